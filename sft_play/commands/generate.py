"""`generate`: the files of a checkout that are written from the code."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path

from sft_play.commands.answer import Answer
from sft_play.commands.request import Request
from sft_play.config.reference import write_generated
from sft_play.facts.models.config_fields import CLASS_DEFAULTS, DEFAULTS_FILE, defaults_text
from sft_play.process.variables import help_lines
from sft_play.starter import files

HELP = {
    "generate": "rewrite generated files: configs/reference.yaml, configs/run.schema.json, the starter's data, "
    "transformers' defaults of configs, the variables in make's help"
}
_VARIABLES_OF_HELP = re.compile(r"(?m)(?<=^##@ Variables \(from the command line or the environment\)\n)(#: .*\n)*")


def run(request: Request) -> Answer:
    """Write each of them below this folder."""
    written = [*write_generated(Path.cwd()), *files.write(Path.cwd())]
    table = Path("sft_play/facts/models") / DEFAULTS_FILE.name
    if (Path.cwd() / table).is_file():
        renewed = import_module("sft_play.trace.meta_shape").class_defaults(CLASS_DEFAULTS)
        (Path.cwd() / table).write_text(defaults_text(renewed), encoding="utf-8")
        written.append(table)
    for makefile in (Path("Makefile"), Path("benchmarks/Makefile")):
        if makefile.is_file():
            text = with_variables(makefile.read_text(encoding="utf-8"), maintaining=makefile.parent.name != "")
            makefile.write_text(text, encoding="utf-8")
            written.append(makefile)
    return Answer({"ok": True, "written": [str(path) for path in written]}, [f"wrote {path}" for path in written])


def with_variables(makefile: str, *, maintaining: bool) -> str:
    """A Makefile with the help of its variables as the table has it; with `maintaining`, that of benchmarks/."""
    lines = "".join(f"#: {line}\n" for line in help_lines(maintaining=maintaining))
    return _VARIABLES_OF_HELP.sub(lambda _: lines, makefile, count=1)
