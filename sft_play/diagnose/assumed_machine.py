"""What a plan assumes of a machine that is only named (HARDWARE=); nothing is measured."""

from __future__ import annotations

from typing import Any

from sft_play.diagnose.text import NOT_KNOWN, gib, known
from sft_play.facts.hardware import Hardware
from sft_play.log import escape_control, one_line
from sft_play.planner.plan import budget_bytes


def assumed_json(hardware: Hardware) -> dict[str, Any]:
    """What a plan assumes of a named machine: bytes, rates per second, dense operations; null: not known."""
    return {
        "number_of_gpus": len(hardware.gpus),
        "assumed": True,
        "nodes": hardware.nodes,
        "gpus_per_node": hardware.gpus_per_node if hardware.gpus else 0,
        "gpus": [
            {
                "index": gpu.index,
                "name": gpu.name,
                "usable_bytes": gpu.total_bytes,
                "compute_capability": None if gpu.capability is None else f"{gpu.capability[0]}.{gpu.capability[1]}",
                "bandwidth_bytes_per_s": gpu.bandwidth,
                "bf16_flops_per_s": gpu.bf16_flops,
                "fp16_flops_per_s": gpu.fp16_flops,
                "fp8_flops_per_s": gpu.fp8_flops,
                "fp32_flops_per_s": gpu.fp32_flops,
                "power_limit_watts": gpu.tdp_watts,
            }
            for gpu in hardware.gpus
        ],
        "link_bytes_per_s": hardware.link_bytes_per_s,
        "network_bytes_per_s": hardware.network_bytes_per_s,
        "budget_bytes": budget_bytes(hardware),
        "price_per_gpu_hour": hardware.price_per_gpu_hour,
        "ram_bytes": hardware.ram_bytes,
        "ram_given": hardware.ram_given,
        "cpu_cores": hardware.cpu_cores,
        "notes": list(hardware.notes),
    }


def assumed_lines(hardware: Hardware, text: str) -> list[str]:
    """What a plan would assume of a machine that is only named; nothing is measured."""
    count = len(hardware.gpus)
    nodes = f" on {hardware.nodes} nodes of {hardware.gpus_per_node}" if hardware.nodes > 1 else ""
    page = [
        f"Assumed, not detected: HARDWARE={one_line(text)}, as in make plan (catalogue: docs/gpus.md)",
        f"Number of GPUs: {count}{nodes}",
    ]
    if count:
        gpu = hardware.gpus[0]
        rates = ", ".join(
            f"{name} {_rate(rate)}"
            for name, rate in (("bf16", gpu.bf16_flops), ("fp16", gpu.fp16_flops), ("fp8", gpu.fp8_flops),
                               ("fp32", gpu.fp32_flops))
        )  # fmt: skip
        capability = NOT_KNOWN if gpu.capability is None else f"{gpu.capability[0]}.{gpu.capability[1]}"
        page += [
            f"Each GPU: {one_line(gpu.name)}, compute capability {capability}, {known(gpu.tdp_watts, 'W')}",
            f"  memory that a process can use: {gib(gpu.total_bytes, digits=2)} GiB",
            f"  memory bandwidth: {_bytes_rate(gpu.bandwidth)}",
            f"  dense matrix rates: {rates}",
            f"Link between GPUs, per GPU and one way: {_bytes_rate(hardware.link_bytes_per_s)}",
        ]
        if hardware.nodes > 1 or hardware.network_bytes_per_s is not None:
            page.append(f"Network between nodes, per node and one way: {_bytes_rate(hardware.network_bytes_per_s)}")
        if hardware.price_per_gpu_hour is not None:
            page.append(f"Price: {hardware.price_per_gpu_hour:g} per GPU-hour")
    here = "" if hardware.ram_given else " (this machine's; ram= sets another)"
    page.append(f"Host: {hardware.cpu_cores} cores, {gib(hardware.ram_bytes)} GiB RAM{here}")
    return [escape_control(line) for line in [*page, *hardware.notes]]


def _rate(rate: float | None) -> str:
    return NOT_KNOWN if rate is None else f"{rate / 1e12:,.4g} TFLOPS"


def _bytes_rate(rate: float | None) -> str:
    return NOT_KNOWN if rate is None else f"{rate / 1e9:,.4g} GB/s"
