"""Facts: what a config.json means."""

import csv
import json
import math
import random
import threading
from contextlib import nullcontext
from dataclasses import replace
from importlib.util import find_spec

import pytest

from sft_play.errors import ModelError
from sft_play.models import config_json
from sft_play.trace.confirm import load_planned_shape
from tests.bundled import ORIGINS, OWN_CODE, PUBLISHED, model_config
from tests.conftest import shared

# gemma-3-27b-it is published with its image tower: 27,009,346,304 of it are the language model (262208*5376 embedding +
# 62 blocks + last norm); every other row is the language model whole.
TOWERS = {"gemma-3-27b-it": 27_009_346_304}


@pytest.mark.parametrize("full", PUBLISHED)
def test_published_sizes_give_the_published_counts(full):
    name = full.rpartition("/")[2]
    assert load_planned_shape(model_config(name), name=name).params == TOWERS.get(name, PUBLISHED[full])


def test_published_sizes_are_those_of_the_published_configs():
    """But for Qwen2.5-7B's positions, which the base model has more of, and the type that the weights are stored in."""
    for name in (full.rpartition("/")[2] for full in PUBLISHED):
        published = json.loads(shared(f"model_configs/{name}/config.json").read_text())
        shapes = [load_planned_shape(config, name=name) for config in (model_config(name), published)]
        one, other = (replace(shape, max_positions=0, stored_dtype=None) for shape in shapes)
        assert one == other, name


def test_parameter_counts_are_exact_for_the_published_configs():
    rows = list(csv.DictReader(shared("model_configs/params.csv").read_text().splitlines()))
    rows = [row for row in rows if row["name"] != "phi-2-remote-code"]
    for row in rows:
        config = json.loads(shared(f"model_configs/{row['name']}/config.json").read_text())
        shape = load_planned_shape(config, name=row["name"])
        assert shape.params == TOWERS.get(row["name"], int(row["params"])), row["name"]
    assert len(rows) == 19


def test_what_looks_like_a_path_or_whose_first_part_exists_is_never_a_hub_id(tmp_path, monkeypatch):
    (tmp_path / "models").mkdir()
    monkeypatch.chdir(tmp_path)
    for name in ("/no/such/model", "./nothing", "~/no-such-model-folder", "models/llama"):
        with pytest.raises(ModelError, match="does not exist"):
            config_json.find_model_folder(name)
    assert config_json.find_model_folder("other/llama") is None


def test_a_hub_model_without_network_says_that_it_is_neither_here_nor_cached(monkeypatch):
    monkeypatch.setattr("sft_play.models.config_json.is_hub_reachable", lambda: False)
    with pytest.raises(ModelError, match=r"not a folder here .* not in the local cache, .* cannot be reached"):
        config_json.load_config_json("nobody/no-such-model")


@pytest.mark.parametrize(("environment", "answers"), [
    ({}, True),
    ({"HF_HUB_OFFLINE": "1"}, False),
    ({"TRANSFORMERS_OFFLINE": "yes"}, False),
    ({"HF_HUB_OFFLINE": "0", "TRANSFORMERS_OFFLINE": "1"}, True),
    ({"HF_HUB_OFFLINE": "", "TRANSFORMERS_OFFLINE": "1"}, False),
])  # fmt: skip
def test_the_hub_is_offline_where_huggingface_hub_is(monkeypatch, environment, answers):
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(config_json, "_can_connect", lambda host, port: True)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert config_json.is_hub_reachable() == answers


def test_of_a_proxy_it_is_asked_whether_it_answers(monkeypatch):
    """A proxy that is gone had the library try again for a minute."""
    chance, asked = random.Random(4), []
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy",
                 "HTTP_PROXY", "http_proxy", "NO_PROXY", "no_proxy", "HF_ENDPOINT"):  # fmt: skip
        monkeypatch.delenv(name, raising=False)
    for number in range(60):
        variable, scheme = chance.choice(["HTTPS_PROXY", "https_proxy", "ALL_PROXY"]), chance.choice(["http://", ""])
        hub, proxy, port = f"https://hub{number}.example", f"proxy{number}", chance.randint(1, 65535)
        is_bypassed, answers = chance.random() < 0.3, chance.random() < 0.5
        with monkeypatch.context() as patch:
            patch.setattr(config_json, "_can_connect", lambda *place, answers=answers: asked.append(place) or answers)
            patch.setenv("HF_ENDPOINT", hub)
            patch.setenv(variable, f"{scheme}{proxy}:{port}")
            if is_bypassed:
                patch.setenv("no_proxy", ".example")
            assert config_json.is_hub_reachable() == answers
        assert asked[-1] == ((f"hub{number}.example", 443) if is_bypassed else (proxy, port))


def test_a_name_that_is_looked_up_for_long_is_no_answer(monkeypatch):
    monkeypatch.setattr(config_json, "_CONNECT_TIMEOUT_S", 0.05)
    waits = threading.Event()
    monkeypatch.setattr(config_json.socket, "create_connection", lambda *_: nullcontext(waits.wait(10)))
    assert not config_json._can_connect("hub.example", 443)
    waits.set()


def test_numbers_that_json_lacks_are_read_as_transformers_writes_them(tmp_path):
    """`{"__float__": "Infinity"}`; an object that is no such tag stays as it is."""
    tags = {"limit": [0.0, {"__float__": "Infinity"}], "low": {"__float__": "-Infinity"}, "gap": {"__float__": "NaN"}}
    others = {"a": {"__float__": "x"}, "b": {"__float__": []}, "c": {"__float__": "NaN", "d": 1}}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bamba", **tags, "others": others}))
    found = config_json.load_config_json(str(tmp_path))
    assert (found["limit"], found["low"], found["others"]) == ([0.0, math.inf], -math.inf, others)
    assert math.isnan(found["gap"])


@pytest.mark.parametrize("origin", ORIGINS)
def test_custom_code_is_refused_with_the_options_name(origin, tmp_path):
    folder = tmp_path if origin == "bundled" else shared("model_configs/phi-2-remote-code")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "phi-msft", "auto_map": OWN_CODE, "n_embd": 64}))
    with pytest.raises(ModelError, match=r"model\.trust_remote_code=true"):
        config_json.load_model_shape(str(folder))
    config_json.refuse_remote_code(
        {"model_type": "phi-msft", "auto_map": {"AutoConfig": "x.Y"}}, name="x", allowed=True
    )


@pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed here")
@pytest.mark.parametrize("origin", ORIGINS)
def test_custom_code_that_transformers_does_not_need_is_no_obstacle(origin, tmp_path):
    folder = tmp_path if origin == "bundled" else shared("model_configs/Phi-3.5-mini-instruct")
    config = {**model_config("Phi-3.5-mini-instruct"), "auto_map": OWN_CODE}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert json.loads((folder / "config.json").read_text())["auto_map"]
    assert config_json.load_model_shape(str(folder)).num_layers == 32
