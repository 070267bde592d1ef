"""Tables are data: each file is read by a few lines, has its sources, and the form that its schema here says."""

from __future__ import annotations

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

TEXT, NUMBER, WHOLE, YES = {"type": "string"}, {"type": "number"}, {"type": "integer"}, {"type": "boolean"}
OR_NULL = {"type": ["string", "null"]}
ANYTHING: dict[str, Any] = {}


def listed(item: dict[str, Any]) -> dict[str, Any]:
    """A list that is not empty."""
    return {"type": "array", "items": item, "minItems": 1}


def mapping(value: dict[str, Any]) -> dict[str, Any]:
    """Any keys."""
    return {"type": "object", "additionalProperties": value, "minProperties": 1}


def record(required: dict[str, Any], **optional: Any) -> dict[str, Any]:
    """These keys and no other."""
    return {
        "type": "object",
        "properties": required | optional,
        "required": list(required),
        "additionalProperties": False,
    }


PATH = {"anyOf": [{"enum": list(all_options())}, {"pattern": r"^data\.(columns|chat_template_kwargs)\.\w+$"}]}
ROW = {
    "keys": TEXT, "words": TEXT, "path": PATH, "read": TEXT, "switch": YES,
    "values": mapping({"type": ["string", "object"]}),
}  # fmt: skip
FINDING = {"verdict": {"enum": ["FAIL", "WARN"]}, "what": TEXT, "remedy": TEXT}
SCHEMAS = {
    "config/other_tools.yaml": record(
        {
            "sources": listed(TEXT),
            "rows": listed(record({"keys": TEXT}, **ROW)),
            "prefixes": listed(record({"keys": TEXT, "words": TEXT}, switch=YES)),
            "sections": mapping(TEXT),
            "modules": mapping(TEXT),
            "data_set": record(dict.fromkeys(("path", "config", "split", "max_rows", "weight", "beside"), TEXT)),
        }
    ),
    "config/tool_defaults.yaml": mapping(
        record(
            {
                "name": TEXT,
                "package": TEXT,
                "version": TEXT,
                "date": TEXT,
                "marks": TEXT,
                "defaults": listed(record({"in": TEXT, "are": mapping(ANYTHING)}, code=TEXT)),
            },
            like=TEXT,
            rows=listed(record({"keys": TEXT}, **ROW)),
            data_sets=mapping(mapping(TEXT)),
        )
    ),
    "data/sources/columns.json": mapping(
        record(
            {"words": {"type": "string"}},
            missed=TEXT,
            column={"enum": sorted(KNOWN_COLUMNS)},
            becomes=TEXT,
            usual=TEXT,
        )
    ),
    "variables.json": record(
        {
            "commands": mapping(record({"file": TEXT, "help": TEXT}, groups=TEXT)),
            "groups": mapping(TEXT),
            "targets": mapping(TEXT),
            "flags": mapping(
                record({"for": TEXT, "help": {"type": "string"}}, switch=YES, setting={"enum": list(all_options())})
            ),
            "variables": mapping(
                record({"for": TEXT, "help": TEXT, "example": TEXT}, kind=TEXT, of=TEXT, ranks=TEXT, flag=YES)
            ),
            "settings": mapping({"enum": list(all_options())}),
            "other_words": mapping(TEXT),
            "of_others": TEXT,
            "others": TEXT,
        }
    ),
    "launch/deepspeed_keys.json": record(
        {
            "sources": listed(TEXT),
            "sections": mapping(record({"keys": TEXT}, file=TEXT, with_and_without_stage3_=TEXT, **{"class": TEXT})),
            "renamed": mapping(TEXT),
            "auto_is_a_value": listed(TEXT),
        }
    ),
    "machine/gpu_catalog.json": record(
        {
            "sources": mapping(TEXT),
            "families": mapping(
                record(
                    {"source": TEXT, "fp16": NUMBER, "bf16": YES, "fp8": YES, "fp32": NUMBER, "capability": ANYTHING}
                )
            ),
            "gpus": listed(
                record(
                    {"name": TEXT, "memory": ANYTHING, "sources": listed(TEXT)},
                    family=OR_NULL,
                    vendor=TEXT,
                    units=ANYTHING,
                    boost_mhz=ANYTHING,
                    bandwidth_gb=ANYTHING,
                    watts=ANYTHING,
                    pcie=ANYTHING,
                    nvlink_gb=ANYTHING,
                    aliases=ANYTHING,
                    dense=ANYTHING,
                    unified=YES,
                )
            ),
        }
    ),
    "machine/gpu_prices.json": record(
        {
            "lists": mapping(record({"provider": TEXT, "read": TEXT, "address": TEXT}, kept_at=TEXT)),
            "prices": listed(record({"of": TEXT, "gpu": TEXT, "usd": NUMBER}, counts=listed(WHOLE))),
        }
    ),
    "models/class_defaults.json": mapping(mapping(ANYTHING)),  # by `make generate`, from transformers
    "models/fp16.json": listed(
        record({"models": TEXT, "what": TEXT, "source": TEXT}, note=TEXT, only_with=TEXT, in_backward=YES)
    ),
    "models/other_kinds.json": mapping(TEXT),
    "models/known_models.json": listed(
        record({"names": listed(TEXT), "source": TEXT, "config": mapping(ANYTHING)}, params=ANYTHING)
    ),
    "diagnose/known_bad.json": record(
        {
            "pairs": listed(record({**FINDING, "when": ANYTHING, "sources": listed(TEXT)})),
            "errors": listed(record({"pattern": TEXT, "remedy": TEXT}, sources=ANYTHING)),
        }
    ),
    "finished/export/pre_tokenizers.json": record(
        {
            "source": TEXT,
            "pre_tokenizers": listed(
                record({"names": listed(TEXT), "ignore_merges": YES, "expressions": listed(TEXT)})
            ),
        }
    ),
}
"""By the file's path below the package: each file of data has one here."""
MODEL = PACKAGE / "starter" / "starter-base"
"""A model's folder, as transformers writes it."""
FOUND = sorted(
    path.relative_to(PACKAGE).as_posix()
    for kind in ("json", "yaml")
    for path in PACKAGE.rglob(f"*.{kind}")
    if path.parent != MODEL
)


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
