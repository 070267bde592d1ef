"""Predicted speed on short rows against rows of full length, on every card of the catalogue: a table and a JSON file.

    python -m benchmarks.short_rows ROWS.jsonl TOKENIZER OUT.json

ROWS is a JSONL file of chats or of questions and answers, TOKENIZER a folder. Both plans are for the same effective
batch, each with the micro-batch, checkpointing and division of a step that the plan takes by itself; the ratio is of
tokens per second without padding. A card gets the largest of MODELS and modes that fits it.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections import Counter
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sft_play.config.load import config_from_text
from sft_play.machine.gpu_catalog import CATALOG_ENTRIES
from sft_play.machine.hardware import parse_hardware
from sft_play.models.config_json import load_model_shape
from sft_play.planner.batching import RowTokens, summarize_row_tokens
from sft_play.planner.decide import PlanRequest, make_plan
from sft_play.planner.plan import Plan
from sft_play.runs.files import write_json

MODELS = (
    ("meta-llama/Llama-3.1-8B-Instruct", "lora"),
    ("meta-llama/Llama-3.1-8B-Instruct", "qlora"),
    ("Qwen/Qwen2.5-3B-Instruct", "qlora"),
    ("Qwen/Qwen2.5-0.5B-Instruct", "qlora"),
)
LENGTH = 2048


def read_row_lengths(rows: Path, tokenizer: Path) -> list[int]:
    """Tokens of each row's texts, with eight of a template for each of two turns."""
    from transformers import AutoTokenizer

    encode = AutoTokenizer.from_pretrained(tokenizer).backend_tokenizer
    texts = []
    for line in rows.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        parts = [turn["content"] for turn in row["messages"]] if "messages" in row else map(str, row.values())
        texts.append("\n".join(parts))
    return [min(LENGTH, len(one.ids) + 16) for one in encode.encode_batch(texts)]


def plan_short_rows(card: str, model: str, mode: str, batch: int, rows: RowTokens | None) -> Plan:
    """The plan of one card."""
    text = f"model: {{name: {model}, max_seq_len: {LENGTH}}}\ntuning: {{mode: {mode}}}\n"
    config = config_from_text(text + f"train: {{effective_batch_size: {batch}}}\n", name="short.yaml")
    request = PlanRequest(config, load_model_shape(model), parse_hardware(f"1x{card}"), has_eval=False)
    return make_plan(replace(request, row_tokens=rows))


def main(rows: Path, tokenizer: Path, out: Path) -> None:
    """Print and write the table."""
    known = summarize_row_tokens(Counter(read_row_lengths(rows, tokenizer)), limit=LENGTH)
    assert known is not None
    cards: list[dict[str, Any]] = []
    for batch in (32, 64):
        for card in dict.fromkeys(entry.name for entry in CATALOG_ENTRIES):
            for model, mode in MODELS:
                full = plan_short_rows(card, model, mode, batch, None)
                if full.fits and full.speed_known:
                    short = plan_short_rows(card, model, mode, batch, known)
                    by_rows = full.speed.tokens_per_s * known.mean / LENGTH  # the same micro-batch, each row a full one
                    cards.append(
                        {
                            "card": card, "model": model, "mode": mode, "effective_batch": batch,
                            "full": full.speed.tokens_per_s, "short": short.speed.tokens_per_s,
                            "ratio": short.speed.tokens_per_s / full.speed.tokens_per_s,
                            "padded_to_full": by_rows / full.speed.tokens_per_s,
                            "micro_batches": [short.micro_batches.rows, short.micro_batches.tokens],
                            "padded": short.micro_batches.padded, "one_by_one": short.choice.step.one_by_one,
                        }
                    )  # fmt: skip
                    print(f"{card:24} {model.split('/')[1]:24} {mode:6} {batch:3} {full.speed.tokens_per_s:9,.0f} "
                          f"{short.speed.tokens_per_s:9,.0f} {cards[-1]['ratio']:.2f}")  # fmt: skip
                    break  # the largest that fits
    ratios = [card["ratio"] for card in cards]
    print(f"median {statistics.median(ratios):.2f}, least {min(ratios):.2f}, {len(ratios)} rows")
    write_json(
        out,
        {"date": datetime.now(UTC).isoformat(timespec="seconds"), "rows": {
            "mean": known.mean, "p95": known.p95, "longest": known.longest, "count": known.rows}, "cards": cards},
    )  # fmt: skip


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]))
