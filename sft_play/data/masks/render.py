"""Chats → tokens with a loss mask, through the tokenizer's own chat template.

`turns.py` finds and verifies where the turns are in the rendered text; here the trained ones
become labels. What cannot be found exactly is a bad row with its reason, never a guess, unless the
run YAML says so.

Shape letters: T tokens of one row.
"""

import contextlib
import copy
import functools
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import date
from typing import Any

from sft_play.config.schema import DataConfig
from sft_play.data.masks.image_processor import (
    ImageProcessor,
    ImageProcessorSource,
    cached_image_processor,
    expand_runs,
)
from sft_play.data.masks.rendered_chats import RenderedChatParser
from sft_play.data.masks.sandbox import RenderError
from sft_play.data.masks.template import (
    PLAIN_ROW,
    THINK_END,
    ChatTemplate,
    row_kind,
    select_template_kwargs,
)
from sft_play.data.masks.token_row import (
    CHAT,
    IGNORED,
    PROMPT_MISMATCH,
    TEMPLATE_REFUSES_ROW,
    TEXT,
    InexactMaskError,
    Span,
    TokenRow,
    count_trained_tokens,
)
from sft_play.data.masks.tokenizer import (
    Replacement,
    SpecialTokenGuard,
    TokenizerParts,
    conversation_texts,
    encode_with_mask,
    load_backend,
    mask_encoding,
    splice,
)
from sft_play.data.masks.turns import LocatedTurns, TurnLocator
from sft_play.data.sources.columns import find_rendered_mark
from sft_play.data.sources.formats import Chat, Example, Text
from sft_play.data.sources.images import IMAGE_MARK
from sft_play.data.sources.messages import AUTHOR_MESSAGE, Message, merge_turns
from sft_play.data.sources.raw import BadRow
from sft_play.data.sources.row_images import split_at_images
from sft_play.errors import ModelError, TokenizerError
from sft_play.log import one_line

LOST_TO_LENGTH = "every trained token lies beyond max_seq_len"
NO_END_TOKEN = "no token ends an answer, so the model would not learn to stop"
NOTE_RENDERED_CHAT = (
    "a text that is a chat, rendered by this chat template, is read as the chat that it is"
)
MOVE_SYSTEM_REMEDY = "data.system_into_user=true puts the system prompt before the first user turn"

# different chat_template_kwargs of rows: the template is probed for each, which takes a second and
# some memory
MAX_ROW_KWARGS = 64
CUTS_IMAGE = "max_seq_len would cut an image (data.image_pixels makes images smaller)"
TOO_LONG = "longer than max_seq_len (data.truncate=drop)"


class Renderer:
    """Renders examples with one tokenizer and a run's data section. `today` is the day for
    templates that write the date; `images` says where the base's processor of images is, which is
    loaded when a row has one. Raises TokenizerError where a token's characters cannot be
    known."""

    def __init__(
        self,
        tokenizer: Any,
        data: DataConfig | None = None,
        *,
        max_seq_len: int,
        today: date | None = None,
        images: ImageProcessorSource | None = None,
    ) -> None:
        self.images = images
        self.tokenizer_parts = TokenizerParts.from_tokenizer(tokenizer)
        self.data = data or DataConfig()
        self.max_seq_len = max_seq_len
        self.today = (
            date.fromisoformat(self.data.template_date)
            if self.data.template_date
            else today or date.today()
        )
        self.backend = load_backend(self.tokenizer_parts.backend_json)
        self._added_ids = frozenset(
            token_id for token_id, _, _ in self.tokenizer_parts.added_tokens
        )
        self._bos_id = self.tokenizer_parts.bos_id
        # by template, whether it is for rows with tools alone, and its variables
        self._turn_locators: dict[tuple[str, bool, str], TurnLocator | TokenizerError] = {}
        # rows' own chat_template_kwargs that were seen
        self._row_kwargs: set[str] = set()
        self._end_tokens_by_ends: dict[frozenset[str], tuple[str, ...]] = {}

    # What the template does.

    def turn_locator(
        self,
        *,
        with_tools: bool | None = None,
        kind: str = PLAIN_ROW,
        row_kwargs: Mapping[str, Any] | None = None,
    ) -> TurnLocator:
        """Return the locator of turns for rows with tools or without; with_tools=None: that of the
        template which most rows use. `kind` matters where data.chat_template_kwargs go by it;
        `row_kwargs` are the row's own. Raises TokenizerError."""
        templates = dict(self.tokenizer_parts.templates)
        if with_tools is None:
            # transformers takes `tool_use` for rows with tools where there is one, and `default`
            # for all others
            with_tools = "tool_use" in templates and "default" not in templates
        source = self.tokenizer_parts.template(with_tools=with_tools)
        # a template for all rows is probed once, without tools
        is_for_tools = with_tools and len(templates) > 1 and source != templates.get("default")
        variables = {
            **dict(self.tokenizer_parts.special_tokens_map),
            **select_template_kwargs(
                {**self.data.chat_template_kwargs, **(row_kwargs or {})}, kind
            ),
        }
        key = (source, is_for_tools, json.dumps(variables, sort_keys=True, default=str))
        if key not in self._turn_locators:
            try:
                template = ChatTemplate(source, variables=variables, today=self.today)
                special_texts = (
                    text for _, text, is_special in self.tokenizer_parts.added_tokens if is_special
                )
                self._turn_locators[key] = TurnLocator(
                    template,
                    special_tokens=[
                        *dict.fromkeys((*self.tokenizer_parts.special_tokens, *special_texts))
                    ],
                    eos_token=self.tokenizer_parts.eos_token,
                    with_tools=is_for_tools,
                )
            except TokenizerError as error:  # kept: every row would probe the broken template again
                self._turn_locators[key] = error
        locator = self._turn_locators[key]
        if isinstance(locator, TokenizerError):
            raise locator
        return locator

    def _locator_for(self, chat: Chat) -> TurnLocator:
        """The locator of a chat's turns. Raises InexactMaskError where there is none."""
        own_kwargs = json.dumps(chat.template_kwargs, sort_keys=True, default=str)
        if chat.template_kwargs and own_kwargs not in self._row_kwargs:
            if len(self._row_kwargs) >= MAX_ROW_KWARGS:
                raise InexactMaskError(
                    f"the rows have more than {MAX_ROW_KWARGS} different chat_template_kwargs",
                    "the template is probed with each of them",
                )
            self._row_kwargs.add(own_kwargs)
        with_tools = bool(chat.tools)
        try:
            return self.turn_locator(
                with_tools=with_tools, kind=row_kind(chat.messages), row_kwargs=chat.template_kwargs
            )
        except TokenizerError as error:
            reason = f"no chat template for rows {'with' if with_tools else 'without'} tools"
            raise InexactMaskError(reason, str(error)) from error

    @functools.cached_property
    def special_token_guard(self) -> SpecialTokenGuard:
        """The special tokens that texts of the data may hold."""
        end_tokens: list[str] = []
        for with_tools in (False, True):
            with contextlib.suppress(TokenizerError):
                end_tokens += self.turn_locator(with_tools=with_tools).ends.end_tokens
        return SpecialTokenGuard(self.tokenizer_parts, end_tokens)

    # Rows.

    def recover_chat(self, example: Example) -> Example:
        """Parse a text that is a chat rendered by this template back into a Chat; return other
        examples unchanged."""
        if not isinstance(example, Text):
            return example
        messages = None if self._chat_parser is None else self._chat_parser.parse(example.text)
        if messages is not None:
            return Chat(
                example.where,
                messages,
                (),
                (*example.notes, NOTE_RENDERED_CHAT),
                unused=example.unused,
            )
        mark = find_rendered_mark(example.text)
        note = (
            f"special_tokens_in_text: the text looks like a rendered chat ({mark}) of another"
            " template, and all of it is trained, the user's turns too; give its turns as messages"
            " (make preview shows what is trained)"
        )
        return (
            example
            if mark is None or note in example.notes
            else replace(example, notes=(*example.notes, note))
        )

    @functools.cached_property
    def _chat_parser(self) -> RenderedChatParser | None:
        try:
            locator = self.turn_locator()
        except TokenizerError:
            return None
        return RenderedChatParser(
            locator.template,
            special_tokens=[
                text for _, text, is_special in self.tokenizer_parts.added_tokens if is_special
            ],
        )

    def split_turns(self, example: Example) -> list[Example]:
        """Split an example into one for each trained assistant turn with data.multi_turn=split,
        else keep it whole."""
        if self.data.multi_turn == "whole" or isinstance(example, Text):
            return [example]
        turn_indices = [
            index for index, message in enumerate(example.messages) if is_trained_turn(message)
        ]
        if len(turn_indices) < 2:
            return [example]
        # Each row ends with the turn that it trains: templates write the last turn as it is
        # generated (think text).
        history = [
            {**message, "train": False} if message["role"] == "assistant" else message
            for message in example.messages
        ]
        return [
            replace(
                example,
                where=f"{example.where} turn {turn_number}",
                messages=(*history[:index], example.messages[index]),
                images=example.images[: _count_marks(history[:index])],
            )
            for turn_number, index in enumerate(turn_indices, start=1)
        ]

    def __call__(self, example: Example) -> TokenRow | BadRow:
        """The example's tokens and labels, cut to the limit; a bad row where the mask cannot be
        exact."""
        row = self.render(example)
        return row if isinstance(row, BadRow) else self.truncate(row)

    def render(self, example: Example) -> TokenRow | BadRow:
        """The whole example as tokens, before any limit."""
        return self.render_all([example])[0]

    def render_all(self, examples: Sequence[Example]) -> list[TokenRow | BadRow]:
        """Many examples at once: the tokenizer takes them as one batch."""
        drafts = [self._make_draft(example) for example in examples]
        # None stays for bad rows and for texts with hidden special tokens, which need another copy
        # of the tokenizer.
        encodings: list[Any] = [None] * len(drafts)
        for source, has_marks in ((CHAT, False), (TEXT, True)):
            texts = {
                index: draft.text
                for index, draft in enumerate(drafts)
                if isinstance(draft, TokenRow)
                and draft.source == source
                and not self._should_hide(draft.special_token_count)
            }
            batch = self.backend.encode_batch(list(texts.values()), add_special_tokens=has_marks)
            for index, encoding in zip(texts, batch, strict=True):
                encodings[index] = encoding
        return [
            draft if isinstance(draft, BadRow) else self._tokenise(draft, encoding)
            for draft, encoding in zip(drafts, encodings, strict=True)
        ]

    def _should_hide(self, special_count: int) -> bool:
        """True if texts with so many special tokens have them hidden from the template and
        tokenised as plain text."""
        return special_count > 0 and self.data.special_tokens_in_text == "plain"

    def _make_draft(self, example: Example) -> TokenRow | BadRow:
        """Render an example to text with its trained spans: a TokenRow that has no tokens yet."""
        if isinstance(example, Text):
            text = example.text
            return TokenRow(
                example.where,
                [],
                [],
                source=TEXT,
                method="document",
                text=text,
                spans=((0, len(text)),),
                special_token_count=len(self.special_token_guard.find(text)),
            )
        chat = example
        try:
            # the messages in the form that the template takes
            chat = self._adapt_chat(chat)
            locator = self._locator_for(chat)
            messages, fit_notes = self._fit_messages(locator, chat)
            chat = replace(chat, messages=tuple(messages))
            special_texts = self._find_special_texts(chat)
            special_count = len(special_texts)
            if special_count and self.data.special_tokens_in_text == "fail":
                raise InexactMaskError(
                    "a text holds a special token of the tokenizer", one_line(special_texts[0])
                )
            # the text, with the spans of its turns
            if self._should_hide(special_count):
                located = self._locate_hidden(locator, messages, chat.tools)
            else:
                located = locator.locate(messages, chat.tools)
            # the spans that are trained
            spans, untrained_turns, method = self._select_trained_spans(located, messages)
            prompt_suffixes = {
                start: located.prompt_suffixes[start]
                for start, _ in spans
                if start in located.prompt_suffixes
            }
            notes = (*fit_notes, *self._row_notes(locator, located, chat, prompt_suffixes))
            if not self.data.loss_on_empty_think and self.data.loss_on != "all":
                spans = [self._skip_empty_think(locator, located, span) for span in spans]
            # with loss_on=all the one span is the whole text, whose end says nothing of the
            # answers'
            answer_spans = [*located.spans.values()] if self.data.loss_on == "all" else spans
            self._check_end_tokens(locator, located.text, answer_spans)
            added_suffixes = prompt_suffixes.items() if self.data.add_empty_think else ()
            insertions = [
                (start, start, suffix)
                for start, suffix in added_suffixes
                if THINK_END.search(suffix)
            ]
            text, trained_spans = splice(located.text, insertions, spans)
            text, trained_spans, run_lengths = self._expand_images(chat, text, trained_spans)
        except InexactMaskError as error:
            details = [error.detail]
            # the form of the row is at fault there, not one of its texts or an option
            if (
                error.reason.startswith(("the chat template", "the generation prompt"))
                and "data." not in error.reason
            ):
                details.append(self._find_remedy(chat, inexact_count=len(chat.messages)))
            if error.reason == PROMPT_MISMATCH:
                details.append(self._settable_kwargs_hint(self._locator_for(chat)))
            return BadRow(example.where, error.reason, "; ".join(filter(None, details)))
        return TokenRow(
            example.where,
            [],
            [],
            method=method,
            untrained_turns=untrained_turns,
            stripped_think_pieces=located.stripped_think_pieces,
            special_token_count=special_count,
            text=text,
            spans=trained_spans,
            notes=notes,
            added_end=located.added_end,
            images=chat.images,
            image_runs=run_lengths,
        )

    def _find_special_texts(self, chat: Chat) -> list[str]:
        """Special tokens in the texts of a fitted chat, but the placeholder of its images, which a
        template that takes no parts has in the text."""
        texts = self.special_token_guard.find(*conversation_texts(chat.messages))
        if not chat.images:
            return texts
        return [text for text in texts if text != self.image_processor.placeholder]

    @functools.cached_property
    def image_processor(self) -> ImageProcessor:
        """The base's processor of images. Raises ModelError: it has none."""
        if self.images is None:
            raise ModelError("rows with images are not taken here")
        return cached_image_processor(self.images)

    def _fit_messages(
        self, locator: TurnLocator, chat: Chat
    ) -> tuple[Sequence[Message], tuple[str, ...]]:
        """The messages in the form that the template takes, pictures as parts or, where it takes no
        parts, as the placeholder in the text. Raises InexactMaskError where it writes neither."""
        if not chat.images:
            return locator.template.fit(chat.messages, chat.tools)
        try:
            placeholder = self.image_processor.placeholder
        except ModelError as error:
            raise InexactMaskError(
                "the row has images, and none can be trained on this base", str(error)
            ) from error
        texts = "".join(conversation_texts(chat.messages))
        if placeholder in texts:
            raise InexactMaskError(
                "a text of a row with images holds the placeholder of an image", placeholder
            )
        counts = []
        for messages in (
            [split_at_images(message) for message in chat.messages],
            [_write_placeholders(message, placeholder) for message in chat.messages],
        ):
            fitted, notes = locator.template.fit(messages, chat.tools)
            count = locator.template.try_render(fitted, chat.tools).count(placeholder)
            if count == len(chat.images):
                return fitted, notes
            counts.append(count)
            # a template that drops some images writes parts; where token types tell images apart,
            # a placeholder needs what the template writes around it
            if count or self.image_processor.token_types([[]]):
                break
        raise InexactMaskError(
            "the chat template does not write the row's images",
            f"the row has {len(chat.images)}, and {placeholder} stands {counts[0]} times in its"
            " text; take the template of the processor (chat_template.jinja of the base)",
        )

    def _expand_images(
        self, chat: Chat, text: str, spans: tuple[Span, ...]
    ) -> tuple[str, tuple[Span, ...], tuple[int, ...]]:
        """The text with what the processor writes for each picture, the spans in it, and how often
        each image token in it is repeated. Raises InexactMaskError where a picture would be
        trained."""
        if not chat.images:
            return text, spans, ()
        processor = self.image_processor
        replacements: list[Replacement] = []
        run_lengths: list[int] = []
        offsets = [match.start() for match in re.finditer(re.escape(processor.placeholder), text)]
        if len(offsets) != len(chat.images):
            raise InexactMaskError(
                "a text of a row with images holds special tokens, which hide the images from the"
                " chat template (data.special_tokens_in_text=control takes them as it does)"
            )
        for picture, start in zip(chat.images, offsets, strict=True):
            size = (picture.width, picture.height)
            try:
                expansion = processor.expand(*size, is_alone=len(chat.images) == 1)
            except ModelError as error:
                raise InexactMaskError(
                    "the processor refuses an image", f"{picture.name}: {error}"
                ) from None
            end = start + len(processor.placeholder)
            is_trained = any(begin < end and start < stop for begin, stop in spans)
            if is_trained and self.data.loss_on != "all":
                raise InexactMaskError("an image stands inside an answer", picture.name)
            replacements.append((start, end, expansion.text))
            run_lengths += expansion.run_lengths
        expanded_text, expanded_spans = splice(text, replacements, spans)
        return expanded_text, expanded_spans, tuple(run_lengths)

    def _locate_hidden(
        self, locator: TurnLocator, messages: Sequence[Message], tools: Sequence[Any]
    ) -> LocatedTurns:
        """Locate the turns of messages with their special tokens hidden from the template. Raises
        InexactMaskError where the template writes another text without them."""
        located = locator.locate(self.special_token_guard.hide(messages), tools)
        # without the end that was added, which the template's own rendering does not have
        written_text = located.text.removesuffix(located.added_end)
        try:
            visible_text = locator.template.render(messages, tools)
        except RenderError as error:
            raise InexactMaskError(TEMPLATE_REFUSES_ROW, str(error)) from error
        if self.special_token_guard.reveal(written_text) != visible_text:
            raise InexactMaskError(
                "the chat template looks for a special token that stands in a text "
                "(data.special_tokens_in_text=control takes it as the template does)"
            )
        return located

    def _skip_empty_think(self, locator: TurnLocator, located: LocatedTurns, span: Span) -> Span:
        """A trained span without the empty think block that it begins with. Raises InexactMaskError
        where the prompt opens that block, so that its end is the model's to write."""
        start, end = span
        # the block with the white space after it; its opening mark may be part of the prompt
        opening, closing = map(re.escape, locator.template.traits.think_marks[:2] or ("\0", "\0"))
        block = re.match(rf"\s*(?:{opening}\s*)?{closing}\s*", located.text[start:end])
        if block is None:
            return span
        prompt = located.text[:start] + located.prompt_suffixes.get(start, "")
        if prompt.rstrip().endswith(locator.template.traits.think_marks[0]):
            raise InexactMaskError(
                "data.loss_on_empty_think=false leaves the end of an empty think block untrained"
                " that the generation prompt opens, so the model would not learn to close it"
            )
        return start + block.end(), end

    def _row_notes(
        self,
        locator: TurnLocator,
        located: LocatedTurns,
        chat: Chat,
        prompt_suffixes: Mapping[int, str],
    ) -> Iterator[str]:
        """What is odd about the prompts and turns of a row; `prompt_suffixes`: of the turns that
        are trained."""
        untrained_suffixes = [
            suffix
            for suffix in prompt_suffixes.values()
            if not (self.data.add_empty_think and THINK_END.search(suffix))
        ]
        if untrained_suffixes:
            remedies = [self._settable_kwargs_hint(locator)]
            if any(map(THINK_END.search, untrained_suffixes)):
                remedies.append(
                    "data.add_empty_think=true writes the prompt's empty think block before it"
                )
            hint = "; ".join(filter(None, remedies))
            yield (
                "an answer's generation prompt goes on otherwise than the answer, with think text"
                " that is opened or closed; the answer is trained behind what both have in common"
                f"{f' ({hint})' if hint else ''}"
            )
        inexact_count = len(located.inexact_turns)
        if inexact_count and (remedy := self._find_remedy(chat, inexact_count=inexact_count)):
            yield f"a turn has no exact mask and is not trained: {remedy}"
        if locator.template.traits.answer_header:
            header = repr(locator.template.traits.answer_header)
            yield (
                "the chat template writes no generation prompt, so every answer is trained to begin"
                f" with {header}; give data.chat_template a copy of it that ends with"
                f" {{% if add_generation_prompt %}}{{{{ {header} }}}}{{% endif %}}"
            )
        headers_after_results = [
            text
            for index, text in located.unprompted_headers.items()
            if index and chat.messages[index - 1]["role"] == "tool"
        ]
        if headers_after_results:
            yield (
                "behind a tool's result the generation prompt has no"
                f" {one_line(headers_after_results[0].strip())}, which the text has; it is not"
                " trained, so a model served with this template may leave it out"
            )

    def _check_end_tokens(self, locator: TurnLocator, text: str, spans: Sequence[Span]) -> None:
        if self.data.on_missing_end == "train":
            return
        own_ends = locator.ends.end_tokens
        # special tokens, and the template's own ends that are one token
        # a tokenizer may have thousands, and rows millions
        if own_ends not in self._end_tokens_by_ends:
            parts = self.tokenizer_parts
            ends = [
                token
                for _, token, is_special in parts.added_tokens
                if is_special or token in own_ends
            ]
            self._end_tokens_by_ends[own_ends] = tuple(
                token for token in (*ends, parts.eos_token) if token
            )
        for start, end in spans:
            # a line break after the end token may be trained with it
            trained_text = text[start:end].rstrip()
            if not trained_text.endswith(self._end_tokens_by_ends[own_ends]):
                raise InexactMaskError(
                    NO_END_TOKEN,
                    f"{one_line(repr(trained_text[-40:]), limit=60)}: give data.chat_template a"
                    " template whose answers end with a token of this tokenizer, or train without"
                    " one with data.on_missing_end=train",
                )

    def _find_remedy(self, chat: Chat, *, inexact_count: int) -> str:
        """The option, or the change of the row, that leaves fewer turns inexact, tried on it; empty
        where none does."""
        roles = [message["role"] for message in chat.messages]
        index = next(
            (index for index in range(1, len(roles)) if roles[index] == roles[index - 1]), 1
        )
        merge_remedy = (
            f"messages[{index - 1}] and messages[{index}] are both {roles[index - 1]} turns: "
            "data.merge_consecutive=true joins them"
        )
        remedies: tuple[tuple[str, Callable[[Chat], Chat]], ...] = (
            (merge_remedy, _merge_chat),
            (MOVE_SYSTEM_REMEDY, self._move_system_into_user),
            (
                f"{merge_remedy} and {MOVE_SYSTEM_REMEDY}",
                lambda row: self._move_system_into_user(_merge_chat(row)),
            ),
            (
                (
                    "data.drop_text_beside_calls=true leaves out the text of turns that call tools,"
                    " where the template writes it behind the tool's result"
                ),
                lambda row: replace(row, messages=tuple(drop_text_beside_calls(row.messages))),
            ),
        )
        for remedy, change in remedies:
            with contextlib.suppress(InexactMaskError):
                changed = change(chat)
                if changed.messages == chat.messages:
                    continue
                locator = self._locator_for(changed)
                located = locator.locate(
                    locator.template.fit(changed.messages, chat.tools)[0], chat.tools
                )
                if located.spans and len(located.inexact_turns) < inexact_count:
                    return remedy
        return ""

    def _settable_kwargs_hint(self, locator: TurnLocator) -> str:
        names = locator.template.chat_template.settable_variables
        return (
            f"the template reads {', '.join(names)}, which data.chat_template_kwargs sets"
            if names
            else ""
        )

    def _adapt_chat(self, chat: Chat) -> Chat:
        if self.data.drop_text_beside_calls:
            chat = replace(chat, messages=tuple(drop_text_beside_calls(chat.messages)))
        return self._move_system_into_user(chat) if self.data.system_into_user else chat

    def _move_system_into_user(self, chat: Chat) -> Chat:
        """The chat with the system prompt before the first user turn, where the template has no
        place for it."""
        system, *others = chat.messages
        if system["role"] != "system" or self._locator_for(chat).template.traits.writes_system:
            return chat
        other_messages = [dict(message) for message in others]
        first_user_turn = next(
            (message for message in other_messages if message["role"] == "user"), None
        )
        if first_user_turn is None:
            raise InexactMaskError("there is no user turn to put the system prompt before")
        first_user_turn["content"] = f"{system['content']}\n\n{first_user_turn['content']}"
        # its author's own message no longer says the same
        first_user_turn.pop(AUTHOR_MESSAGE, None)
        return replace(chat, messages=tuple(other_messages))

    def _select_trained_spans(
        self, located: LocatedTurns, messages: Sequence[Message]
    ) -> tuple[list[Span], int, str]:
        """The spans to train, how many turns are left out, and the method. Raises InexactMaskError
        without any span."""
        if self.data.loss_on == "all":
            return [(0, len(located.text))], 0, "all"
        turn_indices = [
            index for index, message in enumerate(messages) if message["role"] == "assistant"
        ]
        requested_turns = turn_indices[-1:] if self.data.loss_on == "completion" else turn_indices
        requested_turns = [
            index for index in requested_turns if messages[index].get("train") is not False
        ]
        if not requested_turns:
            raise InexactMaskError("no turn is to be trained (train: false)")
        exact_spans = [located.spans[index] for index in requested_turns if index in located.spans]
        if exact_spans:
            untrained_turns = len(requested_turns) - len(exact_spans)
            return exact_spans, untrained_turns, "last_turn" if untrained_turns else located.method
        inexact_turn = located.inexact_turns[requested_turns[-1]]
        guessed_spans = [
            located.guessed_spans[index]
            for index in requested_turns
            if index in located.guessed_spans
        ]
        if guessed_spans and self.data.on_inexact_mask == "train":
            return guessed_spans, len(requested_turns) - len(guessed_spans), "inexact"
        details = [inexact_turn.detail]
        for start, end in guessed_spans[-1:]:
            details.append(
                "data.on_inexact_mask=train would train"
                f" {one_line(repr(located.text[start:end]), limit=60)}"
            )
        raise InexactMaskError(inexact_turn.reason, "; ".join(filter(None, details)))

    def _tokenise(self, draft: TokenRow, encoding: Any) -> TokenRow | BadRow:
        if draft.source == TEXT:
            if encoding is None:
                encoding = self.special_token_guard.plain_tokenizer.encode(draft.text)
            draft.input_ids, end_id = list(encoding.ids), self.tokenizer_parts.end_of_text_id
            # some tokenizers put it there themselves, by their post-processor
            if end_id is not None and draft.input_ids[-1:] != [end_id]:
                draft.input_ids.append(end_id)
            draft.labels = list(draft.input_ids)
            return draft
        encoded_text, spans = draft.text, draft.spans
        backend = self.backend
        if encoding is None:
            guard = self.special_token_guard
            encoding, spans, encoded_text, draft.text, draft.spans = guard.encode(
                encoded_text, spans
            )
            backend = guard.plain_tokenizer
        masked = mask_encoding(encoding, encoded_text, spans, self._added_ids)
        draft.merged_edges = masked.crossed_edges
        if masked.crossed_edges:
            split_tokens = encode_with_mask(backend, encoded_text, spans)
            if split_tokens is None and self.data.on_inexact_mask == "fail":
                return BadRow(
                    draft.location,
                    "a token crosses the edge of an answer",
                    encoding.tokens[masked.crossed_index],
                )
            # on_inexact_mask=train: the token that crosses the edge stays untrained
            masked = split_tokens or masked
        draft.input_ids, draft.labels = masked.ids, masked.labels
        if draft.images:
            expanded = expand_runs(
                masked.ids, masked.labels, self.image_processor.token_ids, draft.image_runs
            )
            if expanded is None:
                return BadRow(
                    draft.location, "a text of a row with images holds a token of an image"
                )
            draft.input_ids, draft.labels = expanded
            draft.image_tokens = sum(draft.image_runs)
        # The text is encoded without special tokens of the tokenizer's own, so a second BOS stands
        # in the text itself.
        if self._bos_id is not None and masked.ids[:2] == [self._bos_id, self._bos_id]:
            return BadRow(
                draft.location,
                "two BOS tokens",
                "the row's text begins with the template's own BOS",
            )
        return draft if draft.trained_tokens else BadRow(draft.location, "no trained token")

    def truncate(self, row: TokenRow) -> TokenRow | BadRow:
        """The row within max_seq_len, cut as data.truncate says."""
        ids, labels, limit = row.input_ids, row.labels, self.max_seq_len
        excess = len(ids) - limit
        if excess <= 0:
            return row  # the same object: most rows fit
        if self.data.truncate == "drop":
            return BadRow(row.location, TOO_LONG, f"{len(ids)} tokens")
        if self.data.truncate == "end":
            ids, labels = ids[:limit], labels[:limit]
        else:  # truncate=prompt: the last tokens, a BOS at the beginning kept
            begin = int(ids[0] == self._bos_id)
            ids, labels = (
                [*ids[:begin], *ids[begin + excess :]],
                [*labels[:begin], *labels[begin + excess :]],
            )
        if row.images and self._cuts_image(row, labels):
            detail = f"{len(row.input_ids)} tokens, {row.image_tokens} of them of images"
            return BadRow(row.location, CUTS_IMAGE, detail)
        remaining_tokens = count_trained_tokens(labels)
        if remaining_tokens == 0:
            first_trained = next(
                index for index, label in enumerate(row.labels) if label != IGNORED
            )
            return BadRow(
                row.location,
                LOST_TO_LENGTH,
                f"{len(row.input_ids)} tokens, the first trained one at {first_trained}",
            )
        return replace(
            row,
            input_ids=ids,
            labels=labels,
            cut_tokens=excess,
            lost_trained_tokens=row.trained_tokens - remaining_tokens,
        )

    def _cuts_image(self, row: TokenRow, labels: Sequence[int]) -> bool:
        """Whether a cut may take a part of an image, or of what the processor writes around it: a
        cut of the beginning, and one of the end that leaves no trained token behind the images."""
        ids = self.image_processor.token_ids
        last_image = max(index for index, token in enumerate(row.input_ids) if token in ids)
        is_end_cut = self.data.truncate == "end"
        return not is_end_cut or not any(label != IGNORED for label in labels[last_image + 1 :])

    # Documents and prompts.

    def tokenise_documents(self, texts: Sequence[str]) -> list[list[int]]:
        """Tokens of documents with what the tokenizer puts around a text, each ended by the
        end-of-text token."""
        rows = self.render_all([Text("", text) for text in texts])
        # all of them: a text is never refused
        return [row.input_ids for row in rows if isinstance(row, TokenRow)]

    def prompt_ids(self, chat: Chat) -> list[int] | None:
        """Tokens of everything before the last turn with the generation prompt. None where the last
        turn is not the assistant's, or its prompt cannot be rendered."""
        if chat.messages[-1]["role"] != "assistant":
            return None
        try:
            locator = self._locator_for(chat)
            prompt_messages = self._fit_messages(locator, self._adapt_chat(chat))[0][:-1]
            prompt_chat = replace(chat, messages=tuple(prompt_messages))
            is_hiding = self._should_hide(len(self._find_special_texts(prompt_chat)))
            if is_hiding:
                prompt_messages = self.special_token_guard.hide(prompt_messages)
            text = locator.template.render(prompt_messages, chat.tools, with_prompt=True)
            text, _, run_lengths = self._expand_images(chat, text, ())
        except (RenderError, InexactMaskError):
            return None
        ids = (
            self.special_token_guard.encode(text, [])[0].ids
            if is_hiding
            else self.backend.encode(text, add_special_tokens=False).ids
        )
        if not chat.images:
            return list(ids)
        expanded = expand_runs(ids, ids, self.image_processor.token_ids, run_lengths)
        return None if expanded is None else expanded[0]

    def prompt_and_answer_ids(self, chat: Chat) -> tuple[list[int], list[int]] | None:
        """Token ids of the last turn's prompt, and of the answer that training teaches after it,
        its end of turn included. None if there is no such prompt, or the turn is not trained."""
        prompt = self.prompt_ids(chat)
        last_turn_renderer = copy.copy(self)  # shares the probed template
        last_turn_renderer.data = self.data.model_copy(update={"loss_on": "completion"})
        # before any limit: an answer that is cut is not the right one
        row = last_turn_renderer.render(chat)
        if prompt is None or isinstance(row, BadRow):
            return None
        answer = [label for label in row.labels if label != IGNORED]
        context = row.input_ids[: row.labels.index(answer[0])]
        # what stands untrained between them is given too: a block, a header
        if context[: len(prompt)] == prompt:
            return context, answer
        # the prompt may have closed the think text that the turn closes: it is not asked for a
        # second time
        overlap = next(
            (size for size in range(len(answer), 0, -1) if prompt[-size:] == answer[:size]), 0
        )
        return prompt, answer[overlap:]

    def hides_special_tokens(self, messages: Sequence[Message]) -> bool:
        """True if special tokens that the messages' texts spell are tokenised as plain text, as in
        training."""
        return self._should_hide(len(self.special_token_guard.find(*conversation_texts(messages))))


def drop_text_beside_calls(messages: Sequence[Message]) -> list[Message]:
    """The messages with only the think text of turns that call tools, beside their calls."""
    copies = [dict(message) for message in messages]
    for message in copies:
        if message.get("tool_calls") and message.get("content"):
            ends = [match.end() for match in THINK_END.finditer(message["content"])]
            message["content"] = message["content"][: max(ends, default=0)]
            message.pop(AUTHOR_MESSAGE, None)  # its author's own message no longer says the same
    return copies


def _count_marks(messages: Sequence[Message]) -> int:
    return sum(str(message.get("content") or "").count(IMAGE_MARK) for message in messages)


def _write_placeholders(message: Message, placeholder: str) -> Message:
    """The message with the placeholder of the processor where its pictures stand."""
    content = message.get("content")
    if not isinstance(content, str):
        return message
    return {**message, "content": content.replace(IMAGE_MARK, placeholder)}


def _merge_chat(chat: Chat) -> Chat:
    return replace(chat, messages=tuple(merge_turns(chat.messages)))


def is_trained_turn(message: Message) -> bool:
    """True if it is an assistant turn without `train: false`."""
    return message["role"] == "assistant" and message.get("train") is not False
