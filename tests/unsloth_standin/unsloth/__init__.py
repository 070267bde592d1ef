"""A package in Unsloth's place for tests: its FastLanguageModel on plain transformers and PEFT, on a CPU.

Parameters are named as in Unsloth 2026.10.9. What it was called with, and every batch that its model was trained on,
is appended to the file of UNSLOTH_STANDIN_RECORD; UNSLOTH_STANDIN_FAULT makes it fail in the way that it names.
"""

import json
import os
import signal
from pathlib import Path

DEVICE_TYPE = "cpu"
FAULT = os.environ.get("UNSLOTH_STANDIN_FAULT", "")

if FAULT == "import":
    raise NotImplementedError("Unsloth cannot find any torch accelerator? You need a GPU.")


def _note(**entry):
    path = os.environ.get("UNSLOTH_STANDIN_RECORD")
    if path:
        with Path(f"{path}.{os.environ.get('RANK', '0')}").open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry, default=str) + "\n")


def _note_batch(model, arguments, options):
    if model.training:
        _note(input_ids=options["input_ids"].tolist(), labels=options["labels"].tolist())


class FastLanguageModel:
    """What the worker calls."""

    @staticmethod
    def from_pretrained(
        model_name="", max_seq_length=2048, dtype=None, load_in_4bit=True, load_in_8bit=False, load_in_16bit=False,
        full_finetuning=False, token=None, fix_tokenizer=True, trust_remote_code=False,
        use_gradient_checkpointing="unsloth", revision=None, use_exact_model_name=False, random_state=3407, **options,
    ):  # fmt: skip
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

        _note(called="from_pretrained", **{name: value for name, value in locals().items() if name in _SHOWN})
        if FAULT == "load":
            raise NotImplementedError("this model is not supported yet")
        if FAULT == "memory":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")
        if FAULT == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        packed = None
        if load_in_4bit:
            nf4 = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True, "bnb_4bit_compute_dtype": dtype}
            packed = BitsAndBytesConfig(load_in_4bit=True, **nf4)
        model = AutoModelForCausalLM.from_pretrained(model_name, dtype=dtype, quantization_config=packed)
        return model, AutoTokenizer.from_pretrained(model_name)

    @staticmethod
    def get_peft_model(
        model, r=16, target_modules=(), lora_alpha=16, lora_dropout=0.0, bias="none",
        use_gradient_checkpointing="unsloth", random_state=3407, max_seq_length=2048, use_rslora=False, **options,
    ):  # fmt: skip
        from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
        from transformers import set_seed

        _note(called="get_peft_model", **{name: value for name, value in locals().items() if name in _SHOWN})
        if FAULT == "adapters":
            target_modules = target_modules[:1]
        if getattr(model, "is_loaded_in_4bit", False):
            model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
        if use_gradient_checkpointing:
            model.activation_checkpointing_enable({"use_reentrant": False})
            model.enable_input_require_grads()
        set_seed(random_state)
        lora = LoraConfig(
            task_type="CAUSAL_LM", r=r, lora_alpha=lora_alpha, lora_dropout=lora_dropout, bias=bias,
            target_modules=list(target_modules), use_rslora=use_rslora,
        )  # fmt: skip
        made = get_peft_model(model, lora)
        made.register_forward_pre_hook(_note_batch, with_kwargs=True)
        return made

    @staticmethod
    def for_inference(model):
        _note(called="for_inference")
        model.eval()
        return model

    @staticmethod
    def for_training(model, use_gradient_checkpointing=None):
        _note(called="for_training")
        model.train()
        return model


_SHOWN = (
    *("model_name", "max_seq_length", "dtype", "load_in_4bit", "use_exact_model_name", "fix_tokenizer", "random_state"),
    *("r", "target_modules", "lora_alpha", "lora_dropout", "bias", "use_gradient_checkpointing", "use_rslora"),
)
