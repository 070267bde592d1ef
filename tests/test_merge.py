"""Merging an adapter into its base: the merged folder answers as base and adapter do, whatever the class."""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path

import pytest
import torch
import transformers
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText, LlamaForCausalLM

from benchmarks.registry import small_base
from sft_play.errors import ConfigError, ModelError, RunFolderError
from sft_play.finished.export import merge, push
from sft_play.finished.export.checks import divergence_limit, merge_test
from sft_play.finished.export.export import export_run
from sft_play.finished.export.merge import ensure_whole_model_folder, merge_run, record_merge_test
from sft_play.finished.respond import load_model_folder, load_trained_model
from sft_play.finished.run import MERGE_FILE, find_finished_run, find_merged_model
from sft_play.runs.folder import read_json
from tests.finished_runs import SMALL, finished_run, make_base

pytestmark = pytest.mark.build


def small_model(name: str, **settings):
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**{**SMALL, "vocab_size": 400, **settings})
    return getattr(transformers, f"{name}{'LMHeadModel' if name == 'GPT2' else 'ForCausalLM'}")(config)


def with_images(name: str, text: dict, vision: dict, **settings):
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(text_config={**SMALL, **text}, vision_config=vision, **settings)
    return getattr(transformers, f"{name}ForConditionalGeneration")(config)


def llama(**changes):
    return small_model("Llama", **{"tie_word_embeddings": False, **changes})


def gpt2():
    return small_model("GPT2", n_embd=64, n_layer=2, n_head=4, n_positions=256)


def gemma3_with_images(vocab_size=400):
    text = {"vocab_size": vocab_size, "sliding_window": 32, "layer_types": ["sliding_attention", "full_attention"]}
    vision = {
        "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
        "image_size": 32, "patch_size": 16,
    }  # fmt: skip
    return with_images("Gemma3", text, vision, mm_tokens_per_image=4)


EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


def qwen3_moe():
    return small_model("Qwen3Moe", **EXPERTS)


def qwen3_5_moe_with_images():
    text = {
        "vocab_size": 400, "layer_types": ["linear_attention", "full_attention"], **EXPERTS,
        "shared_expert_intermediate_size": 32, "linear_num_value_heads": 4, "linear_num_key_heads": 2,
        "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    }  # fmt: skip
    vision = {"hidden_size": 32, "intermediate_size": 64, "depth": 1, "num_heads": 2, "out_hidden_size": 64}
    return with_images("Qwen3_5Moe", text, vision)


def run_of(folder: Path, built, **options):
    """A finished run with a random adapter on a base of its own; `dtype`: of the base."""
    base = make_base(folder / "base", built, dtype=options.pop("dtype", torch.float32))
    return find_finished_run(folder, str(finished_run(folder / "run", base, **options)))


def one_by_one(base: Path) -> Path:
    """The base with each expert's projections as tensors of their own, as such models are published."""
    (file,) = base.glob("*.safetensors")
    tensors = {}
    for name, tensor in load_file(file).items():
        place, _, leaf = name.rpartition(".experts.")
        if place and leaf in ("gate_up_proj", "down_proj"):
            for expert, weight in enumerate(tensor):
                halves = weight.chunk(2) if leaf == "gate_up_proj" else [weight]
                for part, half in zip(leaf.removesuffix("_proj").split("_"), halves, strict=True):
                    tensors[f"{place}.experts.{expert}.{part}_proj.weight"] = half.contiguous()
        else:
            tensors[name] = tensor
    assert any(name.endswith((".experts.3.up_proj.weight", ".experts.3.w1.weight")) for name in tensors)
    save_file(tensors, file, metadata={"format": "pt"})
    return base


@torch.no_grad()
def logits(model) -> torch.Tensor:
    ids = torch.randint(3, 300, (2, 24), generator=torch.Generator().manual_seed(3))
    return model(input_ids=ids, use_cache=False).logits.float()


BASES = {
    "llama": (llama, {}),
    "tied": (lambda: llama(tie_word_embeddings=True), {}),
    "biases": (lambda: llama(attention_bias=True), {"use_rslora": True, "alpha": 8}),
    "dora": (llama, {"use_dora": True}),
    "transposed": (gpt2, {}),
    "trained head": (llama, {"modules_to_save": ["lm_head", "norm"]}),
    "tied, trained embeddings": (lambda: llama(tie_word_embeddings=True), {"modules_to_save": ["embed_tokens"]}),
    "tied, trained head": (lambda: llama(tie_word_embeddings=True), {"modules_to_save": ["lm_head"]}),
    "larger vocabulary, tied": (
        lambda: llama(vocab_size=300, tie_word_embeddings=True), {"modules_to_save": ["embed_tokens", "lm_head"]},
    ),
    "experts": (lambda: small_model("Mixtral", num_local_experts=4), {}),
    "a file for each expert": (qwen3_moe, {}),
    "a router in attention too": (lambda: small_model("JetMoe", kv_channels=16, num_local_experts=4), {}),
    "text tower": (gemma3_with_images, {}),
    "text tower with experts": (qwen3_5_moe_with_images, {}),
}  # fmt: skip


@pytest.mark.slow
def test_adapters_of_weights_that_blocks_share_are_not_merged(tmp_path):
    run = run_of(tmp_path, small_base("zamba"))
    with pytest.raises(ModelError, match=r"blocks of a ZambaForCausalLM share .*\.shared_transf\..* serve the base"):
        merge_run(run)
    assert not (tmp_path / "run" / "merged").exists()


@pytest.mark.slow
def test_tensors_that_are_joined_in_ram_are_merged_over(tmp_path):
    """Qwen4's table of n-grams lies in files in parts, which transformers joins on the CPU wherever the model is."""
    run = run_of(tmp_path, small_base("qwen4_exp_text"))
    merged = merge_run(run)
    assert any("ngram_embedding.shard_" in name for name in load_file(merged.path / "model.safetensors"))
    found, expected = logits(load_model_folder(merged.path)), logits(load_trained_model(run))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_tensors_that_peft_alone_would_lose_are_merged_and_named(tmp_path):
    run = run_of(tmp_path, small_model("Laguna", shared_expert_intermediate_size=32, **EXPERTS, gating=False))
    merged = merge_run(run)
    (line,) = (one for one in merged.lines() if one.startswith("Adapter: "))
    assert "PEFT alone would load it without 6 of 32 tensors" in line
    trained = load_trained_model(run)
    expected = logits(trained)
    with trained.disable_adapter():
        effect = (expected - logits(trained)).norm()
    with pytest.warns(UserWarning, match="Found missing adapter keys"):
        by_peft = PeftModel.from_pretrained(load_model_folder(tmp_path / "base"), str(run.weights))
    assert (logits(by_peft) - expected).norm() / effect > 0.2
    torch.testing.assert_close(logits(load_model_folder(merged.path)), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")  # PEFT's
@pytest.mark.parametrize("kind", BASES)
def test_the_merged_model_is_base_and_adapter(tmp_path, kind):
    build, lora = BASES[kind]
    base = make_base(tmp_path / "base", build(), max_shard_size="1GB" if "expert" in kind else "100KB")
    if "expert" in kind:
        one_by_one(base)
    run = find_finished_run(tmp_path, str(finished_run(tmp_path / "run", base, **lora)))
    merged = merge_run(run, file_bytes=100_000)
    trained, whole = load_trained_model(run), load_model_folder(merged.path)
    with trained.disable_adapter():
        untrained = logits(trained)
    expected = logits(trained)
    torch.testing.assert_close(logits(whole), expected, rtol=1e-4, atol=1e-4)
    assert (expected - untrained).abs().max() > 0.01  # the adapter does something, so that the equality says something
    files = [*merged.path.glob("*.safetensors"), *run.weights.glob("*.safetensors")]
    assert len(files) > 2
    assert {file.stat().st_mode & 0o777 for file in files} == {0o644}  # another user may serve them
    assert json.loads((merged.path / "config.json").read_text())["dtype"] == "float32"
    assert type(whole).__name__ == type(trained.get_base_model()).__name__


def test_what_an_image_text_model_becomes_is_of_its_own_class(tmp_path, command):
    """Its adapter works in PEFT on the class as published, merged weights are the class's, all else is bit-equal."""
    run, base = run_of(tmp_path, gemma3_with_images()), tmp_path / "base"
    whole = AutoModelForImageTextToText.from_pretrained(base).eval()
    before = logits(whole)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # PEFT's, of keys that it does not find
        opened = PeftModel.from_pretrained(whole, run.weights)
    assert (logits(opened) - before).abs().max() > 0.01
    assert not [name for name, _ in opened.named_parameters() if "lora_" in name and ".language_model." not in name]
    merged = merge_run(run)
    as_published, info = AutoModelForImageTextToText.from_pretrained(merged.path, output_loading_info=True)
    assert not info["missing_keys"] | info["unexpected_keys"]
    torch.testing.assert_close(logits(as_published.eval()), logits(opened), rtol=1e-4, atol=1e-4)
    trained, published = (load_file(folder / "model.safetensors") for folder in (merged.path, base))
    assert trained.keys() == published.keys()
    adapter = load_file(run.weights / "adapter_model.safetensors")
    adapted = {name.partition(".lora_")[0].removeprefix("base_model.model.") for name in adapter}
    layers = {name.replace("model.language_model.", "language_model.model.") for name in adapted}  # as in its files
    for name, tensor in trained.items():
        assert torch.equal(tensor, published[name]) == (name.removesuffix(".weight") not in layers), name
    code, printed = command("train", "--config", str(tmp_path / "run.yaml"), "output.name=again", "train.max_steps=1")
    assert (code, printed.count("only the language model of this gemma3 is trained")) == (0, 1), printed


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
def test_trained_embeddings_are_saved_once(tmp_path):
    build, lora = BASES["larger vocabulary, tied"]
    weights = load_file(run_of(tmp_path, build(), **lora).weights / "adapter_model.safetensors")
    embeddings = [name for name in weights if ".layers." not in name]
    assert embeddings == ["base_model.model.lm_head.weight", "base_model.model.model.embed_tokens.weight"]


CHANGED_SHAPES = {
    "no way back": (None, r"model.layers.0.* has no way back; serve the base with the adapter"),
    "missing": (lambda name, shape: (name, shape) if "q_proj" not in name else None, "2 are missing, such as model.l"),
    "shape": (lambda name, shape: (name, (8, shape[1]) if "v_proj" in name else shape), "2 have another shape, such "),
    "an expert less": (lambda name, shape: None if ".experts.2.up" in name else (name, shape), "conversion of the"),
    "unknown": (lambda name, shape: (name.replace(".1.mlp.gate.", ".1.router."), shape), "not be those of a Qwen3Moe"),
}  # fmt: skip


@pytest.mark.parametrize(("change", "message"), CHANGED_SHAPES.values(), ids=CHANGED_SHAPES)
def test_a_merge_whose_files_are_not_the_classes_is_never_written(tmp_path, monkeypatch, change, message):
    """As of HrmText, whose files hold several layers in one tensor, which have no way back."""
    run, shapes = run_of(tmp_path, qwen3_moe()), merge.MergedWeights._output_shapes
    if change is None:
        monkeypatch.setattr(merge._Source, "can_be_split", lambda self: False)
    else:
        spoilt = lambda self: filter(None, (change(name, shape) for name, shape in shapes(self)))  # noqa: E731
        monkeypatch.setattr(merge.MergedWeights, "_output_shapes", spoilt)
    with pytest.raises(ModelError, match=message):
        merge_run(run)
    assert not (run.folder.path / "merged").exists()


@pytest.mark.parametrize(("base_dtype", "dtype"), [(torch.bfloat16, None), (torch.float32, "fp16")])
def test_the_dtype_is_the_one_asked_for_or_the_files_own(tmp_path, base_dtype, dtype):
    run = run_of(tmp_path, llama(), dtype=base_dtype, target_modules=["q_proj"])
    merged = merge_run(run, dtype=dtype)
    wanted = {"fp16": torch.float16, None: base_dtype}[dtype]
    tensors, original = (load_file(at / "model.safetensors") for at in (merged.path, tmp_path / "base"))
    assert {tensor.dtype for tensor in tensors.values()} == {wanted}
    assert json.loads((merged.path / "config.json").read_text())["dtype"] == str(wanted).removeprefix("torch.")
    assert set(tensors) == set(original)
    changed = {name for name in original if not torch.equal(tensors[name], original[name].to(wanted))}
    assert changed == {f"model.layers.{n}.self_attn.q_proj.weight" for n in range(2)}


def test_what_the_class_keeps_in_fp32_stays_so(tmp_path, monkeypatch):
    run = run_of(tmp_path, llama())
    monkeypatch.setattr(LlamaForCausalLM, "_keep_in_fp32_modules", ["norm"])
    tensors = load_file(merge_run(run, dtype="bf16").path / "model.safetensors")
    dtypes = {("norm" in name, tensor.dtype) for name, tensor in tensors.items()}
    assert dtypes == {(True, torch.float32), (False, torch.bfloat16)}


def test_a_qlora_adapter_goes_into_the_weights_that_it_was_trained_on(tmp_path):
    run = run_of(tmp_path, llama(), mode="qlora", target_modules=["q_proj"])
    dequantized = merge_run(run, dtype="fp32")
    original = merge_run(run, dtype="fp32", base="original", out=tmp_path / "original")
    expected = logits(load_trained_model(run))
    torch.testing.assert_close(logits(load_model_folder(dequantized.path)), expected, rtol=1e-3, atol=1e-3)
    assert (logits(load_model_folder(original.path)) - expected).abs().max() > 0.01
    assert [merge_test(run).ok, merge_test(run, path=original.path).ok] == [True, False]
    assert [read_json(merged.path / MERGE_FILE)["test"]["ok"] for merged in (dequantized, original)] == [True, False]
    assert merge_test(run, path=tmp_path / "base").ok is False
    assert not (tmp_path / "base" / "merge.json").exists()  # a folder that no merge wrote stays as it is


def test_a_merge_that_is_not_the_trained_model_is_taken_by_nobody(tmp_path, monkeypatch):
    """By export, serve and push alike, which ask `whole_model_folder` or the same rule."""
    run = run_of(tmp_path, llama(), mode="qlora", target_modules=["q_proj"])
    folder = merge_run(run, base="original", dtype="fp32").path
    asked = (lambda: ensure_whole_model_folder(run, is_locked=False), lambda: push._merged_folder(run))
    for ask in asked:
        with pytest.raises(RunFolderError, match=r"original weights.*merge-test"):
            ask()
    merge_test(run)
    for ask in asked:
        with pytest.raises(RunFolderError, match=r"merge-test found it .* nats from the adapter"):
            ask()
    record_merge_test(folder, ok=True, divergence=1e-6, limit=1e-4)  # as where NF4 rounds nothing that counts
    for ask in asked:
        assert ask() == folder
    merge_run(run, replace=True)
    assert (read_json(folder / MERGE_FILE)["base"], read_json(folder / MERGE_FILE)["test"]) == ("dequantized", None)
    exported = export_run(run, "vllm")
    assert json.loads((exported.path / "export.json").read_text())["merge"] == read_json(folder / MERGE_FILE)
    assert read_json(exported.path / MERGE_FILE) == read_json(folder / MERGE_FILE)
    aside = (folder / "config.json").rename(tmp_path / "config.json")
    assert find_merged_model(run) is None  # half removed by hand
    aside.rename(folder / "config.json")
    assert find_merged_model(run) == folder
    # the adapter was trained further: the merge is not its any more
    adapter = run.weights / "adapter_model.safetensors"
    save_file({name: tensor * 2 for name, tensor in load_file(adapter).items()}, adapter)
    assert find_merged_model(run) is None
    with pytest.raises(RunFolderError, match="no merged model of this adapter"):
        push._merged_folder(run)


def test_the_verdict_goes_by_what_training_changed_within_bounds_of_the_dtype():
    # 5% of the base's divergence, held between the bounds that docs/trained.md names
    assert [divergence_limit("float32", base) for base in (0.0, 1e-6, 1e-3, 1.0)] == pytest.approx(
        [1e-6, 1e-6, 5e-5, 1e-4]
    )
    assert [divergence_limit("bfloat16", base) for base in (0.0, 0.02)] == pytest.approx([1e-4, 1e-3])
    assert divergence_limit("float16", 10.0) == 5e-3


def test_what_is_wrong_is_refused_and_nothing_is_left_behind(tmp_path):
    run, base = run_of(tmp_path, llama()), tmp_path / "base"
    before = {path.name for path in run.folder.path.iterdir()}
    with pytest.raises(ConfigError, match="for QLoRA runs"):
        merge_run(run, base="original")
    with pytest.raises(RunFolderError, match="no merged model"):
        merge_test(run)
    stopped = finished_run(tmp_path / "stopped", base) / "manifest.json"
    stopped.write_text(json.dumps(json.loads(stopped.read_text()) | {"status": "stopped"}))
    with pytest.raises(RunFolderError, match="make resume"):
        find_finished_run(tmp_path, "stopped")
    whole = find_finished_run(tmp_path, str(finished_run(tmp_path / "whole", base, mode="full")))
    with pytest.raises(RunFolderError, match="nothing has to be merged"):
        merge_run(whole)
    large = load_file(base / "model.safetensors")
    large["model.embed_tokens.weight"][0, 0] = 1e6
    save_file(large, base / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match="put the base back"):
        merge_run(run)
    run.manifest["data"] = {}
    with pytest.raises(ConfigError, match="fp16 cannot hold"):
        merge_run(run, dtype="fp16")
    assert {path.name for path in run.folder.path.iterdir()} == before
    merge_run(run)
    with pytest.raises(RunFolderError, match="FORCE=1"):
        merge_run(run)
    assert merge_run(run, replace=True).ok


def test_an_adapter_of_another_model_is_refused(tmp_path):
    run = run_of(tmp_path / "one", llama())
    other = run_of(tmp_path / "other", llama(hidden_size=96, head_dim=24))
    for file in run.weights.glob("*.safetensors"):
        file.replace(other.weights / file.name)
    with pytest.raises(ModelError, match="adapter of another model"):
        merge_run(other)
    assert not (other.folder.path / "merged").exists()


def test_the_commands_answer_in_words_and_json(tmp_path, command):
    folder = run_of(tmp_path, llama(), dtype=torch.bfloat16).folder.path
    code, printed = command("merge", "--run", str(folder), "--dtype", "bf16")
    assert (code, f"Next: make merge-test RUN={folder}" in printed) == (0, True), printed
    code, printed = command("merge-test", "--run", str(folder), "--json")
    answer = json.loads(printed.splitlines()[-1])
    assert (code, answer["ok"], answer["kl_merged"] <= answer["kl_limit"]) == (0, True, True)
    assert command("merge-test", "--run", str(folder), "--out", str(tmp_path / "base"))[0] == 2


def test_a_place_on_the_disk_is_seen_before_anything_is_written(tmp_path, monkeypatch):
    run = run_of(tmp_path, llama())
    usage = shutil.disk_usage(tmp_path)
    size = sum(tensor.numel() * 4 for tensor in load_file(tmp_path / "base" / "model.safetensors").values())
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=size - 1))
    with pytest.raises(ConfigError, match="GiB free"):
        merge_run(run)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=size))
    assert Path(merge_run(run).path).is_dir()
