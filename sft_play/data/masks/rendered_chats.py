"""Texts that are chats already, rendered by the run's own template: read back as the messages that
they are.

Many sets (guanaco's layout, sets made for Unsloth) hold `<|im_start|>user…` in a text column. As
plain text every token of it would be trained, the user's too, with the marks as the characters that
spell them. What the template writes between two turns is learned by rendering conversations of
known texts, the text is cut there, and the messages count only if the template renders them as this
very text again.
"""

import itertools
import re
from collections.abc import Iterator, Sequence

from sft_play.data.masks.fitted_template import FittedTemplate, control_tokens, find_control_tokens
from sft_play.data.sources.messages import Message

_PROBE_ROLES: tuple[tuple[str, ...], ...] = (
    ("user", "assistant"),
    ("user", "assistant", "user", "assistant", "user", "assistant"),
    ("system", "user", "assistant"),
    ("system", "user", "assistant", "user", "assistant"),
)
# Neighbours of the first turn and of the last.
_START, _END = "", ""


class RenderedChatParser:
    """Reads texts as chats of one template."""

    def __init__(self, template: FittedTemplate, *, special_tokens: Sequence[str]) -> None:
        self._template = template
        self._special_tokens = tuple(special_tokens)
        # What the template writes between turns, by the roles before and after; some gaps have
        # several forms.
        forms: dict[tuple[str, str], dict[str, None]] = {}
        for roles in _PROBE_ROLES:
            texts = [f"qzx{index}{role}qzx" for index, role in enumerate(roles)]
            messages = [
                {"role": role, "content": text} for role, text in zip(roles, texts, strict=True)
            ]
            # gaps and texts in turn
            parts = re.split(f"({'|'.join(texts)})", template.try_render(messages, ()))
            if parts[1::2] != texts:  # dropped or written elsewhere: such rows are none of these
                continue
            neighbours = itertools.pairwise((_START, *roles, _END))
            for key, gap in zip(neighbours, parts[::2], strict=True):
                forms.setdefault(key, {})[gap] = None
        self._gaps = {
            key: tuple(sorted(gaps, key=len, reverse=True)) for key, gaps in forms.items()
        }
        # Control tokens that the template writes around turns.
        all_gaps = "".join(itertools.chain.from_iterable(self._gaps.values()))
        self._marks = frozenset(filter(str.strip, control_tokens(all_gaps, special_tokens)))
        # Tokens with which all conversations begin, and which no later turn has before it.
        starts = [
            gap.lstrip() for (role, _), gaps in self._gaps.items() if role == _START for gap in gaps
        ]
        later_gaps = [
            gap for (role, _), gaps in self._gaps.items() if role != _START for gap in gaps
        ]
        self._bos_tokens = [
            token
            for token in special_tokens
            if starts
            and all(gap.startswith(token) for gap in starts)
            and not any(token in gap for gap in later_gaps)
        ]

    def parse(self, text: str) -> tuple[Message, ...] | None:
        """Parse a text that the template rendered back into its messages; None if it is no such
        text."""
        bare_text = self._strip_surroundings(text)
        if not any(
            mark.strip() and mark.strip() in text
            for mark in self._gaps.get(("user", "assistant"), ())
        ):
            return None
        for messages in itertools.islice(self._candidate_chats(bare_text), 8):
            if any(mark in message["content"] for message in messages for mark in self._marks):
                continue  # a turn of a role that was not looked for, or a mark that somebody typed
            rendered = self._strip_surroundings(self._template.try_render(messages, ()))
            # a template may write a system prompt of its own before the first turn, as it does for
            # rows of messages
            if rendered == bare_text or (
                messages[0]["role"] != "system" and rendered.endswith(bare_text)
            ):
                return messages
        return None

    def _strip_surroundings(self, text: str) -> str:
        """A text without what may stand around a conversation and not in it: BOS, white space and
        end of text."""
        text = self._strip_bos(text.strip())
        ends = [end.strip() for end in self._gaps.get(("assistant", _END), ()) if end.strip()]
        for token in self._special_tokens:
            # one more special token behind the turn's own end
            if text.endswith(token) and any(
                text.removesuffix(token).rstrip().endswith(end) for end in ends
            ):
                return text.removesuffix(token).rstrip()
        return text

    def _candidate_chats(self, text: str) -> Iterator[tuple[Message, ...]]:
        for role in ("system", "user"):
            for start in self._gaps.get((_START, role), ()):
                bare_start = self._strip_bos(start)
                # behind a system prompt of the template's own too, which sets leave out
                starts = [
                    0,
                    *(
                        offset
                        for offset, _ in find_control_tokens(bare_start, self._special_tokens)
                        if offset
                    ),
                ]
                for beginning in (bare_start[offset:] for offset in starts):
                    # only a system prompt may begin without a mark, and only where the template
                    # writes none
                    if not text.startswith(beginning) or not (
                        beginning.strip() or (role == "system" and not bare_start)
                    ):
                        continue
                    messages = self._split_turns(text[len(beginning) :], role)
                    if messages is not None:
                        yield messages

    def _strip_bos(self, text: str) -> str:
        text = text.lstrip()
        bos = next((token for token in self._bos_tokens if text.startswith(token)), "")
        return text.removeprefix(bos).lstrip()

    def _split_turns(self, text: str, role: str) -> tuple[Message, ...] | None:
        """The turns of a text that begins with the content of a turn of this role; None where one
        does not end."""
        messages: list[Message] = []
        while True:
            matches = [
                (offset, -len(gap), next_role)
                for (previous_role, next_role), gaps in self._gaps.items()
                if previous_role == role and next_role != _END
                for gap in gaps
                if gap.strip() and (offset := text.find(gap)) >= 0
            ]
            if not matches:
                break
            offset, negative_size, next_role = min(matches)
            messages.append({"role": role, "content": text[:offset]})
            text, role = text[offset - negative_size :], next_role
        if role != "assistant" or not messages:
            return None
        ends = sorted(
            (end.strip() for end in self._gaps.get((role, _END), ())), key=len, reverse=True
        )
        end = next((end for end in ends if end and text.rstrip().endswith(end)), "")
        return (
            *messages,
            {"role": role, "content": text.rstrip().removesuffix(end).rstrip() if end else text},
        )
