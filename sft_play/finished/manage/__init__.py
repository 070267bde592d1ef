"""Runs are listed, pruned and trained again."""
