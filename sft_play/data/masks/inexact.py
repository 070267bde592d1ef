"""Rows whose loss mask cannot be found exactly: the error, and the reasons that more than one module knows."""

from __future__ import annotations

REFUSED = "the chat template refuses the row"
NO_END = "the chat template writes no end of turn after a turn"
OTHER_PROMPT = "the generation prompt does not match how the chat template writes the turn"


class Inexact(ValueError):
    """A mask that cannot be found exactly: the reason rows are counted by, and the detail."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(reason, detail)
        self.reason, self.detail = reason, detail
