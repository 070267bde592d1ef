"""What the public workflow and the hooks name is there: targets, files, versions of Python, pinned packages."""

import re
import tomllib

import yaml

from tests.conftest import ROOT

PLANNER_NEEDS_NO = ("torch", "transformers", "trl", "peft", "accelerate", "datasets", "deepspeed", "bitsandbytes")


JOBS = yaml.safe_load((ROOT / ".github/workflows/tests.yml").read_text(encoding="utf-8"))["jobs"]


def commands(*names: str) -> list[str]:
    """Every command of these jobs, or of all."""
    return [step["run"] for name in names or JOBS for step in JOBS[name]["steps"] if "run" in step]


def test_the_workflow_names_targets_and_files_that_are_there():
    text = "\n".join(commands())
    targets = set(re.findall(r"make ([a-z-]+)", text))
    assert targets == {"setup", "lint", "test", "coverage"}
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert all(f"\n{target}:" in makefile for target in targets)
    files = re.findall(r"(?<!\^)(?:tests|configs)/\S+", text)
    assert len(files) == 9
    assert [file for file in files if not (ROOT / file).is_file()] == []


def test_the_workflow_runs_every_python_that_the_package_supports():
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
