"""What serving engines do not load of what a config trains: `engines.json`, each entry with its source.

Read in the engines' own packages. What a table cannot hold is not in it: kernels, hardware, and settings of a server's
own. A FAIL is not loaded; a WARN only with a flag or another base. `of_full` concerns a model that is trained whole, or
merged, too.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sft_play.config.schema import RunConfig
from sft_play.diagnose.machine_checks import Facts, matches_conditions
from sft_play.errors import ConfigError
from sft_play.findings import Finding, pass_finding
from sft_play.log import one_line

_ENGINE_TABLE: Mapping[str, Any] = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
LOOKED_UP_DATE: str = _ENGINE_TABLE["looked_up"]
# `title` and `limits` by the name that SERVE= takes.
ENGINES: Mapping[str, Mapping[str, Any]] = _ENGINE_TABLE["engines"]
# Classes by the names of config.json, as the engines know them.
MODEL_CLASSES: Mapping[str, frozenset[str]] = {
    name: frozenset(entry["names"]) for name, entry in _ENGINE_TABLE["models"].items()
}
VLLM_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
# Whole modules that vLLM takes beside an adapter: heads of classifiers.
_CLASSIFIER_HEADS = {"classifier", "score"}


@dataclass(frozen=True)
class ServedModel:
    """What a config trains, as far as engines care; empty or None where it is not known."""

    mode: str = "lora"
    r: int = 16
    alpha: int = 32
    use_rslora: bool = False
    use_dora: bool = False
    modules_to_save: frozenset[str] = frozenset()
    targets: frozenset[str] = frozenset()
    """Last parts of the names of the layers that get an adapter."""
    has_chosen_targets: bool = False
    """The user named them."""
    adapts_experts: bool = False
    """Stacked experts get one too."""
    architecture: str | None = None

    @property
    def scale(self) -> float:
        """What an adapter's output is multiplied by in training."""
        return self.alpha / (math.sqrt(self.r) if self.use_rslora else self.r)


def smallest_vllm_rank(rank: int) -> int | None:
    """The smallest `--max-lora-rank` that takes this rank; None where no value does."""
    return next((limit for limit in VLLM_LORA_RANKS if limit >= rank), None)


def _engine_facts(served_model: ServedModel) -> Facts:
    unknown_targets = served_model.targets.difference(_ENGINE_TABLE["sglang_targets"])
    if served_model.architecture in MODEL_CLASSES["sglang_own_sizes"]:  # there it knows the sizes of all
        unknown_targets = frozenset()
    alpha = served_model.alpha * math.sqrt(served_model.r)
    same_scale_hint = f", or train the same with use_rslora=false alpha={alpha:.0f}" if alpha == round(alpha) else ""
    architecture = served_model.architecture
    return {
        "mode": served_model.mode,
        "r": served_model.r,
        "use_dora": served_model.use_dora,
        "adapts_experts": served_model.adapts_experts,
        # an engine that divides alpha by the rank; with r = 1 alpha / sqrt(r) is alpha / r
        "is_rescaled": served_model.use_rslora and served_model.r > 1,
        "scale": served_model.scale,
        "plain_scale": served_model.alpha / served_model.r,
        "or_same_scale": same_scale_hint,
        "saves_modules": bool(served_model.modules_to_save),
        "saves_more_than_heads": bool(served_model.modules_to_save - _CLASSIFIER_HEADS),
        "modules_to_save": ", ".join(sorted(served_model.modules_to_save)),
        "architecture": architecture,
        "vllm_rank": smallest_vllm_rank(served_model.r),
        "vllm_without_lora": architecture in MODEL_CLASSES["vllm_without_lora"],
        "llama_cpp_converts": architecture and architecture in MODEL_CLASSES["llama_cpp"],
        "chooses_targets": served_model.has_chosen_targets,
        "sglang_unknown": bool(unknown_targets),
        "unknown": ", ".join(sorted(unknown_targets)),
    }


def model_architecture(model_config: Mapping[str, Any]) -> str | None:
    """The model's class as its config.json names it, else transformers' for its type; None where neither is known."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as OF_TYPES

    architectures = model_config.get("architectures")
    if isinstance(architectures, list) and architectures and isinstance(architectures[0], str):
        return architectures[0]
    default_class = OF_TYPES.get(str(model_config.get("model_type")))
    return default_class if isinstance(default_class, str) else None


def build_served_model(config: RunConfig, architecture: str | None, targets: Iterable[str] = ()) -> ServedModel:
    """What a config trains; `targets`: names of the adapter's layers, of which the config may only say `auto`."""
    lora = config.tuning.lora
    chosen_targets = lora.target_modules if lora.target_modules != "auto" else ()
    return ServedModel(
        mode=config.tuning.mode,
        r=lora.stored_rank,
        alpha=lora.stored_alpha,
        use_rslora=lora.use_rslora,
        use_dora=lora.use_dora,
        modules_to_save=frozenset(
            [name.rpartition(".")[2] for name in lora.modules_to_save]
            + ["rows of model.add_tokens"] * bool(config.model.add_tokens)
        ),
        targets=frozenset(name.rpartition(".")[2] for name in (*targets,) or chosen_targets),
        has_chosen_targets=bool(chosen_targets),
        adapts_experts=bool(lora.adapted_parameters),
        architecture=architecture,
    )


def parse_engine_names(requested_names: Sequence[str]) -> tuple[str, ...]:
    """The engines that SERVE= names, each once; raises ConfigError where a name is not one of them."""
    names = tuple(dict.fromkeys(name.lower() for name in requested_names))
    unknown = [one_line(name) for name in names if name not in ENGINES]
    if unknown:
        raise ConfigError(f"SERVE={','.join(unknown)} is no engine that is known here; there are {', '.join(ENGINES)}")
    return names


def engine_findings(name: str, served_model: ServedModel) -> list[Finding]:
    """What this engine does not load of what is trained, each with its source; one PASS where that is nothing."""
    title, facts = ENGINES[name]["title"], _engine_facts(served_model)
    is_full = served_model.mode == "full"
    matching_limits = [limit for limit in ENGINES[name]["limits"]
           if (not is_full or limit.get("of_full")) and matches_conditions(limit["when"], facts)]  # fmt: skip
    if not matching_limits:
        message = "model" if is_full else "adapter"
        return [pass_finding(f"serve {name}", f"nothing in this {message} that {title} is known not to load")]
    findings = []
    for limit in matching_limits:
        message, remedy = f"{limit['what'].format(**facts)} ({title})", limit["remedy"].format(**facts)
        source = f"{limit['source']} (looked up {LOOKED_UP_DATE})"
        findings.append(Finding(f"serve {name}", limit["verdict"], message, remedy, (source,)))
    return findings
