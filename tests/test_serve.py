"""`make serve`: the real server and OpenAI's client; its prompts are training's, its answers those of `make infer`."""

import contextlib
import dataclasses
import json
import os
import random
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from sft_play.data.masks.render import Renderer
from sft_play.data.masks.token_row import IGNORED
from sft_play.data.sources.formats import Chat, detect_format, to_example
from sft_play.data.sources.raw import RawRow
from sft_play.errors import BackendError, DataError
from sft_play.finished import serve
from sft_play.finished.run import find_finished_run
from sft_play.machine.network import is_local
from tests.bundled import template_of
from tests.conftest import ROOT, write_rows
from tests.finished_runs import finished_run, make_base
from tests.processes import wait_for
from tests.test_merge import llama

pytestmark = pytest.mark.build
pytest.importorskip("fastapi", reason="the extra sft-play[serve] is not installed")
if find_spec("openai") is None:  # importing it takes every process of the tests two seconds
    pytest.skip("the extra sft-play[serve] is not installed", allow_module_level=True)

ASKED = [{"role": "system", "content": "You are terse."}, {"role": "user", "content": "what is 3 + 3?"}]
TOKENS = 12


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Path:
    """A folder with finished runs on one base: LoRA in fp32, QLoRA in bf16, all weights."""
    folder = tmp_path_factory.mktemp("serve")
    base = make_base(folder / "base", llama())
    finished_run(folder / "lora", base)
    finished_run(folder / "qlora run", base, mode="qlora", precision="bf16")
    finished_run(folder / "full", base, mode="full")
    endless = llama(max_position_embeddings=10**6)
    endless.lm_head.weight.data.zero_()  # always the first token, which ends nothing
    finished_run(folder / "endless", make_base(folder / "long", endless))
    return folder


@contextlib.contextmanager
def started(service: serve.Service) -> Iterator[serve.ServedEndpoint]:
    try:
        yield service.start()
    finally:
        if isinstance(service, serve.TransformersService):
            service._server.should_exit = service._server.force_exit = True
            service._thread.join(10)


@pytest.fixture(scope="module")
def lora(world) -> Iterator[serve.ServedEndpoint]:
    with started(of_run(world / "lora")) as endpoint:
        yield endpoint


def of_run(run: Path, engine: str = "transformers") -> serve.Service:
    return serve.create_service(engine, find_finished_run(run.parent, str(run)), "127.0.0.1", 0)


@contextlib.contextmanager
def serving(run: Path, *words: str, **variables: str) -> Iterator[tuple[subprocess.Popen[str], dict[str, object]]]:
    """The command with JSON=1 as a process of its own: the process and its answer, once it has one."""
    command = [sys.executable, "-m", "sft_play", "serve", "--run", str(run), "--port", "0", "--json", *words]
    with tempfile.TemporaryFile() as log:  # no pipe: what the command starts would keep it open
        environment = {**os.environ, **variables}
        process = subprocess.Popen(command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=log, env=environment)
        try:
            line = process.stdout.readline()
            log.seek(0)
            assert line, log.read().decode()
            yield process, json.loads(line)
        finally:
            process.kill()
            process.wait()
            process.stdout.close()


@pytest.mark.parametrize("name", ["qlora run", "full"])
def test_openais_client_gets_the_answers_of_infer(world, tmp_path, name):
    import openai

    from sft_play.finished.respond import infer

    prompts, answers = write_rows(tmp_path / "prompts.jsonl", [{"messages": ASKED}]), tmp_path / "answers.jsonl"
    infer(find_finished_run(world, str(world / name)), prompts, answers, max_new_tokens=TOKENS)
    expected = json.loads(answers.read_text())["answer"]
    assert expected.strip("\N{REPLACEMENT CHARACTER}")
    with started(of_run(world / name)) as endpoint:
        client = openai.OpenAI(base_url=endpoint.url, api_key="none", max_retries=0)
        assert [model.id for model in client.models.list()] == [name]
        options = {"model": name, "messages": ASKED, "temperature": 0, "max_tokens": TOKENS}
        whole = client.chat.completions.create(**options)
        assert (whole.model, whole.choices[0].message.content) == (name, expected)
        parts = client.chat.completions.create(**options, stream=True)
        streamed = [part.choices[0].delta.content or "" for part in parts]
        # a stream ends without the bytes of a character that did not come whole
        assert "".join(streamed).rstrip("\N{REPLACEMENT CHARACTER}") == expected.rstrip("\N{REPLACEMENT CHARACTER}")
        assert sum(bool(text) for text in streamed) > 1
        sampled = [{**options, "temperature": 5.0, "seed": seed} for seed in range(3)]
        texts = {client.chat.completions.create(**one).choices[0].message.content for one in sampled}
        assert texts != {expected}  # a client's temperature counts, although the base's own default is greedy


def test_requests_that_cannot_be_answered_say_why(lora):
    for more, words in (
        ({"messages": [{"role": "nobody", "content": "x"}]}, "unknown role"),
        ({"messages": [*ASKED, {"role": "assistant", "content": "6"}]}, "no turn that an answer can follow"),
        ({"messages": [{"role": "user", "content": "x " * 1000}]}, "256 positions"),
        ({"model": "another"}, "pinned"),
    ):
        code, said = post(lora, {**CHAT, **more})
        assert (code, words in said["error"]["message"]) == (400, True), said
    assert post(lora, {**CHAT, "max_tokens": 10_000})[1]["usage"]["total_tokens"] <= 256
    for path in ("completions", "responses", "audio/transcriptions"):
        assert post(lora, {}, path)[0] == 404
    for path in ("load_model", "reset"):  # with which transformers' own server takes another model
        request = urllib.request.Request(lora.url.removesuffix("v1") + path, data=b"{}", method="POST")
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(request, timeout=10)


def post(
    endpoint: serve.ServedEndpoint, body: object, path: str = "chat/completions", **headers: str
) -> tuple[int, dict]:
    """Status and answer; `body` in JSON, or bytes as they are."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(f"{endpoint.url}/{path}", data, {"Content-Type": "application/json", **headers})
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        with error:
            text = error.read().decode()
        return error.code, json.loads(text) if text.startswith("{") else {"text": text}


TOOLS = [{"type": "function", "function": {"name": "look", "description": "Look.", "parameters": {"type": "object"}}}]
CHAT = {"messages": ASKED, "temperature": 0, "max_tokens": TOKENS}
REFUSED: list[dict[str, object]] = [
    {"n": 2}, {"logprobs": True}, {"top_logprobs": 3}, {"response_format": {"type": "json_object"}},
    {"presence_penalty": 0.5}, {"frequency_penalty": 0.5}, {"tool_choice": "none"}, {"modalities": ["audio"]},
    {"generation_config": "{}"}, {"no_such_option": 1}, {"chat_template_kwargs": {"enable_thinking": True}},
    {"temperature": -1}, {"temperature": "x"}, {"temperature": True}, {"top_p": 0}, {"top_p": 1.5},
    {"max_tokens": 0}, {"max_tokens": 1.5}, {"max_completion_tokens": 0}, {"stop": 5}, {"stop": ["a"] * 5},
    {"stop": [""]}, {"stop": "x" * 1000}, {"seed": 2**70}, {"stream": "yes"}, {"logit_bias": {"2": 1}},
    {"messages": "hello"}, {"messages": [5]}, {"messages": None}, {"messages": []}, {"tools": 5},
    {"tool_choice": "required"}, {"tool_choice": {"type": "function", "function": {"name": "look"}}}, {"tools": TOOLS},
]  # fmt: skip


def test_what_is_not_supported_is_refused_by_name_and_the_connection_is_still_good(lora):
    import http.client

    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", lora.port, timeout=60)) as connection:
        for wrong in REFUSED:
            (option,) = wrong
            body = json.dumps({**CHAT, **wrong})
            connection.request("POST", "/v1/chat/completions", body, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            said = json.loads(answer.read())["error"]
            assert (answer.status, said["type"], said["param"]) == (400, "invalid_request_error", option), (wrong, said)
            assert option in said["message"] or option == "messages"
    for raw in (b"{", b"[]", b"", b'{"messages": "\\ud83d"}'):
        code, said = post(lora, raw)
        assert (code, said["error"]["type"]) == (400, "invalid_request_error"), raw
    assert post(lora, {**CHAT, "messages": [{"role": "user", "content": "\ud83d"}]})[0] == 400
    assert post(lora, {}, "no/such/path")[1]["error"]["type"] == "invalid_request_error"


def test_tools_are_taken_where_the_chat_template_writes_them(lora, tmp_path):
    base = make_base(tmp_path / "base", llama())
    (base / "chat_template.jinja").write_text(template_of("bundled/tools"))
    run = finished_run(tmp_path / "calls", base)
    with started(of_run(run)) as endpoint:
        plain, given = (post(endpoint, {**CHAT, **more}) for more in ({}, {"tools": TOOLS, "tool_choice": "auto"}))
        assert (plain[0], given[0]) == (200, 200), given
        assert given[1]["usage"]["prompt_tokens"] > plain[1]["usage"]["prompt_tokens"] + 20
    code, said = post(lora, {**CHAT, "tools": TOOLS, "stream": True})
    is_told = "the model's chat template writes no tools" in said["error"]["message"]
    assert (code, said["error"]["param"], is_told) == (400, "tools", True)
    assert post(lora, {**CHAT, "tools": []})[0] == 200  # which asks for nothing


def test_options_that_ask_for_nothing_change_nothing(lora):
    nothing = {
        "n": 1, "logprobs": False, "top_logprobs": 0, "response_format": {"type": "text"}, "presence_penalty": 0,
        "frequency_penalty": 0.0, "stop": None, "stream_options": None, "user": "me", "metadata": {"a": "b"},
        "tool_choice": "auto", "store": False, "seed": -5, "service_tier": "auto",
    }  # fmt: skip
    assert post(lora, {**CHAT, **nothing})[1]["choices"] == post(lora, CHAT)[1]["choices"]
    assert post(lora, {**CHAT, "temperature": 1e-300})[0] == 200  # logits / 1e-300 would be infinite


def streamed(endpoint: serve.ServedEndpoint, body: dict[str, object]) -> tuple[str, str]:
    """The text of a stream's pieces, and its last line."""
    data = json.dumps({**body, "stream": True}).encode()
    request = urllib.request.Request(f"{endpoint.url}/chat/completions", data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        lines = [line for line in answer.read().decode().splitlines() if line]
    pieces = [json.loads(line.removeprefix("data: "))["choices"][0] for line in lines if "[DONE]" not in line]
    return "".join(one.get("delta", {}).get("content") or "" for one in pieces), lines[-1]


def test_the_stop_text_is_not_part_of_the_answer(lora):
    """Stop texts of every length from every place of the answer, streamed and not: cut where Python's find says."""
    body = {**CHAT, "max_tokens": 24}
    whole, draw = post(lora, body)[1]["choices"][0]["message"]["content"], random.Random(0)
    assert len(whole) > 8
    for _ in range(5):
        # not in the bytes of a character that never came whole, which a stream decodes differently
        cuts = [whole[at : at + n] for n in (1, 2, 3) for at in range(len(whole) - 3)]
        stops = [draw.choice([cut for cut in cuts if "\N{REPLACEMENT CHARACTER}" not in cut]), "never said"]
        expected = whole[: whole.find(stops[0])]
        answer = post(lora, {**body, "stop": stops})[1]
        assert answer["choices"][0]["message"]["content"] == expected, stops
        assert streamed(lora, {**body, "stop": stops}) == (expected, "data: [DONE]")
        assert answer["usage"]["completion_tokens"] <= 24


def test_pieces_of_a_stream_are_cut_at_a_stop_text_wherever_they_are_divided():
    from sft_play.finished.openai import StopTextFilter, cut_at_stop

    draw = random.Random(1)
    for _ in range(1000):
        text = "".join(draw.choices("ab\n", k=draw.randint(0, 12)))
        stops = ["".join(draw.choices("ab\n", k=draw.randint(1, 4))) for _ in range(draw.randint(0, 3))]
        cuts = sorted(draw.choices(range(len(text) + 1), k=3))
        pieces = [text[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        until = StopTextFilter(stops)
        shown = "".join([*map(until.feed, pieces), until.feed("", is_over=True)])
        expected = text
        for end in range(len(text) + 1):  # character by character, as if each were a token
            complete = [stop for stop in stops if text[:end].endswith(stop)]
            if complete:
                expected = text[: end - max(map(len, complete))]
                break
        assert shown == expected, (text, stops, pieces)
        assert cut_at_stop(text, stops) == shown


def test_long_bodies_and_long_prompts_do_not_stop_the_others(lora):
    code, said = post(lora, {**CHAT, "messages": [{"role": "user", "content": "x" * 30_000_000}]})
    assert (code, said["error"]["type"]) == (413, "invalid_request_error")
    answers = []
    many = [{"role": ("user", "assistant")[n % 2], "content": "x y"} for n in range(19_999)]
    for messages in (many, [{"role": "user", "content": "x y " * 200_000}]):
        asking = threading.Thread(target=lambda m=messages: answers.append(post(lora, {**CHAT, "messages": m})))
        asking.start()
        while asking.is_alive():
            begun = time.monotonic()
            with urllib.request.urlopen(lora.url.removesuffix("/v1") + "/health", timeout=60) as health:
                assert health.status == 200
            assert time.monotonic() - begun < 30
        asking.join()
    assert [code for code, _ in answers] == [400, 400]
    assert all("256 positions" in said["error"]["message"] for _, said in answers)


def test_only_this_machines_names_reach_a_server_that_only_it_can_reach(lora):
    good, evil = (
        ({"Host": "[::1]:8000"}, {"Origin": "http://localhost:3000"}),
        ({"Host": "evil.example"}, {"Origin": "null"}),
    )
    assert [post(lora, {**CHAT, "max_tokens": 1}, **headers)[0] for headers in good] == [200, 200]
    for headers in evil:
        code, said = post(lora, {**CHAT, "max_tokens": 1}, **headers)
        assert (code, said["error"]["type"]) == (403, "invalid_request_error"), headers
    assert serve.allowed_host_names("0.0.0.0") is None


def ask_for_long(port: int) -> socket.socket:
    body = json.dumps({**CHAT, "model": "endless", "max_tokens": 10**6, "stream": True}).encode()
    connection = socket.create_connection(("127.0.0.1", port))
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost:{port}\r\nContent-Type: application/json\r\n"
    connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    assert connection.recv(100).startswith(b"HTTP/1.1 200")
    return connection


@pytest.mark.parametrize("numbers", [(signal.SIGINT, signal.SIGINT), (signal.SIGTERM,)])
def test_the_command_prints_one_object_and_ends_by_its_pid_without_waiting_for_answers(world, tmp_path, numbers):
    with serving(world / "endless", "--out", str(tmp_path / "ready.json")) as (process, answer):
        assert {key: answer[key] for key in ("ok", "run", "engine", "model", "host", "pid")} == {
            "ok": True, "run": str(world / "endless"), "engine": "transformers", "model": "endless",
            "host": "127.0.0.1", "pid": process.pid,
        }  # fmt: skip
        assert json.loads((tmp_path / "ready.json").read_text()) == answer
        with ask_for_long(int(str(answer["port"]))):
            for number in numbers:
                assert process.poll() is None
                os.kill(int(str(answer["pid"])), number)
                time.sleep(1.5)  # two signals within a second are one
            assert process.wait(timeout=20) == 0
        assert process.stdout.read() == ""
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", int(str(answer["port"]))))


@pytest.mark.parametrize("settings", [{"system_into_user": True}, {"merge_consecutive": True}])
def test_prompt_ids_are_those_of_training_rows(world, settings):
    from sft_play.finished.openai import render_request
    from sft_play.finished.respond import Responder

    run = find_finished_run(world, "lora")
    data = run.config.data.model_copy(update=settings)
    responder = Responder(run)
    responder.run.config.__dict__["data"] = data
    responder._renderer = Renderer(responder.tokenizer, data, max_seq_len=64)
    turns = [*ASKED, *([{"role": "user", "content": "quickly"}] if settings.get("merge_consecutive") else [])]
    row = RawRow("row 1", {"messages": [*turns, {"role": "assistant", "content": "it is 6."}]})
    _, shape = detect_format(iter([row]), data)
    example = to_example(row, shape, data)
    assert isinstance(example, Chat)
    trained = Renderer(responder.tokenizer, data, max_seq_len=200)(example)
    before = [label == IGNORED for label in trained.labels].index(False)
    assert render_request(responder, turns)[0] == trained.input_ids[:before]
    parts = [{**turn, "content": [{"type": "text", "text": turn["content"]}]} for turn in turns]
    assert render_request(responder, parts)[0] == trained.input_ids[:before]
    with pytest.raises(DataError, match="image"):
        render_request(responder, [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}])


def test_the_lines_are_commands_that_can_be_pasted_and_say_the_models_positions(lora):
    context = lora.as_json()["context"]
    assert "256 positions; rows of training had at most 64 tokens" in context
    lines = dataclasses.replace(lora, model='it\'s "a run"').lines()
    assert context in lines
    curl = next(line for line in lines if "curl" in line)
    assert json.loads(shlex.split(curl)[-1])["model"] == 'it\'s "a run"'


def test_wrong_addresses_are_refused_before_anything_is_loaded(world, command, monkeypatch):
    monkeypatch.setattr("sft_play.finished.respond.Responder", lambda *_: pytest.fail("a model was loaded"))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        for words, message in (
            (["--port", port], "PORT=0 takes any free port"),
            (["--port", "65536"], "PORT=65536 is not a port"),
            (["--port", "-1"], "PORT=-1 is not a port"),
            (["--host", "no.such.host.invalid"], "HOST=no.such.host.invalid"),
            (["--engine", "sglang"], "transformers, vllm"),
        ):
            code, printed = command("serve", "--run", str(world / "lora"), *words)
            assert (code, message in printed, printed.strip().count("\n")) == (2, True, 0), printed


def test_only_addresses_of_this_machine_come_without_a_warning():
    assert all(map(is_local, ("127.0.0.1", "localhost", "::1", "127.9.9.9")))
    assert not any(map(is_local, ("0.0.0.0", "::", "192.168.0.7", "gpu-node")))
    assert [serve.parse_port(text) for text in (None, "0", "65535")] == [8000, 0, 65535]


def test_packages_that_are_missing_or_have_another_server_are_named(world, monkeypatch):
    service = of_run(world / "lora")
    with contextlib.closing(service._listener):
        # another transformers, then the same without the package openai
        for is_there, said in ((True, "chat_completion"), (False, "CompletionCreateParamsStreaming")):
            with monkeypatch.context() as patch:
                patch.delitem(sys.modules, "sft_play.finished.openai", raising=False)
                patch.setitem(sys.modules, "transformers.cli.serving.chat_completion", None)
                if not is_there:
                    patch.delitem(sys.modules, "transformers.cli.serving.chat_completion")
                    patch.setattr("transformers.utils.import_utils.is_serve_available", lambda: False)
                with pytest.raises(BackendError, match=rf"{said}.*sft-play\[serve\]"):
                    service.start()
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(BackendError, match="no program vllm"):
        of_run(world / "full", "vllm")


VLLM = """#!{python}
import json, os, sys, time
print("a line of vLLM's own", flush=True)
json.dump([os.getpid(), sys.argv[1:]], open({record!r} + ".new", "w"))
os.rename({record!r} + ".new", {record!r})
time.sleep(300)
"""


@pytest.mark.parametrize("name", ["lora", "full"])
def test_vllm_takes_the_place_of_the_command_over_the_whole_model(world, tmp_path, name):
    (tmp_path / "vllm").write_text(VLLM.format(python=sys.executable, record=str(tmp_path / "words")))
    (tmp_path / "vllm").chmod(0o755)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    whole = world / name / ("merged" if name == "lora" else "model")
    with serving(world / name, "--engine", "vllm", PATH=path) as (process, answer):
        assert (answer["engine"], answer["weights"], answer["pid"]) == ("vllm", str(whole), process.pid)
        assert (whole / "config.json").is_file()
        wait_for((tmp_path / "words").is_file, within_s=30)
        words = f"--served-model-name {name} --host 127.0.0.1 --port {answer['port']} --dtype float32".split()
        assert json.loads((tmp_path / "words").read_text()) == [process.pid, ["serve", str(whole), *words]]
        process.terminate()
        assert process.wait(20) == -signal.SIGTERM
        assert process.stdout.read() == ""  # what vLLM prints goes to standard error
