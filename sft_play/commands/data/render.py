"""`render`: the text that the model will see, one row per example, with its mask as spans."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sft_play.commands.answer import Answer, answer_of
from sft_play.commands.data.rows import first_stage, refuse_source
from sft_play.commands.request import Request
from sft_play.config.load import LoadedConfig, load_config
from sft_play.data.rendered import RenderedFile, refuse_bad, render_file
from sft_play.data.sources.files import data_paths, split_of
from sft_play.data.written import OutputFolder
from sft_play.diagnose.row_tools import SPLITS, prepare_hub, tools_of
from sft_play.errors import DataError

HELP = {"render": "write the text that the model will see, one row per example, with its mask as spans"}
DEFAULT_RENDERED = Path("data/rendered")


def run(request: Request) -> Answer:
    """Write the rows, and answer with their counts."""
    loaded = load_config(request.config, overrides=request.overrides)
    return answer_of(render(loaded, out=request.out, force=request.force), to_out=False)


@dataclass(frozen=True)
class Renderings:
    """What `make render` wrote."""

    files: tuple[RenderedFile, ...]
    notes: tuple[str, ...]
    ok: bool = True

    def lines(self) -> list[str]:
        """Each file's lines."""
        return [*self.notes, *(line for file in self.files for line in file.lines())]

    def as_json(self) -> dict[str, Any]:
        """`ok`, and each file with its counts."""
        return {"ok": self.ok, "files": [file.as_json() for file in self.files], "notes": list(self.notes)}


def render(loaded: LoadedConfig, *, out: Path | None, force: bool) -> Renderings:
    """The text that the model will see with its mask as spans, one JSON row per example.

    Args:
        out: a file for the training rows alone, or a folder for all; data/rendered where it is None.

    Raises:
        DataError: rows that cannot be used (unless data.on_bad_row=skip), or a file that was edited since; nothing is
            written then.
        TokenizerError: the tokenizer or its template cannot be used.
    """
    loaded, of_stage = first_stage(loaded)
    config = loaded.config
    paths = data_paths(config.data)
    prepare_hub(config)
    tools = tools_of(config)
    whole_folder = out is None or out.is_dir()
    folder = out if out is not None and out.is_dir() else DEFAULT_RENDERED if out is None else out.parent
    if not whole_folder and len(paths.sources) > 1:
        raise DataError(f"OUT={out} is one file, and data.sources names {len(paths.sources)}; name an existing folder")
    files = list(paths.files()) if whole_folder else [("train", paths.train)]
    names: dict[str, str] = {}
    for part, _ in files:
        source = part.removeprefix("source ").removesuffix(" (val)")
        name = f"{split_of(part)}-{source}.jsonl" if source != part else f"{split_of(part)}.jsonl"
        names[part] = name if whole_folder or out is None else out.name
    # of splits that this run lacks too: a file of an earlier run under such a name must not pass for this one's
    announced = tuple(names.values())
    if whole_folder:
        announced = tuple(dict.fromkeys([*(f"{split}.jsonl" for split in (*SPLITS, "text")), *announced]))
    for name in names.values():
        refuse_source(folder / name, files)
    with OutputFolder(folder, announced, force=force, command="render") as written:
        rendered = [
            render_file(path, split_of(part), written.open(names[part]), folder / names[part], config.data, tools.maker)
            for part, path in files
        ]
        refuse_bad(rendered, config.data)
    return Renderings(tuple(rendered), (*of_stage, *paths.notes, *tools.notes))
