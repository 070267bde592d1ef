"""The run folder: its name, its contents, its lock, and what to do with an existing one.

`folder` names what is in it. `lookup` finds old ones, and makes new ones whole or not at all, with `manifest` and
`locking`; `manifest` says what makes one reproducible, and may be continued.
"""
