"""What a client may ask of `make serve`: the options of OpenAI's API that are read, each with the values it takes; the
limit on a request's body; and the stop texts at which its answer ends.

An option that is not read is refused by name, but for the value that asks for nothing (`n=1`, `logprobs=False`): a
request that is answered is answered as it was asked.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import torch
from fastapi import HTTPException
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from transformers import StoppingCriteria

from sft_play.facts.network import is_local_request
from sft_play.log import one_line

# Stop texts of a request (OpenAI's own limit), and characters of one.
MAX_STOP_TEXTS, MAX_STOP_CHARS = 4, 256
# Of a body that is too long, this many times the limit is read before the connection is closed: a client sees the
# answer only once it has sent everything.
_DRAIN_FACTOR = 64
# Tokens beyond the stop text's bytes that are decoded too: special ones have no text, parts of a character neither.
_MARGIN_TOKENS = 16
_MAX_VALUE_CHARS = 60


_StopText = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]
_to_list = BeforeValidator(lambda value: [value] if isinstance(value, str) else value)
_StopList = Annotated[list[_StopText], _to_list, Field(max_length=MAX_STOP_TEXTS)]
_TokenCount = Annotated[int, Field(ge=1)]
_Zero = Annotated[float, Field(ge=0, le=0)]


class _StrictModel(BaseModel):
    """Types are strict: `"5"` is no number."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class _TextFormat(_StrictModel):
    type: Literal["text"]


class _StreamOptions(_StrictModel):
    include_usage: bool | None = None
    """Whatever is asked, the last piece of a stream has the usage."""


class ChatRequest(_StrictModel):
    """`/v1/chat/completions`."""

    messages: Annotated[list[dict[str, Any]], Field(min_length=1)]
    tools: list[dict[str, Any]] | None = None
    model: str | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    max_tokens: _TokenCount | None = None
    max_completion_tokens: _TokenCount | None = None
    temperature: Annotated[float, Field(ge=0)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: _StopList | None = None

    # only the value that asks for nothing
    frequency_penalty: _Zero | None = None
    presence_penalty: _Zero | None = None
    n: Annotated[int, Field(ge=1, le=1)] | None = None
    logprobs: Literal[False] | None = None
    top_logprobs: _Zero | None = None
    tool_choice: Literal["auto"] | None = None
    parallel_tool_calls: Literal[True] | None = None
    response_format: _TextFormat | None = None
    modalities: list[Literal["text"]] | None = None
    store: Literal[False] | None = None

    # labels of a request, which change no answer
    user: str | None = None
    metadata: dict[str, str] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    service_tier: Literal["auto", "default"] | None = None


def validate_request(body: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a request that ask for something, as they were sent; `stop` as a list. Raises HTTPException,
    a 400 with the option in OpenAI's `param`, where one is unknown, not supported or a wrong value."""
    _refuse_surrogates(body)
    try:
        request = ChatRequest.model_validate(body)
    except ValidationError as error:
        raise _validation_response(error, body) from None
    return {name: getattr(request, name) for name in request.model_fields_set if getattr(request, name) is not None}


def bad_request(message: str, option: str | None = None) -> HTTPException:
    """The 400 of a request, which names the option that it is about."""
    return HTTPException(400, {"message": message, "param": option})


def _validation_response(error: ValidationError, body: Mapping[str, Any]) -> HTTPException:
    first = error.errors(include_url=False)[0]
    option = str(first["loc"][0])
    if first["type"] == "missing" and len(first["loc"]) == 1:
        return bad_request(f"{option} is missing", option)
    value_text = one_line(json.dumps(body.get(option), ensure_ascii=False, default=str), limit=_MAX_VALUE_CHARS)
    if first["type"] == "extra_forbidden" and len(first["loc"]) == 1:
        return bad_request(
            f"{one_line(option)} is not supported by this server ({value_text} was given); leave it out", option
        )
    return bad_request(f"{option}={value_text} is not supported: {first['msg'][:1].lower()}{first['msg'][1:]}", option)


def _refuse_surrogates(value: Any) -> None:
    """Raises for text with half of a surrogate pair, which no tokenizer and no answer can hold."""
    try:
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        raise bad_request(
            "the request holds half of a surrogate pair (such as \\ud83d alone), which is no text"
        ) from None
    except RecursionError:
        raise bad_request("the request is nested too deeply") from None


# --- its body ---------------------------------------------------------------------------------------------------------


class RequestGuard:
    """ASGI middleware: answers 403 to requests under a name, or from a page, that is none of `allowed_hosts` (None:
    any), and 413 to bodies of more than `max_body_bytes`, which are never held in memory (411 where no length is
    said)."""

    def __init__(self, app: Any, *, max_body_bytes: int, allowed_hosts: frozenset[str] | None) -> None:
        self._app, self._max_body_bytes, self._allowed_hosts = app, max_body_bytes, allowed_hosts

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        status, message_text = self._rejection(Headers(scope=scope)) if scope["type"] == "http" else (0, "")
        if not status:
            await self._app(scope, receive, send)
            return
        drained_bytes = 0
        while drained_bytes < _DRAIN_FACTOR * self._max_body_bytes:
            message = await receive()
            drained_bytes += len(message.get("body", b""))
            if not message.get("more_body"):
                break
        error = {"message": message_text, "type": "invalid_request_error", "param": None, "code": None}
        await JSONResponse({"error": error}, status_code=status)(scope, receive, send)

    def _rejection(self, headers: Headers) -> tuple[int, str]:
        host, origin = headers.get("host", ""), headers.get("origin")
        if self._allowed_hosts is not None and not is_local_request(self._allowed_hosts, host, origin):
            return 403, "this server answers this machine alone, and the request names another in Host or Origin"
        if "transfer-encoding" in headers:
            return 411, "the body has no length (Content-Length)"
        length = headers.get("content-length", "")
        if length.isdigit() and int(length) > self._max_body_bytes:
            return 413, f"the body has more than {self._max_body_bytes} bytes, the most that this server takes"
        return 0, ""


# --- its stop texts ---------------------------------------------------------------------------------------------------


def cut_at_stop(text: str, stop_texts: Sequence[str]) -> str:
    """Return the text before the stop text that is complete first, not the one that begins first: where an answer is
    cut must not depend on how it is divided into tokens."""
    matches = [(text.find(stop) + len(stop), text.find(stop)) for stop in stop_texts if stop in text]
    return text[: min(matches)[1]] if matches else text


class StopTextFilter:
    """Pieces of a streamed text, up to the first stop text; what may be the beginning of one is held back."""

    def __init__(self, stop_texts: Sequence[str]) -> None:
        self._stop_texts, self._held_back, self._is_over = stop_texts, "", False

    def feed(self, piece: str) -> str:
        """Return the text that can be shown once this piece has come."""
        if self._is_over:
            return ""
        text = self._held_back + piece
        released = cut_at_stop(text, self._stop_texts)
        self._is_over = len(released) < len(text)
        held_length = 0 if self._is_over else max((_overlap_length(text, stop) for stop in self._stop_texts), default=0)
        self._held_back = text[len(text) - held_length :] if held_length else ""
        return released[: len(released) - held_length]

    def end(self) -> str:
        """Return the text that was held back: it was no stop text after all."""
        released, self._held_back = self._held_back, ""
        return released


def _overlap_length(text: str, stop: str) -> int:
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)


class StopTextCriteria(StoppingCriteria):
    """Ends generation once the text after the prompt holds a stop text. transformers' own `stop_strings` compares each
    with every entry of the vocabulary first, which takes minutes for many, and takes the prompt's end for the beginning
    of one."""

    def __init__(self, tokenizer: Any, stop_texts: Sequence[str], *, prompt_tokens: int) -> None:
        self._tokenizer, self._stop_texts, self._prompt_tokens = tokenizer, stop_texts, prompt_tokens
        self._window_tokens = max(len(stop.encode()) for stop in stop_texts) + _MARGIN_TOKENS

    def __call__(self, input_ids: torch.Tensor, scores: Any = None, **_: Any) -> torch.Tensor:
        tail = input_ids[:, max(self._prompt_tokens, input_ids.shape[-1] - self._window_tokens) :]
        texts = self._tokenizer.batch_decode(tail, skip_special_tokens=True)
        has_stopped = [any(stop in text for stop in self._stop_texts) for text in texts]
        return torch.tensor(has_stopped, dtype=torch.bool, device=input_ids.device)
