"""`make gpu-selftest`: what this machine's GPUs do, against what the plan says of them, in about ten minutes."""
