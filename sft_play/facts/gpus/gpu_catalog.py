"""GPUs by name: usable memory, bandwidth, dense matrix rates, links, compute capability, power; each with its source.

Memory. `driver_bytes` is what `nvidia-smi` prints as total; `memory_bytes` is what torch reports
(`torch.cuda.get_device_properties(0).total_memory`, the "total capacity" of its out-of-memory message): the driver
keeps the difference. Where no torch figure was seen, `memory_bytes` is `driver_bytes` less `reserve_bytes`, and
`memory_kind` says so; where no `nvidia-smi` figure was seen either, `driver_bytes` is the size on the box.

Rates are peaks without structured sparsity (data sheets of Ada and Hopper quote twice as much), of the matrix units
with 32-bit accumulation, which is what training uses: on GeForce cards since Turing half of what the units do with
16-bit accumulation. A rate is a data sheet's figure, or multiprocessors x boost clock x operations per clock of the
family (`FAMILIES`), which gives the published figures to within 1% wherever there are both.

Links are bytes per second and GPU in one direction (data sheets of NVLink quote both directions together). `nvlink`
is what joins all GPUs of a machine as it is sold (SXM and OAM boards); bridges between two cards are an extra that a
user has to name (`link=`). `pcie` is lanes x rate before encoding.

A GPU of which no source was seen is not here: `HARDWARE="2xMyGPU,mem=24GiB,bandwidth=1000GBs,bf16=165TFLOPS"`.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from dataclasses import dataclass

from sft_play.units import GIB, MIB

BF16_CAPABILITY = (8, 0)
"""CUDA compute capability from which bfloat16 matrix units exist (CUDA C++ Programming Guide, table of
arithmetic by compute capability)."""
AMD_BF16 = re.compile(r"gfx(908|90a|94[0-2]|95\d|11\d\d|12\d\d)")
"""AMD's architectures with bfloat16 matrix units: CDNA 1 to 4, RDNA 3 and 4 (ROCm documentation, "Data types and
precision support")."""


@dataclass(frozen=True)
class Family:
    """A generation's matrix units: dense operations per multiprocessor and clock, 32-bit accumulation.

    `fp16` is 0 where half precision is not faster than nothing (Pascal's consumer chips); `fp8` is twice `fp16` where
    the units have it. `fp32` counts the ordinary units (no TF32).
    """

    capability: tuple[int, int]
    fp16: int
    bf16: bool
    fp8: bool
    fp32: int
    source: str


_GA102 = "NVIDIA GA102 whitepaper, appendix: RTX 3090 71, RTX A6000 154.8, A40 149.7 TFLOPS with FP32 accumulate"
_ADA = "NVIDIA Ada whitepaper 2.1, appendix A: RTX 4090 165.2 (FP16/BF16) and 330.3 (FP8) TFLOPS with FP32 accumulate"
_RDNA = "operations per unit and clock: reddit.com/r/hardware/comments/1j97xyw"
_TURING = "developer.nvidia.com/blog/nvidia-turing-architecture-in-depth: RTX 2080 Ti 53.8, Titan RTX 130.5 TFLOPS"
_LIT = "github.com/Lightning-AI/pytorch-lightning@7f0c343 src/lightning/fabric/utilities/throughput.py"
_AIC = "github.com/ai-dynamo/aiconfigurator@095f58a aic-core/src/aiconfigurator_core/systems"

FAMILIES: dict[str, Family] = {
    "gp100": Family((6, 0), 256, False, False, 128, "Tesla P100: 21.2 TFLOPS, table of developer.nvidia.com/blog"),
    "gp102": Family((6, 1), 0, False, False, 256, "GTX 1080 Ti: 11.3 TFLOPS FP32, the same table"),
    "volta": Family((7, 0), 1024, False, False, 128, f"V100 SXM2: 125 TFLOPS, {_LIT}"),
    "turing": Family((7, 5), 1024, False, False, 128, _TURING),
    "turing_geforce": Family((7, 5), 512, False, False, 128, _TURING),
    "turing_gtx": Family((7, 5), 256, False, False, 128, "no matrix units: twice the FP32 rate"),
    "ga100": Family((8, 0), 2048, True, False, 128, f"A100: 312 TFLOPS, {_LIT}"),
    "ga10x": Family((8, 6), 1024, True, False, 256, _GA102),
    "ga10x_geforce": Family((8, 6), 512, True, False, 256, _GA102),
    "ada": Family((8, 9), 1024, True, True, 256, f"L4: 121 and 242 TFLOPS, {_AIC}/l4.yaml"),
    "ada_geforce": Family((8, 9), 512, True, True, 256, _ADA),
    "hopper": Family((9, 0), 4096, True, True, 256, f"H100 SXM: 989 and 1978 TFLOPS, {_AIC}/h100_sxm.yaml"),
    "gb100": Family((10, 0), 8192, True, True, 256, f"figures of the entries themselves, {_AIC}"),
    "gb110": Family((10, 3), 8192, True, True, 256, f"figures of the entries themselves, {_AIC}"),
    "gb20x": Family((12, 0), 1024, True, True, 256, f"RTX PRO 6000: 467.8 TFLOPS, {_AIC}/rtx_pro_6000_server.yaml"),
    "gb20x_geforce": Family((12, 0), 512, True, True, 256, "as Ada's GeForce cards: half the professional cards'"),
    "cdna2": Family((9, 0), 1024, True, False, 256, "MI250X: 383 TFLOPS FP16, RightNow-GPU-Database data/amd/all.json"),
    "cdna3": Family((9, 4), 2048, True, True, 256, "awesomeagents.ai/hardware/amd-mi325x: 1307.4 and 2614.9 TFLOPS"),
    "rdna3": Family((11, 0), 512, True, False, 256, f"{_RDNA} (RDNA 3: 512 FP16)"),
    "rdna4": Family((12, 0), 1024, True, True, 256, f"{_RDNA} (RDNA 4: 1024 FP16, 2048 FP8)"),
    "cdna4": Family((9, 5), 4096, True, True, 256, "ISSCC 2026 on MI355X: 8192 FP8 operations per unit and clock"),
}


@dataclass(frozen=True)
class CatalogEntry:
    """A GPU: memory in bytes, rates in operations per second, links in bytes per second one way; None: not known."""

    name: str
    vendor: str
    memory_bytes: int
    memory_kind: str
    driver_bytes: int
    box_gb: int
    bandwidth: float
    bf16: float | None
    fp16: float | None
    fp8: float | None
    fp32: float | None
    nvlink: float | None
    pcie: float
    capability: tuple[int, int]
    tdp_watts: int | None
    source: str
    aliases: tuple[str, ...] = ()

    @property
    def link(self) -> float:
        """Bytes per second and GPU, one way, between the GPUs of a machine as sold."""
        return self.nvlink or self.pcie


def reserve_bytes(driver_bytes: int) -> int:
    """What the driver keeps for itself where no figure of the card was seen: 350 MiB and 0.5% of the memory.

    Pairs seen of nvidia-smi's total and torch's (MiB): 8188/7806, 16303/15840, 16376/15944, 23034/22563, 24564/24081,
    46068/45495, 49140/48539: 382, 463, 432, 471, 483, 573, 601 against 391, 432, 432, 465, 473, 580, 596 by this rule.
    Data-centre cards keep less (H200 615, B200 729 against 1069, 1267), A100 with 80 GB more (882 against 760).
    """
    return 350 * MIB + driver_bytes // 200


_RN = "github.com/reox007/RightNow-GPU-Database@77fae38 data/nvidia/all.json (units, clock, bandwidth, power, bus)"
_RN_AMD = "github.com/reox007/RightNow-GPU-Database@77fae38 data/amd/all.json (units, clock, power)"
_RN_RDNA = f"{_RN_AMD}: it counts two units where AMD counts one"
_MODAL = "nvidia-smi: github.com/modal-labs/modal-client/pull/2797"
_SMI = "nvidia-smi: `NAME, TOTAL MiB` of this card, equal in several public repositories (exact search, 2026-11)"
_BOX = "memory: the size on the box"
_TORCH = "torch: total in Ultralytics' `CUDA:0 (NAME, MiB)` or out-of-memory messages of public repositories (2026-11)"
_PEAKS = "torch: total in Hugging Face's PEFT benchmark records"
_PROF = "github.com/citsjtu2020/LLM-Prof hardware_spec.md"
_GB = 1e9
_T = 1e12


def _gpu(
    name: str,
    family: str,
    units: int,
    boost_mhz: int,
    memory: tuple[int, int | None, int | None],
    bandwidth_gb: float,
    watts: int | None,
    pcie: tuple[int, int],
    *sources: str,
    nvlink_gb: float | None = None,
    dense: tuple[float, float | None] | None = None,
    aliases: tuple[str, ...] = (),
    vendor: str = "NVIDIA",
) -> CatalogEntry:
    """An entry; `memory` is GB on the box, nvidia-smi's MiB, torch's MiB; `dense` a data sheet's 16- and 8-bit TFLOPS.

    `units` are streaming multiprocessors (AMD: compute units).
    """
    kind, (box, smi, torch), (generation, lanes) = FAMILIES[family], memory, pcie
    driver = smi * MIB if smi else box * GIB
    clock = units * boost_mhz * 1e6
    half = (dense[0] * _T if dense else clock * kind.fp16) or None
    eighth = dense[1] * _T if dense and dense[1] else clock * kind.fp16 * 2
    return CatalogEntry(
        name,
        vendor,
        memory_bytes=torch * MIB if torch else driver - reserve_bytes(driver),
        memory_kind="torch" if torch else "nvidia-smi less reserve" if smi else "box less reserve",
        driver_bytes=driver,
        box_gb=box,
        bandwidth=bandwidth_gb * _GB,
        bf16=half if kind.bf16 else None,
        fp16=half,
        fp8=eighth if kind.fp8 else None,
        fp32=clock * kind.fp32,
        nvlink=nvlink_gb * _GB if nvlink_gb else None,
        pcie=lanes * 2.0 ** (generation - 3) * _GB,  # 1 GB/s per lane of generation 3, doubling with each
        capability=kind.capability,
        tdp_watts=watts,
        source="; ".join(sources if dense else (*sources, kind.source)),
        aliases=aliases,
    )


_DATA_CENTRE = (
    _gpu("H100", "hopper", 132, 1830, (80, 81_559, 81_080), 3350, 700, (5, 16),
         f"{_AIC}/h100_sxm.yaml", "anandtech.com/show/21136 (clock)", _MODAL, _TORCH, nvlink_gb=450,
         aliases=("H100 SXM", "H100 SXM5", "H100 80GB HBM3", "H100-SXM5-80GB")),
    _gpu("H100-PCIe", "hopper", 114, 1755, (80, 81_559, None), 2000, 350, (5, 16), f"{_AIC}/h100_pcie.yaml", _SMI,
         dense=(756.5, 1513), aliases=("H100",)),
    _gpu("H100-NVL", "hopper", 132, 1785, (94, 95_830, None), 3940, 400, (5, 16), _RN, _LIT, _SMI,
         dense=(835.5, 1670.5), aliases=("H100",)),
    _gpu("H200", "hopper", 132, 1830, (141, 143_771, 143_156), 4800, 700, (5, 16), f"{_AIC}/h200_sxm.yaml",
         "nvidia-smi of an H200, driver 580.159.03, 2026-10-27", _TORCH, nvlink_gb=450,
         aliases=("H200 SXM", "H200 SXM5", "H200 141GB HBM3e")),
    _gpu("H200-NVL", "hopper", 132, 1785, (141, 143_771, None), 4800, 600, (5, 16), _RN, _LIT, _SMI,
         dense=(840, 1680)),
    _gpu("H800", "hopper", 132, 1755, (80, 81_559, None), 3350, 700, (5, 16), _PROF, _RN, _SMI, nvlink_gb=200,
         dense=(989, 1979), aliases=("H800 SXM", "H800 SXM5")),
    _gpu("H20", "hopper", 78, 1830, (96, 97_871, None), 4022, None, (5, 16), _PROF, _SMI, nvlink_gb=450,
         dense=(148, 296), aliases=("H20 SXM",)),
    _gpu("GH200", "hopper", 132, 1830, (96, 97_871, None), 4000, None, (5, 16), _SMI,
         "NVIDIA's GH200 data sheet as kept in github.com/atineoSE/coding-model-seeks-gpu "
         "pipeline/pipeline/sources/gh200_specs.md (its power counts the CPU too)",
         dense=(990, 1979), aliases=("GH200 480GB", "GH200 120GB")),
    _gpu("B200", "gb100", 148, 1965, (180, 183_359, 182_630), 7700, 1000, (6, 16), f"{_AIC}/b200_sxm.yaml", _SMI,
         _TORCH, nvlink_gb=900, dense=(2250, 4500), aliases=("B200 SXM",)),
    _gpu("GB200", "gb100", 148, 1965, (186, 189_471, None), 8000, 1200, (5, 16), f"{_AIC}/gb200.yaml", nvlink_gb=900,
         dense=(2500, 5000)),
    _gpu("B300", "gb110", 148, 2032, (288, 275_040, None), 7750, 1100, (6, 16), f"{_AIC}/b300_sxm.yaml",
         nvlink_gb=900, dense=(2250, 4500), aliases=("B300 SXM", "B300 SXM6 AC")),
    _gpu("GB300", "gb110", 148, 2032, (288, 284_208, None), 8000, 1400, (5, 16), f"{_AIC}/gb300.yaml", nvlink_gb=900,
         dense=(2500, 5000)),
    _gpu("A100-80GB", "ga100", 108, 1410, (80, 81_920, 81_038), 2039, 400, (4, 16), f"{_AIC}/a100_sxm.yaml", _MODAL,
         _TORCH, nvlink_gb=300, dense=(312, None),
         aliases=("A100", "A100 SXM", "A100 SXM4", "A100-SXM4-80GB", "A100-SXM-80GB")),
    _gpu("A100-40GB", "ga100", 108, 1410, (40, 40_960, 40_442), 1555, 400, (4, 16), _LIT, _PEAKS, _MODAL, _RN,
         nvlink_gb=300, dense=(312, None), aliases=("A100", "A100 SXM", "A100 SXM4", "A100-SXM4-40GB")),
    _gpu("A100-80GB-PCIe", "ga100", 108, 1410, (80, 81_920, 81_154), 1935, 300, (4, 16), f"{_AIC}/a100_pcie.yaml",
         _MODAL, _TORCH, dense=(312, None), aliases=("A100 PCIe", "A100 80GB PCIe", "A100-PCIE-80GB", "A100")),
    _gpu("A100-40GB-PCIe", "ga100", 108, 1410, (40, 40_960, None), 1555, 250, (4, 16), _LIT, _MODAL, _RN,
         dense=(312, None), aliases=("A100 PCIe", "A100-PCIE-40GB", "A100 40GB PCIe", "A100")),
    _gpu("A800-80GB", "ga100", 108, 1410, (80, 81_920, None), 2039, 400, (4, 16), _PROF, _RN, _SMI, nvlink_gb=200,
         dense=(312, None), aliases=("A800", "A800 SXM", "A800-SXM4-80GB")),
    _gpu("A800-80GB-PCIe", "ga100", 108, 1410, (80, 81_920, 81_051), 1935, 250, (4, 16), _RN, _TORCH,
         dense=(312, None), aliases=("A800 80GB PCIe", "A800 PCIe", "A800")),
    _gpu("A30", "ga100", 56, 1440, (24, 24_576, None), 933, 165, (4, 16), f"{_AIC}/a30.yaml", _SMI, dense=(165, None)),
    _gpu("A40", "ga10x", 84, 1740, (48, 46_068, None), 696, 300, (4, 16), _LIT, _RN, _SMI, dense=(149.7, None)),
    _gpu("A10", "ga10x", 72, 1695, (24, 23_028, None), 600, 150, (4, 16), _RN, _MODAL, dense=(125, None)),
    _gpu("A10G", "ga10x", 72, 1710, (24, 23_028, 22_716), 600, 150, (4, 16), _LIT, _RN, _SMI, _PEAKS,
         dense=(125, None)),
    _gpu("A16", "ga10x", 10, 1755, (16, 15_356, None), 200, 62, (4, 8), _RN, _SMI,
         "one of the four GPUs of the card, a quarter of its 250 W"),
    _gpu("A2", "ga10x", 10, 1770, (16, 15_356, None), 200, 60, (4, 8), _RN, _SMI),
    _gpu("L40S", "ada", 142, 2520, (48, 46_068, 45_495), 864, 350, (4, 16), f"{_AIC}/l40s.yaml", _MODAL, _TORCH,
         dense=(362.05, 733)),
    _gpu("L40", "ada", 142, 2490, (48, 46_068, None), 864, 300, (4, 16), _LIT, _RN, _SMI, dense=(181, 362)),
    _gpu("L20", "ada", 92, 2520, (48, 46_068, None), 864, 275, (4, 16), _PROF, _RN, _SMI, dense=(119.5, 239)),
    _gpu("L4", "ada", 58, 2040, (24, 23_034, 22_563), 300, 72, (4, 16), f"{_AIC}/l4.yaml", _MODAL, _TORCH,
         dense=(121, 242)),
    _gpu("T4", "turing", 40, 1590, (16, 15_360, 14_912), 320, 70, (3, 16), _LIT, _MODAL, _PEAKS, _RN,
         dense=(65, None)),
    _gpu("V100-16GB", "volta", 80, 1530, (16, 16_384, 16_144), 900, 300, (3, 16), _LIT, _SMI, _TORCH,
         "NVLink: Dell EMC Ready Solutions for AI, deep learning with NVIDIA, page 17", nvlink_gb=150,
         dense=(125, None), aliases=("V100", "V100 SXM2", "V100-SXM2-16GB")),
    _gpu("V100-32GB", "volta", 80, 1530, (32, 32_768, 32_510), 898, 300, (3, 16), _LIT, _SMI, _TORCH,
         "NVLink: Dell EMC Ready Solutions for AI, deep learning with NVIDIA, page 17", nvlink_gb=150,
         dense=(125, None), aliases=("V100", "V100 SXM2", "V100-SXM2-32GB", "V100-SXM3-32GB")),
    _gpu("V100-16GB-PCIe", "volta", 80, 1380, (16, 16_384, None), 897, 250, (3, 16), _LIT, _RN, dense=(112, None),
         aliases=("V100 PCIe", "V100-PCIE-16GB", "V100")),
    _gpu("V100-32GB-PCIe", "volta", 80, 1380, (32, 32_768, None), 897, 250, (3, 16), _LIT, _RN, dense=(112, None),
         aliases=("V100 PCIe", "V100-PCIE-32GB", "V100")),
    _gpu("P100-16GB", "gp100", 56, 1329, (16, 16_384, 16_269), 732, 250, (3, 16), _RN, _SMI, _TORCH,
         aliases=("P100", "P100 PCIe", "P100-PCIE-16GB")),
    _gpu("P100-SXM2", "gp100", 56, 1480, (16, None, None), 732, 300, (3, 16), _RN, _BOX,
         "NVLink: Dell EMC Ready Solutions for AI, deep learning with NVIDIA, page 17", nvlink_gb=80,
         aliases=("P100", "P100-SXM2-16GB")),
)  # fmt: skip

_GEFORCE = (
    _gpu("RTX 5090", "gb20x_geforce", 170, 2407, (32, 32_607, 32_102), 1792, 575, (5, 16), _RN,
         "nvidia-smi: github.com/noonghunna/club-3090/issues/1261", _TORCH),
    _gpu("RTX 5080", "gb20x_geforce", 84, 2617, (16, 16_303, 15_840), 960, 360, (5, 16), _RN, _SMI, _TORCH),
    _gpu("RTX 5070 Ti", "gb20x_geforce", 70, 2452, (16, 16_303, None), 896, 300, (5, 16), _RN, _SMI),
    _gpu("RTX 5070", "gb20x_geforce", 48, 2512, (12, 12_227, None), 672, 250, (5, 16), _RN,
         "nvidia-smi: github.com/shkhln/libc6-shim/issues/14"),
    _gpu("RTX 5060 Ti 16GB", "gb20x_geforce", 36, 2572, (16, 16_311, 15_848), 448, 180, (5, 8), _RN, _SMI, _TORCH,
         aliases=("RTX 5060 Ti",)),
    _gpu("RTX 5060 Ti 8GB", "gb20x_geforce", 36, 2572, (8, 8_151, None), 448, 180, (5, 8), _RN, _SMI,
         aliases=("RTX 5060 Ti",)),
    _gpu("RTX 5060", "gb20x_geforce", 30, 2497, (8, 8_151, None), 448, 145, (5, 8), _RN, _SMI),
    _gpu("RTX 4090", "ada_geforce", 128, 2520, (24, 24_564, 24_081), 1008, 450, (4, 16), _RN,
         "nvidia-smi: github.com/RLinf/RLinf/issues/255", _TORCH),
    _gpu("RTX 4080 SUPER", "ada_geforce", 80, 2550, (16, 16_376, 15_944), 736.3, 320, (4, 16), _RN, _SMI, _TORCH,
         aliases=("RTX 4080S",)),
    _gpu("RTX 4080", "ada_geforce", 76, 2505, (16, 16_376, None), 716.8, 320, (4, 16), _RN, _SMI),
    _gpu("RTX 4070 Ti SUPER", "ada_geforce", 66, 2610, (16, 16_376, None), 672.3, 285, (4, 16), _RN, _SMI,
         aliases=("RTX 4070 TiS",)),
    _gpu("RTX 4070 Ti", "ada_geforce", 60, 2610, (12, 12_282, None), 504.2, 285, (4, 16), _RN, _SMI),
    _gpu("RTX 4070 SUPER", "ada_geforce", 56, 2475, (12, 12_282, None), 504.2, 220, (4, 16), _RN, _SMI,
         aliases=("RTX 4070S",)),
    _gpu("RTX 4070", "ada_geforce", 46, 2475, (12, 12_282, None), 504.2, 200, (4, 16), _RN, _SMI),
    _gpu("RTX 4060 Ti 8GB", "ada_geforce", 34, 2535, (8, 8_188, 7_806), 288, 160, (4, 8), _RN, _SMI, _TORCH,
         aliases=("RTX 4060 Ti",)),
    _gpu("RTX 4060 Ti 16GB", "ada_geforce", 34, 2535, (16, 16_380, None), 288, 165, (4, 8), _RN, _SMI,
         aliases=("RTX 4060 Ti",)),
    _gpu("RTX 4060", "ada_geforce", 24, 2460, (8, 8_188, None), 272, 115, (4, 8), _RN, _SMI),
    _gpu("RTX 3090 Ti", "ga10x_geforce", 84, 1860, (24, 24_564, None), 1008, 450, (4, 16), _RN, _SMI),
    _gpu("RTX 3090", "ga10x_geforce", 82, 1695, (24, 24_576, 24_124), 936.2, 350, (4, 16), _RN,
         "nvidia-smi: github.com/noonghunna/club-3090/issues/1128", _TORCH),
    _gpu("RTX 3080 Ti", "ga10x_geforce", 80, 1665, (12, 12_288, None), 912.4, 350, (4, 16), _RN, _SMI),
    _gpu("RTX 3080", "ga10x_geforce", 68, 1710, (10, 10_240, None), 760.3, 320, (4, 16), _RN, _SMI,
         aliases=("RTX 3080 10GB",)),
    _gpu("RTX 3080 12GB", "ga10x_geforce", 70, 1710, (12, None, None), 912.4, 350, (4, 16), _RN, _BOX,
         aliases=("RTX 3080",)),
    _gpu("RTX 3070 Ti", "ga10x_geforce", 48, 1770, (8, 8_192, None), 608.3, 290, (4, 16), _RN, _SMI),
    _gpu("RTX 3070", "ga10x_geforce", 46, 1725, (8, 8_192, None), 448, 220, (4, 16), _RN, _SMI),
    _gpu("RTX 3060 Ti", "ga10x_geforce", 38, 1665, (8, 8_192, None), 448, 200, (4, 16), _RN, _SMI),
    _gpu("RTX 3060", "ga10x_geforce", 28, 1777, (12, 12_288, None), 360, 170, (4, 16), _RN,
         "nvidia-smi: github.com/geerlingguy/raspberry-pi-pcie-devices/issues/790", aliases=("RTX 3060 12GB",)),
    _gpu("RTX 3060 8GB", "ga10x_geforce", 28, 1777, (8, None, None), 240, 170, (4, 16), _RN, _BOX,
         aliases=("RTX 3060",)),
    _gpu("RTX 3050", "ga10x_geforce", 20, 1777, (8, None, None), 224, 130, (4, 8), _RN, _BOX,
         aliases=("RTX 3050 8GB",)),
    _gpu("RTX 2080 Ti", "turing_geforce", 68, 1545, (11, 11_264, 11_012), 616, 250, (3, 16), _RN, _SMI, _TORCH),
    _gpu("RTX 2080 SUPER", "turing_geforce", 48, 1815, (8, None, None), 495.9, 250, (3, 16), _RN, _BOX,
         aliases=("RTX 2080S",)),
    _gpu("RTX 2080", "turing_geforce", 46, 1710, (8, 8_192, None), 448, 215, (3, 16), _RN, _SMI),
    _gpu("RTX 2070 SUPER", "turing_geforce", 40, 1770, (8, None, None), 448, 215, (3, 16), _RN, _BOX,
         aliases=("RTX 2070S",)),
    _gpu("RTX 2070", "turing_geforce", 36, 1620, (8, 8_192, None), 448, 175, (3, 16), _RN, _SMI),
    _gpu("RTX 2060 SUPER", "turing_geforce", 34, 1650, (8, None, None), 448, 175, (3, 16), _RN, _BOX,
         aliases=("RTX 2060S",)),
    _gpu("RTX 2060", "turing_geforce", 30, 1680, (6, 6_144, None), 336, 160, (3, 16), _RN, _SMI,
         aliases=("RTX 2060 6GB",)),
    _gpu("RTX 2060 12GB", "turing_geforce", 34, 1650, (12, None, None), 336, 184, (3, 16), _RN, _BOX,
         aliases=("RTX 2060",)),
    _gpu("TITAN RTX", "turing", 72, 1770, (24, 24_576, None), 672, 280, (3, 16), _RN, _SMI),
    _gpu("GTX 1660 Ti", "turing_gtx", 24, 1770, (6, 6_144, None), 288, 120, (3, 16), _RN, _SMI),
    _gpu("GTX 1080 Ti", "gp102", 28, 1582, (11, 11_264, None), 484.4, 250, (3, 16), _RN, _SMI),
)  # fmt: skip

_WORKSTATION = (
    _gpu("RTX 6000 Ada", "ada", 142, 2505, (48, 49_140, 48_539), 960, 300, (4, 16), _RN, _SMI, _TORCH,
         aliases=("RTX 6000",)),
    _gpu("RTX 5880 Ada", "ada", 110, 2460, (48, None, None), 864, 285, (4, 16), _RN, _BOX, aliases=("RTX 5880",)),
    _gpu("RTX 5000 Ada", "ada", 100, 2550, (32, 32_760, None), 576, 250, (4, 16), _RN, _SMI, aliases=("RTX 5000",)),
    _gpu("RTX 4500 Ada", "ada", 60, 2580, (24, 24_570, None), 432, 210, (4, 16), _RN, _SMI, aliases=("RTX 4500",)),
    _gpu("RTX 4000 Ada", "ada", 48, 2175, (20, 20_475, 20_010), 360, 130, (4, 16), _RN, _SMI, _TORCH,
         aliases=("RTX 4000",)),
    _gpu("RTX 2000 Ada", "ada", 22, 2130, (16, 16_380, None), 256, 70, (4, 8), _RN, _SMI, aliases=("RTX 2000",)),
    _gpu("RTX PRO 6000", "gb20x", 188, 2430, (96, 97_887, 97_249), 1792, 600, (5, 16),
         f"{_AIC}/rtx_pro_6000_server.yaml", _SMI, _TORCH,
         aliases=("RTX PRO 6000 Blackwell", "RTX PRO 6000 Blackwell Server Edition",
                  "RTX PRO 6000 Blackwell Workstation Edition", "RTX 6000")),
    _gpu("RTX PRO 5000", "gb20x", 110, 2377, (48, 48_935, None), 1344, 300, (5, 16), _RN, _SMI,
         aliases=("RTX PRO 5000 Blackwell", "RTX 5000")),
    _gpu("RTX PRO 4500", "gb20x", 82, 2407, (32, 32_623, None), 896, 200, (5, 16), _RN, _SMI,
         aliases=("RTX PRO 4500 Blackwell", "RTX 4500")),
    _gpu("RTX PRO 4000", "gb20x", 70, 2055, (24, 24_467, None), 672, 140, (5, 16), _RN, _SMI,
         aliases=("RTX PRO 4000 Blackwell", "RTX 4000")),
    _gpu("RTX A6000", "ga10x", 84, 1800, (48, 49_140, None), 768, 300, (4, 16), _RN, _SMI),
    _gpu("RTX A5500", "ga10x", 80, 1665, (24, None, None), 768, 230, (4, 16), _RN, _BOX),
    _gpu("RTX A5000", "ga10x", 64, 1695, (24, 24_564, None), 768, 230, (4, 16), _RN, _SMI),
    _gpu("RTX A4500", "ga10x", 56, 1650, (20, 20_470, None), 640, 200, (4, 16), _RN, _SMI),
    _gpu("RTX A4000", "ga10x", 48, 1560, (16, 16_376, None), 448, 140, (4, 16), _RN, _SMI),
    _gpu("RTX A2000 12GB", "ga10x", 26, 1200, (12, 12_282, 12_017), 288, 70, (4, 16), _RN, _SMI, _TORCH,
         aliases=("RTX A2000",)),
    _gpu("RTX A2000 6GB", "ga10x", 26, 1200, (6, None, None), 288, 70, (4, 16), _RN, _BOX, aliases=("RTX A2000",)),
    _gpu("Quadro RTX 8000", "turing", 72, 1770, (48, None, None), 672, 260, (3, 16), _RN, _BOX,
         aliases=("RTX 8000",)),
    _gpu("Quadro RTX 6000", "turing", 72, 1770, (24, 24_576, None), 672, 260, (3, 16), _RN, _SMI,
         aliases=("RTX 6000",)),
    _gpu("Quadro RTX 5000", "turing", 48, 1815, (16, None, None), 448, 230, (3, 16), _LIT, _RN, _BOX,
         aliases=("RTX 5000",)),
)  # fmt: skip

_AMD = (
    _gpu("MI350X", "cdna4", 256, 2200, (288, None, None), 8000, 1000, (5, 16), _RN_AMD, _BOX,
         "the memory of the MI355X", vendor="AMD"),
    _gpu("MI355X", "cdna4", 256, 2400, (288, None, None), 8000, 1400, (5, 16), _RN_AMD, _BOX,
         "tomshardware.com: amds-instinct-mi355x-accelerator-will-consume-1-400-watts (bandwidth)", vendor="AMD"),
    _gpu("MI325X", "cdna3", 304, 2100, (256, None, None), 6000, 1000, (5, 16), _RN_AMD, _BOX, nvlink_gb=448,
         vendor="AMD"),
    _gpu("MI300X", "cdna3", 304, 2100, (192, None, 196_290), 5300, 750, (5, 16), _RN_AMD, _TORCH,
         "yobitel.com/knowledge-base/amd-mi325x (bandwidth); wheelersnetwork.com/2024/01: seven links of 128 GB/s",
         nvlink_gb=448, vendor="AMD"),
    _gpu("MI250X", "cdna2", 110, 1700, (64, None, None), 1638, 250, (4, 16), _RN_AMD, _BOX,
         "one of the two dies of the card, as torch counts them", vendor="AMD"),
    _gpu("MI250", "cdna2", 104, 1700, (64, None, None), 1638, 250, (4, 16), _RN_AMD, _BOX,
         "one of the two dies of the card, as torch counts them", vendor="AMD"),
    _gpu("MI210", "cdna2", 104, 1700, (64, None, None), 1638, 300, (4, 16), _RN_AMD, _BOX, vendor="AMD"),
    _gpu("RX 7900 XTX", "rdna3", 96, 2498, (24, None, None), 960, 355, (4, 16), _RN_RDNA, _BOX, vendor="AMD",
         aliases=("7900 XTX",)),
    _gpu("RX 7900 XT", "rdna3", 84, 2394, (20, None, None), 800, 300, (4, 16), _RN_RDNA, _BOX, vendor="AMD",
         aliases=("7900 XT",)),
    _gpu("PRO W7900", "rdna3", 96, 2495, (48, None, None), 864, 295, (4, 16), _RN_RDNA, _BOX, vendor="AMD",
         aliases=("W7900",)),
    _gpu("RX 9070 XT", "rdna4", 64, 2970, (16, None, None), 640, 304, (5, 16), _RN_RDNA, _BOX, vendor="AMD",
         aliases=("9070 XT",)),
    _gpu("AI PRO R9700", "rdna4", 64, 2920, (32, None, None), 640, 300, (5, 16), _RN_RDNA, _BOX, vendor="AMD",
         aliases=("R9700",)),
)  # fmt: skip

ENTRIES: tuple[CatalogEntry, ...] = (*_DATA_CENTRE, *_GEFORCE, *_WORKSTATION, *_AMD)
"""All entries; of those that share an alias, the first is what the alias alone means."""

_NOISE = re.compile(r"nvidia|geforce|tesla|amd|instinct|radeon|generation|graphics|[^a-z0-9]")


def key_of(name: str) -> str:
    """A name in lower case without separators, maker and series: `NVIDIA GeForce RTX 4090` is `rtx4090`."""
    return _NOISE.sub("", name.lower())


CATALOG: dict[str, CatalogEntry] = {key_of(entry.name): entry for entry in ENTRIES}
"""By the catalogue's own name: `a10080gb`, `rtx4090`."""


def _short(key: str) -> str:
    """`4090` for `rtx4090`: how people write it."""
    return key.removeprefix("rtx").removeprefix("gtx") if key.startswith(("rtx", "gtx")) else key


_BY_KEY: dict[str, list[CatalogEntry]] = {}
for _entry in ENTRIES:
    for _key in {form for name in (_entry.name, *_entry.aliases) for form in (key_of(name), _short(key_of(name)))}:
        _BY_KEY.setdefault(_key, []).append(_entry)
_OTHER_CLOCKS = ("laptop", "mobile", "maxq")
_SUGGESTED = ("L4", "A100-40GB", "L40S", "H100", "H200", "B200", "B300")


def find(name: str, driver_bytes: int | None = None) -> tuple[CatalogEntry, ...]:
    """The entries that a name can mean, the most likely first; empty if none.

    A trailing size chooses among them (`RTX 3060 12GB`, `H100-80GB`); so does `driver_bytes`, the total of a GPU that
    was found, which leaves at most one. Laptop GPUs, whose clocks and power are others', match nothing.
    """
    key = key_of(name)
    if any(word in key for word in _OTHER_CLOCKS):
        return ()
    entries = _BY_KEY.get(key, [])
    if not entries:  # a key that ends with the size on the box: `h10080gb`, `h10080g`, `h10080`
        sized = ([one for one in _BY_KEY.get(base, []) if one.box_gb == size] for base, size in _with_size(key))
        entries = next(filter(None, sized), [])
    exact = CATALOG.get(key) or CATALOG.get(f"rtx{key}")
    if exact:
        entries = [exact, *(entry for entry in entries if entry is not exact)]
    if driver_bytes is None or not entries:
        return tuple(entries)
    return (min(entries, key=lambda entry: abs(entry.driver_bytes - driver_bytes)),)


def _with_size(key: str) -> Iterator[tuple[str, int]]:
    """The ways to read a key as a name and a size: `h10080gb` is h100 with 80 (h1 with 0080 is not one)."""
    stem = key.removesuffix("b").removesuffix("g")
    for digits in (1, 2, 3):
        base, size = stem[:-digits], stem[-digits:]
        if base and size.isdigit() and size[0] != "0":
            yield base, int(size)


def amd_entry(name: str) -> CatalogEntry | None:
    """The entry of a detected AMD GPU: for `AMD Instinct MI300X OAM` that of the MI300X."""
    match = re.search(r"\b(MI\d{3}[A-Z]?|RX \d{4}(?: XTX| XT| GRE)?|W\d{4}|R9\d{3})\b", name)
    entries = find(match[1]) if match else ()
    return entries[0] if entries and entries[0].vendor == "AMD" else None


def gpus_by_memory() -> list[CatalogEntry]:
    """The GPUs that a plan suggests in place of the present ones: usual data-centre ones, the smallest first."""
    return sorted((CATALOG[key_of(name)] for name in _SUGGESTED), key=lambda entry: entry.memory_bytes)


def nearest(name: str) -> list[str]:
    """Catalogue names similar to `name`; the most usual ones if none is."""
    wanted = key_of(name)
    sizes = [entry.name for base, _ in _with_size(wanted) for entry in _BY_KEY.get(base, [])]
    if sizes:
        return list(dict.fromkeys(sizes))[:4]
    forms = {form: entry.name for entry in ENTRIES for form in (_short(key_of(entry.name)), key_of(entry.name))}
    close = difflib.get_close_matches(wanted, list(forms), n=12, cutoff=0.5)
    close.sort(key=lambda form: (-difflib.SequenceMatcher(None, form, wanted).ratio(), _steps(wanted, form)))
    return list(dict.fromkeys(forms[form] for form in close))[:4] or [*_SUGGESTED, "RTX 4090", "RTX 3090"]


def _steps(wanted: str, form: str) -> int:
    """How far apart the characters are: H200 is nearer to H300 than H100 is."""
    return sum(abs(ord(one) - ord(other)) for one, other in zip(wanted, form, strict=False))
