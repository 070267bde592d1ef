"""`get_accelerator` and `wrap_model_optimizer`: an `accelerate.Accelerator` as a file says, and what it trains.

accelerate and DeepSpeed are imported when they are used: either may be missing.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import socket
from collections.abc import Mapping
from typing import Any

import torch

from sft_play.dist.one_process import NoOpAccelerator
from sft_play.dist.settings import DEFAULT_CONFIG, Asked, Device, DistConfig, asked
from sft_play.errors import BackendError, ConfigError
from sft_play.launch.deepspeed_config import adam_obstacles
from sft_play.launch.deepspeed_keys import AUTO_IS_A_VALUE
from sft_play.launch.exported import drop_accelerate, is_of_accelerate, rank_variables, refuse_too_few
from sft_play.log import one_line

logger = logging.getLogger(__name__)

_BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu")
_BY_HIDDEN_SIZE = {
    "reduce_bucket_size": lambda size: size * size,
    "stage3_prefetch_bucket_size": lambda size: int(0.9 * size * size),
    "stage3_param_persistence_threshold": lambda size: 10 * size,
}
"""Keys of `zero_optimization` whose "auto" follows from the model, by the formulas of transformers and accelerate."""


def get_accelerator(config: str | os.PathLike[str] | Mapping[str, Any] | DistConfig = DEFAULT_CONFIG) -> Any:
    """A ready `accelerate.Accelerator` with the settings of a YAML file or a mapping (`DistConfig` has the keys).

    A relative path is looked for in the working folder, then in the project. Where DeepSpeed is asked for and its file
    or package is missing, accelerate runs in its place, with a warning; where accelerate is not installed, one process
    gets a `NoOpAccelerator`, with a warning. Called again, it replaces the accelerator that it made before: accelerate
    keeps one state per process. The settings are its attribute `dist_config`.

    Raises:
        ConfigError: the settings cannot be read or meant, all problems at once; a launcher started fewer processes
            than it was asked for; or ranks were given different settings.
        BackendError: accelerate is not installed, and there are several ranks or fp16 is asked for.
    """
    if importlib.util.find_spec("accelerate") is None:
        return _without_accelerate(config)
    _refuse_lone_process()
    device = _device()
    if not device.is_gpu:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # DeepSpeed would look for a GPU and warn that there is none
    found = asked(config, device=device, has_deepspeed=importlib.util.find_spec("deepspeed") is not None)
    for note in found.notes:
        logger.info("%s", note)
    if found.fallback is not None:
        lost = " (zero3_offload: nothing is offloaded)" if found.settings.zero3_offload else ""
        _warn(f"backend: deepspeed falls back to accelerate{lost}: {found.fallback}")
    _say_launcher(found)
    _forget_earlier()
    accelerator = _made(found, on_cpu=not device.is_gpu)
    if os.environ.get("ACCELERATE_USE_FSDP", "").lower() == "true" and accelerator.distributed_type != "FSDP":
        _warn(f"accelerate launch was told to use FSDP, which accelerate leaves out here (type "
              f"{accelerator.distributed_type}): it shards over several GPUs only")  # fmt: skip
    accelerator.dist_config = found.settings
    _require_alike(accelerator, found)
    return accelerator


def _without_accelerate(config: Any) -> Any:
    """One process's stand-in where the package is missing."""
    found = asked(config, device=_device(), has_deepspeed=False)
    ranks = rank_variables(os.environ).get("WORLD_SIZE", "1")
    if ranks != "1":
        raise BackendError(
            f"{ranks} ranks were started and the package accelerate is not installed: each would train for itself; "
            "pip install accelerate"
        )
    if found.mixed_precision == "fp16":
        raise BackendError("mixed_precision: fp16 needs accelerate, which scales the loss; pip install accelerate, "
                           "or set mixed_precision: bf16 or no")  # fmt: skip
    _warn("the package accelerate is not installed: one process trains, without DDP, FSDP or ZeRO (NoOpAccelerator)")
    made = NoOpAccelerator(
        mixed_precision=found.mixed_precision,
        gradient_accumulation_steps=found.settings.gradient_accumulation_steps,
    )
    made.dist_config = found.settings
    return made


def _refuse_lone_process() -> None:
    """Raises ConfigError where `accelerate launch` was asked for several processes and started one, as on a CPU."""
    try:
        refuse_too_few(os.environ)
    except ConfigError as error:
        raise ConfigError(
            f"{str(error).partition(': without a GPU')[0]}: without a GPU it starts several through MPI only; start "
            "your script with torchrun --standalone --nproc-per-node 2, or with accelerate launch --multi_gpu"
        ) from None


def _device() -> Device:
    if os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true", "yes") or not torch.accelerator.is_available():
        return Device(is_gpu=False)
    if torch.cuda.is_available():
        return Device(is_gpu=True, has_bf16=torch.cuda.is_bf16_supported(including_emulation=False))
    return Device(is_gpu=True, has_bf16=True)


def _say_launcher(found: Asked) -> None:
    """Take away what `accelerate launch` said and the settings say too; FSDP is accelerate's to bring."""
    told = os.environ.get("ACCELERATE_USE_DEEPSPEED", "").lower() == "true" and is_of_accelerate(os.environ)
    if told and found.deepspeed is None and found.fallback is None:
        _warn(
            "accelerate launch was told to use DeepSpeed, and backend: accelerate is what runs; set backend: deepspeed"
        )
    precision = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    if is_of_accelerate(os.environ) and precision not in ("no", found.mixed_precision):
        _warn(f"accelerate launch was told mixed_precision {one_line(precision)}; {found.name} says "
              f"{found.mixed_precision}, which is used")  # fmt: skip
    if found.deepspeed is not None:
        drop_accelerate(os.environ)
        return
    for name in [name for name in os.environ if name.startswith("ACCELERATE_") and "DEEPSPEED" in name]:
        del os.environ[name]


def _forget_earlier() -> None:
    """Let accelerate begin anew where it was begun before in this process; the process group stays.

    Its state refuses another precision and a second DeepSpeed plugin, so that a notebook's cell could not be run twice.
    """
    from accelerate.state import AcceleratorState, GradientState

    if AcceleratorState._shared_state:
        _warn("an Accelerator was made before in this process; it and what it prepared are replaced")
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()


def _made(found: Asked, *, on_cpu: bool) -> Any:
    """The Accelerator itself, its process group included."""
    from accelerate import Accelerator
    from accelerate.state import PartialState
    from accelerate.utils import DistributedDataParallelKwargs, GradientAccumulationPlugin

    # FSDP would keep every rank's whole gradients until the last pass of a step
    shards = found.deepspeed is None and os.environ.get("ACCELERATE_USE_FSDP", "").lower() == "true"
    options: dict[str, Any] = {"cpu": on_cpu}
    if found.deepspeed is not None:
        if not rank_variables(os.environ):  # DeepSpeed looks for MPI where no launcher has said that there is one rank
            os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
            os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": _free_port()}
        if on_cpu:
            PartialState(cpu=True)  # which the Accelerator is not told: it would leave DeepSpeed out without a word
        options = {"deepspeed_plugin": _plugin(found.deepspeed)}
    accelerator = Accelerator(
        mixed_precision=found.mixed_precision,
        gradient_accumulation_plugin=GradientAccumulationPlugin(
            num_steps=found.settings.gradient_accumulation_steps, sync_each_batch=shards
        ),
        kwargs_handlers=[
            DistributedDataParallelKwargs(find_unused_parameters=found.settings.find_unused_parameters),
        ],
        **options,
    )
    if found.deepspeed is not None and on_cpu:
        from deepspeed import comm

        comm.init_distributed("gloo", auto_mpi_discovery=False)  # ZeRO-3 divides weights while they are read
    return accelerator


def _plugin(config: dict[str, Any]) -> Any:
    """DeepSpeed's plugin, with torch's optimizer on the CPU where DeepSpeed's own cannot be built."""
    from accelerate.utils import DeepSpeedPlugin

    zero = config["zero_optimization"]
    offloads = (zero.get("offload_optimizer") or {}).get("device", "none") != "none"
    if offloads and config.get("zero_force_ds_cpu_optimizer", True) and (missing := adam_obstacles()):
        _warn(
            f"DeepSpeed's CPU Adam cannot be built ({', '.join(missing)}): torch's AdamW steps on the CPU, and slower"
        )
        config["zero_force_ds_cpu_optimizer"] = False
    return DeepSpeedPlugin(hf_ds_config=config)


def _free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def _require_alike(accelerator: Any, found: Asked) -> None:
    """Raises ConfigError on every rank where ranks were given different settings: they would wait for each other."""
    if accelerator.num_processes == 1:
        return
    import torch.distributed as dist

    own = {**found.settings.model_dump(), "mixed_precision": found.mixed_precision, "DeepSpeed": found.deepspeed}
    every: list[Any] = [None] * accelerator.num_processes
    dist.all_gather_object(every, own)
    for rank, other in enumerate(every[1:], start=1):
        differing = [f"{key} ({every[0][key]} and {value})" for key, value in other.items() if every[0][key] != value]
        if differing:
            raise ConfigError(
                f"rank {rank} was given other settings than rank 0: {one_line('; '.join(differing), limit=400)}; "
                "give all ranks the same files"
            )


def _warn(text: str) -> None:
    """A warning, once for all ranks of a node."""
    logger.log(logging.WARNING if os.environ.get("LOCAL_RANK", "0") == "0" else logging.DEBUG, "%s", text)


# --- what is trained --------------------------------------------------------------------------------------------------


def wrap_model_optimizer(
    accelerator: Any,
    model: Any,
    optimizer: Any = None,
    *others: Any,
    gradient_checkpointing: bool | None = None,
    micro_batch_size: int | None = None,
) -> tuple[Any, ...]:
    """Model, optimizer and the others (data loaders, schedulers), prepared, in the order in which they were given.

    `None` stays `None`. Data loaders yield this rank's share.

    Args:
        gradient_checkpointing: None does what the settings of `get_accelerator` say.
        micro_batch_size: rows per rank and pass, which DeepSpeed is told where no data loader says it.

    Raises:
        ConfigError: the model cannot recompute its activations; or the DeepSpeed file fixes a batch that this is not.
    """
    if gradient_checkpointing is None:
        gradient_checkpointing = bool(
            getattr(getattr(accelerator, "dist_config", None), "gradient_checkpointing", False)
        )
    if gradient_checkpointing:
        _checkpoint_activations(model)
    plugin = getattr(accelerator, "deepspeed_plugin", None)
    if plugin is not None:
        _fill_deepspeed(plugin.deepspeed_config, accelerator, model, (optimizer, *others), micro_batch_size)
    given = (model, optimizer, *others)
    there = [item for item in given if item is not None]
    prepared = accelerator.prepare(*there)
    rest = iter(prepared if len(there) > 1 else (prepared,))
    return tuple(None if item is None else next(rest) for item in given)


def _checkpoint_activations(model: Any) -> None:
    """Turn on the recomputation of activations, in the form that works with frozen weights and under DDP."""
    name = type(model).__name__
    word = "activation" if hasattr(model, "activation_checkpointing_enable") else "gradient"  # transformers' two names
    enable = getattr(model, f"{word}_checkpointing_enable", None)
    if enable is None:
        raise ConfigError(f"gradient_checkpointing: {name} has no gradient_checkpointing_enable, which transformers' "
                          "models have; set it to false, or recompute in your model's forward")  # fmt: skip
    try:
        enable(**{f"{word}_checkpointing_kwargs": {"use_reentrant": False}})
    except ValueError as error:
        raise ConfigError(f"gradient_checkpointing: {name} cannot: {one_line(str(error))}; set it to false") from None
    if getattr(getattr(model, "config", None), "use_cache", None):
        model.config.use_cache = False  # transformers would warn at every step, and turn it off itself
    embeddings = model.get_input_embeddings() if hasattr(model, "get_input_embeddings") else None
    is_frozen = embeddings is not None and not any(weight.requires_grad for weight in embeddings.parameters())
    if is_frozen and hasattr(model, "enable_input_require_grads"):
        model.enable_input_require_grads()  # else the first layers' outputs need no gradient, and adapters get none


def _fill_deepspeed(
    config: dict[str, Any], accelerator: Any, model: Any, others: tuple[Any, ...], micro_batch_size: int | None
) -> None:
    """Give DeepSpeed's configuration what only model, data and optimizer say."""
    _fill_batch(config, accelerator, others, micro_batch_size)
    hidden = _hidden_size(model)
    zero = config["zero_optimization"]
    for key, formula in _BY_HIDDEN_SIZE.items():
        if zero.get(key) == "auto" and hidden is not None:
            zero[key] = formula(hidden)
    _drop_blocks(config, others)
    _drop_autos(config)


def _fill_batch(
    config: dict[str, Any], accelerator: Any, others: tuple[Any, ...], micro_batch_size: int | None
) -> None:
    sizes = [size for size in map(_batch_size, others) if size is not None]
    micro = config.get("train_micro_batch_size_per_gpu", "auto")
    if micro in ("auto", None):
        # rows of the first data loader, which trains; DeepSpeed uses the number for its own arithmetic alone
        micro = micro_batch_size or next(iter(sizes), 1)
    elif sizes and sizes[0] != micro:
        raise ConfigError(
            f"the DeepSpeed file's train_micro_batch_size_per_gpu: {micro} is not the data loader's batch of "
            f'{sizes[0]}; set it to "auto"'
        )
    steps = accelerator.gradient_accumulation_steps
    product = micro * steps * accelerator.num_processes
    total = config.get("train_batch_size", "auto")
    if total not in ("auto", None, product):
        raise ConfigError(
            f"the DeepSpeed file's train_batch_size: {total} is not {micro} (rows per rank) × {steps} (accumulation) × "
            f'{accelerator.num_processes} (ranks) = {product}; set it to "auto"'
        )
    config |= {"train_micro_batch_size_per_gpu": micro, "train_batch_size": product}


def _batch_size(item: Any) -> int | None:
    """Rows per batch of a data loader; None of anything else, or where they differ from batch to batch."""
    if not hasattr(item, "dataset") or not hasattr(item, "batch_sampler"):
        return None
    size = item.batch_size if item.batch_size is not None else getattr(item.batch_sampler, "batch_size", None)
    return size if isinstance(size, int) else None


def _hidden_size(model: Any) -> int | None:
    """The widest hidden size of a transformers model; None where it has none."""
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    sizes = getattr(text, "hidden_sizes", None) or [getattr(text, "hidden_size", None)]
    return max((size for size in sizes if isinstance(size, int)), default=None)


def _drop_blocks(config: dict[str, Any], others: tuple[Any, ...]) -> None:
    """Leave out the file's optimizer and schedule where the script brings its own, or nothing resolves their autos."""
    for name in ("optimizer", "scheduler"):
        block = config.get(name)
        given = next((item for item in others if _is(item, name)), None)
        if block is None or type(given).__name__.startswith("Dummy"):  # accelerate's word for: as the file says
            continue
        if given is not None or "auto" in (block.get("params") or {}).values():
            why = "the script's is used" if given is not None else 'its "auto" has nobody to resolve it'
            _warn(f"the DeepSpeed file's {name} block ({one_line(str(block.get('type')))}) is left out: {why}")
            del config[name]


def _is(item: Any, name: str) -> bool:
    """Whether something is an optimizer, or a scheduler, accelerate's `DummyOptim` and `DummyScheduler` included."""
    kinds = {"optimizer": ("Optimizer", "DummyOptim"), "scheduler": ("LRScheduler", "DummyScheduler")}[name]
    return any(kind.__name__ in kinds for kind in type(item).__mro__)


def _drop_autos(config: dict[str, Any], path: str = "") -> None:
    """An "auto" that nobody resolves is DeepSpeed's default in some sections and a crash in others: none is left."""
    for key, value in list(config.items()):
        here = f"{path}{key}"
        if isinstance(value, dict):
            if here not in ("optimizer", "scheduler"):
                _drop_autos(value, f"{here}.")
        elif value == "auto" and not here.startswith(AUTO_IS_A_VALUE):
            logger.info('DeepSpeed: %s: "auto" is left out (its default)', here)
            del config[key]
