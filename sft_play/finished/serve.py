"""`make serve`: an OpenAI-compatible endpoint that answers as a finished run's model.

By default the server of `transformers serve` runs in this process, with the model as it was
trained (`openai`). With vLLM its own `vllm serve` takes the place of this process, over the
merged model, whose folder holds the tokenizer, the template and the stop tokens of training.
"""

import json
import logging
import os
import re
import shlex
import shutil
import signal
import socket
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from sft_play.answers import Answer
from sft_play.errors import BackendError, ConfigError
from sft_play.finished.run import FinishedRun, describe_context_window, next_command_line
from sft_play.log import one_line
from sft_play.machine.network import allowed_host_names, server_url
from sft_play.machine.software import install_command
from sft_play.process.environment import independent_environment
from sft_play.process.signals import StopSignals
from sft_play.process.waiting import importing
from sft_play.runs.folder import read_json

logger = logging.getLogger(__name__)

SERVING_ENGINES = ("transformers", "vllm")
DEFAULT_HOST, DEFAULT_PORT = "127.0.0.1", 8000
_POLL_INTERVAL_S = 0.1


@dataclass(frozen=True)
class ServedEndpoint(Answer):
    """An endpoint that answers."""

    run: Path
    engine: str
    model: str
    weights: Path
    host: str
    port: int
    pid: int
    # A line for clients on how the run was trained (`_client_notes`); may be empty.
    context: str = ""

    @property
    def url(self) -> str:
        """The base URL for clients on this machine."""
        return f"{server_url(self.host, self.port)}v1"

    def as_json(self) -> dict[str, Any]:
        return {**super().as_json(), "url": self.url}

    def lines(self) -> list[str]:
        request = json.dumps(
            {
                "model": self.model,
                "messages": [{"role": "user", "content": "Hello"}],
                "temperature": 0,
            },
            ensure_ascii=False,
        )
        return [
            f"Serving {self.weights} at {self.url} (pid {self.pid}); model name: {self.model}",
            (
                f"  curl {self.url}/chat/completions -H 'Content-Type: application/json' -d"
                f" {shlex.quote(request)}"
            ),
            *([self.context] if self.context else []),
            f"Ctrl-C ends it. {next_command_line('push', 'REPO=user/name', RUN=self.run)}",
        ]


def _client_notes(run: FinishedRun, model: str) -> str:
    """Say what clients should know of how the run was trained; empty where there is nothing."""
    notes = [describe_context_window(run, model)[1]]
    if run.config.data.style.system:
        notes.append(
            "System prompt: rows of training had that of data.style.system,"
            " and requests bring their own"
        )
    return "; ".join(filter(None, notes))


def parse_port(text: str | None) -> int:
    """Read the port of `PORT=`; 0 is any free one. Raises ConfigError where it is no port."""
    if text is None:
        return DEFAULT_PORT
    if not re.fullmatch("[0-9]{1,5}", text.strip()) or int(text) >= 65_536:
        raise ConfigError(
            f"PORT={one_line(text)} is not a port;"
            " ports go from 1 to 65535, and 0 takes any free one"
        )
    return int(text)


def claim_port(host: str, port: int) -> socket.socket:
    """Listen on a port, so that nobody takes it while the model is loaded; returns the socket.
    Raises ConfigError where the port is taken, or this machine has no such address."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        # also a port whose last connections are still closing (TIME_WAIT)
        return socket.create_server(
            address, family=family, dualstack_ipv6=family == socket.AF_INET6
        )
    except (OSError, UnicodeError) as error:
        reason = one_line(getattr(error, "strerror", None) or str(error), limit=120)
        raise ConfigError(
            f"HOST={one_line(host)} PORT={port} cannot be listened on: {reason}; HOST= names an"
            " address of this machine, PORT=0 takes any free port"
        ) from None


class TransformersService:
    """`transformers serve`'s server in a thread of this process."""

    def __init__(self, run: FinishedRun, host: str, port: int) -> None:
        self._run, self._host, self._listener = run, host, claim_port(host, port)

    def start(self) -> ServedEndpoint:
        """Load the model and serve it; returns once it answers."""
        try:
            with importing():
                import uvicorn

                from sft_play.finished.openai import openai_app
        # without the package openai the module of transformers ends in a NameError (5.23)
        except (ImportError, NameError) as error:
            raise BackendError(
                f"the server of transformers cannot be used here ({one_line(str(error))}):"
                f" {install_command('sft-play[serve]')}, with the transformers of requirements.lock"
            ) from None
        from sft_play.finished.respond import Responder
        from sft_play.training.prepare.library_messages import quiet_libraries

        quiet_libraries()
        run, port = self._run, int(self._listener.getsockname()[1])
        name = run.folder.path.name
        # log_config=None: uvicorn would replace the handlers of this program's logging by its own
        self._server = uvicorn.Server(
            uvicorn.Config(
                openai_app(Responder(run), name, allowed_hosts=allowed_host_names(self._host)),
                log_config=None,
                log_level="warning",
                access_log=False,
                # seconds for answers under way, after the first Ctrl-C
                timeout_graceful_shutdown=30,
            )
        )
        # in a thread, so that Ctrl-C is this program's to handle: uvicorn installs signal handlers
        # in the main one only
        self._thread = threading.Thread(
            target=self._server.run, args=([self._listener],), name="serve", daemon=True
        )
        self._thread.start()
        while not self._server.started:  # uvicorn has no event for it
            if not self._thread.is_alive():
                raise BackendError(
                    f"the server at {self._host} port {port} did not start; see the lines above"
                )
            time.sleep(_POLL_INTERVAL_S)
        return ServedEndpoint(
            run.folder.path,
            SERVING_ENGINES[0],
            name,
            run.weights,
            self._host,
            port,
            os.getpid(),
            _client_notes(run, run.config.model.name if run.is_adapter else str(run.weights)),
        )

    def wait(self) -> NoReturn:
        """Wait until it ends or is stopped, and end this process. Ctrl-C lets answers under way
        end; a second one or SIGTERM does not."""
        finished = threading.Event()

        def stop(signal_number: int) -> None:
            if signal_number != signal.SIGINT:
                finished.set()
                return
            logger.info("Stopping once the answers under way have ended; Ctrl-C again stops now")
            self._server.should_exit = True

        with StopSignals(stop, lambda _: finished.set()):
            while self._thread.is_alive() and not finished.is_set():
                finished.wait(_POLL_INTERVAL_S)
        logger.info("Stopped")
        sys.stdout.flush()
        logging.shutdown()
        # a daemon thread that still computes an answer would abort Python while it takes itself
        # down
        os._exit(0)


class VllmService:
    """`vllm serve` in the place of this process."""

    def __init__(self, run: FinishedRun, host: str, port: int) -> None:
        program = shutil.which(
            "vllm",
            path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]),
        )
        if program is None:
            raise BackendError(
                "ENGINE=vllm: there is no program vllm in PATH or in this environment; install "
                "vLLM in an environment of its own, and put its bin folder into PATH"
            )
        self._run, self._host, self._program = run, host, program
        # vLLM itself says late, and in a traceback, that a port is taken
        with claim_port(host, port) as listener:
            self._port = int(listener.getsockname()[1])

    def start(self) -> ServedEndpoint:
        """Merge where that has not been done, and say where vLLM will answer."""
        from sft_play.finished.export.merge import ensure_whole_model_folder

        weights = ensure_whole_model_folder(self._run, is_locked=False)
        name = self._run.folder.path.name
        config = read_json(weights / "config.json")
        # vLLM's own choice for fp32 weights is a 16-bit dtype
        dtype = str(config.get("dtype") or config.get("torch_dtype") or "auto")
        self._command = [
            *(self._program, "serve", str(weights), "--served-model-name", name),
            *("--host", self._host, "--port", str(self._port), "--dtype", dtype),
            *(["--trust-remote-code"] if self._run.config.model.trust_remote_code else []),
        ]
        logger.info("Starting: %s", shlex.join(self._command))
        return ServedEndpoint(
            self._run.folder.path,
            SERVING_ENGINES[1],
            name,
            weights,
            self._host,
            self._port,
            os.getpid(),
            _client_notes(self._run, str(weights)),
        )

    def wait(self) -> NoReturn:
        """Become vLLM, whose exit code is this command's."""
        sys.stdout.flush()  # execve drops what is still buffered
        os.execve(self._command[0], self._command, independent_environment(os.environ))


Service = TransformersService | VllmService


def create_service(engine: str, run: FinishedRun, host: str, port: int) -> Service:
    """Create the service of an engine; raises ConfigError for an unknown one."""
    if engine not in SERVING_ENGINES:
        raise ConfigError(f"ENGINE={one_line(engine)} is not one of {', '.join(SERVING_ENGINES)}")
    return (VllmService if engine == "vllm" else TransformersService)(run, host, port)
