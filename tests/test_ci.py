"""What the public workflow, the hooks, the Dockerfile and the devcontainer name is there, as far as it can be checked
without a network; the image builds by the lock, and nothing of a person's checkout gets in."""

import fnmatch
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib

import yaml

from tests.conftest import ROOT, clean_environment

PLANNER_NEEDS_NO = ("torch", "transformers", "trl", "peft", "accelerate", "datasets", "deepspeed", "bitsandbytes")
JOBS = yaml.safe_load((ROOT / ".github/workflows/tests.yml").read_text(encoding="utf-8"))["jobs"]


def commands(*names: str) -> list[str]:
    """Every command of these jobs, or of all."""
    return [step["run"] for name in names or JOBS for step in JOBS[name]["steps"] if "run" in step]


def test_the_workflow_names_targets_and_files_that_are_there_and_every_supported_python():
    text = "\n".join(commands())
    targets = set(re.findall(r"make ([a-z-]+)", text))
    assert targets == {"setup", "lint", "test", "coverage"}
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert all(f"\n{target}:" in makefile for target in targets)
    files = re.findall(r"(?<!\^)(?:tests|configs)/\S+", text)
    assert (len(files), [file for file in files if not (ROOT / file).is_file()]) == (9, [])
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    low, high = (int(number) for number in re.findall(r"3\.(\d+)", project["requires-python"]))
    assert JOBS["tests"]["strategy"]["matrix"]["python"] == [f"3.{minor}" for minor in range(low, high)]


def test_packages_and_files_are_audited_on_every_push_and_every_night():
    assert "if" not in JOBS["audit"]
    packages, secrets = commands("audit")
    locks = re.findall(r"-r (\S+)", packages)
    assert locks == ["requirements.lock", "requirements-unsloth.lock"]
    assert all((ROOT / lock).is_file() for lock in locks)
    assert "pip-audit==" in packages
    assert "git ls-files" in secrets
    assert "detect-secrets==" in secrets
    [left_out] = re.findall(r"--exclude-files '\^(\S+)\$'", secrets)
    assert (ROOT / left_out.replace("[.]", ".")).is_file()


def test_the_planner_job_installs_pinned_packages_and_no_library_of_models():
    script = next(command for command in commands() if "planner.txt" in command)
    names = re.search(r"names='([^']+)'", script)
    assert names is not None
    wanted = names[1].split("|")
    lock = (ROOT / "requirements.lock").read_text(encoding="utf-8")
    assert all(re.search(rf"^{re.escape(name)}==", lock, re.MULTILINE) for name in wanted)
    assert not set(wanted) & set(PLANNER_NEEDS_NO)


def test_the_hooks_run_what_lint_runs():
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))["repos"][0]["hooks"]
    said = " ".join(hook["entry"] for hook in hooks)
    assert all(tool in said for tool in ("ruff check", "ruff format", "mypy"))
    named = re.findall(r"(tests/\S+) -k (\S+)", said)
    assert [(path, word) for path, word in named if f"_{word}" not in (ROOT / path).read_text(encoding="utf-8")] == []
    assert named


def test_a_tag_releases_what_was_built_and_tested_without_a_token():
    release, image = (
        yaml.safe_load((ROOT / ".github/workflows" / f"{name}.yml").read_text(encoding="utf-8"))
        for name in ("release", "image")
    )
    assert release[True]["push"] == image[True]["push"] == {"tags": ["v*"]}  # YAML reads `on` as true
    publish = release["jobs"]["publish"]
    assert (set(publish["needs"]), publish["permissions"]) == ({"build", "test"}, {"id-token": "write"})
    assert "secrets." not in yaml.dump(release)
    (tested,) = (step["run"] for step in release["jobs"]["test"]["steps"] if "TESTS=" in step.get("run", ""))
    assert (ROOT / shlex.split(shlex.split(tested)[2].partition("=")[2])[-1]).is_file()
    (tag,) = (step["run"] for step in release["jobs"]["build"]["steps"] if "GITHUB_REF_NAME" in step.get("run", ""))
    said = subprocess.run(
        ["bash", "-c", tag.replace("python", sys.executable)], cwd=ROOT, env={**os.environ, "GITHUB_REF_NAME": "v0.0"}
    )
    assert said.returncode == 1
    for job in [*release["jobs"].values(), *image["jobs"].values()]:
        assert all(re.fullmatch(r"[\w/-]+@(v\d+|release/v1)", step["uses"]) for step in job["steps"] if "uses" in step)
    builds = image["jobs"]["image"]["strategy"]["matrix"]["include"]
    named = re.findall(r"CUDA=([\d.]+)(?: --build-arg |\n[\s\S]*?)(?:ARG )?TORCH=(\w+)", DOCKERFILE)
    assert {(one["cuda"], one["torch"]) for one in builds} == set(named)


DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8")
INSTRUCTIONS = re.sub(r"^#.*\n", "", DOCKERFILE, flags=re.MULTILINE).replace("\\\n", " ")
STEPS = [(word, rest.strip()) for word, rest in re.findall(r"^([A-Z]+)\s+(.*)$", INSTRUCTIONS, re.MULTILINE)]
IGNORED = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and not line.startswith("#")]


def ignored(path: str) -> bool:
    """Whether Docker leaves a path out: a pattern matches it or a folder above it; `**/` is any depth."""
    parts = path.split("/")
    return any(
        fnmatch.fnmatchcase("/".join(parts[: count + 1]), pattern)
        or (pattern.startswith("**/") and fnmatch.fnmatchcase(parts[count], pattern[3:]))
        for pattern in IGNORED
        for count in range(len(parts))
    )


def test_the_instructions_are_dockers_in_an_order_that_builds():
    words = [word for word, _ in STEPS]
    assert set(words) <= {"ARG", "FROM", "RUN", "WORKDIR", "COPY", "ENV", "CMD"}
    assert words[:2] == ["ARG", "FROM"]  # only an ARG may come before FROM
    assert words.index("COPY") < max(place for place, word in enumerate(words) if word == "RUN")
    for word, rest in STEPS:
        if word == "RUN":  # the shell reads each
            subprocess.run(["bash", "-n", "-c", rest], check=True)
        if word == "CMD":
            assert json.loads(rest) == ["sft-play", "--help"]
    path, cache = shlex.split(dict(STEPS)["ENV"])
    assert path == "PATH=/opt/sft_play/.venv/bin:${PATH}"
    assert cache.startswith("TRITON_CACHE_DIR=/root/.cache/")  # the volume that keeps what is compiled


def test_cuda_and_torch_are_of_one_version_and_the_rest_is_what_a_run_needs():
    arguments = dict(rest.split("=") for word, rest in STEPS if word == "ARG")
    major, minor, _ = arguments["CUDA"].split(".")
    assert arguments["TORCH"] == f"cu{major}{minor}"
    other = re.search(r"--build-arg CUDA=(\d+)\.(\d+)\.\d+ --build-arg TORCH=cu(\d+)", DOCKERFILE)
    assert other is not None
    assert other[3] == other[1] + other[2]
    assert dict(STEPS)["FROM"].startswith("nvidia/cuda:${CUDA}-runtime-")
    installed = next(rest for _, rest in STEPS if "apt-get install" in rest).split()
    assert {"gcc", "g++", "make", "git", "python3", "python3-venv", "python3-dev"} <= set(installed)


def test_the_image_has_what_setup_and_make_read_and_nothing_else_of_a_checkout(tmp_path):
    for path in (".git/config", ".venv/bin/python", ".venv-unsloth/x", "data/my.jsonl", "outputs/run/adapter/x", ".env",
                 "sft_play/planner/__pycache__/x.pyc", "build/lib/x", ".coverage.1"):  # fmt: skip
        assert ignored(path), path
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
    for path in listed.stdout.splitlines():
        assert not ignored(path), path  # sft_play/data and benchmarks/data.py are code
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / path, tmp_path / path)
    run = next(rest for word, rest in STEPS if word == "RUN" and "make setup" in rest)
    words = shlex.split(run.replace("${TORCH}", "cu130"))
    words = ["make", "-n", *words[words.index("make") + 1 :]]
    dry = subprocess.run(words, cwd=tmp_path, env=clean_environment(), capture_output=True, text=True)
    assert dry.returncode == 0, dry.stderr
    assert "scripts/setup_env.py" in dry.stdout
    assert (tmp_path / "requirements.lock").is_file()


def test_jobs_and_devcontainer_find_the_project_where_the_image_has_it():
    place = next(rest for word, rest in STEPS if word == "WORKDIR")
    job = (ROOT / "sft_play" / "commands" / "jobs" / "kubeflow.yaml.jinja").read_text()
    assert f'"{place}/scripts/train_distributed.sh"' in job
    folder = ROOT / ".devcontainer"
    container = json.loads((folder / "devcontainer.json").read_text())
    assert (folder / container["build"]["dockerfile"]).resolve() == ROOT / "Dockerfile"
    assert (folder / container["build"]["context"]).resolve() == ROOT
    assert container["containerEnv"]["VENV"] == f"{place}/.venv"
    assert container["customizations"]["vscode"]["settings"]["python.defaultInterpreterPath"].startswith(place)
    for schema in container["customizations"]["vscode"]["settings"]["yaml.schemas"]:
        assert (ROOT / schema).is_file()
    page = (ROOT / "docs" / "gpus.md").read_text(encoding="utf-8")
    for line in ("docker build -t sft-play .", "docker run --rm --gpus all --ipc=host"):
        assert (line in DOCKERFILE, line in page) == (True, True)
