"""Developers' commands. `bench`, `memory-model-score`, `verify-layouts`, `gpu-selftest` and
`mask-score` measure the project itself, by tools that only a checkout has: `benchmarks/` is beside
the package and is not installed with it. `generate` writes the files of a checkout that are made
from the code."""

import importlib
import logging
import sys
from types import ModuleType

from sft_play.commands.request import CommandResult, Request, refuse_hardware
from sft_play.errors import ConfigError
from sft_play.files import ROOT

logger = logging.getLogger(__name__)


def run_developing(request: Request) -> CommandResult:
    """Run a developer's command; returns its figures, each beside what was expected, or the files
    that it wrote."""
    if request.command in ("bench", "verify-layouts", "gpu-selftest"):
        refuse_hardware(request)
    module = benchmark_module("commands", command=request.command)
    result: CommandResult = getattr(module, request.command.replace("-", "_"))(request, logger.info)
    return result


def benchmark_module(name: str, *, command: str) -> ModuleType:
    """Import the module `benchmarks.NAME` of the checkout. Raises ConfigError where the package is
    installed without its checkout."""
    if not (ROOT / "benchmarks" / f"{name.replace('.', '/')}.py").is_file():
        raise ConfigError(
            f"{command} measures the project itself with tools that {ROOT / 'sft_play'} was"
            f" installed without: make {command}"
        )
    # a console script has its own folder there; processes that it spawns inherit it
    if str(ROOT) not in sys.path:
        sys.path.insert(0, str(ROOT))
    return importlib.import_module(f"benchmarks.{name}")
