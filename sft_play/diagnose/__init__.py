"""What this machine is and what may break a run on it: GPUs, memory, versions, limits, a real
all-reduce.

`run_check` is `make check`. `doctor` is `make doctor`: it reads and judges this machine, and each
rank makes an all-reduce by `collective_check`. `machine_pages` shows this machine, and a run's
memory on it.
"""
