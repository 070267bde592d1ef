"""Prints what is wrong with the targets and variables on make's command line, or nothing: the
Makefile asks first.

    check_variables.py TARGET… --targets TARGET… --given NAME… --empty NAME… --make PID [--json]
    check_variables.py --about TOPIC    what a target, variable or setting is (make help TOPIC)

With --json it prints the object that the command would have answered with.
Standard library only, and nothing newer than Python 3.6, like what it reads.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from sft_play.exit_codes import (
    EXIT_USER,
    add_exit_status,
    wants_json,
    write_json_line,
    write_missing_answer,
)
from sft_play.variables import command_line_problem, repeated_variable_problem, topic_help


def main(words):
    """Print the refusal, if there is one; the exit code is 0 either way, so that make knows that
    the check ran."""
    if words[:1] == ["--about"]:
        lines = topic_help(Path("Makefile").read_text(encoding="utf-8"), words[1])
        if wants_json(()):
            write_json_line(add_exit_status({"topic": words[1], "help": lines}, 0))
        else:
            sys.stdout.write("\n".join(lines) + "\n")
        return 0
    is_json = words[-1:] == ["--json"]
    words = words[: len(words) - is_json]
    here, given, empty, make = (
        words.index(option) for option in ("--targets", "--given", "--empty", "--make")
    )
    text = command_line_problem(
        words[:here], words[given + 1 : empty], words[empty + 1 : make], words[here + 1 : given]
    ) or repeated_variable_problem(_make_words(words[make + 1]))
    if text and is_json:
        write_missing_answer(EXIT_USER, text)
    elif text:
        sys.stdout.write(text + "\n")
    return 0


def _make_words(pid):
    """The words that make was called with, which keeps of a variable given twice the last alone;
    none where the system does not show them."""
    try:
        text = Path("/proc/" + pid + "/cmdline").read_bytes().decode("utf-8", "replace")
    except OSError:
        return []
    return text.split("\0")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
