"""What people and scripts give to `make plan`, right and wrong, and what every answer must keep to."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import shlex
import shutil
from pathlib import Path
from unittest.mock import Mock

import pytest

from sft_play.commands import plan as plan_command
from sft_play.commands.request import read_request
from sft_play.config.load import load_config
from sft_play.config.schema import RunConfig
from sft_play.errors import ConfigError, ModelError
from sft_play.launch import planning
from sft_play.launch.planning import plan_run, refusals
from sft_play.machine.gpu_catalog import CATALOG_ENTRIES
from sft_play.machine.hardware import detect_hardware, parse_hardware
from sft_play.models.config_json import KNOWN_MODELS, load_model_shape
from sft_play.models.families import UnknownArchitecture
from sft_play.planner import advice
from sft_play.planner.advice import find_largest_fit, make_advised_plan
from sft_play.planner.batching import RowTokens
from sft_play.planner.candidates import evaluate_candidates, lowest_memory_candidates
from sft_play.planner.decide import PlanRequest, build_plan_inputs
from sft_play.planner.explain import bar_lines
from sft_play.planner.layout import find_layouts
from sft_play.planner.plan import Plan, planned_disk_usage
from sft_play.planner.precision import choose_precision
from sft_play.runs.folder import MANIFEST_FORMAT
from sft_play.runs.lookup import output_dir
from sft_play.text import GIB
from tests.conftest import ROOT, Command, write_run

LORA = str(ROOT / "configs" / "run_lora.yaml")
LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 256, "intermediate_size": 512,
    "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 1000, "max_position_embeddings": 512,
}  # fmt: skip


def config(*overrides: str, name: str = "Qwen/Qwen2.5-7B-Instruct") -> RunConfig:
    return load_config(Path(LORA), overrides=(f"model.name={name}", *overrides)).config


def request_of(hardware: str, *overrides: str, name: str = "Qwen/Qwen2.5-7B-Instruct") -> PlanRequest:
    return PlanRequest(config(*overrides, name=name), load_model_shape(name), parse_hardware(hardware))


def plan_of(hardware: str, *overrides: str, name: str = "Qwen/Qwen2.5-7B-Instruct") -> Plan:
    return make_advised_plan(request_of(hardware, *overrides, name=name))


def broken(plan: Plan, effective: int) -> list[str]:
    answer = json.loads(json.dumps(plan.as_json(), allow_nan=False))
    found = []
    for one in [answer, *answer["candidates"]]:
        peak = one["peak_bytes"]
        sizes, parallel = peak["terms"].values(), one["tensor_parallel_ranks"] * one["context_parallel_ranks"]
        is_within = peak["required"] <= peak["budget"]
        rules = {
            "terms add up": sum(sizes) == peak["allocated"],
            "terms are whole bytes": all(isinstance(size, int) and size >= 0 for size in sizes),
            "reserved holds allocated": peak["reserved"] >= peak["allocated"],
            "batch": one["micro_batch"] * one["grad_accum"] * one["data_parallel_ranks"] == effective,
            "ranks": one["data_parallel_ranks"] * parallel == one["ranks"],
            "what fits is within the budget": is_within or not one["fits"],
            "what does not fit is not, on the GPU or the host": one["fits"] or not is_within or peak["host"] > 0,
        }
        found += [rule for rule, kept in rules.items() if not kept]
    chosen = [one for one in answer["candidates"] if one["rejected_because"] is None]
    shared = {key: value for key, value in answer.items() if key in answer["candidates"][0]}
    if chosen != [{**shared, "rejected_because": None}]:
        found.append("the choice is one of the candidates")
    reasons = [one["rejected_because"] for one in answer["candidates"] if one["rejected_because"] is not None]
    found += [f"a number in: {reason}" for reason in reasons if not any(letter.isdigit() for letter in reason)]
    if not answer["fits"] and not answer["ways_out"]:
        found.append("ways out where nothing fits")
    if not answer["fits"] and any(one["fits"] for one in answer["candidates"]):
        found.append("nothing fits where a candidate does")
    return found


@pytest.mark.parametrize("file", sorted((ROOT / "configs").glob("run_*.yaml")), ids=lambda file: file.stem)
def test_a_shipped_config_answers_by_the_rules_on_every_machine(file: Path):
    job = load_config(file).config
    shape = load_model_shape(job.model.name)
    chance = random.Random(file.stem)
    effective = job.train.effective_batch_size
    for entry in chance.sample(CATALOG_ENTRIES, 3):
        for count in (1, 2, 5, 16):
            machine = parse_hardware(f"{count}x{entry.name}")
            if effective % count:
                with pytest.raises(ConfigError, match=f"does not split over {count} ranks; use "):
                    make_advised_plan(PlanRequest(job, shape, machine))
            else:
                assert broken(make_advised_plan(PlanRequest(job, shape, machine)), effective) == [], (entry.name, count)


@pytest.mark.parametrize("mode", ["lora", "qlora", "full"])
def test_a_known_model_answers_by_the_rules(mode):
    chance = random.Random(mode)
    for name in chance.sample(sorted(KNOWN_MODELS), 12):
        hardware = chance.choice(["1xT4", "1xH100", "2xRTX4090", "4xL40S", "2x8xH100", "8xMI300X,ram=1TiB"])
        length = chance.choice([8, 1000, 4096, 131072])
        try:
            plan = plan_of(hardware, f"tuning.mode={mode}", f"model.max_seq_len={length}", name=name)
        except UnknownArchitecture:  # its plan needs torch
            continue
        assert broken(plan, 32) == [], (name, hardware, length)


@pytest.mark.parametrize(("hardware", "overrides"), [
    ("8xRTX3060,ram=128GiB", ["tuning.mode=full"]),
    ("2x8xRTX3060", ["tuning.mode=full", "train.effective_batch_size=960"]),
    ("2xMyGPU,mem=40GiB,ram=512GiB", ["model.max_seq_len=8192", "model.attn_implementation=eager"]),
    ("1xRTX4090", ["tuning.mode=qlora"]), ("cpu,ram=64GiB", []),
])  # fmt: skip
def test_a_way_out_is_what_its_words_plan(hardware, overrides):
    name = "meta-llama/Llama-3.3-70B-Instruct"
    plan = plan_of(hardware, *overrides, name=name)
    assert not plan.fits
    assert any(way.fits for way in plan.suggestions)
    for way in plan.suggestions:
        settings = way.setting.split() if way.setting else []
        model = next((word.partition("=")[2] for word in settings if word.startswith("model.name=")), name)
        kept = [word for word in settings if not word.startswith("model.name=")]
        again = plan_of(way.hardware or hardware, *overrides, *kept, name=model)
        assert (again.fits, again.memory.required) == (way.fits, way.required), way
        keys = [setting.partition("=")[0] for setting in settings]
        assert len(set(keys)) == len(keys), way
        assert way.fits or way.required <= plan.memory.required, way


def test_where_no_setting_and_no_gpu_is_enough_a_smaller_model_is_named():
    words = ("tuning.mode=lora", "train.effective_batch_size=1", "model.max_seq_len=256", "tuning.lora.r=8")
    plan = plan_of("1xT4", *words, name="zai-org/GLM-4.5")
    last = plan.suggestions[-1]
    assert (plan.fits, last.fits) == (False, True)
    assert (last.setting or "").startswith("model.name=")


def test_a_plan_that_no_larger_machine_can_run_is_still_one():
    """One GPU is too small, and over several ranks every layout refuses these settings: `make fuzz` found a crash."""
    asked = ["tuning.mode=qlora", "distributed.mixed_precision.param=float32"]
    name = "Qwen/Qwen2.5-32B-Instruct"
    with pytest.raises(ConfigError, match="no layout over 2 ranks"):
        plan_of("2xT4", *asked, name=name)
    plan = plan_of("1xT4", *asked, name=name)
    assert (plan.fits, bool(plan.suggestions)) == (False, True)


@pytest.mark.parametrize(("hardware", "mode"), [("1xRTX3060", "qlora"), ("8xRTX3060", "full"), ("2x8xL4", "lora")])
def test_the_thriftiest_candidates_fit_where_any_does(hardware, mode):
    for length in (512, 2048, 8192, 32768):
        job = build_plan_inputs(request_of(hardware, f"tuning.mode={mode}", f"model.max_seq_len={length}"))
        layouts, _ = find_layouts(job.config, job.shape, job.hardware)
        thriftiest, every = lowest_memory_candidates(job, layouts), evaluate_candidates(job, layouts)
        assert any(one.fits for one in thriftiest) == any(one.fits for one in every)


def test_max_model_has_room_for_the_sequences():
    found = find_largest_fit("model", request_of("1xRTX4090", "model.max_seq_len=32768"))
    assert isinstance(found.value, str)
    assert (load_model_shape(found.value).max_positions or 0) >= 32768


@pytest.mark.parametrize(
    ("targets", "why"), [("[q_proj, nope]", "matches nothing"), ("[lm_head]", "is the output head")]
)
def test_adapters_on_layers_that_are_not_there_are_refused(targets, why, command: Command):
    words = ("plan", "--config", LORA, "--hardware", "1xH100", f"tuning.lora.target_modules={targets}")
    code, said = command(*words)
    assert (code, why in said) == (2, True), said
    assert "down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj" in said
    assert command(*words, "tuning.mode=full")[0] == 0


@pytest.mark.parametrize(("words", "message"), [
    (["CONFIG=configs/run_bnb.yaml"], "CONFIG=configs/run_bnb.yaml is a variable of make, not a setting"),
    (["--whatif", "model.max_seq_len=2048,4"], "WHATIF, model.max_seq_len=4: "),
    (["--whatif", "train.effective_batch_size=32,33 train.batch_size=2"],
     "WHATIF, train.effective_batch_size=33 train.batch_size=2: "),
    (["--whatif", "tuning.mode=lora,qlora tuning.mode=full"], "WHATIF names tuning.mode twice"),
])  # fmt: skip
def test_a_word_that_cannot_be_meant_is_answered_by_its_own_name(words, message, refuse):
    assert message in refuse("plan", "--config", LORA, "--hardware", "1xH100", *words)


@pytest.mark.parametrize(
    "overrides",
    [["model.mesh_shape=[1,1]"], ["tuning.lora.target_modules=[q_proj, v_proj]"], ["output.name='a b'"], []],
)
def test_the_launch_command_is_read_as_it_was_given(overrides, monkeypatch):
    loaded = load_config(Path(LORA), overrides=overrides)
    words = shlex.split(plan_command.launch_line(plan_of("1xH100"), loaded).partition(" (on ")[0])
    for word in words[3:]:
        monkeypatch.setenv("SET", word.removeprefix("SET="))
    request = read_request(["plan", "--config", words[2].removeprefix("CONFIG=")], os.environ)
    assert load_config(request.config, overrides=request.overrides).config == loaded.config


STORED = [
    ({"quant_method": "gptq"}, "qlora", "(gptq)"),
    *[({"quant_method": "mxfp4"}, mode, None) for mode in ("lora", "qlora", "full")],
    ({"bits": 4}, "qlora", "(unknown method)"),
    ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "lora", "(bitsandbytes)"),
    ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "qlora", "(bitsandbytes, 8 bits)"),
    ({"quant_method": "bitsandbytes", "_load_in_4bit": True, "_load_in_8bit": False}, "qlora", None),
    ({"load_in_4bit": True}, "qlora", None),
]


@pytest.mark.parametrize(("stored", "mode", "said"), STORED)
def test_weights_that_are_stored_quantised_are_refused_alike_by_plan_and_run(
    stored, mode, said, command: Command, tmp_path: Path
):
    from sft_play.training.prepare.model_spec import build_model_spec

    fields = {**LLAMA, "quantization_config": stored}
    if mode == "lora":  # below the part that is text, in some models
        fields = {"model_type": "gemma3", "text_config": {**LLAMA, "model_type": "gemma3_text", "head_dim": 16}}
        fields["text_config"]["quantization_config"] = stored
    (tmp_path / "config.json").write_text(json.dumps(fields))
    settings = [f"model.name={tmp_path}", f"tuning.mode={mode}", "data.packing=none"]
    code, printed = command("plan", "--config", LORA, "--hardware", "1xH100", *settings)
    run = load_config(Path(LORA), overrides=settings).config
    precision = choose_precision(run, parse_hardware("1xH100"), load_model_shape(str(tmp_path)))
    if said is None:
        assert (code, "quantised (" in printed) == (0, False), printed
        assert build_model_spec(run, precision, tokenizer_size=100).vocab_size == 1000
        return
    assert (code, f"already quantised {said}" in printed, "Launch" in printed) == (2, True, False), printed
    with pytest.raises(ModelError) as refused:
        build_model_spec(run, precision, tokenizer_size=100)
    assert str(refused.value) in " ".join(printed.split())


def test_a_known_model_with_quantised_weights_is_planned_dequantised_and_proposed(command: Command, monkeypatch):
    name = "openai/gpt-oss-20b"
    code, printed = command("plan", "--config", LORA, "model.max_seq_len=512", "--hardware", "8xH200",
                            f"model.name={name}", "tuning.mode=qlora")  # fmt: skip
    assert (code, "stored in MXFP4" in printed, "Launch" in printed) == (0, True, True), printed
    small = "Qwen/Qwen2.5-0.5B"
    monkeypatch.setattr(advice, "KNOWN_MODELS", {one: KNOWN_MODELS[one] for one in (name, small)})
    request = request_of("16xH200", "model.max_seq_len=512", "tuning.mode=qlora", name=small)
    assert find_largest_fit("model", request).value == name

    def refuses(fields, *, name, mode):
        if name != small:
            raise ModelError(name)

    monkeypatch.setattr(advice, "refuse_quantised", refuses)
    assert find_largest_fit("model", request).value == small  # what is refused is never proposed


def test_more_gpus_keep_the_machines_ram():
    plan = plan_of("1xRTX3060,ram=192GiB", "tuning.mode=full", "train.effective_batch_size=64", "train.optim=adafactor")
    assert not plan.fits
    hardware = {way.hardware.partition(",ram=")[2] for way in plan.suggestions if way.hardware}
    assert hardware == {"196608MiB"}


@pytest.fixture
def small_run(tmp_path, monkeypatch, tiny_llama, sums) -> Path:
    """A run YAML in a folder with data and paths that nothing can be done with, and a run that has the name taken."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SFT_PLAY_CACHE", str(tmp_path / "cache"))
    os.mkfifo("pipe")
    Path("broken.parquet").write_bytes(b"PAR1" + bytes(100) + b"PAR1")
    late = [*sums.read_text().splitlines(), *sums.read_text().splitlines(), "{"]
    Path("late.jsonl").write_text("\n".join(late))
    Path("outputs/taken").mkdir(parents=True)
    train = {"effective_batch_size": 4, "save_steps": 1, "max_steps": None}
    return write_run(Path(), tiny_llama, sums, train=train, output={"dir": "outputs"})


REFUSED = {
    "output.name=../esc": "one word without separators", "output.name=taken": "outputs/taken exists",
    "output.dir=pipe": "output.dir=pipe cannot be a folder: it is a file",
    "data.train_path=broken.parquet": "broken.parquet is Parquet that cannot be read",
    "data.train_path=late.jsonl": "late.jsonl:129", "train.report_to=[trackio]": "trackio is not installed",
    "model.attn_implementation=kernels-community/flash-attn2@0123456789abcdef0123456789abcdef01234567": "kernels",
}  # fmt: skip


@pytest.mark.parametrize(("words", "why"), REFUSED.items(), ids=lambda one: one[:40])
def test_a_plan_and_a_check_say_what_train_is_refused_for(command: Command, small_run, words, why):
    given = ("--config", str(small_run), *words.split())
    code, said = command("train", *given)
    error = said.partition("error: ")[2].strip()
    assert (code, why in error, "Traceback" in said) == (2, True, False), said
    assert not list(Path("outputs").glob("*/manifest.json"))
    code, said = command("plan", *given, "--json")
    answer = json.loads(said.splitlines()[0])
    assert (code, answer["ok"], answer["launch"], answer["refused_because"]) == (0, True, None, [error])
    code, said = command("check", *given)
    assert (code, why in said, said.count(" PROBLEM ") <= 1) == (2, True, True), said
    code, said = command("plan", *given, "--hardware", "1xRTX3060")  # whose disk and packages are not known
    says = words in ("output.name=../esc", "data.train_path=late.jsonl", "data.train_path=broken.parquet")
    assert (code, "a run would stop: " in said, "Launch: make train" in said) == (0, says, not says), said


def test_what_depends_on_this_machine_is_not_said_of_a_named_one_nor_of_data_that_may_come(small_run):
    Path("gone").symlink_to("nowhere")
    here, named = dataclasses.replace(parse_hardware("cpu,ram=64GiB"), named=False), parse_hardware("1xRTX3060")
    for words, why in {
        **REFUSED,
        "output.dir=gone": "it is a file, or a link that leads nowhere",
        "output.dir=pipe/below": "pipe/below cannot be written",
        "output.name=taken output.if_exists=resume": "is not a run folder",
        "data.train_path=/not/here.jsonl": "/not/here.jsonl does not exist",
    }.items():
        if words == "data.train_path=late.jsonl":
            continue  # of the first rows alone
        loaded = load_config(small_run, overrides=words.split())
        assert [why in str(error) for error in refusals(loaded, here)] == [True], words
        is_everywhere = "../esc" in words or "broken" in words
        assert len(list(refusals(loaded, named, needs_rows=False))) == is_everywhere, words
        assert len(list(refusals(loaded, here, makes_folder=False))) == ("output." not in words), words
        is_missing = words.startswith("data.train_path=/not")
        assert len(list(refusals(loaded, here, needs_rows=False))) == (not is_missing), words


@pytest.mark.parametrize("verb", ["train", "sweep"])
def test_a_torch_without_cuda_beside_gpus_is_refused_before_ranks_are_started(
    command: Command, small_run, monkeypatch, verb
):
    machine = dataclasses.replace(parse_hardware("2xRTX3090"), named=False)
    for module in ("commands.request", "commands.sweep", "launch.planning", "launch.request", "launch.run_hardware"):
        monkeypatch.setattr(f"sft_play.{module}.detect_hardware", lambda: machine)
    monkeypatch.setattr("sft_play.launch.planning.require_compiler", lambda *_: None)
    monkeypatch.setattr("sft_play.launch.ranks.run_ranks", lambda *_: pytest.fail("ranks were started"))
    monkeypatch.setattr("sft_play.launch.planning.torch_build_version", lambda _: None)
    more = ["train.learning_rate=1e-4,2e-4"] if verb == "sweep" else []
    code, said = command(verb, "--config", str(small_run), *more)
    assert (code, "the driver shows NVIDIA RTX 3090, but torch" in said) == (2, True), said
    code, said = command("plan", "--config", str(small_run))
    assert (code, "a run here would stop: the driver shows" in said, "make train" in said) == (0, True, False)
    monkeypatch.setattr("sft_play.launch.planning.torch_build_version", lambda _: "13.0")
    code, said = command("plan", "--config", str(small_run))
    assert (code, "would stop" in said, "make train" in said) == (0, False, True), said


def test_a_disk_without_room_for_the_checkpoints_is_refused_before_the_weights_load(
    command: Command, small_run, monkeypatch
):
    given = ("--config", str(small_run), "tuning.mode=full")
    config = load_config(small_run, overrides=given[2:]).config
    one = plan_run(config, detect_hardware()).memory.checkpoint_bytes
    usage = shutil.disk_usage("/")
    for free, limit, refused in [(3 * one - 1, 2, True), (3 * one + 10_000, 2, False), (2 * one - 1, 1, True)]:
        monkeypatch.setattr(shutil, "disk_usage", lambda _, free=free: usage._replace(free=free))
        words = (*given, f"train.save_total_limit={limit}")
        code, said = command("plan", *words)
        assert (code, "there is no room for what the run writes" in said) == (0, refused), (free, said)
        assert ("make train" in said) is not refused
        monkeypatch.setattr("sft_play.launch.start.train_in_process", lambda *_, **__: pytest.fail("it was started"))
        if refused:
            code, said = command("train", *words)
            assert (code, f"{free:,} bytes" in said) == (2, True), said
            assert not list(Path("outputs").glob("*/manifest.json"))


def test_the_checkpoints_of_a_run_that_is_resumed_need_no_room_again(command: Command, small_run, monkeypatch):
    config = load_config(small_run).config
    one = plan_run(config, detect_hardware()).memory.checkpoint_bytes
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=one + 10_000))
    folder = output_dir(config.output) / "begun"
    for number in (1, 2):  # a third one is written before the first is removed
        (folder / "checkpoints" / f"checkpoint-{number}").mkdir(parents=True)
    (folder / "manifest.json").write_text(json.dumps({"format": MANIFEST_FORMAT}))
    for name, refused in [("begun", False), ("other", True)]:
        _, said = command("plan", "--config", str(small_run), f"output.name={name}", "output.if_exists=resume")
        assert ("there is no room for what the run writes" in said) is refused, said


def test_checkpoints_after_each_epoch_are_counted_by_the_steps_that_are_given(small_run):
    """64 rows in batches of 4 are 16 steps: 40 steps end three epochs, of which three checkpoints exist at once."""
    rows = RowTokens(20.0, 20, 20, 64, 64, sample=(20,) * 64)
    for steps, count in [(16, 1), (32, 2), (40, 3), (400, 3)]:
        config = load_config(small_run, overrides=[f"train.max_steps={steps}", "train.save_steps=null"]).config
        plan = plan_run(config, detect_hardware(), rows=rows)
        assert planned_disk_usage(config, load_model_shape(config.model.name), plan).max_checkpoints == count


def test_a_plan_names_the_longest_held_out_row_only_where_it_is_longer(small_run):
    config = load_config(small_run).config
    for held_out in (0, 20, 21):
        plan = plan_run(config, detect_hardware(), rows=RowTokens(20.0, 20, 20, 64, 64, held_out, (20,) * 64))
        assert any("longest held-out row 21" in reason for reason in plan.reasons) == (held_out == 21)


def test_a_start_asks_for_its_plan_once_and_makes_it_once(command, monkeypatch, small_run):
    """The rows are counted between the two: what no length changes is checked in the request that is then completed."""
    calls: list[str] = []

    def count_calls(name: str) -> None:
        function = getattr(planning, name)

        def counted(*words: object, **options: object) -> object:
            calls.append(name)
            return function(*words, **options)

        monkeypatch.setattr(planning, name, counted)

    steps = ["build_plan_request", "check_plan_request", "count_row_tokens", "plan_request"]
    for name in steps:
        count_calls(name)
    stop = Mock(side_effect=ConfigError("planned"))
    monkeypatch.setattr("sft_play.launch.start.train_in_process", stop)
    code, printed = command("train", "--config", str(small_run))
    assert (code, "error: planned" in printed) == (2, True), printed
    assert calls == steps


def test_what_loading_takes_beyond_a_step_is_a_part_of_the_bar():
    plan = plan_of("1xH100", "tuning.mode=full", "train.effective_batch_size=1", name="Qwen/Qwen2.5-0.5B-Instruct")
    loading = dataclasses.replace(plan.memory, load_bytes=40 * GIB)
    for memory, has_more in ((plan.memory, False), (loading, True)):
        choice = dataclasses.replace(plan.choice, memory=memory)
        bar, legend = bar_lines(dataclasses.replace(plan, choice=choice))[:2]
        assert ("L more while loading" in legend) == ("L" in bar.partition("|")[2]) == has_more
        parts = sum(float(part.rpartition(" ")[2]) for part in legend.split(","))
        assert parts == pytest.approx(memory.required / GIB, abs=0.1)


def test_the_longest_rows_are_looked_for_over_ranks_that_share_them():
    request = request_of("8xRTX4090", "tuning.mode=full", "train.effective_batch_size=8")
    assert "fsdp_cp does NOT fit" in str(find_largest_fit("seq_len", request))
