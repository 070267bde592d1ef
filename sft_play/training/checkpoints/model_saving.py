"""The trained weights on disk: written aside, read back and compared with the model, then
renamed."""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers.core_model_loading import revert_weight_conversion
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from sft_play.data.masks.image_processor import ImageProcessorSource, copy_processor_files
from sft_play.errors import ModelError
from sft_play.files import atomic
from sft_play.log import one_line
from sft_play.models.config_json import find_model_folder
from sft_play.models.families import dequantisable_method, dequantised_config
from sft_play.planner.memory.estimate import MAX_WEIGHTS_FILE_BYTES
from sft_play.process.waiting import report_wait
from sft_play.runs.folder import read_json
from sft_play.training.checkpoints.full_state_dict import (
    ADAPTER_FILE,
    embedding_layers,
    has_adapter,
    model_names_by_saved_name,
    tied_weight_names,
)
from sft_play.training.model.language_model import find_text_tower

# The safetensors files of a model's folder, read by their headers.
#
# Where weights are stored quantised, in MXFP4 or in blocks of FP8 or FP4, the folder is seen as if
# it held the 16-bit tensors that they stand for: each is dequantised when it is read.


@dataclass(frozen=True)
class FileTensor:
    """A tensor of a folder's weights."""

    file: Path
    shape: tuple[int, ...]
    # As safetensors writes it, such as BF16.
    dtype: str
    read: Callable[[], torch.Tensor]

    def __getitem__(self, index: Any) -> torch.Tensor:
        """Its values, as transformers reads them of a file."""
        return self.read()[index]


def open_tensors(folder: Path) -> dict[str, FileTensor]:
    """Every tensor in a folder's weights, none read yet; raises ModelError for a quantised one
    without scales."""
    tensors: dict[str, FileTensor] = {}
    for file in weight_files(folder):
        # maps the file, as long as any of its tensors is held
        archive: Any = safe_open(file, framework="pt")
        for name in archive.keys():  # noqa: SIM118  (safe_open is no mapping)
            # reads the file's header, and none of the tensor
            tensor_slice = archive.get_slice(name)
            tensors[name] = FileTensor(
                file,
                tuple(tensor_slice.get_shape()),
                str(tensor_slice.get_dtype()),
                partial(archive.get_tensor, name),
            )
    method, fields = dequantisable_method(read_json(folder / "config.json"))
    if method == "mxfp4":
        return dict(_mxfp4_tensors(tensors))
    if method == "fp8":
        return dict(_block_tensors(tensors, fields.get("weight_block_size")))
    return tensors


def weight_files(folder: Path) -> list[Path]:
    """List the files that transformers would read: the index's files, or all of them without an
    index. A hub repository may hold the same weights twice (`consolidated.safetensors` beside
    `model-*.safetensors`)."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        return sorted(
            {
                folder / name
                for name in json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
            }
        )
    single_file = folder / "model.safetensors"
    return [single_file] if single_file.is_file() else sorted(folder.glob("*.safetensors"))


def fetch_base_folder(name: str, *, revision: str | None) -> Path:
    """A base's folder: the local one, or the hub's, downloaded; raises ModelError where it cannot
    be fetched."""
    folder = find_model_folder(name)
    if folder is not None:
        return folder
    from huggingface_hub import snapshot_download

    # what transformers reads, and not the same weights again as .bin, .gguf or original/*.pth
    patterns = ["*.safetensors", "*.json", "*.py", "*.txt", "*.model", "*.jinja"]
    try:
        with report_wait(f"Downloading {one_line(name)} from the hub"):
            return Path(snapshot_download(name, revision=revision, allow_patterns=patterns))
    except Exception as error:  # the hub's own errors, and those of every layer below it
        problem = (
            describe_broken_connection(error)
            or f"cannot be fetched: {one_line(str(error), limit=300)}"
        )
        raise ModelError(f"the base {name} {problem}") from error


def describe_broken_connection(error: BaseException) -> str | None:
    """Describe a download that a connection error ended, also as the cause of another error; None
    for any other."""
    cause: BaseException | None = error
    while cause is not None and not type(cause).__module__.startswith(
        ("httpx", "httpcore", "requests", "urllib3")
    ):
        cause = cause.__cause__ or cause.__context__
    if cause is None:
        return None
    message = one_line(str(cause) or type(cause).__name__, limit=200)
    return (
        f"did not come whole ({message}); files that did"
        " are kept, and the next start fetches the others"
    )


# --- stored quantised -----------------------------------------------------------------------------
# The values of four bits without their sign, which comes first (OCP Microscaling Formats 1.0,
# 5.3.3).
_E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# How the scales of a tensor are called: DeepSeek-V3, Qwen and MiniMax; DeepSeek-V4; Mistral; per
# tensor.
_SCALE_NAMES = ("{key}_scale_inv", "{stem}.scale", "{stem}.qscale_weight", "{key}_scale")


# gpt-oss: `*_blocks` (experts x rows x groups x 16 bytes) and `*_scales` (experts x rows x groups).
def _mxfp4_tensors(tensors: Mapping[str, FileTensor]) -> Iterator[tuple[str, FileTensor]]:
    for key, blocks in tensors.items():
        name = key.removesuffix("_blocks")
        if name == key:
            if not (key.endswith("_scales") and f"{key.removesuffix('_scales')}_blocks" in tensors):
                yield key, blocks
            continue
        scales = tensors.get(f"{name}_scales")
        if scales is None:
            raise ModelError(f"{blocks.file} holds {key}, and no {name}_scales")
        experts, rows, groups, group_bytes = blocks.shape
        shape = (experts, 2 * group_bytes * groups, rows)
        yield name, FileTensor(blocks.file, shape, "BF16", partial(_read_mxfp4, blocks, scales))


def _read_mxfp4(blocks: FileTensor, scales: FileTensor) -> Any:
    return convert_moe_packed_tensors(blocks.read(), scales.read())


def _block_tensors(
    tensors: Mapping[str, FileTensor], block_size: Any
) -> Iterator[tuple[str, FileTensor]]:
    scales_by_key = dict[str, str]()
    for key, tensor in tensors.items():
        if tensor.dtype in ("F8_E4M3", "F8_E5M2", "F4", "I8", "U8"):
            names = [
                name.format(key=key, stem=key.removesuffix(".weight")) for name in _SCALE_NAMES
            ]
            scales = next((name for name in names if name in tensors and name != key), None)
            if scales is not None:
                scales_by_key[key] = scales
            elif tensor.dtype.startswith("F8") and not key.endswith("scale_inv"):
                raise ModelError(
                    f"{tensor.file} holds {key} in {tensor.dtype}, and no scales of it"
                )
    scale_keys = set(scales_by_key.values())
    for key, tensor in tensors.items():
        if key in scales_by_key:
            numbers_per_byte = 1 if tensor.dtype.startswith("F8") else 2
            shape = (*tensor.shape[:-1], numbers_per_byte * tensor.shape[-1])
            yield (
                key,
                FileTensor(
                    tensor.file,
                    shape,
                    "BF16",
                    partial(_read_blocks, tensor, tensors[scales_by_key[key]], block_size),
                ),
            )
        # scales of activations, which 16 bits have no use for, are left out
        elif key not in scale_keys and not key.endswith(
            ("activation_scale", "input_scale", "qscale_act")
        ):
            yield key, tensor


# In bfloat16: each block times its scale, in fp32; the last blocks may be smaller than the others.
def _read_blocks(tensor: FileTensor, scales: FileTensor, block_size: Any) -> torch.Tensor:
    stored, scale = tensor.read(), scales.read()
    if scale.dtype is torch.uint8:
        # an exponent of two in a byte (E8M0)
        scale = torch.exp2(scale.float() - 127)
    if tensor.dtype.startswith("F8"):
        values = stored.float()
    else:  # bytes of two numbers each, the lower half first: the last side is twice as long
        table = torch.tensor([*_E2M1_VALUES, *(-value for value in _E2M1_VALUES)])
        stored = stored.view(torch.uint8)
        halves = torch.stack([stored & 15, stored >> 4], dim=-1)
        values = table[halves.int()].reshape(*stored.shape[:-1], -1)
    if scale.numel() == 1:
        return (values * scale.float().reshape(())).bfloat16()
    sizes = block_size if isinstance(block_size, list | tuple) and len(block_size) == 2 else (1, 1)
    rows, columns = map(_block_length, values.shape[-2:], scale.shape[-2:], sizes)
    expanded = scale.float().repeat_interleave(rows, -2)[..., : values.shape[-2], :]
    expanded = expanded.repeat_interleave(columns, -1)[..., : values.shape[-1]]
    return (values * expanded).bfloat16()


# Elements of a block on a side of `length` with `count` blocks; the config's size where it gives
# this count.
def _block_length(length: int, count: int, configured: int) -> int:
    if configured and math.ceil(length / configured) == count:
        return configured
    return math.ceil(length / count)


def save_model(
    model: Any,
    tokenizer: Any,
    path: Path,
    *,
    base_folder: Path | None = None,
    images: ImageProcessorSource | None = None,
    steps: int = 0,
    **write_options: Any,
) -> int:
    """Save the adapter, or the whole model, with its tokenizer: written aside, read back, checked,
    then renamed. Returns the bytes of its tensors. `base_folder`: the base's folder, which has the
    other parts of a whole class, and `images` how the run used its processor; `steps`: optimizer
    steps taken (after two, a lora_B of zeros is an error); `write_options`: passed to
    `write_weights`. Raises ModelError: what was written is empty, not finite, or not what the model
    holds."""
    with atomic.replace_path(path, temporary=path.with_name(f".{path.name}.building")) as staging:
        write_weights(model, staging, **write_options)
        # PEFT's blank form, which names the base by its path
        (staging / "README.md").unlink(missing_ok=True)
        tokenizer.save_pretrained(staging)
        size = check_saved_weights(
            staging, expected_shapes=saved_shapes(model), must_have_learned=steps > 1
        )
        if base_folder is not None:
            expand_to_full_class(model, staging, base_folder, images=images)
        return size


def write_weights(
    model: Any,
    folder: Path,
    *,
    state_dict: dict[str, Any] | None = None,
    tensors: NamedTensors | None = None,
    dtype: torch.dtype | None = None,
) -> None:
    """Write a model's config and weights into a folder. `state_dict`: the weights, if the model
    holds only a part of them; `tensors`: the same one after the other (with `keeps_tensor_names` at
    most one file's worth is in memory); `dtype`: whole weights get it, in the files and in the
    model (None: unchanged)."""
    text_tower, options = find_text_tower(model), dict[str, Any]()
    if has_adapter(model):
        options["save_embedding_layers"] = embeddings_to_save(model)
    elif text_tower is not None:
        # conversions that the whole class has when it is loaded are not those of its language model
        options["save_original_format"] = False
    dtype_rule = saved_dtype_rule(model, dtype)
    shapes = saved_shapes(model)
    has_native_names = "save_original_format" in options
    if state_dict is not None:
        tensors = state_dict.items()
    if tensors is None:  # the model's own weights are cast in place: no second copy
        for name, parameter in model.named_parameters():
            parameter.data = parameter.data.to(dtype_rule(name, parameter))
        model.save_pretrained(folder, **options)
    elif state_dict is None and (has_native_names or keeps_tensor_names(model, shapes)):
        model.save_pretrained(folder, state_dict={}, save_original_format=False)
        write_tensors(folder, tensors, shapes=shapes, dtype_rule=dtype_rule)
    else:
        model.save_pretrained(
            folder,
            **options,
            state_dict={
                name: tensor.to(dtype_rule(name, tensor))
                for name, tensor in tensors
                if tensor is not None
            },
        )
    if text_tower is not None and has_adapter(model):
        # names of the whole class, as PEFT and serving engines expect; a suffix alone would match
        # image layers too
        weights_path, config_path = folder / ADAPTER_FILE, folder / "adapter_config.json"
        full_tensors = {
            text_tower.to_full_name(name): tensor
            for name, tensor in load_file(weights_path).items()
        }
        save_file(full_tensors, weights_path, {"format": "pt"})
        config = json.loads(config_path.read_text(encoding="utf-8"))
        targets = sorted(config["target_modules"])
        part_names = [name for name in targets if text_tower.to_full_name(name) != name]
        suffixes = "|".join(re.escape(name) for name in targets if name not in part_names)
        pattern = rf"{re.escape(text_tower.prefixes[0][1])}(?:.+\.)?(?:{suffixes})"
        for name in part_names:
            pattern += f"|{re.escape(text_tower.to_full_name(name))}"
        config["target_modules"] = pattern
        parameters, rows = config.get("target_parameters"), config.get("trainable_token_indices")
        if parameters:
            config["target_parameters"] = list(map(text_tower.to_full_name, parameters))
        if rows:
            config["trainable_token_indices"] = {
                text_tower.to_full_name(name): row for name, row in rows.items()
            }
        config_path.write_text(json.dumps(config, indent=2, sort_keys=True), encoding="utf-8")
    for file in folder.glob("*.safetensors"):
        file.chmod(0o644)  # safetensors writes files that only their owner may read
    if dtype is not None:
        # transformers writes the dtype that the weights had in memory
        path = folder / "config.json"
        saved_config = {
            **json.loads(path.read_text(encoding="utf-8")),
            "dtype": str(dtype).removeprefix("torch."),
        }
        path.write_text(json.dumps(saved_config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def expand_to_full_class(
    model: Any, folder: Path, base_folder: Path, *, images: ImageProcessorSource | None = None
) -> None:
    """Make of a folder with a language model's weights one of its whole class, under the names that
    the base's files have; all else is the base's, bit by bit, but the bounds of `images`. A model
    of text stays as it is."""
    text_tower = find_text_tower(model)
    if text_tower is None or has_adapter(model):
        return
    trained, base_tensors = open_tensors(folder), open_tensors(base_folder)
    # the first two parts of a name
    trained_prefixes, tied_names = (
        {tuple(name.split(".")[:2]) for name in trained},
        tied_weight_names(model),
    )
    full_prefixes = tuple(
        full_prefix
        for text_prefix, full_prefix in text_tower.prefixes
        if full_prefix != text_prefix
    )
    sources, unmatched = dict[str, FileTensor](), dict(trained)
    for key, file_tensor in base_tensors.items():
        name = apply_key_mapping(key, text_tower.key_mapping)
        if name in trained:
            sources[key] = unmatched.pop(name, trained[name])
        # a part for images or sound
        elif not (
            name in tied_names
            or tuple(name.split(".")[:2]) in trained_prefixes
            or apply_key_mapping(key, dict(text_tower.renamings)).startswith(full_prefixes)
        ):
            sources[key] = file_tensor
    published = partial(
        _published_tensors,
        text_tower.build_full_model(),
        {text_tower.to_full_name(name): file_tensor for name, file_tensor in unmatched.items()},
    )
    meta_tensors = published(lambda file_tensor: torch.empty(file_tensor.shape, device="meta"))
    shapes = {key: file_tensor.shape for key, file_tensor in sources.items()} | {
        key: tuple(meta_tensor.shape) for key, meta_tensor in meta_tensors
    }
    staging = folder / ".whole"
    staging.mkdir()
    write_tensors(
        staging,
        chain(
            ((key, file_tensor.read()) for key, file_tensor in sources.items()),
            published(lambda file_tensor: file_tensor.read()),
        ),
        shapes=shapes,
        dtype_rule=lambda name, tensor: tensor.dtype,
    )
    for file in {
        *(file_tensor.file for file_tensor in trained.values()),
        *folder.glob("*.index.json"),
    }:
        file.unlink()
    for file in staging.iterdir():
        file.rename(folder / file.name)
    staging.rmdir()
    # the base's config.json with what training changed, and what its class reads images with
    config = dequantised_config(
        json.loads((base_folder / "config.json").read_text(encoding="utf-8"))
    )
    saved_dtype = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("dtype")
    if saved_dtype:
        set_dtype(config, saved_dtype)
    config.get("text_config", config)["vocab_size"] = model.config.vocab_size
    (folder / "config.json").write_text(
        json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8"
    )
    copy_processor_files(base_folder, folder, images)


# Tensors in the names and pieces that their class saves them in, a block at a time, where there is
# a way.
def _published_tensors(
    full_model: Any, tensors: Mapping[str, FileTensor], read: Callable[[FileTensor], torch.Tensor]
) -> Iterator[tuple[str, torch.Tensor]]:
    blocks: dict[str, dict[str, FileTensor]] = {}
    for name, file_tensor in tensors.items():
        prefix = "".join(re.findall(r"^.*?\.\d+\.", name))
        blocks.setdefault(prefix, {})[name] = file_tensor
    for block in blocks.values():
        state = {name: read(file_tensor) for name, file_tensor in block.items()}
        # there is no such class, or a conversion fails in its own way
        with contextlib.suppress(Exception):
            state = revert_weight_conversion(full_model, dict(state))
        yield from state.items()


def set_dtype(config: dict[str, Any], dtype: str) -> None:
    """Write a dtype into the fields of a config.json, and of the parts that name one."""
    config.pop("torch_dtype", None)  # what transformers 4 called `dtype`
    config["dtype"] = dtype
    for section in config.values():
        if isinstance(section, dict) and {"dtype", "torch_dtype"} & section.keys():
            set_dtype(section, dtype)


def apply_key_mapping(name: str, key_mapping: Mapping[str, str]) -> str:
    """A name as transformers' `key_mapping` changes it."""
    for pattern, replacement in key_mapping.items():
        name = re.sub(pattern, replacement, name, count=1)
    return name


def set_stop_tokens(
    folder: Path, stop_ids: Sequence[int], pad_id: int | None, *, source_folder: Path | None = None
) -> None:
    """Write the tokens that end an answer into a model's generation config. Its other settings come
    from the model in `source_folder`, by default from the folder's own."""
    path = folder / "generation_config.json"
    generation_config = read_json((source_folder or folder) / path.name) | {"pad_token_id": pad_id}
    generation_config["eos_token_id"] = list(stop_ids) if len(stop_ids) > 1 else stop_ids[0]
    path.unlink(missing_ok=True)  # it may be a link to another model's
    path.write_text(json.dumps(generation_config, indent=2) + "\n", encoding="utf-8")


def embeddings_to_save(model: Any) -> bool | str:
    """Whether PEFT should save a model's embeddings beside its adapter; "auto": it finds out. Not
    if all are in `modules_to_save` or have rows that train, which would be saved twice (0.21);
    always if one trains without.
    """
    from peft.utils.other import AuxiliaryTrainingWrapper

    unwrapped = [
        layer
        for layer in embedding_layers(model)
        if not isinstance(layer, AuxiliaryTrainingWrapper)
    ]
    if not unwrapped:
        return False
    return (
        any(
            weight.requires_grad
            for layer in unwrapped
            for weight in layer.parameters(recurse=False)
        )
        or "auto"
    )


def saved_dtype_rule(
    model: Any, dtype: torch.dtype | None
) -> Callable[[str, torch.Tensor], torch.dtype]:
    """The dtype that each tensor is saved in: the given one, except for those that the class always
    keeps in fp32."""
    if dtype is None:
        return lambda name, tensor: tensor.dtype
    fp32_modules = {
        *(model._keep_in_fp32_modules or ()),
        *(model._keep_in_fp32_modules_strict or ()),
    }

    def saved_dtype(name: str, tensor: torch.Tensor) -> torch.dtype:
        if not tensor.is_floating_point() or any(part in name for part in fp32_modules):
            return tensor.dtype
        return dtype

    return saved_dtype


def saved_shapes(model: Any) -> dict[str, tuple[int, ...]]:
    """Name and whole shape, also under ZeRO-3 and FSDP, of every tensor that saving writes, tied
    ones once."""
    parameters = {
        name: tuple(getattr(parameter, "ds_shape", parameter.shape))
        for name, parameter in model.named_parameters()
    }
    if has_adapter(model):
        return {
            saved_name: parameters[name]
            for saved_name, name in model_names_by_saved_name(model).items()
            if name in parameters
        }
    tied = tied_weight_names(model)
    tensors = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    return {name: shape for name, shape in (tensors | parameters).items() if name not in tied}


def check_saved_weights(
    folder: Path,
    *,
    expected_shapes: dict[str, tuple[int, ...]] | None = None,
    must_have_learned: bool = False,
) -> int:
    """Read back the tensors saved in a folder; returns their bytes. Raises ModelError: there are
    none, one is empty, of another shape, not finite or missing, or no lora_B
    `must_have_learned`."""
    shapes: dict[str, tuple[int, ...]] = {}
    size, has_learned = 0, not must_have_learned
    for name, file_tensor in open_tensors(folder).items():
        tensor = file_tensor.read()
        shapes[name] = tuple(tensor.shape)
        size += tensor.nbytes
        if tensor.is_floating_point() and not torch.isfinite(tensor).all():
            raise ModelError(f"{folder}: {name} was saved with values that are not finite")
        has_learned = has_learned or ("lora_B" in name and bool(torch.count_nonzero(tensor)))
    if size == 0:
        raise ModelError(f"{folder}: no weights were saved")
    if expected_shapes is not None:
        # by the hub's names, one tensor per expert, only the number of values can be compared
        missing = sorted(set(expected_shapes) - set(shapes))
        wrong = [name for name, shape in expected_shapes.items() if shapes.get(name) != shape]
        saved_values, expected_values = (
            sum(map(math.prod, sizes.values())) for sizes in (shapes, expected_shapes)
        )
        if wrong and (not missing or saved_values != expected_values):
            problem = (
                f"{wrong[0]} has the shape {shapes.get(wrong[0])}"
                f" and not {expected_shapes[wrong[0]]}"
            )
            if missing:
                problem = (
                    f"it holds {saved_values:,} of {expected_values:,} values; missing by name:"
                    f" {', '.join(missing[:3])}"
                )
            raise ModelError(
                f"{folder}: what was saved is not the model: {problem}. The last checkpoint is"
                " kept: continue from it with make resume, or write it out with make consolidate"
            )
    if not has_learned and any("lora_B" in name for name in shapes):
        raise ModelError(
            f"{folder}: every lora_B of the adapter is zero:"
            " what was trained did not reach the file"
        )
    return size


# Names and whole tensors, None on ranks that only help to gather them.
NamedTensors = Iterable[tuple[str, torch.Tensor | None]]


def keeps_tensor_names(model: Any, names: Iterable[str]) -> bool:
    """Whether transformers saves the tensors as they are in memory; else it has to be given all at
    once."""
    meta_tensors = {name: torch.empty(0, device="meta") for name in names}
    try:
        return set(revert_weight_conversion(model, dict(meta_tensors))) == set(meta_tensors)
    except Exception:  # a conversion that fails on empty tensors is a conversion
        return False


def write_tensors(
    folder: Path,
    tensors: NamedTensors,
    *,
    shapes: Mapping[str, tuple[int, ...]],
    dtype_rule: Callable[[str, torch.Tensor], torch.dtype],
    max_file_bytes: int = MAX_WEIGHTS_FILE_BYTES,
) -> None:
    """Write tensors as transformers' safetensors files, with an index where there are several.
    `shapes`: of all tensors to come; `max_file_bytes`: most bytes of a file of several tensors.
    Raises ModelError: a tensor is not in `shapes`, has another shape, or is missing at the end."""
    file_names: list[list[str]] = []
    pending: dict[str, torch.Tensor] = {}
    byte_counts: dict[str, int] = {}

    def write_file() -> None:
        path = folder / f".part{len(file_names)}.safetensors"
        save_file(pending, path, metadata={"format": "pt"})
        path.chmod(0o644)  # safetensors writes files that only their owner may read
        file_names.append(list(pending))
        pending.clear()

    for name, tensor in tensors:
        if tensor is None or shapes.get(name) != tuple(tensor.shape):
            raise ModelError(
                f"{folder}: {name} was to be saved with shape {shapes.get(name)}, but has "
                f"{getattr(tensor, 'shape', None)}"
            )
        tensor = tensor.to(dtype_rule(name, tensor)).contiguous()
        byte_counts[name] = tensor.nbytes
        if (
            pending
            and sum(byte_counts[other] for other in pending) + tensor.nbytes > max_file_bytes
        ):
            write_file()
        pending[name] = tensor
    write_file()
    missing = sorted(set(shapes) - set(byte_counts))
    if missing:
        raise ModelError(
            f"{folder}: {len(missing)} tensors were not gathered, such as {missing[0]}"
        )
    if len(file_names) == 1:
        (folder / ".part0.safetensors").rename(folder / "model.safetensors")
        return
    weight_map: dict[str, str] = {}
    for index, names in enumerate(file_names):
        file = f"model-{index + 1:05d}-of-{len(file_names):05d}.safetensors"
        (folder / f".part{index}.safetensors").rename(folder / file)
        weight_map |= dict.fromkeys(names, file)
    parameter_count, total_bytes = sum(map(math.prod, shapes.values())), sum(byte_counts.values())
    index_json = {
        "metadata": {"total_parameters": parameter_count, "total_size": total_bytes},
        "weight_map": weight_map,
    }
    (folder / "model.safetensors.index.json").write_text(
        json.dumps(index_json, indent=2, sort_keys=True) + "\n", encoding="utf-8"
    )
