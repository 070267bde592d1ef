"""Settings as the text of a run YAML, as a person would write it: a short section on one line."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml

from sft_play.config.leaves import leaves
from sft_play.config.yaml_io import Plain, plain_scalar

_WIDTH = 112


def run_yaml(settings: Mapping[str, Plain]) -> str:
    """The text for settings by their dotted paths, in the order of the schema."""
    tree: dict[str, Any] = {}
    for path in (one for one in leaves() if one in settings):
        *holders, name = path.split(".")
        section = tree
        for holder in holders:
            section = section.setdefault(holder, {})
        section[name] = settings[path]
    return "".join(_section({name: value}) for name, value in tree.items())


def _section(section: dict[str, Any]) -> str:
    short, long = (
        yaml.dump(section, Dumper=_Dumper, default_flow_style=flow, width=10_000, sort_keys=False, allow_unicode=True)
        for flow in (None, False)
    )
    is_short = not short.startswith("{") and max(map(len, short.splitlines())) <= _WIDTH
    return short if is_short else long


class _Dumper(yaml.SafeDumper):
    """Without anchors; a text that is a number to YAML 1.2 alone (1e-4) is quoted."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_str(self, data: str) -> yaml.ScalarNode:
        return self.represent_scalar("tag:yaml.org,2002:str", data, style=None if plain_scalar(data) == data else '"')


_Dumper.add_representer(str, _Dumper.represent_str)
