"""The variables of make, and the program's flags for them, in one table: `variables.json`.

Make's check of its command line, `make help`, the program's flags and their help, its `Request` and the tests read it.
Standard library only, and nothing newer than Python 3.6: `scripts/check_variables.py` reads it with any Python, before
there is an environment.
"""

import json
from pathlib import Path
from typing import Any, Dict, Iterable, List, NamedTuple, Optional, Sequence, Set, Tuple

from sft_play.spelling import nearest, plain

_TABLE: Dict[str, Any] = json.loads(Path(__file__).with_name("variables.json").read_text(encoding="utf-8"))


def _names(text: str) -> Tuple[str, ...]:
    """The words of an entry; `@NAME` stands for those of a group."""
    found = []  # type: List[str]
    for word in text.split():
        found += _names(_TABLE["groups"][word[1:]]) if word.startswith("@") else [word]
    return tuple(found)


# Commands that train, and those about the run that `train` with the same words would start.
TRAINING, DESCRIBING = _names("@training"), _names("@describing")
COMMANDS = _names("@commands")
TARGETS: Dict[str, str] = _TABLE["targets"]
MAINTAINING = _names("@maintaining")
COMMANDS_OF_MAKE = _names("@commands_of_make")
# Flags that are not variables: the commands that take them, their help, and the setting for which some stand.
FLAGS: Dict[str, Dict[str, Any]] = {flag: {**row, "for": _names(row["for"])} for flag, row in _TABLE["flags"].items()}
SETTINGS: Dict[str, str] = _TABLE["settings"]
# Other names for the same, in capitals without underscores: launchers' and people's.
OTHER_WORDS = {word: name for name, words in _TABLE["other_words"].items() for word in words.split()}
# Prefixes of other programs' and libraries' variables: `make train HF_TOKEN=…` passes them on.
OF_OTHERS = _names(_TABLE["of_others"])
_OTHERS = _names(_TABLE["others"])
DATA_SUFFIXES = (".jsonl", ".ndjson", ".csv", ".tsv", ".parquet", ".arrow", ".txt")
_ANYWHERE = ("*",)


class Variable(NamedTuple):
    """A variable of make, and the flag of the program that means the same.

    `commands`: those that take it. `help` and `example`: its line of `make help`, and the help of its flag.
    `kind`: how `Request` reads it: "text", "path", "names" (with commas), "count" (from 1) and "number" (from 0) may
    not be empty; "list" may; "switch" is off where it is empty or 0; "launch" is read by `launch/launch_options.py`.
    `of`: what a count or a number counts, for error messages.
    `ranks`: commands that take the flag, although make's target of that name does not pass the variable.
    """

    commands: Tuple[str, ...]
    help: str
    example: str
    kind: str
    has_flag: bool
    ranks: Tuple[str, ...]
    of: str


def _variable(row: Dict[str, Any]) -> Variable:
    return Variable(
        _names(row["for"]),
        row["help"],
        row["example"],
        row.get("kind", "text"),
        row.get("flag", True),
        _names(row.get("ranks", "")),
        row.get("of", ""),
    )


VARIABLES: Dict[str, Variable] = {name: _variable(row) for name, row in _TABLE["variables"].items()}


def command_of(target: str) -> str:
    """The command of `sft-play` that a target of make runs."""
    return TARGETS.get(target, target)


def targets() -> Set[str]:
    """Every target of make that the table speaks of."""
    return {*COMMANDS, *TARGETS, *COMMANDS_OF_MAKE}


def is_taken(name: str, target: str) -> bool:
    """Whether a target of make uses a variable."""
    commands = VARIABLES[name].commands
    return commands == _ANYWHERE or target in commands or command_of(target) in commands


def flag_commands(name: str) -> Tuple[str, ...]:
    """The commands of the program that take the flag of a variable."""
    variable = VARIABLES[name]
    return tuple(one for one in (*variable.commands, *variable.ranks) if one not in (*TARGETS, *COMMANDS_OF_MAKE))


def about(makefile: str, target: str) -> List[str]:
    """What `make help TARGET` shows: the target's line of a Makefile, and the variables that it takes."""
    text = next(line for line in makefile.splitlines() if line.startswith(target + ":")).partition("## ")[2]
    taken = [(name, one) for name, one in VARIABLES.items() if is_taken(name, target)]
    return [f"make {target}: {text}", *(f"  {name + '=' + one.example:<24} {one.help}" for name, one in taken)]


def refusal(
    goals: Sequence[str], given: Iterable[str], empty: Iterable[str], here: Optional[Sequence[str]] = None
) -> Optional[str]:
    """What is wrong with make's command line, in one line; None where nothing is.

    Args:
        goals: the targets that were asked for.
        given: the names of all variables on the command line, of which `empty` have no value.
        here: the targets of the Makefile that asks; None is every target of both.
    """
    asked = list(goals or ["help"])
    unknown = [_no_target(goal) for goal in asked if goal not in (here or targets())]
    if unknown:
        return "; ".join(unknown)
    words = f"make {' '.join(asked)}" if goals else "make without a target"
    wrong = [text for name in sorted(given) for text in [_wrong(name, asked, words)] if text]
    for name in sorted(empty):
        if (
            name in VARIABLES
            and VARIABLES[name].kind not in ("list", "switch")
            and any(is_taken(name, goal) for goal in asked)
        ):
            wrong.append(f"{name}= is given and empty (an unset shell variable?): give a value, or leave it out")
    return "; ".join(wrong) or None


def spoken(target: str) -> str:
    """How a target is called, from the checkout."""
    return f"make -C benchmarks {target}" if target in MAINTAINING else f"make {target}"


def _no_target(goal: str) -> str:
    if goal in targets():  # of the other Makefile
        return f"make {goal}: that target is called as {spoken(goal)}"
    near = nearest(goal, targets())
    hint = f"did you mean {spoken(near)}?" if near else "make help ALL=1 lists them"
    if goal.endswith((".yaml", ".yml")):
        hint = f"a run YAML is given as CONFIG={goal}"
    elif goal.lower().endswith(DATA_SUFFIXES):
        hint = f"data are named by a run YAML: make new MODEL=owner/name DATA={goal} writes one"
    return f"make {goal}: there is no such target; {hint}"


def _wrong(name: str, asked: List[str], words: str) -> Optional[str]:
    if name in VARIABLES:
        if any(is_taken(name, goal) for goal in asked):
            return None
        refused = f"{name}= is not used by {words}; it belongs to {_takers(name)}"
        is_run = any(command_of(goal) in (*TRAINING, *DESCRIBING) for goal in asked)
        return f"{refused} (the setting: SET='{SETTINGS[name]}=...')" if is_run and name in SETTINGS else refused
    if name.upper() in _OTHERS:
        return None
    own = [one for one in VARIABLES if any(is_taken(one, goal) for goal in asked)]
    # PYTHONPATH is no slip of PYTHON, and ACCELERATE_CONFG is one of ACCELERATE_CONFIG
    alike = 0.85 if name.startswith(OF_OTHERS) else None
    near = OTHER_WORDS.get(plain(name))
    if near not in own:  # GPU=4090 is HARDWARE= for make plan, and a slip of GPUS= where ranks are launched
        near = nearest(name, own, alike=alike) or near or nearest(name, list(VARIABLES), alike=alike)
    if near is not None:
        whose = "" if near in own else f" It belongs to {_takers(near)}"
        return f"{name}= is not a variable of {words}; did you mean {near}=?{whose}"
    if name.startswith(OF_OTHERS):
        return None
    return (
        f"{name}= is not a variable of {words}, which takes {', '.join(own)} (a setting of the run YAML goes into "
        f"SET='a.b=1'; a variable for another program goes before make: {name}=... make)"
    )


def _takers(name: str) -> str:
    named = [spoken(one) for one in VARIABLES[name].commands]
    return ", ".join(named) if len(named) <= 7 else f"{', '.join(named[:6])} and {len(named) - 6} others"
