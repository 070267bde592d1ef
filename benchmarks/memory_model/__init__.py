"""The memory model against published measured peaks: `make memory-model-score`."""
