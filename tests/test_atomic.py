"""Files and folders that are whole: the old one or the new one, and nothing beside them."""

from pathlib import Path

import pytest

from sft_play.files import atomic


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_file_is_replaced_or_stays(tmp_path):
    path = tmp_path / "below" / "file.json"
    atomic.write(path, "old")
    with pytest.raises(UnicodeEncodeError):
        atomic.write(path, "\ud800")
    with pytest.raises(ZeroDivisionError), atomic.replace_path(path) as aside:
        aside.write_text(f"half: {1 / (aside.write_text('half') - 4)}")
    assert (path.read_text(), names(path.parent)) == ("old", ["file.json"])
    atomic.write(path, "new")
    assert (path.read_text(), names(path.parent)) == ("new", ["file.json"])


def test_a_folder_is_replaced_or_stays(tmp_path, monkeypatch):
    path = tmp_path / "model"
    for content in ("old", "new"):
        with atomic.replace_path(path) as aside:
            aside.mkdir()
            (aside / content).touch()
        assert (names(path), names(tmp_path)) == ([content], ["model"])
    rename = Path.rename
    monkeypatch.setattr(Path, "rename", lambda one, to: rename(one, to if "before" in f"{one}{to}" else one / "no"))
    with pytest.raises(OSError, match="no"), atomic.replace_path(path) as aside:
        aside.mkdir()
    assert (names(path), names(tmp_path)) == (["new"], ["model"])


def test_what_a_killed_process_left_at_a_fixed_place_is_removed(tmp_path):
    (tmp_path / "aside").mkdir()
    (tmp_path / "aside" / "left").touch()
    with atomic.replace_path(tmp_path / "model", temporary=tmp_path / "aside") as aside:
        aside.mkdir()
    assert (names(tmp_path / "model"), names(tmp_path)) == ([], ["model"])
