"""What a start costs: processor seconds, and seconds to the first step, of this checkout and of another one in turns.

    python -m benchmarks.startup --before FOLDER --out startup_cpu.json

FOLDER is a checkout of the commit to compare with. A tiny model takes three steps: every command is started once in
each checkout before anything is counted (bytecode, rows and measured shapes are then cached), so what is counted is a
second start. Rounds alternate, A B A B; figures are medians. `cpu_s` are processor seconds of the command and all that
it started, `first_step_s` seconds until the line of the first step, `first_word_s` until any line. Seconds on a clock
depend on what else runs on the machine; processor seconds hardly do.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from sft_play.machine.hardware import detect_hardware
from sft_play.process.environment import independent_environment
from sft_play.runs.files import write_json
from sft_play.runs.folder import installed_versions

ROOT = Path(__file__).resolve().parent.parent
COMMANDS = {
    "train": ["train", "--config", "{folder}/run.yaml"],
    "train, empty data file": ["train", "--config", "{folder}/empty.yaml"],
    "train-distributed, 2 CPU ranks": ["train-distributed", "--config", "{folder}/run.yaml", "--nproc", "2"],
    "train-distributed, empty data file": ["train-distributed", "--config", "{folder}/empty.yaml", "--nproc", "2"],
    "plan": ["plan", "--config", "{folder}/run.yaml"],
    "plan, a class that the tables lack": ["plan", "--config", "{folder}/other.yaml"],
    "check": ["check", "--config", "{folder}/run.yaml"],
}
RUN = """\
model: {{name: {model}, max_seq_len: 64}}
data: {{train_path: {rows}, val_fraction: 0.1}}
train: {{effective_batch_size: 8, max_steps: 3, report_to: [], logging_steps: 1}}
eval: {{steps: 0}}
output: {{dir: {folder}/outputs}}
"""
OTHER = {
    "architectures": ["BitNetForCausalLM"],
    "model_type": "bitnet",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
}


@dataclass(frozen=True)
class Start:
    """One start of a command."""

    checkout: str
    command: str
    round: int
    code: int
    cpu_s: float
    wall_s: float
    first_word_s: float | None
    first_step_s: float | None


def make_inputs(folder: Path) -> None:
    """A tiny model, its rows, an empty file, and the run YAMLs of the commands."""
    from benchmarks.starter_base import make_model, make_tokenizer
    from benchmarks.starter_corpus import corpus_documents

    make_tokenizer(corpus_documents()).save_pretrained(folder / "model")
    make_model().save_pretrained(folder / "model")
    (folder / "other").mkdir()
    (folder / "other" / "config.json").write_text(json.dumps(OTHER))
    turns = [("user", "what is {0} + {0}?"), ("assistant", "it is {0} and {0}.")]
    rows = [{"messages": [{"role": role, "content": text.format(n)} for role, text in turns]} for n in range(64)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "empty.jsonl").touch()
    for name, model, file in (("run", "model", "rows"), ("empty", "model", "empty"), ("other", "other", "rows")):
        text = RUN.format(model=folder / model, rows=folder / f"{file}.jsonl", folder=folder)
        (folder / f"{name}.yaml").write_text(text)


def start(checkout: str, root: Path, command: str, number: int, environment: Mapping[str, str], folder: Path) -> Start:
    """Run a command to its end."""
    words = [word.format(folder=folder) for word in COMMANDS[command]]
    began = time.monotonic()
    first_word = first_step = None
    with subprocess.Popen(
        [sys.executable, "-m", "sft_play", *words],
        env={**environment, "PYTHONPATH": str(root), "PYTHONPYCACHEPREFIX": str(folder / f"bytecode {checkout}")},
        cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
    ) as process:  # fmt: skip
        assert process.stdout is not None
        for line in process.stdout:
            first_word = first_word or time.monotonic() - began
            if "] step 1/" in line:
                first_step = first_step or time.monotonic() - began
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    took = time.monotonic() - began
    cpu = used.ru_utime + used.ru_stime
    return Start(checkout, command, number, process.returncode, cpu, took, first_word, first_step)


def summary(starts: list[Start]) -> dict[str, dict[str, dict[str, float | None]]]:
    """Medians by command and figure, of both checkouts, and the second's over the first's."""
    rows: dict[str, dict[str, dict[str, float | None]]] = {}
    for command in dict.fromkeys(one.command for one in starts):
        for figure in ("cpu_s", "wall_s", "first_word_s", "first_step_s"):
            medians: dict[str, float | None] = {}
            for checkout in dict.fromkeys(one.checkout for one in starts):
                of_it = [getattr(one, figure) for one in starts if (one.command, one.checkout) == (command, checkout)]
                values = [value for value in of_it if value is not None]
                medians[checkout] = round(statistics.median(values), 2) if values else None
            before, now = medians.get("before"), medians.get("now")
            if before and now:
                medians["ratio"] = round(now / before, 2)
            rows.setdefault(command, {})[figure] = medians
    return rows


def main() -> None:
    """Start every command in turns, and write what it cost."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--before", type=Path, help="a checkout to compare with; without it, only this one")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--commands", nargs="*", default=list(COMMANDS), choices=list(COMMANDS), metavar="COMMAND")
    parser.add_argument("--out", default=os.environ.get("OUT") or "startup.json")
    options = parser.parse_args()
    checkouts = {"before": options.before.resolve()} if options.before else {}
    checkouts["now"] = ROOT
    starts: list[Start] = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        make_inputs(folder)
        environment = {**independent_environment(os.environ), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        for number in range(options.rounds + 1):
            for command in options.commands:
                for checkout, root in checkouts.items():
                    own = {**environment, "SFT_PLAY_CACHE": str(folder / f"cache {checkout}")}
                    one = start(checkout, root, command, number, own, folder)
                    sys.stdout.write(f"{json.dumps(asdict(one))}\n")
                    sys.stdout.flush()
                    starts += [one] if number else []  # round 0 compiles bytecode and fills caches
    result = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": detect_hardware().as_json(),
        "versions": installed_versions(),
        "summary": summary(starts),
        "starts": [asdict(one) for one in starts],
    }
    write_json(Path(options.out).absolute(), result)
    sys.stdout.write(json.dumps(result["summary"], indent=1) + "\n")


if __name__ == "__main__":
    main()
