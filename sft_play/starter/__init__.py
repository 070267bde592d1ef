"""The starter task: rows of a small generated language, a base that knows its words, and the run
YAML: all of it comes with the package, so that nothing is downloaded and no checkout is needed."""

import os
from pathlib import Path

# The model name of the base that is part of this package.
BASE_NAME = "sft-play/starter-base"

# Its folder. `make -C benchmarks starter-base` makes it again; benchmarks/starter_base.json has its
# digest.
FOLDER = Path(__file__).resolve().parent
BASE = FOLDER / "starter-base"

# The run YAML of a command without CONFIG, and its rows, as a checkout has them.
CONFIG = "configs/run_starter.yaml"
_ROWS = Path("sft_play/starter/data")


def find_starter_file(path: Path) -> Path | None:
    """Find the package's own copy of a file of the starter, named as in a checkout; None for any
    other path."""
    if path == Path(CONFIG):
        return FOLDER / path.name
    copy = FOLDER / "data" / path.name
    return copy if path.parent == _ROWS and os.path.isfile(copy) else None  # noqa: PTH113  (a name may be too long)
