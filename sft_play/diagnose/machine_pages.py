"""`make gpu-info`: this machine's GPUs, driver, host and disk, read in under a second and without
importing torch; or what a plan assumes of a machine that is only named. `make memory-check`: the
processes of a run, what its ranks hold of each GPU, what others hold, and what its plan predicted.
Each as JSON, and as lines that fit a narrow terminal.
"""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil

from sft_play.log import escape_control, one_line
from sft_play.machine import nvml
from sft_play.machine.gpu import GpuProcess, GpuSnapshot, GpuStatus
from sft_play.machine.hardware import Hardware, detect_hardware
from sft_play.machine.host import nearest_disk_space
from sft_play.machine.host_speed import load_host_speeds
from sft_play.machine.software import installed_version, nccl_package, torch_build_version
from sft_play.machine.visible_gpus import find_unusable_accelerator, torch_build_text
from sft_play.planner.plan import device_budget_bytes
from sft_play.process.failures import RUN_VARIABLE
from sft_play.runs.folder import RunFolder, read_json
from sft_play.runs.lookup import iter_runs, lock_holder_pid, lock_holder_pids, resolve_run
from sft_play.text import (
    GIB,
    build_table,
    format_size,
    gib_or_na,
    render_lines,
    value_or_na,
    yes_no_or_na,
)

# The program that measures the host, and how long it may take: most of it is imports.
HOST_PROBE, HOST_PROBE_TIMEOUT_S = "sft_play.trace.host_probe", 180.0


def read_machine_info(
    outputs: Path, environment: Mapping[str, str], *, includes_torch: bool = False
) -> tuple[dict[str, Any], list[str]]:
    """Read this machine as a run with `environment` would see it; returns JSON and lines.

    Args:
        outputs: the folder of the runs, whose disk is read.
        environment: the run's variables; `CUDA_VISIBLE_DEVICES` chooses GPUs.
        includes_torch: True asks torch too, in a process of its own.

    In the JSON sizes are bytes, and null is what the driver does not say. `visible_gpus` has the
    indices of the GPUs that a run here would see, in its order; `host` has the RAM that this
    process may use.
    """
    hardware, snapshot = detect_hardware(environment), read_all_gpus()
    visible_devices = environment.get("CUDA_VISIBLE_DEVICES")
    nccl_name, nccl_version = nccl_package() or (None, None)
    disk_folder, disk = nearest_disk_space(outputs)
    all_gpus = asdict(snapshot)
    data = {
        "number_of_gpus": len(hardware.gpus),
        "assumed": False,
        "source": snapshot.source,
        "visible_setting": (
            None if visible_devices is None else f"CUDA_VISIBLE_DEVICES={visible_devices}"
        ),
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
            "torch_cuda": torch_build_version("cuda"),
            "torch_hip": torch_build_version("hip"),
            "nccl": nccl_version,
            "nccl_package": nccl_name,
        },
        "torch": read_torch_report(environment) if includes_torch else None,
        "host_speed": _read_host_speed(hardware, environment, measures=includes_torch),
        "unused_accelerator": None if hardware.gpus else find_unusable_accelerator(environment),
    }
    return data, _machine_lines(data, snapshot)


def read_all_gpus(*, includes_topology: bool = True) -> GpuSnapshot:
    """Every GPU of this machine, visible to this process or not."""
    return nvml.gpu_snapshot(topology=includes_topology) or GpuSnapshot()


def read_torch_report(environment: Mapping[str, str], *, timeout_s: float = 120.0) -> list[str]:
    """Ask torch, in a process of its own, for its report of its build and of the GPUs that it sees
    (`torch.utils.collect_env`), line by line. An import of torch from a cold network disk takes a
    minute and more."""
    command = [sys.executable, "-W", "ignore", "-m", "torch.utils.collect_env"]
    try:
        result = subprocess.run(
            command,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            check=True,
        )
    except subprocess.CalledProcessError as error:
        # the last line of a traceback is the error
        reason = one_line("".join(error.stderr.strip().splitlines()[-1:]), limit=300)
        return [f"it ended with exit status {error.returncode}: {reason}"]
    except (OSError, subprocess.TimeoutExpired) as error:
        return [f"it did not answer: {one_line(str(error), limit=300)}"]
    report = result.stdout.partition("\nCPU:")[0]  # the rest is of the machine, and known
    return [one_line(line) for line in report.splitlines()[1:] if line.strip()]


def _read_host_speed(
    hardware: Hardware, environment: Mapping[str, str], *, measures: bool
) -> dict[str, Any] | None:
    """How fast the host starts kernels on the first GPU, as it is known here; None where it is not.
    `measures`: it is measured now, in a process of its own, where there is a GPU."""
    if not hardware.gpus:
        return None
    name = hardware.gpus[0].name
    if measures:
        command = [sys.executable, "-W", "ignore", "-m", HOST_PROBE, name, "make gpu-info"]
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            subprocess.run(
                command,
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=HOST_PROBE_TIMEOUT_S,
                check=True,
            )
    speed = load_host_speeds().get(name)
    return asdict(speed) if speed else None


def _host_speed_line(data: Mapping[str, Any]) -> str:
    speed = data["host_speed"]
    if speed is not None:
        figures = []
        if speed["operator_s"]:
            figures.append(f"{speed['operator_s'] * 1e6:.1f} us for an operator of a pass")
        if speed["bus_bytes_per_s"]:
            figures.append(f"{speed['bus_bytes_per_s'] / 1e9:.1f} GB/s from pinned RAM to the card")
        return f"Host: {', '.join(figures)}, measured by {speed['measured_by']} ({speed['date']})"
    if not data["number_of_gpus"]:
        return "Host: not measured, since there is no GPU that it starts kernels on"
    return "Host: not measured yet (FULL=1 does, and every run on one GPU)"


def _machine_lines(data: Mapping[str, Any], snapshot: GpuSnapshot) -> list[str]:
    """The page; its first line names the source, the second the number of GPUs."""
    host, header, driver = data["host"], "no driver shows a GPU", "n/a (none answers)"
    if snapshot.source:
        header = f"GPUs as {snapshot.source} shows them"
        driver = (
            f"{value_or_na(snapshot.driver)}, which runs CUDA up to"
            f" {value_or_na(snapshot.driver_cuda)}"
        )
    lines = [f"This machine: {header}", f"Number of GPUs: {data['number_of_gpus']}"]
    if data["visible_setting"] is not None:
        order = [
            f"GPU {index} is cuda:{device}" for device, index in enumerate(data["visible_gpus"])
        ]
        lines.append(
            f"{one_line(data['visible_setting'])}: {', '.join(order) or 'no GPU is visible'}"
        )
    lines += data["notes"]
    if data["unused_accelerator"]:
        lines.append(data["unused_accelerator"])
    # in the order in which a run would see them: CUDA_VISIBLE_DEVICES may change it
    by_index = {gpu.index: gpu for gpu in snapshot.gpus}
    gpus = [by_index[index] for index in data["visible_gpus"] if index in by_index]
    if gpus:
        lines += ["", *_gpu_lines(gpus, snapshot.source)]
    lines += [
        "",
        f"Driver: {driver}",
        f"NCCL: {value_or_na(data['software']['nccl'])}",
        torch_build_text(),
        (
            f"CPU: {one_line(host['cpu'])}, {value_or_na(host['physical_cores'])} physical cores,"
            f" {value_or_na(host['logical_cores'])} logical,"
            f" {host['usable_cores']} for this process"
        ),
        f"RAM: {gib_or_na(host['ram_bytes'])} GiB, {gib_or_na(host['ram_free_bytes'])} free",
        (
            f"Disk: {gib_or_na(host['disk_free_bytes'])} of {gib_or_na(host['disk_bytes'])} GiB"
            f" free at {one_line(host['disk_folder'])}"
        ),
        _host_speed_line(data),
    ]
    if data["torch"] is not None:
        lines += ["", "torch, asked:", *(f"  {line}" for line in data["torch"])]
    return [escape_control(line) for line in lines]


def _gpu_lines(gpus: Sequence[GpuStatus], source: str | None) -> list[str]:
    """A table of GPUs, and below it what has no column: instances, processes, what is withheld."""
    # the cells of each GPU, by the headings of their columns
    rows = [
        {
            "GPU": str(gpu.index),
            "name": value_or_na(gpu.name),
            "total\nGiB": gib_or_na(gpu.total_bytes),
            "used\nGiB": gib_or_na(gpu.used_bytes),
            "free\nGiB": gib_or_na(gpu.free_bytes),
            "cc": value_or_na(gpu.compute_capability),
            "bf16": yes_no_or_na(gpu.bf16),
            "fp8": yes_no_or_na(gpu.fp8),
            "cap\nW": value_or_na(gpu.power_cap_watts),
            "°C": value_or_na(gpu.temperature_celsius),
            "PCIe\nnow/max": (
                f"{value_or_na(gpu.pcie.generation)}x{value_or_na(gpu.pcie.lanes)}/"
                f"{value_or_na(gpu.pcie.max_generation)}x{value_or_na(gpu.pcie.max_lanes)}"
            ),
            "MIG": yes_no_or_na(gpu.mig_enabled),
        }
        for gpu in gpus
    ]
    lines = render_lines(
        build_table([*rows[0]], [[*row.values()] for row in rows], text_columns=(1,))
    )
    for gpu in gpus:
        if gpu.withheld:
            withheld = ", ".join(
                f"{fact} ({one_line(reason)})" for fact, reason in gpu.withheld.items()
            )
            lines.append(f"GPU {gpu.index}: {source} does not tell its {withheld}")
        for instance in gpu.instances:
            lines.append(
                f"GPU {gpu.index} instance {value_or_na(instance.profile)}:"
                f" {value_or_na(instance.uuid)}"
            )
        for process in gpu.all_processes:
            size = gib_or_na(process.used_bytes, digits=2)
            lines.append(
                f"GPU {gpu.index} process {process.pid} ({value_or_na(process.name)}): {size} GiB"
            )
    return lines


# --- a machine that is only named (HARDWARE=); nothing is measured --------------------------------


# What is shown of a named machine: label, key, unit and its size (None: as it is).
_ASSUMED_FACTS: tuple[tuple[str, str, str, float | None], ...] = (
    ("Each GPU", "name", "", None),
    ("  memory", "total_bytes", "GiB", GIB),
    ("  memory bandwidth", "bandwidth", "GB/s", 1e9),
    *((f"  {name}", f"{name}_flops", "TFLOPS", 1e12) for name in ("bf16", "fp16", "fp8", "fp32")),
    ("  compute capability", "cc", "", None),
    ("  power", "tdp_watts", "W", 1),
    ("A plan uses at most", "budget_bytes", "GiB of each", GIB),
    ("Between GPUs, each way", "link_bytes_per_s", "GB/s", 1e9),
    ("Nodes", "nodes", "", 1),
    ("Between nodes, each way", "network_bytes_per_s", "GB/s of a node", 1e9),
    ("RAM of a node", "ram_bytes", "GiB", GIB),
    ("Price of a GPU-hour", "price_per_gpu_hour", "", 1),
)


def assumed_machine_info(hardware: Hardware, text: str) -> tuple[dict[str, Any], list[str]]:
    """Say what a plan assumes of the machine that `text` names; returns JSON and lines. In the
    JSON sizes are bytes, rates are per second, and null is not known; the lines have the unit that
    the end of a key tells."""
    data = {
        "number_of_gpus": len(hardware.gpus),
        "assumed": True,
        "budget_bytes": device_budget_bytes(hardware),
        **hardware.as_json(),
    }
    lines = [
        (
            f"Assumed, not detected: HARDWARE={one_line(text)},"
            " as in make plan (catalogue: docs/gpus.md)"
        ),
        f"Number of GPUs: {len(hardware.gpus)}",
    ]
    facts = {**data, **(data["gpus"][0] if data["gpus"] else {})}
    facts["cc"] = ".".join(map(str, facts.get("capability") or ())) or None
    if not hardware.ram_given:  # what stands there is this machine's
        facts["ram_bytes"] = None
        facts["budget_bytes"] = data["budget_bytes"] if hardware.gpus else None
        lines.append("RAM of a node: not given (ram=512GiB names it)")
    for label, key, unit, size in _ASSUMED_FACTS:
        value = facts.get(key)
        if value is not None:
            text_value = f"{value / size:,.4g} {unit}".strip() if size else value_or_na(value)
            lines.append(f"{label}: {text_value}")
    lines += hardware.notes
    return data, [escape_control(line) for line in lines]


# --- make memory-check ----------------------------------------------------------------------------
#
# Which processes of this machine train a run, and what they hold of its memory.
#
# A manifest that says `running` proves nothing: a killed run leaves it so. What counts is the lock
# on `run.lock`, which the kernel releases when its holder ends. Its processes are the ranks whose
# environment names the folder (`SFT_PLAY_RUN`), else the lock's holder with the ranks that its
# launcher started. Only processes of this user can be read.


@dataclass(frozen=True)
class RankProcess:
    """A process that trains; `rss_bytes` is its resident memory. `world_size` is None where it is
    the only one."""

    rank: int
    pid: int
    rss_bytes: int
    world_size: str | None = None


def find_ranks(folder: RunFolder, holder_pids: tuple[int, ...]) -> tuple[RankProcess, ...]:
    """Find the processes that train a run, given the pids that hold its lock; none if they cannot
    be seen from here."""
    # None is what cannot be read, as of a process that has ended
    processes = {
        process.pid: process.info
        for process in psutil.process_iter(["pid", "ppid", "uids", "environ", "memory_info"])
        if process.pid != os.getpid()
        and None not in process.info.values()
        and process.info["uids"].real == os.getuid()
    }
    rank_pids = {pid for pid, info in processes.items() if "RANK" in info["environ"]}
    # what a rank started has its environment: only the topmost one counts
    top_ranks = [processes[pid] for pid in rank_pids if processes[pid]["ppid"] not in rank_pids]
    run_path = folder.path.resolve()
    members = [
        info
        for info in top_ranks
        if Path(info["environ"].get(RUN_VARIABLE, os.devnull)).resolve() == run_path
    ]
    writer = next((processes[pid] for pid in holder_pids if pid in processes), None)
    if not members and writer is not None:
        members = [writer]
        # a person started the ranks, by a launcher that names no folder
        if writer["pid"] in rank_pids:
            members = [info for info in top_ranks if info["ppid"] == writer["ppid"]]
    ranks = []
    for info in members:
        # a shell may export RANK empty, which a run reads as no rank
        rank, world_size = info["environ"].get("RANK") or "0", info["environ"].get("WORLD_SIZE")
        ranks.append(RankProcess(int(rank), info["pid"], info["memory_info"].rss, world_size))
    return tuple(sorted(ranks, key=lambda rank: rank.rank))


def find_run(
    output_root: Path, *, name: str | None = None
) -> tuple[RunFolder | None, tuple[str, ...]]:
    """Find the run called `name`, else the newest that is being written in `output_root` (None if
    there is none); returns it with lines that say so, and name the others. Raises RunFolderError
    where `name` is no run of this toolkit."""
    if name is not None:
        return resolve_run(output_root, name), ()
    runs: list[tuple[str, RunFolder]] = []
    # the folder is missing, or on a network disk that does not answer
    with contextlib.suppress(OSError):
        for folder in iter_runs(output_root):
            if lock_holder_pid(folder) is not None:
                manifest = read_json(folder.manifest_path)
                resumed = manifest.get("resumed") or [manifest.get("started")]
                runs.append((str(resumed[-1]), folder))
    if not runs:
        return None, (f"No run is in progress in {one_line(str(output_root))}",)
    (_, newest), *others = sorted(runs, key=lambda run: run[0], reverse=True)
    other_paths = ", ".join(one_line(str(folder.path)) for _, folder in others)
    return newest, (f"also running: {other_paths} (RUN= chooses)",) * bool(others)


def _describe_run(
    folder: RunFolder, ranks: tuple[RankProcess, ...], status: object, *, is_running: bool
) -> str:
    path, pids = one_line(str(folder.path)), ", ".join(str(rank.pid) for rank in ranks)
    # a process that is killed cannot write its end into the manifest
    if not is_running and status == "running":
        return (
            f"Run {path} is not running (its manifest says running, and nothing writes it:"
            " it was ended)"
        )
    if not is_running:
        return f"Run {path} is not running (status: {value_or_na(status)})"
    if not ranks:
        unseen = "a process that cannot be seen from here (another user, container or machine)"
        return f"Run {path} is being written, by {unseen}"
    return (
        f"Run {path}: {len(ranks)} of {one_line(ranks[0].world_size or '1')} ranks on this machine,"
        f" pid {pids}"
    )


# --------------------------------------------------------------------------------------------------
# What the ranks hold of each GPU, what others hold, and what the plan predicted.


# A plan's peak of one rank, in bytes; `terms` add up to `allocated`. On a CPU `reserved` is what a
# rank is predicted to hold beyond what it holds after its imports, which is `outside_allocator`.
_PREDICTED_SIZES = ("terms", "allocated", "reserved", "margin", "outside_allocator", "required")


@dataclass(frozen=True)
class GpuMemoryUse:
    """Memory of one GPU, in bytes. `run_bytes` is what the run holds, `others_bytes` the rest of
    what is used; both are None where the driver does not say who holds it."""

    index: int
    name: str | None
    ranks: tuple[int, ...]
    total_bytes: int | None
    used_bytes: int | None
    free_bytes: int | None
    run_bytes: int | None
    others_bytes: int | None
    others: tuple[GpuProcess, ...]


@dataclass(frozen=True)
class MemorySnapshot:
    """The memory of this machine and of the run on it at one time. `said` has lines about the run;
    `running` is True while a process trains; `ram` has `total_bytes` and `free_bytes` that this
    process may use. `prediction` has `_PREDICTED_SIZES` and `on_gpu`; None where the run has no
    plan."""

    time: str
    running: bool
    said: tuple[str, ...]
    folder: str | None
    status: str | None
    gpus: tuple[GpuMemoryUse, ...]
    ranks: tuple[RankProcess, ...]
    prediction: Mapping[str, Any] | None
    ram: Mapping[str, int]
    warnings: tuple[str, ...]


def read_memory_snapshot(
    output_root: Path, environment: Mapping[str, str], *, name: str | None = None
) -> MemorySnapshot:
    """Read the memory of this machine and of the run called `name`, else of the newest that is
    running. Raises RunFolderError where `name` is no run of this toolkit."""
    (folder, notes), hardware = find_run(output_root, name=name), detect_hardware(environment)
    is_running = folder is not None and lock_holder_pid(folder) is not None
    ranks: tuple[RankProcess, ...] = ()
    prediction, status = None, None
    if folder is not None:
        status = read_json(folder.manifest_path).get("status")
        plan = read_json(folder.path / "plan.json")
        with contextlib.suppress(LookupError, TypeError):
            sizes = {name: plan["peak_bytes"][name] for name in _PREDICTED_SIZES}
            prediction = {**sizes, "on_gpu": bool(plan["hardware"]["gpus"])}
        if is_running:
            ranks = find_ranks(folder, lock_holder_pids(folder))
        notes = (_describe_run(folder, ranks, status, is_running=is_running), *notes)
        if prediction is None:
            notes += ("its plan.json cannot be read, so there is no prediction to compare with",)
    gpus = tuple(_gpu_memory_uses(hardware, ranks))
    warnings: list[str] = []
    if prediction is not None and prediction["on_gpu"]:
        warnings = [text for use in gpus if (text := _others_warning(use, prediction))]
    return MemorySnapshot(
        time=datetime.now(UTC).isoformat(timespec="seconds"),
        running=is_running,
        said=notes,
        folder=str(folder.path) if folder else None,
        status=status,
        gpus=gpus,
        ranks=ranks,
        prediction=prediction,
        ram={"total_bytes": hardware.ram_bytes, "free_bytes": hardware.ram_free_bytes},
        warnings=tuple(warnings),
    )


def _gpu_memory_uses(hardware: Hardware, ranks: tuple[RankProcess, ...]) -> Iterator[GpuMemoryUse]:
    """Yield each GPU that is visible here or that the run uses, with who holds its memory."""
    rank_by_pid = {rank.pid: rank.rank for rank in ranks}
    visible = {gpu.index for gpu in hardware.gpus}
    gpus = read_all_gpus(includes_topology=False).gpus
    # a rank holds memory of its GPU from its first steps on: where the driver lists none of them,
    # it counts those outside this container, or none at all
    is_listed = any(item.pid in rank_by_pid for gpu in gpus for item in gpu.all_processes)
    for gpu in gpus:
        run_processes = [item for item in gpu.all_processes if item.pid in rank_by_pid]
        if gpu.index not in visible and not run_processes:
            continue
        run_bytes = others_bytes = None
        # nothing is known where the run has ranks, and the driver lists none of them here
        others: tuple[GpuProcess, ...] = ()
        is_known = bool(run_processes) or not ranks or (is_listed and gpu.processes is not None)
        if is_known and all(item.used_bytes is not None for item in run_processes):
            run_bytes = sum(item.used_bytes or 0 for item in run_processes)
            others_bytes = None if gpu.used_bytes is None else max(0, gpu.used_bytes - run_bytes)
            others = tuple(item for item in gpu.all_processes if item.pid not in rank_by_pid)
        yield GpuMemoryUse(
            gpu.index,
            gpu.name,
            tuple(sorted(rank_by_pid[item.pid] for item in run_processes)),
            gpu.total_bytes,
            gpu.used_bytes,
            gpu.free_bytes,
            run_bytes,
            others_bytes,
            others,
        )


def _others_warning(use: GpuMemoryUse, prediction: Mapping[str, Any]) -> str | None:
    """Warn of what others hold of a GPU of the run; None where the predicted peak and its margin
    fit beside it."""
    # a tight plan without others is no news: `make plan` said so
    if not use.run_bytes or use.total_bytes is None or not use.others_bytes:
        return None
    # by the plan, not by what the run holds at the moment
    left_bytes = (
        use.total_bytes
        - use.others_bytes
        - prediction["reserved"]
        - prediction["outside_allocator"]
    )
    if left_bytes >= prediction["margin"]:
        return None
    holders = f"{gib_or_na(use.others_bytes, digits=2)} GiB are held by no process that is listed"
    if use.others:
        holders = "others hold " + ", ".join(
            f"pid {item.pid} ({value_or_na(item.name)}) {gib_or_na(item.used_bytes, digits=2)} GiB"
            for item in use.others
        )
    return (
        f"GPU {use.index}: {holders}: beside the predicted peak"
        f" {gib_or_na(max(0, left_bytes), digits=2)} of the plan's margin of"
        f" {gib_or_na(prediction['margin'], digits=2)} GiB are left"
    )


# --------------------------------------------------------------------------------------------------
# The page: the run, a table with the prediction in it, RAM, warnings.


def format_memory_snapshot(snapshot: MemorySnapshot) -> list[str]:
    """The page: the run, a table with the prediction in it, RAM, warnings."""
    lines, prediction = [*snapshot.said], snapshot.prediction
    predicted, shows_gpus = gib_or_na(None), bool(snapshot.gpus)
    if prediction is not None:
        predicted = gib_or_na(prediction["reserved"] + prediction["outside_allocator"], digits=2)
        shows_gpus = shows_gpus and (prediction["on_gpu"] or not snapshot.ranks)
    headers: tuple[str, ...] = ()
    # a run on the CPU has a row for each rank, whatever GPUs the machine has
    if snapshot.ranks and not shows_gpus:
        headers = ("rank", "pid", "RSS\nGiB", "predicted\npeak")
        rows = [
            [str(rank.rank), str(rank.pid), gib_or_na(rank.rss_bytes, digits=2), predicted]
            for rank in snapshot.ranks
        ]
    elif shows_gpus:
        headers = ("GPU", "rank", "total", "this\nrun", "predicted\npeak", "others", "free")
        rows = []
        for use in snapshot.gpus:
            sizes = [
                gib_or_na(size, digits=2)
                for size in (use.run_bytes, use.others_bytes, use.free_bytes)
            ]
            sizes.insert(1, predicted if use.ranks else "-")
            rows.append(
                [
                    str(use.index),
                    ",".join(map(str, use.ranks)) or "-",
                    gib_or_na(use.total_bytes),
                    *sizes,
                ]
            )
    if headers:
        lines += ["", *render_lines(build_table(headers, rows)), ""]
    if prediction is not None:
        terms = ", ".join(
            f"{name.replace('_', ' ')} {format_size(size)}"
            for name, size in prediction["terms"].items()
            if size > 0
        )
        peak = {name: format_size(prediction[name]) for name in _PREDICTED_SIZES[1:]}
        lines.append(f"Predicted for each rank: {peak['allocated']} allocated ({terms})")
        lines.append(
            f"{peak['reserved']} reserved + {peak['margin']} margin + {peak['outside_allocator']}"
            f" libraries = {peak['required']} needed"
        )
    # `n/a` in the table needs a reason: without one it looks like a run that holds nothing
    if snapshot.ranks and shows_gpus and any(use.run_bytes is None for use in snapshot.gpus):
        lines.append(
            "n/a: the driver names no process of this run there, as in a container,"
            " or before it uses the GPU"
        )
    lines.append(
        f"RAM: {gib_or_na(snapshot.ram['total_bytes'])} GiB,"
        f" {gib_or_na(snapshot.ram['free_bytes'])} free"
    )
    lines += [f"warning: {text}" for text in snapshot.warnings]
    return [escape_control(line) for line in lines]
