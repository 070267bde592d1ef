"""What a run measures of itself, against figures worked by hand."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from torch.autograd import DeviceType
from transformers import MixtralConfig, MixtralForCausalLM
from trl import SFTTrainer

from sft_play.training.measure import monitor as module
from sft_play.training.measure.board import format_answers
from sft_play.training.measure.exact_match import GeneratedAnswer, Question
from sft_play.training.measure.monitor import Monitor
from sft_play.training.measure.profile import exposed_time, split_spans
from tests import warm
from tests.conftest import ROOT, chat, clean_environment, write_rows, write_run

pytestmark = pytest.mark.build


def test_padding_samples_and_speed_are_counted_from_the_batches(monkeypatch):
    clock = iter([0.0, 4.0, 4.0])  # start, take, reset
    monkeypatch.setattr(module.time, "perf_counter", lambda: next(clock, 4.0))
    speed, memory = SimpleNamespace(tokens_per_s=10.0), SimpleNamespace(reserved=3 * 2**30)
    made = Monitor(SimpleNamespace(memory=memory, speed=speed, speed_known=True, mfu=0.5))
    made._window_start = 0.0
    # two rows of four places, one of them padded by two; the second row is a masked one
    rows, labels = [[1, 2, 3, 4], [1, 2, 0, 0]], [[-100, -100, 3, 4], [-100] * 4]
    batch = {"input_ids": rows, "labels": labels, "attention_mask": [[1, 1, 1, 1], [1, 1, 0, 0]]}
    made.count_batch({name: torch.tensor(value) for name, value in batch.items()}, ignored_label=-100)
    found = made.take_metrics(steps=2, device=torch.device("cpu"))
    assert found["padding_share"] == pytest.approx(2 / 8)
    assert found["samples_seen"] == 1
    assert found["memory_predicted_gib"] == 3.0
    assert found["tokens_per_s"] == pytest.approx(6 / (found["step_time_s"] * 2))
    assert found["mfu"] == pytest.approx(0.5 * found["tokens_per_s"] / 10)
    again = made.take_metrics(steps=1, device=torch.device("cpu"))
    assert (again["tokens_per_s"], again["samples_seen"]) == (0, 1)


def test_what_libraries_annotate_on_a_gpu_hides_no_communication():
    """Each annotation of FSDP2, DDP and the optimizer comes back as an event of the GPU, collectives included."""

    def event(name: str, start: float, end: float, *, annotation: bool = False, on_gpu: bool = True) -> SimpleNamespace:
        return SimpleNamespace(
            name=name, device_type=DeviceType.CUDA if on_gpu else DeviceType.CPU, is_user_annotation=annotation,
            time_range=SimpleNamespace(start=start, end=end),
        )  # fmt: skip

    events = [
        event("ProfilerStep#3", 0, 100, annotation=True),
        event("FSDP::pre_forward (model.layers.0)", 0, 40, annotation=True),
        event("FSDP::all_gather (model.layers.0)", 0, 30, annotation=True),
        event("nccl:_all_gather_base", 0, 31, annotation=True),  # the process group's own span
        event("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", 0, 30),
        event("ampere_bf16_s16816gemm_bf16_128x128", 20, 60),
        event("DistributedDataParallel.forward", 0, 60, annotation=True),
        event("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)", 60, 80),
        event("Optimizer.step#AdamW.step", 60, 100, annotation=True),
        event("void at::native::multi_tensor_apply_kernel", 80, 100), event("aten::mm", 0, 100, on_gpu=False),
    ]  # fmt: skip
    communication, computation = split_spans(events, on_gpu=True)
    assert (communication, computation) == ([(0, 30), (60, 80)], [(20, 60), (80, 100)])
    assert exposed_time(communication, computation) == 40  # 0-20 and 60-80
    assert exposed_time([(0, 10)], [(2, 4), (3, 5), (9, 20)]) == 6  # 0-2 and 5-9
    gloo = [event("gloo:all_reduce", 0, 10, annotation=True, on_gpu=False), *events]
    assert split_spans(gloo, on_gpu=False) == ([(0, 10)], [(0, 100)])


def test_answers_are_shown_as_text_and_never_as_markup():
    said = format_answers([GeneratedAnswer(Question([1], "<b>what?</b>", "yes"), "`no`\n# head")])
    assert said.splitlines() == ["- asked: `<b>what?</b>`", "  said: `’no’\\n# head` (expected: `yes`)"]


def test_a_run_shows_itself(tmp_path, tiny_llama, succeed):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    rows = write_rows(tmp_path / "rows.jsonl", (chat(f"what is {n}?", f"it is {n}.") for n in range(20)))
    train = {"effective_batch_size": 4, "batch_size": 2, "max_steps": 6, "profile_steps": 2, "save_steps": 3}
    evaluation = {"steps": 3, "generate_rows": 2, "max_new_tokens": 4}
    path = write_run(tmp_path, tiny_llama, rows, data={"val_path": str(rows)}, eval=evaluation,
                     train={**train, "report_to": ["tensorboard"]}, output={"name": "shown"})  # fmt: skip
    succeed("train", "--config", str(path))
    run = tmp_path / "outputs" / "shown"
    events, held_out = (
        EventAccumulator(str(folder), size_guidance={"tensors": 0, "scalars": 0}).Reload()
        for folder in (run / "tb", run / "tb" / "validation")
    )
    tags = events.Tags()
    names = "loss learning_rate grad_norm tokens_per_s tokens_per_s_per_rank step_time_s time_checkpoint_s "
    names += "padding_share memory_peak_gib memory_predicted_gib samples_seen time_exposed_communication_s"
    assert {f"train/{name}" for name in names.split()} <= set(tags["scalars"])
    assert {tag.partition("/")[0] for tag in tags["scalars"]} == {"train"}
    assert {tag.partition("/")[0] for tag in held_out.Tags()["scalars"]} == {"eval"}  # a run, and colour, of its own
    assert not (run / "tb" / "test").exists()
    assert [event.value for event in events.Scalars("train/samples_seen")] == [4, 8, 12, 16, 20, 24]
    texts = {tag.removesuffix("/text_summary") for tag in tags["tensors"]}
    assert {"config", "plan", "manifest"} == texts - {"custom_scalars__config__"}
    answered = [event.step for event in held_out.Tensors("answers/text_summary")]
    assert answered == [event.step for event in held_out.Scalars("eval/exact_match")] == [0, 3, 6]
    logged = [event.value for event in held_out.Scalars("eval/loss")]
    told = json.loads((run / "summary.json").read_text())["evaluations"]
    assert [entry["step"] for entry in told] == [0, 3, 6]
    assert [entry["loss"] for entry in told] == pytest.approx(logged, rel=1e-5)
    line = "Validation at step {step}: loss {loss:.4f}, exact match {exact_match:.1%}"
    assert all(line.format(**entry) in (run / "train.log").read_text() for entry in told[1:])
    assert "_hparams_/experiment" in events.summary_metadata
    assert any("custom_scalars" in tag for tag in tags["tensors"])
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    step = [line for line in lines if "time_data_s" in line][-1]
    parts = sum(step[f"time_{name}_s"] for name in ("data", "forward_backward", "optimizer"))
    assert 0 < parts <= step["step_time_s"] * 1.01
    assert (run / "profile" / "trace.json.gz").stat().st_size > 1000


@pytest.fixture(scope="module")
def tiny_mixtral(tmp_path_factory):
    """Two experts of four for each token, and a large coefficient of the routers' balancing loss."""
    from tests.models import make_tokenizer

    folder = tmp_path_factory.mktemp("mixtral")
    make_tokenizer(folder)
    torch.manual_seed(0)
    config = MixtralConfig(
        hidden_size=64, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=400, num_local_experts=4, router_aux_loss_coef=0.5, output_router_logits=True, pad_token_id=0,
        eos_token_id=2, bos_token_id=None,
    )  # fmt: skip
    MixtralForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(params=["tiny_llama", "tiny_mixtral"])
def trainer(request, tmp_path):
    from tests.ranks_evaluation import trainer_of

    made = trainer_of(request.getfixturevalue(request.param), tmp_path)
    made.create_optimizer_and_scheduler(num_training_steps=2)
    made.current_gradient_accumulation_steps = 3
    return made


def passes_of(trainer) -> list[dict]:
    """Three batches with different numbers of trained tokens; the second has none."""
    batches = list(itertools.islice(trainer.get_train_dataloader(), 3))
    batches[1]["labels"][:] = -100
    return batches


def test_loss_gradients_and_figures_are_those_that_trl_computes(trainer):
    """TRL's figures are means of a batch; weighted by its tokens they are the means over tokens that are logged."""
    in_step = sum((batch["labels"][:, 1:] != -100).sum() for batch in passes_of(trainer))
    found, weights = [], []
    for compute in (trainer.compute_loss, lambda *args, **options: SFTTrainer.compute_loss(trainer, *args, **options)):
        trainer.model.zero_grad()
        trainer.model.train()
        losses = []
        for batch in passes_of(trainer):
            weights.append(int((batch["labels"][:, 1:] != -100).sum()))
            inputs = {name: batch[name] for name in ("input_ids", "labels", "attention_mask")}
            losses.append(compute(trainer.model, inputs, num_items_in_batch=in_step))
            losses[-1].backward()
        found.append((torch.stack(losses), [weight.grad.clone() for weight in trainer.model.parameters()]))
    (ours, our_gradients), (theirs, their_gradients) = found
    assert torch.equal(ours, theirs)
    assert all(torch.equal(one, other) for one, other in zip(our_gradients, their_gradients, strict=True))

    logged = trainer._monitor.take_metrics(steps=1, device=torch.device("cpu"))
    of_trl = trainer._metrics["train"]
    for name in ("entropy", "mean_token_accuracy"):
        mean = sum(value * count for value, count in zip(of_trl[name], weights[3:], strict=True)) / sum(weights[3:])
        assert logged[name] == pytest.approx(mean, rel=1e-5), name
    assert ("aux_loss" in logged) == ("aux_loss" in of_trl) == trainer.aux_loss_enabled
    if trainer.aux_loss_enabled:
        assert logged["aux_loss"] == pytest.approx(sum(of_trl["aux_loss"]) / 3)


def test_no_pass_waits_for_the_device_or_for_other_ranks(trainer, monkeypatch):
    """Every way from a tensor to a Python number, and every gather, outside the model; TRL's own loss has them."""
    waits: list[str] = []

    def watched(owner, name):
        real = getattr(owner, name)

        def counted(*args, **options):
            caller = str(sys._getframe(1).f_globals["__name__"])
            if caller.startswith(("sft_play.", "trl.", "transformers.trainer", "accelerate.")):
                waits.append(name)
            return real(*args, **options)

        monkeypatch.setattr(owner, name, counted)

    for name in ("item", "tolist", "__bool__", "__int__", "__float__", "__index__", "cpu", "numpy"):
        watched(torch.Tensor, name)
    for name in ("gather", "gather_for_metrics", "reduce"):
        watched(trainer.accelerator, name)

    def found(compute) -> list[str]:
        batch = passes_of(trainer)[0]
        waits.clear()
        compute(batch)
        return waits

    assert found(lambda batch: trainer.training_step(trainer.model, batch, torch.tensor(5))) == []
    trainer.model.eval()
    assert found(lambda batch: trainer.prediction_step(trainer.model, batch, True)) == []
    of_trl = found(lambda batch: SFTTrainer.compute_loss(trainer, trainer.model.train(), dict(batch)))
    assert (of_trl.count("gather_for_metrics") >= 4, of_trl.count("item") >= 3) == (True, True)


def test_the_profilers_library_writes_no_lines_of_its_own():
    """To standard error (`USDT:...`), unless it was told not to before torch is imported."""
    code = (
        "from sft_play.launch import run_hardware\nfrom sft_play.machine.hardware import parse_hardware\n"
        "run_hardware.prepare_libraries('m', parse_hardware('cpu'))\n"
        "import torch\nwith torch.profiler.profile():\n    torch.ones(3)\n"
    )
    words = [warm.python(), "-c", code]
    done = subprocess.run(words, capture_output=True, text=True, cwd=ROOT, env=clean_environment())
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
