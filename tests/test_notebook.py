"""make run-notebook: every rank runs the cells in order, rank 0 prints; what fails is told by cell and line."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sft_play.commands import run_notebook as notebook
from sft_play.errors import ConfigError
from sft_play.machine.hardware import detect_hardware
from tests import warm
from tests.conftest import ROOT
from tests.processes import free_port

EXAMPLES = ROOT / "examples"
TOOLS = Path(sys.executable).parent


def book(folder: Path, *cells: str, **changes: Any) -> Path:
    code = {"cell_type": "code", "metadata": {}, "execution_count": None, "outputs": []}
    made = [{**code, "cell_type": "markdown", "source": "# text"}, *({**code, "source": text} for text in cells)]
    path = folder / "work.ipynb"
    path.write_text(json.dumps({"cells": made, "metadata": {}, "nbformat": 4, "nbformat_minor": 4, **changes}))
    return path


def test_cells_are_read_in_order_with_lines_as_text_or_list(tmp_path):
    path = book(tmp_path, "a = 1\n", "", " \n", "b = (7\n% 4)")
    data = json.loads(path.read_text())
    data["cells"][1]["source"] = ["a = 1\n", "a += 1"]
    path.write_text(json.dumps(data))
    cells = notebook.read_notebook(path)
    assert [code.co_filename for code in cells] == ["work.ipynb, cell 1", "work.ipynb, cell 4"]
    values: dict[str, Any] = {}
    for code in cells:
        exec(code, values)
    assert (values["a"], values["b"]) == (2, 3)


@pytest.mark.parametrize(("cell", "line"), [
    ("!pip install x\na = 1", "line 1: !pip install x"), ("%%bash\nls", "line 1: %%bash"),
    ("a = 1\nfiles = !ls", "line 2: files = !ls"), ("print?", "line 1: print?"), ("b = 2\nif b\n", "line 2: if b"),
])  # fmt: skip
def test_what_is_not_python_is_refused_before_anything_runs(cell, line, tmp_path):
    with pytest.raises(ConfigError) as caught:
        notebook.read_notebook(book(tmp_path, "b = 7 % 4", cell))
    assert f"cell 2, {line} is not Python" in str(caught.value)


@pytest.mark.parametrize(("content", "said"), [
    (b"{", "format 4"), (b"\xff\xfe", "is not UTF-8"), (b"[]", "format 4"), (None, "does not exist"),
    (b'{"nbformat": 3, "worksheets": []}', "format 4"), (b'{"nbformat": 4, "cells": 5}', "format 4"),
    (b'{"nbformat": 4, "cells": [], "metadata": {}}', "has no code cell"),
    (b'{"nbformat": 4, "cells": [null, {"cell_type": "code"}]}', "format 4"),
])  # fmt: skip
def test_what_is_no_notebook_is_one_message_and_exit_2(content, said, tmp_path, command):
    path = tmp_path / "work.ipynb"
    if content is not None:
        path.write_bytes(content)
    code, printed = command("run-notebook", "--notebook", str(path))
    assert (code, printed.count("error:"), said in printed) == (2, 1, True), printed


def run(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    given = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **environment}
    return subprocess.run(words, cwd=ROOT, env=given, text=True, timeout=600, capture_output=True)


def test_every_rank_runs_every_cell_and_rank_0_prints_until_one_fails(tmp_path):
    path = book(
        tmp_path,
        "import os, time\nfrom pathlib import Path\nrank = int(os.environ['RANK'])\nprint('hello from', rank)",
        "Path(f'ran{rank}').write_text(__name__)\ndisplay(rank + 40)",
        "while not Path(f'ran{1 - rank}').exists():\n    time.sleep(0.05)", "rank + 50",
        "def broken(number):\n    return 1 / number\n\nbroken(0)", "Path(f'never{rank}').touch()",
    )  # fmt: skip
    ended = run("make", f"VENV={TOOLS.parent}", "run-notebook", f"NOTEBOOK={path}", "NPROC=2", "JSON=1")
    answer, printed = json.loads(ended.stdout), ended.stderr  # with JSON=1 its output is one object
    assert (answer["ok"], answer["kind"], answer["exit"]) == (False, "failed", 1)
    assert printed.count("hello from") == 1
    assert "hello from 0\n40\n" in printed
    assert sorted(item.name for item in tmp_path.iterdir()) == ["ran0", "ran1", "work.ipynb"]
    assert (tmp_path / "ran1").read_text() == "__main__"
    said = printed.partition("Traceback")[2]
    assert 'File "work.ipynb, cell 5", line 4, in <module>\n    broken(0)' in said
    assert 'File "work.ipynb, cell 5", line 2, in broken\n    return 1 / number' in said
    assert re.search(r"\[run-notebook\] error: rank [01] of 2", said)
    assert "ended with ZeroDivisionError: division by zero" in said


def test_the_example_notebook_is_valid_and_holds_no_outputs():
    data = json.loads((EXAMPLES / "train_with_accelerator.ipynb").read_text(encoding="utf-8"))
    assert (data["nbformat"], data["nbformat_minor"]) == (4, 5)
    assert len({cell["id"] for cell in data["cells"]}) == len(data["cells"]) > 5
    code = [cell for cell in data["cells"] if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code)
    assert all(set(cell) == {"cell_type", "id", "metadata", "source"} for cell in data["cells"] if cell not in code)
    assert len(notebook.read_notebook(EXAMPLES / "train_with_accelerator.ipynb")) == len(code)


def check_example(answer: subprocess.CompletedProcess[str], folder: Path) -> list[float]:
    assert answer.returncode == 0, answer.stdout
    losses = [float(text) for text in re.findall(r"^step \d+: loss ([\d.]+)$", answer.stdout, re.MULTILINE)]
    assert len(losses) == 3, answer.stdout  # once, not once per rank
    assert sorted(item.name for item in folder.parent.iterdir() if item.suffix != ".yaml") == [folder.name]
    assert (folder / "adapter_model.safetensors").is_file()
    return losses


SCRIPT = "examples/train_with_accelerator.py"
SHORT = ("--steps", "3", "--batch", "2")


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    folder = tmp_path_factory.mktemp("alone") / "out"
    return check_example(run(warm.python(), SCRIPT, *SHORT[:3], "4", "--save", str(folder)), folder)


def test_the_example_runs_under_torchrun(tmp_path):
    words = (warm.python(), "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", SCRIPT)
    check_example(run(*words, *SHORT, "--save", str(tmp_path / "out")), tmp_path / "out")


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["accelerate", "deepspeed"])
@pytest.mark.parametrize("launcher", ["torchrun", "accelerate", "deepspeed"])
def test_the_example_runs_under_every_launcher(launcher, backend, alone, tmp_path):
    if detect_hardware().gpus:
        pytest.skip("the ranks would take GPUs")
    port = str(free_port())
    words = {
        "torchrun": ["torchrun", "--standalone", "--nproc-per-node", "2"],
        "accelerate": ["accelerate", "launch", "--multi_gpu", "--num_processes", "2", "--main_process_port", port],
        "deepspeed": ["deepspeed", "--num_gpus", "2", "--master_port", port],
    }[launcher]
    program = shutil.which(words[0], path=str(TOOLS))
    if program is None:
        pytest.skip(f"{words[0]} is not beside this Python")
    config = tmp_path / "my.yaml"
    config.write_text(f"backend: {backend}\n")
    path = f"{TOOLS}{os.pathsep}{os.environ['PATH']}"
    answer = run(
        program, *words[1:], SCRIPT, *SHORT, "--config", str(config), "--save", str(tmp_path / "out"),
        PATH=path, DS_ACCELERATOR="cpu",
    )  # fmt: skip
    assert check_example(answer, tmp_path / "out") == pytest.approx(alone, abs=1e-5)
