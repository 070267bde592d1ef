"""What this machine is and what may break a run on it: GPUs, memory, versions, limits, a real all-reduce."""
