"""Decisions of the plan and the launch on random inputs, each against its rule written again in another way."""

import dataclasses
import functools
import itertools
import json
import math

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sft_play.config.load import config_from_text
from sft_play.config.schema import TrainConfig
from sft_play.errors import ConfigError
from sft_play.launch.planning import plan_run
from sft_play.launch.torchrun import TORCHRUN_MODULE, RankInfo, read_rank_info, torchrun_command
from sft_play.machine.gpu import Gpu
from sft_play.machine.hardware import Hardware
from sft_play.machine.network import NodeSetup
from sft_play.models.config_json import load_model_shape
from sft_play.planner import candidates as weighing
from sft_play.planner.batching import BatchPlan, RowTokens, batch_splits
from sft_play.planner.candidates import Candidate, MemoryBudget, choose_candidate, evaluate_candidates
from sft_play.planner.decide import PlanRequest, build_plan_inputs, make_plan
from sft_play.planner.layout import LAYOUT_NAMES, LAYOUT_PREFERENCE, Layout, PreviousRun, find_layouts
from sft_play.planner.memory.estimate import max_evaluation_rows
from sft_play.planner.memory.step_memory import StepMemorySimulation
from sft_play.planner.plan import RunLength, TracePrediction, device_budget_bytes

GIB = 2**30
FEW = settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
"""For whole plans, which take a tenth of a second each."""
QUICK = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def config(*lines: str, name: str = "Qwen/Qwen2.5-3B-Instruct"):
    return config_from_text("\n".join([f"model: {{name: {name}}}", *lines]), name="run.yaml")


def machine(*free_gib: float, ram: int = 512, nodes: int = 1, given: bool = True, capability=(9, 0)) -> Hardware:
    gpus = tuple(Gpu(n, "GPU", 80 * GIB, int(free * GIB), capability) for n, free in enumerate(free_gib))
    return Hardware(gpus, "CPU", 8, ram * GIB, ram * GIB, nodes=nodes, ram_given=given)


@QUICK
@given(
    effective=st.integers(1, 400), ranks=st.integers(1, 12), micro=st.one_of(st.just("auto"), st.integers(1, 24)),
    accum=st.one_of(st.just("auto"), st.integers(1, 24)),
)  # fmt: skip
def test_batches_are_all_exact_products_or_a_refusal_whose_advice_works(effective, ranks, micro, accum):
    train = TrainConfig(effective_batch_size=effective, batch_size=micro, grad_accum=accum)
    pairs = itertools.product(range(1, effective + 1), repeat=2)
    exact = {(m, a) for m, a in pairs if m * a * ranks == effective and micro in ("auto", m) and accum in ("auto", a)}
    of_one_rank = "auto" not in (micro, accum) and micro * accum == effective
    if of_one_rank and effective % ranks == 0:  # kept over several ranks by fewer rows at once, then fewer passes
        share = effective // ranks
        size = max(size for size in range(1, micro + 1) if share % size == 0)
        exact = {(size, share // size)}
    try:
        found = batch_splits(train, ranks=ranks)
    except ConfigError as error:
        assert not exact
        advice = [int(word) for word in str(error).partition("; use ")[2].replace("=", " ").split() if word.isdigit()]
        assert advice
        good = train.model_copy(update={"effective_batch_size": advice[0]})
        assert batch_splits(good, ranks=ranks)
        return
    assert [(plan.micro_batch, plan.grad_accum) for plan in found] == sorted(exact)
    assert all(plan.effective_batch == effective and plan.ranks == ranks for plan in found)


@functools.cache
def real_candidates() -> tuple[Candidate, ...]:
    run = config("tuning: {mode: lora}")
    shape = load_model_shape("Qwen/Qwen2.5-3B-Instruct")
    job = build_plan_inputs(PlanRequest(run, shape, machine(40, 40)))
    return tuple(evaluate_candidates(job, find_layouts(run, shape, machine(40, 40))[0]))


@st.composite
def candidates(draw) -> list[Candidate]:
    """Candidates of random layout, size, speed and verdict."""
    made = []
    for base in draw(st.lists(st.sampled_from(real_candidates()), min_size=1, max_size=8)):
        speed = draw(st.sampled_from([90.0, 96.9, 97.1, 98.0, 100.0, 150.0]))
        memory = dataclasses.replace(base.memory, reserved=draw(st.integers(1, 4)) * GIB)
        budget = MemoryBudget(memory.required - draw(st.sampled_from([0, 1, memory.required // 2])), None)
        scaled = base.speed.scaled(base.speed.tokens_per_s / speed)
        made.append(dataclasses.replace(base, budget=budget, memory=memory, speed=scaled))
    return made


def rank_of(candidate: Candidate) -> tuple[int, bool, int, int]:
    """Simple layouts first, then all or no layers checkpointed, then small micro-batches, then little memory."""
    mixed = 0 < candidate.checkpointed_layers < candidate.layers
    order = list(LAYOUT_PREFERENCE).index(candidate.layout.name)
    return order, mixed, candidate.batch.micro_batch, candidate.memory.required


@QUICK
@given(candidates())
def test_the_choice_is_the_simplest_of_the_fast_ones_that_fit_and_offload_only_where_nothing_else_does(found):
    chosen = choose_candidate(found)
    fitting = [one for one in found if one.fits]
    without_offload = [one for one in fitting if not one.layout.name.endswith("_offload")]
    pool = without_offload or fitting
    if not pool:
        assert chosen is None
        return
    resident = [one for one in pool if one.layout.name != "streamed"]
    if resident and max(one.speed.tokens_per_s for one in resident) * 1.25 > max(
        one.speed.tokens_per_s for one in pool
    ):
        pool = resident  # a base in RAM has to be clearly faster
    best = max(one.speed.tokens_per_s for one in pool)
    equal = [one for one in pool if one.speed.tokens_per_s >= 0.97 * best]
    assert chosen in equal
    assert rank_of(chosen) == min(rank_of(one) for one in equal)


@QUICK
@given(candidates(), st.integers(0, 2), st.one_of(st.none(), st.integers(1, 8)))
def test_a_candidate_lacks_each_memory_that_is_less_than_it_needs_and_the_nearest_needs_least(made, more, host_gib):
    found = []
    for one in made:
        budget = MemoryBudget(one.memory.required + more - 1, None if host_gib is None else host_gib * GIB)
        one = dataclasses.replace(one, budget=budget, host_required=one.batch.micro_batch * GIB)
        lacking = {"GPU memory"} if more == 0 else set()
        lacking |= {"RAM"} if host_gib is not None and one.batch.micro_batch > host_gib else set()
        ratios = [one.memory.required / budget.device] + ([one.batch.micro_batch / host_gib] if host_gib else [])
        assert (set(one.insufficient_memory), one.fits) == (lacking, not lacking)
        assert one.budget_ratio == pytest.approx(max(ratios))
        on_cpu = dataclasses.replace(one, step=dataclasses.replace(one.step, on_gpu=False))
        assert set(on_cpu.insufficient_memory) <= {"RAM"}
        found.append(one)
    assert weighing.fastest_speed(found) == max([one.speed.tokens_per_s for one in found if one.fits], default=0.0)
    assert weighing.closest_to_fitting(found).budget_ratio == min(one.budget_ratio for one in found)


@QUICK
@given(free=st.lists(st.floats(1, 79), min_size=1, max_size=6), ram=st.integers(1, 64), ranks=st.integers(1, 5))
def test_the_budget_is_what_the_fullest_gpu_has_free_or_a_cpu_ranks_share_of_ram(free, ram, ranks):
    assert device_budget_bytes(machine(*free)) == int(min(free) * GIB)
    named_only = tuple(Gpu(n, "GPU", int(size * GIB), None, None) for n, size in enumerate(free))
    assert device_budget_bytes(Hardware(named_only, "CPU", 8, GIB, GIB)) == int(min(free) * GIB)
    on_cpu = Hardware((), "CPU", 8, 2 * ram * GIB, ram * GIB, cpu_ranks=ranks)
    assert device_budget_bytes(on_cpu) == ram * GIB // ranks


@FEW
@given(wish=st.integers(8, 100_000), eval_wish=st.one_of(st.just("auto"), st.integers(1, 64)))
def test_rows_are_no_longer_than_the_positions_and_evaluation_takes_what_was_asked(wish, eval_wish):
    shape = load_model_shape("Qwen/Qwen2.5-3B-Instruct")
    run = config("tuning: {mode: qlora}", f"eval: {{batch_size: {eval_wish}}}")
    run = run.model_copy(update={"model": run.model.model_copy(update={"max_seq_len": wish})})
    plan = make_plan(PlanRequest(run, shape, machine(79)))
    assert plan.max_seq_len == (wish if wish < shape.max_positions else shape.max_positions)
    # test_evaluation.py counts it
    most = max_evaluation_rows(StepMemorySimulation(run, shape, plan.precision, plan.choice.step))
    assert plan.eval_batch == (most if eval_wish == "auto" else eval_wish)
    assert (plan.choice.step.eval_batch, plan.choice.step.seq_len) == (plan.eval_batch, plan.max_seq_len)
    unjudged = make_plan(PlanRequest(run, shape, machine(79), has_eval=False))
    assert unjudged.choice.step.eval_batch == 0


@FEW
@given(allocated=st.floats(0.3, 3.0), reserved=st.floats(0.3, 3.0))
def test_of_closed_form_and_trace_the_larger_counts(allocated, reserved):
    run, shape, hardware = config("tuning: {mode: lora}"), load_model_shape("Qwen/Qwen2.5-3B-Instruct"), machine(79)
    plain = make_plan(PlanRequest(run, shape, hardware))
    asked = []

    def confirm(candidate: Candidate) -> TracePrediction:
        asked.append(candidate)
        memory = candidate.memory
        return TracePrediction(int(memory.allocated * allocated), int(memory.reserved * reserved))

    traced = make_plan(PlanRequest(run, shape, hardware), trace_candidate=confirm)
    first, last = asked[0].memory, asked[-1].memory
    assert first.allocated == plain.memory.allocated
    assert traced.choice.is_traced
    assert traced.memory.allocated == pytest.approx(last.allocated * max(1.0, allocated), abs=2)
    assert traced.memory.reserved == pytest.approx(last.reserved * max(1.0, reserved), abs=2)
    assert traced.memory.margin == pytest.approx(last.margin * max(1.0, reserved), abs=2)
    assert traced.fits == (traced.memory.required <= traced.budget_bytes)
    said = [reason for reason in traced.reasons if reason.startswith("traced: ")]
    assert (len(said), "the larger one is used" in said[-1]) == (len(asked), abs(allocated - 1) > 0.03)


@QUICK
@given(
    per_node=st.integers(1, 8), nodes=st.integers(1, 4),
    mode=st.sampled_from(["full", "lora", "qlora", "lora, lora: {use_dora: true}"]),
    optim=st.sampled_from(["adamw_torch_fused", "adamw_torch", "paged_adamw_8bit", "adafactor"]),
)  # fmt: skip
def test_every_layout_is_possible_or_refused_and_uses_all_gpus(per_node, nodes, mode, optim):
    run = config(f"tuning: {{mode: {mode}}}", f"train: {{optim: {optim}}}")
    count = per_node * nodes
    hardware = machine(*[40.0] * count, nodes=nodes)
    possible, refused = find_layouts(run, load_model_shape("Qwen/Qwen2.5-3B-Instruct"), hardware)
    names = [layout.name for layout in possible]
    assert all(layout.ranks == count for layout in possible)
    assert not set(names) & {item.name for item in refused}
    assert ("single" in names, "ddp" in names) == (count == 1, count > 1)
    sharded = count > 1 and optim != "paged_adamw_8bit"
    assert ("fsdp" in names, "fsdp_hybrid" in names) == (sharded, sharded and per_node > 1 and nodes > 1)
    assert ("zero2" in names) == (sharded and optim != "adafactor")
    assert ("zero2_offload" in names) == optim.startswith("adamw_torch")
    for layout in possible:
        if layout.name == "fsdp_hybrid":
            assert layout.shard == per_node
        elif layout.name in ("single", "ddp", "streamed"):
            assert layout.shard == 1
        elif layout.tensor_parallel == 1:
            assert layout.shard == count
        if layout.tensor_parallel > 1:
            assert (mode in ("full", "lora"), count % layout.tensor_parallel) == (True, 0)
            assert layout.tensor_parallel <= per_node


@pytest.mark.parametrize("name", LAYOUT_NAMES)
def test_a_layouts_properties_follow_from_its_name(name):
    layout, is_zero = Layout(name, 4, 4), name.startswith("zero")
    is_fsdp, stage = name.startswith("fsdp") or name == "tp", int(name[4]) if is_zero else 0
    assert (layout.is_zero, layout.is_fsdp, layout.shards_params) == (is_zero, is_fsdp, is_fsdp or stage == 3)
    assert layout.shards_gradients == (layout.shards_params or stage == 2)
    assert layout.shards_states == (layout.shards_gradients or stage == 1)
    assert layout.offloads_states == name.endswith("offload")
    assert layout.offloads_params == (name == "zero3_offload")


@QUICK
@given(before=st.sampled_from(LAYOUT_NAMES), after=st.sampled_from(LAYOUT_NAMES), ranks=st.integers(1, 4))
def test_only_deepspeeds_checkpoints_are_bound_to_their_layout(before, after, ranks):
    because = PreviousRun(before, BatchPlan(1, 1, ranks)).resume_obstacle(after)
    assert (because is None) == (before == after or not (before.startswith("zero") or after.startswith("zero")))


@QUICK
@given(ram=st.integers(1, 300), ranks=st.sampled_from([1, 2, 4]), given_ram=st.booleans())
def test_offload_fits_only_into_ram_that_holds_all_ranks_of_a_node(ram, ranks, given_ram):
    run, shape = config("tuning: {mode: full}"), load_model_shape("Qwen/Qwen2.5-3B-Instruct")
    hardware = machine(*[70.0] * ranks, ram=ram, given=given_ram)
    job = build_plan_inputs(PlanRequest(run, shape, hardware))
    for candidate in weighing.lowest_memory_candidates(job, find_layouts(run, shape, hardware)[0]):
        memory, need = candidate.memory, candidate.host_required
        assert need == (memory.host_bytes - memory.host_save_bytes) * ranks + memory.host_save_bytes
        enough = not given_ram or need <= ram * GIB
        assert candidate.fits == (enough and candidate.memory.required <= job.device_budget)


@QUICK
@given(wish=st.sampled_from(["auto", True, False, 1, 5, 36, 99]), free=st.integers(4, 70))
def test_checkpointing_is_what_was_given_or_weighed_both_ways(wish, free):
    text = str(wish).lower()
    run = config("tuning: {mode: lora}", f"train: {{gradient_checkpointing: {text}}}")
    shape = load_model_shape("Qwen/Qwen2.5-3B-Instruct")
    hardware = machine(free)
    job = build_plan_inputs(PlanRequest(run, shape, hardware))
    found = evaluate_candidates(job, find_layouts(run, shape, hardware)[0][:1])
    counts = {candidate.checkpointed_layers for candidate in found}
    layers = shape.num_layers
    if wish == "auto":
        assert {0, layers} <= counts
        for micro in {candidate.batch.micro_batch for candidate in found}:
            mine = {one.checkpointed_layers: one for one in found if one.batch.micro_batch == micro}
            between = {layers // 4, layers // 2, layers * 3 // 4}
            assert set(mine) == {0, layers} | (between if mine[layers].fits and not mine[0].fits else set())
    else:
        assert counts == {layers if wish is True else 0 if wish is False else min(wish, layers)}
    for one in found:
        expected = True if one.checkpointed_layers == layers else False if one.checkpointed_layers == 0 else "selective"
        assert one.checkpointing == expected
    sizes = sorted({one.batch.micro_batch for one in found})
    for first, second in itertools.pairwise(sizes):  # larger ones are weighed unless two in a row do not fit
        fits = [any(one.fits for one in found if one.batch.micro_batch == size) for size in (first, second)]
        assert any(fits) or second == sizes[-1]
    if sizes[-1] != max(split.micro_batch for split in batch_splits(run.train, ranks=1)):
        assert not any(one.fits for one in found if one.batch.micro_batch in sizes[-2:])
        assert len(sizes) > 1


def test_a_class_that_cannot_checkpoint_is_planned_without_and_refused_with_it():
    shape = dataclasses.replace(load_model_shape("Qwen/Qwen2.5-0.5B"), can_checkpoint=False)
    for wish in ("auto", "false"):
        run = config(f"train: {{gradient_checkpointing: {wish}}}")
        assert {one.checkpointed_layers for one in make_plan(PlanRequest(run, shape, machine(70))).candidates} == {0}
    for wish in ("true", "3", "offload"):
        with pytest.raises(ConfigError, match="has no activation checkpointing"):
            make_plan(PlanRequest(config(f"train: {{gradient_checkpointing: {wish}}}"), shape, machine(70)))


@pytest.mark.parametrize(("words", "counted", "length"), [
    (["train.epochs=2"], True, RunLength(8, 10_300)),  # 4 steps of 32 rows an epoch
    (["train.max_steps=2"], True, RunLength(2, 2_575)),
    (["train.epochs=0.1"], True, RunLength(1, 1_288)),
    (["train.epochs=1"], False, RunLength(2, 4_096)),  # by its characters, and what max_seq_len leaves of each row
    (["train.epochs=1", "data.packing=best_fit"], False, RunLength(4, 6_400)),  # in full packs
    (["train.epochs=1", "data.sources=[{path: ROWS, max_rows: 32}]"], False, RunLength(1, 2_048)),
    (["train.max_steps=3", "data.train_path=/none"], False, RunLength(3, None)),
    (["train.epochs=1", "data.train_path=/none"], False, None),
])  # fmt: skip
def test_the_length_of_a_run_follows_its_rows_or_its_files(tmp_path, words, counted, length):
    row = {"question": "q" * 200, "answer": "a" * 200}  # 100 tokens
    (tmp_path / "rows.jsonl").write_text((json.dumps(row) + "\n") * 64)
    words = ["model.max_seq_len=64", *(word.replace("ROWS", f"{tmp_path}/rows.jsonl") for word in words)]
    if "data.sources" not in words[-1]:
        words = [f"data.train_path={tmp_path}/rows.jsonl", "data.val_path=null", *words]
    run = config_from_text("model: {name: Qwen/Qwen2.5-0.5B}", name="x", overrides=words)
    rows = RowTokens(mean=50.0, p95=60, longest=60, rows=103, limit=64, sample=(50,) * 103)
    assert plan_run(run, machine(70), rows=rows if counted else None).run_length == length


@QUICK
@given(
    count=st.integers(1, 3), data=st.data(), timeout_s=st.one_of(st.none(), st.floats(0.1, 9999)),
    threads=st.one_of(st.none(), st.integers(1, 8)),
)  # fmt: skip
def test_the_launch_says_who_meets_where_and_leaves_set_variables_alone(count, data, timeout_s, threads):
    rank = data.draw(st.integers(0, count - 1))
    nodes = NodeSetup(count, rank, "10.0.0.1", 29_501) if count > 1 else NodeSetup()
    waits = {
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": str(max(1, math.ceil(timeout_s or 0))),  # whole seconds
    }
    already = data.draw(st.sets(st.sampled_from(sorted(waits))))
    launch = torchrun_command(
        ["train"], processes_per_node=5, nodes=nodes, threads_per_rank=threads, nccl_timeout_s=timeout_s,
        present_environment=dict.fromkeys(already, "mine"), python="python",
    )  # fmt: skip
    meet = ["--standalone"]
    if count > 1:
        meet = ["--nnodes", str(count), "--node-rank", str(rank), "--master-addr", "10.0.0.1", "--master-port", "29501"]
    words = ["python", "-m", TORCHRUN_MODULE, *meet, "--nproc-per-node", "5", "--module", "sft_play", "train"]
    assert (list(launch.argv), launch.port) == (words, 29_501 if count > 1 and rank == 0 else None)
    expected = {} if threads is None else {"OMP_NUM_THREADS": str(threads)}
    if timeout_s is not None:
        expected |= {name: waits[name] for name in waits if name not in already}
    assert launch.environment == expected


@QUICK
@given(
    rank=st.integers(-1, 6), world=st.integers(0, 6), local=st.integers(-1, 6), on_node=st.integers(0, 6),
    nodes=st.one_of(st.none(), st.integers(1, 3)),
)  # fmt: skip
def test_a_rank_knows_its_place_or_the_contradiction_is_named(rank, world, local, on_node, nodes):
    environment = {"RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": local, "LOCAL_WORLD_SIZE": on_node}
    environment |= {"GROUP_WORLD_SIZE": nodes} if nodes is not None else {}
    per_node = nodes in (None, world / on_node if on_node else -1)
    possible = 0 <= rank < world and 0 <= local < max(1, on_node) and per_node
    texts = {name: str(value) for name, value in environment.items()}
    if not possible:
        with pytest.raises(ConfigError):
            read_rank_info(texts)
        return
    place = read_rank_info(texts)
    assert (place, place.is_first) == (RankInfo(rank, local, world, on_node), rank == 0)
    assert place.node_count == max(1, world // max(1, on_node))


def test_no_launcher_means_no_rank_and_half_a_launcher_is_an_error():
    assert read_rank_info({}) is None
    assert read_rank_info({"LOCAL_RANK": "1"}) is None
    for half in ({"RANK": "0"}, {"WORLD_SIZE": "1"}, {"RANK": "0", "LOCAL_RANK": "0"}):
        with pytest.raises(ConfigError, match="a launcher sets all"):
            read_rank_info(half)
    with pytest.raises(ConfigError, match="RANK=x is not a whole number"):
        read_rank_info({"RANK": "x", "WORLD_SIZE": "2", "LOCAL_RANK": "0"})
    assert read_rank_info({"RANK": "3", "WORLD_SIZE": "4"}) is None  # a node's number: tests/test_ways_in.py
    assert read_rank_info({"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}) == RankInfo(3, 1, 4, 4)
