"""Names of the starter."""

BASE_NAME = "sft-play/starter-base"
"""The model name of the base that this toolkit trains itself and keeps in its cache."""

CONFIG = "configs/run_starter.yaml"
"""The run YAML of a command without CONFIG."""
