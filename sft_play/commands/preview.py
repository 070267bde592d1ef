"""`preview`: the tokens of examples with the trained part in colour, here and as a page."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from sft_play.commands.answer import Answer, answer_of
from sft_play.commands.request import Request
from sft_play.config.load import LoadedConfig, load_config
from sft_play.data.preview import (
    TERMINAL_PIECES,
    Shown,
    TokenBytes,
    plain_lines,
    row_numbered,
    rows_spread,
    shown_rows,
    terminal_text,
    visible,
)
from sft_play.data.preview_page import PAGE_PIECES, html_page
from sft_play.data.sources.examples import ExampleReader
from sft_play.data.sources.files import data_paths
from sft_play.data.written import OutputFolder
from sft_play.diagnose.row_tools import first_stage, prepare_hub, refuse_source, tools_of

HELP = {"preview": "show the tokens of N examples (or of ROW) with the trained part in colour, here and as a page"}
DEFAULT_PAGE = Path("data/preview.html")
DEFAULT_EXAMPLES = 5


def run(request: Request) -> Answer | int:
    """The examples, in colour where the terminal has colours."""
    loaded = load_config(request.config, overrides=request.overrides)
    answer = preview(loaded, count=request.n, row=request.row, page=request.out, force=request.force)
    if not request.json and answer.draw(sys.stdout):  # not through the log, which keeps no colours
        return 0
    return answer_of(answer, to_out=False)


@dataclass(frozen=True)
class Preview:
    """Examples to look at, and the page that shows them."""

    source: str
    rows: int
    examples: tuple[Shown, ...]
    notes: tuple[str, ...]
    page: Path
    most: int = TERMINAL_PIECES

    ok: bool = True

    def lines(self) -> list[str]:
        """The examples as plain text, trained parts in [[ ]]."""
        head = f"{len(self.examples):,} of {self.rows:,} rows of {self.source}; trained parts in [[ ]]"
        body = [line for shown in self.examples for line in ["", *plain_lines(shown, most=self.most)]]
        return [head, *self.notes, *body, "", f"Page: {self.page}"]

    def as_json(self) -> dict[str, Any]:
        """`ok`, `page`, `source`, `rows` and the examples with ids and labels."""
        examples = [shown.as_json() for shown in self.examples]
        return {"ok": self.ok, "page": str(self.page), "source": self.source, "rows": self.rows, "examples": examples}

    def draw(self, stream: TextIO) -> bool:
        """The examples in colour where `stream` is a terminal with colours; elsewhere nothing is drawn, and false."""
        from rich.console import Console

        console = Console(file=stream, highlight=False, markup=False, emoji=False)
        if not console.is_terminal or console.no_color or console.color_system is None:
            return False
        console.print(f"{len(self.examples):,} of {self.rows:,} rows of {visible(self.source)}; trained parts green")
        for note in self.notes:
            console.print(visible(note))
        for shown in self.examples:
            console.print()
            console.print(terminal_text(shown, most=self.most))
        console.print(f"Page: {visible(str(self.page))}")
        return True


def preview(loaded: LoadedConfig, *, count: int | None, row: int | None, page: Path | None, force: bool) -> Preview:
    """Examples of the training file with their exact tokens, as a page too: `count` of them, evenly over the file, or
    one row, counted from 1.

    Raises:
        DataError: the file cannot be read, has no such row, or the page was edited since.
        TokenizerError: the tokenizer or its template cannot be used.
    """
    loaded, of_stage = first_stage(loaded)
    config = loaded.config
    paths = data_paths(config.data)
    path = paths.train
    prepare_hub(config)
    reader = ExampleReader(path, config.data, split="train", text_wanted=config.task_mode == "cpt")
    chosen = row_numbered(reader, row) if row is not None else rows_spread(reader, count or DEFAULT_EXAMPLES)
    tools = tools_of(config)
    names = TokenBytes(tools.tokenizer)
    examples = tuple(one for number, raw in chosen for one in shown_rows(number, raw, reader, tools.maker, names))
    target = page or DEFAULT_PAGE
    refuse_source(target, [("train", path)])
    others = [source.name for source in paths.sources[1:]]
    unseen = [f"The first of data.sources; not shown: {', '.join(others)}"] if others else []
    notes = (*of_stage, *tools.notes, *unseen)
    about = [
        f"{len(examples):,} of {reader.rows:,} rows of {path} ({reader.format}); config {loaded.path}",
        f"model {config.model.name}, task_mode {config.task_mode}, data.loss_on {config.data.loss_on}, "
        f"max_seq_len {tools.maker.max_seq_len:,}",
        *notes,
    ]
    if config.task_mode == "cpt":
        about.append("task_mode cpt joins the documents and cuts them into full blocks; here each is shown whole")
    with OutputFolder(target.parent, (target.name,), force=force, command="preview") as folder:
        folder.open(target.name).write(html_page(examples, title=f"Preview of {Path(str(path)).name}", about=about))
    most = PAGE_PIECES if row is not None else TERMINAL_PIECES
    return Preview(str(path), reader.rows, examples, notes, target, most)
