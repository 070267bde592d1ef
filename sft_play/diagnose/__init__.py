"""What this machine is and what may break a run on it: GPUs, memory, versions, limits, a real all-reduce.

`run_check` is `make check`, `doctor` `make doctor`, which asks `this_machine`, the plan, `ranks` (an all-reduce by
`collective_check` in each of them) and `engines`; `memory_check` watches a run; `pages` writes their answers.
"""
