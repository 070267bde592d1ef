"""Which program installs, what it is told and where its output goes."""

import os
import re
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

import installer
from installer import Installer, Logged

PIP = Installer("pip", ("/v/bin/python", "-m", "pip", "install"), "", "pip installs")
UV = Installer("uv", ("/bin/uv", "pip", "install", "--python", "/v/bin/python"), "", "uv installs")
MIRROR = "global.index-url='https://mirror.example/simple'\n"


@pytest.fixture
def environ(tmp_path):
    """Variables of a person who has uv on PATH and told it nothing."""
    uv = tmp_path / "bin" / "uv"
    uv.parent.mkdir()
    uv.write_text("#!/bin/sh\n")
    uv.chmod(0o755)
    return {"PATH": str(tmp_path / "bin"), "HOME": str(tmp_path / "home")}


# Which program
def test_uv_is_used_where_it_is_installed_and_pip_otherwise(environ, tmp_path):
    by = installer.choose("/v/bin/python", environ, "")
    assert by[:3] == ("uv", (str(tmp_path / "bin/uv"), "pip", "install", "--python", "/v/bin/python"), "")
    by = installer.choose("/v/bin/python", {**environ, "PATH": str(tmp_path)}, "")
    assert by == ("pip", ("/v/bin/python", "-m", "pip", "install"), "", "pip installs")


def test_an_index_of_pips_settings_keeps_uv_out_unless_uv_knows_one_too(environ):
    by = installer.choose("/v/bin/python", environ, MIRROR)
    assert (by.name, by.configured) == ("pip", "pip's settings name an index (global.index-url)")
    assert by.why == "pip installs: pip's settings name an index (global.index-url), and uv does not read them"
    by = installer.choose("/v/bin/python", {**environ, "UV_INDEX_URL": "https://mirror.example/simple"}, MIRROR)
    assert (by.name, by.configured) == ("uv", "uv's settings name an index (UV_INDEX_URL)")
    without = installer.choose("/v/bin/python", {**environ, "PATH": "/no"}, MIRROR)
    assert (without.name, without.why) == ("pip", "pip installs")
    assert without.configured == by.configured.replace("uv's", "pip's").replace("UV_INDEX_URL", "global.index-url")


@pytest.mark.parametrize(("settings", "told"), [
    (MIRROR, "global.index-url"),
    (":env:.extra-index-url='a'\n:env:.find-links='/wheels'\n", ":env:.extra-index-url, :env:.find-links"),
    ("install.no-index='1'\n", "install.no-index"),
    ("global.cert='/ca'\n:env:.default-timeout='180'\nglobal.constraint='/c'\ndownload.index-url='x'\n", ""),
])  # fmt: skip
def test_settings_of_pip_that_name_an_index_are_found(settings, told):
    assert installer.pip_indexes(settings) == told


@pytest.mark.parametrize(("text", "is_told"), [
    ('index-url = "https://mirror.example"\n', True), ('[pip]\nextra-index-url = ["x"]\n', True),
    ('[[index]]\nurl = "x"\n', True), ('[[pip.index]]\nurl = "x"\n', True), ('find-links = ["/wheels"]\n', True),
    ('# index-url = "x"\nindex-strategy = "first-index"\n', False),
    ("native-tls = true\n", False),
])  # fmt: skip
def test_files_of_uv_that_name_an_index_are_found(text, is_told, environ, tmp_path):
    for file, more in (
        (tmp_path / "home/.config/uv/uv.toml", {}),
        (tmp_path / "xdg/uv/uv.toml", {"XDG_CONFIG_HOME": str(tmp_path / "xdg")}),
        (tmp_path / "own.toml", {"UV_CONFIG_FILE": str(tmp_path / "own.toml")}),
    ):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        assert installer.uv_indexes({**environ, **more}) == (str(file) if is_told else "")
        file.unlink()
    assert installer.uv_indexes({**environ, "UV_INDEX": "x", "UV_FIND_LINKS": "/w"}) == "UV_INDEX, UV_FIND_LINKS"


def test_pips_real_settings_are_asked_for_with_the_users_variables():
    environ = {"PATH": os.environ["PATH"], "PIP_INDEX_URL": "https://m.example"}
    assert ":env:.index-url='https://m.example'" in installer.pip_settings(sys.executable, environ)
    assert installer.pip_settings("/no/python", {}) == ""


# What it is told
def test_another_index_is_asked_for_torch_alone_and_beside_the_usual_one_for_its_needs():
    assert installer.from_index(PIP, "https://x")[:3] == ["--no-deps", "--index-url", "https://x"]
    assert installer.from_index(UV, "https://x") == ["--no-deps", "--index-url", "https://x"]
    assert installer.beside_index(PIP, "https://x") == ["--extra-index-url", "https://x"]
    assert installer.beside_index(UV, "https://x")[-2:] == ["--index-strategy", "unsafe-best-match"]


# The log
def test_output_goes_to_the_log_and_not_to_the_person(tmp_path, capfd):
    run = Logged(tmp_path / "log")
    assert run([sys.executable, "-c", "import sys; print('said'); print('warned', file=sys.stderr)"], tmp_path) == 0
    assert run([sys.executable, "-c", "import os; print(os.getcwd()); raise SystemExit(3)"], tmp_path) == 3
    assert capfd.readouterr() == ("", "")
    lines = run.tail()
    assert {"said", "warned"} <= set(lines)
    assert lines[-1] == str(tmp_path)
    assert sum(line.startswith("$ ") for line in lines) == 2
    # the tail is the last lines that say something
    run = Logged(tmp_path / "log")
    assert run.tail() == []
    run.log.write_text("\n".join(f"line {n}\n" for n in range(100)) + "\rbar 1%\rbar 2%\n\n")
    assert run.tail(2) == ["bar 1%", "bar 2%"]
    assert len(run.tail()) == installer.LINES_SHOWN


def test_a_terminal_sees_one_line_that_is_renewed_and_taken_away(tmp_path, monkeypatch):
    reader, writer = os.openpty()
    terminal = os.fdopen(writer, "w")
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(installer.shutil, "get_terminal_size", lambda: os.terminal_size((40, 24)))
    run = Logged(tmp_path / "log")
    run([sys.executable, "-uc", "import time; print('Downloading ' + 'a' * 99); time.sleep(1.5)"], tmp_path)
    seen, end = "", time.monotonic() + 5
    while not re.search("aa\r\033\\[K$", seen) and time.monotonic() < end:
        seen += os.read(reader, 10000).decode()
    terminal.close()
    os.close(reader)
    assert "\n" not in seen
    first, *more, last = seen.split("\r\033[K")
    assert (first, last) == ("", "")
    assert all(len(line) == 39 and line.startswith("[setup] ") for line in more)
    assert "s: Downloading aa" in more[-1]


def test_ctrl_c_ends_the_installer(tmp_path):
    run = Logged(tmp_path / "log")
    timer = threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    begun = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        run([sys.executable, "-uc", "import os, time; print(os.getpid()); time.sleep(60)"], tmp_path)
    assert time.monotonic() - begun < 30
    assert not Path(f"/proc/{run.tail(1)[0]}").exists()
