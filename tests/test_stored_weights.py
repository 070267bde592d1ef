"""Bases whose weights are stored quantised: read as 16-bit ones, tensor by tensor; others refused by name."""

import json
import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, FineGrainedFP8Config, Mxfp4Config

from sft_play.config.load import config_from_text
from sft_play.errors import ModelError
from sft_play.finished.export.merge import merge_run
from sft_play.finished.respond import load_model_folder, load_trained_model
from sft_play.finished.run import find_finished_run
from sft_play.models.families import dequantised_config
from sft_play.planner.precision import Precision
from sft_play.trace.confirm import load_run_model_shape
from sft_play.training.checkpoints.model_saving import open_tensors
from sft_play.training.model.model_loading import load_model
from sft_play.training.prepare.model_spec import build_model_spec
from tests.conftest import chat, write_rows, write_run
from tests.finished_runs import finished_run
from tests.models import make_tokenizer

BF16 = Precision("bfloat16", "bfloat16", "")
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [32, 32]}


def four_bits(values: torch.Tensor) -> torch.Tensor:
    """Nearest numbers of four bits, two in a byte, the lower half first."""
    nearest = (values[..., None] - E2M1).abs().argmin(-1).to(torch.uint8)
    return nearest[..., ::2] | (nearest[..., 1::2] << 4)


def as_mxfp4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Blocks and scales of experts x columns x rows, as gpt-oss is published."""
    groups = weight.float().transpose(1, 2).reshape(weight.shape[0], weight.shape[2], -1, 32)
    exponent = torch.floor(torch.log2(groups.abs().amax(-1).clamp(min=1e-9))) - 2
    return four_bits(groups / torch.exp2(exponent)[..., None]), (exponent + 127).to(torch.uint8)


def as_fp8(weight: torch.Tensor, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Values and scales by blocks, of which the last may be smaller."""
    rows, columns = (-(-side // block) for side in weight.shape)
    scales = torch.empty(rows, columns)
    out = torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
    for row in range(rows):
        for column in range(columns):
            place = (slice(row * block, (row + 1) * block), slice(column * block, (column + 1) * block))
            scales[row, column] = weight[place].float().abs().max() / 448
            out[place] = (weight[place].float() / scales[row, column]).to(torch.float8_e4m3fn)
    return out, scales


def base(folder: Path, kind: str, quantisation: dict, *, width: int = 48) -> Path:
    """A small random model whose file is stored so."""
    fields = {
        "vocab_size": 400, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 16,
        "num_key_value_heads": 2, "num_experts_per_tok": 2, "tie_word_embeddings": False,
        "max_position_embeddings": 256, "intermediate_size": 64 if kind == "gpt_oss" else 2 * width,
    }  # fmt: skip
    sparse = {"num_experts": 4, "moe_intermediate_size": width, "mlp_only_layers": [0]}
    fields |= {"num_local_experts": 4} if kind == "gpt_oss" else sparse
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **fields), dtype=torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    model.save_pretrained(folder)
    make_tokenizer(folder)
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    stored: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if quantisation is MXFP4 and name.endswith(("gate_up_proj", "down_proj")):
            stored[f"{name}_blocks"], stored[f"{name}_scales"] = as_mxfp4(tensor)
        elif quantisation is FP8 and name.endswith("_proj.weight"):
            stored[name], stored[f"{name}_scale_inv"] = as_fp8(tensor, 32)
        else:
            stored[name] = tensor
    save_file(stored, file, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": quantisation}))
    return folder


def plain_copy(folder: Path) -> Path:
    to = folder.with_name("plain")
    to.mkdir()
    make_tokenizer(to)
    tensors = {name: one.read().contiguous() for name, one in open_tensors(folder).items()}
    save_file(tensors, to / "model.safetensors", {"format": "pt"})
    config = dequantised_config(json.loads((folder / "config.json").read_text()))
    (to / "config.json").write_text(json.dumps(config))
    return to


def loaded(folder: Path, mode: str):
    config = config_from_text(f"model: {{name: {folder}, max_seq_len: 64}}\ntuning: {{mode: {mode}}}", name="run")
    spec = build_model_spec(config, BF16, tokenizer_size=400)
    return load_model(config, BF16, spec, device="cpu"), spec


CASES = {"gpt_oss": MXFP4, "qwen3_moe": FP8}


@pytest.mark.build
@pytest.mark.parametrize(("kind", "stored"), CASES.items(), ids=CASES)
@pytest.mark.parametrize("mode", ["lora", "qlora", "full"])
def test_it_loads_as_its_16_bit_copy_does(tmp_path, kind, stored, mode):
    folder = base(tmp_path / "base", kind, stored)
    model, spec = loaded(folder, mode)
    assert any("stored in" in note and "dequantised tensor by tensor" in note for note in spec.notes)
    other, plain_spec = loaded(plain_copy(folder), mode)
    assert not any("stored in" in note for note in plain_spec.notes)
    theirs = dict(other.named_parameters())
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, theirs[name]), name
    assert not hasattr(model.config, "quantization_config") or mode == "qlora"


@pytest.mark.build
@pytest.mark.parametrize(("kind", "stored"), CASES.items(), ids=CASES)
def test_values_are_those_of_transformers_own_dequantisation(tmp_path, kind, stored):
    folder = base(tmp_path / "base", kind, stored, width=64)  # it takes whole blocks only
    wanted = Mxfp4Config(dequantize=True) if stored is MXFP4 else FineGrainedFP8Config(dequantize=True)
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, quantization_config=wanted)
    model, _ = loaded(folder, "lora")
    for name, parameter in theirs.named_parameters():
        assert torch.equal(parameter, model.get_parameter(name)), name


@pytest.mark.parametrize("seed", range(6))
def test_any_grid_of_scales_is_undone(tmp_path, seed):
    """Blocks that end early, one scale for all, several names for it, FP4 experts: each is the value it stands for."""
    draw = random.Random(seed)
    rows, columns, block = draw.randint(1, 90), 2 * draw.randint(1, 45), draw.choice([8, 16, 32])
    weight = torch.randn(rows, columns)
    name = draw.choice(["a.weight", "experts.gate_up_proj"])
    others = ["a.scale", "a.qscale_weight"] if name == "a.weight" else []
    scale_name = draw.choice([f"{name}_scale_inv", *others])
    kind = draw.choice(["fp8", "single", "fp4"])
    if kind == "fp8":
        stored, scales = as_fp8(weight, block)
        grown = scales.repeat_interleave(block, 0)[:rows].repeat_interleave(block, 1)[:, :columns]
        expected = (stored.float() * grown).bfloat16()
    elif kind == "single":
        scales = weight.abs().max().reshape(draw.choice([(), (1,)])) / 448
        stored = (weight / scales.reshape(())).to(torch.float8_e4m3fn)
        expected = (stored.float() * scales.reshape(())).bfloat16()
    else:
        stored = four_bits(weight).view(torch.int8)
        scales = torch.full((rows, 1), 2.0)
        expected = (2 * E2M1[(weight[..., None] - E2M1).abs().argmin(-1)]).bfloat16()
    used = {name: stored, scale_name: scales, "a.input_scale": torch.ones(1), "norm.weight": torch.ones(4)}
    save_file(used, tmp_path / "model.safetensors")
    size = [block, block] if kind == "fp8" else None
    quantisation = {"quant_method": "fp8", "weight_block_size": size}
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": quantisation}))
    found = open_tensors(tmp_path)
    assert set(found) == {name, "norm.weight"}
    assert (found[name].shape, found[name].dtype) == (tuple(expected.shape), "BF16")
    assert torch.equal(found[name].read(), expected)


@pytest.mark.parametrize("size", [None, [0, None], [2, 2]])
def test_blocks_are_as_large_as_their_number_says_where_no_size_is_named_and_without_scales_refused(tmp_path, size):
    stored, scales = torch.ones(4, 4).to(torch.float8_e4m3fn), torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    save_file({"a.weight": stored, "a.weight_scale_inv": scales}, tmp_path / "model.safetensors")
    config = {"quantization_config": {"quant_method": "fp8", "weight_block_size": size}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert open_tensors(tmp_path)["a.weight"].read().tolist() == [[1, 1, 2, 2]] * 2 + [[3, 3, 4, 4]] * 2
    save_file({"a.weight": stored}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"a\.weight in F8_E4M3, and no scales"):
        open_tensors(tmp_path)


@pytest.mark.build
@pytest.mark.parametrize("mode", ["lora", "qlora"])
@pytest.mark.parametrize(("kind", "stored"), CASES.items(), ids=CASES)
def test_a_merge_is_a_16_bit_model_that_answers_as_trained(tmp_path, kind, stored, mode):
    folder = base(tmp_path / "base", kind, stored)
    run = find_finished_run(tmp_path, str(finished_run(tmp_path / "run", folder, mode=mode)))
    merged = merge_run(run, dtype="fp32")
    assert "quantization_config" not in json.loads((merged.path / "config.json").read_text())
    assert {one.dtype for one in open_tensors(merged.path).values()} <= {"F32", "BF16"}  # some classes keep norms
    ids = torch.arange(3, 40)[None]
    with torch.no_grad():
        models = (load_model_folder(merged.path), load_trained_model(run))
        ours, theirs = (model(input_ids=ids).logits for model in models)
    torch.testing.assert_close(ours.float(), theirs.float(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("method", ["gptq", "fbgemm_fp8"])
@pytest.mark.parametrize("verb", ["plan", "check", "train"])
def test_other_ways_are_refused_everywhere_with_the_original(tmp_path, command, method, verb):
    fields = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4,
              "intermediate_size": 64, "vocab_size": 400, "quantization_config": {"quant_method": method},
              "_name_or_path": "meta-llama/Llama-3.1-8B"}  # fmt: skip
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(fields))
    make_tokenizer(tmp_path / "model")
    rows = write_rows(tmp_path / "rows.jsonl", [chat("a", "b")])
    config = write_run(tmp_path, tmp_path / "model", rows)
    code, printed = command(verb, "--config", str(config), *(["--hardware", "1xH100"] * (verb == "plan")))
    assert (code, f"already quantised ({method})" in printed) == (2, True), printed
    assert "take the unquantised model" in printed


def test_the_plan_says_how_weights_are_stored(succeed):
    words = ("--hardware", "1xH100", "model.name=openai/gpt-oss-20b", "--config", "configs/run_bnb.yaml")
    printed = succeed("plan", *words)
    assert "stored in MXFP4: dequantised tensor by tensor while loading, and packed as NF4" in printed
    config = config_from_text("model: {name: openai/gpt-oss-20b}", name="run")
    assert load_run_model_shape(config).stored_dtype == "mxfp4"
