"""The starter task: rows of a small generated language, and a base that knows its words, so nothing
is downloaded."""

from pathlib import Path

# The model name of the base that is part of this package.
BASE_NAME = "sft-play/starter-base"

# Its folder. `make -C benchmarks starter-base` makes it again; benchmarks/starter_base.json has its
# digest.
BASE = Path(__file__).resolve().parent / "starter-base"

# The run YAML of a command without CONFIG.
CONFIG = "configs/run_starter.yaml"
