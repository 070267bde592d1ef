"""An Ollama Modelfile: the chat template of training, written again in Go's template language, and checked.

Ollama does not run the template inside a GGUF. Its own is made of the texts that the chat template writes between
probe texts. A conversation alternates (Ollama joins neighbouring messages of one role), so it does not matter where
one turn ends and the next begins between two of them. What Ollama makes of conversations with its template has to be
the chat template's text, character by character.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from sft_play.data.masks.sandbox import RenderError
from sft_play.errors import TokenizerError
from sft_play.finished.export.check_export import EnginePrompts, probe_conversations
from sft_play.finished.run import FinishedRun

_SYSTEM, _TURNS = "Qsys0Q", ("Quser1Q", "Qbot1Q", "Quser2Q", "Qbot2Q", "Quser3Q")


class UnsupportedTemplateError(TokenizerError):
    """The chat template does what a Modelfile cannot say."""


# The chat template: messages to text up to where the answer begins; raises RenderError where it refuses them.
RenderFunction = Callable[[Sequence[Mapping[str, str]]], str]


@dataclass(frozen=True)
class TemplateParts:
    """What a chat template writes around the texts of a conversation."""

    # Before the first question, where there is no system prompt.
    start: str
    question_to_answer: str
    answer_to_question: str
    # After the last question, up to where the answer begins.
    end: str
    # Around the system prompt, up to the question that follows it; None where the template takes
    # none.
    system: tuple[str, str] | None = None
    # True if the system prompt stands before the last question, after `start` or
    # `answer_to_question`; else it stands before the first question, in the place of `start`.
    is_system_last: bool = False


def build_modelfile(run: FinishedRun, prompts: EnginePrompts, file: str, *, adds_bos: bool, context: int) -> str:
    """The text of a Modelfile. `adds_bos`: the engine puts BOS before a prompt. `context`: positions of the
    model. Raises UnsupportedTemplateError where a Modelfile cannot render what the chat template does."""
    tokenizer = prompts.tokenizer
    stops = [tokenizer.decode([token], skip_special_tokens=False) for token in prompts.stop_ids]
    for stop in stops:
        # Ollama stops at a text, not at a token: one that ordinary tokens spell too would end answers early
        if len(tokenizer(stop, add_special_tokens=False)["input_ids"]) != 1:
            raise UnsupportedTemplateError(f"the stop token {stop!r} is not one token when it is written as text")
    if prompts.is_plain_text:
        return format_modelfile(file, "{{ .Prompt }}", stops=stops, context=context)
    bos = str(tokenizer.bos_token) if adds_bos else ""
    try:
        template = go_template(learn_template_parts(prompts.render, bos=bos))
        return format_modelfile(file, template, stops=stops, context=context)
    except (UnsupportedTemplateError, RenderError) as error:
        raise UnsupportedTemplateError(
            f"the chat template cannot be written as an Ollama template: {error}. llama-server "
            f"--jinja runs it itself: make export FORMAT=gguf RUN={run.folder.shell_path}"
        ) from None


def format_modelfile(file: str, template: str, *, stops: Sequence[str], context: int) -> str:
    """The text of a Modelfile. `context`: tokens of the longest conversation; Ollama's own limit cuts prompts silently.
    Raises UnsupportedTemplateError where the template cannot be quoted."""
    if '"""' in template:
        raise UnsupportedTemplateError('it writes """, which ends a text in a Modelfile')
    # greedy, as the run's own evaluation and every comparison here
    parameters = [f"stop {json.dumps(stop, ensure_ascii=False)}" for stop in stops]
    parameters += [f"num_ctx {context}", "temperature 0"]
    lines = [f"FROM ./{file}", f'TEMPLATE """{template}"""', *(f"PARAMETER {parameter}" for parameter in parameters)]
    return "\n".join(lines) + "\n"


def learn_template_parts(render: RenderFunction, *, bos: str = "") -> TemplateParts:
    """Learn the parts of a chat template from probe conversations. `bos`: a text at the beginning that the engine puts
    there. Raises UnsupportedTemplateError where they do not make up what the template writes."""
    turns = [{"role": ("user", "assistant")[index % 2], "content": text} for index, text in enumerate(_TURNS)]
    start, *between, end = _split_at(render(turns), _TURNS)
    parts = TemplateParts(start.removeprefix(bos), between[0], between[1], end)
    try:
        text = render([{"role": "system", "content": _SYSTEM}, *turns])
    except RenderError:
        text = ""
    if _SYSTEM in text and text.index(_SYSTEM) < text.index(_TURNS[0]):
        before, after, *_ = _split_at(text, (_SYSTEM, *_TURNS))
        parts = replace(parts, system=(before.removeprefix(bos), after))
    elif _SYSTEM in text:
        *_, before, after, _ = _split_at(text, (*_TURNS[:-1], _SYSTEM, _TURNS[-1]))
        parts = replace(parts, system=(before.removeprefix(between[1]), after), is_system_last=True)
    for messages in probe_conversations():
        if messages[0]["role"] == "system" and parts.system is None:
            continue
        if render_as_ollama(parts, messages) != render(messages).removeprefix(bos):
            roles = ", ".join(message["role"] for message in messages)
            raise UnsupportedTemplateError(f"it renders a conversation ({roles}) differently")
    return parts


def _split_at(text: str, marks: Sequence[str]) -> list[str]:
    pieces = []
    for mark in marks:
        piece, matched, text = text.partition(mark)
        if not matched or mark in text:
            raise UnsupportedTemplateError("it does not write every turn once and in order")
        pieces.append(piece)
    return [*pieces, text]


def go_template(parts: TemplateParts) -> str:
    """The parts as a template in Go's language."""

    def escape(literal: str) -> str:
        return literal.replace("{{", '{{ "{{" }}')  # Go's way to write braces that begin no action

    start, question, index = escape(parts.start), "{{ .Content }}", ""
    if parts.system is not None:
        before, after = map(escape, parts.system)
        if parts.is_system_last:
            condition, index = "and $.System (eq (len (slice $.Messages $i)) 1)", "$i, $_ := "
            question = f"{{{{ if {condition} }}}}{before}{{{{ $.System }}}}{after}{{{{ end }}}}{question}"
        else:
            start = f"{{{{ if .System }}}}{before}{{{{ .System }}}}{after}{{{{ else }}}}{start}{{{{ end }}}}"
    answer = f"{escape(parts.question_to_answer)}{{{{ .Content }}}}{escape(parts.answer_to_question)}"
    return (
        f'{start}{{{{ range {index}.Messages }}}}{{{{ if eq .Role "user" }}}}{question}'
        f'{{{{ else if eq .Role "assistant" }}}}{answer}{{{{ end }}}}{{{{ end }}}}{escape(parts.end)}'
    )


def render_as_ollama(parts: TemplateParts, messages: Sequence[Mapping[str, str]]) -> str:
    """What Ollama makes of a conversation, whose roles alternate, with the template of these parts."""
    contents, text, system = [message["content"] for message in messages], parts.start, ""
    if messages[0]["role"] == "system" and parts.system is not None:
        system = parts.system[0] + contents.pop(0) + parts.system[1]
        text = text if parts.is_system_last else system
    for index, content in enumerate(contents):
        if index == len(contents) - 1 and parts.is_system_last:
            text += system
        is_answer = index % 2 == 1
        text += parts.question_to_answer + content + parts.answer_to_question if is_answer else content
    return text + parts.end
