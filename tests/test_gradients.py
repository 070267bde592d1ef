"""How ranks add up gradients: what a layout can do of it, what it costs in memory and bytes, and that engines do it."""

import functools
import gzip
import json
import random
import subprocess
from dataclasses import replace
from importlib.util import find_spec

import pytest

from sft_play.config.load import config_from_text
from sft_play.config.schema import RunConfig
from sft_play.errors import ConfigError
from sft_play.launch.deepspeed import translate_deepspeed_keys
from sft_play.machine.hardware import parse_hardware
from sft_play.models.config_json import load_model_shape
from sft_play.planner import precision as rules
from sft_play.planner.batching import BatchPlan
from sft_play.planner.candidates import build_candidate
from sft_play.planner.decide import PlanRequest, build_plan_inputs, make_plan
from sft_play.planner.layout import LAYOUT_NAMES, Layout, find_layouts
from sft_play.planner.memory.estimate import estimate_memory
from sft_play.planner.memory.step_memory import Step, StepMemorySimulation
from sft_play.planner.precision import DTYPE_BYTES, GRADIENT_SHARDING_LAYOUTS, Precision
from sft_play.planner.speed import find_rates, predict_speed, sent_bytes, step_traffic
from sft_play.trace.confirm import step_settings
from sft_play.training.measure import profile
from tests import warm
from tests.conftest import ROOT, clean_environment, write_rows, write_run
from tests.models import uneven_run

GIB = 2**30
MODEL = "Qwen/Qwen2.5-0.5B"
BF16, FP32 = (Precision(name, name, "") for name in ("bfloat16", "float32"))
DTYPES = ("auto", "bfloat16", "float16", "float32")
EVERY = ("auto", "step", "micro_batch", 2)


def run_of(mode: str = "full", accum: str = "4", **distributed: object) -> RunConfig:
    text = f"model: {{name: {MODEL}}}\ntuning: {{mode: {mode}}}\ntrain: {{grad_accum: {accum}}}\n"
    return config_from_text(text + f"distributed: {json.dumps(distributed)}", name="run.yaml")


def layout_of(name: str, ranks: int = 4) -> Layout:
    shard = 1 if name in ("ddp", "single") else ranks // 2 if name == "fsdp_hybrid" else ranks
    return Layout(name, 1 if name == "single" else ranks, shard)  # type: ignore[arg-type]


# --- what a layout can do ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("wish", "accum", "ddp", "times"), [
    ("step", "4", "step", 1), ("micro_batch", "4", "micro_batch", 4), (1, "4", "micro_batch", 4),
    (4, "4", "step", 1), (1, "auto", "micro_batch", 4), (1, "1", "step", 1), ("step", "1", "step", 1),
    (2, "4", 2, 2), (3, "4", 3, 2), (8, "4", "step", 1), (3, "auto", 3, 2), (2, "1", "step", 1),
])  # fmt: skip
def test_a_number_of_micro_batches_is_how_many_are_reduced_together(wish, accum, ddp, times):
    chosen = rules.gradient_sync(run_of(accum=accum, sync_gradients_every=wish), BF16, "ddp")
    assert chosen.interval == ddp
    assert chosen.reductions_per_step(1 if accum == "1" else 4) == times


def test_whatever_is_asked_a_layout_does_it_or_says_what_to_write():
    """Each wish is honoured where nothing is refused, and a refusal names the key with its value and a way on."""
    draw = random.Random(3)
    honoured = refused = 0
    for _ in range(600):
        every, accum = draw.choice(EVERY), draw.choice(["1", "4", "auto"])
        mixed = {part: draw.choice(DTYPES) for part in ("param", "reduce", "buffer")}
        mode, layout = draw.choice(["full", "lora", "qlora"]), draw.choice(LAYOUT_NAMES)
        precision = draw.choice([BF16, FP32])
        config = run_of(mode, accum, sync_gradients_every=every, mixed_precision=mixed)
        because = rules.gradient_sync_obstacle(config, precision, layout, on_gpu=draw.random() < 0.5)
        if layout == "single":
            assert because is None
            continue
        if because is not None:
            refused += 1
            for part in because.split("; distributed."):
                key, _, rest = part.removeprefix("distributed.").partition("=")
                value = rest.partition(":")[0]
                wished = every if key == "sync_gradients_every" else mixed[key.removeprefix("mixed_precision.")]
                assert value == str(wished) != "auto", because
                assert "auto" in rest, because
            continue
        honoured += 1
        chosen = rules.gradient_sync(config, precision, layout)
        if every != "auto" and accum != "1":
            assert chosen.interval == every, (config.distributed, layout)
        if layout in GRADIENT_SHARDING_LAYOUTS:
            assert chosen.interval == "micro_batch"
        assert mixed["reduce"] in ("auto", chosen.reduced_dtype)
        assert mixed["param"] in ("auto", chosen.gathered_dtype)
        assert mixed["buffer"] in ("auto", chosen.buffer_dtype)
        assert chosen.is_compressed == (chosen.reduced_dtype != chosen.computed_dtype)
        if layout == "ddp":
            assert DTYPE_BYTES[chosen.reduced_dtype] <= DTYPE_BYTES[chosen.computed_dtype]
    assert min(honoured, refused) > 80


def test_the_plan_takes_a_layout_that_can_do_what_is_asked_and_says_so_where_none_can():
    shape, hardware = load_model_shape(MODEL), parse_hardware("4xA100-80GB")
    for wish, wanted in (("step", {"ddp", "fsdp", "zero1"}), ("micro_batch", {"ddp", "fsdp", "zero2", "zero3"})):
        possible, refused = find_layouts(run_of(sync_gradients_every=wish), shape, hardware)
        assert wanted <= {layout.name for layout in possible}
        because = {item.name: item.because for item in refused}
        assert not wanted & set(because)
        assert "sync_gradients_every" in because["zero2" if wish == "step" else "zero1"]
    config = run_of("lora", mixed_precision={"buffer": "bfloat16"})
    assert make_plan(PlanRequest(config, shape, hardware)).layout.startswith("zero")
    config = run_of(sync_gradients_every="step", mixed_precision={"buffer": "bfloat16", "param": "float32"})
    with pytest.raises(ConfigError, match=r"no layout over 2 ranks can run this job: ddp: .*; fsdp: .*; zero1: "):
        make_plan(PlanRequest(config, shape, parse_hardware("2xA100-80GB")))


def test_one_process_runs_the_same_file_and_says_what_has_no_effect():
    config = run_of("lora", sync_gradients_every="step", find_unused_parameters=True, profile_communication=5)
    plan = make_plan(PlanRequest(config, load_model_shape(MODEL), parse_hardware("1xA100-80GB")))
    assert plan.layout == "single"
    (said,) = [line for line in plan.reasons if "no effect on one process" in line]
    keys = ("find_unused_parameters=true", "sync_gradients_every=step", "profile_communication=5")
    assert all(f"distributed.{key}" in said for key in keys)
    assert rules.ineffective_distributed_options(run_of(), "single") == []
    searching = run_of(find_unused_parameters=True, profile_communication=True)
    said = rules.ineffective_distributed_options(searching, "zero3")
    assert said == ["distributed.find_unused_parameters=true: no effect under zero3, which needs no search"]
    assert rules.ineffective_distributed_options(run_of(find_unused_parameters=True), "ddp") == []


def test_what_a_named_layout_cannot_do_stops_before_anything_loads(tmp_path, refuse, monkeypatch):
    """The model does not exist: a message about the key shows that nothing was looked for."""
    rows = write_rows(tmp_path / "rows.jsonl", [{"prompt": "what is 1?", "completion": "it is 1."}])
    config = write_run(tmp_path, MODEL, rows, train={"batch_size": 1})
    monkeypatch.setenv("NPROC", "2")
    for strategy, setting, message in (
        ("zero2", "sync_gradients_every=step", "ZeRO-2 and -3 shard gradients after each"),
        ("ddp", "mixed_precision.reduce=bfloat16", "torch's hook for it needs GPUs; auto, float16, or"),
    ):
        monkeypatch.setenv("STRATEGY", strategy)
        assert message in refuse("train-distributed", "--config", str(config), f"distributed.{setting}")
    assert not (tmp_path / "outputs").exists()


# --- what it costs ----------------------------------------------------------------------------------------------------
def step_of(layout: str, *, ranks: int = 4, accum: int = 4) -> Step:
    return Step(micro_batch=1, grad_accum=accum, seq_len=512, layout=layout_of(layout, ranks))


@pytest.mark.parametrize("precision", [BF16, FP32])
def test_whole_gradients_are_counted_where_fsdp_adds_up_once_a_step(precision):
    shape = load_model_shape(MODEL)
    often, once = run_of(sync_gradients_every="micro_batch"), run_of(sync_gradients_every="step")
    wide = run_of(sync_gradients_every="step", mixed_precision={"reduce": "float32"})
    runs, step = (often, once, wide), step_of("fsdp", ranks=8)
    walks = [StepMemorySimulation(config, shape, precision, step) for config in runs]
    width = DTYPE_BYTES[precision.compute]
    assert [walk.full_gradient_bytes for walk in walks] == [0, shape.params * width, shape.params * 4]
    peaks = [estimate_memory(config, shape, precision, step) for config in runs]
    more = peaks[1].moments["head"] - peaks[0].moments["head"]
    assert more == shape.params * width - shape.params * 4 // 8  # instead of this rank's parts in fp32
    assert peaks[2].moments["backward"] >= peaks[1].moments["backward"]
    assert peaks[1].moments["optimizer"] == peaks[0].moments["optimizer"]  # cut by then
    alone = step_of("fsdp", ranks=8, accum=1)
    single = [estimate_memory(config, shape, precision, alone) for config in (often, once)]
    assert single[0] == single[1]


def test_syncing_less_often_never_needs_less_memory_and_never_sends_more():
    draw = random.Random(11)
    hardware = parse_hardware("8xA100-80GB,link=64GB/s")
    for _ in range(60):
        mode, layout = draw.choice(["full", "lora", "qlora"]), draw.choice(["ddp", "fsdp", "fsdp_hybrid"])
        precision, accum = draw.choice([BF16, FP32]), draw.choice([1, 2, 8])
        shape = load_model_shape(draw.choice([MODEL, "Qwen/Qwen2.5-3B-Instruct", "Qwen/Qwen3-30B-A3B"]))
        step = step_of(layout, ranks=draw.choice([2, 4, 8]), accum=accum)
        often, once = (run_of(mode, str(accum), sync_gradients_every=every) for every in ("micro_batch", "step"))
        memory = [estimate_memory(config, shape, precision, step).allocated for config in (often, once)]
        assert memory[1] >= memory[0]
        rates = find_rates(hardware, precision)
        speeds = [predict_speed(config, shape, precision, step, rates) for config in (often, once)]
        sent = [speed.moved_bytes for speed in speeds]
        assert sent[1] <= sent[0]
        assert speeds[1].step_s <= speeds[0].step_s
        if accum == 1:
            assert (memory[0], sent[0]) == (memory[1], sent[1])
        elif step.layout.data_parallel > 1:
            assert sent[1] < sent[0]


def test_the_closed_form_by_hand():
    """Four ranks, two passes, all weights in bf16: P bytes of gradients are 2P, an all-reduce sends 2 * 3/4 of them."""
    shape = load_model_shape(MODEL)
    size = 2 * shape.params

    def kinds(layout: str, **keys: object) -> dict[str, int]:
        return step_traffic(run_of(**keys), shape, BF16, step_of(layout, accum=2)).bytes_by_kind(2)

    assert kinds("ddp") == {"all_reduce": size}
    assert kinds("ddp", sync_gradients_every="micro_batch") == {"all_reduce": 2 * size}
    assert kinds("zero1") == {"all_reduce": size, "all_gather": size}
    assert kinds("zero2") == {"all_reduce": 2 * size, "all_gather": size}
    assert kinds("zero2", mixed_precision={"reduce": "float32"}) == {"all_reduce": 4 * size, "all_gather": size}
    assert kinds("fsdp")["reduce_scatter"] == 2 * size
    assert kinds("fsdp", sync_gradients_every="step")["reduce_scatter"] == size
    assert kinds("fsdp", mixed_precision={"reduce": "float32"})["reduce_scatter"] == 4 * size
    tail = 2 * shape.vocab_size * shape.hidden_size  # tied: embedding and head, gathered once a pass
    assert kinds("fsdp")["all_gather"] == 2 * (2 * size - tail)
    assert kinds("fsdp", mixed_precision={"param": "float32"})["all_gather"] == 4 * (2 * size - tail)
    once = replace(step_of("zero3", accum=2), checkpointed_layers=0)  # 494 million weights are used again within 1e9
    gathered = step_traffic(run_of(), shape, BF16, once).bytes_by_kind(2)
    assert gathered == {"all_gather": 2 * size, "reduce_scatter": 2 * size}
    large = load_model_shape("Qwen/Qwen2.5-3B-Instruct")
    gathered = step_traffic(run_of(), large, BF16, step_of("zero3", accum=1)).bytes_by_kind(1)
    assert gathered["all_gather"] == pytest.approx(2 * (2 * large.params - 1e9 / 3), rel=1e-6)
    huge = load_model_shape("meta-llama/Llama-3.3-70B-Instruct")  # 80 blocks of 855 million weights, each checkpointed
    gathered = step_traffic(run_of(), huge, BF16, step_of("zero3", accum=1)).bytes_by_kind(1)
    again = huge.params - 2 * huge.vocab_size * huge.hidden_size - 80 * 0.5e9
    assert gathered["all_gather"] == pytest.approx(2 * (2 * huge.params - 1e9 / 3 + again), rel=1e-6)
    hybrid = step_traffic(run_of(), shape, BF16, step_of("fsdp_hybrid", accum=2)).bytes_by_kind(2)
    assert hybrid["all_reduce"] == 2 * size // 2  # each of two shards, in both passes
    assert [sent_bytes(kind, 8.0, 4) for kind in ("all_reduce", "all_gather", "barrier")] == [12.0, 6.0, 0.0]


def test_the_trace_runs_what_the_keys_say():
    config = run_of(sync_gradients_every="step", mixed_precision={"reduce": "float32", "param": "float32"})
    shape, hardware = load_model_shape(MODEL), parse_hardware("2xRTX4090")
    for run, layout, wanted in (
        (config, "fsdp", (False, "float32", None)), (run_of(), "fsdp", (True, None, None)),
        (run_of(mixed_precision={"reduce": "float32"}), "fsdp", (True, None, "float32")),
        (run_of(sync_gradients_every="step"), "ddp", (False, None, None)),
    ):  # fmt: skip
        job = build_plan_inputs(PlanRequest(run, shape, hardware))
        candidate = build_candidate(job, layout_of(layout, 2), BatchPlan(1, 4, 2), 0)
        found = step_settings(run, {}, shape, BF16, candidate.step)
        assert (found.sync_each_batch, found.gathers_in, found.reduces_in) == wanted


# --- DeepSpeed's file -------------------------------------------------------------------------------------------------
def test_dtypes_in_a_deepspeed_file_are_the_run_yamls():
    asked = {"reduce": {"communication_data_type": "fp32"}, "buffer": {"data_types": {"buffer_dtype": "bf16"}}}
    for field, given in asked.items():
        with pytest.raises(ConfigError, match=f"distributed.mixed_precision.{field} of the run YAML"):
            translate_deepspeed_keys(given)


# --- what is counted --------------------------------------------------------------------------------------------------
def test_the_backends_work_is_told_by_its_name():
    """gloo reduces and scatters by an all-reduce that is called so."""
    kinds = {
        "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)": "all_reduce",
        "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)": "reduce_scatter",
        "ncclKernel_Broadcast_RING_LL_Sum_int8_t(ncclWorkElem)": "broadcast",
        "gloo:alltoall": "all_to_all", "nccl:all_reduce": None, "aten::mm": None,
    }  # fmt: skip
    assert {name: profile.work_kind(name) for name in kinds} == kinds
    collectives = [("all_gather", 8, True), ("reduce_scatter", 8, True)]
    work = [("gloo:all_reduce", 5e6, 7e6), ("aten::mm", 0.0, 9e6), ("gloo:all_gather", 1e6, 2e6)]
    assert profile.collective_times(work, collectives) == [("all_gather", 1.0), ("reduce_scatter", 2.0)]
    assert profile.collective_times(work, collectives[:1]) == [("all_gather", 1.0), ("all_reduce", 2.0)]


def test_a_report_of_four_ranks_by_hand():
    def counted(rank: int, seconds: float) -> profile.RankCommunication:
        collectives = (("all_reduce", 100, True), ("all_gather", 10, False), ("barrier", 0, True))
        timed = (("all_reduce", seconds), ("all_gather", 0.2), ("barrier", 0.0))
        return profile.RankCommunication(rank, "here", 2.0, 1.0, 0.5, collectives, timed)

    ranks = [counted(rank, 0.2 + 0.2 * (rank != 2)) for rank in range(4)]
    report = functools.partial(profile.communication_report, planned_bytes={"all_reduce": 50, "all_gather": 20})
    found = report(ranks, Layout("ddp", 4), steps=2, planned_sent_bytes=90)
    reduced = found["kinds"]["all_reduce"]
    assert (reduced["count"], reduced["bytes"], reduced["sent_bytes"]) == (0.5, 50, 75)  # 2 * 3/4
    assert reduced["seconds"] == pytest.approx((3 * 0.4 + 0.2) / 4 / 2)
    assert found["kinds"]["all_gather"]["bytes"] == 20  # 10 of each of four ranks, in two steps
    assert (found["sent_bytes"], found["agrees"]) == (90, True)
    assert [rank["waiting_s"] for rank in found["ranks"]] == pytest.approx([0.1, 0.1, 0.0, 0.1])
    differing = [ranks[0], ranks[1]._replace(work_times=(("all_gather", 0.5),))]
    found = report(differing, Layout("ddp", 2), steps=2, planned_sent_bytes=80)
    assert {rank["waiting_s"] for rank in found["ranks"]} == {None}
    assert not report(ranks, Layout("ddp", 4), steps=2, planned_sent_bytes=80)["agrees"]
    for layout in (Layout("fsdp_hybrid", 4, 2), Layout("fsdp_tp", 2, 2, tensor_parallel=2)):
        kinds = report(ranks, layout, steps=1, planned_sent_bytes=90)["kinds"]
        gathered = kinds["all_gather"]
        assert (gathered["bytes"], gathered["sent_bytes"]) == (20, 10)  # two ranks of a shard
        assert kinds["all_reduce"]["sent_bytes"] == 100  # over two copies, or two tensor-parallel ranks


# --- on real ranks ----------------------------------------------------------------------------------------------------
STEP, MIXED = "distributed.sync_gradients_every=", "distributed.mixed_precision."
SIX = ["train.batch_size=1", "train.effective_batch_size=12"]
RUNS: dict[str, tuple[str, str, list[str]]] = {
    "ddp": ("ddp", "full", []),
    "ddp fp16": ("ddp", "full", [STEP + "1", "distributed.find_unused_parameters=true", MIXED + "reduce=float16"]),
    "fsdp": ("fsdp", "full", []),
    "fsdp step": ("fsdp", "lora", ["train.bf16=true", STEP + "step", MIXED + "reduce=float32"]),
    "ddp six": ("ddp", "full", SIX), "ddp four and two": ("ddp", "full", [*SIX, STEP + "4"]),
    "fsdp four and two": ("fsdp", "full", [*SIX, STEP + "4"]), "zero2": ("zero2", "full", [MIXED + "reduce=bf16"]),
    "zero3": ("zero3", "lora", ["train.bf16=true", MIXED + "reduce=float32", MIXED + "buffer=bfloat16"]),
}  # fmt: skip
"""Name: layout, mode, settings. Two micro-batches a step, or six."""
FEW = ("ddp", "fsdp", "zero2")


@pytest.fixture(scope="module", params=["few", pytest.param("all", marks=pytest.mark.slow)])
def found(request, tmp_path_factory, tiny_llama) -> dict[str, dict[str, object]]:
    """Of few or all of `RUNS` over two CPU ranks: what the engine was told, the counted communication, the losses."""
    if find_spec("deepspeed") is None:
        pytest.skip("deepspeed is not installed here")
    folder = tmp_path_factory.mktemp("runs")
    uneven_run(folder, tiny_llama)
    runs = {name: RUNS[name] for name in (FEW if request.param == "few" else RUNS)}
    same = ["distributed.profile_communication=1", "train.max_steps=3", "eval.before_training=false",
            "data.val_path=null", "train.learning_rate=1e-3"]  # fmt: skip
    words = [
        ["train", "--config", f"{folder}/run.yaml", "--strategy", layout, f"tuning.mode={mode}",
         f"output.name={name.replace(' ', '-')}", *same, *settings]
        for name, (layout, mode, settings) in runs.items()
    ]  # fmt: skip
    (folder / "runs.json").write_text(json.dumps(words))
    command = [warm.python(), "-m", "tests.many_runs", f"{folder}/runs.json", f"{folder}/found.json"]
    answer = subprocess.run(command, cwd=ROOT, env=clean_environment(), capture_output=True, text=True, timeout=580)
    assert answer.returncode == 0, (answer.stdout + answer.stderr)[-5000:]
    found = {}
    for name, told in zip(runs, json.loads((folder / "found.json").read_text()), strict=True):
        run = folder / "outputs" / name.replace(" ", "-")
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        counted = json.loads((run / "profile" / "communication.json").read_text())
        losses = [line["loss"] for line in lines if "loss" in line]
        found[name] = {**told, "counted": counted, "losses": losses, "log": (run / "train.log").read_text(),
                       "trace": run / "profile" / counted["trace"]}  # fmt: skip
    return found


def bytes_of(found: dict[str, dict[str, object]], run: str, kind: str) -> int:
    return found[run]["counted"]["kinds"][kind]["bytes"]  # type: ignore[index,no-any-return]


@pytest.mark.build
def test_gradients_are_added_up_in_every_micro_batch_or_once_a_step(found):
    ddp = bytes_of(found, "ddp", "all_reduce")
    assert bytes_of(found, "zero2", "all_reduce") == pytest.approx(ddp, rel=1e-3)  # twice, half the bytes
    assert bytes_of(found, "fsdp", "reduce_scatter") == pytest.approx(2 * ddp, rel=1e-2)
    assert found["fsdp"]["whole_gradients"] == 0
    # the closed form's bytes are the counted ones
    for name, run in found.items():
        counted = run["counted"]
        assert counted["agrees"], (name, counted["difference"])
        assert abs(counted["difference"]) < 0.02, (name, counted["difference"])
        for kind, planned in counted["planned_bytes"].items():
            assert counted["kinds"][kind]["bytes"] == pytest.approx(planned, rel=0.03), (name, kind)


@pytest.mark.build
def test_what_was_counted_is_timed_for_each_rank_and_can_be_opened(found):
    for name, run in found.items():
        counted = run["counted"]
        assert [rank["rank"] for rank in counted["ranks"]] == [0, 1], name
        assert all(0 < rank["communication_s"] <= rank["step_s"] for rank in counted["ranks"])
        assert all(rank["exposed_s"] <= rank["communication_s"] + 1e-6 for rank in counted["ranks"])
        assert 0 < counted["share"] < 1
        waits = [rank["waiting_s"] for rank in counted["ranks"]]
        assert all(wait is None or 0 <= wait < counted["step_s"] for wait in waits)
        assert all(kind["seconds"] > 0 for kind in counted["kinds"].values() if kind["bytes"] > 1000)
        assert all(said in run["log"] for said in ("bytes a step", "they agree"))
    with gzip.open(found["fsdp"]["trace"]) as trace:
        events = json.load(trace)["traceEvents"]
    assert sum(event.get("name") == "c10d::_reduce_scatter_base_" for event in events) == 6


@pytest.mark.parametrize("found", [pytest.param("all", marks=pytest.mark.slow)], indirect=True)
@pytest.mark.build
def test_every_key_reaches_its_engine_and_losses_are_those_of_ddp(found):
    """In fp32 how often gradients are added up changes only the order of sums; half precision changes their digits."""
    assert (found["ddp"]["find_unused_parameters"], found["ddp fp16"]["find_unused_parameters"]) == (False, True)
    assert (found["ddp"]["comm_hook"], found["ddp fp16"]["comm_hook"]) == ("", "fp16_compress_hook")
    assert found["fsdp step"]["policy"] == ["torch.bfloat16", "torch.float32"]
    assert found["zero2"]["communication_data_type"] == "torch.bfloat16"
    zero3 = found["zero3"]
    assert (zero3["communication_data_type"], zero3["buffers"]) == ("torch.float32", ["torch.bfloat16"])
    sent = functools.partial(bytes_of, found)
    assert sent("ddp fp16", "all_reduce") == pytest.approx(sent("ddp", "all_reduce"), rel=1e-3)  # twice, half the bytes
    assert sent("ddp four and two", "all_reduce") == pytest.approx(2 * sent("ddp six", "all_reduce"), rel=1e-3)
    assert sent("fsdp four and two", "reduce_scatter") == pytest.approx(sent("fsdp", "reduce_scatter"), rel=1e-3)
    whole = found["fsdp step"]["counted"]["planned_bytes"]["reduce_scatter"]
    assert found["fsdp step"]["whole_gradients"] == whole  # on every rank
    wanted = found["ddp"]["losses"]
    assert found["fsdp"]["losses"] == pytest.approx(wanted, rel=1e-5)
    for name in ("ddp four and two", "fsdp four and two"):
        assert found[name]["losses"] == pytest.approx(found["ddp six"]["losses"], rel=1e-5), name
    for name in ("ddp fp16", "zero2"):
        assert found[name]["losses"] == pytest.approx(wanted, rel=4e-3), name
        assert found[name]["losses"][0] == pytest.approx(wanted[0], rel=1e-6), name
    assert found["fsdp step"]["losses"] == pytest.approx(found["zero3"]["losses"], rel=2e-2)
