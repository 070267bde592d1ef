"""What is to be launched: a run, its options, and what a launcher, accelerate's file and a mesh add to them."""

import dataclasses
import json
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from sft_play.config.load import LoadedConfig, load_config
from sft_play.config.schema import RunConfig
from sft_play.errors import ConfigError, HardwareError
from sft_play.launch.accelerate import (
    MIXED_PRECISION,
    AccelerateConfig,
    accelerate_launch_config,
    default_accelerate_path,
    find_accelerate_file,
    read_accelerate_file,
    remove_accelerate_variables,
)
from sft_play.launch.deepspeed import are_numbers_equal
from sft_play.launch.nodes import NodeMeeting, meet_nodes, node_card
from sft_play.launch.rank import setup_rank_environment
from sft_play.launch.run_hardware import hide_gpus, restrict_to_device, select_hardware
from sft_play.launch.torchrun import (
    RENDEZVOUS_VARIABLES,
    RankInfo,
    rank_timeout_s,
    read_nodes,
    read_whole_number,
    refuse_lone_node,
)
from sft_play.log import one_line
from sft_play.machine.hardware import Hardware, detect_hardware
from sft_play.machine.network import DEFAULT_PORT, NodeSetup, is_local
from sft_play.planner.layout import LAYOUT_NAMES, LayoutName, Mesh, format_mesh, parse_mesh
from sft_play.planner.plan import Plan
from sft_play.runs.folder import RunFolder
from sft_play.spelling import did_you_mean

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class DeepspeedRequest:
    """A request for DeepSpeed as the engine; `file` is the user's configuration, None the layout's shipped one."""

    file: Path | None = None


@dataclass(frozen=True)
class LaunchOptions:
    """How a run is launched: what the user gave, None where the plan or the machine decides. `processes` are those of
    one node."""

    strategy: LayoutName | None = None
    processes_per_node: int | None = None
    gpus: tuple[int, ...] = ()
    nodes: NodeSetup = field(default_factory=NodeSetup)
    deepspeed: DeepspeedRequest | None = None
    uses_tensorboard: bool = False
    dry_run: bool = False
    max_restarts: int = 0
    notes: tuple[str, ...] = ()

    def select_hardware(self, hardware: Hardware, *, is_one_node: bool = False) -> Hardware:
        """This machine as the ranks will use it; with `is_one_node` the part of a single node. Raises HardwareError
        where it has not the GPUs that are asked for."""
        return select_hardware(
            hardware,
            gpus=self.gpus,
            processes_per_node=self.processes_per_node,
            node_count=1 if is_one_node else self.nodes.count,
        )


@dataclasses.dataclass(frozen=True)
class LaunchRequest:
    """What is to be launched: a run, its options, and which processes train it."""

    loaded: LoadedConfig
    options: LaunchOptions = dataclasses.field(default_factory=LaunchOptions)
    # Whether ranks are launched; else this process trains, alone or as one of `rank_info`.
    launches_ranks: bool = False
    # Whether the run's only process is launched, as a rank is, so that it can be started again when
    # it dies.
    is_supervised: bool = False
    rank_info: RankInfo | None = None
    # Whether a stopped run is resumed: the one in `folder`, or the one that rank 0 finds by its
    # name `run_name`.
    should_resume: bool = False
    folder: RunFolder | None = None
    run_name: str | None = None
    # The choices of `accelerate launch`, or of accelerate's file, over some of which the plan wins.
    accelerate_config: AccelerateConfig | None = None

    @property
    def is_reporting_rank(self) -> bool:
        """True for the one process that prints: not a rank, or rank 0 under a foreign launcher."""
        return self.rank_info is None or (self.rank_info.is_first and self.rank_info.run_folder is None)


# --- make's variables ------------------------------------------------------------------------------------------------


def parse_launch_options(
    values: Mapping[str, str],
    *,
    uses_deepspeed: bool = False,
    uses_tensorboard: bool = False,
    notes: tuple[str, ...] = (),
) -> LaunchOptions:
    """Parse make's launch variables; `notes` name the sources of values that the user did not type. Raises
    ConfigError where one of them is not a number, out of range, or an unknown strategy."""
    deepspeed, file = None, values.get("DEEPSPEED_CONFIG")
    if file:
        deepspeed = DeepspeedRequest(Path(file).expanduser())
    elif uses_deepspeed:
        deepspeed = DeepspeedRequest()
    try:
        nodes = read_nodes(values)
        if nodes.count == 1 and values.get("NNODES", "").strip():
            # without NNODES a file of accelerate may name several: address and port are kept for it
            nodes = NodeSetup()
        return LaunchOptions(
            strategy=_parse_strategy(values.get("STRATEGY")),
            processes_per_node=read_whole_number(values, "NPROC", minimum=1),
            gpus=_parse_gpus(values.get("GPUS")),
            nodes=nodes,
            deepspeed=deepspeed,
            uses_tensorboard=uses_tensorboard,
            max_restarts=read_whole_number(values, "MAX_RESTARTS", minimum=0) or 0,
            notes=notes,
        )
    except ConfigError as error:
        if not notes:
            raise
        # a value that nobody typed is wrong: the message says where it comes from
        raise ConfigError(f"{error} ({'; '.join(notes)})") from None


def _parse_strategy(text: str | None) -> LayoutName | None:
    if not text:
        return None
    for name in LAYOUT_NAMES:
        if text.strip().lower() == name:
            return name
    suggestion = did_you_mean(text, LAYOUT_NAMES, min_similarity=0.6)
    hint = f"{suggestion} " if suggestion else ""
    raise ConfigError(f"STRATEGY={one_line(text)} is not a layout; {hint}there are: {', '.join(LAYOUT_NAMES)}")


def _parse_gpus(text: str | None) -> tuple[int, ...]:
    parts = [part.strip() for part in (text or "").split(",") if part.strip()]
    if any(not (part.isascii() and part.isdigit() and len(part) < 6) for part in parts):
        raise ConfigError(f"GPUS={one_line(text or '')} is not a list of GPU numbers, such as GPUS=0,1")
    gpu_indices = tuple(int(part) for part in parts)
    if len(set(gpu_indices)) != len(gpu_indices):
        raise ConfigError(f"GPUS={one_line(text or '')} names a GPU twice")
    return gpu_indices


# --- what the command line leaves open -------------------------------------------------------------------------------


def resolve_launch_request(request: LaunchRequest) -> LaunchRequest:
    """Fill what the command line leaves open, and set this process's environment for what it is: the launcher of ranks,
    one of them, or the only process. Raises ConfigError or HardwareError where what was asked for contradicts itself or
    the machine."""
    hide_gpus(request.loaded.config, os.environ)  # before torch is imported, which reads the variable once
    if request.launches_ranks and not request.is_supervised:
        request = _resolve_launcher(request)
    elif request.rank_info is not None:
        request = _resolve_rank(request, request.rank_info)
    else:
        request = _resolve_single_process(request)
    refuse_restarts(request.options, request.rank_info)
    if request.options.uses_tensorboard:
        request = dataclasses.replace(request, loaded=add_tensorboard_tracker(request.loaded))
    return request


def _resolve_launcher(request: LaunchRequest) -> LaunchRequest:
    """What the command line leaves open, accelerate's file fills in, then the mesh."""
    config = request.loaded.config
    options, accelerate_config = apply_accelerate_config(request.options, config)
    if options.nodes.exported_note:
        options = resolve_exported_nodes(options, config)
    options = apply_mesh(options, config)
    refuse_lone_node(options.nodes)
    return dataclasses.replace(request, options=options, accelerate_config=accelerate_config)


def _resolve_rank(request: LaunchRequest, rank_info: RankInfo) -> LaunchRequest:
    config, options = request.loaded.config, request.options
    rank_info = setup_rank_environment(config, rank_info)
    # now: the plan decides, and accelerate would act on the same variables later
    accelerate_config = pop_accelerate_launch_config()
    # under a parent of ours they are left from another launch
    if accelerate_config is not None and rank_info.run_folder is None:
        options = fill_from_accelerate(options, accelerate_config, parse_mesh(config.model.mesh_shape))
    return dataclasses.replace(request, options=options, rank_info=rank_info, accelerate_config=accelerate_config)


def _resolve_single_process(request: LaunchRequest) -> LaunchRequest:
    accelerate_config = pop_accelerate_launch_config()
    # torch and accelerate would wait for others, as a notebook or a guide asked
    for name in RENDEZVOUS_VARIABLES:
        os.environ.pop(name, None)
    options = dataclasses.replace(request.options, strategy="single")
    return dataclasses.replace(request, options=options, accelerate_config=accelerate_config)


def apply_accelerate_config(options: LaunchOptions, config: RunConfig) -> tuple[LaunchOptions, AccelerateConfig | None]:
    """The options with what an accelerate configuration adds, and that configuration; what it adds is logged."""
    for note in options.notes:
        logger.info("%s", note)
    file = find_accelerate_file(os.environ)
    if file is None:
        return options, None
    if file == default_accelerate_path(os.environ):
        logger.info("accelerate's own file %s is read (ACCELERATE_CONFIG=none leaves it out)", one_line(str(file)))
    accelerate_config = read_accelerate_file(file)
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
    deepspeed_request = options.deepspeed
    if deepspeed_request is None and accelerate_config.distributed_type == "DEEPSPEED":
        deepspeed_request = DeepspeedRequest(accelerate_config.deepspeed_config_file)
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


def resolve_exported_nodes(options: LaunchOptions, config: RunConfig) -> LaunchOptions:
    """Resolve what exported RANK and WORLD_SIZE count: ranks, where RANK can be the first one of this node, else nodes.
    Returns the options with those nodes."""
    nodes = options.nodes
    ranks_here = options.select_hardware(restrict_to_device(config, detect_hardware()), is_one_node=True).ranks
    if ranks_here == 1 or nodes.count % ranks_here or nodes.rank % ranks_here:
        return options
    # as many nodes as each has ranks, or all ranks on this one, which is sure where no other machine can reach it
    if nodes.count == ranks_here and not is_local(str(nodes.address)):
        return options
    note = (
        f"RANK and WORLD_SIZE in the environment count ranks, {nodes.count} in all and {ranks_here} on each node "
        "(NNODES= and NODE_RANK= say otherwise)"
    )
    logger.info("Nodes: %s", note)
    node_count, node_rank = nodes.count // ranks_here, nodes.rank // ranks_here
    nodes = dataclasses.replace(nodes, count=node_count, rank=node_rank, exported_note=note)
    return dataclasses.replace(options, nodes=nodes)


def meet_run_nodes(options: LaunchOptions, config: RunConfig, hardware: Hardware) -> NodeMeeting:
    """Meet the other nodes of a run, each known by its card; `hardware`: this node's. Raises as `meet_nodes` does."""
    card = node_card(config, hardware, strategy=options.strategy, uses_deepspeed=options.deepspeed is not None)
    return meet_nodes(options.nodes, card, timeout_s=rank_timeout_s(config, os.environ))


def add_tensorboard_tracker(loaded: LoadedConfig) -> LoadedConfig:
    """The config with TensorBoard among its trackers, logged where it was added: the page would stay empty without."""
    trackers = loaded.config.train.report_to
    if "tensorboard" in trackers:
        return loaded
    setting = f"train.report_to={json.dumps(['tensorboard', *trackers])}"
    logger.info("TensorBoard was asked for: %s, in place of %s", setting, json.dumps(list(trackers)))
    other_overrides = [word for word in loaded.overrides if not word.startswith("train.report_to=")]
    return load_config(loaded.path, overrides=[*other_overrides, setting])


def refuse_restarts(options: LaunchOptions, rank_info: RankInfo | None) -> None:
    """Raises ConfigError where MAX_RESTARTS= is given and other machines, or a launcher, have processes of the run."""
    if options.max_restarts and (rank_info is not None or options.nodes.count > 1):
        raise ConfigError(
            f"MAX_RESTARTS={options.max_restarts} starts processes again that this command has started on one machine: "
            "let the launcher or the scheduler start the others again, with output.if_exists=resume (make launch-file "
            "writes such a job)"
        )


def log_overrides(request: LaunchRequest, plan: Plan) -> None:
    """Log where the run YAML or the plan overrides accelerate's choices."""
    if request.accelerate_config is None or not request.is_reporting_rank:
        return
    precision, max_grad_norm = plan.precision.compute, request.loaded.config.train.max_grad_norm
    for line in override_lines(
        request.accelerate_config,
        mixed_precision=MIXED_PRECISION.get(precision, "no"),
        grad_accum=plan.batch.grad_accum,
        max_grad_norm=max_grad_norm,
    ):
        logger.info("%s", line)


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
