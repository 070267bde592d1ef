"""Every class of the installed transformers, tiny: planned, traced, trained, resumed, merged, loaded (docs/models.md).

    python -m benchmarks.registry [--kinds llama,gpt_oss] [--out registry.json]

`--kinds= ` only makes docs/models.md of the file. What is in it already, of the same versions, is not done again unless
`--kinds` names it; a class that ended the process stays in it as such. On two cores a quarter of a minute a class.
"""

import argparse
import contextlib
import io
import itertools
import json
import os
import re
import signal
import tempfile
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from benchmarks.report_header import report_header
from benchmarks.steps.material import chat, write_rows
from benchmarks.verify.weights import read_tensors
from sft_play.config.load import config_from_text
from sft_play.errors import ModelError, SftPlayError
from sft_play.finished.respond import load_trained_model
from sft_play.finished.run import find_finished_run
from sft_play.models.families import require_causal_lm_config
from sft_play.models.shape import ModelShape
from sft_play.planner.memory.estimate import estimate_memory
from sft_play.planner.memory.step_memory import Step
from sft_play.planner.precision import Precision
from sft_play.runs.folder import installed_versions, read_json, write_json
from sft_play.trace.confirm import load_planned_shape, step_settings
from sft_play.trace.settings import TraceUnavailable
from sft_play.trace.step import record_step
from sft_play.training.class_checks import small_model
from sft_play.training.class_checks.small_model import small_config

ROOT = Path(__file__).resolve().parent.parent
REGISTRY_FILE = ROOT / "benchmarks" / "registry.json"
MODES = ("lora", "qlora", "full")
MAX_PARAMETERS = 150_000_000
"""Parameters of a model that is still tried where its class refuses small sizes."""
VOCABULARY = 512
WIDTH_FACTOR = 8
"""How much wider than those that train here the models are whose plan and trace are compared: activations outweigh
tables then, as they do in models of a usual size."""
MAX_LOGIT_GAP = 1e-3
"""Of the logits' spread: more is no rounding in fp32."""
_BESIDE = {
    "hidden_size": 64, "embed_dim": 64, "d_model": 64, "intermediate_size": 64, "out_hidden_size": 64, "num_heads": 4,
    "text_hidden_size": 64, "projector_hidden_size": 64, "adapter_in_dim": 64, "adapter_out_dim": 64,
    "adapter_input_size": 64, "encoder_hidden_size": 64,
    "num_attention_heads": 4, "num_key_value_heads": 4, "encoder_attention_heads": 4, "head_dim": 16,
}  # fmt: skip
"""Sizes of parts for images and sound."""
REQUIRED_FIELDS: dict[str, dict[str, Any]] = read_json(Path(__file__).with_name("registry_fields.json"))
"""Fields for which a config class has no default, or none that works: sizes, or values as published."""
BF16 = Precision("bfloat16", "bfloat16", "")
RUN_YAML = """\
model: {{name: {folder}/base, max_seq_len: 64}}
tuning: {{mode: {mode}{rank}}}
data: {{train_path: {folder}/rows.jsonl, val_path: null, test_path: null}}
train: {{effective_batch_size: 4, batch_size: 2, max_steps: 4, learning_rate: 1e-3, report_to: []}}
eval: {{steps: 0}}
output: {{dir: {folder}/outputs}}
"""


def model_types() -> list[str]:
    """Model types of causal language models, with those that are refused by name, then of image-text classes."""
    causal = list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    return [*causal, *(kind for kind in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES if kind not in causal)]


class CannotBuild(Exception):
    """The class cannot be built small from its config's own defaults."""


def small_base(kind: str) -> Any:
    """A model of the class on the CPU, in fp32, with random weights, none zero everywhere; or CannotBuild."""
    auto, problems = _auto_class(kind), dict[str, None]()
    for narrow in ("all", "text", "nothing"):
        try:
            config = _small(CONFIG_MAPPING[kind](**REQUIRED_FIELDS.get(kind, {})), narrow)
            with torch.device("meta"):
                size = sum(one.numel() for one in auto.from_config(config).parameters())
            if size > MAX_PARAMETERS:
                raise CannotBuild(f"its smallest has {size:,} parameters")
            torch.manual_seed(0)
            model = auto.from_config(config, dtype=torch.float32)
            with torch.no_grad():
                for parameter in model.parameters():  # what begins at zero would pass no gradient on
                    parameter.add_(torch.randn_like(parameter) * 0.02)
            return model
        except Exception as error:  # each class checks its sizes in its own way
            problems[" ".join(str(error).split())[:200]] = None
    raise CannotBuild("; ".join(problems))


def _small(whole: Any, narrow: str) -> Any:
    """The config with few blocks; `narrow`: those of all parts, of the language model, or none."""
    text = whole.get_text_config()
    small = small_config(text) if narrow != "nothing" else text
    for name in ("vocab_size", "vocab_size_per_layer_input", "unpadded_vocab_size"):
        if getattr(small, name, None):
            setattr(small, name, VOCABULARY)
    for name in whole.sub_configs:
        if getattr(whole, name, None) is text:
            setattr(whole, name, small)
    whole = small if text is whole else whole
    _shorten(whole, small, _BESIDE if narrow == "all" else {})
    return whole


def _shorten(whole: Any, text: Any, widths: Mapping[str, int]) -> None:
    """One block in all parts of a config, and in theirs, but for the language model's; widths where they have some."""
    for part in (getattr(whole, name, None) for name in whole.sub_configs):
        if part is None or part is text:
            continue
        _shorten(part, text, widths)
        if getattr(part, "is_heterogeneous", False):  # sizes of blocks that are not there any more
            part.per_layer_config = None
        blocks = getattr(part, "num_hidden_layers", None)
        lists = [name for name, value in vars(part).items() if isinstance(value, list | tuple) and len(value) == blocks]
        sizes = {"depth": 1, "num_hidden_layers": 1, "num_layers": 1, "num_blocks": 1, **widths}
        for size, value in sizes.items():
            if isinstance(getattr(part, size, None), int):
                setattr(part, size, value)
        for name in lists:
            setattr(part, name, getattr(part, name)[:1])


def wide_config(kind: str) -> dict[str, Any]:
    """The config of a small model of a class, WIDTH_FACTOR times as wide; raises what the class says of its sizes."""
    narrow = small_model._NARROW_SIZES
    with mock.patch.dict(narrow, _wider(narrow)), mock.patch.dict(_BESIDE, _wider(_BESIDE)):
        config = _small(CONFIG_MAPPING[kind](**REQUIRED_FIELDS.get(kind, {})), "all")
    fields: dict[str, Any] = json.loads(json.dumps(config.to_dict(), default=str))
    return fields


def _wider(sizes: dict[str, int]) -> dict[str, int]:
    """The widths among the sizes, WIDTH_FACTOR times as large; counts stay as they are."""
    counts = {name for name in sizes if "num_" in name or "vocab" in name or name.endswith("_heads")}
    return {name: WIDTH_FACTOR * size for name, size in sizes.items() if name not in counts}


def agreement(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Where the plan's activations are from, and how far they are from a trace of the whole step, as shares: LoRA
    without, QLoRA and full weights with checkpointing; None where no trace runs."""
    shape = load_planned_shape(fields, name="m")
    result: dict[str, Any] = {"plan": "known" if shape.block_meter is None else "measured"}
    for mode in MODES:
        layers = None if mode != "lora" and shape.can_checkpoint else 0
        result[f"trace_{mode}"] = _trace_gap(fields, shape, mode, layers)
    return result


def _trace_gap(fields: Mapping[str, Any], shape: ModelShape, mode: str, layers: int | None) -> float | None:
    rank = "" if mode == "full" else ", lora: {r: 8}"
    run = config_from_text(f"model: {{name: m, max_seq_len: 128}}\ntuning: {{mode: {mode}{rank}}}\n", name="x")
    attentions: list[Literal["sdpa", "eager"]] = ["sdpa", "eager"] if shape.has_sdpa else ["eager"]
    # a class may not run without a mask (a run pads its rows then), nor with sdpa's kernels (Inkling's biases); what
    # a run would take has to be planned
    for attention, masks in itertools.product(attentions, (False, True)):
        step = Step(
            8, 1, 128, attention=attention, masks=masks, saves=False, checkpointed_layers=layers,
            loss="logits" if shape.has_custom_logits else "chunked",
        )  # fmt: skip
        is_of_run = masks and attention == attentions[0]
        with contextlib.suppress(TraceUnavailable, *(() if is_of_run else (ModelError,))):
            predicted = estimate_memory(run, shape, BF16, step).allocated
            return round(predicted / record_step(step_settings(run, fields, shape, BF16, step)).peak - 1, 4)
    return None


@contextlib.contextmanager
def _stopped_after(passes: int) -> Iterator[None]:
    """Ctrl-C in the middle of an optimizer step."""
    from sft_play.training.loop.trainer import PlannedTrainer

    original, calls = PlannedTrainer.training_step, 0

    def step(self: Any, *args: Any, **options: Any) -> Any:
        nonlocal calls
        loss, calls = original(self, *args, **options), calls + 1
        if calls == passes:
            os.kill(os.getpid(), signal.SIGINT)
        return loss

    with mock.patch.object(PlannedTrainer, "training_step", step):
        yield


class CommandFailed(Exception):
    """A command did not do what it was to."""


def _command(*arguments: str, code: int = 0) -> None:
    from sft_play.cli import main

    text = io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.redirect_stderr(text):
        try:
            exit_code = main(list(arguments))
        except Exception:  # a fault of ours, or of the class
            raise CommandFailed(f"{arguments[0]}: {traceback.format_exc().strip().splitlines()[-1][:300]}") from None
    if exit_code != code:
        lines = [line for line in text.getvalue().splitlines() if line.strip()]
        raise CommandFailed(f"{arguments[0]}: exit {exit_code}: {lines[-1][:300] if lines else ''}")


def check_lifecycle(kind: str, mode: str, folder: Path) -> dict[str, Any]:
    """Train, resume, merge and load again; raises CommandFailed at the first of these that does not work."""
    rank = "" if mode == "full" else ", lora: {r: 4}"
    config = folder / f"{mode}.yaml"
    config.write_text(RUN_YAML.format(folder=folder, mode=mode, rank=rank))
    runs = {name: f"{mode}-{name}" for name in ("whole", "stopped")}
    _command("train", "--config", str(config), f"output.name={runs['whole']}")
    with _stopped_after(3):
        _command("train", "--config", str(config), f"output.name={runs['stopped']}", code=130)
    _command("resume", "--config", str(config), f"output.name={runs['stopped']}")
    part = "model" if mode == "full" else "adapter"
    one, two = (read_tensors(folder / "outputs" / run / part) for run in runs.values())
    different = [name for name in one if name not in two or not torch.equal(one[name], two[name])]
    if different or one.keys() != two.keys():
        raise CommandFailed(f"resume: {len(different)} of {len(one)} tensors differ from the unbroken run's")
    whole = folder / "outputs" / runs["whole"]
    if mode == "full":
        after, before = (_logits(_load_plain(kind, model)) for model in (whole / part, folder / "base"))
        return {"moved": float((after - before).abs().max() / before.std())}
    _command("merge", "--run", str(whole))
    return _merged(kind, whole, folder / "base", quantised=mode == "qlora")


def _auto_class(kind: str) -> Any:
    return AutoModelForCausalLM if kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES else AutoModelForImageTextToText


def _load_plain(kind: str, folder: Path) -> Any:
    """A model by transformers alone; every tensor has to be there."""
    model, info = _auto_class(kind).from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    missing = sorted(info["missing_keys"]) + sorted(info["unexpected_keys"])
    if missing:
        raise CommandFailed(f"reload: {len(missing)} tensors missing or unexpected, such as {missing[0]}")
    return model.eval()


def _logits(model: Any) -> torch.Tensor:
    ids = torch.randint(3, 100, (1, 20), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits: torch.Tensor = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits
    return logits


def _merged(kind: str, run: Path, base: Path, *, quantised: bool) -> dict[str, float]:
    """How far the merged model's logits are from those of base and adapter in PEFT, and those from the base's alone,
    over their spread. The base of a QLoRA adapter is what NF4 stands for, so there it is only loaded."""
    from peft import PeftModel

    merged = _logits(_load_plain(kind, run / "merged"))
    adapted = PeftModel.from_pretrained(_load_plain(kind, base), run / "adapter").eval()
    together, spread = _logits(adapted), float(merged.std())
    with adapted.disable_adapter():
        alone = _logits(adapted)
    gaps = {"moved": float((together - alone).abs().max()) / spread}
    if not quantised:
        gaps["merge"] = float((merged - together).abs().max()) / spread
        if gaps["merge"] > MAX_LOGIT_GAP:
            # plain PEFT may load a part of an adapter alone: what this package loads says whose fault it is
            own = _logits(load_trained_model(find_finished_run(ROOT, str(run))))
            own_gap = float((merged - own).abs().max()) / spread
            if own_gap > MAX_LOGIT_GAP:
                raise CommandFailed(f"merge: its logits differ by {own_gap:.2g} of their spread from the adapter's")
            raise CommandFailed(f"plain PEFT's logits are {gaps['merge']:.2g} of their spread from the merge's")
    if gaps["moved"] < MAX_LOGIT_GAP:
        raise CommandFailed("reload: in plain PEFT the adapter changes nothing")
    return gaps


def format_page(book: Mapping[str, Any]) -> str:
    notes: dict[str, int] = {}

    def cell(found: Any) -> str:
        return f"[{notes.setdefault(_reason_text(found), len(notes) + 1)}]" if isinstance(found, str) else "yes"

    rows, counts = [], dict.fromkeys(("planned", "trained", "refused", "not_built"), 0)
    for kind, row in book["classes"].items():
        reason = row.get("refused") or row.get("not_built")
        if reason:
            counts["refused" if "refused" in row else "not_built"] += 1
            rows.append(f"| {kind} | {'refused' if 'refused' in row else 'not built'} {cell(reason)} | | | | |")
            continue
        counts["planned"] += 1
        counts["trained"] += all(not isinstance(row[mode], str) for mode in MODES)
        shares = [row[f"trace_{mode}"] for mode in MODES]
        trace = "; ".join("—" if share is None else f"{share:+.1%}" for share in shares)
        rows.append(f"| {kind} | {row['plan']} | {trace} | {' | '.join(cell(row[mode]) for mode in MODES)} |")
    lines = (f"{number}. {text}" for text, number in notes.items())
    counts |= {"seen": len(rows), "all": book["all"]}
    page = Path(__file__).with_name("registry_page.md").read_text(encoding="utf-8")
    texts = {"date": book["date"][:10], "rows": "\n".join(rows), "notes": "\n".join(lines)}
    return page.format(**book["versions"], **counts, **texts)


def _reason_text(reason: str) -> str:
    """A reason without the folder that the class was tried in."""
    return re.sub(r"/\S*registry-\w+/", "", " ".join(reason.split()))


def walk_class(kind: str, folder: Path) -> dict[str, Any]:
    from tests.models import make_tokenizer

    sums = (chat(f"what is {n} + {n}? hello there", f"it is {2 * n}. yes, the light is on") for n in range(16))
    write_rows(folder / "rows.jsonl", sums)
    try:
        require_causal_lm_config({"model_type": kind}, name="m")
        model = small_base(kind)
        make_tokenizer(folder / "base", vocab_size=VOCABULARY - 112)
        model.save_pretrained(folder / "base")
    except SftPlayError as error:
        return {"refused": str(error)}
    except Exception as error:  # each class checks its sizes in its own way, some only when they are saved
        return {"not_built": _error_line(error)}
    try:
        try:
            row = agreement(wide_config(kind))
        except Exception:  # a class that takes no other sizes, or is refused: the small one too then
            row = agreement(json.loads(json.dumps(model.config.to_dict(), default=str)))
    except SftPlayError as error:
        return {"refused": str(error)}
    except Exception as error:  # a class that does not take its own config again
        return {"not_built": f"{type(error).__name__}: {_error_line(error)}"}
    for mode in MODES:
        try:
            row[mode] = check_lifecycle(kind, mode, folder)
        except CommandFailed as error:
            row[mode] = _reason_text(str(error))
        except Exception as error:  # transformers or PEFT, with what was written
            whose = ""
            try:
                _logits(_load_plain(kind, folder / "base"))
            except Exception:  # each class in its own way
                whose = "the base itself fails in plain transformers: "
            row[mode] = f"reload: {whose}{type(error).__name__}: {_error_line(error)}"
    return row


def _error_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=REGISTRY_FILE)
    parser.add_argument("--kinds", help="these classes, those too that are in the file; default: all others")
    options = parser.parse_args()
    torch.set_num_threads(1)
    book = read_json(options.out) if options.out.is_file() else {}
    if book.get("versions") != installed_versions():
        book = report_header()
    book["all"] = len(model_types())
    rows: dict[str, Any] = book.setdefault("classes", {})
    new = [kind for kind in model_types() if kind not in rows]
    for kind in new if options.kinds is None else filter(None, options.kinds.split(",")):
        rows[kind] = {"not_built": "it ended the process"}
        write_json(options.out, {**book, "classes": dict(sorted(rows.items()))})
        with tempfile.TemporaryDirectory(prefix="registry-") as workdir:
            rows[kind] = walk_class(kind, Path(workdir))
        print(kind, json.dumps(rows[kind]), flush=True)
        write_json(options.out, {**book, "classes": dict(sorted(rows.items()))})
    if options.out == REGISTRY_FILE:
        (ROOT / "docs" / "models.md").write_text(format_page(read_json(options.out)), encoding="utf-8")


if __name__ == "__main__":
    main()
