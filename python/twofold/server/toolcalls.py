"""Tool calls that a model writes into its text, as ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``.

llama_cpp's handlers force a call of a tool that the client names; where the model may choose, they leave its text as it
is. Templates of the Hermes kind (Qwen and others) make models write the form above, which is read here; so is a text
that is nothing but such an object, fenced as code or not, which smaller ones write instead.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Callable, Iterator
from typing import Any

_OPEN = "<tool_call>"
_CALL = re.compile(r"<tool_call>\s*(.*?)\s*(?:</tool_call>|$)", re.DOTALL)
_BARE = re.compile(r"\s*(?:```(?:json)?\s*)?(\{.*\})\s*(?:```)?\s*", re.DOTALL)
_OWN_TOOLS = ("chatml-function-calling", "functionary", "functionary-v1", "functionary-v2")


def answer(handler: Callable[..., Any], llm: Any, request: dict[str, Any]) -> Any:
    """Answer a chat by `handler`, with tool calls read from the text where the model may choose to call.

    Returns
    -------
    Any
        the answer, or an iterator of chunks.
    """
    made = handler(**request)
    if not request.get("tools"):
        return made
    if request.get("tool_choice") != "auto" or llm.chat_format in _OWN_TOOLS:
        return _named_once(made) if request.get("stream") else made
    names = {tool["function"]["name"] for tool in request["tools"]}
    return _stream(made, names) if request.get("stream") else _whole(made, names)


def _named_once(chunks: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Leave the name of a call in its first chunk alone: clients join what the chunks hold."""
    seen = set()
    for chunk in chunks:
        delta = chunk["choices"][0]["delta"]
        delta.pop("function_call", None)
        for call in delta.get("tool_calls") or ():
            if call["id"] in seen:
                for name in ("id", "type"):
                    del call[name]
                del call["function"]["name"]
            else:
                seen.add(call["id"])
        yield chunk


def parse(text: str, names: set[str]) -> tuple[str, list[dict[str, Any]]]:
    """Split a text into what is said and calls made; where one is not of a tool with these names, all stays text."""
    bare = _BARE.fullmatch(text)
    written = [bare[1]] if bare else [match[1] for match in _CALL.finditer(text)]
    calls = [_call(each, names) for each in written]
    found = [call for call in calls if call is not None]
    if not found or len(found) < len(calls):
        return text, []
    return "" if bare else _CALL.sub("", text).strip(), found


def _call(text: str, names: set[str]) -> dict[str, Any] | None:
    try:
        call = json.loads(text)
        name, arguments = call["name"], call.get("arguments", call.get("parameters", {}))
    except (ValueError, TypeError, KeyError, AttributeError):
        return None
    if name not in names:
        return None
    written = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    function = {"name": name, "arguments": written}
    return {"id": f"call_{uuid.uuid4().hex}", "type": "function", "function": function}


def _whole(made: dict[str, Any], names: set[str]) -> dict[str, Any]:
    choice = made["choices"][0]
    said, calls = parse(choice["message"].get("content") or "", names)
    if calls:
        choice["message"] |= {"content": said or None, "tool_calls": calls}
        choice["finish_reason"] = "tool_calls"
    return made


def _stream(chunks: Iterator[dict[str, Any]], names: set[str]) -> Iterator[dict[str, Any]]:
    """Pass text on as it comes, but hold back what may be a call until the end."""
    held, sent = "", False
    for chunk in chunks:
        choice = chunk["choices"][0]
        if choice["finish_reason"] is None:
            held += choice["delta"].get("content") or ""
            ready = 0 if not sent and held.lstrip().startswith(("{", "`")) else _before_a_call(held)
            sent = sent or bool(held[:ready].strip())
            if "content" in choice["delta"]:
                choice["delta"]["content"] = held[:ready]
            held = held[ready:]
            yield chunk
            continue
        said, calls = parse(held, names)
        if said.strip() or not calls:
            yield _like(chunk, {"content": said})
        if calls:
            yield _like(chunk, {"tool_calls": [{"index": place, **call} for place, call in enumerate(calls)]})
            choice["finish_reason"] = "tool_calls"
        yield chunk


def _before_a_call(text: str) -> int:
    """How many characters cannot belong to a call: those before its tag, or before what may be a tag's beginning."""
    if _OPEN in text:
        return text.index(_OPEN)
    for length in range(min(len(_OPEN) - 1, len(text)), 0, -1):
        if text.endswith(_OPEN[:length]):
            return len(text) - length
    return len(text)


def _like(chunk: dict[str, Any], delta: dict[str, Any]) -> dict[str, Any]:
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}
    return {**chunk, "choices": [choice]}
