"""Whether every layout trains the same model: real runs over ranks, compared with one process."""
