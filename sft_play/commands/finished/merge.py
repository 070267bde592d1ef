"""`merge` and `merge-test`: the run's adapter in its base's weights, and whether the result answers as the adapter."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from sft_play.commands.answer import Answer, answer_of, stdout_to_stderr
from sft_play.commands.machine import finished_run
from sft_play.commands.request import Request
from sft_play.errors import ConfigError
from sft_play.runs.locking import lock

if TYPE_CHECKING:
    from sft_play.finished.export.adapted_model import Base

HELP = {
    "merge": "merge RUN's adapter into the 16-bit weights of its base, as a model that loads anywhere",
    "merge-test": "compare the merged model of RUN with its adapter on rows of the run's data",
}
_DTYPES = ("bf16", "fp16", "fp32")
_BASES = ("dequantized", "original")


def run(request: Request) -> Answer:
    """Merge, or compare; exit code 2 where the merged model is not the adapter's."""
    if request.dtype not in (None, *_DTYPES):
        raise ConfigError(f"DTYPE={request.dtype} is not one of {', '.join(_DTYPES)}")
    if request.base not in (None, *_BASES):
        raise ConfigError(f"BASE={request.base} is not one of {', '.join(_BASES)}")
    finished = finished_run(request)
    with stdout_to_stderr(wanted=request.json):
        if request.command == "merge-test":
            from sft_play.finished.export.check_merge import ROWS, merge_test

            return answer_of(merge_test(finished, path=request.out, rows=request.limit or ROWS), to_out=False)
        from sft_play.finished.export.merge import merge_run

        with lock(finished.folder):
            merged = merge_run(
                finished,
                dtype=request.dtype,
                base=cast("Base | None", request.base),
                out=request.out,
                replace=request.force,
            )
        return answer_of(merged, to_out=False)
