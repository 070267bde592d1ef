"""Combinations of versions, drivers and machines that are known to hang, crash or train wrongly, each with its thread.

Each entry rests on a public thread: what happens, and from which version to which. An entry that the pinned versions no
longer meet stays as long as a user's own environment (`VENV=`) can.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from packaging.version import InvalidVersion, Version

from sft_play.findings import Finding, Verdict, passed
from sft_play.launch.device import P2P_OFF, refuses_p2p

NAME = "known bad pairs"


@dataclass(frozen=True)
class Pairs:
    """What the table is matched with; unknown versions are absent or None, and match no entry."""

    versions: Mapping[str, str] = field(default_factory=dict)
    kernel: str = ""
    machine: str = "x86_64"
    driver: str | None = None
    driver_cuda: tuple[int, int] | None = None
    torch_cuda: str | None = None
    torch_hip: str | None = None
    nccl: str | None = None
    gpu_names: tuple[str, ...] = ()
    capabilities: tuple[tuple[int, int], ...] = ()
    bitsandbytes_cuda: tuple[tuple[int, int], ...] = ()
    bitsandbytes_rocm: tuple[tuple[int, int], ...] = ()
    ranks: int = 1
    nodes: int = 1
    layout: str = "single"
    quantised: bool = False
    """Whether bitsandbytes is used: QLoRA or an 8-bit optimizer."""
    environment: Mapping[str, str] = field(default_factory=dict)

    def version(self, name: str) -> Version | None:
        """The version of a package; None where it is not installed."""
        return version_of(self.versions.get(name))

    @property
    def over_nccl(self) -> bool:
        """Whether several GPUs communicate."""
        return self.ranks > 1 and bool(self.gpu_names)

    @property
    def cuda(self) -> Version | None:
        """The CUDA version that torch was built with."""
        return version_of(self.torch_cuda)


def version_of(text: str | None) -> Version | None:
    """A version that can be compared: of a package, a driver, or the leading numbers of a kernel's."""
    # the leading numbers alone: 2.13.0+cu128, 6.8.0-45-generic and 570.86.15 have to compare
    match = re.match(r"\d+(?:\.\d+)*", text or "")
    try:
        return Version(match[0]) if match else None
    except InvalidVersion:
        return None


def _between(version: Version | None, least: str | None, below: str | None) -> bool:
    """Whether a known version is at least `least` and below `below`."""
    if version is None:
        return False
    return (least is None or version >= Version(least)) and (below is None or version < Version(below))


@dataclass(frozen=True)
class KnownBad:
    """An entry: when it applies, what then happens, what to do, and the source."""

    what: str
    applies: Callable[[Pairs], bool]
    remedy: str
    sources: tuple[str, ...]
    verdict: Verdict = "FAIL"


def _left_out_of_the_build(pairs: Pairs) -> bool:
    """Turing (7.5) is the oldest GPU that CUDA 13 builds support; torch's CUDA 12.8 builds too, from 2.11 on."""
    old = any(capability < (7, 5) for capability in pairs.capabilities)
    builds = _between(pairs.cuda, "13", None) or (
        _between(pairs.cuda, "12.8", None) and _between(pairs.version("torch"), "2.11", None)
    )
    return old and builds


def _no_bitsandbytes_library(pairs: Pairs) -> bool:
    """bitsandbytes uses a library of the same major CUDA or ROCm version (from 0.50 on), never of another."""
    build, libraries = version_of(pairs.torch_hip), pairs.bitsandbytes_rocm
    if build is None:
        build, libraries = pairs.cuda, pairs.bitsandbytes_cuda
    if not (pairs.gpu_names and pairs.quantised and build and pairs.version("bitsandbytes")):
        return False
    exact = (build.major, build.minor) in libraries
    same_major = any(major == build.major for major, _ in libraries)
    return not (exact or (same_major and _between(pairs.version("bitsandbytes"), "0.50", None)))


def _refused_by_accelerate(pairs: Pairs) -> bool:
    is_off = P2P_OFF.keys() <= pairs.environment.keys()
    return pairs.over_nccl and not is_off and refuses_p2p(pairs.gpu_names, pairs.driver)


def _blackwell_desktop(pairs: Pairs) -> bool:
    return pairs.over_nccl and any(capability[0] == 12 for capability in pairs.capabilities)


NEWER_TORCH = "install a torch that brings a newer NCCL (make -C benchmarks lock TORCH=X.Y.Z && make setup)"

TABLE: tuple[KnownBad, ...] = (
    KnownBad(
        "the driver runs CUDA {driver_cuda} at most, and torch is built for CUDA {torch_cuda}: torch will say that the "
        "driver is too old, and see no GPU",
        lambda pairs: bool(
            pairs.gpu_names and pairs.cuda and pairs.driver_cuda and pairs.driver_cuda[0] < pairs.cuda.major
        ),
        "install driver 580 or newer for CUDA 13, 525 or newer for CUDA 12, or a torch built for the driver's CUDA",
        (
            "https://github.com/pytorch/pytorch/pull/162531",
            "https://docs.nvidia.com/deploy/cuda-compatibility/minor-version-compatibility.html",
        ),
    ),
    KnownBad(
        "torch {torch} for CUDA {torch_cuda} has no kernels for GPUs older than Turing (compute capability 7.5): "
        '"no kernel image is available"',
        _left_out_of_the_build,
        "install torch's build for CUDA 12.6, which still has Volta and Pascal",
        ("https://github.com/pytorch/pytorch/issues/172352", "https://github.com/unslothai/unsloth/pull/5876"),
    ),
    KnownBad(
        "bitsandbytes {bitsandbytes} has no library for {torch_build}, which torch is built for",
        _no_bitsandbytes_library,
        "install a newer bitsandbytes, or a torch for one of the versions that it has",
        ("https://github.com/bitsandbytes-foundation/bitsandbytes/issues/1688",),
    ),
    KnownBad(
        "several RTX 40 with driver {driver}: the driver offers a P2P that hangs, and accelerate refuses to start; "
        "runs switch it off (NCCL_P2P_DISABLE=1 NCCL_IB_DISABLE=1)",
        _refused_by_accelerate,
        "install driver 550.40.07 or newer, and ranks communicate faster",
        ("https://github.com/NVIDIA/nccl-tests/issues/117", "https://github.com/QwenLM/Qwen-VL/issues/447"),
        "WARN",
    ),
    KnownBad(
        "driver {driver}: NCCL was seen to hang with P2P under 560, and no longer under 570",
        lambda pairs: pairs.over_nccl and _between(version_of(pairs.driver), "560", "561"),
        "install driver 570 or newer; until then export NCCL_P2P_DISABLE=1",
        ("https://github.com/dmlc/xgboost/issues/11242",),
        "WARN",
    ),
    KnownBad(
        "NCCL {nccl} on desktop Blackwell: every collective fails (its kernels need more shared memory than it has)",
        lambda pairs: _blackwell_desktop(pairs) and _between(version_of(pairs.nccl), None, "2.26.2"),
        NEWER_TORCH,
        ("https://github.com/NVIDIA/nccl-tests/issues/287", "https://github.com/NVIDIA/nccl/issues/1637"),
    ),
    KnownBad(
        "NCCL {nccl} on desktop Blackwell: collectives of 512 KiB and more were seen to crash without P2P",
        lambda pairs: _blackwell_desktop(pairs) and _between(version_of(pairs.nccl), "2.26.2", "2.27.6"),
        NEWER_TORCH + "; 2.31.2 was seen to work",
        ("https://github.com/NVIDIA/nccl/issues/2418", "https://github.com/NVIDIA/nccl/issues/1852"),
        "WARN",
    ),
    KnownBad(
        "NCCL {nccl} on ARM over several nodes: its proxy queue loses slots until all ranks hang, without an error",
        lambda pairs: (
            pairs.over_nccl
            and pairs.nodes > 1
            and pairs.machine in ("aarch64", "arm64")
            and _between(version_of(pairs.nccl), None, "2.29.3")
        ),
        NEWER_TORCH + ", 2.29.3 at least",
        (
            "https://github.com/marin-community/marin/issues/7344",
            "https://github.com/marin-community/marin/pull/8038",
        ),
    ),
    KnownBad(
        "NCCL {nccl} hangs: a regression of 2.29.2, fixed in 2.29.3",
        lambda pairs: pairs.over_nccl and _between(version_of(pairs.nccl), "2.29.2", "2.29.3"),
        NEWER_TORCH + ", 2.29.3 at least",
        ("https://github.com/pytorch/pytorch/pull/174338",),
    ),
    KnownBad(
        "DeepSpeed {deepspeed} computes wrong gradients under ZeRO-2 (0.17.6 to 0.18.2)",
        lambda pairs: pairs.layout.startswith("zero2") and _between(pairs.version("deepspeed"), "0.17.6", "0.18.3"),
        "install deepspeed 0.18.3 or newer (make setup), or take STRATEGY=zero3",
        ("https://github.com/deepspeedai/DeepSpeed/issues/7718", "https://github.com/huggingface/trl/issues/4540"),
    ),
    KnownBad(
        "Linux {kernel}: accelerate was seen to hang over shared memory under kernels before 5.5",
        lambda pairs: pairs.ranks > 1 and _between(version_of(pairs.kernel), None, "5.5"),
        "upgrade the kernel to 5.5 or newer; if your distribution has fixed its older one, see the all-reduce below",
        ("https://github.com/huggingface/accelerate/issues/1929",),
        "WARN",
    ),
)


def find_known_bad(pairs: Pairs) -> list[Finding]:
    """A finding for each entry that applies; a single PASS if none does."""
    words = {
        **{name: pairs.versions.get(name, "?") for name in ("torch", "deepspeed", "bitsandbytes")},
        "driver": pairs.driver or "?",
        "driver_cuda": ".".join(map(str, pairs.driver_cuda or ())) or "?",
        "torch_cuda": pairs.torch_cuda or "?",
        "torch_build": f"ROCm {pairs.torch_hip}" if pairs.torch_hip else f"CUDA {pairs.torch_cuda or '?'}",
        "nccl": pairs.nccl or "?",
        "kernel": pairs.kernel,
    }
    findings = [
        Finding(NAME, entry.verdict, entry.what.format(**words), entry.remedy, entry.sources)
        for entry in TABLE
        if entry.applies(pairs)
    ]
    return findings or [passed(NAME, f"none of {len(TABLE)} applies")]
