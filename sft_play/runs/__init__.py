"""The run folder: its name, its contents, its lock, and what to do with an existing one.

`folder` names what is in it, what makes a run reproducible, and its notes of memory that ran out,
and reads and writes it. `lookup` finds old runs, locks them, and makes new ones whole or not at
all.
"""
