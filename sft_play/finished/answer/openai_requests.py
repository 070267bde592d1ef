"""What a client may ask of `make serve`: the options of OpenAI's API that are read, each with the values it takes.

An option that is not read is refused by name, but for the value that asks for nothing (`n=1`, `logprobs=False`): a
request that is answered is answered as it was asked.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from fastapi import HTTPException
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from sft_play.log import one_line

MOST_STOPS, LONGEST_STOP = 4, 256
"""Stop texts of a request (OpenAI's own limit), and characters of one."""
_SHOWN = 60
"""Characters of a wrong value that an error shows."""


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


_StopText = Annotated[str, Field(min_length=1, max_length=LONGEST_STOP)]
_Stops = Annotated[list[_StopText], BeforeValidator(_as_list), Field(max_length=MOST_STOPS)]
_Tokens = Annotated[int, Field(ge=1)]
_Bias = Annotated[float, Field(ge=-100, le=100)]
_One = Annotated[int, Field(ge=1, le=1)]
_Zero = Annotated[float, Field(ge=0, le=0)]


class _PlainText(BaseModel):
    """`{"type": "text"}`: an answer in no particular format."""

    model_config = ConfigDict(extra="forbid", strict=True)
    type: Literal["text"]


class _TextOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    format: _PlainText | None = None


class _StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    include_usage: bool | None = None
    """Whatever is asked, the last piece of a stream has the usage."""


class _Asked(BaseModel):
    """Options of every endpoint. Types are strict: `"5"` is no number."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    model: str | None = None
    stream: bool | None = None
    temperature: Annotated[float, Field(ge=0)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None

    # labels of a request, which change no answer
    user: str | None = None
    metadata: dict[str, str] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    service_tier: Literal["auto", "default"] | None = None


class _Penalties(_Asked):
    stop: _Stops | None = None
    logit_bias: dict[str, _Bias] | None = None
    frequency_penalty: _Zero | None = None
    presence_penalty: _Zero | None = None
    n: _One | None = None
    stream_options: _StreamOptions | None = None


class ChatRequest(_Penalties):
    """`/v1/chat/completions`."""

    messages: Annotated[list[dict[str, Any]], Field(min_length=1)]
    tools: list[dict[str, Any]] | None = None
    max_tokens: _Tokens | None = None
    max_completion_tokens: _Tokens | None = None
    logprobs: Literal[False] | None = None
    top_logprobs: _Zero | None = None
    tool_choice: Literal["auto"] | None = None
    parallel_tool_calls: Literal[True] | None = None
    response_format: _PlainText | None = None
    modalities: list[Literal["text"]] | None = None
    store: Literal[False] | None = None


class CompletionRequest(_Penalties):
    """`/v1/completions`."""

    prompt: str
    max_tokens: _Tokens | None = None
    best_of: _One | None = None
    echo: Literal[False] | None = None
    suffix: Literal[""] | None = None


class ResponseRequest(_Asked):
    """`/v1/responses`."""

    input: str | Annotated[list[dict[str, Any]], Field(min_length=1)]
    instructions: str | None = None
    tools: list[dict[str, Any]] | None = None
    max_output_tokens: _Tokens | None = None
    background: Literal[False] | None = None
    parallel_tool_calls: Literal[True] | None = None
    store: Literal[False] | None = None
    text: _TextOptions | None = None
    tool_choice: Literal["auto"] | None = None
    top_logprobs: _Zero | None = None
    truncation: Literal["disabled"] | None = None


def accepted(body: Mapping[str, Any], kind: type[_Asked]) -> dict[str, Any]:
    """The options of a request that ask for something, as they were sent; `stop` as a list.

    Raises:
        HTTPException: 400, with the option in OpenAI's `param`, where one is unknown, not supported or a wrong value.
    """
    _refuse_surrogates(body)
    try:
        asked = kind.model_validate(body)
    except ValidationError as error:
        raise _refusal(error, body) from None
    return {name: getattr(asked, name) for name in asked.model_fields_set if getattr(asked, name) is not None}


def refused(message: str, option: str | None = None) -> HTTPException:
    """The 400 of a request, which names the option that it is about."""
    return HTTPException(400, {"message": message, "param": option})


def _refusal(error: ValidationError, body: Mapping[str, Any]) -> HTTPException:
    """What is wrong with the first option that is: OpenAI's errors name one."""
    first = error.errors(include_url=False)[0]
    option = str(first["loc"][0])
    if first["type"] == "missing" and len(first["loc"]) == 1:
        return refused(f"{option} is missing", option)
    shown = one_line(json.dumps(body.get(option), ensure_ascii=False, default=str))
    shown = shown if len(shown) <= _SHOWN else f"{shown[:_SHOWN]}…"
    if first["type"] == "extra_forbidden" and len(first["loc"]) == 1:
        return refused(f"{one_line(option)} is not supported by this server ({shown} was given); leave it out", option)
    return refused(f"{option}={shown} is not supported: {first['msg'][:1].lower()}{first['msg'][1:]}", option)


def _refuse_surrogates(value: Any) -> None:
    """Raises for text with half of a surrogate pair, which no tokenizer and no answer can hold."""
    try:
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        raise refused("the request holds half of a surrogate pair (such as \\ud83d alone), which is no text") from None
    except RecursionError:
        raise refused("the request is nested too deeply") from None
