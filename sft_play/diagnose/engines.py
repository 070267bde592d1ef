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
from sft_play.diagnose.known_bad import Facts, holds
from sft_play.errors import ConfigError
from sft_play.findings import Finding, pass_finding
from sft_play.log import one_line

_TABLE: Mapping[str, Any] = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
LOOKED_UP: str = _TABLE["looked_up"]
# `title` and `limits` by the name that SERVE= takes.
ENGINES: Mapping[str, Mapping[str, Any]] = _TABLE["engines"]
# Classes by the names of config.json, as the engines know them.
MODELS: Mapping[str, frozenset[str]] = {name: frozenset(one["names"]) for name, one in _TABLE["models"].items()}
VLLM_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
# Whole modules that vLLM takes beside an adapter: heads of classifiers.
_CLASSIFIERS = {"classifier", "score"}


@dataclass(frozen=True)
class Served:
    """What a config trains, as far as engines care; empty or None where it is not known."""

    mode: str = "lora"
    r: int = 16
    alpha: int = 32
    use_rslora: bool = False
    use_dora: bool = False
    modules_to_save: frozenset[str] = frozenset()
    targets: frozenset[str] = frozenset()
    """Last parts of the names of the layers that get an adapter."""
    chooses_targets: bool = False
    """The user named them."""
    adapts_experts: bool = False
    """Stacked experts get one too."""
    architecture: str | None = None

    @property
    def scale(self) -> float:
        """What an adapter's output is multiplied by in training."""
        return self.alpha / (math.sqrt(self.r) if self.use_rslora else self.r)


def vllm_rank(rank: int) -> int | None:
    """The smallest `--max-lora-rank` that takes this rank; None where no value does."""
    return next((most for most in VLLM_RANKS if most >= rank), None)


def _facts(served: Served) -> Facts:
    unknown = served.targets.difference(_TABLE["sglang_targets"])
    if served.architecture in MODELS["sglang_own_sizes"]:  # there it knows the sizes of all
        unknown = frozenset()
    alpha = served.alpha * math.sqrt(served.r)
    same = f", or train the same with use_rslora=false alpha={alpha:.0f}" if alpha == round(alpha) else ""
    architecture = served.architecture
    return {
        "mode": served.mode,
        "r": served.r,
        "use_dora": served.use_dora,
        "adapts_experts": served.adapts_experts,
        # an engine that divides alpha by the rank; with r = 1 alpha / sqrt(r) is alpha / r
        "is_rescaled": served.use_rslora and served.r > 1,
        "scale": served.scale,
        "plain_scale": served.alpha / served.r,
        "or_same_scale": same,
        "saves_modules": bool(served.modules_to_save),
        "saves_more_than_heads": bool(served.modules_to_save - _CLASSIFIERS),
        "modules_to_save": ", ".join(sorted(served.modules_to_save)),
        "architecture": architecture,
        "vllm_rank": vllm_rank(served.r),
        "vllm_without_lora": architecture in MODELS["vllm_without_lora"],
        "llama_cpp_converts": architecture and architecture in MODELS["llama_cpp"],
        "chooses_targets": served.chooses_targets,
        "sglang_unknown": bool(unknown),
        "unknown": ", ".join(sorted(unknown)),
    }


def architecture_of(values: Mapping[str, Any]) -> str | None:
    """The model's class as its config.json names it, else transformers' for its type; None where neither is known."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as OF_TYPES

    named = values.get("architectures")
    if isinstance(named, list) and named and isinstance(named[0], str):
        return named[0]
    of_type = OF_TYPES.get(str(values.get("model_type")))
    return of_type if isinstance(of_type, str) else None


def served_of(config: RunConfig, architecture: str | None, targets: Iterable[str] = ()) -> Served:
    """What a config trains; `targets`: names of the adapter's layers, of which the config may only say `auto`."""
    lora = config.tuning.lora
    given = lora.target_modules if lora.target_modules != "auto" else ()
    return Served(
        mode=config.tuning.mode,
        r=lora.stored_rank,
        alpha=lora.stored_alpha,
        use_rslora=lora.use_rslora,
        use_dora=lora.use_dora,
        modules_to_save=frozenset(
            [name.rpartition(".")[2] for name in lora.modules_to_save]
            + ["rows of model.add_tokens"] * bool(config.model.add_tokens)
        ),
        targets=frozenset(name.rpartition(".")[2] for name in (*targets,) or given),
        chooses_targets=bool(given),
        adapts_experts=bool(lora.adapted_parameters),
        architecture=architecture,
    )


def engine_names(asked: Sequence[str]) -> tuple[str, ...]:
    """The engines that SERVE= names, each once; raises ConfigError where a name is not one of them."""
    names = tuple(dict.fromkeys(name.lower() for name in asked))
    unknown = [one_line(name) for name in names if name not in ENGINES]
    if unknown:
        raise ConfigError(f"SERVE={','.join(unknown)} is no engine that is known here; there are {', '.join(ENGINES)}")
    return names


def engine_findings(name: str, served: Served) -> list[Finding]:
    """What this engine does not load of what is trained, each with its source; one PASS where that is nothing."""
    title, facts = ENGINES[name]["title"], _facts(served)
    is_full = served.mode == "full"
    met = [limit for limit in ENGINES[name]["limits"]
           if (not is_full or limit.get("of_full")) and holds(limit["when"], facts)]  # fmt: skip
    if not met:
        what = "model" if is_full else "adapter"
        return [pass_finding(f"serve {name}", f"nothing in this {what} that {title} is known not to load")]
    findings = []
    for limit in met:
        what, remedy = f"{limit['what'].format(**facts)} ({title})", limit["remedy"].format(**facts)
        source = f"{limit['source']} (looked up {LOOKED_UP})"
        findings.append(Finding(f"serve {name}", limit["verdict"], what, remedy, (source,)))
    return findings
