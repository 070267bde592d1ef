"""The HTTP application of `make serve`: that of `transformers serve`, with a finished run's model and prompts.

Server, endpoints, streaming and tool calls are transformers'. Three parts are replaced, since `transformers serve
FOLDER` cannot do them: it refuses a folder with an adapter alone, its 4-bit option computes in fp32 whatever the run
trained in, and it renders prompts by the template alone, without the settings of the run (`data.system_into_user`, the
date that training rendered, …). Endpoints that load other models are left out.
"""

from __future__ import annotations

import inspect
import json
import logging
from collections.abc import Sequence
from typing import Any

import torch
from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import JSONResponse
from transformers import BatchEncoding
from transformers.cli.serving.chat_completion import ChatCompletionHandler
from transformers.cli.serving.completion import CompletionHandler
from transformers.cli.serving.model_manager import ModelManager
from transformers.cli.serving.response import ResponseHandler
from transformers.cli.serving.server import build_server
from transformers.cli.serving.utils import GenerationState

from sft_play.config.schema import DataConfig
from sft_play.data.sources.formats import Chat, first_format, to_example
from sft_play.data.sources.messages import Message
from sft_play.data.sources.raw import BadRow, RawRow
from sft_play.errors import DataError
from sft_play.finished.respond import Responder

SERVED = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/models", "/health")
"""The endpoints that there are."""


def openai_app(responder: Responder, name: str) -> FastAPI:
    """The application that answers as the run's model; `name` is the model's name for clients."""
    _prepare(responder)
    manager, state = _OneModel(responder, name), GenerationState()
    handlers = {
        "chat_handler": _ChatHandler(manager, state),
        "completion_handler": _CompletionHandler(manager, state),
        "response_handler": _ResponseHandler(manager, state),
    }
    others = [one for one in inspect.signature(build_server).parameters if one.endswith("_handler")]
    app: FastAPI = build_server(manager, generation_state=state, **{**dict.fromkeys(others), **handlers})
    app.router.routes[:] = [route for route in app.router.routes if getattr(route, "path", None) in SERVED]
    app.add_exception_handler(HTTPException, _as_openai_error)
    for part in ("chat_completion", "completion", "response"):
        logging.getLogger(f"transformers.cli.serving.{part}").addFilter(_is_no_request)
    # of temperature 0, which the server keeps beside do_sample=False
    logging.getLogger("transformers.generation.configuration_utils").setLevel(logging.ERROR)
    return app


async def _as_openai_error(request: Request, error: Exception) -> JSONResponse:
    """An error in OpenAI's form, whose message its client shows."""
    assert isinstance(error, HTTPException)
    kind = "invalid_request_error" if error.status_code < 500 else "server_error"
    message = error.detail if isinstance(error.detail, str) else json.dumps(error.detail, default=str)
    return JSONResponse({"error": {"message": message, "type": kind}}, status_code=error.status_code)


def _is_no_request(record: logging.LogRecord) -> bool:
    """Whether a line of the server's log is more than that a request came."""
    return not record.getMessage().startswith("[Request received]")


def _prepare(responder: Responder) -> None:
    """Give model and tokenizer what the server asks of them: stop tokens, sampling, prompts as in training."""
    model, tokenizer = responder.model, responder.tokenizer
    generation = model.generation_config
    generation.eos_token_id, generation.pad_token_id = responder.stop, tokenizer.pad_token_id
    generation.do_sample = True  # else a client's temperature would change nothing; the server's 0 is greedy
    text_config = model.config.get_text_config()
    if getattr(text_config, "output_router_logits", None):  # with a cache its mask has another length
        text_config.output_router_logits = False
    generate, positions = model.generate, getattr(text_config, "max_position_embeddings", None)

    def within_positions(*words: Any, **options: Any) -> Any:
        """`generate`, up to the last position that the model has."""
        length, config = options["input_ids"].shape[-1], options["generation_config"]
        if positions is not None:
            config.max_new_tokens = max(1, min(config.max_new_tokens, positions - length))
        return generate(*words, **options)

    def rendered(messages: Sequence[Message], *, tools: Any = None, **asked: Any) -> BatchEncoding:
        """The prompt of a request, in the place of the tokenizer's own `apply_chat_template`."""
        own = {"add_generation_prompt", "return_tensors", "return_dict", "tokenize", "load_audio_from_video"}
        if set(asked) - own:
            raise HTTPException(400, "chat_template_kwargs are not taken: prompts are rendered as in training")
        try:
            ids = request_ids(responder, messages, tools)
        except DataError as error:
            raise HTTPException(400, str(error)) from error
        if positions is not None and len(ids) >= positions:
            raise HTTPException(400, f"the prompt has {len(ids)} tokens and the model {positions} positions")
        ids_BT = torch.tensor([ids])
        return BatchEncoding({"input_ids": ids_BT, "attention_mask": torch.ones_like(ids_BT)})

    model.generate, tokenizer.apply_chat_template = within_positions, rendered


def request_ids(responder: Responder, messages: Sequence[Message], tools: Any = None) -> list[int]:
    """Token ids of a request's messages, read and rendered as training reads and renders a row.

    Raises:
        DataError: they are no conversation that an answer can follow.
    """
    turns = [*messages, {"role": "assistant", "content": "."}]
    row = RawRow("the request", {"messages": turns, **({"tools": tools} if tools else {})})
    data = DataConfig(merge_consecutive=responder.run.config.data.merge_consecutive)
    _, shape = first_format(iter([row]), data)
    assert shape is not None
    example = to_example(row, shape, data)
    if not isinstance(example, Chat):
        raise DataError(str(example) if isinstance(example, BadRow) else "the request is not a conversation")
    if len(example.messages) < 2 or example.messages[-2]["role"] == "assistant":
        raise DataError("the messages end with no turn that an answer can follow")
    return responder.prompt_ids(example.messages[:-1], example.tools)


class _OneModel(ModelManager):
    """The server's model manager, with one model that is loaded already and never unloaded."""

    def __init__(self, responder: Responder, name: str) -> None:
        super().__init__(model_timeout=-1)
        self.force_model = name
        self.model, self.tokenizer = responder.model, responder.tokenizer

    @staticmethod
    def process_model_name(model_id: str) -> str:
        return model_id  # in answers too: it has no revisions

    def load_model_and_processor(self, *_: Any, **__: Any) -> tuple[Any, Any]:
        return self.model, self.tokenizer

    def get_gen_models(self, *_: Any) -> list[dict[str, Any]]:
        return [{"id": self.force_model, "object": "model", "created": 0, "owned_by": "sft_play"}]


def _refuse(manager: _OneModel, body: dict[str, Any]) -> None:
    """Raises HTTPException for requests that the server would fail at: bad messages, a stream that cannot be."""
    messages = body.get("messages")
    if "messages" in body and not (
        messages and isinstance(messages, list) and all(isinstance(m, dict) for m in messages)
    ):
        raise HTTPException(400, "messages is not a list of messages")
    if body.get("stream") and not hasattr(manager.tokenizer, "_tokenizer"):
        raise HTTPException(400, "this model's tokenizer cannot stream; ask without stream=True")


class _ChatHandler(ChatCompletionHandler):
    def _validate_request(self, body: dict[str, Any]) -> None:
        super()._validate_request({"messages": None, **body})
        _refuse(self.model_manager, {"messages": None, **body})

    @staticmethod
    def get_processor_inputs_from_messages(messages: list[Message], modality: Any) -> list[Message]:
        return messages  # as the client sent them: the run's own code reads them


class _ResponseHandler(ResponseHandler):
    def _validate_request(self, body: dict[str, Any]) -> None:
        body.setdefault("stream", False)  # as OpenAI's; transformers' is True
        super()._validate_request(body)
        _refuse(self.model_manager, body)


class _CompletionHandler(CompletionHandler):
    def _validate_request(self, body: dict[str, Any]) -> None:
        super()._validate_request(body)
        _refuse(self.model_manager, body)
