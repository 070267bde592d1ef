"""The model card (README.md) of trained weights: base, data in figures, results, settings, how to use them.

Rows, paths and secrets are not in it: a base in a local folder is named by its hub id where the folder tells it, else
by the folder's name. huggingface_hub writes and reads the front matter.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from huggingface_hub import ModelCard, ModelCardData

from sft_play.config.schema import RunConfig
from sft_play.data.masks.render import Renderer
from sft_play.facts.models.architecture import local_folder
from sft_play.planner.plan import Plan
from sft_play.runs.files import write_text
from sft_play.starter.names import BASE_NAME, shown_name
from sft_play.training.measure.exact_match import stop_ids
from sft_play.training.model.model_loading import TEXT_TOWER_KEYS
from sft_play.training.prepare.model_spec import ModelSpec, location

logger = logging.getLogger(__name__)

CARD = "README.md"
HERE = "USER/NAME"
"""What stands in the card's code for the repository, until it is uploaded."""
Kind = Literal["adapter", "model", "merged"]
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_HUB_CACHE = re.compile(r"models--([\w.-]+?)--([\w.-]+)")
_VERSIONS = ("sft_play", "torch", "transformers", "peft", "trl", "bitsandbytes", "python")


@dataclass(frozen=True)
class Base:
    """The base model as a card names it."""

    name: str
    """Its hub id, or the name of its folder."""
    is_on_hub: bool
    license: Mapping[str, str]
    """`license`, and `license_name` and `license_link` where its own card has them; empty where nothing tells it."""


@dataclass(frozen=True)
class CardFacts:
    """What a card is about. `stop`: token ids that end an answer. `manifest`, `summary`: the run's."""

    kind: Kind
    name: str
    config: RunConfig
    plan: Plan
    model_spec: ModelSpec
    manifest: Mapping[str, Any]
    summary: Mapping[str, Any]
    stop: Sequence[int]
    dtype: str = ""
    """Of a merged model: bf16, fp16, fp32."""


def write_card(folder: Path, trained: CardFacts) -> None:
    """Write the card into the folder of the weights."""
    write_text(folder / CARD, card_of(trained, base_of(trained.config)))


def stops_of(config: RunConfig, tokenizer: Any, renderer: Renderer) -> list[int]:
    """Tokens that end an answer: the tokenizer's end token, those of the base's generation config, and the template's
    ends of turn."""
    from transformers import GenerationConfig

    where = location(config)
    try:
        of_base = GenerationConfig.from_pretrained(where, revision=config.model.revision).eos_token_id
    except (OSError, ValueError):  # it has none, or not on this disk and the hub cannot be asked
        of_base = None
    return stop_ids(config.task_mode, tokenizer, renderer, of_base)


def card_of(trained: CardFacts, base: Base) -> str:
    """The card's text, with its front matter."""
    config = trained.config
    datasets = sorted(
        {path.removeprefix("hub:").partition(":")[0] for path in _paths(config) if path.startswith("hub:")}
    )
    method = {"full": "full fine-tuning", "lora": "LoRA", "qlora": "QLoRA"}[config.tuning.mode]
    data = ModelCardData(
        base_model=base.name if base.is_on_hub else None,
        library_name="peft" if trained.kind == "adapter" else "transformers",
        pipeline_tag="text-generation",
        datasets=datasets or None,
        tags=["sft_play", "sft" if config.task_mode == "sft" else "continued-pretraining", *_tags(trained)],
        **base.license,
    )
    what = {
        "adapter": f"A {method} adapter for `{base.name}`, which it needs.",
        "model": f"`{base.name}` after {method}, all weights.",
        "merged": f"`{base.name}` with a {method} adapter merged into its weights ({trained.dtype}).",
    }[trained.kind]
    return str(
        ModelCard(
            "\n".join(
                [
                    f"---\n{data.to_yaml()}\n---",
                    f"\n# {trained.name}\n\n{what} Trained by sft_play.",
                    *_section("Use", [usage(trained, base)]),
                    *_section("Results", _results(trained)),
                    *_section("Data", _data(trained)),
                    *_section("Settings", _settings(trained)),
                    *_section("Base and licence", [_licence(base)]),
                    *_section("Versions", [_versions(trained)]),
                ]
            )
            + "\n"
        )
    )


def _section(title: str, lines: Sequence[str]) -> list[str]:
    return [f"\n## {title}\n", *lines] if lines else []


def _paths(config: RunConfig) -> list[str]:
    data = config.data
    return [path for path in (data.train_path, data.text_path, *(one.path for one in data.sources)) if path]


def _tags(trained: CardFacts) -> list[str]:
    mode = trained.config.tuning.mode
    return [] if mode == "full" else ["lora", *(["qlora"] if mode == "qlora" else [])]


# --- the base ---------------------------------------------------------------------------------------------------------


def base_of(config: RunConfig) -> Base:
    """What the base is called where others can find it, and its licence where its own card or config tells it."""
    name = shown_name(config.model.name)
    if name == BASE_NAME:
        return Base(name, False, {})
    folder = local_folder(name)
    if folder is None:
        return Base(name, True, _license_on_hub(name, config.model.revision))
    settings = _json_of(folder / "config.json")
    cached, recorded = _HUB_CACHE.search(str(folder.resolve())), str(settings.get("_name_or_path") or "")
    hub_id = "/".join(cached.groups()) if cached else recorded
    is_on_hub = _HUB_ID.fullmatch(hub_id) is not None and not Path(hub_id).exists()
    return Base(
        hub_id if is_on_hub else folder.resolve().name, is_on_hub, _license_of(folder / CARD) or _named(settings)
    )


def _json_of(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _license_of(card: Path) -> dict[str, str]:
    """The licence that a card's front matter names; empty where there is no card, or one that cannot be read."""
    try:
        return _named(ModelCard.load(card, ignore_metadata_errors=True).data.to_dict())
    except Exception:  # other people's YAML
        return {}


def _named(settings: Mapping[str, Any]) -> dict[str, str]:
    keys = ("license", "license_name", "license_link")
    kept = {key: settings[key] for key in keys if isinstance(settings.get(key), str) and settings[key]}
    return kept if "license" in kept else {}


def _license_on_hub(name: str, revision: str | None) -> dict[str, str]:
    """The same of a base on the hub; empty where the hub cannot be asked."""
    from huggingface_hub import hf_hub_download

    try:
        return _license_of(Path(hf_hub_download(name, CARD, revision=revision, etag_timeout=5)))
    except Exception:  # no network, no card, not allowed: the licence is left out
        return {}


def _licence(base: Base) -> str:
    shown = base.license.get("license_name") or base.license.get("license")
    where = f"[{base.name}](https://huggingface.co/{base.name})" if base.is_on_hub else f"`{base.name}` (a local model)"
    if shown is None:
        return f"Base: {where}. Its licence is not recorded here; it holds for this model too."
    link = base.license.get("license_link")
    return f"Base: {where}. Its licence ({f'[{shown}]({link})' if link else shown}) holds for this model too."


# --- how to use it ----------------------------------------------------------------------------------------------------


def usage(trained: CardFacts, base: Base) -> str:
    """Code that loads the weights as they were trained and answers a prompt."""
    return "\n".join(["```python", *_loading(trained, base), *_asking(trained), "```"])


def _loading(trained: CardFacts, base: Base) -> Iterator[str]:
    config, spec = trained.config, trained.model_spec
    trust = ["trust_remote_code=True"] if config.model.trust_remote_code else []
    dtype = f"dtype=torch.{trained.plan.precision.load}" if trained.kind == "adapter" else 'dtype="auto"'
    options = [dtype, 'device_map="auto"', *trust]
    classes = ["AutoModelForCausalLM", "AutoTokenizer"]
    if trained.kind == "adapter":
        if base.is_on_hub and config.model.revision:
            options.append(f"revision={json.dumps(config.model.revision)}")
        if spec.is_text_tower:
            classes.append("AutoConfig")
            options += ["config=AutoConfig.from_pretrained(base).get_text_config()", f"key_mapping={TEXT_TOWER_KEYS!r}"]
        if config.tuning.mode == "qlora":
            classes.append("BitsAndBytesConfig")
            options.append("quantization_config=quantization")
    yield "import torch"
    yield from ["from peft import PeftModel"] * (trained.kind == "adapter")
    yield f"from transformers import {', '.join(sorted(classes))}"
    yield ""
    yield f'name = "{HERE}"  # this repository, or the folder of this file'
    if trained.kind != "adapter":
        yield f"tokenizer = AutoTokenizer.from_pretrained({', '.join(['name', *trust])})"
        yield f"model = AutoModelForCausalLM.from_pretrained({', '.join(['name', *options])})"
        return
    yield f"base = {json.dumps(base.name)}" + ("" if base.is_on_hub else "  # the folder of the base")
    yield f"tokenizer = AutoTokenizer.from_pretrained({', '.join(['name', *trust])})"
    if config.tuning.mode == "qlora":
        yield "quantization = BitsAndBytesConfig("
        yield '    load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,'
        yield f"    bnb_4bit_compute_dtype=torch.{trained.plan.precision.compute},"
        yield ")"
    yield f"model = AutoModelForCausalLM.from_pretrained({', '.join(['base', *options])})"
    if spec.resize_to is not None:
        yield f"model.resize_token_embeddings({spec.resize_to}, mean_resizing=False)"
    yield "model = PeftModel.from_pretrained(model, name).eval()"


def _asking(trained: CardFacts) -> Iterator[str]:
    data = trained.config.data
    yield ""
    if trained.config.task_mode == "cpt":
        yield 'inputs = tokenizer("Once upon a time", return_tensors="pt").to(model.device)'
    else:
        more = f", **{data.chat_template_kwargs!r}" if data.chat_template_kwargs else ""
        yield 'messages = [{"role": "user", "content": "Hello"}]'
        yield "inputs = tokenizer.apply_chat_template("
        yield f'    messages, add_generation_prompt=True, return_dict=True, return_tensors="pt"{more}'
        yield ").to(model.device)"
    yield f"output = model.generate(**inputs, max_new_tokens=256, do_sample=False, eos_token_id={list(trained.stop)})"
    yield 'print(tokenizer.decode(output[0, inputs["input_ids"].shape[1]:], skip_special_tokens=True))'


# --- what was done ----------------------------------------------------------------------------------------------------


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [head, ["---"] * len(head), *rows]
    return [f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |" for cells in lines] if rows else []


def _results(trained: CardFacts) -> list[str]:
    summary, rows = trained.summary, []
    before, after = summary.get("before") or {}, summary.get("after") or {}
    for name, key, form in (("loss", "loss", "{:.4f}"), ("exact match", "exact_match", "{:.1%}")):
        values = [figures.get(key) for figures in (before, after)]
        if any(value is not None for value in values):
            rows.append([name, *("not measured" if value is None else form.format(value) for value in values)])
    count = after.get("rows") or before.get("rows")
    split = {"val": "validation", "test": "test"}.get(str(summary.get("split")), str(summary.get("split")))
    table = _table([f"{count:,} {split} rows" if count else "", "before", "after"], rows)
    return [*table, "", "On rows like those of the training; nothing else was measured here."] if table else []


def _data(trained: CardFacts) -> list[str]:
    """Rows and tokens of each split, as the manifest has them; never a row, a path or a file's name."""
    rows = []
    for name, fact in (trained.manifest.get("data") or {}).items():
        report = fact.get("report") if isinstance(fact, Mapping) else None
        if report and name.split()[-1] in ("train", "val", "test"):
            numbers = [f"{report[key]:,}" for key in ("rows_kept", "tokens", "tokens_trained")]
            rows.append([name, str(report.get("format") or ""), *numbers])
    return _table(["split", "format", "rows", "tokens", "trained tokens"], rows)


def _settings(trained: CardFacts) -> list[str]:
    config, spec = trained.config, trained.model_spec
    train, lora = config.train, config.tuning.lora
    rows = [["method", {"full": "all weights", "lora": "LoRA", "qlora": "QLoRA (NF4 base)"}[config.tuning.mode]]]
    if config.tuning.mode != "full":
        targets = sorted(spec.peft_config.target_modules or ()) if spec.peft_config is not None else []
        kinds = [name for name, is_on in (("rsLoRA", lora.use_rslora), ("DoRA", lora.use_dora)) if is_on]
        scale = spec.peft_config.lora_alpha if spec.peft_config is not None else lora.alpha
        rows.append(["adapter", ", ".join([f"r {lora.r}", f"alpha {scale}", f"dropout {lora.dropout:g}", *kinds])])
        rows.append(["adapted layers", ", ".join(targets)] if targets else ["adapted layers", "all linear ones"])
        rows += [["trained whole", ", ".join(lora.modules_to_save)]] if lora.modules_to_save else []
    steps = trained.summary.get("steps")
    rows += [
        ["steps", f"{steps:,}" if steps else str(train.max_steps or f"{train.epochs:g} epochs")],
        ["effective batch", str(trained.plan.choice.batch.effective_batch)],
        ["learning rate", f"{config.learning_rate:g}, {train.lr_scheduler_type}, warm-up {train.warmup_steps:g}"],
        ["optimizer", f"{train.optim}, weight decay {train.weight_decay:g}, gradient norm {train.max_grad_norm:g}"],
        ["sequence length", f"{trained.plan.max_seq_len:,}" + (", packed" if config.data.packing != "none" else "")],
        ["loss on", "all text" if config.task_mode == "cpt" else config.data.loss_on],
        ["precision", f"{trained.plan.precision.compute}, weights in {trained.plan.precision.load}"],
        ["seed", str(train.seed)],
    ]
    return _table(["setting", "value"], rows)


def _versions(trained: CardFacts) -> str:
    versions = trained.manifest.get("versions") or {}
    return ", ".join(f"{name} {versions[name]}" for name in _VERSIONS if versions.get(name)) or "not recorded"
