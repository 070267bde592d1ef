"""What can cost a night, found in a minute: versions, GPUs, limits, disk, and a real all-reduce of all ranks."""
