"""Tiny models and tokenizers made from config classes with random weights, for tests."""

from __future__ import annotations

from pathlib import Path

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TEXTS = ["hello there, how are you today?", "the light in the kitchen is on", "what is 12 + 30? it is 42.", "yes no"]


def make_tokenizer(folder: Path, *, template: str | None = CHATML, vocab_size: int = 400) -> None:
    """Write a byte-level BPE tokenizer with ChatML's special tokens into `folder`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    raw.train_from_iterator(TEXTS * 4, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)


def make_llama(folder: Path, *, template: str | None = CHATML, **changes: object) -> Path:
    """Write a two-layer Llama with random weights (seed 0) and its tokenizer into `folder`."""
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    folder.mkdir(parents=True, exist_ok=True)
    make_tokenizer(folder, template=template)
    size = len(AutoTokenizer.from_pretrained(folder))
    settings: dict[str, object] = {
        "vocab_size": size,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "bos_token_id": None,
    }
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**{**settings, **changes})).save_pretrained(folder)  # type: ignore[arg-type]
    return folder
