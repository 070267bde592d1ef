"""The commands, the variables of make and the program's flags for them, in one table:
`variables.json`.

Make's check of its command line, `make help`, the program's flags and their help, its `Request` and
the tests read it. Texts name commands as make's, and `spell_commands` writes them as the program's
for a user who has no Makefile. Standard library only, and nothing newer than Python 3.6:
`scripts/check_variables.py` reads it with any Python, before there is an environment.
"""

import json
import os
import re
import shlex
from pathlib import Path
from typing import Any, Dict, Iterable, List, NamedTuple, Optional, Sequence, Set, Tuple

from sft_play.spelling import nearest_name, normalize_name

_VARIABLE_TABLE: Dict[str, Any] = json.loads(
    Path(__file__).with_name("variables.json").read_text(encoding="utf-8")
)


# The commands in the order of the help: each with the file that runs it, the groups that it is in,
# and its help.
COMMAND_ROWS: Dict[str, Dict[str, str]] = _VARIABLE_TABLE["commands"]
COMMANDS = tuple(COMMAND_ROWS)


def _expand_names(text: str) -> Tuple[str, ...]:
    """Split an entry into names. `@NAME` stands for the commands of a group, or for targets of
    make, which have no row."""
    names = []  # type: List[str]
    for word in text.split():
        group = word[1:]
        if not word.startswith("@"):
            names.append(word)
        elif group == "commands":
            names += COMMANDS
        elif group in _VARIABLE_TABLE["groups"]:
            names += _expand_names(_VARIABLE_TABLE["groups"][group])
        else:
            names += [
                name for name, row in COMMAND_ROWS.items() if group in row.get("groups", "").split()
            ]
    return tuple(names)


# Commands that train, and those about the run that `train` with the same words would start.
TRAINING_COMMANDS, DESCRIBING_COMMANDS = _expand_names("@training"), _expand_names("@describing")
TARGETS: Dict[str, str] = _VARIABLE_TABLE["targets"]
MAINTENANCE_TARGETS = _expand_names("@maintaining")
MAKE_ONLY_COMMANDS = _expand_names("@commands_of_make")
# Flags that are not variables: the commands that take them, their help, and the setting for which
# some stand.
EXTRA_FLAGS: Dict[str, Dict[str, Any]] = {
    flag: {**row, "for": _expand_names(row["for"])}
    for flag, row in _VARIABLE_TABLE["flags"].items()
}
SETTING_BY_VARIABLE: Dict[str, str] = _VARIABLE_TABLE["settings"]
# Other names for the same, in capitals without underscores: launchers' and people's.
VARIABLE_SYNONYMS = {
    word: name for name, words in _VARIABLE_TABLE["other_words"].items() for word in words.split()
}
# Prefixes of other programs' and libraries' variables: `make train HF_TOKEN=…` passes them on.
FOREIGN_PREFIXES = _expand_names(_VARIABLE_TABLE["of_others"])
_FOREIGN_VARIABLES = _expand_names(_VARIABLE_TABLE["others"])
DATA_SUFFIXES = (".jsonl", ".ndjson", ".csv", ".tsv", ".parquet", ".arrow", ".txt")


class Variable(NamedTuple):
    """A variable of make, and the flag of the program that means the same.

    `commands`: those that take it. `help` and `example`: its line of `make help`, and the help of
    its flag. `kind`: how `Request` reads it: "text", "path", "names" (with commas), "count" (from
    1) and "number" (from 0) may not be empty; "list" may; "switch" is off where it is empty or 0;
    "launch" is read by `launch/request.py`. `counted_noun`: what a count or a number counts, for
    error messages. `flag_only_commands`: commands that take the flag, although their target of make
    does not pass the variable.
    """

    commands: Tuple[str, ...]
    help: str
    example: str
    kind: str
    has_flag: bool
    flag_only_commands: Tuple[str, ...]
    counted_noun: str


VARIABLES: Dict[str, Variable] = {
    name: Variable(
        _expand_names(row["for"]),
        row["help"],
        row["example"],
        row.get("kind", "text"),
        row.get("flag", True),
        _expand_names(row.get("ranks", "")),
        row.get("of", ""),
    )
    for name, row in _VARIABLE_TABLE["variables"].items()
}


def target_command(target: str) -> str:
    """The command of `sft-play` that a target of make runs."""
    return TARGETS.get(target, target)


def all_targets() -> Set[str]:
    """Every target of make that the table speaks of."""
    return {*COMMANDS, *TARGETS, *MAKE_ONLY_COMMANDS}


def takes_variable(name: str, target: str) -> bool:
    """True if a target of make uses a variable."""
    commands = VARIABLES[name].commands
    return commands == ("*",) or target in commands or target_command(target) in commands


def flag_commands(name: str) -> Tuple[str, ...]:
    """The commands of the program that take the flag of a variable."""
    variable = VARIABLES[name]
    return tuple(
        command
        for command in (*variable.commands, *variable.flag_only_commands)
        if command not in (*TARGETS, *MAKE_ONLY_COMMANDS)
    )


def target_help(makefile: str, target: str) -> List[str]:
    """What `make help TARGET` shows: the target's line of a Makefile, and the variables that it
    takes."""
    text = next(line for line in makefile.splitlines() if line.startswith(target + ":")).partition(
        "## "
    )[2]
    variables = [
        (name, variable) for name, variable in VARIABLES.items() if takes_variable(name, target)
    ]
    return [
        f"make {target}: {text}",
        *(f"  {name + '=' + variable.example:<24} {variable.help}" for name, variable in variables),
    ]


def command_line_problem(
    goals: Sequence[str],
    given_names: Iterable[str],
    empty_names: Iterable[str],
    makefile_targets: Optional[Sequence[str]] = None,
) -> Optional[str]:
    """Say what is wrong with make's command line, in one line; None where nothing is.

    Args:
        goals: the targets that were asked for.
        given_names: all variables on the command line.
        empty_names: the ones without a value.
        makefile_targets: the targets of the Makefile that asks; None is every target of both.
    """
    targets = list(goals or ["help"])
    unknown = [
        _unknown_target_problem(goal)
        for goal in targets
        if goal not in (makefile_targets or all_targets())
    ]
    if unknown:
        return "; ".join(unknown)
    command_text = f"make {' '.join(targets)}" if goals else "make without a target"
    problems = [_variable_problem(name, targets, command_text) for name in sorted(given_names)]
    for name in sorted(empty_names):
        variable = VARIABLES.get(name)
        is_used = variable is not None and any(takes_variable(name, goal) for goal in targets)
        if variable is not None and is_used and variable.kind not in ("list", "switch"):
            problems.append(
                f"{name}= is given and empty (an unset shell variable?): give a value,"
                " or leave it out"
            )
    return "; ".join(filter(None, problems)) or None


def make_command(target: str) -> str:
    """How a target is called, from the checkout."""
    return f"make -C benchmarks {target}" if target in MAINTENANCE_TARGETS else f"make {target}"


def _unknown_target_problem(goal: str) -> str:
    if goal in all_targets():  # of the other Makefile
        return f"make {goal}: that target is called as {make_command(goal)}"
    hint, suggestion = "make help ALL=1 lists them", nearest_name(goal, all_targets())
    if goal.endswith((".yaml", ".yml")):
        hint = f"a run YAML is given as CONFIG={goal}"
    elif goal.lower().endswith(DATA_SUFFIXES):
        hint = f"data are named by a run YAML: make new MODEL=owner/name DATA={goal} writes one"
    elif suggestion is not None:
        hint = f"did you mean {make_command(suggestion)}?"
    return f"make {goal}: there is no such target; {hint}"


def _variable_problem(name: str, targets: List[str], command_text: str) -> Optional[str]:
    if name in VARIABLES:
        if any(takes_variable(name, goal) for goal in targets):
            return None
        problem = (
            f"{name}= is not used by {command_text}; it belongs to"
            f" {_format_variable_commands(name)}"
        )
        is_run_command = any(
            target_command(goal) in (*TRAINING_COMMANDS, *DESCRIBING_COMMANDS) for goal in targets
        )
        if is_run_command and name in SETTING_BY_VARIABLE:
            problem += f" (the setting: SET='{SETTING_BY_VARIABLE[name]}=...')"
        return problem
    if name.upper() in _FOREIGN_VARIABLES:
        return None
    usable_names = [
        variable
        for variable in VARIABLES
        if any(takes_variable(variable, goal) for goal in targets)
    ]
    # PYTHONPATH is no slip of PYTHON, and ACCELERATE_CONFG is one of ACCELERATE_CONFIG
    min_similarity = 0.85 if name.startswith(FOREIGN_PREFIXES) else None
    suggestion = VARIABLE_SYNONYMS.get(normalize_name(name))
    # GPU=4090 is HARDWARE= for make plan, and a slip of GPUS= where ranks are launched
    if suggestion not in usable_names:
        suggestion = (
            nearest_name(name, usable_names, min_similarity=min_similarity)
            or suggestion
            or nearest_name(name, list(VARIABLES), min_similarity=min_similarity)
        )
    if suggestion is not None:
        owner_note = (
            ""
            if suggestion in usable_names
            else f" It belongs to {_format_variable_commands(suggestion)}"
        )
        return (
            f"{name}= is not a variable of {command_text}; did you mean {suggestion}=?{owner_note}"
        )
    if name.startswith(FOREIGN_PREFIXES):
        return None
    return (
        f"{name}= is not a variable of {command_text}, which takes {', '.join(usable_names)} (a"
        " setting of the run YAML goes into SET='a.b=1'; a variable for another program goes"
        f" before make: {name}=... make)"
    )


def _format_variable_commands(name: str) -> str:
    commands = [make_command(command) for command in VARIABLES[name].commands]
    if len(commands) > 7:
        return f"{', '.join(commands[:6])} and {len(commands) - 6} others"
    return ", ".join(commands)


# --- commands in texts: make's in a checkout, the program's elsewhere -----------------------------
# The tools of developers' commands, which only a checkout has.
_TOOLS_FOLDER = Path(__file__).resolve().parent.parent / "benchmarks"
# `make TARGET` with variables as a shell reads them; dots may stand for some of them. A text may
# quote a row: `make new friends` is no command.
_WORD = r"""(?: (?:\.\.\.(?= [A-Z])|(?=['"]?[A-Z_]+=)(?:'[^']*'|"[^"]*"|\\.|[^\s'"\\();])+))"""
_TARGETS = "|".join(sorted(all_targets() - {"new"}, key=len, reverse=True))
_MAKE_COMMAND = re.compile(
    rf"\bmake (?P<target>(?:-C benchmarks )?(?:{_TARGETS})(?![\w-])|new(?= (?:needs|'?[A-Z]+=)))"
    rf"(?P<words>{_WORD}*)"
)


def is_makefile_near() -> bool:
    """True if the user stands in a checkout, where make runs the commands."""
    return os.path.isfile("scripts/make.mk")  # noqa: PTH113  (no error for a folder that is gone)


def spell_commands(text: str) -> str:
    """Write the commands in a text as the user can type them: `make plan CONFIG=my.yaml` in a
    checkout, else `sft-play plan --config my.yaml`."""
    if "make " not in text or is_makefile_near():
        return text
    return _MAKE_COMMAND.sub(_spell_command, text)


def _spell_command(match: "re.Match[str]") -> str:
    target = match["target"]
    words = match["words"].rstrip(",:.") if not match["words"].endswith("...") else match["words"]
    rest = match["words"][len(words) :]
    command = target_command(target)
    is_developing = COMMAND_ROWS.get(command, {}).get("file") == "developing"
    if command not in COMMAND_ROWS or (is_developing and not _TOOLS_FOLDER.is_dir()):
        return f"make {target}{words} in a checkout{rest}"
    before, after = [], ["--tensorboard"] if target in TARGETS else []  # type: List[str], List[str]
    for word in shlex.split(words):
        name, _, value = word.partition("=")
        if name == "SET":
            after += shlex.split(value)
        elif name not in VARIABLES:
            after.append(word)
        elif not VARIABLES[name].has_flag:
            before.append(word)
        else:
            flag = "--" + name.lower().replace("_", "-")
            after += [flag] if VARIABLES[name].kind == "switch" else [flag, value]
    return " ".join(map(_quote_word, [*before, "sft-play", command, *after])) + rest


def _quote_word(word: str) -> str:
    """Quote a word where a shell would split or expand it; dots for a value stay as they are."""
    return shlex.quote(word) if re.search(r"[^\w@%+=:,./…-]", word) or not word else word
