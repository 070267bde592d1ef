"""The memory of a step on one rank, in closed form, term by term."""
