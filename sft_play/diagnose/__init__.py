"""What this machine is and what may break a run on it: GPUs, memory, versions, limits, a real
all-reduce.

`run_check` is `make check`, which also asks `engines` what serving engines load. `doctor` is `make
doctor`: it has `machine_checks` judge `this_machine`, and asks the plan and `ranks` (an all-reduce
by `collective_check` in each of them). `memory_check` watches a run; `pages` writes their answers.
"""
