"""`make serve`: the real server and OpenAI's client; its prompts are training's, its answers those of `make infer`."""

from __future__ import annotations

import contextlib
import json
import os
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
from unittest.mock import MagicMock

import psutil
import pytest

from sft_play.errors import BackendError, ConfigError, DataError
from sft_play.finished import serve
from sft_play.finished.run import find_finished
from tests.conftest import ROOT
from tests.finished_runs import finished_run, make_base
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
    finished_run(folder / "endless", make_base(folder / "long", llama(max_position_embeddings=10**6)))
    return folder


@contextlib.contextmanager
def started(service: serve.Service) -> Iterator[serve.Serving]:
    """A service in this process, ended afterwards."""
    try:
        yield service.start()
    finally:
        if isinstance(service, serve.VllmService):
            service._end()
        else:
            service._server.should_exit = service._server.force_exit = True
            service._thread.join(10)


def of_run(run: Path, engine: str = "transformers") -> serve.Service:
    return serve.service_of(engine, find_finished(run.parent, str(run)), "127.0.0.1", 0)


@contextlib.contextmanager
def serving(run: Path, *words: str, **variables: str) -> Iterator[tuple[subprocess.Popen[str], dict[str, object]]]:
    """The command with JSON=1 as a process of its own: the process and its answer, once it has one."""
    command = [sys.executable, "-m", "sft_play", "serve", "--run", str(run), "--port", "0", "--json", *words]
    with tempfile.TemporaryFile() as log:  # no pipe: what the command starts would keep it open
        process = subprocess.Popen(
            command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=log, env={**os.environ, **variables}
        )
        assert process.stdout is not None
        try:
            line = process.stdout.readline()
            log.seek(0)
            assert line, log.read().decode()
            yield process, json.loads(line)
        finally:
            process.kill()
            process.wait()
            process.stdout.close()


def answer_of_infer(run: Path, folder: Path) -> str:
    from sft_play.finished.infer import infer

    prompts, answers = folder / "prompts.jsonl", folder / "answers.jsonl"
    prompts.write_text(json.dumps({"messages": ASKED}) + "\n")
    infer(find_finished(run.parent, str(run)), prompts, answers, max_new_tokens=TOKENS)
    return str(json.loads(answers.read_text())["answer"])


@pytest.mark.parametrize("name", ["lora", "qlora run", "full"])
def test_openais_client_gets_the_answers_of_infer(world, tmp_path, name):
    import openai

    expected = answer_of_infer(world / name, tmp_path)
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
        responses = client.responses.create(
            model=name, instructions=ASKED[0]["content"], input=ASKED[1]["content"], temperature=0,
            max_output_tokens=TOKENS,
        )  # fmt: skip
        assert responses.output_text == expected


def test_requests_that_cannot_be_answered_say_why(world):
    import openai

    with started(of_run(world / "lora")) as endpoint:
        client = openai.OpenAI(base_url=endpoint.url, api_key="none", max_retries=0)
        for messages, words in (
            ([], "not a list of messages"),
            ([{"role": "nobody", "content": "x"}], "unknown role"),
            ([*ASKED, {"role": "assistant", "content": "6"}], "no turn that an answer can follow"),
            ([{"role": "user", "content": "x " * 1000}], "256 positions"),
        ):
            with pytest.raises(openai.BadRequestError, match=words):
                client.chat.completions.create(model="lora", messages=messages)
        with pytest.raises(openai.BadRequestError, match="pinned"):
            client.chat.completions.create(model="another", messages=ASKED)
        with pytest.raises(openai.BadRequestError, match="rendered as in training"):
            client.chat.completions.create(
                model="lora", messages=ASKED, extra_body={"chat_template_kwargs": {"enable_thinking": True}}
            )
        longest = client.chat.completions.create(model="lora", messages=ASKED, temperature=0, max_tokens=10_000)
        assert longest.usage.total_tokens <= 256
        for path in ("load_model", "reset", "v1/systemone", "v1/audio/transcriptions"):  # of other models
            request = urllib.request.Request(endpoint.url.removesuffix("v1") + path, data=b"{}", method="POST")
            with pytest.raises(urllib.error.HTTPError, match="404"):
                urllib.request.urlopen(request, timeout=10)


# --- its end ----------------------------------------------------------------------------------------------------------


def ask_for_long(port: int) -> socket.socket:
    """A connection on which an answer is streamed that does not end by itself."""
    body = json.dumps(
        {"model": "endless", "messages": ASKED, "temperature": 0, "max_tokens": 10**6, "stream": True,
         "logit_bias": {"2": -100.0}}
    ).encode()  # fmt: skip
    connection = socket.create_connection(("127.0.0.1", port))
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    assert connection.recv(100).startswith(b"HTTP/1.1 200")
    return connection


@pytest.mark.parametrize("numbers", [(signal.SIGINT, signal.SIGINT), (signal.SIGTERM,)])
def test_a_second_ctrl_c_and_sigterm_do_not_wait_for_answers(world, numbers, monkeypatch):
    monkeypatch.setattr("sft_play.endings.ECHO_S", 0.0)
    service = of_run(world / "endless")
    with started(service) as endpoint, ask_for_long(endpoint.port):
        begun = time.monotonic()
        timers = [threading.Timer(0.5 * n, os.kill, (os.getpid(), number)) for n, number in enumerate(numbers, start=1)]
        for timer in timers:
            timer.start()
        assert service.wait() == 0
        assert 0.5 * len(numbers) <= time.monotonic() - begun < 10
        assert service.is_busy  # it still streams: nobody waited for it


def test_the_command_ends_by_its_pid_and_prints_one_object(world, tmp_path):
    with serving(world / "endless", "--out", str(tmp_path / "ready.json")) as (process, answer):
        assert {key: answer[key] for key in ("ok", "run", "engine", "model", "host", "pid")} == {
            "ok": True, "run": str(world / "endless"), "engine": "transformers", "model": "endless",
            "host": "127.0.0.1", "pid": process.pid,
        }  # fmt: skip
        assert json.loads((tmp_path / "ready.json").read_text()) == answer
        with ask_for_long(int(str(answer["port"]))):
            os.kill(int(str(answer["pid"])), signal.SIGTERM)
            assert process.wait(timeout=20) == 0
        assert process.stdout.read() == ""
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", int(str(answer["port"]))))


@pytest.mark.parametrize("settings", [{}, {"system_into_user": True}, {"merge_consecutive": True}])
def test_prompt_ids_are_those_of_training_rows(world, settings):
    """Against the rows that training reads, cut before their answers."""
    from sft_play.data.masks.render import Renderer
    from sft_play.data.masks.token_row import IGNORED
    from sft_play.data.sources.formats import Chat, first_format, to_example
    from sft_play.data.sources.raw import RawRow
    from sft_play.finished.openai_app import request_ids
    from sft_play.finished.respond import Responder

    run = find_finished(world, "lora")
    data = run.config.data.model_copy(update=settings)
    responder = Responder(run)
    responder.run.config.__dict__["data"] = data
    responder._renderer = Renderer(responder.tokenizer, data, max_seq_len=64)
    turns = [*ASKED, *([{"role": "user", "content": "quickly"}] if settings.get("merge_consecutive") else [])]
    row = RawRow("row 1", {"messages": [*turns, {"role": "assistant", "content": "it is 6."}]})
    _, shape = first_format(iter([row]), data)
    example = to_example(row, shape, data)
    assert isinstance(example, Chat)
    trained = Renderer(responder.tokenizer, data, max_seq_len=200)(example)
    before = [label == IGNORED for label in trained.labels].index(False)
    assert request_ids(responder, turns) == trained.input_ids[:before]
    parts = [{**turn, "content": [{"type": "text", "text": turn["content"]}]} for turn in turns]
    assert request_ids(responder, parts) == trained.input_ids[:before]
    with pytest.raises(DataError, match="image"):
        request_ids(responder, [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}])


def test_the_lines_are_commands_that_can_be_pasted(tmp_path):
    shown = serve.Serving(tmp_path, "transformers", 'it\'s "a run"', tmp_path, "127.0.0.1", 8000, 1).lines()
    curl = next(line for line in shown if "curl" in line)
    words = shlex.split(curl)
    assert json.loads(words[-1])["model"] == 'it\'s "a run"'
    python = [line for line in shown if line.startswith("  ") and "curl" not in line]
    assert len(python) == 3
    openai = MagicMock()
    exec("\n".join(line.strip() for line in python[1:]), {"OpenAI": openai})
    openai.assert_called_once_with(base_url="http://127.0.0.1:8000/v1", api_key="none")
    (call,) = openai.return_value.chat.completions.create.mock_calls[:1]
    assert call.kwargs["model"] == 'it\'s "a run"'
    assert python[0].strip() == "from openai import OpenAI"


def test_wrong_addresses_are_refused_before_anything_is_loaded(world, command, monkeypatch):
    monkeypatch.setattr("sft_play.finished.respond.Responder", lambda *_: pytest.fail("a model was loaded"))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        for words, message in (
            (["--port", port], "PORT=0 takes any free port"),
            (["--port", "http"], "PORT=http is not a port"),
            (["--port", "65536"], "PORT=65536 is not a port"),
            (["--port", "-1"], "PORT=-1 is not a port"),
            (["--host", "no.such.host.invalid"], "HOST=no.such.host.invalid"),
            (["--engine", "sglang"], "transformers, vllm"),
        ):
            code, printed = command("serve", "--run", str(world / "lora"), *words)
            assert (code, message in printed) == (2, True), printed
            assert len(printed.strip().splitlines()) == 1, printed


def test_only_addresses_of_this_machine_come_without_a_warning():
    for host in ("127.0.0.1", "localhost", "::1", "127.9.9.9"):
        assert serve.warning_of(host) is None
    for host in ("0.0.0.0", "::", "192.168.0.7", "gpu-node"):
        assert "no password" in str(serve.warning_of(host))
    assert [serve.read_port(text) for text in (None, "0", "65535")] == [8000, 0, 65535]


def test_a_transformers_with_another_server_is_named(world, monkeypatch):
    monkeypatch.delitem(sys.modules, "sft_play.finished.openai_app", raising=False)
    monkeypatch.setitem(sys.modules, "transformers.cli.serving.server", None)
    service = of_run(world / "lora")
    with (
        contextlib.closing(service._listener),
        pytest.raises(BackendError, match=r"transformers 5\S+ has another server"),
    ):
        service.start()


def test_a_missing_extra_is_named(world, monkeypatch):
    monkeypatch.setattr("transformers.utils.import_utils.is_serve_available", lambda: False)
    with pytest.raises(BackendError, match=r"sft-play\[serve\]"):
        of_run(world / "lora")


# --- vLLM, by a program that records its words: no real vLLM runs here ----------------------------------------------

VLLM = """#!{python}
import json, os, sys, http.server, pathlib, subprocess
pathlib.Path({record!r}).write_text(json.dumps(sys.argv[1:]))
if "fail" in {mode!r}:
    sys.exit(3)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
pathlib.Path({record!r} + ".pids").write_text(json.dumps([os.getpid(), child.pid]))
class Health(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()
    def log_message(self, *_): pass
words = dict(zip(sys.argv, sys.argv[1:]))
http.server.HTTPServer((words["--host"], int(words["--port"])), Health).serve_forever()
"""


def fake_vllm(folder: Path, mode: str = "") -> Path:
    """A program `vllm` in a folder; it writes its words to `words` there."""
    program = folder / "bin" / "vllm"
    program.parent.mkdir(parents=True)
    program.write_text(VLLM.format(python=sys.executable, record=str(folder / "words"), mode=mode))
    program.chmod(0o755)
    return program.parent


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_vllm_serves_the_merged_model_and_ends_with_the_service(world, tmp_path, monkeypatch, number):
    monkeypatch.setenv("PATH", f"{fake_vllm(tmp_path)}{os.pathsep}{os.environ['PATH']}")
    merged = world / "lora" / "merged"
    service = of_run(world / "lora", "vllm")
    with started(service) as endpoint:
        assert (endpoint.engine, endpoint.weights, endpoint.pid) == ("vllm", merged, os.getpid())
        assert (merged / "config.json").is_file()
        assert json.loads((tmp_path / "words").read_text()) == [
            "serve", str(merged), "--served-model-name", "lora", "--host", "127.0.0.1", "--port", str(endpoint.port),
            "--dtype", "float32",
        ]  # fmt: skip
        pids = json.loads((tmp_path / "words.pids").read_text())
        threading.Timer(0.3, os.kill, (os.getpid(), number)).start()
        assert service.wait() == 0
        await_end(*pids)


def test_vllm_ends_with_a_command_that_is_killed(world, tmp_path):
    path = f"{fake_vllm(tmp_path)}{os.pathsep}{os.environ['PATH']}"
    with serving(world / "full", "--engine", "vllm", PATH=path) as (process, answer):
        assert answer["weights"] == str(world / "full" / "model")
        program, child = json.loads((tmp_path / "words.pids").read_text())
        process.kill()
        await_end(program)
        psutil.Process(child).kill()  # a real vLLM ends its own on the SIGTERM that it gets


def test_a_vllm_that_ends_by_itself_is_an_error(world, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", f"{fake_vllm(tmp_path)}{os.pathsep}{os.environ['PATH']}")
    service = of_run(world / "full", "vllm")
    with started(service):
        service._child.kill()
        with pytest.raises(BackendError, match="exit code -9"):
            service.wait()


def await_end(*pids: int) -> None:
    deadline = time.monotonic() + 20
    while any(psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_vllm_that_is_missing_or_fails_is_said_so(world, tmp_path, command, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with pytest.raises(BackendError, match="no program vllm"):
        of_run(world / "full", "vllm")
    monkeypatch.undo()
    monkeypatch.setenv("PATH", f"{fake_vllm(tmp_path, 'fail')}{os.pathsep}{os.environ['PATH']}")
    with pytest.raises(BackendError, match="exit code 3"):
        of_run(world / "full", "vllm").start()
    with pytest.raises(ConfigError, match="not one of"):
        of_run(world / "full", "other")
