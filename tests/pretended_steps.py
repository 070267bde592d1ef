"""The trainer's paths on a pretended GPU (`tests.pretended`), beside the same on the CPU, and with tensors that are
left on the host: writes what each found.

python -m tests.pretended_steps MODEL OUT CASES LEFT

CASES and LEFT are JSON: which of `CASES` and of the names of `LEFT`.
"""

import contextlib
import dataclasses
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from accelerate.state import AcceleratorState
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.trainer_utils import SaveStrategy

from sft_play.config.load import config_from_text
from sft_play.data.build.splits import DataSplit
from sft_play.data.build.stats import RowStats
from sft_play.machine.hardware import Hardware
from sft_play.models.config_json import load_model_shape
from sft_play.planner.batching import MicroBatches
from sft_play.planner.decide import PlanRequest, make_plan
from sft_play.runs.folder import RunFolder
from sft_play.training.loop.callbacks import GradientCheck
from sft_play.training.loop.trainer import PlannedTrainer, build_trainer, training_arguments
from sft_play.training.measure.exact_match import Question
from sft_play.training.measure.updates import UpdateCheck
from sft_play.training.model import attention_functions
from sft_play.training.model.model_loading import load_model
from sft_play.training.prepare.model_spec import build_model_spec
from tests import pretended
from tests.models import make_tokenizer
from tests.ranks_evaluation import rows_of

MODES = ("full", "lora", "qlora")
ROWS = {
    "padded": [], "unmasked": [], "joined": [], "packed": ["data.packing=best_fit"],
    "masked packs": ["data.packing=best_fit", "model.attn_implementation=sdpa"],
    "of sources": ["task_mode=cpt_mixed", "data.text_path=none.txt"],
}  # fmt: skip
"""Kinds of batches, by what they set: padded with and without a mask, rows and packs by their boundaries, packs behind
a mask, and rows whose losses are summed by source."""
CASES = [
    *((mode, rows, ("fp32", "bf16")[(one + other) % 2], "llama")
      for one, mode in enumerate(MODES) for other, rows in enumerate(ROWS)),
    ("lora", "unmasked", "bf16", "mistral"), ("full", "joined", "fp32", "mistral"),
    ("lora", "padded", "bf16", "mixtral"), ("full", "masked packs", "fp32", "mixtral"),
]  # fmt: skip
"""Mode, rows, precision, and the model: Mistral has a window shorter than the rows, Mixtral experts and their loss."""
SIZES = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512, "eos_token_id": 2, "pad_token_id": 0,
    "bos_token_id": None,
}  # fmt: skip
OWN = {
    "mistral": {"sliding_window": 8},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.1,
                "output_router_logits": True},
}  # fmt: skip


def models(llama: Path, folder: Path) -> dict[str, Path]:
    """The models by name."""
    found = {"llama": llama}
    for kind, own in OWN.items():
        found[kind] = folder / kind
        make_tokenizer(found[kind])
        size = len(AutoTokenizer.from_pretrained(found[kind]))
        config = AutoConfig.for_model(kind, **SIZES, **own, vocab_size=size, dtype="float32")
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).save_pretrained(found[kind])
    return found


def trainer_of(model: Path, folder: Path, mode: str, rows: str, precision: str, device: torch.device | None) -> Any:
    """A trainer, with its model on the device or, without one, on the CPU."""
    config = config_from_text(
        f"model: {{name: {model}, max_seq_len: 48}}\ntuning: {{mode: {mode}, lora: {{r: 4}}}}\n"
        "train: {effective_batch_size: 4, batch_size: 2, max_steps: 2, report_to: [], warmup_steps: 0,\n"
        f"        logging_steps: 1, bf16: {str(precision == 'bf16').lower()}}}\n",
        name="run.yaml", overrides=ROWS[rows],
    )  # fmt: skip
    plan = make_plan(PlanRequest(config, load_model_shape(str(model)), Hardware((), "CPU", 2, 2**34, 2**34)))
    cut = MicroBatches(2, tokens=96, padded=False) if rows == "joined" else MicroBatches(2)
    plan = dataclasses.replace(plan, micro_batches=cut, answer_tokens=64)
    tokenizer, has_masks = AutoTokenizer.from_pretrained(model), rows not in ("unmasked", "of sources")
    spec = build_model_spec(
        config, plan.precision, tokenizer_size=len(tokenizer), uses_masks=has_masks,
        uses_boundaries=rows in ("joined", "packed"),
    )  # fmt: skip
    torch.manual_seed(1)
    loaded = load_model(config, plan.precision, spec, device="cpu")
    run, engine = RunFolder(folder), {} if device is None else {"use_cpu": False}
    arguments = training_arguments(config, plan, run, has_eval=True, engine_options=engine)
    arguments.save_strategy = SaveStrategy.NO  # files are written from memory that these tensors do not have
    split = DataSplit(rows_of(), RowStats("rows", "rows"))
    made = build_trainer(
        config, plan, run, model=loaded if device is None else moved(loaded, device), tokenizer=tokenizer,
        peft_config=spec.peft_config, train_split=split, eval_split=split, arguments=arguments, adds_masks=has_masks,
        questions=[Question([5, 6, 7], "x", "y"), Question([8, 9], "x", "y")], max_new_tokens=3,
    )  # fmt: skip
    for callback in (GradientCheck(), UpdateCheck(made, plan.precision.updates)):
        made.add_callback(callback)
    return made


def moved(model: Any, device: torch.device) -> Any:
    """The model on the device. NF4 weights are plain parameters there with what bitsandbytes reads off them: a
    Params4bit cannot wrap a tensor of another class. Layers, products and their kernels stay bitsandbytes' own."""
    from bitsandbytes.nn import Linear4bit

    packed = {layer: layer.weight for layer in model.modules() if isinstance(layer, Linear4bit)}
    for layer, weight in packed.items():
        layer.weight = torch.nn.Parameter(weight.data.as_subclass(torch.Tensor), requires_grad=False)
    model = model.to(device)
    model.tie_weights()  # parameters of another class were replaced one by one
    for layer, weight in packed.items():
        layer.weight.__dict__.update({name: value for name, value in vars(weight).items() if name != "inner"})
        layer.weight.quant_state.to(device)
    return model


def story(made: Any) -> dict[str, Any]:
    """What two steps, an evaluation and generated answers find."""
    made.train()
    metrics = made.evaluate()
    trained = [one.detach().cpu() for one in made.model.parameters() if one.requires_grad]
    return {
        "losses": [line["loss"] for line in made.state.log_history if "loss" in line],
        "eval_loss": metrics["eval_loss"], "answers": [one.token_ids for one in made.last_answers],
        "weights": float(sum(one.double().abs().sum() for one in trained)), "on_host": pretended.on_host(made.model),
        "device": str(made.args.device),
    }  # fmt: skip


def kernel(query: Any, key: Any, value: Any, ends: Any, longest: int, *, lengths: Any = None, **options: Any) -> Any:
    """`packed_attention` by calls for each chat, after it has read the boundaries on the device as the GPU's
    kernel does: that one is CUDA's alone."""
    assert lengths is None or list(lengths) == (ends - torch.zeros_like(ends, device=query.device)).diff().tolist()
    return attention_functions.attention_per_chat(query, key, value, ends.diff().tolist(), **options)


def left(name: str, *, training: bool = True) -> Callable[[], Any]:
    """A batch whose `name` stays on the host, past accelerate's and the Trainer's own moves, in training or not."""

    def leaving() -> Any:
        real = PlannedTrainer.compute_loss

        def computed(self: Any, model: Any, inputs: Any, *args: Any, **options: Any) -> Any:
            stays = {name: inputs[name].cpu()} if model.training == training else {}
            return real(self, model, {**inputs, **stays}, *args, **options)

        return mock.patch.object(PlannedTrainer, "compute_loss", computed)

    return leaving


def loss_left() -> Any:
    """A loss that adds a tensor of the host's."""
    real = PlannedTrainer.compute_loss
    added = lambda self, *args, **options: (real(self, *args, **options) + torch.zeros(1)).sum()  # noqa: E731
    return mock.patch.object(PlannedTrainer, "compute_loss", added)


def prompts_left() -> Any:
    """Prompts of generated answers that are made on the host."""
    return mock.patch.object(PreTrainedModel, "device", torch.device("cpu"))


LEFT: dict[str, tuple[str, Callable[[], Any]]] = {
    "input_ids": ("padded", left("input_ids")), "labels": ("padded", left("labels")),
    "attention_mask": ("padded", left("attention_mask")), "position_ids": ("unmasked", left("position_ids")),
    "position_ids of packs": ("masked packs", left("position_ids")), "boundaries": ("packed", left("cu_seq_lens_q")),
    "boundaries of rows": ("joined", left("cu_seq_lens_q")), "sources": ("of sources", left("source")),
    "loss": ("padded", loss_left), "evaluation": ("unmasked", left("position_ids", training=False)),
    "generation": ("unmasked", prompts_left),
}  # fmt: skip
"""What is left behind, in which rows."""


def refused(model: Path, folder: Path, rows: str, leaving: Callable[[], Any], device: torch.device) -> str | None:
    """What the run says."""
    made = trainer_of(model, folder, "lora", rows, "fp32", device)
    try:
        with leaving():
            story(made)
    except RuntimeError as error:
        return str(error)
    return None


@contextlib.contextmanager
def on_a_gpu() -> Iterator[None]:
    """While open, libraries see a GPU that computes in bf16."""
    os.environ["ACCELERATE_TORCH_DEVICE"] = f"{pretended.NAME}:0"
    AcceleratorState._reset_state(reset_partial_state=True)
    with (
        pretended.Pretending(),
        mock.patch("transformers.training_args.is_torch_bf16_gpu_available", return_value=True),
        mock.patch.object(attention_functions, "packed_attention", kernel),
        mock.patch.object(PlannedTrainer, "compute_loss", without_copies(PlannedTrainer.compute_loss)),
    ):
        yield


def without_copies(compute_loss: Any) -> Any:
    """A loss to which nothing is copied from the host while it is computed: its batch came to the device before."""

    def computed(*args: Any, **options: Any) -> Any:
        with pretended.without_copies():
            return compute_loss(*args, **options)

    return computed


def main() -> None:
    """Write what every case found."""
    out = Path(sys.argv[2])
    cases, names = (json.loads(words) for words in sys.argv[3:])
    folders = models(Path(sys.argv[1]), out.parent)
    device = pretended.register()  # before any backward pass: autograd counts devices once
    found: dict[str, Any] = {"cpu": {}, "gpu": {}}
    for *case, kind in cases:
        made = trainer_of(folders[kind], out.parent / "cpu", *case, None)
        found["cpu"][" ".join((*case, kind))] = story(made)
    with on_a_gpu():
        for *case, kind in cases:
            made = trainer_of(folders[kind], out.parent / "gpu", *case, device)
            found["gpu"][" ".join((*case, kind))] = story(made)
        found["left"] = {name: refused(folders["llama"], out.parent / "left", *LEFT[name], device) for name in names}
    out.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
