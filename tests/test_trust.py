"""docs/trust.md: what strangers' files, and pages in a browser, cannot do. Every test that the page names exists."""

from __future__ import annotations

import ast
import io
import json
import re
import subprocess
import sys
import tarfile

import pytest

from sft_play.facts.network import is_asked_from_here, names_of
from tests.conftest import ROOT, chat, clean_environment

PAGES = ("docs/trust.md", "docs/reliability.md")


@pytest.mark.parametrize("page", PAGES)
def test_every_test_that_a_page_names_is_there(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    files = set(re.findall(r"`tests/(test_\w+)\.py`|`(test_\w+)`(?!::)", text))
    named = re.findall(r"`(test_\w+)::(\w+)`", text)
    assert len(named) > 15
    for file in {one or other for one, other in files}:
        assert (ROOT / "tests" / f"{file}.py").is_file(), file
    for file, test in named:
        source = (ROOT / "tests" / f"{file}.py").read_text(encoding="utf-8")
        assert re.search(rf"^\s*def {test}\(", source, re.MULTILINE), f"{file}::{test}"


# --- the package's own code -------------------------------------------------------------------------------------------

RUNS_CODE = {
    "sft_play/data/build/workers.py": {"pickle.loads"},  # between processes of this run, through a pipe of its own
    "sft_play/commands/run_notebook.py": {"exec"},  # the cells of the notebook that the user names
}
"""Where the package runs code or unpickles without a list of names, and why it may."""


def calls(tree: ast.AST) -> list[ast.Call]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.Call)]


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
    if name.endswith(("extractall", "unpack_archive")) or words.get("shell") == "True":
        return name
    return None


def test_nothing_of_the_package_runs_what_it_reads():
    files = sorted((ROOT / "sft_play").rglob("*.py"))
    assert len(files) > 200
    found: dict[str, set[str]] = {}
    for path in files:
        for call in calls(ast.parse(path.read_text(encoding="utf-8"))):
            if name := dangerous(call):
                found.setdefault(str(path.relative_to(ROOT)), set()).add(name)
    assert found == RUNS_CODE


def test_the_search_finds_what_it_looks_for():
    for code in ("eval(x)", "torch.load(f)", "torch.load(f, weights_only=False)", "a.extractall(p)",
                 "subprocess.run(x, shell=True)", "yaml.load(x)", "yaml.load(x, Loader=yaml.Loader)"):  # fmt: skip
        assert dangerous(calls(ast.parse(code))[0]), code
    for code in ("torch.load(f, weights_only=True)", "model.eval()", "json.load(f)", "subprocess.run([x])",
                 "yaml.load(x, Loader=yaml.BaseLoader)"):  # fmt: skip
        assert not dangerous(calls(ast.parse(code))[0]), code


# --- archives ---------------------------------------------------------------------------------------------------------


def test_a_file_of_the_converters_archive_stays_in_its_folder(tmp_path):
    from sft_play.finished.export.llama_cpp import _VENDORED, CONVERTER, unpack

    with tarfile.open(tmp_path / "a.tar.gz", "w:gz") as package:
        for name in (CONVERTER, "conversion/../../out", "gguf-py/gguf/../../../out", "conversion/good.py"):
            facts = tarfile.TarInfo(_VENDORED + name)
            facts.size = 1
            package.addfile(facts, io.BytesIO(b"x"))
    unpack(tmp_path / "a.tar.gz", tmp_path / "in" / "it")
    written = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    assert written == {"a.tar.gz", f"in/it/{CONVERTER}", "in/it/conversion/good.py"}


# --- tokens -----------------------------------------------------------------------------------------------------------

SECRETS = {"HF_TOKEN": "correct-horse-battery-staple-1", "WANDB_API_KEY": "correct-horse-battery-staple-2"}


@pytest.mark.build
def test_no_token_of_the_environment_reaches_any_file_of_a_trained_run(tmp_path, tiny_llama, command, monkeypatch):
    """Curves, card, report and logs too: a data file, the config and the row that is shown spell the tokens."""
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    rows = [chat(f"say {value} {n}", "no.") for n in range(6) for value in SECRETS.values()]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "run.yaml").write_text(
        f"# {SECRETS['HF_TOKEN']}\nmodel: {{name: {tiny_llama}, max_seq_len: 64}}\n"
        f"data: {{train_path: {tmp_path}/rows.jsonl, val_fraction: 0.3}}\ntuning: {{mode: lora}}\n"
        "train: {effective_batch_size: 2, max_steps: 2, bf16: false}\n"
        f"eval: {{generate_rows: 2, max_new_tokens: 4}}\noutput: {{dir: {tmp_path}/outputs, name: one}}\n"
    )
    code, said = command("train", "--config", str(tmp_path / "run.yaml"))
    assert code == 0, said
    files = [path for path in (tmp_path / "outputs").rglob("*") if path.is_file()]
    names = {path.name for path in files}
    assert {"README.md", "report.html", "manifest.json", "train.log", "metrics.jsonl", "config.yaml"} <= names
    assert any(name.startswith("events.out") for name in names)
    holding = [str(path) for path in files if any(value.encode() in path.read_bytes() for value in SECRETS.values())]
    assert holding == []
    assert not any(value in said for value in SECRETS.values())


def test_a_traceback_of_ours_hides_tokens_too(tmp_path):
    code = (
        "import sys; sys.argv = ['sft-play', 'runs']\nimport sft_play.entry as entry\nfrom sft_play import cli\n"
        "import os\ndef broken(words): raise RuntimeError('https://me:hunter2hunter2@host ' + os.environ['HF_TOKEN'])\n"
        "cli.main = broken\nentry.main()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, env=clean_environment(**SECRETS)
    )
    assert done.returncode == 1
    assert "Traceback" in done.stderr
    assert "RuntimeError: https://***@host ***" in done.stderr
    assert SECRETS["HF_TOKEN"] not in done.stderr


# --- who asks ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "127.9.9.9", "LOCALHOST"])
def test_a_server_of_this_machine_alone_knows_its_names(host):
    names = names_of(host)
    for asked in (
        "localhost",
        "localhost:80",
        "127.0.0.1:8000",
        "[::1]:1",
        "[::1]",
        host if ":" not in host else "[::1]",
    ):
        assert is_asked_from_here(names, asked, None), asked
        assert is_asked_from_here(names, asked, f"http://{asked}"), asked
    others = ("evil.example", "evil.example:80", "localhost.evil.example", "127.0.0.1.evil.example", "", "[", "a b",
              "evil.example#localhost", "localhost@evil.example", "evil.example/localhost")  # fmt: skip
    for other in others:
        assert not is_asked_from_here(names, other, None), other
        assert not is_asked_from_here(names, "localhost", f"http://{other}"), other
    for origin in ("null", "", "file://", "localhost"):
        assert not is_asked_from_here(names, "localhost", origin), origin


def test_a_server_that_others_may_reach_is_asked_under_any_name():
    for host in ("0.0.0.0", "::", "192.168.0.7", "gpu-node"):
        assert names_of(host) is None
        assert is_asked_from_here(names_of(host), "gpu-node:8000", "http://elsewhere.example")


def test_what_listens_listens_on_this_machine_unless_asked():
    """Every default of an address in the package is the loopback's."""
    import inspect

    from sft_play.finished.answer import serve
    from sft_play.launch import tensorboard

    assert inspect.signature(tensorboard.start).parameters["host"].default == "127.0.0.1" == serve.DEFAULT_HOST
