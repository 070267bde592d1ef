"""The decision of a plan: the layouts of a request evaluated, one candidate chosen and confirmed by
a trace.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sft_play.config.schema import RunConfig
from sft_play.errors import ConfigError
from sft_play.machine.hardware import Hardware
from sft_play.machine.host_speed import HostSpeed
from sft_play.machine.software import PINNED_CUDA_LIBRARIES, CudaLibraries
from sft_play.models.shape import ModelShape
from sft_play.planner import calibration
from sft_play.planner.backend import check_image_options
from sft_play.planner.batching import BatchPlan, RowTokens
from sft_play.planner.candidates import (
    Candidate,
    PlanInputs,
    build_candidate,
    choose_candidate,
    choose_eval_batch,
    closest_to_fitting,
    evaluate_candidates,
    evaluate_weight_updates,
    lowest_memory_candidates,
    plan_micro_batches,
)
from sft_play.planner.explain import candidates_to_show, plan_reasons
from sft_play.planner.kernels import plan_experts, plan_kernels, select_attention
from sft_play.planner.layout import (
    LAYOUT_NAMES,
    ImpossibleLayout,
    Layout,
    LayoutName,
    compile_obstacle,
    context_parallel_layouts,
    find_layouts,
)
from sft_play.planner.memory.estimate import RUN_PHASES, generation_token_budget
from sft_play.planner.memory.step_memory import create_step_simulation, is_padded
from sft_play.planner.memory.structure import check_adapter_targets, needs_repeated_kv
from sft_play.planner.plan import (
    ActivationsFrom,
    Plan,
    RunLength,
    TraceCandidate,
    count_parameters,
    device_budget_bytes,
    plan_vision,
)
from sft_play.planner.precision import WeightUpdates, choose_precision
from sft_play.planner.speed import (
    check_compile_options,
    compile_conflicts,
    estimate_compile_s,
    find_rates,
    find_speed_error,
)
from sft_play.text import GIB, format_duration

# Tokens of a row that a plan counts at least, as the shortest model.max_seq_len.
MIN_ROW_TOKENS = 8
# Relative difference between estimate and trace above which the plan says that the larger one is
# used.
TRACE_TOLERANCE = 0.03
# How many times what compiling costs a run has to save before `train.compile: auto` compiles: what
# is saved is predicted, and compiling is paid for certain.
MIN_COMPILE_GAIN = 2


@dataclass(frozen=True)
class PlanRequest:
    """What is to be planned: a config, its model's shapes, and a machine, with all of its GPUs (or
    its RAM). `measured_runs` were made on this machine."""

    config: RunConfig
    shape: ModelShape
    hardware: Hardware
    # Layouts that may be taken; every one is evaluated where none is left out.
    allowed_layouts: Sequence[LayoutName] = LAYOUT_NAMES
    # Whether evaluation batches run beside the training.
    has_eval: bool = True
    measured_runs: Sequence[calibration.MeasuredRun] = ()
    # The lengths of the rows, where they are known.
    row_tokens: RowTokens | None = None
    # Packages with kernels that are not installed (`machine.software.missing_kernel_packages`).
    missing_packages: frozenset[str] = frozenset()
    # Those by which PyTorch chooses kernels (`machine.software.cuda_libraries`).
    libraries: CudaLibraries = PINNED_CUDA_LIBRARIES
    # How fast this machine's host was measured to start kernels; None where it was not.
    host_speed: HostSpeed | None = None
    # Whether `zero3_offload` leaves the weights on the GPUs, as a DeepSpeed file may say.
    keeps_params: bool = False
    # The batch that a resumed run keeps, whatever the config says.
    resumed_batch: BatchPlan | None = None
    # How updates reached the weights of a resumed run, which `weight_updates: auto` takes.
    resumed_updates: WeightUpdates | None = None
    # Whether the blocks of a resumed run were compiled, which `train.compile: auto` takes.
    resumed_compiled: bool | None = None
    # Why inductor cannot compile on the machine that the run starts on; None where it can.
    inductor_obstacle: str | None = None

    @property
    def named_layout(self) -> LayoutName | None:
        """The layout that the user named, if it is only one."""
        if len(self.allowed_layouts) == 1:
            return self.allowed_layouts[0]
        return None

    @property
    def max_seq_len(self) -> int:
        """Tokens of a row at most: model.max_seq_len, or the model's positions where those are
        fewer."""
        option = self.config.model.max_seq_len
        return min(option, self.shape.max_positions or option)


def make_plan(
    request: PlanRequest,
    *,
    trace_candidate: TraceCandidate | None = None,
    estimate_run_length: Callable[[int], RunLength | None] | None = None,
) -> Plan:
    """Make the plan of a run, without suggestions (`advice.make_advised_plan` adds them).

    Args:
        trace_candidate: traces the choice; the larger of prediction and trace counts.
        estimate_run_length: the optimizer steps and tokens of the run, given the effective batch.

    Raises ConfigError for batch sizes that do not divide, and what machine, job or model forbid.
    """
    config, shape, hardware = request.config, request.shape, request.hardware
    _check_settings(request)  # first, so that the message names the setting and not a layout
    inputs, candidates, impossible = _evaluate_layouts(request, build_plan_inputs(request))
    choice, candidates, notes = _choose_confirmed(inputs, candidates, trace_candidate)
    effective_batch = choice.batch.effective_batch
    run_length = estimate_run_length(effective_batch) if estimate_run_length else None
    shown_candidates = candidates_to_show(inputs, candidates, choice)  # the choice first
    choice, inputs, compile_notes = _resolve_compile(request, inputs, choice, run_length)
    shown_candidates[0], config = choice, inputs.config
    # the choice stands; below is what the run, its ranks and its reader have to know of it
    step, half_precision = choice.step, choice.precision.compute != "float32"
    repeats_kv = step.on_gpu and needs_repeated_kv(
        shape, attention=step.attention, half_precision=half_precision, capability=step.capability
    )
    kernels = plan_kernels(
        config,
        shape,
        step.layout,
        on_gpu=step.on_gpu,
        missing_packages=inputs.rates.missing_packages,
    )
    simulation = create_step_simulation(config, shape, choice.precision, step)
    speed_known = inputs.rates.is_known or inputs.find_correction(choice.layout).has_measured_speed
    speed_error = counted_kernels = mfu = None
    # model FLOP utilisation: the model's own operations per second over the peak
    if inputs.rates.is_known:
        mfu = choice.speed.model_flops / choice.speed.step_s / inputs.rates.matrix_flops_per_s
    if speed_known:
        speed_error = find_speed_error(shape, choice.precision, hardware, step)
    if kernels.reason:
        counted_kernels = kernels.counted_kernels
    return Plan(
        choice=choice,
        precision=choice.precision,
        max_seq_len=request.max_seq_len,
        repeats_kv=repeats_kv,
        eval_batch=step.eval_batch or choose_eval_batch(simulation),
        masked_bytes=_masked_required_bytes(inputs, choice),
        answer_tokens=generation_token_budget(simulation, choice.memory),
        budget_bytes=inputs.device_budget,
        model_params=shape.params,
        hardware=hardware,
        reasons=plan_reasons(
            inputs,
            candidates,
            choice,
            max_seq_len=request.max_seq_len,
            repeats_kv=repeats_kv,
            kernels=kernels,
            notes=[*notes, *compile_notes],
        ),
        candidates=tuple(shown_candidates),
        not_possible=impossible,
        speed_known=speed_known,
        speed_error=speed_error,
        mfu=mfu,
        run_length=run_length,
        micro_batches=plan_micro_batches(inputs, choice.precision, step),
        row_tokens=inputs.row_tokens,
        kernels=counted_kernels,
        compiled=config.train.compile is True,
        compile_s=estimate_compile_s(config, shape),
        activations_from=_activation_source(choice, shape),
        parameters=count_parameters(config, shape, choice.precision, choice.layout),
        vision=plan_vision(inputs, choice),
    )


def _activation_source(choice: Candidate, shape: ModelShape) -> ActivationsFrom:
    """Where the choice's activations are from."""
    if choice.is_traced:
        return "trace"
    if shape.block_meter is not None:
        return "measured"
    return "blocks"


def check_plan_request(request: PlanRequest) -> None:
    """Run only the checks of `make_plan` that do not depend on row lengths, on a few candidates.
    Raises ConfigError."""
    _check_settings(request)
    lowest_memory_candidates(build_plan_inputs(request), requested_layouts(request)[0])


def _check_settings(request: PlanRequest) -> None:
    if request.shape.vision is not None:
        check_image_options(request.config)
    check_adapter_targets(request.config, request.shape)
    check_compile_options(request.config)
    plan_experts(
        request.config,
        request.shape,
        choose_precision(request.config, request.hardware, request.shape),
    )


def _evaluate_layouts(
    request: PlanRequest, inputs: PlanInputs
) -> tuple[PlanInputs, list[Candidate], tuple[ImpossibleLayout, ...]]:
    layouts, impossible = requested_layouts(request)
    inputs, candidates = evaluate_weight_updates(inputs, layouts)
    # context parallelism is slower wherever a whole row fits a GPU: evaluated only where nothing
    # else fits
    can_divide_rows = (
        "fsdp_cp" in request.allowed_layouts and request.config.model.mesh_shape is None
    )
    if can_divide_rows and not any(candidate.fits for candidate in candidates):
        candidates += evaluate_candidates(
            inputs, context_parallel_layouts(request.config, request.shape, request.hardware)
        )
    return inputs, candidates, impossible


def requested_layouts(request: PlanRequest) -> tuple[list[Layout], tuple[ImpossibleLayout, ...]]:
    """The layouts that a plan evaluates first, and those that cannot run the job. Raises
    ConfigError where none can."""
    hardware = request.hardware
    possible, impossible = find_layouts(
        request.config, request.shape, hardware, named=request.named_layout
    )
    layouts = [layout for layout in possible if layout.name in request.allowed_layouts] or list(
        possible[:1]
    )
    if not layouts:
        raise ConfigError(
            f"no layout over {hardware.ranks} ranks can run this job: "
            + "; ".join(f"{item.name}: {item.because}" for item in impossible)
        )
    if request.keeps_params:
        layouts = [
            dataclasses.replace(layout, keeps_params=layout.offloads_params) for layout in layouts
        ]
    return layouts, impossible


def build_plan_inputs(request: PlanRequest, *, fp32_master_weights: bool = True) -> PlanInputs:
    """Build what the candidates of a plan share. `fp32_master_weights` False: weights that train
    are bf16 wherever that is possible."""
    config, shape, hardware = request.config, request.shape, request.hardware
    precision = choose_precision(config, hardware, shape)
    device, host_budget = "cpu", None  # runs are recorded by this name
    if hardware.gpus:
        device = hardware.gpus[0].name
    if hardware.ram_given:  # a named machine's RAM is only this machine's, which says nothing of it
        host_budget = hardware.ram_free_bytes
    # the rows' own lengths where they are counted and hold under this limit, else full rows
    seq_len, row_tokens = request.max_seq_len, request.row_tokens
    if row_tokens is not None:
        row_tokens = row_tokens.limited_to(seq_len)
    if row_tokens is not None:
        seq_len = max(MIN_ROW_TOKENS, row_tokens.longest_row)

    @functools.cache
    def find_correction(layout: Layout) -> calibration.Correction:
        kernels = plan_kernels(
            config,
            shape,
            layout,
            on_gpu=bool(hardware.gpus),
            missing_packages=request.missing_packages,
        )
        return calibration.compute_correction(
            request.measured_runs,
            device=device,
            mode=config.tuning.mode,
            layout=layout.name,
            model=config.model.name,
            kernels=kernels.counted_kernels,
            is_compiled=config.train.compile is True,
            budget_bytes=device_budget_bytes(hardware),
        )

    return PlanInputs(
        config=config,
        shape=shape,
        precision=precision,
        hardware=hardware,
        rates=dataclasses.replace(
            find_rates(hardware, precision), missing_packages=request.missing_packages
        ),
        seq_len=seq_len,
        attention=select_attention(config.model.attn_implementation, has_sdpa=shape.has_sdpa),
        has_eval=request.has_eval,
        device_budget=device_budget_bytes(hardware),
        host_budget=host_budget,
        find_correction=find_correction,
        fp32_master_weights=fp32_master_weights,
        row_tokens=row_tokens,
        libraries=request.libraries,
        host_speed=request.host_speed,
        resumed_batch=request.resumed_batch,
        resumed_updates=request.resumed_updates,
    )


def _choose_confirmed(
    inputs: PlanInputs, candidates: list[Candidate], trace_candidate: TraceCandidate | None
) -> tuple[Candidate, list[Candidate], list[str]]:
    notes: list[str] = []
    while True:
        choice = choose_candidate(candidates)
        if choice is None:
            return closest_to_fitting(candidates), candidates, notes
        if trace_candidate is None or choice.is_traced:
            return choice, candidates, notes
        trace = trace_candidate(choice)
        if trace.unavailable_reason is not None:
            return (
                choice,
                candidates,
                [*notes, f"not confirmed by a trace: {trace.unavailable_reason}"],
            )
        estimated = choice.memory.allocated
        text = (
            f"traced: {trace.allocated / GIB:.2f} GiB allocated and {trace.reserved / GIB:.2f}"
            f" reserved; the estimate says {estimated / GIB:.2f} and"
            f" {choice.memory.reserved / GIB:.2f}"
        )
        difference = trace.allocated / max(1, estimated) - 1
        if abs(difference) > TRACE_TOLERANCE:
            text += f", {difference:+.1%} apart: the larger one is used"
        notes.append(text)
        # If the traced choice no longer fits, the next round takes, and traces, the next best. This
        # ends: a candidate is traced once, and one that fits by its trace is returned.
        candidates = [*candidates]
        # the larger of estimate and trace, then the calibration; the excess is shown as its own
        # term
        memory, excess = choice.memory, max(0, trace.allocated - estimated)
        # later plans learn from raw predictions, so the trace raises the raw one and the correction
        # is applied again
        raw_reserved = max(choice.uncorrected.reserved, trace.reserved)
        reserved = inputs.find_correction(choice.layout).corrected_reserved(
            raw_reserved, inputs.device_budget
        )
        peak_phase, terms = RUN_PHASES.get(memory.moment, "training"), memory.terms
        if excess:
            terms = terms | {"trace_says_more": excess}
        peak_bytes = (estimated + excess, max(memory.by_moment[peak_phase][1], trace.reserved))
        candidates[candidates.index(choice)] = dataclasses.replace(
            choice,
            memory=dataclasses.replace(
                memory,
                terms=terms,
                reserved=reserved,
                by_moment=memory.by_moment | {peak_phase: peak_bytes},
                # it keeps its share of the reserved
                margin=int(memory.margin * reserved / max(1, memory.reserved)),
            ),
            uncorrected=dataclasses.replace(choice.uncorrected, reserved=raw_reserved),
            is_traced=True,
        )


# --- train.compile: auto --------------------------------------------------------------------------
def compiled_config(config: RunConfig) -> RunConfig:
    """The config with compiled blocks."""
    return config.model_copy(update={"train": config.train.model_copy(update={"compile": True})})


def _resolve_compile(
    request: PlanRequest, inputs: PlanInputs, choice: Candidate, run_length: RunLength | None
) -> tuple[Candidate, PlanInputs, list[str]]:
    """The choice with compiled blocks, and what is shared by its figures, where `train.compile:
    auto` takes them; else both as they are. Beside them the reason, if auto was asked for on a
    GPU."""
    if request.config.train.compile != "auto" or not request.hardware.gpus:
        return choice, inputs, []
    compiled, reason = _decide_compile(request, inputs, choice, run_length)
    if compiled is None:
        return choice, inputs, [reason]
    config = compiled_config(request.config)
    return compiled, dataclasses.replace(inputs, config=config), [reason]


def _decide_compile(
    request: PlanRequest, inputs: PlanInputs, choice: Candidate, run_length: RunLength | None
) -> tuple[Candidate | None, str]:
    """Decide whether the choice runs with compiled blocks. Returns it so, with its own speed, or
    None; and why, with what the run saves and what compiling costs. Memory stays that of the plain
    code, an upper bound."""
    plain_text = "compile: train.compile=auto: blocks are not compiled, because "
    obstacle = _compile_auto_obstacle(request, inputs, choice, run_length)
    if obstacle is not None or run_length is None:
        return None, f"{plain_text}{obstacle}"
    config = compiled_config(request.config)
    compiled = build_candidate(
        build_plan_inputs(
            dataclasses.replace(request, config=config),
            fp32_master_weights=inputs.fp32_master_weights,
        ),
        choice.layout,
        choice.batch,
        choice.checkpointed_layers,
        loss=choice.step.loss,
        eval_rows=choice.step.eval_batch,
    )
    if compiled.step != choice.step:
        return None, f"{plain_text}rows would lie otherwise, with more memory than is planned"
    if not compiled.fits:
        return None, f"{plain_text}earlier compiled runs took more memory than there is"
    # by the two predictions alone: one of them may have been corrected by measured runs
    speedup = compiled.uncorrected.tokens_per_s / choice.uncorrected.tokens_per_s
    saved_s = run_length.steps * choice.speed.step_s * (1 - 1 / speedup)
    compile_s = estimate_compile_s(config, inputs.shape)
    kernels = plan_kernels(
        request.config,
        inputs.shape,
        choice.layout,
        on_gpu=choice.step.on_gpu,
        missing_packages=inputs.rates.missing_packages,
    )
    other_code = "plain blocks" if kernels.speed is None else "Liger's kernels"
    figures = (
        f"{run_length.steps:,} steps save {format_duration(max(0.0, saved_s))} over {other_code},"
        f" and compiling costs {format_duration(compile_s)}"
    )
    if request.resumed_compiled is None and saved_s <= MIN_COMPILE_GAIN * compile_s:
        return None, f"{plain_text}{figures}, which is worth it from {MIN_COMPILE_GAIN} times on"
    memory = dataclasses.replace(
        choice.memory, reserved=max(choice.memory.reserved, compiled.memory.reserved)
    )
    compiled = dataclasses.replace(
        choice,
        memory=memory,
        speed=compiled.speed,
        uncorrected=dataclasses.replace(
            choice.uncorrected,
            tokens_per_s=compiled.uncorrected.tokens_per_s,
            pass_times=compiled.uncorrected.pass_times,
        ),
    )
    return compiled, (
        f"compile: train.compile=auto: blocks are compiled: {figures}; other candidates are shown"
        f" with {other_code}"
    )


def _compile_auto_obstacle(
    request: PlanRequest, inputs: PlanInputs, choice: Candidate, run_length: RunLength | None
) -> str | None:
    config = request.config
    conflicts = compile_conflicts(config)
    if inputs.shape.vision is not None:
        return "rows with images run the class's own code"
    if config.tuning.backend != "bnb":
        return f"tuning.backend={config.tuning.backend} has its own"
    if conflicts:
        return f"{' and '.join(conflicts)} was asked for"
    if not choice.fits:
        return "nothing fits"
    if request.resumed_compiled is False:
        return "those of the run that is resumed were not"
    if not inputs.rates.is_known:
        return "the speed of this GPU is not known"
    if run_length is None:
        return "the number of steps is not known"
    return compile_obstacle(choice.layout) or request.inductor_obstacle


def _masked_required_bytes(inputs: PlanInputs, choice: Candidate) -> int | None:
    step = choice.step
    # by tokens, several short rows share a micro-batch of one full row; a packed row is not padded
    # to others
    batch_rows = max(1 + inputs.cuts_by_tokens, step.eval_batch)
    if not inputs.packed:
        batch_rows = max(batch_rows, step.micro_batch)
    if not step.varlen and (
        step.masks or not is_padded(inputs.config, choice.layout, rows=batch_rows)
    ):
        return None
    masked_candidate = build_candidate(
        inputs,
        choice.layout,
        choice.batch,
        choice.checkpointed_layers,
        loss=step.loss,
        eval_rows=step.eval_batch,
        keeps_masks=True,
    )
    # a trace may have raised it above its own estimate
    return max(masked_candidate.memory.required, choice.memory.required)
