"""Loss masks of chat templates against masks worked out another way: `make mask-score`."""
