"""The HTTP application of `make serve`: `transformers serve`'s, with a run's model, and the options
of OpenAI's API it reads.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import json
import logging
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Annotated, Any, Literal

import torch
from fastapi import FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, StreamingResponse
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException as AnyHTTPException
from transformers import BatchEncoding, StoppingCriteria, StoppingCriteriaList
from transformers.cli.serving.chat_completion import ChatCompletionHandler
from transformers.cli.serving.model_manager import ModelManager
from transformers.cli.serving.server import build_server
from transformers.cli.serving.utils import GenerateManager, GenerationState

from sft_play.config.schema import DataConfig
from sft_play.data.masks.fitted_template import PROBE_EXCHANGE, PROBE_TOOLS
from sft_play.data.sources.formats import Chat, detect_format, to_example
from sft_play.data.sources.messages import Message
from sft_play.data.sources.raw import BadRow, RawRow
from sft_play.errors import DataError, translate_library_errors
from sft_play.finished.respond import Responder
from sft_play.log import one_line
from sft_play.machine.network import is_local_request

# What a client may ask of `make serve`: the options of OpenAI's API that are read, each with the
# values it takes; the limit on a request's body; and the stop texts at which its answer ends.
#
# An option that is not read is refused by name, but for the value that asks for nothing (`n=1`,
# `logprobs=False`): a request that is answered is answered as it was asked.

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


# The HTTP application of `make serve`: that of `transformers serve`, with a finished run's model
# and prompts.
#
# Server, endpoints, streaming and tool calls are transformers'. These parts are replaced:
# `transformers serve FOLDER` refuses a folder with an adapter alone, its 4-bit option computes in
# fp32 whatever the run trained in, and it renders prompts by the template alone, without the
# settings of the run (`data.system_into_user`, the date that training rendered, …); it ignores most
# options of a request and fails at wrong ones (`validate_request`), leaves stop texts in answers,
# and renders in the event loop, where one long prompt stops every client. Endpoints that load other
# models are left out.
SERVED_PATHS = ("/v1/chat/completions", "/v1/models", "/health")
_MIN_BODY_LIMIT = 2**20
# A token of a request is some four characters, which JSON may write as six bytes each.
_BYTES_PER_POSITION = 16
# The lowest temperature that is sampled at, as in vLLM: below it logits overflow.
_MIN_TEMPERATURE = 0.01
# Token ids of the request that this task answers.
_REQUEST_PROMPT_IDS: ContextVar[list[int]] = ContextVar("prompt")


def openai_app(responder: Responder, name: str, *, allowed_hosts: frozenset[str] | None = None) -> FastAPI:
    """The application that answers as the run's model, called `name`; `allowed_hosts`: the names under which this
    server is asked, and from whose pages (None: any)."""
    _prepare_model(responder)
    manager, state, generate_manager = (
        _LoadedModelManager(responder, name),
        GenerationState(),
        _StoppingGenerateManager(),
    )
    state.get_manager = lambda *_, **__: generate_manager
    handlers: dict[str, Any] = dict.fromkeys(
        parameter for parameter in inspect.signature(build_server).parameters if parameter.endswith("_handler")
    )
    handlers["chat_handler"] = _ChatHandler(manager, state)
    app: FastAPI = build_server(manager, generation_state=state, **handlers)
    app.router.routes[:] = [route for route in app.router.routes if getattr(route, "path", None) in SERVED_PATHS]
    for error_class in (AnyHTTPException, RequestValidationError, Exception):
        app.add_exception_handler(error_class, _openai_error_response)
    body_limit = max(_MIN_BODY_LIMIT, _BYTES_PER_POSITION * (_max_positions(responder.model) or 0))
    app.add_middleware(RequestGuard, max_body_bytes=body_limit, allowed_hosts=allowed_hosts)
    log = logging.getLogger("transformers.cli.serving.chat_completion")
    log.addFilter(lambda record: not record.getMessage().startswith("[Request received]"))
    # of temperature 0, which the server keeps beside do_sample=False
    logging.getLogger("transformers.generation.configuration_utils").setLevel(logging.ERROR)
    return app


async def _openai_error_response(request: Request, error: Exception) -> JSONResponse:
    """An error in OpenAI's form, whose message its client shows."""
    status, detail = 500, "the server failed at this request; its log has the traceback"
    if isinstance(error, AnyHTTPException):
        status, detail = error.status_code, error.detail
    elif isinstance(error, RequestValidationError):  # FastAPI's own: the body is no JSON object
        status, detail = 400, "the body is not a JSON object"
    fields = detail if isinstance(detail, dict) else {"message": str(detail)}
    error_type = "invalid_request_error" if status < 500 else "server_error"
    return JSONResponse({"error": {"param": None, "code": None, "type": error_type, **fields}}, status_code=status)


def _max_positions(model: Any) -> int | None:
    return getattr(model.config.get_text_config(), "max_position_embeddings", None)


def _prepare_model(responder: Responder) -> None:
    """Give the model what the server asks of it: stop tokens, sampling, an end at stop texts and at its positions."""
    model, tokenizer = responder.model, responder.tokenizer
    generation_config = model.generation_config
    generation_config.eos_token_id, generation_config.pad_token_id = responder.stop_ids, tokenizer.pad_token_id
    generation_config.do_sample = True  # else a client's temperature would change nothing; the server's 0 is greedy
    text_config = model.config.get_text_config()
    if getattr(text_config, "output_router_logits", None):  # with a cache its mask has another length
        text_config.output_router_logits = False
    generate, max_positions = model.generate, _max_positions(model)

    def generate_within_limits(*args: Any, **kwargs: Any) -> Any:
        """`generate`, up to the last position that the model has or to the first stop text."""
        prompt_tokens, config = kwargs["input_ids"].shape[-1], copy.copy(kwargs.pop("generation_config"))
        stops, config.stop_strings = config.stop_strings, None
        if max_positions is not None:
            config.max_new_tokens = max(1, min(config.max_new_tokens, max_positions - prompt_tokens))
        if stops:
            stop_criterion = StopTextCriteria(kwargs["tokenizer"], stops, prompt_tokens=prompt_tokens)
            kwargs["stopping_criteria"] = StoppingCriteriaList([stop_criterion])
        return generate(*args, generation_config=config, **kwargs)

    model.generate = generate_within_limits


def request_prompt_ids(responder: Responder, messages: Sequence[Message], tools: Any = None) -> list[int]:
    """Token ids of a request's messages, read and rendered as training reads and renders a row; raises DataError where
    they are no conversation that an answer can follow."""
    turns = [*messages, {"role": "assistant", "content": "."}]
    row = RawRow("the request", {"messages": turns, **({"tools": tools} if tools else {})})
    data = DataConfig(merge_consecutive=responder.run.config.data.merge_consecutive)
    _, row_format = detect_format(iter([row]), data)
    assert row_format is not None
    example = to_example(row, row_format, data)
    if not isinstance(example, Chat):
        raise DataError(str(example) if isinstance(example, BadRow) else "the request is not a conversation")
    if len(example.messages) < 2 or example.messages[-2]["role"] == "assistant":
        raise DataError("the messages end with no turn that an answer can follow")
    return responder.prompt_ids(example.messages[:-1], example.tools)


class _LoadedModelManager(ModelManager):
    """The server's model manager, with one model that is loaded already and never unloaded."""

    def __init__(self, responder: Responder, name: str) -> None:
        super().__init__(model_timeout=-1)
        self.force_model, self.responder = name, responder
        self.model, self.max_positions = responder.model, _max_positions(responder.model)
        chat_without_tools, chat_with_tools = (
            Chat("", tuple(PROBE_EXCHANGE), tools) for tools in ((), tuple(PROBE_TOOLS))
        )
        self.supports_tools = responder.renderer.prompt_ids(chat_without_tools) != responder.renderer.prompt_ids(
            chat_with_tools
        )
        # one of its own: the other thread, which renders, changes the settings of the responder's while it reads
        self.tokenizer = copy.deepcopy(responder.tokenizer)
        self.tokenizer.apply_chat_template = _request_prompt
        self.render_lock = asyncio.Lock()

    @staticmethod
    def process_model_name(model_id: str) -> str:
        return model_id  # in answers too: it has no revisions

    def load_model_and_processor(self, *_: Any, **__: Any) -> tuple[Any, Any]:
        return self.model, self.tokenizer

    def get_gen_models(self, *_: Any) -> list[dict[str, Any]]:
        return [{"id": self.force_model, "object": "model", "created": 0, "owned_by": "sft_play"}]

    @translate_library_errors()  # a panic of the tokenizer is an answer with an error
    def chat_prompt_ids(self, messages: Sequence[Message], tools: Any) -> list[int]:
        """The prompt of a conversation; raises HTTPException where it is none, or too long."""
        texts = (str(message.get("content") or "") for message in messages)
        lengths = [len(self.responder.tokenizer(text)["input_ids"]) for text in texts]
        if self.max_positions is not None and len(messages) + sum(lengths) > 2 * self.max_positions:
            # before it is rendered, which costs more; a template may leave out some of the text
            raise bad_request(
                f"the messages are far longer than the model's {self.max_positions} positions", "messages"
            )
        try:
            return request_prompt_ids(self.responder, messages, tools)
        except DataError as error:
            raise bad_request(str(error), "messages") from error


def _request_prompt(*_: Any, **__: Any) -> BatchEncoding:
    """The request's prompt, in the place of the tokenizer's own `apply_chat_template`."""
    ids_BT = torch.tensor([_REQUEST_PROMPT_IDS.get()])
    return BatchEncoding({"input_ids": ids_BT, "attention_mask": torch.ones_like(ids_BT)})


class _StoppingGenerateManager(GenerateManager):
    def generate_streaming(self, model: Any, processor: Any, inputs: Any, gen_config: Any, **options: Any) -> Any:
        queue, streamer = super().generate_streaming(model, processor, inputs, gen_config, **options)
        return _StoppingQueue(queue, gen_config.stop_strings or ()), streamer

    async def generate_non_streaming(
        self, model: Any, processor: Any, inputs: Any, gen_config: Any, **options: Any
    ) -> Any:
        text, length, ids = await super().generate_non_streaming(model, processor, inputs, gen_config, **options)
        stops = gen_config.stop_strings or ()
        shortened = cut_at_stop(text, stops)
        if shortened != text:  # think text and tool calls are read from the ids, in which special tokens are
            raw_text = cut_at_stop(processor.decode(ids), stops)
            ids = torch.tensor(processor(raw_text, add_special_tokens=False)["input_ids"], dtype=ids.dtype)
        return shortened, length, ids


class _StoppingQueue:
    def __init__(self, queue: asyncio.Queue[Any], stops: Sequence[str]) -> None:
        self._queue, self._stop_filter, self._ready_items = queue, StopTextFilter(stops), deque[Any]()

    async def get(self) -> Any:
        """The next piece."""
        while not self._ready_items:
            self._receive(await self._queue.get())
        return self._ready_items.popleft()

    def get_nowait(self) -> Any:
        """The next piece; raises asyncio.QueueEmpty where none has come."""
        while not self._ready_items:
            self._receive(self._queue.get_nowait())
        return self._ready_items.popleft()

    def _receive(self, item: Any) -> None:
        if type(item) is str:  # think text and tool calls have types of their own
            self._ready_items.extend(filter(None, [self._stop_filter.feed(item)]))
            return
        self._ready_items.extend([*filter(None, [self._stop_filter.end()]), item])


class _ChatHandler(ChatCompletionHandler):
    """Checks a request's options, and renders its prompt in a thread, before the server's own handler sees it."""

    async def handle_request(self, body: dict[str, Any], request_id: str) -> Any:
        options = validate_request(body)
        manager: _LoadedModelManager = self.model_manager
        if options.get("stream") and not hasattr(manager.tokenizer, "_tokenizer"):
            raise bad_request("this model's tokenizer cannot stream; ask without stream=True", "stream")
        if options.get("tools") and not manager.supports_tools:
            raise bad_request("tools cannot be given: the model's chat template writes no tools", "tools")
        if options.get("temperature"):
            options["temperature"] = max(options["temperature"], _MIN_TEMPERATURE)
        async with manager.render_lock:  # one at a time: so does the tokenizer
            ids = await run_in_threadpool(manager.chat_prompt_ids, options["messages"], options.get("tools"))
        if manager.max_positions is not None and len(ids) >= manager.max_positions:
            raise bad_request(f"the prompt has {len(ids)} tokens and the model {manager.max_positions} positions")
        _REQUEST_PROMPT_IDS.set(ids)
        answer = await super().handle_request({"stream": False, **options}, request_id)
        if isinstance(answer, StreamingResponse):
            answer.body_iterator = _append_done(answer.body_iterator)
        return answer

    @staticmethod
    def get_processor_inputs_from_messages(messages: list[Message], modality: Any) -> list[Message]:
        return messages  # the prompt is made already


async def _append_done(events: AsyncIterator[Any]) -> AsyncIterator[Any]:
    """A stream with the line by which clients know that it is whole."""
    async for event in events:
        yield event
    yield "data: [DONE]\n\n"
