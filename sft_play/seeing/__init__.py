"""Seeing it: what GPUs and host there are, and what a run that goes on takes of their memory. Nothing here is heavy."""
