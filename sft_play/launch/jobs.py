"""Jobs for schedulers: a file for Slurm, SkyPilot or Kubeflow that trains a run, and goes on after a preemption.

Each starts `scripts/train_distributed.sh` once on every node, with a fixed `output.name` and `output.if_exists=resume`:
a job that is started again continues from the run's last checkpoint, and one whose run is finished ends at once. JSON
is YAML, so values are quoted as JSON.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

CPUS_PER_GPU, GRACE_S = 4, 300
"""As in `scripts/train_slurm.sbatch`; GRACE_S: seconds to save, between the signal and the end."""
BUCKET, VOLUME = "/sft-play", "/workspace"
"""Where SkyPilot mounts the bucket for run folders, and where Kubeflow's pods mount the volume and run."""


@dataclass(frozen=True)
class Job:
    """What is to be started, and where. `words` are those of `sft-play train-distributed` after its config."""

    name: str
    """The run's name, in the form that Kubernetes takes (`job_name`)."""
    config: Path
    words: Sequence[str]
    nodes: int
    gpus_per_node: int
    gpu: str
    """The GPU's name in the catalogue (`H100`, `RTX 4090`)."""
    checkout: Path
    folder: Path
    """Where the command was given: relative paths of the config begin here."""
    bucket: str
    """A name for a bucket of this run."""
    venv: str | None = None
    local: Mapping[str, Path] = field(default_factory=dict)
    """Files and folders of this machine that the run reads, by their names in the config."""

    @property
    def settings(self) -> tuple[str, ...]:
        """Words after the config, with what lets a job that is started again resume."""
        return (*self.words, f"output.name={self.name}", "output.if_exists=resume")


def job_name(text: str) -> str:
    """A name that Kubernetes takes, with room for the ends that an operator appends."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:40].rstrip("-") or "run"


def _yaml(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def slurm(job: Job) -> str:
    """A batch script: its lines for sbatch, then `scripts/train_slurm.sbatch`, which requeues the job at its end."""
    q = shlex.quote
    venv = "" if job.venv is None else f" VENV={q(job.venv)}"
    return f"""#!/bin/bash
#SBATCH --job-name={job.name}
#SBATCH --nodes={job.nodes}
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node={job.gpus_per_node}
#SBATCH --cpus-per-task={CPUS_PER_GPU * job.gpus_per_node}
#SBATCH --time=24:00:00
#SBATCH --output={job.name}-%j.out
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=B:USR1@{GRACE_S}
# Add what the cluster wants (--partition, --account). All nodes see the disk of the project, the data and output.dir.
export SFT_PLAY_HOME={q(str(job.checkout))} SLURM_SUBMIT_DIR={q(str(job.folder))}{venv}
exec bash "$SFT_PLAY_HOME/scripts/train_slurm.sbatch" {q(str(job.config))} {shlex.join(job.settings)}
"""


def skypilot(job: Job) -> str:
    """A managed job: on spot machines, its run folder in a bucket that the next machines find."""
    mounts = {f"~/sky_workdir/{name}" if name[0] not in "/~" else name: str(path)
              for name, path in job.local.items()}  # fmt: skip
    config = f"{job.name}.yaml"
    mounts[f"~/sky_workdir/{config}"] = str(job.config)
    run = ["scripts/train_distributed.sh", "--config", config, *job.settings, f"output.dir={BUCKET}"]
    one_line = shlex.join(run).replace("\n", "'$'\\n''")
    local = "".join(f"  {_yaml(name)}: {_yaml(path)}\n" for name, path in mounts.items())
    return f"""name: {job.name}
workdir: {_yaml(str(job.checkout))}
num_nodes: {job.nodes}
resources:
  accelerators: {_yaml(f"{job.gpu.replace(' ', '')}:{job.gpus_per_node}")}
  use_spot: true
file_mounts:
  {BUCKET}: {{name: {job.bucket}, mode: MOUNT_CACHED}}
{local}setup: |
  command -v make >/dev/null || sudo apt-get install -y make
  make setup
run: |
  export NNODES=$SKYPILOT_NUM_NODES NODE_RANK=$SKYPILOT_NODE_RANK MASTER_PORT=29500
  export MASTER_ADDR=$(echo "$SKYPILOT_NODE_IPS" | head -n 1)
  [ "$NNODES" -gt 1 ] || unset NODE_RANK MASTER_ADDR MASTER_PORT
  # a managed job runs once at a time: the lock of a machine that is gone holds nothing
  [ "$SKYPILOT_NODE_RANK" -ne 0 ] || rm -f {BUCKET}/{job.name}/run.lock
  exec {one_line}
"""


def kubeflow(job: Job) -> str:
    """A PyTorchJob, and a ConfigMap with the run YAML."""
    words = ["/opt/sft_play/scripts/train_distributed.sh", "--config", "/job/run.yaml", *job.settings]
    words = [word.replace("$(", "$$(") for word in words]  # Kubernetes would put a variable in its place
    # Alone, codes from 128 restart the pod (130: stopped and saved), and those that a person has to fix end the job. Of
    # several nodes one that lost another ends with 1, and has to start again with it.
    restart = "ExitCode" if job.nodes == 1 else "OnFailure"
    pod = f"""restartPolicy: {restart}
      template:
        spec:
          terminationGracePeriodSeconds: {GRACE_S}
          containers:
            - name: pytorch
              image: sft-play  # that of the Dockerfile, by its name in your registry
              workingDir: {VOLUME}
              command: {_yaml(words)}
              resources: {{limits: {{nvidia.com/gpu: "{job.gpus_per_node}"}}}}
              volumeMounts:
                - {{name: workspace, mountPath: {VOLUME}}}
                - {{name: config, mountPath: /job}}
                - {{name: shm, mountPath: /dev/shm}}
          volumes:
            # a volume claim of yours, which all nodes can write, with the data at the paths that the run YAML names
            - {{name: workspace, persistentVolumeClaim: {{claimName: sft-play}}}}
            - {{name: config, configMap: {{name: {job.name}}}}}
            - {{name: shm, emptyDir: {{medium: Memory}}}}
"""
    replicas = f"    Master:\n      replicas: 1\n      {pod}"
    if job.nodes > 1:
        replicas += f"    Worker:\n      replicas: {job.nodes - 1}\n      {pod}"
    return f"""apiVersion: v1
kind: ConfigMap
metadata: {{name: {job.name}}}
data:
  run.yaml: {_yaml(job.config.read_text(encoding="utf-8"))}
---
apiVersion: kubeflow.org/v1
kind: PyTorchJob
metadata: {{name: {job.name}}}
spec:
  runPolicy: {{backoffLimit: 20, cleanPodPolicy: Running}}
  pytorchReplicaSpecs:
{replicas}"""


SCHEDULERS = {
    "slurm": (slurm, ".sbatch", "sbatch"),
    "skypilot": (skypilot, ".sky.yaml", "sky jobs launch"),
    "kubeflow": (kubeflow, ".kubeflow.yaml", "kubectl apply -f"),
}
"""By their names for FOR=: the text of a job's file, how its name ends, and what submits it."""
