"""The model of a finished run, loaded for use, and its answers: prompts as training rendered them,
ended where training taught answers to end; one by one, in batches, or in the conversation of `make
chat`.
"""

import contextlib
import functools
import json
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from accelerate.utils.memory import should_reduce_batch_size

from sft_play.answers import Answer
from sft_play.config.schema import DataConfig, RunConfig
from sft_play.data.build.splits import DataSplit, DataSplits, build_splits
from sft_play.data.masks.image_processor import ImageProcessorSource
from sft_play.data.masks.render import Renderer
from sft_play.data.sources.examples import apply_style
from sft_play.data.sources.files import file_digest, find_data_paths, find_source, read_rows
from sft_play.data.sources.formats import (
    FORMATS,
    TEMPLATE_KWARGS,
    Chat,
    recognise_format,
    rename_columns,
    to_example,
)
from sft_play.data.sources.images import IMAGE_MARK, Picture, find_picture
from sft_play.data.sources.messages import Message, drop_author_messages, quote_value, unpack_json
from sft_play.data.sources.raw import BadRow, RawRow, read_text_blocks, require_file
from sft_play.data.sources.row_images import (
    ROW_IMAGE_COLUMNS,
    UNTRAINED_MEDIA_COLUMNS,
    holds_media,
    split_at_images,
)
from sft_play.errors import DataError, ModelError
from sft_play.finished.run import (
    FinishedRun,
    base_model_folder,
    find_continued_adapter,
    next_command_line,
    translate_write_errors,
)
from sft_play.log import one_line
from sft_play.models.config_json import base_weights_identity
from sft_play.process.waiting import report_wait
from sft_play.runs.folder import first_start_date
from sft_play.text import GIB
from sft_play.training.checkpoints.full_state_dict import ADAPTER_FILE, load_adapter
from sft_play.training.checkpoints.model_saving import open_tensors
from sft_play.training.measure.exact_match import (
    GeneratedAnswer,
    Question,
    collect_stop_ids,
    configured_eos_token_ids,
    generate_answers,
)
from sft_play.training.model import attention_functions
from sft_play.training.model.language_model import (
    fit_tied_embeddings,
    locate_text_tower,
    prepare_text_config,
)
from sft_play.training.model.model_loading import (
    NO_ADAPTER_KWARGS,
    TORCH_DTYPES,
    load_model,
    require_all_weights,
    silence_load_report,
)
from sft_play.training.model.streamed_base import stream_base
from sft_play.training.model.vision import load_vision, prepare_generation
from sft_play.training.prepare.device_checks import free_memory
from sft_play.training.prepare.model_spec import build_model_spec, model_location
from sft_play.training.prepare.tokenizer import load_tokenizer

T = TypeVar("T")


# --- the model, loaded as it was trained, or merged -----------------------------------------------
def default_device() -> str:
    """The first GPU where there is one, else the CPU."""
    return "cuda:0" if torch.cuda.is_available() else "cpu"


def compute_dtype(run: FinishedRun) -> torch.dtype:
    """The dtype that the run's own evaluations computed in."""
    return TORCH_DTYPES[run.plan().precision.compute]


def load_trained_model(run: FinishedRun) -> Any:
    """Load the run's model as training left it, in eval mode on the first GPU or the CPU: the base
    with the adapter on it, in the precision of the run (NF4 for QLoRA), or the whole trained model.
    Raises ModelError where the base is gone or another one, or weights are missing."""
    if not run.is_adapter:
        return load_model_folder(
            run.weights, dtype=TORCH_DTYPES[run.plan().precision.load], images=image_source(run)
        )
    return load_adapter(load_base_model(run), run.weights)


def load_base_model(run: FinishedRun) -> Any:
    """Load the model as it was before the run, in eval mode on the first GPU or the CPU, in the
    precision of the run. Raises ModelError where the base is gone or another one."""
    config, precision = run.config, run.plan().precision
    base_model_folder(run)  # refuses a base that has changed since
    loaded = load_tokenizer(config)
    spec = build_model_spec(
        config, precision, tokenizer_size=len(loaded.tokenizer), new_rows=loaded.new_rows
    )
    attention_functions.enable_cudnn(enabled=False)  # answers have a new length for every token
    device, is_streamed = torch.device(default_device()), run.plan().choice.layout.is_streamed
    packs_on = device if is_streamed and device.type == "cuda" else None
    home = "cpu" if is_streamed else str(device)
    model = load_model(config, precision, spec, device=home, packs_on=packs_on)
    images = image_source(run)
    if images is not None:
        load_vision(
            model,
            name=config.model.name,
            location=model_location(config),
            revision=config.model.revision,
            images=images,
            dtype=TORCH_DTYPES[precision.load],
            device=device,
        )
    if is_streamed:
        stream = stream_base(model, device)
        logger.info(
            "The base stays in RAM, as in training: for each token of an answer %.1f GiB go over"
            " the bus",
            stream.host_bytes / GIB,
        )
    # training switches it off; without it each new token reads the whole prompt again
    model.config.use_cache = True
    return model.eval()


def image_source(run: FinishedRun) -> ImageProcessorSource | None:
    """Where the processor of the run's images is; None for a run on text alone."""
    return ImageProcessorSource.from_config(run.config) if run.has_images else None


def require_images(run: FinishedRun, subject: str) -> None:
    """Raise DataError where the run was trained on text alone, and `subject` has images."""
    if not run.has_images:
        raise DataError(
            f"{subject} has images, and {run.folder.path} was trained on text alone; its model"
            " takes none"
        )


def measure_both_models(run: FinishedRun, measure: Callable[[str, Any], T]) -> tuple[T, T]:
    """Run `measure(model_label, model)` on the model before training (the base, or the adapter that
    was continued) and on the trained one; returns both results. `model_label` names the model in
    log lines. Raises ModelError where a model is gone, or not the one that the run recorded."""
    continued = find_continued_adapter(run)
    if run.is_adapter and continued is None:
        model = load_trained_model(run)
        with model.disable_adapter():
            base_result = measure("base", model)
    else:
        model_label = "base"
        if continued is None:
            model = load_base_model(run)
        else:
            adapter_file = continued.folder / ADAPTER_FILE
            if not adapter_file.is_file() or file_digest(adapter_file) != continued.sha256:
                raise ModelError(
                    f"{adapter_file} is not the adapter that {run.folder.path} continued, or is"
                    " gone: put it back"
                )
            model_label = f"model before training ({continued.name})"
            model = load_adapter(load_base_model(run), continued.folder)
        base_result = measure(model_label, model)
        del model  # two whole models may be more than fits
        free_memory()
        model = load_trained_model(run)
    tuned_result = measure("trained model", model)
    del model
    free_memory()
    return base_result, tuned_result


def load_model_folder(
    folder: Path, *, dtype: torch.dtype | None = None, images: ImageProcessorSource | None = None
) -> Any:
    """Load a whole model, in eval mode on the first GPU or the CPU; without `dtype` in the dtype of
    its files. With `images` it answers rows with images, by the tower in the folder. Raises
    ModelError where it cannot be loaded."""
    from transformers import AutoConfig, AutoModelForCausalLM

    attention_functions.enable_cudnn(enabled=False)
    try:
        # a device by name: device_map="auto" would spread a large model over devices, or offload it
        # without a word
        full_config = AutoConfig.from_pretrained(str(folder))
        # transformers would fetch kernels for some of them
        if getattr(full_config, "quantization_config", None):
            raise ModelError(
                f"{folder} holds quantised weights, and no run of this toolkit saves such"
            )
        config, tower, key_mapping = prepare_text_config(full_config), None, None
        if config is not full_config:  # of an image-text model its language model
            fit_tied_embeddings(full_config, config, lambda: set(open_tensors(folder)))
            with torch.device("meta"):
                tower = locate_text_tower(full_config, AutoModelForCausalLM.from_config(config))
            key_mapping = tower.key_mapping if tower is not None else None
        with silence_load_report(), report_wait(f"Loading the weights of {one_line(str(folder))}"):
            model, loading_info = AutoModelForCausalLM.from_pretrained(
                str(folder),
                config=config,
                dtype=dtype or "auto",
                device_map={"": default_device()},
                use_safetensors=True,
                output_loading_info=True,
                key_mapping=key_mapping,
                **NO_ADAPTER_KWARGS,
            )
    except ModelError:
        raise
    except (OSError, ValueError, RuntimeError) as error:
        raise ModelError(
            f"the model in {folder} cannot be loaded: {one_line(str(error), limit=300)}"
        ) from error
    require_all_weights(model, loading_info, str(folder))
    if images is not None:
        model.sft_tower = tower
        load_vision(
            model,
            name=str(folder),
            location=str(folder),
            revision=None,
            images=images,
            dtype=model.dtype,
            device=model.device,
        )
    return model.eval()


def build_run_renderer(run: FinishedRun, tokenizer: Any) -> Renderer:
    """Build the renderer of conversations as the run's training used it, on the day that the run
    began."""
    return Renderer(
        tokenizer,
        run.config.data,
        max_seq_len=run.plan().max_seq_len,
        # a template that writes the date would put another one into every prompt
        today=first_start_date(run.folder),
        images=ImageProcessorSource.from_config(run.config),
    )


def build_run_splits(run: FinishedRun, config: RunConfig, tokenizer: Any) -> DataSplits:
    """Tokenise and divide the rows of `config` as training did; it is the run's, or has other data.
    Raises DataError where the data is gone, or no longer has trained tokens."""
    return build_splits(
        config,
        find_data_paths(config.data),
        tokenizer,
        max_seq_len=run.plan().max_seq_len,
        today=first_start_date(run.folder),
    )


@dataclass(frozen=True)
class HeldOutRows:
    """Token rows that a run was not trained on, and the split that has them; `train` where the run
    has no other."""

    name: str
    split: DataSplit
    train: DataSplit


def load_held_out_rows(run: FinishedRun) -> HeldOutRows:
    """Load the run's test rows, else its validation rows, else its training rows, as training read
    them. Raises DataError where the data is gone, or no longer has trained tokens."""
    splits = build_run_splits(run, run.config, load_tokenizer(run.config).tokenizer)
    # test before val: validation rows may have chosen the checkpoint (train.load_best_model_at_end)
    for name, split in (("test", splits.test), ("val", splits.val)):
        if split is not None:
            return HeldOutRows(name, split, splits.train)
    return HeldOutRows("train", splits.train, splits.train)


# --- answers --------------------------------------------------------------------------------------
logger = logging.getLogger(__name__)


def _training_autocast(run: FinishedRun, model: Any) -> torch.autocast:
    """Autocast for a run that trained all weights, as in training; none for adapters: their base
    has its precision."""
    dtype = compute_dtype(run)
    is_mixed = not run.is_adapter and dtype != torch.float32
    return torch.autocast(model.device.type, dtype=dtype, enabled=is_mixed)


class Responder:
    """A run's model with the tokenizer and the template of the run; without `model` it is loaded as
    it was trained."""

    def __init__(self, run: FinishedRun, model: Any = None) -> None:
        self.run = run
        self.tokenizer = load_tokenizer(run.config).tokenizer
        self.model = load_trained_model(run) if model is None else model
        self.renderer = build_run_renderer(run, self.tokenizer)
        self.stop_ids = collect_stop_ids(
            run.config.task_mode,
            self.tokenizer,
            self.renderer,
            configured_eos_token_ids(self.model),
        )

    def prompt_ids(
        self,
        messages: Sequence[Message],
        tools: tuple[Any, ...] = (),
        template_kwargs: Mapping[str, Any] | None = None,
        images: tuple[Picture, ...] = (),
    ) -> list[int]:
        """Tokenise a conversation that ends before the assistant's turn, as training did before an
        answer; `images` are the pictures of its `IMAGE_MARK`s. Raises DataError where the chat
        template refuses these messages, or the model takes no images."""
        if images:
            require_images(self.run, "a prompt")
        if self.run.config.task_mode == "cpt":
            text = "\n".join(str(message["content"]) for message in messages)
            return list(self.tokenizer(text)["input_ids"])
        # the answer itself is not rendered
        turns = (*messages, {"role": "assistant", "content": "."})
        prompt = self.renderer.prompt_ids(
            Chat("", turns, tools, template_kwargs=template_kwargs or {}, images=images)
        )
        if prompt is None:
            roles = ", ".join(str(message["role"]) for message in messages)
            raise DataError(
                f"the chat template of {self.run.folder.path} cannot render turns of these roles:"
                f" {roles}{' with their images' if images else ''}"
            )
        return prompt

    def answers(
        self,
        questions: Sequence[Question],
        *,
        max_new_tokens: int,
        model_label: str = "trained model",
    ) -> list[GeneratedAnswer]:
        """Generate greedy answers, in the order of the questions, in the batches and the precision
        of the run's own evaluation; where memory runs out the batches are halved. `model_label`
        names the model in log lines.
        """

        def try_batch(generate: Callable[[], T], rows: int) -> T | None:
            try:
                return generate()
            except RuntimeError as error:
                if not should_reduce_batch_size(error) or rows == 1:
                    raise
            logger.warning(
                "Out of memory: continuing with at most %s rows a batch", f"{rows // 2:,}"
            )
            free_memory()
            return None

        with (
            report_wait(
                f"Answers by the {model_label}", unit="questions", count_total=questions.__len__
            ) as progress,
            _training_autocast(self.run, self.model),
        ):
            return generate_answers(  # type: ignore[no-any-return]
                self.model,
                self.tokenizer,
                questions,
                stop_ids=self.stop_ids,
                max_new_tokens=max_new_tokens,
                max_tokens=self.run.plan().answer_tokens,
                on_batch_end=progress.add,
                try_batch=try_batch,
            )

    def answer_texts(
        self,
        prompts: Sequence[list[int]],
        *,
        max_new_tokens: int,
        images: Sequence[tuple[Picture, ...]] = (),
    ) -> list[str]:
        """The texts of greedy answers to prompts; `images` are those of each, empty where none has
        any."""
        pictures = images or [()] * len(prompts)
        questions = [Question(ids, "", "", row) for ids, row in zip(prompts, pictures, strict=True)]
        return [answer.text for answer in self.answers(questions, max_new_tokens=max_new_tokens)]

    @torch.no_grad()
    def stream(
        self,
        prompt_ids: list[int],
        show: Callable[[str], None],
        *,
        max_new_tokens: int,
        temperature: float = 0.0,
        images: Sequence[Picture] = (),
    ) -> str:
        """Generate one answer, and show each piece of its text as it comes; greedy at temperature
        0. `images` are the prompt's. Ctrl-C ends it; what has come is returned."""
        streamer = _TextStreamer(self.tokenizer, self.stop_ids, show)
        # without what a base's generation config sets for sampling: transformers would warn of it
        sampling: dict[str, Any] = {
            "do_sample": False,
            "temperature": None,
            "top_p": None,
            "top_k": None,
        }
        if temperature > 0:
            sampling = {"do_sample": True, "temperature": temperature}
        ids_BT = torch.tensor([prompt_ids], device=self.model.device)
        with contextlib.suppress(KeyboardInterrupt), _training_autocast(self.run, self.model):
            generator, inputs = prepare_generation(self.model, ids_BT, [images])
            generator.generate(
                input_ids=ids_BT,
                attention_mask=torch.ones_like(ids_BT),
                **inputs,
                max_new_tokens=max_new_tokens,
                eos_token_id=self.stop_ids,
                pad_token_id=self.tokenizer.pad_token_id,
                use_cache=True,
                streamer=streamer,
                **sampling,
            )
        streamer.end()
        return streamer.text


class _TextStreamer:
    """Shows text while tokens come (transformers' protocol: `put` gets the prompt first, then each
    token)."""

    def __init__(
        self, tokenizer: Any, stop_ids: Sequence[int], show: Callable[[str], None]
    ) -> None:
        self._tokenizer, self._stop_ids, self._show = tokenizer, set(stop_ids), show
        self._ids: list[int] | None = None
        self.text = ""

    def put(self, value: torch.Tensor) -> None:
        if self._ids is None:
            self._ids = []
            return
        self._ids += [token for token in value.flatten().tolist() if token not in self._stop_ids]
        self.end(is_over=False)

    def end(self, *, is_over: bool = True) -> None:
        """Show what has come; what ends inside a character only once all of it is there."""
        # all of them again: what a token spells depends on those before it (bytes of one character,
        # leading spaces)
        text = str(self._tokenizer.decode(self._ids or [], skip_special_tokens=False))
        # tokens that end inside a character decode to a replacement character
        if text != self.text and (is_over or not text.endswith("\N{REPLACEMENT CHARACTER}")):
            self._show(text[len(self.text) :])
            self.text = text


CHAT_HELP = (
    "/reset forgets the conversation · /system TEXT sets the system prompt · /image FILE adds an"
    " image to the next question · /base switches the adapter off and on · /both answers with and"
    " without it · /exit"
)


@dataclass
class Conversation:
    """A conversation in the terminal: the turns so far, and who answers, and how. `show` gets text
    as it comes, without a line end after it."""

    responder: Responder
    show: Callable[[str], None]
    max_new_tokens: int = 512
    temperature: float = 0.0
    system: str | None = None
    messages: list[Message] = field(default_factory=list)
    # Those of the messages, then those of the next question.
    images: list[Picture] = field(default_factory=list)
    uses_base: bool = False
    compares_base: bool = False
    has_ended: bool = False

    def handle_line(self, line: str) -> None:
        """Take a line: an answer is shown, or a command is carried out."""
        text = line.strip()
        if not text:
            return
        if text.startswith("/"):
            self._run_command(*text[1:].split(maxsplit=1))
            return
        images = tuple(self.images)
        asked_images = sum(str(message["content"]).count(IMAGE_MARK) for message in self.messages)
        question = IMAGE_MARK * (len(images) - asked_images) + line.replace(IMAGE_MARK, "")
        conversation: list[Message] = [*self.messages, {"role": "user", "content": question}]
        system: list[Message] = [{"role": "system", "content": self.system}] if self.system else []
        try:
            prompt_ids = self.responder.prompt_ids([*system, *conversation], images=images)
        except DataError as error:
            self.show(f"({error})\n")
            return
        answer = ""
        # with /both the trained model answers last, and the conversation goes on with its answer
        for is_base in (True, False) if self.compares_base else (self.uses_base,):
            if self.compares_base:
                self.show("base:  " if is_base else "tuned: ")
            with self.responder.model.disable_adapter() if is_base else contextlib.nullcontext():
                answer = self.responder.stream(
                    prompt_ids,
                    self.show,
                    max_new_tokens=self.max_new_tokens,
                    temperature=self.temperature,
                    images=images,
                )
            self.show("\n")
        answer = answer.replace(IMAGE_MARK, "")
        self.messages = [*conversation, {"role": "assistant", "content": answer}]

    def _add_image(self, value: str) -> str:
        """Add the picture to the next question; returns what is said of it."""
        if not value:
            return "/image needs a file: /image photo.png"
        try:
            require_images(self.responder.run, "the question")
            picture = find_picture(value, str(Path.cwd()), self.responder.run.config.data)
        except DataError as error:
            return str(error)
        self.images.append(picture)
        size = f"{picture.width:,} x {picture.height:,}"
        return f"{picture.name}, {size}, goes with the next question"

    def _run_command(self, name: str = "", argument: str = "") -> None:
        reply = CHAT_HELP
        if name in ("exit", "quit"):
            self.has_ended = True
            return
        if name == "reset":
            self.messages, self.images = [], []
            reply = "the conversation is empty"
        elif name == "system":
            # answers so far were given under another system prompt
            self.system, self.messages, self.images = argument or None, [], []
            reply = (
                f"the system prompt is {'set' if argument else 'removed'};"
                " the conversation is empty"
            )
        elif name == "image":
            reply = self._add_image(argument.strip())
        elif name in ("base", "both") and not self.responder.run.is_adapter:
            reply = "this run trained all weights: there is no adapter to switch off"
        elif name == "base":
            self.uses_base = not self.uses_base
            reply = (
                f"the {'base without the adapter' if self.uses_base else 'trained model'} answers"
            )
        elif name == "both":
            self.compares_base = not self.compares_base
            reply = "base and trained model answer" if self.compares_base else "one model answers"
        self.show(f"({reply})\n")


# --- make infer: an answer to each prompt of a file, written as JSONL, resumed where it stopped ---

# Prompts that are answered before their answers are written; within them the batches are sorted by
# length.
_CHUNK_PROMPTS = 256


@dataclass(frozen=True)
class Prompt:
    """A prompt of the file: the messages before the answer, and what else the row has. `reference`
    is the row's own answer; `extra_columns` are columns that no format reads."""

    messages: tuple[Message, ...]
    tools: tuple[Any, ...] = ()
    reference: str | None = None
    extra_columns: Mapping[str, Any] = field(default_factory=dict)
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    images: tuple[Picture, ...] = ()

    @functools.cached_property
    def output_fields(self) -> dict[str, Any]:
        """What a line of the output repeats of the prompt: its further columns, `messages`, and
        `tools`, `chat_template_kwargs` and `reference` if it has them. As JSON reads them back:
        tuples are lists."""
        new_names = {
            name: f"input_{name}" for name in ("messages", "tools", "answer", "reference", "by")
        }
        fields: dict[str, Any] = {
            new_names.get(name, name): value for name, value in self.extra_columns.items()
        }
        fields["messages"] = list(map(split_at_images, drop_author_messages(self.messages)))
        if self.images:
            fields["images"] = written_images(self.images)
        if self.tools:
            fields["tools"] = self.tools
        if self.template_kwargs:
            fields[TEMPLATE_KWARGS] = self.template_kwargs
        if self.reference is not None:
            fields["reference"] = self.reference
        return dict(json.loads(json.dumps(fields, default=str)))


def written_images(pictures: Sequence[Picture]) -> list[str]:
    """Pictures as files hold them: by their path, or as data URIs."""
    return [picture.path or picture.data_uri for picture in pictures]


@dataclass(frozen=True)
class InferResult(Answer):
    """What `infer` wrote."""

    run: Path
    path: Path
    prompts: int
    resumed: int

    def lines(self) -> list[str]:
        resumed_note = f" ({self.resumed:,} were there already)" if self.resumed else ""
        return [
            f"Answers: {self.prompts:,}{resumed_note}",
            f"Written to: {self.path}",
            next_command_line("eval", RUN=self.run),
        ]


def read_prompts(path: Path, data: DataConfig | None = None) -> list[Prompt]:
    """Read the prompts of a file: the lines of a .txt, or rows in any format that training reads,
    with their last answer or without it. data.columns and data.style of the run (`data`) apply as
    in training. Raises DataError where a row is not a prompt."""
    if path.suffix == ".txt":
        lines = enumerate("".join(read_text_blocks(path)).split("\n"), start=1)
        rows: list[RawRow | BadRow] = [
            RawRow(f"{path}:{number}", {"prompt": line.removesuffix("\r")})
            for number, line in lines
            if line.strip()
        ]
    else:
        rows = list(read_rows(find_source(str(path)), split="train"))
    if not rows:
        raise DataError(f"INPUT={one_line(str(path))} holds no prompts")
    prompts, errors = list[Prompt](), list[str]()
    for raw in rows:
        prompt = _parse_prompt(raw, data or DataConfig())
        if isinstance(prompt, Prompt):
            prompts.append(prompt)
        else:
            errors.append(f"{raw.where}: {prompt}")
    if errors:
        raise DataError(
            "\n  ".join([f"{len(errors)} of {len(rows)} rows are no prompts:", *errors[:5]])
        )
    return prompts


def _parse_prompt(raw: RawRow | BadRow, data: DataConfig) -> Prompt | str:
    """Return the prompt of a row, or the reason why it holds none."""
    if isinstance(raw, BadRow):
        return str(raw).removeprefix(f"{raw.where}: ")
    column_mapping = {
        column: user_column
        for column, user_column in data.columns.items()
        if user_column in raw.data
    }
    renamed = rename_columns(raw, column_mapping)
    row = {key: value for key, value in renamed.data.items() if key not in renamed.missing}
    # as training recognises rows, but the answer may be missing, and plain text asks nothing;
    # complete rows first
    formats = [form for form in FORMATS if form.kind != "text" and form.required_columns[0] in row]
    formats.sort(key=lambda form: any(row.get(key) is None for key in form.required_columns))
    if not formats:
        return (
            "no column is a prompt (columns:"
            f" {one_line(', '.join(map(str, row)) or 'none', limit=200)}); a prompt is a column"
            " prompt, question or instruction (with input), or a list messages"
        )
    # with what data.columns maps
    row_format = recognise_format(formats[0].required_columns, column_mapping) or formats[0]
    question, *answers = row_format.required_columns
    question_value = unpack_json(row[question], "[")
    if not isinstance(question_value, (str, list)):
        return (
            f"{question} is {quote_value(question_value)}, and has to be text or a list of messages"
        )
    names = {*row_format.required_columns, *row_format.optional_columns} - {"reasoning"}
    media_columns = (*ROW_IMAGE_COLUMNS, *UNTRAINED_MEDIA_COLUMNS)
    names |= {column for column in media_columns if holds_media(row.get(column))}
    format_columns = {key: value for key, value in row.items() if key in names}
    # an answer is put where a row of training has one, and taken off again: a prompt is read by the
    # same code
    is_open = row_format.kind != "turns" and row.get(answers[0]) is None
    if is_open:
        format_columns[answers[0]] = "."
    elif row_format.kind == "turns":
        format_columns[question] = question_value
        if (
            question_value
            and isinstance(question_value, list)
            and not isinstance(question_value[-1], list)
        ):
            is_open = True  # a list of [question, answer] is never open
            format_columns[question] = [*question_value, {"role": "assistant", "content": "."}]
    image_options = DataConfig(
        fetch_images=data.fetch_images, max_image_megapixels=data.max_image_megapixels
    )
    example = apply_style(
        to_example(RawRow(raw.where, format_columns, folder=raw.folder), row_format, image_options),
        raw,
        data.style,
    )
    if not isinstance(example, Chat):
        return str(example).removeprefix(f"{raw.where}: ")
    messages, reference = [*example.messages], None
    if is_open:
        del messages[-1]
    if messages and messages[-1]["role"] == "assistant":
        reference = str(messages.pop().get("content") or "")
    if not messages:
        return f"{question} holds nothing that an answer can follow"
    return Prompt(
        tuple(messages),
        example.tools,
        reference,
        {
            column_mapping.get(key, key): value
            for key, value in renamed.data.items()
            if key not in format_columns
        },
        example.template_kwargs,
        example.images,
    )


def infer(
    run: FinishedRun, prompts_path: Path, answers_path: Path, *, max_new_tokens: int
) -> InferResult:
    """Answer every prompt of `prompts_path`, greedily, into the JSONL `answers_path`:
    `Prompt.output_fields`, `answer` and `by` (run, weights, limit). A file that was begun so is
    continued. Raises DataError where a row is not a prompt, or `answers_path` holds answers to
    other prompts or of other weights."""
    prompts = read_prompts(prompts_path, run.config.data)
    if any(prompt.images for prompt in prompts):
        require_images(run, f"INPUT={one_line(str(prompts_path))}")
    # weights and not only the name: a run of the same name may have been trained again
    digest = str(base_weights_identity(str(run.weights), None)["sha256"])[:12]
    provenance = f"{run.folder.path.name} {digest} max_new_tokens={max_new_tokens}"
    answered_count = _count_answered(answers_path, prompts, provenance)
    if answered_count < len(prompts):
        responder = Responder(run)
        with translate_write_errors(answers_path), answers_path.open("a", encoding="utf-8") as file:
            for offset in range(answered_count, len(prompts), _CHUNK_PROMPTS):
                chunk = prompts[offset : offset + _CHUNK_PROMPTS]
                prompt_ids = [
                    responder.prompt_ids(
                        prompt.messages, prompt.tools, prompt.template_kwargs, prompt.images
                    )
                    for prompt in chunk
                ]
                answers = responder.answer_texts(
                    prompt_ids,
                    max_new_tokens=max_new_tokens,
                    images=[prompt.images for prompt in chunk],
                )
                for prompt, answer in zip(chunk, answers, strict=True):
                    fields = {**prompt.output_fields, "answer": answer, "by": provenance}
                    file.write(json.dumps(fields, ensure_ascii=False) + "\n")
                # on the disk before the next ones are computed: an answer that a crash loses costs
                # minutes of GPU
                file.flush()
                os.fsync(file.fileno())
                logger.info("Answered: %d of %d", offset + len(chunk), len(prompts))
    return InferResult(run.folder.path, answers_path, len(prompts), answered_count)


def _count_answered(answers_path: Path, prompts: list[Prompt], provenance: str) -> int:
    """Count the prompts that are answered already, and cut off a half-written last line. Raises
    DataError where the file holds other answers."""
    file_label = f"OUTPUT={one_line(str(answers_path))}"
    if not answers_path.exists():
        with translate_write_errors(answers_path):
            answers_path.parent.mkdir(parents=True, exist_ok=True)
        return 0
    require_file(answers_path)
    # a process that was killed may have left half a line, or half a character of one
    content = answers_path.read_bytes()
    complete_lines = content[: content.rfind(b"\n") + 1]
    lines = complete_lines.decode("utf-8", "replace").split("\n")[:-1]  # not at U+2028
    if len(lines) > len(prompts):
        raise DataError(f"{file_label} has {len(lines)} answers, and INPUT {len(prompts)} prompts")
    for line_number, (line, prompt) in enumerate(zip(lines, prompts, strict=False), start=1):
        try:
            entry = json.loads(line)
            answered_by, _ = entry.pop("by"), entry.pop("answer")
        except (ValueError, AttributeError, TypeError, KeyError):
            raise DataError(
                f"{file_label} exists, and line {line_number} is not an answer of make infer"
            ) from None
        if entry != prompt.output_fields:
            raise DataError(
                f"{file_label} exists and answers other prompts (line {line_number});"
                " name another file"
            )
        if answered_by != provenance:
            raise DataError(
                f"{file_label} exists and was answered by {one_line(str(answered_by))}, now "
                f"{one_line(provenance)}; name another file"
            )
    if len(complete_lines) < len(content):
        os.truncate(answers_path, len(complete_lines))
    return len(lines)
