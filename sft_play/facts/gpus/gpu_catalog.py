"""GPUs by name: usable memory, bandwidth, dense matrix rates, links, compute capability, power; each with its source.

At the end what clouds ask for an hour of them. Memory: `driver_bytes` is what `nvidia-smi` prints as total,
`memory_bytes` what torch reports (`torch.cuda.get_device_properties(0).total_memory`): the driver keeps the difference.
Where no torch figure was seen, it is `driver_bytes` less `reserve_bytes`, and `memory_kind` says so; where no
`nvidia-smi` figure was seen either, `driver_bytes` is the size on the box.

Rates are peaks without structured sparsity, of the matrix units with 32-bit accumulation, which is what training uses:
a data sheet's, or multiprocessors x boost clock x operations per clock of the family (`FAMILIES`), which gives the
published figures to within 1% wherever there are both. Links are bytes per second and GPU in one direction; `nvlink` is
what joins all GPUs of a machine as it is sold, bridges between two cards are an extra that a user has to name
(`link=`); `pcie` is lanes x rate before encoding.

The figures are in `gpu_catalog.json`. One of which no source was seen is not there:
`HARDWARE="2xMyGPU,mem=24GiB,bandwidth=1000GBs,bf16=165TFLOPS"`.
"""

from __future__ import annotations

import difflib
import functools
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

from sft_play.units import GIB, MIB

# CUDA compute capability from which bfloat16 matrix units exist (CUDA C++ Programming Guide, table of
# arithmetic by compute capability).
BF16_CAPABILITY = (8, 0)


@dataclass(frozen=True)
class Family:
    """A generation's matrix units: dense operations per multiprocessor and clock, 32-bit accumulation. `fp16` is 0
    where half precision is not faster than nothing (Pascal's consumer chips); `fp8` is twice `fp16` where the units
    have it. `fp32` counts the ordinary units (no TF32)."""

    capability: tuple[int, int]
    fp16: int
    bf16: bool
    fp8: bool
    fp32: int
    source: str


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
    unified: bool = False
    """Whether its memory is the host's."""

    @property
    def link(self) -> float:
        """Bytes per second and GPU, one way, between the GPUs of a machine as sold."""
        return self.nvlink or self.pcie


def reserve_bytes(driver_bytes: int) -> int:
    """What the driver keeps for itself where no figure of the card was seen: 350 MiB and 0.5% of the memory. Pairs seen
    of nvidia-smi's total and torch's (MiB): 8188/7806, 16303/15840, 16376/15944, 23034/22563, 24564/24081, 46068/45495,
    49140/48539: 382, 463, 432, 471, 483, 573, 601 against 391, 432, 432, 465, 473, 580, 596 by this rule. Data-centre
    cards keep less (H200 615, B200 729 against 1069, 1267), A100 with 80 GB more (882 against 760)."""
    return 350 * MIB + driver_bytes // 200


_GB = 1e9
_T = 1e12


def _entry_of(row: Mapping[str, Any], sources: Mapping[str, str]) -> CatalogEntry:
    """An entry of a line of the file, which has `memory`: GB on the box, nvidia-smi's MiB, torch's MiB; `dense`: a data
    sheet's 16- and 8-bit TFLOPS; `units`: streaming multiprocessors (AMD: compute units); `pcie`: generation, lanes."""
    kind, (box, smi, torch), (generation, lanes) = FAMILIES[row["family"]], row["memory"], row["pcie"]
    driver = smi * MIB if smi else box * GIB
    clock, dense, nvlink = row["units"] * row["boost_mhz"] * 1e6, row.get("dense"), row.get("nvlink_gb")
    half = (dense[0] * _T if dense else clock * kind.fp16) or None
    eighth = dense[1] * _T if dense and dense[1] else clock * kind.fp16 * 2
    named = [_source(text, sources) for text in row["sources"]]
    return CatalogEntry(
        row["name"],
        row.get("vendor", "NVIDIA"),
        memory_bytes=torch * MIB if torch else driver - reserve_bytes(driver),
        memory_kind="torch" if torch else "nvidia-smi less reserve" if smi else "box less reserve",
        driver_bytes=driver,
        box_gb=box,
        bandwidth=row["bandwidth_gb"] * _GB,
        bf16=half if kind.bf16 else None,
        fp16=half,
        fp8=eighth if kind.fp8 else None,
        fp32=clock * kind.fp32,
        nvlink=nvlink * _GB if nvlink else None,
        pcie=lanes * 2.0 ** (generation - 3) * _GB,  # 1 GB/s per lane of generation 3, doubling with each
        capability=kind.capability,
        tdp_watts=row["watts"],
        source="; ".join(named if dense else (*named, kind.source)),
        aliases=tuple(row.get("aliases", ())),
        unified=row.get("unified", False),
    )


def _source(text: str, sources: Mapping[str, str]) -> str:
    name, slash, file = text.partition("/")
    return f"{sources[name]}{slash}{file}" if name in sources else text


_TABLE = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
FAMILIES: dict[str, Family] = {
    name: Family(**{**one, "capability": tuple(one["capability"])}) for name, one in _TABLE["families"].items()
}
# All entries; of those that share an alias, the first is what the alias alone means.
ENTRIES: tuple[CatalogEntry, ...] = tuple(_entry_of(row, _TABLE["sources"]) for row in _TABLE["gpus"])

_NOISE = re.compile(r"nvidia|geforce|tesla|amd|instinct|radeon|generation|graphics|[^a-z0-9]")
_LAPTOP = re.compile(r"(laptop|mobile|notebook)(gpu)?")
_MAX_Q = re.compile(r"(with)?maxq(design)?")


def key_of(name: str) -> str:
    """A name in lower case without separators, maker and series: `NVIDIA GeForce RTX 4090` is `rtx4090`, and
    `RTX 3060 mobile` is `laptoprtx3060`."""
    key = _MAX_Q.sub("maxq", _NOISE.sub("", name.lower()))
    rest, count = _LAPTOP.subn("", key)
    return f"laptop{rest}" if count else key


# By the catalogue's own name: `a10080gb`, `rtx4090`.
CATALOG: dict[str, CatalogEntry] = {key_of(entry.name): entry for entry in ENTRIES}


def _short(key: str) -> str:
    return re.sub(r"^(laptop)?[rg]tx", r"\1", key)


_BY_KEY: dict[str, list[CatalogEntry]] = {}
for _entry in ENTRIES:
    for _key in {form for name in (_entry.name, *_entry.aliases) for form in (key_of(name), _short(key_of(name)))}:
        _BY_KEY.setdefault(_key, []).append(_entry)
_SUGGESTED = ("L4", "A100-40GB", "L40S", "H100", "H200", "B200", "B300")


def find(name: str, driver_bytes: int | None = None) -> tuple[CatalogEntry, ...]:
    """The entries that a name can mean, the most likely first; a trailing size chooses among them (`H100-80GB`), and so
    does `driver_bytes`, the total of a GPU that was found. A laptop's GPU is never the desktop's of the same number."""
    key = key_of(name)
    entries = _BY_KEY.get(key) or (_BY_KEY.get(f"laptop{key[:-1]}", []) if key.endswith("m") else [])  # 3060m
    if not entries:  # a key that ends with the size on the box: `h10080gb`, `h10080g`, `h10080`
        sized = ([one for one in _BY_KEY.get(base, []) if one.box_gb == size] for base, size in _with_size(key))
        entries = next(filter(None, sized), [])
    entries = sorted(entries, key=lambda entry: key not in (key_of(entry.name), _short(key_of(entry.name))))
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


def gpus_by_memory() -> list[CatalogEntry]:
    """The GPUs that a plan suggests in place of the present ones: usual data-centre ones, the smallest first."""
    return sorted((CATALOG[key_of(name)] for name in _SUGGESTED), key=lambda entry: entry.memory_bytes)


def nearest(name: str) -> list[str]:
    """Catalogue names similar to `name`; none where no name is near, since a far one is another machine."""
    wanted = key_of(name)
    sizes = [entry.name for base, _ in _with_size(wanted) for entry in _BY_KEY.get(base, [])]
    if sizes:
        return list(dict.fromkeys(sizes))[:4]
    forms = {form: entry.name for entry in ENTRIES for form in (_short(key_of(entry.name)), key_of(entry.name))}
    close = difflib.get_close_matches(wanted, list(forms), n=12, cutoff=0.7)
    close.sort(key=lambda form: (-difflib.SequenceMatcher(None, form, wanted).ratio(), _steps(wanted, form)))
    return list(dict.fromkeys(forms[form] for form in close))[:4]


def _steps(wanted: str, form: str) -> int:
    return sum(abs(ord(one) - ord(other)) for one, other in zip(wanted, form, strict=False))


# --- prices -----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class PriceList:
    """A provider's page, the day on which its prices were read, and where that reading is kept."""

    provider: str
    read: date
    address: str
    kept_at: str = ""


@dataclass(frozen=True)
class Price:
    """US dollars for an hour of one GPU of a machine that has `counts` of them; `gpu` is the catalogue's name."""

    of: PriceList
    gpu: str
    usd: float
    counts: tuple[int, ...] = (1, 2, 4, 8)


@functools.cache
def all_prices() -> tuple[Price, ...]:
    """`gpu_prices.json`: on-demand prices in US dollars by public lists. They change every week, and none is an offer:
    every answer that uses one shows its date."""
    table = json.loads(Path(__file__).with_name("gpu_prices.json").read_text(encoding="utf-8"))
    lists = {
        name: PriceList(**{**one, "read": date.fromisoformat(one["read"])}) for name, one in table["lists"].items()
    }
    return tuple(Price(lists[row["of"]], row["gpu"], row["usd"], tuple(row["counts"])) for row in table["prices"])


def cheapest(prices: tuple[Price, ...] | None = None) -> Iterator[tuple[Price, int]]:
    """The lowest price of every GPU and number of them, in the order of the list."""
    found: dict[tuple[str, int], Price] = {}
    for price in all_prices() if prices is None else prices:
        for count in price.counts:
            kept = found.get((price.gpu, count))
            if kept is None or price.usd < kept.usd:
                found[price.gpu, count] = price
    for (_, count), price in found.items():
        yield price, count
