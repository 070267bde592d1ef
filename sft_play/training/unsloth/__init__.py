"""Unsloth, in processes of its own: `bridge` and `handover` on this side, the others on that side."""
