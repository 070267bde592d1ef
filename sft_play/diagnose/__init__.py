"""What this machine is and what may break a run on it: GPUs, memory, versions, limits, a real all-reduce.

`run_check` is `make check`. `doctor` is `make doctor`: `machine_checks` reads and judges this machine, and `ranks` has
an all-reduce made by `collective_check` in each rank. `gpu_info` shows this machine, `memory_check` a run's memory.
"""
