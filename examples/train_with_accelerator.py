"""Fine-tune with your own training loop: sft_play.dist for the ranks, sft_play's loss masks for the
data.

    python examples/train_with_accelerator.py
    torchrun --standalone --nproc-per-node 2 examples/train_with_accelerator.py
    accelerate launch --multi_gpu --num_processes 2 examples/train_with_accelerator.py
    deepspeed --num_gpus 2 examples/train_with_accelerator.py --config my.yaml  (backend: deepspeed)

Without --model it trains an adapter on a tiny Llama of random weights: that shows that the loop
works, and says nothing about models. Without a GPU it trains on the CPU.
"""

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(
    0, str(Path(__file__).resolve().parent.parent)
)  # needed only if sft_play is not installed

import torch
from peft import LoraConfig, get_peft_model
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from sft_play.data.masks.render import Renderer
from sft_play.data.masks.token_row import TokenRow
from sft_play.data.sources.formats import Chat
from sft_play.dist import get_accelerator, save_sharded, wrap_model_optimizer
from sft_play.starter import BASE

IGNORED = -100
CHATS = [
    [
        {"role": "user", "content": f"what is {n} + {n}?"},
        {"role": "assistant", "content": f"it is {2 * n}."},
    ]
    for n in range(32)
]


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--config", default="configs/train/common.yaml", help="settings of sft_play.dist"
    )
    parser.add_argument(
        "--model", help="a model's folder or hub id; without it a tiny one with random weights"
    )
    parser.add_argument(
        "--data", type=Path, help='JSONL of {"messages": […]}; without it a few sums'
    )
    parser.add_argument(
        "--full", action="store_true", help="train every weight instead of a LoRA adapter"
    )
    parser.add_argument("--steps", type=int, default=8, help="optimizer steps")
    parser.add_argument("--batch", type=int, default=4, help="rows per rank and pass")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--max-seq-len", type=int, default=256)
    parser.add_argument(
        "--save", default="outputs/with_accelerator", help="folder that is written at the end"
    )
    parser.add_argument(
        "--local_rank", type=int, help=argparse.SUPPRESS
    )  # deepspeed's launcher passes it
    return parser.parse_args()


def load(args):
    """Tokenizer and model, with an adapter unless every weight is trained. The seed makes all ranks
    start equal."""
    torch.manual_seed(0)
    if args.model:
        tokenizer = AutoTokenizer.from_pretrained(args.model)
        model = AutoModelForCausalLM.from_pretrained(
            args.model, dtype=torch.float32 if args.full else "auto"
        )
    else:
        tokenizer = AutoTokenizer.from_pretrained(BASE)
        model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=len(tokenizer),
                hidden_size=32,
                intermediate_size=64,
                num_hidden_layers=2,
                num_attention_heads=2,
                num_key_value_heads=2,
                max_position_embeddings=args.max_seq_len,
            )
        )
    if not args.full:
        model = get_peft_model(
            model, LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM")
        )
    return tokenizer, model


def rows_of(args, tokenizer):
    """Token rows with their loss masks: only what the assistant says is trained, and the end of its
    turn."""
    chats = CHATS
    if args.data:
        chats = [
            json.loads(line)["messages"]
            for line in args.data.read_text(encoding="utf-8").splitlines()
        ]
    render = Renderer(tokenizer, max_seq_len=args.max_seq_len)
    rows = [
        render(Chat(f"row {number}", tuple(chat))) for number, chat in enumerate(chats, start=1)
    ]
    kept = [
        row for row in rows if isinstance(row, TokenRow) and row.trained_tokens
    ]  # a bad row says why: row.reason
    return [{"input_ids": row.input_ids, "labels": row.labels} for row in kept]


def collate(pad):
    """Pads the rows of a batch on the right."""

    def batch(rows):
        width = max(len(row["input_ids"]) for row in rows)
        filled = [(row["input_ids"], row["labels"], width - len(row["labels"])) for row in rows]
        return {
            "input_ids": torch.tensor([list(ids) + [pad] * gap for ids, _, gap in filled]),
            "attention_mask": torch.tensor([[1] * len(ids) + [0] * gap for ids, _, gap in filled]),
            "labels": torch.tensor([list(labels) + [IGNORED] * gap for _, labels, gap in filled]),
        }

    return batch


def loss_of(accelerator, model, batch):
    """The mean loss over the trained tokens of all ranks. Gradients are averaged over ranks, hence
    the factor."""
    labels = batch.pop("labels")[:, 1:]
    logits = model(**batch).logits[:, :-1]
    total = torch.nn.functional.cross_entropy(
        logits.float().transpose(1, 2), labels, ignore_index=IGNORED, reduction="sum"
    )
    tokens = accelerator.gather((labels != IGNORED).sum()).sum()
    mine = total / tokens
    return mine * accelerator.num_processes, accelerator.gather(mine.detach()).sum().item()


def endless(loader):
    while True:
        yield from loader


def main():
    args = arguments()
    accelerator = get_accelerator(args.config)
    tokenizer, model = load(args)
    rows = rows_of(args, tokenizer)
    loader = DataLoader(
        rows, batch_size=args.batch, collate_fn=collate(tokenizer.pad_token_id), drop_last=True
    )
    optimizer = torch.optim.AdamW(
        [weight for weight in model.parameters() if weight.requires_grad], lr=args.lr
    )
    model, optimizer, loader = wrap_model_optimizer(accelerator, model, optimizer, loader)
    model.train()
    batches, done, losses = endless(loader), 0, []
    while done < args.steps:
        with accelerator.accumulate(model):
            loss, shown = loss_of(accelerator, model, next(batches))
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(shown)
        if accelerator.sync_gradients:
            done += 1
            accelerator.print(f"step {done}: loss {sum(losses) / len(losses):.6f}")
            losses = []
    folder = save_sharded(accelerator, model, args.save, tokenizer=tokenizer)
    accelerator.print(f"saved: {folder}")
    accelerator.wait_for_everyone()
    # Free DDP's model before the process group ends: whoever releases the group last ends gloo's
    # threads. DDP would do so while it holds the GIL, for which one of those threads may be waiting
    # to free its last gather.
    model, optimizer, loader = accelerator.free_memory(model, optimizer, loader)
    accelerator.end_training()


if __name__ == "__main__":
    main()
