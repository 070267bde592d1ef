"""Tiny models and tokenizers made from config classes with random weights, for tests."""

import json
import random
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
    special, alphabet = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"], pre_tokenizers.ByteLevel.alphabet()
    options = {"special_tokens": special, "initial_alphabet": alphabet, "show_progress": False}
    raw.train_from_iterator(TEXTS * 4, trainers.BpeTrainer(vocab_size=vocab_size, **options))
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
        "vocab_size": size, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512, "tie_word_embeddings": True,
        "eos_token_id": 2, "pad_token_id": 0, "bos_token_id": None,
    }  # fmt: skip
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**{**settings, **changes})).save_pretrained(folder)
    return folder


def uneven_run(folder: Path, model: Path) -> Path:
    """Write rows of very different lengths, which divide over no ranks, and a run YAML that trains on them.

    21 rows in steps of 8: an epoch ends with 5. 13 rows for evaluation.
    """
    draw = random.Random(1)
    words = " ".join(TEXTS).split()

    def row(number: int) -> dict[str, object]:
        question = f"what is {number}? " + " ".join(draw.choices(words, k=draw.randint(0, 8)))
        answer = " ".join(draw.choices(words, k=draw.choice([1, 1, 2, 4, 20])))
        return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}

    for name, count in (("train", 21), ("val", 13)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row(n)) + "\n" for n in range(count)))
    path = folder / "run.yaml"
    path.write_text(
        f"model: {{name: {model}, max_seq_len: 64}}\n"
        f"data: {{train_path: {folder}/train.jsonl, val_path: {folder}/val.jsonl, test_path: null}}\n"
        "train: {effective_batch_size: 8, batch_size: 2, max_steps: 5, report_to: [], learning_rate: 1e-3}\n"
        f"eval: {{steps: 0}}\noutput: {{dir: {folder}/outputs}}\n"
    )
    return path
