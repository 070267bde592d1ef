"""The base's own processor of images: how many tokens each picture takes, by its size, and the
tensors that the model is given.

A processor writes a placeholder's expansion (`replace_image_token`), which here is spliced into the
rendered text: runs of one image token stand there once and are repeated as ids, so that a text of
thousands of image tokens is never tokenised.
"""

import contextlib
import functools
import hashlib
import importlib
import itertools
import json
import re
import shutil
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from sft_play.config.schema import RunConfig
from sft_play.data.masks.token_row import IGNORED
from sft_play.data.sources.images import Picture
from sft_play.errors import ConfigError, ModelError
from sft_play.log import one_line
from sft_play.models.config_json import find_model_folder

# Keys of a processor's output that are made of the text, or say only how it was made.
_TEXT_KEYS = frozenset({"input_ids", "attention_mask"})
# Sizes with different shapes: an expansion that is the same around its image tokens for all of them
# is so for every size.
_PROBED_SIZES = ((64, 64), (640, 480), (480, 640), (1600, 400), (300, 1500))


@dataclass(frozen=True)
class ImageProcessorSource:
    """Where a base's processor is loaded from, and the bounds of `data.image_pixels`."""

    # The base's folder, or its name on the hub.
    location: str
    revision: str | None = None
    min_pixels: int | None = None
    max_pixels: int | None = None

    @classmethod
    def from_config(cls, config: RunConfig) -> "ImageProcessorSource":
        """The processor of a run's base."""
        model, pixels = config.model, config.data.image_pixels
        location = find_model_folder(model.name) or model.name
        return cls(str(location), model.revision, pixels.min, pixels.max)

    @property
    def identity(self) -> list[str]:
        """What decides the tokens of images: this, and the content of the processor's files where
        they are in a folder."""
        files = sorted(Path(self.location).glob("*processor*.json"))
        digests = [hashlib.sha256(file.read_bytes()).hexdigest() for file in files]
        return [repr(self), *digests]


@dataclass(frozen=True)
class ImageExpansion:
    """What the tokenizer is given for one picture: `text` with each run of an image token written
    once, and the length of every run in its order."""

    text: str
    run_lengths: tuple[int, ...]

    @property
    def tokens(self) -> int:
        """Image tokens of the picture, without those that the processor puts around them."""
        return sum(self.run_lengths)


class _CountedFrame(NamedTuple):
    """An expansion whose text is that of pictures of all shapes, and whose only run of image tokens
    that differs between them is known by the processor's own count."""

    expansion: ImageExpansion
    # Which of its runs that is, and what the count has beside it.
    place: int
    other_tokens: int
    # Whether it differs between the probed shapes at all.
    is_varying: bool


class ImageProcessor:
    """The processor of an image-text class, without its video processor, on PIL's backend: the same
    rows with and without torchvision. Raises ModelError where the base has none, or one of a kind
    that is not known here."""

    def __init__(self, processor: Any, name: str) -> None:
        from transformers import ProcessorMixin

        self.processor, self.name = processor, name
        placeholder = getattr(processor, "image_token", None)
        own_method = type(processor).replace_image_token
        if not isinstance(placeholder, str) or own_method is ProcessorMixin.replace_image_token:
            raise ModelError(
                f"{one_line(name)}: {type(processor).__name__} does not say which token stands for"
                " an image; rows with images cannot be trained on this base"
            )
        self.placeholder: str = placeholder
        tokenizer = processor.tokenizer
        self.token_ids = frozenset(one for one in processor.image_token_ids if one is not None)
        tokens = sorted(tokenizer.convert_ids_to_tokens(sorted(self.token_ids)), key=len)
        # a token, and the same one again
        self._run = re.compile(rf"({'|'.join(map(re.escape, reversed(tokens)))})\1*")
        self._expansions: dict[tuple[tuple[int, int], bool], ImageExpansion] = {}
        self._tile_expansions: dict[tuple[int, ...], ImageExpansion] = {}

    # How a picture is written.

    def expand(self, width: int, height: int, *, is_alone: bool = True) -> ImageExpansion:
        """What stands for a picture of this size in the text; `is_alone`: in a row without others,
        which some processors cut into more tiles (LLaVA-OneVision)."""
        size = (width, height)
        key = (size, is_alone or not self._heeds_others)
        if key not in self._expansions:
            try:
                self._expansions[key] = self._find_expansion(*key)
            except (ValueError, TypeError, RuntimeError) as error:
                raise ModelError(
                    f"{type(self.processor).__name__} refuses images of {width} x {height} pixels:"
                    f" {one_line(str(error), limit=200)}"
                ) from error
        return self._expansions[key]

    def _find_expansion(self, size: tuple[int, int], is_alone: bool) -> ImageExpansion:
        if not is_alone:
            return self.process([[self._blank(size)] * 2])[1][0]
        return self._expand_by_count(size) or self._expand_tiles(size)

    @functools.cached_property
    def _heeds_others(self) -> bool:
        blanks = [self._blank(size) for size in _PROBED_SIZES]
        together = self.process([blanks])[1]
        return together != [self._expand_blank(size) for size in _PROBED_SIZES]

    def count_tokens(self, width: int, height: int) -> int:
        """Image tokens of a picture of this size."""
        return self.expand(width, height).tokens

    def _expand_tiles(self, size: tuple[int, int]) -> ImageExpansion:
        """The expansion of a blank picture, made once for all sizes that are cut into the same rows
        and columns of tiles."""
        count_patches = getattr(self.processor.image_processor, "get_number_of_image_patches", None)
        tiles = count_patches(size[1], size[0], {}) if count_patches is not None else None
        if not isinstance(tiles, tuple):
            return self._expand_blank(size)
        if tiles not in self._tile_expansions:
            self._tile_expansions[tiles] = self._expand_blank(size)
        return self._tile_expansions[tiles]

    def _expand_blank(self, size: tuple[int, int]) -> ImageExpansion:
        return self.process([[self._blank(size)]])[1][0]

    def _expand_by_count(self, size: tuple[int, int]) -> ImageExpansion | None:
        """The expansion by the processor's own count, which reads no pixel; None where the count
        does not decide it."""
        frame = self._counted_frame
        if frame is None:
            return None
        lengths = [*frame.expansion.run_lengths]
        length = self._quick_count(size) - frame.other_tokens
        if length != lengths[frame.place] and not frame.is_varying:
            return None  # a number of tiles that none of the probed shapes has
        lengths[frame.place] = length
        return replace(frame.expansion, run_lengths=tuple(lengths))

    @functools.cached_property
    def _counted_frame(self) -> _CountedFrame | None:
        expansions = [self._expand_blank(size) for size in _PROBED_SIZES]
        if len({(one.text, len(one.run_lengths)) for one in expansions}) > 1:
            return None  # more than a run differs: tiles, rows
        runs = list(zip(*(one.run_lengths for one in expansions), strict=True))
        place = max(range(len(runs)), key=lambda index: (len({*runs[index]}), runs[index][0]))
        try:
            counts = [self._quick_count(size) for size in _PROBED_SIZES]
        except (AttributeError, KeyError, TypeError, ValueError):
            return None
        differences = {count - run for count, run in zip(counts, runs[place], strict=True)}
        are_others_alike = all(
            len({*lengths}) == 1 for index, lengths in enumerate(runs) if index != place
        )
        if len(differences) > 1 or not are_others_alike:
            return None
        return _CountedFrame(expansions[0], place, differences.pop(), len({*runs[place]}) > 1)

    def _quick_count(self, size: tuple[int, int]) -> int:
        data = self.processor._get_num_multimodal_tokens(image_sizes=[[*reversed(size)]])
        return int(data["num_image_tokens"][0])

    def _collapse(self, expanded: str) -> ImageExpansion:
        lengths = [len(run.group()) // len(run[1]) for run in self._run.finditer(expanded)]
        return ImageExpansion(self._run.sub(r"\1", expanded), tuple(lengths))

    # What the model is given.

    def process(
        self, images_by_row: Sequence[Sequence[Any]]
    ) -> tuple[dict[str, Any], list[ImageExpansion]]:
        """The tensors of decoded pictures (PIL, RGB) by the model's own names, for the rows of a
        batch that have any, and the expansion of every picture in their order. Raises ModelError:
        the processor refuses one."""
        kwargs = self.processor._merge_kwargs(
            tokenizer_init_kwargs=self.processor.tokenizer.init_kwargs, return_tensors="pt"
        )
        try:
            inputs, expansions = self.processor._process_images(
                [[*images] for images in images_by_row], **kwargs["images_kwargs"]
            )
        except (ValueError, TypeError, RuntimeError) as error:
            sizes = ", ".join(f"{image.width}x{image.height}" for image in images_by_row[0][:3])
            raise ModelError(
                f"{type(self.processor).__name__} refuses images of {sizes}:"
                f" {one_line(str(error), limit=200)}"
            ) from error
        # the others are counts that the processor itself needs
        names = {*self.processor.model_input_names} - _TEXT_KEYS
        tensors = {
            name: value
            for name, value in inputs.items()
            if name in names or name.startswith("pixel_")
        }
        return tensors, [self._collapse(expansion) for expansion in expansions]

    def blank_inputs(self, sizes: Sequence[tuple[int, int]]) -> dict[str, Any]:
        """The tensors of blank pictures of these sizes (width, height), each in a row of its
        own."""
        return self.process([[self._blank(size)] for size in sizes])[0]

    @staticmethod
    def _blank(size: tuple[int, int]) -> Any:
        from PIL import Image

        return Image.new("RGB", size, (127, 127, 127))

    def token_types(self, input_ids: Sequence[Sequence[int]]) -> dict[str, list[list[int]]]:
        """Whether each token is text (0) or of an image (1), under the names that the class reads;
        nothing where it reads none."""
        names = [
            name
            for name in self.processor.model_input_names
            if name in ("mm_token_type_ids", "token_type_ids")
        ]
        if not names:
            return {}
        types = self.processor.create_mm_token_type_ids([list(ids) for ids in input_ids])
        return dict.fromkeys(names, types)


def image_inputs(
    processor: ImageProcessor, pictures_by_row: Sequence[Sequence[Picture]]
) -> tuple[dict[str, Any], list[int]]:
    """The tensors of the pictures of a batch, decoded, and the image tokens that each row must
    have; no tensors where there is no picture."""
    if not any(pictures_by_row):
        return {}, [0] * len(pictures_by_row)
    tensors, expansions = processor.process(
        [[picture.decode() for picture in row] for row in pictures_by_row if row]
    )
    remaining = iter(expansions)
    return tensors, [
        sum(expansion.tokens for expansion in itertools.islice(remaining, len(row)))
        for row in pictures_by_row
    ]


def expand_runs(
    input_ids: Sequence[int],
    labels: Sequence[int],
    token_ids: frozenset[int],
    run_lengths: Sequence[int],
) -> tuple[list[int], list[int]] | None:
    """Repeat each image token of a row as often as its picture takes it, untrained; ids and labels
    of shape [T]. None where the row has not as many image tokens as `run_lengths`."""
    positions = [position for position, token in enumerate(input_ids) if token in token_ids]
    if len(positions) != len(run_lengths):
        return None
    expanded_ids, expanded_labels = list(input_ids), list(labels)
    # from the end, so that the positions before stay
    for position, length in zip(reversed(positions), reversed(run_lengths), strict=True):
        expanded_ids[position : position + 1] = [input_ids[position]] * length
        expanded_labels[position : position + 1] = [IGNORED] * length
    return expanded_ids, expanded_labels


# --------------------------------------------------------------------------------------------------
# Loading. Processors of classes that also take videos ask for a video processor, which needs
# torchvision: pictures need none.


def load_image_processor(source: ImageProcessorSource) -> ImageProcessor:
    """Load the processor of a base, with the base's own tokenizer. Raises ModelError: the base
    takes no images, or its processor cannot be built here; ConfigError: it has no such bounds."""
    from transformers import AutoImageProcessor, AutoTokenizer

    name, revision = source.location, source.revision
    processor_class = _find_processor_class(source)
    try:
        image_processor = AutoImageProcessor.from_pretrained(name, revision=revision, backend="pil")
        tokenizer = AutoTokenizer.from_pretrained(name, revision=revision)
        fields, _ = processor_class.get_processor_dict(name, revision=revision)
        processor = _build_processor(processor_class, image_processor, tokenizer, fields)
    except Exception as error:  # each class checks its parts in its own way
        raise ModelError(
            f"{one_line(name)}: its {processor_class.__name__} cannot be built, so rows with images"
            f" cannot be trained: {one_line(str(error), limit=300)}"
        ) from error
    if source.min_pixels is not None or source.max_pixels is not None:
        _bound_pixels(processor.image_processor, source)
    loaded = ImageProcessor(processor, name)
    _require_own_result(loaded)
    return loaded


def _require_own_result(image_processor: ImageProcessor) -> None:
    """Raise ModelError where the processor, called as a whole on one picture, gives other tokens or
    other tensors than are made here from its parts."""
    processor, picture = image_processor.processor, ImageProcessor._blank(_PROBED_SIZES[1])
    tensors, expansions = image_processor.process([[picture]])
    expansion = expansions[0]
    ids = processor.tokenizer(expansion.text, add_special_tokens=False)["input_ids"]
    expanded = expand_runs(ids, ids, image_processor.token_ids, expansion.run_lengths)
    try:
        with warnings.catch_warnings(action="ignore"):  # of how its numbers become tensors
            result = processor(
                text=[image_processor.placeholder],
                images=[[picture]],
                return_tensors="pt",
                add_special_tokens=False,
            )
    except Exception as error:  # each class in its own way
        problem = f"it does not take one image as others do: {one_line(str(error), limit=200)}"
    else:
        names = {*tensors, *image_processor.token_types([ids]), *_TEXT_KEYS}
        problem = ""
        if names != {*result}:
            problem = f"it gives the model {', '.join(sorted(names ^ {*result}))} beside"
        elif expanded is None or result["input_ids"][0].tolist() != expanded[0]:
            problem = "its tokens of an image are not those of its own expansion"
    if problem:
        raise ModelError(
            f"{one_line(image_processor.name)}: {type(processor).__name__} is not known here, so"
            f" rows with images cannot be trained: {problem}"
        )


def _find_processor_class(source: ImageProcessorSource) -> Any:
    from transformers import AutoConfig
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES

    names = [
        _read_json(source, file).get("processor_class")
        for file in ("processor_config.json", "preprocessor_config.json", "tokenizer_config.json")
    ]
    with contextlib.suppress(OSError, ValueError):
        config = AutoConfig.from_pretrained(source.location, revision=source.revision)
        names.append(PROCESSOR_MAPPING_NAMES.get(config.model_type))
    known_names = {*PROCESSOR_MAPPING_NAMES.values()} - {None}
    class_name = next((name for name in names if name in known_names), None)
    if class_name is None:
        raise ModelError(
            f"{one_line(source.location)} takes no images: it has no processor"
            " (processor_config.json); train rows with images on an image-text base"
        )
    return _import_processor_class(class_name)


# A module of a processor may import its image processor for torchvision (Pixtral): where
# torchvision is missing, that for PIL is imported under its name.
def _import_processor_class(class_name: str) -> Any:
    import transformers
    from transformers.utils import is_torchvision_available

    processor_class = getattr(transformers, class_name)
    if is_torchvision_available() or not getattr(processor_class, "is_dummy", False):
        return processor_class
    module_name = f"transformers.{transformers._class_to_module[class_name]}"
    folder, _, family = module_name.rpartition(".processing_")
    torchvision_module = f"{folder}.image_processing_{family}"
    sys.modules[torchvision_module] = importlib.import_module(
        f"{folder}.image_processing_pil_{family}"
    )
    try:
        return getattr(importlib.import_module(module_name), class_name)
    finally:
        del sys.modules[torchvision_module]


def _read_json(source: ImageProcessorSource, file: str) -> dict[str, Any]:
    from transformers.utils import cached_file

    path = cached_file(
        source.location,
        file,
        revision=source.revision,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_gated_repo=False,
        _raise_exceptions_for_connection_errors=False,
    )
    fields = json.loads(Path(path).read_text(encoding="utf-8")) if path else {}
    return fields if isinstance(fields, dict) else {}


def _build_processor(
    processor_class: Any, image_processor: Any, tokenizer: Any, fields: Mapping[str, Any]
) -> Any:
    class WithoutVideos(processor_class):
        def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
            if argument is None:
                return None
            return super().check_argument_for_proper_class(argument_name, argument)

    # SmolVLM's asks for a package that writes the numbers of a video's frames in words
    module = sys.modules[processor_class.__module__]
    if getattr(module, "num2words", "") is None:
        vars(module)["num2words"] = str
    WithoutVideos.__name__ = WithoutVideos.__qualname__ = processor_class.__name__
    parts = {"image_processor": image_processor, "tokenizer": tokenizer}
    arguments = [parts.get(name) for name in processor_class.get_attributes()]
    return WithoutVideos.from_args_and_dict(arguments, dict(fields))


def _bound_pixels(image_processor: Any, source: ImageProcessorSource) -> None:
    """Set the bounds of a picture's pixels in the processor's own terms. Raises ConfigError where
    it has none: every picture takes the same tokens then."""
    size = dict(image_processor.size or {})
    minimum, maximum = source.min_pixels, source.max_pixels
    if {"shortest_edge", "longest_edge"} <= size.keys() and hasattr(image_processor, "patch_size"):
        # of these classes (Qwen, GLM) both numbers are areas, whatever they are called
        least, most = minimum or size["shortest_edge"], maximum or size["longest_edge"]
        if least > most:
            raise ConfigError(
                f"data.image_pixels: at least {least:,} and at most {most:,} pixels exclude each"
                " other (a bound that is left out is the processor's own)"
            )
        image_processor.size = type(image_processor.size)(shortest_edge=least, longest_edge=most)
        return
    if size.get("longest_edge") and not size.get("shortest_edge") and minimum is None:
        edge = int((maximum or 0) ** 0.5)
        image_processor.size = type(image_processor.size)(longest_edge=edge)
        return
    raise ConfigError(
        f"data.image_pixels: {type(image_processor).__name__} resizes every picture to"
        f" {one_line(json.dumps(dict(size)))} and has no such bound; leave the key out"
    )


def bounded_size(source: ImageProcessorSource) -> dict[str, int] | None:
    """The size of its image processor with the bounds of `data.image_pixels`, as its file has it;
    None without bounds. Raises ConfigError: it has no such bounds."""
    from transformers import AutoImageProcessor

    if source.min_pixels is None and source.max_pixels is None:
        return None
    image_processor = AutoImageProcessor.from_pretrained(
        source.location, revision=source.revision, backend="pil"
    )
    _bound_pixels(image_processor, source)
    return dict(image_processor.size)


def copy_processor_files(
    base_folder: Path, folder: Path, source: ImageProcessorSource | None = None
) -> None:
    """Copy the files that a base's class reads images by into a folder of trained weights. The
    bounds of `source` are written into them: others make the tokens of training then."""
    for file in base_folder.glob("*processor*.json"):
        shutil.copyfile(file, folder / file.name)
    if source is None:
        return
    size = bounded_size(replace(source, location=str(folder), revision=None))
    if size is None:
        return
    for name in ("preprocessor_config.json", "processor_config.json"):
        fields = _read_json(ImageProcessorSource(str(folder)), name)
        # since transformers 5 it may be a part of the processor's own file
        section = fields if name.startswith("pre") else fields.get("image_processor")
        if section:
            section["size"] = size
            for old_name in ("min_pixels", "max_pixels"):  # would go before the size
                section.pop(old_name, None)
            (folder / name).write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")


@functools.lru_cache(maxsize=2)
def cached_image_processor(source: ImageProcessorSource) -> ImageProcessor:
    """The processor of a base with its own tokenizer, loaded once in a process."""
    return load_image_processor(source)
