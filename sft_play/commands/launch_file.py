"""`launch-file` and `setup-accelerate`: what launchers read.

A job for a scheduler trains a run as it is planned, and goes on after a preemption:

`jobs/` has a template for each scheduler: Slurm's batch script, which lets
`scripts/train_slurm.sbatch` requeue the job at its end, a managed job of SkyPilot, whose run folder
is in a bucket that the next machines find, a PyTorchJob of Kubeflow with the run YAML in a
ConfigMap, and a program that starts a job of Hugging Face with a bucket. Each starts
`train-distributed` once on every node, with a fixed `output.name` and `output.if_exists=resume`: a
job that is started again continues from the run's last checkpoint, and one whose run is finished
ends at once.
"""

import dataclasses
import hashlib
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sft_play._version import __version__
from sft_play.commands import plan
from sft_play.commands.request import CommandResult, Request, redirect_stdout_to_stderr
from sft_play.config.load import LoadedConfig, load_config
from sft_play.errors import ConfigError
from sft_play.files import ROOT, atomic
from sft_play.launch.accelerate import (
    MIXED_PRECISION,
    accelerate_path,
    read_accelerate_nodes,
    write_accelerate_file,
)
from sft_play.launch.run_hardware import restrict_to_device
from sft_play.log import one_line
from sft_play.machine.gpu_catalog import find_catalog_entries
from sft_play.machine.hardware import detect_hardware
from sft_play.planner.precision import choose_precision
from sft_play.text import plural

SCHEDULERS = {
    "slurm": ("slurm.sbatch.jinja", ".sbatch", "sbatch"),
    "skypilot": ("skypilot.sky.yaml.jinja", ".sky.yaml", "sky jobs launch"),
    "kubeflow": ("kubeflow.yaml.jinja", ".kubeflow.yaml", "kubectl apply -f"),
    "hfjobs": ("hfjobs.py.jinja", ".hfjobs.py", shlex.quote(sys.executable)),
}
# Those whose jobs run scripts of the checkout, from where it is.
_CHECKOUT_SCHEDULERS = ("slurm", "skypilot")
# Hugging Face's flavors by GPU and number (`JobHardware` of huggingface_hub 2.4); where two have
# the same GPU, the one with more RAM, for loading.
FLAVORS = {
    "T4": {1: "t4-medium"},
    "L4": {1: "l4x1", 4: "l4x4"},
    "A10G": {1: "a10g-large", 2: "a10g-largex2", 4: "a10g-largex4"},
    "L40S": {1: "l40sx1", 4: "l40sx4", 8: "l40sx8"},
    "A100-80GB": {1: "a100-large", 4: "a100x4", 8: "a100x8"},
    "H200": {1: "h200", 2: "h200x2", 4: "h200x4", 8: "h200x8"},
    "RTX PRO 6000": {
        1: "rtx-pro-6000",
        2: "rtx-pro-6000x2",
        4: "rtx-pro-6000x4",
        8: "rtx-pro-6000x8",
    },
}
# Seconds to save, between the signal and the end; as in `scripts/train_slurm.sbatch`.
GRACE_S = 300


def run_launch_file(request: Request) -> CommandResult:
    """Write what a launcher reads: accelerate's configuration, or a scheduler's job."""
    return (
        _setup_accelerate(request) if request.command == "setup-accelerate" else _write_job(request)
    )


def _write_job(request: Request) -> CommandResult:
    """Write the job of the planned run. Raises DoesNotFit where none would start, ConfigError where
    FOR names no scheduler, no GPU is known, or the file cannot be written."""
    if request.for_ not in SCHEDULERS:
        for_text = (
            f"FOR={one_line(request.for_)} is not"
            if request.for_
            else "make launch-file needs FOR=,"
        )
        raise ConfigError(f"{for_text} one of {', '.join(SCHEDULERS)}")
    _, suffix, submit_command = SCHEDULERS[request.for_]
    if request.for_ in _CHECKOUT_SCHEDULERS and not (ROOT / "scripts").is_dir():
        raise ConfigError(
            f"FOR={request.for_} starts scripts of a checkout, and sft_play is installed here"
            " without one: run it in a clone of the repository;"
            " FOR=kubeflow and FOR=hfjobs need none"
        )
    # as the job will be started, which resumes the folder of its name
    plan_result = plan.run_plan(
        dataclasses.replace(request, overrides=(*request.overrides, "output.if_exists=resume"))
    )
    if plan_result.error is not None:
        raise plan_result.error
    loaded = load_config(request.config, overrides=request.overrides)
    job = _scheduler_job(request, loaded, plan_result.data)
    path, text = request.out or Path(f"{job.name}{suffix}"), render_job(request.for_, job)
    try:
        if path.is_dir() or (
            path.exists() and not request.force and path.read_text(encoding="utf-8") != text
        ):
            raise ConfigError(
                f"{path} exists and says something else; name another OUT=, or FORCE=1 replaces it"
            )
        atomic.write(path, text)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"OUT={one_line(str(path))} cannot be written: {error}") from None
    program = "sft-play train-distributed" if job.flavor else "scripts/train_distributed.sh"
    command = f"{program} {shlex.join(['--config', str(loaded.path), *job.settings])}"
    machines_text = f"{plural(job.nodes, 'node')} with {job.gpus_per_node} x {job.gpu}"
    if plan_result.exit_code:
        machines_text += ", predicted not to fit, and tried"
    fields = {
        "path": str(path),
        "for": request.for_,
        "launch": command,
        "submit": f"{submit_command} {shlex.quote(str(path))}",
        "nodes": job.nodes,
        "gpus_per_node": job.gpus_per_node,
        "text": text,
    }
    lines = [
        f"Written to: {path}, for {machines_text}",
        f"On each node: {command}",
        f"Submit: {fields['submit']}",
    ]
    return CommandResult(fields, lines, is_written_to_out=False)


@dataclasses.dataclass(frozen=True)
class SchedulerJob:
    """What is to be started, and where. `words` follow the config in the command line of
    `sft-play train-distributed`."""

    # The run's name, in the form that Kubernetes takes (`job_name`).
    name: str
    config: Path
    words: Sequence[str]
    nodes: int
    gpus_per_node: int
    gpu: str
    checkout: Path
    # Where the command was given: relative paths of the config begin here.
    folder: Path
    bucket: str
    venv: str | None = None
    # Files and folders of this machine that the run reads, by their names in the config.
    local: Mapping[str, Path] = dataclasses.field(default_factory=dict)
    # Of Hugging Face Jobs: the machine, what pip installs there, and the folder of its code.
    flavor: str | None = None
    package: str = f"sft-play[cuda]=={__version__}"
    code: Path | None = None

    @property
    def settings(self) -> list[str]:
        """Words after the config, with what lets a job that is started again resume."""
        return [*self.words, f"output.name={self.name}", "output.if_exists=resume"]


def job_name(text: str) -> str:
    """Turn a text into a name that Kubernetes takes, with room for the endings that an operator
    appends."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:40].rstrip("-") or "run"


def _scheduler_job(
    request: Request, loaded: LoadedConfig, plan_data: dict[str, Any]
) -> SchedulerJob:
    nodes, gpus = plan_data["hardware"]["nodes"], plan_data["hardware"]["gpus"]
    if not gpus:
        raise ConfigError(
            "this machine has no GPU: name the machines of the job, such as HARDWARE=2x8xH100"
        )
    deepspeed, words = request.options.deepspeed, ["--strategy", plan_data["layout"]]
    data, model = loaded.config.data, loaded.config.model.name
    run_paths = [data.train_path, data.val_path, data.test_path, data.text_path, model]
    if deepspeed and deepspeed.file:
        words = ["--deepspeed", "--deepspeed-config", str(deepspeed.file)]
        run_paths.append(words[-1])
    run_paths += [path for source in data.sources for path in (source.path, source.val_path)]
    name = job_name(loaded.config.output.name or loaded.path.stem)
    entries = find_catalog_entries(gpus[0]["name"], gpus[0]["total_bytes"])
    gpu = entries[0].name if entries else gpus[0]["name"]
    if request.for_ == "skypilot" and gpu == "A100-40GB":
        gpu = "A100"  # as SkyPilot calls it
    hosted: dict[str, Any] = {}
    if request.for_ == "hfjobs":
        hosted["flavor"] = find_flavor(gpu, len(gpus), nodes)
        if (ROOT / "pyproject.toml").is_file():
            hosted |= {"package": "./code[cuda]", "code": ROOT}
    # two configs of one name have a bucket each
    config_digest = hashlib.sha256(str(loaded.path.absolute()).encode()).hexdigest()[:8]
    return SchedulerJob(
        name=name,
        config=loaded.path.absolute(),
        words=[*words, *loaded.overrides],
        nodes=nodes,
        gpus_per_node=len(gpus) // nodes,
        gpu=gpu,
        checkout=ROOT,
        folder=Path.cwd(),
        bucket=f"sft-play-{name}-{config_digest}",
        venv=os.environ.get("VENV") and str(Path(os.environ["VENV"]).absolute()),
        local={
            text: Path(text).expanduser().absolute()
            for text in dict.fromkeys(run_paths)
            if text and Path(text).expanduser().exists()
        },
        **hosted,
    )


def find_flavor(gpu: str, gpu_count: int, node_count: int) -> str:
    """Find the machine of Hugging Face Jobs that has these GPUs. Raises ConfigError where none
    has."""
    flavor = FLAVORS.get(gpu, {}).get(gpu_count)
    if flavor is None or node_count > 1:
        machines = [
            f"{count}x{name.replace(' ', '')}" for name in FLAVORS for count in FLAVORS[name]
        ]
        nodes_text = f" on {node_count} nodes" if node_count > 1 else ""
        raise ConfigError(
            f"Hugging Face Jobs has no machine with {gpu_count} x {gpu}{nodes_text};"
            f" HARDWARE= can name {', '.join(machines)}"
        )
    return flavor


def render_job(scheduler: str, job: SchedulerJob) -> str:
    """The text of a job's file."""
    from jinja2 import Environment, FileSystemLoader

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).with_name("jobs")),
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )
    # JSON is YAML
    environment.filters |= {
        "word": lambda value: shlex.quote(str(value)),
        "yaml": lambda value: json.dumps(
            value if isinstance(value, list) else str(value), ensure_ascii=False
        ),
        "python": lambda value: repr(json.loads(json.dumps(value, default=str))),
    }
    return environment.get_template(SCHEDULERS[scheduler][0]).render(job=job, grace_s=GRACE_S)


# --------------------------------------------------------------------------------------------------
# A configuration for accelerate's launcher.


def _setup_accelerate(request: Request) -> CommandResult:
    """Write the configuration of the GPUs, or processes, of this machine; with INTERACTIVE=1
    accelerate asks."""
    path = accelerate_path(os.environ)
    if os.environ.get("INTERACTIVE", "") not in ("", "0"):
        if not (sys.stdin and sys.stdin.isatty()):
            raise ConfigError(
                "INTERACTIVE=1: there is no terminal to answer accelerate's questions in;"
                " leave it out"
            )
        argv = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "config"]
        with redirect_stdout_to_stderr(enabled=request.json):
            exit_code = subprocess.call([*argv, "--config_file", str(path)])
        return CommandResult({"ok": exit_code == 0, "path": str(path)}, exit_code=exit_code)
    loaded = load_config(request.config, overrides=request.overrides)
    options = dataclasses.replace(request.options, nodes=read_accelerate_nodes(os.environ))
    hardware = options.select_hardware(restrict_to_device(loaded.config, detect_hardware()))
    text = write_accelerate_file(
        path,
        hardware,
        mixed_precision=MIXED_PRECISION.get(
            choose_precision(loaded.config, hardware).compute, "no"
        ),
        gpu_ids=options.gpus,
        overwrite=request.force,
        nodes=options.nodes,
    )
    return CommandResult(
        {"ok": True, "path": str(path), "text": text},
        [f"{path}:", *(f"  {line}" for line in text.splitlines())],
    )
