"""Exports: the GGUF, the Modelfile and the folder say what was trained, and export-test sees where they do not."""

import importlib.util
import io
import json
import random
import re
import shutil
import string
import sys
import tarfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import normalizers, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaTokenizer

from benchmarks.starter_base import make_model
from benchmarks.starter_base import make_tokenizer as starter_tokenizer
from benchmarks.starter_corpus import corpus_documents
from sft_play.data.sources.formats import Chat
from sft_play.errors import BackendError, ConfigError, ModelError, RunFolderError, TokenizerError
from sft_play.finished.export import checks
from sft_play.finished.export.export import export_run
from sft_play.finished.export.llama_cpp import LLAMA_CPP_VERSION, find_converter, unpack_converter
from sft_play.finished.export.merge import merge_run
from sft_play.finished.run import describe_context_window, find_finished_run
from tests import warm
from tests.converter import converter
from tests.finished_runs import SMALL, finished_run, make_base
from tests.models import CHATML, make_tokenizer
from tests.test_merge import gemma3_with_images, small_model

pytestmark = pytest.mark.build

TOKENS = 314
"""Of tests.models.make_tokenizer's vocabulary."""
LLAMA3_POSITIONS = {
    "rope_type": "llama3", "rope_theta": 10_000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip


@pytest.fixture(autouse=True)
def _warm(monkeypatch) -> None:
    """The converter is a program that imports torch and transformers."""
    monkeypatch.setattr(sys, "executable", warm.python())


def model(name: str, **changes):
    return small_model(name, **{"bos_token_id": None, "eos_token_id": 2, "pad_token_id": 0, **changes})


def run_of(folder: Path, built, *, dtype=torch.float32, change_tokenizer=None, **options):
    base = make_base(folder / "base", built, dtype=dtype)
    if change_tokenizer is not None:
        tokenizer = AutoTokenizer.from_pretrained(base)
        change_tokenizer(tokenizer)
        tokenizer.save_pretrained(base)
    precision = "bf16" if dtype == torch.bfloat16 else "fp32"
    return find_finished_run(folder, str(finished_run(folder / "run", base, precision=precision, **options)))


KINDS = {
    "qwen2, tied": (lambda: model("Qwen2", tie_word_embeddings=True), torch.bfloat16, {}, None, "bf16"),
    "qwen3, q8_0": (lambda: model("Qwen3", tie_word_embeddings=True), torch.float32, {}, "q8_0", "q8_0"),
    "gemma3 with its images": (lambda: gemma3_with_images(vocab_size=320), torch.bfloat16, {}, None, "bf16"),
    "larger vocabulary, scaled positions, biases": (
        lambda: model("Llama", vocab_size=300, attention_bias=True, rope_parameters=LLAMA3_POSITIONS),
        torch.float32, {"modules_to_save": ["embed_tokens", "lm_head"]}, "f16", "f16",
    ),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`", "ignore:Setting `save_embedding_layers`")
@pytest.mark.parametrize("kind", KINDS)
def test_the_exported_model_is_the_trained_one(tmp_path, kind):
    converter()
    build, dtype, lora, quant, written = KINDS[kind]
    run = run_of(tmp_path, build(), dtype=dtype, **lora)
    exported = export_run(run, "gguf", quant=quant)
    assert (exported.quant, exported.prompts_checked > 10) == (written, True)
    tested = checks.export_test(run, rows=6)
    assert tested.ok, "\n".join(tested.lines())
    assert tested.answers["kl"] < tested.kl_base / 10


# --- fewer than 8 bits ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("quant", "dtype", "types"),
    [("q4_k_m", torch.bfloat16, {"F32", "Q4_K", "Q6_K"}), ("q5_0", torch.float32, {"F32", "Q5_0", "Q6_K"})],
)
def test_fewer_bits_are_those_of_llama_cpp_and_measured(tmp_path, quant, dtype, types):
    pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed (it compiles for minutes)")
    converter()
    wide = {"hidden_size": 256, "intermediate_size": 352, "head_dim": 64}
    run = run_of(tmp_path, model("Llama", tie_word_embeddings=False, vocab_size=TOKENS, **wide), dtype=dtype)
    exported = export_run(run, "gguf", quant=quant)
    assert [*exported.path.glob("*.gguf")] == [exported.file]
    assert exported.file.name.endswith(f"-{quant}.gguf")
    tested = checks.export_test(run, rows=4)
    found = set(tested.types)
    assert types <= found
    assert bool(found - types) == (quant != "q5_0")  # rows of 352 weights, which llama.cpp stores in blocks of 32
    bits = min(bits for name in found if (bits := checks.weight_bits(name)))
    limit = checks.divergence_limit(f"q{bits}", tested.kl_base)
    assert 0 < tested.answers["kl"] < tested.answers["kl_limit"] == limit


def test_bits_are_read_from_the_names_of_types():
    names = {"Q4_K": 4, "IQ4_XS": 4, "Q8_0": 8, "Q2_K": 2, "F16": None, "BF16": None, "MXFP4": None}
    assert {name: checks.weight_bits(name) for name in names} == names
    assert (checks.divergence_limit("q8", 0.0), checks.divergence_limit("q8", 10.0)) == (2e-3, 2e-2)


# --- a file that is not what was trained ------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    converter()
    folder = tmp_path_factory.mktemp("exported")
    run = run_of(folder, model("Llama", tie_word_embeddings=False, vocab_size=TOKENS))
    return run, export_run(run, "gguf").file


def test_a_lossless_export_answers_token_for_token(exported):
    run, file = exported
    tested = checks.export_test(run, rows=5)
    assert tested.ok, "\n".join(tested.lines())
    assert (tested.answers["equal_answers"], tested.prompts) == (1.0, 5)
    fields, tokenizer = checks.read_fields(file), AutoTokenizer.from_pretrained(run.weights)
    assert fields["tokenizer.chat_template"] == tokenizer.chat_template
    assert fields["tokenizer.ggml.eos_token_id"] == tokenizer.convert_tokens_to_ids("<|im_end|>")


def _change_weights(reader):
    next(one for one in reader.tensors if one.name == "blk.1.ffn_down.weight").data[:] *= -3


def _swap_rows(reader):
    data = next(one for one in reader.tensors if one.name == "output.weight").data
    data[:] = data[::-1].copy()


def _entry(key, value):
    def change(reader):
        field = reader.fields[key]
        part = field.parts[field.data[0]]
        new = value(bytes(part)) if callable(value) else value
        part[:] = list(new) if isinstance(new, bytes) else new

    return change


TEMPLATE = "tokenizer.chat_template"
WRONG = {
    "weights": (_change_weights, {"answers"}), "rows of the output embeddings": (_swap_rows, {"answers"}),
    "template": (_entry(TEMPLATE, lambda text: text.replace(b"assistant", b"Assistant")), {"template"}),
    "end": (_entry("tokenizer.ggml.eos_token_id", 1), {"stop tokens"}),
    "pre-tokenizer": (_entry("tokenizer.ggml.pre", b"tekke"), {"tokenizer"}),
}  # fmt: skip


def changed_copy(file: Path, folder: Path, change) -> Path:
    from gguf import GGUFReader

    copy = folder / "model.gguf"
    shutil.copyfile(file, copy)
    reader = GGUFReader(str(copy), "r+")
    change(reader)
    reader.data.flush()
    return copy


@pytest.mark.parametrize("what", WRONG)
def test_export_test_names_what_is_wrong_in_a_file(exported, tmp_path, what):
    change, names = WRONG[what]
    run, file = exported
    tested = checks.export_test(run, path=changed_copy(file, tmp_path, change), rows=3)
    assert (tested.ok, {check.name.lower() for check in tested.checks if check.ok is not True}) == (False, names)


def test_a_model_that_transformers_does_not_read_back_is_not_called_equal(tmp_path):
    converter()
    run = run_of(tmp_path, model("Olmo2"))
    export_run(run, "gguf")
    tested = checks.export_test(run, rows=3)
    assert (tested.ok, [check.ok for check in tested.checks if check.name == "Answers"]) == (False, [None])


# --- the tokenizer ----------------------------------------------------------------------------------------------------
def test_a_files_tokenizer_is_read_as_llama_cpp_reads_it(exported, tmp_path):
    run, file = exported
    tokenizer, fields = AutoTokenizer.from_pretrained(run.weights), checks.read_fields(file)
    draw = random.Random(5)
    words = ["hello", " there", "12", "3456", "<|im_start|>", "<|im_end|>", "\n\n", "é", "日本", "🚀", "'s", " ", "!?"]
    words += string.ascii_letters
    given = ["".join(draw.choices(words, k=draw.randint(0, 30))) for _ in range(300)]
    encode = checks.load_file_tokenizer(file, fields)
    expected = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in given]
    assert [encode(text) for text in given] == expected
    key, bos = "tokenizer.ggml.bos_token_id", tokenizer.convert_ids_to_tokens(0)
    with_bos = checks.load_file_tokenizer(file, {**fields, key: 0, "tokenizer.ggml.add_bos_token": True})
    assert with_bos("hello") == with_bos(f"{bos}hello") == [0, *encode("hello")]
    other = changed_copy(file, tmp_path, _entry("tokenizer.ggml.pre", b"tekke"))
    with pytest.raises(ModelError, match=r"not in the table of llama.cpp's"):
        checks.load_file_tokenizer(other, checks.read_fields(other))
    falcon = changed_copy(file, tmp_path, _entry("tokenizer.ggml.pre", b"youtu"))
    assert [checks.load_file_tokenizer(falcon, checks.read_fields(falcon))(text) for text in given] != expected


def test_a_sentencepiece_tokenizer_is_exported_from_the_bases_own_file(tmp_path):
    converter()
    sentencepiece = pytest.importorskip("sentencepiece")
    corpus = [f"the light in room {n} is {n * 37} lumen, isn't it?" for n in range(200)]
    published = tmp_path / "given" / "tokenizer.model"
    published.parent.mkdir()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(corpus), model_prefix=str(published.with_suffix("")), vocab_size=360, model_type="bpe",
        byte_fallback=True, normalization_rule_name="identity", remove_extra_whitespaces=False, minloglevel=2,
    )  # fmt: skip
    tokenizer = LlamaTokenizer.from_pretrained(str(published.parent))
    tokenizer.pad_token = "</s>"
    # as Mistral writes it: the text follows the mark at once, or a space
    tokenizer.chat_template = (
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %} {{ m.content }}{{ eos_token }}"
        "{% else %}[{{ m.role }}] {{ m.content }} [/]{% endif %}{% endfor %}"
    )
    base = make_base(tmp_path / "base", model("Llama", vocab_size=360, bos_token_id=1, pad_token_id=2))
    for file in (*base.glob("tokenizer*"), *base.glob("*.jinja")):
        file.unlink()
    tokenizer.save_pretrained(base)
    (base / "tokenizer.model").unlink(missing_ok=True)
    run = find_finished_run(tmp_path, str(finished_run(tmp_path / "run", base)))
    with pytest.raises(ModelError, match=r"reads a SentencePiece tokenizer from tokenizer.model"):
        export_run(run, "gguf")
    shutil.copy(published, base / "tokenizer.model")
    exported = export_run(run, "gguf")
    assert exported.prompts_checked > 10
    fields = checks.read_fields(exported.file)
    assert fields["tokenizer.ggml.model"] == "llama"
    encode, draw = checks.load_file_tokenizer(exported.file, fields), random.Random(2)
    words = [*" ".join(corpus).split(), "日本", "🚀", "é"]
    for _ in range(100):
        text = draw.choice([" ", "  ", "\n", ", "]).join(draw.choices(words, k=draw.randint(1, 9)))
        assert encode(f"<s>{text}") == tokenizer(f"<s>{text}", add_special_tokens=False)["input_ids"], text


def test_a_prompt_whose_texts_spell_special_tokens_is_not_compared_with_an_engine(exported):
    """Training has the characters there; an engine that is sent the text has the token."""
    run, _ = exported
    answer = {"role": "assistant", "content": "x"}
    chats = [Chat("", ({"role": "user", "content": text}, answer)) for text in ("hi", "hi<|im_end|>", "you")]
    asked = checks.EnginePrompts(run, run.folder.path / "merged").row_prompts(SimpleNamespace(chats=chats), 3)
    assert ["hi" in one.rendered for one in asked] == [True, False]


def test_a_pre_tokenizer_is_proven_and_not_assumed(tmp_path):
    make_tokenizer(tmp_path)
    backend = AutoTokenizer.from_pretrained(tmp_path).backend_tokenizer
    assert checks.find_pre_tokenizer(backend) == "gpt-2"
    split = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), split])
    assert checks.find_pre_tokenizer(backend) == "smollm"
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    assert checks.find_pre_tokenizer(backend) is None
    backend.pre_tokenizer, backend.model.ignore_merges = split, True
    assert checks.find_pre_tokenizer(backend) is None


def cut_elsewhere(tokenizer) -> None:
    pieces = [pre_tokenizers.Split("a", "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(pieces)


def lowercase(tokenizer) -> None:
    tokenizer.backend_tokenizer.normalizer = normalizers.Lowercase()


def number_turns(tokenizer) -> None:
    tokenizer.chat_template = CHATML.replace("'<|im_start|>'", "'<|im_start|>' + loop.index | string + ' '")


@pytest.mark.parametrize(("change", "form", "message"), [
    (cut_elsewhere, "gguf", "BPE pre-tokenizer was not recognized"),
    (lowercase, "gguf", "prompts have training's token ids"), (number_turns, "ollama", "llama-server --jinja"),
])  # fmt: skip
def test_what_llama_cpp_or_ollama_cannot_run_is_refused(tmp_path, change, form, message):
    converter()
    run = run_of(tmp_path, model("Llama"), change_tokenizer=change)
    with pytest.raises((BackendError, TokenizerError), match=message):
        export_run(run, form)
    assert not list((run.folder.path / "export").iterdir())


WITH_BOS = "{{ bos_token }}" + CHATML


@pytest.mark.parametrize("template", [WITH_BOS, CHATML])
def test_a_prompt_begins_with_bos_once_where_training_had_it_and_never_elsewhere(tmp_path, template):
    def put_bos_first(tokenizer) -> None:
        tokenizer.bos_token, tokenizer.chat_template = "<|endoftext|>", template
        begins = TemplateProcessing(single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)])
        tokenizer.backend_tokenizer.post_processor = begins

    converter()
    run = run_of(tmp_path, model("Llama", bos_token_id=0), change_tokenizer=put_bos_first)
    exported = export_run(run, "ollama")
    fields = checks.read_fields(exported.file)
    assert fields["tokenizer.ggml.add_bos_token"] == (template == WITH_BOS)
    text = (exported.path / "Modelfile").read_text()
    assert "<|endoftext|>" not in text.partition("PARAMETER")[0]
    assert "PARAMETER num_ctx 256\n" in text  # the model's, where the rows of training had 64
    assert checks.export_test(run, rows=3).ok


# --- the converter ----------------------------------------------------------------------------------------------------
def archive(path: Path, files: dict[str, bytes]) -> Path:
    with tarfile.open(path, "w:gz") as package:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            package.addfile(member, io.BytesIO(content))
    return path


def test_only_the_converter_is_unpacked_and_another_archive_is_refused(tmp_path):
    inside = f"llama_cpp_python-{LLAMA_CPP_VERSION}/vendor/llama.cpp/"
    wanted = {"convert_hf_to_gguf.py", "conversion/llama.py"}
    files = {f"{inside}{name}": b"" for name in (*wanted, "src/llama.cpp")} | {"conversion/other.py": b""}
    target = tmp_path / "target"
    unpack_converter(archive(tmp_path / "a.tar.gz", files), target)
    assert {str(file.relative_to(target)) for file in target.rglob("*") if file.is_file()} == wanted
    with pytest.raises(ConfigError, match=r"holds no convert_hf_to_gguf.py"):
        unpack_converter(archive(tmp_path / "b.tar.gz", {f"{inside}README.md": b""}), tmp_path / "b")
    (tmp_path / "c.tar.gz").write_bytes(b"no archive")
    with pytest.raises(ConfigError, match="cannot be unpacked"):
        unpack_converter(tmp_path / "c.tar.gz", tmp_path / "c")
    with pytest.raises(ConfigError, match=r"not a checkout of llama.cpp"):
        find_converter(tmp_path)


def test_without_an_index_one_message_says_how_to_get_the_converter(tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    monkeypatch.setenv("SFT_PLAY_CACHE", "/dev/null/cache")
    with pytest.raises(ConfigError, match=r"cannot be created .*set SFT_PLAY_CACHE"):
        find_converter(None)
    monkeypatch.setenv("SFT_PLAY_CACHE", str(tmp_path / "cache"))
    with pytest.raises(ConfigError, match=r"LLAMA_CPP= a checkout .* llama-cpp-python") as caught:
        find_converter(None)
    assert "\n" not in str(caught.value)
    assert {path.name for path in (tmp_path / "cache" / "llama.cpp").iterdir()} == {"lock"}


@pytest.fixture
def failing(tmp_path) -> Path:
    """A checkout of llama.cpp whose converter fails."""
    folder = tmp_path / "llama.cpp"
    (folder / "gguf-py" / "gguf").mkdir(parents=True)
    writer = "class GGUFWriter:\n    def write_header_to_file(self): ...\n"
    (folder / "gguf-py" / "gguf" / "__init__.py").write_text(writer)
    (folder / "convert_hf_to_gguf.py").write_text(
        "class TextModel:\n    def get_vocab_base_pre(self): ...\n"
        "def main():\n    print('Model NewForCausalLM is not supported')\n    raise SystemExit(1)\n"
    )
    return folder


def test_what_is_wrong_is_refused_and_nothing_is_left_behind(tmp_path, failing, monkeypatch):
    run, there = run_of(tmp_path, model("Llama")), importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "llama_cpp" else there(name))
    with pytest.raises(ConfigError, match=r"pip install llama-cpp-python==0.*QUANT=q8_0"):
        export_run(run, "gguf", quant="q4_k_m", llama_cpp=failing)
    assert not (run.folder.path / "merged").exists()  # fewer bits are refused before the merge
    with pytest.raises(RunFolderError, match="make export FORMAT=gguf"):
        checks.export_test(run)
    with pytest.raises(BackendError, match=r"(?s)LLAMA_CPP=.*\n  Model NewForCausalLM is not"):
        export_run(run, "gguf", llama_cpp=failing)
    assert not list((run.folder.path / "export").iterdir())
    (tmp_path / "mine").mkdir()
    with pytest.raises(RunFolderError, match="FORCE=1"):
        export_run(run, "gguf", out=tmp_path / "mine", llama_cpp=failing)
    with pytest.raises(RunFolderError, match="is no export of this toolkit"):
        export_run(run, "gguf", out=tmp_path / "mine", llama_cpp=failing, replace=True)
    (tmp_path / "no.gguf").write_bytes(b"GGU")
    with pytest.raises(ModelError, match="cannot be read as a GGUF"):
        checks.export_test(run, path=tmp_path / "no.gguf")


def test_a_merge_that_is_older_than_the_adapter_is_made_anew(tmp_path):
    run = run_of(tmp_path, model("Llama"))
    merged = merge_run(run).path / "model.safetensors"
    assert (export_run(run, "vllm").path / "model.safetensors").samefile(merged)
    adapter, before = run.weights / "adapter_model.safetensors", load_file(merged)
    save_file({name: tensor * 2 for name, tensor in load_file(adapter).items()}, adapter)
    again = export_run(run, "vllm", replace=True).path
    after = load_file(merged)
    assert any(not torch.equal(after[name], tensor) for name, tensor in before.items())
    assert (again / "model.safetensors").samefile(merged)


# --- vLLM and the commands --------------------------------------------------------------------------------------------
@pytest.mark.parametrize("mode", ["lora", "full"])
def test_the_folder_for_vllm_is_a_whole_model_with_the_stop_tokens_of_training(tmp_path, mode):
    base = make_base(tmp_path / "base", model("Llama", eos_token_id=0))
    run = find_finished_run(tmp_path, str(finished_run(tmp_path / "run", base, mode=mode)))
    exported = export_run(run, "vllm")
    tokenizer = AutoTokenizer.from_pretrained(exported.path)
    stops = GenerationConfig.from_pretrained(exported.path).eos_token_id
    assert tokenizer.convert_tokens_to_ids("<|im_end|>") in (stops if isinstance(stops, list) else [stops])
    assert tokenizer.chat_template == CHATML
    assert AutoModelForCausalLM.from_pretrained(exported.path).config.vocab_size == 400
    # the length is the model's, not the 64 tokens of the rows
    assert re.fullmatch(rf"vllm serve {exported.path} .* --max-model-len 256", exported.commands[0])


@pytest.mark.parametrize(("changes", "positions"), [
    ({}, 8192), ({"max_position_embeddings": 64}, 64),
    ({"model_type": "gpt2", "n_positions": 1024, "max_position_embeddings": None}, 1024),
])  # fmt: skip
def test_an_engine_is_given_the_models_own_positions(tmp_path, changes, positions):
    config = {
        "model_type": "llama", **SMALL, "vocab_size": 400, "max_position_embeddings": 8192, "n_embd": 64, "n_layer": 2,
        "n_head": 4, **changes,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps({key: one for key, one in config.items() if one is not None}))
    run = SimpleNamespace(plan=lambda: SimpleNamespace(max_seq_len=64))
    found, note = describe_context_window(run, str(tmp_path))
    assert (found, bool(note)) == (positions, positions != 64)


def test_the_commands_answer_in_words_and_json(exported, succeed, refuse):
    folder = str(exported[0].folder.path)
    printed = succeed("export-test", "--run", folder, "--limit", "2", "--json")
    assert json.loads(next(line for line in printed.splitlines() if line.startswith('{"ok"')))["prompts"] == 2
    for words, message in (
        ([], "error: make export needs FORMAT=, one of gguf, ollama, vllm"),
        (["--format", "gguf"], "FORCE=1"),
        (["--format", "onnx"], "gguf, ollama, vllm"),
        (["--format", "vllm", "--quant", "q8_0"], "QUANT= is for GGUFs"),
    ):
        assert message in refuse("export", "--run", folder, *words)


def test_the_starters_model_and_tokenizer_pass(tmp_path):
    """Its base before training: the same class, tokenizer and template."""
    converter()
    base = tmp_path / "base"
    starter_tokenizer(corpus_documents(2000)).save_pretrained(base)
    make_model().save_pretrained(base)
    run = find_finished_run(tmp_path, str(finished_run(tmp_path / "run", base)))
    exported = export_run(run, "ollama", quant="q8_0")
    assert exported.notes == ()
    assert checks.read_fields(exported.file)["tokenizer.ggml.pre"] == "gpt-2"
    assert 'PARAMETER stop "<|im_end|>"' in (exported.path / "Modelfile").read_text()
    tested = checks.export_test(run, rows=4)
    assert tested.ok, "\n".join(tested.lines())
