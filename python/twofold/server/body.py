"""What clients ask for: checked, and put the way llama_cpp.server reads it.

It follows OpenAI's schema less closely than clients do; where it would silently ignore or misread a field, the field is
translated or refused here.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from twofold import errors
from twofold.loop import MAX_DRAFT
from twofold.server import app

MAX_LOGPROBS = 20
MAX_REPETITIONS = 1000


@dataclass(frozen=True)
class Request:
    """A checked request.

    Attributes
    ----------
    body
        JSON for llama_cpp.server.
    include_usage
        whether a stream ends with a chunk of ``usage``.
    draft_tokens, max_tokens
        as asked for, or None.
    """

    body: bytes
    include_usage: bool
    draft_tokens: int | None
    max_tokens: int | None


def read(raw: bytes, *, chat: bool, vocabulary: int) -> Request:
    """Check a request's body.

    Parameters
    ----------
    raw
        JSON.
    chat
        whether it is a chat's.
    vocabulary
        number of tokens of the model.

    Raises
    ------
    ArgumentError
        naming the field and what is allowed.
    """
    try:
        body = json.loads(raw, parse_constant=_no_constant)
        json.dumps(body, ensure_ascii=False).encode()  # half a surrogate pair is JSON, but no text
    except (ValueError, RecursionError) as error:
        raise errors.ArgumentError(f"the body is not JSON that can be read: {error}") from error
    if not isinstance(body, dict):
        raise errors.ArgumentError("the body is not a JSON object")
    body = {name: value for name, value in body.items() if value is not None}
    draft = _integer(body, "draft_tokens", 0, MAX_DRAFT)
    options = body.pop("stream_options", None) or {}
    _common(body, vocabulary)
    (_chat if chat else _completion)(body)
    _forced(body)
    limit = _integer({"max_tokens": body.get("max_tokens", None if chat else 16)}, "max_tokens", 1, 2**31 - 1)
    app.check_body(chat, body)
    include = bool(isinstance(options, dict) and options.get("include_usage"))
    return Request(json.dumps(body).encode(), include, draft, limit)


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")


def _integer(body: dict[str, Any], name: str, least: int, most: int) -> int | None:
    """Take an integer out of a body."""
    value = body.pop(name, None)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise errors.ArgumentError(f"{name} {value!r}: an integer from {least} to {most} is allowed")
    return value


def _common(body: dict[str, Any], vocabulary: int) -> None:
    for name in ("n", "best_of"):
        if body.pop(name, 1) != 1:
            raise errors.ArgumentError(f"{name}: only 1 is supported, one answer at a time; send the request again")
    stop = body.get("stop", [])
    if any(not isinstance(s, str) or not s for s in (stop if isinstance(stop, list) else [stop])):
        raise errors.ArgumentError("stop: a text, or a list of texts, none of them empty")
    # llama_cpp.server's own default, 1.1, is a sampler that clients did not ask for, and costs accepted drafts.
    body.setdefault("repeat_penalty", 1.0)
    for name, value in body.items():
        if isinstance(value, float) and not math.isfinite(value):  # as 1e999
            raise errors.ArgumentError(f"{name}: the number is too large")
    _bias(body, vocabulary)


def _bias(body: dict[str, Any], vocabulary: int) -> None:
    bias = body.get("logit_bias")
    if not isinstance(bias, dict):
        return
    for token, value in bias.items():
        if body.get("logit_bias_type") != "tokens" and not (token.isdecimal() and int(token) < vocabulary):
            raise errors.ArgumentError(f"logit_bias {token!r}: token ids from 0 to {vocabulary - 1} are allowed")
        if not isinstance(value, (int, float)) or not -100 <= value <= 100:
            raise errors.ArgumentError(f"logit_bias {token!r}: values from -100 to 100 are allowed")


def _forced(body: dict[str, Any]) -> None:
    """Refuse what forbids the only token that a grammar allows: llama.cpp ends the process then."""
    if body.get("min_tokens") and ("grammar" in body or "response_format" in body or "tools" in body):
        raise errors.ArgumentError("min_tokens with a grammar, a response_format or tools: leave one of them out")


def _completion(body: dict[str, Any]) -> None:
    prompt = body.get("prompt", "")
    if isinstance(prompt, list) and len(prompt) == 1:
        prompt = body["prompt"] = prompt[0]
    if not isinstance(prompt, str):
        raise errors.ArgumentError("prompt: one text is allowed, no list of several and no token ids")
    if body.pop("suffix", None):
        raise errors.ArgumentError("suffix: filling in the middle is not supported; write the model's tokens for it")
    logprobs = body.get("logprobs")
    if logprobs is not None:
        _integer({"logprobs": logprobs}, "logprobs", 0, MAX_LOGPROBS)
        if body.get("echo"):
            raise errors.ArgumentError("echo with logprobs: log-probabilities of the prompt are not supported")


def _chat(body: dict[str, Any]) -> None:
    if "max_completion_tokens" in body:
        body["max_tokens"] = body.pop("max_completion_tokens")
    if body.get("logprobs"):
        _integer({"top_logprobs": body.setdefault("top_logprobs", 0)}, "top_logprobs", 0, MAX_LOGPROBS)
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages or not all(isinstance(message, dict) for message in messages):
        raise errors.ArgumentError("messages: a list of one message or more")
    body["messages"] = [_message(message) for message in messages]
    _format(body)
    _tools(body)


def _message(message: dict[str, Any]) -> dict[str, Any]:
    """Put a message the way templates read it: content is one text."""
    content = message.get("content") or ""
    if isinstance(content, list):
        if any(not isinstance(part, dict) or part.get("type") != "text" for part in content):
            raise errors.ArgumentError("messages: content of type text alone is supported")
        content = "".join(str(part.get("text", "")) for part in content)
    role = "system" if message.get("role") == "developer" else message.get("role")
    kept = {name: value for name, value in message.items() if value is not None}
    return {**kept, "role": role, "content": content}


def _format(body: dict[str, Any]) -> None:
    """OpenAI's json_schema is llama_cpp's json_object with a schema."""
    wanted = body.get("response_format")
    if not isinstance(wanted, dict):
        return
    if wanted.get("type") == "json_schema":
        schema = wanted.get("json_schema")
        if not isinstance(schema, dict) or not isinstance(schema.get("schema"), dict):
            raise errors.ArgumentError("response_format: json_schema.schema is missing")
        wanted = body["response_format"] = {"type": "json_object", "schema": schema["schema"]}
    if "schema" in wanted:
        _schema(wanted["schema"])


def _schema(schema: Any) -> None:
    """Refuse a schema without a grammar, or with one so large that it would take all memory."""
    _bounded(schema)
    app.check_schema(schema)


def _bounded(schema: Any) -> None:
    counts = list(_repetitions(schema))
    if max(counts, default=0) > MAX_REPETITIONS or sum(counts) > 10 * MAX_REPETITIONS:
        raise errors.ArgumentError(
            f"JSON schema: lengths, numbers of items and repetitions in patterns up to {MAX_REPETITIONS} are allowed, "
            f"{10 * MAX_REPETITIONS} together; leave larger bounds out"
        )


def _repetitions(schema: Any) -> Iterator[int]:
    """Yield how often a schema's grammar repeats rules: llama_cpp writes each repetition out."""
    waiting = [schema]
    while waiting:
        part = waiting.pop()
        if isinstance(part, list):
            waiting += part
        elif isinstance(part, dict):
            waiting += part.values()
            bounds = (part.get(name) for name in ("minLength", "maxLength", "minItems", "maxItems"))
            yield from (int(bound) for bound in bounds if isinstance(bound, (int, float)))
            if isinstance(part.get("pattern"), str):
                braces = re.findall(r"\{(\d*)(?:,(\d*))?\}", part["pattern"])
                yield from (int(number[:9]) for pair in braces for number in pair if number)


def _tools(body: dict[str, Any]) -> None:
    if body.pop("functions", None) or body.pop("function_call", None):
        raise errors.ArgumentError("functions, function_call: use tools and tool_choice")
    tools = body.get("tools")
    if not tools:
        body.pop("tools", None)
        body.pop("tool_choice", None)
        return
    if not isinstance(tools, list) or not all(_name(tool) for tool in tools):
        raise errors.ArgumentError("tools: a list of functions with names")
    _bounded(tools)
    choice = body.setdefault("tool_choice", "auto")
    if choice == "none":
        del body["tools"], body["tool_choice"]
    elif choice == "required":
        if len(tools) > 1:
            raise errors.ArgumentError("tool_choice required: name the function where there are several")
        choice = body["tool_choice"] = {"type": "function", "function": {"name": _name(tools[0])}}
    if isinstance(choice, dict):
        named = [tool for tool in tools if _name(tool) == _name(choice)]
        if not named:
            raise errors.ArgumentError(f"tool_choice {_name(choice)!r}: no such tool")
        _schema(named[0]["function"].setdefault("parameters", {"type": "object", "properties": {}}))


def _name(tool: Any) -> str | None:
    """Name of the function in a tool or a choice, or None."""
    function = tool.get("function") if isinstance(tool, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) else None
