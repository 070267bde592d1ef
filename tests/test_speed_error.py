"""Predicted against published speeds that no constant was fitted to, what a plan says of its error, and how
predictions scale with GPUs: near to what others published, and never as if communication cost nothing."""

import json
import random
import re
import statistics
from dataclasses import replace

import pytest

from benchmarks import published_speeds
from benchmarks.scaling import SCALING_POINTS, compare_scaling
from sft_play.config.load import config_from_text
from sft_play.machine.hardware import parse_hardware
from sft_play.models.config_json import load_model_shape
from sft_play.planner import speed
from sft_play.planner.batching import AverageMicroSteps
from sft_play.planner.decide import PlanRequest, build_plan_inputs, make_plan
from sft_play.planner.explain import format_relative_speed, rejection_reason, speed_lines
from sft_play.planner.layout import SINGLE, Layout
from sft_play.planner.memory.step_memory import Step
from sft_play.planner.pass_work import FORWARD_OPERATOR_WEIGHT, PassTimes, estimate_pass_work
from sft_play.planner.plan import plan_from_json
from sft_play.planner.precision import Precision

BF16 = Precision("bfloat16", "bfloat16", "")


@pytest.fixture(scope="module")
def published():
    return published_speeds.compare_published()


def test_speeds_that_were_not_fitted_are_predicted_within_15_percent(published):
    found = published_speeds.errors_by_class(published)
    assert found["all"]["n"] >= 100
    assert min(found[name]["n"] for name in ("all sources", "one GPU", "full", "lora", "qlora")) >= 8
    assert max(found[name]["median"] for name in ("all", "all sources", "one GPU", "several GPUs")) < 0.15


def test_each_row_says_where_and_when_it_was_read_and_whether_it_was_fitted():
    rows = published_speeds.read_speed_rows()
    assert len({row["id"] for row in rows}) == len(rows) >= 130
    for row in rows:
        assert re.match(
            r"github\.com/[\w.-]+/[\w.-]+(@[0-9a-f]{7,}|/issues/\d+)|github\.com/AnswerDotAI|(docs|www)\.\w+\.com/",
            row["source"],
        ), row["id"]
        assert re.match(r"20\d\d(-\d\d){0,2}$", row["date"]), row["id"]
        assert row["split"] in ("fitted", "held out", "not compared")
        assert (row["split"] == "not compared") == ("FP8" in row["note"])
        assert row["kernels"] in ("plain", "compiled", "fused")
    assert 10 < sum(row["split"] == "fitted" for row in rows) < len(rows) / 4


def test_four_of_five_published_speeds_lie_within_what_the_plan_says(published):
    found = published_speeds.shares_within_error(published)
    # smaller models: benchmarks/speed.json
    assert set(found) == {speed.DATA_CENTRE_ERROR.of, speed.LONG_ROW_ERROR.of, speed.WORKSTATION_ERROR.of}
    assert all(one["within"] >= 0.75 for one in found.values()), found


def test_a_pass_takes_the_longer_of_host_and_card_and_the_backward_pass_waits_for_the_host():
    """Against a second rule: a queue, into which the host puts a forward and a backward pass one after the other."""
    draw = random.Random("passes")
    for _ in range(300):
        host, card = ([draw.uniform(0.01, 1) for _ in range(2)] for _ in range(2))
        by_token = [draw.uniform(0, 1e-4) for _ in range(2)]
        tokens = draw.choice((0, 1, 100, 8192))
        times = PassTimes(*host, *card, *by_token)
        busy = [fixed + tokens * each for fixed, each in zip(card, by_token, strict=True)]
        # a direction's work begins with its first kernel, ends no earlier than its last is started
        forward_end = max(busy[0], host[0])
        backward_end = max(host[0] + host[1], max(forward_end, host[0]) + busy[1])
        assert times.seconds(tokens) == pytest.approx(max(backward_end, sum(busy)))
        factor = draw.uniform(0.5, 2)
        slower = times.corrected(host_factor=1.0, card_factor=factor)
        found = times.card_factor(tokens, slower.seconds(tokens))
        assert found is None or slower.corrected(host_factor=1, card_factor=found / factor).seconds(
            tokens
        ) == pytest.approx(slower.seconds(tokens))


def h100_step(chats: AverageMicroSteps | None = None) -> float:
    """Seconds of a step of Qwen3-4B with LoRA as it was recorded on an H100, whose host took 8.6 ms a layer
    (benchmarks/LOG.md, 2026-11-26): four passes of 8,192 tokens, or `chats`, by plain code and PEFT's own adapters."""
    config = config_from_text("model: {name: Qwen/Qwen3-4B}\ntuning: {mode: lora}\ntrain: {kernels: none}", name="x")
    shape, step = load_model_shape("Qwen/Qwen3-4B"), Step(4, 4, 2048, checkpointed_layers=0, varlen=chats is not None)
    work = estimate_pass_work(config, shape, BF16, step).plain
    operator_s = 8.6e-3 / (FORWARD_OPERATOR_WEIGHT * work.forward.operators + work.backward.operators)
    rates = replace(speed.find_rates(parse_hardware("1xH100"), BF16), operator_s=operator_s)
    return speed.predict_speed(config, shape, BF16, step, rates, micro_steps=chats).step_s


# Tokens and seconds of its mixed steps, the checks of the first steps taken off by their count; a step of 3,617 tokens
# that took 0.545 s is unexplained, and left out.
H100_CHATS = ((6017, 0.61), (3184, 0.42), (4733, 0.52), (3057, 0.339))
H100_BLOCKS = (4 * 8192, 4 * 8192 / 13_160)


def test_the_recorded_passes_of_an_h100_are_predicted_with_that_hosts_floor():
    assert h100_step() == pytest.approx(H100_BLOCKS[1], rel=0.15)
    for tokens, seconds in H100_CHATS:
        assert h100_step(AverageMicroSteps(1, tokens, 447, tokens, 16)) == pytest.approx(seconds, rel=0.25)


def classed(model: str, machine: str, *, length: int = 2048, compute: str = "bfloat16", **more):
    precision, step = Precision(compute, compute, ""), Step(1, 1, length, **more)
    return speed.find_speed_error(load_model_shape(model), precision, parse_hardware(machine), step)


def test_the_class_is_that_of_card_precision_model_and_row():
    model = "meta-llama/Llama-3.1-8B"
    assert classed(model, "1xA100-80GB") == classed(model, "8xH200") == speed.DATA_CENTRE_ERROR
    assert classed(model, "8xH100", length=8193) == speed.LONG_ROW_ERROR
    assert classed(model, "2xRTX4090", length=32_768) == speed.WORKSTATION_ERROR
    assert (
        classed("Qwen/Qwen2.5-0.5B", "1xH100") == classed(model, "1xT4", compute="float16") == speed.SMALL_MODEL_ERROR
    )
    unknown = [classed(model, machine) for machine in ("1xMI300X", "1xB200", "1xMyGPU,mem=24GiB", "cpu")]
    unknown.append(classed("Qwen/Qwen3-30B-A3B", "1xH100"))
    unknown.append(classed(model, "8xH100", layout=Layout("zero3_offload", 8, 8)))
    assert all(one.share is None and "no published run" in one.text for one in unknown)
    assert speed.DATA_CENTRE_ERROR.text == "±15%, bf16 on data-centre cards"
    assert [one.share for one in speed.SPEED_ERROR_CLASSES] == [0.15, 0.40, 0.35, 0.60]


def test_a_plan_says_its_error_in_words_and_json_and_a_rank_receives_it():
    config = config_from_text("model: {name: meta-llama/Llama-3.1-8B}\ntuning: {mode: lora}", name="x")
    request = PlanRequest(config, load_model_shape(config.model.name), parse_hardware("1xH100"))
    plan = make_plan(request)
    words = f"about {plan.speed.tokens_per_s:,.0f} tokens/s (±15%, bf16 on data-centre cards), "
    assert words in speed_lines(plan)[0]
    data = json.loads(json.dumps(plan.as_json()))
    assert data["speed_error"] == {"share": 0.15, "of": "bf16 on data-centre cards"}
    assert plan_from_json(data).speed_error == plan.speed_error
    unknown = make_plan(replace(request, hardware=parse_hardware("1xMyGPU,mem=80GiB")))
    assert unknown.speed_error is unknown.as_json()["speed_error"] is None


def test_what_the_error_does_not_tell_apart_is_about_as_fast():
    chance = random.Random("about")
    for _ in range(500):
        ratio, share = chance.uniform(0.2, 2.5), chance.uniform(0, 0.6)
        words = format_relative_speed(ratio, speed.SpeedError(share, "x"))
        assert (words == "about as fast") == (abs(ratio - 1) <= share)
        assert words == "about as fast" or words.endswith("faster" if ratio > 1 else "slower")
        assert "-" not in words
        assert format_relative_speed(ratio, speed.SpeedError(None, "x")) == format_relative_speed(ratio)
    reasons = []
    for _ in range(12):
        model = chance.choice(("Qwen/Qwen2.5-0.5B", "meta-llama/Llama-3.1-8B", "Qwen/Qwen2.5-32B"))
        mode, machine = chance.choice(("full", "lora", "qlora")), chance.choice(("1xH100", "4xA100-80GB", "2xRTX4090"))
        text = f"model: {{name: {model}}}\ntuning: {{mode: {mode}}}\ntrain: {{effective_batch_size: 32}}"
        request = PlanRequest(config_from_text(text, name="x"), load_model_shape(model), parse_hardware(machine))
        plan = make_plan(request)
        error = plan.speed_error
        for candidate in plan.candidates:
            fastest = {"fastest_tokens_per_s": plan.speed.tokens_per_s}
            why = rejection_reason(build_plan_inputs(request), candidate, plan.choice, **fastest)
            reasons.append(why)
            for number, sign in re.findall(r"(-?[\d.]+)% (faster|slower)", why):
                assert float(number) / 100 > (error.share or 0.0) - 0.01, (why, sign)
    assert any("about as fast" in why for why in reasons)
    assert any("% slower" in why for why in reasons)


MODELS = ("Qwen/Qwen2.5-0.5B", "Qwen/Qwen2.5-3B-Instruct", "meta-llama/Llama-3.1-8B", "Qwen/Qwen3-30B-A3B")
CARDS = ("RTX 4090", "RTX 3090", "A100-80GB", "H100", "L40S", "MyGPU,mem=24GiB,bandwidth=1000GBs,bf16=165TFLOPS")


def test_published_runs_scale_as_predicted_and_not_without_a_term(monkeypatch):
    """Twenty independent settings of five sources; the hardest are small models in fp32 through the host's memory."""
    found = {point.name: compare_scaling(point) for point in SCALING_POINTS}
    assert len(found) == len(SCALING_POINTS) >= 30
    assert len({item["source"].split(" ")[0] for item in found.values()}) >= 6
    assert all(item["source"].startswith("https://") for item in found.values())
    off = {name: abs(item["ratio"] - 1) for name, item in found.items()}
    assert statistics.median(off.values()) < 0.05
    assert max(off.values()) < 0.25, max(off, key=off.__getitem__)
    lora = [share for name, share in off.items() if " lora ddp" in name]
    assert (len(lora), max(lora) < 0.04) == (2, True)
    for name, value in (("OVERLAP_SHARE", 1.0), ("WAIT_SPREAD", 0.0), ("BUCKET_COPIES", 0), ("PCIE_SHARE", 0.75)):
        with monkeypatch.context() as patch:
            patch.setattr(speed, name, value)
            without = [abs(compare_scaling(point)["ratio"] - 1) for point in SCALING_POINTS]
            assert statistics.mean(without) > statistics.mean(off.values()), name


def predicted(
    card: str, gpus: int, *, model: str, mode: str, layout: str, rows: int, accum: int, dtype: str = "bfloat16"
):
    hardware = parse_hardware(f"{gpus}x{card}")
    config = config_from_text(f"model: {{name: {model}}}\ntuning: {{mode: {mode}}}", name="run.yaml")
    precision = Precision(dtype, dtype, "")
    shard = gpus if layout in ("fsdp", "zero1", "zero2", "zero3") else 1
    step = Step(
        micro_batch=rows, grad_accum=accum, seq_len=1024, checkpointed_layers=None,
        layout=SINGLE if gpus == 1 else Layout(layout, gpus, shard),
    )  # fmt: skip
    return speed.predict_speed(config, load_model_shape(model), precision, step, speed.find_rates(hardware, precision))


def test_more_gpus_are_never_as_many_times_faster_as_they_are_many():
    draw = random.Random(5)
    for _ in range(100):
        chosen = {
            "model": draw.choice(MODELS), "mode": draw.choice(["full", "lora", "qlora"]),
            "rows": draw.choice([1, 4, 16]), "accum": draw.choice([1, 2, 8]),
            "layout": draw.choice(["ddp", "fsdp", "zero1", "zero2", "zero3"]),
            "dtype": draw.choice(["bfloat16", "float32"]),
        }  # fmt: skip
        card = draw.choice(CARDS)
        alone = predicted(card, 1, **chosen)
        last = alone.step_s - alone.parts["optimizer"]
        assert alone.parts["communication"] == alone.parts["waiting"] == alone.moved_bytes == 0
        for gpus in (2, 4, 8):
            found = predicted(card, gpus, **chosen)
            assert found.step_s == pytest.approx(sum(found.parts.values()))
            assert min(found.parts["communication"], found.parts["waiting"]) > 0
            assert found.tokens_per_s / gpus < 0.99 * alone.tokens_per_s or chosen["layout"] != "ddp", (card, chosen)
            rest = found.step_s - found.parts["optimizer"]  # which is divided over ranks where states are
            assert rest > last
            last = rest


@pytest.mark.parametrize("card", ["RTX 4090", "L40S", "RTX PRO 6000"])
@pytest.mark.parametrize("mode", ["lora", "qlora"])
def test_adapters_scale_well_over_pcie_and_not_wholly(card, mode):
    config = config_from_text(f"model: {{name: meta-llama/Llama-3.1-8B}}\ntuning: {{mode: {mode}}}\n", name="run.yaml")
    shape = load_model_shape("meta-llama/Llama-3.1-8B")
    machines = (parse_hardware(f"{count}x{card}") for count in (1, 4))
    plans = [make_plan(PlanRequest(config, shape, one, allowed_layouts=("single", "ddp"))) for one in machines]
    assert 3.5 < plans[1].speed.tokens_per_s / plans[0].speed.tokens_per_s < 3.95


def test_a_link_and_what_it_is_made_of_count():
    chosen = {"model": "meta-llama/Llama-3.1-8B", "mode": "full", "rows": 1, "accum": 1, "layout": "fsdp"}
    slower = [predicted(f"H100,link={link}GB/s", 8, **chosen).tokens_per_s for link in (900, 300, 128, 64, 32)]
    assert slower == sorted(set(slower), reverse=True)
    for text, share in (
        ("2xH100", speed.LINK_SHARE), ("2xRTX4090", speed.PCIE_SHARE), ("2xH100-PCIe", speed.PCIE_SHARE),
        ("2xRTX3090,link=112.5GB/s", speed.LINK_SHARE), ("2xH100,link=128GB/s", speed.PCIE_SHARE),
        ("2xMyGPU,mem=24GiB", speed.PCIE_SHARE), ("2xMyGPU,mem=24GiB,link=600GB/s", speed.LINK_SHARE),
    ):  # fmt: skip
        assert speed.find_rates(parse_hardware(text), BF16).link_share == share, text


def test_over_nodes_the_slower_of_link_and_network_counts():
    # A ring enters and leaves a node once: 16 ranks on two nodes have the node's 50 GB/s together, as nccl-tests' bus
    # bandwidth is the network's (https://github.com/NVIDIA/nccl-tests/issues/196). Eight groups of two ranks share it.
    rates = speed.find_rates(parse_hardware("2x8xH100,network=400Gbps"), BF16)
    assert speed._link_bytes_per_s(8, rates) == pytest.approx(450e9 * 0.75)
    assert speed._link_bytes_per_s(16, rates) == pytest.approx(50e9 * 0.75)
    assert speed._link_bytes_per_s(16, rates, per_node=1) == pytest.approx(50e9 / 8 * 0.75)
    whole = speed.Collective("all_gather", 16e9, 16, 0)
    copies = speed.Collective("all_reduce", 1e9, 2, 0, spanned_ranks=16)
    assert speed._collective_seconds(whole, rates) == pytest.approx(15e9 / (50e9 * 0.75))
    assert speed._collective_seconds(copies, rates) == pytest.approx(1e9 / (50e9 / 8 * 0.75))
    fast = replace(rates, network_bytes_per_s=1e15)
    assert speed._link_bytes_per_s(16, fast) == speed._link_bytes_per_s(8, fast)


def test_the_slowest_of_more_ranks_is_waited_for_longer():
    """Expected largest of n standard normals: 0.564, 1.029, 1.424 (Harter 1961, table 1) for 2, 4, 8."""
    assert speed.straggler_wait_share(1) == 0
    for ranks, expected in ((2, 0.564), (4, 1.029), (8, 1.424)):
        assert speed.straggler_wait_share(ranks) == pytest.approx(speed.WAIT_SPREAD * expected, rel=0.05)
    assert [speed.straggler_wait_share(n) for n in range(1, 200)] == sorted(
        {speed.straggler_wait_share(n) for n in range(1, 200)}
    )
