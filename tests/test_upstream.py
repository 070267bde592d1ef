"""The private names of libraries that the training loop builds on: all listed, each with its guard."""

import ast
import inspect
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate.optimizer import AcceleratedOptimizer
from transformers import Trainer, TrainerState
from trl import SFTTrainer

from sft_play.errors import BackendError
from sft_play.training.loop import upstream
from sft_play.training.loop.evaluated_loop import EvaluatedLoop
from sft_play.training.loop.loop import PlannedLoop
from sft_play.training.loop.loop_checkpoints import CheckpointedLoop
from sft_play.training.loop.trainer import PlannedTrainer
from sft_play.training.measure.monitor import Monitor
from sft_play.training.unsloth_run import UnslothLoop

pytestmark = pytest.mark.build
LOOPS = (CheckpointedLoop, EvaluatedLoop, PlannedLoop, PlannedTrainer, UnslothLoop)
OF_A_TRAINER = ("self", "super()", "trainer", "_trainer")
TABLES = ("OVERRIDDEN_METHODS", "USED_MEMBERS", "TRL_MEMBERS", "ACCELERATE_MEMBERS")
KNOWN = {name: users for table in TABLES for name, users in vars(upstream)[table].items()}


def test_every_private_override_is_listed_and_nothing_else_is():
    private = {name for loop in LOOPS for name in vars(loop) if name.startswith("_") and not name.startswith("__")}
    overridden = {name for name in private if hasattr(SFTTrainer, name)} - {"_abc_impl"}
    assert overridden == set(upstream.OVERRIDDEN_METHODS)
    assert (len(KNOWN) > 10, all(KNOWN.values())) == (True, True)


def private_names(sources: Iterable[str]) -> set[str]:
    """Names that begin with an underscore and that code asks of itself, of `super()` or of a trainer."""
    found = set()
    for node in (node for source in sources for node in ast.walk(ast.parse(source))):
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
            found |= {node.attr} if ast.unparse(node.value).rpartition(".")[2] in OF_A_TRAINER else set()
    return found


def test_every_private_name_of_a_trainer_that_training_uses_is_listed():
    """Methods and attributes of transformers' and TRL's trainers, by the libraries' own sources."""
    theirs = private_names(inspect.getsource(base) for base in (Trainer, SFTTrainer))
    own = {name for loop in LOOPS for name in vars(loop)} - set(upstream.OVERRIDDEN_METHODS)
    folder = Path(upstream.__file__).parent
    for path in sorted(folder.glob("*.py")):
        text = path.read_text(encoding="utf-8")
        is_loop = path.stem in {loop.__module__.rpartition(".")[2] for loop in LOOPS}
        used = private_names([text if is_loop else text.replace("self._", "other._")]) & theirs
        assert used - own <= set(KNOWN), path.name
    loops = [(folder / f"{name}.py").read_text(encoding="utf-8") for name in ("loop", "loop_checkpoints")]
    assert {"_tr_loss", "_globalstep_last_logged", "_save", "_save_rng_state"} <= private_names(loops) & theirs


def test_the_library_counts_the_tokens_of_batches_that_are_not_empty(monkeypatch):
    """Of transformers' and Unsloth's counting both: they look for labels in the first batch of a step."""
    counted = []

    def count(self, epoch_iterator, num_batches, device):
        counted.append((list(epoch_iterator), num_batches, device))
        return counted[-1][0], 7

    monkeypatch.setattr(Trainer, "get_batch_samples", count)
    loop = object.__new__(PlannedLoop)
    loop._monitor, loop.step_memory = Monitor(), SimpleNamespace(has_halved=False)
    rows = iter([{}, {}, {"labels": 1}, {"labels": 2}, {}, {"labels": 3}])
    assert loop.get_batch_samples(rows, 4, "cpu") == ([{}, {}, {"labels": 1}, {"labels": 2}], 7)
    assert loop._micro_steps == 2
    assert loop.get_batch_samples(rows, 4, "cpu") == ([{}, {"labels": 3}], 7)  # the last step of an epoch
    assert loop._micro_steps == 1
    assert counted == [([{"labels": 1}, {"labels": 2}], 2, "cpu"), ([{"labels": 3}], 1, "cpu")]


@pytest.mark.parametrize("first_step", [0, 100])
def test_the_mean_loss_of_a_run_is_that_of_all_ranks_and_steps_however_many_came_before(monkeypatch, first_step):
    """The Trainer's last sum since a log is one rank's own: 4.0 here, 6.0 on average; 6.0 were logged before."""
    logged = {}
    monkeypatch.setattr(Trainer, "log", lambda self, logs, start_time=None: logged.update(logs))
    loop = object.__new__(PlannedLoop)
    loop._eval_sums, loop._tr_loss, loop._total_loss_scalar = {}, torch.tensor(4.0), 6.0 + 4.0
    loop.state = TrainerState(global_step=first_step + 5)
    monkeypatch.setattr(loop, "_mean_loss_sum", lambda: 6.0)
    for divisor in (5, first_step + 5):  # transformers 5.23's, and that of older versions
        loop.log({"train_loss": 10.0 / divisor})
        assert logged["train_loss"] == pytest.approx(12.0 / (first_step + 5))
    monkeypatch.setattr(loop, "_mean_loss_sum", lambda: 4.0)  # one process: nothing to put right
    loop.log({"train_loss": 0.7})
    assert logged["train_loss"] == pytest.approx(10.0 / (first_step + 5))


@pytest.mark.parametrize("known", KNOWN)
def test_a_name_that_the_library_uses_no_more_is_named(monkeypatch, known):
    def moved(self, *args, **options): ...

    owners = {"TRL_MEMBERS": SFTTrainer, "ACCELERATE_MEMBERS": AcceleratedOptimizer}
    owner = next((owners[table] for table in owners if known in vars(upstream)[table]), Trainer)
    for user in KNOWN[known]:
        for module, is_theirs in ((owner.__module__, True), ("unsloth.models", False)):
            moved.__module__ = module
            with monkeypatch.context() as patch:
                for names in TABLES:
                    kept = {name: users for name, users in vars(upstream)[names].items() if name == known}
                    patch.setattr(upstream, names, kept)
                patch.setattr(owner, user, moved)
                if not is_theirs:  # another library's replacement is its own affair
                    upstream.require_upstream_names(SFTTrainer)
                    continue
                with pytest.raises(BackendError, match=rf"{owner.__name__}\.{user} no longer uses {known}"):
                    upstream.require_upstream_names(SFTTrainer)


def test_the_installed_libraries_are_known_and_the_guard_is_looked_at_before_a_trainer_is_made(monkeypatch):
    for base in (Trainer, SFTTrainer):
        upstream.require_upstream_names(base)
    with monkeypatch.context() as patch:
        patch.setattr(SFTTrainer, "log", lambda self, logs, start_time=None: None)
        upstream.require_upstream_names(Trainer)  # a loop that is not TRL's needs nothing of TRL
    monkeypatch.setattr(Trainer, "_finalize_training", Trainer.evaluate)
    with pytest.raises(BackendError, match="no longer uses _load_best_model; install the version of"):
        PlannedTrainer(model=None, plan=None)
