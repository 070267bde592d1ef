"""Which masks a class needs: do chats of a row stay apart, by a mask or by boundaries alone, and
does padding need one?

Measured on a small model of the class on the CPU: some classes derive no mask from position ids
(falcon, opt, bloom, gpt-oss), some carry a state from token to token (mamba); some read the mask
elsewhere (experts' balance loss).
"""

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from sft_play.data.masks.token_row import IGNORED
from sft_play.errors import ConfigError
from sft_play.training.class_checks.small_model import (
    MAX_TRAINED_PARAMETERS,
    VOCABULARY_SIZE,
    measure_small_model,
    model_type_name,
    pack_row,
    run_model,
    small_model,
)
from sft_play.training.model import attention_functions
from sft_play.training.prepare.experts import balance_coefficient

# Least difference that a chat's beginning must make to its end: in a model below it, no leak would
# show.
MIN_INFLUENCE = 0.05
# Difference of logits over their spread that counts as rounding: of 151 classes of transformers
# 5.23, 94 differ by 2e-4 at most (93 of them by 2e-5), the others by 0.19 and more (fp32,
# 2026-11-21).
APART_TOLERANCE = 1e-3
# The same of logits and gradients without a mask for padding. See benchmarks/LOG.md, 2026-11-23,
# for the classes of transformers 5.23: what matters changes gradients by 4e-6 or more.
PADDING_TOLERANCE = 2e-6
# The same of logits and gradients with boundaries in place of a mask.
BOUNDARIES_TOLERANCE = 1e-4
# Tokens of two rows: the second has more padding than the small windows are long.
_PADDED_LENGTHS = (42, 19)
_WITHOUT_PACKING = (
    "data.packing=none: rows of similar length then share a micro-batch (train.group_by_length)"
)


def require_packable(
    hf_config: Any,
    *,
    attention: str,
    max_row_tokens: int | None = None,
    trust_remote_code: bool = False,
) -> str:
    """A line that a model of this config keeps the chats of one row (of at most `max_row_tokens`
    tokens) apart, with the measured difference; flash attention is measured as sdpa or eager.
    Raises ConfigError: it does not, or it cannot be measured."""
    model_type = model_type_name(hf_config)
    measurement, problem = measure_small_model(
        hf_config,
        measure_packing_leak,
        attention=attention,
        max_row_tokens=max_row_tokens,
        trust_remote_code=trust_remote_code,
    )
    leak, influence = measurement or (0.0, 0.0)
    if measurement is not None and not influence >= MIN_INFLUENCE:
        problem = (
            f"a token hardly depends on those before it there, by {influence:.1g} of the spread"
        )
    elif not math.isfinite(leak):
        problem = "a small model of its class computes numbers that are not finite"
    if problem:
        raise ConfigError(
            f"data.packing=best_fit: whether {model_type} keeps the chats of a row apart cannot be "
            f"measured ({problem}); use {_WITHOUT_PACKING}"
        )
    leak_words = (
        f"on a small model of its class the logits of a chat differ by {leak:.0e} of their spread"
    )
    if leak >= APART_TOLERANCE:
        raise ConfigError(
            f"data.packing=best_fit: {model_type} does not keep the chats of a row apart:"
            f" {leak_words}; use {_WITHOUT_PACKING}"
        )
    return (
        f"Packing: {model_type} keeps the chats of a row apart"
        f" ({leak_words}, alone, packed, or after another chat)"
    )


def measure_packing_leak(
    config: Any, *, attention: str, trust_remote_code: bool = False
) -> tuple[float, float]:
    """Measure, in fp32 on the CPU, how much a chat changes when it shares a row. Returns two
    differences of logits over their spread: of the second chat in a row of two, compared with the
    same chat alone, after another chat, or in a padded batch; and, to show what a leak looks like,
    after another beginning of the same chat. No random state is changed."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        model = small_model(config, attention, trust_remote_code)
        generator = torch.Generator().manual_seed(1)
        # longer than the small windows, so that windows and chunks cross the border
        start, length = 19, 23
        first, other_first, second = (
            torch.randint(3, VOCABULARY_SIZE, (size,), generator=generator).numpy()
            for size in (start, start, length)
        )

        def logits(*packs: list[Any]) -> torch.Tensor:
            return run_model(
                model, [pack_row(pack) for pack in packs], needs_gradients=False
            ).logits

        alone = logits([second])
        packed, other_packed = (logits([chat, second])[start:] for chat in (first, other_first))
        joined, other_joined = (
            logits([np.concatenate([chat, second])])[start:] for chat in (first, other_first)
        )
        # the second chat, behind the first and alone
        batch = logits([first, second], [second])[start:]
    spread = float(alone.std()) or 1.0
    gaps = torch.cat([packed - other_packed, packed - alone, batch - torch.cat([alone, alone])])
    return float(gaps.abs().max()) / spread, float((joined - other_joined).abs().max()) / spread


@dataclass(frozen=True)
class MaskRequirement:
    """Whether rows come with a mask, and why."""

    is_needed: bool
    reason: str


@dataclass(frozen=True)
class MaskDifference:
    """What leaving out a mask changes in a model."""

    # Largest difference of a logit at a position without padding, in fp32, over the logits' spread.
    logits: float
    # Distance of all gradients in fp32, over their length.
    gradients: float
    # What an influence looks like that should be none, in logits over their spread.
    influence: float
    # How much of the first two is rounding.
    tolerance: float


def check_padding(
    hf_config: Any,
    *,
    attention: str,
    max_row_tokens: int | None = None,
    trust_remote_code: bool = False,
) -> MaskRequirement:
    """Whether padded rows, of at most `max_row_tokens` tokens, of a model of this config need their
    mask; what cannot be measured keeps it."""
    return _mask_requirement(
        hf_config,
        measure_padding,
        kept_reason="padded rows keep their mask",
        freed_reason="padded rows need no mask, as attention is causal and padding at the end",
        trust_remote_code=trust_remote_code,
        max_row_tokens=max_row_tokens,
        attention=attention,
    )


def check_boundaries(
    hf_config: Any, *, max_row_tokens: int | None = None, trust_remote_code: bool = False
) -> MaskRequirement:
    """Whether packs, of at most `max_row_tokens` tokens, need a mask beside their boundaries
    (`varlen`); what cannot be measured keeps it."""
    return _mask_requirement(
        hf_config,
        measure_boundaries,
        kept_reason="chats of one row keep a mask between them",
        freed_reason="chats of one row need no mask: they are told apart by their boundaries",
        trust_remote_code=trust_remote_code,
        max_row_tokens=max_row_tokens,
    )


def _mask_requirement(
    hf_config: Any,
    measure: Callable[..., MaskDifference],
    *,
    kept_reason: str,
    freed_reason: str,
    **options: Any,
) -> MaskRequirement:
    difference, problem = measure_small_model(
        hf_config, measure, max_parameters=MAX_TRAINED_PARAMETERS, **options
    )
    model_type = model_type_name(hf_config)
    if difference is None or not difference.influence >= MIN_INFLUENCE:
        problem = problem or "in a small model of its class nothing would show it"
        return MaskRequirement(
            True, f"{kept_reason}: what {model_type} does without cannot be measured ({problem})"
        )
    figures = (
        f"on a small model of {model_type}'s class logits differ by {difference.logits:.1g} of"
        f" their spread, gradients by {difference.gradients:.1g} of their length"
    )
    # nan is more
    if difference.logits <= difference.tolerance and difference.gradients <= difference.tolerance:
        return MaskRequirement(False, f"{freed_reason} ({figures})")
    return MaskRequirement(True, f"{kept_reason}: without one, {figures}")


def measure_padding(
    config: Any, *, attention: str, trust_remote_code: bool = False
) -> MaskDifference:
    """What the mask of two padded rows changes, on the CPU, with the experts' balance loss where
    TRL adds it."""
    with torch.random.fork_rng(devices=[]):
        balance_inputs = {}
        if balance_coefficient(config.get_text_config()) > 0:
            # with the class's own weight, often 0.001, what padding adds to this loss would be as
            # small as rounding
            config = copy.deepcopy(config)
            config.get_text_config().router_aux_loss_coef = 1.0
            balance_inputs["output_router_logits"] = True
        model = small_model(config, attention, trust_remote_code)
        generator, rows = np.random.default_rng(1), []
        for length in _PADDED_LENGTHS:
            ids = generator.integers(4, VOCABULARY_SIZE, size=length)
            rows.append(
                {
                    "input_ids": ids,
                    "labels": np.where(np.arange(length) < length // 3, IGNORED, ids),
                }
            )
        # another first token: what a row's end owes to its beginning
        changed_rows = [
            {**row, "input_ids": np.concatenate([[3], row["input_ids"][1:]])} for row in rows
        ]
        masked, unmasked = (
            run_model(model, rows, uses_masks=masks, **balance_inputs) for masks in (True, False)
        )
        changed_outputs = run_model(model, changed_rows, **balance_inputs)
    # of each row, without padding
    last_positions = torch.tensor([_PADDED_LENGTHS[0] - 1, sum(_PADDED_LENGTHS) - 1])
    spread = float(masked.logits.std()) or 1.0
    return MaskDifference(
        logits=float((masked.logits - unmasked.logits).abs().max()) / spread,
        gradients=_relative_distance(unmasked.gradients, masked.gradients),
        influence=float((masked.logits - changed_outputs.logits)[last_positions].abs().max())
        / spread,
        tolerance=PADDING_TOLERANCE,
    )


def measure_boundaries(config: Any, *, trust_remote_code: bool = False) -> MaskDifference:
    """How the same chats differ as packs with sdpa and its mask, and one behind the other with
    `varlen`, in fp32 on the CPU; and padded rows of them, which evaluation has."""
    with torch.random.fork_rng(devices=[]):
        sdpa_model, varlen_model = (
            small_model(config, name, trust_remote_code)
            for name in ("sdpa", attention_functions.VARLEN_ATTENTION)
        )
        generator = np.random.default_rng(2)
        chats = [
            [generator.integers(3, VOCABULARY_SIZE, size=length) for length in lengths]
            # some longer than the small windows: these begin inside them
            for lengths in ((19, 23), (30,), (11, 9, 5))
        ]
        packs = [pack_row(row_chats) for row_chats in chats]
        masked, separated = run_model(sdpa_model, packs), run_model(varlen_model, packs, flat=True)
        # each row as one chat: what a model computes that cannot tell them apart
        joined_rows = [{**row, "chat_lengths": np.array([len(row["input_ids"])])} for row in packs]
        leaking = run_model(varlen_model, joined_rows, flat=True)
        varlen_model.train()  # raises ValueError for a class that drops attention probabilities
        run_model(varlen_model, packs, flat=True)
        varlen_model.eval()
        single_rows = [
            {name: pack_row([chat])[name] for name in ("input_ids", "labels")}
            for row in chats
            for chat in row
        ]
        sdpa_rows, varlen_rows = (
            run_model(sdpa_model, single_rows),
            run_model(varlen_model, single_rows, uses_masks=False),
        )
    spread = float(masked.logits.std()) or 1.0
    differences = torch.cat(
        [masked.logits - separated.logits, sdpa_rows.logits - varlen_rows.logits]
    )
    return MaskDifference(
        logits=float(differences.abs().max()) / spread,
        gradients=_relative_distance(separated.gradients, masked.gradients),
        influence=float((leaking.logits - separated.logits).abs().max()) / spread,
        tolerance=BOUNDARIES_TOLERANCE,
    )


def _relative_distance(tensor: torch.Tensor, reference: torch.Tensor) -> float:
    return float((tensor - reference).norm() / reference.norm().clamp(min=1e-30))
