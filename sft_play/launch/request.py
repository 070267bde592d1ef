"""What is to be launched: a run, its options, and what a launcher, accelerate's file and a mesh add
to them; what becomes of it, the plan that ranks receive; and what a run that goes on keeps, and how
often it is started again.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import re
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import date
from pathlib import Path

from sft_play.config.load import LoadedConfig, load_config
from sft_play.config.schema import RunConfig
from sft_play.errors import ConfigError, DoesNotFit, HardwareError, RunFolderError, SftPlayError
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
from sft_play.launch.run_hardware import hide_gpus, restrict_to_device, spread_hardware
from sft_play.launch.torchrun import (
    RENDEZVOUS_VARIABLES,
    RankInfo,
    rank_variables,
    read_nodes,
    read_whole_number,
    refuse_lone_node,
    rendezvous_variables,
)
from sft_play.log import one_line, start_log_file
from sft_play.machine.hardware import Hardware, detect_hardware
from sft_play.machine.network import (
    DEFAULT_PORT,
    GLOO_VARIABLE,
    NodeSetup,
    find_interface,
    is_local,
    route_address,
)
from sft_play.planner.batching import BatchPlan, divisors
from sft_play.planner.layout import (
    DEEPSPEED_LAYOUTS,
    LAYOUT_NAMES,
    ONE_PROCESS_LAYOUTS,
    LayoutName,
    Mesh,
    PreviousRun,
    format_mesh,
    mesh_layout,
    parse_mesh,
)
from sft_play.planner.plan import Plan, PlanWithDeepSpeed, plan_from_json
from sft_play.planner.precision import UNSHARDED_LAYOUTS, WeightUpdates
from sft_play.runs.folder import (
    CRASH_ENTRY,
    RESTARTS_ENTRY,
    CodeTrust,
    RunFolder,
    load_resumed_config,
    pop_oom_note,
    read_json,
    read_oom_events,
)
from sft_play.runs.lookup import RunLock, find_resumable
from sft_play.spelling import did_you_mean
from sft_play.starter import BASE_NAME, CONFIG

logger = logging.getLogger(__name__)

# In a run folder that a parent created: what it hands to its ranks.
LAUNCH_FILE = "launch.json"


@dataclass(frozen=True)
class DeepspeedRequest:
    """A request for DeepSpeed as the engine; `file` is the user's configuration, None the layout's
    shipped one."""

    file: Path | None = None


@dataclass(frozen=True)
class LaunchOptions:
    """How a run is launched: what the user gave, None where the plan or the machine decides.
    `processes_per_node` counts one node's."""

    strategy: LayoutName | None = None
    # This process trains alone, without an engine around the model.
    trains_in_process: bool = False
    processes_per_node: int | None = None
    gpus: tuple[int, ...] = ()
    nodes: NodeSetup = field(default_factory=NodeSetup)
    deepspeed: DeepspeedRequest | None = None
    uses_tensorboard: bool = False
    dry_run: bool = False
    max_restarts: int = 0
    notes: tuple[str, ...] = ()

    def select_hardware(self, hardware: Hardware, *, is_one_node: bool = False) -> Hardware:
        """This machine as the ranks will use it: the GPUs of it that are named, several nodes like
        it (with `is_one_node` a single one), or processes on its CPU. Raises HardwareError where it
        has not the GPUs that are asked for."""
        node_count = 1 if is_one_node else self.nodes.count
        if not hardware.gpus:
            if self.gpus:
                raise HardwareError("GPUS= names GPUs, and this machine has none")
            rank_count = (
                self.processes_per_node or 2
            ) * node_count  # 2: the fewest that are several
            return replace(hardware, cpu_ranks=rank_count, nodes=node_count)
        by_index = {gpu.index: gpu for gpu in hardware.gpus}
        for index in self.gpus:
            if index not in by_index:
                raise HardwareError(
                    f"GPUS= names {index}, and there are {', '.join(map(str, by_index))}"
                )
        chosen_gpus = [by_index[index] for index in self.gpus] or list(hardware.gpus)
        if self.processes_per_node is not None and self.processes_per_node > len(chosen_gpus):
            raise HardwareError(
                f"NPROC={self.processes_per_node} and {len(chosen_gpus)} GPUs: one process uses one"
                " GPU"
            )
        chosen_gpus = chosen_gpus[: self.processes_per_node]
        # Every rank waits for the slowest, and one plan cannot hold for two sizes of memory.
        if len({gpu.name for gpu in chosen_gpus}) > 1:
            kinds = ", ".join(f"GPU {gpu.index} is a {gpu.name}" for gpu in chosen_gpus)
            raise HardwareError(
                f"the GPUs differ, and a run takes GPUs of one kind ({kinds}); name GPUs that are"
                f" alike: {hardware.format_gpu_choices(processes=self.processes_per_node)}"
            )
        # CUDA's default order is fastest first, which are not the GPUs of the plan
        if len(hardware.gpu_groups) > 1:
            os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
        return spread_hardware(
            replace(hardware, gpus=tuple(chosen_gpus)), len(chosen_gpus) * node_count, node_count
        )


@dataclass(frozen=True)
class LaunchRequest:
    """What is to be launched: a run, its options, and which processes train it."""

    loaded: LoadedConfig
    options: LaunchOptions = field(default_factory=LaunchOptions)
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
    # The choices of `accelerate launch`, or of accelerate's file; the plan wins over some of them.
    accelerate_config: AccelerateConfig | None = None

    @property
    def is_reporting_rank(self) -> bool:
        """True for the one process that prints: not a rank, or rank 0 under a foreign launcher."""
        return self.rank_info is None or (
            self.rank_info.is_first and self.rank_info.run_folder is None
        )

    @property
    def base_description(self) -> str:
        """The base model and the run YAML in one line; of the starter's also how to leave it."""
        name, path = self.loaded.config.model.name, str(self.loaded.path)
        if name == BASE_NAME and self.loaded.path.name == Path(CONFIG).name:
            name += ", the starter's two million parameters"
            path += "; a run of yours: make train CONFIG=my.yaml"
        return one_line(f"{name} ({path})", limit=400)


@dataclass(frozen=True)
class LaunchPlan:
    """A launch as planned, before anything is made."""

    # The run's; None on several nodes, where rank 0 names it.
    folder: RunFolder | None
    is_resumed: bool
    # The plan of the run, or of each stage; none where the run to resume is finished.
    stage_plans: Sequence[PlanWithDeepSpeed] = ()
    # Whether this process trains, or starts Unsloth's processes, which do.
    trains_in_process: bool = True
    # Whether the parent that launched this rank has created the folder, so that rank 0 must not.
    folder_exists: bool = False
    # The folder's lock, where this process has locked the whole run.
    lock: RunLock | None = None
    # The day of the run's first start, for chat templates that write one.
    today: date = field(default_factory=date.today)

    @property
    def plan(self) -> Plan:
        """The plan of the run, or of its first stage."""
        return self.stage_plans[0][0]

    def to_json(self) -> str:
        """As JSON, for the ranks. Needs a folder."""
        assert self.folder is not None, "rank 0 names it"
        fields = {
            "folder": str(self.folder.path.absolute()),
            "parts": [
                {"plan": plan.as_json(), "deepspeed": deepspeed}
                for plan, deepspeed in self.stage_plans
            ],
            "resume": self.is_resumed,
            "made": self.folder_exists,
            "today": str(self.today),
        }
        return json.dumps(fields)

    @staticmethod
    def from_json(text: str) -> LaunchPlan:
        """Read what a parent, or rank 0, has written; raises the error with which rank 0 has
        refused the run."""
        fields = json.loads(text)
        if "refused" in fields:
            error_class = DoesNotFit if fields["exit_code"] == DoesNotFit.exit_code else ConfigError
            raise error_class(fields["refused"])
        stage_plans = [
            (plan_from_json(part["plan"]), part["deepspeed"]) for part in fields["parts"]
        ]
        folder, today = RunFolder(Path(fields["folder"])), date.fromisoformat(fields["today"])
        return LaunchPlan(
            folder, fields["resume"], stage_plans, folder_exists=fields["made"], today=today
        )


def refusal_to_json(error: SftPlayError) -> str:
    """Format rank 0's refusal as JSON for the other ranks, which raise it too
    (`LaunchPlan.from_json`)."""
    return json.dumps({"refused": str(error), "exit_code": error.exit_code})


# --- make's variables -----------------------------------------------------------------------------


def parse_launch_options(
    values: Mapping[str, str],
    *,
    uses_deepspeed: bool = False,
    uses_tensorboard: bool = False,
    notes: tuple[str, ...] = (),
) -> LaunchOptions:
    """Parse make's launch variables; `notes` name the sources of values that the user did not type.
    Raises ConfigError where one of them is not a number, out of range, or an unknown strategy."""
    deepspeed, file = None, values.get("DEEPSPEED_CONFIG")
    if file or uses_deepspeed:
        deepspeed = DeepspeedRequest(Path(file).expanduser() if file else None)
    try:
        gpus_text = values.get("GPUS", "")
        # an empty entry, as a variable without a value leaves it, counts for nothing
        entries = [entry.strip() for entry in gpus_text.split(",")]
        if not all(re.fullmatch(r"\d{0,5}", entry, re.ASCII) for entry in entries):
            raise ConfigError(
                f"GPUS={one_line(gpus_text)} is not a list of GPU numbers, such as GPUS=0,1"
            )
        gpus = tuple(int(entry) for entry in entries if entry)
        if len(set(gpus)) != len(gpus):
            raise ConfigError(f"GPUS={one_line(gpus_text)} names a GPU twice")
        nodes = read_nodes(values)
        if nodes.count == 1 and values.get("NNODES", "").strip():
            # without NNODES a file of accelerate may name several: address and port are kept for it
            nodes = NodeSetup()
        return LaunchOptions(
            strategy=_parse_strategy(values.get("STRATEGY", "")),
            processes_per_node=read_whole_number(values, "NPROC", minimum=1),
            gpus=gpus,
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


def _parse_strategy(text: str) -> LayoutName | None:
    if not text:
        return None
    name = text.strip().lower()
    if name in LAYOUT_NAMES:
        return name
    words = [
        f"STRATEGY={one_line(text)} is not a layout;",
        did_you_mean(text, LAYOUT_NAMES, min_similarity=0.6),
        f"there are: {', '.join(LAYOUT_NAMES)}",
    ]
    raise ConfigError(" ".join(filter(None, words)))


# --- what the command line leaves open ------------------------------------------------------------


def resolve_launch_request(request: LaunchRequest) -> LaunchRequest:
    """Fill what the command line leaves open, and set this process's environment for what it is:
    the launcher of ranks, one of them, or the only process. Raises ConfigError or HardwareError
    where what was asked for contradicts itself or the machine."""
    config, options, rank_info = request.loaded.config, request.options, request.rank_info
    hide_gpus(config, os.environ)  # before torch is imported, which reads the variable once
    mesh = parse_mesh(config.model.mesh_shape)
    if request.launches_ranks and not request.is_supervised:
        # what the command line leaves open, accelerate's file fills in, then the mesh
        for note in options.notes:
            logger.info("%s", note)
        accelerate_config, file = None, find_accelerate_file(os.environ)
        if file is not None:
            if file == default_accelerate_path(os.environ):
                logger.info(
                    "accelerate's own file %s is read (ACCELERATE_CONFIG=none leaves it out)",
                    one_line(str(file)),
                )
            accelerate_config = read_accelerate_file(file)
            options = fill_from_accelerate(options, accelerate_config, mesh)
        if options.nodes.exported_note:
            options = resolve_exported_nodes(options, config)
        options = apply_mesh(options, config)
        refuse_lone_node(options.nodes)
    else:
        if rank_info is not None:
            rank_info = setup_rank_environment(config, rank_info)
        # the Trainer's arguments set engine and precision: accelerate would act on its variables as
        # well
        accelerate_config = accelerate_launch_config(os.environ)
        remove_accelerate_variables(os.environ)
        if rank_info is None:
            # torch and accelerate would wait for others, as a notebook or a guide asked
            for name in RENDEZVOUS_VARIABLES:
                os.environ.pop(name, None)
            options = replace(options, trains_in_process=True)
        # under a parent of ours, which has read them, they are left over
        elif accelerate_config is not None and rank_info.run_folder is None:
            options = fill_from_accelerate(options, accelerate_config, mesh)
    if options.max_restarts and (rank_info is not None or options.nodes.count > 1):
        raise ConfigError(
            f"MAX_RESTARTS={options.max_restarts} starts processes again that this command has"
            " started on one machine: let the launcher or the scheduler start the others again,"
            " with output.if_exists=resume (make launch-file writes such a job)"
        )
    loaded = request.loaded
    if options.uses_tensorboard:
        loaded = add_tensorboard_tracker(loaded)
    return replace(
        request,
        loaded=loaded,
        options=options,
        rank_info=rank_info,
        accelerate_config=accelerate_config,
    )


def setup_rank_environment(config: RunConfig, rank_info: RankInfo) -> RankInfo:
    """Set the variables by which torch and gloo find the other ranks, whichever launcher set them;
    returns this rank."""
    # other launchers' names as torchrun's, which torch reads
    os.environ.update(rank_variables(os.environ))
    os.environ.update(rendezvous_variables(os.environ, node_count=rank_info.node_count))
    is_foreign_rank = rank_info.run_folder is None and rank_info.local_world_size > 1
    # another launcher shows each rank its own GPU alone: device 0, whatever the rank's number
    if is_foreign_rank and len(restrict_to_device(config, detect_hardware()).gpus) == 1:
        os.environ["LOCAL_RANK"] = "0"  # which torch and accelerate read
        rank_info = replace(rank_info, local_rank=0)
    choose_interface(rank_info, os.environ)
    return rank_info


def choose_interface(rank_info: RankInfo, environment: MutableMapping[str, str]) -> None:
    """Set `GLOO_SOCKET_IFNAME` of a rank among several nodes to the interface that leads to
    `MASTER_ADDR`, where nobody has. gloo would take the address of this host's own name, which may
    be the loopback (Debian's /etc/hosts), and on the other nodes means themselves; NCCL finds
    interfaces by itself. Raises ConfigError where MASTER_ADDR does not resolve here."""
    host, port = environment.get("MASTER_ADDR"), environment.get("MASTER_PORT", "")
    if rank_info.world_size <= rank_info.local_world_size or not host:
        return
    try:
        address = route_address(host, int(port) if port.isdigit() else 0)
    except ConfigError as error:
        raise ConfigError(
            f"{error}; where torchrun runs with --rdzv-backend c10d it takes the name of node 0's"
            " host: give --local-addr with this node's own address on every node"
        ) from None
    interface = find_interface(address) if address else None
    if interface is not None and not environment.get(GLOO_VARIABLE):
        environment[GLOO_VARIABLE] = interface
        logger.info(
            "Network: gloo uses %s (%s), which leads to MASTER_ADDR=%s; %s= names another",
            interface,
            address,
            one_line(host),
            GLOO_VARIABLE,
        )


def fill_from_accelerate(
    options: LaunchOptions, accelerate_config: AccelerateConfig, mesh: Mesh | None = None
) -> LaunchOptions:
    """The options with an accelerate configuration filled in wherever the command line says
    nothing. `mesh`: the run YAML's; FSDP in the configuration means it then, and not a layout.
    Raises ConfigError where it is for several machines and lacks the address of rank 0's."""
    nodes = options.nodes
    if nodes.count == 1 and accelerate_config.num_machines > 1:
        address = nodes.address or accelerate_config.main_process_ip
        if address is None:
            raise ConfigError(
                f"{one_line(str(accelerate_config.path))}: num_machines:"
                f" {accelerate_config.num_machines} needs main_process_ip, the address of the"
                " machine of rank 0 that the others reach (make setup-accelerate: MAIN_IP=)"
            )
        nodes = NodeSetup(
            accelerate_config.num_machines,
            accelerate_config.machine_rank,
            address,
            nodes.port or accelerate_config.main_process_port or DEFAULT_PORT,
        )
    processes_per_machine = accelerate_config.num_processes  # None: one for each GPU
    if processes_per_machine is not None:
        processes_per_machine //= accelerate_config.num_machines
    deepspeed_request = options.deepspeed
    if deepspeed_request is None and accelerate_config.distributed_type == "DEEPSPEED":
        deepspeed_request = DeepspeedRequest(accelerate_config.deepspeed_config_file)
    layout = accelerate_config.layout
    # a mesh of copies only (dp) shards nothing, so there FSDP is a layout of its own
    if mesh is not None and mesh.ranks > mesh.dp and accelerate_config.distributed_type == "FSDP":
        layout = None
    return replace(
        options,
        strategy=options.strategy or layout,
        processes_per_node=options.processes_per_node or processes_per_machine,
        gpus=options.gpus or accelerate_config.gpu_ids or (),
        nodes=nodes,
        deepspeed=deepspeed_request,
    )


def apply_mesh(options: LaunchOptions, config: RunConfig) -> LaunchOptions:
    """The options with as many processes as a mesh has, where no number was given; raises
    ConfigError where they do not divide over the nodes, or there are fewer GPUs than the mesh has
    processes."""
    mesh = parse_mesh(config.model.mesh_shape)
    if mesh is None or options.processes_per_node or options.gpus:
        return options
    mesh_text, nodes = (
        f"model.mesh_shape={format_mesh(config.model.mesh_shape)}",
        options.nodes.count,
    )
    if mesh.ranks % nodes:
        raise ConfigError(
            f"{mesh_text} is a mesh of {mesh.ranks} processes, which {nodes} nodes cannot share"
            " equally"
        )
    ranks_per_node, gpu_count = mesh.ranks // nodes, len(detect_hardware().gpus)
    if gpu_count and ranks_per_node > gpu_count:
        raise HardwareError(
            f"{mesh_text} needs {ranks_per_node} processes on each node, and there are {gpu_count}"
            " GPUs: one each"
        )
    return replace(options, processes_per_node=ranks_per_node)


def resolve_exported_nodes(options: LaunchOptions, config: RunConfig) -> LaunchOptions:
    """Decide whether exported RANK and WORLD_SIZE count ranks or nodes: ranks only where RANK can
    be the first rank of this node. Returns the options with the nodes that follow."""
    nodes = options.nodes
    ranks_here = options.select_hardware(
        restrict_to_device(config, detect_hardware()), is_one_node=True
    ).ranks
    if ranks_here == 1 or nodes.count % ranks_here or nodes.rank % ranks_here:
        return options
    # as many nodes as each has ranks, or all ranks on this one, which is sure where no other
    # machine can reach it
    if nodes.count == ranks_here and not is_local(str(nodes.address)):
        return options
    note = (
        f"RANK and WORLD_SIZE in the environment count ranks, {nodes.count} in all and {ranks_here}"
        " on each node (NNODES= and NODE_RANK= say otherwise)"
    )
    logger.info("Nodes: %s", note)
    nodes = replace(
        nodes, count=nodes.count // ranks_here, rank=nodes.rank // ranks_here, exported_note=note
    )
    return replace(options, nodes=nodes)


def add_tensorboard_tracker(loaded: LoadedConfig) -> LoadedConfig:
    """The config with TensorBoard among its trackers, logged where it was added: the page would
    stay empty without."""
    trackers = loaded.config.train.report_to
    if "tensorboard" in trackers:
        return loaded
    setting = f"train.report_to={json.dumps(['tensorboard', *trackers])}"
    logger.info(
        "TensorBoard was asked for: %s, in place of %s", setting, json.dumps(list(trackers))
    )
    other_overrides = [word for word in loaded.overrides if not word.startswith("train.report_to=")]
    return load_config(loaded.path, overrides=[*other_overrides, setting])


def override_lines(
    accelerate_config: AccelerateConfig, plan: Plan, *, max_grad_norm: float
) -> list[str]:
    """Lines for the log: where the run YAML or the plan overrides accelerate's choices."""
    name, precision = accelerate_config.path.name, accelerate_config.mixed_precision
    planned_precision = MIXED_PRECISION.get(plan.precision.compute, "no")
    lines = []
    if precision not in (None, planned_precision):
        lines.append(
            f"{name} says mixed_precision: {precision}, the run YAML asks for {planned_precision}:"
            " the run YAML wins"
        )
    if accelerate_config.distributed_type == "FSDP":
        fsdp_config = accelerate_config.fsdp_config
        if str(fsdp_config.get("fsdp_version", 1)) != "2":
            lines.append(f"{name} asks for FSDP's first version: FSDP2 (fully_shard) is used")
        if str(fsdp_config.get("fsdp_offload_params")).lower() in ("true", "yes", "on"):
            lines.append(
                f"{name} says fsdp_offload_params: true, which is not supported: use zero3_offload"
                " for weights in RAM"
            )
    if accelerate_config.distributed_type == "DEEPSPEED":
        planned = {
            "gradient_accumulation_steps": plan.batch.grad_accum,
            "gradient_clipping": max_grad_norm,
        }
        for key, value in planned.items():
            file_value = accelerate_config.deepspeed_config.get(key, "auto")
            if file_value != "auto" and not are_numbers_equal(file_value, value):
                lines.append(
                    f"{name} says deepspeed_config.{key}: {file_value}, the plan {value:g}: the"
                    " plan wins"
                )
    return lines


# --- a run that goes on after a stop or a death ---------------------------------------------------


def resume_request(
    loaded: LoadedConfig, options: LaunchOptions, *, run_name: str | None, is_trusted: CodeTrust
) -> LaunchRequest:
    """Build the request that resumes a stopped run, the one named `run_name` or the newest, over as
    many ranks as before unless another number is given. Raises RunFolderError where there is none,
    or its settings allow code that `is_trusted` does not."""
    folder = find_resumable(loaded.config.output, config_path=loaded.path, name=run_name)
    new_config, previous = loaded, read_previous_run(folder)
    loaded = load_resumed_config(new_config, folder, is_trusted=is_trusted)
    if not (options.processes_per_node or options.gpus or options.nodes.count > 1):
        gpu_count = len(restrict_to_device(loaded.config, detect_hardware()).gpus)
        rank_count = previous.processes if previous else 1
        if gpu_count:
            rank_count = min(rank_count, gpu_count)
        options = replace(options, processes_per_node=rank_count)
    if not _keeps_mesh(loaded.config, options, previous):
        logger.info(
            "Mesh: model.mesh_shape=%s is of other processes, or another layout: left out",
            format_mesh(loaded.config.model.mesh_shape),
        )
        loaded = load_resumed_config(new_config, folder, is_trusted=is_trusted, keeps_mesh=False)
    # a single rank's too
    has_engine = options.deepspeed or (
        previous is not None and previous.layout in DEEPSPEED_LAYOUTS
    )
    is_one_rank = options.processes_per_node == 1 and options.nodes.count == 1 and not has_engine
    launches_ranks = not (is_one_rank and options.strategy in (None, *ONE_PROCESS_LAYOUTS))
    return LaunchRequest(
        loaded, options, launches_ranks=launches_ranks, should_resume=True, folder=folder
    )


def _keeps_mesh(config: RunConfig, options: LaunchOptions, previous: PreviousRun | None) -> bool:
    """True if a resumed run can keep its mesh: it has as many processes as the mesh, and its layout
    is the mesh's."""
    mesh = parse_mesh(config.model.mesh_shape)
    if mesh is None:
        return True
    layout = options.strategy or (previous.layout if previous else None)
    if layout not in (None, mesh_layout(mesh).name):
        return False
    processes_per_node = options.processes_per_node or len(options.gpus)
    return not processes_per_node or processes_per_node * options.nodes.count == mesh.ranks


def read_previous_run(folder: RunFolder) -> PreviousRun | None:
    """Read a stopped run's layout, batch and number of ranks from its manifest, or from its plan if
    it failed before a rank wrote them; None if neither has them."""
    manifest, plan = folder.read_manifest(), read_json(folder.path / "plan.json")
    batch = manifest.get("batch")
    layout, processes = manifest.get("layout", "single"), manifest.get("processes", 0)
    if not isinstance(batch, dict):
        batch = {**plan, "ranks": plan.get("data_parallel_ranks")}
        layout, processes = plan.get("layout"), plan.get("ranks", 0)
    numbers = [batch.get(name) or 0 for name in ("micro_batch", "grad_accum", "ranks")]
    if min(numbers) < 1:
        return None
    updates = None
    # elsewhere they follow from it: FSDP and DeepSpeed keep copies in float32
    if layout in UNSHARDED_LAYOUTS:
        updates = (plan.get("precision") or {}).get("updates")
    oom_micro_batches = [
        event.micro_batch for event in read_oom_events(folder) if event.again in ("step", "run")
    ]
    least_oom = min(oom_micro_batches, default=None)
    return PreviousRun(
        layout,
        BatchPlan(*numbers),
        processes,
        updates,
        folder.has_trained,
        least_oom,
        compiled=bool(plan.get("compiled")),
    )


def resume_constraints(
    config: RunConfig, previous: PreviousRun | None, processes: int
) -> tuple[BatchPlan | None, WeightUpdates | None]:
    """Return what a run that is resumed over `processes` keeps: its batch, and how updates reach
    its weights. None leaves either to the config and the plan. The rows of a step stay the same.
    Over another number of data-parallel ranks the accumulation changes instead, and a micro-batch
    that does not divide a rank's share, or ran out of memory, becomes the largest that does.
    Raises RunFolderError where the effective batch does not split over them.
    """
    if previous is None or not (previous.has_trained or previous.oom_micro_batch):
        return None, None
    mesh, ranks = parse_mesh(config.model.mesh_shape), processes
    if mesh is not None:
        ranks = mesh.data_parallel_ranks
    elif previous.processes == processes:
        ranks = previous.batch.ranks
    train, updates, requested_micro_batch = config.train, None, None
    if train.weight_updates == "auto":
        updates = previous.updates
    if train.batch_size != "auto" and train.batch_size < (previous.oom_micro_batch or math.inf):
        requested_micro_batch = train.batch_size
    effective_batch = previous.batch.effective_batch
    # another effective batch is refused by check_same_run, and a split that is given in full needs
    # none from here
    if not train.derives_effective_batch and train.effective_batch_size != effective_batch:
        return None, updates
    grad_accum = 0 if train.grad_accum == "auto" else train.grad_accum
    if requested_micro_batch and requested_micro_batch * grad_accum * ranks == effective_batch:
        return None, updates
    rank_share, remainder = divmod(effective_batch, ranks)
    if remainder:
        possible_ranks = ", ".join(
            str(number) for number in divisors(effective_batch) if number <= 2 * ranks
        )
        raise RunFolderError(
            f"the run cannot be resumed over {ranks} ranks: they do not divide its effective batch"
            f" of {effective_batch} (it was stopped with {previous.batch.ranks}); numbers that do:"
            f" {possible_ranks}"
        )
    micro_batch = requested_micro_batch or previous.batch.micro_batch
    if rank_share % micro_batch and train.batch_size == "auto" and not previous.oom_micro_batch:
        return None, updates
    micro_batch = max(size for size in divisors(rank_share) if size <= micro_batch)
    return BatchPlan(micro_batch, rank_share // micro_batch, ranks), updates


@dataclass
class RestartBudget:
    """The restarts of one command: at most `limit` after a process died."""

    limit: int
    used: int = 0

    def should_restart(self, folder: RunFolder, loaded: LoadedConfig) -> bool:
        """True if a run that has failed is to be started again. Counts the restart, logs its reason
        and records it in the manifest."""
        if event := pop_oom_note(folder):
            logger.warning("Starting again with micro-batch %d", event.now)
            return True
        crash = pop_crash_record(folder) if self.limit else None
        if crash is None:
            return False
        with contextlib.closing(start_log_file(folder.log_path)):
            if self.used == self.limit:
                logger.error("MAX_RESTARTS=%d is used up: the run ends", self.limit)
                return False
            self.used += 1
            step, resume_text = _resume_point(folder, loaded)
            logger.warning(
                "Restart %d of %d: %s; the run goes on from %s",
                self.used,
                self.limit,
                crash,
                resume_text,
            )
        entry = {"after": crash, "from_step": step, "number": self.used, "of": self.limit}
        folder.update_manifest(
            **{RESTARTS_ENTRY: [*folder.read_manifest().get(RESTARTS_ENTRY, []), entry]}
        )
        return True


def pop_crash_record(folder: RunFolder) -> str | None:
    """Read how a process of the run died, and remove it from the manifest; None if none died."""
    with contextlib.suppress(RunFolderError):  # an unused folder was removed again
        crash = folder.read_manifest().get(CRASH_ENTRY)
        if isinstance(crash, str):
            folder.update_manifest(**{CRASH_ENTRY: None})
            return crash
    return None


def _resume_point(folder: RunFolder, loaded: LoadedConfig) -> tuple[int, str]:
    from sft_play.training.checkpoints.checkpoints import checkpoint_step, last_complete_checkpoint

    last_folder, stage_suffix = folder, ""
    for stage_config in loaded.config.curriculum:
        stage_folder = folder.stage_folder(stage_config.name)
        if stage_folder.has_begun:
            last_folder, stage_suffix = stage_folder, f" of stage {stage_config.name}"
    checkpoint = last_complete_checkpoint(last_folder.checkpoints_path)
    if checkpoint is None:
        return 0, f"the beginning{stage_suffix}: there is no checkpoint"
    return (
        checkpoint_step(checkpoint),
        f"the checkpoint of step {checkpoint_step(checkpoint)}{stage_suffix}",
    )
