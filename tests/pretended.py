"""A pretended GPU on a CPU machine: tensors with values whose device is `pretend:0`, and a refusal where one meets a
tensor that was left on the host.

The device is registered with PyTorch (`torch.utils.backend_registration`), which cannot be undone: use it in a process
of its own. A tensor on it is a wrapper around one of the CPU, which computes. What CUDA allows is allowed: numbers (0-d
tensors) of the host among tensors of the device, indices on the host, and copies.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend

NAME = "pretend"
aten = torch.ops.aten
_COPIES = (aten._to_copy.default, aten.copy_.default)
_BY_INDEX = (
    aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default,
    aten._unsafe_index.Tensor,
)  # fmt: skip
"""Operators that take indices of the host."""


class _Module(_DummyBackendModule):
    """What torch asks of a device's module beyond the least."""

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    def get_rng_state(self, *_: Any) -> torch.Tensor:
        return torch.empty(0, dtype=torch.uint8)

    def set_rng_state(self, *_: Any) -> None: ...

    def synchronize(self, *_: Any) -> None: ...

    def empty_cache(self) -> None: ...


def register() -> torch.device:
    """Register the device in this process."""
    _setup_privateuseone_for_python_backend(NAME, backend_module=_Module())
    _register_autocast()
    own = torch.library.Library("aten", "IMPL", "PrivateUse1")
    # torch.tensor(..., device=) asks below every mode
    own.impl("empty_strided", lambda size, stride, *, dtype=None, **_: Pretended(_strided(size, stride, dtype)))
    own.impl("copy_", lambda to, given, *_: run(aten.copy_.default, (to, given), {}))
    _LIBRARIES.append(own)
    return torch.device(NAME, 0)


def _strided(size: Any, stride: Any, dtype: torch.dtype | None) -> torch.Tensor:
    return torch.empty_strided(size, stride, dtype=dtype, device="cpu")


class Pretended(torch.Tensor):
    """A tensor of the pretended device; `inner` has its values."""

    inner: torch.Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Pretended:
        made = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, inner.size(), strides=inner.stride(), storage_offset=inner.storage_offset(), dtype=inner.dtype,
            layout=inner.layout, device=torch.device(NAME, 0),
        )  # fmt: skip
        made.inner = inner
        return made

    def tolist(self) -> Any:
        """Its values on the host."""
        return self.inner.tolist()

    def __repr__(self, **_: Any) -> str:
        return f"Pretended({self.inner!r})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(func, args, kwargs or {})


class Pretending(TorchDispatchMode):
    """While open, factories and copies that name the device make tensors of it."""

    copies = True
    """Whether tensors of the host may be copied to the device at the moment; numbers always may."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(func, args, kwargs or {})


def run(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The operator on the inner tensors, its results on the device of its arguments or the one that it names.

    Raises:
        RuntimeError: tensors of both devices meet, as CUDA says it.
    """
    kwargs = dict(kwargs)
    given = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    here = any(isinstance(one, Pretended) for one in given)
    if here and func not in _COPIES:
        checked = [args[0], *args[2:]] if func in _BY_INDEX else (args, kwargs)
        for one in pytree.tree_leaves(checked):
            if isinstance(one, torch.Tensor) and not isinstance(one, Pretended) and one.dim() and not one.is_meta:
                raise RuntimeError(
                    f"Expected all tensors to be on the same device, but found {NAME}:0 and {one.device} "
                    f"({func}, shape {tuple(one.shape)})"
                )
    wanted = kwargs.get("device")
    if func in _COPIES and not Pretending.copies:
        to = torch.device(wanted) if wanted is not None else args[0].device
        source = args[-1] if func is aten.copy_.default else args[0]
        if to.type == NAME and source.device.type == "cpu" and source.dim():
            raise RuntimeError(f"a tensor was left on the host, and is copied here: {tuple(source.shape)}")
    if wanted is not None:
        here = torch.device(wanted).type == NAME
        kwargs["device"] = torch.device("cpu") if here else wanted
    elif func is aten.copy_.default:
        here = isinstance(args[0], Pretended)
    kwargs.pop("pin_memory", None) if here else None
    plain, options = pytree.tree_map_only(Pretended, lambda one: one.inner, (tuple(args), kwargs))
    if func is aten.histc.default and not plain[0].is_floating_point():  # CUDA counts whole numbers, a CPU does not
        out = func(plain[0].float(), *plain[1:], **options).to(plain[0].dtype)
    else:
        out = func(*plain, **options)
    if not here:
        return out
    out = pytree.tree_map_only(torch.Tensor, lambda one: one if isinstance(one, Pretended) else Pretended(one), out)
    if not any(isinstance(one, Pretended) for one in given):
        return out
    return return_and_correct_aliasing(func, tuple(args), kwargs, out)


_LIBRARIES: list[Any] = []
_LOW = ("linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "scaled_dot_product_attention")
"""Operators that autocast runs in its dtype; the rest fall through."""


def _register_autocast() -> None:
    rest = torch.library.Library("_", "IMPL", "AutocastPrivateUse1")
    rest.fallback(torch.library.fallthrough_kernel)
    own = torch.library.Library("aten", "IMPL", "AutocastPrivateUse1")
    for name in _LOW:
        own.impl(name, _in_low(getattr(aten, name).default))
    _LIBRARIES.extend((rest, own))


def _in_low(operator: Any) -> Callable[..., Any]:
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)

    def cast(value: Any) -> Any:
        is_float = isinstance(value, torch.Tensor) and value.is_floating_point() and value.device.type == NAME
        return value.to(torch.get_autocast_dtype(NAME)) if is_float else value

    def called(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(keys):
            return operator(*map(cast, args), **{key: cast(value) for key, value in kwargs.items()})

    return called


@contextlib.contextmanager
def without_copies() -> Iterator[None]:
    """While open, nothing but numbers comes from the host: libraries that move a tensor by themselves hide that it was
    left there, and each step waits for the copy."""
    Pretending.copies = False
    try:
        yield
    finally:
        Pretending.copies = True


def on_host(module: torch.nn.Module) -> list[str]:
    """Names of parameters and buffers that are not on the device."""
    tensors = (*module.named_parameters(), *module.named_buffers())
    return [name for name, tensor in tensors if tensor.device.type != NAME]
