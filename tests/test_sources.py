"""data.sources: exact shares of every epoch, the loss of each, the same rows after a stop, and every refusal."""

import json
import random
import re
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from sft_play.config.load import config_from_text, load_config
from sft_play.data.build.splits import MixedSources, SourceMix, build_splits, draw_rows, format_mix_table, share_counts
from sft_play.data.sources.files import find_data_paths
from sft_play.errors import ConfigError, DataError
from sft_play.machine.hardware import Hardware
from sft_play.models.config_json import load_model_shape
from sft_play.planner.decide import PlanRequest, make_plan
from sft_play.runs.folder import RunFolder
from sft_play.training.loop.trainer import build_trainer
from sft_play.training.measure.monitor import Monitor
from tests.conftest import chat, write_rows
from tests.test_train import logged as series

pytestmark = pytest.mark.build


def test_shares_add_up_and_every_row_comes_as_often_as_the_others_of_its_source():
    assert share_counts([1, 1, 1], 8) == (3, 3, 2)  # 2.67 each: of equal remainders the first
    assert share_counts([0.7, 0.2, 0.1], 11) == (8, 2, 1)  # 7.7, 2.2, 1.1
    assert share_counts([1e300, 1.0], 5) == (5, 0)
    draw = random.Random(14)
    for _ in range(150):
        sizes = tuple(draw.randint(1, 40) for _ in range(draw.randint(1, 5)))
        weights = [draw.choice([draw.random() + 1e-9, draw.randint(1, 9), 10 ** draw.uniform(-6, 6)]) for _ in sizes]
        total = draw.choice([sum(sizes), draw.randint(1, 200)])
        counts = share_counts(weights, total)
        assert sum(counts) == total
        for count, weight in zip(counts, weights, strict=True):
            assert abs(count - total * Fraction(weight) / sum(map(Fraction, weights))) < 1
        names, seed = tuple(map(str, range(len(sizes)))), draw.randrange(2**32)
        mix, ends = SourceMix(names, sizes, counts, seed), np.cumsum(sizes)
        so_far = np.zeros(sum(sizes), dtype=int)
        for epoch in range(5):
            rows = mix.epoch_rows(epoch)
            # from its number alone
            assert np.array_equal(rows, SourceMix(names, sizes, counts, seed).epoch_rows(epoch))
            seen = np.bincount(rows, minlength=sum(sizes))
            so_far += seen
            for count, mine, ever in zip(counts, np.split(seen, ends[:-1]), np.split(so_far, ends[:-1]), strict=True):
                assert mine.sum() == count
                assert max(np.ptp(mine), np.ptp(ever)) <= 1


def test_epochs_of_a_source_that_is_not_used_whole_have_other_rows():
    mix = MixedSources(("a", "b"), (1.0, 1.0), (30, 10)).mix(seed=1)
    assert mix.rows_per_epoch == (20, 20)
    first, second = (set(mix.epoch_rows(epoch)[:20].tolist()) for epoch in (0, 1))
    assert len(first) == len(second) == 20
    assert first | second == set(range(30))
    assert sorted(mix.epoch_rows(0)[20:].tolist()) == sorted([*range(30, 40)] * 2)
    unweighted = MixedSources(("a", "b"), (None, None), (30, 10)).mix(seed=1)
    assert sorted(unweighted.epoch_rows(3).tolist()) == list(range(40))
    assert draw_rows(5, 5, seed=1) is None
    kept, again, other = (draw_rows(1000, 10, seed=seed) for seed in (1, 1, 2))
    assert (len({*kept.tolist()}), np.array_equal(kept, again), np.array_equal(kept, other)) == (10, True, False)


def test_a_weight_that_gives_no_row_or_too_many_passes_is_refused_and_the_table_says_rows_share_and_passes():
    with pytest.raises(DataError, match=r"weight 1 of b, 0\.001 of all, gives it no row of an epoch of 40"):
        MixedSources(("a", "b"), (999.0, 1.0), (30, 10)).mix(seed=1)
    with pytest.raises(DataError, match="asks for 3,000 rows an epoch, and it has 1: more than 1,000 passes"):
        MixedSources(("a", "b"), (3.0, 1.0), (1, 3999)).mix(seed=1)
    lines = format_mix_table(MixedSources(("code", "chat"), (3.0, 1.0), (10, 30)).mix(seed=1))
    assert lines[1].split() == ["code", "10", "30", "75.00%", "3"]
    assert lines[2].split() == ["chat", "30", "10", "25.00%", "0.333"]


@pytest.mark.parametrize(("data", "said"), [
    ("sources: [{path: a, max_rows: 0}]", "data.sources[0].max_rows: expected a whole number of at least 1"),
    ("sources: [{path: a, wieght: 2}]", "data.sources[0].wieght: unknown key (value 2); did you mean weight?"),
    ("sources: [{weight: 2}]", "data.sources[0].path: missing"),
    ("sources: [a.jsonl]", 'data.sources[0]: expected a section, found "a.jsonl"; write {path: "a.jsonl", …}'),
    ("sources: [{path: x/a.jsonl}, {path: b, name: a}]", "data.sources[1].name: is named a, as data.sources[0] is"),
    ("sources: [{path: a, weight: 1}, {path: b}]", "data.sources[1]: has no weight, and other sources have one"),
    ("train_path: a\n  sources: [{path: b}]", "run.yaml:3: data.train_path: given together with data.sources"),
    ("val_path: v\n  sources: [{path: b, val_path: c}]", "data.val_path: given together with a source's val_path"),
    ("train_path: null", "data.train_path: null, and data.sources is empty"),
    ("sources:\n  - path: a\n    weight: 1\n  - path: b\n    weight: 0", "run.yaml:7: data.sources[1].weight: exp"),
])  # fmt: skip
def test_what_is_wrong_with_sources_is_said_with_its_place(data, said):
    with pytest.raises(ConfigError, match=re.escape(said)):
        config_from_text(f"model: {{name: x}}\ndata:\n  {data}\n", name="run.yaml")


def test_sources_have_names_and_no_default_files_beside_them():
    text = "model: {name: x}\ndata: {sources: [{path: a/train.jsonl.gz}, {path: b/train.jsonl}, {path: 'hub:o/n'}]}\n"
    data = config_from_text(text, name="run.yaml").data
    assert data.source_names == ("a-train", "b-train", "n")
    assert (data.train_path, data.val_path, data.test_path) == (None, None, None)


@pytest.fixture
def run_yaml(tmp_path: Path, tiny_llama: Path) -> Path:
    """Two files of chats and one to judge on, three quarters of an epoch from the smaller."""
    for name, count, answer in (("sums", 12, "it is"), ("colours", 20, "red red red"), ("held", 6, "it is")):
        rows = (chat(f"what is {n} of {name}?", f"{answer} {n}.") for n in range(count))
        write_rows(tmp_path / f"{name}.jsonl", rows)
    path = tmp_path / "run.yaml"
    path.write_text(
        f"model: {{name: {tiny_llama}, max_seq_len: 64}}\ntuning: {{mode: full}}\ndata:\n  sources:\n"
        f"    - {{path: {tmp_path}/sums.jsonl, weight: 3, val_path: {tmp_path}/held.jsonl}}\n"
        f"    - {{path: {tmp_path}/colours.jsonl, weight: 1}}\n"
        "train: {effective_batch_size: 8, batch_size: 2, epochs: 3, learning_rate: 1e-3, report_to: [],\n"
        "        gradient_checkpointing: false, bf16: false}\n"
        f"eval: {{before_training: false}}\noutput: {{dir: {tmp_path}/outputs}}\n"
    )
    return path


def test_a_run_on_sources_stopped_and_resumed_has_the_losses_of_an_unbroken_one(run_yaml, succeed, refuse, tmp_path):
    """32 rows an epoch, 24 of the first source and 8 of the second: 4 steps an epoch, stopped within the second."""
    for name, words in (("whole", []), ("broken", ["train.stop_after_steps=5"])):
        said = succeed("train", "--config", str(run_yaml), f"output.name={name}", *words)
    given = run_yaml.read_text()
    run_yaml.write_text(given.replace("weight: 3", "weight: 2"))
    assert "data.sources: the run has" in refuse("resume", "--config", str(run_yaml), "--run", "broken")
    run_yaml.write_text(given)
    succeed("resume", "--config", str(run_yaml), "--run", "broken")
    whole, broken = (tmp_path / "outputs" / name for name in ("whole", "broken"))
    for key in ("loss", "loss_sums", "loss_colours", "eval_loss"):
        assert series(broken, key) == series(whole, key), key
    assert [len(series(whole, key)) for key in ("loss", "eval_loss_sums", "eval_loss_colours")] == [12, 3, 0]
    assert "sums             12          24   75.00%        2" in said
    assert "colours          20           8   25.00%      0.4" in said
    facts = json.loads((whole / "manifest.json").read_text())["data"]
    assert len(facts["source sums"]["sha256"]) == len(facts["source sums (val)"]["sha256"]) == 64


def rows_of_steps(run_yaml: Path, *overrides: str, epochs: int = 2) -> tuple[Any, list[list[int]]]:
    """The trainer of a run in this process, and the rows of each epoch as its order gives them."""
    config = load_config(run_yaml, overrides=overrides).config
    name = config.model.name
    tokenizer = AutoTokenizer.from_pretrained(name)
    splits = build_splits(config, find_data_paths(config.data), tokenizer, max_seq_len=config.model.max_seq_len)
    assert splits.sources is not None
    plan = make_plan(PlanRequest(config, load_model_shape(name), Hardware((), "CPU", 2, 2**34, 2**34)))
    trainer = build_trainer(
        config, plan, RunFolder(run_yaml.parent / "run"), peft_config=None, train_split=splits.train,
        model=AutoModelForCausalLM.from_pretrained(name), tokenizer=tokenizer, eval_split=splits.val,
        sources=splits.sources, monitor=Monitor(sources=splits.sources.names),
    )  # fmt: skip
    loader = trainer.get_train_dataloader()
    order = []
    for epoch in range(epochs):
        trainer.epoch_order.set_epoch(epoch)
        order.append(list(trainer.epoch_order))
    assert len(loader) == -(-len(order[0]) // plan.batch.effective_batch) * trainer.args.gradient_accumulation_steps
    return trainer, order


def test_the_trainer_sees_the_shares_of_every_epoch_and_packs_hold_rows_of_one_source(run_yaml):
    trainer, (first, second) = rows_of_steps(run_yaml)
    for rows in (first, second):
        sources = [int(trainer.train_dataset[row]["sources"][0]) for row in rows]
        assert (sources.count(0), sources.count(1)) == (24, 8)
        assert sources != sorted(sources)  # mixed, not one after the other
    assert sorted(row for row in first if row < 12) == sorted([*range(12)] * 2)
    of_second = [{row for row in rows if row >= 12} for rows in (first, second)]
    assert not of_second[0] & of_second[1]
    trainer, (rows, _) = rows_of_steps(run_yaml, "data.packing=best_fit", "model.max_seq_len=160")
    found = [trainer.train_dataset[row]["sources"] for row in rows]
    assert all(len(set(sources.tolist())) == 1 for sources in found)
    counts = [sum(int(sources[0]) == place for sources in found) for place in (0, 1)]
    sizes = trainer.epoch_order._mix.sizes
    assert tuple(counts) == share_counts([3, 1], sum(sizes))
    assert sum(sizes) < 32


def test_max_rows_held_out_shares_and_one_held_out_file_for_all_sources(run_yaml, succeed, refuse, tmp_path):
    text = run_yaml.read_text().replace(f", val_path: {tmp_path}/held.jsonl", "")
    run_yaml.write_text(text.replace("weight: 1", "weight: 1, max_rows: 9"))
    for name, word in (("shares", "data.val_fraction=0.3"), ("one", f"data.val_path={tmp_path}/held.jsonl")):
        words = [f"output.name={name}", word, "train.max_steps=1", "eval.steps=1"]
        said = succeed("train", "--config", str(run_yaml), *words)
        assert "rows of colours are used (max_rows)" in said
        run = tmp_path / "outputs" / name
        assert bool(series(run, "eval_loss_sums")) is bool(series(run, "eval_loss_colours")) is (name == "shares")
        assert series(run, "eval_loss") or name == "shares"
    run_yaml.write_text(run_yaml.read_text().replace("colours.jsonl", "colors.jsonl"))
    said = refuse("train", "--config", str(run_yaml))
    assert re.search(r"data\.sources\[1\]\.path: .*colors\.jsonl does not exist", said)


def test_plain_text_of_several_sources_is_mixed_by_blocks(run_yaml, succeed, tmp_path):
    for name in ("one", "two"):
        (tmp_path / f"{name}.txt").write_text(f"the light in the {name} is on. " * 200)
    sources = f"[{{path: {tmp_path}/one.txt, weight: 1}}, {{path: {tmp_path}/two.txt, weight: 2}}]"
    words = ["task_mode=cpt", f"data.sources={sources}", "train.max_steps=1", "output.name=text"]
    succeed("train", "--config", str(run_yaml), *words)
    assert series(tmp_path / "outputs" / "text", "loss_two")


def test_check_render_and_preview_read_every_source_and_a_bad_row_is_named_with_it(
    run_yaml, succeed, refuse, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    assert "colours.jsonl" in succeed("check", "--config", str(run_yaml))
    succeed("render", "--config", str(run_yaml))
    names = {path.name for path in (tmp_path / "data" / "rendered").glob("*.jsonl")}
    assert names == {"train-sums.jsonl", "train-colours.jsonl", "val-sums.jsonl"}
    assert "The first of data.sources; not shown: colours" in succeed("preview", "--config", str(run_yaml))
    succeed("plan", "--config", str(run_yaml))
    with (tmp_path / "colours.jsonl").open("a") as file:
        file.write("{}\n")
    said = f"data.sources[1].path: 1 of 21 rows of {tmp_path}/colours.jsonl (messages) cannot be used"
    assert said in refuse("train", "--config", str(run_yaml))


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "zero2", "fsdp_cp"])
def test_sources_are_the_same_over_ranks(run_yaml, tmp_path, strategy):
    from tests.test_distributed import start

    asked = {"STRATEGY": strategy, "NPROC": "2"}
    for name, command, given in (("one", "train", {}), ("two", "train-distributed", asked)):
        answer = start(tmp_path, command, "--config", str(run_yaml), f"output.name={name}", **given)
        assert answer.returncode == 0, answer.stdout + answer.stderr
    one, two = (tmp_path / "outputs" / name for name in ("one", "two"))
    for key in ("loss", "loss_sums", "loss_colours", "eval_loss", "eval_loss_sums", "samples_seen"):
        assert series(two, key) == pytest.approx(series(one, key), rel=1e-4), key
        assert series(one, key)
