"""The only door to llama_cpp.server: its application, with our model and one thread that runs it.

What is replaced of it, and why:

- its LlamaProxy loads a llama_cpp.Llama; ours gives out the model that is already loaded;
- its thread pool: ggml makes a team of threads for every thread that calls it, so the model keeps to one;
- its error handler prints a traceback for every refused request; the gate answers and logs instead;
- its settings read the environment (MODEL, API_KEY, CONFIG_FILE ...); ours come from the command line alone.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import os
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from twofold import errors

_END = object()


def check_libraries() -> None:
    """Import what the server needs.

    Raises
    ------
    ArgumentError
        naming what is missing and how to install it.
    """
    try:
        for name in ("llama_cpp.server.app", "prometheus_client", "uvicorn"):
            importlib.import_module(name)
    except ImportError as error:
        raise errors.ArgumentError(f"twofold serve needs {error.name}: pip install twofold[server]") from error


def make_app(llm: Any, name: str, thread: ThreadPoolExecutor) -> Any:
    """Make the application.

    Parameters
    ----------
    llm
        the model that answers.
    name
        what ``/v1/models`` calls it.
    thread
        of one worker, which runs the model.

    Returns
    -------
    Any
        an ASGI application. llama_cpp.server keeps its state in its module: one application for a process.
    """
    from llama_cpp.server import app, errors, model
    from llama_cpp.server.settings import ModelSettings, ServerSettings

    class Proxy(model.LlamaProxy):  # type: ignore[misc]
        """Gives out the model it was made with."""

        @staticmethod
        def load_llama_from_model_settings(settings: Any) -> Any:
            return llm

    app.LlamaProxy = Proxy
    app.run_in_threadpool = partial(_call, thread)
    app.iterate_in_threadpool = partial(_iterate, thread)
    errors.RouteErrorHandler.error_message_wrapper = _internal_error
    server = ServerSettings.model_construct(interrupt_requests=False, disable_ping_events=False, root_path="")
    settings = ModelSettings.model_construct(model=name, model_alias=name)
    config = os.environ.pop("CONFIG_FILE", None)  # a name that others use too; create_app would take its settings
    try:
        made = app.create_app(server_settings=server, model_settings=[settings])
    finally:
        if config is not None:
            os.environ["CONFIG_FILE"] = config
    made.dependency_overrides[app.get_llama_proxy] = lambda: app._llama_proxy  # lists models without waiting for turns
    return made


async def _call(thread: ThreadPoolExecutor, function: Callable[..., Any], *arguments: Any, **settings: Any) -> Any:
    return await asyncio.get_running_loop().run_in_executor(thread, partial(function, *arguments, **settings))


async def _iterate(thread: ThreadPoolExecutor, source: Iterator[Any]) -> AsyncIterator[Any]:
    iterator = iter(source)
    while (item := await _call(thread, next, iterator, _END)) is not _END:
        yield item


def _internal_error(_: Any, error: Exception, body: Any = None) -> tuple[int, dict[str, Any]]:
    return 500, {"message": str(error), "type": "server_error", "param": None, "code": None}


def check_body(chat: bool, body: dict[str, Any]) -> None:
    """Check a request as llama_cpp.server will read it.

    Raises
    ------
    ArgumentError
        naming the first field with a value that is not allowed.
    """
    from llama_cpp.server.types import CreateChatCompletionRequest, CreateCompletionRequest
    from pydantic import ValidationError

    try:
        (CreateChatCompletionRequest if chat else CreateCompletionRequest).model_validate(body)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        raise errors.ArgumentError(f"{field}: {first['msg']}") from error


def check_schema(schema: Any) -> None:
    """Refuse a JSON schema that has no grammar; llama_cpp would silently allow any JSON instead.

    Raises
    ------
    ArgumentError
        with the reason.
    """
    from llama_cpp.llama_grammar import LlamaGrammar

    try:
        LlamaGrammar.from_json_schema(json.dumps(schema))
    except Exception as error:  # the converter raises whatever it stumbles over
        raise errors.ArgumentError(f"this JSON schema cannot be turned into a grammar: {error!r}") from error


def chat_handler(llm: Any) -> Callable[..., Any]:
    """Return what `llm` would answer chats with: llama_cpp's handler of its chat format or of its own template.

    Raises
    ------
    ArgumentError
        for a chat format that llama_cpp does not have.
    """
    from llama_cpp import llama_chat_format

    found = llm.chat_handler or llm._chat_handlers.get(llm.chat_format)
    if found is None:
        try:
            found = llama_chat_format.get_chat_completion_handler(llm.chat_format)
        except llama_chat_format.LlamaChatCompletionHandlerNotFoundException as error:
            known = sorted(llama_chat_format.LlamaChatCompletionHandlerRegistry()._chat_handlers)
            raise errors.ArgumentError(f"--chat-format {llm.chat_format}: {', '.join(known)} are allowed") from error
    return found  # type: ignore[no-any-return]
