"""What a step costs the host besides the model's own operators: no walk through the modules, no wait for the device in
the checks of the first steps, and one collective at most."""

import functools
import gc
import math
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import TrainerCallback

from benchmarks import host_pass
from sft_play.planner.batching import MicroBatches
from sft_play.process.waiting import frozen_objects
from sft_play.runs.folder import read_json
from sft_play.training import distributed
from sft_play.training.loop.callbacks import GradientCheck, largest_sizes
from sft_play.training.loop.loop import _replaced_module_walks, _SteppedParameters
from sft_play.training.loop.rows import Collator, complete_boundaries
from sft_play.training.measure.updates import UpdateCheck, UpdateFacts
from tests.conftest import ROOT, unfreeze
from tests.ranks_micro_batches import trainer_of

pytestmark = pytest.mark.build


class Walks(TrainerCallback):
    """Counts the modules that are visited from the second step on, the step's logs and saves left out."""

    def __init__(self) -> None:
        self.visited, self.is_open = 0, False
        self._real = nn.Module.named_modules, nn.Module.train

    def named_modules(self, module, *args, **options):
        for one in self._real[0](module, *args, **options):
            self.visited += self.is_open
            yield one

    def train(self, module, mode=True):
        self.visited += self.is_open
        return self._real[1](module, mode)

    def on_step_begin(self, args, state, control, **_):
        self.is_open = state.global_step >= 1

    def on_step_end(self, *_, **__):
        self.is_open = False


def test_a_step_visits_no_module_but_those_that_it_computes_with(tmp_path, tiny_llama):
    trainer = trainer_of(tiny_llama, tmp_path, MicroBatches(2), ranks=1, bf16=False)
    walks = Walks()
    trainer.add_callback(walks)
    with (
        mock.patch.object(nn.Module, "named_modules", lambda *args, **options: walks.named_modules(*args, **options)),
        mock.patch.object(nn.Module, "train", lambda *args, **options: walks.train(*args, **options)),
    ):
        trainer.train()
        assert trainer.state.global_step > 2
        assert walks.visited == 0
        walks.is_open = True
        trainer.model.zero_grad()  # torch's own
        assert walks.visited > 0


def test_an_evaluation_of_any_part_ends_with_the_next_pass():
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Dropout(0.5), nn.Linear(2, 2)))
    model[1][0].eval()  # as transformers loads a model: its root is another's part, and trains
    frozen = model[0].weight.requires_grad_(False)
    trained = _SteppedParameters([one for one in model.parameters() if one is not frozen])
    with _replaced_module_walks(model, trained):
        assert all(module.training for module in model.modules())
        model[1].eval()  # the root of this part is told nothing
        assert model.train() is model
        assert all(module.training for module in model.modules())
        model.eval()
        assert not any(module.training for module in model.modules())
        model.train()(torch.ones(1, 2)).sum().backward()
        model.zero_grad()
        assert all(one.grad is None for one in model.parameters())
    assert not {"train", "zero_grad"} & vars(model).keys()


class Operators(TorchDispatchMode):
    """The operators that are called, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if not any(one.alias_info is not None for one in function._schema.returns):  # no view of another's memory
            self.names.append(function._schema.name.removeprefix("aten::"))
        return function(*args, **kwargs or {})


def adapters(layers: int) -> nn.ModuleList:
    """As many tensors as a model of `layers` layers has adapters, in two dtypes."""
    return nn.ModuleList(
        nn.ParameterDict(
            {"lora_A": torch.full((3, layer + 1), 0.5), "lora_B": torch.full((layer + 1, 3), 0.5, dtype=torch.bfloat16)}
        )
        for layer in range(layers)
    )


def fake_trainer(model: nn.Module) -> SimpleNamespace:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return SimpleNamespace(
        model=model, model_wrapped=model, optimizer=optimizer, is_deepspeed_enabled=False,
        accelerator=SimpleNamespace(optimizer_step_was_skipped=False),
    )  # fmt: skip


def test_the_checks_of_the_first_steps_ask_the_device_and_the_ranks_once_whatever_trains(monkeypatch):
    counts, reads, read = {}, [], torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda tensor: reads.append(tensor) or read(tensor))
    collectives = mock.Mock(side_effect=distributed._all_reduce)
    monkeypatch.setattr(distributed, "_all_reduce", collectives)
    for layers in (2, 40):
        model = adapters(layers)
        trainer = fake_trainer(model)
        update_check, gradient_check = UpdateCheck(trainer, "float32"), GradientCheck()
        operators = Operators()
        reads.clear()
        collectives.reset_mock()
        for step in range(4):
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter)
            with operators:
                update_check.on_step_begin()
                gradient_check.on_pre_optimizer_step(None, SimpleNamespace(global_step=step), None, model=model)
                update_check.on_pre_optimizer_step()
            trainer.optimizer.step()
            with operators:
                update_check.on_step_end()
        counts[layers] = (len(operators.names), len(reads), collectives.call_count)
        assert gradient_check.is_done
        assert "_local_scalar_dense" not in operators.names  # a wait by `bool` or `int`
        assert update_check.facts.moved_share == 1.0
    assert counts[2] == counts[40]
    assert counts[40][1:] == (2, 2)  # the sizes of the gradients, and what has moved in all three steps


def test_whole_weights_that_an_evaluation_leaves_in_a_sharded_model_change_no_count():
    shards, whole = adapters(2), adapters(5)
    trainer = fake_trainer(shards)
    check = UpdateCheck(trainer, "float32")
    for step in range(4):
        trainer.model = trainer.model_wrapped = whole if step == 2 else shards
        check.on_step_begin()
        trainer.model = trainer.model_wrapped = shards
        for parameter in shards.parameters():
            parameter.grad = torch.ones_like(parameter)
        check.on_pre_optimizer_step()
        trainer.optimizer.step()
        check.on_step_end()
    assert check.facts.moved_share == 1.0


@pytest.mark.parametrize("seed", range(4))
def test_updates_are_counted_as_a_plain_loop_counts_them(seed):
    draw = torch.Generator().manual_seed(seed)
    model = adapters(5)
    parameters = dict(model.named_parameters())
    for parameter in parameters.values():
        parameter.data = torch.randn(parameter.shape, generator=draw).to(parameter.dtype)
    check, moved, compared = UpdateCheck(fake_trainer(model), "float32"), 0, 0
    for step in range(4):
        check.on_step_begin()
        for number, parameter in enumerate(parameters.values()):
            parameter.grad = None if number == 3 else torch.randn(parameter.shape, generator=draw).to(parameter.dtype)
            if parameter.grad is not None:
                parameter.grad[torch.rand(parameter.shape, generator=draw) < 0.3] = 0
        if step == 2:
            next(iter(parameters.values())).grad.fill_(math.inf)  # loss scaling leaves this step out
        check.on_pre_optimizer_step()
        for parameter in parameters.values():
            changes = torch.rand(parameter.shape, generator=draw) < 0.6
            if step in (1, 3) and parameter.grad is not None:
                has_gradient = parameter.grad != 0
                compared += int(has_gradient.sum())
                moved += int((changes & has_gradient).sum())
            parameter.data = torch.where(changes, parameter.data + 1, parameter.data)
        check.on_step_end()
    assert isinstance(check.facts, UpdateFacts)
    assert check.facts.moved_share == round(moved / compared, 4)


def test_the_largest_sizes_are_those_of_each_tensor():
    tensors = [
        None, torch.zeros(0), torch.zeros(3, dtype=torch.bfloat16), torch.tensor([[1.5, -2.0]]),
        torch.tensor([1e-40]), torch.tensor([0.0, math.nan]), torch.tensor([-math.inf], dtype=torch.float16),
        torch.tensor(-3.0),
    ]  # fmt: skip
    sizes = largest_sizes(tensors)
    assert sizes[:5] == [0.0, 0.0, 0.0, 2.0, pytest.approx(1e-40, rel=1e-4)]
    assert math.isnan(sizes[5])
    assert sizes[6:] == [math.inf, 3.0]
    assert largest_sizes([]) == []


def test_boundaries_of_chats_are_copied_to_the_device_once():
    rows = [{"input_ids": [1, 2], "labels": [1, 2], "chat_lengths": [2]}] * 2
    batch = Collator(pad_id=0, flat=True)(rows)
    assert not [name for name in batch if name == "cu_seq_lens_k"]
    completed = complete_boundaries(batch)
    assert completed["cu_seq_lens_k"] is completed["cu_seq_lens_q"]
    padded = Collator(pad_id=0)([{"input_ids": [1], "labels": [1]}])
    assert complete_boundaries(padded) is padded


def test_what_is_there_before_the_loop_is_left_out_of_collections(monkeypatch):
    monkeypatch.setattr(gc, "unfreeze", unfreeze)
    before = gc.get_freeze_count()
    with frozen_objects():
        assert gc.get_freeze_count() > before
    assert gc.get_freeze_count() == 0


def test_a_layer_calls_as_many_operators_as_were_counted(tmp_path):
    """Those that start a kernel, in the versions that the file names; a figure that falls is written anew."""
    counted = read_json(ROOT / "benchmarks" / "host_pass.json")["operators_of_layer"]
    count = functools.partial(host_pass.operators_of_run, overrides=host_pass.COUNTED["lora"])
    assert host_pass.operators_of_layer(tmp_path, count) == counted["lora"]
    assert counted["lora"] < counted["stock peft"]
