"""The Makefile as its users meet it: help, dry runs, hostile values, a VENV of one's own, and .ci/run."""

import json
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.generate import with_variables
from sft_play import variables
from sft_play.cli import main

ROOT = Path(__file__).resolve().parent.parent
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
RECIPES = (ROOT / "scripts" / "make.mk").read_text(encoding="utf-8")
MAINTAINING = (ROOT / "benchmarks" / "Makefile").read_text(encoding="utf-8")
TARGETS = re.findall(r"^([a-z-]+):", MAKEFILE, re.MULTILINE)
RUNNING = [target for target in TARGETS if variables.target_command(target) in variables.COMMANDS]
PROGRAM = [target for target in RUNNING if target != "train-and-watch"]  # another name for train-tb
"""Targets that run a command of the program."""
NEED_ENVIRONMENT = [*RUNNING, "test", "lint", "format", "coverage"]
SCRIPTS = {
    name: f"scripts/{name.removesuffix('-tb').replace('-', '_')}.py"
    for name in (
        *("train", "train-tb", "resume", "train-distributed", "train-distributed-tb", "train-deepspeed"),
        *("train-deepspeed-tb", "launch-command", "run-notebook", "verify-layouts", "plan", "gpu-selftest"),
    )
}
"""Targets that launch or train, and what each executes."""
VARIABLES = list(variables.VARIABLES)
INTERNAL = re.findall(r"^override (?:define )?([.A-Z_]+)", MAKEFILE + RECIPES, re.MULTILINE)

# MARK becomes the path of a file that must not come into being.
HOSTILE = {
    "make function": "a=$(shell touch MARK)", "make eval": "$(eval all: ; touch MARK)", "backquotes": "a=`touch MARK`",
    "closing single quote": "'; touch MARK; '", "newline": "a=b\ntouch MARK\n", "hash": "a # b \\# c",
    "shell operators": "a && touch MARK || touch MARK | touch MARK & touch MARK > MARK",
    "variables": "$HOME ${HOME} $(HOME) $(SET) $@ $<", "quotes": """it's "quoted" \\" \\'""",
    "backslashes": "a\\b\\\\c \\", "spaces": "two  spaces, a\ttab and one at the end ",
    "assignment": "a:=b c!=touch MARK d+=e", "unicode": "größe × 2 — 学习",
}  # fmt: skip


def clean_environ(**extra):
    """Our environment without what an outer make or its user put there."""
    removed = {"MAKEFLAGS", "MFLAGS", "MAKELEVEL", "MAKEOVERRIDES", "PYTHONPATH", *VARIABLES}
    return {name: value for name, value in os.environ.items() if name not in removed} | extra


def make(*arguments, cwd=ROOT, **environ):
    options = {"env": clean_environ(**environ), "capture_output": True, "text": True, "timeout": 120}
    return subprocess.run(["make", *arguments], cwd=cwd, stdin=subprocess.DEVNULL, **options)


def listing(folder):
    """Every path below a folder with its size and time of change."""
    stats = {path: path.lstat() for path in sorted(folder.rglob("*"))}
    return {str(path.relative_to(folder)): (one.st_size, one.st_mtime_ns) for path, one in stats.items()}


def write_program(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh\n" + text, encoding="utf-8")
    path.chmod(0o755)


class FakeVenv:
    """An environment whose python only notes how it was started."""

    def __init__(self, folder, notes):
        self.folder, self.notes = folder, notes
        notes.mkdir()
        note = (
            "import json, os, sys; os.makedirs(sys.argv[1], exist_ok=True); "
            "json.dump(dict(argv=sys.argv[2:], environ=dict(os.environ), parent=os.getppid(), "
            "cwd=os.getcwd()), open(os.path.join(sys.argv[1], str(os.getpid())), 'w'))"
        )
        command = shlex.join([sys.executable, "-I", "-c", note, str(notes)])
        write_program(folder / "bin" / "python", f'exec {command} "$@"\n')

    def starts(self):
        return [json.loads(path.read_text(encoding="utf-8")) for path in sorted(self.notes.iterdir())]

    def only_start(self):
        (start,) = self.starts()
        return start


@pytest.fixture
def fake(tmp_path):
    return FakeVenv(tmp_path / "fake venv", tmp_path / "notes")


@pytest.fixture
def copy(tmp_path):
    """The build files in a folder of their own, whose path has a space and a quote."""
    folder = tmp_path / "a user's checkout"
    folder.mkdir()
    for name in ("Makefile", "pyproject.toml", "requirements.lock"):
        shutil.copy(ROOT / name, folder)
    for name in ("scripts", ".ci"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("sft_play", "tests", "benchmarks"):
        (folder / name).mkdir(parents=True)
    shutil.copy(ROOT / "benchmarks" / "Makefile", folder / "benchmarks")
    for name in ("__init__.py", "_version.py", "exit_codes.py", "spelling.py", "variables.py", "variables.json"):
        shutil.copy(ROOT / "sft_play" / name, folder / "sft_play" / name)
    return folder


# Help
def test_every_target_has_a_help_line_and_is_phony():
    for text, words in ((MAKEFILE, []), (MAINTAINING, ["-f", "benchmarks/Makefile"])):
        targets = re.findall(r"^([a-z-]+):", text, re.MULTILINE)
        assert targets == re.findall(r"^([a-z-]+):.* ## \S", text, re.MULTILINE)
        known = make(*words, "-pn", "help").stdout
        phony = re.search(r"^\.PHONY: (.*)$", known, re.MULTILINE)
        assert sorted(phony[1].split()) == sorted(targets)
        # the help of the variables is that of their table
        assert with_variables(text, maintaining=bool(words)) == text, "run make -C benchmarks generate"


def test_the_readme_names_every_target_and_that_of_benchmarks_those_that_measure():
    readme, commands, measuring = (
        (ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "docs/commands.md", "benchmarks/README.md")
    )
    readme += commands
    code = re.compile(r"\bmake ([a-z][a-z-]*)|`([a-z][a-z-]*)`")
    named = {name for text in (readme, measuring) for found in code.findall(text) for name in found}
    named |= set(re.findall(r"\bmake -C benchmarks ([a-z][a-z-]*)", readme + measuring))
    maintaining = set(re.findall(r"^([a-z-]+):", MAINTAINING, re.MULTILINE))
    assert len({*TARGETS, *maintaining}) > 60
    assert {*TARGETS, *maintaining} - named == set()
    assert set(re.findall(r"(?:^    |`)make ([a-z][a-z-]*)", readme, re.MULTILINE)) <= set(TARGETS)


# Dry runs
def test_a_dry_run_starts_and_builds_nothing(copy, fake):
    before = listing(copy)
    result = make("-n", *TARGETS, f"VENV={fake.folder}", cwd=copy)
    assert (result.returncode, result.stderr) == (0, "")
    for target in PROGRAM:
        assert SCRIPTS.get(target, f"-m sft_play {target.removesuffix('-tb')}") in result.stdout, target
    assert make("-n", *TARGETS, cwd=copy).stdout == result.stdout
    assert listing(copy) == before
    assert fake.starts() == []


def test_every_target_that_launches_or_trains_executes_a_script_of_its_name():
    """A person can give the same file to any launcher; what starts or trains otherwise would be seen here."""
    recipes = {target: make("-n", target).stdout.splitlines()[-1] for target in {*TARGETS} - {"help", "launch-file"}}
    for target, script in {**SCRIPTS, "train-and-watch": "scripts/train.py"}.items():
        is_watched = target.endswith("-tb") or "watch" in target
        assert recipes.pop(target).endswith(f" {script}" + " --tensorboard" * is_watched)
        assert (ROOT / script).is_file()
    assert not [target for target, text in recipes.items() if re.search(r"sft_play.* (train|resume|launch)", text)]
    assert not [target for target in recipes if re.match(r"train|resume|launch", target)]


def test_what_measures_the_project_is_called_from_the_checkout(copy, fake):
    names = sorted({*re.findall(r"^([a-z-]+):", MAINTAINING, re.MULTILINE)} - {"help", "setup"})
    dry = make("-C", "benchmarks", *names, "-n", f"VENV={fake.folder}", cwd=copy)
    assert (dry.returncode, dry.stderr) == (0, "")
    modules = re.findall(r"-m benchmarks\.(\w+)", dry.stdout)
    assert all((ROOT / "benchmarks" / name).is_dir() or (ROOT / f"benchmarks/{name}.py").is_file() for name in modules)
    assert make("-C", "benchmarks", "bench-data", f"VENV={fake.folder}", "ROWS=10", cwd=copy).returncode == 0
    start = fake.only_start()
    assert (start["argv"], start["environ"]["ROWS"]) == (["-m", "benchmarks.data"], "10")
    assert Path(start["cwd"]).samefile(copy)


def test_setup_hears_of_the_targets_that_were_asked_for(copy):
    """It knows which of them add an extra."""
    for goals, words in (("setup plan", "setup plan"), ("setup-unsloth", "unsloth"), ("dapt-docx", "dapt-docx")):
        shown = make("-n", *goals.split(), cwd=copy).stdout
        assert set(re.findall(r"scripts/setup_env\.py ?([a-z -]*);", shown)) == {words}, goals


def test_a_scripts_folder_is_not_on_the_path(monkeypatch):
    """There `train` or `plan` would be found for a module of somebody else's. All scripts are links to one."""
    folder = str(ROOT / "scripts")
    monkeypatch.setattr(sys, "path", [folder, *sys.path])
    runpy.run_path(f"{folder}/plan.py", run_name="imported")
    assert (sys.path[0], folder in sys.path) == (str(ROOT), False)
    assert {(ROOT / name).resolve().name for name in SCRIPTS.values()} == {"train.py"}


@pytest.mark.parametrize("script", ["scripts/train_distributed.py", "scripts/plan.py"])
def test_a_script_is_its_command_from_any_folder(script, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    words = [sys.executable, str(ROOT / script), "--help"]
    result = subprocess.run(words, cwd=tmp_path, env=clean_environ(), capture_output=True, text=True, timeout=120)
    assert (result.returncode, result.stderr) == (0, "")
    command = Path(script).stem.replace("_", "-")
    with pytest.raises(SystemExit, match="0"):
        main([command, "--help"])
    assert result.stdout == capsys.readouterr().out


# Values
@pytest.mark.parametrize("value", HOSTILE.values(), ids=HOSTILE.keys())
def test_a_hostile_value_reaches_the_program_unchanged(value, fake, tmp_path):
    """From make's command line and from the environment; a dry run and the help run none either."""
    mark = tmp_path / "mark"
    value = value.replace("MARK", str(mark))
    result = make("train", f"VENV={fake.folder}", f"SET={value}", CONFIG=value)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")
    start = fake.only_start()
    assert start["argv"] == ["scripts/train.py"]
    assert (start["environ"]["SET"], start["environ"]["CONFIG"]) == (value, value)
    assert set(VARIABLES) & set(start["environ"]) == {"VENV", "SET", "CONFIG"}  # what is not set is not exported
    target = "train-distributed-tb"  # takes most
    arguments = [f"{name}={value}" for name in VARIABLES if name != "VENV" and variables.takes_variable(name, target)]
    assert make("-n", target, f"VENV={fake.folder}", *arguments).returncode == 0
    assert make("help", *[f"{name}={value}" for name in VARIABLES]).returncode == 2
    assert not mark.exists()


def test_every_variable_takes_a_hostile_value(tmp_path):
    """The variables of a target at once, over targets that take all of them; and those of other programs."""
    mark, left = tmp_path / "mark", {*VARIABLES} - {"VENV"}
    value = f"""$(shell touch {mark}) `touch {mark}` $$HOME '"; touch {mark}; #%"""
    for number, target in enumerate(PROGRAM):
        names = {name for name in VARIABLES if name != "VENV" and variables.takes_variable(name, target)}
        if names & left:
            left -= names
            names |= {"HF_TOKEN", "WANDB_MODE", "V"}
            fake = FakeVenv(tmp_path / f"venv {number}", tmp_path / f"notes{number}")
            result = make(target, f"VENV={fake.folder}", *(f"{name}={value}" for name in sorted(names)))
            assert result.returncode == 0, result.stderr
            environ = fake.only_start()["environ"]
            assert {name: environ[name] for name in names} == dict.fromkeys(names, value)
    assert not any(variables.takes_variable(name, target) for name in left for target in PROGRAM)
    assert not mark.exists()


@pytest.mark.parametrize("name", INTERNAL)
def test_no_variable_of_the_makefile_can_be_replaced(name, fake, tmp_path):
    mark = tmp_path / "mark"
    result = make("train", f"VENV={fake.folder}", f'{name}=x"; touch {mark}; "')
    if name in ("SHELL", ".SHELLFLAGS"):  # make's own, which an outer make may hand on
        assert (result.returncode, fake.only_start()["argv"]) == (0, ["scripts/train.py"])
    else:
        assert (result.returncode, fake.starts()) == (2, [])
        assert f"{name}= is not a variable of make train" in result.stderr
    assert not mark.exists()


def test_the_checkout_comes_first_on_pythonpath_and_the_users_path_stays(fake, copy):
    assert make("train", f"VENV={fake.folder}", cwd=copy, PYTHONPATH="/elsewhere").returncode == 0
    first, second = fake.only_start()["environ"]["PYTHONPATH"].split(":")
    assert (Path(first).samefile(copy), second) == (True, "/elsewhere")


def test_a_program_target_becomes_its_program_so_that_ctrl_c_reaches_it(fake):
    command = ["make", *PROGRAM, f"VENV={fake.folder}"]
    with subprocess.Popen(command, cwd=ROOT, env=clean_environ()) as process:
        assert process.wait(timeout=60) == 0
    starts = fake.starts()
    assert {start["parent"] for start in starts} == {process.pid}  # no shell in between
    named = [[SCRIPTS[name]] if name in SCRIPTS else ["-m", "sft_play", name] for name in PROGRAM]
    words = [[*of, *["--tensorboard"][: name.endswith("-tb")]] for of, name in zip(named, PROGRAM, strict=True)]
    assert sorted(start["argv"] for start in starts) == sorted(words)


# VENV
@pytest.mark.parametrize("name", ["it's a", 'say "hi"', "$(HOME);$HOME", "`id` #1"])
def test_venv_may_have_any_path(name, tmp_path):
    fake = FakeVenv(tmp_path / name, tmp_path / "the notes")
    assert make("train", f"VENV={fake.folder}").returncode == 0
    assert fake.only_start()["environ"]["VENV"] == str(fake.folder)


def test_a_relative_venv_is_of_the_checkout_and_parallel_targets_check_it_once(copy):
    fake = FakeVenv(copy / "mine", copy / "notes")
    ended = make("-j4", "-C", str(copy), "train", "resume", "plan", "VENV=mine", cwd="/")
    assert (ended.returncode, ended.stderr) == (0, "")
    scripts = sorted(SCRIPTS[name] for name in ("plan", "resume", "train"))
    assert sorted(start["argv"][0] for start in fake.starts()) == scripts


def test_a_venv_without_a_python_is_refused(copy):
    result = make("-k", *NEED_ENVIRONMENT, "VENV=/no/such; touch mark", cwd=copy)
    for target in NEED_ENVIRONMENT:
        assert f"Target '{target}' not remade because of errors" in result.stderr, target
    assert re.search("VENV=/no/such; touch mark was asked for, but there is no program.*/bin/python", result.stderr)
    assert (result.returncode, "Traceback" in result.stderr) == (2, False)
    assert not any((copy / name).exists() for name in ("mark", ".venv"))


def test_a_venv_of_the_users_is_never_written_to(fake, copy):
    before = listing(fake.folder)
    assert make("setup", *NEED_ENVIRONMENT, "clean", f"VENV={fake.folder}", cwd=copy).returncode == 0
    assert len(fake.starts()) >= len(NEED_ENVIRONMENT)
    assert listing(fake.folder) == before
    assert not (copy / ".venv").exists()


@pytest.mark.parametrize(("words", "path", "error"), [
    (["plan", "CONFG=x"], None, "did you mean CONFIG=?"), (["plann"], None, "did you mean make plan?"),
    (["plan", "SET=", "HARDWARE="], None, "HARDWARE= is given and empty"),
    (["plan", "VENV=/no/such"], None, "VENV=/no/such was asked for"),
    (["plan", "PYTHON=python3; touch mark"], None, "PYTHON=python3; touch mark was asked for, but it does not"),
    (["plan"], "empty", "No Python 3 answers"),
])  # fmt: skip
def test_what_make_and_the_setup_refuse_is_one_json_object_too(words, path, error, copy, tmp_path):
    programs = {"PATH": str(tmp_path)} if path else {}
    command = [shutil.which("make"), *words]
    for more, environ, is_json in (["JSON=1"], {}, True), ([], {"JSON": "1"}, True), (["JSON=0"], {}, False):
        options = {"env": clean_environ(**environ, **programs), "capture_output": True, "text": True, "timeout": 120}
        ended = subprocess.run([*command, *more], cwd=copy, **options)
        assert (ended.returncode, error in ended.stderr) == (2, True)
        if is_json:
            answer = json.loads(ended.stdout)
            assert (answer["ok"], answer["kind"], answer["exit"]) == (False, "fix", 2)
            assert error in answer["error"]
        else:
            assert ended.stdout == ""
    assert not any((copy / name).exists() for name in ("mark", ".venv"))


# Develop
def real_venv(folder, lint_code=0):
    """An environment that runs pytest with our own Python, and answers for ruff and mypy."""
    answer = f'case "$2" in ruff|mypy) echo "fake $2"; exit {lint_code};; esac\n'
    answer += "export PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 PYTEST_PLUGINS=xdist.plugin\n"  # others take a second to import
    write_program(folder / "bin" / "python", f'{answer}exec {shlex.quote(sys.executable)} "$@"\n')
    return folder


def test_tests_chooses_tests_and_may_hold_quotes(copy, tmp_path):
    (copy / "tests" / "test_one.py").write_text("def test_a(): pass\ndef test_b(): pass\ndef test_c(): assert 0\n")
    venv = real_venv(tmp_path / "real")
    chosen = make("test", f"VENV={venv}", """TESTS=tests/test_one.py -k "test_a or test_b" """, cwd=copy)
    assert chosen.returncode == 0, chosen.stdout + chosen.stderr
    assert "2 passed, 1 deselected" in chosen.stdout
    assert make("test", f"VENV={venv}", cwd=copy).returncode == 2


def test_clean_removes_caches_and_leaves_environment_outputs_and_data(copy):
    gone = [f"{name}/__pycache__/x" for name in ("sft_play/a", "tests", "benchmarks")]
    caches = (".pytest_cache", ".ruff_cache", ".mypy_cache", "build", "dist", "sft_play.egg-info")
    gone += [f"{name}/x" for name in caches]
    kept = [".venv/lib/__pycache__/x", "outputs/__pycache__/x", "data/build/x", "mine/__pycache__/x"]
    kept += ["sft_play/data/x.py", "sft_play/a/b.py"]
    for name in gone + kept:
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        (copy / name).touch()
    assert make("clean", cwd=copy).returncode == 0
    assert [name for name in gone if (copy / name).exists() or (copy / name).parent.exists()] == []
    assert [name for name in kept if not (copy / name).exists()] == []
    assert make("clean", cwd=copy).returncode == 0


# .ci/run
@pytest.mark.parametrize(("tests", "lint_code", "passes", "last_line"), [
    ("def test_a(): pass\n", 0, True, r"1 passed in .*s"),
    ("def test_a(): pass\ndef test_b(): assert 0\n", 0, False, r"1 failed, 1 passed in .*s"),
    ("def test_a(): pass\n", 1, False, r"1 passed in .*s"),
], ids=["all passes", "a test fails", "lint fails"])  # fmt: skip
def test_ci_run_fails_when_it_should_and_ends_with_the_summary(tests, lint_code, passes, last_line, copy, tmp_path):
    (copy / "tests" / "test_one.py").write_text(tests, encoding="utf-8")
    environ = clean_environ(VENV=str(real_venv(tmp_path / "real", lint_code)))
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    result = subprocess.run([copy / ".ci" / "run"], cwd="/", env=environ, text=True, timeout=120, **streams)
    assert (result.returncode == 0) is passes, result.stdout
    assert re.fullmatch(last_line, result.stdout.splitlines()[-1]), result.stdout
    assert "[ci] make lint" in result.stdout
    assert ("make lint failed" in result.stdout) is bool(lint_code)
