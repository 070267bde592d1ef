"""Unsloth, in processes of its own: `unsloth_run` on both sides; `unsloth_worker` is their program."""
