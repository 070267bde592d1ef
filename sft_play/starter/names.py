"""Names under which the starter is asked for."""

BASE_NAME = "sft-play/starter-base"
"""The model name that means the base which this toolkit trains itself and keeps in its cache."""

CONFIG = "configs/run_starter.yaml"
"""The run YAML of a command without CONFIG."""
