"""make bench: equal work on both sides, tokens counted alike, what is refused, and the peers' settings; and
benchmarks/data.py: its rows, its sums, and one small measurement."""

import importlib
import json
import random
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from benchmarks import data
from benchmarks.starter_base import make_tokenizer
from benchmarks.steps import bench, material
from benchmarks.steps.order import ProcessOrder
from sft_play.commands import developing
from sft_play.errors import ConfigError, DoesNotFit, TrainingError
from sft_play.text import GIB
from tests import warm
from tests.conftest import ROOT, chat

MIXED = {"words_of_question": (3, 0.5), "words_of_answer": (6, 0.9)}
"""Median and spread; the tiny tokenizer has about six tokens a word."""


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory, tiny_llama: Path) -> Path:
    """A folder with 40 chats of mixed lengths and run YAMLs: 8 rows a step, padded, packed or joined."""
    folder = tmp_path_factory.mktemp("bench")
    material.write_chats(folder / "chats.jsonl", 40, **MIXED)
    train = {"effective_batch_size": 8, "learning_rate": 1e-3}
    kinds: dict[str, dict[str, dict[str, Any]]] = {
        "padded": {"train": train | {"batch_size": 2}},
        "packed": {"train": train | {"batch_size": 2}, "data": {"packing": "best_fit"}},
        "joined": {"train": train | {"batch_by": "tokens"}},
    }
    for name, given in kinds.items():
        path, rows = folder / f"{name}.yaml", folder / "chats.jsonl"
        material.write_config(path, model=tiny_llama, rows=rows, seq_len=512, **given)
    return folder


def facts_of(config: Path, folder: Path) -> dict[str, Any]:
    """What peers are told of a run; its rows lie in `facts/rows`."""
    (folder / "facts").mkdir()
    words = ["train.max_steps=2", f"output.dir={json.dumps(str(folder / 'outputs'))}", "output.name=facts"]
    order = ProcessOrder("ours", str(folder / "r.json"), str(folder), 1, 1, config=str(config), overrides=words,
                  facts=str(folder / "facts"))  # fmt: skip
    importlib.import_module("benchmarks.steps.ours").measure(order)
    return order.known()


@pytest.fixture
def warmed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", warm.python())


@pytest.mark.build
@pytest.mark.usefixtures("warmed")
@pytest.mark.parametrize("kind", ["padded", "packed", "joined"])
def test_the_bare_loop_does_the_same_steps(kind, small):
    found = bench.compare(small / f"{kind}.yaml", peer="bare", steps=3, warmup=2, rounds=1)
    data = json.loads(json.dumps(found.as_json()))
    assert data["same_work"] == {
        "rows": True, "steps": True, "tokens": True, "trained_tokens": True, "losses_compared": 5,
        "largest_loss_difference": pytest.approx(0.0, abs=1e-4),
    }  # fmt: skip
    [mine], [other] = data["runs"]["ours"], data["runs"]["bare"]
    assert mine["tokens"] == other["tokens"]
    assert [sum(step[name] for step in mine["tokens_by_step"]) for name in mine["tokens"]] == [*mine["tokens"].values()]
    assert mine["losses"][0] != mine["losses"][-1]  # the weights move
    assert mine["tokens"]["trained"] < mine["tokens"]["total"] <= mine["tokens"]["padded"]
    assert set(mine["parts_s"]) == {"data", "forward_backward", "optimizer"}
    assert 0 < mine["parts_s"]["forward_backward"] < mine["step_s"]
    assert mine["predicted"]["reserved_bytes"] >= mine["predicted"]["allocated_bytes"] > 0
    assert {"rows_per_s", "step_s", "resident_bytes", "process_s"} <= set(data["ratios"])
    assert data["ratios"]["tokens_per_s"] == pytest.approx(mine["tokens_per_s"] / other["tokens_per_s"])
    assert any("the same rows in every step" in line for line in found.lines())


@pytest.mark.build
@pytest.mark.usefixtures("warmed")
def test_trl_trains_the_same_rows_and_takes_its_fastest_micro_batch(small):
    found = bench.compare(small / "joined.yaml", peer="trl", steps=2, warmup=1, rounds=2)
    same = found.same_work()
    assert same is not None
    assert all(same[name] for name in ("rows", "tokens", "trained_tokens"))
    assert same["largest_loss_difference"] < 1e-4
    assert [one["micro_batch"] for one in found.tried] == [1, 2, 4, 8]
    fastest = min(found.tried, key=lambda one: one["cpu_s"])["micro_batch"]
    assert [run["settings"]["micro_batch"] for run in found.runs["trl"]] == [fastest] * 2
    # on the rows that are measured, since others would be padded otherwise
    assert {one["rows_digest"] for one in found.tried} == {run["rows_digest"] for run in found.runs["trl"]}
    assert len({one["tokens"]["total"] for one in found.tried}) == 1
    assert found.tried[0]["tokens"]["padded"] == found.tried[0]["tokens"]["total"]  # one row at a time pads nothing


@pytest.mark.build
def test_peers_of_a_run_with_boundaries_take_sdpa(small, tmp_path, monkeypatch):
    """The attention that takes boundaries is registered by this toolkit: a peer's transformers does not have it."""
    from sft_play.training.model import attention_functions

    ours = importlib.import_module("benchmarks.steps.ours")
    used, write_facts = [], ours.write_facts

    def watched(folder: Path, job: Any, prepared: Any) -> None:
        used.append(prepared.model_spec.attention.name)
        write_facts(folder, job, prepared)

    monkeypatch.setattr(ours, "write_facts", watched)
    facts = facts_of(small / "joined.yaml", tmp_path)
    assert (used, facts["attention"]) == ([attention_functions.VARLEN_ATTENTION], "sdpa")


@pytest.mark.build
@pytest.mark.usefixtures("warmed")
def test_rows_for_peers_are_those_that_trl_makes_itself(small, tiny_llama, tmp_path):
    from datasets import load_dataset, load_from_disk
    from transformers import AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    facts_of(small / "padded.yaml", tmp_path)
    ours = load_from_disk(str(tmp_path / "facts" / "rows"))
    trainer = SFTTrainer(
        model=str(tiny_llama),
        args=SFTConfig(output_dir=str(tmp_path), max_length=512, report_to="none", use_cpu=True, bf16=False),
        train_dataset=load_dataset("json", data_files=str(small / "chats.jsonl"), split="train"),
        processing_class=AutoTokenizer.from_pretrained(tiny_llama),
    )
    theirs = {tuple(row) for row in trainer.train_dataset["input_ids"]}
    assert len(ours) == 40
    # the line break behind the last marker is in both; only TRL trains it
    assert {tuple(row) for row in ours["input_ids"]} == theirs
    assert all(row[0] == -100 for row in ours["labels"])


@pytest.mark.parametrize("seed", range(5))
def test_tokens_are_counted_alike_padded_without_a_mask_and_packed(seed):
    """The same chats as one padded batch with a mask, one without, and as packs of which some places are empty."""
    torch = pytest.importorskip("torch")
    from benchmarks.steps.recording import count_batch, rows_digest

    draw, pad = random.Random(seed), 0
    chats = [[draw.randrange(1, 50) for _ in range(draw.randrange(2, 9))] for _ in range(6)]
    labels = [[-100, *(token if draw.random() < 0.5 else -100 for token in chat[1:-1]), chat[-1]] for chat in chats]

    def table(rows: list[list[int]], fill: int) -> Any:
        made = np.full((len(rows), max(map(len, rows)) + 1), fill)
        for place, row in zip(made, rows, strict=True):
            place[: len(row)] = row
        return torch.from_numpy(made)

    padded = {"input_ids": table(chats, pad), "labels": table(labels, -100)}
    masked = {**padded, "attention_mask": table([[1] * len(chat) for chat in chats], 0)}
    pairs = [(0, 1), (2, 3, 4), (5,)]
    packed = {
        "input_ids": table([[token for n in pair for token in chats[n]] for pair in pairs], pad),
        "labels": table([[label for n in pair for label in labels[n]] for pair in pairs], -100),
        "position_ids": table([[place for n in pair for place in range(len(chats[n]))] for pair in pairs], 0),
    }
    total, trained = sum(map(len, chats)), sum(label != -100 for row in labels for label in row)
    found = [count_batch(batch, pad_id=pad) for batch in (masked, padded, packed)]
    assert ([one["total"] for one in found], [one["trained"] for one in found]) == ([total] * 3, [trained] * 3)
    assert [one["padded"] for one in found] == [batch["input_ids"].numel() for batch in (masked, padded, packed)]
    assert sorted(found[2]["lengths"]) == sorted(map(len, chats))
    assert len({rows_digest([one["rows"]]) for one in found}) == 1


def test_a_python_that_cannot_import_trl_is_refused_before_our_run(refuse, small, tmp_path, monkeypatch):
    python = tmp_path / "python"  # whose only package may be a TRL of a text
    python.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path} exec {sys.executable} -S "$@"\n')
    python.chmod(0o755)
    monkeypatch.setenv("HOME", str(tmp_path))  # shells leave `~` alone in make's words
    words = ("bench", "--config", str(small / "padded.yaml"), "--peer", "trl", "--peer-python", "~/python")
    for module in ("trl", "nowhere_at_all"):
        said = refuse(*words)
        assert "Round" not in said
        assert f"which {python} cannot import: ModuleNotFoundError: No module named '{module}'" in said
        (tmp_path / "trl.py").write_text("import nowhere_at_all\n")
    (tmp_path / "trl.py").write_text("")
    assert bench.check_peer("trl", str(python)) == str(python)


def test_a_python_is_refused_where_it_is_none_or_unused(tmp_path):
    for peer, python, message in (
        ("trl", f"{tmp_path}/python", "is not a program that can be run"),
        ("bare", sys.executable, "PEER_PYTHON= names the Python of another TRL"),
        (None, sys.executable, "none is asked for"),
    ):
        with pytest.raises(ConfigError, match=message):
            bench.check_peer(peer, python)


def test_stages_and_an_unknown_peer_are_refused_before_anything_runs(refuse, small, tmp_path):
    said = refuse("bench", "--config", str(small / "padded.yaml"), "--peer", "tlr")
    assert "PEER=tlr is not known; there are: bare, trl, trl-grouped" in said
    settings = json.loads((small / "padded.yaml").read_text())
    data = {"train_path": settings["data"]["train_path"]}
    settings["curriculum"] = [{"name": f"s{size}", "max_seq_len": size, "data": data} for size in (128, 512)]
    (tmp_path / "stages.yaml").write_text(json.dumps(settings))
    assert "has 2 stages" in refuse("bench", "--config", str(tmp_path / "stages.yaml"))


def test_a_process_that_fails_is_named_by_its_exit_code():
    refused = "[bench] error: it is too large\n[bench] more"
    with pytest.raises(ConfigError, match="ours ended with exit code 2: it is too large"):
        bench.refuse("ours", 2, refused)
    with pytest.raises(DoesNotFit, match="exit code 3"):
        bench.refuse("ours", 3, refused)
    with pytest.raises(TrainingError, match="trl ended with exit code 1: ValueError: no"):
        bench.refuse("trl", 1, "Traceback\nValueError: no\n")


def test_ratios_are_those_of_medians():
    def run(speed: float, cpu_s: float) -> dict[str, Any]:
        return {"tokens_per_s": speed, "rows": 6, "tokens": {"total": 60}, "cpu_s": cpu_s, "mfu": None}

    ours, theirs = [run(90, 1.0), run(120, 2.0), run(1000, 3.0)], [run(60, 4.0), run(50, 4.0), run(80, 4.0)]
    found = bench.Comparison("run.yaml", "trl", 2, 1, {"ours": ours, "trl": theirs})
    # medians 120 and 60; 6 rows in 2 s of processors against 6 in 4
    assert found.ratios() == {"tokens_per_s": 2.0, "rows_per_cpu_s": 2.0, "tokens_per_cpu_s": 2.0}


@pytest.mark.parametrize("allocated", [21 * GIB, None])
def test_a_gpus_peak_is_shown_beside_the_plans(allocated):
    plan = {"allocated_bytes": 20 * GIB, "reserved_bytes": 22 * GIB}
    run = {"allocated_bytes": allocated, "reserved_bytes": 21.5 * GIB, "predicted": plan}
    runs = {"ours": [run], "trl": [{"allocated_bytes": 30 * GIB}]}
    lines = [line for line in bench.Comparison("run.yaml", "trl", 2, 1, runs).lines() if "of the GPU" in line]
    said = "    of the GPU: 21.00 GiB allocated (20.00 predicted), 21.50 GiB reserved (22.00 predicted)"
    assert lines == ([said] if allocated else [])


def test_utilisation_uses_the_length_of_the_rows_and_is_none_on_a_cpu(small, monkeypatch):
    from sft_play.config.load import load_config
    from sft_play.launch.planning import plan_run
    from sft_play.machine.hardware import parse_hardware
    from sft_play.planner.speed import find_rates

    loaded = load_config(small / "padded.yaml")
    plan = plan_run(loaded.config, parse_hardware("1xH200"))
    run = {"weighted_length": 200.0, "tokens_per_s": 1e6}
    short, long = (bench.utilisation({**run, "weighted_length": n}, plan, loaded) or 0 for n in (20.0, 200.0))
    assert 0 < short < long  # attention sees more keys
    rate = find_rates(plan.hardware, plan.precision).matrix_flops_per_s
    assert bench.utilisation({**run, "tokens_per_s": 2e6}, plan, loaded) == pytest.approx(2 * long)
    # lora: 4 operations per weight of the blocks and token at least (forward and the inputs' gradients)
    weights = 2 * (64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 128)
    assert short * rate / 1e6 > 4 * weights
    on_cpu = plan_run(loaded.config, parse_hardware("cpu,ram=8GiB,cores=2"))
    assert bench.utilisation(run, on_cpu, loaded) is None


def test_trl_tries_powers_of_two_that_divide_the_step():
    assert bench.micro_batches({"effective_batch": 32, "micro_batch": 8, "on_cpu": True}) == [1, 2, 4, 8]
    assert bench.micro_batches({"effective_batch": 12, "micro_batch": 3, "on_cpu": True}) == [1, 2, 3, 4]
    assert bench.micro_batches({"effective_batch": 32, "micro_batch": 8, "on_cpu": False}) == [4, 8, 16]


def test_recording_and_orders_need_nothing_of_this_project():
    for name in ("recording", "order", "trl_peer"):
        assert "sft_play" not in (ROOT / "benchmarks" / "steps" / f"{name}.py").read_text()


def test_weights_are_made_on_the_cpu_where_the_gpu_does_not_hold_them(monkeypatch, tmp_path):
    import torch

    from benchmarks import random_model

    shape = {"model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1,
             "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 128}  # fmt: skip
    monkeypatch.setitem(random_model.KNOWN_MODELS, "small", SimpleNamespace(config=shape))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (random_model.ROOM, 2 * random_model.ROOM))
    random_model.write_published_shape("small", tmp_path / "model")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]
    assert (tmp_path / "model" / "model.safetensors").is_file()


ROWS: Any = [chat("one", "1")["messages"], chat("two", "2")["messages"]]


def noted(tool: str, of: int, per_s: float, **more: Any) -> dict[str, Any]:
    """A run as it is noted; TRL may have taken fewer rows than the file has."""
    rows = more.pop("rows", of)
    run = {"tool": tool, "of": of, "rows": rows, "form": "messages", "rows_per_s": per_s}
    return {**run, "prepare_s": rows / per_s, "total_s": rows / per_s + 5, "peak_rss_bytes": 100, **more}


def test_repeated_rows_differ_in_every_text_and_the_last_turn_is_the_completion(tmp_path: Path):
    made = list(data.changed_rows(ROWS, 5))
    assert [[message["role"] for message in row] for row in made] == [["user", "assistant"]] * 5
    asked = [f"No. {number}: {'two' if number % 2 else 'one'}" for number in range(5)]
    assert ([row[0]["content"] for row in made], made[2][1]["content"]) == (asked, "1\n(No. 2 assistant)")
    assert ROWS[0][0]["content"] == "one"
    data.write_rows(tmp_path / "rows.jsonl", [data.in_form(ROWS[0], "prompt_completion")])
    assert json.loads((tmp_path / "rows.jsonl").read_text()) == {"prompt": ROWS[0][:1], "completion": ROWS[0][1:]}


def test_ratios_compare_the_best_run_of_each_tool_at_the_fewest_rows():
    runs = [
        noted("ours", 10_000, 3000.0), noted("ours", 10_000, 2000.0), noted("trl", 10_000, 500.0),
        noted("trl", 10_000, 750.0, form="prompt_completion", peak_rss_bytes=400),
        noted("tokenizer", 10_000, 4000.0),
        noted("ours", 1_000_000, 3200.0, peak_rss_bytes=110),
        noted("trl", 1_000_000, 800.0, rows=20_000),
    ]  # fmt: skip
    found = data.ratios([*runs, {"tool": "trl", "of": 10_000, "rows": 10_000, "error": "no template"}])
    assert (found["ours_over_trl"], found["ours_over_tokenizer"]) == (4.0, 0.75)  # 3000 / 750, 3000 / 4000
    assert found["memory_1M_over_10k"] == pytest.approx(1.1)  # 110 / 100
    assert found["by_rows"]["10000"]["memory_ours_over_trl"] == 0.25  # 100 / 400
    assert found["by_rows"]["1000000"]["ours_over_trl"] == 4.0  # 3200 / 800


@pytest.mark.parametrize("text", ["ten", "", "0", "10,-1", "1e6"])
def test_numbers_of_rows_that_are_none_are_refused(text: str):
    with pytest.raises(SystemExit, match="expected numbers of rows such as 10000,1000000"):
        data.row_counts(text)


@pytest.fixture
def tokenizer(tmp_path: Path) -> str:
    """A folder with a small tokenizer of its own."""
    make_tokenizer(["one two three 1 2 3 No. user assistant"] * 20).save_pretrained(tmp_path / "tokenizer")
    return str(tmp_path / "tokenizer")


def test_a_measurement_says_time_memory_and_what_came_out_or_why_it_failed(tmp_path: Path, tokenizer: str):
    data.write_rows(tmp_path / "rows.jsonl", (data.in_form(row, "messages") for row in data.changed_rows(ROWS, 40)))
    file, cache = str(tmp_path / "rows.jsonl"), str(tmp_path / "cache")
    found = data.measure(data.Job("ours", 40, 40, file=file, tokenizer=tokenizer, cache=cache))
    assert "error" not in found, found
    assert found["masks"] == {"prefix": 40}
    assert 0 < found["trained_tokens"] < found["tokens"]
    assert found["rows_per_s"] == pytest.approx(40 / found["prepare_s"])
    assert found["total_s"] > found["prepare_s"]
    assert found["peak_rss_bytes"] > 10**7
    job = data.Job("ours", 1, 1, file=str(tmp_path / "none.jsonl"), tokenizer=tokenizer, cache=str(tmp_path))
    assert "none.jsonl" in data.measure(job)["error"]


@pytest.mark.slow
def test_trl_and_this_project_make_the_same_tokens(tmp_path: Path, tokenizer: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(data, "real_rows", lambda: ("two rows", ROWS))
    answer = data.bench([60], tokenizer, tmp_path / "out.json", trl_rows=60, rounds=1)
    runs = {(one["tool"], one["form"]): one for one in answer["runs"]}
    made = {key: one["ids_digest"] for key, one in runs.items() if "ids_digest" in one}
    assert (len(set(made.values())), {tool for tool, _ in made}) == (1, {"ours", "trl"}), runs
    assert json.loads((tmp_path / "out.json").read_text())["ratios"] == answer["ratios"]
    assert answer["ratios"]["by_rows"]["60"]["second_start_s"] < 5


def test_the_tool_of_a_developers_command_is_found_from_any_folder(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path not in ("", ".", str(ROOT))])
    for name in [name for name in sys.modules if name.split(".")[0] == "benchmarks"]:
        monkeypatch.delitem(sys.modules, name)
    assert callable(developing.benchmark_module("mask_score.score", command="mask-score").score)
    assert sys.path[0] == str(ROOT)
    with pytest.raises(ConfigError, match="was installed without: make nothing"):
        developing.benchmark_module("nothing", command="nothing")
