"""`export` and `export-test`: the run's model for another engine, and whether it answers there as it was trained."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from sft_play.commands.answer import Answer, answer_of, stdout_to_stderr
from sft_play.commands.machine import finished_run
from sft_play.commands.request import Request
from sft_play.errors import ConfigError
from sft_play.log import one_line
from sft_play.runs.locking import lock

if TYPE_CHECKING:
    from sft_play.finished.export.exported import Format, Quant

HELP = {
    "export": "write RUN's model for an engine: FORMAT=gguf (llama.cpp), ollama or vllm",
    "export-test": "compare the exported GGUF of RUN with the adapter: prompts, weights and greedy answers",
}
_FORMATS = ("gguf", "ollama", "vllm")
_QUANTS = ("f32", "f16", "bf16", "q8_0")


def run(request: Request) -> Answer:
    """Export, or compare; exit code 2 where the exported model is not the trained one."""
    if request.command == "export" and request.format not in _FORMATS:
        given = (
            f"FORMAT={one_line(request.format)} is not one of"
            if request.format
            else "make export needs FORMAT=, one of"
        )
        raise ConfigError(f"{given} {', '.join(_FORMATS)}")
    if request.quant not in (None, *_QUANTS):
        raise ConfigError(
            f"QUANT={one_line(request.quant)} is not one of {', '.join(_QUANTS)}, which the converter writes"
        )
    if request.quant is not None and request.format == "vllm":
        raise ConfigError(
            "QUANT= is how a GGUF stores weights; FORMAT=vllm writes none (make merge DTYPE= sets its dtype)"
        )
    finished = finished_run(request)
    with stdout_to_stderr(wanted=request.json):
        if request.command == "export-test":
            from sft_play.finished.export.check_export import ROWS, export_test

            tested = export_test(finished, path=request.out, rows=request.limit or ROWS, llama_cpp=request.llama_cpp)
            return answer_of(tested, to_out=False)
        from sft_play.finished.export.export import export_run

        with lock(finished.folder):
            exported = export_run(
                finished,
                cast("Format", request.format),
                quant=cast("Quant | None", request.quant),
                out=request.out,
                replace=request.force,
                llama_cpp=request.llama_cpp,
            )
        return answer_of(exported, to_out=False)
