"""Each command for a finished run ends by naming the next one, as words of a shell."""

from __future__ import annotations

import io
import re
import shlex
import sys

import pytest

from tests.command_cases import COMMAND_CASES
from tests.conftest import ROOT


def test_every_command_after_training_says_what_comes_next():
    text = (ROOT / "Makefile").read_text()
    group = text[text.index("##@ After training") :].split("\n##@ ")[0]
    with_next_commands = {name for name, case in COMMAND_CASES.items() if case.next_commands}
    assert set(re.findall(r"^([a-z-]+):.*## ", group, re.MULTILINE)) == with_next_commands | {"chat"}


@pytest.mark.parametrize("command", [name for name, case in COMMAND_CASES.items() if case.next_commands])
def test_an_answer_ends_by_naming_the_next_command(command):
    for answer, words in COMMAND_CASES[command].next_commands:
        _, mark, said = answer().lines()[-1].rpartition("Next: ")
        assert (mark, shlex.split(said)[: len(words)]) == ("Next: ", words)


@pytest.mark.build
def test_a_chat_in_a_terminal_does_too_and_one_over_a_pipe_says_answers_alone(
    tmp_path, tiny_llama, command, monkeypatch
):
    from tests.finished_runs import finished_run

    folder = finished_run(tmp_path / "first", tiny_llama)
    monkeypatch.setattr("builtins.input", lambda prompt: "/exit")
    monkeypatch.setattr(sys, "stdin", io.StringIO("/exit\n"))
    assert "Next: " not in command("chat", "--run", str(folder))[1]
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stdin", terminal)
    code, said = command("chat", "--run", str(folder))
    assert (code, said.rstrip().splitlines()[-1]) == (0, f"Next: make eval RUN={folder}")
