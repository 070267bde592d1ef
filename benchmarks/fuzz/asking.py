"""Requests to the server of `make serve`: bodies mutated as values and as bytes, and raw HTTP. Every one is answered
with 200 or 4xx in the form of the API, and the server answers the next."""

import contextlib
import json
import random
import re
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.fuzz import mutate
from benchmarks.fuzz.run import CaseRunner, FuzzFailure, isolated_environment

_PATHS = ("/v1/chat/completions", "/v1/models", "/health", "/", "/v1/../etc", "/docs")
_CHAT: dict[str, Any] = {
    "model": "run", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 2, "temperature": 0.5,
    "top_p": 0.9, "stop": ["x"], "seed": 1, "stream": False, "user": "me",
    "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}],
}  # fmt: skip
_HEADERS = (
    *("Host: evil.example", "Origin: http://evil.example", "Origin: null", "Content-Length: 5", "Content-Length: -1"),
    *("Transfer-Encoding: chunked", "Content-Type: text/plain", "Expect: 100-continue", "X: " + "a" * 70_000),
    "Host: a",
    *("Connection: close", "Cookie: \x00", "Authorization: Bearer x", ": x", "no colon here", "Content-Encoding: gzip"),
)


@contextlib.contextmanager
def case_runner() -> Iterator[CaseRunner]:
    from transformers import LlamaForCausalLM

    from sft_play.finished import serve
    from sft_play.finished.run import find_finished_run
    from tests.finished_runs import finished_run, make_base
    from tests.models import make_llama

    with isolated_environment(), tempfile.TemporaryDirectory(prefix="fuzz-serve-") as home:
        model = LlamaForCausalLM.from_pretrained(make_llama(Path(home) / "whole"))
        finished_run(Path(home) / "run", make_base(Path(home) / "base", model))
        service = serve.TransformersService(find_finished_run(Path(home), "run"), "127.0.0.1", 0)
        endpoint = service.start()

        def judge(draw: random.Random, folder: Path) -> bool:
            request, is_whole = _request(draw, endpoint.port)
            status, body = _answered(endpoint.port, request, is_whole=is_whole)
            if status >= 500 or status == 0:
                raise FuzzFailure(f"status {status}: {body[:2000]!r}")
            if 400 <= status < 500 and body.startswith(b"{") and "error" not in json.loads(body):
                raise FuzzFailure(f"status {status} without an error: {body[:500]!r}")
            if _answered(endpoint.port, _plain("GET", "/health", endpoint.port))[0] != 200:
                raise FuzzFailure("the server does not answer the next request")
            return status == 200

        try:
            yield judge
        finally:
            service._server.should_exit = service._server.force_exit = True
            service._thread.join(20)


def _plain(method: str, path: str, port: int, body: bytes = b"", *more: str) -> bytes:
    lines = [f"{method} {path} HTTP/1.1", f"Host: 127.0.0.1:{port}", "Content-Type: application/json",
             f"Content-Length: {len(body)}", "Connection: close", *more]  # fmt: skip
    return "\r\n".join([*lines, "", ""]).encode("latin-1", "replace") + body


def _request(draw: random.Random, port: int) -> tuple[bytes, bool]:
    """A request, and whether it is a whole one, which has to be answered."""
    path = _PATHS[0] if draw.random() < 0.9 else draw.choice(_PATHS)
    body: Any = mutate.plain(draw, _CHAT) if draw.random() < 0.7 else _CHAT
    data = mutate.as_json(body).encode()
    if draw.random() < 0.2:
        data = mutate.raw(draw, data)
    method = draw.choice(("POST",) * 9 + ("GET", "PUT", "OPTIONS", "DELETE", "HEAD", "x"))
    more = [draw.choice(_HEADERS)] if draw.random() < 0.15 else []
    request = _plain(method, path, port, data, *more)
    return (mutate.raw(draw, request), False) if draw.random() < 0.1 else (request, not more)


def _answered(port: int, request: bytes, *, is_whole: bool = True) -> tuple[int, bytes]:
    """Status and body; (400, nothing) where the server closes on what is no whole request, or waits for its rest."""
    with socket.create_connection(("127.0.0.1", port), timeout=60 if is_whole else 3) as connection:
        pieces = []
        try:
            connection.sendall(request)
            while piece := connection.recv(2**16):
                pieces.append(piece)
        except TimeoutError:
            if is_whole:
                raise FuzzFailure("no answer within 60 s") from None
        except OSError:  # it has closed what it does not understand
            pass
    head, _, body = b"".join(pieces).partition(b"\r\n\r\n")
    words = head.split(b"\r\n", 1)[0].split()
    if not words:
        return 400, b""
    if len(words) < 2 or not words[1].isdigit():
        raise FuzzFailure(f"no HTTP answer: {head[:200]!r}")
    # what is left of a mutated request may be answered as a second one
    length = re.search(rb"\ncontent-length: *(\d+)", head.lower())
    return int(words[1]), body[: int(length[1])] if length else body
