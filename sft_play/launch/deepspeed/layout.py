"""The ZeRO layout that a DeepSpeed configuration asks for."""

from __future__ import annotations

from sft_play.errors import ConfigError
from sft_play.launch.deepspeed.keys import AUTO, Config
from sft_play.planner.layout import LayoutName

STAGES: dict[str, tuple[int, bool, bool]] = {
    "zero1": (1, False, False),
    "zero2": (2, False, False),
    "zero3": (3, False, False),
    "zero2_offload": (2, True, False),
    "zero3_offload": (3, True, True),
}
"""Layout: ZeRO stage, whether optimizer states are offloaded, whether weights are."""
LAYOUTS: dict[tuple[int, bool], LayoutName] = {
    (1, False): "zero1",
    (1, True): "zero1",
    (2, False): "zero2",
    (3, False): "zero3",
    (2, True): "zero2_offload",
    (3, True): "zero3_offload",
}
"""The layout of a stage, with its optimizer states offloaded or not."""


def layout_of(config: Config, *, name: str = "the DeepSpeed configuration", planned: str = "zero2") -> LayoutName:
    """The layout that a translated configuration asks for; where its stage is "auto" or absent, that of `planned`.

    Raises:
        ConfigError: it shards nothing (stage 0), or offloads weights that it does not shard.
    """
    zero = config.get("zero_optimization") or {}
    stage = zero.get("stage", AUTO)
    stage = STAGES[planned][0] if stage in (AUTO, None) else int(stage)
    states, weights = offloads(zero, "offload_optimizer"), offloads(zero, "offload_param")
    if stage == 0:
        raise ConfigError(
            f"{name}: zero_optimization.stage 0 shards nothing: every GPU would hold the whole model; "
            "set stage 1, 2 or 3, or ask for STRATEGY=ddp"
        )
    if weights and stage < 3:
        raise ConfigError(f"{name}: offload_param needs stage 3 and the stage is {stage}; set stage 3 or remove it")
    return LAYOUTS[stage, states]


def layout_notes(config: Config, *, planned: str = "zero2") -> tuple[str, ...]:
    """Where a file differs from the layout that it is planned as."""
    zero = config.get("zero_optimization") or {}
    notes = []
    layout = layout_of(config, planned=planned)
    states, weights = offloads(zero, "offload_optimizer"), offloads(zero, "offload_param")
    if states and layout == "zero1":
        notes.append("optimizer states go to RAM; the plan for zero1 has them on the GPUs, so it needs less than that")
    if weights and layout == "zero3":
        notes.append("weights go to RAM; the plan for zero3 has them on the GPUs, so it needs less than that")
    if keeps_params(config, layout):
        notes.append("no offload_param: the weights stay on the GPUs, and are planned there")
    for key in ("offload_optimizer", "offload_param"):
        if isinstance(zero.get(key), dict) and zero[key].get("device") == "nvme":
            notes.append(f"{key} goes to NVMe ({zero[key].get('nvme_path')}); its speed is not planned")
    return tuple(notes)


def keeps_params(config: Config, layout: LayoutName) -> bool:
    """Whether a file that asks for `zero3_offload` offloads only the optimizer states."""
    return layout == "zero3_offload" and not offloads(config.get("zero_optimization") or {}, "offload_param")


def offloads(zero: Config, key: str) -> bool:
    """Whether the section `key` of `zero_optimization` moves something off the GPUs."""
    section = zero.get(key)
    return isinstance(section, dict) and section.get("device", "none") in ("cpu", "nvme")
