"""Every option reaches what it is for: each probe names the fact downstream that must take which value.

A refusal is no effect unless the probe says so, and a change of anything else than the named fact does not count.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, get_args, get_origin

import pytest

from sft_play.config.load import config_from_text
from sft_play.config.options import all_options, sections
from sft_play.config.schema import RunConfig
from sft_play.data.build import splits as data_splits
from sft_play.data.build.splits import build_splits
from sft_play.data.process import process_files, style_rows
from sft_play.data.sources.files import find_data_paths
from sft_play.errors import SftPlayError
from sft_play.launch.run_hardware import hide_gpus, restrict_to_device
from sft_play.launch.torchrun import rank_timeout_s
from sft_play.machine.gpu import Gpu
from sft_play.machine.hardware import Hardware, parse_hardware
from sft_play.models.config_json import load_model_shape
from sft_play.planner.backend import choose_backend
from sft_play.planner.decide import PlanRequest, make_plan
from sft_play.planner.layout import LAYOUT_NAMES, find_layouts
from sft_play.planner.plan import RunLength
from sft_play.planner.precision import Precision, adapter_dtype, choose_precision, gradient_sync
from sft_play.runs.folder import MANIFEST_FORMAT, RunFolder
from sft_play.runs.lookup import is_resume, new_run_folder
from tests.conftest import chat, need_documents_extra, write_rows, write_run
from tests.image_families import make_image_model

GIB = 2**30
SMALL_MIXTURE = {
    "vocab_size": 100, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 2,
}  # fmt: skip
FP32 = Precision("float32", "float32", "")
CPU = Hardware((), "CPU", 2, 24 * GIB, 24 * GIB)
MACHINE = Hardware((Gpu(0, "GPU", 40 * GIB, None, (9, 0)),), "CPU", 2, 24 * GIB, 24 * GIB)

pytestmark = pytest.mark.build


@pytest.fixture(scope="module")
def world(tmp_path_factory, tiny_llama):
    folder = tmp_path_factory.mktemp("world")
    for name in ("train", "other"):
        write_rows(folder / f"{name}.jsonl", (chat(f"what is {n}?", f"it is {n}.") for n in range(20)))
    write_rows(folder / "german.jsonl", [{"frage": "a", "antwort": "b"}] * 20)
    for encoding, answer in ENCODED.items():
        row = json.dumps(chat("wer?", answer), ensure_ascii=False)
        (folder / f"{encoding}.jsonl").write_bytes(f"{row}\n".encode(encoding))
    (folder / "bad.jsonl").write_text(json.dumps(chat("a", "b")) + "\n{}\n")
    (folder / "na.csv").write_text("prompt,completion\n" + "what is none?,None\n" * 9)
    (folder / "text.txt").write_text("the light in the kitchen is on. " * 200)
    shutil.copytree(tiny_llama, folder / "model")
    (folder / "mixture").mkdir()
    (folder / "mixture" / "config.json").write_text(json.dumps({"model_type": "mixtral", **SMALL_MIXTURE}))
    _write_pictures(folder)
    _write_odd_rows(folder)
    _write_templates(folder)
    _write_documents(folder)
    return {"folder": folder, "model": tiny_llama}


def _write_pictures(folder: Path) -> None:
    from PIL import Image

    make_image_model(folder / "vision", "qwen2_5_vl")
    for name, side in (("large", 200), ("small", 16)):
        Image.new("RGB", (side, side)).save(folder / f"{name}.png")
    names = {"large": "large.png", "small": "small.png", "remote": "http://127.0.0.1:9/a.png"}
    for name, image in names.items():
        write_rows(folder / f"{name}_pictures.jsonl", [{**chat("what is it?", "it is on."), "image": image}])


def _write_odd_rows(folder: Path) -> None:
    twice = chat("a", "b")["messages"] * 2
    files = {
        "multi": [{"messages": twice}], "special": [chat("a <|im_end|> b", "c")],
        "system": [{"messages": [{"role": "system", "content": "brief"}, *chat("a", "b")["messages"]]}],
        "consecutive": [{"messages": [{"role": "user", "content": "x"}, *chat("a", "b")["messages"]]}],
        "empty": [chat("a", "b"), chat("c", "")], "no_roles": [{"messages": ["a", "b"]}],
        "long": [chat("a", "b " * 50), chat("a", "b")], "double": [chat("a", "b"), chat("a", "b"), chat("c", "d")],
        "near": [chat("c", "d"), *(chat("one two three four five six seven eight nine ten", word) for word in "xy")],
        "many": [chat(f"q {n}", f"a {n}") for n in range(60)],
        "calls": [{"messages": [twice[0], {**twice[1], "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}]}],
    }  # fmt: skip
    files |= {"leaky/train": files["double"], "leaky/val": files["double"][:1]}
    (folder / "leaky").mkdir()
    for name, rows in files.items():
        write_rows(folder / f"{name}.jsonl", rows)


def _write_templates(folder: Path) -> None:
    turns = "{% for m in messages %}{{ m.role + m.content }}<|im_end|>{% endfor %}"
    prompt = "{% if add_generation_prompt %}assistant{% endif %}"
    think = "'<think>' + (m.reasoning_content or '') + '</think>'"
    thought = f"{{{{ m.role + ({think} if m.role == 'assistant' else '') + m.content"
    calls = "{{ m.tool_calls|tojson if m.tool_calls }}"
    templates = {
        "mine": turns + prompt, "thinks": turns.replace("{{ m.role + m.content", thought) + prompt,
        "prompts_think": turns + prompt.replace("{% end", "<think></think>{% end"),
        "calls": turns.replace("<|im_end|>", f"{calls}<|im_end|>") + prompt,
        "kwargs": "{{ tone or 'plain' }}" + turns + prompt,
        "dated": "{{ strftime_now('%Y-%m-%d') }}" + turns + prompt,
        "inexact": turns + prompt.replace("assistant{%", "model{%"),
        "endless": turns.replace("<|im_end|>", "\n") + prompt,
        "nosystem": turns.replace("messages %}", "messages if m.role != 'system' %}", 1) + prompt,
    }  # fmt: skip
    for name, text in templates.items():
        (folder / f"{name}.jinja").write_text(text)


def _write_documents(folder: Path) -> None:
    opening = "The same long opening paragraph of every file here, word for word."
    for folder_name in ("documents", "other_documents"):
        (folder / folder_name).mkdir()
    for n in range(40):
        words = " ".join(f"word{n}x{k}" for k in range(60))
        (folder / f"documents/{n:02}.txt").write_text(f"{opening}\n\n{words}\n")
    (folder / "other_documents" / "a.txt").write_text("another text " * 30)


def make(world: dict[str, Any], *overrides: str) -> RunConfig:
    text = (
        f"model: {{name: {world['model']}, max_seq_len: 64}}\n"
        f"data: {{train_path: {world['folder']}/train.jsonl, val_path: null, test_path: null}}\n"
        f"output: {{dir: {world['folder']}/outputs}}\n"
        "train: {effective_batch_size: 8}\n"
    )
    filled = [override.replace("WORLD", str(world["folder"])) for override in overrides]
    return config_from_text(text, name="run.yaml", overrides=filled)


Facts = dict[str, Any]
REFUSED = "refused"
"""The fact that holds the message of a refusal; absent where nothing was refused."""


@dataclass(frozen=True)
class Says:
    """A text that holds `part`."""

    part: str

    def __eq__(self, other: object) -> bool:
        return isinstance(other, str) and self.part in other


@dataclass(frozen=True)
class Probe:
    """Where an option is looked at, the overrides that change it, and the facts that it must then set.

    `WORLD` in overrides and expected texts is the folder of files. Each named fact must have its value with `after` and
    another one (or be absent) with `before`.
    """

    look: Callable[[RunConfig], Facts]
    after: list[str]
    then: Mapping[str, Any]
    before: list[str] = field(default_factory=list)

    def problem(self, world: dict[str, Any]) -> str | None:
        """What speaks against the option's reaching its facts; None where nothing does."""
        expected = {key: _filled(value, world) for key, value in self.then.items()}
        before, after = (self.facts(world, [*self.before, *more]) for more in ([], self.after))
        for facts in (before, after):
            if REFUSED in facts and REFUSED not in expected:
                return f"refused, which is no effect: {facts[REFUSED]}"
        for key, value in expected.items():
            if value != after.get(key):
                return f"{key} is {after.get(key)!r} instead of {value!r}"
            if value == before.get(key):
                return f"{key} is {value!r} without the change too"
        return None

    def facts(self, world: dict[str, Any], overrides: list[str]) -> Facts:
        try:
            return self.look(make(world, *overrides))
        except SftPlayError as error:
            return {REFUSED: str(error)}


def _filled(value: Any, world: dict[str, Any]) -> Any:
    if isinstance(value, Says):
        return Says(value.part.replace("WORLD", str(world["folder"])))
    return value.replace("WORLD", str(world["folder"])) if isinstance(value, str) else value


def flat(value: Any, at: str = "") -> Facts:
    """Nested mappings as one, with dotted keys."""
    if not isinstance(value, dict):
        return {at: value}
    found: Facts = {}
    for name, item in value.items():
        found |= flat(item, f"{at}.{name}" if at else name)
    return found


def plan(config: RunConfig) -> Facts:
    return flat(make_plan(PlanRequest(config, load_model_shape("Qwen/Qwen2.5-3B-Instruct"), MACHINE)).as_json())


def long_run(config: RunConfig) -> Facts:
    request = PlanRequest(config, load_model_shape("Qwen/Qwen2.5-3B-Instruct"), parse_hardware("H100"))
    return {"compiled": make_plan(request, estimate_run_length=lambda _: RunLength(100_000, None)).compiled}


def on_cpu(config: RunConfig) -> Any:
    return make_plan(PlanRequest(config, load_model_shape(config.model.name), CPU))


def arguments(config: RunConfig) -> Facts:
    from sft_play.training.loop.trainer import training_arguments

    return training_arguments(config, on_cpu(config), RunFolder(Path("/nowhere")), has_eval=True).to_dict()


SEEN = ("checkpoint_limit", "patience", "sorts_by_length", "on_nan", "loraplus_lr_ratio")
"""Arguments of the trainer that probes look at."""


def trainer(config: RunConfig) -> Facts:
    """What the trainer is built with beside its arguments."""
    from transformers import AutoModelForCausalLM

    from sft_play.training.loop.trainer import build_plan_callbacks, build_trainer

    seen: Facts = {}

    class Recorder:
        is_deepspeed_enabled = False

        def __init__(self, **options: Any) -> None:
            seen.update({key: options[key] for key in SEEN})
            seen["packs"] = options["packs"] and len(options["packs"])
            kind, _ = options.get("optimizer_cls_and_kwargs", (None, {}))
            seen["optimizer"] = kind and kind.__name__
            self.step_memory = SimpleNamespace(on_oom=[])

        def remove_callback(self, *_: Any) -> None: ...

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sft_play.training.loop.trainer.PlannedTrainer", Recorder)
        plan, folder = on_cpu(config), RunFolder(Path(config.output.dir) / "x")
        model = AutoModelForCausalLM.from_pretrained(config.model.name) if config.train.optim == "muon" else None
        rest: Facts = {"tokenizer": None, "peft_config": None, "eval_split": None}
        rows = _splits(config)[0].train
        made = build_trainer(config, plan, folder, model=model, train_split=rows, **rest)
    callbacks = build_plan_callbacks(config, plan, folder, made)
    seen["callbacks"] = tuple(type(item).__name__ for item in callbacks)
    seen["profiled"] = [item._steps for item in callbacks if type(item).__name__ == "ProfileWindow"]
    return seen


def kernels(config: RunConfig) -> Facts:
    """Which kernels replace the model's own, on a machine that can run them."""
    from sft_play.training.class_checks import replaced_code as module

    model: Any = type("Model", (), {"config": type("Config", (), {"_attn_implementation": "sdpa"})})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_liger_problem", lambda plan: None)
        patch.setattr(module, "_unknown_class_problem", lambda model: None)
        patch.setattr(module, "check_liger_kernels", lambda *_, **__: module.ClassCheck(1e-7, 1.0))
        patch.setattr(module, "_apply_liger", lambda model: ("rms_norm",))
        patch.setattr(module, "_kernels_of_run", contextlib.ExitStack())
        return {"kernels": module.activate_kernels(model, config, on_cpu(config), device=None).replaced}


def _splits(config: RunConfig) -> Any:
    from sft_play.training.prepare.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(config).tokenizer
    return build_splits(config, find_data_paths(config.data), tokenizer, max_seq_len=64), tokenizer


def splits(config: RunConfig) -> Facts:
    """The rows of a run: how many, and the first one as text, whole and its trained part."""
    made, tokenizer = _splits(config)
    first = made.train.rows[0]
    trained = [token for token, label in zip(first["input_ids"], first["labels"], strict=True) if label != -100]
    rows = made.train.rows
    return {
        "rows": len(rows), "source": made.train.stats.source, "tokens": len(first["input_ids"]),
        "text_rows": sum(source == 1 for source in rows["source"]) if "source" in rows.column_names else 0,
        "val": made.val and f"{made.val.stats.source} ({len(made.val.rows)})",
        "test": made.test and f"{made.test.stats.source} ({len(made.test.rows)})",
        "text": tokenizer.decode(first["input_ids"]), "trained": tokenizer.decode(trained),
    }  # fmt: skip


def files_of(folder: Path) -> Facts:
    """Rows of the files in a folder, and their first words and texts."""
    files = sorted(folder.glob("*.jsonl"))
    rows = {path.stem: [json.loads(line) for line in path.read_text().splitlines()] for path in files}
    return {"folder": str(folder), **{name: len(found) for name, found in rows.items()}, "first": rows["train"][0]}


def processed(config: RunConfig) -> Facts:
    report = process_files(config, force=True)
    counts = {"near": report.near_duplicates.count, "overlaps": sum(one.count for one in report.overlaps.values())}
    return files_of(Path(config.data.process.out_dir)) | counts


def styled(config: RunConfig) -> Facts:
    processed(config)
    style_rows(config, None, force=True)
    facts = files_of(Path(config.data.style.out_dir))
    return {**facts, "system": facts["first"]["messages"][0]["content"]}


def texts(config: RunConfig) -> Facts:
    from sft_play.documents import convert_documents

    need_documents_extra()
    convert_documents(config, force=True)
    found = files_of(Path(config.data.documents.out_dir))
    written = [json.loads(line)["text"] for line in (Path(found["folder"]) / "train.jsonl").read_text().splitlines()]
    opening = sum("The same long opening" in text for text in written)
    longest = max(len(text) for text in written)
    return {**found, "text": written[0], "openings": opening > 1, "short": longest <= 200, "has_val": "val" in found}


def pictures(config: RunConfig) -> Facts:
    """Tokens that the images of the rows take."""
    from sft_play.training.prepare.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(config).tokenizer
    built = build_splits(config, find_data_paths(config.data), tokenizer, max_seq_len=2048)
    return {"image_tokens": built.train.stats.image_tokens}


def trained_parts(config: RunConfig) -> Facts:
    """Parts for images that train."""
    from sft_play.training.prepare.model_spec import build_model_spec

    spec = build_model_spec(config, FP32, tokenizer_size=100)
    targets = [] if spec.peft_config is None else sorted(spec.peft_config.target_modules)
    return {
        "parts": [name for name, _ in spec.text_tower.prefixes[1:]],
        "adapted": [name for name in targets if name.startswith("sft_vision")],
    }


def headers(config: RunConfig) -> Facts:
    """What is read of a .docx with a page header."""
    import docx

    folder = Path(config.data.documents.path)
    folder.mkdir(exist_ok=True)
    made = docx.Document()
    made.add_paragraph("The body of the only page that there is, long enough to be kept.")
    made.sections[0].header.paragraphs[0].text = "Confidential header line"
    made.save(str(folder / "page.docx"))
    return texts(config)


def worker_count(config: RunConfig) -> Facts:
    """How many processes are asked to make rows."""
    asked: list[Any] = []
    real = data_splits.build_rows

    def record(*args: Any, workers: Any, **options: Any) -> Any:
        asked.append(workers)
        return real(*args, workers=1, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(data_splits, "build_rows", record)
        splits(config)
    return {"workers": asked}


def model_spec(config: RunConfig) -> Facts:
    """The backend, the attention and the adapter that are taken."""
    from sft_play.training.prepare.model_spec import build_model_spec

    drawn = build_model_spec(config, FP32, tokenizer_size=100)
    adapter = drawn.peft_config.to_dict() if drawn.peft_config else {}
    listed = {key: tuple(sorted(value)) if isinstance(value, (set, list)) else value for key, value in adapter.items()}
    backend = choose_backend(config, CPU)
    return {
        "backend": backend.name, "fallback_from": backend.fallback_from, "attention": drawn.attention.name,
        "has_adapter": bool(adapter), "trainable": config.tuning.trainable != "all" and drawn.notes[-1],
        "notes": " ".join(drawn.notes), "bf16": adapter_dtype(config, Precision("bfloat16", "bfloat16", "")), **listed,
    }  # fmt: skip


def experts(config: RunConfig) -> Facts:
    from transformers import AutoModelForCausalLM, MixtralConfig

    from sft_play.training.prepare.experts import choose_experts

    model = AutoModelForCausalLM.from_config(MixtralConfig(**SMALL_MIXTURE))
    chosen = choose_experts(config, model, FP32)
    return {"runs": chosen.name if chosen else None}


def expert_weights(config: RunConfig) -> Facts:
    from transformers import AutoModelForCausalLM, MixtralConfig
    from transformers.quantizers import AutoHfQuantizer

    from sft_play.training.model.model_loading import quantization_config

    wanted = quantization_config(FP32, quantizes_experts=config.tuning.quantize_experts is not False)
    model = AutoModelForCausalLM.from_config(MixtralConfig(**SMALL_MIXTURE))
    quantizer = AutoHfQuantizer.from_config(wanted, pre_quantized=False)
    return {"packed": quantizer.param_needs_quantization(model, f"{EXPERTS}.down_proj")}


def origin(config: RunConfig) -> Facts:
    """The adapter that training begins with."""
    from peft import get_peft_model

    from sft_play.training.model.model_loading import read_base_adapter, read_model
    from sft_play.training.prepare.model_spec import build_model_spec

    spec = build_model_spec(config, FP32, tokenizer_size=100)
    if config.model.adapter is not None:
        get_peft_model(read_model(config, FP32, spec), spec.peft_config).save_pretrained(config.model.adapter)
    found = read_base_adapter(config, spec)
    return {"folder": str(found.folder) if found else None}


def loading(config: RunConfig) -> Facts:
    """What tokenizer and config are asked for with."""
    from sft_play.training.prepare import model_spec, tokenizer

    seen: Facts = {}

    for what, target, ask in (
        ("tokenizer", "transformers.AutoTokenizer", tokenizer.load_tokenizer),
        ("config", "sft_play.training.prepare.model_spec.AutoConfig", model_spec._load_full_config),
    ):

        def asked(name: Any, *, what: str = what, **options: Any) -> None:
            seen.update({f"{what}.{key}": value for key, value in {"name": name, **options}.items()})
            raise OSError("recorded")

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(f"{target}.from_pretrained", asked)
            with pytest.raises(SftPlayError):
                ask(config)
    return seen


def tokens(config: RunConfig) -> Facts:
    """The tokens that are added, as a text that spells them has them, and their trained rows."""
    from sft_play.training.prepare.tokenizer import load_tokenizer

    loaded = load_tokenizer(config)
    ids = loaded.tokenizer("so it is not", add_special_tokens=False)["input_ids"]
    return {"added": [loaded.tokenizer.decode([one]) for one in ids if one in loaded.new_rows]}


def weights(config: RunConfig) -> Facts:
    """What the weights are asked for with."""
    from sft_play.training.model import model_loading
    from sft_play.training.prepare import model_spec

    seen: Facts = {}

    def record(*args: Any, **options: Any) -> None:
        seen.update(name=args[0], quantised="quantization_config" in options, **options)
        raise OSError("recorded")

    drawn = model_spec.build_model_spec(config, FP32, tokenizer_size=100)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sft_play.training.model.model_loading.AutoModelForCausalLM.from_pretrained", record)
        with pytest.raises(SftPlayError):
            model_loading.load_model(config, FP32, drawn, device="cpu")
    return seen


def folder(config: RunConfig) -> Facts:
    """The folder of a new run."""
    Path(config.output.dir, "there").mkdir(parents=True, exist_ok=True)
    now = datetime(2026, 1, 1, tzinfo=UTC)
    return {"path": str(new_run_folder(config.output, config_path=Path("run.yaml"), now=now).path)}


def decision(config: RunConfig) -> Facts:
    """What an existing folder of ours means."""
    path = Path(config.output.dir) / "ours"
    path.mkdir(parents=True, exist_ok=True)
    (path / "manifest.json").write_text(json.dumps({"format": MANIFEST_FORMAT}))
    folder = new_run_folder(config.output, config_path=Path("run.yaml"))
    return {"path": str(folder.path), "goes_on": is_resume(folder, config.output)}


def device(config: RunConfig) -> Facts:
    """What a run takes of a machine with GPUs."""
    environment: dict[str, str] = {}
    hide_gpus(config, environment)
    return {"device": restrict_to_device(config, MACHINE).device, **environment}


def hybrid(config: RunConfig) -> Facts:
    """The layouts of four ranks on one node, with the ranks that each divides its states over."""
    shape = load_model_shape("Qwen/Qwen2.5-3B-Instruct")
    possible, _ = find_layouts(config, shape, replace(CPU, cpu_ranks=4))
    return {item.name: item.shard for item in possible}


def over_ranks(config: RunConfig) -> Facts:
    """What two CPU ranks do with gradients in each layout, or why it cannot; profiles, checkpoints."""
    from sft_play.training.engines import engine_arguments
    from sft_play.training.measure.profile import build_profile_window

    machine = replace(CPU, cpu_ranks=2)
    shape, precision = load_model_shape(config.model.name), choose_precision(config, machine)
    possible, refused = find_layouts(config, shape, machine)
    facts: Facts = {item.name: item.because for item in refused}
    for layout in possible:
        chosen = gradient_sync(config, precision, layout.name)
        facts[layout.name] = f"{chosen.interval} {chosen.gathered_dtype} {chosen.reduced_dtype} {chosen.buffer_dtype}"
    only = ("ddp",) if any(layout.name == "ddp" for layout in possible) else LAYOUT_NAMES
    made = make_plan(PlanRequest(config, shape, machine, allowed_layouts=only))
    told = engine_arguments(made, config, layer_class="Layer", deepspeed=None)
    window = build_profile_window(config, made, Path("/nowhere"), None)
    return {**facts, "unused": told["ddp_find_unused_parameters"], "window": window and window._steps,
            "checkpoint": made.memory.checkpoint}  # fmt: skip


def test_ddp_looks_for_unused_parameters_where_short_rows_leave_some():
    from sft_play.training.engines import engine_arguments

    config, machine = config_from_text("model: {name: Qwen/Qwen2.5-0.5B}", name="x"), replace(CPU, cpu_ranks=2)
    made = make_plan(PlanRequest(config, load_model_shape(config.model.name), machine, allowed_layouts=("ddp",)))
    for skips in (False, True):
        told = engine_arguments(made, config, layer_class="Layer", deepspeed=None, has_late_gradients=skips)
        assert told["ddp_find_unused_parameters"] is skips


def traced(config: RunConfig) -> Facts:
    from sft_play.trace.confirm import trace_candidate

    shape = load_model_shape(config.model.name)
    answer = trace_candidate(config, {}, shape, choose_precision(config, CPU), on_cpu(config).choice)
    return {"unavailable": answer.unavailable_reason}


LORA, LORA16 = ["tuning.mode=lora"], ["tuning.mode=lora", "train.bf16=true"]
OUT = ["data.process.out_dir=WORLD/processed"]
RAW = ["data.process.raw_path=WORLD/many.jsonl", *OUT]
WHOLE = [*OUT, "data.process.val_fraction=0", "data.process.test_fraction=0"]
RAW_NEAR = ["data.process.raw_path=WORLD/near.jsonl", *WHOLE]
NEAR_AND_ONE = [*RAW_NEAR, "data.process.compare_with=[WORLD/double.jsonl]"]
RAW_SYSTEM = ["data.process.raw_path=WORLD/system.jsonl"]
STYLED = [*RAW, "data.style.system=be brief", "data.style.out_dir=WORLD/styled"]
STYLED_SYSTEM = [*STYLED, *RAW_SYSTEM]
TEXTS = ["data.documents.path=WORLD/documents", "data.documents.out_dir=WORLD/texts"]
MIXTURE, EXPERTS = ["model.name=WORLD/mixture"], "model.layers.0.mlp.experts"
MIXED = ["task_mode=cpt_mixed", "data.text_path=WORLD/text.txt"]
LONG = ["data.train_path=WORLD/long.jsonl", "data.max_lost_fraction=1.0"]
SPECIAL = ["data.train_path=WORLD/special.jsonl"]
VISION = ["model.name=WORLD/vision"]
LARGE, SMALL, REMOTE = (
    [*VISION, f"data.train_path=WORLD/{name}_pictures.jsonl"] for name in ("large", "small", "remote")
)


def template(name: str) -> list[str]:
    return [f"data.chat_template=WORLD/{name}.jinja"]


def data(path: str, *more: str) -> list[str]:
    return [f"data.train_path=WORLD/{path}", *more]


def one(look: Any, leaf: str, value: Any, key: str, expected: Any, before: Any = ()) -> tuple[str, Probe]:
    """A probe of one leaf that sets one fact."""
    return leaf, Probe(look, [f"{leaf}={value}"], {key: expected}, list(before))


def unlocks(look: Any, leaf: str, value: Any, key: str, expected: Any, before: Any) -> tuple[str, Probe]:
    """A probe of one leaf without which the run is refused, and with which a fact is as expected."""
    return leaf, Probe(look, [f"{leaf}={value}"], {REFUSED: None, key: expected}, list(before))


ENCODED = {
    "utf-16": "Änne", "cp1252": "Änne", "latin1": "Änne", "cp1250": "żółw", "cp1254": "ağaç", "cp1251": "Привет",
    "koi8-r": "Привет", "cp932": "日本語", "euc-jp": "日本語", "gb18030": "汉字", "euc-kr": "한글", "big5": "漢字",
}  # fmt: skip
"""An answer in each encoding that data.encoding names."""
FULL = ["tuning.mode=full"]
GENERATES = ["eval.generate_rows=1"]
PROBES: list[tuple[str, Probe]] = [
    *(
        one(look, f"model.{name}", word, f"{part}{name}", expected)
        for name, word, expected in (("name", "WORLD/model", "WORLD/model"), ("revision", "v2", "v2"),
                                     ("trust_remote_code", "true", True))
        for look, part in ((loading, "tokenizer."), (loading, "config."), (weights, ""))
    ),
    one(origin, "model.adapter", "WORLD/adapter", "folder", "WORLD/adapter"),
    one(tokens, "model.add_tokens", "['it is']", "added", ["it is"]),
    one(plan, "model.max_seq_len", 128, "max_seq_len", 128),
    *(one(plan, "model.dtype", name, "precision.load", name) for name in ("float32", "float16")),
    one(plan, "model.dtype", "bfloat16", "precision.load", "bfloat16", ["train.bf16=false"]),
    one(model_spec, "model.attn_implementation", "eager", "attention", "eager"),
    one(model_spec, "model.attn_implementation", "sdpa", "attention", "sdpa", ["model.attn_implementation=eager"]),
    # neither a mesh of four processes on one GPU nor FlashAttention on a CPU can be had: they have to say so
    one(model_spec, "model.attn_implementation", "flash_attention_2", REFUSED, Says("flash_attention_2")),
    one(experts, "model.experts_implementation", "eager", "runs", "eager"),
    one(experts, "model.experts_implementation", "grouped_mm", "runs", "grouped_mm",
        ["model.experts_implementation=eager"]),
    one(model_spec, "model.attn_implementation", f"kernels-community/flash-attn2@{'a' * 40}", REFUSED,
        Says("needs the package kernels")),
    one(plan, "model.mesh_shape", "[2, 2]", REFUSED, Says("mesh of 4 processes")),
    one(splits, "task_mode", "cpt", "rows", 25, [*data("text.txt"), "data.max_lost_fraction=1.0"]),
    ("task_mode", Probe(splits, MIXED, {"text_rows": 20})),
    one(weights, "tuning.mode", "lora", "quantised", False),
    one(model_spec, "tuning.mode", "full", "has_adapter", False),
    ("tuning.backend", Probe(model_spec, ["tuning.backend=unsloth", "tuning.backend_fallback=bnb"], {
        "fallback_from": "unsloth"})),
    one(model_spec, "tuning.backend", "unsloth", REFUSED, Says("tuning.backend=unsloth cannot run here")),
    unlocks(model_spec, "tuning.backend_fallback", "bnb", "backend", "bnb", ["tuning.backend=unsloth"]),
    *(one(model_spec, f"tuning.lora.{name}", value, fact, value)
      for name, value, fact in (("r", 4, "r"), ("alpha", 4, "lora_alpha"), ("dropout", 0.1, "lora_dropout"))),
    one(model_spec, "tuning.lora.target_modules", "[q_proj]", "target_modules", ("q_proj",)),
    one(model_spec, "tuning.lora.target_parameters", "auto", "target_parameters",
        (f"{EXPERTS}.down_proj", f"{EXPERTS}.gate_up_proj"), MIXTURE),
    one(model_spec, "tuning.lora.target_parameters", "[down_proj]", "target_parameters", (f"{EXPERTS}.down_proj",),
        MIXTURE),
    one(model_spec, "tuning.lora.experts", "true", "target_parameters",
        (f"{EXPERTS}.down_proj", f"{EXPERTS}.gate_up_proj"), MIXTURE),
    one(expert_weights, "tuning.quantize_experts", "false", "packed", False),
    one(expert_weights, "tuning.quantize_experts", "true", "packed", True, ["tuning.quantize_experts=false"]),
    one(plan, "tuning.quantize_experts", "true", REFUSED, Says("has no experts in one tensor")),
    one(model_spec, "tuning.lora.modules_to_save", "[lm_head]", "modules_to_save", ("lm_head",)),
    one(model_spec, "tuning.trainable", "[q_proj]", "trainable", Says("Trainable: q_proj: ")),
    one(model_spec, "tuning.lora.use_rslora", "true", "use_rslora", True),
    one(model_spec, "tuning.lora.dtype", "bfloat16", "bf16", "bfloat16"),  # adapters of a run that computes in it
    one(model_spec, "tuning.lora.dtype", "float32", "bf16", "float32", ["tuning.lora.dtype=bfloat16"]),
    one(model_spec, "tuning.lora.use_dora", "true", "use_dora", True),
    one(model_spec, "tuning.lora.init", "pissa", "r", 32),
    one(model_spec, "tuning.lora.init", "loftq", "notes", Says("alpha 32, started by loftq on")),
    one(trainer, "tuning.lora.loraplus_lr_ratio", 16, "loraplus_lr_ratio", 16.0),
    one(splits, "data.train_path", "WORLD/other.jsonl", "source", "WORLD/other.jsonl"),
    ("data.sources", Probe(splits, ["data.sources=[{path: WORLD/train.jsonl}, {path: WORLD/other.jsonl, max_rows: 7}]",
                                    "data.train_path=null"], {"rows": 27})),
    one(splits, "data.val_path", "WORLD/many.jsonl", "val", "WORLD/many.jsonl (60)"),
    one(splits, "data.test_path", "WORLD/many.jsonl", "test", "WORLD/many.jsonl (60)"),
    one(splits, "data.text_path", "WORLD/nothing.txt", REFUSED, Says("WORLD/nothing.txt does not exist"), MIXED),
    one(splits, "data.text_fraction", 0.1, "text_rows", 2, MIXED),
    one(splits, "data.val_fraction", 0.3, "rows", 13),
    unlocks(splits, "data.columns", "{question: frage, answer: antwort}", "trained", "b<|im_end|>",
        data("german.jsonl")),
    unlocks(splits, "data.keep_default_na", "false", "trained", "None<|im_end|>", data("na.csv")),
    one(splits, "data.style.system", "be loud", "text", Says("system\nbe loud<|im_end|>")),
    one(splits, "data.chat_template", "WORLD/mine.jinja", "text", Says("userwhat is 0?<|im_end|>assistant")),
    one(splits, "data.loss_on", "all", "trained",
        "<|im_start|>user\nwhat is 0?<|im_end|>\n<|im_start|>assistant\nit is 0.<|im_end|>\n"),
    one(splits, "data.loss_on", "completion", "trained", "b<|im_end|>", data("multi.jsonl")),
    one(splits, "data.loss_on_empty_think", "false", "trained", "it is 0.<|im_end|>", template("thinks")),
    one(splits, "data.add_empty_think", "true", "text", Says("assistant<think></think>it is 0."),
        template("prompts_think")),
    one(splits, "data.drop_text_beside_calls", "true", "text", Says('assistant[{"function"'),
        [*data("calls.jsonl"), *template("calls")]),
    unlocks(splits, "data.on_bad_row", "skip", "rows", 1, data("bad.jsonl")),
    one(splits, "data.chat_template_kwargs", "{tone: loud}", "text", Says("louduserwhat"), template("kwargs")),
    one(splits, "data.template_date", "'2001-02-03'", "text", Says("2001-02-03"), template("dated")),
    one(splits, "data.multi_turn", "split", "rows", 2, data("multi.jsonl")),
    unlocks(splits, "data.on_inexact_mask", "train", "rows", 20, template("inexact")),
    unlocks(splits, "data.on_missing_end", "train", "rows", 20, template("endless")),
    one(splits, "data.special_tokens_in_text", "control", "tokens", 27, SPECIAL),
    one(splits, "data.special_tokens_in_text", "fail", REFUSED, Says("<|im_end|>"), SPECIAL),
    unlocks(splits, "data.system_into_user", "true", "text", Says("brief"),
        ["data.train_path=WORLD/system.jsonl", *template("nosystem")]),
    unlocks(splits, "data.turns_without_roles", "alternate", "trained", "b<|im_end|>", data("no_roles.jsonl")),
    one(splits, "data.merge_consecutive", "true", "text", Says("user\nx\n\na<|im_end|>"), data("consecutive.jsonl")),
    one(splits, "data.drop_empty", "true", "rows", 1, data("empty.jsonl")),
    *[
        unlocks(splits, "data.encoding", encoding, "trained", f"{answer}<|im_end|>", data(f"{encoding}.jsonl"))
        for encoding, answer in ENCODED.items()
    ],
    one(splits, "data.truncate", "drop", "rows", 1, LONG),
    one(splits, "data.truncate", "prompt", "text", Says("b <|im_end|>"), LONG),
    unlocks(splits, "data.max_lost_fraction", 1.0, "rows", 2, data("long.jsonl")),
    one(trainer, "data.packing", "best_fit", "packs", 10),
    one(worker_count, "data.workers", 2, "workers", [2]),
    one(pictures, "data.image_pixels.max", 1024, "image_tokens", 4, LARGE),
    one(pictures, "data.image_pixels.min", 4096, "image_tokens", 16, SMALL),
    one(pictures, "data.max_image_megapixels", 0.01, REFUSED, Says("max_image_megapixels"), LARGE),
    one(pictures, "data.fetch_images", "true", REFUSED, Says("an image could not be fetched"), REMOTE),
    one(trained_parts, "tuning.lora.projector", "true", "adapted",
        ["sft_vision.visual.merger.mlp.0", "sft_vision.visual.merger.mlp.2"], [*VISION, *LORA]),
    one(trained_parts, "tuning.train_vision", "true", "parts", ["sft_vision.visual."], [*VISION, *FULL]),
    one(processed, "data.process.raw_path", "WORLD/multi.jsonl", "train", 1, RAW),
    one(processed, "data.process.out_dir", "WORLD/elsewhere_processed", "folder", "WORLD/elsewhere_processed", RAW),
    one(processed, "data.process.val_fraction", 0.0, "val", None, [*RAW, "data.process.val_fraction=0.4"]),
    one(processed, "data.process.test_fraction", 0.0, "test", None, RAW),
    one(processed, "data.process.drop_duplicates", "true", "train", 2,
        ["data.process.raw_path=WORLD/double.jsonl", *OUT]),
    one(processed, "data.process.drop_leaks", "true", "train", 1, ["data.process.raw_path=WORLD/leaky", *OUT]),
    one(processed, "data.process.near_duplicates", "ignore", "near", 0, RAW_NEAR),
    one(processed, "data.process.near_duplicates", "drop", "train", 2, RAW_NEAR),
    one(processed, "data.process.similarity", 0.9, "near", 0, RAW_NEAR),
    one(processed, "data.process.compare_with", "[WORLD/double.jsonl]", "overlaps", 1, RAW_NEAR),
    one(processed, "data.process.drop_overlaps", "true", "train", 2, NEAR_AND_ONE),
    one(styled, "data.style.system", "be loud", "system", "be loud", STYLED),
    one(styled, "data.style.how", "replace", "system", "be brief", STYLED_SYSTEM),
    one(styled, "data.style.how", "keep", "system", "brief", STYLED_SYSTEM),
    one(styled, "data.style.per_source", '{"*": be quiet}', "system", "be quiet", STYLED),
    one(styled, "data.style.out_dir", "WORLD/elsewhere_styled", "folder", "WORLD/elsewhere_styled", STYLED),
    one(texts, "data.documents.path", "WORLD/other_documents", "text", Says("another text"), TEXTS),
    one(texts, "data.documents.out_dir", "WORLD/elsewhere_texts", "folder", "WORLD/elsewhere_texts", TEXTS),
    one(texts, "data.documents.val_fraction", 0.5, "has_val", True, TEXTS),
    one(texts, "data.documents.chunk_chars", 200, "short", True, TEXTS),
    one(texts, "data.documents.drop_repeated", "false", "openings", True, TEXTS),
    one(headers, "data.documents.headers", "true", "text", Says("Confidential header line"),
        [*TEXTS, "data.documents.path=WORLD/pages"]),
    one(trainer, "train.group_by_length", "false", "sorts_by_length", False),
    one(plan, "train.group_by_length", "false", "micro_batches.tokens", None),
    one(plan, "train.batch_by", "rows", "micro_batches.tokens", None),
    one(plan, "train.batch_by", "tokens", "micro_batches.tokens", 2 * 64, ["train.batch_size=2"]),
    one(plan, "train.effective_batch_size", 16, "effective_batch", 16),
    one(plan, "train.batch_size", 2, "micro_batch", 2),
    one(plan, "train.grad_accum", 4, "grad_accum", 4),
    one(arguments, "train.epochs", 3, "num_train_epochs", 3.0),
    *(
        one(arguments, f"train.{name}", value, name, value)
        for name, value in (("max_steps", 3), ("learning_rate", 0.5), ("weight_decay", 0.1), ("adam_beta2", 0.95),
                            ("max_grad_norm", 0.1), ("logging_steps", 9), ("save_steps", 9), ("seed", 1),
                            ("dataloader_num_workers", 2))
    ),
    *(
        one(arguments, "train.lr_scheduler_type", name, "lr_scheduler_type", name)
        for name in ("linear", "constant", "constant_with_warmup", "polynomial", "inverse_sqrt")
    ),
    one(plan, "train.compile", "true", "compile_s", 103.0),
    one(long_run, "train.compile", "false", "compiled", False),
    one(long_run, "train.compile", "auto", "compiled", True, ["train.compile=false"]),
    one(kernels, "train.kernels", "none", "kernels", ()),
    *(
        one(kernels, "train.kernels", name, "kernels", ("rms_norm",), ["train.kernels=none"])
        for name in ("auto", "liger")
    ),
    one(arguments, "train.warmup_steps", 7, "warmup_steps", 7.0),
    *(
        one(plan, "train.weight_updates", how, "precision.updates", how, [*FULL, f"train.weight_updates={other}"])
        for how, other in (("bfloat16", "auto"), ("stochastic", "bfloat16"), ("float32", "bfloat16"))
    ),
    *(
        one(arguments, "train.optim", name, "optim", name)
        for name in ("adamw_torch", "paged_adamw_8bit", "adafactor", "adamw_8bit", "lion_32bit", "lion_8bit")
    ),
    one(trainer, "train.optim", "muon", "optimizer", "MuonWithAdamW", FULL),
    ("train.device", Probe(device, ["train.device=cpu"], {"device": "cpu", "CUDA_VISIBLE_DEVICES": "-1"})),
    one(plan, "train.bf16", "false", "precision.compute", "float32"),
    one(arguments, "train.bf16", "true", "bf16", True),
    one(plan, "train.fp16", "true", "precision.compute", "float16"),
    one(traced, "plan.trace", "false", "unavailable", "plan.trace is false"),
    one(arguments, "train.gradient_checkpointing", "true", "gradient_checkpointing", True),
    one(plan, "train.gradient_checkpointing", 3, "checkpointed_layers", 3),
    one(plan, "train.gradient_checkpointing", "offload", "step.offloads", True),
    one(arguments, "train.save_steps", "null", "save_strategy", "epoch"),
    one(trainer, "train.on_nan", "skip", "on_nan", "skip"),
    one(over_ranks, "train.async_save", "true", "checkpoint", "sharded", FULL),
    one(trainer, "train.save_total_limit", 9, "checkpoint_limit", 9),
    one(arguments, "train.load_best_model_at_end", "true", "load_best_model_at_end", True),
    ("train.metric_for_best_model", Probe(arguments, ["train.metric_for_best_model=exact_match"], {
        "metric_for_best_model": "eval_exact_match", "greater_is_better": True}, GENERATES)),
    ("train.metric_for_best_model", Probe(arguments, ["train.metric_for_best_model=loss"], {
        "metric_for_best_model": "eval_loss", "greater_is_better": False},
        [*GENERATES, "train.metric_for_best_model=exact_match"])),
    one(trainer, "train.early_stopping_patience", 3, "patience", 3, ["train.load_best_model_at_end=true"]),
    one(trainer, "train.profile_steps", 2, "profiled", [2]),
    one(trainer, "train.report_to", "[]", "callbacks", ()),
    one(arguments, "eval.steps", 5, "eval_steps", 5),
    one(arguments, "eval.steps", 0, "eval_strategy", "no"),
    one(plan, "eval.batch_size", 3, "eval_batch", 3),
    one(lambda config: {"seconds": rank_timeout_s(config, {})}, "distributed.timeout_s", 60, "seconds", 60.0),
    one(hybrid, "distributed.shard_ranks", 2, "fsdp_hybrid", 2),
    one(over_ranks, "distributed.sync_gradients_every", "step", "fsdp", "step float32 float32 None"),
    one(over_ranks, "distributed.sync_gradients_every", "micro_batch", "ddp", "micro_batch float32 float32 None"),
    one(over_ranks, "distributed.sync_gradients_every", 3, "ddp", "3 float32 float32 None"),
    one(over_ranks, "distributed.sync_gradients_every", 1, "ddp", "micro_batch float32 float32 None"),
    one(over_ranks, "distributed.find_unused_parameters", "true", "unused", True),
    one(over_ranks, "distributed.profile_communication", "true", "window", 3),
    one(over_ranks, "distributed.profile_communication", 7, "window", 7),
    one(over_ranks, "distributed.mixed_precision.param", "float32", "fsdp", "micro_batch float32 float32 None", LORA16),
    one(over_ranks, "distributed.mixed_precision.param", "bfloat16", REFUSED, Says("only FSDP2 gathers"), LORA),
    one(over_ranks, "distributed.mixed_precision.param", "float16", REFUSED, Says("computes in float32"), LORA),
    one(over_ranks, "distributed.mixed_precision.reduce", "bfloat16", "fsdp", "micro_batch float32 bfloat16 None"),
    one(over_ranks, "distributed.mixed_precision.reduce", "float16", "ddp", "step float32 float16 None"),
    one(over_ranks, "distributed.mixed_precision.reduce", "float32", "zero2", "micro_batch bfloat16 float32 None",
        LORA16),
    *(
        one(over_ranks, "distributed.mixed_precision.buffer", name, "zero3", f"micro_batch bfloat16 bfloat16 {name}",
            LORA16)
        for name in ("bfloat16", "float16", "float32")
    ),
    one(folder, "output.dir", "WORLD/elsewhere", "path", "WORLD/elsewhere/run-20260101T000000Z"),
    one(folder, "output.name", "mine", "path", "WORLD/outputs/mine"),
    unlocks(decision, "output.if_exists", "resume", "goes_on", True, ["output.name=ours"]),
    unlocks(decision, "output.if_exists", "replace", "goes_on", False, ["output.name=ours"]),
]  # fmt: skip
"""(leaf, probe) of every option whose effect shows without a run."""


RUN_PROBES: dict[str, tuple[str, Callable[[Facts], Any], Any]] = {
    "train.max_hours": ("1e-9", lambda said: said["steps"], 1),
    "train.stop_after_steps": ("1", lambda said: said["steps"], 1),
    "eval.generate_rows": ("0", lambda said: said["after"]["exact_match"], None),
    "eval.max_new_tokens": ("1", lambda said: said["longest"], 1),
    "eval.before_training": ("false", lambda said: (said["before"] or {}).get("loss"), None),
    "curriculum": ("[{name: a, max_steps: 1}]", lambda said: [one["name"] for one in said.get("stages", ())], ["a"]),
}
"""Leaves whose effect is a run's: (value, what is looked at in what the run says, its value then)."""


def test_every_option_is_probed():
    below = {"train.dataloader_pin_memory"}  # with a GPU only: one that is named
    assert {leaf for leaf, _ in PROBES} | set(RUN_PROBES) | below == set(all_options())


def choices() -> Iterator[tuple[str, str]]:
    """Every (leaf, word) that a leaf with a choice of words takes, its default aside."""
    for section, model in sections().items():
        for name, found in model.model_fields.items():
            path = f"{section}.{name}".lstrip(".")
            for word in _words(found.annotation):
                default = all_options()[path].default if path in all_options() else None
                if word != default and not (isinstance(default, list) and word in default):
                    yield path, word


def _words(kind: Any) -> list[str]:
    if get_origin(kind) is Literal:
        return [word for word in get_args(kind) if isinstance(word, str)]
    return [word for part in get_args(kind) for word in _words(part)]


def test_every_choice_of_every_option_is_probed():
    probed = {(leaf, override.partition("=")[2]) for leaf, probe in PROBES for override in probe.after}
    # trackers that are not installed with the toolkit; tests/test_train.py has the refusal
    wanted = set(choices()) - {("train.report_to", name) for name in ("wandb", "mlflow", "trackio")}
    assert len(wanted) > 25
    assert wanted <= probed, wanted - probed


@pytest.mark.parametrize(
    ("leaf", "probe"), PROBES, ids=[f"{number}-{' '.join(probe.after)}" for number, (_, probe) in enumerate(PROBES)]
)
def test_an_option_sets_the_facts_that_it_is_for(leaf, probe, world):
    assert probe.problem(world) is None


def test_a_probe_sees_an_option_that_reaches_nothing_or_something_else(world):
    """The probe of the probes: what passed before, and must not."""

    def refusing(config: RunConfig) -> Facts:
        if config.train.epochs == 3:
            raise SftPlayError("no epochs today")
        return {"num_train_epochs": config.train.epochs}

    def beside(config: RunConfig) -> Facts:
        return {"num_train_epochs": 1.0, "max_steps": config.train.epochs}

    def hard_coded(config: RunConfig) -> Facts:
        return {**arguments(config), "metric_for_best_model": "eval_loss"}

    for look in (refusing, beside):
        assert one(look, "train.epochs", 3, "num_train_epochs", 3.0)[1].problem(world), look.__name__
    keeps_the_worst = next(probe for leaf, probe in PROBES if leaf == "train.metric_for_best_model")
    worst = Probe(hard_coded, keeps_the_worst.after, keeps_the_worst.then, keeps_the_worst.before)
    assert "metric_for_best_model" in str(worst.problem(world))


def test_an_option_of_a_run_changes_what_its_summary_says(world, succeed, tmp_path, monkeypatch):
    from sft_play.training.measure import exact_match

    longest = [0]
    real = exact_match._generate

    def generate(*args: Any) -> Any:
        longest.append(args[-1])
        return real(*args)

    monkeypatch.setattr(exact_match, "_generate", generate)
    path = write_run(
        tmp_path, world["model"], world["folder"] / "train.jsonl", data={"val_fraction": 0.3},
        train={"effective_batch_size": 4, "gradient_checkpointing": False},
        eval={"steps": 0, "generate_rows": 2, "max_new_tokens": 6},
    )  # fmt: skip

    def said(name: str, *overrides: str) -> Facts:
        succeed("train", "--config", str(path), f"output.name={name}", *overrides)
        return json.loads((tmp_path / "outputs" / name / "summary.json").read_text()) | {"longest": longest[-1]}

    usual = said("usual")
    for leaf, (value, fact, expected) in RUN_PROBES.items():
        assert fact(usual) != expected, leaf
        assert fact(said(leaf.replace(".", "-"), f"{leaf}={value}")) == expected, leaf


def test_pinned_memory_is_asked_for_with_a_gpu_only(world):
    from sft_play.training.loop import trainer as module

    def pinned(machine: Hardware, *overrides: str) -> bool:
        config = make(world, *overrides)
        made = make_plan(PlanRequest(config, load_model_shape(config.model.name), machine))
        seen: dict[str, Any] = {}
        real = module.SFTConfig
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "SFTConfig", lambda **options: seen.update(options))
            module.SFTConfig.__dataclass_fields__ = real.__dataclass_fields__  # type: ignore[attr-defined]
            module.training_arguments(config, made, RunFolder(Path("/nowhere")), has_eval=False)
        return bool(seen["dataloader_pin_memory"])

    assert pinned(MACHINE)
    assert not pinned(MACHINE, "train.dataloader_pin_memory=false")
    assert not pinned(CPU)
