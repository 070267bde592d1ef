"""`make gpu-info`: this machine's GPUs, driver, host and disk, read in under a second and without importing torch; or
what a plan assumes of a machine that is only named. Each as JSON, and as lines that fit a narrow terminal.
"""

import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil

from sft_play.log import escape_control, one_line
from sft_play.machine import nvml
from sft_play.machine.gpu import GpuSnapshot, GpuStatus
from sft_play.machine.hardware import Hardware, detect_hardware
from sft_play.machine.host import nearest_disk_space
from sft_play.machine.software import installed_version, nccl_package, torch_cuda_version, torch_hip_version
from sft_play.machine.visible_gpus import find_unusable_accelerator, torch_build_text
from sft_play.planner.plan import device_budget_bytes
from sft_play.text import GIB, build_table, gib_or_na, render_lines, value_or_na, yes_no_or_na

# An import of torch from a cold network disk takes a minute and more.
TORCH_TIMEOUT_S = 120.0


def read_machine_info(
    outputs: Path, environment: Mapping[str, str], *, includes_torch: bool = False
) -> tuple[dict[str, Any], list[str]]:
    """This machine, as a run with `environment` would see it, with the disk of the run folders (`outputs`), as JSON and
    as lines; `includes_torch`: torch is asked too, in a process of its own.

    In the JSON sizes are bytes, and null is what the driver does not say. `visible_gpus` are the indices of the GPUs
    that a run here would see, in its order; `host` has the RAM as far as this process may use it.
    """
    hardware, snapshot = detect_hardware(environment), read_all_gpus()
    visible_devices, visible_setting = environment.get("CUDA_VISIBLE_DEVICES"), None
    if visible_devices is not None:
        visible_setting = f"CUDA_VISIBLE_DEVICES={visible_devices}"
    nccl_name, nccl_version = nccl_package() or (None, None)
    disk_folder, disk = nearest_disk_space(outputs)
    all_gpus = asdict(snapshot)
    data = {
        "number_of_gpus": len(hardware.gpus),
        "assumed": False,
        "source": snapshot.source,
        "visible_setting": visible_setting,
        "visible_gpus": list(dict.fromkeys(gpu.index for gpu in hardware.gpus)),
        "usable_by_a_plan": bool(hardware.gpus),
        "notes": list(hardware.notes),
        "gpus": all_gpus["gpus"],
        "topology": all_gpus["topology"],
        "driver": {"version": snapshot.driver, "newest_cuda": snapshot.driver_cuda},
        "host": {
            "cpu": hardware.cpu_name,
            "physical_cores": psutil.cpu_count(logical=False),
            "logical_cores": psutil.cpu_count(),
            "usable_cores": hardware.cpu_cores,
            "ram_bytes": hardware.ram_bytes,
            "ram_free_bytes": hardware.ram_free_bytes,
            "outputs": str(outputs),
            # the nearest folder above the outputs that exists
            "disk_folder": str(disk_folder),
            "disk_bytes": disk and disk.total,
            "disk_free_bytes": disk and disk.free,
        },
        # None: not installed
        "software": {
            "torch": installed_version("torch"),
            "torch_cuda": torch_cuda_version(),
            "torch_hip": torch_hip_version(),
            "nccl": nccl_version,
            "nccl_package": nccl_name,
        },
        "torch": read_torch_report(environment) if includes_torch else None,
        "unused_accelerator": None if hardware.gpus else find_unusable_accelerator(environment),
    }
    return data, _machine_lines(data, snapshot)


def read_all_gpus(*, includes_topology: bool = True) -> GpuSnapshot:
    """Every GPU of this machine, visible to this process or not."""
    return nvml.gpu_snapshot(topology=includes_topology) or GpuSnapshot()


def read_torch_report(environment: Mapping[str, str], *, timeout_s: float = TORCH_TIMEOUT_S) -> list[str]:
    """Torch's own report of its build and of the GPUs that it sees, line by line (`torch.utils.collect_env`)."""
    command = [sys.executable, "-W", "ignore", "-m", "torch.utils.collect_env"]
    try:
        result = subprocess.run(
            command, env=dict(environment), stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace",
            timeout=timeout_s, check=True,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError) as error:
        return [f"it did not answer: {one_line(str(error), limit=300)}"]
    report = result.stdout.partition("\nCPU:")[0]  # the rest is of the machine, and known
    return [one_line(line) for line in report.splitlines()[1:] if line.strip()]


def _machine_lines(data: Mapping[str, Any], snapshot: GpuSnapshot) -> list[str]:
    """The page; its first line names the source, the second the number of GPUs."""
    host, header = data["host"], "no driver shows a GPU"
    if snapshot.source:
        header = f"GPUs as {snapshot.source} shows them"
    lines = [f"This machine: {header}", f"Number of GPUs: {data['number_of_gpus']}"]
    if data["visible_setting"] is not None:
        order = [f"GPU {index} is cuda:{device}" for device, index in enumerate(data["visible_gpus"])]
        lines.append(f"{one_line(data['visible_setting'])}: {', '.join(order) or 'no GPU is visible'}")
    lines += data["notes"]
    if data["unused_accelerator"]:
        lines.append(data["unused_accelerator"])
    by_index = {gpu.index: gpu for gpu in snapshot.gpus}
    if gpus := [by_index[index] for index in data["visible_gpus"] if index in by_index]:
        headers = ("GPU", "name", "total\nGiB", "used\nGiB", "free\nGiB", "cc", "bf16", "fp8", "cap\nW", "°C",
                   "PCIe\nnow/max", "MIG")  # fmt: skip
        lines += ["", *render_lines(build_table(headers, [_gpu_row(gpu) for gpu in gpus], text_columns=(1,)))]
    for gpu in gpus:
        if gpu.withheld:
            withheld = ", ".join(f"{fact} ({one_line(reason)})" for fact, reason in gpu.withheld.items())
            lines.append(f"GPU {gpu.index}: {snapshot.source} does not tell its {withheld}")
        for instance in gpu.instances:
            lines.append(f"GPU {gpu.index} instance {value_or_na(instance.profile)}: {value_or_na(instance.uuid)}")
        for process in gpu.all_processes:
            size = gib_or_na(process.used_bytes, digits=2)
            lines.append(f"GPU {gpu.index} process {process.pid} ({value_or_na(process.name)}): {size} GiB")
    lines += [
        "",
        f"Driver: {value_or_na(snapshot.driver)}, which runs CUDA up to {value_or_na(snapshot.driver_cuda)}",
        f"NCCL: {value_or_na(data['software']['nccl'])}",
        torch_build_text(),
        f"CPU: {one_line(host['cpu'])}, {value_or_na(host['physical_cores'])} physical cores, "
        f"{value_or_na(host['logical_cores'])} logical, {host['usable_cores']} for this process",
        f"RAM: {gib_or_na(host['ram_bytes'])} GiB, {gib_or_na(host['ram_free_bytes'])} free",
        f"Disk: {gib_or_na(host['disk_free_bytes'])} of {gib_or_na(host['disk_bytes'])} GiB free "
        f"at {one_line(host['disk_folder'])}",
    ]
    if data["torch"] is not None:
        lines += ["", "torch, asked:", *(f"  {line}" for line in data["torch"])]
    return [escape_control(line) for line in lines]


def _gpu_row(gpu: GpuStatus) -> list[str]:
    link = gpu.pcie
    return [
        str(gpu.index), value_or_na(gpu.name),
        gib_or_na(gpu.total_bytes), gib_or_na(gpu.used_bytes), gib_or_na(gpu.free_bytes),
        value_or_na(gpu.compute_capability), yes_no_or_na(gpu.bf16), yes_no_or_na(gpu.fp8),
        value_or_na(gpu.power_cap_watts), value_or_na(gpu.temperature_celsius),
        f"{value_or_na(link.generation)}x{value_or_na(link.lanes)}/"
        f"{value_or_na(link.max_generation)}x{value_or_na(link.max_lanes)}",
        yes_no_or_na(gpu.mig_enabled),
    ]  # fmt: skip


# --- a machine that is only named (HARDWARE=); nothing is measured ----------------------------------------------------


def assumed_machine_info(hardware: Hardware, text: str) -> tuple[dict[str, Any], list[str]]:
    """What a plan assumes of a machine that is named by `text`, as JSON (bytes, rates per second, dense operations;
    null: not known) and as lines, each value in the unit that the end of its key tells."""
    data = {
        "number_of_gpus": len(hardware.gpus),
        "assumed": True,
        "budget_bytes": device_budget_bytes(hardware),
        **hardware.as_json(),
    }
    lines = [
        f"Assumed, not detected: HARDWARE={one_line(text)}, as in make plan (catalogue: docs/gpus.md)",
        f"Number of GPUs: {len(hardware.gpus)}",
    ]
    units = {"bytes_per_s": ("GB/s", 1e9), "bandwidth": ("GB/s", 1e9), "flops": ("TFLOPS", 1e12), "bytes": ("GiB", GIB)}
    machine_facts = {key: value for key, value in data.items() if key != "gpus"}
    for header, facts in (*(("Each GPU:", gpu) for gpu in data["gpus"][:1]), ("Machine:", machine_facts)):
        lines.append(header)
        for key, value in facts.items():
            text_value = value_or_na(value)
            for suffix, (unit, size) in units.items():
                if key.endswith(suffix) and value is not None:
                    text_value = f"{value / size:,.4g} {unit}"
            if value not in (None, ()):
                lines.append(f"  {key}: {text_value}")
    return data, [escape_control(line) for line in lines]
