"""docs/schema: what programs may read of each command's answer, and whether an answer has it."""

import functools
import json
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator
from referencing import Registry, Resource

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "schema"


@functools.cache
def schemas() -> dict[str, dict[str, Any]]:
    """Every schema by the name of its command; `ending` is the part that all have."""
    return {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(FOLDER.glob("*.json"))}


@functools.cache
def _registry() -> Any:
    return Registry().with_resources((f"{name}.json", Resource.from_contents(one)) for name, one in schemas().items())


def refuse_invalid(command: str, answer: Any) -> None:
    """Raises jsonschema's ValidationError where an answer is not what the command's schema says (or else `ending`)."""
    json.dumps(answer, allow_nan=False)
    Draft202012Validator(schemas().get(command, schemas()["ending"]), registry=_registry()).validate(answer)
