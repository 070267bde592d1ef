"""The starter tasks: rows of a small generated language, and drawn shapes; bases that know their
words, and the run YAML of each: all of it comes with the package, so that nothing is downloaded and
no checkout is needed."""

import os
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
# The model name of the base of a command without CONFIG.
BASE_NAME = "sft-play/starter-base"
# The folders of the bases that are part of this package, by model name. `make -C benchmarks
# starter-base` makes the first again, `python -m benchmarks.shapes_base` the second; JSON files
# beside these have their digests.
BASES = {BASE_NAME: FOLDER / "starter-base", "sft-play/shapes-base": FOLDER / "shapes-base"}

# The run YAML of a command without CONFIG, and that of rows with images, as a checkout has them.
CONFIG = "configs/run_starter.yaml"
IMAGE_CONFIG = "configs/run_images.yaml"
_ROWS = tuple(Path("sft_play/starter") / name for name in ("data", "shapes"))


def find_starter_file(path: Path) -> Path | None:
    """Find the package's own copy of a file of the starters, named as in a checkout; None for any
    other path."""
    if path in (Path(CONFIG), Path(IMAGE_CONFIG)):
        return FOLDER / path.name
    copy = FOLDER / path.parent.name / path.name
    return copy if path.parent in _ROWS and os.path.isfile(copy) else None  # noqa: PTH113  (a name may be too long)
