"""A run that ran out of memory: its advice is what resume takes, and a run that then finishes has no error."""

from __future__ import annotations

import random
import re
import shlex
from pathlib import Path
from types import SimpleNamespace

from sft_play.config.load import LoadedConfig, config_from_text
from sft_play.launch.request import resume_constraints
from sft_play.planner.batching import BatchPlan
from sft_play.planner.layout import PreviousRun
from sft_play.runs.folder import RunFolder, check_same_run, new_manifest
from sft_play.runs.lookup import create_run
from sft_play.text import GIB
from sft_play.training.checkpoints.checkpoints import checkpoint_path
from sft_play.training.prepare.device_checks import out_of_memory_message


def loaded_config(*settings: str) -> LoadedConfig:
    config = config_from_text("model: {name: Qwen/Qwen2.5-0.5B}\n", name="run.yaml", overrides=settings)
    return LoadedConfig(config, Path("run.yaml"), "", settings)


def advised(batch: BatchPlan, checkpointing: object) -> str:
    memory = SimpleNamespace(required=30 * GIB)
    choice = SimpleNamespace(checkpointing=checkpointing)
    plan = SimpleNamespace(memory=memory, budget_bytes=23 * GIB, batch=batch, choice=choice)
    return out_of_memory_message(plan, RuntimeError("no room"))  # type: ignore[arg-type]


def test_what_is_advised_is_taken_by_resume_and_needs_less(tmp_path):
    draw, kinds = random.Random(27), set()
    for number in range(60):
        micro, accum, ranks = draw.choice([1, 2, 3, 4, 6, 7, 9, 16]), draw.choice([1, 2, 5]), draw.choice([1, 2, 3])
        started, whole = BatchPlan(micro, accum, ranks), micro * accum * ranks
        size, steps = f"train.batch_size={micro}", f"train.grad_accum={accum}"
        effective = f"train.effective_batch_size={whole}"
        given = draw.choice([(effective,), (size, steps), (size, effective)])
        loaded = loaded_config(*given)
        manifest = {**new_manifest(loaded, hardware={}, data={}), "batch": vars(started), "layout": "ddp"}
        folder = RunFolder(tmp_path / str(number))
        create_run(folder, loaded, manifest=manifest, plan={"effective_batch": whole}).close()
        checkpoint_path(folder.checkpoints_path, 1).mkdir(parents=True)
        checkpointing = draw.choice([False, True, "selective"])
        advice = advised(started, checkpointing)
        found = re.search(r"SET=(\S+|'[^']*'), which resume takes too", advice)
        assert bool(found) == (micro > 1 or checkpointing is not True), advice
        if found is None:
            assert "more GPUs, or a new run with a shorter model.max_seq_len" in advice
            kinds.add("nothing")
            continue
        again = loaded_config(*given, *shlex.split(shlex.split(found[1])[0]))
        stopped = PreviousRun("ddp", BatchPlan(micro, accum, ranks))
        asked = again.config.train
        kept, *_ = resume_constraints(again.config, stopped, ranks)
        kept = kept or BatchPlan(int(asked.batch_size), int(asked.grad_accum), ranks)
        assert kept.effective_batch == whole
        check_same_run(folder, again, data={}, batch=vars(kept))
        assert kept.micro_batch < micro or (micro == 1 and again.config.train.gradient_checkpointing is True)
        kinds.add(len(given))
    assert kinds == {"nothing", 1, 2}
