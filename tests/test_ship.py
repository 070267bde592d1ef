"""`make ship`: what is better and lost nothing ships, nothing else does, and the verdict follows from its file; and the
interval of a difference: how often it holds the true one, and what it is where nothing differs."""

import dataclasses
import json
import math
import random
import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from sft_play.cli import main
from sft_play.data.masks.render import Renderer
from sft_play.errors import ConfigError
from sft_play.finished import evaluation, metrics, respond, ship
from sft_play.finished.evaluation import chat_rows, distinct_rows, text_rows
from sft_play.finished.export.checks import MergeTest, mean_divergence
from sft_play.finished.metrics import paired_bootstrap
from sft_play.finished.respond import load_held_out_rows
from sft_play.finished.run import find_finished_run
from sft_play.finished.ship import general_sample
from sft_play.models.config_json import base_weights_identity
from tests.conftest import chat, write_rows, write_run

QUICK = ship.Thresholds(resamples=1000)


def half(base, tuned, *, chance=100.0) -> ship.Losses:
    return ship.Losses(tuple(base), tuple(tuned), (1,) * len(base), (chance,) * len(base))


def task(base, tuned) -> ship.TaskEvidence:
    return ship.TaskEvidence("test", half(base, tuned))


def evidence(*, of_task=None, text=None, chats=None, merge=None) -> ship.Evidence:
    draw = np.random.default_rng(0)
    base = draw.uniform(1, 2, 40)
    same = half([1.0] * 40, [1.0] * 40)
    return ship.Evidence(
        of_task or task(base.tolist(), (base - draw.uniform(0.4, 0.6, 40)).tolist()),
        ship.GeneralEvidence(text or same, chats or same),
        merge or ship.MergeEvidence("compared", 1e-6, 1e-4, 0.1),
    )


def refused(given: ship.Evidence, thresholds: ship.Thresholds = QUICK) -> dict[str, str]:
    verdict = ship.judge_evidence(given, thresholds)
    assert verdict.ok == all(check.ok for check in verdict.checks)
    return {check.name: check.reason for check in verdict.checks if not check.ok}


def test_what_is_better_and_lost_nothing_ships_and_each_bound_is_where_it_is_said_to_be():
    assert refused(evidence()) == {}
    base = [2.0] * 30
    at_most = ship.Thresholds(min_gain=0.25, max_text_rise=0.125, max_chat_rise=0.25, resamples=100)
    more = math.nextafter(0.125, 1)

    def of(**parts):
        return refused(evidence(**parts), at_most)

    assert "not better" in of(of_task=task(base, [1.5] * 30))["task"]  # 0.5 is a quarter of 2: above is asked
    assert of(of_task=task(base, [math.nextafter(1.5, 0)] * 30)) == {}
    assert "29 held-out rows" in of(of_task=task(base[1:], [1.0] * 29))["task"]
    assert of(text=half([1.0] * 9, [1.125] * 9)) == {}
    assert "general text" in of(text=half([0.0] * 9, [more] * 9))["general"]
    assert of(chats=half([1.0] * 9, [1.25] * 9)) == {}
    assert "general chats" in of(chats=half([0.0] * 9, [math.nextafter(0.25, 1)] * 9))["general"]
    assert of(merge=ship.MergeEvidence("compared", 1e-4, 1e-4, 0.1)) == {}
    assert "not the adapter's" in of(merge=ship.MergeEvidence("compared", 1.1e-4, 1e-4, 0.1))["merge"]


def test_a_loss_above_chance_that_falls_to_one_above_chance_is_no_gain():
    # 3 nats of chance: a base of 9 that any noise makes less sure, as random weights do
    blurred = half([9.0] * 40, [8.0] * 40, chance=3.0)
    assert "by guessing" in refused(evidence(of_task=ship.TaskEvidence("test", blurred)))["task"]
    learned = dataclasses.replace(blurred, tuned=(2.5,) * 40)
    assert refused(evidence(of_task=ship.TaskEvidence("test", learned))) == {}
    assert ship.loss_gain(learned, QUICK).difference == 0.5
    # of 4 tokens three are 7, one is 9
    chances = [-2 * math.log(3 / 4), -math.log(3 / 4) - math.log(1 / 4), 0.0]
    assert ship.chance_losses([[7, 7], [7, 9], []]) == pytest.approx(chances)


def test_what_the_base_does_not_know_cannot_be_lost():
    # 5 nats of chance: rows that the base reads no better may be any worse; those it knows are lost up to chance
    for known, unknown, is_kept in ((0, 40, True), (10, 90, False), (7, 90, True)):
        text = half([4.0] * known + [9.0] * unknown, [14.0] * (known + unknown), chance=5.0)
        assert (refused(evidence(text=text)) == {}) == is_kept


def test_exact_match_may_not_fall_by_more_than_chance():
    right, wrong = (True,) * 40, (False,) * 40
    given = evidence().task
    fell = dataclasses.replace(given, right_base=right, right_tuned=wrong)
    assert "exact match fell from 100.0% to 0.0%" in refused(evidence(of_task=fell))["task"]
    for before, after in ((wrong, right), (right, right), (right, (False, *right[1:]))):
        assert refused(evidence(of_task=dataclasses.replace(given, right_base=before, right_tuned=after))) == {}


@pytest.mark.parametrize("which", ["base", "tuned"])
def test_a_loss_that_is_not_a_number_never_ships(which):
    columns = {"base": [2.0] * 40, "tuned": [1.0] * 40}
    columns[which][3] = None
    whose = "base's" if which == "base" else "trained model's"
    assert f"the {whose} loss is not a number on 1 of 40" in refused(evidence(of_task=task(**columns)))["task"]
    for part in ("text", "chats"):
        assert whose in refused(evidence(**{part: half(**columns)}))["general"]
    assert "merge" in refused(evidence(merge=ship.MergeEvidence("compared", None, 1e-4, 0.1)))


def test_no_held_out_rows_and_no_merge_never_ship():
    assert "no rows that the run was not trained on" in refused(evidence(of_task=ship.TaskEvidence("")))["task"]
    assert refused(evidence(merge=ship.MergeEvidence("failed", reason="no disk")))["merge"] == "no disk"
    assert "merge" in refused(evidence(merge=ship.MergeEvidence("not needed")))
    assert refused(evidence(merge=ship.MergeEvidence("no adapter"))) == {}
    gone = dataclasses.replace(evidence(), not_loaded="the base is gone")
    assert refused(gone)["task"] == "the base is gone"


def plain_rule(given: ship.Evidence, asked: ship.Thresholds) -> dict[str, bool]:
    def rises(losses, bound):
        if None in losses.base + losses.tuned:
            return False
        base, tuned, tokens, chance = map(np.array, (losses.base, losses.tuned, losses.tokens, losses.chance))
        is_known = base < chance
        if is_known.sum() < asked.min_known:
            return True
        tokens = tokens[is_known]
        before, after = base[is_known] / tokens, np.minimum(tuned, chance)[is_known] / tokens
        return paired_bootstrap(before, after, weights=tokens, resamples=asked.resamples).high <= bound

    losses = given.task.losses
    is_better = len(losses) >= asked.min_rows and None not in losses.base + losses.tuned
    if is_better:
        floor = asked.min_gain * sum(map(min, losses.base, losses.chance)) / sum(losses.tokens)
        is_better = ship.loss_gain(losses, asked).low > floor
    if is_better and given.task.right_base:
        change = paired_bootstrap(given.task.right_base, given.task.right_tuned, resamples=asked.resamples)
        is_better = change.high >= 0
    merge = given.merge
    is_merged = merge.state == "no adapter" or (merge.state == "compared" and (merge.kl_merged or 0) <= merge.kl_limit)
    is_kept = rises(given.general.text, asked.max_text_rise) and rises(given.general.chats, asked.max_chat_rise)
    return {"task": is_better, "general": is_kept, "merge": is_merged}


def random_evidence(seed: int) -> ship.Evidence:
    draw, pick = np.random.default_rng(seed), random.Random(seed)

    def losses(shift, spread, number, *, general):
        tokens = draw.integers(1, 60, number)
        base = draw.gamma(4, 0.5, number)
        tuned = base + shift + draw.normal(0, spread, number)
        columns = [(base * tokens).tolist(), (np.maximum(tuned, 0) * tokens).tolist()]
        if pick.random() < 0.06:
            pick.choice(columns)[0] = None
        chance = (pick.choice([0.2, 2.5, 6.0] if general else [1.5, 6.0]) * tokens).tolist()
        return ship.Losses(*map(tuple, columns), tuple(tokens.tolist()), tuple(chance))

    number = pick.choice([10, 29, 30, 45, 80])
    answers = [tuple(pick.random() < share for _ in range(25)) for share in (0.5, pick.choice([0.1, 0.5, 0.9]))]
    given = losses(pick.choice([-0.5, -0.1, 0.0, 0.1]), 0.3, number, general=False)
    with_answers = pick.random() < 0.5
    return ship.Evidence(
        ship.TaskEvidence("val", given, *(answers if with_answers else ((), ()))),
        ship.GeneralEvidence(
            *(losses(pick.choice([-0.1, 0.0, 0.08, 0.18, 0.4]), 0.1, pick.choice([6, 40]), general=True) for _ in "12")
        ),
        pick.choice(
            [ship.MergeEvidence("no adapter"), ship.MergeEvidence("compared", pick.choice([1e-5, 1e-3]), 1e-4, 0.1),
             ship.MergeEvidence("failed", reason="no disk")]
        ),
    )  # fmt: skip


def test_the_verdict_is_that_of_the_rule_written_again():
    thresholds = ship.Thresholds(resamples=200)
    seen: Counter[tuple[str, bool]] = Counter()
    for seed in range(150):
        given = random_evidence(seed)
        wanted = plain_rule(given, thresholds)
        verdict = ship.judge_evidence(given, thresholds)
        assert {check.name: check.ok for check in verdict.checks} == wanted, seed
        assert verdict.ok == all(wanted.values())
        seen.update(wanted.items())
    assert min(seen[name, ok] for name in ("task", "general", "merge") for ok in (True, False)) >= 10


NO_GAIN = {
    "even": lambda draw, size: draw.normal(size=size),
    "heavy tails": lambda draw, size: draw.standard_t(3, size=size),
    "a few rows lose much": lambda draw, size: math.exp(0.125) - draw.lognormal(0, 0.5, size),
    "right or wrong": lambda draw, size: draw.choice([-1.0, 0.0, 1.0], p=[0.1, 0.8, 0.1], size=size),
}


def changed(draw, change) -> ship.Losses:
    """Rows of 1 to 60 tokens that lose 2 nats a token, and less by the change."""
    tokens = draw.integers(1, 61, len(change))
    columns = (2.0 * tokens, (2.0 - change) * tokens, tokens, 9.0 * tokens)
    return ship.Losses(*(tuple(column.tolist()) for column in columns))


@pytest.mark.parametrize("rows", [30, 60])
@pytest.mark.parametrize("kind", NO_GAIN)
def test_noise_does_not_pass_as_a_gain(kind, rows):
    """Pairs whose true difference is zero, of rows of 1 to 60 tokens: at most 2.5% of verdicts, measured 0 to 2%."""
    draw, trials = np.random.default_rng(1), 200
    drawn = (changed(draw, 0.1 * NO_GAIN[kind](draw, rows)) for _ in range(trials))
    passed = sum(ship.loss_gain(losses, QUICK).low > 0 for losses in drawn)
    assert passed <= 0.025 * trials + 3 * math.sqrt(0.025 * 0.975 * trials) / 2


def test_a_gain_passes_with_few_rows():
    draw = np.random.default_rng(2)
    drawn = (ship.TaskEvidence("val", changed(draw, draw.normal(0.4, 0.3, 30))) for _ in range(40))
    assert sum(ship.judge_evidence(evidence(of_task=one), QUICK).ok for one in drawn) >= 38


def test_the_general_sample_is_broad_and_no_training_data_of_the_starter():
    from benchmarks.starter_corpus import corpus_documents, normalise, starter_rows

    sample = general_sample()
    texts, conversations = sample.texts, sample.chats
    everything = [*texts, *(message["content"] for messages in conversations for message in messages)]
    assert ship.GENERAL_SAMPLE_VERSION == "general-1"
    # a changed row is another version
    assert sample.sha256 == "59dca0bf3d337c46a19c5bff4051ef2871da5d129f4c900b02943ef0bacdac59"
    assert (len(texts), len(conversations)) == (137, 77)
    corpus = normalise("\n".join(corpus_documents()))
    rows = starter_rows()
    taught = {normalise(turn["content"]) for split in rows.values() for row in split for turn in row["messages"]}
    for text in everything:
        assert normalise(text) not in taught
        assert len(text) < 12 or normalise(text) not in corpus


def sum_chat(number: int) -> dict[str, object]:
    return chat(f"what is {number} + {number}?", f"it is {2 * number}.")


SAMPLE = dataclasses.replace(general_sample(), texts=general_sample().texts[::4], chats=general_sample().chats[::3])
"""A part of the general sample, which is read sooner."""


@pytest.fixture(autouse=True)
def _part_of_the_sample(monkeypatch) -> None:
    monkeypatch.setattr(evaluation, "general_sample", lambda: SAMPLE)


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Path:
    """A base that has learned the general sample, and two runs on it, a good one and a ruined one."""
    from tests.models import make_llama

    folder = tmp_path_factory.mktemp("ship")
    base = make_llama(folder / "base")
    renderer = Renderer(AutoTokenizer.from_pretrained(base), max_seq_len=512)
    others = [tuple(sum_chat(n)["messages"]) for n in range(160, 400)]  # how such answers begin
    sample = dataclasses.replace(SAMPLE, chats=(*SAMPLE.chats, *others))
    rows = [*text_rows(sample, renderer), *chat_rows(sample, renderer)]
    stream = torch.tensor([token for row in rows for token in row["input_ids"]])
    model = AutoModelForCausalLM.from_pretrained(base)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    draw = torch.Generator().manual_seed(0)
    for _ in range(120):
        starts = torch.randint(0, len(stream) - 128, (8,), generator=draw)
        ids_BT = torch.stack([stream[start : start + 128] for start in starts.tolist()])
        model(input_ids=ids_BT, labels=ids_BT).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(base)
    data = write_rows(folder / "sums.jsonl", map(sum_chat, range(160)))
    sections = {
        "tuning": {"lora": {"r": 4, "dropout": 0.0}}, "data": {"val_fraction": 0.3},
        "train": {"max_steps": 12, "learning_rate": 4e-3, "warmup_steps": 0, "bf16": False},
        "eval": {"before_training": False, "steps": 0, "generate_rows": 4, "max_new_tokens": 6},
    }  # fmt: skip
    run_yaml = write_run(folder, base, data, **sections)
    for name, *more in (("good",), ("ruined", "train.learning_rate=1e-2", "train.max_steps=40", "train.bf16=true")):
        assert main(["train", "--config", str(run_yaml), f"output.name={name}", *more]) == 0
    return folder


def adapter_copy(world: Path, name: str, factor: float = 1.0) -> Path:
    """A copy of the good run, with the half of its adapter that began at zero times a factor."""
    folder = world / "outputs" / name
    left_out = shutil.ignore_patterns("merged", "ship.json", "complete.json")
    shutil.copytree(world / "outputs" / "good", folder, ignore=left_out)
    path = folder / "adapter" / "adapter_model.safetensors"
    tensors = load_file(path)
    save_file({key: tensor * factor if "lora_B" in key else tensor for key, tensor in tensors.items()}, path)
    return folder


def shipped(command, folder: Path, *words: str) -> tuple[int, dict]:
    code, printed = command("ship", "--run", str(folder), "--json", *words)
    (line,) = [line for line in printed.splitlines() if line.startswith("{")]
    answer = json.loads(line)
    written = json.loads((folder / "ship.json").read_text())
    assert {key: answer[key] for key in written} == written
    assert (code, answer["kind"]) == ((0, "done") if answer["ok"] else (2, "do_not_ship"))
    replayed, printed = command("ship", "--replay", str(folder / "ship.json"))
    assert (replayed, "follows from its evidence" in printed) == (code, True), printed
    return code, answer


def checks(answer: dict) -> dict[str, bool | None]:
    return {check["name"]: check["ok"] for check in answer["checks"]}


@pytest.mark.build
def test_a_good_run_ships(world, command):
    folder = world / "outputs" / "good"
    code, answer = shipped(command, folder)
    assert (code, answer["verdict"]) == (0, "ship"), answer["reasons"]
    assert checks(answer) == {"task": True, "general": True, "merge": True}
    task = answer["evidence"]["task"]
    assert (len(task["losses"]["base"]), len(task["right_base"])) == (61, 4)
    assert "nothing to lose" not in answer["checks"][1]["line"]
    assert (folder / "merged" / "config.json").is_file()
    assert {"versions", "weights", "base", "rows_sha256", "sample", "thresholds"} <= set(answer)


@pytest.mark.build
@pytest.mark.parametrize(
    ("name", "factor", "task", "general"),
    [("ruined", None, True, False), ("untrained", 0.0, False, True), ("nan", math.nan, False, False)],
)
def test_ruined_untrained_and_no_numbers_are_refused(world, command, name, factor, task, general):
    folder = world / "outputs" / name if factor is None else adapter_copy(world, name, factor)
    code, answer = shipped(command, folder)
    assert (code, checks(answer)) == (2, {"task": task, "general": general, "merge": None})


@pytest.mark.build
def test_a_run_without_its_base_has_no_verdict(world, command):
    folder = adapter_copy(world, "rebased")
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["data"]["weights"]["sha256"] = "0" * 64
    (folder / "manifest.json").write_text(json.dumps(manifest))
    code, printed = command("ship", "--run", str(folder))
    assert (code, "put the base back" in printed) == (2, True), printed
    assert not (folder / "ship.json").exists()


@pytest.mark.build
def test_a_wrong_merge_is_refused_for_the_merge(world, command):
    folder = adapter_copy(world, "unmerged")
    shutil.copytree(world / "base", folder / "merged")
    adapter = base_weights_identity(str(folder / "adapter"), None)["sha256"]
    (folder / "merged" / "merge.json").write_text(json.dumps({"adapter_sha256": adapter}))
    code, answer = shipped(command, folder, "--limit", "45", "--tolerance", "0.5")
    assert (code, checks(answer)) == (2, {"task": True, "general": True, "merge": False})
    assert (answer["thresholds"]["max_text_rise"], answer["thresholds"]["max_chat_rise"]) == (0.5, 0.5)
    assert len(answer["evidence"]["task"]["losses"]["base"]) == 45


def test_a_merge_that_is_not_numbers_is_not_the_adapters(tmp_path):
    row = (torch.zeros(2, 4).log_softmax(-1), torch.zeros(2))
    divergence = mean_divergence([row], [(row[0] * math.nan, row[1])])
    assert math.isnan(divergence)
    assert not MergeTest(tmp_path, tmp_path, "val", 1, 2, divergence, 0.1, 1e-4, {}).ok


@pytest.mark.build
def test_repeated_rows_and_training_rows_are_no_evidence(world, tmp_path):
    run = find_finished_run(world / "outputs", "good")
    held = load_held_out_rows(run)
    rows, left_out = distinct_rows(held, 20)
    assert (len(rows), left_out) == (20, 0)
    twice = dataclasses.replace(held.split, rows=held.split.rows.select([0, 1, 0, 1, 1, 2]))
    trained = dataclasses.replace(held, split=dataclasses.replace(held.split, rows=held.train.rows.select(range(9))))
    assert distinct_rows(dataclasses.replace(held, split=twice), 20)[1] == 3
    assert distinct_rows(trained, 20) == ([], 9)


@pytest.mark.build
def test_both_models_of_a_run_that_trained_all_weights_are_measured(tmp_path, command):
    code, answer = shipped(command, random_run(tmp_path, "full", rows=80))
    assert code == 2
    losses = answer["evidence"]["general"]["text"]
    # all weights as they were: base and trained model are two folders with the same weights
    assert losses["base"] == pytest.approx(losses["tuned"], rel=1e-6)
    assert len(losses["base"]) == len(SAMPLE.texts)


@pytest.mark.build
@pytest.mark.parametrize("rows", [24, 0])
def test_rows_that_cannot_be_enough_refuse_the_run_before_a_model_loads(tmp_path, command, monkeypatch, rows):
    loaded: list[str] = []
    monkeypatch.setattr(respond, "load_model", lambda *_, **__: loaded.append("a model"))
    folder = random_run(tmp_path, "lora", rows=rows or 24)
    if not rows:
        settings = json.loads((folder / "resolved.json").read_text())
        settings["data"]["val_fraction"] = 0
        (folder / "resolved.json").write_text(json.dumps(settings))
    code, answer = shipped(command, folder)
    assert (code, answer["ok"], answer["verdict"], loaded) == (2, False, "do not ship", [])
    assert checks(answer) == {"task": False, "general": None, "merge": None}
    assert {"versions", "weights", "base", "rows_sha256", "sample", "thresholds", "evidence"} <= set(answer)
    task = answer["evidence"]["task"]
    assert (task["split"], task["losses"]["tokens"]) == ("val" if rows else "", [])


@pytest.mark.build
def test_a_run_whose_record_says_that_rows_are_too_few_is_refused_without_reading_them(tmp_path, command, monkeypatch):
    monkeypatch.setattr(evaluation, "judge_run", lambda *_, **__: pytest.fail("its rows were read"))
    folder = random_run(tmp_path, "lora", rows=24)
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["data"] = {**(manifest.get("data") or {}), "val": {"report": {"rows_kept": 12}}}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    code, answer = shipped(command, folder)
    assert (code, answer["verdict"], "12 held-out rows" in answer["reasons"][0]) == (2, "do not ship", True)
    assert json.loads((folder / "ship.json").read_text())["checks"] == answer["checks"]


def random_run(folder: Path, mode: str, *, rows: int) -> Path:
    """A finished run of random weights, of whose rows half are held out."""
    from tests.finished_runs import SMALL, finished_run, make_base

    torch.manual_seed(0)
    base = make_base(folder / "base", LlamaForCausalLM(LlamaConfig(**SMALL, vocab_size=400)))
    run = finished_run(folder / "run", base, mode=mode)
    write_rows(folder / "run.jsonl", map(sum_chat, range(rows)))
    return run


@pytest.fixture
def recorded(tmp_path) -> dict:
    given = evidence()
    whole = ship.ShipResult(tmp_path, given, ship.Thresholds(), ship.judge_evidence(given, ship.Thresholds()), {})
    return json.loads(json.dumps(whole.as_json()))


def replayed(tmp_path: Path, data) -> object:
    path = tmp_path / "ship.json"
    path.write_text(data if isinstance(data, str) else json.dumps(data))
    return ship.replay_verdict(path)


EDITS = {
    "ok": ("ok", lambda new: new.update(ok=False)),
    "verdict": ("verdict", lambda new: new.update(verdict="do not ship")),
    "a check": ("checks[task].ok", lambda new: new["checks"][0].update(ok=False)),
    "a loss": ("checks[task].ok", lambda new: new["evidence"]["task"]["losses"]["tuned"].__setitem__(0, 99.0)),
    "a divergence": ("checks[merge].ok", lambda new: new["evidence"]["merge"].update(kl_merged=5e-2)),
    "a threshold": ("checks[task].ok", lambda new: new["thresholds"].update(min_gain=0.9)),
    "no check": ("checks[merge].ok", lambda new: new["checks"].pop()),
}


@pytest.mark.parametrize("what", EDITS)
def test_a_verdict_replays_and_an_edited_file_does_not(tmp_path, recorded, what):
    again = replayed(tmp_path, recorded)
    assert (again.ok, again.differences) == (True, ())
    name, edit = EDITS[what]
    edit(recorded)
    again = replayed(tmp_path, recorded)
    assert (again.ok, name in again.differences) == (False, True)


WRONG_FILES = {
    "no JSON": lambda data: "{", "another JSON": lambda data: "[]",
    "another format": lambda data: json.dumps(data | {"format": "other"}),
    "no evidence": lambda data: json.dumps(data | {"evidence": None}),
    "a level above 1": lambda data: json.dumps(data | {"thresholds": {"level": 2}}),
    "not a number": lambda data: json.dumps(data).replace("[1.0,", "[NaN,", 1),
    "a row of no tokens": lambda data: json.dumps(data).replace('"tokens": [1,', '"tokens": [0,', 1),
    "no list of checks": lambda data: json.dumps(data | {"checks": 5}),
    "a check that is a text": lambda data: json.dumps(data | {"checks": ["task"]}),
    "a row less": lambda data: json.dumps(data).replace('"tokens": [1,', '"tokens": [', 1),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG_FILES)
def test_a_file_that_is_no_verdict_is_refused(tmp_path, recorded, what):
    with pytest.raises(ConfigError, match="REPLAY="):
        replayed(tmp_path, WRONG_FILES[what](recorded))
    with pytest.raises(ConfigError, match="cannot be read"):
        ship.replay_verdict(tmp_path / "none.json")


def drawn_losses(generator, rows):
    base = generator.gamma(4.0, 0.5, rows)
    return base, base - 0.3 + generator.normal(0, 0.5, rows), None


def matches(generator, rows):
    """Exact matches of the same rows: 30% of them before, 50% after."""
    hard = generator.random(rows)
    return (hard < 0.3).astype(float), (hard < 0.5).astype(float), None


def by_tokens(generator, rows):
    """Rows of 1 to 60 tokens, whose improvement falls with their length: the plain mean of rows would be another."""
    tokens = generator.integers(1, 61, rows)
    base = generator.gamma(4.0, 0.5, rows)
    return base, base - 3.0 / tokens + generator.normal(0, 0.2, rows), tokens


@pytest.mark.parametrize(("draw", "truth", "rows", "level", "least", "most"), [
    (drawn_losses, -0.3, 8, 0.95, 0.92, 0.98),  # the standard error of 400 trials is 1.1 points
    (matches, 0.2, 60, 0.95, 0.92, 0.98), (by_tokens, -3.0 / 30.5, 60, 0.95, 0.92, 0.98),
    (drawn_losses, -0.3, 40, 0.8, 0.74, 0.86),
    (lambda *given: (*by_tokens(*given)[:2], None), -3.0 / 30.5, 60, 0.95, 0.0, 0.5),  # not the mean over tokens
])  # fmt: skip
def test_intervals_hold_the_true_difference_as_often_as_their_level_says(draw, truth, rows, level, least, most):
    generator, held, trials = np.random.default_rng(7), 0, 400
    for _ in range(trials):
        base, tuned, weights = draw(generator, rows)
        made = paired_bootstrap(base, tuned, weights=weights, level=level, resamples=600)
        held += made.low <= truth <= made.high
    assert least <= held / trials <= most


def test_equal_figures_differ_by_exactly_nothing_and_others_by_their_weighted_means():
    generator = np.random.default_rng(0)
    for rows in (1, 2, 3, 50):
        same, weights = generator.normal(size=rows), generator.integers(1, 9, rows)
        for weight in (None, weights):
            made = paired_bootstrap(same, same, weights=weight)
            assert (made.difference, made.low, made.high) == (0.0, 0.0, 0.0)
    # by hand: tuned 0*1 + 4*3 = 12, base 2*1 + 2*3 = 8; (12 - 8) / (1 + 3) = 1
    made = paired_bootstrap([2.0, 2.0, math.nan], [0.0, 4.0, math.nan], weights=[1, 3, 0])
    assert made.difference == 1.0
    # two rows drawn with replacement: both the first (-2), one of each (1), both the second (2)
    assert (made.low, made.high) == (-2.0, 2.0)


def test_the_same_arguments_give_the_same_interval_in_pieces_of_any_size(monkeypatch):
    generator = np.random.default_rng(1)
    base, tuned, weights = by_tokens(generator, 40)
    made = paired_bootstrap(base, tuned, weights=weights, resamples=999)
    assert paired_bootstrap(base, tuned, weights=weights, resamples=999) == made
    assert paired_bootstrap(base, tuned, weights=weights, resamples=999, seed=1) != made
    monkeypatch.setattr(metrics, "_MAX_DRAWN_ROWS", 100)
    assert paired_bootstrap(base, tuned, weights=weights, resamples=999) == made
    swapped = paired_bootstrap(tuned, base, weights=weights, resamples=999)
    assert (swapped.low, swapped.high) == pytest.approx((-made.high, -made.low))


def test_few_rows_widen_the_interval_and_one_row_says_nothing():
    one = paired_bootstrap([0.0], [1.0])
    assert (one.difference, one.low, one.high) == (1.0, -math.inf, math.inf)
    assert one.as_json() == {"difference": 1.0, "low": None, "high": None, "level": 0.95}
    none = paired_bootstrap([], [])
    assert none.as_json() == {"difference": None, "low": None, "high": None, "level": 0.95}
    with pytest.raises(ValueError, match="for each row"):
        paired_bootstrap([1.0, 2.0], [1.0])
