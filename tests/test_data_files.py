"""Tables are data: each file is read by a few lines, has its sources, and the form that its schema here says."""

import json
from collections import Counter
from typing import Any

import jsonschema
import pytest
import yaml

from sft_play.config.options import all_options
from sft_play.data.sources.formats import KNOWN_COLUMNS
from tests.conftest import ROOT

PACKAGE = ROOT / "sft_play"

TEXT, NUMBER, YES = {"type": "string"}, {"type": "number"}, {"type": "boolean"}
OR_NULL = {"type": ["string", "null"]}
ANYTHING: dict[str, Any] = {}


def listed(item: dict[str, Any]) -> dict[str, Any]:
    """A list that is not empty."""
    return {"type": "array", "items": item, "minItems": 1}


def mapping(value: dict[str, Any]) -> dict[str, Any]:
    """Any keys."""
    return {"type": "object", "additionalProperties": value, "minProperties": 1}


def record(texts: str, required: dict[str, Any] | None = None, **optional: Any) -> dict[str, Any]:
    """The keys of these texts, which are separated by spaces, and the others, and no more."""
    needed = dict.fromkeys(texts.split(), TEXT) | (required or {})
    properties = needed | optional
    return {"type": "object", "properties": properties, "required": list(needed), "additionalProperties": False}


PATH = {"anyOf": [{"enum": list(all_options())}, {"pattern": r"^data\.(columns|chat_template_kwargs)\.\w+$"}]}
KEYS = record("keys", words=TEXT, path=PATH, read=TEXT, switch=YES, values=mapping({"type": ["string", "object"]}))
SETTING = {"enum": list(all_options())}
GPU_FACTS = ["units", "boost_mhz", "bandwidth_gb", "watts", "pcie", "nvlink_gb", "aliases", "dense"]
SCHEMAS = {
    "config/other_tools.yaml": record("", {
        "sources": listed(TEXT), "rows": listed(KEYS), "prefixes": listed(record("keys words", switch=YES)),
        "sections": mapping(TEXT), "modules": mapping(TEXT),
        "data_set": record("path config split max_rows weight beside"),
    }),
    "config/tool_defaults.yaml": mapping(record(
        "name package version date marks", {"defaults": listed(record("in", {"are": mapping(ANYTHING)}, code=TEXT))},
        like=TEXT, rows=listed(KEYS), data_sets=mapping(mapping(TEXT)),
    )),
    "data/sources/columns.json": mapping(
        record("words", missed=TEXT, column={"enum": sorted(KNOWN_COLUMNS)}, becomes=TEXT, usual=TEXT)
    ),
    "variables.json": record("of_others others", {
        "commands": mapping(record("file help", groups=TEXT)), "groups": mapping(TEXT), "targets": mapping(TEXT),
        "flags": mapping(record("for help", switch=YES, setting=SETTING)), "settings": mapping(SETTING),
        "variables": mapping(record("for help example", kind=TEXT, of=TEXT, ranks=TEXT, flag=YES)),
        "other_words": mapping(TEXT), "setting_words": mapping(TEXT), "target_words": mapping(TEXT),
    }),
    "launch/deepspeed_keys.json": record("", {
        "sources": listed(TEXT), "renamed": mapping(TEXT), "auto_is_a_value": listed(TEXT),
        "sections": mapping(record("keys", file=TEXT, with_and_without_stage3_=TEXT, **{"class": TEXT})),
    }),
    "machine/gpu_catalog.json": record("", {
        "sources": mapping(TEXT),
        "families": mapping(record(
            "source", {"fp16": NUMBER, "bf16": YES, "fp8": YES, "fp32": NUMBER, "capability": ANYTHING}
        )),
        "gpus": listed(record(
            "name", {"memory": ANYTHING, "sources": listed(TEXT)}, family=OR_NULL, vendor=TEXT, unified=YES,
            **dict.fromkeys(GPU_FACTS, ANYTHING),
        )),
    }),
    "machine/gpu_prices.json": record("", {
        "lists": mapping(record("provider read address", kept_at=TEXT)),
        "prices": listed(record("of gpu", {"usd": NUMBER}, counts=listed({"type": "integer"}))),
    }),
    "models/class_defaults.json": mapping(mapping(ANYTHING)),  # by `make generate`, from transformers
    "models/fp16.json": listed(record("models what source", note=TEXT, only_with=TEXT, in_backward=YES)),
    "models/name_hints.json": listed({"type": "array", "items": TEXT, "minItems": 2, "maxItems": 2}),
    "models/other_kinds.json": mapping(TEXT),
    "models/known_models.json": listed(
        record("source", {"names": listed(TEXT), "config": mapping(ANYTHING)}, params=ANYTHING)
    ),
    "diagnose/known_bad.json": record("", {"pairs": listed(record(
        "what remedy", {"verdict": {"enum": ["FAIL", "WARN"]}, "when": ANYTHING, "sources": listed(TEXT)}
    ))}),
    "finished/export/pre_tokenizers.json": record("source", {"pre_tokenizers": listed(
        record("", {"names": listed(TEXT), "ignore_merges": YES, "expressions": listed(TEXT)})
    )}),
}  # fmt: skip
"""By the file's path below the package: each file of data has one here."""
STARTER = PACKAGE / "starter"
"""Folders of models, as transformers writes them; beside them are run YAMLs, which the starters' tests compare."""
FILES = [path for kind in ("json", "yaml") for path in PACKAGE.rglob(f"*.{kind}") if STARTER not in path.parents]
FOUND = sorted(path.relative_to(PACKAGE).as_posix() for path in FILES)


def read(name: str) -> Any:
    """The file's data; a key that appears twice is refused."""
    text = (PACKAGE / name).read_text(encoding="utf-8")
    if name.endswith(".yaml"):
        return yaml.load(text, Loader=yaml.BaseLoader)

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        twice = [key for key, count in Counter(key for key, _ in pairs).items() if count > 1]
        assert not twice, twice
        return dict(pairs)

    return json.loads(text, object_pairs_hook=once)


@pytest.mark.parametrize("name", FOUND)
def test_a_file_of_data_has_the_form_and_the_sources_that_its_schema_says(name):
    assert name in SCHEMAS, "give the new file a schema here"
    data = read(name)
    if name.endswith(".yaml"):  # whose words true and false are texts to a plain reader
        for row in [*data.get("rows", []), *data.get("prefixes", [])]:
            row.update({"switch": row["switch"] == "true"} if "switch" in row else {})
    jsonschema.validate(data, SCHEMAS[name])


def test_no_key_of_another_tool_is_answered_twice():
    keys = Counter(key for row in read("config/other_tools.yaml")["rows"] for key in row["keys"].split())
    assert len(keys) > 1000
    assert not [key for key, count in keys.items() if count > 1]
