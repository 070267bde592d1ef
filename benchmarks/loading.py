"""What loading takes of each rank's memory, against the plan: real ranks on this machine's CPU.

    python -m benchmarks.loading --out loading.json

Each row is a run of 0.15 billion parameters under FSDP2, ended once it has loaded. A rank's own memory is counted
from before the weights are read until they are divided; pages of files are left out. `files`: bytes of stored weights.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.random_model import write_random_model
from benchmarks.report_header import report_header
from benchmarks.verify.small import make_small_run
from sft_play.runs.folder import write_json

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class LoadingSetting:
    """One run: `mode` of tuning, ranks, dtype of the files, and whether the model has experts."""

    mode: str
    ranks: int = 2
    stored: str = "bfloat16"
    experts: bool = False

    @property
    def name(self) -> str:
        return f"{self.mode} x{self.ranks} {self.stored}{' experts' if self.experts else ''}"


AFTER_LOADING = '''
"""Ends a rank once all have loaded: a step and its checkpoint would take twice as long."""
import json, os, threading, time
from pathlib import Path

def own_bytes():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))

if "RANK" in os.environ:
    from sft_play.training.measure.summary import InitialEvaluation
    from sft_play.training.measure.monitor import MemoryPeaks
    from sft_play.training.distributed import gather_values

    folder, seen, done, start_moment = Path(__file__).parent, [], threading.Event(), MemoryPeaks.start

    def watch():
        while not done.wait(0.005):
            seen.append(own_bytes())

    def start(peaks, moment):
        if moment == "loading":
            seen.append(own_bytes())
            threading.Thread(target=watch, daemon=True).start()
        start_moment(peaks, moment)

    def leave(before):
        done.set()
        memory = before._job.plan.memory
        taken = gather_values(max(*seen, own_bytes()) - seen[0])
        found = {"predicted_device": memory.load_bytes, "device_by_rank": taken}
        aside = folder / f"{os.environ['RANK']}.part"
        aside.write_text(json.dumps(found))
        aside.rename(folder / f"{os.environ['RANK']}.json")
        while len(list(folder.glob("*.json"))) < int(os.environ["WORLD_SIZE"]):  # others may still wait for this one
            time.sleep(0.05)
        os._exit(0)

    MemoryPeaks.start, InitialEvaluation.measure = start, leave
'''
"""sitecustomize.py of the ranks."""

LOADING_SETTINGS = (
    *(LoadingSetting(mode, ranks) for mode in ("full", "lora", "qlora") for ranks in (2, 4)),
    LoadingSetting("lora", stored="float32"),
    LoadingSetting("lora", experts=True),
)


def measure_loading(folder: Path, setting: LoadingSetting) -> dict[str, Any]:
    """What each rank of one run took to load, beside the plan; the run ends then. And the bytes of the stored weights.
    Raises RuntimeError."""
    path = make_small_run(folder)
    config: dict[str, Any] = {
        "model_type": "qwen2", "vocab_size": 16_000, "hidden_size": 1024, "intermediate_size": 4096,
        "num_hidden_layers": 8, "num_attention_heads": 16, "num_key_value_heads": 4, "max_position_embeddings": 256,
        "tie_word_embeddings": False,
    }  # fmt: skip
    if setting.experts:
        config |= {"model_type": "qwen3_moe", "intermediate_size": 1024, "moe_intermediate_size": 512}
        config |= {"num_experts": 8, "num_experts_per_tok": 2, "head_dim": 64}
    shutil.rmtree(folder / "model")
    write_random_model(folder / "model", config, dtype=setting.stored)
    words = [
        "train.max_steps=1", "train.bf16=true", "model.max_seq_len=128", "train.batch_size=1", "train.grad_accum=1",
        f"train.effective_batch_size={setting.ranks}", "data.val_fraction=0.0", "eval.steps=0", "plan.trace=false",
        "eval.before_training=false", "eval.generate_rows=0", "train.report_to=[]", f"output.dir={folder}",
        "output.name=run", f"tuning.mode={setting.mode}",
    ]  # fmt: skip
    options = ["--strategy", "fsdp", "--nproc", str(setting.ranks)]
    command = [sys.executable, "-m", "sft_play", "train-distributed", *options, "--config", str(path), *words]
    (folder / "ranks").mkdir()
    (folder / "ranks" / "sitecustomize.py").write_text(AFTER_LOADING, encoding="utf-8")
    python_path = os.pathsep.join([str(folder / "ranks"), str(ROOT)])
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": python_path}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{setting.name}: exit code {done.returncode}\n{(done.stdout + done.stderr)[-2000:]}")
    files = sum(file.stat().st_size for file in (folder / "model").glob("*.safetensors"))
    return {**json.loads((folder / "ranks" / "0.json").read_text(encoding="utf-8")), "files": files}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    out = parser.parse_args().out
    runs: dict[str, Any] = {}
    for setting in LOADING_SETTINGS:
        with tempfile.TemporaryDirectory() as folder:
            runs[setting.name] = result = measure_loading(Path(folder), setting)
        shown = ", ".join(f"{size / 2**20:.0f}" for size in result["device_by_rank"])
        print(f"{setting.name:28} {shown} MiB, predicted {result['predicted_device'] / 2**20:.0f} MiB", flush=True)
        write_json(out, {**report_header(), "runs": runs})


if __name__ == "__main__":
    main()
