"""Memory of `make process`, `make check` and a training's preparation against the size of a file: it stays flat.

    PYTHONPATH=. python benchmarks/data_memory.py --out data_memory.json --sizes 8,64,256

Files of the given sizes (MiB) in every form that data may have: conversations as lines, gzipped lines, one JSON list,
CSV and Parquet, each row some 2 KB; conversations of 1 MB each; and plain text in one file. What is measured is the
highest resident memory of a process and its children, in a process of its own for each measurement; the libraries alone
take some 400 MB of it. A file of one line of 200 MiB ends in one message.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import itertools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.resident import Sampler
from sft_play.machine.hardware import detect_hardware
from sft_play.runs.files import write_json
from sft_play.runs.folder import installed_versions

ROOT = Path(__file__).resolve().parent.parent
SHARED = ROOT.parent / "shared" / "data"
MIB = 1 << 20
SAMPLE_S = 0.02
"""Short, since a peak of reading one row group lasts no longer."""
WORDS = "the cat sat on a mat and saw that no dog had come into its house".split()  # noqa: SIM905


def sentences(seed: int, chars: int) -> str:
    """Words in an order of the seed's, in lines and paragraphs."""
    found: list[str] = []
    length = 0
    for number in itertools.count():
        word = WORDS[(seed * 7 + number * number + number * seed) % len(WORDS)]
        found.append(word + (".\n\n" if number % 90 == 89 else ".\n" if number % 15 == 14 else " "))
        length += len(found[-1])
        if length >= chars:
            return "".join(found)
    raise AssertionError


def conversations(total: int, chars: int) -> Iterator[dict[str, str]]:
    """Questions and answers of `chars` characters each, `total` in all."""
    bases = [sentences(seed, chars) for seed in range(16 if chars < MIB else 2)]
    for number in range(max(2, total // chars)):
        yield {"question": f"{number}: what did the cat see?", "answer": f"{number} {bases[number % len(bases)]}"}


def write_lines(path: Path, total: int, chars: int = 2_000) -> None:
    """One object a line, gzipped where the name says so."""
    open_as: Callable[..., Any] = gzip.open if path.suffix == ".gz" else open
    with open_as(path, "wt", encoding="utf-8") as file:
        for row in conversations(total, chars):
            file.write(json.dumps(row) + "\n")


def write_list(path: Path, total: int) -> None:
    """One JSON list on one line."""
    with path.open("w", encoding="utf-8") as file:
        for number, row in enumerate(conversations(total, 2_000)):
            file.write((", " if number else "[") + json.dumps(row))
        file.write("]")


def write_csv(path: Path, total: int) -> None:
    """A table with a header."""
    with path.open("w", encoding="utf-8", newline="") as file:
        table = csv.DictWriter(file, ("question", "answer"))
        table.writeheader()
        table.writerows(conversations(total, 2_000))


def write_parquet(path: Path, total: int) -> None:
    """One row group of all rows, the worst there is for a reader."""
    import pyarrow as pa  # type: ignore[import-untyped]
    import pyarrow.parquet  # type: ignore[import-untyped]

    rows = list(conversations(total, 2_000))
    pyarrow.parquet.write_table(pa.Table.from_pylist(rows), path, row_group_size=len(rows), use_dictionary=False)


def write_text(path: Path, total: int) -> None:
    """One document."""
    with path.open("w", encoding="utf-8") as file:
        for number in range(max(1, total // 65_536)):
            file.write(f"Chapter {number}\n\n{sentences(number, 65_536)}")


def write_one_line(path: Path, total: int) -> None:
    """One row."""
    with path.open("w", encoding="utf-8") as file:
        file.write('{"question": "q", "answer": "')
        for _ in range(total // MIB):
            file.write("words " * (MIB // 6))
        file.write('"}\n')


ONE_LINE, ONE_LINE_MIB = "one line", 200
FORMS: dict[str, tuple[str, str, Callable[[Path, int], None]]] = {
    "lines": ("a.jsonl", "sft", write_lines),
    "gzipped lines": ("a.jsonl.gz", "sft", write_lines),
    "lines of 1 MB": ("a.jsonl", "sft", lambda path, total: write_lines(path, total, 1_000_000)),
    "JSON list": ("a.json", "sft", write_list),
    "CSV": ("a.csv", "sft", write_csv),
    "Parquet": ("a.parquet", "sft", write_parquet),
    "plain text": ("a.txt", "cpt", write_text),
    ONE_LINE: ("a.jsonl", "sft", write_one_line),
}
"""What a file is called, the task mode that reads it, and what writes it."""


STAGES = {  # of `make train` the preparation of rows alone, which is all that reads the files
    "process": (
        "from sft_play.data.process import process_files; process_files(load_config('run.yaml').config, force=True)"
    ),
    "check": (
        "from sft_play.diagnose.run_check import check_run; from sft_play.machine.hardware import detect_hardware; "
        "from sft_play.diagnose.doctor import format_findings; "
        "from pathlib import Path; "
        "report = check_run(Path('run.yaml'), (), detect_hardware()); "
        "bad = [line for one in report.findings if one.verdict == 'FAIL' and one.name != 'model files' for line in "
        "format_findings([one], {})]; "
        "sys.exit('\\n'.join(bad) if bad else 0)"
    ),
    "train": (
        "from sft_play.data.build.splits import build_splits; from sft_play.data.sources.files import find_data_paths; "
        "from sft_play.training.prepare.tokenizer import load_tokenizer; config = load_config('run.yaml').config; "
        "build_splits(config, find_data_paths(config.data), load_tokenizer(config).tokenizer, max_seq_len=512)"
    ),
}


def model_of(tokenizer: Path, folder: Path) -> None:
    """A model's folder with this tokenizer, a small Llama's config and no weights, which nothing here loads."""
    folder.mkdir()
    for file in tokenizer.iterdir():
        (folder / file.name).symlink_to(file.resolve())
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 152_064, **shape}
    (folder / "config.json").write_text(json.dumps(config))


def measure(stage: str, form: str, size: int, tokenizer: Path, workers: int) -> dict[str, Any]:
    """One command on one file in a folder of its own."""
    name, mode, write = FORMS[form]
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        write(folder / name, size)
        model_of(tokenizer, folder / "model")
        (folder / "run.yaml").write_text(
            f"model: {{name: ./model, max_seq_len: 512}}\ntask_mode: {mode}\ntuning: {{mode: lora}}\n"
            f"data: {{train_path: {name}, workers: {workers}, max_lost_fraction: 1.0, process: {{raw_path: {name}, "
            "val_fraction: 0, test_fraction: 0}}\n"
            "train: {bf16: false}\n"
        )
        code = f"import sys; from sft_play.config.load import load_config; {STAGES[stage]}"
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "SFT_PLAY_CACHE": scratch}
        command = [sys.executable, "-c", code]
        process = subprocess.Popen(command, cwd=folder, env=environment, stderr=subprocess.PIPE, text=True)
        with Sampler(process.pid, every_s=SAMPLE_S) as sampler:
            _, errors = process.communicate()
        left = sorted(str(path.relative_to(folder)) for path in folder.rglob("*.part"))
        run = {"stage": stage, "form": form, "file_bytes": (folder / name).stat().st_size, "exit": process.returncode}
        last = errors.strip().splitlines()[-1:] if process.returncode else []
        return {**run, "peak_rss_bytes": sampler.rss, "left_behind": left, "message": "".join(last)[:400]}


def bench(sizes: list[int], tokenizer: Path, out: Path, forms: list[str], workers: int) -> dict[str, Any]:
    """Every form at every size, and a summary; OUT is written after every run."""
    runs: list[dict[str, Any]] = []
    answer: dict[str, Any] = {}
    for form in forms:
        for stage in STAGES:
            for size in sizes if form != ONE_LINE else [ONE_LINE_MIB]:
                run = {"asked_mib": size, **measure(stage, form, size * MIB, tokenizer, workers)}
                runs.append(run)
                sys.stdout.write(f"{json.dumps(run)}\n")
                sys.stdout.flush()
                answer = {
                    "date": datetime.now(UTC).isoformat(timespec="seconds"),
                    "machine": detect_hardware().as_json(),
                    "versions": installed_versions(),
                    "workers": workers,
                    "runs": runs,
                    "ratios": ratios(runs),
                }
                write_json(out.absolute(), answer)
    return answer


def ratios(runs: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """By form and command: memory at the greatest size over that at the smallest, and bytes of memory that each byte
    between the two costs."""
    all_ratios: dict[str, dict[str, float]] = {}
    for run in runs:
        name = f"{run['stage']}, {run['form']}"
        same_stage = [one for one in runs if (one["stage"], one["form"]) == (run["stage"], run["form"])]
        if len(same_stage) < 2:
            continue
        first, last = same_stage[0], same_stage[-1]
        more = last["peak_rss_bytes"] - first["peak_rss_bytes"]
        all_ratios[name] = {
            "memory_last_over_first": round(last["peak_rss_bytes"] / first["peak_rss_bytes"], 3),
            "memory_bytes_per_file_byte": round(more / (last["file_bytes"] - first["file_bytes"]), 3),
        }
    return all_ratios


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default=os.environ.get("OUT") or "data_memory.json")
    parser.add_argument("--sizes", default="8,64,256", help="sizes of files in MiB")
    parser.add_argument("--tokenizer", default=str(SHARED / "tokenizers" / "Qwen2.5-Instruct"), help="its folder")
    parser.add_argument("--forms", default=",".join(FORMS))
    parser.add_argument("--workers", type=int, default=1)
    options = parser.parse_args()
    sizes = [int(word) for word in options.sizes.split(",")]
    answer = bench(sizes, Path(options.tokenizer), Path(options.out), options.forms.split(","), options.workers)
    sys.stdout.write(f"{json.dumps(answer['ratios'], indent=2)}\n")


if __name__ == "__main__":
    main()
