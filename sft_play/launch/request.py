"""What is to be launched: a run, its options, and what a launcher, accelerate's file and a mesh add to them."""

from __future__ import annotations

import dataclasses
import logging
import os
from dataclasses import replace

from sft_play.config.load import LoadedConfig
from sft_play.config.schema import RunConfig
from sft_play.errors import (
    ConfigError,
    HardwareError,
)
from sft_play.facts.hardware import detect_hardware
from sft_play.facts.network import DEFAULT_PORT, NodeSetup
from sft_play.launch import tensorboard
from sft_play.launch.accelerate import (
    AccelerateConfig,
    accelerate_launch_config,
    find_accelerate_file,
    read_accelerate_file_with_notes,
    remove_accelerate_variables,
)
from sft_play.launch.deepspeed.fill import are_numbers_equal
from sft_play.launch.machine import (
    hide_gpus,
)
from sft_play.launch.nodes import resolve_exported_nodes
from sft_play.launch.options import DeepspeedRequest, LaunchOptions
from sft_play.launch.rank import (
    setup_rank_environment,
)
from sft_play.launch.torchrun import (
    RENDEZVOUS_VARIABLES,
    RankInfo,
    refuse_lone_node,
)
from sft_play.log import one_line
from sft_play.planner.layout import LAYOUT_NAMES
from sft_play.planner.mesh import Mesh, format_mesh, parse_mesh
from sft_play.runs.folder import RunFolder

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class LaunchRequest:
    """What is to be launched: a run, its options, and which processes train it."""

    loaded: LoadedConfig
    options: LaunchOptions = dataclasses.field(default_factory=LaunchOptions)
    launches_ranks: bool = False
    """Whether ranks are launched; else this process trains, alone or as one of `rank_info`."""
    is_supervised: bool = False
    """Whether the run's only process is launched, as a rank is, so that it can be started again when it dies."""
    rank_info: RankInfo | None = None
    should_resume: bool = False
    """Whether a stopped run is resumed: the one in `folder`, or the one that rank 0 finds by its name `run_name`."""
    folder: RunFolder | None = None
    run_name: str | None = None
    accelerate_config: AccelerateConfig | None = None
    """The choices of `accelerate launch`, or of accelerate's file, over some of which the plan wins."""

    @property
    def is_reporting_rank(self) -> bool:
        """True for the one process that prints: not a rank, or rank 0 under a foreign launcher."""
        return self.rank_info is None or (self.rank_info.is_first and self.rank_info.run_folder is None)


def resolve_launch_request(request: LaunchRequest) -> LaunchRequest:
    """Fill what the command line leaves open from the launcher, accelerate's file and the mesh, and set this process's
    environment for its rank."""
    loaded, options, rank_info = request.loaded, request.options, request.rank_info
    hide_gpus(loaded.config, os.environ)  # before torch is imported, which reads the variable once
    if request.launches_ranks and not request.is_supervised:
        # what the command line leaves open, accelerate's file fills in, then the mesh
        options, accelerate_config = apply_accelerate_config(options, loaded.config)
        if options.nodes.exported_note:
            options = resolve_exported_nodes(options, loaded.config)
        options = apply_mesh(options, loaded.config)
        refuse_lone_node(options.nodes)
    else:
        rank_info = setup_rank_environment(loaded.config, rank_info) if rank_info is not None else None
        # now: the plan decides, and accelerate would act on the same variables later
        accelerate_config = pop_accelerate_launch_config()
        if rank_info is None:
            options = dataclasses.replace(options, strategy="single")
            # torch and accelerate would wait for others, as a notebook or a guide asked
            for name in RENDEZVOUS_VARIABLES:
                os.environ.pop(name, None)
        # under a parent of ours: left from another launch
        elif accelerate_config is not None and rank_info.run_folder is None:
            options = fill_from_accelerate(options, accelerate_config, parse_mesh(loaded.config.model.mesh_shape))
    refuse_restarts(loaded, options, rank_info)
    loaded = tensorboard.add_tensorboard_tracker(loaded) if options.uses_tensorboard else loaded
    return dataclasses.replace(
        request, loaded=loaded, options=options, rank_info=rank_info, accelerate_config=accelerate_config
    )


def apply_accelerate_config(options: LaunchOptions, config: RunConfig) -> tuple[LaunchOptions, AccelerateConfig | None]:
    """The options with what an accelerate configuration adds, and that configuration; what it adds is logged."""
    file, accelerate_config, notes = find_accelerate_file(os.environ), None, options.notes
    if file is not None:
        accelerate_config, file_notes = read_accelerate_file_with_notes(file, os.environ)
        notes += file_notes
    for note in notes:
        logger.info("%s", note)
    if accelerate_config is None:
        return options, None
    return fill_from_accelerate(options, accelerate_config, parse_mesh(config.model.mesh_shape)), accelerate_config


def pop_accelerate_launch_config() -> AccelerateConfig | None:
    """The choices of `accelerate launch`, removed from this process's environment: the Trainer's arguments set engine
    and precision, and accelerate would act on its variables as well."""
    accelerate_config = accelerate_launch_config(os.environ)
    remove_accelerate_variables(os.environ)
    return accelerate_config


def fill_from_accelerate(
    options: LaunchOptions, accelerate_config: AccelerateConfig, mesh: Mesh | None = None
) -> LaunchOptions:
    """The options with an accelerate configuration filled in wherever the command line says nothing. `mesh`: the run
    YAML's; FSDP in the configuration means it then, and not a layout. Raises ConfigError where it is for several
    machines and lacks the address of rank 0's."""
    nodes = options.nodes
    if nodes.count == 1 and accelerate_config.num_machines > 1:
        address = nodes.address or accelerate_config.main_process_ip
        if address is None:
            raise ConfigError(
                f"{one_line(str(accelerate_config.path))}: num_machines: {accelerate_config.num_machines} "
                "needs main_process_ip, the address of the machine of rank 0 that the others reach "
                "(make setup-accelerate: MAIN_IP=)"
            )
        port = nodes.port or accelerate_config.main_process_port or DEFAULT_PORT
        nodes = NodeSetup(accelerate_config.num_machines, accelerate_config.machine_rank, address, port)
    file = accelerate_config.deepspeed_config_file
    deepspeed_request = options.deepspeed or (
        DeepspeedRequest(file) if accelerate_config.distributed_type == "DEEPSPEED" else None
    )
    # a mesh of copies only (dp) shards nothing, so there FSDP is a layout of its own
    follows_mesh = mesh is not None and mesh.ranks > mesh.dp and accelerate_config.distributed_type == "FSDP"
    layout = accelerate_config.layout if accelerate_config.layout in LAYOUT_NAMES and not follows_mesh else None
    return replace(
        options,
        strategy=options.strategy or layout,
        processes_per_node=options.processes_per_node or accelerate_config.processes_per_machine,
        gpus=options.gpus or accelerate_config.gpu_ids or (),
        nodes=nodes,
        deepspeed=deepspeed_request,
    )


def apply_mesh(options: LaunchOptions, config: RunConfig) -> LaunchOptions:
    """The options with as many processes as a mesh has, where no number was given; raises ConfigError where they do not
    divide over the nodes, or there are fewer GPUs than the mesh has processes."""
    mesh = parse_mesh(config.model.mesh_shape)
    if mesh is None or options.processes_per_node or options.gpus:
        return options
    mesh_text, nodes = f"model.mesh_shape={format_mesh(config.model.mesh_shape)}", options.nodes.count
    if mesh.ranks % nodes:
        raise ConfigError(f"{mesh_text} is a mesh of {mesh.ranks} processes, which {nodes} nodes cannot share equally")
    ranks_per_node, gpu_count = mesh.ranks // nodes, len(detect_hardware().gpus)
    if gpu_count and ranks_per_node > gpu_count:
        raise HardwareError(
            f"{mesh_text} needs {ranks_per_node} processes on each node, and there are {gpu_count} GPUs: one each"
        )
    return dataclasses.replace(options, processes_per_node=ranks_per_node)


def refuse_restarts(loaded: LoadedConfig, options: LaunchOptions, rank_info: RankInfo | None) -> None:
    """Raises ConfigError where MAX_RESTARTS= is given and this command could not start the run again."""
    if not options.max_restarts:
        return
    request_text = f"MAX_RESTARTS={options.max_restarts}"
    if rank_info is not None or options.nodes.count > 1:
        raise ConfigError(
            f"{request_text} starts processes again that this command has started on one machine: let the launcher or "
            "the scheduler start the others again, with output.if_exists=resume (make launch-file writes such a job)"
        )
    if loaded.config.tuning.backend == "unsloth":
        raise ConfigError(f"{request_text} does not watch the processes of tuning.backend=unsloth; leave it out")


def override_lines(
    accelerate_config: AccelerateConfig,
    *,
    mixed_precision: str,
    grad_accum: int | None = None,
    max_grad_norm: float | None = None,
) -> list[str]:
    """Lines for the log: where the run YAML or the plan overrides the file. `mixed_precision` is the run's (`no`,
    `fp16`, `bf16`)."""
    distributed_type, precision = accelerate_config.distributed_type, accelerate_config.mixed_precision
    fsdp_config = accelerate_config.fsdp_config if distributed_type == "FSDP" else {"fsdp_version": 2}
    offloads_params = str(fsdp_config.get("fsdp_offload_params")).lower() in ("true", "yes", "on")
    precision_message = f"says mixed_precision: {precision}, the run YAML asks for {mixed_precision}: the run YAML wins"
    messages = [
        (precision not in (None, mixed_precision), precision_message),
        (str(fsdp_config.get("fsdp_version", 1)) != "2", "asks for FSDP's first version: FSDP2 (fully_shard) is used"),
        (
            offloads_params,
            "says fsdp_offload_params: true, which is not supported: use zero3_offload for weights in RAM",
        ),
    ]
    for key, planned_value in {"gradient_accumulation_steps": grad_accum, "gradient_clipping": max_grad_norm}.items():
        file_value = accelerate_config.deepspeed_config.get(key) if distributed_type == "DEEPSPEED" else None
        if (
            file_value not in (None, "auto")
            and planned_value is not None
            and not are_numbers_equal(file_value, planned_value)
        ):
            messages.append(
                (True, f"says deepspeed_config.{key}: {file_value}, the plan {planned_value:g}: the plan wins")
            )
    return [f"{accelerate_config.path.name} {text}" for applies, text in messages if applies]
