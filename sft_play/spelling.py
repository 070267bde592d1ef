"""The name that was probably meant: every "did you mean" asks here.

Standard library only, and nothing newer than Python 3.7: `scripts/check_variables.py` needs it before there is an
environment.
"""

import difflib
from typing import Iterable, Optional

# How similar names are (difflib's ratio) of which one is the other with a slip: one letter of four, two of eight.
LIKE_A_TYPO = 0.75
# The same for names of three letters.
LIKE_A_SHORT_ONE = 0.66
# Letters of a name that was not written to its end, at least: such a name is nearer than any slip.
A_BEGINNING = 4


def nearest(name: str, *choices: Iterable[str], alike: Optional[float] = None) -> Optional[str]:
    """The most similar name, from the first of the lists that has one which begins so, or is at least so `alike`; None
    where none has.

    Case, hyphens and underscores do not count. `alike` is that of a slip where it is not given.
    """
    wanted = plain(name[:100])
    least = alike if alike is not None else LIKE_A_SHORT_ONE if len(wanted) <= 3 else LIKE_A_TYPO
    for names in choices:
        forms = {plain(one): one for one in sorted(names, reverse=True)}
        longer = [form for form in forms if form.startswith(wanted)] if len(wanted) >= A_BEGINNING else []
        near = difflib.get_close_matches(wanted, longer or list(forms), n=1, cutoff=0.0 if longer else least)
        if near:
            return forms[near[0]]
    return None


def did_you_mean(name: str, *choices: Iterable[str], alike: Optional[float] = None) -> str:
    """`did you mean …?` with the nearest name; empty where none is near."""
    near = nearest(name, *choices, alike=alike)
    return f"did you mean {near}?" if near else ""


def plain(name: str) -> str:
    """A name in capitals without hyphens and underscores."""
    return name.upper().replace("_", "").replace("-", "")
