"""The wheel: built, installed into an empty folder, and used where no checkout is near; what it prints can be typed."""

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT, chat, clean_environment, write_rows


class Installed:
    """A folder with the installed wheel, and an empty one, the current folder of commands."""

    def __init__(self, folder: Path) -> None:
        self.site, self.home = folder / "site", folder / "home"
        self.home.mkdir()
        (folder / "source").mkdir()
        for name in ("pyproject.toml", "README.md", "LICENSE"):
            shutil.copy(ROOT / name, folder / "source")
        shutil.copytree(ROOT / "sft_play", folder / "source" / "sft_play", ignore=shutil.ignore_patterns("__pycache__"))
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
        build = [*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", str(folder), str(folder / "source")]
        subprocess.run(build, check=True, timeout=300)
        (wheel,) = folder.glob("sft_play-*.whl")
        assert wheel.stat().st_size < 7_000_000
        install = [*pip, "install", "--no-deps", "--no-index", "--target", str(self.site), str(wheel)]
        subprocess.run(install, check=True, timeout=300)

    def run(self, line: str, *, code: int = 0) -> str:
        """What a line that a person types prints: `sft-play` is the program that was installed."""
        program, *rest = shlex.split(line)
        assert program == "sft-play", line
        words = [sys.executable, str(self.site / "bin" / program), *rest]
        environ = clean_environment(PYTHONPATH=str(self.site), WHY="")
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        answer = subprocess.run(words, cwd=self.home, env=environ, timeout=600, **streams)
        assert answer.returncode == code, answer.stdout
        assert not re.search(r"(?<!\w)make (?!\S+ in a checkout)", answer.stdout), answer.stdout
        assert str(ROOT) not in answer.stdout.replace(sys.executable, "")
        return answer.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    return Installed(tmp_path_factory.mktemp("package"))


def next_command(printed: str, word: str) -> str:
    """The command that a line `WORD: sft-play …` names."""
    found = re.search(rf"{word}: (sft-play .*?)(    |\n|$)", printed)
    assert found is not None, printed
    return found[1]


def test_an_installed_package_plans_a_model_without_a_checkout(installed):
    planned = installed.run("sft-play plan --model Qwen/Qwen2.5-0.5B-Instruct --hardware 1xRTX3060 train.max_steps=9")
    assert "9 steps" in planned
    new = next_command(planned, "Next, with your rows")
    assert new == "sft-play new --model Qwen/Qwen2.5-0.5B-Instruct --data my.jsonl --hardware 1xRTX3060"
    assert "make bench in a checkout" in installed.run("sft-play bench", code=2)
    code = f"import sys; sys.path[:0] = [{str(installed.site)!r}]; from sft_play import entry; entry.main()"
    bare = subprocess.run([sys.executable, "-IS", "-c", code, "plan"], capture_output=True, text=True)
    assert f"install what it needs there: {sys.executable} -m pip install sft-play\n" in bare.stderr


@pytest.mark.slow
def test_an_installed_package_goes_from_rows_to_a_trained_model_by_the_commands_that_it_prints(installed):
    write_rows(installed.home / "my rows.jsonl", (chat(f"what is {n}?", f"it is {n}.") for n in range(64)))
    planned = installed.run("sft-play plan")
    assert "2,600 rows of sft_play/starter/data/train.jsonl" in planned
    assert (
        next_command(planned, "Start") == f"sft-play train --config {installed.site}/sft_play/starter/run_starter.yaml"
    )
    written = installed.run("sft-play new --model sft-play/starter-base --data 'my rows.jsonl'")
    start = next_command(installed.run(next_command(written, "Next")), "Start")
    assert "Ready to train" in installed.run("sft-play check --config my_rows.yaml")
    trained = installed.run(f"{start} train.max_steps=2 output.name=first")
    assert next_command(trained, "Talk to it") == "sft-play chat --run outputs/first"
    starter = installed.run("sft-play train train.max_steps=2 eval.generate_rows=2 output.name=starter")
    assert "held out: 100 val and 300 test" in starter
    ranks = installed.run(
        "sft-play train-distributed --nproc 2 --config my_rows.yaml train.max_steps=1 output.name=two"
    )
    assert "Written to: outputs/two" in ranks
    assert "Written to: " in installed.run(next_command(installed.run("sft-play runs"), "Next"))
    stopped = installed.run("sft-play train --config my_rows.yaml train.stop_after_steps=1 output.name=half")
    assert "Written to: outputs/half" in installed.run(next_command(stopped, "resume with"))
