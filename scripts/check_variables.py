"""Prints what is wrong with the targets and variables on make's command line, or nothing: the
Makefile asks first.

    check_variables.py TARGET… --targets TARGET… --given NAME… --empty NAME… [--json]
    check_variables.py --about TARGET    what the target does, and its variables (make help TARGET)

With --json it prints the object that the command would have answered with.
Standard library only, and nothing newer than Python 3.6, like what it reads.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from sft_play.exit_codes import EXIT_USER, write_missing_answer
from sft_play.variables import command_line_problem, target_help


def main(words):
    """Print the refusal, if there is one; the exit code is 0 either way, so that make knows that
    the check ran."""
    if words[:1] == ["--about"]:
        sys.stdout.write(
            "\n".join(target_help(Path("Makefile").read_text(encoding="utf-8"), words[1])) + "\n"
        )
        return 0
    is_json = words[-1:] == ["--json"]
    words = words[: len(words) - is_json]
    here, given, empty = (words.index(option) for option in ("--targets", "--given", "--empty"))
    text = command_line_problem(
        words[:here], words[given + 1 : empty], words[empty + 1 :], words[here + 1 : given]
    )
    if text and is_json:
        write_missing_answer(EXIT_USER, text)
    elif text:
        sys.stdout.write(text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
