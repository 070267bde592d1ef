"""The run folder: its name, its contents, its lock, and what to do with an existing one.

`folder` names what is in it. `creation` makes one whole or not at all, with `manifest` and `locking`; `lookup` names
new ones and finds old ones, and `manifest` says what makes one reproducible, and may be continued.
"""
