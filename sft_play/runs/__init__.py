"""The run folder: its name, its contents, its lock, and what to do with an existing one."""
