"""What an unknown key probably means: another tool's name for it, its place in another section, or a near spelling.

Keys that speak of one option are worked out together: `load_in_4bit: true` and `adapter: lora` are one QLoRA, not two
answers of which the last one counts.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from sft_play.config import other_tools
from sft_play.config.options import accepts, homes, leaves, sections, yaml_value
from sft_play.config.yaml_io import OVERRIDE, Path_, Plain, Problem, YamlDocument, dotted, parse_value, show, walk
from sft_play.errors import ConfigError
from sft_play.spelling import nearest_name

# Keys whose values are not repeated in a message; `pad_token` and the like name a token of the vocabulary.
_SECRET = re.compile(r"(?<!pad)(?<!eos)(?<!bos)(?<!unk)_token$|^token$|api_key|secret|password", re.IGNORECASE)
# Names that mean something else in every section: those of another tool's section are not looked up in ours.
_VAGUE = {"name", "path", "dir", "mode", "steps", "how", "headers", "workers", "trace"}
# How similar names must be where nothing else connects them: `loss_fn` (0.86) is not a misspelt `loss_on`.
_ALIKE = 0.87


@dataclass(frozen=True)
class Foreign:
    """A key that our sections do not have: `section` is ours that holds it or corresponds to the one that does,
    `meaning` what the table of other tools answers, `home` the only place of our key of that name, which takes the
    value; None where there is none. `is_default`: it is not in the file, but what its tool takes then."""

    path: Path_
    value: Plain
    section: str | None
    meaning: other_tools.Meaning | None
    home: str | None = None
    is_default: bool = False

    @property
    def name(self) -> str:
        """The key alone."""
        return str(self.path[-1]).lower()

    @property
    def settings(self) -> dict[str, Plain]:
        """The options that it asks for, by their paths."""
        if self.meaning is not None:
            return dict(self.meaning.settings)
        return {} if self.home is None else {self.home: self.value}


def foreign_keys(document: YamlDocument, path: Path_, value: Plain, *, section: str | None) -> Iterator[Foreign]:
    """An unknown key; of a section every key in it, unless the table answers it as a whole. `section` is ours that
    holds it, or that the other tool's section corresponds to; None if unknown."""
    key, row = str(path[-1]), other_tools.known(tuple(map(str, path)))
    about = other_tools.table().sections.get(key.lower())
    is_answered_whole = row is not None and (not row.path or row.path in other_tools.DATA) and about is None
    if not isinstance(value, dict) or not value or is_answered_whole:
        yield _foreign(path, value, section)
        return
    near = None if about is not None else nearest_name(key, [name for name in sections() if name])
    fields = sections()[about or near or ""].model_fields if about or near else {}
    answered = [inner for inner in value if about is not None or (inner not in fields and _is_known((*path, inner)))]
    if about is None and (section is not None or not answered):
        yield _foreign(path, value, section)
    for inner in value:
        if inner in answered or (near is not None and inner not in fields):
            yield from foreign_keys(document, (*path, inner), value[inner], section=about or near)


def _foreign(path: Path_, value: Plain, section: str | None) -> Foreign:
    parts = tuple(map(str, path))
    places = _places(parts, section)
    is_ours = len(places) == 1 and places[0] in leaves() and accepts(places[0], value)
    return Foreign(path, value, section, meant(parts, value), places[0] if is_ours else None)


def _places(parts: tuple[str, ...], section: str | None) -> list[str]:
    """Where our keys of that name belong; none where the name is too vague to say."""
    key, is_own = parts[-1], section is not None and ".".join(parts[:-1]) == section
    at = homes(key)
    if section and not is_own and f"{section}.{key}" in at:
        at = [f"{section}.{key}"]
    if ".".join(parts) in leaves():
        at = [".".join(parts)]
    return at if is_own or len(at) == 1 or key not in _VAGUE else []


def meant(parts: tuple[str, ...], value: Plain) -> other_tools.Meaning | None:
    """What the table of other tools answers; None without an answer, or where our own key says more than words."""
    row = other_tools.known(parts)
    # a row for both names (compile.mode) says more than the home of the last one (tuning.mode)
    is_for_both = len(parts) > 1 and ".".join(parts[-2:]).lower() in other_tools.table().rows
    if row is None or (homes(parts[-1]) and row.only_words and not is_for_both):
        return None
    return other_tools.answer(row, value)


def _is_known(path: Path_) -> bool:
    return other_tools.known(tuple(map(str, path))) is not None or bool(homes(str(path[-1])))


def unknown_problem(document: YamlDocument, key: Foreign) -> Problem:
    """The problem of an unknown key."""
    where, raw = document.where(key.path), document.raw.get(key.path)
    joint = "=" if where == OVERRIDE else ": "
    if key.meaning is not None:
        hint = f"; {answer_words(key.meaning, key.value, raw=raw, joint=joint)}"
    else:
        hint = _suggestion(tuple(map(str, key.path)), key.value, raw=raw, section=key.section, joint=joint)
    return Problem(dotted(key.path), where, f"unknown key ({shown_value(key, raw)}){hint}")


def shown_value(key: Foreign, raw: str | None) -> str:
    """`value 4`, or that it is a secret."""
    inside = [str(part) for path, value in walk(key.value, key.path[-1:]) if isinstance(value, str) for part in path]
    is_secret = any(map(_SECRET.search, inside))
    return "not shown" if is_secret else f"value {show(key.value, raw=raw)}"


def flag_hint(flag: str, value: str | None) -> str | None:
    """What another tool's flag (`--mixed_precision`) with its value means here; None if unknown."""
    parts = tuple(flag.lstrip("-").replace("-", "_").split("."))
    try:
        parsed = True if value is None else parse_value(value, name=flag)
    except ConfigError:
        parsed = value
    if ".".join(parts) not in leaves() and (parts[-1] in _VAGUE or not _is_known(parts)):
        return None
    answer = meant(parts, parsed)
    if answer is not None:
        return answer_words(answer, parsed, raw=value, joint="=")
    return _suggestion(parts, parsed, raw=value, section=None, joint="=").removeprefix("; ")


def _suggestion(parts: tuple[str, ...], value: Plain, *, raw: str | None, section: str | None, joint: str) -> str:
    key, at = parts[-1], _places(parts, section)
    if at:
        shown = f"{joint}{written(value, raw)}" if len(at) == 1 and at[0] in leaves() and accepts(at[0], value) else ""
        return f"; it belongs at {' or '.join(at[:3])}{shown}"
    here = list(sections()[section].model_fields) if section is not None else []
    near = nearest_name(key, here)
    if near:
        return f"; did you mean {f'{section}.' if section else ''}{near}?"
    elsewhere = {path.rpartition(".")[2] for path in [*leaves(), *sections()]} - _VAGUE - {""}
    near = None if key in _VAGUE else nearest_name(key, elsewhere, other_tools.table().plain_keys, min_similarity=_ALIKE)
    if near:
        if places := homes(near):
            return f"; did you mean {' or '.join(places[:3])}?"
        answer = other_tools.answer(other_tools.table().rows[near], value)
        return f"; did you mean {near} ({answer_words(answer, value, raw=raw, joint=joint)})?"
    return f"; {section or 'the root'} takes {', '.join(here or sections()[''].model_fields)}"


def answer_words(answer: other_tools.Meaning, value: Plain, *, raw: str | None, joint: str) -> str:
    """An answer of the table in words: `here it is train.bf16: true`."""
    settings = []
    for path, ours in answer.settings:
        is_same = ours is value or (ours == value and type(ours) is type(value))
        default = ", the default" if path in leaves() and leaves()[path].default == ours else ""
        settings.append(f"{path}{joint}{written(ours, raw if is_same else None)}{default}")
    words = answer.words.replace("{value}", show(value, raw=raw).strip('"'))
    if not settings:
        return words
    return f"here it is {' and '.join(settings)}{f' ({words})' if words else ''}"


def written(value: Plain, raw: str | None) -> str:
    """A value in the form that YAML and `SET=` read."""
    if isinstance(value, str):
        plain = re.fullmatch(r"[\w./~@+-][\w./~@:+-]*", value) and parse_value(value, name="") == value
        return value if plain else show(value)
    return show(value, raw=raw) if raw else yaml_value(value)


# --- together ---------------------------------------------------------------------------------------------------------

# Of modes that keys ask for, the first: 4 bits and an adapter are QLoRA, and weights that are trained have 16 bits.
_MODES = ("full", "qlora", "lora")
# Keys that decide, whatever others say: by `save_strategy: epoch` the Trainer does not read save_steps.
_STRONGER = {
    "eval.steps": ("eval_strategy", "evaluation_strategy"),
    "train.save_steps": ("save_strategy",),
    "tuning.lora.target_modules": ("lora_target_linear", "match_all_linear"),
}
# Numbers of steps, which count before shares of them, and before a switch that asks for any.
_FIRST = ("warmup_steps", "num_warmup_steps", "eval_steps", "eval_every")


def together(keys: Sequence[Foreign]) -> list[Foreign]:
    """The keys with the answers that hold for all of them: one value for each option, and which key decides it."""
    decided = list(keys)
    for option in dict.fromkeys(path for key in keys for path in key.settings):
        asking = [key for key in keys if option in key.settings]
        first = min(asking, key=lambda key: _rank(option, key))
        value = first.settings[option]
        words = f"together with {first.name}: {show(first.value)}"
        lists = [key.settings[option] for key in asking if not key.is_default]
        items = [item for one in lists if isinstance(one, list) for item in one]
        if items and isinstance(value, list) and all(isinstance(item, str) for item in items):
            value, words = list(dict.fromkeys(items)), ""  # the trackers, the tokens, the modules of both
        for at, key in enumerate(decided):
            if option in key.settings and other_tools.spelled(key.settings[option]) != other_tools.spelled(value):
                reason = "" if key.is_default else words
                if reason and option.startswith("data.columns."):  # one name of a column holds for all data sets
                    column = f"{option}={key.settings[option]}"
                    reason += f"; make process SET='data.process.raw_path=FILE {column}' writes its rows"
                settings = tuple({**key.settings, option: value}.items())
                decided[at] = dataclasses.replace(key, meaning=other_tools.Meaning(settings, reason))
    return decided


def _rank(option: str, key: Foreign) -> tuple[bool, bool, bool, int, bool]:
    """What counts first of several keys: a strategy, what is switched on, the mode that includes the other."""
    value = key.settings[option]
    mode = _MODES.index(str(value)) if value in _MODES else len(_MODES)
    return (
        key.is_default and option != "tuning.mode",
        key.name not in _STRONGER.get(option, ()),
        other_tools.spelled(key.value) in other_tools.OFF,
        mode,
        key.name not in _FIRST,
    )
