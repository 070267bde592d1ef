"""What serving engines do not load: the table against its rules written again, and what `check SERVE=` says."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest

from sft_play.diagnose import engines
from sft_play.diagnose.engines import ENGINES, ServedModel, engine_findings, model_architecture, parse_engine_names
from sft_play.errors import ConfigError
from tests.conftest import chat

LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
MODELS = ("LlamaForCausalLM", "GPT2LMHeadModel", "Qwen3_5ForCausalLM", "OPTForCausalLM", "NobodysForCausalLM", None)


def draw_served(draw: random.Random) -> ServedModel:
    return ServedModel(
        mode=draw.choice(["full", "lora", "qlora"]),
        r=draw.choice([1, 2, 8, 15, 16, 17, 32, 33, 64, 129, 256, 257, 320, 321, 512, 513, 4096]),
        alpha=draw.choice([1, 16, 32, 64]),
        use_rslora=draw.random() < 0.5,
        use_dora=draw.random() < 0.3,
        modules_to_save=frozenset(draw.sample(["embed_tokens", "lm_head", "norm", "score"], draw.choice([0, 0, 1, 2]))),
        has_chosen_targets=draw.random() < 0.3,
        adapts_experts=draw.random() < 0.3,
        targets=frozenset(draw.sample([*LINEAR, "shared_expert_gate", "c_attn"], draw.randint(1, 9))),
        architecture=draw.choice(MODELS),
    )


def expected(engine: str, of: ServedModel) -> set[tuple[str, str]]:
    """The verdicts, each with a word of its text, by the rules in words.

    vLLM: ranks to 512, above 16 with a flag; no DoRA, no whole modules but a classifier's head, some classes take no
    adapter. SGLang: no DoRA, alpha / r only, no whole modules, and only names that it knows; it joins layers.
    In both, adapters on stacked experts are doubtful. llama.cpp: classes of its converter only; no DoRA, alpha / r
    only, no whole modules.
    """
    rows: set[tuple[str, str]] = set()
    if engine == "llama.cpp" and of.architecture in ("OPTForCausalLM", "NobodysForCausalLM"):
        rows.add(("FAIL", "converter to GGUF"))
    if of.mode == "full":
        return rows
    if of.mode == "qlora":
        rows.add(("WARN", "qlora"))
    if of.use_dora:
        rows.add(("FAIL", "use_dora"))
    if of.adapts_experts and engine != "llama.cpp":
        rows.add(("WARN", "target_parameters"))
    if engine == "vllm":
        if of.r > 512:
            rows.add(("FAIL", "largest rank"))
        elif of.r >= 17:
            rows.add(("WARN", "default is at most 16"))
        if of.modules_to_save & {"embed_tokens", "lm_head", "norm"}:
            rows.add(("FAIL", "modules_to_save"))
        if of.architecture == "GPT2LMHeadModel":
            rows.add(("FAIL", "takes no adapter"))
        return rows
    if of.use_rslora and of.r != 1:
        rows.add(("FAIL", "use_rslora"))
    if of.modules_to_save:
        rows.add(("FAIL", "modules_to_save"))
    if engine == "sglang":
        if of.has_chosen_targets:
            rows.add(("WARN", "are one layer there"))
        if of.architecture != "Qwen3_5ForCausalLM" and of.targets - set(LINEAR):
            rows.add(("FAIL", "are not known there"))
    return rows


@pytest.mark.parametrize("engine", ENGINES)
def test_the_table_says_what_the_rules_say(engine):
    draw = random.Random(engine)
    met: set[tuple[str, str]] = set()
    for _ in range(3000):
        of = draw_served(draw)
        rows = engine_findings(engine, of)
        wanted = expected(engine, of)
        met |= wanted
        if not wanted:
            assert [row.verdict for row in rows] == ["PASS"], of
            assert ("adapter", "model")[of.mode == "full"] in rows[0].found
            continue
        assert len(rows) == len(wanted), (of, rows)
        for verdict, word in wanted:
            (row,) = [row for row in rows if row.verdict == verdict and word in row.found]
            assert row.name == f"serve {engine}"
            assert row.sources[0].startswith("https://github.com/")
            assert engines.LOOKED_UP_DATE in row.sources[0]
            assert ENGINES[engine]["title"] in row.found
    assert len(met) == len(ENGINES[engine]["limits"]), "an entry that no draw meets"


def test_the_flag_is_the_smallest_rank_that_vllm_takes():
    for rank in range(1, 700):
        allowed = [most for most in (1, 8, 16, 32, 64, 128, 256, 320, 512) if most >= rank]
        assert engines.smallest_vllm_rank(rank) == (min(allowed) if allowed else None)
        rows = engine_findings("vllm", ServedModel(r=rank))
        flags = [row.remedy for row in rows if row.verdict == "WARN"]
        assert flags == ([f"serve with --enable-lora --max-lora-rank {min(allowed)}"] if 16 < rank <= 512 else [])


def test_the_scale_that_is_offered_instead_of_rslora_is_the_same_in_peft():
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    def peft_scale(**lora: Any) -> float:
        shape = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
        model = LlamaForCausalLM(LlamaConfig(vocab_size=8, **shape))
        adapted = get_peft_model(model, LoraConfig(target_modules=["q_proj"], **lora))
        (scale,) = {
            module.scaling["default"]
            for module in adapted.modules()
            if isinstance(getattr(module, "scaling", None), dict)
        }
        return float(scale)

    for rank, alpha in ((16, 32), (4, 1), (8, 16)):
        of = ServedModel(r=rank, alpha=alpha, use_rslora=True)
        assert of.scale == pytest.approx(peft_scale(r=rank, lora_alpha=alpha, use_rslora=True))
        (row,) = engine_findings("sglang", of)
        assert f"alpha / r = {alpha / rank:g}" in row.found
        offered = str(row.remedy).partition("use_rslora=false alpha=")[2]
        assert bool(offered) == math.sqrt(rank).is_integer()
        if offered:
            assert peft_scale(r=rank, lora_alpha=int(offered)) == pytest.approx(of.scale)


def test_the_lists_of_models_are_of_classes_that_are_asked_for():
    """transformers' own names: most of them are known to llama.cpp, few of vLLM's take no adapter."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as OF_TYPES

    trainable = {name for name in OF_TYPES.values() if isinstance(name, str)}
    llama_cpp, without_lora = engines.MODEL_CLASSES["llama_cpp"], engines.MODEL_CLASSES["vllm_without_lora"]
    assert {"LlamaForCausalLM", "Qwen3ForCausalLM", "Gemma3ForCausalLM", "GptOssForCausalLM"} <= llama_cpp & trainable
    assert {"GPT2LMHeadModel", "FalconForCausalLM", "BloomForCausalLM"} <= without_lora & trainable
    assert len(llama_cpp & trainable) > 60
    assert not {"LlamaForCausalLM", "Qwen3ForCausalLM", "MixtralForCausalLM"} & without_lora
    assert "Qwen3_5ForCausalLM" in engines.MODEL_CLASSES["sglang_own_sizes"]


def test_the_class_is_the_configs_own_word_else_transformers():
    assert model_architecture({"architectures": ["MPTForCausalLM"], "model_type": "mpt"}) == "MPTForCausalLM"
    assert model_architecture({"model_type": "llama"}) == "LlamaForCausalLM"
    for unknown in ({}, {"architectures": []}, {"architectures": "x"}, {"model_type": "nobodys"}):
        assert model_architecture(unknown) is None


def test_names_are_read_once_in_any_case_and_unknown_ones_are_refused():
    assert parse_engine_names(["vLLM", "llama.cpp", "vllm"]) == ("vllm", "llama.cpp")
    assert parse_engine_names([]) == ()
    with pytest.raises(ConfigError, match=r"SERVE=tgi,ollama is no engine .* vllm, sglang, llama\.cpp"):
        parse_engine_names(["vllm", "tgi", "ollama"])


# --- the command ------------------------------------------------------------------------------------------------------


@pytest.fixture
def config(tmp_path, tiny_llama) -> Path:
    rows = tmp_path / "train.jsonl"
    rows.write_text("".join(json.dumps(chat(f"what is {n}?", f"it is {n}.")) + "\n" for n in range(30)))
    path = tmp_path / "run.yaml"
    path.write_text(
        f"model: {{name: {tiny_llama}, max_seq_len: 64}}\ntuning: {{mode: lora}}\n"
        f"data: {{train_path: {rows}, val_path: null, test_path: null}}\n"
        f"train: {{effective_batch_size: 8, report_to: []}}\noutput: {{dir: {tmp_path}/outputs}}\n"
    )
    return path


def served(command: Any, monkeypatch: pytest.MonkeyPatch, config: Path, serve: str, *words: str) -> tuple[int, Any]:
    monkeypatch.setenv("SERVE", serve)
    out = config.parent / "check.json"
    code, _ = command("check", "--config", str(config), "--out", str(out), *words)
    checks = json.loads(out.read_text())["checks"]
    return code, {(check["name"], check["state"]): check for check in checks if check["name"].startswith("serve")}


def test_check_says_what_an_engine_does_not_load_and_ends_with_2(config, command, monkeypatch):
    code, rows = served(command, monkeypatch, config, "vllm,sglang,llama.cpp")
    assert code == 0
    assert set(rows) == {(f"serve {name}", "ok") for name in ENGINES}
    words = ("tuning.lora.r=64", "tuning.lora.use_rslora=true")
    code, rows = served(command, monkeypatch, config, "vllm", *words)
    assert code == 0
    assert "--max-lora-rank 64" in rows["serve vllm", "warning"]["do"]
    code, rows = served(command, monkeypatch, config, "vllm llama.cpp", *words)
    assert code == 2
    assert "alpha=256" in rows["serve llama.cpp", "problem"]["do"]
    assert rows["serve llama.cpp", "problem"]["see"][0].startswith("https://github.com/ggml-org/llama.cpp/")
    code, rows = served(command, monkeypatch, config, "sglang", "tuning.lora.target_modules=[q_proj, o_proj]")
    assert code == 0
    assert "are one layer there" in rows["serve sglang", "warning"]["what"]
    assert served(command, monkeypatch, config, "", *words) == (0, {})


def test_the_page_shows_the_source_and_a_wrong_engine_is_refused_at_once(config, command, monkeypatch):
    monkeypatch.setenv("SERVE", "vllm")
    code, said = command("check", "--config", str(config), "tuning.lora.use_dora=true")
    assert code == 2
    assert "PROBLEM  serve vllm" in said
    assert "do: merge before serving: make merge" in said
    assert "see https://github.com/vllm-project/vllm/blob/v0.33.0/vllm/lora/peft_helper.py" in said
    code, said = command("check", "--config", str(config), "--serve", "tgi")
    assert code == 2
    assert "SERVE=tgi is no engine that is known here" in said
    assert "memory plan" not in said
