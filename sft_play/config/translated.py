"""Another tool's file as a run YAML: its keys in our terms, worked out together, then that tool's
own defaults for what it leaves out, and what has no equivalent as comments with the reason."""

import copy
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import yaml

from sft_play.config import other_tools
from sft_play.config.options import all_options, find_option, option_accepts, sections
from sft_play.config.validation import find_unknown_keys, read_config, validate
from sft_play.config.yaml_io import (
    JsonValue,
    KeyPath,
    YamlDocument,
    dotted_path,
    find_value,
    format_value,
    nest_values,
    parse_yaml,
    resolve_scalar,
    walk_leaves,
)
from sft_play.errors import ConfigError

_UNKNOWN_KEY = other_tools.KnownKey(explanation="there is no such option here")
_REMOVE_ADVICE = re.compile(r"[:,;]? ?remove it$")
# Words beside a setting that say that it is not all that was asked for.
_PARTIAL_WORDS = re.compile(r"\bnot\b|longest|together|with tuning")


@dataclass
class Translation:
    """Our settings by path, and what is not taken, with the reason."""

    tool: other_tools.OtherTool
    settings: dict[str, JsonValue]
    left_out_keys: list[tuple[str, str]] = field(default_factory=list)

    def comments(self) -> list[str]:
        """What is not taken, or taken in another way, as lines of comment."""
        keys_by_reason: dict[str, list[str]] = {}
        for key, reason in self.left_out_keys:
            keys_by_reason.setdefault(reason, []).append(key)
        texts = [f"{', '.join(keys)}: {reason}" for reason, keys in keys_by_reason.items()]
        # no word is broken: a path or a command is meant to be copied
        wrapper = textwrap.TextWrapper(
            112,
            initial_indent="# ",
            subsequent_indent="#     ",
            break_long_words=False,
            break_on_hyphens=False,
        )
        return [line for text in texts for line in wrapper.wrap(text)]


def translate_file(
    text: str, *, name: str, user_settings: Mapping[str, JsonValue], row_format: str = ""
) -> Translation:
    """Translate another tool's file into a run that loads. `user_settings` win over the file's;
    `row_format` is the format of the rows, if it is known. Raises ConfigError if the file is no
    YAML, names no model, or describes another kind of training."""
    values_by_path = {
        dotted_path(path): str(value)
        for path, value in walk_leaves(parse_yaml(text, name=name).data)
    }
    # OmegaConf's references: ${output_dir}
    document = parse_yaml(
        re.sub(r"\$\{([\w.]+)\}", lambda ref: values_by_path.get(ref[1], ref[0]), text), name=name
    )
    if document.problems:
        raise ConfigError("\n".join(map(str, document.problems)))
    _move_shared_data_keys(document)
    foreign_keys = find_unknown_keys(document, read_config(document)[1])
    key_names = {
        str(part)
        for key in foreign_keys
        for path, _ in walk_leaves(key.value, key.path)
        for part in path
    }
    result = Translation(other_tools.detect_tool(key_names), dict(user_settings))
    keys = [*foreign_keys, *_same_named_keys(document, result)]
    keys += _data_set_keys(keys)
    for index, key in enumerate(keys):
        if known_key := result.tool.known_keys.get(key.name):
            keys[index] = replace(
                key, translation=other_tools.translate_value(known_key, key.value)
            )
    for key in keys:  # what was written would train something else
        if (
            key.translation is not None
            and key.value
            and key.translation.explanation.startswith("preference tuning")
        ):
            raise ConfigError(
                f"{name}: {dotted_path(key.path)}: {format_value(key.value)}:"
                f" {key.translation.explanation}; nothing is written"
            )
    keys = other_tools.merge_keys([*keys, *_default_keys(result.tool, keys)])
    # what another setting decides (steps of each epoch) behind it; of the defaults the mode first
    for key in sorted(
        keys, key=lambda key: not all(option_accepts(*setting) for setting in key.settings.items())
    ):
        if not key.is_default:
            _apply_key(key, document, result)
    for key in sorted(
        filter(lambda key: key.is_default, keys), key=lambda key: "tuning.mode" not in key.settings
    ):
        _apply_default(key, result, row_format)
    if "model.name" not in result.settings:
        raise ConfigError(
            f"{name} names no model; give one beside it: make new FROM={name} MODEL=owner/name"
        )
    _complete_settings(result, user_settings)
    return result


def _move_shared_data_keys(document: YamlDocument) -> None:
    """Move keys that describe all data sets (`dataset_config`, `max_samples`) into the entry of
    each data set."""
    named_keys = {
        key: other_tools.find_known_key((key,)) for key, value in document.data.items() if value
    }
    data_set_keys = [
        key
        for key, known_key in named_keys.items()
        if known_key
        and known_key.path == other_tools.DATA_SET_OPTIONS[0]
        and other_tools.translate_value(known_key, document.data[key]).settings
    ]
    shared_options = {
        key: document.data.pop(key)
        for key in named_keys
        if data_set_keys and key in other_tools.key_table().data_set_names["beside"]
    }
    for data_set_key in data_set_keys if shared_options else []:
        document.data[data_set_key] = [
            shared_options | entry
            for entry in other_tools.parse_data_sets(document.data[data_set_key])
        ]


def _same_named_keys(
    document: YamlDocument, result: Translation
) -> Iterator[other_tools.ForeignKey]:
    """Take values at paths that are ours too: as settings where our option accepts them, else yield
    them as keys."""
    for path in [*all_options(), *filter(None, sections())]:
        key_path: KeyPath = tuple(path.split("."))
        value = find_value(document.data, key_path)
        if value is None or (path in sections() and isinstance(value, dict)):
            continue
        if path in all_options() and option_accepts(path, value):
            result.settings.setdefault(path, value)
            continue
        known_key = other_tools.key_table().known_keys.get(str(key_path[-1]))
        translation = None
        if known_key is not None:
            translation = other_tools.translate_value(known_key, value)
        elif path in all_options():
            translation = other_tools.KeyTranslation(
                explanation=f"expected {all_options()[path].accepted_values}"
            )
        yield other_tools.ForeignKey(key_path, value, None, translation)


def _data_set_keys(keys: Sequence[other_tools.ForeignKey]) -> Iterator[other_tools.ForeignKey]:
    """Yield what is said of each data set that is trained on (a split, columns) as keys of their
    own."""
    for key in keys:
        known_key = other_tools.find_known_key(tuple(map(str, key.path)))
        if (
            known_key is None
            or known_key.path != other_tools.DATA_SET_OPTIONS[0]
            or isinstance(key.value, str)
        ):
            continue
        for index, entry in enumerate(other_tools.parse_data_sets(key.value)):
            entry_path = (*key.path, index) if isinstance(key.value, list) else key.path
            for inner_path, value in walk_leaves(entry):
                inner_key = (
                    other_tools.find_known_key(("entry", *map(str, inner_path))) or _UNKNOWN_KEY
                )
                translation = other_tools.translate_value(inner_key, value)
                if value and inner_path[0] in other_tools.key_table().data_set_names["config"]:
                    # part of the source's name, but of a local file
                    rest = {name: part for name, part in entry.items() if name != inner_path[0]}
                    settings, settings_without = (
                        other_tools.translate_value(known_key, [part]).settings
                        for part in (entry, rest)
                    )
                    if settings and settings == settings_without:
                        translation = other_tools.KeyTranslation(
                            explanation="it changes nothing that is read here"
                        )
                yield other_tools.ForeignKey((*entry_path, *inner_path), value, None, translation)


def _default_keys(
    tool: other_tools.OtherTool, keys: Sequence[other_tools.ForeignKey]
) -> Iterator[other_tools.ForeignKey]:
    """Yield the tool's defaults as keys, without the options that the file speaks of, whether they
    were taken or not; the mode follows from several keys, named and not."""
    # A default stays out where the file has its key (in whatever section), or any key of ours or
    # theirs that decides the same option: the file has spoken, also where it was not understood.
    set_keys = [key for key in keys if key.value is not None]
    names = {str(part) for key in set_keys for part in key.path}
    known_keys = [other_tools.find_known_key(tuple(map(str, key.path))) for key in set_keys]
    options = {known_key.path for known_key in known_keys if known_key} | {
        path for key in set_keys for path in key.settings
    }
    if "train.effective_batch_size" in options:  # the plan divides it
        options |= {"train.batch_size", "train.grad_accum"}
    for name, value in tool.defaults.items():
        paths = find_option(name)
        known_key = (
            tool.known_keys.get(name)
            or other_tools.find_known_key(tuple(name.split(".")))
            or other_tools.KnownKey(paths[0] if len(paths) == 1 else "")
        )
        translation = (
            other_tools.parse_translation(value)
            if isinstance(value, dict)
            else other_tools.translate_value(known_key, value)
        )
        key = other_tools.ForeignKey((name,), value, None, translation, is_default=True)
        is_in_file = name.rpartition(".")[2] in names or not options.isdisjoint(
            key.settings.keys() - {"tuning.mode"}
        )
        if value is not None and not is_in_file:
            options |= key.settings.keys()
            yield key


def _apply_key(key: other_tools.ForeignKey, document: YamlDocument, result: Translation) -> None:
    """Take the settings of a key that our options accept; say what is not taken, or taken in
    another way."""
    if key.translation == other_tools.KeyTranslation():
        return
    values = (
        (path, _dependent_value(path, value, result.settings))
        for path, value in key.settings.items()
    )
    accepted = {path: value for path, value in values if option_accepts(path, value)}
    for path, value in accepted.items():
        result.settings.setdefault(path, value)
    raw_text = document.raw_texts.get(key.path)
    reason = ""
    if key.translation is not None:
        reason = _REMOVE_ADVICE.sub("", key.translation.explanation).replace(
            "{value}", format_value(key.value, raw_text=raw_text).strip('"')
        )
    is_off = key.value is False or key.value in (None, "", [], {}) or "no effect" in reason
    if accepted:
        if not _PARTIAL_WORDS.search(reason):
            return
        accepted_text = " and ".join(
            f"{path}: {format_value(value)}" for path, value in accepted.items()
        )
        reason = f"here {accepted_text}; {reason}"
    elif is_off and not reason.startswith("here rows"):
        return
    result.left_out_keys.append(
        (
            f"{dotted_path(key.path)} ({other_tools.format_key_value(key, raw_text)})",
            reason or _UNKNOWN_KEY.explanation,
        )
    )


def _apply_default(key: other_tools.ForeignKey, result: Translation, row_format: str) -> None:
    """Take a default of the tool where it is not ours too; a default of adapters only where new
    ones are trained."""
    is_idle = result.settings.get("tuning.mode") == "full" or "model.adapter" in result.settings
    undecided = [
        path
        for path in key.settings
        if path not in result.settings and not (is_idle and path.startswith("tuning.lora."))
    ]
    for path in undecided:
        value = _dependent_value(path, key.settings[path], result.settings, row_format)
        if option_accepts(path, value) and (
            path == "tuning.mode" or value != all_options()[path].default
        ):
            result.settings[path] = value
    # the words for a mode speak of training all weights
    is_mode_explanation = "tuning.mode" in key.settings and result.settings["tuning.mode"] != "full"
    explanation = key.translation.explanation if key.translation and not is_mode_explanation else ""
    if (
        explanation
        and not _REMOVE_ADVICE.search(explanation)
        and (not key.settings or (undecided and _PARTIAL_WORDS.search(explanation)))
    ):
        result.left_out_keys.append((f"{dotted_path(key.path)} (not in the file)", explanation))


def _dependent_value(
    path: str, value: Any, settings: Mapping[str, JsonValue], row_format: str = ""
) -> Any:
    """Work out a value that follows from others: a mapping by mode, optimizer or format, or the
    product of a number and a setting."""
    if isinstance(value, dict) and not option_accepts(path, value):
        weights_kind = (
            "adapters" if any(path.startswith("tuning.lora.") for path in settings) else "whole"
        )
        alternatives = (
            row_format,
            settings.get("tuning.mode"),
            settings.get("train.optim"),
            weights_kind,
        )
        return next(
            (value[alternative] for alternative in alternatives if alternative in value), None
        )
    if (
        isinstance(value, list)
        and len(value) == 2
        and isinstance(value[0], int)
        and str(value[1]) in all_options()
    ):
        return int(value[0] * settings.get(value[1], all_options()[value[1]].default))
    return value


def _complete_settings(result: Translation, user_settings: Mapping[str, JsonValue]) -> None:
    """Complete what follows from several settings, the user's among them; then take out settings,
    with the reason, until what is left is a run YAML without a problem."""
    settings = result.settings
    if "data.train_path" in user_settings and "data.sources" in settings:
        result.left_out_keys.append(
            (f"data.sources: {format_value(settings.pop('data.sources'))}", "DATA= names the rows")
        )
    if "data.train_path" not in settings and "data.sources" not in settings:
        result.left_out_keys.append(
            (
                "data.train_path",
                (
                    "no file or data set of the hub is named; DATA=FILE, or this key, names it"
                    " (else: make process)"
                ),
            )
        )
    if settings["tuning.mode"] == "full":
        for path in [path for path in settings if path.startswith("tuning.lora.")]:
            result.left_out_keys.append(
                (
                    f"{path}: {format_value(settings.pop(path))}",
                    "all weights are trained, without adapters",
                )
            )
    if isinstance(settings.get("train.batch_size"), int):
        if "train.grad_accum" in settings and "train.effective_batch_size" in settings:
            total = settings.pop("train.effective_batch_size")
            result.left_out_keys.append(
                (f"train.effective_batch_size: {total}", "batch_size x grad_accum x GPUs decide it")
            )
        elif "train.effective_batch_size" not in settings:
            # the other tools' default; ours would be 32 rows in a step
            settings.setdefault("train.grad_accum", 1)
    while True:
        problems = validate(parse_yaml(format_run_yaml(result.settings), name="the run YAML"))[1]
        if not problems:
            return
        refused_settings = [
            (path, problem.message)
            for path in result.settings
            for problem in problems
            if f"{problem.path}.".startswith((f"{path}.", f"{path}["))
        ]
        if not refused_settings:
            raise ConfigError("\n".join(map(str, problems)))
        path, reason = refused_settings[0]
        result.left_out_keys.append((f"{path}: {format_value(result.settings.pop(path))}", reason))


# --- written --------------------------------------------------------------------------------------


def format_run_yaml(settings: Mapping[str, JsonValue]) -> str:
    """The text for settings by their dotted paths, in the order of the schema."""
    # a setting may be one of a mapping: data.columns.prompt
    ordered = [
        path for option in all_options() for path in settings if f"{path}.".startswith(f"{option}.")
    ]
    tree = nest_values({path: copy.copy(settings[path]) for path in ordered})
    return "".join(_format_section({name: value}) for name, value in tree.items())


def _format_section(section: dict[str, Any]) -> str:
    short_text, long_text = (
        yaml.dump(
            section,
            Dumper=_RunYamlDumper,
            default_flow_style=flow,
            width=10_000,
            sort_keys=False,
            allow_unicode=True,
        )
        for flow in (None, False)
    )
    is_short = not short_text.startswith("{") and max(map(len, short_text.splitlines())) <= 112
    return short_text if is_short else long_text


class _RunYamlDumper(yaml.SafeDumper):
    """Without anchors; a text that is a number to YAML 1.2 alone (1e-4) is quoted."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_str(self, data: str) -> yaml.ScalarNode:
        return self.represent_scalar(
            "tag:yaml.org,2002:str", data, style=None if resolve_scalar(data) == data else '"'
        )


_RunYamlDumper.add_representer(str, _RunYamlDumper.represent_str)
