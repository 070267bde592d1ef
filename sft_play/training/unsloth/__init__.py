"""Unsloth, in processes of its own: `bridge` on this side, the others on that side."""
