"""The trained weights on disk: written aside, read back and compared with the model, then renamed."""

from __future__ import annotations

import contextlib
import json
import math
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers.core_model_loading import revert_weight_conversion

from sft_play.errors import ModelError
from sft_play.facts.models.config_fields import dequantised_config
from sft_play.files import atomic
from sft_play.planner.memory.loading_and_saving import MAX_WEIGHTS_FILE_BYTES
from sft_play.training.checkpoints.full_state_dict import (
    ADAPTER_FILE,
    embedding_layers,
    has_adapter,
    model_names_by_saved_name,
    tied_weight_names,
)
from sft_play.training.checkpoints.tensor_files import FileTensor, open_tensors
from sft_play.training.model.language_model import TextTower, find_text_tower


def save_model(
    model: Any,
    tokenizer: Any,
    path: Path,
    *,
    base_folder: Path | None = None,
    steps: int = 0,
    on_bytes: Callable[[int], None] | None = None,
    **write_options: Any,
) -> int:
    """Save the adapter, or the whole model, with its tokenizer: written aside, read back and checked, then renamed;
    returns the bytes of its tensors. `base`: the base's folder, with the rest of a whole class; `steps`: optimizer
    steps taken, after more than one of which a lora_B is not zero; `on_bytes` is called with the bytes that are read
    back; `write_options`: those of `write_weights`. Raises ModelError: what was written is empty, not finite, or not
    what the model holds."""
    with atomic.replace_path(path, temporary=path.with_name(f".{path.name}.building")) as staging:
        write_weights(model, staging, **write_options)
        (staging / "README.md").unlink(missing_ok=True)  # PEFT's blank form, which names the base by its path
        tokenizer.save_pretrained(staging)
        size = check_saved_weights(
            staging, expected_shapes=saved_shapes(model), must_have_learned=steps > 1, on_bytes=on_bytes
        )
        if base_folder is not None:
            expand_to_full_class(model, staging, base_folder)
        return size


def write_weights(
    model: Any,
    folder: Path,
    *,
    state_dict: dict[str, Any] | None = None,
    tensors: NamedTensors | None = None,
    dtype: torch.dtype | None = None,
) -> None:
    """Write a model's config and weights into a folder. `state_dict`: the weights, where the model holds only a part of
    them; `tensors`: the same, one after the other, at most one file's worth in memory where `keeps_tensor_names`;
    `dtype`: of whole weights in the files (None: unchanged), and of the model from then on."""
    text_tower = find_text_tower(model)
    # conversions that the whole class has when it is loaded are not those of its language model
    has_native_names = text_tower is not None and not has_adapter(model)
    options: dict[str, Any] = {"save_original_format": False} if has_native_names else {}
    if has_adapter(model):
        options["save_embedding_layers"] = embeddings_to_save(model)
    dtype_rule = saved_dtype_rule(model, dtype)
    shapes = saved_shapes(model)
    named_tensors = tensors if tensors is not None or state_dict is None else state_dict.items()
    if tensors is not None and (has_native_names or keeps_tensor_names(model, shapes)):
        model.save_pretrained(folder, state_dict={}, save_original_format=False)
        write_tensors(folder, tensors, shapes=shapes, dtype_rule=dtype_rule)
    elif named_tensors is not None:
        cast_tensors = {
            name: tensor.to(dtype_rule(name, tensor)) for name, tensor in named_tensors if tensor is not None
        }
        model.save_pretrained(folder, **options, state_dict=cast_tensors)
    else:  # the model's own weights are cast in place: no second copy
        for name, parameter in model.named_parameters() if dtype is not None else ():
            parameter.data = parameter.data.to(dtype_rule(name, parameter))
        model.save_pretrained(folder, **options)
    if text_tower is not None and has_adapter(model):
        _use_full_names(model, text_tower, folder)
    for file in folder.glob("*.safetensors"):
        file.chmod(0o644)  # safetensors writes files that only their owner may read
    if dtype is not None:
        # transformers writes the dtype that the weights had in memory
        path = folder / "config.json"
        saved_config = {**json.loads(path.read_text(encoding="utf-8")), "dtype": str(dtype).removeprefix("torch.")}
        path.write_text(json.dumps(saved_config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _use_full_names(model: Any, text_tower: TextTower, folder: Path) -> None:
    """Use names of the whole class, as PEFT and serving engines expect; a suffix alone would match image layers too."""
    weights_path, config_path = folder / ADAPTER_FILE, folder / "adapter_config.json"
    save_file(
        {text_tower.to_full_name(name): tensor for name, tensor in load_file(weights_path).items()},
        weights_path,
        {"format": "pt"},
    )
    config = json.loads(config_path.read_text(encoding="utf-8"))
    suffixes = "|".join(re.escape(target) for target in sorted(config["target_modules"]))
    config["target_modules"] = rf"{re.escape(text_tower.prefixes[0][1])}(?:.+\.)?(?:{suffixes})"
    config["target_parameters"] = [
        text_tower.to_full_name(name) for name in config.get("target_parameters") or ()
    ] or None
    rows = config.get("trainable_token_indices") or {}
    config["trainable_token_indices"] = {
        text_tower.to_full_name(name): row_ids for name, row_ids in rows.items()
    } or None
    config_path.write_text(json.dumps(config, indent=2, sort_keys=True), encoding="utf-8")


def expand_to_full_class(model: Any, folder: Path, base_folder: Path, *, dtype: torch.dtype | None = None) -> None:
    """Make of a folder with a language model's weights one of its whole class, under the names that the base's files
    have; all else is the base's, bit by bit, or in `dtype` if one is asked for. A model of text stays as it is."""
    text_tower = find_text_tower(model)
    if text_tower is None or has_adapter(model):
        return
    trained, base_tensors = open_tensors(folder), open_tensors(base_folder)
    trained_prefixes, tied_names = {_name_prefix(name) for name in trained}, tied_weight_names(model)
    full_prefixes = tuple(full_prefix for text_prefix, full_prefix in text_tower.prefixes if full_prefix != text_prefix)
    sources, unmatched = dict[str, FileTensor](), dict(trained)
    for key, file_tensor in base_tensors.items():
        name = apply_key_mapping(key, text_tower.key_mapping)
        if name in trained:
            sources[key] = unmatched.pop(name, trained[name])
        elif not (
            name in tied_names
            or _name_prefix(name) in trained_prefixes
            or apply_key_mapping(key, dict(text_tower.renamings)).startswith(full_prefixes)
        ):  # a part for images or sound
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
        dtype_rule=lambda name, tensor: dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype,
    )  # fmt: skip
    for file in {*(file_tensor.file for file_tensor in trained.values()), *folder.glob("*.index.json")}:
        file.unlink()
    for file in staging.iterdir():
        file.rename(folder / file.name)
    staging.rmdir()
    saved_dtype = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("dtype")
    write_full_config(base_folder, folder, dtype=saved_dtype, vocab_size=model.config.vocab_size)


def _published_tensors(
    full_model: Any, tensors: Mapping[str, FileTensor], read: Callable[[FileTensor], torch.Tensor]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors in the names and pieces that their class saves them in, a block at a time, where there is a way."""
    blocks: dict[str, dict[str, FileTensor]] = {}
    for name, file_tensor in tensors.items():
        blocks.setdefault(name[: match.end()] if (match := re.search(r"\.\d+\.", name)) else "", {})[name] = file_tensor
    for block in blocks.values():
        state = {name: read(file_tensor) for name, file_tensor in block.items()}
        with contextlib.suppress(Exception):  # each conversion fails in its own way
            state = state if full_model is None else revert_weight_conversion(full_model, dict(state))
        yield from state.items()


def write_full_config(base_folder: Path, folder: Path, *, dtype: str | None, vocab_size: int) -> None:
    """The base's config.json with what training changed, and what its class reads images with."""
    config = dequantised_config(json.loads((base_folder / "config.json").read_text(encoding="utf-8")))
    if dtype:
        set_dtype(config, dtype)
    config.get("text_config", config)["vocab_size"] = vocab_size
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    for file in base_folder.glob("*processor*.json"):
        shutil.copyfile(file, folder / file.name)


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


def _name_prefix(name: str) -> str:
    return ".".join(name.split(".")[:2])


def set_stop_tokens(
    folder: Path, stop_ids: Sequence[int], pad_id: int | None, *, source_folder: Path | None = None
) -> None:
    """Write the tokens that end an answer into a model's generation config, whose other settings are those of the model
    in `source_folder`, or its own."""
    source, path = (source_folder or folder) / "generation_config.json", folder / "generation_config.json"
    generation_config = json.loads(source.read_text(encoding="utf-8")) if source.is_file() else {}
    generation_config |= {"eos_token_id": list(stop_ids) if len(stop_ids) > 1 else stop_ids[0], "pad_token_id": pad_id}
    path.unlink(missing_ok=True)  # it may be a link to another model's
    path.write_text(json.dumps(generation_config, indent=2) + "\n", encoding="utf-8")


def embeddings_to_save(model: Any) -> bool | str:
    """Whether PEFT should save a model's embeddings beside its adapter; "auto": it finds out. Not if all are in
    `modules_to_save` or have rows that train, which would be saved twice (0.21); always if one trains without."""
    from peft.utils.other import AuxiliaryTrainingWrapper

    layers = embedding_layers(model)
    if all(isinstance(layer, AuxiliaryTrainingWrapper) for layer in layers):
        return False
    unwrapped = [layer for layer in layers if not isinstance(layer, AuxiliaryTrainingWrapper)]
    has_trained = any(weight.requires_grad for layer in unwrapped for weight in layer.parameters(recurse=False))
    return True if has_trained else "auto"


def saved_dtype_rule(model: Any, dtype: torch.dtype | None) -> Callable[[str, torch.Tensor], torch.dtype]:
    """The dtype that each tensor is saved in: the given one, except for those that the class always keeps in fp32."""
    if dtype is None:
        return lambda name, tensor: tensor.dtype
    fp32_modules = {*(model._keep_in_fp32_modules or ()), *(model._keep_in_fp32_modules_strict or ())}

    def saved_dtype(name: str, tensor: torch.Tensor) -> torch.dtype:
        keeps_dtype = not tensor.is_floating_point() or any(part in name for part in fp32_modules)
        return tensor.dtype if keeps_dtype else dtype

    return saved_dtype


def saved_shapes(model: Any) -> dict[str, tuple[int, ...]]:
    """Name and whole shape, also under ZeRO-3 and FSDP, of every tensor that saving writes, tied ones once."""
    parameters = {
        name: tuple(getattr(parameter, "ds_shape", parameter.shape)) for name, parameter in model.named_parameters()
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
    on_bytes: Callable[[int], None] | None = None,
) -> int:
    """Read back the tensors saved in a folder; returns their bytes, with which `on_bytes` is called. Raises ModelError:
    there are none, one is empty, of another shape, not finite or missing, or no lora_B `must_have_learned`."""
    shapes: dict[str, tuple[int, ...]] = {}
    size, has_learned = 0, not must_have_learned
    for name, file_tensor in open_tensors(folder).items():
        tensor = file_tensor.read()
        shapes[name] = tuple(tensor.shape)
        size += tensor.nbytes
        if on_bytes is not None:
            on_bytes(tensor.nbytes)
        if tensor.is_floating_point() and not torch.isfinite(tensor).all():
            raise ModelError(f"{folder}: {name} was saved with values that are not finite")
        has_learned = has_learned or ("lora_B" in name and bool(torch.count_nonzero(tensor)))
    if size == 0:
        raise ModelError(f"{folder}: no weights were saved")
    if expected_shapes is not None:
        _compare_saved(folder, shapes, expected_shapes)
    if not has_learned and any("lora_B" in name for name in shapes):
        raise ModelError(f"{folder}: every lora_B of the adapter is zero: what was trained did not reach the file")
    return size


def _compare_saved(
    folder: Path, shapes: dict[str, tuple[int, ...]], expected_shapes: dict[str, tuple[int, ...]]
) -> None:
    """Compare saved shapes with the model's; by the hub's names, one tensor per expert, only the number of values."""
    missing = sorted(set(expected_shapes) - set(shapes))
    wrong = [] if missing else [name for name, shape in expected_shapes.items() if shapes[name] != shape]
    saved_values, expected_values = (sum(map(math.prod, sizes.values())) for sizes in (shapes, expected_shapes))
    problem = f"it holds {saved_values:,} of {expected_values:,} values; missing by name: {', '.join(missing[:3])}"
    if wrong:
        problem = f"{wrong[0]} has the shape {shapes[wrong[0]]} and not {expected_shapes[wrong[0]]} ({len(wrong)} such)"
    if wrong or (missing and saved_values != expected_values):
        raise ModelError(
            f"{folder}: what was saved is not the model: {problem}. The last checkpoint is kept: continue from it with "
            "make resume, or write it out with make consolidate"
        )


# Names and whole tensors, None on ranks that only help to gather them.
NamedTensors = Iterable[tuple[str, torch.Tensor | None]]


def keeps_tensor_names(model: Any, names: Iterable[str]) -> bool:
    """Whether transformers saves the tensors as they are in memory; else it has to be given all at once."""
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
    """Write tensors as transformers' safetensors files, with an index where there are several. `shapes`: of all tensors
    to come; `max_file_bytes`: most bytes of a file of several tensors. Raises ModelError: a tensor is not in `shapes`,
    has another shape, or is missing at the end."""
    written_files: list[tuple[Path, list[str]]] = []
    pending: dict[str, torch.Tensor] = {}
    total_bytes = 0

    def write_file() -> None:
        nonlocal total_bytes
        path = folder / f".part{len(written_files)}.safetensors"
        save_file(pending, path, metadata={"format": "pt"})
        path.chmod(0o644)  # safetensors writes files that only their owner may read
        written_files.append((path, list(pending)))
        total_bytes += sum(tensor.nbytes for tensor in pending.values())
        pending.clear()

    for name, tensor in tensors:
        if tensor is None or shapes.get(name) != tuple(tensor.shape):
            shape = None if tensor is None else tuple(tensor.shape)
            raise ModelError(f"{folder}: {name} was to be saved with shape {shapes.get(name)}, but has {shape}")
        tensor = tensor.to(dtype_rule(name, tensor)).contiguous()
        if (
            pending
            and sum(pending_tensor.nbytes for pending_tensor in pending.values()) + tensor.nbytes > max_file_bytes
        ):
            write_file()
        pending[name] = tensor
    if pending:
        write_file()
    missing = sorted(set(shapes) - {name for _, names in written_files for name in names})
    if missing:
        raise ModelError(f"{folder}: {len(missing)} tensors were not gathered, such as {missing[0]}")
    _name_files(
        folder,
        written_files,
        total_bytes=total_bytes,
        parameter_count=sum(math.prod(shape) for shape in shapes.values()),
    )


def _name_files(
    folder: Path, written_files: list[tuple[Path, list[str]]], *, total_bytes: int, parameter_count: int
) -> None:
    if len(written_files) == 1:
        written_files[0][0].rename(folder / "model.safetensors")
        return
    weight_map: dict[str, str] = {}
    for index, (path, names) in enumerate(written_files, start=1):
        file = f"model-{index:05d}-of-{len(written_files):05d}.safetensors"
        path.rename(folder / file)
        weight_map |= dict.fromkeys(names, file)
    index_json = {
        "metadata": {"total_parameters": parameter_count, "total_size": total_bytes},
        "weight_map": weight_map,
    }
    text = json.dumps(index_json, indent=2, sort_keys=True) + "\n"
    (folder / "model.safetensors.index.json").write_text(text, encoding="utf-8")
