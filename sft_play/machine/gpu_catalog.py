"""GPUs by name: usable memory, bandwidth, dense matrix rates, links, compute capability, power;
each with its source.

At the end what clouds ask for an hour of them. Memory: `driver_bytes` is what `nvidia-smi` prints
as total, `memory_bytes` what torch reports (`torch.cuda.get_device_properties(0).total_memory`):
the driver keeps the difference. Where no torch figure was seen, it is `driver_bytes` less
`driver_reserve_bytes`, and `memory_kind` says so; where no `nvidia-smi` figure was seen either,
`driver_bytes` is the size on the box.

Rates are peaks without structured sparsity, of the matrix units with 32-bit accumulation, which
is what training uses: a data sheet's, or multiprocessors x boost clock x operations per clock of
the family (`GPU_GENERATIONS`), which gives the published figures to within 1% wherever there are
both. Links are bytes per second and GPU in one direction; `nvlink` is what joins all GPUs of a
machine as it is sold, bridges between two cards are an extra that a user has to name (`link=`);
`pcie` is lanes x rate before encoding.

The figures are in `gpu_catalog.json`. A GPU without a seen source is not there:
`HARDWARE="2xMyGPU,mem=24GiB,bandwidth=1000GBs,bf16=165TFLOPS"`.
"""

import difflib
import functools
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

from sft_play.text import GIB, MIB

# CUDA compute capability from which bfloat16 matrix units exist (CUDA C++ Programming Guide, table
# of arithmetic by compute capability).
BF16_CAPABILITY = (8, 0)


@dataclass(frozen=True)
class CatalogEntry:
    """A GPU: memory in bytes, rates in operations per second, links in bytes per second one way;
    None: not known."""

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
    # Whether its memory is the host's.
    unified: bool = False

    @property
    def link(self) -> float:
        """Bytes per second and GPU, one way, between the GPUs of a machine as sold."""
        return self.nvlink or self.pcie


def driver_reserve_bytes(driver_bytes: int) -> int:
    """What the driver keeps for itself where no figure of the card was seen: 350 MiB and 0.5% of
    the memory. Pairs seen of nvidia-smi's total and torch's (MiB): 8188/7806, 16303/15840,
    16376/15944, 23034/22563, 24564/24081, 46068/45495, 49140/48539: 382, 463, 432, 471, 483, 573,
    601 against 391, 432, 432, 465, 473, 580, 596 by this rule. Data-centre cards keep less (H200
    615, B200 729 against 1069, 1267), A100 with 80 GB more (882 against 760).
    """
    return 350 * MIB + driver_bytes // 200


def _parse_entry(row: Mapping[str, Any], sources: Mapping[str, str]) -> CatalogEntry:
    """An entry of a line of the file, which has `memory`: GB on the box, nvidia-smi's MiB, torch's
    MiB; `dense`: a data sheet's 16- and 8-bit TFLOPS; `units`: streaming multiprocessors (AMD:
    compute units); `pcie`: generation, lanes.
    """
    generation = GPU_GENERATIONS[row["family"]]
    box_gb, smi_mib, torch_mib = row["memory"]
    driver_bytes = (smi_mib or 0) * MIB or box_gb * GIB
    kinds = (
        ("torch", torch_mib),
        ("nvidia-smi less reserve", smi_mib),
        ("box less reserve", box_gb),
    )
    unit_cycles_per_s = row["units"] * row["boost_mhz"] * 1e6
    dense_fp16, dense_fp8 = row.get("dense") or (0, 0)
    fp16_flops = dense_fp16 * 1e12 or unit_cycles_per_s * generation["fp16"] or None
    fp8_flops = (dense_fp8 or 0) * 1e12 or unit_cycles_per_s * generation["fp16"] * 2
    pcie_generation, pcie_lanes = row["pcie"]
    citations = []
    for text in row["sources"]:
        name, slash, file = text.partition("/")  # some begin with the short name of a repository
        citations.append(f"{sources.get(name, name)}{slash}{file}")
    if not dense_fp16:
        citations.append(generation["source"])
    return CatalogEntry(
        row["name"],
        row.get("vendor", "NVIDIA"),
        memory_bytes=(torch_mib or 0) * MIB or driver_bytes - driver_reserve_bytes(driver_bytes),
        memory_kind=next(kind for kind, known in kinds if known),
        driver_bytes=driver_bytes,
        box_gb=box_gb,
        bandwidth=row["bandwidth_gb"] * 1e9,
        bf16=fp16_flops if generation["bf16"] else None,
        fp16=fp16_flops,
        fp8=fp8_flops if generation["fp8"] else None,
        fp32=unit_cycles_per_s * generation["fp32"],
        nvlink=row.get("nvlink_gb", 0) * 1e9 or None,
        pcie=pcie_lanes
        * 2.0 ** (pcie_generation - 3)
        * 1e9,  # 1 GB/s per lane of generation 3, doubling with each
        capability=tuple(generation["capability"]),
        tdp_watts=row["watts"],
        source="; ".join(citations),
        aliases=tuple(row.get("aliases", ())),
        unified=row.get("unified", False),
    )


_CATALOG_DATA = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
# A generation's matrix units: dense operations per multiprocessor and clock, 32-bit accumulation.
# `fp16` is 0 where half precision is not faster than nothing (Pascal's consumer chips); `fp8` is
# twice `fp16` where the units have it. `fp32` counts the ordinary units (no TF32).
GPU_GENERATIONS: dict[str, dict[str, Any]] = _CATALOG_DATA["families"]
# All entries; of those that share an alias, the first is what the alias alone means.
CATALOG_ENTRIES: tuple[CatalogEntry, ...] = tuple(
    _parse_entry(row, _CATALOG_DATA["sources"]) for row in _CATALOG_DATA["gpus"]
)

_MAKER_WORDS = re.compile(r"nvidia|geforce|tesla|amd|instinct|radeon|generation|graphics|[^a-z0-9]")
_LAPTOP = re.compile(r"(laptop|mobile|notebook)(gpu)?")
_MAX_Q = re.compile(r"(with)?maxq(design)?")


def catalog_key(name: str) -> str:
    """A name in lower case without separators, maker and series: `NVIDIA GeForce RTX 4090` is
    `rtx4090`, and `RTX 3060 mobile` is `laptoprtx3060`."""
    key = _MAX_Q.sub("maxq", _MAKER_WORDS.sub("", name.lower()))
    desktop_key, count = _LAPTOP.subn("", key)
    return f"laptop{desktop_key}" if count else key


# By the catalogue's own name: `a10080gb`, `rtx4090`.
CATALOG_BY_KEY: dict[str, CatalogEntry] = {
    catalog_key(entry.name): entry for entry in CATALOG_ENTRIES
}


def _short_key(key: str) -> str:
    return re.sub(r"^(laptop)?[rg]tx", r"\1", key)


_ENTRIES_BY_KEY: dict[str, list[CatalogEntry]] = {}

for _entry in CATALOG_ENTRIES:
    for _key in {
        form
        for name in (_entry.name, *_entry.aliases)
        for form in (catalog_key(name), _short_key(catalog_key(name)))
    }:
        _ENTRIES_BY_KEY.setdefault(_key, []).append(_entry)


def find_catalog_entries(name: str, driver_bytes: int | None = None) -> tuple[CatalogEntry, ...]:
    """The entries that a name can mean, the most likely first; a trailing size chooses among them
    (`H100-80GB`), and so does `driver_bytes`, the total of a GPU that was found. A laptop's GPU is
    never the desktop's of the same number.
    """
    key = catalog_key(name)
    # 3060m
    entries = _ENTRIES_BY_KEY.get(key) or (
        _ENTRIES_BY_KEY.get(f"laptop{key[:-1]}", []) if key.endswith("m") else []
    )
    if not entries:  # a key that ends with the size on the box: `h10080gb`, `h10080g`, `h10080`
        sized_entries = (
            [one for one in _ENTRIES_BY_KEY.get(base, []) if one.box_gb == size]
            for base, size in _split_size(key)
        )
        entries = next(filter(None, sized_entries), [])
    entries = sorted(
        entries,
        key=lambda entry: key not in (catalog_key(entry.name), _short_key(catalog_key(entry.name))),
    )
    if driver_bytes is None or not entries:
        return tuple(entries)
    return (min(entries, key=lambda entry: abs(entry.driver_bytes - driver_bytes)),)


def _split_size(key: str) -> Iterator[tuple[str, int]]:
    """The ways to read a key as a name and a size: `h10080gb` is h100 with 80 (h1 with 0080 is not
    one)."""
    stem = key.removesuffix("b").removesuffix("g")
    for digits in (1, 2, 3):
        base, size = stem[:-digits], stem[-digits:]
        if base and size.isdigit() and size[0] != "0":
            yield base, int(size)


def suggested_gpus() -> list[CatalogEntry]:
    """The GPUs that a plan suggests in place of the present ones: usual data-centre ones, the
    smallest first."""
    return sorted(
        (
            CATALOG_BY_KEY[catalog_key(name)]
            for name in ("L4", "A100-40GB", "L40S", "H100", "H200", "B200", "B300")
        ),
        key=lambda entry: entry.memory_bytes,
    )


def nearest_gpu_names(name: str) -> list[str]:
    """Catalogue names similar to `name`; none where no name is near, since a far one is another
    machine."""
    key = catalog_key(name)
    sized_names = [
        entry.name for base, _ in _split_size(key) for entry in _ENTRIES_BY_KEY.get(base, [])
    ]
    if sized_names:
        return list(dict.fromkeys(sized_names))[:4]
    names_by_key = {
        spelling: entry.name
        for entry in CATALOG_ENTRIES
        for spelling in (_short_key(catalog_key(entry.name)), catalog_key(entry.name))
    }
    matches = difflib.get_close_matches(key, list(names_by_key), n=12, cutoff=0.7)
    return list(dict.fromkeys(names_by_key[form] for form in matches))[:4]


# --- prices ---------------------------------------------------------------------------------------
@dataclass(frozen=True)
class PriceList:
    """A provider's page, the day on which its prices were read, and where that reading is kept."""

    provider: str
    read: date
    address: str
    kept_at: str = ""


@dataclass(frozen=True)
class Price:
    """US dollars for an hour of one GPU of a machine that has `gpu_counts` of them; `gpu` is the
    catalogue's name."""

    price_list: PriceList
    gpu: str
    usd: float
    gpu_counts: tuple[int, ...] = (1, 2, 4, 8)


@functools.cache
def load_prices() -> tuple[Price, ...]:
    """`gpu_prices.json`: on-demand prices in US dollars by public lists. They change every week,
    and none is an offer: every answer that uses one shows its date."""
    table = json.loads(Path(__file__).with_name("gpu_prices.json").read_text(encoding="utf-8"))
    price_lists = {
        name: PriceList(**{**one, "read": date.fromisoformat(one["read"])})
        for name, one in table["lists"].items()
    }
    return tuple(
        Price(price_lists[row["of"]], row["gpu"], row["usd"], tuple(row["counts"]))
        for row in table["prices"]
    )


def lowest_prices() -> Iterator[tuple[Price, int]]:
    """The lowest price of every GPU and number of them, in the order of the list."""
    lowest: dict[tuple[str, int], Price] = {}
    for price in load_prices():
        for count in price.gpu_counts:
            best = lowest.get((price.gpu, count), price)
            lowest[price.gpu, count] = min(best, price, key=lambda candidate: candidate.usd)
    yield from ((price, count) for (_, count), price in lowest.items())
