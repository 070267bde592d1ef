"""What a person sees of help, plan, check and train: how many lines, that the rest is where it is said to be, and one
unit: sizes of memory and disk are GiB wherever a person reads them; rates of links stay GB/s."""

import ast
import dataclasses
import functools
import json
import math
import random
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sft_play.config.load import config_from_text
from sft_play.launch.planning import require_usable_hardware
from sft_play.log import set_up_logging
from sft_play.machine.hardware import parse_hardware
from sft_play.models.config_json import load_model_shape
from sft_play.planner.advice import make_advised_plan
from sft_play.planner.decide import PlanRequest
from sft_play.planner.explain import fit_line, plan_summary_lines
from sft_play.planner.plan import Plan, RunLength
from sft_play.runs.folder import RunFolder, next_run_commands
from sft_play.text import format_duration
from sft_play.training.prepare.prepare import shorten_row
from sft_play.variables import VARIABLES, takes_variable
from tests import warm
from tests.conftest import ROOT, clean_environment, write_run

BEFORE_STEP_1 = 12
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
TARGETS = re.findall(r"^([a-z-]+):", MAKEFILE, re.MULTILINE)


@pytest.fixture(autouse=True)
def _as_a_person_types(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WHY")


def make(*words: str) -> str:
    answer = subprocess.run(["make", *words], cwd=ROOT, capture_output=True, text=True, env=clean_environment())
    assert (answer.returncode, answer.stderr) == (0, ""), answer
    return answer.stdout


def test_make_alone_is_twelve_lines_at_most_and_names_targets_that_there_are():
    lines = make().splitlines()
    assert (len(lines) <= 12, max(map(len, lines)) <= 120) == (True, True)
    assert lines[0].startswith("sft_play: fine-tune a language model. First: make train ")
    named_targets = set(re.findall(r"(?:\bmake|\|) +([a-z-]+)", "\n".join(lines)))
    assert {"train", "plan", "check", "resume", "chat", "ship", "export"} <= named_targets
    assert named_targets <= {*TARGETS, "new"}
    assert "make help ALL=1" in lines[-1]
    text = make("help", "ALL=1")
    assert all(re.search(rf"^  {target} +\S", text, re.MULTILINE) for target in TARGETS)
    assert make("ALL=1") == text


def test_help_of_a_target_names_its_variables_and_runs_nothing():
    chance = random.Random(3)
    for target in ["plan", "clean", "train-tb", "train-and-watch", *chance.sample(sorted({*TARGETS} - {"help"}), 4)]:
        before = sorted(path.name for path in ROOT.iterdir())
        lines = make("help", target).splitlines()
        told = re.search(rf"^{target}:.*## (.*)$", MAKEFILE, re.MULTILINE)
        assert told is not None
        assert lines[0] == f"make {target}: {told[1]}"
        taken = [name for name in VARIABLES if takes_variable(name, target)]
        assert re.findall(r"^  ([A-Z_]+)=", "\n".join(lines[1:]), re.MULTILINE) == taken
        assert sorted(path.name for path in ROOT.iterdir()) == before
    for topic, part in (("HARDWARE", "of make plan"), ("learning_rate", "train.learning_rate (default: auto): "),
                        ("train.epochs", "SET='train.epochs=...'"), ("SET", "SET='a.b=1")):  # fmt: skip
        assert part in make("help", topic)
    facts = json.loads(make("help", "plan", "JSON=1"))
    assert (facts["ok"], facts["topic"], facts["help"]) == (True, "plan", make("help", "plan").splitlines())


MODELS = ("Qwen/Qwen2.5-0.5B", "Qwen/Qwen2.5-3B-Instruct", "meta-llama/Llama-3.1-8B", "Qwen/Qwen3-30B-A3B")
MACHINES = ("1xRTX3060", "1xRTX4090,ram=64GiB", "2xH200", "8xH100", "2x8xH100,ram=1TiB", "cpu,ram=64GiB,cores=8")


def random_plan(chance: random.Random) -> tuple[Any, Plan]:
    batch = chance.choice([16, 32, 48])
    text = f"train: {{effective_batch_size: {batch}, bf16: {chance.choice(['true', 'false'])}}}\n"
    text += f"tuning: {{mode: {chance.choice(['qlora', 'lora', 'full'])}}}\n"
    config = config_from_text(f"model: {{name: {chance.choice(MODELS)}}}\n{text}", name="x")
    work = RunLength(chance.choice([1, 15, 19, 20, 500]), 10**6) if chance.random() < 0.7 else None
    request = PlanRequest(config, load_model_shape(config.model.name), parse_hardware(chance.choice(MACHINES)))
    return config, make_advised_plan(request, estimate_run_length=lambda effective: work)


def test_the_page_of_a_plan_is_four_lines_and_a_line_for_each_warning():
    chance, seen = random.Random(5), set()
    for _ in range(40):
        config, plan = random_plan(chance)
        start = ["Start: make train CONFIG=my.yaml"] if plan.fits else []
        head, batch, data, *warned, last = plan_summary_lines(plan, config, start_lines=start, has_local_data=False)
        assert ("FITS" in head, "DOES NOT FIT" in head) == (plan.fits, not plan.fits)
        assert head.startswith(config.model.name.split("/")[1])
        product_of = re.sub(r"groups of \d+", "groups", batch.partition(";")[0])
        whole, *numbers = (int(text) for text in re.findall(r"\d+", product_of))
        assert whole == math.prod(numbers) == plan.batch.effective_batch
        assert "not here" in data
        assert f"; learning rate {config.learning_rate:g}; " in batch
        assert ("tokens/s" in batch, "margin included" in head) == (plan.speed_known, plan.fits)
        assert ("make train" in last) == plan.fits
        assert last.endswith("Why, and what else was compared: make plan ... WHY=1")
        few = plan.run_length is not None and plan.run_length.steps < 20
        long = plan.run_length is not None and not plan.hardware.gpus and 10**6 / plan.speed.tokens_per_s >= 3600
        assert len(warned) == few + long
        assert all(line.startswith("Warning: ") for line in warned)
        assert not re.search(r"\b0\.\d h\b", "\n".join([head, batch, fit_line(plan, config)]))
        seen.add((plan.fits, bool(warned), plan.run_length is None, bool(plan.hardware.gpus)))
    assert len(seen) >= 8, seen


def test_a_plan_says_that_a_run_would_stop_where_it_does(command, monkeypatch):
    """A 3B on a CPU: the plan said that it fits, and named a command that is refused."""
    monkeypatch.chdir(ROOT)
    machine = dataclasses.replace(parse_hardware("cpu,ram=64GiB,cores=8"), named=False)
    for name in ("sft_play.commands.request.detect_hardware", "sft_play.launch.planning.detect_hardware"):
        monkeypatch.setattr(name, lambda: machine)
    monkeypatch.setattr("sft_play.launch.planning.find_unusable_accelerator", lambda devices: None)
    code, refused = command("train", "--config", "configs/run_bnb.yaml")
    why = refused.partition("error: ")[2]
    assert (code, "no GPU was detected here" in why) == (2, True)
    code, said = command("plan", "--config", "configs/run_bnb.yaml")
    assert (code, f"warning: a run here would stop: {why}" in said) == (0, True)
    assert ("NOT STARTED on this machine" in said, "make train" in said) == (True, False)
    code, said = command("plan", "--config", "configs/run_bnb.yaml", "--json")
    assert json.loads(said.splitlines()[0])["launch"] is None
    code, said = command("plan", "--config", "configs/run_bnb.yaml", "train.device=cpu")
    assert (code, "Start: make train" in said, "would stop" in said) == (0, True, False)


def test_durations_are_in_the_unit_that_a_person_would_take():
    chance = random.Random(7)
    units = {"second": 1, "minute": 60, "hour": 3600, "day": 86400}
    for _ in range(500):
        seconds = 10 ** chance.uniform(-1, 7)
        number, unit = format_duration(seconds).split()
        size = units[unit.removesuffix("s")]
        assert float(number) * size == pytest.approx(max(1, seconds), rel=0.04, abs=0.5 * (size < 3600) * size)
        assert (1.5 if size > 1 else 1) <= float(number) < (91 if unit != "days" else math.inf)
    assert [format_duration(s) for s in (0, 1, 40, 480, 11520, 456 * 3600)] == [
        "1 second", "1 second", "40 seconds", "8 minutes", "3.2 hours", "19.0 days",
    ]  # fmt: skip


@pytest.fixture
def config(tmp_path, tiny_llama, sums) -> Path:
    train = {"effective_batch_size": 4, "epochs": 1, "max_steps": None, "logging_steps": 1, "save_steps": 10}
    answers = {"generate_rows": 4, "max_new_tokens": 4}
    sections = {"data": {"val_fraction": 0.2}, "train": train, "eval": answers, "output": {"name": "one"}}
    return write_run(tmp_path, tiny_llama, sums, **sections)


@pytest.mark.build
def test_check_says_one_line_or_what_is_wrong(config, tmp_path, sums, command, succeed, monkeypatch):
    said = succeed("check", "--config", str(config))
    *waited, line = said.splitlines()
    assert all(" s so far" in one for one in waited)  # what takes long on a busy machine says so
    assert re.fullmatch(r"\[check\] Ready to train: \d+ ok \([^)]+\); WHY=1 shows each", line)
    broken = tmp_path / "broken.jsonl"
    broken.write_text(sums.read_text() + '{"messages": []}\n')
    code, said = command("check", "--config", str(config), f"data.train_path={broken}")
    assert (code, "PROBLEM  rows: train" in said) == (2, True), said
    assert [bool(re.search(part, said, re.MULTILINE)) for part in ("^ok ", "^Not ready: 1 problem")] == [False, True]
    with monkeypatch.context() as patch:  # what make train would refuse is a problem here too
        patch.setattr("sft_play.launch.planning.MAX_CPU_PARAMS", 10)
        code, said = command("check", "--config", str(config))
        assert (code, "PROBLEM  memory plan" in said, "no GPU was detected here" in said) == (2, True, True)
        assert "no GPU was detected here" in command("train", "--config", str(config))[1]
        patch.setenv("HARDWARE", "cpu,ram=64GiB,cores=4")
        assert command("check", "--config", str(config))[0] == 0
    monkeypatch.setenv("WHY", "1")
    code, said = command("check", "--config", str(config))
    assert (code, len(re.findall(r"^ok  ", said, re.MULTILINE)) > 10) == (0, True)


def messages(text: str) -> list[str]:
    """What lines of a terminal, or of train.log, say, without those of what takes long."""
    lines = (re.sub(r"^(\[[a-z-]+\]( warning:)?|\S+ [A-Z]+ [\w.]+:) ", "", line) for line in text.splitlines())
    return [line for line in lines if " s so far" not in line]


@pytest.mark.build
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_begins_in_twelve_lines_and_its_log_has_everything(ranks, config, tmp_path, tiny_llama, sums):
    command = "train" if ranks == 1 else "train-distributed"
    if ranks == 2:  # three answers without an exact match, where nothing is said of answers
        config.write_text(config.read_text().replace('"generate_rows": 4, ', ""))
    environment = clean_environment(SFT_PLAY_CACHE=str(tmp_path / "cache"))
    words = [warm.python(), "-m", "sft_play", command, "--config", str(config)]
    answer = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, env=environment, timeout=300)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    shown = messages(answer.stdout)
    first = next(number for number, line in enumerate(shown) if line.startswith("step 1/"))
    assert first <= BEFORE_STEP_1, "\n".join(shown[:first])
    assert shown[0] == f"Base model: {tiny_llama} ({config})"
    spread, where = ("", "the CPU") if ranks == 1 else ("distributed ", "the CPU (2 ranks)")
    for words in (
        f"Auto-calculated batch size: {4 // ranks} per process, gradient accumulation: 1", "Effective batch size: 4",
        f"Starting new bnb {spread}run with fp32 precision on {where}",
    ):  # fmt: skip
        assert shown[:first].count(words) == 1, words
    begun = "\n".join(shown[:first])
    assert re.search(r"^Plan: LoRA( in ddp)? fits, [\d.]+ of [\d.]+ GiB per process; \d+ steps; ", begun, re.MULTILINE)
    rows = rf"^Data: \d+ rows of {re.escape(str(sums))}, \d+% of [\d,]+ tokens trained, longest \d+, none cut; held out"
    assert re.search(rows + r": \d+ val$", begun, re.MULTILINE)
    assert re.search(r"^First training row, trained part in \[\[ \]\]: .*\[\[", begun, re.MULTILINE)
    assert f"Run folder: {tmp_path}/outputs/one" in begun
    assert re.search(r"^\d+ optimizer steps are few: more train.epochs", begun, re.MULTILINE)
    # the end: held-out before and after, three answers, one figure of memory predicted and one measured, what is next
    last = shown[max(number for number, line in enumerate(shown) if line.startswith("step ")) :]
    assert len(last) <= 19
    counts = [sum(line.startswith(part) for line in last) for part in ("Held-out ", "Asked: ", "  before: ")]
    assert counts == [3 - ranks, 3, 3]
    (memory,) = [line for line in last if "memory" in line]
    own = r"Peak memory above the libraries' own, in [a-z]+: at most [\d.]+ GiB predicted, [\d.]+ GiB measured"
    assert re.fullmatch(own, memory)
    run = f"RUN={tmp_path}/outputs/one"
    assert f"Talk to it: make chat {run}" in last
    assert f"Try next: make eval {run}, make ship {run}, make export {run} FORMAT=gguf" in last
    assert last[-1] == f"Report: {tmp_path}/outputs/one/report.html"
    # the log has all of it, the reasons too
    log = messages((tmp_path / "outputs" / "one" / "train.log").read_text())
    assert [line for line in shown if line not in log and not line.startswith("Report: ")] == []
    for part in ("Because: ", "Choice: ", "Predicted peak: ", "Data train: masks: verified", "Trainable parameters: "):
        assert [any(line.startswith(part) for line in lines) for lines in (log, shown)] == [True, False], part
    reasons = json.loads((tmp_path / "outputs" / "one" / "plan.json").read_text())["reasons"]
    assert [f"Because: {reason}" for reason in reasons if f"Because: {reason}" not in log] == []


@pytest.mark.build
def test_a_run_in_stages_begins_in_twelve_lines_and_says_of_each_stage_what_it_trains(config, succeed):
    names = ("short", "middle", "long")
    stages = [{"name": name, "max_steps": 1, "max_seq_len": 64 - 8 * at} for at, name in enumerate(names)]
    config.write_text(json.dumps({**json.loads(config.read_text()), "curriculum": stages}))
    words = ("eval.generate_rows=0", "eval.before_training=false")
    shown = messages(succeed("train", "--config", str(config), *words))
    assert sum(line.startswith("step 1/") for line in shown) == 3
    first = next(number for number, line in enumerate(shown) if line.startswith("step 1/"))
    assert first <= BEFORE_STEP_1, "\n".join(shown[:first])
    for at, name in enumerate(names):
        assert sum(line.startswith(f"Stage {name}: Plan: LoRA fits, ") for line in shown[:first]) == 1
        (begun,) = [n for n, line in enumerate(shown) if line.startswith(f"Stage {at + 1} of 3, {name}: 1 steps, ")]
        assert shown[begun + 1].startswith("Data: ")
        assert shown[begun + 2].startswith("First training row, trained part in [[ ]]: ")


@pytest.mark.build
def test_step_lines_are_the_same_in_a_terminal_in_a_pipe_and_in_the_log(capsys, monkeypatch):
    from sft_play.training.loop.callbacks import Progress

    written: dict[bool, str] = {}
    for is_terminal in (True, False):
        set_up_logging("train")
        monkeypatch.setattr(sys.stdout, "isatty", lambda answer=is_terminal: answer, raising=False)
        progress = Progress(clock=functools.partial(next, iter(range(10**6))))
        state: Any = type("State", (), {"global_step": 0, "max_steps": 40, "is_world_process_zero": True})()
        progress.on_train_begin(None, state, None)
        for step in range(1, 41):
            state.global_step = step
            progress.on_step_begin(None, state, None)
            progress.on_step_end(None, state, None)
            progress.on_log(None, state, None, {"loss": 1.0 / step, "tokens_per_s": 10.0})
        progress.on_train_end(None, state, None)
        written[is_terminal] = capsys.readouterr().out
    assert written[True] == written[False] != ""
    assert all(line.startswith("[train] step ") for line in written[True].splitlines())


def test_what_the_starter_proposes_next_can_be_trained_on_a_cpu():
    machine = dataclasses.replace(parse_hardware("cpu,ram=64GiB,cores=8"), named=False)
    for hardware in (machine, parse_hardware("1xRTX4090")):
        (line,) = next_run_commands(
            RunFolder(Path("a")), "configs/run_starter.yaml", on_gpu=bool(hardware.gpus), has_held_out_rows=True
        )
        found = re.fullmatch(r"make new MODEL=(\S+) DATA=my.jsonl", line)
        assert found is not None
        config = config_from_text(f"model: {{name: {found[1]}}}", name="x")
        shape = load_model_shape(config.model.name)
        require_usable_hardware(config, hardware, {}, count_params=lambda shape=shape: shape.params)
        assert ("0.5B" in config.model.name) == (not hardware.gpus)


def test_a_shortened_row_begins_with_a_word_or_a_token():
    chance = random.Random(4)
    for _ in range(50):
        prompt = "".join(chance.choice(["<|im_start|>", "some ", "words\\n"]) for _ in range(chance.randrange(200)))
        line = shorten_row(f"{prompt}<|im_start|>assistant\\n[[an answer]]")
        assert line.endswith("[[an answer]]")
        assert line.startswith(("… ", "…<") if len(prompt) > 300 else prompt[:20])


DECIMAL = re.compile(r"(?:^|[\d}]) ?(?:KB|kB|MB|GB|TB)\b(?!/s)")
"""A decimal size: `80 GB`, `{size} GB`; products hold theirs without a space (`H100-80GB`, `H100 80GB HBM3`)."""
PRODUCT = re.compile(r"\d(?:GB|TB)\b")
SOURCES = [*sorted((ROOT / "sft_play").rglob("*.py")), *sorted((ROOT / "scripts").glob("*.py"))]


def texts(tree: ast.AST) -> Iterator[str]:
    """Texts that a program may print: constants and f-strings, docstrings left out."""
    skipped: set[int] = set()  # a tree is walked from its root: what holds a node comes before it
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr):
            skipped.add(id(node.value))
        elif isinstance(node, ast.JoinedStr):
            skipped.update(map(id, node.values))
            yield "".join(part.value if isinstance(part, ast.Constant) else "{}" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in skipped:
            yield node.value


def decimal_sizes(text: str) -> list[str]:
    return DECIMAL.findall(PRODUCT.sub("", text))


def test_the_search_finds_decimal_sizes_and_leaves_rates_and_names():
    for text in ("141.0 GB", "{} GB free", "12 MB", "GB"):
        assert decimal_sizes(text), text
    for text in ("450 GB/s", "NVIDIA H100 80GB HBM3", "A100-80GB", "12 GiB", "{}GB/s", "GB200"):
        assert not decimal_sizes(text), text


def test_no_text_of_the_package_and_no_header_of_a_config_gives_a_size_in_decimal_units():
    assert len(SOURCES) > 100
    for path in SOURCES:
        found = [text for text in texts(ast.parse(path.read_text(encoding="utf-8"))) if decimal_sizes(text)]
        assert found == [], path
    assert not [path for path in (ROOT / "configs").glob("*.yaml") if decimal_sizes(path.read_text(encoding="utf-8"))]
