"""One GPU as a plan sees it, found or only named."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sft_play.facts.gpus.gpu_catalog import BF16_CAPABILITY


@dataclass(frozen=True)
class Gpu:
    """One GPU: `index` as `CUDA_VISIBLE_DEVICES` counts it, memory in bytes; `free_bytes` is None when named, or
    where the driver does not tell it.

    `total_bytes` is what the driver reports of a GPU that was found, and what torch could use of one that is named.
    `bandwidth` is bytes per second; rates are dense operations per second with 32-bit accumulation; None: not known,
    or that the GPU has no such units. `mig` is the profile of an instance (`1g.10gb`), None for a whole GPU.
    """

    index: int
    name: str
    total_bytes: int
    free_bytes: int | None
    capability: tuple[int, int] | None
    bandwidth: float | None = None
    bf16_flops: float | None = None
    fp16_flops: float | None = None
    fp8_flops: float | None = None
    fp32_flops: float | None = None
    tdp_watts: int | None = None
    mig: str | None = None

    @property
    def is_amd(self) -> bool:
        """Whether it is one of AMD's, which can only be named."""
        return self.name.startswith("AMD ")

    @property
    def has_bf16(self) -> bool:
        """Whether its matrix units compute in bfloat16; unknown counts as yes."""
        return self.capability is None or self.capability >= BF16_CAPABILITY

    def rate(self, dtype: str) -> float | None:
        """Dense operations per second of matrix products in `bfloat16`, `float16`, `float8` or `float32`."""
        rates = {"bfloat16": self.bf16_flops, "float16": self.fp16_flops, "float8": self.fp8_flops}
        return rates.get(dtype, self.fp32_flops)


def capability_pair(value: Any) -> tuple[int, int] | None:
    """A compute capability from JSON or from `8.9` split at its dot; None where there is none."""
    return (int(value[0]), int(value[1])) if value else None
