"""The `twofold serve` command: the socket, the model, signals."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from twofold import device_arguments, errors, prompting
from twofold.server import app


def serve(arguments: Namespace) -> int:
    """Run ``twofold serve``.

    Raises
    ------
    ArgumentError
        if a library is missing, the address cannot be used, or the model does not allow a setting.
    TwofoldError
        for everything that :class:`twofold.Llama` refuses.
    """
    app.check_libraries()
    logging.basicConfig(format="twofold: %(message)s", level=logging.WARNING)
    with contextlib.closing(_listen(arguments.host, arguments.port)) as listener:
        asyncio.run(_run(arguments, listener))
    return 0


def _listen(host: str, port: int) -> socket.socket:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family)
    except OSError as error:
        raise errors.ArgumentError(f"{host}:{port}: {error.strerror}; choose another --host or --port") from error


async def _run(arguments: Namespace, listener: socket.socket) -> None:
    """Listen at once, so that ``/health`` tells of the loading; then load, answer, and leave in order."""
    import uvicorn

    from twofold.server.gate import Gate, Limits

    key = arguments.api_key or os.environ.get("TWOFOLD_API_KEY") or None
    gate = Gate(Limits(api_key=key, queue=arguments.queue, max_body=arguments.max_body))
    config = uvicorn.Config(
        gate,
        lifespan="off",
        access_log=False,
        log_level="warning",
        server_header=False,
        timeout_graceful_shutdown=1,  # for clients that still read an answer; the model is done by then
    )
    server = uvicorn.Server(config)
    server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign, assignment]
    leaving = asyncio.Event()
    thread = ThreadPoolExecutor(1, "model")
    loop = asyncio.get_running_loop()
    with _signals(leaving, gate.cut):
        serving = asyncio.ensure_future(server.serve(sockets=[listener]))
        try:
            address = "http://{}:{}".format(*listener.getsockname()[:2])
            print(f"twofold: listening on {address}, loading {arguments.base}", file=sys.stderr, flush=True)
            llm = await loop.run_in_executor(thread, _load, arguments)
            name = arguments.alias or Path(arguments.base).name.removesuffix(".base.gguf")
            gate.open(app.make_app(llm, name, thread), llm)
            print(f"twofold: {name} is ready", file=sys.stderr, flush=True)
            await leaving.wait()
            print("twofold: shutting down", file=sys.stderr, flush=True)
            await gate.drain(arguments.grace)
            await loop.run_in_executor(thread, llm.close)
        finally:
            server.should_exit = True
            await serving
            thread.shutdown()


@contextlib.contextmanager
def _signals(leaving: asyncio.Event, cut: Callable[[], None]) -> Iterator[None]:
    """Leave at the first SIGTERM or SIGINT; cut the running answer too at the next one; a third ends the process."""
    loop = asyncio.get_running_loop()
    caught = (signal.SIGTERM, signal.SIGINT)

    def leave() -> None:
        if leaving.is_set():
            cut()
            for number in caught:
                loop.remove_signal_handler(number)
        leaving.set()

    for number in caught:
        loop.add_signal_handler(number, leave)
    try:
        yield
    finally:
        for number in caught:
            loop.remove_signal_handler(number)


def _load(arguments: Namespace) -> Any:
    from twofold.server.model import ServedLlama

    optional = {"n_threads": arguments.threads, "chat_format": arguments.chat_format}
    llm = prompting.load_as(
        ServedLlama,
        arguments.base,
        draft_tokens=arguments.draft,
        drafter=None if arguments.drafter == "none" else arguments.drafter,
        residual_bits=arguments.residual_bits,
        residual_path=arguments.residual,
        n_ctx=arguments.ctx,
        n_batch=arguments.batch,
        **device_arguments.options(arguments),
        **{name: value for name, value in optional.items() if value is not None},
    )
    llm.serve(arguments.max_length, app.chat_handler(llm))
    return llm
