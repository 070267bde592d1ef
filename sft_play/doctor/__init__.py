"""What can cost a night, found in a minute: versions, drivers, GPUs, limits, disk, and a real all-reduce of all ranks."""
