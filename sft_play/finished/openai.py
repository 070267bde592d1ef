"""The HTTP application of `make serve`: OpenAI's chat completions by a run's model.

Generation, streaming, think text and tool calls are those of `transformers serve`. The rest is
here: `transformers serve FOLDER` refuses a folder with an adapter alone, its 4-bit option computes
in fp32 whatever the run trained in, it renders prompts by the template alone, without the settings
of the run (`data.system_into_user`, the date that training rendered, …), ignores most options of a
request, fails at wrong ones, leaves stop texts in answers, and renders in the event loop, where one
long prompt stops every client.
"""

import asyncio
import copy
import json
import logging
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Annotated, Any

import torch
from fastapi import FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException as AnyHTTPException
from transformers import StoppingCriteria, StoppingCriteriaList
from transformers.cli.serving.chat_completion import ChatCompletionHandler
from transformers.cli.serving.utils import GenerateManager, GenerationState

from sft_play.config.schema import DataConfig
from sft_play.data.masks.fitted_template import PROBE_EXCHANGE, PROBE_TOOLS
from sft_play.data.sources.formats import Chat, detect_format, to_example
from sft_play.data.sources.images import Picture
from sft_play.data.sources.messages import (
    PART_IMAGES,
    Message,
    UnusableRowError,
    parse_turns,
    quote_value,
)
from sft_play.data.sources.raw import BadRow, RawRow
from sft_play.errors import DataError, ModelError, translate_library_errors
from sft_play.finished.respond import Responder
from sft_play.log import one_line
from sft_play.machine.network import is_local_request
from sft_play.training.model.vision import prepare_generation

# Labels of a request, which change no answer; and whatever is asked of it, the last piece of a
# stream has the usage.
_LABELS = ("user", "metadata", "safety_identifier", "prompt_cache_key", "stream_options")
# Options that are not read, with the values that ask for nothing.
_NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,), "presence_penalty": (0,), "n": (1,), "logprobs": (False,),
    "top_logprobs": (0,), "tool_choice": ("auto",), "parallel_tool_calls": (True,),
    "response_format": ({"type": "text"},), "modalities": (["text"],), "store": (False,),
    "service_tier": ("auto", "default"),
}  # fmt: skip
_TokenCount = Annotated[int, Field(ge=1)]
# Images of a request, as base64.
_MAX_IMAGE_BYTES = 64 * 2**20


class ChatRequest(BaseModel):
    """The options of `/v1/chat/completions` that are read. Types are strict: `"5"` is no number."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    messages: Annotated[list[dict[str, Any]], Field(min_length=1)]
    tools: list[dict[str, Any]] | None = None
    model: str | None = None
    stream: bool | None = None
    max_tokens: _TokenCount | None = None
    max_completion_tokens: _TokenCount | None = None
    temperature: Annotated[float, Field(ge=0)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    # a text, or at most four, which is OpenAI's own limit
    stop: (
        Annotated[
            list[Annotated[str, Field(min_length=1, max_length=256)]],
            BeforeValidator(lambda value: [value] if isinstance(value, str) else value),
            Field(max_length=4),
        ]
        | None
    ) = None


def bad_request(message: str, option: str | None = None) -> HTTPException:
    """The 400 of a request, which names the option that it is about."""
    return HTTPException(400, {"message": message, "param": option})


def validate_request(body: Mapping[str, Any]) -> dict[str, Any]:
    """Check the options of a request; returns those that ask for something as they were sent,
    `stop` as a list. Raises HTTPException, a 400 with the option in OpenAI's `param`, where one is
    unknown, not supported or a wrong value: a request that is answered is answered as it was
    asked."""
    try:
        json.dumps(body, ensure_ascii=False).encode("utf-8")
    # half of a surrogate pair, which no tokenizer can hold; lists in lists without end
    except (UnicodeEncodeError, RecursionError):
        raise bad_request("the request holds what is no text, or is nested too deeply") from None
    options = {
        name: value
        for name, value in body.items()
        if value is not None and name not in _LABELS and value not in _NEUTRAL_VALUES.get(name, ())
    }
    try:
        request = ChatRequest.model_validate(options)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
    else:
        return {name: getattr(request, name) for name in options}
    option = str(first["loc"][0])
    value_text = one_line(json.dumps(options.get(option), ensure_ascii=False), limit=60)
    message = (
        f"{option}={value_text} is not supported: {first['msg'][:1].lower()}{first['msg'][1:]}"
    )
    if option not in options:
        message = f"{option} is missing"
    elif first["type"] == "extra_forbidden":
        message = (
            f"{one_line(option)} is not supported by this server ({value_text} was given);"
            " leave it out"
        )
    raise bad_request(message, option)


# --- stop texts -----------------------------------------------------------------------------------


def cut_at_stop(text: str, stop_texts: Sequence[str]) -> str:
    """Return the text before the stop text that is complete first, not the one that begins first:
    where an answer is cut must not depend on how it is divided into tokens."""
    matches = [
        (text.find(stop) + len(stop), text.find(stop)) for stop in stop_texts if stop in text
    ]
    return text[: min(matches)[1]] if matches else text


class StopTextFilter:
    """Passes on the pieces of a streamed text up to the first stop text; what may be the beginning
    of one is held back."""

    def __init__(self, stop_texts: Sequence[str]) -> None:
        self._stop_texts, self._text, self._shown_length = stop_texts, "", 0

    def feed(self, piece: str, *, is_over: bool = False) -> str:
        """Return the text that can be shown once this piece has come."""
        self._text += piece
        visible = cut_at_stop(self._text, self._stop_texts)
        if visible == self._text and not is_over:
            longest = max(map(len, self._stop_texts), default=1)
            visible = visible[: max(self._shown_length, len(visible) - longest + 1)]
        shown_length, self._shown_length = self._shown_length, len(visible)
        return visible[shown_length:]


class StopTextCriteria(StoppingCriteria):
    """Ends generation once the text after the prompt holds a stop text. transformers' own
    `stop_strings` compares each with every entry of the vocabulary first, which takes minutes for
    many, and takes the prompt's end for the beginning of one."""

    def __init__(self, tokenizer: Any, stop_texts: Sequence[str], *, prompt_tokens: int) -> None:
        self._tokenizer, self.stop_texts, self._prompt_tokens = tokenizer, stop_texts, prompt_tokens
        # 16 more than the stop text's bytes: special tokens have no text, parts of a character
        # neither
        self._window_tokens = max(len(stop.encode()) for stop in stop_texts) + 16

    def __call__(self, input_ids: torch.Tensor, scores: Any = None, **_: Any) -> torch.Tensor:
        tail = input_ids[:, max(self._prompt_tokens, input_ids.shape[-1] - self._window_tokens) :]
        texts = self._tokenizer.batch_decode(tail, skip_special_tokens=True)
        return torch.tensor(
            [any(stop in text for stop in self.stop_texts) for text in texts],
            dtype=torch.bool,
            device=input_ids.device,
        )


class _StoppingGenerateManager(GenerateManager):
    """Generates on a thread of its own, and cuts the answer where a stop text begins."""

    def generate_streaming(
        self, model: Any, processor: Any, inputs: Any, gen_config: Any, **options: Any
    ) -> Any:
        queue, streamer = super().generate_streaming(
            model, processor, inputs, gen_config, **options
        )
        # the handler above reads the queue: pieces are cut as they are put into it
        text_filter, put = StopTextFilter(_stop_texts_of(inputs)), queue._put

        def put_filtered(item: Any) -> None:
            if type(item) is str:
                put(text_filter.feed(item))
            else:  # think text and tool calls have types of their own
                put(text_filter.feed("", is_over=True))
                put(item)

        queue._put = put_filtered
        return queue, streamer

    async def generate_non_streaming(
        self, model: Any, processor: Any, inputs: Any, gen_config: Any, **options: Any
    ) -> Any:
        text, length, ids = await super().generate_non_streaming(
            model, processor, inputs, gen_config, **options
        )
        stop_texts = _stop_texts_of(inputs)
        shortened = cut_at_stop(text, stop_texts)
        # think text and tool calls are read from the ids, in which special tokens are
        if shortened != text:
            raw_text = cut_at_stop(processor.decode(ids), stop_texts)
            ids = torch.tensor(
                processor(raw_text, add_special_tokens=False)["input_ids"], dtype=ids.dtype
            )
        return shortened, length, ids


def _stop_texts_of(inputs: Mapping[str, Any]) -> Sequence[str]:
    return [
        stop for criterion in inputs.get("stopping_criteria", ()) for stop in criterion.stop_texts
    ]


# --- requests -------------------------------------------------------------------------------------


def render_request(
    responder: Responder, messages: Sequence[Message], tools: Any = None
) -> tuple[list[int], tuple[Picture, ...]]:
    """Read and render a request's messages as training does a row; returns token ids and pictures.
    Raises DataError where they are no conversation that an answer can follow, or name an image that
    is not in the request."""
    require_data_uris(messages)
    answer = {"role": "assistant", "content": "."}
    row = RawRow("the request", {"messages": [*messages, answer], "tools": tools or []})
    run_data = responder.run.config.data
    data = DataConfig(
        merge_consecutive=run_data.merge_consecutive,
        max_image_megapixels=run_data.max_image_megapixels,
    )
    _, row_format = detect_format(iter([row]), data)
    assert row_format is not None
    example = to_example(row, row_format, data)
    if not isinstance(example, Chat):
        raise DataError(
            str(example) if isinstance(example, BadRow) else "the request is not a conversation"
        )
    if len(example.messages) < 2 or example.messages[-2]["role"] == "assistant":
        raise DataError("the messages end with no turn that an answer can follow")
    megapixels = sum(picture.width * picture.height for picture in example.images) / 1e6
    if megapixels > data.max_image_megapixels:
        raise DataError(
            f"the images have {megapixels:,.1f} million pixels, and those of a request at most"
            f" {data.max_image_megapixels:g} together"
        )
    return (
        responder.prompt_ids(example.messages[:-1], example.tools, images=example.images),
        example.images,
    )


def require_data_uris(messages: Sequence[Message]) -> None:
    """Raise DataError where an image of a request is not in it as a data URI: a request must not
    name files that the server reads, or addresses that it fetches."""
    try:
        turns = parse_turns([*messages], "messages")
    except UnusableRowError:  # what is wrong is said where the messages are read
        return
    for value, _ in (part for turn in turns for part in turn.get(PART_IMAGES, ())):
        url = value
        if isinstance(value, dict) and value.keys() <= {"url", "detail"}:
            url = value.get("url")
        if not isinstance(url, str) or not url.startswith("data:"):
            raise DataError(
                f"an image is {quote_value(url)}; this server reads no files and fetches no"
                " addresses: send the image itself, as data:image/png;base64,…"
            )


class _ChatHandler(ChatCompletionHandler):
    """Answers requests as the run's model, by the server's own generation, streaming and
    parsing."""

    def __init__(self, responder: Responder, name: str) -> None:
        super().__init__(None, GenerationState())
        self._responder, self._name, self._model = responder, name, responder.model
        text_config = self._model.config.get_text_config()
        self.max_positions: int | None = getattr(text_config, "max_position_embeddings", None)
        # with a cache its mask has another length
        if getattr(text_config, "output_router_logits", None):
            text_config.output_router_logits = False
        self._generation_config = copy.deepcopy(self._model.generation_config)
        # do_sample: else a client's temperature would change nothing; the server's 0 is greedy
        self._generation_config.update(
            eos_token_id=responder.stop_ids,
            pad_token_id=responder.tokenizer.pad_token_id,
            do_sample=True,
        )
        chats = [Chat("", tuple(PROBE_EXCHANGE), tools) for tools in ((), tuple(PROBE_TOOLS))]
        plain_ids, tool_ids = map(responder.renderer.prompt_ids, chats)
        self._supports_tools = plain_ids != tool_ids
        # one of its own: the other thread, which renders, changes the settings of the responder's
        # while it reads
        self._tokenizer = copy.deepcopy(responder.tokenizer)
        self._manager, self._render_lock = _StoppingGenerateManager(), asyncio.Lock()

    async def handle_request(self, body: dict[str, Any], request_id: str) -> Any:
        """The answer to a request, streamed where it asks for that; raises HTTPException where it
        cannot be."""
        options = validate_request(body)
        if options.get("model", self._name) != self._name:
            raise bad_request(
                f"this server is pinned to {self._name}; {options['model']} was asked for", "model"
            )
        if options.get("stream") and not hasattr(self._tokenizer, "_tokenizer"):
            raise bad_request(
                "this model's tokenizer cannot stream; ask without stream=True", "stream"
            )
        if options.get("tools") and not self._supports_tools:
            raise bad_request(
                "tools cannot be given: the model's chat template writes no tools", "tools"
            )
        if options.get("temperature"):
            # as in vLLM: below it logits overflow
            options["temperature"] = max(options["temperature"], 0.01)
        async with self._render_lock:  # one at a time: so does the tokenizer
            ids_BT, generator, image_inputs = await run_in_threadpool(
                self._read_prompt, options["messages"], options.get("tools")
            )
        stop_texts = options.pop("stop", ())
        config = self._build_generation_config(options, self._generation_config)
        prompt_tokens = ids_BT.shape[1]
        if self.max_positions is not None:
            config.max_new_tokens = max(
                1, min(config.max_new_tokens, self.max_positions - prompt_tokens)
            )
        inputs: dict[str, Any] = {
            "input_ids": ids_BT,
            "attention_mask": torch.ones_like(ids_BT),
            **image_inputs,
        }
        if stop_texts:
            inputs["stopping_criteria"] = StoppingCriteriaList(
                [StopTextCriteria(self._tokenizer, stop_texts, prompt_tokens=prompt_tokens)]
            )
        arguments = (request_id, generator, self._tokenizer, self._name, inputs, config)
        if not options.get("stream"):
            return await self._non_streaming(
                *arguments, gen_manager=self._manager, tools=options.get("tools")
            )
        response = self._streaming(
            *arguments, gen_manager=self._manager, tools=options.get("tools")
        )
        response.body_iterator = _append_done(response.body_iterator)
        return response

    @translate_library_errors()  # a panic of the tokenizer is an answer with an error
    def _read_prompt(
        self, messages: Sequence[Message], tools: Any
    ) -> tuple[torch.Tensor, Any, dict[str, torch.Tensor]]:
        # the prompt's tokens, what answers them, and what that is given of their pictures
        tokenizer, positions = self._responder.tokenizer, self.max_positions
        text_tokens = sum(
            len(tokenizer(_written_text(message.get("content")))["input_ids"])
            for message in messages
        )
        if positions is not None and len(messages) + text_tokens > 2 * positions:
            # before it is rendered, which costs more; a template may leave out some of the text
            raise bad_request(
                f"the messages are far longer than the model's {positions} positions", "messages"
            )
        try:
            prompt_ids, images = render_request(self._responder, messages, tools)
            if positions is not None and len(prompt_ids) >= positions:
                raise bad_request(
                    f"the prompt has {len(prompt_ids)} tokens and the model {positions} positions"
                )
            ids_BT = torch.tensor([prompt_ids], device=self._model.device)
            return ids_BT, *prepare_generation(self._model, ids_BT, [images])
        except (DataError, ModelError) as error:  # such as an image that is damaged inside
            raise bad_request(str(error), "messages") from error


def _written_text(content: Any) -> str:
    """The text of a message's content, without its images."""
    if not isinstance(content, list):
        return str(content or "")
    return "".join(str(part.get("text") or "") for part in content if isinstance(part, dict))


async def _append_done(events: AsyncIterator[Any]) -> AsyncIterator[Any]:
    """Append the line by which clients know that a stream is whole."""
    async for event in events:
        yield event
    yield "data: [DONE]\n\n"


def openai_app(
    responder: Responder, name: str, *, allowed_hosts: frozenset[str] | None = None
) -> FastAPI:
    """Build the application that answers as the run's model, called `name`. `allowed_hosts` are the
    names that a request may have in Host, and its page in Origin; None allows any."""
    app, handler = FastAPI(openapi_url=None), _ChatHandler(responder, name)
    # a token of a request is some four characters, which JSON may write as six bytes each
    body_limit = max(2**20, 16 * (handler.max_positions or 0))
    if responder.run.has_images:
        body_limit += _MAX_IMAGE_BYTES
    # of temperature 0, which the server keeps beside do_sample=False
    logging.getLogger("transformers.generation.configuration_utils").setLevel(logging.ERROR)

    @app.middleware("http")
    async def guard(request: Request, call_next: Any) -> Any:
        headers, length = request.headers, request.headers.get("content-length", "")
        if not is_local_request(allowed_hosts, headers.get("host", ""), headers.get("origin")):
            rejection = _error_response(
                403,
                "this server answers this machine alone,"
                " and the request names another in Host or Origin",
            )
        elif "transfer-encoding" in headers:
            rejection = _error_response(411, "the body has no length (Content-Length)")
        elif length.isdigit() and int(length) > body_limit:
            rejection = _error_response(
                413, f"the body has more than {body_limit} bytes, the most that this server takes"
            )
        else:
            return await call_next(request)
        # a client sees the answer only once it has sent everything
        async for _ in request.stream():
            pass
        return rejection

    @app.post("/v1/chat/completions")
    async def chat_completions(body: dict[str, Any]) -> Any:
        return await handler.handle_request(body, f"chatcmpl-{uuid.uuid4()}")

    @app.get("/v1/models")
    def list_models() -> Any:
        return {
            "object": "list",
            "data": [{"id": name, "object": "model", "created": 0, "owned_by": "sft_play"}],
        }

    @app.get("/health")
    def health() -> Any:
        return {"status": "ok"}

    async def answer_error(request: Request, error: Exception) -> JSONResponse:
        if isinstance(error, AnyHTTPException):
            return _error_response(error.status_code, error.detail)
        if isinstance(error, RequestValidationError):  # FastAPI's own
            return _error_response(400, "the body is not a JSON object")
        return _error_response(500, "the server failed at this request; its log has the traceback")

    for error_class in (AnyHTTPException, RequestValidationError, Exception):
        app.add_exception_handler(error_class, answer_error)
    return app


def _error_response(status: int, detail: Any) -> JSONResponse:
    fields = detail if isinstance(detail, dict) else {"message": str(detail)}
    error_type = "invalid_request_error" if status < 500 else "server_error"
    return JSONResponse(
        {"error": {"param": None, "code": None, "type": error_type, **fields}}, status_code=status
    )
