"""The training loop: TRL's trainer with the plan's numbers, rows and micro-batches, and the checks
of each step."""
