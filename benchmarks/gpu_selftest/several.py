"""The parts for two ranks and more: an all-reduce, every layout against one process, FSDP QLoRA, stop and resume."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

from benchmarks.gpu_selftest.checks import loss_problems, speed_problems
from benchmarks.gpu_selftest.part import Part
from benchmarks.gpu_selftest.trials import ProcessResult, TrialBench, judge_run_folder, run_module, train_run
from sft_play.config.load import load_config
from sft_play.diagnose import doctor
from sft_play.diagnose.machine_checks import read_system_facts
from sft_play.launch.request import LaunchOptions
from sft_play.machine.hardware import Hardware
from sft_play.machine.network import NodeSetup
from sft_play.planner.precision import choose_precision
from sft_play.planner.speed import find_rates

PREFIX = "several/"
ALL_REDUCE_S = 90.0
RUN_S = 600.0
VERIFY_S = 1800.0
LAYOUTS = "ddp,fsdp"


def together(hardware: Hardware) -> Hardware:
    """The ranks that work together: GPUs of one kind, or two processes on the CPU."""
    if not hardware.gpus:
        return dataclasses.replace(hardware, cpu_ranks=2)
    return dataclasses.replace(hardware, gpus=hardware.gpu_groups[0])


def _spread(hardware: Hardware) -> LaunchOptions:
    """GPUs by their indices where there are others beside them."""
    of_one_kind = together(hardware).gpus
    return LaunchOptions(gpus=tuple(gpu.index for gpu in of_one_kind) if len(of_one_kind) < len(hardware.gpus) else ())


def _words(hardware: Hardware) -> list[str]:
    options = _spread(hardware)
    if options.gpus:
        return ["--gpus", ",".join(map(str, options.gpus))]
    return ["--nproc", str(together(hardware).ranks)]


def all_reduce(bench: TrialBench, hardware: Hardware) -> Part:
    """The doctor's all-reduce over every rank, and its bandwidth against the plan's figure."""
    name, machine, options = f"{PREFIX}all-reduce", together(hardware), _spread(hardware)
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "-1"} if not hardware.gpus else os.environ
    outcome = doctor.run_all_reduce(machine, options, limit_s=ALL_REDUCE_S, environment=environment)
    finding = doctor.judge_all_reduce(outcome, read_system_facts(machine), NodeSetup())
    best = outcome.bytes_per_s
    if finding.verdict == "FAIL" or best is None:
        return Part(name, "fail", finding.found)
    measured = {"ranks": outcome.world_size, "bytes_per_s": best}
    if not hardware.gpus:
        reason = f"right over {outcome.world_size} CPU ranks, {best / 1e9:.1f} GB/s; none is predicted for a CPU"
        return Part(name, "pass", reason, None, measured)
    config = load_config(bench.config("qlora", "equal")).config
    rates = find_rates(machine, choose_precision(config, machine))
    predicted = rates.link_bytes_per_s * rates.link_share
    if machine.link_bytes_per_s is None:
        reason = f"{best / 1e9:.1f} GB/s; the expected rate of the link between these GPUs is not known"
        return Part(name, "pass", reason, None, measured)
    problems = speed_problems(predicted / 1e9, best / 1e9, what="GB/s", form=",.1f")
    reason = f"{best / 1e9:.1f} GB/s measured, {predicted / 1e9:.1f} predicted"
    return Part(
        name, "fail" if problems else "pass", "; ".join(problems) or reason, {"bytes_per_s": predicted}, measured
    )


def verify_layouts(bench: TrialBench, hardware: Hardware) -> Part:
    """`make verify-layouts` in bf16: DDP and FSDP2 against one process, LoRA, QLoRA and full."""
    name, out, log = f"{PREFIX}verify-layouts", bench.folder / "layouts.json", bench.logs / "verify-layouts.log"
    out.unlink(missing_ok=True)
    arguments = ["sft_play", "verify-layouts", "train.bf16=true", "--layouts", LAYOUTS, "--out", str(out)]
    ended = run_module(arguments, log, bench, limit_s=VERIFY_S)
    common: dict[str, Any] = {"seconds": round(ended.seconds, 1), "log": str(log)}
    if not out.is_file():
        return Part(name, "fail", ended.words, **common)
    rows = json.loads(out.read_text(encoding="utf-8"))
    apart = [f"{row['mode']} under {row['layout']}: {row.get('error') or row.get('worst_tensor') or 'losses'}"
             for row in rows if not row["ok"]]  # fmt: skip
    several = [row for row in rows if row["ranks"] > 1]
    problems = [f"{len(apart)} of {len(rows)} runs differ: {'; '.join(apart)}"] if apart else []
    problems += [] if several else ["no layout of several ranks was compared"]
    agreed = f"{len(rows)} runs agree with one process"
    return Part(name, "fail" if problems else "pass", "; ".join(problems) or agreed, None, {"rows": rows}, **common)


def fsdp_qlora(bench: TrialBench, hardware: Hardware) -> Part:
    """QLoRA under FSDP2: predicted against measured, per device."""
    bench.clean()
    ended = _start(bench, hardware, "whole", bench.logs / "fsdp-qlora.log")
    part = judge_run_folder(f"{PREFIX}fsdp-qlora", bench.run_folder.with_name("whole"), ended, rows="unequal")
    losses = _losses(bench.run_folder.with_name("whole"))
    return dataclasses.replace(part, measured={**part.measured, "losses": losses}) if part.measured else part


def resume(bench: TrialBench, hardware: Hardware, whole: Part | None) -> Part:
    """The same run stopped halfway and resumed: the same losses as the unbroken one's."""
    name, log = f"{PREFIX}resume", bench.logs / "resume.log"
    if whole is None or not whole.measured:
        return Part(name, "skipped", "there is no unbroken run to compare with")
    stop = f"train.stop_after_steps={bench.size.steps // 2}"
    ended = _start(bench, hardware, "stopped", log, stop)
    if ended.code != 0:
        return Part(name, "fail", ended.words, seconds=round(ended.seconds, 1), log=str(log))
    again = train_run(bench, _config(bench, hardware), log, "output.name=stopped", command="resume")
    common: dict[str, Any] = {"seconds": round(ended.seconds + again.seconds, 1), "log": str(log)}
    if again.code != 0:
        return Part(name, "fail", again.words, **common)
    expected_losses, losses = whole.measured["losses"], _losses(bench.run_folder.with_name("stopped"))
    problems = loss_problems(expected_losses, losses)
    reason = f"stopped at step {bench.size.steps // 2} and resumed: {len(losses)} losses as in the unbroken run"
    return Part(name, "fail" if problems else "pass", "; ".join(problems) or reason, {"losses": expected_losses},
                {"losses": losses}, **common)  # fmt: skip


def _config(bench: TrialBench, hardware: Hardware) -> Path:
    count = together(hardware).ranks
    return bench.config(
        "qlora",
        "equal",
        train={"effective_batch_size": bench.size.effective_batch * count, "gradient_checkpointing": True},
        eval={"steps": 0},
    )


def _start(bench: TrialBench, hardware: Hardware, name: str, log: Path, *more: str) -> ProcessResult:
    config = _config(bench, hardware)
    arguments = ["sft_play", "train-distributed", "--config", str(config), "--strategy", "fsdp", *_words(hardware)]
    return run_module([*arguments, f"output.name={name}", *more], log, bench, limit_s=RUN_S)


def _losses(folder: Path) -> list[float]:
    """The loss of every step of a run; empty if it wrote none."""
    path = folder / "metrics.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    return [entry["loss"] for entry in map(json.loads, lines) if "loss" in entry]
