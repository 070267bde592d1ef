"""A hub that cuts off in mid-download, answers with errors or not at all: one message, and the next start goes on."""

import hashlib
import http.server
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import chat, clean_environment

pytestmark = pytest.mark.build
COMMIT = "0123456789abcdef0123456789abcdef01234567"
NAME = "owner/tiny"


class Hub(http.server.BaseHTTPRequestHandler):
    """As much of the hub as `huggingface_hub` asks for, over the files of a folder."""

    folder: Path
    way = "whole"
    asked: list[str]
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        """Nothing."""

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def _answer(self, *, with_body: bool) -> None:
        self.asked.append(f"{self.command} {self.path}")
        path = self.path.partition("?")[0]
        if self.way == "unavailable":
            self._send(503, b"busy", {}, with_body=with_body)
            return
        if path.startswith(f"/api/models/{NAME}"):
            files = [{"rfilename": file.name} for file in sorted(self.folder.iterdir())]
            facts = {"id": NAME, "modelId": NAME, "sha": COMMIT, "siblings": files}
            tree = [{"type": "file", "path": file.name, "size": file.stat().st_size, "oid": "0" * 40}
                    for file in sorted(self.folder.iterdir())]  # fmt: skip
            body = json.dumps(tree if "/tree/" in path else facts).encode()
            self._send(200, body, {"Content-Type": "application/json"}, with_body=with_body)
            return
        file = self.folder / path.rpartition("/")[2]
        if not path.startswith(f"/{NAME}/resolve/") or not file.is_file():
            self._send(404, b"", {"X-Error-Code": "EntryNotFound"}, with_body=with_body)
            return
        content = file.read_bytes()
        begin = int((self.headers.get("Range") or "bytes=0-").removeprefix("bytes=").partition("-")[0])
        facts = {"ETag": f'"{hashlib.sha256(content).hexdigest()}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        if begin:
            facts["Content-Range"] = f"bytes {begin}-{len(content) - 1}/{len(content)}"
        is_cut = self.way == "cut" and file.suffix == ".safetensors" and with_body
        self._send(206 if begin else 200, content[begin:], facts, with_body=with_body, is_cut=is_cut)

    def _send(self, code: int, body: bytes, headers: dict[str, str], *, with_body: bool, is_cut: bool = False) -> None:
        self.send_response(code)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if with_body and not is_cut:
            self.wfile.write(body)
        if is_cut:  # what is asked for again gets nothing more
            self.wfile.write(body[: len(body) // 2 if code == 200 else 0])
            self.wfile.flush()
            self.connection.shutdown(2)
            self.close_connection = True


@pytest.fixture
def hub(tiny_llama) -> Iterator[type[Hub]]:
    """A hub on this machine with the tiny model, whose answers `way` decides."""

    class Own(Hub):
        folder, asked = tiny_llama, []

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Own)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    Own.address = f"http://127.0.0.1:{server.server_port}"
    yield Own
    server.shutdown()
    server.server_close()


def train(folder: Path, address: str, *words: str) -> subprocess.CompletedProcess[str]:
    """A run of two steps of the hub's model, with a cache of its own."""
    (folder / "rows.jsonl").write_text("".join(json.dumps(chat(f"what is {n}?", f"{n}.")) + "\n" for n in range(8)))
    (folder / "run.yaml").write_text(
        f"model: {{name: {NAME}, max_seq_len: 64}}\ndata: {{train_path: rows.jsonl}}\ntuning: {{mode: lora}}\n"
        "train: {effective_batch_size: 2, max_steps: 2, report_to: [], bf16: false}\n"
        "output: {name: one, if_exists: replace}\n"
    )
    environment = clean_environment(HF_ENDPOINT=address, HF_HOME=str(folder / "hf"), HF_HUB_DISABLE_XET="1")
    environment = {name: value for name, value in environment.items() if name != "HF_HUB_OFFLINE"}
    return subprocess.run(
        [sys.executable, "-m", "sft_play", "train", "--config", "run.yaml", *words], cwd=folder, capture_output=True,
        text=True, timeout=300, env={**environment, "NO_PROXY": "*", "no_proxy": "*"},
    )  # fmt: skip


def test_a_download_that_is_cut_off_is_one_message_and_the_next_start_fetches_the_rest(hub, tmp_path):
    hub.way = "cut"
    done = train(tmp_path, hub.address)
    assert (done.returncode, "Traceback" in done.stderr) == (2, False)
    last = done.stderr.splitlines()[-1]
    assert last.startswith(f"[train] error: the weights of {NAME} did not come whole (")
    assert not list((tmp_path / "hf").rglob("model.safetensors"))  # nothing that would count as the whole file
    assert not (tmp_path / "outputs" / "one").exists()  # it has not trained
    hub.way = "whole"
    hub.asked.clear()
    done = train(tmp_path, hub.address)
    assert done.returncode == 0, done.stderr[-3000:]
    fetched = [one.rpartition("/")[2] for one in hub.asked if one.startswith("GET /owner")]
    assert "model.safetensors" in fetched
    assert "tokenizer.json" not in fetched  # it came whole the first time


@pytest.mark.slow  # the library asks six times before it gives up
def test_a_hub_that_is_out_of_order_is_one_message_before_anything_is_made(hub, tmp_path):
    hub.way = "unavailable"
    done = train(tmp_path, hub.address)
    assert (done.returncode, "Traceback" in done.stderr) == (2, False)
    assert f"model {NAME}" in done.stderr.splitlines()[-1]
    assert not (tmp_path / "outputs").exists()


def test_a_hub_model_of_gguf_files_alone_is_named_as_such(hub, tmp_path):
    done = train(tmp_path, hub.address, "model.name=owner/tiny-GGUF")
    assert done.returncode == 2
    assert "error: model owner/tiny-GGUF is a GGUF, weights for llama.cpp" in done.stderr.splitlines()[-1]
