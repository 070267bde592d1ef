"""`python -m sft_play.launch.own_board --logdir=…`: TensorBoard's own program, with a check of each request's Host.

TensorBoard answers under any host name. Here one that listens on this machine alone refuses pages of other origins.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from absl import app
from tensorboard import default, main_lib, program

from sft_play.facts.network import allowed_host_names, is_local_request


def refuse_foreign_requests(tensorboard_app: Any, host: str) -> Any:
    """A WSGI application that answers 403 to requests under a name, or from a page, that is not this machine's."""
    names = allowed_host_names(host)

    def filtered_app(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        if is_local_request(names, environ.get("HTTP_HOST", ""), environ.get("HTTP_ORIGIN")):
            return tensorboard_app(environ, start_response)  # type: ignore[no-any-return]
        body = b"This TensorBoard answers this machine alone, and the request names another in Host or Origin.\n"
        headers = [("Content-Type", "text/plain"), ("X-Content-Type-Options", "nosniff")]
        start_response("403 Forbidden", [*headers, ("Content-Length", str(len(body)))])
        return [body]

    return filtered_app


def _create_server(tensorboard_app: Any, flags: Any) -> Any:
    return program.create_port_scanning_werkzeug_server(refuse_foreign_requests(tensorboard_app, flags.host), flags)


if __name__ == "__main__":
    main_lib.global_init()
    tensorboard = program.TensorBoard(plugins=default.get_plugins(), server_class=_create_server)
    app.run(tensorboard.main, flags_parser=tensorboard.configure)
