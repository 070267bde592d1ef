"""When .venv is built, repaired, shared or left alone, what the lock holds, and which build of torch a machine gets.

All builds are faked; drivers and GPUs are told, none is needed."""

import os
import re
import subprocess
import sys
import threading
import time
import tomllib
import zipfile
from collections import namedtuple
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import Mock

import pytest
from packaging.requirements import Requirement

import installer
import lock
import setup_env
import torch_build
from setup_env import STAMP, Python, SetupError
from sft_play.documents import DOCUMENT_PACKAGES
from torch_build import BUILDS, BuildError, Machine

ROOT = Path(__file__).resolve().parent.parent
HERE = sys.version_info[:2]
Usage = namedtuple("Usage", "total used free")
BASE = Path(sys.executable).resolve()  # the interpreter itself, not the environment that runs these tests


class FakeBuild:
    """Stands in for venv and pip: makes a bin/python, and fails at a step if told to."""

    def __init__(self, fail_at=None, error=None):
        self.commands, self.fail_at, self.error = [], fail_at, error

    def __call__(self, command, root):
        self.commands.append(list(command))
        if "venv" in command:
            python = Path(command[-1]) / "bin" / "python"
            python.parent.mkdir()
            python.symlink_to(BASE)
        else:
            (root / ".venv" / f"installed-{len(self.commands)}").touch()
        if len(self.commands) == self.fail_at:
            if self.error:
                raise self.error
            return 1
        return 0

    @property
    def builds(self):
        """How many builds were begun."""
        return sum("venv" in command for command in self.commands)


def built(root, **environ):
    """The build that a checkout needs."""
    fake = FakeBuild()
    setup_env.ensure(root, environ, fake)
    return fake


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A checkout with pins, and a Python on PATH to build with."""
    root = tmp_path / "a checkout"
    root.mkdir()
    (root / "requirements.lock").write_text("# pins\nalpha==1.0\nbeta==2.0\ntorch==2.0\n", encoding="utf-8")
    (root / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text("utf-8"), encoding="utf-8")
    for name in ("VENV", "PYTHON", "TORCH"):  # `make test VENV=...` hands them to the tests as well
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "defpath", "/nowhere")  # where a uv is looked for without PATH
    monkeypatch.setattr(installer, "pip_settings", lambda python, environ: "")
    monkeypatch.setattr(setup_env.shutil, "disk_usage", lambda path: Usage(2**40, 0, 2**40))
    monkeypatch.setattr(torch_build, "this_machine", lambda: Machine("linux", "x86_64", "580.65.06"))
    monkeypatch.setattr(setup_env, "search_python", lambda: Python(str(BASE), HERE, True))
    return root


@pytest.fixture
def ready(checkout):
    setup_env.ensure(checkout, {}, FakeBuild())
    return checkout


@pytest.fixture
def refusal(checkout, monkeypatch, capfd):
    """Builds by a stand-in in a process of setup's that has to be refused; returns its message."""

    def run(build, root=checkout, code=2):
        monkeypatch.setattr(setup_env.ensure, "__defaults__", (build,))
        capfd.readouterr()
        assert setup_env.main(root) == code
        message = capfd.readouterr().err
        assert "Traceback" not in message
        return message

    return run


def edit(path, old, new):
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new), encoding="utf-8")


def program(path, script):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
    path.chmod(0o755)
    return str(path)


def fake_python(path, answer):
    """A program that answers the probe as a Python would."""
    return program(path, f"echo '{answer}'")


def never(command, root):
    raise AssertionError(f"unexpected build step {command}")


def test_a_first_build_makes_the_environment_then_setuptools_then_the_project(checkout, capfd):
    fake = built(checkout)
    create, tool, project = fake.commands
    assert (create[0], create[-3:]) == (str(BASE), ["-m", "venv", str(checkout / ".venv")])
    pip = [str(checkout / ".venv/bin/python"), "-m", "pip", "install", "--constraint", "requirements.lock"]
    assert tool[:6] == project[:6] == pip
    assert tool[-1] == "setuptools"
    assert not [word for command in fake.commands for word in command if "index" in word]
    assert project[-3:] == ["--no-build-isolation", "--editable", ".[dev,cuda]"]  # as a driver was found
    output = capfd.readouterr()
    assert (output.out, output.err.count("[setup]")) == ("", 6)  # stdout belongs to the program
    log = f"GiB on the disk; pip installs, its log is {checkout / '.venv.log'}"
    parts = ("torch for CUDA 13.0: NVIDIA's driver 580.65.06 runs it", log, ".venv is ready")
    assert all(part in output.err for part in parts), output.err


@pytest.mark.parametrize(("name", "old", "new", "rebuilds"), [
    ("requirements.lock", "alpha==1.0", "alpha==1.1", True), ("pyproject.toml", '"rich>=13"', '"rich>=14"', True),
    ("pyproject.toml", '"mypy>=1.15"', '"mypy>=1.16"', True),
    ("pyproject.toml", "sft_play.entry:main", "sft_play.entry:other", True),
    ("pyproject.toml", "setuptools>=77", "setuptools>=78", True),
    ("requirements.lock", "# pins", "# other words\n", False),
    ("pyproject.toml", 'version = "0.1.0"', 'version = "0.2.0"', False),
])  # fmt: skip
def test_pins_that_change_rebuild_from_nothing_and_nothing_else_does(name, old, new, rebuilds, ready, capfd):
    (ready / ".venv" / "left over").mkdir()
    capfd.readouterr()
    setup_env.ensure(ready, {}, never)
    assert capfd.readouterr() == ("", "")
    edit(ready / name, old, new)
    assert (built(ready).builds == 1) is rebuilds
    assert (ready / ".venv" / "left over").exists() is not rebuilds
    setup_env.ensure(ready, {}, never)


@pytest.mark.parametrize("damage", [
    lambda venv: (venv / "bin" / "python").rename(venv / "bin" / "gone"),
    lambda venv: setup_env.empty(venv) or (venv / STAMP).unlink(),  # as an interrupted first step leaves it
    lambda venv: (venv / STAMP).write_text("", encoding="utf-8"),
    lambda venv: (venv / STAMP).write_text("ready 0000 python 3.11\n", encoding="utf-8"),
    lambda venv: venv.parent.rename(venv.parent.with_name("moved")),  # its scripts name the old place
])  # fmt: skip
def test_an_environment_that_is_damaged_or_moved_is_built_anew(damage, ready):
    damage(ready / ".venv")
    assert built(ready if ready.exists() else ready.with_name("moved")).builds == 1


@pytest.mark.parametrize("step", [1, 3])
@pytest.mark.parametrize("error", [None, KeyboardInterrupt()], ids=["failed", "interrupted"])
def test_a_build_that_did_not_end_is_one_message_and_is_repaired(step, error, checkout, refusal):
    message = refusal(FakeBuild(fail_at=step, error=error), code=130 if error else 2)
    assert ("interrupted; the next make repairs .venv" if error else "run make again: it repairs .venv") in message
    assert error or "ended with exit code 1" in message
    assert (checkout / ".venv" / STAMP).read_text("utf-8") == "building\n"
    assert len(built(checkout).commands) == 3
    setup_env.ensure(checkout, {}, never)


def test_the_environment_of_another_checkout_is_never_built_through_a_link(ready, refusal):
    other = ready.with_name("another worktree")
    other.mkdir()
    for name in ("requirements.lock", "pyproject.toml"):
        (other / name).write_bytes((ready / name).read_bytes())
    (other / ".venv").symlink_to(ready / ".venv")
    before = sorted((ready / ".venv").rglob("*"))
    message = refusal(never, other)
    assert re.search(f"is a link to the environment of {ready}, so it is not changed[^$]*VENV=.venv", message)
    assert sorted((ready / ".venv").rglob("*")) == before
    (ready / ".venv" / STAMP).write_text("building\n", "utf-8")  # of a build there that is not done
    refusal(never, other)
    setup_env.ensure(other, {"VENV": str(other / ".venv")}, never)  # which uses it, unchanged


def test_another_python_rebuilds_on_the_disk_that_a_link_names_and_is_then_kept(ready, monkeypatch):
    venv, disk = ready / ".venv", ready.with_name("big disk")
    venv.rename(disk)
    venv.symlink_to(disk)
    monkeypatch.setattr(setup_env, "named_python", lambda name: Python("/other/python", (3, 99), True))
    fake = built(ready, PYTHON="other")
    assert (fake.commands[0][0], fake.builds) == ("/other/python", 1)
    assert (venv.is_symlink(), (disk / STAMP).read_text("utf-8")[:6]) == (True, "ready ")
    monkeypatch.setattr(setup_env, "live_version", lambda venv: (3, 99))
    setup_env.ensure(ready, {"PYTHON": "other"}, never)
    setup_env.ensure(ready, {}, never)
    monkeypatch.setattr(setup_env, "live_version", lambda venv: (3, 98))  # a system upgrade
    assert built(ready).builds == 1


def test_a_checkout_without_permission_or_a_driver_that_runs_no_build_is_one_message(checkout, refusal, monkeypatch):
    closed = PermissionError(13, "Permission denied", "/closed/.venv")
    assert "/closed/.venv: Permission denied" in refusal(FakeBuild(fail_at=1, error=closed))
    with pytest.raises(FileNotFoundError):  # a fault of ours is a traceback
        refusal(FakeBuild(fail_at=1, error=FileNotFoundError("pins")))
    monkeypatch.setattr(torch_build, "this_machine", lambda: Machine("linux", "x86_64", "470.57.02"))
    assert "torch has no build that runs with NVIDIA's driver 470.57.02 here" in refusal(FakeBuild())
    setup_env.ensure(checkout, {"TORCH": "cpu"}, FakeBuild())


def test_two_makes_at_once_build_once_and_the_second_says_that_it_waits(checkout, capfd):
    fake, begun, go_on = FakeBuild(), threading.Event(), threading.Event()

    def slow(command, root):
        begun.set()
        assert go_on.wait(30)
        return fake(command, root)

    with ThreadPoolExecutor(2) as pool:
        pool.submit(setup_env.ensure, checkout, {}, slow)
        assert begun.wait(30)
        second = pool.submit(setup_env.ensure, checkout, {}, never)
        output, end = "", time.monotonic() + 30
        while "waiting for another make" not in output and time.monotonic() < end:
            time.sleep(0.01)
            output += capfd.readouterr().err
        go_on.set()
    second.result()
    assert ("waiting for another make that builds .venv" in output, fake.builds) == (True, 1)
    setup_env.ensure(checkout, {}, never)


def test_pip_keeps_the_users_settings_but_not_what_leads_it_astray():
    kept = {"HTTPS_PROXY": "p", "PIP_INDEX_URL": "i", "UV_INDEX_URL": "u"}
    dropped = {"PIP_TARGET": "/x", "PYTHONPATH": "/y", "UV_TORCH_BACKEND": "auto", "MAKEFLAGS": "x", "MAKELEVEL": "1"}
    own = {"PIP_USER": "0", "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INPUT": "1"}
    assert installer.clean_environ(kept | dropped | {"PIP_USER": "1"}) == kept | own


def told(commands):
    """The commands that install, without the program, the constraint and what each is given."""
    found = []
    for command in commands:
        if "venv" not in command:
            words = command[command.index("install") + 1 :]
            found.append([word for word in words if word not in ("--progress-bar", "off", "--retries", "2")][2:])
    return found


def test_another_build_comes_first_from_its_index_and_is_kept_by_its_name(checkout, monkeypatch, capfd, refusal):
    monkeypatch.setattr(torch_build, "this_machine", lambda: Machine("linux", "x86_64", "550.54.15"))
    fake, source = FakeBuild(), torch_build.WHEELS + "cu126"
    setup_env.ensure(checkout, {}, fake)
    assert told(fake.commands) == [
        ["--no-deps", "--index-url", source, "torch==2.0+cu126"],
        ["setuptools"],
        ["torch==2.0+cu126", "--no-build-isolation", "--editable", ".[dev,cuda]"],
    ]
    assert (checkout / ".venv" / STAMP).read_text("utf-8").endswith(" torch cu126\n")
    rocm = built(checkout, TORCH="rocm7.2")  # what its torch needs is looked for on its index too
    assert told(rocm.commands)[-1][:2] == ["--extra-index-url", torch_build.WHEELS + "rocm7.2"]
    assert [told(one.commands)[-1][-1] for one in (rocm, built(checkout, TORCH="cpu"))] == [".[dev]", ".[dev]"]
    assert f"installing torch for CUDA 12.6 from {source}" in capfd.readouterr().err
    monkeypatch.setattr(installer, "pip_settings", lambda python, environ: "global.index-url='https://m.example'")
    fake = built(checkout, TORCH="auto")  # with an index in pip's settings no other is named
    assert told(fake.commands) == [["setuptools"], ["--no-build-isolation", "--editable", ".[dev,cuda]"]]
    monkeypatch.setenv("TORCH", "2.13.0")  # no build
    assert "make -C benchmarks lock TORCH=X.Y.Z" in refusal(never)


def test_without_a_way_to_pytorch_org_a_build_that_is_needed_is_an_error(monkeypatch, refusal):
    build = FakeBuild()
    monkeypatch.setenv("TORCH", "cpu")
    message = refusal(lambda command, root: build(command, root) or int("--index-url" in command))
    assert ("make setup TORCH=index" in message, "ended with exit code 1" in message) == (True, True)


@pytest.mark.parametrize("lacking", [0, 1])
def test_what_does_not_fit_the_disk_is_refused_before_anything_is_fetched(lacking, checkout, monkeypatch, capfd):
    fake, needed = FakeBuild(), torch_build.BUILDS["cu130"].disk * 2**20
    monkeypatch.setattr(setup_env.shutil, "disk_usage", lambda path: Usage(2**40, 0, needed - lacking))
    monkeypatch.setattr(setup_env.ensure, "__defaults__", (fake,))
    assert setup_env.main(checkout) == 2 * lacking
    assert bool(told(fake.commands)) is not bool(lacking)
    assert (".venv does not fit: 5.7 GiB are needed at " in capfd.readouterr().err) is bool(lacking)


def test_torch_rebuilds_for_another_build_alone(ready, monkeypatch):
    for torch in ("cu130", "auto", ""):
        setup_env.ensure(ready, {"TORCH": torch}, never)
    for torch in ("cpu", "auto"):
        assert built(ready, TORCH=torch).builds == 1
        setup_env.ensure(ready, {}, never)  # an environment that works stays as it was asked for
    assert (ready / ".venv" / STAMP).read_text("utf-8").endswith(" torch cu130\n")


def test_uv_installs_the_same_pins_into_the_same_environment(checkout, tmp_path, monkeypatch, capfd):
    notes = tmp_path / "notes"
    uv = program(tmp_path / "bin" / "uv", f'echo "$@" >> "{notes}"\necho "Resolved 3 packages"')
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")
    assert setup_env.main(checkout) == 0
    python = checkout / ".venv/bin/python"
    start = f"pip install --python {python} --constraint requirements.lock --compile-bytecode"
    made = [f"{start} setuptools", f"{start} --no-build-isolation --editable .[dev,cuda]"]
    assert notes.read_text("utf-8").splitlines() == made
    assert python.exists()
    message, log = capfd.readouterr().err, (checkout / ".venv.log").read_text("utf-8")
    assert (f"uv installs ({uv})" in message, "Resolved" in message) == (True, False)
    assert (log.count("Resolved 3 packages"), f"$ {uv} pip install" in log) == (2, True)


def test_a_failed_install_shows_the_end_of_its_log_and_where_it_is(checkout, tmp_path, monkeypatch, capfd):
    program(tmp_path / "bin" / "uv", 'seq 40 | sed "s/^/line /"\necho "error: no network" >&2\nexit 2')
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")
    made = f'mkdir -p "$last/bin" && ln -s "{BASE}" "$last/bin/python"'
    python = program(tmp_path / "python", f"for last; do :; done; {made}")  # its last word is the environment's folder
    monkeypatch.setattr(setup_env, "search_python", lambda: Python(python, HERE, True))
    assert setup_env.main(checkout) == 2
    message = capfd.readouterr().err
    assert f"ended with exit code 2; the last lines of {checkout / '.venv.log'}:\n" in message
    assert ("    line 40\n    error: no network\n" in message, "line 20\n" in message) == (True, False)


def publish(index, name, version, *needs):
    """A wheel without content in a folder that pip reads as an index."""
    home = index / name
    home.mkdir(parents=True, exist_ok=True)
    info = f"{name}-{version}.dist-info"
    metadata = [f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}", *(f"Requires-Dist: {n}" for n in needs)]
    with zipfile.ZipFile(home / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{info}/METADATA", "\n".join(metadata) + "\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    links = [f'<a href="{file.name}">{file.name}</a>' for file in sorted(home.glob("*.whl"))]
    (home / "index.html").write_text("<html><body>" + "".join(links) + "</body></html>", "utf-8")


@pytest.mark.build
@pytest.mark.parametrize("has_build", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_real_pip_takes_torch_from_one_index_and_all_else_at_its_pins_from_the_other(
    has_build, checkout, tmp_path, monkeypatch
):
    usual, other = tmp_path / "usual", tmp_path / "other"
    if has_build:
        publish(other / "cpu", "torch", "2.0+cpu", "beta")
    for version in ("0", "1"):
        publish(usual, "torch", f"2.{version}", "beta")
        publish(usual, "alpha", f"1.{version}", "torch>=1")
        publish(usual, "beta", f"1.{version}")
    (checkout / "pins").write_text("alpha==1.0\nbeta==1.1\ntorch==2.0\n", "utf-8")
    monkeypatch.setattr(torch_build, "WHEELS", other.as_uri() + "/")
    monkeypatch.setattr(torch_build, "this_machine", lambda: Machine("linux", "x86_64"))
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_INDEX_URL", usual.as_uri())
    what = setup_env.Environment(".venv", "pins", "setup", ("alpha",))
    setup_env.ensure(checkout, {}, what=what)
    listing = [str(checkout / ".venv/bin/python"), "-m", "pip", "list", "--format=freeze"]
    found = set(subprocess.check_output(listing, text=True).split())
    assert {"alpha==1.0", "beta==1.1", "torch==2.0+cpu" if has_build else "torch==2.0"} <= found


FOREIGN = {
    "folder": lambda venv: (venv / "bin").mkdir(parents=True),
    "file": lambda venv: venv.write_text("notes"),
    "dangling link": lambda venv: venv.symlink_to("/no/such/folder"),
}


@pytest.mark.parametrize("create", FOREIGN.values(), ids=FOREIGN)
def test_a_foreign_venv_stays_untouched_and_the_ways_out_are_named(create, checkout, refusal):
    venv = checkout / ".venv"
    create(venv)
    before = sorted((str(path), path.lstat().st_mtime_ns) for path in [venv, *venv.rglob("*")])
    message = refusal(never)
    assert sorted((str(path), path.lstat().st_mtime_ns) for path in [venv, *venv.rglob("*")]) == before
    assert all(part in message for part in ("was not built by this project", "VENV=.venv", "mv .venv .venv.mine"))


def test_an_environment_of_the_users_is_taken_as_it_is(ready, tmp_path, monkeypatch, capfd):
    fake_python(tmp_path / "mine" / "bin" / "python", "3 9 0 /x")
    monkeypatch.setenv("VENV", str(tmp_path / "mine"))
    monkeypatch.setattr(setup_env.add_extra, "__defaults__", (never,))
    assert setup_env.main(ready, targets=["dapt-docx"]) == 0
    for name in ("mine", "~/mine"):
        monkeypatch.setenv("VENV", name)
        assert setup_env.main(ready) == 2
        message = capfd.readouterr().err
        assert f"VENV={name} was asked for, but there is no program" in message
        assert ("~ inside quotes" in message) is name.startswith("~")


@pytest.mark.parametrize(("answer", "words"), [
    ("3 10 1 /x", "it is Python 3.10; this project needs Python 3.11 to 3.14"),
    ("3 x 1 /x", "it does not answer as Python"), ("3 12 0 /x", "apt install python3-venv (or python3.12-venv)"),
])  # fmt: skip
def test_a_named_python_that_cannot_be_used_is_refused(answer, words, tmp_path):
    name = fake_python(tmp_path / "python", answer)
    with pytest.raises(SetupError, match=f"PYTHON={name}") as caught:
        setup_env.named_python(name)
    assert words in str(caught.value)


def test_the_search_takes_the_first_python_that_fits(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    fake_python(tmp_path / "python3", "3 9 1 /nine")
    fake_python(tmp_path / "python3.13", "3 13 0 /without pip")
    fake_python(tmp_path / "python3.12", "3 12 1 /has a space/python3.12")
    fake_python(tmp_path / "python3.11", "3 11 1 /eleven")
    assert setup_env.search_python() == Python("/has a space/python3.12", (3, 12), True)


@pytest.mark.parametrize(
    ("answer", "words"),
    [("3 15 1 /x", "found: python3 is 3.15"), ("3 11 0 /x", "python3 is Python 3.11 (/x), but it lacks the venv")],
)
def test_when_nothing_fits_the_message_says_what_was_found(answer, words, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    # Shell scripts need no PATH: echo is built in.
    fake_python(tmp_path / "python3", answer)
    with pytest.raises(SetupError) as caught:
        setup_env.search_python()
    assert all(text in str(caught.value) for text in (words, "PYTHON=/path", "VENV=/path"))
    assert setup_env.probe(sys.executable).version == HERE


def pyproject():
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def pins(name="requirements.lock"):
    return lock.read_pins((ROOT / name).read_text(encoding="utf-8"))


def test_the_locks_are_sorted_and_free_of_local_builds_and_of_what_torch_pins():
    oldest, beyond = setup_env.show(setup_env.OLDEST), (setup_env.NEWEST[0], setup_env.NEWEST[1] + 1)
    assert pyproject()["project"]["requires-python"] == f">={oldest},<{setup_env.show(beyond)}"
    for text in lock.requirements(pyproject()):
        requirement = Requirement(text)
        assert requirement.specifier.contains(pins()[lock.canonical(requirement.name)]), text
    for found in (pins(), pins(setup_env.UNSLOTH.pins)):
        assert list(found) == sorted(found)
        assert all(re.fullmatch(r"[0-9][0-9a-z.]*", version) for version in found.values())
        assert not [name for name in found if name != "nvidia-ml-py" and lock.TORCH_OWN.match(name)]


def test_renewing_writes_the_lock_in_one_step(tmp_path, monkeypatch, capsys):
    path = tmp_path / "requirements.lock"
    path.write_text("# old\nrich==1.0\ntorch==2.13.0\n", encoding="utf-8")
    names = {"Torch": "2.13.0+cpu", "rich": "2.0", "nvidia_cublas": "1", "triton": "3"}  # torch pins the last two
    found = [{"metadata": {"name": name, "version": version}} for name, version in names.items()]
    resolve, python = Mock(return_value={"install": found}), Python(str(BASE), HERE, True)
    monkeypatch.setattr(lock, "LOCK", path)
    monkeypatch.setattr(lock, "resolve", resolve)
    monkeypatch.delenv("TORCH", raising=False)
    lock.renew(python)
    resolve.assert_called_once_with(lock.requirements(pyproject()), "2.13.0", python)
    assert lock.read_pins(path.read_text(encoding="utf-8")) == {"rich": "2.0", "torch": "2.13.0"}
    assert "[lock] rich 1.0 -> 2.0\n" in capsys.readouterr().out
    assert [entry.name for entry in tmp_path.iterdir()] == ["requirements.lock"]
    old, new = {"a": "1", "b": "1", "c": "1"}, {"a": "1", "b": "2", "d": "1"}
    assert lock.changes(old, new) == ["b 1 -> 2", "c 1 -> (none)", "d (none) -> 1"]
    assert lock.torch_pin({"TORCH": "2.14.1"}, {"torch": "2.13.0"}) == "2.14.1"
    with pytest.raises(SetupError, match="make -C benchmarks lock TORCH="):
        lock.torch_pin({"TORCH": "new"}, {"torch": "2.13.0"})


@pytest.mark.parametrize("extra", [*setup_env.EXTRAS, "tasks"])
def test_an_extra_is_read_as_pyproject_has_it_pinned_and_not_in_the_core(extra):
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    of_extra = pyproject()["project"]["optional-dependencies"][extra]
    assert setup_env.extra_requirements(text, extra) == of_extra
    names = {Requirement(text).name for text in of_extra}
    assert not names & {Requirement(text).name for text in pyproject()["project"]["dependencies"]}
    assert {lock.canonical(name) for name in names} <= {lock.canonical(name) for name in pins()}
    covered = "\n".join(setup_env.dependency_lines(text))
    assert all(f'"{requirement}"' in covered for requirement in lock.requirements(pyproject()))
    if extra == "documents":
        assert names == set(DOCUMENT_PACKAGES)


def test_a_target_gets_the_extras_that_it_needs():
    needed = {target for _, targets in setup_env.EXTRAS.values() for target in targets}
    for target in needed:
        extras = [extra for extra, (_, targets) in setup_env.EXTRAS.items() if target in targets]
        assert [extra for extra, _ in setup_env.needed_extras([target, "setup"], {})] == extras
    assert setup_env.needed_extras(["setup", "train"], {"TASKS": "gsm8k"}) == []
    assert [extra for extra, _ in setup_env.needed_extras(["eval"], {"TASKS": "gsm8k"})] == ["eval", "tasks"]


def test_an_extra_is_added_once_at_its_pins(ready, capfd):
    def add_documents(run):
        setup_env.add_extra("documents", "reading documents", ready, {}, run)

    commands = []
    capfd.readouterr()
    add_documents(lambda command, root: commands.append(list(command)) or 0)
    (command,) = commands
    pip = [str(ready / ".venv/bin/python"), "-m", "pip", "install", "--constraint", "requirements.lock"]
    assert command[:6] == pip
    documents = pyproject()["project"]["optional-dependencies"]["documents"]
    assert command[-len(documents) :] == documents
    assert capfd.readouterr().err.count("adding the packages for reading documents to .venv, once") == 1
    add_documents(never)
    assert capfd.readouterr().err == ""
    setup_env.ensure(ready, {}, never)  # .venv is what it was
    assert not setup_env.has_extra(ready / ".venv", "eval")
    edit(ready / "requirements.lock", "alpha==1.0", "alpha==1.1")
    setup_env.ensure(ready, {}, FakeBuild())
    add_documents(lambda command, root: commands.append(command) or 0)  # anew in a new environment
    assert len(commands) == 2


def test_an_extra_that_cannot_be_installed_names_the_way_by_hand(ready, monkeypatch, capfd):
    for code in (1, 0):
        monkeypatch.setattr(setup_env.add_extra, "__defaults__", (lambda *_, code=code: code,))
        assert setup_env.main(ready, targets=["dapt-docx"]) == 2 * code
        assert setup_env.has_extra(ready / ".venv", "documents") is not bool(code)
    assert "pip install 'sft-play[documents]'" in capfd.readouterr().err


def test_unsloths_environment_is_built_beside_ours_from_pins_of_its_own(checkout, monkeypatch, capfd):
    (checkout / "requirements-unsloth.lock").write_text("# pins\nunsloth==1.0\n", encoding="utf-8")
    (checkout / ".venv").mkdir()  # the stand-in of a build writes there
    fake, folder = FakeBuild(), checkout / ".venv-unsloth"
    setup_env.ensure(checkout, {}, fake, what=setup_env.UNSLOTH)
    assert (folder / STAMP).read_text().startswith("ready ")
    assert not (checkout / ".venv" / STAMP).exists()
    made, installed = fake.commands
    assert (made[-1], "unsloth" in installed, ".[dev]" in installed) == (str(folder), True, False)
    assert installed[installed.index("--constraint") + 1] == "requirements-unsloth.lock"
    assert ".venv-unsloth is ready" in capfd.readouterr().err
    setup_env.ensure(checkout, {"VENV": "/no/such"}, never, what=setup_env.UNSLOTH)
    (checkout / "requirements-unsloth.lock").write_text("unsloth==2.0\n", encoding="utf-8")
    monkeypatch.setattr(setup_env.ensure, "__defaults__", (lambda *_: 1,))
    assert setup_env.main(checkout, setup_env.UNSLOTH) == 2
    assert "make setup-unsloth: it repairs .venv-unsloth" in capfd.readouterr().err


def test_unsloths_pins_exclude_ours_and_hold_what_is_needed():
    """Why there are two environments; the day that this fails, one may do."""
    theirs = pins(setup_env.UNSLOTH.pins)
    for requirement in map(Requirement, setup_env.UNSLOTH.needs):
        assert requirement.specifier.contains(theirs[lock.canonical(requirement.name)]), requirement
    ranges = {one.name: one.specifier for one in map(Requirement, pyproject()["project"]["dependencies"])}
    assert not ranges["trl"].contains(theirs["trl"])
    assert ranges["transformers"].contains(theirs["transformers"])
    assert not pins().keys() & {"unsloth", "unsloth-zoo"}


L4 = ("NVIDIA L4", (8, 9))
V100 = ("Tesla V100-SXM2-16GB", (7, 0))
RTX5090 = ("NVIDIA GeForce RTX 5090", (12, 0))
K80 = ("Tesla K80", (3, 7))
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
CUDA_12_INDEX = "https://download.pytorch.org/whl/cu126"


def linux(driver="", *gpus, arch="x86_64"):
    return Machine("linux", arch, driver, gpus)


def chosen(machine, asked="", configured=""):
    choice = torch_build.choose(machine, asked, configured)
    return choice.name, choice.source


@pytest.mark.parametrize(("machine", "name", "source"), [
    (linux("580.65.06", L4), "cu130", None),  # what the public index has
    (linux("579.99", L4), "cu126", CUDA_12_INDEX),
    (linux("535.54"), "cu126", CUDA_12_INDEX),  # the kernel tells of no GPUs
    (linux("580.65.06", V100), "cu126", CUDA_12_INDEX),  # no kernels for 7.0 in CUDA 13's
    (linux("580.65.06", L4, V100), "cu126", CUDA_12_INDEX),
    (linux("580.65.06", ("NVIDIA GH200 480GB", (9, 0)), arch="aarch64"), "cu130", torch_build.WHEELS + "cu130"),
    (linux(), "cpu", CPU_INDEX), (linux(arch="aarch64"), "cpu", None), (Machine("darwin", "arm64"), "index", None),
    (linux(arch="ppc64le"), "index", None),
])  # fmt: skip
def test_the_driver_and_the_gpus_decide_the_build(machine, name, source):
    assert chosen(machine) == (name, source)


@pytest.mark.parametrize(("machine", "parts", "update"), [
    (linux("525.60.11", L4), ["needs driver 580 or newer", "needs driver 525.60.13 or newer"], "580"),
    (linux("470.57.02"), ["driver 470.57.02 here", "needs driver 525.60.13"], "580"),
    (linux("570.86.15", RTX5090), ["CUDA 12.6 (cu126): has no kernels for NVIDIA GeForce RTX 5090"], "580"),
    (linux("470.57.02", V100), ["CUDA 13.0 (cu130): needs driver 580 or newer; has no kernels"], "525"),
    (linux("470.57.02", K80, K80), ["has no kernels for Tesla K80 (capability 3.7)"], None),
    (linux("580.65.06", V100, RTX5090), ["no kernels for Tesla V100", "no kernels for NVIDIA GeForce"], None),
])  # fmt: skip
def test_where_no_build_runs_the_message_says_why_and_what_to_update(machine, parts, update):
    with pytest.raises(BuildError) as caught:
        torch_build.choose(machine)
    text = str(caught.value)
    assert all(part in text for part in parts), text
    assert "TORCH=cpu" in text
    assert re.findall(r"update NVIDIA's driver to (\d+) or newer", text) == ([update] if update else [])


def test_a_configured_index_is_used_and_no_other():
    for machine in (linux(), linux("580.65.06", L4), linux("470.57.02", K80)):
        for asked in ("", "auto"):
            assert chosen(machine, asked, "pip's settings name an index (global.index-url)") == ("index", None)


@pytest.mark.parametrize(("asked", "configured", "source"), [
    ("cu126", "", CUDA_12_INDEX), ("cu130", "", None), ("cu130", "a mirror", torch_build.WHEELS + "cu130"),
    ("cpu", "a mirror", CPU_INDEX), ("rocm7.1", "", torch_build.WHEELS + "rocm7.1"), ("index", "", None),
])  # fmt: skip
def test_the_build_that_is_asked_for_is_taken_whatever_the_machine(asked, configured, source):
    for machine in (linux(), linux("470.57.02", K80)):
        assert chosen(machine, asked, configured) == (asked, source)


def test_torch_takes_the_name_of_a_build_and_nothing_else():
    for asked in ("", "auto", "index", *BUILDS, "cu132", "rocm7.14"):
        assert torch_build.asked_build({"TORCH": asked}) == asked
    assert torch_build.asked_build({}) == ""
    with pytest.raises(BuildError, match=r"TORCH=2\.13\.0 .*which is a version[^$]*make -C \w+ lock TORCH="):
        torch_build.asked_build({"TORCH": "2.13.0"})
    for asked in ("cuda", "cu13", "cu1300", "CPU", "rocm", "cpu/../x", "http://x", " cpu"):
        with pytest.raises(BuildError, match="which is not a build of torch"):
            torch_build.asked_build({"TORCH": asked})


def test_what_nvidia_smi_and_the_kernel_module_say_is_read():
    text = "580.65.06, 8.9, NVIDIA L4\n580.65.06, 12.0, NVIDIA RTX PRO 6000 Blackwell, Server\n"
    assert torch_build.read_smi(text) == ("580.65.06", (L4, ("NVIDIA RTX PRO 6000 Blackwell, Server", (12, 0))))
    for text in ("", "No devices were found\n", "NVIDIA-SMI has failed because it couldn't communicate\n"):
        assert torch_build.read_smi(text) == ("", ())
    closed = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.54.03  Tue Jun  6 22:20:39 UTC 2023\nGCC …"
    free = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build  (x@y)\n"
    assert [torch_build.read_kernel(text) for text in (closed, free, "")] == ["535.54.03", "570.86.15", ""]


def test_a_machine_with_nvidia_smi_is_asked_through_it(tmp_path, monkeypatch):
    program(tmp_path / "nvidia-smi", '[ "$2" = --format=csv,noheader ] && echo "550.54.15, 8.9, NVIDIA L4"')
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert torch_build.this_machine()[2:4] == ("550.54.15", (L4,))


def test_sizes_are_said_in_gib_and_unknown_ones_as_such():
    mib, cpu = 2**20, BUILDS["cpu"]
    for name, build in BUILDS.items():
        download, disk, text = torch_build.sizes(torch_build.Choice(name, None, ""))
        known = cpu if build.disk is None else build
        assert (download, disk) == (known.download * mib, known.disk * mib)
        assert ("not measured" in text) == (build.disk is None)
        if build.disk is not None:
            assert f"{build.download / 1024:.1f} GiB to download, {build.disk / 1024:.1f} GiB on the disk" in text
    assert "not measured" in torch_build.sizes(torch_build.Choice("cu132", "x", ""))[2]
    download, disk, text = torch_build.sizes(torch_build.Choice("index", None, ""))
    assert (download, disk) == (cpu.download * mib, cpu.disk * mib)  # the least that it can be
    assert f"{BUILDS['cu130'].disk / 1024:.1f} GiB if it is for CUDA" in text


def test_the_tables_are_about_the_torch_that_is_pinned():
    """Where `lock TORCH=` moves it: renew the builds, their drivers and GPUs, and the sizes, then VERSION."""
    for name in ("requirements.lock", "requirements-unsloth.lock"):
        assert lock.read_pins((ROOT / name).read_text())["torch"] == torch_build.VERSION
