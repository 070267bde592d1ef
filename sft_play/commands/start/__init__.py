"""Commands that start ranks, or prepare their start."""
