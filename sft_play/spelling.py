"""The name that was probably meant: every "did you mean" asks here.

Standard library only, and nothing newer than Python 3.7: `scripts/check_variables.py` needs it
before there is an environment.
"""

import difflib
from typing import Iterable, Optional

# How similar a name and the same with a slip are (difflib's ratio): one letter of four, two of
# eight.
TYPO_SIMILARITY = 0.75
# The same for names of three letters.
SHORT_NAME_SIMILARITY = 0.66
# Letters of a name that was not written to its end, at least: such a name is nearer than any slip.
MIN_PREFIX_LETTERS = 4


def nearest_name(
    name: str, *choices: Iterable[str], min_similarity: Optional[float] = None
) -> Optional[str]:
    """Find the most similar name, in the first list that has one which begins like `name` or is at
    least so similar; None if no list has.

    Case, hyphens and underscores do not count. `min_similarity`: difflib's ratio; None takes a
    slip's.
    """
    normalized = normalize_name(name[:100])
    if min_similarity is None:
        min_similarity = SHORT_NAME_SIMILARITY if len(normalized) <= 3 else TYPO_SIMILARITY
    for names in choices:
        forms = {normalize_name(choice): choice for choice in sorted(names, reverse=True)}
        matches = difflib.get_close_matches(normalized, list(forms), n=1, cutoff=min_similarity)
        completions = [form for form in forms if form.startswith(normalized)]
        if completions and len(normalized) >= MIN_PREFIX_LETTERS:
            matches = difflib.get_close_matches(normalized, completions, n=1, cutoff=0.0)
        if matches:
            return forms[matches[0]]
    return None


def did_you_mean(name: str, *choices: Iterable[str], min_similarity: Optional[float] = None) -> str:
    """Ask `did you mean …?` with the nearest name; empty where none is near, or it is the same."""
    suggestion = nearest_name(name, *choices, min_similarity=min_similarity)
    return f"did you mean {suggestion}?" if suggestion not in (None, name) else ""


def normalize_name(name: str) -> str:
    """A name in capitals without hyphens and underscores."""
    return name.upper().replace("_", "").replace("-", "")
