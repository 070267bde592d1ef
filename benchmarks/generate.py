"""`make -C benchmarks generate`: the files of a checkout that are made from the code. Tests keep them current."""

import dataclasses
import json
import re
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks import peaks_picture, what_fits
from sft_play.config.options import all_options, format_yaml_value, sections
from sft_play.config.schema import DTYPE_ALIASES, EXTERNAL_NAMES, OWNER, RunConfig
from sft_play.models.families import CLASS_DEFAULTS, DEFAULTS_FILE, ClassDefaults
from sft_play.variables import MAINTENANCE_TARGETS, VARIABLES

REFERENCE, SCHEMA = Path("configs/reference.yaml"), Path("configs/run.schema.json")
_HEADER = """\
# Every option of a run YAML, its default, and what it does. Generated from sft_play/config/schema.py by
# `make -C benchmarks generate`; a test keeps it current. Only model.name has no default. It is a valid run YAML itself.
# yaml-language-server: $schema=run.schema.json
"""


def defaults_text(table: dict[str, ClassDefaults]) -> str:
    """`class_defaults.json` of such a table: a line for each model type."""
    rows = (f"  {json.dumps(kind)}: {json.dumps(table[kind])}" for kind in sorted(table))
    return "{\n" + ",\n".join(rows) + "\n}\n"


def class_defaults(table: Mapping[str, ClassDefaults]) -> dict[str, ClassDefaults]:
    """`models.families` with the installed transformers' values; what no class has as a field stays."""
    from transformers import CONFIG_MAPPING

    renewed: dict[str, ClassDefaults] = {}
    for kind, fields in table.items():
        own: dict[str, Any] = {field.name: field.default for field in dataclasses.fields(CONFIG_MAPPING[kind])}
        renewed[kind] = {key: own.get(key, value) for key, value in fields.items()}
    return renewed


def generate() -> list[str]:
    """Write the generated files below the checkout, which is the working folder, and return their paths; beside the
    two in configs/, those that are there."""
    texts = {REFERENCE: reference_yaml(), SCHEMA: json_schema()}
    table, fits = Path("sft_play/models") / DEFAULTS_FILE.name, Path("docs/what-fits.md")
    if table.is_file():
        texts[table] = defaults_text(class_defaults(CLASS_DEFAULTS))
    if fits.is_file():
        texts[fits] = what_fits.page(fits.read_text(encoding="utf-8"))
        texts[peaks_picture.PICTURE] = peaks_picture.picture()
    for makefile in (Path("Makefile"), Path("benchmarks/Makefile")):
        if makefile.is_file():
            text = makefile.read_text(encoding="utf-8")
            texts[makefile] = with_variables(text, maintaining=makefile.parent.name != "")
    for path, text in texts.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return list(map(str, texts))


def with_variables(makefile: str, *, maintaining: bool) -> str:
    """A Makefile with what its `help` shows of each variable: an example, its targets where they are few, its meaning.

    Those that only targets of benchmarks/Makefile take are listed there (`maintaining`), all others in the Makefile.
    """
    lines = ""
    for name, variable in VARIABLES.items():
        if set(variable.commands).issubset(MAINTENANCE_TARGETS) is not maintaining:
            continue
        few = variable.commands != ("*",) and len(variable.commands) <= 4
        takers = f"{', '.join(variable.commands)}: " if few else ""
        lines += f"#: {name + '=' + variable.example:<24} {takers}{variable.help}\n"
    heading = r"(?<=^##@ Variables \(from the command line or the environment\)\n)"
    return re.sub(rf"(?m){heading}(#: .*\n)*", lambda _: lines, makefile, count=1)


def reference_yaml() -> str:
    lines = [_HEADER]
    open_sections: list[str] = []
    for leaf in all_options().values():
        *holders, name = leaf.path.split(".")
        lines += _section_heads(holders, open_sections)
        open_sections = holders
        indent, comment = "  " * len(holders), f"{leaf.doc} ({leaf.accepted_values})"
        wrapped = textwrap.wrap(comment, width=112 - len(indent), break_long_words=False, break_on_hyphens=False)
        lines += [f"{indent}# {line}" for line in wrapped]
        example = "Qwen/Qwen2.5-3B-Instruct" if leaf.required else format_yaml_value(leaf.default)
        lines.append(f"{indent}{name}: {example}")
    return "\n".join(lines) + "\n"


def _section_heads(holders: list[str], open_sections: list[str]) -> list[str]:
    shared = 0
    while shared < min(len(holders), len(open_sections)) and holders[shared] == open_sections[shared]:
        shared += 1
    lines = []
    for depth in range(shared, len(holders)):
        path = ".".join(holders[: depth + 1])
        indent = "  " * depth
        lines += ["", f"{indent}# {' '.join((sections()[path].__doc__ or '').split())}"]
        lines.append(f"{indent}{holders[depth]}:")
    if not holders and open_sections:
        lines.append("")
    return lines


def json_schema() -> str:
    """The text of configs/run.schema.json (JSON Schema, draft 2020-12)."""
    described = RunConfig.model_json_schema()
    described["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    described["title"] = "sft_play run YAML"
    return json.dumps(_published(described), indent=2) + "\n"


def _published(value: Any) -> Any:
    if isinstance(value, dict):
        shown = {key: _published(item) for key, item in value.items() if key not in (OWNER, EXTERNAL_NAMES)}
        if isinstance(text := shown.get("description"), str):  # however the docstring is wrapped
            shown["description"] = " ".join(text.split())
        if "bfloat16" in (names := shown.get("enum", ())):
            shown["enum"] = [*names, *(short for short, name in DTYPE_ALIASES.items() if name in names)]
        return shown
    return [_published(item) for item in value] if isinstance(value, list) else value
