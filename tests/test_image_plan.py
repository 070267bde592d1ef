"""Plans of rows with images: the vision tower is measured on its class, estimate and trace count it alike, and what
does not go with images is refused by name."""

import functools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForImageTextToText

from sft_play.config.load import config_from_text, load_config
from sft_play.config.schema import RunConfig
from sft_play.errors import ConfigError, ModelError
from sft_play.launch.planning import build_plan_request, plan_request
from sft_play.machine.hardware import parse_hardware
from sft_play.models.shape import ModelShape, VisionPass, VisionShape
from sft_play.planner.batching import ImageLoad, RowTokens
from sft_play.planner.layout import Layout, find_layouts
from sft_play.planner.memory.estimate import IMAGE_WORKERS, PREFETCHED_BATCHES, estimate_memory
from sft_play.planner.memory.step_memory import Step
from sft_play.planner.plan import Plan, plan_from_json
from sft_play.planner.precision import Precision
from sft_play.trace.confirm import load_planned_shape, load_run_model_shape, step_settings
from sft_play.trace.settings import StepSettings
from sft_play.trace.step import record_step
from sft_play.trace.storages import StorageLog
from sft_play.trace.vision import _extrapolate, measure_vision_pass, measure_vision_weights
from tests.image_families import FAMILIES, make_image_model

pytestmark = pytest.mark.build

HALF = Precision("bfloat16", "bfloat16", "")
WITH_MASTERS = Precision("bfloat16", "float32", "")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The tiny model of a family, by its name."""
    return functools.cache(lambda name: make_image_model(tmp_path_factory.mktemp("models") / name, name))


def pictures_of(folder: Path, count: int = 1, size: tuple[int, int] = (64, 48)) -> dict[str, torch.Tensor]:
    from sft_play.data.masks.image_processor import ImageProcessorSource, load_image_processor

    return load_image_processor(ImageProcessorSource(str(folder))).blank_inputs([size] * count)


def config_json(folder: Path) -> dict[str, Any]:
    fields: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return fields


# --- the tower ------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", FAMILIES)
def test_a_pass_without_bytes_takes_what_a_real_one_takes(name: str, folders: Any) -> None:
    """The same code on real numbers, with every allocation logged."""
    folder = folders(name)
    fields, picture = config_json(folder), pictures_of(folder)
    settings = StepSettings(model=fields, mode="full", weights="float32", autocast=None, attention="eager")
    measured = measure_vision_pass(fields, settings, picture, name=name)
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    log = StorageLog()
    with torch.no_grad(), log:
        for tensor in (*model.parameters(), *model.buffers(), *picture.values()):
            log.record_tensor(tensor)
        log.peak = before = log.current
        output = model.get_image_features(**picture, return_dict=True)
        pooled = output.pooler_output
        joined = torch.cat(list(pooled), dim=0) if isinstance(pooled, list | tuple) else pooled
        assert joined.numel()
    assert measured.peak_bytes == pytest.approx(log.peak - before, rel=0.03)
    assert measured.feature_bytes == pytest.approx(log.current - before, rel=0.03)
    assert measured.operations > 0
    assert measured.backward_bytes == 0


@pytest.mark.parametrize("name", FAMILIES)
def test_what_is_no_language_model_is_counted(name: str, folders: Any) -> None:
    folder = folders(name)
    weights = measure_vision_weights(config_json(folder), name=name)
    model = AutoModelForImageTextToText.from_pretrained(folder)
    prefix = next(path for path, module in model.named_modules() if module is model.get_decoder())
    assert weights.params == sum(
        weight.numel() for path, weight in model.named_parameters() if not path.startswith((f"{prefix}.", "lm_head."))
    )
    assert bool(weights.projector) != (name == "gemma3")  # whose projection is a bare matrix
    assert weights.has_picture_mask == name.startswith("gemma")


def test_a_tower_that_trains_holds_more(folders: Any) -> None:
    folder = folders("qwen2_5_vl")
    fields, picture = config_json(folder), pictures_of(folder)
    settings = StepSettings(model=fields, mode="full")
    frozen, trained = (
        measure_vision_pass(fields, settings, picture, name="m", is_trained=is_trained) for is_trained in (False, True)
    )
    assert trained.feature_bytes > 5 * frozen.feature_bytes
    assert trained.backward_bytes > 0
    assert trained.operations == frozen.operations


def test_a_large_picture_follows_from_two_smaller_ones() -> None:
    """Bytes grow with tokens, operations also with their squares: 3 n + 2 n^2 of 20 and 10 tokens, at 40."""
    passes = [(n, VisionPass(peak_bytes=100 * n, operations=3 * n + 2 * n * n)) for n in (20, 10)]
    assert _extrapolate(passes, 40) == VisionPass(peak_bytes=4_000, operations=3 * 40 + 2 * 1_600)


def test_a_model_of_text_looks_at_no_pictures() -> None:
    with pytest.raises(ModelError, match="no image-text class"):
        measure_vision_weights({"model_type": "llama"}, name="m")


# --- estimate and trace ---------------------------------------------------------------------------
TEXT = {
    "hidden_size": 512, "intermediate_size": 1024, "head_dim": 64, "num_hidden_layers": 2, "num_attention_heads": 8,
    "num_key_value_heads": 4, "vocab_size": 60_000, "max_position_embeddings": 2048, "rms_norm_eps": 1e-6,
}  # fmt: skip
ROTATION = {"rope_parameters": {"rope_type": "default", "mrope_section": [8, 12, 12], "rope_theta": 10_000.0}}
SQUARE = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 8}


def patches(side: int, width: int) -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.zeros(side * side, width), "image_grid_thw": torch.tensor([[1, side, side]])}


CLASSES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, torch.Tensor], int]] = {
    "qwen2_5_vl": (
        TEXT | ROTATION,
        {"depth": 4, "hidden_size": 512, "intermediate_size": 1024, "num_heads": 8, "out_hidden_size": 512},
        patches(32, 1176),
        256,
    ),
    "gemma3": (
        {**TEXT, "model_type": "gemma3_text"},
        {**SQUARE, "model_type": "siglip_vision_model", "image_size": 448, "patch_size": 14},
        {"pixel_values": torch.zeros(1, 3, 448, 448)},
        256,
    ),
    "internvl": (
        {**TEXT, "model_type": "qwen2"},
        {**SQUARE, "model_type": "internvl_vision", "image_size": [448, 448], "patch_size": [14, 14]},
        {"pixel_values": torch.zeros(1, 3, 448, 448)},
        256,
    ),
}


def class_with_pictures(kind: str) -> tuple[dict[str, Any], ModelShape]:
    """A class of real proportions, and its shape with pictures of 256 tokens, at most two in a row."""
    text, vision, picture, tokens = CLASSES[kind]
    fields = AutoConfig.for_model(kind, text_config=text, vision_config=vision).to_dict()

    @functools.cache
    def meter(precision: Precision, step: Step, is_trained: bool) -> VisionPass:
        autocast = None if precision.compute == "float32" else precision.compute
        dtype = precision.compute if is_trained else precision.load
        settings = StepSettings(model=fields, mode="full", weights=dtype, autocast=autocast)
        return measure_vision_pass(fields, settings, picture, name="m", is_trained=is_trained)

    weights = measure_vision_weights(fields, name="m")
    shape = VisionShape(weights, tokens, 2, 0.75, 0.5, meter)
    return fields, replace(load_planned_shape(fields, name="m"), vision=shape)


def run_of(tuning: str, more: str = "") -> RunConfig:
    return config_from_text(f"model: {{name: m}}\ntuning: {tuning}\n{more}", name="x")


@pytest.mark.parametrize("mode", ["lora", "qlora", "full"])
@pytest.mark.parametrize("kind", CLASSES)
def test_estimate_and_trace_count_a_frozen_tower_alike(kind: str, mode: str) -> None:
    fields, shape = class_with_pictures(kind)
    config = run_of(f"{{mode: {mode}}}")
    for checkpointed, pictures in ((None, 8), (0, 2), (None, 60)):
        step = Step(4, 1, 768, padded=True, saves=False, checkpointed_layers=checkpointed, pictures=pictures)
        precision = WITH_MASTERS if mode == "full" else HALF
        estimate = estimate_memory(config, shape, precision, step)
        traced = record_step(step_settings(config, fields, shape, precision, step)).peak
        assert estimate.allocated == pytest.approx(traced, rel=0.01), (checkpointed, pictures, estimate.terms)
        assert estimate.terms["images"] > 0


@pytest.mark.parametrize("mode", ["lora", "full"])
@pytest.mark.parametrize("layout", [Layout("ddp", 4), Layout("fsdp", 4, 4)], ids=lambda layout: layout.name)
def test_ranks_hold_the_tower_whole(layout: Layout, mode: str) -> None:
    """With an evaluation, whose batches have pictures too."""
    fields, shape = class_with_pictures("internvl")
    config, precision = run_of(f"{{mode: {mode}}}"), WITH_MASTERS if mode == "full" else HALF
    step = Step(4, 2, 768, layout=layout, padded=True, saves=False, pictures=8, eval_batch=8)
    estimate = estimate_memory(config, shape, precision, step)
    traced = record_step(step_settings(config, fields, shape, precision, step)).peak
    assert estimate.allocated == pytest.approx(traced, rel=0.01), estimate.terms


@pytest.mark.parametrize("kind", ["gemma3", "internvl"])
def test_the_whole_class_peaks_where_the_estimate_says(kind: str) -> None:
    """Its own forward pass over real numbers, two pictures among 768 tokens, the tower frozen: at the peak it looks."""
    text, vision, picture, tokens = CLASSES[kind]
    config = AutoConfig.for_model(kind, text_config={**text, "vocab_size": 2000}, vision_config=vision)
    setattr(config, "image_token_id" if kind == "internvl" else "image_token_index", 5)
    model = AutoModelForImageTextToText.from_config(config, attn_implementation="eager", dtype=torch.float32)
    model.requires_grad_(requires_grad=False)
    for part in (model.get_decoder(), model.get_output_embeddings()):
        part.requires_grad_(requires_grad=True)
    ids = torch.full((1, 768), 7)
    for first in (10, 400):
        ids[:, first : first + tokens] = 5
    batch = {key: torch.cat([one, one]) for key, one in picture.items()} | {"input_ids": ids}
    if kind == "gemma3":
        batch["token_type_ids"] = (ids == 5).long()
    log = StorageLog()
    with log:
        for tensor in (*model.parameters(), *model.buffers()):
            log.record_tensor(tensor)
        log.peak = before = log.current
        for tensor in batch.values():
            log.record_tensor(tensor)
        model(**batch, use_cache=False)
    settings = StepSettings(model={}, mode="full", weights="float32", autocast=None, attention="eager")
    measured = measure_vision_pass(config.to_dict(), settings, picture, name="m")
    _, shape = class_with_pictures(kind)
    assert shape.vision is not None
    shape = replace(
        load_planned_shape(config.to_dict(), name="m"), vision=replace(shape.vision, meter=lambda *_: measured)
    )
    options = {"attention": "eager", "loss": "logits", "checkpointed_layers": 0, "padded": kind == "gemma3"}
    step = Step(1, 1, 768, pictures=2, on_gpu=False, saves=False, **options)
    estimate = estimate_memory(run_of("{mode: full}"), shape, Precision("float32", "float32", ""), step)
    resident = estimate.terms["weights"] + estimate.terms["optimizer"]
    assert estimate.moments["forward"] - resident == pytest.approx(log.peak - before, rel=0.01)


def test_a_tower_that_trains_takes_gradients_and_states() -> None:
    _, shape = class_with_pictures("internvl")
    assert shape.vision is not None
    step = Step(2, 1, 512, pictures=4)
    frozen, trained = (
        estimate_memory(
            run_of(f"{{mode: full, train_vision: {flag}}}", "train: {optim: adamw_torch_fused}"),
            shape,
            WITH_MASTERS,
            step,
        )
        for flag in ("false", "true")
    )
    added = {name: trained.terms[name] - frozen.terms[name] for name in ("weights", "optimizer")}
    assert added == {"weights": 0, "optimizer": pytest.approx(8 * shape.vision.weights.params, rel=0.01)}
    assert trained.checkpoint_bytes - frozen.checkpoint_bytes == pytest.approx(
        12 * shape.vision.weights.params, rel=0.01
    )


def test_a_quantised_base_keeps_its_tower_in_16_bits() -> None:
    _, shape = class_with_pictures("internvl")
    assert shape.vision is not None
    config, step = run_of("{mode: qlora}"), Step(1, 1, 512, pictures=1)
    with_tower = estimate_memory(config, shape, HALF, step)
    text_alone = estimate_memory(config, replace(shape, vision=None), HALF, replace(step, pictures=0))
    tower = with_tower.terms["weights"] - text_alone.terms["weights"]
    assert tower == 2 * shape.vision.weights.params + shape.vision.weights.buffer_bytes
    assert with_tower.load_bytes - text_alone.load_bytes == tower


# --- the plan -------------------------------------------------------------------------------------
IMAGES = ImageLoad(
    rows=812, pictures=1_500, tokens=18_000, width=64, height=48, picture_tokens=12, row_pictures=3, token_share=0.75
)
ROWS = RowTokens(40.0, 60, 64, 1_000, 64, sample=tuple(range(64, 16, -1)), images=IMAGES)


def plan_of(folder: Path, *, rows: RowTokens | None = ROWS, machine: str = "1xRTX4090", more: str = "") -> Plan:
    config = config_from_text(
        f"model: {{name: {folder}, max_seq_len: 64}}\ndata: {{train_path: none.jsonl}}\n{more}", name="x"
    )
    return plan_request(build_plan_request(config, parse_hardware(machine), rows=rows))


def test_a_plan_says_what_the_rows_show(folders: Any) -> None:
    plan = plan_of(folders("internvl"))
    line = next(reason for reason in plan.reasons if reason.startswith("images: "))
    assert line.startswith("images: 812 rows have 1 to 3, at most 12 tokens each; the vision tower takes 0.00 GiB")
    assert plan.vision is not None
    assert plan.vision.pictures == plan.choice.step.pictures > 0
    assert plan.choice.step.masks
    assert not plan.choice.step.varlen
    assert not any("only the language model" in reason for reason in plan.reasons)
    assert not plan.compiled
    assert any("rows with images run the class's own code" in one for one in plan.reasons)
    data = json.loads(json.dumps(plan.as_json()))
    assert data["vision"]["pictures"] == plan.vision.pictures
    assert data["row_tokens"]["images"]["rows"] == 812
    assert replace(plan_from_json(data), hardware=plan.hardware) == plan


def test_a_plan_of_text_says_nothing_of_images(folders: Any) -> None:
    plan = plan_of(folders("internvl"), rows=replace(ROWS, images=None))
    assert plan.vision is None
    assert plan.choice.step.pictures == 0
    assert any("only the language model" in reason for reason in plan.reasons)
    data = plan.as_json()
    assert "vision" not in data
    assert "images" not in data["row_tokens"]
    assert "pictures" not in data["step"]


def test_rows_of_one_picture_mask_keep_it_alone(folders: Any) -> None:
    """Gemma's pictures see each other: a row without padding has a mask too."""
    assert plan_of(
        folders("gemma3"), more="train: {batch_size: 1, grad_accum: 8, effective_batch_size: 8}"
    ).choice.step.padded


def test_operations_of_the_tower_count(folders: Any) -> None:
    pictured, text = (plan_of(folders("internvl"), rows=rows) for rows in (ROWS, replace(ROWS, images=None)))
    assert pictured.speed.model_flops > 1.2 * text.speed.model_flops


def test_pictures_wait_in_ram(folders: Any) -> None:
    plan = plan_of(folders("internvl"), more="train: {batch_size: 2, grad_accum: 4, effective_batch_size: 8}")
    assert plan.vision is not None
    text = plan_of(
        folders("internvl"),
        rows=replace(ROWS, images=None),
        more="train: {batch_size: 2, grad_accum: 4, effective_batch_size: 8}",
    )
    batches = 4 + PREFETCHED_BATCHES * IMAGE_WORKERS  # of a step, and what the loader's workers have made
    assert plan.memory.host_bytes - text.memory.host_bytes == batches * plan.vision.pixel_bytes


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ("tuning: {mode: lora}\ndata: {packing: best_fit}", "data.packing=best_fit"),
        ("tuning: {mode: lora}\ntrain: {kernels: liger}", "train.kernels=liger"),
        ("tuning: {mode: lora}\ntrain: {compile: true}", "train.compile=true"),
    ],
)
def test_settings_that_exclude_images_are_refused_by_name(more: str, words: str, folders: Any) -> None:
    config = config_from_text(f"model: {{name: {folders('internvl')}}}\n{more}", name="x")
    request = build_plan_request(config, parse_hardware("1xRTX4090"), rows=ROWS)
    with pytest.raises(ConfigError, match="rows with images do not go together with") as caught:
        plan_request(request)
    assert words in str(caught.value)


def test_layouts_that_run_no_images_say_why(folders: Any) -> None:
    config = config_from_text(f"model: {{name: {folders('internvl')}}}\ntuning: {{mode: lora}}", name="x")
    shape = load_run_model_shape(config, ROWS)
    possible, impossible = find_layouts(config, shape, parse_hardware("4xH100,ram=512GiB"))
    assert {one.name for one in possible} <= {"ddp", "fsdp", "zero2", "zero3"}
    assert len(possible) >= 3
    reasons = {one.name: one.because for one in impossible}
    for name in ("streamed", "tp", "zero2_offload", "zero3_offload", "zero1"):
        assert reasons[name].startswith("rows with images: "), name


def test_smaller_pictures_are_suggested_where_they_are_most_of_the_tokens(folders: Any) -> None:
    from sft_play.planner.advice import _memory_saving_settings, _request_with

    config = config_from_text(f"model: {{name: {folders('qwen2_5_vl')}, max_seq_len: 64}}", name="x")
    many = replace(ROWS, images=replace(IMAGES, tokens=30_000))
    for rows, is_suggested in ((ROWS, False), (many, True)):
        request = build_plan_request(config, parse_hardware("1xRTX4090"), rows=rows)
        settings = [one for one in _memory_saving_settings(request) if "image_pixels" in one]
        assert settings == ["data.image_pixels.max=1536"] * is_suggested
    smaller = _request_with(request, settings[0])
    assert smaller.row_tokens is not None
    assert smaller.row_tokens.longest == 40
    assert smaller.shape.vision is not None
    assert smaller.shape.vision.picture_tokens == 6


# --- the rows -------------------------------------------------------------------------------------
def test_pictures_are_counted_with_the_rows(tmp_path: Path, folders: Any) -> None:
    """40 rows with no, one and two pictures in turn, of 64, 72 and 80 by 48 pixels: the widest has 5 x 3 tokens."""
    from PIL import Image

    from sft_play.launch.row_survey import cached_row_tokens, count_row_tokens, load_row_tokens

    rows = []
    for number in range(40):
        Image.new("RGB", (64 + 8 * (number % 3), 48), (number, 2, 3)).save(tmp_path / f"{number}.png")
        count = number % 3
        turns = [("user", "<image>" * count + f" what is it, {number}?"), ("assistant", "a thing")]
        messages = [{"role": role, "content": text} for role, text in turns]
        rows.append({"messages": messages} | ({"images": [f"{number}.png"] * count} if count else {}))
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = f"model: {{name: {folders('qwen2_5_vl')}, max_seq_len: 256}}\ndata: {{train_path: {tmp_path}/rows.jsonl}}"
    path = tmp_path / "run.yaml"
    path.write_text(text)
    loaded = load_config(path)
    count_row_tokens(loaded.runs)
    counted = cached_row_tokens(loaded.config)
    assert counted is not None
    images = counted.images
    assert images is not None
    assert (images.rows, images.pictures, images.row_pictures) == (26, 39, 2)
    assert (images.width, images.height, images.picture_tokens) == (80, 48, 15)
    # one picture of 72 x 48 (12 tokens) or two of 80 x 48, of 8 pixels and 2 x 2 patches
    assert images.tokens == 13 * 12 + 13 * 30
    assert 0.3 < images.token_share < 0.6
    assert load_row_tokens(loaded.config) == counted
