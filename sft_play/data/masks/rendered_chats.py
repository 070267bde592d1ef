"""Texts that are chats already, rendered by the run's own template: read back as the messages that they are.

Many sets (guanaco's layout, sets made for Unsloth) hold `<|im_start|>user…` in a text column. As plain text every token
of it would be trained, the user's too, with the marks as the characters that spell them. What the template writes
between two turns is learned by rendering conversations of known texts, the text is cut there, and the messages count
only if the template renders them as this very text again.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from sft_play.data.masks.fitted_template import FittedTemplate
from sft_play.data.masks.template import RenderError
from sft_play.data.masks.turn_ends import control_token_places, control_tokens
from sft_play.data.sources.messages import Message

_PROBES: tuple[tuple[str, ...], ...] = (
    ("user", "assistant"),
    ("user", "assistant", "user", "assistant", "user", "assistant"),
    ("system", "user", "assistant"),
    ("system", "user", "assistant", "user", "assistant"),
)
# Neighbours of the first turn and of the last.
_START, _END = "", ""
Gaps = dict[tuple[str, str], tuple[str, ...]]


class RenderedChats:
    """Reads texts as chats of one template."""

    def __init__(self, template: FittedTemplate, *, special: Sequence[str]) -> None:
        self._template = template
        self._gaps = _gaps_of(template)
        self._special = tuple(special)
        gaps = "".join(itertools.chain.from_iterable(self._gaps.values()))
        # Control tokens that the template writes around turns.
        self._marks = frozenset(filter(str.strip, control_tokens(gaps, special)))

    def read(self, text: str) -> tuple[Message, ...] | None:
        """The messages of a text that the template renders from them; None where it is no such text."""
        bare = self._bare(text)
        if not any(mark.strip() and mark.strip() in text for mark in self._gaps.get(("user", "assistant"), ())):
            return None
        for messages in itertools.islice(self._cuts(bare), 8):
            if any(mark in message["content"] for message in messages for mark in self._marks):
                continue  # a turn of a role that was not looked for, or a mark that somebody typed
            try:
                rendered = self._bare(self._template.rendered(messages, ()))
            except RenderError:
                continue
            # a template may write a system prompt of its own before the first turn, as it does for rows of messages
            if rendered == bare or (messages[0]["role"] != "system" and rendered.endswith(bare)):
                return messages
        return None

    def _bare(self, text: str) -> str:
        """A text without what may stand around a conversation and not in it: BOS, white space and end of text."""
        text = self._without_bos(text.strip())
        ends = [end.strip() for end in self._gaps.get(("assistant", _END), ()) if end.strip()]
        for token in self._special:
            # one more special token behind the turn's own end
            if text.endswith(token) and any(text.removesuffix(token).rstrip().endswith(end) for end in ends):
                return text.removesuffix(token).rstrip()
        return text

    def _is_bos(self, token: str) -> bool:
        """Whether all conversations begin with this token, and no later turn has it before it."""
        forms = [(before == _START, gap) for (before, _), gaps in self._gaps.items() for gap in gaps]
        starts = [gap.lstrip() for is_first, gap in forms if is_first]
        within = any(token in gap for is_first, gap in forms if not is_first)
        return bool(starts) and all(gap.startswith(token) for gap in starts) and not within

    def _cuts(self, text: str) -> Iterator[tuple[Message, ...]]:
        for role in ("system", "user"):
            for start in self._gaps.get((_START, role), ()):
                bare = self._without_bos(start)
                # behind a system prompt of the template's own too, which sets leave out
                places = [0, *(at for at, _ in control_token_places(bare, self._special) if at)]
                for begin in (bare[at:] for at in places):
                    # only a system prompt may begin without a mark, and only where the template writes none
                    if not text.startswith(begin) or not (begin.strip() or (role == "system" and not bare)):
                        continue
                    messages = self._turns(text[len(begin) :], role)
                    if messages is not None:
                        yield messages

    def _without_bos(self, text: str) -> str:
        text = text.lstrip()
        begin = next((token for token in self._special if text.startswith(token) and self._is_bos(token)), "")
        return text.removeprefix(begin).lstrip()

    def _turns(self, rest: str, role: str) -> tuple[Message, ...] | None:
        """The turns of a text that begins with the content of a turn of this role; None where one does not end."""
        messages: list[Message] = []
        while True:
            found = [
                (at, -len(gap), following)
                for (before, following), gaps in self._gaps.items()
                if before == role and following != _END
                for gap in gaps
                if gap.strip() and (at := rest.find(gap)) >= 0
            ]
            if not found:
                break
            at, size, following = min(found)
            messages.append({"role": role, "content": rest[:at]})
            rest, role = rest[at - size :], following
        if role != "assistant" or not messages:
            return None
        ends = sorted((end.strip() for end in self._gaps.get((role, _END), ())), key=len, reverse=True)
        end = next((end for end in ends if end and rest.rstrip().endswith(end)), "")
        return (*messages, {"role": role, "content": rest.rstrip().removesuffix(end).rstrip() if end else rest})


def _gaps_of(template: FittedTemplate) -> Gaps:
    """What the template writes between turns, by the roles before and after; of some there are several forms."""
    gaps: dict[tuple[str, str], dict[str, None]] = {}
    for roles in _PROBES:
        texts = [f"qzx{number}{role}qzx" for number, role in enumerate(roles)]
        messages = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=True)]
        try:
            rest = template.rendered(messages, ())
        except RenderError:
            continue
        before, found = _START, []
        for role, text in zip(roles, texts, strict=True):
            gap, is_there, rest = rest.partition(text)
            if not is_there:  # dropped or written elsewhere: such rows are none of these
                break
            found.append(((before, role), gap))
            before = role
        else:
            for key, gap in [*found, ((before, _END), rest)]:
                gaps.setdefault(key, {})[gap] = None
    return {key: tuple(sorted(forms, key=len, reverse=True)) for key, forms in gaps.items()}
