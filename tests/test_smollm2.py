"""configs/run_smollm2.yaml the whole way, on real weights (`../shared/real_model.py`) and 60 rows of GSM8K."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT, SHARED, shared
from tests.test_export import converter

pytestmark = pytest.mark.slow


def run_command(folder: Path, *words: str) -> dict:
    """The object that a command prints; it must have gone well."""
    ended = subprocess.run(
        [sys.executable, "-m", "sft_play", *words, "--json"], cwd=folder, env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=3000,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return json.loads(ended.stdout)


def test_sixty_rows_lower_the_held_out_loss_and_the_merge_and_the_gguf_answer_as_the_adapter(tmp_path):
    rows = shared("sft/gsm8k/train.jsonl").read_text(encoding="utf-8").splitlines()
    writer = SHARED.parent / "real_model.py"
    if not writer.exists():
        pytest.skip(f"the shared material is not here: {writer}")
    converter()
    subprocess.run([sys.executable, str(writer), str(tmp_path / "smollm2")], check=True, timeout=600)
    (tmp_path / "train.jsonl").write_text("\n".join(rows[:60]))
    (tmp_path / "test.jsonl").write_text("\n".join(rows[60:100]))
    settings = [f"model.name={tmp_path / 'smollm2'}", "data.train_path=train.jsonl", "data.test_path=test.jsonl"]
    settings += ["data.val_fraction=0", "output.name=gsm8k"]
    run_command(tmp_path, "train", "--config", str(ROOT / "configs" / "run_smollm2.yaml"), *settings)
    summary = json.loads((tmp_path / "outputs/gsm8k/summary.json").read_text())
    before, after = (summary[when]["loss"] for when in ("before", "after"))
    assert after < before - 0.1, (before, after)
    run_command(tmp_path, "merge", "--run", "gsm8k")
    assert run_command(tmp_path, "merge-test", "--run", "gsm8k", "--limit", "8")["ok"]
    run_command(tmp_path, "export", "--run", "gsm8k", "--format", "gguf")
    assert run_command(tmp_path, "export-test", "--run", "gsm8k", "--limit", "8")["ok"]
