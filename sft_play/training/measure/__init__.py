"""What a run measures and reports: memory, speed, evaluation, the summary."""
