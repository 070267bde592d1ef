"""The private names of transformers and TRL that the training loop builds on: all listed, each with its guard."""

from __future__ import annotations

import pytest
from transformers import Trainer
from trl import SFTTrainer

from sft_play.errors import BackendError
from sft_play.training import upstream
from sft_play.training.loop import PlannedLoop
from sft_play.training.loop_checkpoints import CheckpointedLoop
from sft_play.training.trainer import PlannedTrainer
from sft_play.training.unsloth_run import UnslothLoop

pytestmark = pytest.mark.build
LOOPS = (CheckpointedLoop, PlannedLoop, PlannedTrainer, UnslothLoop)
KNOWN = [*upstream.OVERRIDDEN, *upstream.USED]


def test_every_private_override_is_listed_with_a_reason_and_nothing_else_is():
    """An override of a name that the libraries have, and that begins with an underscore."""
    overridden = {
        name
        for loop in LOOPS
        for name in vars(loop)
        if name.startswith("_") and not name.startswith("__") and hasattr(SFTTrainer, name)
    } - {"_abc_impl"}
    assert overridden == {one.name for one in upstream.OVERRIDDEN}
    assert len({one.name for one in KNOWN}) == len(KNOWN) > 10
    for one in KNOWN:
        assert len(one.reason.split()) >= 5, one.name
        assert one.used_by, one.name


def test_the_installed_libraries_are_known():
    for base in (Trainer, SFTTrainer):
        upstream.require_known(base)


@pytest.mark.parametrize("known", [one for one in KNOWN if one.parameters is not None], ids=lambda one: one.name)
@pytest.mark.parametrize("base", [Trainer, SFTTrainer])
def test_a_method_whose_parameters_change_is_named(monkeypatch, base, known):
    def moved(self, state, *, folder=None): ...

    moved.__module__ = "transformers.trainer"
    monkeypatch.setattr(base, known.name, moved)
    with pytest.raises(BackendError, match=rf"this training loop does not support transformers [\d.]+: "
                       rf"{base.__name__}\.{known.name} takes \(self, state, folder\) instead of \(self"):  # fmt: skip
        upstream.require_known(base, names=[known])


@pytest.mark.parametrize("known", KNOWN, ids=lambda one: one.name)
def test_a_name_that_the_library_uses_no_more_is_named(monkeypatch, known):
    """It would be overridden or read in vain."""

    def moved(self, *args, **options): ...

    owner = SFTTrainer if known.owner == "SFTTrainer" else Trainer
    moved.__module__ = owner.__module__
    for user in known.used_by:
        with monkeypatch.context() as patch:
            patch.setattr(owner, user, moved)
            with pytest.raises(BackendError, match=rf"{owner.__name__}\.{user} no longer uses {known.name}"):
                upstream.require_known(SFTTrainer, names=[known])
            moved.__module__ = "unsloth.models"
            upstream.require_known(SFTTrainer, names=[known])  # another library's replacement is its own affair
            moved.__module__ = owner.__module__


def test_a_method_that_is_gone_is_named(monkeypatch):
    monkeypatch.delattr(Trainer, "_save_rng_state")
    with pytest.raises(
        BackendError, match=r"Trainer\._save_rng_state is gone; it is needed for this: random states of"
    ):
        upstream.require_known(Trainer)


def test_a_loop_that_is_not_trls_needs_nothing_of_trl(monkeypatch):
    monkeypatch.setattr(SFTTrainer, "log", lambda self, logs, start_time=None: None)
    upstream.require_known(Trainer)


def test_the_guard_is_looked_at_before_a_trainer_is_made(monkeypatch):
    monkeypatch.delattr(Trainer, "_load_best_model")
    with pytest.raises(BackendError, match="_load_best_model is gone"):
        PlannedTrainer(model=None)
