"""The starter's base model: trained once by an ordinary run of this toolkit, and kept in the cache.

A Llama with two million random weights and a byte-level BPE tokenizer learn the generated corpus with `task_mode: cpt`
and `tuning.mode: full` (sft_play/starter/base.yaml). The folder's name in the cache has a digest of all that goes in.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any

from sft_play.config.load import LoadedConfig, load_config
from sft_play.errors import BackendError, ConfigError, DoesNotFit
from sft_play.facts.hardware import detect
from sft_play.facts.models.architecture import KNOWN_MODELS
from sft_play.files import cache_dir, locked
from sft_play.process.endings import ends_with_me
from sft_play.process.environment import deepspeed_on_cpu, for_another_run
from sft_play.starter import BASE_NAME, language

logger = logging.getLogger(__name__)

SEED = 2
"""Seed of the random weights and of the corpus's order; others do about as well (benchmarks/starter.py)."""
INITIALIZER_RANGE = 0.06
"""Wider than Llama's 0.02: a model this small, trained this briefly, learned to copy words only with it."""
CHAT_TEMPLATE = (
    "{% if tools %}{{ '<|im_start|>system\n' }}{% if messages[0].role == 'system' %}{{ messages[0].content + '\n' }}"
    "{% endif %}{{ 'tools: ' + (tools | tojson) + '<|im_end|>\n' }}{% endif %}"
    "{% for message in messages %}{% if not (tools and loop.first and message.role == 'system') %}"
    "{{ '<|im_start|>' + message.role + '\n' + (message.content or '') }}"
    "{% for call in message.tool_calls or [] %}{{ '\ncall: ' + ({'name': call.function.name, "
    "'arguments': call.function.arguments} | tojson) }}{% endfor %}{{ '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""ChatML; tools are in the system turn, and calls follow the assistant's text."""


def ensure_base(*, seed: int = SEED) -> Path:
    """The folder of the base model, which is trained now if the cache has none.

    Args:
        seed: of the random weights and of the order of the corpus; `benchmarks/starter.py` tries others.

    Raises:
        ConfigError: the cache cannot be written.
        DoesNotFit, BackendError: its run failed.
    """
    folder = cache_dir() / "starter"
    final = folder / f"base-{_digest(seed)}"
    if _is_whole(final):
        return final / "model"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"the cache {folder} cannot be created ({error.strerror}); set SFT_PLAY_CACHE to a folder of yours"
        ) from None
    with locked(folder / "lock", waiting="Another run is training the starter's base model: waiting for it"):
        if not _is_whole(final):
            _make(folder, final, seed=seed)
    return final / "model"


def with_base(loaded: LoadedConfig) -> LoadedConfig:
    """The config with the path of the base model in place of its name; trained now if it does not exist."""
    if loaded.config.model.name != BASE_NAME:
        return loaded
    overrides = (*loaded.overrides, f"model.name={json.dumps(str(ensure_base()))}")
    # text and overrides stay as given: the run folder's config.yaml names the starter, not a path of this machine
    return replace(load_config(loaded.path, overrides=overrides), text=loaded.text, overrides=loaded.overrides)


def built_base() -> Path | None:
    """The folder of the base model where the cache has it."""
    final = cache_dir() / "starter" / f"base-{_digest(SEED)}"
    return final / "model" if _is_whole(final) else None


def _is_whole(final: Path) -> bool:
    return (final / "model" / "model.safetensors").is_file()


def _recipe() -> str:
    return resources.files("sft_play.starter").joinpath("base.yaml").read_text(encoding="utf-8")


def _digest(seed: int) -> str:
    """Twelve hex digits that change with the recipe, the corpus and the model's shape."""
    parts = [_recipe(), Path(language.__file__).read_text(encoding="utf-8"), CHAT_TEMPLATE]
    parts += [json.dumps(KNOWN_MODELS[BASE_NAME].config), str((seed, INITIALIZER_RANGE))]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:12]


def _make(folder: Path, final: Path, *, seed: int) -> None:
    if not detect().gpus:
        deepspeed_on_cpu()
    from transformers.utils import logging as transformers_logging

    logger.info("The starter's base model is not in the cache (%s): training it from scratch, once", final)
    started = time.monotonic()
    for leftover in folder.glob(".building-*"):  # of a process that was killed: this one holds the lock
        shutil.rmtree(leftover, ignore_errors=True)
    building = Path(tempfile.mkdtemp(dir=folder, prefix=".building-"))
    try:
        corpus, start = building / "corpus.jsonl", building / "start"
        documents = language.corpus_documents(seed=language.DEFAULT_SEED)
        corpus.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents), encoding="utf-8")
        if not sys.stderr.isatty():
            transformers_logging.disable_progress_bar()
        make_tokenizer(documents).save_pretrained(start)
        make_model(seed=seed).save_pretrained(start)
        _train(building, start, corpus, seed=seed)
        shutil.rmtree(building / "outputs" / "base" / "checkpoints", ignore_errors=True)
        shutil.rmtree(final, ignore_errors=True)
        (building / "outputs" / "base").rename(final)
    finally:
        shutil.rmtree(building, ignore_errors=True)
    logger.info("The base model is ready after %.0f s", time.monotonic() - started)


def make_tokenizer(documents: list[str]) -> Any:
    """A byte-level BPE tokenizer trained on `documents`, with at most the model's vocabulary, and the chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=KNOWN_MODELS[BASE_NAME].config["vocab_size"],
        special_tokens=list(language.SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    raw.train_from_iterator(documents, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw, eos_token=language.TURN_END, pad_token=language.END_OF_TEXT
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def make_model(*, seed: int = SEED) -> Any:
    """The base before training: random weights in fp32."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = {key: value for key, value in KNOWN_MODELS[BASE_NAME].config.items() if key != "model_type"}
    pad, _, end = range(len(language.SPECIAL_TOKENS))
    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(**shape, initializer_range=INITIALIZER_RANGE, bos_token_id=None, eos_token_id=end, pad_token_id=pad)
    )


def _train(building: Path, start: Path, corpus: Path, *, seed: int) -> None:
    recipe = building / "base.yaml"
    recipe.write_text(_recipe(), encoding="utf-8")
    overrides = {
        "model.name": str(start),
        "data.train_path": str(corpus),
        "output.dir": str(building / "outputs"),
        "output.name": "base",
        "train.seed": seed,
    }
    words = [sys.executable, "-u", "-m", "sft_play", "train", "--config", str(recipe)]
    words += [f"{key}={json.dumps(value)}" for key, value in overrides.items()]
    last: list[str] = []
    with subprocess.Popen(
        words,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=ends_with_me(for_another_run(os.environ)),
        text=True,
        errors="replace",
    ) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                last = [*last[-8:], line.rstrip()]
                shown = _shown(line.rstrip(), building)
                if shown is not None:
                    logger.log(logging.INFO if shown.startswith("step ") else logging.DEBUG, "base | %s", shown)
        except BaseException:  # this process was told to stop: a half-trained base is of no use
            process.kill()
            raise
    if process.returncode == DoesNotFit.exit_code:
        raise DoesNotFit("the starter's base model does not fit this machine's memory: " + last[-1])
    if process.returncode in (130, -2):  # -2: SIGINT before sft-play handles signals
        raise KeyboardInterrupt
    if process.returncode:
        raise BackendError("the starter's base model could not be trained:\n" + "\n".join(last))


def _shown(line: str, building: Path) -> str | None:
    """A line of the base's run for the log of ours; None where it names the run's folder, which is soon another's."""
    text = line.removeprefix("[train] ")
    return None if str(building / "outputs") in text else text.replace(f"{building}/", "")
