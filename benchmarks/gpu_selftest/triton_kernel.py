"""A Triton kernel of four lines: it shows that Triton finds its compiler, its headers and the driver.

Imported only on GPUs, where torch brings Triton. Triton reads the source of a kernel from its module.
"""

import torch
import triton
import triton.language as tl

BLOCK = 1024


@triton.jit
def _add(first, second, out, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # Triton reads annotations
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = places < count
    tl.store(out + places, tl.load(first + places, mask=inside) + tl.load(second + places, mask=inside), mask=inside)


def wrong_elements(count: int, device: str) -> int:
    """Elements of a sum of two vectors [count] that the kernel gets wrong."""
    first = torch.arange(count, dtype=torch.float32, device=device)
    second = torch.full_like(first, 0.5)
    out = torch.empty_like(first)
    _add[(triton.cdiv(count, BLOCK),)](first, second, out, count, BLOCK=BLOCK)
    return int((out != first + second).sum())
