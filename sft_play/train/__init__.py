"""The heavy part: tokenizer, model, trainer, checkpoints. Imports torch; `trainer` alone knows TRL's names."""
