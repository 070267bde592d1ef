"""What a command answers with: plain data for programs, and lines for a person."""

import json
from dataclasses import asdict
from typing import Any


class Answer:
    """What the work of a command comes to: a dataclass, whose JSON is `ok` and its fields.

    A class whose published JSON has other keys says so in an `as_json` of its own.
    """

    @property
    def ok(self) -> bool:
        """True if the command succeeded: its exit code is 0, else 2."""
        return True

    def as_json(self) -> Any:
        """`ok` and the fields, as plain data."""
        return {"ok": self.ok, **plain_data(self)}

    def lines(self) -> list[str]:
        """In words, the next command last."""
        raise NotImplementedError


def plain_data(instance: Any) -> dict[str, Any]:
    """The fields of a dataclass as JSON has them: lists, text for paths, ISO dates."""
    text = json.dumps(asdict(instance), default=lambda value: getattr(value, "isoformat", value.__str__)())
    return json.loads(text)  # type: ignore[no-any-return]
