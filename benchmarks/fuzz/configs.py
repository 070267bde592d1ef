"""Run YAMLs: those of configs/, mutated as text and as values, with overrides."""

import contextlib
import json
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from benchmarks.fuzz import mutate, run
from sft_play.config.load import config_from_text, load_config, resolved_config
from sft_play.config.options import all_options, option_accepts
from sft_play.config.yaml_io import parse_yaml
from sft_play.errors import SftPlayError
from sft_play.files import ROOT

_PLAIN: tuple[Any, ...] = (
    *(True, False, None, [], "auto", "x", "a/b"),
    *(0, 1, 2, 3, 4, 8, 16, 64, 100, 512, 4096, 0.0, 0.1, 0.5, 1.0, 1e-4, 2e-5),
)
_MACHINES = ("1xH100", "2xH200", "8xA100-80GB", "1xRTX4090", "4xL40S", "1xT4")


@contextlib.contextmanager
def case_runner() -> Iterator[run.CaseRunner]:
    seeds = [path.read_bytes() for path in sorted((ROOT / "configs").glob("*.yaml"))]
    parsed_seeds = [parse_yaml(seed.decode(), name="seed").data for seed in seeds]
    keys = list(all_options())
    words = re.findall(r'"(\w[\w.-]*)"', (ROOT / "sft_play/config/schema.py").read_text(encoding="utf-8"))
    every_value = (*_PLAIN, *dict.fromkeys(words))
    accepted_values = {key: [one for one in every_value if option_accepts(key, one)] for key in keys}

    def judge(draw: random.Random, folder: Path) -> bool:
        path = folder / "run.yaml"
        content, why_refused = _case(draw, draw.choice(seeds), draw.choice(parsed_seeds), accepted_values)
        path.write_bytes(content)
        overrides = [_override(draw, keys) for _ in range(draw.choice((0, 0, 0, 1, 3)))]
        accepted = _loads(path, overrides, why_refused)
        if accepted and draw.random() < 0.1:
            words = ["plan", "--config", str(path), "--hardware", draw.choice(_MACHINES), "--json", *overrides]
            run.require_consistent_exit(*run.run_command(words), is_json=True)
        return accepted

    with run.isolated_environment():
        yield judge


def _case(
    draw: random.Random, seed: bytes, parsed: dict[str, Any], accepted_values: dict[str, list[Any]]
) -> tuple[bytes, str]:
    """A run YAML, and why it has to be refused; empty where it may be right."""
    choice, data = draw.randrange(10), json.loads(json.dumps(parsed))
    if choice < 3:
        return mutate.raw(draw, seed), ""
    if choice < 5:
        return _dumped(mutate.plain(draw, parsed)), ""
    if choice < 8:  # values that are right by themselves
        for key in draw.sample([one for one in accepted_values if accepted_values[one]], draw.randint(1, 4)):
            _put(data, key, draw.choice(accepted_values[key]))
        return _dumped(data), ""
    section = draw.choice([data, *(one for one in data.values() if isinstance(one, dict))])
    if choice == 8:
        section["no_such_key" + draw.choice(("", "_x", "2"))] = mutate.value(draw)
        return _dumped(data), "a key that there is not"
    tag = draw.choice(("!!python/object/apply:os.system [touch pwned]", "!!python/name:os.system x", "!!binary aGk="))
    return _dumped(data) + f"\nplan: {{trace: {tag}}}\n".encode(), "a tag, or a key twice"


def _put(data: dict[str, Any], key: str, value: Any) -> None:
    *path, last = key.split(".")
    for name in path:
        data[name] = data[name] if isinstance(data.get(name), dict) else {}
        data = data[name]
    data[last] = value


def _dumped(data: Any) -> bytes:
    try:
        return yaml.safe_dump(data, allow_unicode=True, sort_keys=False).encode("utf-8", "surrogatepass")
    except yaml.YAMLError:
        return mutate.as_json(data).encode()


def _override(draw: random.Random, keys: list[str]) -> str:
    key = draw.choice(keys)
    key = mutate.text(draw, key) if draw.random() < 0.2 else key
    value = mutate.value(draw)
    word = f"{key}={value if isinstance(value, str) else mutate.as_json(value)}"
    return mutate.text(draw, word) if draw.random() < 0.1 else word


def _loads(path: Path, overrides: list[str], why_refused: str) -> bool:
    try:
        loaded = load_config(path, overrides=overrides)
    except SftPlayError as error:
        run.require_words(error)
        return False
    if why_refused:
        raise run.FuzzFailure(f"accepted in spite of {why_refused}")
    settings = resolved_config(loaded.config, effective_batch=8)
    if settings["model"].get("adapter") is None:  # what is written into a run folder is read again as the same
        read = config_from_text(json.dumps(settings, allow_nan=False), name="resolved.json")
        again = resolved_config(read, effective_batch=8)
        if again != settings:
            changed = {key for key in settings if again.get(key) != settings[key]}
            raise run.FuzzFailure(f"resolved.json reads otherwise in {changed}")
    return True
