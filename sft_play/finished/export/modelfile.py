"""An Ollama Modelfile: the chat template of training, written again in Go's template language, and checked.

Ollama does not run the template inside a GGUF. Its own is learnt from what the chat template writes around probe texts
(`template_parts`); then a small evaluator of Go's templates (`go_template`) renders conversations with it, and each has
to be the chat template's text.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from sft_play.errors import DataError
from sft_play.finished.answer.prompts import CHECKED_ROWS, Prompts, probes
from sft_play.finished.export.go_template import evaluate, go_template
from sft_play.finished.export.saved_configs import stop_tokens
from sft_play.finished.export.template_parts import NoGoTemplate, learn
from sft_play.finished.load import held_out
from sft_play.finished.run import FinishedRun

_LONGEST_STOP = 64


def modelfile_of(run: FinishedRun, prompts: Prompts, file: str, *, adds_bos: bool) -> tuple[str, tuple[str, ...]]:
    """The Modelfile, and notes about rows that it renders differently. `adds_bos`: the engine puts BOS before a prompt.

    Raises:
        NoGoTemplate: a Modelfile cannot render what the chat template does.
    """
    tokenizer = prompts.tokenizer
    stops = [
        tokenizer.decode([token], skip_special_tokens=False)
        for token in stop_tokens(run, tokenizer, prompts.configured_stops)
    ]
    for stop in stops:
        # Ollama stops at a text, not at a token: one that ordinary tokens spell too would end answers early
        if len(tokenizer(stop, add_special_tokens=False)["input_ids"]) != 1:
            raise NoGoTemplate(f"the stop token {stop!r} is not one token when it is written as text")
    context = run.plan().max_seq_len
    if prompts.is_text:
        return modelfile(file, "{{ .Prompt }}", stops=stops, system=None, context=context), ()
    bos = str(tokenizer.bos_token) if adds_bos else ""
    try:
        parts = learn(prompts.render, tokenizer.all_special_tokens)
        template = go_template(parts, bos=bos)
        _check_probes(prompts, template, bos=bos, has_system=parts.system is not None)
    except NoGoTemplate as error:
        raise NoGoTemplate(
            f"the chat template cannot be written as an Ollama template: {error}. Ollama would send other prompts than "
            "training did. llama-server --jinja runs the chat template itself: make export FORMAT=gguf "
            f"RUN={run.folder.quoted}"
        ) from None
    notes = _rows_rendered_differently(run, prompts, template, bos)
    if prompts.writes_date:
        notes = (*notes, f"The chat template writes the date; the Modelfile has that of the run ({prompts.today})")
    return modelfile(file, template, stops=stops, system=parts.default_system, context=context), notes


def _check_probes(prompts: Prompts, template: str, *, bos: str, has_system: bool) -> None:
    for messages in probes():
        if messages[0]["role"] == "system" and not has_system:
            continue
        wanted = prompts.render(messages).removeprefix(bos)
        if evaluate(template, messages) != wanted:
            roles = ", ".join(message["role"] for message in messages)
            raise NoGoTemplate(f"it renders a conversation ({roles}) differently")


def _rows_rendered_differently(run: FinishedRun, prompts: Prompts, template: str, bos: str) -> tuple[str, ...]:
    """A note where rows of the run would be rendered differently: tools, other roles, white space that is stripped."""
    try:
        rows = prompts.of_rows(held_out(run).split, CHECKED_ROWS)
    except DataError:
        return ()
    plain = [row for row in rows if row.is_plain]
    same = sum(evaluate(template, row.messages) == row.text.removeprefix(bos) for row in plain)
    if same == len(rows):
        return ()
    return (
        f"Ollama: {len(rows) - same} of {len(rows)} prompts of the run's rows are rendered differently (tools, other "
        "roles, or white space that the chat template strips)",
    )


def modelfile(file: str, template: str, *, stops: Sequence[str], system: str | None, context: int) -> str:
    """The text of a Modelfile. `context`: tokens of the longest conversation; Ollama's own limit cuts prompts silently.

    Raises:
        NoGoTemplate: a text in it cannot be quoted.
    """
    for text in (template, system or "", *stops):
        if '"""' in text:
            raise NoGoTemplate('it writes """, which ends a text in a Modelfile')
    lines = [f"FROM ./{file}", f'TEMPLATE """{template}"""']
    if system is not None:
        lines.append(f'SYSTEM """{system}"""')
    lines += [f"PARAMETER stop {json.dumps(stop, ensure_ascii=False)}" for stop in stops if len(stop) <= _LONGEST_STOP]
    # greedy, as the run's own evaluation and every comparison here
    lines += [f"PARAMETER num_ctx {context}", "PARAMETER temperature 0"]
    return "\n".join(lines) + "\n"
