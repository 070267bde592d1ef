"""How predictions scale with GPUs: near to what others published, and never as if communication cost nothing."""

import random
import statistics
from dataclasses import replace

import pytest

from benchmarks.scaling import SCALING_POINTS, compare_scaling
from sft_play.config.load import config_from_text
from sft_play.machine.hardware import parse_hardware
from sft_play.models.config_json import load_model_shape
from sft_play.planner import speed
from sft_play.planner.decide import PlanRequest, make_plan
from sft_play.planner.layout import SINGLE, Layout
from sft_play.planner.memory.step_memory import Step
from sft_play.planner.precision import Precision
from sft_play.planner.speed import Collective, find_rates, predict_speed, straggler_wait_share

MODELS = ("Qwen/Qwen2.5-0.5B", "Qwen/Qwen2.5-3B-Instruct", "meta-llama/Llama-3.1-8B", "Qwen/Qwen3-30B-A3B")
CARDS = ("RTX 4090", "RTX 3090", "A100-80GB", "H100", "L40S", "MyGPU,mem=24GiB,bandwidth=1000GBs,bf16=165TFLOPS")


def test_published_runs_scale_as_predicted():
    """Twenty independent settings of five sources; the hardest are small models in fp32 through the host's memory."""
    found = {point.name: compare_scaling(point) for point in SCALING_POINTS}
    assert len(found) == len(SCALING_POINTS) >= 30
    assert len({item["source"].split(" ")[0] for item in found.values()}) >= 6
    assert all(item["source"].startswith("https://") for item in found.values())
    off = {name: abs(item["ratio"] - 1) for name, item in found.items()}
    assert statistics.median(off.values()) < 0.05
    assert max(off.values()) < 0.25, max(off, key=off.__getitem__)
    lora = [item for name, item in found.items() if " lora ddp" in name]
    assert len(lora) == 2
    assert all(abs(item["ratio"] - 1) < 0.04 for item in lora)


def test_nothing_of_it_comes_out_without_a_term(monkeypatch):
    def error() -> float:
        return statistics.mean(abs(compare_scaling(point)["ratio"] - 1) for point in SCALING_POINTS)

    now = error()
    for name, value in (("OVERLAP_SHARE", 1.0), ("WAIT_SPREAD", 0.0), ("BUCKET_COPIES", 0), ("PCIE_SHARE", 0.75)):
        with monkeypatch.context() as patch:
            patch.setattr(speed, name, value)
            assert error() > now, name


def predicted(
    card: str, gpus: int, *, model: str, mode: str, layout: str, rows: int, accum: int, dtype: str = "bfloat16"
):
    head, _, rest = card.partition(",")
    hardware = parse_hardware(f"{gpus}x{head}{',' + rest if rest else ''}")
    config = config_from_text(f"model: {{name: {model}}}\ntuning: {{mode: {mode}}}", name="run.yaml")
    precision = Precision(dtype, dtype, "")
    shard = gpus if layout in ("fsdp", "zero1", "zero2", "zero3") else 1
    step = Step(
        micro_batch=rows, grad_accum=accum, seq_len=1024, checkpointed_layers=None,
        layout=SINGLE if gpus == 1 else Layout(layout, gpus, shard),
    )  # fmt: skip
    return predict_speed(config, load_model_shape(model), precision, step, find_rates(hardware, precision)), hardware


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
        alone, _ = predicted(card, 1, **chosen)
        last = alone.step_s - alone.parts["optimizer"]
        assert alone.parts["communication"] == alone.parts["waiting"] == alone.moved_bytes == 0
        for gpus in (2, 4, 8):
            found, _ = predicted(card, gpus, **chosen)
            assert found.step_s == pytest.approx(sum(found.parts.values()))
            assert found.parts["communication"] > 0
            assert found.parts["waiting"] > 0
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
    slower = [predicted(f"H100,link={link}GB/s", 8, **chosen)[0].tokens_per_s for link in (900, 300, 128, 64, 32)]
    assert slower == sorted(slower, reverse=True)
    assert len(set(slower)) == len(slower)
    for text, share in (
        ("2xH100", speed.LINK_SHARE), ("2xRTX4090", speed.PCIE_SHARE), ("2xH100-PCIe", speed.PCIE_SHARE),
        ("2xRTX3090,link=112.5GB/s", speed.LINK_SHARE), ("2xH100,link=128GB/s", speed.PCIE_SHARE),
        ("2xMyGPU,mem=24GiB", speed.PCIE_SHARE), ("2xMyGPU,mem=24GiB,link=600GB/s", speed.LINK_SHARE),
    ):  # fmt: skip
        assert find_rates(parse_hardware(text), Precision("bfloat16", "bfloat16", "")).link_share == share, text


def test_over_nodes_the_slower_of_link_and_network_counts():
    # A ring enters and leaves a node once: 16 ranks on two nodes have the node's 50 GB/s together, as nccl-tests' bus
    # bandwidth is the network's (https://github.com/NVIDIA/nccl-tests/issues/196). Eight groups of two ranks share it.
    rates = find_rates(parse_hardware("2x8xH100,network=400Gbps"), Precision("bfloat16", "bfloat16", ""))
    assert speed._link_bytes_per_s(8, rates) == pytest.approx(450e9 * 0.75)
    assert speed._link_bytes_per_s(16, rates) == pytest.approx(50e9 * 0.75)
    assert speed._link_bytes_per_s(16, rates, per_node=1) == pytest.approx(50e9 / 8 * 0.75)
    whole = Collective("all_gather", 16e9, 16, 0)
    copies = Collective("all_reduce", 1e9, 2, 0, spanned_ranks=16)
    assert speed._collective_seconds(whole, rates) == pytest.approx(15e9 / (50e9 * 0.75))
    assert speed._collective_seconds(copies, rates) == pytest.approx(1e9 / (50e9 / 8 * 0.75))
    fast = replace(rates, network_bytes_per_s=1e15)
    assert speed._link_bytes_per_s(16, fast) == speed._link_bytes_per_s(8, fast)


def test_the_slowest_of_more_ranks_is_waited_for_longer():
    """Expected largest of n standard normals: 0.564, 1.029, 1.424 (Harter 1961, table 1) for 2, 4, 8."""
    assert straggler_wait_share(1) == 0
    for ranks, expected in ((2, 0.564), (4, 1.029), (8, 1.424)):
        assert straggler_wait_share(ranks) == pytest.approx(speed.WAIT_SPREAD * expected, rel=0.05)
    assert [straggler_wait_share(n) for n in range(1, 200)] == sorted({straggler_wait_share(n) for n in range(1, 200)})
