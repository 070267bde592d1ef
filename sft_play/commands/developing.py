"""Developers' commands. `bench`, `memory-model-score`, `verify-layouts`, `gpu-selftest` and `mask-score` measure the
project itself, by tools that only a checkout has: `benchmarks/` is beside the package and is not installed with it.
`generate` writes the files of a checkout that are made from the code."""

from __future__ import annotations

import importlib
import logging
import sys
from types import ModuleType

from sft_play.commands.answer import Answer, answer_of
from sft_play.commands.request import Request, refuse_hardware
from sft_play.errors import ConfigError
from sft_play.files import ROOT

logger = logging.getLogger(__name__)

HELP = {
    "bench": "measure real steps of a run: speed, parts, memory; with PEER= in turns with another trainer",
    "memory-model-score": "score the memory model on measured peaks that others published",
    "verify-layouts": "train the same run under every layout over CPU ranks or GPUs, and compare with one process",
    "gpu-selftest": "measure kernels, peaks, speeds and layouts on this machine's GPUs, and compare with the plan",
    "mask-score": "score the loss masks of chat templates (TEMPLATES=, TOKENIZER=)",
    "generate": "rewrite generated files: configs/reference.yaml, configs/run.schema.json, the starter's data, "
    "transformers' defaults of configs, docs/what-fits.md, the variables in make's help",
}


def run(request: Request) -> Answer:
    """Figures, each beside what was predicted or measured elsewhere; or the files that were written."""
    return {
        "bench": _bench,
        "memory-model-score": _memory_model_score,
        "verify-layouts": _verify_layouts,
        "gpu-selftest": _gpu_selftest,
        "mask-score": _mask_score,
        "generate": _generate,
    }[request.command](request)


def tool(name: str, *, command: str) -> ModuleType:
    """The module `benchmarks.NAME` of the checkout.

    Raises:
        ConfigError: the package is installed without its checkout.
    """
    if not (ROOT / "benchmarks" / f"{name.replace('.', '/')}.py").is_file():
        raise ConfigError(
            f"{command} is a developer's command of a checkout, and {ROOT / 'sft_play'} is installed without one: run "
            f"make {command} in a clone of the repository"
        )
    if str(ROOT) not in sys.path:  # a console script has its own folder there; processes that it spawns inherit it
        sys.path.insert(0, str(ROOT))
    return importlib.import_module(f"benchmarks.{name}")


def _bench(request: Request) -> Answer:
    refuse_hardware(request)
    bench = tool("steps.bench", command=request.command)
    compared = bench.compare(
        request.config,
        request.overrides,
        peer=request.peer,
        python=str(request.peer_python) if request.peer_python else None,
        steps=request.steps or bench.STEPS,
        warmup=request.warmup or bench.WARMUP,
        rounds=request.rounds or bench.ROUNDS,
        progress=logger.info,
    )
    return Answer(compared.as_json(), compared.lines())


def _memory_model_score(request: Request) -> Answer:
    """The errors of every measured peak; OUT is written as they come."""
    if request.peaks is None:
        raise ConfigError("PEAKS= names no file; give the CSV of measured peaks: make memory-model-score PEAKS=FILE")
    score = tool("memory_model.score", command=request.command).score
    report = score(request.peaks, out=request.out, progress=logger.info)
    return Answer(report.as_json(), report.table_lines(), to_out=False)


def _verify_layouts(request: Request) -> Answer:
    """Each layout's losses and weights beside those of one process; exit code 1 where one differs."""
    refuse_hardware(request)
    layouts = tool("verify.layouts", command=request.command)
    table = layouts.verify(
        request.config if request.config_given else None,
        request.overrides,
        layouts=request.layouts,
        modes=request.modes,
        steps=request.steps or layouts.STEPS,
        progress=logger.info,
    )
    return Answer(table.as_json(), table.lines(), 0 if table.ok else 1)


def _gpu_selftest(request: Request) -> Answer:
    refuse_hardware(request)
    selftest = tool("gpu_selftest.selftest", command=request.command).selftest
    book = selftest(request.out, minutes=request.minutes, progress=logger.info)  # of the checkout: not sft_play's logs
    lines = tool("gpu_selftest.report", command=request.command).result_lines(book)
    return Answer(book.as_json(), ["\n".join(lines)], 0 if book.ok else ConfigError.exit_code, to_out=False)


def _mask_score(request: Request) -> Answer:
    if request.templates is None or request.tokenizer is None:
        raise ConfigError("mask-score needs both: TEMPLATES=FOLDER (.jinja files) and TOKENIZER=FOLDER (or a hub id)")
    score = tool("mask_score.score", command=request.command).score
    return answer_of(score(request.templates, request.tokenizer))


def _generate(request: Request) -> Answer:
    written = tool("generate", command=request.command).generate()
    return Answer({"ok": True, "written": written}, [f"wrote {path}" for path in written])
