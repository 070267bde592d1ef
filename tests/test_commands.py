"""Every command gives one JSON object with JSON=1: alone on standard output, with the fields that scripts read."""

import contextlib
import io
import json
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator, ValidationError

from sft_play import entry, exit_codes
from sft_play.cli import main
from sft_play.commands import COMMAND_FILES, command_function, help_line, load_module
from sft_play.commands.request import CommandResult, Request, read_request, redirect_stdout_to_stderr
from sft_play.errors import ConfigError, DoesNotFit, Interrupted
from sft_play.machine.hardware import parse_hardware
from sft_play.variables import VARIABLES, flag_commands
from tests import warm
from tests.command_cases import COMMAND_CASES, SUMMARY, TRAINED
from tests.conftest import ROOT, chat, write_rows, write_run
from tests.converter import converter
from tests.models import CHATML
from tests.schemas import refuse_invalid, schemas
from tests.test_card import Hub
from tests.test_notebook import book
from tests.test_score import ROW
from tests.test_score import write as write_peaks


def test_there_is_a_case_for_every_command_and_its_schema():
    assert (set(COMMAND_CASES), schemas().keys() - {"ending"}) == (set(COMMAND_FILES), set(COMMAND_CASES))
    for schema in schemas().values():
        Draft202012Validator.check_schema(schema)


@pytest.mark.parametrize(("answer", "wrong"), [
    ({"ok": False, "kind": "fix", "exit": 2}, "'error' is a required property"),
    ({"ok": False, "kind": "done", "exit": 2, "error": "no"}, "should not be valid"),
    ({"ok": False, "kind": "broken", "exit": 2, "error": "no"}, "'broken' is not one of"),
    ({"ok": True, "kind": "fix", "exit": 0, "elapsed_s": 1.5, "checks": []}, "'done' was expected"),
    ({"ok": True, "kind": "done", "exit": 0, "checks": []}, "'elapsed_s' is a required property"),
    ({"ok": True, "kind": "done", "exit": 0, "elapsed_s": 1, "checks": [{"name": "x"}]}, "is a required property"),
])  # fmt: skip
def test_a_schema_accepts_what_commands_write_and_nothing_less(answer, wrong):
    refuse_invalid("check", {"ok": True, "kind": "done", "exit": 0, "elapsed_s": 1.5, "checks": []})
    refuse_invalid("check", {"ok": False, "kind": "fix", "exit": 2, "error": "no"})
    with pytest.raises(ValidationError, match=wrong):
        refuse_invalid("check", answer)


def test_kinds_are_those_of_the_schema_and_json_has_no_nan(capfd):
    kinds = schemas()["ending"]["properties"]["kind"]["enum"]
    assert set(kinds) == {*exit_codes.EXIT_KINDS.values(), exit_codes.DO_NOT_SHIP}
    assert exit_codes.add_exit_status([{"a": 1}], 0) == {"ok": True, "kind": "done", "exit": 0, "rows": [{"a": 1}]}
    assert exit_codes.add_exit_status({}, 77)["kind"] == "failed"
    exit_codes.write_json_line({"a": float("nan"), "b": [float("inf"), (1.5, {"c": -float("inf")})], "d": True})
    given = json.loads(capfd.readouterr().out, parse_constant=pytest.fail)
    assert given == {"a": None, "b": [None, [1.5, {"c": None}]], "d": True}
    assert exit_codes.add_exit_status({"kind": "do_not_ship", "exit": 2}, 2, "no")["kind"] == "do_not_ship"


def test_every_command_takes_json_as_a_flag_and_from_make(monkeypatch):
    monkeypatch.chdir(ROOT)
    for name in COMMAND_FILES:
        assert name in flag_commands("JSON")
        words = [name, "--config", "configs/run_starter.yaml"] if name in flag_commands("CONFIG") else [name]
        asked = [(["--json"], {}), ([], {"JSON": "1"}), ([], {"JSON": "0"}), ([], {"JSON": ""})]
        assert [read_request([*words, *flags], given).json for flags, given in asked] == [True, True, False, False]
        assert callable(command_function(name))
        assert help_line(name)


def test_a_request_has_the_value_of_every_flag_of_the_kind_that_the_table_says():
    absent = {"text": None, "path": None, "names": (), "count": None, "number": None, "switch": False}
    request = Request(command="plan", config=Path("a.yaml"))
    for name, variable in VARIABLES.items():
        if variable.has_flag and variable.kind != "launch":
            assert getattr(request, name.lower()) == absent[variable.kind] or name == "CONFIG", name
    given = read_request(["gpu-info", "--price", "2.5", "--full"], {"PRICE": "9"})
    assert (given.price, given.full, given.run) == (2.5, True, None)
    with pytest.raises(AttributeError, match="HARDWRE"):
        _ = request.hardwre


@pytest.fixture(scope="module")
def world(tmp_path_factory, tiny_llama) -> Iterator[Path]:
    """A folder with rows, documents, templates, a notebook, and a run that was stopped after its first step."""
    folder = tmp_path_factory.mktemp("commands")
    for name in ("documents", "templates", "given"):
        (folder / name).mkdir()
    for name in ("rows.jsonl", "raw.jsonl", "given/train.jsonl"):
        write_rows(folder / name, (chat(f"what is {n}?", f"it is {n}.") for n in range(40)))
    (folder / "documents" / "a.txt").write_text("A text of some length.\n" * 40)
    (folder / "templates" / "plain.jinja").write_text(CHATML)
    book(folder, "print('a cell')\n")
    write_peaks(folder / "peaks.csv", [{**ROW, "strategy": "tp"}])
    train = {"effective_batch_size": 4, "report_to": ["tensorboard"]}
    write_run(folder, tiny_llama, Path("rows.jsonl"), train=train, output={"dir": "outputs"})
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        trained = (f"train {TRAINED}begun train.stop_after_steps=1", f"train {TRAINED}whole")
        for words in (*trained, "merge --run whole --out merged"):
            assert main([*words.split(), "--config", "run.yaml"]) == 0
        shutil.copytree("outputs/begun", "outputs/old")
        yield folder
        main(["tb-stop", "--config", "run.yaml"])  # whichever tests ran, and in whatever order


SLOWLY = [name for name, case in COMMAND_CASES.items() if case.takes_minutes]
QUICK = [name for name in COMMAND_CASES if name not in SLOWLY]


@pytest.mark.build
@pytest.mark.parametrize("name", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOWLY)])
def test_the_answer_stands_alone_on_standard_output_and_parses(name, world, tiny_llama, tmp_path, monkeypatch, capfd):
    if name == "export-test":
        converter()
        monkeypatch.chdir(world)
        assert main(["export", "--config", "run.yaml", "--run", "whole", "--format", "gguf", "--out", "exported"]) == 0
    if name == "train-deepspeed" and find_spec("deepspeed") is None:
        pytest.skip("deepspeed is not installed here")
    case = COMMAND_CASES[name]
    config = ["--config", "run.yaml"] if name in flag_commands("CONFIG") else []
    given = shlex.split(case.words.format(world=world, model=tiny_llama))
    monkeypatch.chdir(world)
    monkeypatch.setenv("JSON", "1")
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\n"))
    if name == "push":
        Hub().take_the_place(monkeypatch)
    if name == "serve":  # it stays until it is ended
        monkeypatch.setattr("sft_play.finished.serve.TransformersService.wait", ended_at_once)
    monkeypatch.setenv("OUTPUT", str(tmp_path / "answers.jsonl"))
    monkeypatch.setenv("BROWSER", "")
    monkeypatch.setattr(sys, "executable", warm.python())  # of the ranks that it starts
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("ACCELERATE_CONFIG", str(tmp_path / "accelerate.yaml") if name == "setup-accelerate" else "none")
    capfd.readouterr()
    code = main([name, *config, *given])
    out, err = capfd.readouterr()
    # this run has no held-out rows, without which nothing ships
    assert code == (2 if name == "ship" or (name == "doctor" and code) else 0), out + err
    assert out.count("\n") == 1, out
    data = json.loads(out)
    refuse_invalid(name, data)
    fields = set(case.fields.split())
    if fields.isdisjoint(data):
        data = data["rows"][0]
    assert set(data) >= fields
    if case.fields == SUMMARY:
        assert (data["steps"], data["exit"]) == (2, 0)
        summary = json.loads((world / data["run"] / "summary.json").read_text())
        own = ("run", "ok", "kind", "best_step", "best_checkpoint")
        assert {key: value for key, value in data.items() if key not in own} == summary
        assert f"[{name}] Base model: " in err


def ended_at_once(service: Any) -> int:
    service._server.should_exit = True
    service._thread.join()
    return 0


def test_a_plan_that_refuses_a_run_is_its_answer(tmp_path, tiny_llama, sums, capfd, monkeypatch):
    config = write_run(tmp_path, tiny_llama, sums)
    small = replace(parse_hardware("cpu,ram=1GiB,cores=2"), ram_bytes=2**26, ram_free_bytes=2**26, named=False)
    monkeypatch.setattr("sft_play.launch.planning.detect_hardware", lambda: small)
    capfd.readouterr()
    assert main(["train", "--config", str(config)]) == 3
    out, err = capfd.readouterr()
    assert ("does not fit" in err, "{" in out) == (True, False)
    assert main(["train", "--config", str(config), "--json"]) == 3
    out, err = capfd.readouterr()
    assert ("does not fit" in err, json.loads(out)["fits"]) == (True, False)
    refuse_invalid("ending", json.loads(out))


def test_what_is_printed_beside_an_answer_goes_to_standard_error(capfd):
    with redirect_stdout_to_stderr(enabled=True):
        sys.stdout.write("ours\n")
        sys.stdout.flush()
        subprocess.run(["echo", "a child's"], check=True)
    sys.stdout.write("after\n")
    with redirect_stdout_to_stderr(enabled=False):
        sys.stdout.write("unasked\n")
    assert capfd.readouterr() == ("after\nunasked\n", "ours\na child's\n")


def test_words_and_json_are_of_one_object(capfd, monkeypatch, tmp_path):
    answer = CommandResult({"number": 7}, ["the number is 7"], exit_code=3)
    monkeypatch.setattr(load_module("gpu-info"), "run_diagnosing", lambda request: answer)
    assert (main(["gpu-info"]), capfd.readouterr()) == (3, ("[gpu-info] the number is 7\n", ""))
    assert main(["gpu-info", "--json", "--out", f"{tmp_path}/out.json"]) == 3
    expected = {"ok": False, "kind": "does_not_fit", "exit": 3, "error": "the number is 7", "number": 7}
    printed, beside = capfd.readouterr()
    assert (json.loads(printed), beside) == (expected, "")
    assert json.loads((tmp_path / "out.json").read_text()) == expected


def test_with_json_an_error_is_one_object_too(capfd, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for words in (["no-such-command"], ["plan", "--config", "nowhere.yaml"], ["chat", "--run", "no-such-run"]):
        for flags, variable in ((["--json"], ""), ([], "1"), ([], "0")):
            monkeypatch.setenv("JSON", variable)
            assert main([*words, *flags]) == 2
            printed, beside = capfd.readouterr()
            if variable == "0":
                assert printed == ""
                continue
            answer = json.loads(printed)
            refuse_invalid("ending", answer)
            assert (answer["kind"], words[-1] in answer["error"]) == ("fix", True)
            assert answer["error"] in beside  # people read it where they did before


def test_with_json_every_ending_has_its_kind(capfd, monkeypatch):
    def answer_of(raised: BaseException, program: Callable[[], object]) -> tuple[Any, ...]:
        def run(request):
            raise raised

        monkeypatch.setattr(load_module("gpu-info"), "run_diagnosing", run)
        monkeypatch.setattr(exit_codes, "_has_answered", False)
        with contextlib.suppress(ZeroDivisionError, SystemExit):
            program()
        answer = json.loads(capfd.readouterr().out)
        assert not answer["ok"]
        assert "hf_aaa" not in answer["error"]
        return answer["kind"], answer["exit"], answer["error"]

    secret = "hf_" + "a" * 34
    monkeypatch.setenv("HF_TOKEN", secret)
    for raised, kind in (
        (Interrupted("stopped; resume it"), "stopped"), (KeyboardInterrupt(), "stopped"),
        (DoesNotFit("no"), "does_not_fit"), (ConfigError(f"x {secret}"), "fix"),
    ):  # fmt: skip
        assert answer_of(raised, lambda: main(["gpu-info", "--json"]))[0] == kind
    monkeypatch.setattr(sys, "argv", ["sft-play", "gpu-info", "--json"])
    assert answer_of(ZeroDivisionError("ours"), entry.main) == ("failed", 1, "ours")
    reworded = ImportError("a library's word for Ctrl-C")
    reworded.__context__ = KeyboardInterrupt()
    assert answer_of(reworded, entry.main)[:2] == ("stopped", 130)
    kind, code, error = answer_of(SystemExit("a library gave up"), entry.main)
    assert (kind, code, "a library gave up" in error) == ("failed", 1, True)
    monkeypatch.setenv("RANK", "1")  # of a launcher's ranks the first answers
    assert (main(["plan", "--config", "nowhere.yaml", "--json"]), capfd.readouterr().out) == (2, "")


def test_a_command_imports_its_own_file_alone():
    code = "import sys; from sft_play import cli; cli.import_command(['plan', '--config', 'x']); print(*sys.modules)"
    ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    own = {f"sft_play.commands.{name}" for name in COMMAND_FILES.values()} & set(ended.stdout.split())
    assert own == {"sft_play.commands.plan"}
