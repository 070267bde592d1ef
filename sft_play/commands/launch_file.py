"""`launch-file`: a job for a scheduler that trains a run as it is planned, and resumes after a preemption."""

from __future__ import annotations

import hashlib
import os
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sft_play.commands import plan
from sft_play.commands.answer import Answer
from sft_play.commands.request import Request
from sft_play.config.load import LoadedConfig, load_config
from sft_play.errors import ConfigError
from sft_play.facts.gpus.gpu_catalog import find
from sft_play.files import ROOT, atomic
from sft_play.launch.jobs import SCHEDULERS, Job, job_name
from sft_play.log import one_line

HELP = {
    "launch-file": "write a job for FOR=slurm, skypilot or kubeflow that trains CONFIG and resumes after preemption"
}
_SKYPILOTS = {"A100-40GB": "A100"}  # what SkyPilot calls a GPU of the catalogue otherwise


def run(request: Request) -> Answer:
    """Write the file of the planned run; raises DoesNotFit where none would start."""
    if request.for_ not in SCHEDULERS:
        given = f"FOR={one_line(request.for_)} is not" if request.for_ else "make launch-file needs FOR=,"
        raise ConfigError(f"{given} one of {', '.join(SCHEDULERS)}")
    text_of, suffix, submits = SCHEDULERS[request.for_]
    planned = plan.run(request)
    if planned.refused is not None:
        raise planned.refused
    loaded = load_config(request.config, overrides=request.overrides)
    job = _job(request, loaded, planned.data)
    path, text = request.out or Path(f"{job.name}{suffix}"), text_of(job)
    _write(path, text, force=request.force)
    command = shlex.join(["scripts/train_distributed.sh", "--config", str(loaded.path), *job.settings])
    doubt = ", predicted not to fit, and tried" if planned.exit_code else ""
    place = f"{job.nodes} node{'s' * (job.nodes > 1)} with {job.gpus_per_node} x {job.gpu}{doubt}"
    data = {"path": str(path), "for": request.for_, "launch": command, "submit": f"{submits} {shlex.quote(str(path))}",
            "nodes": job.nodes, "gpus_per_node": job.gpus_per_node, "text": text}  # fmt: skip
    lines = [f"Written to: {path}, for {place}", f"On each node: {command}", f"Submit: {data['submit']}"]
    return Answer(data, lines, to_out=False)


def _job(request: Request, loaded: LoadedConfig, planned: dict[str, Any]) -> Job:
    nodes, gpus, deepspeed = planned["hardware"]["nodes"], planned["hardware"]["gpus"], request.options.deepspeed
    if not gpus:
        raise ConfigError("this machine has no GPU: name the machines of the job, such as HARDWARE=2x8xH100")
    file = ["--deepspeed", "--deepspeed-config", str(deepspeed.file)] if deepspeed and deepspeed.file else []
    name = job_name(loaded.config.output.name or loaded.path.stem)
    gpu = next((entry.name for entry in find(gpus[0]["name"], gpus[0]["total_bytes"])), gpus[0]["name"])
    return Job(
        name=name,
        config=loaded.path.absolute(),
        words=[*(file or ["--strategy", planned["layout"]]), *loaded.overrides],
        nodes=nodes,
        gpus_per_node=len(gpus) // nodes,
        gpu=_SKYPILOTS.get(gpu, gpu) if request.for_ == "skypilot" else gpu,
        checkout=ROOT,
        folder=Path.cwd(),
        bucket=f"sft-play-{name}-{hashlib.sha256(f'{loaded.path.absolute()}'.encode()).hexdigest()[:8]}",
        venv=os.environ.get("VENV") and str(Path(os.environ["VENV"]).absolute()),
        local={text: Path(text).expanduser().absolute() for text in _local_paths(loaded, file[-1:])},
    )


def _local_paths(loaded: LoadedConfig, more: list[str]) -> Iterator[str]:
    """What the run reads of this machine, as the config names it."""
    data, model = loaded.config.data, loaded.config.model.name
    named = [data.train_path, data.val_path, data.test_path, data.text_path, model, *more]
    named += [path for source in data.sources for path in (source.path, source.val_path)]
    return (path for path in dict.fromkeys(named) if path and Path(path).expanduser().exists())


def _write(path: Path, text: str, *, force: bool) -> None:
    """Write the file aside and rename it; raises ConfigError where another one is there or the disk refuses."""
    try:
        if path.is_dir() or (path.exists() and not force and path.read_text(encoding="utf-8") != text):
            raise ConfigError(f"{path} exists and says something else; name another OUT=, or FORCE=1 replaces it")
        atomic.write(path, text)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"OUT={one_line(str(path))} cannot be written: {error}") from None
