"""Which linear layers of a class take an adapter, whether its tokens see only those before them,
and whether its logits are what TRL's loss takes them for: tried on a small model of it.

PEFT refuses some layers, some return tuples (routers), some get no gradient (indexers), some are
read past the adapter. What the table of families knows is recorded there, and a test tries it
again.
"""

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
from sft_play.log import one_line
from sft_play.machine.software import load_or_measure
from sft_play.models.families import MODEL_FAMILIES, no_adapter_reason
from sft_play.models.shape import AdapterPlacement
from sft_play.training.class_checks.small_model import (
    MAX_PARAMETERS,
    VOCABULARY_SIZE,
    length_threshold,
    measure_small_model,
    model_type_name,
    small_model,
)
from sft_play.training.model.fused_head import fused_head

# Part of the key of what is remembered: raised whenever this module would answer otherwise.
TRIAL_VERSION = 6
NO_GRADIENT = "it gets no gradient"
BYPASSES_ADAPTER = "the class reads its weight past the adapter"
# How far, of their spread, the last token of a row may move the outputs before it: rounding (of the
# causal classes of transformers 5.23 below 1e-4 in fp32; XLNet 0.04, CPMAnt 4.7).
LOOKAHEAD_TOLERANCE = 1e-3
# Tokens and rows of a batch, and batches until every expert should have had a token.
_LENGTH, _ROWS, _MAX_DRAWS = 24, 2, 4
# Spread of what moves a small model's first values: those at zero would pass no gradient on.
_NOISE_SPREAD = 0.02
# Fields of a config that say nothing of the class's code.
_IRRELEVANT_FIELDS = (
    "_name_or_path",
    "_commit_hash",
    "transformers_version",
    "architectures",
    "dtype",
    "torch_dtype",
)


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
    return getattr(model, "get_output_embeddings", lambda: None)()


def find_adapter_placement(
    model: Any, *, trust_remote_code: bool = False
) -> tuple[AdapterPlacement, frozenset[str]]:
    """Where adapters go in a model (its weights may be on the meta device), and the linear layers
    that get none. Raises ModelError: tokens of its class see those after them."""
    model_type, layers = str(model.config.model_type), list(linear_layers(model))
    reasons, untried_reason = dict[str, str](), ""
    if model_type not in MODEL_FAMILIES:
        try:
            reasons = dict(_cached_trial(model.config, find_failing_layers, trust_remote_code))
        except _TrialFailed as reason:
            reasons, untried_reason = direct_weight_reads(model), str(reason)
    if _EVERY_LAYER in reasons:
        raise ModelError(
            f"model_type {one_line(model_type)}:"
            f" {reasons[_EVERY_LAYER]}; take a causal language model"
        )
    for layer in layers:
        if recorded_reason := no_adapter_reason(model_type, layer.rpartition(".")[2]):
            reasons[wildcard_name(layer)] = recorded_reason
    layers_without_adapter = frozenset(layer for layer in layers if wildcard_name(layer) in reasons)
    targets = shortest_suffixes(
        [layer for layer in layers if layer not in layers_without_adapter],
        [name for name, _ in model.named_modules() if name],
    )
    listed_reasons = sorted(
        (pattern, reasons[pattern]) for pattern in set(map(wildcard_name, layers_without_adapter))
    )
    return (
        AdapterPlacement(tuple(targets), tuple(listed_reasons), untried_reason),
        layers_without_adapter,
    )


def wildcard_name(path: str) -> str:
    """A layer's name with * for numbers: the same layer of every block, and of every expert."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", path)


def shortest_suffixes(layers: Sequence[str], modules: Iterable[str]) -> list[str]:
    """The shortest ends of names that match these layers and no other module, as PEFT compares
    them."""
    selected, remaining, all_modules, targets = set(layers), sorted(layers), list(modules), []
    for length in range(1, 2 + max((name.count(".") for name in layers), default=0)):
        suffixes = dict.fromkeys(_suffix(name, length) for name in remaining)
        other_suffixes = {_suffix(name, length) for name in all_modules if name not in selected}
        unique = {suffix for suffix in suffixes if suffix not in other_suffixes}
        targets += sorted(unique)
        remaining = [name for name in remaining if _suffix(name, length) not in unique]
    return sorted(targets)


def _suffix(name: str, length: int) -> str:
    return ".".join(name.split(".")[-length:])


def parameters_without_gradient(model: Any, *, trust_remote_code: bool = False) -> frozenset[str]:
    """Names (* for numbers) of parameters that a step of the class gives no gradient: biases that
    only choose experts, indexers, parts that text does not pass; none where no small model
    computes."""
    return frozenset(_trial_result(model.config, _try_in_full, trust_remote_code))


def late_gradients(model: Any, *, trust_remote_code: bool = False) -> dict[str, str]:
    """Names (* for numbers) of parameters that some steps give no gradient and later ones do, for
    which a run waits: what sums up tokens in groups of a size that the config sets, which shorter
    rows pass by (the text says so), and what is multiplied by a tensor that the class begins at
    zero (Doge's `A`): a gradient of zeros (no text).
    """
    untrained = parameters_without_gradient(model, trust_remote_code=trust_remote_code)
    reasons = _trial_result(model.config, _try_late, trust_remote_code)
    return {name: reason for name, reason in reasons.items() if name not in untrained}


def has_custom_logits(hf_config: Any, *, trust_remote_code: bool = False) -> bool:
    """Whether a class's logits are others than TRL's head computes of its last hidden states (a
    layer between, a factor or a cap that TRL does not know, words left out); False where no small
    model computes."""
    return bool(_trial_result(hf_config, _try_head, trust_remote_code))


def keeps_graphs(hf_config: Any, *, trust_remote_code: bool = False) -> bool:
    """Whether the class keeps what it computed in a pass, with all that its gradient needs, on its
    modules (RecurrentGemma's states): checkpointing would free none of it. False where no small
    model computes.
    """
    return bool(_trial_result(hf_config, _try_keeping, trust_remote_code))


# Empty for classes of the table, and where no small model computes.
def _trial_result(
    hf_config: Any, trial: Callable[..., dict[str, str]], trust_remote_code: bool
) -> dict[str, str]:
    if str(hf_config.model_type) in MODEL_FAMILIES:
        return {}
    try:
        return _cached_trial(hf_config, trial, trust_remote_code)
    except _TrialFailed:
        return {}


def _try_head(config: Any, *, trust_remote_code: bool = False) -> dict[str, str]:
    if getattr(config, "unpadded_vocab_size", None):
        # below the vocabulary, as in the model itself
        config.unpadded_vocab_size = VOCABULARY_SIZE - 8
    model = small_model(config, "flash", trust_remote_code)
    ids = torch.randint(
        3, VOCABULARY_SIZE - 8, (_ROWS, _LENGTH), generator=torch.Generator().manual_seed(0)
    )
    log_probs = []
    for from_class_logits in (True, False):
        with torch.no_grad(), fused_head(model, from_class_logits=from_class_logits):
            log_probs.append(model(input_ids=ids, labels=ids, fused_lm_head=True).log_probs)
    difference = float((log_probs[0] - log_probs[1]).abs().max() / log_probs[0].std())
    if difference <= LOOKAHEAD_TOLERANCE:
        return {}
    return {"": f"log-probabilities differ by {difference:.2g} of their spread"}


def trained_pattern(tensor_name: str) -> str:
    """The name, with * for numbers, of the parameter that a trained tensor is or adapts."""
    adapted, adapter, _ = tensor_name.removeprefix("base_model.model.").partition(".lora_")
    return wildcard_name(f"{adapted}.weight" if adapter else adapted)


def freeze_parameters(model: nn.Module, patterns: Collection[str]) -> None:
    """Take the parameters of these names, with * for numbers, out of training."""
    for name, parameter in model.named_parameters():
        if wildcard_name(name) in patterns:
            parameter.requires_grad_(False)


def _try_late(config: Any, *, trust_remote_code: bool = False) -> dict[str, str]:
    late = dict.fromkeys(
        _try_in_full(config, noise_spread=0.0, trust_remote_code=trust_remote_code), ""
    )
    if length_threshold(config):
        # rows that are too short for what reads tokens in groups
        late |= _try_in_full(config, length=3, trust_remote_code=trust_remote_code)
    return late


def _try_in_full(
    config: Any,
    *,
    length: int = _LENGTH,
    noise_spread: float = _NOISE_SPREAD,
    trust_remote_code: bool = False,
) -> dict[str, str]:
    with torch.random.fork_rng(devices=[]):
        model = _random_small_model(config, trust_remote_code, noise_spread)
        parameters = dict(model.named_parameters())
        for draw in range(_MAX_DRAWS):
            _run_step(model, draw, length)
            trained = {
                wildcard_name(name)
                for name, parameter in parameters.items()
                if parameter.grad is not None and bool(parameter.grad.any())
            }
            untrained = {wildcard_name(name) for name in parameters} - trained
            if not untrained:
                break
    return dict.fromkeys(sorted(untrained), NO_GRADIENT)


def _try_keeping(config: Any, *, trust_remote_code: bool = False) -> dict[str, str]:
    with torch.random.fork_rng(devices=[]):
        model = _random_small_model(config, trust_remote_code)
        _run_step(model, 0)
    values = (value for module in model.modules() for value in tree_iter(vars(module)))
    keeps_graph = any(
        isinstance(value, torch.Tensor) and value.grad_fn is not None for value in values
    )
    return {"": "it keeps tensors that need a gradient"} if keeps_graph else {}


class _TrialFailed(Exception):
    """No small model of the class computes; the text says why."""


# A model with its own code is always tried anew.
def _cached_trial(
    hf_config: Any, trial: Callable[..., dict[str, str]], trust_remote_code: bool
) -> dict[str, str]:
    fields = {
        name: value for name, value in hf_config.to_dict().items() if name not in _IRRELEVANT_FIELDS
    }
    fields = json.loads(json.dumps(fields, default=repr))
    cache_key = {"config": fields, "version": TRIAL_VERSION, "trial": trial.__name__}

    def run_trial() -> dict[str, str]:
        reasons, problem = measure_small_model(
            hf_config,
            trial,
            trust_remote_code=trust_remote_code,
            max_parameters=MAX_PARAMETERS,
            needs_all_layers=True,
        )
        if reasons is None:
            raise _TrialFailed(f"{model_type_name(hf_config)} could not be tried: {problem}")
        return reasons

    return load_or_measure(
        "adapters",
        cache_key,
        TypeAdapter(dict[str, str]),
        run_trial,
        cacheable=not trust_remote_code,
    )


def find_failing_layers(config: Any, *, trust_remote_code: bool = False) -> dict[str, str]:
    """The linear layers on which an adapter fails in any block, and why; raises where the class
    does not compute."""
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what PEFT says of a choice that is only tried
        model = _random_small_model(config, trust_remote_code)
        _run_step(copy.deepcopy(model), 0)  # some keep their states, which cannot be copied
        # how far the last token of a row moves the outputs before it, over their spread
        ids = torch.randint(
            3, VOCABULARY_SIZE, (1, _LENGTH), generator=torch.Generator().manual_seed(_MAX_DRAWS)
        )
        changed_ids = ids.clone()
        changed_ids[0, -1] = 3 + (ids[0, -1] - 2) % (VOCABULARY_SIZE - 3)  # another one
        causal_model = copy.deepcopy(model).eval()
        with torch.no_grad():
            logits, changed_logits = (
                causal_model(input_ids=input_ids, use_cache=False).logits[0, :-1].float()
                for input_ids in (ids, changed_ids)
            )
        lookahead = float((logits - changed_logits).abs().max() / logits.std())
        if lookahead > LOOKAHEAD_TOLERANCE:
            return {
                _EVERY_LAYER: (
                    "its tokens see those after them (the last one of a row moves outputs before"
                    f" it by {lookahead:.2g} of their spread), and training would teach it to copy"
                )
            }
        reasons = direct_weight_reads(model)
        groups: dict[str, list[str]] = {}
        for name in linear_layers(model):
            if wildcard_name(name) not in reasons:
                groups.setdefault(wildcard_name(name), []).append(name)
        if _try_adapters(model, groups):  # at once is quicker, and the rule
            for pattern, group in groups.items():
                reasons |= _try_adapters(model, {pattern: group})
            reasons |= _try_adapters(
                model,
                {pattern: group for pattern, group in groups.items() if pattern not in reasons},
            )
    return reasons


# The name under which a trial says why a class cannot be trained at all.
_EVERY_LAYER = ""


def _random_small_model(
    config: Any, trust_remote_code: bool, noise_spread: float = _NOISE_SPREAD
) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        copy.deepcopy(config), dtype=torch.float32, trust_remote_code=trust_remote_code
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * noise_spread)
    return model


def _try_adapters(model: nn.Module, groups: Mapping[str, Sequence[str]]) -> dict[str, str]:
    names = [name for group in groups.values() for name in group]
    if not names:
        return {}
    model = copy.deepcopy(model)
    try:
        is_transposed = any(isinstance(model.get_submodule(name), Conv1D) for name in names)
        peft_model = get_peft_model(
            model,
            LoraConfig(
                task_type="CAUSAL_LM", r=2, target_modules=names, fan_in_fan_out=is_transposed
            ),
        )
        untrained = {
            name: parameter
            for name, parameter in peft_model.named_parameters()
            if parameter.requires_grad
        }
        with torch.no_grad():
            for name, parameter in untrained.items():
                if ".lora_B." in name:  # zero at first, and then lora_A has no gradient
                    parameter.normal_(std=0.02)
        for draw in range(_MAX_DRAWS):
            _run_step(peft_model, draw)
            untrained = {
                name: value
                for name, value in untrained.items()
                if value.grad is None or not value.grad.any()
            }
            if not untrained:
                return {}
    # PEFT's refusal, or whatever a class does with what the adapter returns
    except Exception as error:
        return dict.fromkeys(groups, f"an adapter there fails: {one_line(str(error), limit=120)}")
    layers = [name.removeprefix("base_model.model.").partition(".lora_")[0] for name in untrained]
    return dict.fromkeys(sorted(map(wildcard_name, layers)), NO_GRADIENT)


def _run_step(model: Any, draw: int, length: int = _LENGTH) -> None:
    ids = torch.randint(
        3, VOCABULARY_SIZE, (_ROWS, length), generator=torch.Generator().manual_seed(draw)
    )
    model.train()
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    if loss.requires_grad:
        loss.backward()


def direct_weight_reads(model: nn.Module) -> dict[str, str]:
    """Find linear layers (* for numbers) whose owner's code reads `self.NAME.weight` itself: it
    would pass an adapter by, and cannot read 4 bits. Slices do not count: only tensor-parallel
    pretraining (BLOOM) takes them, and no run does."""
    owners = {
        name: type(model.get_submodule(name.rpartition(".")[0])) for name in linear_layers(model)
    }
    sources = {owner: _methods_source(owner) for owner in set(owners.values())}
    reasons = {}
    for name, owner in owners.items():
        attribute = re.escape(name.rpartition(".")[2])
        if re.search(
            rf"\bself\.{attribute}\.weight\b(?!\s*\[|\.(dtype|device|shape)\b)", sources[owner]
        ):
            reasons[wildcard_name(name)] = BYPASSES_ADAPTER
    return reasons


def _methods_source(owner: type) -> str:
    methods = [
        method
        for name, method in inspect.getmembers(owner, inspect.isfunction)
        if name != "__init__" and "init" not in name and method.__module__ == owner.__module__
    ]
    try:
        return "\n".join(inspect.getsource(method) for method in methods)
    except (OSError, TypeError):  # code without its file
        return ""
