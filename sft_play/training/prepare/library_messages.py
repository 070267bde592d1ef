"""Silences messages of the libraries that a user cannot act on."""

import sys
import warnings

from sft_play.process.waiting import importing


def quiet_libraries() -> None:
    """Silence the libraries' deprecation warnings, and their progress bars where there is no
    terminal."""
    with importing():
        from datasets.utils.logging import disable_progress_bar
        from transformers.utils import logging as transformers_logging

    for category in (FutureWarning, DeprecationWarning):
        warnings.simplefilter("ignore", category=category)
    # torch 2.11, of how accelerate makes its mesh
    warnings.filterwarnings("ignore", message="Slicing a flattened dim")
    disable_progress_bar()
    transformers_logging.disable_default_handler()
    transformers_logging.enable_propagation()
    if not sys.stderr.isatty():
        transformers_logging.disable_progress_bar()
