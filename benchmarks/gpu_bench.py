"""`make bench` on a GPU: 8B and 4B shapes, every mode, 2,048 and 8,192 tokens, mixed chats and full blocks, beside TRL.

    python -m benchmarks.gpu_bench --out gpu_bench.json          # at most 25 minutes; --minutes 60 for more of them
    python -m benchmarks.gpu_bench --only 4b-lora-2048-mixed,4b-full-2048-mixed --minutes 4 --longest 60

Weights are random, of the published shapes, so nothing is downloaded; they take 24 GiB of disk in --folder. Each trial
is a run of ours and one of TRL's on the same rows, with our micro-batch for both unless --tries lets TRL try others.
The most telling trials come first, or those of --only in their order; those that the time does not reach are written as
such, and `--again` goes on with them. The file is written after every trial, with the predicted peak and speed beside
the measured ones.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import os
import shutil
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.steps import material
from benchmarks.steps.bench import compare
from sft_play.errors import ConfigError, DoesNotFit, HardwareError, SftPlayError
from sft_play.log import one_line
from sft_play.machine.hardware import detect_hardware
from sft_play.models.config_json import KNOWN_MODELS
from sft_play.runs.files import write_json
from sft_play.runs.folder import installed_versions
from sft_play.spelling import did_you_mean
from sft_play.text import GIB

MODELS = {"8b": "Qwen/Qwen3-8B", "4b": "Qwen/Qwen3-4B"}
MODES, LENGTHS, KINDS = ("qlora", "lora", "full"), (2048, 8192), ("mixed", "blocks")
TOKENS_PER_STEP = 32_768
"""Of full rows: 16 rows of 2,048 tokens, 4 of 8,192."""
STEPS, WARMUP = 5, 2
ROWS = (STEPS + WARMUP) * 16
ROOM = 2 * GIB
"""Beside the weights, while they are made on the GPU."""
LONGEST_S = 240.0
"""A trial is not begun with less time left than the longest so far took, or than this before the first has ended;
--longest says another time for all."""


@dataclass(frozen=True)
class Trial:
    """One cell of the table."""

    model: str
    mode: str
    length: int
    kind: str
    compiled: bool = False

    @property
    def name(self) -> str:
        """As in the file."""
        return f"{self.model}-{self.mode}-{self.length}-{self.kind}{'-compiled' if self.compiled else ''}"


def trials() -> list[Trial]:
    """All 24, and two with compiled blocks: first six in which every mode, length, kind and model occurs at least
    twice, then the compiled ones, to be compared with two of these."""
    every = [Trial(*cell) for cell in itertools.product(MODELS, MODES, LENGTHS, KINDS)]
    first = [
        Trial("8b", "lora", 2048, "mixed"), Trial("8b", "qlora", 8192, "blocks"), Trial("4b", "full", 2048, "mixed"),
        Trial("4b", "lora", 8192, "blocks"), Trial("8b", "qlora", 2048, "mixed"), Trial("4b", "full", 8192, "blocks"),
    ]  # fmt: skip
    compiled = [replace(trial, compiled=True) for trial in (first[0], first[5])]
    return [*first, *compiled, *(trial for trial in every if trial not in first)]


def select_trials(names: str | None) -> list[Trial]:
    """The trials of these names, separated by commas, in their order; all of them without names.

    Raises:
        ConfigError: there is no such trial.
    """
    every = {trial.name: trial for trial in trials()}
    if names is None:
        return list(every.values())
    unknown = [name for name in names.split(",") if name not in every]
    if unknown:
        hint = did_you_mean(unknown[0], every) or f"there are: {', '.join(every)}"
        raise ConfigError(f"--only: there is no trial {one_line(unknown[0])}; {hint}")
    return [every[name] for name in names.split(",")]


def write_model(place: Path, name: str) -> None:
    """Random bf16 weights of a published shape, with a small tokenizer of our own; made on the GPU where it holds them,
    else on the CPU, in minutes."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from benchmarks.starter_base import make_tokenizer
    from benchmarks.starter_corpus import corpus_documents

    folder = place.with_name(f"{place.name}.writing")  # a folder with a config and no weights would pass as made
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    tokenizer = make_tokenizer(corpus_documents(400))
    tokenizer.save_pretrained(folder)
    ends = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    (folder / "config.json").write_text(json.dumps({**KNOWN_MODELS[name].config, **ends}), encoding="utf-8")
    torch.manual_seed(material.SEED)
    config = AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        size = 2 * AutoModelForCausalLM.from_config(config).num_parameters()
    free = torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else 0
    with torch.device("cuda" if free > size + ROOM else "cpu"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    del model
    torch.cuda.empty_cache()
    folder.rename(place)


def write_rows(folder: Path, length: int, kind: str) -> Path:
    """Chats whose median is about a tenth of the length, or answers that fill it: a word is a token and more."""
    path = folder / f"{kind}-{length}.jsonl"
    if not path.is_file():
        answer = (length / 12, 1.0) if kind == "mixed" else (2.0 * length, 0.0)
        material.write_chats(path, ROWS, words_of_answer=answer)
    return path


def config_of(trial: Trial, folder: Path) -> Path:
    """The run YAML of a trial."""
    return material.write_config(
        folder / f"{trial.name}.yaml", model=folder / trial.model, rows=write_rows(folder, trial.length, trial.kind),
        seq_len=trial.length, tuning={"mode": trial.mode}, plan={"trace": False},
        train={"effective_batch_size": TOKENS_PER_STEP // trial.length, "compile": trial.compiled},
    )  # fmt: skip


def measured(trial: Trial, folder: Path, *, tries: bool) -> dict[str, Any]:
    """A trial's figures, or why it has none."""
    began = time.monotonic()
    try:
        if not (folder / trial.model / "config.json").is_file():
            write_model(folder / trial.model, MODELS[trial.model])
        compared = compare(
            config_of(trial, folder), peer="trl", steps=STEPS, warmup=WARMUP, rounds=1, tries=tries, progress=_say
        )
        result = {"status": "measured", **compared.as_json()}
        _say("\n".join(compared.lines()))
    except DoesNotFit as error:
        result = {"status": "does not fit", "reason": str(error)}
    except Exception as error:  # one trial must not end the bench
        logging.getLogger(__name__).warning("%s failed", trial.name, exc_info=True)
        result = {"status": "failed", "reason": str(error) or type(error).__name__}
    return {**result, "seconds": round(time.monotonic() - began, 1)}


def main() -> int:
    """All trials that the time allows; the file is written after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("gpu_bench.json"))
    parser.add_argument(
        "--folder", type=Path, help="where models and rows are made, and kept; default: a temporary one"
    )
    parser.add_argument("--minutes", type=float, default=25.0)
    parser.add_argument("--only", metavar="NAMES", help="these trials, separated by commas, such as 4b-lora-2048-mixed")
    parser.add_argument("--longest", type=float, metavar="SECONDS", help="what the longest trial is taken to need")
    parser.add_argument("--tries", action="store_true", help="let TRL try micro-batches, three more starts a trial")
    parser.add_argument("--again", action="store_true", help="keep what OUT has measured and go on")
    options = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    logging.getLogger("benchmarks.steps").setLevel(logging.INFO)  # the last lines of a side that fails
    began, machine = time.monotonic(), detect_hardware()
    try:
        asked = select_trials(options.only)
        if not machine.gpus:
            raise HardwareError("gpu_bench needs a GPU, and none is seen here; make bench runs on a CPU")
    except SftPlayError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    out = options.out.absolute()
    book: dict[str, Any] = json.loads(out.read_text(encoding="utf-8")) if options.again and out.is_file() else {}
    book |= {"machine": machine.as_json(), "versions": installed_versions(), "trials": book.get("trials", {})}
    with tempfile.TemporaryDirectory(prefix="sft-play-gpu-bench-") as workdir:
        folder = options.folder or Path(workdir)
        folder.mkdir(parents=True, exist_ok=True)
        os.environ["SFT_PLAY_CACHE"] = str(folder / "cache")
        longest = options.longest or LONGEST_S
        for trial in asked:
            if book["trials"].get(trial.name, {}).get("status") == "measured":
                continue
            if time.monotonic() - began + longest > options.minutes * 60:
                book["trials"][trial.name] = {"status": "not reached"}
            else:
                _say(f"{trial.name}:")
                book["trials"][trial.name] = measured(trial, folder, tries=options.tries)
                spent = [one["seconds"] for one in book["trials"].values() if "seconds" in one]
                longest = options.longest or max(spent)
            write_json(out, book)
    return 0


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    raise SystemExit(main())
