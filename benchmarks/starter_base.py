"""The starter's base: trained again from scratch, and compared with the one in sft_play/starter/starter-base.

    make -C benchmarks starter-base OUT=outputs/starter-base

docs/starter.md says what it learns, and why its weights come out differently elsewhere. With
OUT=sft_play/starter/starter-base the new one is shipped, and benchmarks/starter_base.json renewed.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml

from benchmarks.report_header import report_header
from benchmarks.starter_corpus import CORPUS, END_OF_TEXT, SPECIAL_TOKENS, TURN_END, corpus_documents
from benchmarks.steps.material import write_rows
from sft_play.models.config_json import KNOWN_MODELS
from sft_play.process.environment import independent_environment
from sft_play.runs.folder import write_json
from sft_play.starter import BASE_NAME, BASES

ROOT = Path(__file__).resolve().parent.parent
RECORD = ROOT / "benchmarks" / "starter_base.json"
"""How the shipped base was made, and its digest."""
RECIPE = ROOT / "benchmarks" / "starter_base.yaml"
WEIGHTS = "model.safetensors"
SEED = 2
"""Seed of the random weights and of the corpus's order; others do about as well (benchmarks/LOG.md, 2026-11-22)."""
INITIALIZER_RANGE = 0.06
"""Wider than Llama's 0.02: a model this small, trained this briefly, learned to copy words only with it."""
CHAT_TEMPLATE = (BASES[BASE_NAME] / "chat_template.jinja").read_text(encoding="utf-8")
"""ChatML; tools are in the system turn, and calls follow the assistant's text."""


def main() -> None:
    """Train a base, say what it has in common with the shipped one, and record it where it is shipped."""
    from benchmarks.verify.weights import read_tensors

    out = Path(os.environ.get("OUT") or "outputs/starter-base")
    shipped, made = read_tensors(BASES[BASE_NAME]), make_base(out)
    print(f"{out / WEIGHTS}: sha256 {digest(out / WEIGHTS)}\n{difference(shipped, made)}")
    if out.resolve() == BASES[BASE_NAME]:
        write_json(RECORD, record())
        print(f"{RECORD} has its digest")


def make_base(out: Path) -> dict[str, Any]:
    """Train the base, write it to `out` as it is shipped, and give its weights."""
    documents = corpus_documents()
    with tempfile.TemporaryDirectory() as workdir:
        start = Path(workdir) / "start"
        corpus = write_rows(Path(workdir) / "corpus.jsonl", ({"text": text} for text in documents))
        make_tokenizer(documents).save_pretrained(start)
        make_model().save_pretrained(start)
        words = [f"model.name={start}", f"data.train_path={corpus}", f"output.dir={workdir}", f"train.seed={SEED}"]
        train = [sys.executable, "-m", "sft_play", "train", "--config", str(RECIPE), "output.name=base", *words]
        subprocess.run(train, cwd=ROOT, env=independent_environment(os.environ), check=True)
        return _shipped(Path(workdir) / "base" / "model", out)


def _shipped(trained: Path, out: Path) -> dict[str, Any]:
    """The files that a model's folder needs, with the weights in bfloat16."""
    import torch
    from safetensors.torch import save_file

    from benchmarks.verify.weights import read_tensors

    shutil.rmtree(out, ignore_errors=True)
    shutil.copytree(trained, out, ignore=shutil.ignore_patterns("README.md", WEIGHTS))
    fields = json.loads((out / "config.json").read_text(encoding="utf-8"))
    write_json(out / "config.json", fields | {"dtype": "bfloat16", "use_cache": True})
    weights = {name: weight.to(torch.bfloat16) for name, weight in read_tensors(trained).items()}
    save_file(weights, out / WEIGHTS, metadata={"format": "pt"})
    return weights


def difference(shipped: dict[str, Any], made: dict[str, Any]) -> str:
    """One line: whether two bases are the same, and how far apart they are."""
    if shipped.keys() != made.keys():
        return "no base of these tensors was shipped before"
    pairs = [(shipped[name].float(), made[name].float()) for name in made]
    count, total = sum(int((one != other).sum()) for one, other in pairs), sum(one.numel() for one, _ in pairs)
    if not count:
        return "the same as the shipped base, to the last bit"
    far = max(float((one - other).abs().max()) for one, other in pairs)
    return f"{count:,} of {total:,} weights differ from the shipped base's, by at most {far:.2g}: another rounding"


def record() -> dict[str, Any]:
    """What is known of the base in the package: its digest, what it was made of, where and when."""
    return {
        "command": "make -C benchmarks starter-base OUT=sft_play/starter/starter-base",
        "sha256": {path.name: digest(path) for path in sorted(BASES[BASE_NAME].iterdir())},
        "recipe": recipe(), "seed": SEED,
        "threads": os.environ.get("OMP_NUM_THREADS"), **report_header(),
    }  # fmt: skip


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def recipe() -> str:
    """Twelve hex digits that change with what the base is made of, not with words about it."""
    shape, settings = KNOWN_MODELS[BASE_NAME].config, yaml.safe_load(RECIPE.read_text(encoding="utf-8"))
    parts = [digest(CORPUS), CHAT_TEMPLATE, json.dumps([settings, shape, SEED, INITIALIZER_RANGE], sort_keys=True)]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:12]


def make_tokenizer(documents: list[str]) -> Any:
    """A byte-level BPE tokenizer trained on `documents`, with at most the model's vocabulary, and the chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=KNOWN_MODELS[BASE_NAME].config["vocab_size"], special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False,
    )  # fmt: skip
    raw.train_from_iterator(documents, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token=TURN_END, pad_token=END_OF_TEXT)
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def make_model(*, seed: int = SEED) -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = {key: value for key, value in KNOWN_MODELS[BASE_NAME].config.items() if key not in ("model_type", "dtype")}
    pad, _, end = range(len(SPECIAL_TOKENS))
    torch.manual_seed(seed)
    tokens = {"bos_token_id": None, "eos_token_id": end, "pad_token_id": pad}
    return LlamaForCausalLM(LlamaConfig(**shape, initializer_range=INITIALIZER_RANGE, **tokens))


if __name__ == "__main__":
    main()
