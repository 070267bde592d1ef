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
from typing import Any, Dict, Iterable, Iterator, List, NamedTuple, Optional, Sequence, Set, Tuple

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
# Other names for settings in the same form, and for targets with what to say of each.
SETTING_SYNONYMS, TARGET_HINTS = (
    {word: answer for answer, words in _VARIABLE_TABLE[table].items() for word in words.split()}
    for table in ("setting_words", "target_words")
)
# Prefixes of other programs' and libraries' variables: `make train HF_TOKEN=…` passes them on.
FOREIGN_PREFIXES = _expand_names(_VARIABLE_TABLE["of_others"])
_FOREIGN_VARIABLES = _expand_names(_VARIABLE_TABLE["others"])
# The run YAML's settings, as JSON: what reads this file may lack the package's libraries.
_SCHEMA_FILE = Path(__file__).parent.parent / "configs" / "run.schema.json"
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


def topic_help(makefile: str, topic: str) -> List[str]:
    """What `make help TOPIC` shows: of a target its line of a Makefile and the variables that it
    takes, of a variable its help and targets, of a setting its default and what it is."""
    if topic in VARIABLES:
        variable = VARIABLES[topic]
        commands = "every target" if variable.commands == ("*",) else _format_all(variable.commands)
        return [f"{topic}={variable.example}: {variable.help}", f"  of {commands}"]
    texts = [line for line in makefile.splitlines() if line.startswith(topic + ":")]
    if not texts:
        return [f"{path} {text}  SET='{path}=...'" for path, text in find_settings(topic).items()]
    return [
        f"make {topic}: {texts[0].partition('## ')[2]}",
        *(
            f"  {name + '=' + variable.example:<24} {variable.help}"
            for name, variable in VARIABLES.items()
            if takes_variable(name, topic)
        ),
    ]


def find_settings(name: str) -> Dict[str, str]:
    """The settings of the run YAML of that name, or dotted path, with default and help; none
    where the schema is not here."""
    if not _SCHEMA_FILE.is_file():
        return {}
    schema = json.loads(_SCHEMA_FILE.read_text(encoding="utf-8"))
    settings = _walk_schema(schema, schema["$defs"], "")
    return {path: text for path, text in settings if f".{path}".endswith(f".{name.lower()}")}


def _walk_schema(
    section: Dict[str, Any], sections: Dict[str, Any], prefix: str
) -> Iterator[Tuple[str, str]]:
    for name, row in section["properties"].items():
        inner = sections.get(row.get("$ref", "").rpartition("/")[2])
        if inner is not None:
            yield from _walk_schema(inner, sections, prefix + name + ".")
        else:
            text = " ".join(row.get("description", "").split())
            default = json.dumps(row.get("default")).strip('"')
            yield prefix + name, f"(default: {default}): {text}"


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
        # make help HARDWARE, make help train.epochs
        and not (targets[0] == "help" and (goal in VARIABLES or find_settings(goal)))
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


def repeated_variable_problem(words: Sequence[str]) -> Optional[str]:
    """Say which variable stands twice among the words of make, which would keep the last alone;
    None where none does."""
    for name in VARIABLES:
        texts = [word.partition("=")[2] for word in words if word.startswith(name + "=")]
        if len(texts) > 1:
            joined = f": {name}='{' '.join(texts)}'" * (VARIABLES[name].kind == "list")
            return (
                f"{name}= is given {len(texts)} times, and make keeps the last alone; give it"
                f" once{joined}"
            )
    return None


def make_command(target: str) -> str:
    """How a target is called, from the checkout."""
    return f"make -C benchmarks {target}" if target in MAINTENANCE_TARGETS else f"make {target}"


def _unknown_target_problem(goal: str) -> str:
    if goal in all_targets():  # of the other Makefile
        return f"make {goal}: that target is called as {make_command(goal)}"
    suggestion = nearest_name(goal, all_targets())
    hint = TARGET_HINTS.get(goal.lower().replace("_", "-"), "make help ALL=1 lists them")
    if goal.endswith((".yaml", ".yml")):
        hint = f"a run YAML is given as CONFIG={goal}"
    elif goal.lower().endswith(DATA_SUFFIXES):
        hint = f"data are named by a run YAML: make new MODEL=owner/name DATA={goal} writes one"
    elif suggestion is not None and hint not in TARGET_HINTS.values():
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
    setting = SETTING_SYNONYMS.get(normalize_name(name)) or next(iter(find_settings(name)), None)
    if setting and not nearest_name(name, usable_names):
        return (
            f"{name}= is not a variable of {command_text}, but a setting of the run YAML:"
            f" SET='{setting}=...'"
        )
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
    commands = VARIABLES[name].commands
    if len(commands) > 7:
        return f"{_format_all(commands[:6])} and {len(commands) - 6} others"
    return _format_all(commands)


def _format_all(commands: Iterable[str]) -> str:
    return ", ".join(map(make_command, commands))


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
    """True if the current folder is a checkout, where make runs the commands."""
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
