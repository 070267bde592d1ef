"""Facts: what a config.json means."""

from __future__ import annotations

import csv
import json

import pytest

from sft_play.errors import ModelError
from sft_play.facts.architecture import (
    config_json,
    local_folder,
    parse_config,
    refuse_remote_code,
    shape_of,
)
from tests.conftest import shared


def test_parameter_counts_are_exact_for_the_published_configs():
    checked = 0
    for row in csv.DictReader(shared("model_configs/params.csv").open()):
        config = json.loads(shared(f"model_configs/{row['name']}/config.json").read_text())
        if row["name"] == "phi-2-remote-code":
            continue
        shape = parse_config(config, name=row["name"])
        # gemma-3-27b-it is published with its image tower: 27,009,346,304 of it are the language model
        # (262208*5376 embedding + 62 blocks + last norm); every other row is the language model whole.
        expected = 27_009_346_304 if row["name"] == "gemma-3-27b-it" else int(row["params"])
        assert shape.params == expected, row["name"]
        checked += 1
    assert checked == 19


@pytest.mark.parametrize("name", ["/no/such/model", "./nothing", "~/no-such-model-folder"])
def test_what_looks_like_a_path_is_never_a_hub_id(name):
    with pytest.raises(ModelError, match="does not exist"):
        local_folder(name)


def test_a_path_whose_first_part_exists_is_a_path(tmp_path, monkeypatch):
    (tmp_path / "models").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError, match="model path models/llama does not exist"):
        local_folder("models/llama")
    assert local_folder("other/llama") is None


def test_a_hub_model_without_network_says_that_it_is_neither_here_nor_cached(monkeypatch):
    monkeypatch.setattr("sft_play.facts.architecture.hub_answers", lambda: False)
    with pytest.raises(ModelError, match=r"no folder here .* not in the local cache, .* cannot be reached"):
        config_json("nobody/no-such-model")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "has no config.json"),
        ("{", "is not JSON"),
        ("[]", "has no model_type"),
        ('{"model_type": "llama"}', "hidden_size: null"),
        ('{"model_type": "llama", "hidden_size": "x"}', "needs a whole number"),
    ],
)
def test_a_config_json_that_is_none_says_so(tmp_path, content, message):
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ModelError, match=message):
        shape_of(str(tmp_path))


def test_custom_code_is_refused_with_the_options_name():
    folder = shared("model_configs/phi-2-remote-code")
    with pytest.raises(ModelError, match=r"model\.trust_remote_code=true"):
        shape_of(str(folder))
    refuse_remote_code({"model_type": "phi-msft", "auto_map": {"AutoConfig": "x.Y"}}, name="x", allowed=True)


def test_custom_code_that_transformers_does_not_need_is_no_obstacle():
    assert json.loads(shared("model_configs/Phi-3.5-mini-instruct/config.json").read_text())["auto_map"]
    assert shape_of(str(shared("model_configs/Phi-3.5-mini-instruct"))).num_layers == 32
