"""What clients talk to: keys, limits, the queue, health and metrics in front of llama_cpp.server's application."""

from __future__ import annotations

import asyncio
import hmac
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeAlias

from twofold.server import body
from twofold.server.metrics import Metrics
from twofold.server.model import Job, ServedLlama
from twofold.server.replies import Message, Refused, Relay, Send, refusal, refuse, whole
from twofold.server.turns import Closed, QueueFull, Turns

Receive: TypeAlias = Callable[[], Awaitable[Message]]
Scope: TypeAlias = Message
Application: TypeAlias = Callable[[Scope, Receive, Send], Awaitable[None]]

_CHAT = "/v1/chat/completions"
_WORK = ("/v1/completions", _CHAT)
_OTHERS = {
    "/v1/models": "GET",
    "/extras/tokenize": "POST",
    "/extras/tokenize/count": "POST",
    "/extras/detokenize": "POST",
    "/docs": "GET",
    "/openapi.json": "GET",
}
_GONE = 499  # what others note for a client that left


class _Left(Exception):
    """The client is gone."""


@dataclass(frozen=True)
class Limits:
    """What is allowed.

    Attributes
    ----------
    api_key
        that requests must carry, or None.
    queue
        requests that may wait.
    max_body
        bytes of a request.
    """

    api_key: str | None = None
    queue: int = 32
    max_body: int = 4 << 20


class Gate:
    """The server's ASGI application; `open` gives it the model."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._turns = Turns(limits.queue)
        self._metrics = Metrics(lambda: self._turns.waiting, lambda: float(self._turns.busy))
        self._app: Application | None = None
        self._llm: ServedLlama
        self._job: Job | None = None
        self._cutting = False
        self._duration = 1.0  # of an answer, a moving average in seconds

    def open(self, app: Application, llm: ServedLlama) -> None:
        """Begin to answer."""
        self._llm, self._app = llm, app

    async def drain(self, grace: float) -> None:
        """Refuse what waits and what comes; give the running answer `grace` seconds, then cut it."""
        self._turns.close()
        try:
            await asyncio.wait_for(self._turns.idle(), grace)
        except asyncio.TimeoutError:
            self.cut()
            await self._turns.idle()

    def cut(self) -> None:
        """End the running answer as it stands."""
        self._cutting = True
        if self._job is not None:
            self._job.stop()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["type"] != "http":
            raise RuntimeError(f"{scope['type']}: only HTTP is served")
        started = time.perf_counter()
        status, path = 500, scope["path"]
        try:
            status = await self._route(scope, receive, send, started)
        except _Left:
            status = _GONE
        except Exception as error:
            refused = refusal(error)
            status = refused.status
            await _send_all(send, refuse(refused))
        finally:
            known = path in _WORK or path in _OTHERS or path in ("/health", "/metrics")
            self._metrics.answered(path if known else "other", status, started)

    async def _route(self, scope: Scope, receive: Receive, send: Send, started: float) -> int:
        method, path = scope["method"], scope["path"]
        if path == "/health" and method == "GET":
            return await self._health(send)
        if method != "OPTIONS":
            self._authenticate(scope)
        if path == "/metrics" and method == "GET":
            return await _send_all(send, whole(200, self._metrics.render(), self._metrics.content_type))
        allowed = "POST" if path in _WORK else _OTHERS.get(path)
        if allowed is None:
            raise Refused(404, f"{path}: there is no such thing here")
        if method not in (allowed, "OPTIONS"):
            raise Refused(405, f"{path}: {allowed} is allowed", headers={"allow": allowed})
        if method == "POST" and not _header(scope, b"content-type").startswith(b"application/json"):
            raise Refused(415, "content-type: application/json is allowed; curl: -H 'Content-Type: application/json'")
        if self._app is None:
            raise Refused(503, "the model is being loaded", headers={"retry-after": "5"})
        if self._turns.closed:
            raise _shutting_down()
        if method == "POST" and path in _WORK:
            return await self._work(self._app, scope, receive, send, started)
        return await self._pass(self._app, scope, receive, send)

    async def _health(self, send: Send) -> int:
        if self._app is not None and not self._turns.closed:
            return await _send_all(send, whole(200, b'{"status": "ok"}', "application/json"))
        state = "shutting down" if self._turns.closed else "loading"
        return await _send_all(send, whole(503, f'{{"status": "{state}"}}'.encode(), "application/json"))

    def _authenticate(self, scope: Scope) -> None:
        key = self._limits.api_key
        if key is None:
            return
        if not hmac.compare_digest(_header(scope, b"authorization"), f"Bearer {key}".encode()):
            raise Refused(401, "wrong or missing API key", "invalid_api_key", {"www-authenticate": "Bearer"})

    async def _pass(self, app: Application, scope: Scope, receive: Receive, send: Send) -> int:
        """Let the application answer what needs no turn."""
        raw = await self._read(receive)
        statuses = [500]

        async def watch(message: Message) -> None:
            if message["type"] == "http.response.start":
                statuses[0] = message["status"]
            await send(message)

        await app(scope, _replay(raw), watch)
        return statuses[0]

    async def _read(self, receive: Receive) -> bytes:
        raw = b""
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise _Left
            raw += bytes(message.get("body", b""))
            if len(raw) > self._limits.max_body:
                raise Refused(413, f"the body is larger than {self._limits.max_body} bytes")
            if not message.get("more_body"):
                return raw

    # ---- work for the model --------------------------------------------------------------------------

    async def _work(self, app: Application, scope: Scope, receive: Receive, send: Send, started: float) -> int:
        raw = await self._read(receive)
        chat, vocabulary = scope["path"] == _CHAT, self._llm.n_vocab()
        request = await asyncio.to_thread(body.read, raw, chat=chat, vocabulary=vocabulary)
        outbox: asyncio.Queue[Message | None] = asyncio.Queue()
        pump = asyncio.ensure_future(_pump(outbox, send))
        gone = asyncio.ensure_future(_disconnected(receive))
        try:
            await self._enter(gone)
            status = await self._run(app, scope, request, outbox, gone, started)
            await asyncio.wait({pump, gone}, return_when=asyncio.FIRST_COMPLETED)
            if pump.done():
                pump.result()
            return status
        finally:
            pump.cancel()
            gone.cancel()

    async def _enter(self, gone: asyncio.Future[None]) -> None:
        """Wait for the turn, or for the client to leave."""
        turn = asyncio.ensure_future(self._turns.enter())
        await asyncio.wait({turn, gone}, return_when=asyncio.FIRST_COMPLETED)
        if gone.done():
            self._metrics.left("queued")
            if turn.done() and turn.exception() is None:
                self._turns.leave()
            turn.cancel()
            raise _Left
        try:
            turn.result()
        except QueueFull:
            wait = max(1, round(self._duration * (self._turns.waiting + 1)))
            message = f"{self._turns.limit} requests wait already; try again later"
            raise Refused(429, message, "queue_full", {"retry-after": str(wait)}) from None
        except Closed:
            raise _shutting_down() from None

    async def _run(
        self,
        app: Application,
        scope: Scope,
        request: body.Request,
        outbox: asyncio.Queue[Message | None],
        gone: asyncio.Future[None],
        started: float,
    ) -> int:
        """Use the turn: the model works for this client until the answer ends or the client leaves."""
        begun = time.perf_counter()
        job = self._job = Job(draft_tokens=request.draft_tokens, max_tokens=request.max_tokens)
        relay = Relay(outbox.put_nowait, job, request.include_usage)

        def leave(_: object) -> None:
            if not relay.complete:
                job.stop()
                left.append(job)

        left: list[Job] = []
        gone.add_done_callback(leave)
        if self._cutting:
            job.stop()
        raised = None
        try:
            self._llm.begin(job)
            try:
                await app(scope, _replay(request.body), relay)
            except Exception as error:
                raised = error
            self._llm.end()
            if left:
                self._metrics.left("running")
            relay.close(raised)
            outbox.put_nowait(None)
            self._metrics.worked(job, started)
            self._duration += 0.2 * (time.perf_counter() - begun - self._duration)
        finally:
            self._job = None
            self._turns.leave()
        return _GONE if left else relay.status


def _header(scope: Scope, name: bytes) -> bytes:
    return bytes(dict(scope["headers"]).get(name, b""))


def _shutting_down() -> Refused:
    return Refused(503, "the server is shutting down", headers={"retry-after": "5"})


def _replay(raw: bytes) -> Receive:
    """Make an ASGI `receive` that gives a body that was read already, and never tells of a client that left.

    The application would abandon its work at once then; stopped by its job, the model ends in order.
    """
    given = False

    async def receive() -> Message:
        nonlocal given
        if given:
            await asyncio.Event().wait()
        given = True
        return {"type": "http.request", "body": raw, "more_body": False}

    return receive


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _pump(outbox: asyncio.Queue[Message | None], send: Send) -> None:
    """Send what is in the outbox: a client that reads slowly holds up no one else."""
    while (message := await outbox.get()) is not None:
        await send(message)


async def _send_all(send: Send, messages: list[Message]) -> int:
    for message in messages:
        await send(message)
    return int(messages[0]["status"])
