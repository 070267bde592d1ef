"""Data preparation beside TRL's own: rows a second and memory, on the same rows (benchmarks/README.md, Data).

    make -C benchmarks bench-data OUT=data.json ROWS=10000,1000000

`prepare_s` are the seconds of the preparation alone, `total_s` those from the start of the process with its imports;
`peak_private_bytes` leaves out of `peak_rss_bytes` what processes share. Ratios compare the quickest run of each tool.
"""

import contextlib
import hashlib
import itertools
import json
import os
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

import psutil

from benchmarks.report_header import report_header
from benchmarks.starter_corpus import starter_rows
from benchmarks.steps.material import chat, write_rows
from sft_play.process.signals import child_environment, watch_parent
from sft_play.runs.folder import write_json

ROOT = Path(__file__).resolve().parent.parent
SHARED = ROOT.parent / "shared" / "data"
CORES = 2
MAX_LENGTH = 2048
"""Tokens; no row made here has as many."""
BATCH_ROWS = 1_000
SAMPLE_S = 0.1
TRL_ROWS = 20_000
"""TRL takes the first so many rows of a longer file: its rows a second do not depend on it, and it is slow."""
TOKENIZER_ROWS = 100_000
"""So many the tokenizer alone, for the same reason."""
ROUNDS = 3
ONE_ROUND_FROM = 100_000
"""Files of so many rows are measured once."""
MARK = "bench-data "
Run = dict[str, Any]
Messages = list[dict[str, str]]


@dataclass(frozen=True)
class Job:
    """One measurement. `rows` of the file of `of` rows are taken."""

    tool: str
    rows: int
    of: int
    processes: int = 1
    form: str = "messages"
    file: str = ""
    tokenizer: str = ""
    cache: str = ""


def real_rows() -> tuple[str, list[Messages]]:
    path = SHARED / "sft" / "gsm8k" / "train.jsonl"
    if path.is_file():
        rows = map(json.loads, path.read_text(encoding="utf-8").splitlines())
        return "GSM8K", [chat(row["question"], row["answer"])["messages"] for row in rows]
    return "the starter's data", [row["messages"] for row in starter_rows()["train"]]


def changed_rows(rows: Sequence[Messages], count: int) -> Iterator[Messages]:
    """`count` conversations, no two alike: the rows over and over, each time with another number in every text."""
    for number, messages in enumerate(itertools.islice(itertools.cycle(rows), count)):
        changed = []
        for message in messages:
            text = f"No. {number}: {message['content']}"
            if message["role"] == "assistant":
                text = f"{message['content']}\n(No. {number} {message['role']})"
            changed.append({**message, "content": text})
        yield changed


def in_form(messages: Messages, form: str) -> dict[str, Messages]:
    return {"messages": messages} if form == "messages" else {"prompt": messages[:-1], "completion": messages[-1:]}


def run_stage(job: Job) -> None:
    """Measure in this process; says so when it is done, then counts what came out."""
    # pinned: every tool gets the same cores, however many threads it starts
    cores = sorted(os.sched_getaffinity(0))[:CORES] if hasattr(os, "sched_getaffinity") else []
    if cores:
        os.sched_setaffinity(0, cores)
    os.environ["RAYON_NUM_THREADS"] = str(CORES)
    run, made = {"trl": _trl, "ours": _ours, "ours_again": _ours, "tokenizer": _tokenizer}[job.tool](job)
    print(f"{MARK}{json.dumps(run)}", flush=True)
    if job.tool != "ours_again" and made is not None:
        print(f"{MARK}{json.dumps(_counted(made))}", flush=True)


def _spent_since(start: tuple[float, float]) -> dict[str, float]:
    """Seconds since `_now()`: of the wall's clock, and of processors in this process and its ended children."""
    wall, cpu = _now()
    return {"prepare_s": wall - start[0], "cpu_s": cpu - start[1]}


def _now() -> tuple[float, float]:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return time.perf_counter(), sum(one.ru_utime + one.ru_stime for one in used)


def _ours(job: Job) -> tuple[Run, Any]:
    from transformers import AutoTokenizer

    from sft_play.config.schema import DataConfig
    from sft_play.data.build.build import BuildRecipe, build_rows
    from sft_play.data.masks.tokenizer import TokenizerParts

    parts = TokenizerParts.from_tokenizer(AutoTokenizer.from_pretrained(job.tokenizer))
    recipe = BuildRecipe(parts, DataConfig(), MAX_LENGTH, date.today())
    start = _now()
    built = build_rows(Path(job.file), recipe, split="train", workers=job.processes)
    run = _spent_since(start)
    stats = built.stats["kept"]
    assert stats.kept_rows == stats.rows == job.rows, f"{stats.kept_rows} of {stats.rows} rows kept"
    return {**run, "masks": dict(stats.methods)}, built.dataset("kept")


def _tokenizer(job: Job) -> tuple[Run, Any]:
    from transformers import AutoTokenizer

    from sft_play.data.masks.render import Renderer

    tokenizer = AutoTokenizer.from_pretrained(job.tokenizer)
    turns = Renderer(tokenizer, max_seq_len=MAX_LENGTH).turn_locator()
    spent, tokens = {"prepare_s": 0.0, "cpu_s": 0.0}, 0
    with Path(job.file).open(encoding="utf-8") as file:
        while lines := list(itertools.islice(file, BATCH_ROWS)):
            texts = [turns.template.render(json.loads(line)["messages"]) for line in lines]
            start = _now()
            encoded = tokenizer(texts, add_special_tokens=False)
            spent = {name: spent[name] + more for name, more in _spent_since(start).items()}
            tokens += sum(map(len, encoded["input_ids"]))
    return {**spent, "tokens": tokens}, None


def _trl(job: Job) -> tuple[Run, Any]:
    os.environ["HF_DATASETS_CACHE"] = job.cache
    from datasets import load_dataset
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
    from trl import SFTConfig, SFTTrainer

    spent: dict[str, float] = {}

    class Timed(SFTTrainer):
        def _prepare_dataset(self, *args: Any, **options: Any) -> Any:
            start = _now()
            made = super()._prepare_dataset(*args, **options)
            spent.update(_spent_since(start))
            return made

    tokenizer = AutoTokenizer.from_pretrained(job.tokenizer)
    began = time.perf_counter()
    rows = load_dataset("json", data_files=job.file, split="train", cache_dir=job.cache)
    read_s = time.perf_counter() - began
    arguments = SFTConfig(
        output_dir=str(Path(job.cache) / "out"), max_length=MAX_LENGTH, assistant_only_loss=job.form == "messages",
        dataset_num_proc=job.processes if job.processes > 1 else None, report_to=[], use_cpu=True, bf16=False,
    )  # fmt: skip
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **sizes))
    trainer = Timed(model, arguments, train_dataset=rows, processing_class=tokenizer)
    return {**spent, "read_s": read_s}, trainer.train_dataset


def _counted(dataset: Any) -> Run:
    """Tokens, trained tokens and a digest of the ids, in the order of the rows."""
    import numpy as np

    digest, tokens, trained = hashlib.sha256(), 0, 0
    for batch in dataset.with_format("arrow").iter(BATCH_ROWS):
        columns = (batch[name].chunks for name in ("input_ids", "labels"))
        ids, labels = (np.concatenate([chunk.flatten() for chunk in chunks]) for chunks in columns)
        digest.update(ids.astype(np.int32).tobytes())
        tokens, trained = tokens + len(ids), trained + int((labels != -100).sum())
    return {"tokens": tokens, "trained_tokens": trained, "ids_digest": digest.hexdigest()[:16]}


class Sampler(threading.Thread):
    """The highest resident memory of a process and its children, in bytes: `rss`, and `private` without what they share
    with others (pages of mapped files, for one)."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self.rss = self.private = 0
        self._pid, self._is_done = pid, threading.Event()
        self.start()

    def stop(self) -> None:
        self._is_done.set()
        self.join()

    def run(self) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            root = psutil.Process(self._pid)
            while not self._is_done.wait(SAMPLE_S):
                rss = private = 0
                for one in (root, *root.children(recursive=True)):
                    with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                        used = one.memory_info()
                        rss, private = rss + used.rss, private + used.rss - getattr(used, "shared", 0)
                self.rss, self.private = max(self.rss, rss), max(self.private, private)


def measure(job: Job) -> Run:
    command = [sys.executable, "-m", "benchmarks.data", "--stage", json.dumps(asdict(job))]
    environment = child_environment({**os.environ, "SFT_PLAY_CACHE": job.cache, "HF_HUB_OFFLINE": "1"})
    run: Run = {"tool": job.tool, "rows": job.rows, "of": job.of, "processes": job.processes, "form": job.form}
    began = time.perf_counter()
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True)
        assert process.stdout is not None
        sampler = Sampler(process.pid)
        with process.stdout:
            for line in process.stdout:
                if line.startswith(MARK):
                    # the first line is the end of the work; what comes after it only counts what was made
                    run.setdefault("total_s", time.perf_counter() - began)
                    sampler.stop()
                    run |= json.loads(line.removeprefix(MARK))
        sampler.stop()
        if process.wait():
            errors.seek(0)
            return {**run, "error": " / ".join(errors.read().strip().splitlines()[-3:])[-600:]}
    run |= {"peak_rss_bytes": sampler.rss, "peak_private_bytes": sampler.private}
    return {**run, "rows_per_s": job.rows / run["prepare_s"]}


def jobs_of(rows: int, trl_rows: int) -> list[Job]:
    trl_limit = min(rows, trl_rows)
    trl = [Job("trl", trl_limit, rows, CORES, form) for form in ("messages", "prompt_completion")]
    return [Job("ours", rows, rows, CORES), Job("tokenizer", min(rows, TOKENIZER_ROWS), rows, CORES), *trl]


def best(runs: Sequence[Run], tool: str, of: int) -> Run | None:
    candidates = [run for run in runs if run["tool"] == tool and "error" not in run and run["of"] == of]
    return max(candidates, key=lambda run: run["rows_per_s"], default=None)


def ratios(runs: Sequence[Run]) -> dict[str, Any]:
    """Rows a second and memory against each other, at each number of rows; the first of all by their plain names."""
    sizes = sorted({run["of"] for run in runs})
    all_ratios: dict[str, Any] = {}
    by_rows: dict[str, dict[str, float]] = {}
    for size in sizes:
        ours, trl, alone, again = (best(runs, tool, size) for tool in ("ours", "trl", "tokenizer", "ours_again"))
        size_ratios = by_rows.setdefault(str(size), {})
        for name, other in (("ours_over_trl", trl), ("ours_over_tokenizer", alone)):
            if ours and other:
                size_ratios[name] = ours["rows_per_s"] / other["rows_per_s"]
                all_ratios.setdefault(name, size_ratios[name])
        if ours and trl:
            size_ratios["memory_ours_over_trl"] = ours["peak_rss_bytes"] / trl["peak_rss_bytes"]
            size_ratios["ours_over_trl_from_start"] = ours["rows"] / ours["total_s"] / (trl["rows"] / trl["total_s"])
        if again:
            size_ratios["second_start_s"] = again["prepare_s"]
    first, last = best(runs, "ours", sizes[0]), best(runs, "ours", sizes[-1])
    if first and last and first is not last:
        name = f"memory_{_short(sizes[-1])}_over_{_short(sizes[0])}"
        all_ratios[name] = last["peak_rss_bytes"] / first["peak_rss_bytes"]
    return {**all_ratios, "by_rows": by_rows}


def _short(count: int) -> str:
    for size, letter in ((1_000_000, "M"), (1_000, "k")):
        if count % size == 0:
            return f"{count // size}{letter}"
    return str(count)


def bench(sizes: Sequence[int], tokenizer: str, out: Path, *, trl_rows: int, rounds: int) -> dict[str, Any]:
    source, rows = real_rows()
    answer: dict[str, Any] = {"rows_from": source, "tokenizer": Path(tokenizer).name, "cores": CORES, "runs": []}
    with tempfile.TemporaryDirectory() as scratch:
        for size in sorted(sizes):
            for turn in range(rounds if size < ONE_ROUND_FROM else 1):
                for job in jobs_of(size, trl_rows):
                    answer["runs"] += _measured(replace(job, tokenizer=tokenizer), rows, Path(scratch), turn)
                    answer["ratios"] = ratios(answer["runs"])
                    write_json(out.absolute(), {**report_header(), **answer})
            for file in Path(scratch).glob("*.jsonl"):
                file.unlink()
    return answer


def _measured(job: Job, rows: Sequence[Messages], scratch: Path, turn: int) -> Iterator[Run]:
    file = scratch / f"{job.rows}.{job.form}.jsonl"
    if not file.is_file():
        write_rows(file, (in_form(messages, job.form) for messages in changed_rows(rows, job.rows)))
    with tempfile.TemporaryDirectory(dir=scratch) as cache:
        job = replace(job, file=str(file), cache=cache)
        again = [replace(job, tool="ours_again")] if job.tool == "ours" else []
        for one in (job, *again):
            run = {"turn": turn, **measure(one)}
            print(json.dumps(run), flush=True)
            yield run


def row_counts(text: str) -> list[int]:
    try:
        counts = [int(word) for word in text.split(",") if word.strip()]
    except ValueError:
        counts = []
    if not counts or min(counts) < 1:
        raise SystemExit(f"ROWS={text}: expected numbers of rows such as 10000,1000000")
    return counts


def main() -> None:
    """Measure what the variables of make ask for; `--stage JOB` is one measurement, in a process of its own."""
    if sys.argv[1:2] == ["--stage"]:
        watch_parent()
        run_stage(Job(**json.loads(sys.argv[2])))
        return
    tokenizer = os.environ.get("TOKENIZER") or str(SHARED / "tokenizers" / "Qwen2.5-Instruct")
    if not Path(tokenizer).is_dir():
        raise SystemExit(f"no tokenizer at {tokenizer}; give TOKENIZER=FOLDER, one with a chat template")
    sizes, out = row_counts(os.environ.get("ROWS") or "10000,1000000"), Path(os.environ.get("OUT") or "data.json")
    answer = bench(sizes, tokenizer, out, trl_rows=int(os.environ.get("TRL_ROWS") or TRL_ROWS), rounds=ROUNDS)
    print(json.dumps(answer["ratios"], indent=2))


if __name__ == "__main__":
    main()
