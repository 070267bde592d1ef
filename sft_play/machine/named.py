"""A machine that is not here, as a person describes it: `2x8xH100,network=400Gbps`, `A100x4`, `p4d`,
or a YAML file.

What the catalogue would take for another GPU is refused by name.
"""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from sft_play.errors import HardwareError
from sft_play.log import one_line
from sft_play.machine.gpu_catalog import CATALOG_ENTRIES, find_catalog_entries
from sft_play.spelling import nearest_name

# Machines as people say them: `A100x4`, `2 4090`, `p4d`, in the grammar of `parse_machine_spec`; and what
# is refused with a word of its own, because the nearest name of the catalogue would be another
# machine.

_COUNT_PREFIX = r"((?:[0-9]+\s*[xX*×]\s*){0,2})"
_COUNT_SUFFIX = re.compile(r"(.+?)\s*[xX*×:]\s*([0-9]{1,5})")
_SPACED_COUNT = re.compile(r"(?:[xX*×]\s*)?([0-9]{1,4})\s*[xX*×]?\s+(.+)")
_MEMORY_SIZE = re.compile(r"([0-9]{1,4})\s*(?:GB|GiB|G)\s*(?:of\s+)?(?:v?ram|gpu|card|memory|laptop)?", re.IGNORECASE)
_APPLE_DEVICES = re.compile(r"(apple\b.*|mac(book)?\b.*|m[1-9]( ?(pro|max|ultra))?( .*)?)", re.IGNORECASE)
_UNSUPPORTED_DEVICES = re.compile(
    r".*\b(tpu|gaudi|trainium|inferentia|ascend|npu|arc|iris|igpu|jetson|strix halo|ryzen ai)\b.*", re.IGNORECASE
)


def normalize_machine_text(text: str) -> tuple[str, str]:
    """The text in the grammar of `parse_machine_spec`, and a note where it was read as another.

    Raises HardwareError for a size of memory, or a device that no run uses.
    """
    head, comma, options = text.partition(",")
    match = re.fullmatch(_COUNT_PREFIX + r"(.+)", head.strip())
    is_gpu_name = (
        match is not None
        and not re.search(r"[*×:]", match[2])
        and (find_catalog_entries(match[2].strip()) or find_catalog_entries(head))
    )
    if match is None or is_gpu_name or "mem" in options:
        return text, ""
    counts, name = match[1], match[2].strip()
    alias = _find_cloud_machine(name)
    if alias is None and not counts:
        alias = _move_count_first(name)
    if alias is not None:
        return f"{counts}{alias}{comma}{options}", f"{one_line(name)} is read as {alias}"
    _refuse_unsupported(name, text)
    return text, ""


def _move_count_first(name: str) -> str | None:
    """A count behind the name, or before it without a sign, where the rest is a GPU: `GTX 1080` has none."""
    suffix_match, spaced_match = _COUNT_SUFFIX.fullmatch(name), _SPACED_COUNT.fullmatch(name)
    if suffix_match and find_catalog_entries(suffix_match[1]):
        return f"{suffix_match[2]}x{suffix_match[1]}"
    return f"{spaced_match[1]}x{spaced_match[2]}" if spaced_match and find_catalog_entries(spaced_match[2]) else None


@functools.cache
def _cloud_machines() -> list[tuple[str, str]]:
    path = Path(__file__).with_name("cloud_machines.json")
    return [(pattern, machine) for pattern, machine in json.loads(path.read_text(encoding="utf-8"))["machines"]]


def _find_cloud_machine(name: str) -> str | None:
    normalized = re.sub(r"^(ml\.|standard_|(google |free )(?=colab))", "", name.lower().strip())
    for pattern, machine in _cloud_machines():
        if match := re.fullmatch(pattern, normalized):
            return machine.replace("{1}", ((match[1] or "") if match.groups() else "").upper())
    return None


def _refuse_unsupported(name: str, text: str) -> None:
    prefix = f"HARDWARE={one_line(text)}"
    cpu_hint = "HARDWARE=cpu,ram=32GiB,cores=8 plans a run on the CPU"
    if size := _MEMORY_SIZE.fullmatch(name):
        cards = [entry.name for entry in CATALOG_ENTRIES if entry.box_gb == int(size[1])]
        examples = f": {', '.join(cards[:8])}" if cards else ""
        raise HardwareError(
            f"{prefix} is a size, and speed differs by card; name the card{examples}, or any other with mem="
        )
    if _APPLE_DEVICES.fullmatch(name):
        raise HardwareError(f"{prefix}: no run uses Apple's GPUs; {cpu_hint}")
    if _UNSUPPORTED_DEVICES.fullmatch(name):
        raise HardwareError(f"{prefix}: no run uses this device, only GPUs of NVIDIA, and CPUs; {cpu_hint}")


# --------------------------------------------------------------------------------------------------
# A user's description of a machine that is not here: `2x8xH100,network=400Gbps`, or a YAML file.
# Text in, numbers out.
#
# The grammar is `[NODES x] [COUNT x] GPU [, OPTION=VALUE ...]`; `cpu` is a machine without GPUs.
# docs/gpus.md says what the options of `_READERS` mean, and shows the file.

MAX_GPUS = 100_000
_MAX_FILE_BYTES = 1_000_000
_EXAMPLES = "such as 2xH200, 2x8xH100 or 2xMyGPU,mem=24GiB"
_DECIMAL_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15}
_BINARY_UNITS = {"i": 1, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
_NUMBER = r"([0-9]{1,15}(?:\.[0-9]{1,9})?)"


@dataclass(frozen=True)
class MachineSpec:
    """A machine as described; None is what was not given. Memory in bytes, rates per second, `link` one way. `gpu` is
    None for a machine without GPUs, `per_node` is then 0."""

    gpu: str | None
    per_node: int = 0
    nodes: int = 1
    mem: int | None = None
    bandwidth: float | None = None
    bf16: float | None = None
    fp16: float | None = None
    fp8: float | None = None
    fp32: float | None = None
    link: float | None = None
    network: float | None = None
    ram: int | None = None
    cores: int | None = None
    cc: tuple[int, int] | None = None
    tdp: int | None = None
    price: float | None = None
    notes: tuple[str, ...] = field(default=())


class _InvalidValue(Exception):
    """A value that its option does not accept; the text says what it accepts."""


def _make_reader(
    pattern: str, unit_factor: Callable[[re.Match[str]], float], minimum: float, maximum: float, expected: str
) -> Callable[[str], float]:

    def read(text: str) -> float:
        match = re.fullmatch(pattern, text)
        value = float(match[1]) * unit_factor(match) if match else math.nan
        if not minimum <= value <= maximum:
            raise _InvalidValue(expected)
        return value

    return read


_read_bytes = _make_reader(
    rf"(?i){_NUMBER}\s*([KMGT]?)(i?b|i)",
    lambda match: (_BINARY_UNITS[match[2].upper() + "i"] if "i" in match[3].lower()
                   else _DECIMAL_UNITS[match[2].upper()]),
    2**20, 2**50, "a size with its unit, MiB, GiB, TiB, MB, GB or TB, such as 24GiB",
)  # fmt: skip
_read_bytes_per_s = _make_reader(
    rf"{_NUMBER}\s*([KMGT]i?)(B|b|bit)(?:/s|ps|s)?",  # case matters: B is a byte, b a bit
    lambda match: {**_DECIMAL_UNITS, **_BINARY_UNITS}[match[2]] / (1 if match[3] == "B" else 8),
    1e3, 1e17, "a rate with its unit, GB/s or TB/s (bytes), or Gbps (bits), such as 900GB/s or 400Gbps",
)  # fmt: skip
_read_flops = _make_reader(
    rf"(?i){_NUMBER}\s*([GTP])(?:FLOPS?(?:/s)?|OPS?(?:/s)?)?",
    lambda match: _DECIMAL_UNITS[match[2].upper()],
    1e9, 1e18, "a dense rate with its unit, TFLOPS or PFLOPS, such as 165TFLOPS",
)  # fmt: skip
_read_watts = _make_reader(
    rf"{_NUMBER}\s*(k?)W?", lambda match: 1000 if match[2] else 1, 1, 100_000, "watts, such as 350W"
)
_read_cores = _make_reader(r"([0-9]{1,6})", lambda match: 1, 1, math.inf, "a whole number from 1, such as 64")
_read_price = _make_reader(
    _NUMBER, lambda match: 1, 0, math.inf, "a number without currency, per GPU and hour, such as 2.5"
)


def _read_capability(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"([1-9][0-9]?)\.([0-9])", text)
    if match is None:
        raise _InvalidValue("a CUDA compute capability, such as 8.9")
    return int(match[1]), int(match[2])


_READERS: dict[str, Callable[[str], Any]] = {
    "mem": lambda text: round(_read_bytes(text)),
    "bandwidth": _read_bytes_per_s,
    **dict.fromkeys(("bf16", "fp16", "fp8", "fp32"), _read_flops),
    "link": _read_bytes_per_s,
    "network": _read_bytes_per_s,
    "ram": lambda text: round(_read_bytes(text)),
    "cores": lambda text: round(_read_cores(text)),
    "cc": _read_capability,
    "tdp": lambda text: round(_read_watts(text)),
    "price": _read_price,
}
_HOST_OPTIONS = ("ram", "cores")


def parse_machine_spec(text: str) -> MachineSpec:
    """The machine that `HARDWARE=` describes: by the grammar above, or the path of a YAML file. Raises
    HardwareError."""
    if is_machine_file(text):
        return _parse_machine_file(Path(text.strip()).expanduser())
    prefix = f"HARDWARE={one_line(text)}"
    head, *assignments = [part.strip() for part in text.split(",")]
    options: dict[str, str] = {}
    for assignment in assignments:
        name, equals, value = (part.strip() for part in assignment.partition("="))
        if not equals:
            raise HardwareError(f"{prefix}: {one_line(assignment)!r} is not NAME=VALUE with {', '.join(_READERS)}")
        if options.setdefault(name.lower(), value) != value:
            raise HardwareError(f"{prefix} gives {one_line(name)}= twice; keep one")
    return _apply_options(_parse_head(head, prefix), options, prefix)


def is_machine_file(text: str) -> bool:
    """Whether the text is a YAML file: by its ending, or because it exists."""
    stripped = text.strip()
    if stripped.lower().endswith((".yaml", ".yml")):
        return True
    try:
        return bool(stripped) and Path(stripped).expanduser().is_file()
    except (OSError, RuntimeError, ValueError):  # too long, ~nobody, a NUL
        return False


def _parse_head(text: str, prefix: str) -> MachineSpec:
    if re.fullmatch(r"cpu", text, re.IGNORECASE):
        return MachineSpec(None)
    # an X before T or TX is the card's: 7900 XTX
    match = re.fullmatch(r"((?:[0-9]{1,30}\s*[xX*×]\s*(?!TX?\b)){0,2})(.+)", text)
    name = match[2].strip() if match else ""
    # neither a bare count (`2x`) nor a third one (`2x2x2xH100`) is a GPU's name
    is_gpu_name = re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9 _.+()/-]{0,79}", name) and not re.match(
        r"[0-9.]+\s*[xX*×](?!TX?\b)", name
    )
    if match is None or not is_gpu_name:
        raise HardwareError(f"{prefix} is not COUNTxGPU, {_EXAMPLES}; or cpu, or a YAML file")
    counts = [int(number) for number in re.findall(r"[0-9]+", match[1])]  # nodes and GPUs of each, or GPUs only
    if name.lower() == "cpu":
        raise HardwareError(f"{prefix}: a machine without GPUs takes no count; write cpu,ram=64GiB,cores=16")
    total = math.prod(counts)
    if not 1 <= total <= MAX_GPUS:
        raise HardwareError(f"{prefix} names {total} GPUs; name 1 to {MAX_GPUS}")
    return MachineSpec(name, per_node=counts[-1] if counts else 1, nodes=counts[0] if len(counts) == 2 else 1)


def _apply_options(spec: MachineSpec, options: dict[str, str], prefix: str) -> MachineSpec:
    for name, value in options.items():
        if name not in _READERS:
            suggestion = nearest_name(name, tuple(_READERS), min_similarity=0.5)
            hint = f"nearest: {suggestion}; " if suggestion else ""
            raise HardwareError(
                f"{prefix}: {one_line(name)!r} is not an option of a machine; {hint}there are {', '.join(_READERS)}"
            )
        if spec.gpu is None and name not in _HOST_OPTIONS:
            raise HardwareError(f"{prefix}: a machine without GPUs takes {' and '.join(_HOST_OPTIONS)}, not {name}")
        try:
            parsed = _READERS[name](value)
        except _InvalidValue as expected:
            raise HardwareError(f"{prefix}: {name} takes {expected}, not {one_line(value)!r}") from None
        if name == "link":
            note = f"link={value} is read as data sheets quote it, both directions: {parsed / 2e9:g} GB/s each way"
            spec = replace(spec, link=parsed / 2, notes=(*spec.notes, note))
        else:
            spec = replace(spec, **{name: parsed})
    return spec


# --- the YAML file ----------------------------------------------------------------------------------------------------
_FILE_FORMAT = (
    "a machine's file has gpus: (a name, or name:, count: and options), nodes:, ram:, cores:, network:, price:"
)


def _parse_machine_file(path: Path) -> MachineSpec:
    prefix = f"HARDWARE={path}"
    try:
        if path.stat().st_size > _MAX_FILE_BYTES:
            raise ValueError(f"it has over {_MAX_FILE_BYTES} bytes")
        data = yaml.load(path.read_text(encoding="utf-8"), Loader=yaml.BaseLoader)  # every value is a text
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise HardwareError(f"{prefix} cannot be read as YAML: {one_line(str(error))}") from None
    if not isinstance(data, dict):
        raise HardwareError(f"{prefix} is not a mapping; {_FILE_FORMAT}")
    gpus = data.pop("gpus", "cpu")
    options = {**data, **(gpus if isinstance(gpus, dict) else {"name": gpus})}
    if any(not isinstance(part, str) for pair in options.items() for part in pair) or "name" not in options:
        raise HardwareError(f"{prefix}: gpus has no name, or a value is a list or a mapping; {_FILE_FORMAT}")
    name = options.pop("name").strip()
    spec = _parse_head("cpu" if name.lower() in ("", "~", "null", "none", "0") else name, prefix)
    for key, part in (("count", "per_node"), ("nodes", "nodes")):
        if key in options:
            spec = _apply_count(spec, key, part, options.pop(key), prefix)
    return _apply_options(spec, {key: value.strip() for key, value in options.items()}, prefix)


def _apply_count(spec: MachineSpec, key: str, field_name: str, text: str, prefix: str) -> MachineSpec:
    count = int(text) if re.fullmatch(r"[0-9]{1,6}", text) else 0
    total = count * (spec.nodes if field_name == "per_node" else spec.per_node)
    if spec.gpu is None or getattr(spec, field_name) != 1 or not 1 <= total <= MAX_GPUS:
        raise HardwareError(
            f"{prefix}: {key}: {one_line(text)} is not a number of GPUs from 1 to {MAX_GPUS} that the name does "
            "not have"
        )
    return replace(spec, per_node=count) if field_name == "per_node" else replace(spec, nodes=count)
