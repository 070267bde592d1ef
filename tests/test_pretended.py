"""Device mismatches of the trainer show on a machine without a GPU: its paths run on a pretended one."""

from __future__ import annotations

import json
import subprocess
from typing import Any

import pytest

from tests import warm
from tests.conftest import chosen, clean_environment
from tests.pretended_steps import CASES, LEFT, MODES, ROWS

pytestmark = pytest.mark.build


@pytest.fixture(scope="module")
def found(request, tiny_llama, tmp_path_factory) -> dict[str, Any]:
    """What a process with a pretended GPU found: registering the device cannot be undone."""
    out = tmp_path_factory.mktemp("pretended") / "found.json"
    asked = [json.dumps(chosen(request, name)) for name in ("case", "name")]
    words = [warm.python(), "-m", "tests.pretended_steps", str(tiny_llama), str(out), *asked]
    ran = subprocess.run(words, env=clean_environment(), capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-3000:]
    return json.loads(out.read_text())


def few_of(case: tuple[str, ...]) -> list[pytest.MarkDecorator]:
    """Four kinds of rows, with the modes and precisions in turn, and the mixture; the others are left to `-m slow`."""
    mode, rows, _, kind = case
    is_one = kind == "mixtral" if rows == "padded" else mode == dict(zip(ROWS, MODES * 2, strict=True))[rows]
    return [] if is_one and rows not in ("unmasked", "masked packs") else [pytest.mark.slow]


QUICK_LEFT = ("input_ids", "boundaries", "evaluation", "generation")


@pytest.mark.parametrize("case", [pytest.param(case, id=" ".join(case), marks=few_of(case)) for case in CASES])
def test_training_evaluation_and_answers_stay_on_the_gpu(found, case):
    """With the losses, weights and answers of the CPU. In bf16 the lists of autocast differ between the two;
    bitsandbytes multiplies on a CPU by other kernels, and Adam's first steps are of one size whatever the gradient."""
    gpu, cpu = (found[device][" ".join(case)] for device in ("gpu", "cpu"))
    tolerance = 1e-3 if "bf16" in case else 1e-5
    assert gpu["device"] == "pretend:0"
    assert gpu["on_host"] == []
    assert len(gpu["losses"]) == 2
    assert gpu["losses"] == pytest.approx(cpu["losses"], rel=tolerance)
    assert gpu["eval_loss"] == pytest.approx(cpu["eval_loss"], rel=tolerance)
    assert gpu["weights"] == pytest.approx(cpu["weights"], rel=max(1e-4, tolerance))
    assert gpu["answers"] == cpu["answers"]
    assert len(gpu["answers"]) == 2


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK_LEFT else pytest.mark.slow) for name in LEFT]
)
def test_a_tensor_that_is_left_on_the_host_is_found(found, name):
    said = found["left"][name] or "nothing"
    assert said.startswith(("Expected all tensors to be on the same device", "a tensor was left on the host")), said
