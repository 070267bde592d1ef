"""docs/trust.md: what strangers' files, and pages in a browser, cannot do. Every test that the page names exists."""

import ast
import inspect
import io
import json
import logging
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest

from sft_play.errors import ConfigError
from sft_play.launch import tensorboard
from sft_play.log import set_up_logging
from sft_play.machine.network import allowed_host_names, is_local_request
from tests.conftest import ROOT, chat, clean_environment, write_rows, write_run


@pytest.mark.parametrize("page", ["docs/trust.md", "docs/reliability.md"])
def test_every_test_that_a_page_names_is_there(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    named = re.findall(r"`(test_\w+)::(\w+)`", text)
    assert len(named) > 15
    for file in re.findall(r"`(?:tests/)?(test_\w+)(?:\.py)?`", text):
        assert (ROOT / "tests" / f"{file}.py").is_file(), file
    for file, test in named:
        source = (ROOT / "tests" / f"{file}.py").read_text(encoding="utf-8")
        assert re.search(rf"^\s*def {test}\(", source, re.MULTILINE), f"{file}::{test}"


RUNS_CODE = {
    "sft_play/data/build/build.py": {"pickle.loads"},  # between processes of this run, through a pipe of its own
    "sft_play/data/masks/sandbox.py": {"pickle.load"},  # the same
    "sft_play/commands/run_notebook.py": {"exec"},  # the cells of the notebook that the user names
}
"""Where the package runs code or unpickles without a list of names, and why it may."""


def calls(code: str) -> list[ast.Call]:
    return [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Call)]


def dangerous(call: ast.Call) -> str | None:
    """The name of a call that can run what it is given; None for others."""
    name = ast.unparse(call.func)
    words = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
    if name == "yaml.load" and words.get("Loader") == "yaml.BaseLoader":  # makes texts of everything
        return None
    if name in ("eval", "exec", "os.system", "os.popen", "pickle.load", "pickle.loads", "marshal.loads", "yaml.load",
                "yaml.unsafe_load", "yaml.full_load", "shelve.open", "joblib.load"):  # fmt: skip
        return name
    if name == "torch.load" and words.get("weights_only") != "True":
        return name
    is_dangerous = name.endswith(("extractall", "unpack_archive")) or words.get("shell") == "True"
    return name if is_dangerous else None


def test_nothing_of_the_package_runs_what_it_reads():
    for code in ("eval(x)", "torch.load(f)", "a.extractall(p)", "run(x, shell=True)", "yaml.load(x, Loader=yaml.L)"):
        assert dangerous(calls(code)[0]), code
    for code in ("torch.load(f, weights_only=True)", "model.eval()", "yaml.load(x, Loader=yaml.BaseLoader)"):
        assert not dangerous(calls(code)[0]), code
    files = sorted((ROOT / "sft_play").rglob("*.py"))
    assert len(files) > 200
    found: dict[str, set[str]] = {}
    for path in files:
        for call in calls(path.read_text(encoding="utf-8")):
            if name := dangerous(call):
                found.setdefault(str(path.relative_to(ROOT)), set()).add(name)
    assert found == RUNS_CODE


KERNEL = "owner/flash-attn"
NAMED: dict[str, dict[str, dict[str, object]]] = {
    "attention": {"config.json": {"attn_implementation": KERNEL}},
    "as its attribute": {"config.json": {"_attn_implementation": KERNEL, "_attn_implementation_internal": KERNEL}},
    "by part": {"config.json": {"attn_implementation": {"": KERNEL, "text_config": KERNEL}}},
    "a package that a kernel stands in for": {"config.json": {"attn_implementation": "flash_attention_2"}},
    "experts": {"config.json": {"experts_implementation": "sonicmoe", "_experts_implementation": "deepgemm"}},
    "kernels": {"config.json": {"use_kernels": True, "kernel_config": {"RMSNorm": KERNEL}}},
    "quantised": {"config.json": {"quantization_config": {"quant_method": "fbgemm_fp8"}}},
    "another base": {"config.json": {"_name_or_path": "owner/other"}},
    "code for answers": {"generation_config.json": {"custom_generate": "owner/answers", "penalty_alpha": 0.6}},
    "a tokenizer": {"tokenizer_config.json": {"auto_map": {"AutoTokenizer": ["owner/words--words.Words", None]},
                                              "tokenizer_class": "Words"}},
    "a processor": {"processor_config.json": {"auto_map": {"AutoProcessor": "owner/images--images.Images"}}},
    "an adapter": {"adapter_config.json": {"peft_type": "XLORA", "base_model_name_or_path": "owner/base",
                                           "adapters": {"one": "owner/adapter"}}},
}  # fmt: skip
"""What is added to a model's files: repositories from which transformers or PEFT could fetch and run something."""
REFUSED = ("quantised", "a tokenizer", "an adapter")
HOSTILE = "\x1b[31mred\x07\x9b2J\u202e"
"""A colour, a bell, a C1 control that clears the screen, and a mark that reverses what follows."""
CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e]")
QUOTED = {"model_type": f"llama{HOSTILE}", "rope_scaling": {"rope_type": HOSTILE}, "hidden_act": HOSTILE}
"""Fields of a config.json that libraries quote, in errors and in warnings of their own."""


def asked_of_hub(folder: Path, commands: list[list[str]]) -> list[dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.asked_of_hub", str(folder / "packages")], input=json.dumps(commands),
        capture_output=True, text=True, cwd=ROOT, env=clean_environment(SFT_PLAY_CACHE=str(folder / "cache")),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    shown = done.stderr + "".join(answer["said"] for answer in answers)  # libraries have handlers of their own
    assert not CONTROL.search(shown), repr(CONTROL.search(shown))
    return answers


def model_of_a_stranger(folder: Path, base: Path, more: dict[str, dict[str, object]]) -> Path:
    """A copy of a model with more in its files, and a run YAML that trains it."""
    shutil.copytree(base, folder / "model")
    for name, fields in more.items():
        file = folder / "model" / name
        known = json.loads(file.read_text()) if file.is_file() else {}
        file.write_text(json.dumps(known | fields))
    rows = write_rows(folder / "rows.jsonl", (chat(f"say {n}", "no.") for n in range(8)))
    train = {"effective_batch_size": 2, "max_steps": 1}
    return write_run(folder, folder / "model", rows, train=train, output={"name": "one"})


@pytest.mark.build
@pytest.mark.parametrize("verb", ["check", pytest.param("train", marks=pytest.mark.slow)])
def test_what_a_models_files_name_is_never_asked_of_the_hub(tmp_path, tiny_llama, verb):
    """Nor do control characters in them reach the terminal, whoever quotes them (`asked_of_hub`)."""
    cases = NAMED | {name: {"config.json": {name: value}} for name, value in QUOTED.items()}
    files = [model_of_a_stranger(tmp_path / str(n), tiny_llama, more) for n, more in enumerate(cases.values())]
    (tmp_path / "own").mkdir()
    own = ["train", "--config", str(model_of_a_stranger(tmp_path / "own", tiny_llama, {})), "train.device=cpu"]
    own.append(f"model.attn_implementation={KERNEL}@{'0' * 40}")  # the user's own word is asked of it, and noted
    *answers, asked = asked_of_hub(tmp_path, [*([verb, "--config", str(file)] for file in files), own])
    assert f"/kernels/{KERNEL}" in asked["asked"]
    for name, answer in zip(cases, answers, strict=True):
        is_refused = name in (*REFUSED, *QUOTED)
        assert answer["asked"] == [], (name, answer["said"])
        assert (answer["code"], "Traceback" in answer["said"]) == (2 * is_refused, False), answer["said"]


@pytest.mark.build
@pytest.mark.slow
def test_nor_what_the_files_of_a_received_run_name(tmp_path, tiny_llama):
    file = model_of_a_stranger(tmp_path, tiny_llama, {})
    modes = {"lora": ("adapter/adapter_config.json", NAMED["an adapter"]["adapter_config.json"]),
             "full": ("model/config.json", NAMED["attention"]["config.json"])}  # fmt: skip
    trained = asked_of_hub(tmp_path, [
        ["train", "--config", str(file), f"tuning.mode={mode}", f"output.name={mode}"] for mode in modes
    ])  # fmt: skip
    assert [one["code"] for one in trained] == [0, 0], trained
    for mode, (name, fields) in modes.items():
        config = tmp_path / "outputs" / mode / name
        config.write_text(json.dumps(json.loads(config.read_text()) | fields))
    # nobody types anything into the chat, so it ends once the model is loaded
    answers = asked_of_hub(tmp_path, [["chat", "--run", str(tmp_path / "outputs" / mode)] for mode in modes])
    assert [(one["code"], one["asked"]) for one in answers] == [(2, []), (0, [])], answers


@pytest.mark.build
def test_an_adapter_beside_the_weights_of_a_received_run_is_not_looked_for(tmp_path, tiny_llama):
    from sft_play.finished.respond import load_model_folder

    folder = shutil.copytree(tiny_llama, tmp_path / "model")
    (folder / "adapter_config.json").write_text(json.dumps(NAMED["an adapter"]["adapter_config.json"]))
    assert not getattr(load_model_folder(folder), "_hf_peft_config_loaded", False)


@pytest.mark.build
@pytest.mark.slow
def test_a_repository_with_an_adapter_beside_its_weights_is_trained_itself(tmp_path, tiny_llama):
    """transformers would load the base that the adapter names in its place."""
    cached = tmp_path / "hub" / "models--owner--mine"
    snapshot = shutil.copytree(tiny_llama, cached / "snapshots" / ("0" * 40))
    adapter = NAMED["an adapter"]["adapter_config.json"] | {"peft_type": "LORA"}
    (snapshot / "adapter_config.json").write_text(json.dumps(adapter))
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("0" * 40)
    config = model_of_a_stranger(tmp_path, tiny_llama, {})
    places = {"SFT_PLAY_CACHE": str(tmp_path / "cache"), "HF_HUB_CACHE": str(tmp_path / "hub")}
    environment = clean_environment(**places, HF_HUB_OFFLINE="1")
    words = [sys.executable, "-m", "sft_play", "train", "--config", str(config), "model.name=owner/mine"]
    done = subprocess.run(words, capture_output=True, text=True, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]


def test_every_librarys_record_is_shown_safely(capsys, monkeypatch):
    set_up_logging("check", stream=sys.stderr)
    library = logging.getLogger("somebody.else")
    monkeypatch.setattr(library, "handlers", [logging.StreamHandler(sys.stderr)])  # as transformers has one of its own
    library.warning("a model of type %s", HOSTILE)
    library.warning("lines\nand\ttabs stay")
    said = capsys.readouterr().err
    assert all(part in said for part in ("a model of type \\x1b[31mred\\x07\\x9b2J\\u202e", "lines\nand\ttabs stay"))
    assert not CONTROL.search(said)


@pytest.mark.parametrize("name", ["conversion/../../out", "gguf-py/gguf/../../../out"])
def test_a_file_of_the_converters_archive_stays_in_its_folder(tmp_path, name):
    from sft_play.finished.export.llama_cpp import _VENDOR_PREFIX, CONVERTER_FILE, unpack_converter

    with tarfile.open(tmp_path / "a.tar.gz", "w:gz") as package:
        for member in (CONVERTER_FILE, name):
            package.addfile(tarfile.TarInfo(_VENDOR_PREFIX + member), io.BytesIO())
    with pytest.raises(ConfigError, match="cannot be unpacked"):
        unpack_converter(tmp_path / "a.tar.gz", tmp_path / "in" / "it")
    assert not list(tmp_path.rglob("out"))


SECRETS = {"HF_TOKEN": "correct-horse-battery-staple-1", "WANDB_API_KEY": "correct-horse-battery-staple-2"}


@pytest.mark.build
def test_no_token_of_the_environment_reaches_any_file_of_a_trained_run(tmp_path, tiny_llama, succeed, monkeypatch):
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    rows = [chat(f"say {value} {n}", "no.") for n in range(6) for value in SECRETS.values()]
    data = write_rows(tmp_path / "rows.jsonl", rows)
    train = {"effective_batch_size": 2, "bf16": False, "report_to": ["tensorboard"]}
    sections = {"data": {"val_fraction": 0.3}, "train": train, "eval": {"generate_rows": 2, "max_new_tokens": 4}}
    path = write_run(tmp_path, tiny_llama, data, **sections, output={"name": "one"})
    path.write_text(f"# {SECRETS['HF_TOKEN']}\n{path.read_text()}")
    said = succeed("train", "--config", str(tmp_path / "run.yaml"))
    files = [path for path in (tmp_path / "outputs").rglob("*") if path.is_file()]
    names = {path.name.partition(".tfevents")[0] for path in files}
    needed = {"README.md", "report.html", "manifest.json", "train.log", "metrics.jsonl", "config.yaml", "events.out"}
    assert needed <= names
    holding = [str(path) for path in files if any(value.encode() in path.read_bytes() for value in SECRETS.values())]
    assert holding == []
    assert not any(value in said for value in SECRETS.values())


def test_a_traceback_of_ours_hides_tokens_too(tmp_path):
    code = (
        "import sys; sys.argv = ['sft-play', 'runs']\nimport sft_play.entry as entry\nfrom sft_play import cli\n"
        "import os\ndef broken(words): raise RuntimeError('https://me:hunter2hunter2@host ' + os.environ['HF_TOKEN'])\n"
        "cli.main = broken\nentry.main()\n"
    )
    words, environment = [sys.executable, "-c", code], clean_environment(**SECRETS)
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, env=environment)
    assert (done.returncode, "Traceback" in done.stderr, SECRETS["HF_TOKEN"] in done.stderr) == (1, True, False)
    assert "RuntimeError: https://***@host ***" in done.stderr


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "LOCALHOST"])
def test_a_server_of_this_machine_alone_knows_its_names(host):
    names = allowed_host_names(host)
    for asked in ("localhost", "localhost:80", "127.0.0.1:8000", "[::1]:1", "[::1]"):
        assert is_local_request(names, asked, None), asked
        assert is_local_request(names, asked, f"http://{asked}"), asked
    for other in ("evil.example:80", "localhost.evil.example", "127.0.0.1.evil.example", "", "[", "a b",
                  "evil.example#localhost", "localhost@evil.example", "evil.example/localhost"):  # fmt: skip
        assert not is_local_request(names, other, None), other
        assert not is_local_request(names, "localhost", f"http://{other}"), other
    for origin in ("null", "", "file://", "localhost"):
        assert not is_local_request(names, "localhost", origin), origin
    for open_host in ("0.0.0.0", "192.168.0.7", "gpu-node"):  # asked under any name
        assert is_local_request(allowed_host_names(open_host), "gpu-node:8000", "http://elsewhere.example")


def test_what_listens_listens_on_this_machine_unless_asked():
    from sft_play.finished import serve

    assert inspect.signature(tensorboard.start_server).parameters["host"].default == "127.0.0.1" == serve.DEFAULT_HOST
