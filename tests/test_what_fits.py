"""docs/what-fits.md is what the plan says today, and its date is that of its figures."""

import json
import random
import re

import pytest

from benchmarks import what_fits
from sft_play.cli import main
from tests.conftest import ROOT

PAGE = (ROOT / "docs" / "what-fits.md").read_text(encoding="utf-8")
ROWS = {
    (model, card): dict(zip(what_fits.MODES, cells, strict=True))
    for model, table in re.findall(r"^## (\S+)\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
    for card, *cells in (re.split(r" *\| *", line.strip("| ")) for line in table.splitlines()[3:] if line)
}


def test_the_page_has_every_card_model_and_mode():
    assert set(ROWS) == {(model, card) for model in what_fits.MODELS for card in what_fits.CARDS}
    assert re.search(r"the figures are of 20\d\d-\d\d-\d\d", PAGE)


@pytest.mark.parametrize("seed", range(5))
def test_a_cell_is_what_plan_says_of_it(seed, tmp_path, capfd):
    chosen = random.Random(seed)
    (model, card), column = chosen.choice(sorted(ROWS)), chosen.choice(what_fits.MODES)
    mode, _, streamed = column.partition(", ")
    config = tmp_path / "run.yaml"
    config.write_text(
        f"model: {{name: {model}, max_seq_len: 2048}}\ntuning: {{mode: {mode}}}\ntrain: {{effective_batch_size: 16}}\n"
        "data: {train_path: rows.jsonl, val_path: null, test_path: null}\n"
    )
    words = ["plan", "--config", str(config), "--hardware", f"1x{card},ram={what_fits.RAM_GIB}GiB", "--strategy",
             streamed or "single", "--max", "seq_len"]  # fmt: skip
    capfd.readouterr()
    main([*words, "--json"])
    said, shown = json.loads(capfd.readouterr().out), ROWS[model, card][column]
    longest = said["max"]["value"]
    assert shown.partition(";")[0] == ("-" if longest is None else f"{longest:,}")
    if said["fits"]:
        figures = re.fullmatch(
            r"[\d,]+; micro (\d+), ([\d,]+)/s (?:±(\d+)%|\?)(?: \(measured by plain code: [\d,]+\))?, (\S+) h", shown
        )
        assert figures is not None, shown
        share = said["speed_error"]["share"]
        counted = (
            str(said["micro_batch"]),
            f"{said['tokens_per_s']:,.0f}",
            None if share is None else f"{share:.0%}"[:-1],
        )
        assert figures.groups()[:3] == counted
        assert float(figures[4]) == pytest.approx(1e6 / said["tokens_per_s"] / 3600, rel=0.06)
    else:
        assert ";" not in shown


def test_what_was_measured_is_beside_what_is_predicted_and_a_plan_of_its_code_comes_near(capfd):
    for (model, mode, card), speed in what_fits.MEASURED.items():
        assert f"(measured by plain code: {speed:,})" in ROWS[model, card][mode]
        settings = ("train.kernels=none", f"model.name={model}", f"tuning.mode={mode}", "model.max_seq_len=2048")
        base = str(ROOT / "configs" / "run_bnb.yaml")
        rows = ("train.effective_batch_size=16", "data.train_path=rows.jsonl", "data.val_path=null")
        main(["plan", "--config", base, "--hardware", f"1x{card}", "--strategy", "single", "--json", *settings, *rows])
        assert json.loads(capfd.readouterr().out)["tokens_per_s"] == pytest.approx(speed, rel=0.15)


def test_the_date_stays_where_no_figure_changes(monkeypatch):
    _, _, tables = PAGE.partition("\n\n## ")
    monkeypatch.setattr(what_fits, "tables", lambda: f"\n## {tables}")
    assert what_fits.page(PAGE) == PAGE
    monkeypatch.setattr(what_fits, "tables", lambda: f"\n## {tables}| x |\n")
    assert what_fits.page(PAGE) != PAGE
    assert what_fits.page(PAGE).partition("\n\n## ")[2] == f"{tables}| x |\n"
