"""The effective batch where nobody wrote one: that of both factors and the ranks, the same wherever it is read."""

import dataclasses
import json
import random
from pathlib import Path

import pytest

from sft_play.config.load import LoadedConfig, config_from_text, resolved_config
from sft_play.errors import ConfigError, RunFolderError
from sft_play.launch.planning import build_stage_request, plan_stage
from sft_play.launch.request import LaunchOptions, resume_constraints
from sft_play.machine.hardware import Hardware, parse_hardware
from sft_play.models.config_json import load_model_shape
from sft_play.planner.advice import find_suggestions
from sft_play.planner.batching import BatchPlan, batch_splits, effective_batch, format_batch_product
from sft_play.planner.decide import PlanRequest, make_plan
from sft_play.planner.explain import batch_lines
from sft_play.planner.layout import PreviousRun
from sft_play.runs.folder import RunFolder, check_same_run, new_manifest
from sft_play.runs.lookup import create_run
from sft_play.training.checkpoints.checkpoints import checkpoint_path


def written(*overrides, text=""):
    return config_from_text(f"model: {{name: Qwen/Qwen2.5-0.5B}}\n{text}", name="run.yaml", overrides=overrides)


def test_the_product_of_both_factors_and_the_ranks_is_the_effective_batch_that_nobody_wrote():
    """Over any ranks, in any place where the two can be given; what was written is never replaced, 32 included."""
    draw = random.Random(14)
    kinds = set()
    for _ in range(300):
        micro, accum = (draw.choice(["auto", 1, 2, 3, 4, 8]) for _ in range(2))
        ranks, effective = draw.randint(1, 9), draw.choice([None, None, 8, 24, 32, 48])
        given = {"batch_size": micro, "grad_accum": accum, "effective_batch_size": effective}
        words = [f"train.{name}={value}" for name, value in given.items() if value not in ("auto", None)]
        cut = draw.randint(0, len(words))
        lines = "".join(f"  {word.removeprefix('train.').replace('=', ': ')}\n" for word in words[:cut])
        train = written(*words[cut:], text=f"train:\n{lines}" if lines else "").train
        follows = effective is None and "auto" not in (micro, accum)
        wanted = micro * accum * ranks if follows else effective or 32
        assert (effective_batch(train, ranks=ranks), train.derives_effective_batch) == (wanted, follows)
        if effective is not None and "auto" not in (micro, accum) and micro * accum == effective:
            continue  # agrees on one rank: the next test
        fits = wanted % ((1 if micro == "auto" else micro) * (1 if accum == "auto" else accum) * ranks) == 0
        if not fits or ("auto" not in (micro, accum) and micro * accum * ranks != wanted):
            with pytest.raises(ConfigError, match=rf"train\.effective_batch_size={wanted} "):
                batch_splits(train, ranks=ranks)
            kinds.add("refused")
            continue
        found = batch_splits(train, ranks=ranks)
        assert all(batch.effective_batch == wanted for batch in found)
        if follows:
            assert found == [BatchPlan(micro, accum, ranks)]
        said = format_batch_product(train, found[0])
        assert (f"{wanted} = micro {micro} x accum {accum} x {ranks} ranks: " in said) == follows
        assert ("train.effective_batch_size was not given" in said) == follows
        kinds.add("follows" if follows else "given")
    assert kinds == {"follows", "given", "refused"}


def test_three_numbers_that_agree_on_one_rank_keep_the_effective_batch_over_any_that_divide_it():
    """By a second rule: of all splits, the one with the most rows a pass that are no more than were given."""
    draw, kinds = random.Random(36), set()
    for _ in range(400):
        micro, accum, ranks = draw.randint(1, 12), draw.randint(1, 12), draw.randint(1, 9)
        effective = micro * accum
        given = {"batch_size": micro, "grad_accum": accum, "effective_batch_size": effective}
        train = written(*(f"train.{name}={value}" for name, value in given.items())).train
        every = [(rows, passes) for rows in range(1, micro + 1) for passes in range(1, effective + 1)
                 if rows * passes * ranks == effective]  # fmt: skip
        if not every:
            refusal = rf"={effective} does not split over {ranks} ranks \(it does over 1\b"
            with pytest.raises(ConfigError, match=refusal):
                batch_splits(train, ranks=ranks)
            kinds.add("refused")
            continue
        rows, passes = max(every)
        assert batch_splits(train, ranks=ranks) == [BatchPlan(rows, passes, ranks)]
        said = format_batch_product(train, BatchPlan(rows, passes, ranks))
        assert (f"train.grad_accum={accum} becomes {passes}" in said) == (passes != accum)
        assert (f"train.batch_size={micro} becomes {rows}" in said) == (rows != micro)
        assert "\n" not in said
        kinds.add("passes" if rows == micro else "rows")
    assert kinds == {"passes", "rows", "refused"}


@pytest.mark.parametrize("machine", ["cpu,ram=64GiB", "1xRTX4090", "2xRTX4090", "4xRTX4090", "2x8xH100"])
def test_a_config_of_one_gpu_plans_unchanged_on_more(machine):
    config = written("train.batch_size=2", "train.grad_accum=2")
    request = PlanRequest(config, load_model_shape("Qwen/Qwen2.5-0.5B"), parse_hardware(machine))
    plan = make_plan(request)
    assert (plan.batch.micro_batch, plan.batch.grad_accum) == (2, 2)
    assert plan.batch.effective_batch == 4 * plan.batch.ranks == plan.as_json()["effective_batch"]
    assert any("train.effective_batch_size was not given" in line for line in batch_lines(plan, config))
    explicit = written("train.batch_size=2", "train.grad_accum=2", "train.effective_batch_size=32")
    if plan.batch.ranks == 8:
        return
    with pytest.raises(ConfigError, match=r"train\.effective_batch_size=32 is not train\.batch_size=2"):
        make_plan(dataclasses.replace(request, config=explicit))


def test_the_resolved_config_holds_the_batch_of_the_plan_and_can_be_given_back():
    config = written("train.batch_size=2", "train.grad_accum=2")
    assert resolved_config(config)["train"]["effective_batch_size"] is None  # it hangs on the ranks
    kept = resolved_config(config, effective_batch=8)
    again = config_from_text(json.dumps(kept), name="resolved.json")
    assert effective_batch(again.train, ranks=2) == 8
    assert batch_splits(again.train, ranks=2) == [BatchPlan(2, 2, 2)]
    with pytest.raises(ConfigError, match=r"train\.effective_batch_size=8 is not .* x 4 ranks = 16"):
        batch_splits(again.train, ranks=4)  # it agreed over two
    plain = written()
    assert resolved_config(plain, effective_batch=8)["train"]["effective_batch_size"] == 32  # as the plan splits it


def test_ways_out_keep_an_effective_batch_that_follows():
    given, name = ("train.batch_size=16", "train.grad_accum=2"), "meta-llama/Llama-3.1-8B"
    config = written(*given, "model.max_seq_len=4096", f"model.name={name}")
    found = list(find_suggestions(PlanRequest(config, load_model_shape(name), parse_hardware("1xRTX4090"))))
    settings = [way.setting for way in found if way.setting and "batch_size" in way.setting]
    assert "train.batch_size=1 train.grad_accum=32" in settings
    for way in settings:
        assert effective_batch(written(*given, *way.split()).train, ranks=1) == 32
    assert not any("grad_accum=auto" in str(way.setting) for way in found)


def any_numbers(draw, micro: int, accum: int, effective: int) -> tuple[str, ...]:
    """Settings that give two, three or one of the numbers."""
    size, passes = f"train.batch_size={micro}", f"train.grad_accum={accum}"
    whole = f"train.effective_batch_size={effective}"
    return draw.choice([(size, passes), (size, passes, whole), (size, whole), (whole,)])


def test_a_resumed_run_keeps_its_effective_batch_over_any_ranks_or_says_which_do():
    """Whatever the config gives of the three numbers, and also when it is resumed a second time."""
    draw = random.Random(15)
    kinds = set()
    for _ in range(400):
        micro, accum, first = draw.choice([1, 2, 3, 4]), draw.choice([1, 2, 4]), draw.randint(1, 6)
        kept = micro * accum * first
        config = written(*any_numbers(draw, micro, accum, kept))
        stopped = PreviousRun("ddp", BatchPlan(micro, accum, first))
        for _ in range(3):
            ranks = draw.choice([first, stopped.batch.ranks, draw.randint(1, 8)])
            if kept % ranks:
                with pytest.raises(RunFolderError, match=f"do not divide its effective batch of {kept} ") as refused:
                    resume_constraints(config, stopped, ranks)
                fitting = [int(word) for word in str(refused.value).rpartition(": ")[2].split(", ")]
                assert fitting == [number for number in range(1, 2 * ranks + 1) if kept % number == 0]
                kinds.add("refused")
                continue
            found = batch_splits(config.train, ranks=ranks, resumed_batch=resume_constraints(config, stopped, ranks)[0])
            assert all(batch.effective_batch == kept for batch in found)
            again = found[0]
            if len(found) == 1:
                assert again.micro_batch <= micro
            if (ranks, micro, accum) == (first, stopped.batch.micro_batch, stopped.batch.grad_accum):
                assert BatchPlan(micro, accum, ranks) in found
            kinds.add("one split" if len(found) == 1 else "the plan splits")
            stopped = PreviousRun("ddp", BatchPlan(again.micro_batch, again.grad_accum, ranks))
    assert kinds == {"refused", "one split", "the plan splits"}


def test_the_settings_of_a_resumed_run_keep_the_batch_that_the_user_gave(tmp_path):
    draw = random.Random(16)
    kinds = set()
    for number in range(40):
        micro, accum, first = draw.choice([1, 2, 4]), draw.choice([1, 2, 3]), draw.choice([1, 2, 3, 4])
        effective = micro * accum * first
        given = any_numbers(draw, micro, accum, effective)
        loaded = LoadedConfig(written(*given), Path("run.yaml"), "", given)
        before = loaded.config.model_dump()
        folder = RunFolder(tmp_path / str(number))
        batch = {"micro_batch": micro, "grad_accum": accum, "ranks": first}
        manifest = {**new_manifest(loaded, hardware={}, data={}), "batch": batch, "layout": "ddp"}
        manifest["processes"] = first
        create_run(folder, loaded, manifest=manifest, plan={"effective_batch": effective}).close()
        checkpoint_path(folder.checkpoints_path, 1).mkdir(parents=True)  # without a step it starts from the beginning
        kept = json.loads((folder.path / "resolved.json").read_text())["train"]
        ranks = draw.choice([ranks for ranks in range(2, 9) if effective % ranks == 0] or [1])
        machine = Hardware((), "CPU", 8, 2**37, 2**37, cpu_ranks=ranks)
        options = LaunchOptions(strategy="ddp" if ranks > 1 else "single")
        plan, _ = plan_stage(build_stage_request(loaded, machine, options, resume_from=folder))
        assert (plan.batch.effective_batch, plan.batch.ranks) == (effective, ranks)
        assert loaded.config.model_dump() == before
        now = resolved_config(loaded.config, effective_batch=plan.batch.effective_batch)["train"]
        for name in ("batch_size", "grad_accum", "effective_batch_size"):
            assert now[name] == kept[name], (given, first, ranks)
        check_same_run(folder, loaded, data={}, batch=dataclasses.asdict(plan.batch))
        kinds.add((len(given), ranks == first))
    assert len(kinds) == 6
