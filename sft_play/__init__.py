"""sft_play: plan, explain and run supervised fine-tuning with one Makefile.

From Python: `from sft_play import load_config, plan, train` (`sft_play.api` describes them).
"""

from typing import TYPE_CHECKING

from sft_play._version import __version__

if TYPE_CHECKING:
    from sft_play.api import load_config, plan, train

__all__ = ["__version__", "load_config", "plan", "train"]


def __getattr__(name: str) -> object:
    """The functions of `sft_play.api`, imported when they are first asked for."""
    if name not in ("load_config", "plan", "train"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from sft_play import api

    return getattr(api, name)
