"""Rows with images, trained: as TRL trains them on the whole class, on every layout, and resumed."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.conftest import write_rows, write_run
from tests.image_families import FAMILIES, TEXT, make_image_model

pytestmark = pytest.mark.build

# Trained by the default suite; the others are slow.
# A first plan of Qwen2.5-VL measures its blocks for 15 s, where those of LLaVA-OneVision (Qwen2's) are known.
QUICK, CHEAPEST = ("llava_onevision", "gemma3", "smolvlm"), "llava_onevision"
STEPS, ROWS, RATE = 3, 8, 1e-4
ADAPTER = Path("adapter", "adapter_model.safetensors")


def picture_rows(folder: Path, *, count: int = ROWS, seed: int = 0, fewest: int = 1) -> list[dict[str, Any]]:
    """Write pictures of noise in many shapes, and rows that ask about one or two of them, or none."""
    from PIL import Image

    draw, rows = random.Random(seed), []
    for number in range(count):
        names = []
        for place in range(draw.randint(fewest, 2)):
            size = draw.randint(16, 80), draw.randint(16, 80)
            names.append(f"{number}-{place}.png")
            Image.frombytes("RGB", size, draw.randbytes(size[0] * size[1] * 3)).save(folder / names[-1])
        parts = [*({"type": "image"} for _ in names), {"type": "text", "text": f"what is {number}?"}]
        draw.shuffle(parts)
        answer = "it is " + " ".join(draw.choices(("on", "off", "today"), k=draw.randint(1, 5)))
        messages = [
            {"role": "user", "content": parts},
            {"role": "assistant", "content": [{"type": "text", "text": answer}]},
        ]
        rows.append({"messages": messages, "images": names})
    return rows


def open_picture(path: Path) -> Any:
    from PIL import Image

    with Image.open(path) as picture:
        return picture.convert("RGB")


def image_run(folder: Path, family: str, rows: list[dict[str, Any]], **sections: Any) -> Path:
    """Write a family's model and a run YAML of a few steps over all rows."""
    base = make_image_model(folder / "base", family)
    template = base / "chat_template.jinja"
    # TRL trains the line break behind an answer, which ends no turn
    template.write_text(template.read_text().replace("<|im_end|>\n", "<|im_end|>"))
    train = {"max_steps": STEPS, "learning_rate": RATE, "effective_batch_size": ROWS, "lr_scheduler_type": "constant",
             "warmup_steps": 0, **sections.pop("train", {})}  # fmt: skip
    sections.setdefault("model", {"max_seq_len": 1024})
    return write_run(folder, base, write_rows(folder / "rows.jsonl", rows), train=train, **sections)


def steps_of(folder: Path) -> list[tuple[float, float]]:
    """Loss and norm of the gradients of each step of a run."""
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [(line["loss"], line["grad_norm"]) for line in lines if "grad_norm" in line]


def steps_of_trl(folder: Path, rows: list[dict[str, Any]], *, bf16: bool) -> list[tuple[float, float]]:
    """The same of TRL's own trainer on the whole class, with its collator for images, its tower frozen."""
    import torch
    from datasets import Dataset
    from datasets import Image as ImageFeature
    from transformers import AutoModelForImageTextToText
    from trl import SFTConfig, SFTTrainer

    from sft_play.data.masks.image_processor import ImageProcessorSource, load_image_processor

    base = folder / "base"
    model = AutoModelForImageTextToText.from_pretrained(base, dtype=torch.float32)
    processor = load_image_processor(ImageProcessorSource(str(base))).processor
    processor.chat_template = (base / "chat_template.jinja").read_text()
    if getattr(processor, "video_processor", "") is None:  # SmolVLM's asks it how many frames it takes
        processor.video_processor = SimpleNamespace(num_frames=1, fps=1)
    decoder = "text_model" if hasattr(model.model, "text_model") else "language_model"
    for name, weight in model.named_parameters():
        weight.requires_grad_(f"model.{decoder}." in name or name.startswith("lm_head"))
    data = Dataset.from_list(
        [{"prompt": row["messages"][:1], "completion": row["messages"][1:],
          "images": [str(folder / name) for name in row["images"]]} for row in rows]
    ).cast_column("images", [ImageFeature()])  # fmt: skip
    options = SFTConfig(
        output_dir=str(folder / "trl"), max_steps=STEPS, per_device_train_batch_size=ROWS, learning_rate=RATE,
        lr_scheduler_type="constant", max_length=None, bf16=bf16, use_cpu=True, report_to=[],
        logging_steps=1, save_strategy="no", optim="adamw_torch", max_grad_norm=1.0, weight_decay=0.0,
        gradient_checkpointing=False, disable_tqdm=True, seed=42,
    )  # fmt: skip
    torch.manual_seed(42)
    trainer = SFTTrainer(model=model, args=options, processing_class=processor, train_dataset=data)
    trainer.train()
    return [(line["loss"], line["grad_norm"]) for line in trainer.state.log_history if "grad_norm" in line]


@pytest.mark.parametrize(
    ("family", "bf16"),
    [
        *((name, False) if name in QUICK else pytest.param(name, False, marks=pytest.mark.slow) for name in FAMILIES),
        *(pytest.param(name, True, marks=pytest.mark.slow) for name in ("qwen2_5_vl", "gemma3", "mistral3")),
    ],
)
def test_losses_and_gradients_are_those_of_trl_on_the_whole_class(family, bf16, tmp_path, succeed):
    rows = picture_rows(tmp_path)
    options = {"optim": "adamw_torch", "weight_decay": 0.0, "adam_beta2": 0.999, "max_grad_norm": 1.0, "bf16": bf16}
    run = image_run(tmp_path, family, rows, tuning={"mode": "full"}, train=options, output={"name": "ours"})
    succeed("train", "--config", str(run))
    ours, theirs = steps_of(tmp_path / "outputs" / "ours"), steps_of_trl(tmp_path, rows, bf16=bf16)
    assert len(ours) == len(theirs) == STEPS
    for (loss, norm), (loss_of_trl, norm_of_trl) in zip(ours, theirs, strict=True):
        assert loss == pytest.approx(loss_of_trl, abs=1e-5)
        assert norm == pytest.approx(norm_of_trl, rel=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_gradient_is_that_of_the_whole_class(family, tmp_path):
    """Two rows with one and two pictures, and a row of text: loss and gradients of the language model, to the bit."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    from sft_play.data.masks.image_processor import ImageProcessorSource, cached_image_processor
    from sft_play.training.model.language_model import locate_text_tower, prepare_text_config
    from sft_play.training.model.vision import load_vision

    base = str(make_image_model(tmp_path / "base", family))
    full_config, source = AutoConfig.from_pretrained(base), ImageProcessorSource(base)
    text_config = prepare_text_config(full_config)
    with torch.device("meta"):
        tower = locate_text_tower(full_config, AutoModelForCausalLM.from_config(text_config))
    assert tower is not None
    whole = AutoModelForImageTextToText.from_pretrained(base).train()
    ours = AutoModelForCausalLM.from_pretrained(base, config=text_config, key_mapping=tower.key_mapping).train()
    ours.sft_tower = tower
    load_vision(ours, name=family, location=base, revision=None, images=source, dtype=torch.float32, device="cpu")
    processor, rows = cached_image_processor(source), picture_rows(tmp_path)
    images = [[open_picture(tmp_path / name) for name in row["images"]] for row in rows[:2]]
    texts = [f"so {FAMILIES[family].picture * len(row)} it is on." for row in images]
    with warnings.catch_warnings(action="ignore"):
        batch = dict(processor.processor(
            text=texts, images=images, return_tensors="pt", padding=True, padding_side="right"
        ))  # fmt: skip
        text_rows = dict(processor.processor(text=["the light is off."], return_tensors="pt"))
    for inputs in (batch, text_rows):
        labels = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)
        labels[torch.isin(labels, torch.tensor(sorted(processor.token_ids)))] = -100
        losses = [model(**inputs, labels=labels).loss for model in (whole, ours)]
        assert losses[0].item() == losses[1].item()
        for loss in losses:
            loss.backward()
    theirs = {name: weight.grad for name, weight in whole.named_parameters()}
    gradients = {tower.to_full_name(name): weight.grad for name, weight in ours.named_parameters()}
    assert gradients
    assert all(torch.equal(gradient, theirs[name]) for name, gradient in gradients.items() if gradient is not None)


# --- layouts, stops, and what is saved --------------------------------------------------------------------------------
def adapter_of(folder: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    return load_file(folder / ADAPTER)


def steps_so_far(folder: Path) -> list[str]:
    file = folder / "metrics.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    return [line for line in lines if "grad_norm" in line]


def same(ours: list[tuple[float, float]], theirs: list[tuple[float, float]]) -> bool:
    return len(ours) == len(theirs) > 0 and ours == [pytest.approx(step, rel=1e-5) for step in theirs]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["lora", "qlora", "full"])
@pytest.mark.parametrize("family", ["qwen3_vl", "gemma3", "mistral3", "smolvlm"])
def test_every_layout_trains_as_one_process_does(family, mode, tmp_path, succeed, monkeypatch):
    """Rows of text among those with images: some ranks have no picture in a step. 21 rows leave ranks without a row."""
    run = image_run(tmp_path, family, picture_rows(tmp_path, count=21, fewest=0), tuning={"mode": mode},
                    train={"max_steps": 4}, data={"val_path": str(tmp_path / "rows.jsonl")},
                    eval={"generate_rows": 4, "max_new_tokens": 4})  # fmt: skip
    succeed("train", "--config", str(run), "output.name=single")
    single = steps_of(tmp_path / "outputs" / "single")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    for layout in ("ddp", "fsdp", "zero2", "zero3"):
        if mode == "qlora" and layout == "zero3":
            continue  # NF4 under ZeRO-3 needs a GPU
        words = ("--nproc", "2", "--strategy", layout, f"output.name={layout}")
        succeed("train-distributed", "--config", str(run), *words)
        assert same(steps_of(tmp_path / "outputs" / layout), single), layout


@pytest.mark.parametrize("family", [pytest.param("qwen3_vl", marks=pytest.mark.slow), "gemma3"])
def test_a_run_that_is_stopped_and_resumed_is_the_unbroken_one(family, tmp_path, succeed):
    import torch

    run = image_run(
        tmp_path, family, picture_rows(tmp_path, count=20, fewest=0), train={"max_steps": 4, "save_steps": 2}
    )
    succeed("train", "--config", str(run), "output.name=whole")
    succeed("train", "--config", str(run), "output.name=broken", "train.stop_after_steps=2")
    succeed("resume", "--run", str(tmp_path / "outputs" / "broken"))
    whole, broken = tmp_path / "outputs" / "whole", tmp_path / "outputs" / "broken"
    assert steps_of(broken) == steps_of(whole)
    tensors = adapter_of(whole)
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in adapter_of(broken).items())


@pytest.mark.slow
def test_a_run_that_is_killed_resumes_to_the_unbroken_one(tmp_path, succeed):
    rows = picture_rows(tmp_path, count=20, fewest=0)
    run = image_run(tmp_path, "gemma3", rows, train={"max_steps": 30, "save_steps": 3})
    succeed("train", "--config", str(run), "output.name=whole")
    whole, killed = tmp_path / "outputs" / "whole", tmp_path / "outputs" / "killed"
    words = [sys.executable, "-m", "sft_play", "train", "--config", str(run), "output.name=killed"]
    with subprocess.Popen(
        words, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as process:
        deadline = time.monotonic() + 300
        while time.monotonic() < deadline and len(steps_so_far(killed)) < 8:
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGKILL)
    assert 8 <= len(steps_so_far(killed)) < 30
    succeed("resume", "--run", str(killed))
    assert steps_of(killed) == steps_of(whole)
    assert (killed / ADAPTER).read_bytes() == (whole / ADAPTER).read_bytes()


@pytest.mark.parametrize("trains_vision", [False, True])
@pytest.mark.parametrize(
    "family", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES]
)
def test_the_tower_stays_as_published_unless_it_is_asked_to_train(family, trains_vision, tmp_path, succeed):
    """What no image depends on, such as the pooling head of a tower whose blocks are read, stays in any case."""
    import torch
    from safetensors.torch import load_file
    from transformers import AutoModelForImageTextToText

    run = image_run(tmp_path, family, picture_rows(tmp_path), output={"name": "ours"},
                    tuning={"mode": "full", "train_vision": trains_vision})  # fmt: skip
    said = succeed("train", "--config", str(run))
    saved = tmp_path / "outputs" / "ours" / "model"
    before, after = load_file(tmp_path / "base" / "model.safetensors"), load_file(saved / "model.safetensors")
    assert before.keys() == after.keys()
    vision = [name for name in before if re.search("vision|visual|projector|connector|newline", name)]
    assert len(vision) > 10
    changed = {name for name in vision if not torch.equal(before[name], after[name])}
    if not trains_vision:
        assert not changed
        assert "stay as they are" not in said
    else:
        unread = {name for name in vision if name not in changed}
        assert all(re.search(r"\.head\.|post_layernorm|encoder\.layers\.2", name) for name in unread), unread
        assert ("stay as they are" in said) == bool(unread)
    _, info = AutoModelForImageTextToText.from_pretrained(saved, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]


@pytest.mark.parametrize("family", ["llava_onevision", pytest.param("qwen2_5_vl", marks=pytest.mark.slow)])
def test_adapters_of_the_projector_open_in_plain_peft(family, tmp_path, succeed):
    import torch
    from peft import PeftModel
    from transformers import AutoModelForImageTextToText

    from sft_play.data.masks.image_processor import ImageProcessorSource, expand_runs, load_image_processor
    from sft_play.finished.respond import load_trained_model
    from sft_play.finished.run import find_finished_run

    run = image_run(tmp_path, family, picture_rows(tmp_path), tuning={"mode": "lora", "lora": {"projector": True}},
                    output={"name": "ours"}, train={"learning_rate": 1e-2})  # fmt: skip
    succeed("train", "--config", str(run))
    folder = tmp_path / "outputs" / "ours"
    projector = [name for name in adapter_of(folder) if "merger" in name or "projector" in name]
    assert projector
    theirs = PeftModel.from_pretrained(
        AutoModelForImageTextToText.from_pretrained(tmp_path / "base"), folder / "adapter"
    )
    ours = load_trained_model(find_finished_run(folder.parent, str(folder)))
    processor = load_image_processor(ImageProcessorSource(str(tmp_path / "base")))
    expansion, tokenizer = processor.expand(40, 40), processor.processor.tokenizer
    ids = tokenizer(expansion.text)["input_ids"]
    expanded = expand_runs(ids, ids, processor.token_ids, expansion.run_lengths)
    assert expanded is not None
    types = {name: torch.tensor(value) for name, value in processor.token_types([expanded[0]]).items()}
    batch = {"input_ids": torch.tensor([expanded[0]]), **processor.blank_inputs([(40, 40)]), **types}
    with torch.no_grad():
        assert torch.allclose(ours(**batch).logits, theirs(**batch).logits, atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"data": {"packing": "best_fit"}}, "data.packing"),
        ({"train": {"kernels": "liger"}}, "train.kernels=liger"),
        ({"train": {"compile": True}}, "train.compile=true"),
        ({"tuning": {"mode": "lora", "train_vision": True}}, "tuning.train_vision"),
    ],
)
def test_what_rows_with_images_exclude_is_refused_by_name(changes, words, tmp_path, refuse):
    run = image_run(tmp_path, CHEAPEST, picture_rows(tmp_path), **changes)
    assert words in refuse("train", "--config", str(run))


def test_a_layout_that_takes_no_images_is_refused_once_the_rows_are_counted(tmp_path, refuse):
    run = image_run(tmp_path, CHEAPEST, picture_rows(tmp_path))
    for _ in ("rows not counted yet", "rows counted"):
        assert "rows with images: " in refuse("train", "--config", str(run), "--strategy", "streamed")


def test_a_bound_that_the_processor_does_not_have_is_an_error_of_the_setting(tmp_path, refuse, command):
    run = image_run(tmp_path, "gemma3", picture_rows(tmp_path), data={"image_pixels": {"max": 1024}})
    said = refuse("train", "--config", str(run))
    assert "data.image_pixels: " in said
    code, said = command("check", "--config", str(run))
    assert code == 2
    assert "data.image_pixels: " in said
    assert "leave the key out" in said
    assert "fix the file" not in said


def test_a_whole_class_that_leaves_out_its_language_models_scale_is_named():
    import torch
    from transformers import AutoConfig, AutoModelForImageTextToText

    from sft_play.training.model.vision_parts import find_dropped_scaling

    def dropped(kind: str, **text: Any) -> list[str]:
        family = FAMILIES.get(kind, FAMILIES["llava"])
        vision = family.vision | ({"model_type": family.vision_type} if family.vision_type else {})
        small = {**TEXT, "vocab_size": 99, **text}
        config = AutoConfig.for_model(kind, text_config=small, vision_config=vision)
        with torch.device("meta"):
            return find_dropped_scaling(AutoModelForImageTextToText.from_config(config))

    assert dropped("aya_vision", model_type="cohere2", logit_scale=0.25) == ["logit_scale=0.25"]
    assert dropped("llava_next", model_type="granite", logits_scaling=8.0) == ["logits_scaling=8"]
    assert dropped("llava_next", model_type="llama") == []
    assert dropped("gemma4", model_type="gemma4_text", final_logit_softcapping=30.0) == []
    # bounded by a module of its own
    config = AutoConfig.for_model("inkling2")
    config.get_text_config().num_hidden_layers = 1
    assert config.get_text_config().final_logit_softcapping
    with torch.device("meta"):
        assert find_dropped_scaling(AutoModelForImageTextToText.from_config(config)) == []


def test_rows_with_images_on_a_base_of_text_are_bad_rows(tmp_path, tiny_llama, refuse):
    rows = write_rows(tmp_path / "rows.jsonl", picture_rows(tmp_path))
    said = refuse("train", "--config", str(write_run(tmp_path, tiny_llama, rows)))
    assert "none can be trained on this base" in said


def test_parts_for_images_do_not_train_on_rows_without_any(tmp_path, refuse):
    run = image_run(tmp_path, CHEAPEST, picture_rows(tmp_path, count=8, fewest=0, seed=0),
                    tuning={"mode": "full", "train_vision": True})  # fmt: skip
    rows = [{**row, "images": []} for row in picture_rows(tmp_path)]
    for row in rows:
        row["messages"][0]["content"] = [part for part in row["messages"][0]["content"] if part["type"] == "text"]
    write_rows(tmp_path / "rows.jsonl", rows)
    assert "no row has one" in refuse("train", "--config", str(run)).replace("\n", " ")


# --- pictures that change ---------------------------------------------------------------------------------------------
def test_a_cache_of_rows_knows_its_folder_and_the_files_of_its_images(tmp_path, monkeypatch):
    from PIL import Image

    from sft_play.config.load import config_from_text
    from sft_play.data.build.splits import build_splits
    from sft_play.data.sources.files import find_data_paths
    from sft_play.training.prepare.tokenizer import load_tokenizer

    base, rows = make_image_model(tmp_path / "base", "qwen2_5_vl"), []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        rows = picture_rows(tmp_path / name)
        write_rows(tmp_path / name / "rows.jsonl", rows)
    settings = {
        "model": {"name": str(base), "max_seq_len": 1024},
        "data": {"train_path": "rows.jsonl", "val_path": None},
    }
    config = config_from_text(json.dumps(settings), name="run.yaml")

    def build(name: str) -> Any:
        monkeypatch.chdir(tmp_path / name)
        paths = find_data_paths(config.data)
        return build_splits(config, paths, load_tokenizer(config).tokenizer, max_seq_len=1024).train.rows

    for name in ("one", "two", "one"):
        files = [Path(picture["path"]) for row in build(name)["images"] for picture in row]
        assert {file.parent for file in files} == {tmp_path / name}
    tokens = sum(build("one")["image_tokens"])
    Image.new("RGB", (120, 120)).save(tmp_path / "one" / rows[0]["images"][0])
    assert sum(build("one")["image_tokens"]) != tokens


@pytest.mark.slow
def test_a_run_is_not_resumed_on_other_pictures(tmp_path, succeed, refuse):
    from PIL import Image, ImageOps

    run = image_run(tmp_path, "gemma3", picture_rows(tmp_path), train={"save_steps": 1}, output={"name": "ours"})
    succeed("train", "--config", str(run), "train.stop_after_steps=1")
    for file in tmp_path.glob("*.png"):
        with Image.open(file) as picture:
            ImageOps.invert(picture).save(file)
    assert "images of" in refuse("resume", "--run", str(tmp_path / "outputs" / "ours"))


def test_rows_are_counted_anew_where_their_pictures_changed(tmp_path):
    from PIL import Image

    from sft_play.config.load import load_config
    from sft_play.launch.row_survey import cached_row_tokens, count_row_tokens

    rows = picture_rows(tmp_path)
    loaded = load_config(image_run(tmp_path, CHEAPEST, rows))
    count_row_tokens([loaded])
    before = cached_row_tokens(loaded.config)
    assert before is not None
    Image.new("RGB", (128, 128)).save(tmp_path / rows[0]["images"][0])
    assert cached_row_tokens(loaded.config) is None
    count_row_tokens([loaded])
    after = cached_row_tokens(loaded.config)
    assert after is not None
    assert (after.images.width, after.images.height) == (128, 128) != (before.images.width, before.images.height)
