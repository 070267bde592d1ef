"""The HTTP application of `make serve`: that of `transformers serve`, with a finished run's model and prompts.

Server, endpoints, streaming and tool calls are transformers'. These parts are replaced: `transformers serve FOLDER`
refuses a folder with an adapter alone, its 4-bit option computes in fp32 whatever the run trained in, and it renders
prompts by the template alone, without the settings of the run (`data.system_into_user`, the date that training
rendered, …); it ignores most options of a request and fails at wrong ones (`openai_requests`), leaves stop texts in
answers, and renders in the event loop, where one long prompt stops every client. Endpoints that load
other models are left out.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import logging
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextvars import ContextVar
from typing import Any

import torch
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from transformers import BatchEncoding, StoppingCriteriaList
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
from sft_play.finished.answer import openai_requests as requests
from sft_play.finished.answer.respond import Responder

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
    for error_class in (HTTPException, RequestValidationError, Exception):
        app.add_exception_handler(error_class, _openai_error_response)
    body_limit = max(_MIN_BODY_LIMIT, _BYTES_PER_POSITION * (_max_positions(responder.model) or 0))
    app.add_middleware(requests.RequestGuard, max_body_bytes=body_limit, allowed_hosts=allowed_hosts)
    log = logging.getLogger("transformers.cli.serving.chat_completion")
    log.addFilter(lambda record: not record.getMessage().startswith("[Request received]"))
    # of temperature 0, which the server keeps beside do_sample=False
    logging.getLogger("transformers.generation.configuration_utils").setLevel(logging.ERROR)
    return app


async def _openai_error_response(request: Request, error: Exception) -> JSONResponse:
    """An error in OpenAI's form, whose message its client shows."""
    status, detail = 500, "the server failed at this request; its log has the traceback"
    if isinstance(error, HTTPException):
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
            stop_criterion = requests.StopTextCriteria(kwargs["tokenizer"], stops, prompt_tokens=prompt_tokens)
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
            raise requests.bad_request(
                f"the messages are far longer than the model's {self.max_positions} positions", "messages"
            )
        try:
            return request_prompt_ids(self.responder, messages, tools)
        except DataError as error:
            raise requests.bad_request(str(error), "messages") from error


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
        shortened = requests.cut_at_stop(text, stops)
        if shortened != text:  # think text and tool calls are read from the ids, in which special tokens are
            raw_text = requests.cut_at_stop(processor.decode(ids), stops)
            ids = torch.tensor(processor(raw_text, add_special_tokens=False)["input_ids"], dtype=ids.dtype)
        return shortened, length, ids


class _StoppingQueue:
    def __init__(self, queue: asyncio.Queue[Any], stops: Sequence[str]) -> None:
        self._queue, self._stop_filter, self._ready_items = queue, requests.StopTextFilter(stops), deque[Any]()

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
        options = requests.validate_request(body)
        manager: _LoadedModelManager = self.model_manager
        if options.get("stream") and not hasattr(manager.tokenizer, "_tokenizer"):
            raise requests.bad_request("this model's tokenizer cannot stream; ask without stream=True", "stream")
        if options.get("tools") and not manager.supports_tools:
            raise requests.bad_request("tools cannot be given: the model's chat template writes no tools", "tools")
        if options.get("temperature"):
            options["temperature"] = max(options["temperature"], _MIN_TEMPERATURE)
        async with manager.render_lock:  # one at a time: so does the tokenizer
            ids = await run_in_threadpool(manager.chat_prompt_ids, options["messages"], options.get("tools"))
        if manager.max_positions is not None and len(ids) >= manager.max_positions:
            raise requests.bad_request(
                f"the prompt has {len(ids)} tokens and the model {manager.max_positions} positions"
            )
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
