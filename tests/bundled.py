"""The bundled set: material of our own for the tests that otherwise read the shared material.

Texts, templates and rows are files of `tests/bundled/`. Broken files, tokenizers, model configs and Word files are
made here, once a process, in a temporary folder. A name is ours if it begins with `bundled/`, a chat template of the
installed TRL if it begins with `trl/`, and otherwise a file of the shared material.
"""

import functools
import json
import tempfile
from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import SHARED, shared

FILES = Path(__file__).with_suffix("")
ORIGINS = ["bundled", *(["shared"] if SHARED.is_dir() else [])]
"""Where whole folders (broken files, model configs) are tried from."""
SHARED_SLOWLY = ["bundled", pytest.param("shared", marks=pytest.mark.slow)]
"""The same for what takes seconds: both hold the same cases."""

_MADE = tempfile.TemporaryDirectory(prefix="bundled-")


def there(values: Iterable[Any]) -> list[Any]:
    """Of names, or tuples that begin with one, those to parametrize with: the shared material's where it is there."""
    names = ((value, value if isinstance(value, str) else value[0]) for value in values)
    return [value for value, name in names if SHARED.is_dir() or name.partition("/")[0] in ("bundled", "trl")]


def data_file(name: str) -> Path:
    """A file of rows or of plain text."""
    return FILES / name.removeprefix("bundled/") if name.startswith("bundled/") else shared(name)


def template_of(name: str) -> str:
    """The text of a chat template."""
    kind, _, rest = name.partition("/")
    if kind == "trl":
        spec = find_spec("trl")
        assert spec is not None
        assert spec.origin is not None
        path = Path(spec.origin).parent / "chat_templates" / f"{rest}.jinja"
    else:
        path = FILES / "templates" / f"{rest}.jinja" if kind == "bundled" else shared(f"chat_templates/{name}.jinja")
    return path.read_text(encoding="utf-8")


def bad_inputs(origin: str) -> Path:
    """The folder of the broken files."""
    return shared("bad_inputs") if origin == "shared" else _broken_files()


def model_configs(origin: str) -> Path:
    """A folder with a folder for each model, each with its config.json."""
    return shared("model_configs") if origin == "shared" else _config_files()


def tokenizer_folder(name: str) -> Path:
    kind, _, rest = name.partition("/")
    return _tokenizer(rest) if kind == "bundled" else shared(f"tokenizers/{name}")


def word_files(origin: str) -> list[Path]:
    return sorted(shared("docx").glob("*/*.docx")) if origin == "shared" else sorted(_word_files().glob("*.docx"))


# --- model configs ----------------------------------------------------------------------------------------------------

PUBLISHED = {
    "HuggingFaceTB/SmolLM2-135M-Instruct": 134_515_008, "Qwen/Qwen2.5-0.5B": 494_032_768,
    "Qwen/Qwen2.5-3B": 3_085_938_688, "Qwen/Qwen2.5-7B": 7_615_616_512, "Qwen/Qwen3-30B-A3B": 30_532_122_624,
    "Qwen/Qwen3-4B": 4_022_468_096, "Qwen/Qwen3-8B": 8_190_735_360, "TinyLlama/TinyLlama-1.1B-Chat-v1.0": 1_100_048_384,
    "google/gemma-2-9b": 9_241_705_984, "google/gemma-3-1b-it": 999_885_952, "google/gemma-3-27b-it": 27_432_406_640,
    "gpt2": 124_439_808, "meta-llama/Llama-3.1-70B": 70_553_706_496, "meta-llama/Llama-3.1-8B": 8_030_261_248,
    "meta-llama/Llama-3.2-1B": 1_235_814_400, "microsoft/Phi-3.5-mini-instruct": 3_821_079_552,
    "mistralai/Mistral-7B-v0.3": 7_248_023_552, "mistralai/Mixtral-8x7B-v0.1": 46_702_792_704,
    "openai/gpt-oss-20b": 20_914_757_184,
}  # fmt: skip
"""Models and the parameters that are published for them, of gemma-3-27b-it with its image tower."""

OWN_CODE = {"AutoConfig": "configuration_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}
"""What a config.json says of a model that brings classes of its own."""


def model_config(name: str) -> dict[str, Any]:
    """The sizes of a published model, by its name without the organisation, as the package knows them."""
    from sft_play.models.config_json import KNOWN_MODELS

    [full] = (one for one in PUBLISHED if one.rpartition("/")[2] == name)
    config: dict[str, Any] = json.loads(json.dumps(KNOWN_MODELS[full].config))
    return config


@functools.cache
def _config_files() -> Path:
    """The published sizes, written out by the config classes of transformers; one file asks for code of its own."""
    from transformers import AutoConfig

    folder = Path(_MADE.name) / "model_configs"
    for full in PUBLISHED:
        name = full.rpartition("/")[2]
        sizes = model_config(name)
        AutoConfig.for_model(sizes.pop("model_type"), **sizes).save_pretrained(folder / name)
    (folder / "phi-2-remote-code").mkdir()
    own = {"model_type": "phi-msft", "auto_map": OWN_CODE, "n_embd": 2560, "n_layer": 32, "n_head": 32}
    (folder / "phi-2-remote-code" / "config.json").write_text(json.dumps(own))
    return folder


# --- broken files -----------------------------------------------------------------------------------------------------


def _row(*turns: tuple[str, Any]) -> str:
    return json.dumps({"messages": [{"role": role, "content": text} for role, text in turns]}, ensure_ascii=False)


def _asked(question: Any, answer: Any) -> str:
    return _row(("user", question), ("assistant", answer))


def _called(arguments: Any, name: str = "open_door", **more: Any) -> str:
    call = {"id": "call_7", "type": "function", "function": {"name": name, "arguments": arguments}}
    turns = [{"role": "user", "content": "Open it."}, {"role": "assistant", **more, "tool_calls": [call]}]
    return json.dumps({"messages": turns})


GOOD = [_asked(f"How many legs have {n} spiders?", f"They have {8 * n}.") for n in range(1, 7)]


def _lines(*lines: str, end: str = "\n") -> bytes:
    return "".join(line + end for line in lines).encode()


def _with(line: str, *more: str, at: int = 2) -> bytes:
    """The good rows with others among them: from the third line on, or from the first."""
    return _lines(*GOOD[:at], line, *more, *GOOD[at:])


def _list_of(rows: Sequence[str], last: str = "") -> bytes:
    return f"[\n{(',' + chr(10)).join(rows)}{last}\n]\n".encode()


BROKEN: dict[str, bytes] = {
    "01_malformed_line.jsonl": _lines(*GOOD[:3], '{"messages": [{"role": "user", "content": "it stops', *GOOD[3:]),
    "02_trailing_comma.json": _list_of(GOOD, ","),
    "03_json_array_named_jsonl.jsonl": _list_of(GOOD),
    "04_bom_utf8.jsonl": b"\xef\xbb\xbf" + _lines(*GOOD),
    "05_utf16.jsonl": b"\xff\xfe" + _lines(*GOOD).decode().encode("utf-16-le"),
    # Column 44 is the first character of the question: Latin-1's second letter is 0xF9, GBK's first byte 0xC4.
    "06_latin1_bytes.jsonl": _with(_asked("Rùm: une île ?", "Très belle, en été.")).decode().encode("latin-1"),
    "07_gbk.jsonl": _with(_asked("能看见河吗", "在窗边可以看见河，河上有船")).decode().encode("gbk"),
    "08_empty_file.jsonl": b"",
    "09_blank_lines.jsonl": _lines("", GOOD[0], "", GOOD[1], " \t ", GOOD[2], "", ""),
    "10_missing_key.jsonl": _with('{"conversations": [{"role": "user", "content": "Hello?"}]}'),
    "11_null_content.jsonl": _with(_asked("Are you there?", None)),
    "12_empty_assistant.jsonl": _with(_asked("Anything to add?", ""), _asked("Nothing?", " \n ")),
    "13_empty_messages.jsonl": _with('{"messages": []}'),
    "14_ends_with_user.jsonl": _with(_row(("user", "Who will answer this?"))),
    "15_assistant_first.jsonl": _with(_row(("system", "Be kind."), ("assistant", "Good morning!"))),
    "16_two_users_in_a_row.jsonl": _with(_row(("user", "One."), ("user", "Two."), ("assistant", "Three."))),
    "17_role_typo.jsonl": _with(_row(("user", "Who is this?"), ("asistant", "A typo."))),
    "18_content_is_number.jsonl": _with(_asked("Six times seven?", 42)),
    "19_output_is_object.json": (
        b'[{"instruction": "x", "input": "", "output": "y"}, {"instruction": "z", "input": "", "output": {"y": []}}]'
    ),
    "20_tool_args_mixed_types.jsonl": _lines(
        _called({"door": "east"}, content=""), _called({"door": 7}, content=""), _called('{"door": [1]}', content=""),
        _called({}, content=""),
    ),
    "21_tool_args_double_encoded.jsonl": _lines(_called(json.dumps(json.dumps({"door": "east"})))),
    "22_all_longer_than_1024.jsonl": _lines(*(_asked("tick tock " * 1_100, f"It is {n} o'clock.") for n in range(4))),
    "23_prompt_fills_window.jsonl": _with(_asked("tick tock " * 900, "It is noon.")),
    "24_duplicate_json_key.jsonl": _with('{"messages": [], ' + _asked("Which one?", "The last.")[1:], at=0),
    "25_special_tokens_in_text.jsonl": _with(
        _asked("Say <|im_end|>\n<|im_start|>assistant\nyes", "<|im_end|> ends a turn, as </s> and [/INST] do"), at=0
    ),
    "26_duplicates_and_leak.jsonl": _lines(*GOOD, *GOOD[:3]),
    "27_lone_surrogate.jsonl": _with(_asked("half of it: HALF", "Oh.").replace("HALF", "\\ud83e"), at=0),
    "28_nul_and_control.jsonl": _with(_asked("x NUL y", "ESC[1m bold").replace("NUL", "\\u0000").replace(
        "ESC", "\\u001b"), at=0),
    "29_crlf.jsonl": _lines(*GOOD, end="\r\n"),
    "30_nan_literal.jsonl": _lines(
        '{"prompt": "a", "completion": "b", "weight": NaN}', '{"prompt": "c", "completion": "d", "weight": 2.5}'
    ),
    "31_sharegpt_unknown_from.json": _list_of(
        [json.dumps({"conversations": [{"from": "human", "value": "Hello?"}, {"from": name, "value": "Hello!"}]})
         for name in ("bot", "gpt")]
    ),
    "40_lr_string.yaml": b"model: gpt2\nlearning_rate: 3e-5\n",
    "41_duplicate_key.yaml": b"model: gpt2\nmax_length: 512\nseed: 1\nmax_length: 4096\n",
    "42_tab_indent.yaml": b"model:\n\tname: gpt2\n",
    "43_unknown_key.yaml": b"model: gpt2\nlerning_rate: 0.001\n",
    "44_bool_words.yaml": b"model: gpt2\nreport_to: no\nbf16: off\n",
    "45_version_number.yaml": b"model: gpt2\nrun_name: 2.0\nseed: 017\ntime: 1:30:00\n",
    "46_colon_in_value.yaml": b"model: gpt2\nsystem_prompt: Remember: be kind\n",
    "47_empty.yaml": b"",
    "48_list_root.yaml": b"- model: gpt2\n- seed: 1\n",
    "49_null_value.yaml": b"model: gpt2\ndata:\n",
}  # fmt: skip
"""What people really had, each fault in a file of its own: six good rows, and what is broken among them."""


@functools.cache
def _broken_files() -> Path:
    folder = Path(_MADE.name) / "bad_inputs"
    folder.mkdir()
    for name, content in BROKEN.items():
        (folder / name).write_bytes(content)
    return folder


# --- tokenizers -------------------------------------------------------------------------------------------------------

_QWEN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CHATML = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
_BRACKETS = ["[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]"]


@functools.cache
def texts() -> list[str]:
    """What the tokenizers are trained on: lines of our own documents and rows, and runs of line ends."""
    files = [*FILES.glob("documents/*"), *FILES.glob("rows/**/*.json*")]
    lines = [line for path in sorted(files) for line in path.read_text(encoding="utf-8").splitlines(keepends=True)]
    return [*lines, *["one\n\n\ntwo\n\nthree"] * 40]


def _byte_level(special: list[str], *before: Any, use_regex: bool) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    made = Tokenizer(models.BPE())
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)
    made.pre_tokenizer = pre_tokenizers.Sequence([*before, last])
    made.decoder = decoders.ByteLevel()
    options = {"special_tokens": special, "initial_alphabet": pre_tokenizers.ByteLevel.alphabet()}
    made.train_from_iterator(texts(), trainers.BpeTrainer(vocab_size=900, show_progress=False, **options))
    return made


def _metaspace(special: list[str], *, by_normalizer: bool) -> Any:
    """As SentencePiece makes them: a mark for a space, bytes for what is not in the vocabulary.

    `by_normalizer`: the file asks for the mark before every text between special tokens, as older ones do.
    """
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

    special = ["<unk>", "<s>", "</s>", *special]
    made = Tokenizer(models.BPE(unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    made.train_from_iterator(texts(), trainers.BpeTrainer(vocab_size=700, special_tokens=special, show_progress=False))
    state = json.loads(made.to_str())
    vocabulary = state["model"]["vocab"]
    vocabulary.update({f"<0x{byte:02X}>": len(vocabulary) + byte for byte in range(256)})
    state["model"] |= {"byte_fallback": True, "fuse_unk": True}
    made = Tokenizer.from_str(json.dumps(state))
    if by_normalizer:
        made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        made.pre_tokenizer = None
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    made.decoder = decoders.Sequence(steps)
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", vocabulary["<s>"])]
    )
    return made


@functools.cache
def _tokenizer(name: str) -> Path:
    """A folder with one of six tokenizers.

    - `bytes`: byte-level, without template, pad token or ChatML's tokens, as GPT-2's
    - `chatml`: byte-level, a template with tools, a pad token, tokens for calls, as Qwen's; it needs nothing
    - `pad_is_eos`: byte-level, digits alone; pads with its end token, and its BOS begins every turn, as SmolLM2's
    - `metaspace`: a mark for a space, BOS and EOS, no pad token, square brackets, as Mistral's
    - `rebuilt`: as `metaspace`, but transformers builds another one than its file describes, as Phi-3's
    - `spm`: nothing but a SentencePiece `tokenizer.model`
    """
    from tokenizers import AddedToken, Regex, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    folder = Path(_MADE.name) / "tokenizers" / name
    folder.mkdir(parents=True)
    if name == "spm":
        import sentencepiece

        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(texts()), model_prefix=str(folder / "tokenizer"), vocab_size=600, model_type="bpe",
            byte_fallback=True, minloglevel=2,
        )  # fmt: skip
        settings = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
        return folder
    template = None
    if name == "bytes":
        raw = _byte_level(["<|endoftext|>"], use_regex=True)
        tokens = {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>"}
    elif name == "chatml":
        raw = _byte_level(_CHATML, pre_tokenizers.Split(Regex(_QWEN), "isolated"), use_regex=False)
        raw.add_tokens([AddedToken(token, normalized=False) for token in ("<tool_call>", "</tool_call>")])
        tokens = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
        template = template_of("bundled/tools")
    elif name == "pad_is_eos":
        raw = _byte_level(_CHATML, pre_tokenizers.Digits(individual_digits=True), use_regex=True)
        tokens = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "pad_token": "<|im_end|>"}
        template = template_of("bundled/chatml")
    elif name == "metaspace":
        raw = _metaspace([*_BRACKETS, "[/TOOL_RESULTS]"], by_normalizer=False)
        tokens = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
        template = template_of("bundled/calls")
    else:
        assert name == "rebuilt"
        raw = _metaspace(["<|user|>", "<|assistant|>", "<|end|>"], by_normalizer=True)
        tokens = {"bos_token": "<s>", "eos_token": "<|end|>", "pad_token": "<|end|>", "unk_token": "<unk>"}
        template = template_of("bundled/bars")
    made = PreTrainedTokenizerFast(tokenizer_object=raw, **tokens)
    made.chat_template = template
    made.save_pretrained(folder)
    if name == "rebuilt":
        path = folder / "tokenizer_config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "tokenizer_class": "LlamaTokenizer"}))
    return folder


# --- Word files -------------------------------------------------------------------------------------------------------

_W = 'xmlns:w="http://schemas.openxmlformats.org/wordprocessingml/2006/main"'
_BOX = (
    f'<w:r {_W} xmlns:mc="http://schemas.openxmlformats.org/markup-compatibility/2006" '
    'xmlns:wps="http://schemas.microsoft.com/office/word/2010/wordprocessingShape" '
    'xmlns:v="urn:schemas-microsoft-com:vml">'
    '<mc:AlternateContent><mc:Choice Requires="wps"><w:drawing><wps:txbx>BOX</wps:txbx></w:drawing></mc:Choice>'
    "<mc:Fallback><w:pict><v:textbox>BOX</v:textbox></w:pict></mc:Fallback></mc:AlternateContent></w:r>"
).replace("BOX", "<w:txbxContent><w:p><w:r><w:t>＊ Mind the step</w:t></w:r></w:p></w:txbxContent>")


@functools.cache
def _word_files() -> Path:
    """Four files: text, lists and a table; a text box; words that were deleted or hidden; and no text at all."""
    import docx
    from docx.oxml import parse_xml

    folder = Path(_MADE.name) / "docx"
    folder.mkdir()
    made = docx.Document()
    made.add_heading("Minutes of the ferry's council", 1)
    made.add_paragraph("Present: the ferryman, ").add_run("his brother").bold = True
    for text in ("A new rope", "Lamps on both banks", "Eels, naïvely counted: 漢字"):
        made.add_paragraph(text, style="List Bullet")
    table = made.add_table(rows=0, cols=2)
    for line in (("Item", "Coins"), ("rope", "12"), ("oil & wicks", "7")):
        for cell, text in zip(table.add_row().cells, line, strict=True):
            cell.text = text
    made.sections[0].header.paragraphs[0].text = "A header"
    made.save(str(folder / "minutes.docx"))

    made = docx.Document()
    made.add_paragraph("Before the box.")._p.append(parse_xml(_BOX))
    made.save(str(folder / "boxes.docx"))

    made = docx.Document()
    body = made.add_paragraph("What stays, ")._p
    for mark, text in (("ins", "what was added"), ("del", " and what was struck out")):
        body.append(parse_xml(f'<w:{mark} {_W} w:id="1" w:author="us"><w:r><w:t>{text}</w:t></w:r></w:{mark}>'))
    made.add_paragraph("Nobody sees this.").runs[0].font.hidden = True
    made.save(str(folder / "revised.docx"))

    docx.Document().save(str(folder / "empty.docx"))
    return folder
