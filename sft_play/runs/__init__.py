"""The run folder: its name, its contents, its lock, and what to do with an existing one.

`folder` names what is in it. `creation` makes one whole or not at all, by `names`, `manifest` and `locking`; `lookup`
finds old ones, and `resuming` refuses to continue one with other settings.
"""
