"""A machine that is not here, as a person describes it: `2x8xH100,network=400Gbps`. Text in, numbers
out.

The grammar is `[NODES x] [COUNT x] GPU [, OPTION=VALUE ...]`; `cpu` is a machine without GPUs.
docs/gpus.md says what the options of `_OPTIONS` mean.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from sft_play.errors import HardwareError
from sft_play.log import one_line
from sft_play.spelling import nearest_name

MAX_GPUS = 100_000
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


# How a value is written: its pattern, the factor of its unit, the least and most that it may be, and that in words.
_ValueForm = tuple[str, Callable[[re.Match[str]], float], float, float, str]
_SIZE: _ValueForm = (
    rf"(?i){_NUMBER}\s*([KMGT]?)(i?b|i)",
    lambda match: (_BINARY_UNITS[match[2].upper() + "i"] if "i" in match[3].lower()
                   else _DECIMAL_UNITS[match[2].upper()]),
    2**20, 2**50, "a size with its unit, MiB, GiB, TiB, MB, GB or TB, such as 24GiB",
)  # fmt: skip
_RATE: _ValueForm = (
    rf"{_NUMBER}\s*([KMGT]i?)(B|b|bit)(?:/s|ps|s)?",  # case matters: B is a byte, b a bit
    lambda match: {**_DECIMAL_UNITS, **_BINARY_UNITS}[match[2]] / (1 if match[3] == "B" else 8),
    1e3, 1e17, "a rate with its unit, GB/s or TB/s (bytes), or Gbps (bits), such as 900GB/s or 400Gbps",
)  # fmt: skip
_FLOPS: _ValueForm = (
    rf"(?i){_NUMBER}\s*([GTP])(?:FLOPS?(?:/s)?|OPS?(?:/s)?)?",
    lambda match: _DECIMAL_UNITS[match[2].upper()],
    1e9, 1e18, "a dense rate with its unit, TFLOPS or PFLOPS, such as 165TFLOPS",
)  # fmt: skip
_OPTIONS: dict[str, _ValueForm] = {
    "mem": _SIZE,
    "bandwidth": _RATE,
    **dict.fromkeys(("bf16", "fp16", "fp8", "fp32"), _FLOPS),
    "link": _RATE,
    "network": _RATE,
    "ram": _SIZE,
    "cores": (r"([0-9]{1,6})", lambda match: 1, 1, math.inf, "a whole number from 1, such as 64"),
    "cc": (r"([1-9][0-9]?\.[0-9])", lambda match: 1, 1, 100, "a CUDA compute capability, such as 8.9"),
    "tdp": (rf"{_NUMBER}\s*(k?)W?", lambda match: 1000 if match[2] else 1, 1, 100_000, "watts, such as 350W"),
    "price": (_NUMBER, lambda match: 1, 0, math.inf, "a number without currency, per GPU and hour, such as 2.5"),
}
_WHOLE_NUMBERS = ("mem", "ram", "cores", "tdp")
_HOST_OPTIONS = ("ram", "cores")


def parse_machine_spec(text: str) -> MachineSpec:
    """The machine that `HARDWARE=` describes, by the module's grammar. Raises HardwareError."""
    prefix = f"HARDWARE={one_line(text)}"
    head, *assignments = [part.strip() for part in text.split(",")]
    options: dict[str, str] = {}
    for assignment in assignments:
        name, equals, value = (part.strip() for part in assignment.partition("="))
        if not equals:
            raise HardwareError(f"{prefix}: {one_line(assignment)!r} is not NAME=VALUE with {', '.join(_OPTIONS)}")
        if options.setdefault(name.lower(), value) != value:
            raise HardwareError(f"{prefix} gives {one_line(name)}= twice; keep one")
    return _apply_options(_parse_head(head, prefix), options, prefix)


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
        raise HardwareError(f"{prefix} is not COUNTxGPU, {_EXAMPLES}; or cpu")
    counts = [int(number) for number in re.findall(r"[0-9]+", match[1])]  # nodes and GPUs of each, or GPUs only
    if name.lower() == "cpu":
        raise HardwareError(f"{prefix}: a machine without GPUs takes no count; write cpu,ram=64GiB,cores=16")
    total = math.prod(counts)
    if not 1 <= total <= MAX_GPUS:
        raise HardwareError(f"{prefix} names {total} GPUs; name 1 to {MAX_GPUS}")
    return MachineSpec(name, per_node=counts[-1] if counts else 1, nodes=counts[0] if len(counts) == 2 else 1)


def _apply_options(spec: MachineSpec, options: dict[str, str], prefix: str) -> MachineSpec:
    for name, text in options.items():
        if name not in _OPTIONS:
            suggestion = nearest_name(name, _OPTIONS, min_similarity=0.5)
            hint = f"nearest: {suggestion}; " if suggestion else ""
            raise HardwareError(
                f"{prefix}: {one_line(name)!r} is not an option of a machine; {hint}there are {', '.join(_OPTIONS)}"
            )
        if spec.gpu is None and name not in _HOST_OPTIONS:
            raise HardwareError(f"{prefix}: a machine without GPUs takes {' and '.join(_HOST_OPTIONS)}, not {name}")
        pattern, unit_factor, minimum, maximum, expected = _OPTIONS[name]
        match = re.fullmatch(pattern, text)
        number = float(match[1]) * unit_factor(match) if match else math.nan
        if not minimum <= number <= maximum:
            raise HardwareError(f"{prefix}: {name} takes {expected}, not {one_line(text)!r}")
        value: Any = round(number) if name in _WHOLE_NUMBERS else number
        if name == "cc":
            value = tuple(map(int, text.split(".")))
        if name == "link":
            value = number / 2
            note = f"link={text} is read as data sheets quote it, both directions: {value / 1e9:g} GB/s each way"
            spec = replace(spec, notes=(*spec.notes, note))
        spec = replace(spec, **{name: value})
    return spec
