"""Checkpoints and final weights: whole or absent, checked by digests, read without running code."""
