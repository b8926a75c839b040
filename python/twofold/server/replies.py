"""What goes back: errors as OpenAI writes them, and llama_cpp.server's answers with usage added."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, TypeAlias

import jinja2

from twofold import errors
from twofold.server.model import Job, TooLongError, too_long

Message: TypeAlias = MutableMapping[str, Any]
Send: TypeAlias = Callable[[Message], Awaitable[None]]
Deliver: TypeAlias = Callable[[Message], None]

_NO_ROOM = re.compile(r"Requested tokens \((\d+)\) exceed context window of (\d+)")  # llama_cpp's own words

log = logging.getLogger("twofold.server")


class Refused(Exception):
    """A request that is answered with an error.

    Parameters
    ----------
    status
        of HTTP.
    message
        for people.
    code
        for programs, or None.
    headers
        more of them.
    """

    def __init__(
        self, status: int, message: str, code: str | None = None, headers: dict[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.headers = status, code, headers or {}

    def payload(self) -> dict[str, Any]:
        """Return the error in OpenAI's form."""
        kinds = {401: "authentication_error", 429: "rate_limit_error"}
        kind = kinds.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": str(self), "type": kind, "param": None, "code": self.code}}


def refusal(error: BaseException) -> Refused:
    """Say what a client is told about an exception."""
    if isinstance(error, Refused):
        return error
    if isinstance(error, TooLongError):
        return Refused(400, str(error), "context_length_exceeded")
    if found := _NO_ROOM.match(str(error)):
        return Refused(400, too_long(int(found[2]), int(found[1]), 1), "context_length_exceeded")
    if isinstance(error, (errors.ArgumentError, jinja2.TemplateError)) or type(error) is ValueError:
        return Refused(400, str(error))
    log.error("a request failed", exc_info=error)
    return Refused(500, f"{type(error).__name__}: {error}")


def whole(status: int, body: bytes, content_type: str, headers: dict[str, str] | None = None) -> list[Message]:
    """ASGI messages of a response."""
    named = {"content-type": content_type, "content-length": str(len(body)), **(headers or {})}
    raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in named.items()]
    return [
        {"type": "http.response.start", "status": status, "headers": raw},
        {"type": "http.response.body", "body": body, "more_body": False},
    ]


def refuse(error: Refused) -> list[Message]:
    """ASGI messages of a refusal."""
    return whole(error.status, json.dumps(error.payload()).encode(), "application/json", error.headers)


class Relay:
    """ASGI's `send` for llama_cpp.server, between it and the client.

    The head of a stream is held back until its first event, so that what fails before it has a status of its own.

    Parameters
    ----------
    deliver
        takes messages for the client.
    job
        whose usage is added.
    include_usage
        to a stream too, as its last chunk.

    Attributes
    ----------
    status
        of the response; 0 before there is one.
    complete
        whether the answer is; a client may leave then.
    """

    def __init__(self, deliver: Deliver, job: Job, include_usage: bool) -> None:
        self._deliver, self._job, self._include_usage = deliver, job, include_usage
        self._head: Message = {}
        self._started = False
        self._body = self._last = b""
        self.status = 0
        self.complete = False

    @property
    def _streams(self) -> bool:
        headers = dict(self._head.get("headers", []))
        return bool(headers.get(b"content-type", b"").startswith(b"text/event-stream"))

    async def __call__(self, message: Message) -> None:
        """Take a message of the application."""
        if message["type"] == "http.response.start":
            self._head, self.status = message, message["status"]
        elif not self._streams:
            self._body += message.get("body", b"")
            self.complete = not message.get("more_body")
        elif event := message.get("body", b""):
            self.complete = self.complete or event.startswith(b"data: [DONE]")
            if self.complete and self._include_usage and self._job.error is None:
                self._event(self._usage())
            self._last = event if event.startswith(b"data: {") else self._last
            self._event(event)

    def _event(self, event: bytes) -> None:
        if not self._started:
            self._started = True
            self._deliver(self._head)
        self._deliver({"type": "http.response.body", "body": event, "more_body": True})

    def _usage(self) -> bytes:
        chunk = json.loads(self._last.removeprefix(b"data: ")) if self._last else {}
        return b"data: " + json.dumps({**chunk, "choices": [], "usage": self._job.usage()}).encode() + b"\n\n"

    def close(self, raised: BaseException | None) -> None:
        """Deliver what is left, once the application has returned or raised."""
        error = self._job.error or raised
        if self._started:
            if error is not None:
                self._event(b"data: " + json.dumps(refusal(error).payload()).encode() + b"\n\n")
            self._deliver({"type": "http.response.body", "body": b"", "more_body": False})
            return
        if error is None and self.status >= 400:
            error = Refused(self.status, _said(self._body))
        if error is not None:
            refused = refusal(error)
            self.status = refused.status
            messages = refuse(refused)
        else:
            answer = json.loads(self._body)
            answer["usage"] = self._job.usage()
            kept = {k.decode("latin-1"): v.decode("latin-1") for k, v in self._head["headers"]}
            messages = whole(self.status, json.dumps(answer, ensure_ascii=False).encode(), "application/json")
            messages[0]["headers"] += [
                (k.encode(), v.encode()) for k, v in kept.items() if k not in ("content-type", "content-length")
            ]
        for message in messages:
            self._deliver(message)


def _said(body: bytes) -> str:
    """Return the message in an error of llama_cpp.server or FastAPI."""
    try:
        found = json.loads(body)
        return str(found.get("error", {}).get("message") or found["detail"])
    except (ValueError, KeyError, AttributeError):
        return body.decode("utf-8", "replace")
