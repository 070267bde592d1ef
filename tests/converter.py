"""llama.cpp's converter for tests: fetched once a session, or the reason why it cannot be."""

import functools
import sys
from pathlib import Path

import pytest

from sft_play.errors import ConfigError
from sft_play.finished.export.llama_cpp import find_converter

PYTHON = sys.executable
"""The real one, before a test puts another in its place."""


@functools.cache
def _fetched() -> Path | str:
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "executable", PYTHON)
            return find_converter(None)
    except ConfigError as error:
        return str(error)


def converter() -> Path:
    """It; skips the test where there is no package index."""
    fetched = _fetched()
    if isinstance(fetched, str):
        pytest.skip(fetched)
    return fetched
