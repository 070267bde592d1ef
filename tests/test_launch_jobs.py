"""make launch-file: each scheduler's file says what was planned, holds any value, and is started again where it was."""

import dataclasses
import inspect
import json
import os
import random
import re
import runpy
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
import yaml

from sft_play.cli import main
from sft_play.commands.launch_file import FLAVORS, SCHEDULERS, SchedulerJob, job_name, render_job
from sft_play.machine.gpu_catalog import find_catalog_entries
from tests.conftest import ROOT
from tests.schemas import refuse_invalid
from tests.test_nodes import FAKE_LAUNCH, FAKE_SCONTROL, FAKE_SRUN

HOSTILE = ["a b", "it's", 'say "hi"', "$HOME", "$(touch MARK)", "`touch MARK`", "a;touch MARK", "#x", "50%",
           "größe 学 🙂", "back\\slash", "{a: b}", "two\nlines", "*", "~", "- x"]  # fmt: skip
VALIDATORS = os.environ.get("SFT_PLAY_VALIDATORS")
"""A Python that has skypilot and kubeflow-training."""


def a_job(folder: Path, *words: str, nodes: int = 2) -> SchedulerJob:
    (folder / "my run.yaml").write_text("model: {name: größe}\n", encoding="utf-8")
    places = {"config": folder / "my run.yaml", "checkout": folder / "home", "folder": folder}
    places |= {"bucket": "sft-play-my-run-1", "local": {"rows.jsonl": folder / "rows.jsonl"}}
    return SchedulerJob(name="my-run", words=words, nodes=nodes, gpus_per_node=4, gpu="RTX 4090", **places)


@pytest.fixture
def cluster(tmp_path: Path) -> Path:
    """A folder with a project whose launch prints its words, and programs that stand for Slurm's."""
    (tmp_path / "home" / "scripts").mkdir(parents=True)
    shutil.copy(ROOT / "scripts" / "train_slurm.sbatch", tmp_path / "home" / "scripts")
    launch = ("home/scripts/train_distributed.sh", FAKE_LAUNCH.replace("word %s", "word %q"))
    for name, text in (("bin/srun", FAKE_SRUN), ("bin/scontrol", FAKE_SCONTROL), launch):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    return tmp_path


def started(cluster: Path, text: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """A batch script as Slurm starts it, in a folder of Slurm's own."""
    (cluster / "slurm_script").write_text(text, encoding="utf-8")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "SFT_PLAY_HOME"))}
    kept |= {"PATH": f"{cluster}/bin:{os.environ['PATH']}", "FAKE": str(cluster), "SLURM_JOB_ID": "4711",
             "FAKE_COMMAND": "/elsewhere/x", "SLURM_JOB_NODELIST": "node[7,9]", "SLURM_SUBMIT_DIR": "/"}  # fmt: skip
    return subprocess.run(["bash", str(cluster / "slurm_script")], env={**kept, **environ}, text=True, timeout=60,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT)  # fmt: skip


def words_of(printed: str) -> list[str]:
    """The words that the fake launch was given, which it prints as bash quotes them."""
    quoted = [line.removeprefix("word ") for line in printed.splitlines() if line.startswith("word ")]
    shown = subprocess.run(["bash", "-c", "printf '%s\\0' " + " ".join(quoted)], capture_output=True, check=True).stdout
    return shown.decode().split("\0")[:-1]


def wanted(config: str, job: SchedulerJob, *more: str) -> list[str]:
    return ["--config", config, *job.words, "output.name=my-run", "output.if_exists=resume", *more]


def test_slurm_runs_the_command_on_every_node_with_any_value(cluster):
    job = a_job(cluster, "--strategy", "fsdp", *(f"data.columns.text={text}" for text in HOSTILE))
    text = render_job("slurm", job)
    asked = dict(re.findall(r"^#SBATCH --([a-z-]+)(?:=(.*))?$", text, re.MULTILINE))
    wished = {"nodes": "2", "gpus-per-node": "4", "ntasks-per-node": "1", "signal": "B:USR1@300", "requeue": ""}
    assert {name: asked[name] for name in wished} == wished
    assert text.index("#SBATCH") == len("#!/bin/bash\n")  # sbatch reads no line after the first command
    ended = started(cluster, text, SLURM_JOB_NUM_NODES="2")
    assert ended.returncode == 0, ended.stdout
    for node in (0, 1):
        said = (cluster / f"task-{node}").read_text(encoding="utf-8")
        assert f"NODE_RANK={node}\n" in said
        given = words_of(said)
        assert given[:2] == ["--config", str(job.config)]
        # the batch script's own name and if_exists come before ours, which win
        assert given[4:] == wanted(str(job.config), job)[2:]
    assert not (cluster / "MARK").exists()


@pytest.mark.parametrize("nodes", [1, 2])
def test_skypilot_runs_the_command_with_any_value_on_what_it_uploads(nodes, cluster, monkeypatch):
    job = a_job(cluster, "--strategy", "fsdp", *(f"data.columns.text={text}" for text in HOSTILE), nodes=nodes)
    task = yaml.safe_load(render_job("skypilot", job))
    assert (task["num_nodes"], task["resources"]) == (nodes, {"accelerators": "RTX4090:4", "use_spot": True})
    assert task["workdir"] == str(job.checkout)
    assert task["file_mounts"] == {
        "/sft-play": {"name": "sft-play-my-run-1", "mode": "MOUNT_CACHED"},
        "~/sky_workdir/rows.jsonl": str(cluster / "rows.jsonl"), "~/sky_workdir/my-run.yaml": str(job.config),
    }  # fmt: skip
    for rank in range(nodes):
        told = {"SKYPILOT_NUM_NODES": str(nodes), "SKYPILOT_NODE_RANK": str(rank)}
        told["SKYPILOT_NODE_IPS"] = "10.0.0.1\n10.0.0.2"
        options = {"cwd": job.checkout, "env": {**os.environ, **told}, "text": True, "capture_output": True}
        ended = subprocess.run(["bash", "-c", task["run"]], timeout=60, check=True, **options)
        assert words_of(ended.stdout) == wanted("my-run.yaml", job, "output.dir=/sft-play")
        place = {"MASTER_ADDR=10.0.0.1", "MASTER_PORT=29500", f"NODE_RANK={rank}"} if nodes > 1 else set()
        assert set(ended.stdout.splitlines()) >= {f"NNODES={nodes}", *place}
        assert ("NODE_RANK" in ended.stdout) is (nodes > 1)
    assert not (job.checkout / "MARK").exists()


@pytest.mark.parametrize("nodes", [1, 2, 5])
def test_kubeflow_starts_one_pod_a_node_with_any_value(nodes, cluster):
    job = a_job(cluster, "--strategy", "fsdp", *(f"data.columns.text={text}" for text in HOSTILE), nodes=nodes)
    config, task = yaml.safe_load_all(render_job("kubeflow", job))
    assert config["data"]["run.yaml"] == job.config.read_text(encoding="utf-8")
    replicas = task["spec"]["pytorchReplicaSpecs"]
    assert sum(one["replicas"] for one in replicas.values()) == nodes
    assert replicas["Master"]["replicas"] == 1
    for one in replicas.values():
        # alone, 130 (saved) restarts the pod and 2 (to fix) ends the job; of several, all start again together
        assert one["restartPolicy"] == ("ExitCode" if nodes == 1 else "OnFailure")
        pod = one["template"]["spec"]
        container = pod["containers"][0]
        given = [word.replace("$$(", "$(") for word in container["command"]]  # as Kubernetes reads them
        assert given[1:] == wanted("/job/run.yaml", job)
        assert not any(re.search(r"(?<!\$)\$\(", word) for word in container["command"])
        assert container["resources"]["limits"] == {"nvidia.com/gpu": "4"}
        assert {mount["name"] for mount in container["volumeMounts"]} == {one["name"] for one in pod["volumes"]}


TRAIN = """#!/bin/bash
printf 'word %q\\n' "$@"
printf 'rows '; cat rows.jsonl; cat ../home.jsonl
folder=runs/my-run/checkpoints
ls $folder 2>/dev/null | sed 's/^/resumed /'
rm -rf $folder
mkdir -p $folder/checkpoint-$STEP
echo weights > $folder/checkpoint-$STEP/weights
echo whole > $folder/checkpoint-$STEP/complete.json
touch runs/my-run/run.lock
[ -z "$WAITS" ] || { trap 'exit 130' TERM; kill -TERM $PPID; for i in $(seq 300); do sleep 0.1; done; }
exit $CODE
"""


def test_hfjobs_starts_a_job_with_any_value_that_resumes_from_its_bucket(cluster, monkeypatch):
    """The written file runs with fakes of the real signatures; its job then runs, with a folder as the bucket."""
    for name in ("rows.jsonl", "home.jsonl"):
        (cluster / name).write_text(name + "\n")
    job = a_job(cluster, "--strategy", "fsdp", *(f"data.columns.text={text}" for text in HOSTILE), nodes=1)
    local = {"rows.jsonl": cluster / "rows.jsonl", "../home.jsonl": cluster / "home.jsonl"}
    hosted = {"local": local, "flavor": "l4x4", "package": "./code[cuda]", "code": ROOT}
    job = dataclasses.replace(job, **hosted)
    calls: dict[str, Any] = {}

    def stand_in(name: str, answer: Any) -> None:
        signature = inspect.signature(getattr(huggingface_hub, name))

        def called(*words: Any, **options: Any) -> Any:
            calls[name] = signature.bind(*words, **options).arguments
            return answer

        monkeypatch.setattr(huggingface_hub, name, called)

    stand_in("create_bucket", huggingface_hub.BucketUrl("https://huggingface.co/buckets/me/sft-play-my-run-1"))
    stand_in("list_jobs", [])
    stand_in("batch_bucket_files", None)
    stand_in("get_token", "hf_token")
    stand_in("run_job", SimpleNamespace(id="7", url="https://x/7"))
    (cluster / "job.py").write_text(render_job("hfjobs", job), encoding="utf-8")
    runpy.run_path(str(cluster / "job.py"))
    asked = calls["run_job"]
    assert (asked["flavor"], asked["secrets"], asked["attempts"]) == ("l4x4", {"HF_TOKEN": "hf_token"}, 3)
    (volume,) = asked["volumes"]
    assert (volume.type, volume.source, volume.mount_path) == ("bucket", "me/sft-play-my-run-1", "/bucket")
    assert calls["create_bucket"]["private"]
    uploaded = {target: Path(source) for source, target in calls["batch_bucket_files"]["add"]}
    assert {"code/pyproject.toml", "code/README.md", "code/sft_play/variables.json", "run.yaml"} < set(uploaded)
    assert all(path.is_file() and "__pycache__" not in path.parts for path in uploaded.values())
    bucket, programs = cluster / "bucket", {"pip": "#!/bin/sh\nexit 0\n", "sft-play": TRAIN}
    for target, source in uploaded.items():
        (bucket / target).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source, bucket / target)
    for name, text in programs.items():
        (cluster / "bin" / name).write_text(text)
        (cluster / "bin" / name).chmod(0o755)
    words = [word.replace("/bucket", str(bucket)) for word in asked["command"]]
    for step, waits, code, resumed in ((1, "1", 130, []), (2, "", 0, ["checkpoint-1"]), (3, "", 2, ["checkpoint-2"])):
        (cluster / f"machine-{step}" / "work").mkdir(parents=True)
        environ = {"PATH": f"{cluster}/bin:{os.environ['PATH']}", "STEP": str(step), "CODE": str(code), "WAITS": waits}
        options = {"cwd": cluster / f"machine-{step}" / "work", "env": {**os.environ, **environ}, "text": True}
        ended = subprocess.run(words, timeout=60, stdout=subprocess.PIPE, **options)
        assert ended.returncode == code, ended.stdout
        assert words_of(ended.stdout) == ["train-distributed", *wanted(f"{bucket}/run.yaml", job, "output.dir=runs")]
        assert "rows rows.jsonl\nhome.jsonl\n" in ended.stdout
        assert re.findall(r"^resumed (.*)$", ended.stdout, re.MULTILINE) == resumed
        there = {str(path.relative_to(bucket / "run")) for path in (bucket / "run").rglob("*") if path.is_file()}
        assert there == {f"my-run/checkpoints/checkpoint-{step}/{name}" for name in ("weights", "complete.json")}
    stand_in("list_jobs", [SimpleNamespace(id="7", url="https://x/7")])
    with pytest.raises(SystemExit, match="this run is being trained"):
        runpy.run_path(str(cluster / "job.py"))


def test_every_machine_of_hugging_face_with_gpus_can_be_named():
    named = {flavor for counts in FLAVORS.values() for flavor in counts.values()}
    hosted = {one.value for one in huggingface_hub.JobHardware if not one.value.startswith("cpu")}
    assert hosted - named == {"t4-small", "a10g-small"}  # the same GPUs with less RAM
    assert named < hosted
    assert [find_catalog_entries(gpu)[0].name for gpu in FLAVORS] == list(FLAVORS)


VALIDATE = {
    "skypilot": "import sky, sys; task = sky.Task.from_yaml(sys.argv[1]); print(task.name, task.num_nodes)",
    "kubeflow": """
import json, sys, types, yaml
from kubeflow.training.api_client import ApiClient
job = list(yaml.safe_load_all(open(sys.argv[1])))[1]
client = ApiClient()
read = client.deserialize(types.SimpleNamespace(data=json.dumps(job)), "KubeflowOrgV1PyTorchJob")
assert client.sanitize_for_serialization(read) == job, "a field that the API does not know"
print(job["metadata"]["name"], sum(one["replicas"] for one in job["spec"]["pytorchReplicaSpecs"].values()))
""",
}


@pytest.mark.skipif(not VALIDATORS, reason="SFT_PLAY_VALIDATORS= names no Python with skypilot and kubeflow-training")
@pytest.mark.parametrize("nodes", [1, 3])
@pytest.mark.parametrize("scheduler", VALIDATE)
def test_the_tools_own_validators_take_the_file(scheduler, nodes, tmp_path):
    (tmp_path / "home").mkdir()
    (tmp_path / "rows.jsonl").write_text("{}\n")
    job = a_job(tmp_path, "--strategy", "fsdp", "train.epochs=1", nodes=nodes)
    job = dataclasses.replace(job, gpu="H100")
    file = tmp_path / "job.yaml"
    file.write_text(render_job(scheduler, job), encoding="utf-8")
    words = [str(VALIDATORS), "-c", VALIDATE[scheduler], str(file)]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=120, env={**os.environ, "PYTHONPATH": ""})
    assert ended.stdout.split() == ["my-run", str(nodes)], ended.stderr


def test_a_name_is_one_that_kubernetes_takes():
    letters = "aB3-_. ö/日"
    for seed in range(300):
        text = "".join(random.Random(seed).choices(letters, k=seed % 60))
        assert re.fullmatch(r"(?=.{1,40}$)[a-z0-9]([a-z0-9-]*[a-z0-9])?", job_name(text))


# --- the command ------------------------------------------------------------------------------------------------------
@pytest.fixture
def run_yaml(tmp_path, tiny_llama, sums, monkeypatch) -> str:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("VENV", raising=False)
    (tmp_path / "My run.yaml").write_text(f"model: {{name: {tiny_llama}}}\ndata: {{train_path: {sums}}}\n")
    return "My run.yaml"


def answer(capfd: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict[str, Any]]:
    capfd.readouterr()
    code = main(["launch-file", *words, "--json"])
    found = json.loads(capfd.readouterr().out)
    refuse_invalid("launch-file", found)
    return code, found


SHAPES = {"2x8xH100": (2, 8), "1xRTX4090": (1, 1), "4xL40S": (1, 4), "4xL4": (1, 4)}
MACHINES = [(one, *shape) for one, shape in zip(SCHEDULERS, SHAPES.items(), strict=True)]


@pytest.mark.parametrize(("scheduler", "hardware", "shape"), MACHINES)
def test_the_file_asks_for_the_machines_and_layout_of_the_plan(scheduler, hardware, shape, run_yaml, tmp_path, capfd):
    main(["plan", "--config", run_yaml, "--hardware", hardware, "--json", "--out", "plan.json"])
    planned = json.loads((tmp_path / "plan.json").read_text())
    words = ("--config", run_yaml, "--for", scheduler, "--hardware", hardware, "train.epochs=2")
    code, found = answer(capfd, *words)
    assert (code, (found["nodes"], found["gpus_per_node"])) == (0, shape)
    launched = f"--strategy {planned['layout']} train.epochs=2 output.name=my-run output.if_exists=resume"
    assert launched in found["launch"]
    path = Path(found["path"])
    assert path.read_text(encoding="utf-8") == found["text"]
    assert answer(capfd, *words)[0] == 0  # the same again
    path.write_text("mine")
    code, refused = answer(capfd, *words)
    assert (code, refused["kind"], path.read_text()) == (2, "fix", "mine")
    assert answer(capfd, *words, "--force")[0] == 0


def test_what_no_job_can_be_written_for_is_one_message(run_yaml, tmp_path, capfd):
    large = str(ROOT / "configs" / "run_llama70b.yaml")
    for words, kind, said in (
        (("--hardware", "2xH100"), "fix", "make launch-file needs FOR=, one of slurm, skypilot, kubeflow, hfjobs"),
        (("--hardware", "2xH100", "--for", "pbs"), "fix", "FOR=pbs is not one of slurm"),
        (("--for", "slurm", "--hardware", "cpu"), "fix", "such as HARDWARE=2x8xH100"),
        (("--for", "hfjobs", "--hardware", "1xH100"), "fix", "no machine with 1 x H100; HARDWARE= can name 1xT4"),
        (("--for", "hfjobs", "--hardware", "2x4xL4"), "fix", "no machine with 8 x L4 on 2 nodes"),
        (("--for", "slurm", "--hardware", "1xH100", "--out", str(tmp_path)), "fix", "exists"),
        (("--config", large, "--for", "slurm", "--hardware", "1xRTX3060"), "does_not_fit", "fit"),
    ):
        config = () if "--config" in words else ("--config", run_yaml)
        code, found = answer(capfd, *config, *words)
        assert (code, found["kind"]) == ({"fix": 2, "does_not_fit": 3}[kind], kind), found
        assert said in found["error"]
    assert not list(tmp_path.glob("*.sbatch"))
