"""Which linear layers of a class take an adapter, whether its tokens see only those before them, and whether its logits
are what TRL's loss takes them for: tried on a small model of it.

PEFT refuses some layers, some return tuples (routers), some get no gradient (indexers), some are read past the adapter.
What the table of families knows is recorded there, and a test tries it again.
"""

from __future__ import annotations

import copy
import inspect
import json
import re
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from pydantic import TypeAdapter
from torch import nn
from torch.utils._pytree import tree_iter
from transformers import AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

from sft_play.errors import ModelError
from sft_play.facts.installed import load_or_measure
from sft_play.facts.models.families import MODEL_FAMILIES, no_adapter_reason
from sft_play.facts.models.model_shape import AdapterPlacement
from sft_play.log import one_line
from sft_play.training.class_checks.small_model import (
    MOST_PARAMETERS,
    VOCABULARY,
    kind_of,
    longest_usual,
    on_small_model,
    small_model,
)
from sft_play.training.model.fused_head import fused_head

_FOUND = TypeAdapter(dict[str, str])
# Part of the key of what is remembered: raised whenever this module would answer otherwise.
VERSION = 6
LEARNS_NOTHING = "it gets no gradient"
PAST_ADAPTER = "the class reads its weight past the adapter"
# How far, of their spread, the last token of a row may move the outputs before it: rounding (of the causal classes of
# transformers 5.23 below 1e-4 in fp32; XLNet 0.04, CPMAnt 4.7).
AHEAD = 1e-3
# Tokens and rows of a batch, and batches until every expert should have had a token.
_LENGTH, _ROWS, _DRAWS = 24, 2, 4
# Tokens of rows that are too short for what reads them in groups.
_FEW = 3
# Spread of what moves a small model's first values: those at zero would pass no gradient on.
_SPREAD = 0.02
# Fields of a config that say nothing of the class's code.
_VARIES = ("_name_or_path", "_commit_hash", "transformers_version", "architectures", "dtype", "torch_dtype")


def linear_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Every linear layer of the language model by its full name, without the output head."""
    head = output_head(model)
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, (nn.Linear, Conv1D)) and module is not head
    }


def output_head(model: Any) -> nn.Module | None:
    """The layer that scores the vocabulary; None without one."""
    return model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None


def adapter_places(model: Any, *, trust_remote_code: bool = False) -> tuple[AdapterPlacement, frozenset[str]]:
    """Where adapters go in a model (its weights may be on the meta device), and the linear layers that get none. Raises
    ModelError: tokens of its class see those after them."""
    kind, layers = str(model.config.model_type), list(linear_layers(model))
    failed, untried = dict[str, str](), ""
    if kind not in MODEL_FAMILIES:
        try:
            failed = dict(_tried(model.config, try_out, trust_remote_code))
            if ahead := failed.pop(_EVERY_LAYER, ""):
                raise ModelError(f"model_type {one_line(kind)}: {ahead}; take a causal language model")
        except _Untried as why:
            failed, untried = read_past(model), str(why)
    recorded = {any_number(layer): no_adapter_reason(kind, layer.rpartition(".")[2]) for layer in layers}
    failed |= {pattern: why for pattern, why in recorded.items() if why}
    lost = frozenset(layer for layer in layers if any_number(layer) in failed)
    modules = [name for name, _ in model.named_modules() if name]
    targets = shortest([layer for layer in layers if layer not in lost], modules)
    there = {any_number(layer) for layer in lost}
    reasons = sorted((pattern, why) for pattern, why in failed.items() if pattern in there)
    return AdapterPlacement(tuple(targets), tuple(reasons), untried), lost


def any_number(path: str) -> str:
    """A layer's name with * for numbers: the same layer of every block, and of every expert."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", path)


def shortest(layers: Sequence[str], modules: Iterable[str]) -> list[str]:
    """The shortest ends of names that match these layers and no other module, as PEFT compares them."""
    wanted, left, every, targets = set(layers), sorted(layers), list(modules), []
    for length in range(1, 2 + max((name.count(".") for name in layers), default=0)):
        ends = dict.fromkeys(_end(name, length) for name in left)
        taken = {_end(name, length) for name in every if name not in wanted}
        clean = {end for end in ends if end not in taken}
        targets += sorted(clean)
        left = [name for name in left if _end(name, length) not in clean]
    return sorted(targets)


def _end(name: str, length: int) -> str:
    return ".".join(name.split(".")[-length:])


def without_gradient(model: Any, *, trust_remote_code: bool = False) -> frozenset[str]:
    """Names (* for numbers) of parameters that a step of the class gives no gradient: biases that only choose experts,
    indexers, parts that text does not pass; none where no small model computes."""
    return frozenset(_shown(model.config, _try_in_full, trust_remote_code))


def late_gradients(model: Any, *, trust_remote_code: bool = False) -> dict[str, str]:
    """Names (* for numbers) of parameters that some steps give no gradient and later ones do, for which a run waits:
    what sums up tokens in groups of a size that the config sets, which shorter rows pass by (the text says so), and
    what is multiplied by a tensor that the class begins at zero (Doge's `A`): a gradient of zeros (no text)."""
    never = without_gradient(model, trust_remote_code=trust_remote_code)
    return {name: why for name, why in _shown(model.config, _try_late, trust_remote_code).items() if name not in never}


def own_logits(hf_config: Any, *, trust_remote_code: bool = False) -> bool:
    """Whether a class's logits are others than TRL's head computes of its last hidden states (a layer between, a factor
    or a cap that TRL does not know, words left out); False where no small model computes."""
    return bool(_shown(hf_config, _try_head, trust_remote_code))


def keeps_graphs(hf_config: Any, *, trust_remote_code: bool = False) -> bool:
    """Whether the class keeps what it computed in a pass, with all that its gradient needs, on its modules
    (RecurrentGemma's states): checkpointing would free none of it. False where no small model computes."""
    return bool(_shown(hf_config, _try_keeping, trust_remote_code))


def _shown(hf_config: Any, trial: Callable[..., dict[str, str]], trust_remote_code: bool) -> dict[str, str]:
    """What a trial shows; nothing of the table's classes, nor where no small model computes."""
    try:
        return {} if str(hf_config.model_type) in MODEL_FAMILIES else _tried(hf_config, trial, trust_remote_code)
    except _Untried:
        return {}


def _try_head(small: Any, *, trust_remote_code: bool = False) -> dict[str, str]:
    if getattr(small, "unpadded_vocab_size", None):
        small.unpadded_vocab_size = VOCABULARY - 8  # below the vocabulary, as in the model itself
    model = small_model(small, "flash", trust_remote_code)
    ids = torch.randint(3, VOCABULARY - 8, (_ROWS, _LENGTH), generator=torch.Generator().manual_seed(0))
    found = []
    for whole in (True, False):
        with torch.no_grad(), fused_head(model, from_class_logits=whole):
            found.append(model(input_ids=ids, labels=ids, fused_lm_head=True).log_probs)
    apart = float((found[0] - found[1]).abs().max() / found[0].std())
    return {"": f"log-probabilities differ by {apart:.2g} of their spread"} if apart > AHEAD else {}


def pattern_of(trained: str) -> str:
    """The name, with * for numbers, of the parameter that a trained tensor is or adapts."""
    adapted, adapter, _ = trained.removeprefix("base_model.model.").partition(".lora_")
    return any_number(adapted) + (".weight" if adapter else "")


def freeze(model: nn.Module, patterns: Collection[str]) -> None:
    """Take the parameters of these names, with * for numbers, out of training."""
    for name, parameter in model.named_parameters():
        if any_number(name) in patterns:
            parameter.requires_grad_(False)


def _try_late(small: Any, *, trust_remote_code: bool = False) -> dict[str, str]:
    short = _try_in_full(small, length=_FEW, trust_remote_code=trust_remote_code) if longest_usual(small) else {}
    return dict.fromkeys(_try_in_full(small, spread=0.0, trust_remote_code=trust_remote_code), "") | short


def _try_in_full(
    small: Any, *, length: int = _LENGTH, spread: float = _SPREAD, trust_remote_code: bool = False
) -> dict[str, str]:
    with torch.random.fork_rng(devices=[]):
        model = _small_random(small, trust_remote_code, spread)
        every = dict(model.named_parameters())
        for draw in range(_DRAWS):
            _step(model, draw, length)
            learns = {any_number(name) for name, one in every.items() if one.grad is not None and bool(one.grad.any())}
            without = {any_number(name) for name in every} - learns
            if not without:
                break
    return dict.fromkeys(sorted(without), LEARNS_NOTHING)


def _try_keeping(small: Any, *, trust_remote_code: bool = False) -> dict[str, str]:
    with torch.random.fork_rng(devices=[]):
        model = _small_random(small, trust_remote_code)
        _step(model, 0)
    values = (value for module in model.modules() for value in tree_iter(vars(module)))
    keeps = any(isinstance(value, torch.Tensor) and value.grad_fn is not None for value in values)
    return {"": "it keeps tensors that need a gradient"} if keeps else {}


class _Untried(Exception):
    """No small model of the class computes; the text says why."""


def _tried(hf_config: Any, trial: Callable[..., dict[str, str]], trust_remote_code: bool) -> dict[str, str]:
    """From the cache where it was tried before; a model's own code is tried anew."""
    fields = {key: value for key, value in hf_config.to_dict().items() if key not in _VARIES}
    decides = {"config": json.loads(json.dumps(fields, default=repr)), "version": VERSION}
    decides |= {} if trial is try_out else {"trial": trial.__name__}

    def tried() -> dict[str, str]:
        found, problem = on_small_model(
            hf_config, trial, trust_remote_code=trust_remote_code, most=MOST_PARAMETERS, whole_depth=True
        )
        if found is None:
            raise _Untried(f"{kind_of(hf_config)} could not be tried: {problem}")
        return found

    found: dict[str, str] = load_or_measure("adapters", decides, _FOUND, tried, cacheable=not trust_remote_code)
    return found


def try_out(small: Any, *, trust_remote_code: bool = False) -> dict[str, str]:
    """The linear layers on which an adapter fails in any block, and why; raises where the class does not compute."""
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what PEFT says of a choice that is only tried
        model = _small_random(small, trust_remote_code)
        _step(copy.deepcopy(model), 0)  # some keep their states, which cannot be copied
        if (moved := _moved_from_behind(copy.deepcopy(model))) > AHEAD:
            return {_EVERY_LAYER: f"its tokens see those after them (the last one of a row moves outputs before it by "
                                  f"{moved:.2g} of their spread), and training would teach it to copy"}  # fmt: skip
        failed = read_past(model)
        groups: dict[str, list[str]] = {}
        for name in linear_layers(model):
            if any_number(name) not in failed:
                groups.setdefault(any_number(name), []).append(name)
        if _attempt(model, groups):  # at once is quicker, and the rule
            for pattern, group in groups.items():
                failed |= _attempt(model, {pattern: group})
            failed |= _attempt(model, {pattern: group for pattern, group in groups.items() if pattern not in failed})
    return failed


# The name under which a trial says why a class cannot be trained at all.
_EVERY_LAYER = ""


def _moved_from_behind(model: Any) -> float:
    """How far the last token of a row moves the outputs before it, over their spread."""
    ids = torch.randint(3, VOCABULARY, (1, _LENGTH), generator=torch.Generator().manual_seed(_DRAWS))
    other = ids.clone()
    other[0, -1] = 3 + (ids[0, -1] - 2) % (VOCABULARY - 3)  # another one
    model.eval()
    with torch.no_grad():
        one, two = (model(input_ids=given, use_cache=False).logits[0, :-1].float() for given in (ids, other))
    return float((one - two).abs().max() / one.std())


def _small_random(small: Any, trust_remote_code: bool, spread: float = _SPREAD) -> Any:
    torch.manual_seed(0)
    config = copy.deepcopy(small)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, trust_remote_code=trust_remote_code)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * spread)
    return model


def _attempt(model: nn.Module, groups: Mapping[str, Sequence[str]]) -> dict[str, str]:
    names = [name for group in groups.values() for name in group]
    if not names:
        return {}
    model = copy.deepcopy(model)
    try:
        transposed = any(isinstance(model.get_submodule(name), Conv1D) for name in names)
        lora = LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=names, fan_in_fan_out=transposed)
        adapted = get_peft_model(model, lora)
        waiting = {name: parameter for name, parameter in adapted.named_parameters() if parameter.requires_grad}
        with torch.no_grad():
            for name, parameter in waiting.items():
                if ".lora_B." in name:  # zero at first, and then lora_A has no gradient
                    parameter.normal_(std=0.02)
        for draw in range(_DRAWS):
            _step(adapted, draw)
            waiting = {name: one for name, one in waiting.items() if one.grad is None or not one.grad.any()}
            if not waiting:
                return {}
    except Exception as error:  # PEFT's refusal, or whatever a class does with what the adapter returns
        return dict.fromkeys(groups, f"an adapter there fails: {one_line(str(error), limit=120)}")
    without = {any_number(name.removeprefix("base_model.model.").partition(".lora_")[0]) for name in waiting}
    return dict.fromkeys(sorted(without), LEARNS_NOTHING)


def _step(model: Any, draw: int, length: int = _LENGTH) -> None:
    ids = torch.randint(3, VOCABULARY, (_ROWS, length), generator=torch.Generator().manual_seed(draw))
    model.train()
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    if loss.requires_grad:
        loss.backward()


def read_past(model: nn.Module) -> dict[str, str]:
    """The linear layers (* for numbers) whose weight their owner's code reads itself, which would not see an adapter,
    nor can it read 4 bits. Slices are those of tensor-parallel pretraining (BLOOM), which no run has."""
    sources: dict[type, str] = {}
    found = {}
    for name in linear_layers(model):
        parent, _, leaf = name.rpartition(".")
        owner = type(model.get_submodule(parent))
        if owner not in sources:
            sources[owner] = _forward_code(owner)
        if re.search(rf"\bself\.{re.escape(leaf)}\.weight\b(?!\s*\[|\.(dtype|device|shape)\b)", sources[owner]):
            found[any_number(name)] = PAST_ADAPTER
    return found


def _forward_code(owner: type) -> str:
    methods = [
        method for name, method in inspect.getmembers(owner, inspect.isfunction)
        if name != "__init__" and "init" not in name and method.__module__ == owner.__module__
    ]  # fmt: skip
    try:
        return "\n".join(inspect.getsource(method) for method in methods)
    except (OSError, TypeError):  # code without its file
        return ""
