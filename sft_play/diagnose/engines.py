"""What serving engines do not load of what a config trains: a table, each entry with its source.

Read in the engines' own packages: vLLM 0.33.0, SGLang 0.5.23, and the llama.cpp of llama-cpp-python 0.3.36, on
2026-11-23. What a table cannot hold is not in it: kernels, hardware, and settings of a server's own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sft_play.config.schema import RunConfig
from sft_play.diagnose.engine_models import LLAMA_CPP, SGLANG_OWN_SIZES, VLLM_WITHOUT_LORA
from sft_play.errors import ConfigError
from sft_play.findings import Finding, Verdict, passed
from sft_play.log import one_line

LOOKED_UP = "2026-11-23"
VLLM_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values that `--max-lora-rank` takes."""
VLLM_DEFAULT_RANK = 16
_CLASSIFIERS = {"classifier", "score"}
"""Whole modules that vLLM takes beside an adapter: heads of classifiers."""
_SGLANG_TARGETS = frozenset(
    {
        *("q_proj", "k_proj", "v_proj", "qkv_proj", "o_proj", "gate_proj", "up_proj", "gate_up_proj", "down_proj"),
        *("q_a_proj", "kv_a_proj_with_mqa", "q_b_proj", "kv_b_proj", "wq_b", "wk", "weights_proj"),
    }
)
"""Layers whose sizes SGLang knows of any model."""
_MERGE = "merge before serving: make merge, and serve the merged folder"


@dataclass(frozen=True)
class Trained:
    """What a config trains, as far as engines care; empty or None where it is not known."""

    mode: str = "lora"
    r: int = 16
    alpha: int = 32
    use_rslora: bool = False
    use_dora: bool = False
    modules_to_save: frozenset[str] = frozenset()
    targets: frozenset[str] = frozenset()
    """Last parts of the names of the layers that get an adapter."""
    architecture: str | None = None
    """By config.json."""


@dataclass(frozen=True)
class Limit:
    """Something that an engine does not load (FAIL), or only with a flag or another base (WARN)."""

    verdict: Verdict
    meets: Callable[[Trained], bool]
    what: Callable[[Trained], str]
    do: Callable[[Trained], str]
    source: str
    of_full: bool = False
    """Whether it concerns a model that is trained whole, or merged, too."""


@dataclass(frozen=True)
class Engine:
    """An engine in the version that was read."""

    title: str
    limits: tuple[Limit, ...]


def _vllm(path: str) -> str:
    return f"https://github.com/vllm-project/vllm/blob/v0.33.0/{path}"


def _sglang(path: str) -> str:
    return f"https://github.com/sgl-project/sglang/blob/v0.5.23/python/sglang/srt/{path}"


def _llama_cpp(path: str) -> str:
    return f"https://github.com/ggml-org/llama.cpp/blob/master/{path}"


def scale(trained: Trained) -> float:
    """What an adapter's output is multiplied by in training."""
    return trained.alpha / (math.sqrt(trained.r) if trained.use_rslora else trained.r)


def is_rescaled(trained: Trained) -> bool:
    """Whether an engine that divides alpha by the rank computes another scale than training did."""
    return trained.use_rslora and trained.r > 1  # with r = 1 alpha / sqrt(r) is alpha / r


def _scale_text(trained: Trained) -> str:
    return (
        f"use_rslora=true: the adapter loads, and its scale is taken as alpha / r = {trained.alpha / trained.r:g} "
        f"where training had {scale(trained):g}: other answers without an error"
    )


def _scale_remedy(trained: Trained) -> str:
    alpha = trained.alpha * math.sqrt(trained.r)
    same = f", or train the same with use_rslora=false alpha={alpha:.0f}" if alpha == round(alpha) else ""
    return f"{_MERGE}{same}"


def _saved_text(trained: Trained) -> str:
    return f"modules_to_save=[{', '.join(sorted(trained.modules_to_save))}]: whole modules beside an adapter"


def vllm_rank(rank: int) -> int | None:
    """The smallest `--max-lora-rank` that takes this rank; None where no value does."""
    return next((most for most in VLLM_RANKS if most >= rank), None)


def sglang_halves(targets: frozenset[str]) -> tuple[str, ...]:
    """Targets whose adapters SGLang cannot put into its joined layers, for lack of the one that they are joined to.

    It joins q, k and v where it meets q_proj, which needs v_proj; gate and up where it meets gate_proj.
    """
    lost: set[str] = set()
    if "q_proj" in targets and "v_proj" not in targets:
        lost |= targets & {"q_proj", "k_proj"}
    if "q_proj" not in targets:
        lost |= targets & {"k_proj", "v_proj"}
    if "gate_proj" not in targets:
        lost |= targets & {"up_proj"}
    return tuple(sorted(lost))


def sglang_unknown(trained: Trained) -> tuple[str, ...]:
    """Targets whose sizes SGLang does not know in this model."""
    if trained.architecture in SGLANG_OWN_SIZES:
        return ()
    return tuple(sorted(trained.targets - _SGLANG_TARGETS))


ENGINES: Mapping[str, Engine] = {
    "vllm": Engine(
        "vLLM 0.33.0",
        (
            Limit(
                "FAIL",
                lambda t: vllm_rank(t.r) is None,
                lambda t: f"r={t.r}: the largest rank is {VLLM_RANKS[-1]}",
                lambda t: f"tuning.lora.r={VLLM_RANKS[-1]} or less, or {_MERGE}",
                _vllm("vllm/config/lora.py"),
            ),
            Limit(
                "WARN",
                lambda t: t.r > VLLM_DEFAULT_RANK and vllm_rank(t.r) is not None,
                lambda t: f"r={t.r}: the default is at most {VLLM_DEFAULT_RANK}",
                lambda t: f"serve with --enable-lora --max-lora-rank {vllm_rank(t.r)}",
                _vllm("vllm/config/lora.py"),
            ),
            Limit(
                "FAIL",
                lambda t: t.use_dora,
                lambda _: "use_dora=true: DoRA is refused",
                lambda _: _MERGE,
                _vllm("vllm/lora/peft_helper.py"),
            ),
            Limit(
                "FAIL",
                lambda t: bool(t.modules_to_save - _CLASSIFIERS),
                lambda t: f"{_saved_text(t)} are refused",
                lambda _: _MERGE,
                _vllm("vllm/lora/peft_helper.py"),
            ),
            Limit(
                "FAIL",
                lambda t: t.architecture in VLLM_WITHOUT_LORA,
                lambda t: f"{t.architecture} takes no adapter there",
                lambda _: _MERGE,
                _vllm("vllm/model_executor/models/registry.py"),
            ),
            Limit(
                "WARN",
                lambda t: t.mode == "qlora",
                lambda _: (
                    "tuning.mode=qlora: there are no NF4 weights to put the adapter on; on 16-bit ones it "
                    "answers differently than in training"
                ),
                lambda _: "serve the merged folder of make merge, which has the NF4 values in 16 bits",
                _vllm("vllm/model_executor/layers/quantization/__init__.py"),
            ),
        ),
    ),
    "sglang": Engine(
        "SGLang 0.5.23",
        (
            Limit(
                "FAIL",
                lambda t: t.use_dora,
                lambda _: "use_dora=true: DoRA is refused",
                lambda _: _MERGE,
                _sglang("lora/lora_manager.py"),
            ),
            Limit(
                "FAIL",
                is_rescaled,
                _scale_text,
                _scale_remedy,
                "https://github.com/sgl-project/sglang/issues/40835",
            ),
            Limit(
                "FAIL",
                lambda t: bool(t.modules_to_save),
                lambda t: f"{_saved_text(t)} are left out without an error",
                lambda _: _MERGE,
                _sglang("lora/lora.py"),
            ),
            Limit(
                "FAIL",
                lambda t: bool(sglang_halves(t.targets)),
                lambda t: (
                    f"target_modules: adapters on {', '.join(sglang_halves(t.targets))} are not applied, or stop "
                    "the server: q, k and v are one layer there, and need q_proj and v_proj; gate and up need gate_proj"
                ),
                lambda _: f"train the missing ones too (target_modules=auto takes all), or {_MERGE}",
                _sglang("lora/lora.py"),
            ),
            Limit(
                "FAIL",
                lambda t: bool(sglang_unknown(t)),
                lambda t: f"target_modules: {', '.join(sglang_unknown(t))} are not known there",
                lambda _: f"leave them out of tuning.lora.target_modules, or {_MERGE}",
                _sglang("lora/utils.py"),
            ),
            Limit(
                "WARN",
                lambda t: t.mode == "qlora",
                lambda _: "tuning.mode=qlora: on 16-bit weights the adapter answers differently than in training",
                lambda _: (
                    "serve with --quantization bitsandbytes --load-format bitsandbytes, or the merged folder of "
                    "make merge"
                ),
                _sglang("layers/quantization/bitsandbytes.py"),
            ),
        ),
    ),
    "llama.cpp": Engine(
        "llama.cpp of llama-cpp-python 0.3.36",
        (
            Limit(
                "FAIL",
                lambda t: t.architecture is not None and t.architecture not in LLAMA_CPP,
                lambda t: f"{t.architecture} has no converter to GGUF",
                lambda _: "take another model.name, or another engine",
                _llama_cpp("conversion/__init__.py"),
                of_full=True,
            ),
            Limit(
                "FAIL",
                lambda t: t.use_dora,
                lambda _: "use_dora=true: DoRA's magnitudes stop the adapter's converter",
                lambda _: _MERGE,
                _llama_cpp("convert_lora_to_gguf.py"),
            ),
            Limit("FAIL", is_rescaled, _scale_text, _scale_remedy, _llama_cpp("src/llama-adapter.h")),
            Limit(
                "FAIL",
                lambda t: bool(t.modules_to_save),
                lambda t: (
                    f"{_saved_text(t)}: embeddings stop the adapter's converter, norms are left out when it is loaded"
                ),
                lambda _: _MERGE,
                _llama_cpp("convert_lora_to_gguf.py"),
            ),
            Limit(
                "WARN",
                lambda t: t.mode == "qlora",
                lambda _: (
                    "tuning.mode=qlora: GGUF has no NF4; on other weights the adapter answers differently than in "
                    "training"
                ),
                lambda _: "convert the merged folder of make merge, which has the NF4 values in 16 bits",
                _llama_cpp("convert_lora_to_gguf.py"),
            ),
        ),
    ),
}
"""By the name that SERVE= takes."""


def architecture_of(values: Mapping[str, Any]) -> str | None:
    """The model's class as its config.json names it, else transformers' for its type; None where neither is known."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as OF_TYPES

    named = values.get("architectures")
    if isinstance(named, list) and named and isinstance(named[0], str):
        return named[0]
    of_type = OF_TYPES.get(str(values.get("model_type")))
    return of_type if isinstance(of_type, str) else None


def trained_of(config: RunConfig, architecture: str | None, targets: Iterable[str] = ()) -> Trained:
    """What a config trains; `targets`: names of the adapter's layers, of which the config may only say `auto`."""
    lora = config.tuning.lora
    given = lora.target_modules if lora.target_modules != "auto" else ()
    return Trained(
        mode=config.tuning.mode,
        r=lora.r,
        alpha=lora.alpha,
        use_rslora=lora.use_rslora,
        use_dora=lora.use_dora,
        modules_to_save=frozenset(name.rpartition(".")[2] for name in lora.modules_to_save),
        targets=frozenset(name.rpartition(".")[2] for name in (*targets,) or given),
        architecture=architecture,
    )


def engine_names(asked: Sequence[str]) -> tuple[str, ...]:
    """The engines that SERVE= names, each once.

    Raises:
        ConfigError: a name is not one of them.
    """
    names = tuple(dict.fromkeys(name.lower() for name in asked))
    unknown = [one_line(name) for name in names if name not in ENGINES]
    if unknown:
        raise ConfigError(f"SERVE={','.join(unknown)} is no engine that is known here; there are {', '.join(ENGINES)}")
    return names


def findings(name: str, trained: Trained) -> list[Finding]:
    """What this engine does not load of what is trained, each with its source; one PASS where that is nothing."""
    engine = ENGINES[name]
    met = [
        limit for limit in engine.limits if (trained.mode != "full" or limit.of_full) and limit.meets(trained)
    ]  # fmt: skip
    if not met:
        what = "model" if trained.mode == "full" else "adapter"
        return [passed(f"serve {name}", f"nothing in this {what} that {engine.title} is known not to load")]
    return [
        Finding(
            f"serve {name}", limit.verdict, f"{limit.what(trained)} ({engine.title})", limit.do(trained),
            (f"{limit.source} (looked up {LOOKED_UP})",),
        )
        for limit in met
    ]  # fmt: skip
