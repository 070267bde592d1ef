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
from sft_play.planner.memory.loading_and_saving import FILE_BYTES
from sft_play.training.checkpoints.full_state_dict import (
    ADAPTER_FILE,
    adapter_names,
    embeddings_of,
    is_adapter,
    tied_names,
)
from sft_play.training.checkpoints.tensor_files import FileTensor, tensors_in
from sft_play.training.model.language_model import TextTower, find_text_tower


def save_model(
    model: Any,
    tokenizer: Any,
    path: Path,
    *,
    base: Path | None = None,
    steps: int = 0,
    moved: Callable[[int], None] | None = None,
    **weights: Any,
) -> int:
    """Save the adapter, or the whole model, with its tokenizer: written aside, read back and checked, then renamed;
    returns the bytes of its tensors. `base`: the base's folder, with the rest of a whole class; `steps`: optimizer
    steps taken, after more than one of which a lora_B is not zero; `moved` is called with the bytes that are read back;
    `weights`: options of `write_weights`. Raises ModelError: what was written is empty, not finite, or not what the
    model holds."""
    with atomic.replace_path(path, temporary=path.with_name(f".{path.name}.building")) as building:
        write_weights(model, building, **weights)
        (building / "README.md").unlink(missing_ok=True)  # PEFT's blank form, which names the base by its path
        tokenizer.save_pretrained(building)
        size = check_saved_weights(building, expected=whole_shapes(model), must_have_learned=steps > 1, moved=moved)
        if base is not None:
            put_into_whole(model, building, base)
        return size


def write_weights(
    model: Any,
    folder: Path,
    *,
    state_dict: dict[str, Any] | None = None,
    tensors: Tensors | None = None,
    dtype: torch.dtype | None = None,
) -> None:
    """Write a model's config and weights into a folder. `state_dict`: the weights, where the model holds only a part of
    them; `tensors`: the same, one after the other, at most one file's worth in memory where `keeps_names`; `dtype`: of
    whole weights in the files (None: unchanged), and of the model from then on."""
    tower = find_text_tower(model)
    # conversions that the whole class has when it is loaded are not those of its language model
    native_names = tower is not None and not is_adapter(model)
    options: dict[str, Any] = {"save_original_format": False} if native_names else {}
    if is_adapter(model):
        options["save_embedding_layers"] = saves_embeddings(model)
    dtype_of = saved_dtypes(model, dtype)
    shapes = whole_shapes(model)
    given = tensors if tensors is not None or state_dict is None else state_dict.items()
    if tensors is not None and (native_names or keeps_names(model, shapes)):
        model.save_pretrained(folder, state_dict={}, save_original_format=False)
        write_one_by_one(folder, tensors, shapes=shapes, dtype_of=dtype_of)
    elif given is not None:
        cast = {name: tensor.to(dtype_of(name, tensor)) for name, tensor in given if tensor is not None}
        model.save_pretrained(folder, **options, state_dict=cast)
    else:  # the model's own weights are cast in place: no second copy
        for name, parameter in model.named_parameters() if dtype is not None else ():
            parameter.data = parameter.data.to(dtype_of(name, parameter))
        model.save_pretrained(folder, **options)
    if tower is not None and is_adapter(model):
        _name_as_in_whole(model, tower, folder)
    for file in folder.glob("*.safetensors"):
        file.chmod(0o644)  # safetensors writes files that only their owner may read
    if dtype is not None:
        # transformers writes the dtype that the weights had in memory
        path = folder / "config.json"
        saved_config = {**json.loads(path.read_text(encoding="utf-8")), "dtype": str(dtype).removeprefix("torch.")}
        path.write_text(json.dumps(saved_config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _name_as_in_whole(model: Any, tower: TextTower, folder: Path) -> None:
    """PEFT and serving engines look for layers by these; a name's end alone would match layers for images too."""
    file, fields = folder / ADAPTER_FILE, folder / "adapter_config.json"
    save_file({tower.to_full_name(name): tensor for name, tensor in load_file(file).items()}, file, {"format": "pt"})
    config = json.loads(fields.read_text(encoding="utf-8"))
    ends = "|".join(re.escape(target) for target in sorted(config["target_modules"]))
    config["target_modules"] = rf"{re.escape(tower.prefixes[0][1])}(?:.+\.)?(?:{ends})"
    config["target_parameters"] = [tower.to_full_name(name) for name in config.get("target_parameters") or ()] or None
    rows = config.get("trainable_token_indices") or {}
    config["trainable_token_indices"] = {tower.to_full_name(name): numbers for name, numbers in rows.items()} or None
    fields.write_text(json.dumps(config, indent=2, sort_keys=True), encoding="utf-8")


def put_into_whole(model: Any, folder: Path, base: Path, *, dtype: torch.dtype | None = None) -> None:
    """Make of a folder with a language model's weights one of its whole class, under the names that the base's files
    have; all else is the base's, bit by bit, or in `dtype` if one is asked for. A model of text stays as it is."""
    tower = find_text_tower(model)
    if tower is None or is_adapter(model):
        return
    trained, others = tensors_in(folder), tensors_in(base)
    own, tied = {_part(name) for name in trained}, tied_names(model)
    whole_places = tuple(whole for own_place, whole in tower.prefixes if whole != own_place)
    sources, left = dict[str, FileTensor](), dict(trained)
    for key, one in others.items():
        name = renamed(key, tower.key_mapping)
        if name in trained:
            sources[key] = left.pop(name, trained[name])
        elif not (
            name in tied or _part(name) in own or renamed(key, dict(tower.renamings)).startswith(whole_places)
        ):  # a part for images or sound
            sources[key] = one
    pieces = partial(_as_published, tower.build_full_model(), {tower.to_full_name(name): one for name, one in left.items()})
    on_meta = pieces(lambda one: torch.empty(one.shape, device="meta"))
    shapes = {key: one.shape for key, one in sources.items()} | {key: tuple(piece.shape) for key, piece in on_meta}
    aside = folder / ".whole"
    aside.mkdir()
    write_one_by_one(
        aside, chain(((key, one.read()) for key, one in sources.items()), pieces(lambda one: one.read())),
        shapes=shapes,
        dtype_of=lambda name, tensor: dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype,
    )  # fmt: skip
    for file in {*(one.file for one in trained.values()), *folder.glob("*.index.json")}:
        file.unlink()
    for file in aside.iterdir():
        file.rename(folder / file.name)
    aside.rmdir()
    saved = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("dtype")
    write_whole_config(base, folder, dtype=saved, vocab_size=model.config.vocab_size)


def _as_published(
    whole: Any, tensors: Mapping[str, FileTensor], read: Callable[[FileTensor], torch.Tensor]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors in the names and pieces that their class saves them in, a block at a time, where there is a way."""
    blocks: dict[str, dict[str, FileTensor]] = {}
    for name, one in tensors.items():
        blocks.setdefault(name[: match.end()] if (match := re.search(r"\.\d+\.", name)) else "", {})[name] = one
    for block in blocks.values():
        state = {name: read(one) for name, one in block.items()}
        with contextlib.suppress(Exception):  # each conversion fails in its own way
            state = state if whole is None else revert_weight_conversion(whole, dict(state))
        yield from state.items()


def write_whole_config(base: Path, folder: Path, *, dtype: str | None, vocab_size: int) -> None:
    """The base's config.json with what training changed, and what its class reads images with."""
    config = dequantised_config(json.loads((base / "config.json").read_text(encoding="utf-8")))
    if dtype:
        set_dtype(config, dtype)
    config.get("text_config", config)["vocab_size"] = vocab_size
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    for file in base.glob("*processor*.json"):
        shutil.copyfile(file, folder / file.name)


def set_dtype(config: dict[str, Any], dtype: str) -> None:
    """Write a dtype into the fields of a config.json, and of the parts that name one."""
    config.pop("torch_dtype", None)  # what transformers 4 called `dtype`
    config["dtype"] = dtype
    for part in config.values():
        if isinstance(part, dict) and {"dtype", "torch_dtype"} & part.keys():
            set_dtype(part, dtype)


def renamed(name: str, key_mapping: Mapping[str, str]) -> str:
    """A name as transformers' `key_mapping` changes it."""
    for pattern, other in key_mapping.items():
        name = re.sub(pattern, other, name, count=1)
    return name


def _part(name: str) -> str:
    return ".".join(name.split(".")[:2])


def set_stop_tokens(folder: Path, stop: Sequence[int], pad: int | None, *, of: Path | None = None) -> None:
    """Write the tokens that end an answer into a model's generation config, whose other settings are those of the model
    in `of`, or its own."""
    source, path = (of or folder) / "generation_config.json", folder / "generation_config.json"
    settings = json.loads(source.read_text(encoding="utf-8")) if source.is_file() else {}
    settings |= {"eos_token_id": list(stop) if len(stop) > 1 else stop[0], "pad_token_id": pad}
    path.unlink(missing_ok=True)  # it may be a link to another model's
    path.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def saves_embeddings(model: Any) -> bool | str:
    """Whether PEFT should save a model's embeddings beside its adapter; "auto": it finds out. Not if all are in
    `modules_to_save` or have rows that train, which would be saved twice (0.21); always if one trains without."""
    from peft.utils.other import AuxiliaryTrainingWrapper

    layers = embeddings_of(model)
    if all(isinstance(layer, AuxiliaryTrainingWrapper) for layer in layers):
        return False
    own = [layer for layer in layers if not isinstance(layer, AuxiliaryTrainingWrapper)]
    trains = any(weight.requires_grad for layer in own for weight in layer.parameters(recurse=False))
    return True if trains else "auto"


def saved_dtypes(model: Any, dtype: torch.dtype | None) -> Callable[[str, torch.Tensor], torch.dtype]:
    """The dtype that each tensor is saved in: the given one, except for those that the class always keeps in fp32."""
    if dtype is None:
        return lambda name, tensor: tensor.dtype
    wide = {*(model._keep_in_fp32_modules or ()), *(model._keep_in_fp32_modules_strict or ())}

    def of(name: str, tensor: torch.Tensor) -> torch.dtype:
        is_kept = not tensor.is_floating_point() or any(part in name for part in wide)
        return tensor.dtype if is_kept else dtype

    return of


def whole_shapes(model: Any) -> dict[str, tuple[int, ...]]:
    """Name and whole shape, also under ZeRO-3 and FSDP, of every tensor that saving writes, tied ones once."""
    parameters = {
        name: tuple(getattr(parameter, "ds_shape", parameter.shape)) for name, parameter in model.named_parameters()
    }
    if is_adapter(model):
        return {saved: parameters[name] for saved, name in adapter_names(model).items() if name in parameters}
    tied = tied_names(model)
    tensors = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    return {name: shape for name, shape in (tensors | parameters).items() if name not in tied}


def check_saved_weights(
    folder: Path,
    *,
    expected: dict[str, tuple[int, ...]] | None = None,
    must_have_learned: bool = False,
    moved: Callable[[int], None] | None = None,
) -> int:
    """Bytes of the tensors saved in a folder, each read back; `moved` is called with them. Raises ModelError: there are
    none, one is empty, of another shape, not finite or missing, or no lora_B `must_have_learned`."""
    shapes: dict[str, tuple[int, ...]] = {}
    size, learned = 0, not must_have_learned
    for name, one in tensors_in(folder).items():
        tensor = one.read()
        shapes[name] = tuple(tensor.shape)
        size += tensor.nbytes
        if moved is not None:
            moved(tensor.nbytes)
        if tensor.is_floating_point() and not torch.isfinite(tensor).all():
            raise ModelError(f"{folder}: {name} was saved with values that are not finite")
        learned = learned or ("lora_B" in name and bool(torch.count_nonzero(tensor)))
    if size == 0:
        raise ModelError(f"{folder}: no weights were saved")
    if expected is not None:
        _compare_saved(folder, shapes, expected)
    if not learned and any("lora_B" in name for name in shapes):
        raise ModelError(f"{folder}: every lora_B of the adapter is zero: what was trained did not reach the file")
    return size


def _compare_saved(folder: Path, shapes: dict[str, tuple[int, ...]], expected: dict[str, tuple[int, ...]]) -> None:
    """Where transformers saves by the hub's names, one tensor per expert, only the number of values is compared."""
    missing = sorted(set(expected) - set(shapes))
    wrong = [] if missing else [name for name, shape in expected.items() if shapes[name] != shape]
    saved, wanted = (sum(map(math.prod, sizes.values())) for sizes in (shapes, expected))
    problem = f"it holds {saved:,} of {wanted:,} values; missing by name: {', '.join(missing[:3])}"
    if wrong:
        problem = f"{wrong[0]} has the shape {shapes[wrong[0]]} and not {expected[wrong[0]]} ({len(wrong)} such)"
    if wrong or (missing and saved != wanted):
        raise ModelError(
            f"{folder}: what was saved is not the model: {problem}. The last checkpoint is kept: continue from it with "
            "make resume, or write it out with make consolidate"
        )


# Names and whole tensors, None on ranks that only help to gather them.
Tensors = Iterable[tuple[str, torch.Tensor | None]]


def keeps_names(model: Any, names: Iterable[str]) -> bool:
    """Whether transformers saves the tensors as they are in memory; else it has to be given all at once."""
    empty = {name: torch.empty(0, device="meta") for name in names}
    try:
        return set(revert_weight_conversion(model, dict(empty))) == set(empty)
    except Exception:  # a conversion that fails on empty tensors is a conversion
        return False


def write_one_by_one(
    folder: Path,
    tensors: Tensors,
    *,
    shapes: Mapping[str, tuple[int, ...]],
    dtype_of: Callable[[str, torch.Tensor], torch.dtype],
    file_bytes: int = FILE_BYTES,
) -> None:
    """Write tensors as transformers' safetensors files, with an index where there are several. `shapes`: of all tensors
    to come; `file_bytes`: most bytes of a file of several tensors. Raises ModelError: a tensor is not in `shapes`, has
    another shape, or is missing at the end."""
    parts: list[tuple[Path, list[str]]] = []
    held: dict[str, torch.Tensor] = {}
    total = 0

    def close() -> None:
        nonlocal total
        path = folder / f".part{len(parts)}.safetensors"
        save_file(held, path, metadata={"format": "pt"})
        path.chmod(0o644)  # safetensors writes files that only their owner may read
        parts.append((path, list(held)))
        total += sum(tensor.nbytes for tensor in held.values())
        held.clear()

    for name, tensor in tensors:
        if tensor is None or shapes.get(name) != tuple(tensor.shape):
            shape = None if tensor is None else tuple(tensor.shape)
            raise ModelError(f"{folder}: {name} was to be saved with shape {shapes.get(name)}, but has {shape}")
        tensor = tensor.to(dtype_of(name, tensor)).contiguous()
        if held and sum(other.nbytes for other in held.values()) + tensor.nbytes > file_bytes:
            close()
        held[name] = tensor
    if held:
        close()
    lacking = sorted(set(shapes) - {name for _, names in parts for name in names})
    if lacking:
        raise ModelError(f"{folder}: {len(lacking)} tensors were not gathered, such as {lacking[0]}")
    _name_files(folder, parts, total=total, params=sum(math.prod(shape) for shape in shapes.values()))


def _name_files(folder: Path, parts: list[tuple[Path, list[str]]], *, total: int, params: int) -> None:
    if len(parts) == 1:
        parts[0][0].rename(folder / "model.safetensors")
        return
    places: dict[str, str] = {}
    for number, (path, names) in enumerate(parts, start=1):
        file = f"model-{number:05d}-of-{len(parts):05d}.safetensors"
        path.rename(folder / file)
        places |= dict.fromkeys(names, file)
    index = {"metadata": {"total_parameters": params, "total_size": total}, "weight_map": places}
    text = json.dumps(index, indent=2, sort_keys=True) + "\n"
    (folder / "model.safetensors.index.json").write_text(text, encoding="utf-8")
