"""`serve`: an OpenAI-compatible endpoint for a finished run, until it is stopped."""

from __future__ import annotations

import logging
import os

from sft_play.commands.answer import stdout_to_stderr, write_json_line, write_out
from sft_play.commands.machine import finished_run
from sft_play.commands.request import Request

HELP = {
    "serve": "answer as RUN's model over HTTP, as OpenAI's API does (PORT=8000, HOST=127.0.0.1), until Ctrl-C",
}
logger = logging.getLogger(__name__)


def run(request: Request) -> int:
    """Serve. With JSON=1 (and OUT) its one object is written once the endpoint answers, and the command stays."""
    from sft_play.finished.answer import serve

    host, port = request.host or serve.DEFAULT_HOST, serve.read_port(request.port)
    service = serve.service_of(request.engine or serve.ENGINES[0], finished_run(request), host, port)
    warning = serve.warning_of(host)
    if warning is not None:
        logger.warning("%s", warning)
    with stdout_to_stderr(wanted=request.json):
        serving = service.start()
    if request.out is not None:
        write_out(request.out, serving.as_json())
    if request.json:
        write_json_line(serving.as_json())
    else:
        logger.info("%s", "\n".join(serving.lines()))
    with stdout_to_stderr(wanted=request.json):
        code = service.wait()
    if service.is_busy:
        # a daemon thread inside torch while the interpreter is torn down aborts the process (SIGABRT)
        logging.shutdown()
        os._exit(code)
    return code
