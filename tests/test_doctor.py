"""The doctor: each check on facts made by hand, nodes that meet on loopback, and a real all-reduce of CPU ranks."""

import contextlib
import dataclasses
import functools
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import psutil
import pytest

from sft_play.answers import Finding, fail_finding, pass_finding, skip_finding, warn_finding
from sft_play.config.load import config_from_text, load_config
from sft_play.diagnose import doctor
from sft_play.diagnose.doctor import KNOWN_BAD_PAIRS, DiskSpace, SystemFacts, find_known_bad, matches_conditions
from sft_play.errors import ConfigError
from sft_play.launch import nodes
from sft_play.launch.request import LaunchOptions
from sft_play.machine.gpu import Gpu
from sft_play.machine.hardware import Hardware, parse_hardware
from sft_play.machine.network import NodeSetup
from sft_play.models.config_json import load_model_shape, parse_model_shape
from sft_play.planner.advice import make_advised_plan
from sft_play.planner.decide import PlanRequest
from sft_play.planner.explain import slow_code_reasons
from sft_play.planner.plan import OTHER_BYTES, RunLength
from sft_play.runs.folder import read_json
from tests import warm
from tests.conftest import ROOT, write_run
from tests.processes import free_port, is_alive, wait_for

GIB = 2**30
MIB = 2**20
CPU = Hardware((), "CPU", 2, 8 * GIB, 8 * GIB, cpu_ranks=2)
WITHOUT_GPUS = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}


def gpu(index: int = 0, name: str = "NVIDIA A100-SXM4-80GB", size: int = 80 * GIB, **changes: Any) -> Gpu:
    return Gpu(index, name, size, size, (8, 0), **changes)


def machine(*of: Gpu, **changes: Any) -> Hardware:
    return Hardware(of, "CPU", 16, 256 * GIB, 256 * GIB, **changes)


def verdicts(findings: list[Finding]) -> list[str]:
    return [finding.verdict for finding in findings]


def test_the_report_lists_what_fails_and_how_to_mend_it():
    failed = fail_finding("disk", "full", "free space", "https://example.org/thread")
    others = (warn_finding("IOMMU", "on", "iommu=pt"), skip_finding("bandwidth", "one rank"))
    report = doctor.DoctorReport((pass_finding("shared memory", "12.0 GiB at /dev/shm"), failed, *others), 3.2)
    assert (report.ok, doctor.DoctorReport(others).ok) == (False, True)  # a warning fails nothing
    lines = report.lines()
    assert [line.strip() for line in lines[2:4]] == ["do: free space", "see https://example.org/thread"]
    assert lines[-1] == "1 FAIL: disk; 1 PASS, 1 WARN, 1 SKIP (3 s)"
    disk = json.loads(json.dumps(report.as_json()))["findings"][1]
    assert (disk["name"], disk["verdict"], disk["remedy"]) == ("disk", "FAIL", "free space")
    with pytest.raises(AssertionError):  # a failure says what to do
        fail_finding("disk", "full", "")


def test_packages_outside_the_projects_range_or_missing_fail():
    wanted = ("torch>=2.11", "trl>=1.16,<2", "jax>=1; extra == 'flax'", "pywin32; sys_platform == 'win32'")
    assert doctor.check_packages({"torch": "2.13.0+cu130", "trl": "1.16.0"}, wanted).verdict == "PASS"
    found = doctor.check_packages({"torch": "2.7.1+cu128"}, wanted)
    assert (found.verdict, found.found) == ("FAIL", "torch is 2.7.1+cu128, needed >=2.11; trl<2,>=1.16 is missing")


def test_what_this_machine_has_is_read(monkeypatch):
    around = doctor.read_system_facts(CPU)
    assert around.versions["pytest"] == pytest.__version__
    assert any(text.startswith("torch") for text in around.requirements)
    version = Path(str(importlib.util.find_spec("torch").origin)).parent / "version.py"  # type: ignore[union-attr]
    built = re.search(r"^cuda.*= '?([^'\n]*)", version.read_text(), re.MULTILINE)
    assert (around.torch_cuda or "None") == built[1]  # type: ignore[index]
    driver = SimpleNamespace(nvmlInit=int, nvmlShutdown=int, nvmlSystemGetDriverVersion=lambda: "580.82.07",
                             nvmlSystemGetCudaDriverVersion_v2=lambda: 13010)  # fmt: skip
    for pynvml, told in ((driver, ("580.82.07", (13, 1))), (None, (None, None))):
        monkeypatch.setitem(sys.modules, "pynvml", pynvml)
        around = doctor.read_system_facts(machine(gpu(0)))
        assert (around.driver, around.driver_cuda) == told


def known(*, names: tuple[str, ...] = (), capability: tuple[int, int] = (8, 0), **given: Any) -> list[Finding]:
    """The findings on a machine of these GPUs; what is neither the run's nor the GPUs' was read of it."""
    run = {name: given.pop(name) for name in ("rank_count", "node_count", "layout", "packages") if name in given}
    cards = tuple(Gpu(index, name, GIB, GIB, capability) for index, name in enumerate(names))
    return find_known_bad(SystemFacts(hardware=machine(*cards), **given), **run)


def of(**versions: str) -> dict[str, Any]:
    return {"versions": versions}


TWO_4090 = {"names": ("NVIDIA GeForce RTX 4090",) * 2, "capability": (8, 9), "rank_count": 2}
TWO_5090 = {"names": ("NVIDIA GeForce RTX 5090",) * 2, "capability": (12, 0), "rank_count": 2}
OVER_NODES = {"rank_count": 8, "node_count": 2, "cpu_architecture": "aarch64"}
GB200 = {"names": ("NVIDIA GB200",) * 4, "capability": (10, 0), **OVER_NODES}
V100 = {"names": ("Tesla V100-SXM2-16GB",), "capability": (7, 0)}
A100 = {"names": ("NVIDIA A100-SXM4-80GB",)}
FLA = "flash-linear-attention"
B200 = {"names": ("NVIDIA B200",), "capability": (10, 0), "packages": (FLA,), "versions": {FLA: "0.5.2"}}
H100_FLA = {"names": ("NVIDIA H100 80GB HBM3",), "capability": (9, 0), "packages": (FLA,),
            "versions": {FLA: "0.6.0", "triton": "3.6.0"}}  # fmt: skip


@pytest.mark.parametrize(("words", "bad", "good"), [
    ("driver runs CUDA 12.8", {**A100, "driver_cuda": (12, 8), "torch_cuda": "13.0"}, {"driver_cuda": (13, 0)}),
    ("no kernels for GPUs older than Turing", {**V100, "torch_cuda": "13.0"}, {"torch_cuda": "12.6"}),
    ("no kernels for GPUs older", {**V100, "torch_cuda": "12.8", **of(torch="2.11.0")}, of(torch="2.10.0")),
    ("accelerate refuses to start", {**TWO_4090, "driver": "535.183.01"}, {"driver": "550.40.07"}),
    ("seen to hang with P2P under 560", {**TWO_4090, "driver": "560.35.03"}, {"driver": "570.86.10"}),
    ("every collective fails", {**TWO_5090, "nccl": "2.25.1"}, {"nccl": "2.29.3"}),
    ("512 KiB and more", {**TWO_5090, "nccl": "2.27.5"}, {"nccl": "2.28.9"}),
    ("proxy queue loses slots", {**GB200, "nccl": "2.28.9"}, {"nccl": "2.29.3"}),
    ("a regression of 2.29.2", {**TWO_4090, "nccl": "2.29.2"}, {"nccl": "2.29.3"}),
    ("wrong gradients under ZeRO-2", {"layout": "zero2_offload", **of(deepspeed="0.18.2")}, of(deepspeed="0.18.3")),
    (f"{FLA} 0.5.2: on Blackwell", B200, {"versions": {FLA: "0.6.0"}}),
    ("first backward pass on Hopper under Triton 3.6.0", H100_FLA, {"versions": {FLA: "0.6.0", "triton": "3.7.1"}}),
    (f"{FLA} 0.5.2: on Blackwell", {**B200, "capability": (12, 1)}, {"versions": {}}),
    ("5.24.0 asks for PEFT 0.22", of(transformers="5.24.0", peft="0.21.2"), of(transformers="5.24.0", peft="0.22.0")),
    ("hang over shared memory", {"rank_count": 2, "kernel": "5.4.0-150-generic"}, {"kernel": "5.5.0"}),
])  # fmt: skip
def test_a_known_bad_pair_is_found_and_its_neighbour_is_not(words, bad, good):
    (found,) = [item for item in known(**bad) if words in item.found]
    assert (found.verdict in ("FAIL", "WARN"), bool(found.sources)) == (True, True)
    assert words not in " ".join(item.found for item in known(**{**bad, **good}))


@pytest.mark.parametrize(("bad", "good"), [
    ({**V100, "torch_cuda": "13.0"}, {"capability": (7, 5)}),
    ({**TWO_4090, "driver": "560.35.03"}, {"rank_count": 1}),
    ({**GB200, "nccl": "2.28.9"}, {"cpu_architecture": "x86_64"}),
    ({"layout": "zero2", **of(deepspeed="0.17.6")}, {"layout": "zero3"}), (H100_FLA, {"packages": ("mamba-ssm",)}),
    (H100_FLA, {"capability": (8, 0)}), (B200, {"packages": ("causal-conv1d",)}),
    ({**B200, "versions": {FLA: "0.5.0"}}, {"capability": (9, 0)}),
    (of(transformers="5.25.1", peft="0.20.1"), of(transformers="5.23.0", peft="0.20.1")),
])  # fmt: skip
def test_other_machines_and_runs_of_a_bad_version_are_not_accused(bad, good):
    assert verdicts(known(**bad)) != ["PASS"]
    assert verdicts(known(**{**bad, **good})) == ["PASS"]


def test_every_known_pair_is_tested_says_what_to_do_and_accuses_no_unknown_version():
    texts = Path(__file__).read_text(encoding="utf-8")
    for entry in KNOWN_BAD_PAIRS:  # the table above quotes a few words of each
        assert entry["remedy"]
        assert all(url.startswith("https://github.com/") or "docs.nvidia.com" in url for url in entry["sources"])
        literal = [part for part in re.split(r"\{\w+\}", entry["what"]) if len(part) > 12]
        assert any(part[i : i + 14] in texts for part in literal for i in range(len(part) - 14)), entry["what"]
    assert verdicts(known(**TWO_5090)) == verdicts(known()) == ["PASS"]


def test_conditions_of_the_table():
    for wanted, fact, met in (
        (">=580.82.7,<580.82.8", "580.82.07", True), ("<5", "6.8.0-45-generic", False), (">=2.13", "2.13.0+cu1", True),
        (">1", 1, False), (["a"], "a", True), (True, False, False), ("<5", None, False), (False, None, False),
    ):  # fmt: skip
        assert matches_conditions([{"fact": wanted}, {"fact": ["other"]}], {"fact": fact}) is met
        assert not matches_conditions({"fact": wanted, "more": True}, {"fact": fact, "more": None})


def test_shared_memory_has_room_for_nccl():
    sizes = ((64 * MIB, 1, "PASS"), (512 * MIB, 2, "WARN"), (8 * GIB, 8, "PASS"), (None, 2, "SKIP"))
    for free, gpus, verdict in ((64 * MIB, 2, "FAIL"), *sizes):
        space = None if free is None else DiskSpace(free, free)
        found = doctor.check_shared_memory(space, gpus_per_node=gpus)
        assert (found.verdict, "--shm-size" in str(found.remedy)) == (verdict, verdict in ("FAIL", "WARN"))


MIXED = machine(gpu(0), gpu(1), gpu(2, "NVIDIA L4", 22 * GIB))
TWO_NODES = NodeSetup(2, 0, "a", 1)


@pytest.mark.parametrize(("present", "asked", "verdict", "ranks", "words"), [
    (machine(gpu(0), gpu(1)), LaunchOptions(nodes=TWO_NODES), "PASS", (2, 4), "2 x NVIDIA A100-SXM4-80GB"),
    (MIXED, LaunchOptions(gpus=(0, 1)), "PASS", (2, 2), "2 x"),
    (MIXED, LaunchOptions(), "FAIL", None, "GPU 2 is a NVIDIA L4"),
    (machine(gpu(0)), LaunchOptions(processes_per_node=2), "FAIL", None, "NPROC=2 and 1 GPUs"),
    (machine(gpu(0)), LaunchOptions(gpus=(0, 3)), "FAIL", None, "GPUS= names 3, and there are 0"),
    (CPU, LaunchOptions(gpus=(0,)), "FAIL", None, "this machine has none"),
    (CPU, LaunchOptions(nodes=TWO_NODES), "SKIP", (2, 4), "CPU ranks"),
    (CPU, LaunchOptions(processes_per_node=3), "SKIP", (3, 3), "CPU ranks"),
])  # fmt: skip
def test_the_gpus_that_are_asked_for_are_there_and_alike(present, asked, verdict, ranks, words):
    local, everywhere, found = doctor._select_gpus(present, asked)
    assert (found.verdict, words in found.found, bool(found.remedy)) == (verdict, True, verdict == "FAIL")
    assert ranks is None or (local.ranks, everywhere.ranks) == ranks


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory, tiny_llama: Path, sums: Path) -> Path:
    """A folder with a run YAML of two steps."""
    folder = tmp_path_factory.mktemp("doctor")
    train = {"effective_batch_size": 4, "batch_size": 2, "save_steps": 1}
    write_run(folder, tiny_llama, sums, train=train, eval={"steps": 0, "before_training": False})
    return folder


def planned(world: Path, hardware: Hardware, *overrides: str, only: Any = "single", steps: int | None = 2) -> Any:
    config = load_config(world / "run.yaml", overrides=overrides).config
    shape = load_model_shape(config.model.name)
    work = RunLength(steps, None) if steps else None
    request = PlanRequest(config, shape, hardware, allowed_layouts=(only,))
    return doctor.PlannedRun(config, shape, make_advised_plan(request, estimate_run_length=lambda _: work))


def written(world: Path, *overrides: str, hardware: Hardware = CPU, **options: Any) -> doctor.DiskUsage:
    found = planned(world, hardware, *overrides, **options)
    return doctor.planned_disk_usage(found.config, found.shape, found.plan)


def test_a_checkpoint_holds_weights_and_states(world, tiny_llama):
    params = load_model_shape(str(tiny_llama)).params
    full = written(world, "tuning.mode=full")
    rests = full.checkpoint_bytes - OTHER_BYTES - 12 * params  # fp32 on a CPU: weights and two states of 4 bytes
    assert 0 <= rests < MIB
    two = machine(gpu(0), gpu(1))
    zero = written(world, "tuning.mode=full", hardware=two, only="zero2")
    # bf16 weights of DeepSpeed's and of the trainer's, fp32 masters, two fp32 states
    assert zero.checkpoint_bytes - OTHER_BYTES == (2 + 2 + 4 + 8) * params
    assert zero.weights_bytes - OTHER_BYTES == 2 * params
    sharded = written(world, "tuning.mode=full", hardware=two, only="fsdp")
    assert abs(sharded.checkpoint_bytes - OTHER_BYTES - 12 * params) < 64  # uneven parts are padded
    # at once there are those kept, and the one being written
    for steps, kept, count in ((2, 2, 2), (100, 2, 3), (100, 5, 6), (100, "null", 100), (None, "null", None)):
        assert written(world, f"train.save_total_limit={kept}", steps=steps).max_checkpoints == count


@pytest.mark.parametrize(("kept", "free", "changes", "verdict"), [
    (3, 32 * GIB, {}, "PASS"), (3, 31 * GIB, {}, "FAIL"), (None, 100 * GIB, {}, "WARN"), (None, GIB, {}, "FAIL"),
    (3, 99 * GIB, {"is_writable": False}, "FAIL"), (3, 0, {"space": None}, "SKIP"),
])  # fmt: skip
def test_a_disk_that_cannot_hold_the_checkpoints_fails_with_the_numbers(kept, free, changes, verdict):
    settings = {"disk_folder": Path("/data"), "space": DiskSpace(free, free), "is_writable": True, **changes}
    usage = doctor.DiskUsage(10 * GIB, 2 * GIB, kept)
    found = doctor.check_disk(usage, folder=Path("/data/outputs"), **settings)
    assert found.verdict == verdict
    if free == 31 * GIB:
        assert "32.0 GiB; 31.0 GiB are free at /data" in found.found


def test_weights_that_must_be_fetched_need_room(tiny_llama):
    shape = load_model_shape(str(tiny_llama))
    folder = {"disk_folder": Path("/cache"), "space": DiskSpace(shape.params, shape.params)}
    for is_cached, verdict in ((False, "FAIL"), (True, "SKIP")):
        assert doctor.check_download(shape, is_cached=is_cached, **folder).verdict == verdict


def note(rank: int, stage: str = "done", **changes: Any) -> dict[str, Any]:
    return {"rank": rank, "stage": stage, **changes}


def outcome(*notes: dict[str, Any], world: int = 2, seconds: float | None = 0.001, **changes: Any) -> Any:
    result = {"bytes": 256 * MIB, "seconds": seconds} if seconds else None
    by_rank = {**{rank: {} for rank in range(world)}, **{item["rank"]: item for item in notes}}
    return doctor.AllReduceOutcome(world, by_rank, result, limit_s=40.0, **changes)


AROUND = SystemFacts(machine(gpu(0), gpu(1), link_bytes_per_s=300e9), driver="580.82.07")
ON_CPU = SystemFacts(CPU)
PCIE = dataclasses.replace(AROUND, hardware=machine(gpu(0), gpu(1), link_bytes_per_s=32e9))
UNLINKED = dataclasses.replace(AROUND, hardware=machine(gpu(0), gpu(1)))


@pytest.mark.parametrize(("around", "nodes", "seconds", "verdict", "words"), [
    (AROUND, NodeSetup(), 0.001, "PASS", "right over NCCL on 2 ranks; 268.44 GB/s a rank, 89% of the 300 GB/s"),
    (AROUND, NodeSetup(), 0.01, "WARN", "9% of the 300 GB/s"),
    (PCIE, NodeSetup(), 0.05, "PASS", "17% of the 32 GB/s"), (PCIE, NodeSetup(), 0.09, "WARN", "9% of the 32 GB/s"),
    (ON_CPU, NodeSetup(), 0.001, "PASS", "right over gloo on 2 ranks; 268.44 GB/s a rank"),
    (AROUND, TWO_NODES, 0.001, "PASS", "; 268.44 GB/s a rank"),
    (UNLINKED, NodeSetup(), 0.001, "PASS", "; 268.44 GB/s a rank"),
])  # fmt: skip
def test_a_right_sum_passes_and_a_slow_link_is_a_warning(around, nodes, seconds, verdict, words):
    found = doctor.judge_all_reduce(outcome(note(0), note(1), seconds=seconds), around, nodes)
    assert (found.verdict, words in found.found) == (verdict, True), found.found
    assert ("%" in found.found) == ("%" in words)
    # 8 ranks, 256 MiB in 1 ms: each byte crosses 2 x 7/8 links
    assert outcome(world=8).bytes_per_s == pytest.approx(256 * MIB / 0.001 * 1.75)


FAILED = note(1, "failed", error="ValueError: no kernel image")
LOST = note(0, "failed", error="RuntimeError: Connection closed by peer")
TIMED_OUT = note(0, "failed", error="DistBackendError: timed out after 35 s")


@pytest.mark.parametrize(("notes", "options", "around", "words", "remedy"), [
    ((note(0), note(1, wrong=5)), {}, AROUND, "the sum is wrong: rank 1 has 5 wrong", "NCCL_P2P_DISABLE=1"),
    ((note(0, "joined"), note(1, "device")), {"world": 3, "exit_code": None}, AROUND,
     "rank 0 is waiting in the first all-reduce; rank 1 is waiting to join the others; rank 2 never started",
     "NCCL_P2P_DISABLE=1"),
    ((TIMED_OUT, note(1, "started")), {}, ON_CPU, "rank 0 gave up; rank 1 has not reached its device", "a core"),
    ((LOST, FAILED), {}, AROUND, "rank 1: ValueError: no kernel image", "NCCL_DEBUG=INFO"),
])  # fmt: skip
def test_a_sum_that_is_wrong_or_hangs_names_who_waits_for_whom(notes, options, around, words, remedy):
    seconds = 0.001 if "wrong" in words else None
    found = doctor.judge_all_reduce(outcome(*notes, seconds=seconds, **options), around, NodeSetup())
    assert (found.verdict, words in found.found) == ("FAIL", True), found.found
    assert remedy in str(found.remedy)


def test_the_ranks_are_started_as_those_of_a_run(monkeypatch):
    seen: list[tuple[str, dict[str, str]]] = []

    def start(argv: list[str], *, environment: dict[str, str], **_: object) -> None:
        seen.append((" ".join(argv), environment))
        raise InterruptedError

    monkeypatch.setattr("sft_play.diagnose.doctor.start_child", start)
    over_nodes = LaunchOptions(nodes=NodeSetup(2, 1, "head", 29501))
    for hardware, options in ((machine(gpu(0), gpu(1)), LaunchOptions(gpus=(0, 1))), (CPU, over_nodes)):
        with pytest.raises(InterruptedError):
            doctor.run_all_reduce(hardware, options, limit_s=40.0, environment={})
    (words, environment), (on_cpu, cpu_environment) = seen
    for part in ("--nproc-per-node 2 --module sft_play.diagnose.collective_check --out ", "--device cuda --timeout "):
        assert part in words
    assert "--nnodes 2 --node-rank 1 --master-addr head --master-port 29501" in on_cpu
    assert (environment["CUDA_VISIBLE_DEVICES"], cpu_environment["OMP_NUM_THREADS"]) == ("0,1", "1")


def met(*places: SystemFacts, count: int | None = None, limit_s: float = 15.0) -> list[Finding]:
    """What nodes found of each other, each in a thread of its own."""
    port, size = free_port(), count or len(places)

    def meet(rank: int) -> Finding:
        return doctor.check_node_meeting(places[rank], NodeSetup(size, rank, "127.0.0.1", port), {}, limit_s=limit_s)[1]

    # a refused node waits until node 0 has gone, and here all are one process
    with mock.patch.object(nodes, "_LEAVE_TIMEOUT_S", 1.0), ThreadPoolExecutor(len(places)) as pool:
        return list(pool.map(meet, range(len(places))))


HERE = SystemFacts(machine(gpu(0), gpu(1)), hostname="a", versions={"torch": "2.13.0"}, driver="580.82.07")


@pytest.mark.parametrize(("changes", "words"), [
    ({}, ("2 met, with the same packages, driver, GPUs",)),
    ({"versions": {"torch": "2.12.1"}, "driver": "570.86.10", "hardware": machine(gpu(0, "NVIDIA L4"))},
     ("torch is 2.13.0 on node 0 and 2.12.1 on node 1", "driver is 580.82.07 on node 0 and 570",
      "number of ranks is 2 on node 0 and 1", "and NVIDIA L4 on")),
], ids=["alike", "different"])  # fmt: skip
def test_nodes_that_differ_are_said_on_all_of_them(changes, words):
    found = met(HERE, dataclasses.replace(HERE, **{"hostname": "b", **changes}))
    assert verdicts(found) == ["FAIL" if changes else "PASS"] * 2
    for text in words:
        assert all(text in item.found for item in found), found[0].found


def test_a_node_that_never_comes_or_has_no_address_is_named():
    (found,) = met(HERE, count=3, limit_s=0.5)
    assert re.search(r"nodes 1, 2 of 3 did not connect to 127\.0\.0\.1:\d+ within 0 s: start the same", found.found)
    _, found = doctor.check_node_meeting(HERE, NodeSetup(2, 1, "no-such-host.invalid", 29500), {}, limit_s=600.0)
    assert "MASTER_ADDR=no-such-host.invalid" in found.found


MIXTRAL = {"model_type": "mixtral", "num_hidden_layers": 4, "hidden_size": 1024, "intermediate_size": 1024,
           "num_attention_heads": 16, "num_key_value_heads": 4, "num_local_experts": 8, "num_experts_per_tok": 2,
           "vocab_size": 32_000}  # fmt: skip


@pytest.mark.parametrize(("changes", "overrides", "packages", "machine_name", "words"), [
    ({}, (), (), "H100", ()),
    ({}, ("model.experts_implementation=eager",), (), "H100", ("as model.experts_implementation says: ",)),
    ({"intermediate_size": 1001}, (), (), "H100", ("multiples of 8, and one is 1001: ", "s of a step of")),
    ({}, (), ("causal-conv1d", FLA), "H100", ("causal-conv1d is not installed", "its own slower code")),
    ({}, (), (FLA,), "RTX5090", ("leave it so: on Blackwell its releases before 0.6.0",)),
])  # fmt: skip
def test_slow_code_is_named_with_its_cost(changes, overrides, packages, machine_name, words):
    config = config_from_text("model: {name: m}\ntuning: {mode: lora}", name="r", overrides=overrides)
    shape, hardware = parse_model_shape(MIXTRAL | changes, name="m"), parse_hardware(machine_name)
    plan = make_advised_plan(PlanRequest(config, shape, hardware))
    shape = dataclasses.replace(shape, kernel_packages=packages)
    told = " ".join(slow_code_reasons(config, shape, plan.choice, frozenset({*packages, "mamba-ssm"})))
    assert all(text in told for text in words), told
    assert bool(told) == bool(words)


def by_name(report: doctor.DoctorReport) -> dict[str, Finding]:
    return {finding.name: finding for finding in report.findings}


@pytest.mark.build
def test_this_machine_is_examined_with_a_real_all_reduce_of_two_ranks(world, monkeypatch):
    monkeypatch.setattr(sys, "executable", warm.python())
    plan = functools.partial(planned, world, only="ddp")
    report = doctor.run_doctor(plan, LaunchOptions(), environment=WITHOUT_GPUS)
    found = by_name(report)
    assert report.ok, report.lines()
    assert re.fullmatch(r"right over gloo on 2 ranks; [0-9.]+ GB/s a rank", found["all-reduce"].found)
    assert "2 checkpoints of" in found["disk"].found
    assert found["plan"].found.startswith("ddp on 2 ranks")


@pytest.mark.build
@pytest.mark.slow
def test_two_nodes_on_loopback_reduce_together(world):
    port = free_port()

    def one_node(rank: int) -> dict[str, str]:
        options = LaunchOptions(processes_per_node=1, nodes=NodeSetup(2, rank, "127.0.0.1", port))
        report = doctor.run_doctor(functools.partial(planned, world, only="ddp"), options, environment=WITHOUT_GPUS)
        assert report.ok, report.lines()
        return {name: finding.found for name, finding in by_name(report).items()}

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(one_node, (0, 1))
    for node, name, words in (
        (first, "all-reduce", "right over gloo on 2 ranks"), (first, "nodes", "2 met, with the same"),
        (second, "all-reduce", "this node's part of 2"), (second, "disk", "node 0 writes checkpoints"),
    ):  # fmt: skip
        assert words in node[name]


@pytest.mark.build
def test_a_rank_that_stops_is_named_and_no_process_is_left(world, monkeypatch):
    """Rank 1 is held by SIGSTOP as soon as it is there; the limit comes once rank 0 waits for it."""
    held: list[psutil.Process] = []
    mark = str(world)

    def started() -> list[psutil.Process]:
        """This check's processes, orphans too. Children of this process would not do: the one that forks for all
        tests (warm.py) may be among them."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get("CHECK_OF") == mark:
                    found.append(process)
        return found

    class Launcher(subprocess.Popen):  # type: ignore[type-arg]
        def wait(self, timeout: float | None = None) -> int:
            if timeout != 120:
                return super().wait(timeout)
            note = Path(self.args[self.args.index("--out") + 1]) / "rank-0.json"  # type: ignore[union-attr,index]
            for _ in range(1200):
                if held and read_json(note).get("stage") == "device":
                    break
                with contextlib.suppress(subprocess.TimeoutExpired):
                    return super().wait(0.1)
            raise subprocess.TimeoutExpired(self.args, timeout)

    monkeypatch.setattr(doctor.subprocess, "Popen", Launcher)

    def hold() -> None:
        for _ in range(600):
            for child in started():
                with contextlib.suppress(psutil.Error):
                    if child.environ().get("RANK") == "1":
                        child.send_signal(signal.SIGSTOP)
                        held.append(child)
                        return
            time.sleep(0.02)

    thread = threading.Thread(target=hold)
    thread.start()
    environment = {**WITHOUT_GPUS, "CHECK_OF": mark}
    got = doctor.run_all_reduce(CPU, LaunchOptions(), limit_s=120, environment=environment)
    thread.join(timeout=30)
    found = doctor.judge_all_reduce(got, ON_CPU, NodeSetup())
    assert found.verdict == "FAIL"
    assert re.search(r"120 s: .*rank 1 (never started|has not reached its device|is waiting to join)", found.found)
    wait_for(lambda: not is_alive(held[0].pid), within_s=10)
    wait_for(lambda: not any(is_alive(process.pid) for process in started()), within_s=10)


@pytest.mark.build
def test_the_sum_is_compared_element_by_element(tmp_path):
    """One process alone: the pattern's sum is the pattern; a changed all-reduce is found out."""
    code = f"""
import torch, torch.distributed as dist
from sft_play.diagnose import collective_check as check
dist.init_process_group('gloo', init_method='file://{tmp_path}/store', rank=0, world_size=1)
assert check.wrong_elements(4096, torch.device('cpu')) == 0
dist.all_reduce = lambda tensor: tensor[3:5].add_(1)
assert check.wrong_elements(4096, torch.device('cpu')) == 2
dist.destroy_process_group()  # gloo's threads, if they still run at the end, abort the process
"""
    answer = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert answer.returncode == 0, answer.stderr


@pytest.mark.build
@pytest.mark.slow
def test_a_written_checkpoint_is_as_large_as_was_said(world, succeed):
    succeed("train", "--config", f"{world}/run.yaml", "tuning.mode=full", "output.name=size", "train.max_steps=1")
    (checkpoint,) = (path for path in (world / "outputs/size/checkpoints").iterdir() if path.name == "checkpoint-1")
    sizes = {path.name: path.stat().st_size for path in checkpoint.rglob("*") if path.is_file()}
    predicted = written(world, "tuning.mode=full").checkpoint_bytes - OTHER_BYTES
    assert sizes["model.safetensors"] + sizes["optimizer.pt"] == pytest.approx(predicted, rel=0.1)
    assert sum(sizes.values()) < predicted + OTHER_BYTES


def test_what_the_config_cannot_be_is_a_finding(world):
    def refuses(_: Hardware) -> doctor.PlannedRun:
        raise ConfigError("train.batch_size=3 does not split over 2 ranks")

    options = LaunchOptions(processes_per_node=1, nodes=NodeSetup(2, 1, "127.0.0.1", free_port()))
    report = doctor.run_doctor(refuses, options, environment={"CUDA_VISIBLE_DEVICES": ""}, meeting_s=0.3)
    found = by_name(report)
    assert "batch_size=3 does not split" in found["plan"].found
    assert (report.names_by_verdict("FAIL"), found["all-reduce"].verdict) == (["plan", "nodes"], "SKIP")
    assert "disk" not in found


@pytest.mark.parametrize(("limit", "is_wsl", "verdict"), [
    (-1, False, "PASS"), (2**40, False, "PASS"), (2**26, False, "WARN"), (-1, True, "WARN"),
])  # fmt: skip
def test_what_a_streamed_base_pins_is_compared_with_what_may_be_locked(limit, is_wsl, verdict):
    finding = doctor.check_pinned_memory(18 * 2**30, limit, is_wsl=is_wsl)
    assert (finding.verdict, "18.0 GiB" in finding.found) == (verdict, True)
