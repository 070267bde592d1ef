"""A limit on the bodies of requests: one that is longer is read to its end and thrown away, then refused."""

from __future__ import annotations

from typing import Any

from starlette.responses import JSONResponse

_DRAINED = 64
"""Of a body that is too long, this many times the limit is read before the connection is closed: a client sees the
answer only once it has sent everything."""


class BodyLimit:
    """ASGI middleware: answers 413 to bodies of more than `most` bytes, which are never held in memory."""

    def __init__(self, app: Any, *, most: int) -> None:
        self._app, self._most = app, most

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        messages, size = [], 0
        while True:
            message = await receive()
            size += len(message.get("body", b""))
            if size <= self._most:
                messages.append(message)
            else:
                messages.clear()
            if not message.get("more_body") or size > _DRAINED * self._most:
                break
        if size > self._most:
            said = f"the body has more than {self._most} bytes, the most that this server takes"
            error = {"message": said, "type": "invalid_request_error", "param": None, "code": None}
            await JSONResponse({"error": error}, status_code=413)(scope, receive, send)
            return
        replay = iter(messages)

        async def received() -> Any:
            return next(replay, None) or await receive()

        await self._app(scope, received, send)
