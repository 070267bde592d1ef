"""A hub that cuts off in mid-download, answers with errors or not at all: one message, and the next start goes on; when
it is asked, and what a config.json means."""

import csv
import hashlib
import http.server
import json
import math
import random
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sft_play.errors import ModelError
from sft_play.models import config_json
from sft_play.trace.confirm import load_planned_shape
from tests.bundled import ORIGINS, OWN_CODE, PUBLISHED, model_config
from tests.conftest import chat, clean_environment, shared, write_rows, write_run

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
    rows = write_rows(folder / "rows.jsonl", (chat(f"what is {n}?", f"{n}.") for n in range(8)))
    output = {"name": "one", "if_exists": "replace"}
    config = write_run(folder, NAME, rows, train={"effective_batch_size": 2, "bf16": False}, output=output)
    hub = {"HF_ENDPOINT": address, "HF_HUB_DISABLE_XET": "1", "HF_HUB_OFFLINE": "0", "NO_PROXY": "*", "no_proxy": "*"}
    environment = clean_environment(HF_HOME=str(folder / "hf"), **hub)
    command = [sys.executable, "-m", "sft_play", "train", "--config", str(config), *words]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300, env=environment)


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


# What a config.json means, and when the hub is asked for one.
# gemma-3-27b-it is published with its image tower: 27,009,346,304 of it are the language model (262208*5376 embedding +
# 62 blocks + last norm); every other row is the language model whole.
TOWERS = {"gemma-3-27b-it": 27_009_346_304}


@pytest.mark.parametrize("full", PUBLISHED)
def test_published_sizes_give_the_published_counts(full):
    name = full.rpartition("/")[2]
    assert load_planned_shape(model_config(name), name=name).params == TOWERS.get(name, PUBLISHED[full])


def test_published_sizes_are_those_of_the_published_configs():
    """But for Qwen2.5-7B's positions, which the base model has more of, and the type that the weights are stored in."""
    for name in (full.rpartition("/")[2] for full in PUBLISHED):
        published = json.loads(shared(f"model_configs/{name}/config.json").read_text())
        shapes = [load_planned_shape(config, name=name) for config in (model_config(name), published)]
        one, other = (replace(shape, max_positions=0, stored_dtype=None) for shape in shapes)
        assert one == other, name


def test_parameter_counts_are_exact_for_the_published_configs():
    rows = list(csv.DictReader(shared("model_configs/params.csv").read_text().splitlines()))
    rows = [row for row in rows if row["name"] != "phi-2-remote-code"]
    for row in rows:
        config = json.loads(shared(f"model_configs/{row['name']}/config.json").read_text())
        shape = load_planned_shape(config, name=row["name"])
        assert shape.params == TOWERS.get(row["name"], int(row["params"])), row["name"]
    assert len(rows) == 19


def test_what_looks_like_a_path_or_whose_first_part_exists_is_never_a_hub_id(tmp_path, monkeypatch):
    (tmp_path / "models").mkdir()
    monkeypatch.chdir(tmp_path)
    for name in ("/no/such/model", "./nothing", "~/no-such-model-folder", "models/llama"):
        with pytest.raises(ModelError, match="does not exist"):
            config_json.find_model_folder(name)
    assert config_json.find_model_folder("other/llama") is None
    # without network it is said to be neither here nor cached
    monkeypatch.setattr("sft_play.models.config_json.is_hub_reachable", lambda: False)
    with pytest.raises(ModelError, match=r"not a folder here .* not in the local cache, .* cannot be reached"):
        config_json.load_config_json("nobody/no-such-model")


@pytest.mark.parametrize(("environment", "answers"), [
    ({}, True), ({"HF_HUB_OFFLINE": "1"}, False), ({"TRANSFORMERS_OFFLINE": "yes"}, False),
    ({"HF_HUB_OFFLINE": "0", "TRANSFORMERS_OFFLINE": "1"}, True),
    ({"HF_HUB_OFFLINE": "", "TRANSFORMERS_OFFLINE": "1"}, False),
])  # fmt: skip
def test_the_hub_is_offline_where_huggingface_hub_is(monkeypatch, environment, answers):
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(config_json, "_can_connect", lambda host, port: True)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert config_json.is_hub_reachable() == answers


def test_of_a_proxy_it_is_asked_whether_it_answers(monkeypatch):
    """A proxy that is gone had the library try again for a minute."""
    chance, asked = random.Random(4), []
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy",
                 "HTTP_PROXY", "http_proxy", "NO_PROXY", "no_proxy", "HF_ENDPOINT"):  # fmt: skip
        monkeypatch.delenv(name, raising=False)
    for number in range(60):
        variable, scheme = chance.choice(["HTTPS_PROXY", "https_proxy", "ALL_PROXY"]), chance.choice(["http://", ""])
        hub, proxy, port = f"https://hub{number}.example", f"proxy{number}", chance.randint(1, 65535)
        is_bypassed, answers = chance.random() < 0.3, chance.random() < 0.5
        with monkeypatch.context() as patch:
            patch.setattr(config_json, "_can_connect", lambda *place, answers=answers: asked.append(place) or answers)
            patch.setenv("HF_ENDPOINT", hub)
            patch.setenv(variable, f"{scheme}{proxy}:{port}")
            if is_bypassed:
                patch.setenv("no_proxy", ".example")
            assert config_json.is_hub_reachable() == answers
        assert asked[-1] == ((f"hub{number}.example", 443) if is_bypassed else (proxy, port))


def test_a_name_that_is_looked_up_for_long_is_no_answer(monkeypatch):
    monkeypatch.setattr(config_json, "_CONNECT_TIMEOUT_S", 0.05)
    waits = threading.Event()
    monkeypatch.setattr(config_json.socket, "create_connection", lambda *_: nullcontext(waits.wait(10)))
    assert not config_json._can_connect("hub.example", 443)
    waits.set()


def test_numbers_that_json_lacks_are_read_as_transformers_writes_them(tmp_path):
    """`{"__float__": "Infinity"}`; an object that is no such tag stays as it is."""
    tags = {"limit": [0.0, {"__float__": "Infinity"}], "low": {"__float__": "-Infinity"}, "gap": {"__float__": "NaN"}}
    others = {"a": {"__float__": "x"}, "b": {"__float__": []}, "c": {"__float__": "NaN", "d": 1}}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bamba", **tags, "others": others}))
    found = config_json.load_config_json(str(tmp_path))
    assert (found["limit"], found["low"], found["others"]) == ([0.0, math.inf], -math.inf, others)
    assert math.isnan(found["gap"])


@pytest.mark.parametrize("origin", ORIGINS)
def test_custom_code_is_refused_with_the_options_name(origin, tmp_path):
    folder = tmp_path if origin == "bundled" else shared("model_configs/phi-2-remote-code")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "phi-msft", "auto_map": OWN_CODE, "n_embd": 64}))
    with pytest.raises(ModelError, match=r"model\.trust_remote_code=true"):
        config_json.load_model_shape(str(folder))
    own = {"model_type": "phi-msft", "auto_map": {"AutoConfig": "x.Y"}}
    config_json.refuse_remote_code(own, name="x", allowed=True)


@pytest.mark.parametrize("origin", ORIGINS)
def test_custom_code_that_transformers_does_not_need_is_no_obstacle(origin, tmp_path):
    folder = tmp_path if origin == "bundled" else shared("model_configs/Phi-3.5-mini-instruct")
    (tmp_path / "config.json").write_text(json.dumps(model_config("Phi-3.5-mini-instruct") | {"auto_map": OWN_CODE}))
    assert json.loads((folder / "config.json").read_text())["auto_map"]
    assert config_json.load_model_shape(str(folder)).num_layers == 32
