"""`make bench`: real optimizer steps of a run, beside another trainer's on the same rows. docs/bench.md."""
