"""Commands run one after the other in a process whose hub, and whose package for kernels of the hub, only note what
they are asked for.

echo '[["check", "--config", "my.yaml"]]' | python -m tests.asked_of_hub FOLDER
"""

import contextlib
import http.server
import io
import json
import os
import sys
import threading
from pathlib import Path
from typing import Any

KERNELS = """
import os, urllib.request
from unittest.mock import MagicMock

def use_kernel_forward_from_hub(*_):
    return lambda it: it

use_kernelized_func = replace_kernel_forward_from_hub = use_kernel_forward_from_hub

def get_kernel(name, *_, **__):
    urllib.request.urlopen(os.environ["HF_ENDPOINT"] + "/kernels/" + name)

def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return MagicMock()
"""
"""A package `kernels` as far as transformers and bitsandbytes import it."""
OF_LIBRARIES = "/kernels/kernels-community/quantization-bitsandbytes"
"""What bitsandbytes (0.50.2) asks for at its import on some CPUs, whatever the model."""
asked: list[str] = []


class Hub(http.server.BaseHTTPRequestHandler):
    """A hub that has nothing."""

    def log_message(self, *_: Any) -> None:
        """Nothing."""

    def do_GET(self) -> None:
        """Note the path, and that there is no such thing."""
        asked.append(self.path)
        self.send_response(404)
        self.send_header("X-Error-Code", "RepoNotFound")
        self.end_headers()

    do_HEAD = do_POST = do_GET


def main() -> None:
    """Read command lines from standard input, and write a line on what became of each."""
    folder = Path(sys.argv[1])
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    os.environ |= {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HF_HOME": str(folder / "hf")}
    os.environ.pop("HF_HUB_OFFLINE", None)
    version = "0.18.2"  # KERNELS_MIN_VERSION of transformers 5.23
    for path, text in {
        "kernels/__init__.py": KERNELS,
        f"kernels-{version}.dist-info/METADATA": f"Metadata-Version: 2.1\nName: kernels\nVersion: {version}\n",
    }.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    sys.path.insert(0, str(folder))
    from transformers.utils.import_utils import is_kernels_available

    from sft_play.cli import main as command

    assert is_kernels_available()
    for words in json.load(sys.stdin):
        asked.clear()
        out = io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
            code = command(words)
        found = [path for path in asked if path != OF_LIBRARIES]
        sys.__stdout__.write(json.dumps({"code": code, "asked": found, "said": out.getvalue()}) + "\n")
        sys.__stdout__.flush()


if __name__ == "__main__":
    main()
