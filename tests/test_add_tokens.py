"""`model.add_tokens`: new rows begin at their pieces, alone train, are saved small and merged right."""

import dataclasses
import json
import random

import pytest
import torch
from safetensors.torch import load_file

from sft_play.config.load import config_from_text
from sft_play.finished.export.merge import merge_run
from sft_play.finished.respond import load_base_model, load_model_folder, load_trained_model
from sft_play.finished.run import find_finished_run
from sft_play.planner.precision import Precision
from tests.bundled import model_config
from tests.conftest import chat, write_rows
from tests.finished_runs import finished_run, make_base
from tests.models import make_llama
from tests.test_distributed import needs_deepspeed, shapes, succeed, world  # noqa: F401
from tests.test_merge import gemma3_with_images, gpt2, llama
from tests.test_train import assert_resumes, assert_same_bits, losses, run_yaml, train, trained, weights  # noqa: F401  (fixtures)

pytestmark = pytest.mark.build

TOKENS = ("<call_7>", " kitchen lamp", "日本")
BASES = {
    "untied": llama, "tied": lambda: llama(tie_word_embeddings=True), "larger": lambda: llama(vocab_size=500),
    "transposed": gpt2, "text tower": gemma3_with_images,
}  # fmt: skip


def ids_of(run) -> list[int]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(run.weights)
    ids = tokenizer.convert_tokens_to_ids(list(TOKENS))
    for token, one in zip(TOKENS, ids, strict=True):
        assert tokenizer(f"on{token}off", add_special_tokens=False)["input_ids"].count(one) == 1
    return ids


@torch.no_grad()
def on_new(model, ids: list[int]) -> torch.Tensor:
    """Logits where rows hold the new tokens."""
    drawn = torch.randint(3, 300, (2, 24), generator=torch.Generator().manual_seed(3))
    drawn[:, 5::6] = torch.tensor([ids[0], ids[-1], ids[1], ids[0]])
    return model(input_ids=drawn, use_cache=False).logits.float()


@pytest.mark.parametrize("base", BASES)
def test_the_merged_model_has_the_trained_rows(tmp_path, base):
    folder = make_base(tmp_path / "base", BASES[base](), max_shard_size="100KB")
    run = find_finished_run(tmp_path, str(finished_run(tmp_path / "run", folder, tokens=TOKENS)))
    ids = ids_of(run)
    merged = merge_run(run)
    model, whole = load_trained_model(run), load_model_folder(merged.path)
    expected = on_new(model, ids)
    torch.testing.assert_close(on_new(whole, ids), expected, rtol=1e-4, atol=1e-4)
    with model.disable_adapter():
        untrained = on_new(model, ids)
    torch.testing.assert_close(untrained, on_new(load_base_model(run), ids))
    assert (expected - untrained)[..., ids].abs().max() > 0.01


@pytest.mark.parametrize("base", BASES)
def test_rows_begin_as_the_mean_of_their_pieces_and_are_all_that_is_saved(tmp_path, base):
    from transformers import AutoTokenizer

    folder = make_base(tmp_path / "base", BASES[base]())
    run = find_finished_run(tmp_path, str(finished_run(tmp_path / "run", folder, tokens=TOKENS)))
    plain, model = AutoTokenizer.from_pretrained(folder), load_base_model(run)
    inputs, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    tables = [inputs] if inputs is head else [inputs, head]
    for token, row in zip(TOKENS, ids_of(run), strict=True):
        pieces = plain(token, add_special_tokens=False)["input_ids"]
        for table in tables:
            torch.testing.assert_close(table[row], table[pieces].mean(dim=0))
    sizes = {name: tuple(one.shape) for name, one in load_file(run.weights / "adapter_model.safetensors").items()}
    rows = {name: shape for name, shape in sizes.items() if "lora_" not in name}
    assert list(rows.values()) == [(len(TOKENS), inputs.shape[1])] * len(tables), rows


@pytest.fixture
def said(tmp_path) -> str:
    """Rows whose answers hold the first of the tokens."""
    draw = random.Random(0)
    rows = [chat(f"lamp {n}?", f"<call_7>{n + draw.randint(0, 9)}") for n in range(24)]
    return f"data.train_path={write_rows(tmp_path / 'said.jsonl', rows)}"


ADDED = f"model.add_tokens={json.dumps(TOKENS)}"


@pytest.mark.parametrize("bf16", ["true", "false"])
@pytest.mark.parametrize(("mode", "tied"), [("qlora", True), ("lora", False), ("full", False)])
def test_a_run_trains_the_rows_and_resumes_to_the_same_bits(trained, said, tmp_path, mode, tied, bf16):  # noqa: F811
    base = make_llama(tmp_path / "base", tie_word_embeddings=tied)
    given = (said, ADDED, f"model.name={base}", f"tuning.mode={mode}", f"train.bf16={bf16}", "train.max_steps=4",
             "train.save_steps=2", "train.learning_rate=5e-3")  # fmt: skip
    whole, parts = assert_resumes(trained, *given)
    assert "Tokens: 3 added" in (whole / "train.log").read_text()
    if mode == "full":
        return
    for path in (parts / "checkpoints").glob("*/adapter_model*"):
        assert path.stat().st_size < 1.3 * (whole / "adapter" / path.name).stat().st_size
    finished = find_finished_run(tmp_path / "outputs", str(whole))
    rows = {name: one for name, one in weights(whole).items() if "trainable_tokens" in name}
    assert len(rows) == (1 if tied else 2)
    begun = load_base_model(finished)
    ids = ids_of(finished)
    for name, one in rows.items():
        table = begun.lm_head.weight if "lm_head" in name else begun.model.embed_tokens.weight
        moved = (one - table[ids]).abs().amax(dim=1)
        assert moved[0] > 1e-4, name
        # the input rows of tokens that occur nowhere stay; output rows are pushed down by every softmax
        assert bool(moved[1] > 0) == (tied or "lm_head" in name), name


def test_what_cannot_be_added_is_refused_by_name(train):  # noqa: F811
    for tokens, what in {
        '["<|im_end|>"]': "<|im_end|> is one token already",
        '["<a>", "<b>", "<a>"]': "<a> is listed twice",
        '["a"]': "a is one token already",
    }.items():
        code, printed, folder = train("one", f"model.add_tokens={tokens}")
        assert (code, what in printed, folder.exists()) == (2, True, False), printed


@pytest.mark.parametrize(("strategy", "mode"), [
    ("ddp", "lora"), pytest.param("fsdp", "full", marks=pytest.mark.slow),
    pytest.param("zero3", "full", marks=[needs_deepspeed, pytest.mark.slow]),
])  # fmt: skip
def test_ranks_lose_and_save_what_one_process_does(world, strategy, mode):  # noqa: F811
    words = (f"tuning.mode={mode}", ADDED)
    succeed(world, "train", *words, f"output.name=one-{strategy}")
    succeed(world, "train-distributed", *words, f"output.name={strategy}", STRATEGY=strategy, NPROC="2")
    one, other = (world / "outputs" / name for name in (f"one-{strategy}", strategy))
    assert losses(other) == pytest.approx(losses(one), rel=1e-5)
    saved = "model" if mode == "full" else "adapter"
    assert shapes(other / saved) == shapes(one / saved)
    for name, tensor in weights(one).items():
        torch.testing.assert_close(weights(other)[name], tensor, rtol=1e-3, atol=1e-4)


def test_layouts_that_divide_embeddings_are_refused_for_rows(command, world, monkeypatch):  # noqa: F811
    words = ("--config", f"{world}/run.yaml", "--hardware", "2xH100", "tuning.mode=lora", ADDED)
    mesh = "model.mesh_shape=[[2],[fsdp]]"
    for verb, strategy, *more in (("plan", "fsdp"), ("plan", "zero1"), ("check", "", mesh)):
        monkeypatch.setenv("STRATEGY", strategy)
        code, printed = command(verb, *words, *more)
        assert (code, "model.add_tokens: PEFT trains rows of whole embeddings only" in printed) == (2, True), printed


@pytest.mark.parametrize("mode", ["qlora", "lora", "full"])
@pytest.mark.parametrize(
    ("name", "micro", "length", "passes", "checkpointed"),
    [("Llama-3.2-1B", 2, 900, 3, 0), ("Llama-3.1-8B", 1, 300, 2, None)],
)
def test_the_plan_agrees_with_a_trace(mode, name, micro, length, passes, checkpointed):
    check_trace(name, micro, length, passes, checkpointed, mode=mode, added=f"{list(TOKENS)}", within=0.01)


def check_trace(name, micro, length, passes, checkpointed, *, mode, added="[]", more="", within, wide=False):
    """The estimate of a step beside the trace of it, two blocks deep."""
    from sft_play.models.config_json import parse_model_shape
    from sft_play.planner.memory.estimate import estimate_memory
    from sft_play.planner.memory.step_memory import Step
    from sft_play.trace.confirm import step_settings
    from sft_play.trace.step import trace_step

    model = model_config(name) | {"num_hidden_layers": 2}
    text = f"model: {{name: x, max_seq_len: {length}, add_tokens: {added}}}\ntuning: {{mode: {mode}}}\n{more}"
    config = config_from_text(text, name="run")
    plain = parse_model_shape(model, name=name)
    shape = dataclasses.replace(plain, vocab_size=plain.vocab_size + len(config.model.add_tokens))
    precision = Precision("float32", "float32", "") if wide else Precision("bfloat16", "bfloat16", "")
    planned = Step(micro, passes, length, checkpointed_layers=checkpointed, saves=False, masks=False)
    found = trace_step(step_settings(config, model, shape, precision, planned))
    assert estimate_memory(config, shape, precision, planned).allocated == pytest.approx(found.allocated, rel=within)


def test_a_further_run_continues_the_rows_and_takes_the_tokens_from_the_adapter(train, trained, tmp_path, tiny_llama):  # noqa: F811
    first = finished_run(tmp_path / "first", tiny_llama, tokens=TOKENS)
    more = trained("more", f"model.adapter={first}", f"model.name={tiny_llama}", "train.learning_rate=1e-30")
    assert json.loads((more / "resolved.json").read_text())["model"]["add_tokens"] == list(TOKENS)
    assert_same_bits(load_file(first / "adapter" / "adapter_model.safetensors"), weights(more))
    code, printed, _ = train("other", f"model.adapter={first}", f"model.name={tiny_llama}", 'model.add_tokens=["<x>"]')
    assert (code, "leave it out: the adapter's is taken" in printed) == (2, True)
    (first / "resolved.json").unlink()
    code, printed, _ = train("third", f"model.adapter={first / 'adapter'}", f"model.name={tiny_llama}")
    assert (code, "trainable_token_indices" in printed) == (2, True)
