"""The run folder: its name, its contents, its lock, and what to do with an existing one.

`folder` names what is in it, and what makes a run reproducible; `files` reads and writes it. `lookup` finds old runs,
locks them, and makes new ones whole or not at all. `oom` is what a run notes of memory that ran out.
"""
