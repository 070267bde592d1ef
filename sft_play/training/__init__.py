"""The heavy part: tokenizer, model, trainer, checkpoints. Imports torch; TRL's names: `trainer`, `trl_template`."""
