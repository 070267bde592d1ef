"""The parts beside the trials: what the libraries find on this machine before anything trains, and several ranks."""

import dataclasses
import itertools
import json
import os
from collections.abc import Callable
from typing import Any

from benchmarks.gpu_selftest import checks
from benchmarks.gpu_selftest.material import LARGE_MODEL
from benchmarks.gpu_selftest.record import Part, judged_part
from benchmarks.gpu_selftest.trials import TrialBench, judge_run_folder, run_module
from sft_play.config.load import load_config
from sft_play.diagnose import doctor
from sft_play.diagnose.doctor import read_system_facts
from sft_play.launch.request import LaunchOptions
from sft_play.machine import visible_gpus
from sft_play.machine.hardware import Hardware
from sft_play.machine.host_speed import load_host_speeds, save_host_speed
from sft_play.machine.network import NodeSetup
from sft_play.machine.software import cuda_libraries
from sft_play.models.config_json import load_model_shape
from sft_play.planner.kernels import prefers_cudnn
from sft_play.planner.memory.estimate import CUDA_CONTEXT_BYTES
from sft_play.planner.memory.structure import select_attention_kernel
from sft_play.planner.precision import choose_precision
from sft_play.planner.speed import OPERATOR_RANGE_S, find_rates

ENVIRONMENT = "environment/"
SEVERAL = "several/"
ALL_REDUCE_S = 90.0
RUN_S = 600.0
VERIFY_S = 1800.0


def check_device(hardware: Hardware) -> Part:
    """The device that everything below runs on; fails if there is an accelerator that is not detected."""
    name = f"{ENVIRONMENT}device"
    if hardware.gpus:
        kinds = [f"{len(group)} x {group[0].name}" for group in hardware.gpu_groups]
        return Part(name, "pass", ", ".join(kinds), measured={"gpus": [gpu.name for gpu in hardware.gpus]})
    if accelerator := visible_gpus.find_unusable_accelerator(os.environ):
        return Part(name, "fail", f"{accelerator}; what follows ran on the CPU")
    reason = f"there is no GPU: all of it runs on the CPU ({hardware.cpu_name}), with a small model"
    return Part(name, "skipped", reason)


def check_nf4(bench: TrialBench) -> Part:
    def reason(measured: dict[str, Any]) -> str:
        return f"relative error {measured['relative_error']:.3f} there and back"

    return _probe(bench, "nf4", checks.nf4_problems, reason)


def check_nvml(bench: TrialBench) -> Part:
    """The driver's count of free memory, which a plan reads, against CUDA's."""

    def reason(measured: dict[str, int]) -> str:
        apart = abs(measured["free_by_driver"] - measured["free_by_cuda"])
        return f"free memory {apart / 2**20:.0f} MiB apart; a context takes {measured['context'] / 2**20:.0f} MiB"

    def judge(measured: dict[str, int]) -> list[str]:
        return checks.memory_counter_problems(measured, context_bytes=CUDA_CONTEXT_BYTES)

    return _probe(bench, "nvml", judge, reason, predicted={"context": CUDA_CONTEXT_BYTES})


def check_host(bench: TrialBench, hardware: Hardware) -> Part:
    """How fast the host starts kernels, kept for later plans of this machine."""
    part, name = f"{ENVIRONMENT}host", hardware.gpus[0].name
    words = ["sft_play.trace.host_probe", name, "make gpu-selftest"]
    result = run_module(words, bench.logs / "environment-host.log", bench)
    speed = load_host_speeds(bench.cache).get(name)
    if result.code != 0 or speed is None:
        return Part(part, "fail", result.message, **result.figures)
    # the user's, not the trials'
    save_host_speed(name, speed.operator_s, measured_by=speed.measured_by)
    reason = f"{speed.operator_s * 1e6:.1f} us an operator, seen before: {OPERATOR_RANGE_S}"
    return Part(part, "pass", reason, measured=dataclasses.asdict(speed), **result.figures)


def check_attention(bench: TrialBench, hardware: Hardware) -> Part:
    """Which kernel runs, for mask x grouped heads x dtype, compared with what the plan counts on."""
    predicted = planned_kernels(hardware) if bench.on_gpu else {}

    def judge(measured: dict[str, Any]) -> list[str]:
        known = {case: kernel for case, kernel in predicted.items() if case in measured["kernels"]}
        return checks.attention_problems(known, measured["kernels"])

    def reason(measured: dict[str, Any]) -> str:
        kinds = ", ".join(sorted(set(measured["kernels"].values())))
        counted = "as the plan counts" if predicted else "no kernel is predicted for a CPU"
        return f"{len(measured['kernels'])} cases: {kinds}; {counted}"

    return _probe(bench, "attention", judge, reason, predicted=predicted or None)


def planned_kernels(hardware: Hardware) -> dict[str, str]:
    """The kernel that the plan counts on, by case, on the first GPU."""
    shape, gpu = load_model_shape(LARGE_MODEL), hardware.gpus[0]
    preferred = prefers_cudnn(gpu.capability, cuda_libraries(), is_amd=gpu.is_amd)
    kernels = {}
    for dtype, (heads, count), mask, (rows, repeat) in itertools.product(
        checks.DTYPES, checks.HEADS.items(), checks.MASKS, checks.ROWS.items()
    ):
        kernel = select_attention_kernel(
            dataclasses.replace(shape, num_heads=checks.QUERY_HEADS, num_kv_heads=count, head_dim=checks.HEAD_DIM),
            attention="sdpa", masked=mask != "causal", half_precision=dtype != "fp32", capability=gpu.capability,
            on_gpu=True, uses_cudnn=preferred and repeat,
        )  # fmt: skip
        kernels[f"{dtype}, {heads}, {mask}{rows}"] = str(kernel)
    return kernels


def _probe(
    bench: TrialBench,
    name: str,
    judge: Callable[[Any], list[str]],
    reason: Callable[[Any], str],
    *,
    predicted: dict[str, Any] | None = None,
) -> Part:
    """Run a probe in its own process, and check its result."""
    out, part = bench.folder / f"{name}.json", f"{ENVIRONMENT}{name}"
    out.unlink(missing_ok=True)
    log = bench.logs / f"environment-{name}.log"
    result = run_module(["benchmarks.gpu_selftest.probes", name, str(out)], log, bench)
    if result.code != 0 or not out.is_file():
        return Part(part, "fail", result.message, predicted, **result.figures)
    measured = json.loads(out.read_text(encoding="utf-8"))
    figures = {"predicted": predicted, "measured": measured, **result.figures}
    return judged_part(part, judge(measured), reason(measured), **figures)


def joint_hardware(hardware: Hardware) -> Hardware:
    """The ranks that work together: GPUs of one kind, or two processes on the CPU."""
    if not hardware.gpus:
        return dataclasses.replace(hardware, cpu_ranks=2)
    return dataclasses.replace(hardware, gpus=hardware.gpu_groups[0])


def _chosen_gpus(hardware: Hardware) -> tuple[int, ...]:
    """Indices of the GPUs that work together; none if they are all there is."""
    of_one_kind = joint_hardware(hardware).gpus
    return tuple(gpu.index for gpu in of_one_kind) if len(of_one_kind) < len(hardware.gpus) else ()


def check_all_reduce(bench: TrialBench, hardware: Hardware) -> Part:
    """The doctor's all-reduce over every rank, and its bandwidth against the plan's figure."""
    name, machine = f"{SEVERAL}all-reduce", joint_hardware(hardware)
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "-1"} if not hardware.gpus else os.environ
    options = LaunchOptions(gpus=_chosen_gpus(hardware))
    outcome = doctor.run_all_reduce(machine, options, limit_s=ALL_REDUCE_S, environment=environment)
    finding = doctor.judge_all_reduce(outcome, read_system_facts(machine), NodeSetup())
    best = outcome.bytes_per_s
    if finding.verdict == "FAIL" or best is None:
        return Part(name, "fail", finding.found)
    measured = {"ranks": outcome.world_size, "bytes_per_s": best}
    if not hardware.gpus:
        reason = f"right over {outcome.world_size} CPU ranks, {best / 1e9:.1f} GB/s; none is predicted for a CPU"
        return Part(name, "pass", reason, None, measured)
    if machine.link_bytes_per_s is None:
        reason = f"{best / 1e9:.1f} GB/s; the expected rate of the link between these GPUs is not known"
        return Part(name, "pass", reason, None, measured)
    config = load_config(bench.write_config("qlora", "equal")).config
    rates = find_rates(machine, choose_precision(config, machine))
    predicted = rates.link_bytes_per_s * rates.link_share
    problems = checks.speed_problems(predicted / 1e9, best / 1e9, what="GB/s", form=",.1f")
    reason = f"{best / 1e9:.1f} GB/s measured, {predicted / 1e9:.1f} predicted"
    return judged_part(name, problems, reason, predicted={"bytes_per_s": predicted}, measured=measured)


def check_fsdp_qlora(bench: TrialBench, hardware: Hardware) -> Part:
    """QLoRA under FSDP2: predicted against measured, per device."""
    bench.clean()
    count = joint_hardware(hardware).ranks
    train = {"effective_batch_size": bench.size.effective_batch * count, "gradient_checkpointing": True}
    config = bench.write_config("qlora", "equal", train=train, eval={"steps": 0})
    gpus = _chosen_gpus(hardware)
    machine = ["--gpus", ",".join(map(str, gpus))] if gpus else ["--nproc", str(count)]
    arguments = ["sft_play", "train-distributed", "--config", str(config), "--strategy", "fsdp", *machine]
    result = run_module(arguments, bench.logs / "fsdp-qlora.log", bench, limit_s=RUN_S)
    return judge_run_folder(f"{SEVERAL}fsdp-qlora", bench.run_folder, result, mode="qlora", rows="unequal")


def check_layouts(bench: TrialBench) -> Part:
    """`make verify-layouts` in bf16: DDP and FSDP2 against one process, LoRA, QLoRA and full."""
    name, out = f"{SEVERAL}verify-layouts", bench.folder / "layouts.json"
    out.unlink(missing_ok=True)
    arguments = ["sft_play", "verify-layouts", "train.bf16=true", "--layouts", "ddp,fsdp", "--out", str(out)]
    result = run_module(arguments, bench.logs / "verify-layouts.log", bench, limit_s=VERIFY_S)
    if not out.is_file():
        return Part(name, "fail", result.message, **result.figures)
    rows = json.loads(out.read_text(encoding="utf-8"))
    problems = []
    for row in rows:
        if not row["ok"]:
            difference = row.get("error") or row.get("worst_tensor") or "losses"
            problems.append(f"{row['mode']} under {row['layout']} differs: {difference}")
    if all(row["ranks"] == 1 for row in rows):
        problems.append("no layout of several ranks was compared")
    reason = f"{len(rows)} runs agree with one process"
    return judged_part(name, problems, reason, measured={"rows": rows}, **result.figures)
