"""The model card (README.md) of trained weights: base, data in figures, results, settings, how to
use them; no rows, paths or secrets. `card.md.jinja` is its text."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from huggingface_hub import ModelCard, ModelCardData
from jinja2 import Environment, FileSystemLoader

from sft_play.config.schema import RunConfig
from sft_play.data.masks.image_processor import ImageProcessorSource, bounded_size
from sft_play.data.masks.render import Renderer
from sft_play.data.masks.template import select_template_kwargs
from sft_play.models.config_json import find_model_folder
from sft_play.planner.plan import Plan
from sft_play.runs.folder import read_json, write_text
from sft_play.starter import BASES
from sft_play.training.measure.exact_match import collect_stop_ids
from sft_play.training.prepare.model_spec import ModelSpec, model_location

CARD_FILE = "README.md"
# Placeholder for the repository in the card's code, until it is uploaded.
REPOSITORY_PLACEHOLDER = "USER/NAME"
WeightsKind = Literal["adapter", "model", "merged"]
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_VERSIONS = ("sft_play", "torch", "transformers", "peft", "trl", "bitsandbytes", "python")


@dataclass(frozen=True)
class CardBase:
    """The base model as a card names it."""

    # Its hub id, or the name of its folder.
    name: str
    is_on_hub: bool
    # `license`, and `license_name` and `license_link` where its own card has them; empty where
    # nothing tells it.
    license: Mapping[str, str]


@dataclass(frozen=True)
class CardFacts:
    """What a card is about. `stop`: token ids that end an answer. `manifest`, `summary`: the
    run's."""

    kind: WeightsKind
    name: str
    config: RunConfig
    plan: Plan
    model_spec: ModelSpec
    manifest: Mapping[str, Any]
    summary: Mapping[str, Any]
    stop_ids: Sequence[int]
    # Of a merged model: bf16, fp16, fp32.
    dtype: str = ""


def write_card(folder: Path, facts: CardFacts) -> None:
    """Write the card into the folder of the weights."""
    write_text(folder / CARD_FILE, render_card(facts, describe_base(facts.config)))


def answer_stop_ids(config: RunConfig, tokenizer: Any, renderer: Renderer) -> list[int]:
    """Collect the tokens that end an answer, from the tokenizer, the base's generation config and
    the template."""
    from transformers import GenerationConfig

    location = model_location(config)
    try:
        base_stop_ids = GenerationConfig.from_pretrained(
            location, revision=config.model.revision
        ).eos_token_id
    except (OSError, ValueError):  # it has none, or not on this disk and the hub cannot be asked
        base_stop_ids = None
    return collect_stop_ids(config.task_mode, tokenizer, renderer, base_stop_ids)


def render_card(facts: CardFacts, base: CardBase) -> str:
    """The card's text, with its front matter."""
    config, is_adapter = facts.config, facts.kind == "adapter"
    method = {"full": "full fine-tuning", "lora": "LoRA", "qlora": "QLoRA (NF4 base)"}[
        config.tuning.mode
    ]
    versions = facts.manifest.get("versions") or {}
    trust_arguments = ["trust_remote_code=True"] * config.model.trust_remote_code
    classes, options = _loading_code(facts, base, trust_arguments)
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["json"] = json.dumps  # jinja2's own escapes what HTML needs
    has_images, image_size = _has_images(facts), None
    if has_images:
        image_size = bounded_size(ImageProcessorSource.from_config(config))
    template_options = ""
    if kwargs := select_template_kwargs(config.data.chat_template_kwargs):
        template_options = f", **{kwargs!r}"
    figures = facts.summary.get("after") or facts.summary.get("before") or {"rows": 0}
    result_rows = (
        f"{figures['rows']:,} {str(facts.summary.get('split')).replace('val', 'validation')}"
    )
    reports = {  # of each split; never a row, a path or a file's name
        name: entry["report"]
        for name, entry in (facts.manifest.get("data") or {}).items()
        if name.split()[-1] in ("train", "val", "test") and entry.get("report")
    }
    text = environment.get_template("card.md.jinja").render(
        front_matter=_front_matter(facts, base).to_yaml(),
        name=facts.name,
        what={
            "adapter": f"A {method} adapter for `{base.name}`, which it needs.",
            "model": f"`{base.name}` after {method}, all weights.",
            "merged": (
                f"`{base.name}` with a {method} adapter merged into its weights ({facts.dtype})."
            ),
        }[facts.kind],
        base=base,
        here=REPOSITORY_PLACEHOLDER,
        is_adapter=is_adapter,
        classes=classes,
        options=options,
        trust=trust_arguments,
        resize_to=facts.model_spec.resize_to,
        stop=list(facts.stop_ids),
        plan=facts.plan,
        config=config,
        template_options=template_options,
        has_images=has_images,
        image_size=image_size,
        method=method,
        train=config.train,
        lora=config.tuning.lora,
        peft_config=facts.model_spec.peft_config,
        steps=facts.summary.get("steps") or config.train.max_steps,
        results=list(result_figures(facts.summary)),
        result_rows=result_rows,
        reports=reports,
        licence=base.license.get("license_name") or base.license.get("license"),
        versions=", ".join(f"{name} {versions[name]}" for name in _VERSIONS if versions.get(name))
        or "not recorded",
    )
    return str(ModelCard(text))


def _has_images(facts: CardFacts) -> bool:
    entries = (facts.manifest.get("data") or {}).values()
    return any((entry.get("report") or {}).get("image_rows") for entry in entries)


# What the hub lists and links: library, tags, data sets of the hub, licence, and a base on the hub.
def _front_matter(facts: CardFacts, base: CardBase) -> ModelCardData:
    data, mode = facts.config.data, facts.config.tuning.mode
    paths = [data.train_path, data.text_path, *(source.path for source in data.sources)]
    datasets = {
        path.removeprefix("hub:").partition(":")[0]
        for path in paths
        if path and path.startswith("hub:")
    }
    return ModelCardData(
        library_name="peft" if facts.kind == "adapter" else "transformers",
        pipeline_tag="image-text-to-text" if _has_images(facts) else "text-generation",
        datasets=sorted(datasets) or None,
        tags=[
            "sft_play",
            "sft" if facts.config.task_mode == "sft" else "continued-pretraining",
            *{"full": [], "lora": ["lora"], "qlora": ["lora", "qlora"]}[mode],
        ],
        **base.license,
        **({"base_model": base.name} if base.is_on_hub else {}),
    )


def describe_base(config: RunConfig) -> CardBase:
    """Return the name by which others can find the base, and the licence that its own card or
    config tells."""
    name = config.model.name
    if name in BASES:
        return CardBase(name, False, {})
    folder = find_model_folder(name)
    if folder is None:
        return CardBase(name, True, _read_license(name))
    base_config = read_json(folder / "config.json")
    base_license = _license_fields(base_config)
    if (folder / CARD_FILE).is_file():
        base_license = _read_license(str(folder / CARD_FILE)) or base_license
    hub_id = str(base_config.get("_name_or_path") or "")
    if cached := re.search(r"models--([\w.-]+?)--([\w.-]+)", str(folder.resolve())):
        hub_id = "/".join(cached.groups())
    if _HUB_ID.fullmatch(hub_id) and not Path(hub_id).exists():
        return CardBase(hub_id, True, base_license)
    return CardBase(folder.resolve().name, False, base_license)


def _read_license(card: str) -> dict[str, str]:
    try:
        return _license_fields(ModelCard.load(card, ignore_metadata_errors=True).data.to_dict())
    # no network, no card, not allowed, or other people's YAML: the licence is left out
    except Exception:
        return {}


def _license_fields(metadata: Mapping[str, Any]) -> dict[str, str]:
    if not isinstance(metadata.get("license"), str):
        return {}
    return {
        key: metadata[key]
        for key in ("license", "license_name", "license_link")
        if isinstance(metadata.get(key), str) and metadata[key]
    }


def _loading_code(
    facts: CardFacts, base: CardBase, trust_arguments: Sequence[str]
) -> tuple[list[str], list[str]]:
    config = facts.config
    classes = ["AutoModelForCausalLM", "AutoTokenizer"]
    if facts.model_spec.text_tower is not None:
        classes[0] = "AutoModelForImageTextToText"
    if _has_images(facts):
        classes.append("AutoProcessor")
    if facts.kind != "adapter":
        return classes, ['dtype="auto"', 'device_map="auto"', *trust_arguments]
    options = [f"dtype=torch.{facts.plan.precision.load}", 'device_map="auto"', *trust_arguments]
    if base.is_on_hub and config.model.revision:
        options.append(f"revision={json.dumps(config.model.revision)}")
    if config.tuning.mode == "qlora":
        classes.append("BitsAndBytesConfig")
        options.append("quantization_config=quantization")
    return classes, options


def result_figures(summary: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Yield name, value before and value after training, in words, of each figure that was
    measured. Exact match says how many answers it counts, if these are fewer than the rows."""
    measured, match_name = (
        [summary.get(moment) or {} for moment in ("before", "after")],
        "exact match",
    )
    for figures in measured:
        if 0 < figures.get("generated_rows", 0) < figures["rows"]:
            match_name = f"exact match of {figures['generated_rows']:,} answers"
    for key, name, template in (("loss", "loss", "{:.4f}"), ("exact_match", match_name, "{:.1%}")):
        values = [figures.get(key) for figures in measured]
        if any(value is not None for value in values):
            before, after = (
                "not measured" if value is None else template.format(value) for value in values
            )
            yield name, before, after
