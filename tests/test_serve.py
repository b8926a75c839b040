"""`twofold serve` with the real openai client, the server in a process of its own; its parts in this one."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

import twofold
from twofold import errors
from twofold.cli import main
from twofold.server import app, body, toolcalls
from twofold.server.gate import Gate, Limits
from twofold.server.model import Job, ServedLlama
from twofold.server.turns import Closed, QueueFull, Turns

PROMPT = "the people would know about the work"
MESSAGES: list[Any] = [{"role": "user", "content": PROMPT}]
KEY = "secret"
QUEUE = 3
LONG: dict[str, Any] = {"model": "x", "prompt": PROMPT, "max_tokens": 1900, "temperature": 0, "logprobs": 20}
SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "size": {"enum": ["small", "large"]}},
    "required": ["ok", "size"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [{"type": "function", "function": {"name": "measure", "description": "d", "parameters": SCHEMA}}]


@dataclass
class Server:
    process: subprocess.Popen[str]
    port: int

    @property
    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"http://127.0.0.1:{self.port}/v1", api_key=KEY, max_retries=0, timeout=20)

    def metrics(self) -> Counter[str]:
        """Samples, those with labels under ``name{value,...}``."""
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}/metrics", headers=auth())
        with urllib.request.urlopen(request) as response:
            families = list(text_string_to_metric_families(response.read().decode()))
        found: Counter[str] = Counter()
        for sample in (sample for family in families for sample in family.samples):
            labels = ",".join(sample.labels.values())
            found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value  # type: ignore[assignment]
        return found

    def wait_for(self, name: str, value: float) -> None:
        deadline = time.monotonic() + 10
        while self.metrics()[name] != value:
            assert time.monotonic() < deadline, f"{name} is {self.metrics()[name]}, not {value}"
            time.sleep(0.01)

    def post(self, path: str, data: bytes, key: str = KEY) -> tuple[int, dict[str, str], Any]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port)
        connection.request("POST", path, data, auth(key))
        response = connection.getresponse()
        return response.status, dict(response.getheaders()), json.loads(response.read())


def auth(key: str = KEY) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}


@contextmanager
def served(pair: Path, *options: str) -> Iterator[Server]:
    command = [
        sys.executable,
        "-m",
        "twofold",
        "serve",
        str(pair),
        "--port",
        "0",
        "--threads",
        "1",
        "--draft",
        "4",
        *options,
    ]
    environment = {**os.environ, "TWOFOLD_API_KEY": KEY, "OMP_WAIT_POLICY": "passive", "CONFIG_FILE": "/none"}
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
    assert process.stderr
    try:
        lines = []
        for line in process.stderr:
            lines.append(line)
            if "is ready" in line:
                break
        found = re.search(r"http://127\.0\.0\.1:(\d+)", "".join(lines))
        assert found and "is ready" in lines[-1], lines
        yield Server(process, int(found[1]))
    finally:
        process.kill()
        process.communicate()


@pytest.fixture(scope="module")
def server(tiny_pair: Path) -> Iterator[Server]:
    with served(tiny_pair, "--ctx", "2048", "--queue", str(QUEUE), "--max-body", "100000", "--batch", "32") as running:
        yield running


@pytest.fixture(scope="module")
def llm(tiny_pair: Path) -> Iterator[twofold.Llama]:
    model = twofold.Llama(tiny_pair, n_ctx=512, logits_all=True, verbose=False)
    yield model
    model.close()


# ---- answers -----------------------------------------------------------------------------------------


def test_completions_are_those_of_the_model(server: Server, llm: twofold.Llama) -> None:
    expected = llm.create_completion(PROMPT, max_tokens=40, temperature=0.0)
    done = server.client.completions.create(model="x", prompt=PROMPT, max_tokens=40, temperature=0)
    assert (done.choices[0].text, done.choices[0].finish_reason) == (expected["choices"][0]["text"], "length")
    parts = list(server.client.completions.create(model="x", prompt=PROMPT, max_tokens=40, temperature=0, stream=True))
    assert len(parts) > 20
    assert "".join(part.choices[0].text for part in parts) == done.choices[0].text


def test_chats_are_those_of_the_model(server: Server, llm: twofold.Llama) -> None:
    expected = llm.create_chat_completion(MESSAGES, max_tokens=30, temperature=0.0)["choices"][0]["message"]["content"]
    options: dict[str, Any] = {"model": "x", "messages": MESSAGES, "max_completion_tokens": 30, "temperature": 0}
    done = server.client.chat.completions.create(**options)
    assert done.choices[0].message.content == expected
    stream = server.client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True})
    *parts, last = stream
    assert "".join(part.choices[0].delta.content or "" for part in parts) == expected
    assert all(part.usage is None for part in parts)
    assert last.choices == [] and last.usage is not None and done.usage is not None
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (done.usage.prompt_tokens, 30)
    in_parts = [{"role": "developer", "content": [{"type": "text", "text": t}]} for t in ("the", "people")]
    joined = [{"role": "system", "content": t} for t in ("the", "people")]
    answers = [server.client.chat.completions.create(**{**options, "messages": m}) for m in (in_parts, joined)]
    assert answers[0].choices == answers[1].choices


def test_usage_counts_drafts(server: Server, llm: twofold.Llama) -> None:
    for draft in (4, 0, 7):
        llm.draft_tokens = draft
        llm.reset()
        llm.create_completion(PROMPT, max_tokens=40, temperature=0.0)
        extra = {"draft_tokens": draft} if draft != 4 else {}
        done = server.client.completions.create(
            model="x", prompt=PROMPT, max_tokens=40, temperature=0, extra_body=extra
        )
        assert done.usage and done.usage.completion_tokens_details
        details = done.usage.completion_tokens_details
        found = (details.accepted_prediction_tokens, details.rejected_prediction_tokens)
        assert found == (llm.stats["accepted"], llm.stats["drafted"] - llm.stats["accepted"])
        assert (found == (0, 0)) == (draft == 0)
    llm.draft_tokens = 4


def test_stop_strings(server: Server) -> None:
    options: dict[str, Any] = {"model": "x", "prompt": PROMPT, "max_tokens": 40, "temperature": 0}
    text = server.client.completions.create(**options).choices[0].text
    stop = text[15:18]
    done = server.client.completions.create(**options, stop=[stop, "never there"], logprobs=1).choices[0]
    assert (done.text, done.finish_reason) == (text[: text.index(stop)], "stop")
    assert done.logprobs and done.logprobs.tokens and done.text.startswith("".join(done.logprobs.tokens))
    parts = list(server.client.completions.create(**options, stop=stop, stream=True))
    assert "".join(part.choices[0].text for part in parts) == done.text
    assert parts[-1].choices[0].finish_reason == "stop"


def test_logprobs(server: Server, llm: twofold.Llama) -> None:
    llm.reset()
    expected = llm.create_completion(PROMPT, max_tokens=20, temperature=0.0, logprobs=3)["choices"][0]["logprobs"]
    options: dict[str, Any] = {"model": "x", "prompt": PROMPT, "max_tokens": 20, "temperature": 0, "logprobs": 3}
    found = server.client.completions.create(**options).choices[0].logprobs
    assert found and found.token_logprobs and found.top_logprobs and found.tokens
    assert found.tokens == expected["tokens"] and found.text_offset == expected["text_offset"]
    np.testing.assert_allclose(found.token_logprobs, expected["token_logprobs"], atol=1e-4)
    for top, other in zip(found.top_logprobs, expected["top_logprobs"], strict=True):
        assert list(top) == list(other)
    streamed = [part.choices[0].logprobs for part in server.client.completions.create(**options, stream=True)]
    assert [token for part in streamed if part for token in part.tokens or ()] == found.tokens
    chat = {"model": "x", "messages": MESSAGES, "max_tokens": 10, "temperature": 0, "logprobs": True}
    choice = server.client.chat.completions.create(**chat, top_logprobs=2).choices[0]
    assert choice.logprobs and choice.logprobs.content
    assert "".join(entry.token for entry in choice.logprobs.content) == choice.message.content
    assert {len(entry.top_logprobs) for entry in choice.logprobs.content} == {2}
    bare = server.client.chat.completions.create(**chat).choices[0].logprobs
    assert bare and bare.content
    assert [entry.logprob for entry in bare.content] == [entry.logprob for entry in choice.logprobs.content]


def test_response_formats(server: Server) -> None:
    options: dict[str, Any] = {"model": "x", "messages": MESSAGES, "max_tokens": 80, "temperature": 0.8}
    wanted: Any = {"type": "json_schema", "json_schema": {"name": "n", "strict": True, "schema": SCHEMA}}
    for seed in (1, 2, -(2**70)):
        done = server.client.chat.completions.create(**options, seed=seed, response_format=wanted).choices[0]
        found = json.loads(done.message.content or "")
        assert isinstance(found["ok"], bool) and found["size"] in ("small", "large") and len(found) == 2
        assert done.finish_reason == "stop"
    loose = server.client.chat.completions.create(**options, response_format={"type": "json_object"}).choices[0]
    assert (loose.message.content or "").lstrip().startswith("{")
    free = server.client.chat.completions.create(**options).choices[0]
    assert not (free.message.content or "").lstrip().startswith("{")


def test_named_tools(server: Server) -> None:
    choice: Any = {"type": "function", "function": {"name": "measure"}}
    options: dict[str, Any] = {"model": "x", "messages": MESSAGES, "max_tokens": 80, "seed": 3, "tools": TOOLS}
    done = server.client.chat.completions.create(**options, tool_choice=choice).choices[0]
    assert done.finish_reason == "tool_calls" and done.message.tool_calls and done.message.content is None
    call: Any = done.message.tool_calls[0]
    assert call.function.name == "measure" and set(json.loads(call.function.arguments)) == {"ok", "size"}
    with server.client.chat.completions.stream(**options, tool_choice="required") as stream:  # joins the chunks
        joined: Any = stream.get_final_completion().choices[0].message.tool_calls
    assert len(joined) == 1 and joined[0].function.name == "measure"
    assert set(json.loads(joined[0].function.arguments)) == {"ok", "size"}
    none = server.client.chat.completions.create(**options, tool_choice="none").choices[0]
    assert none.message.content and not none.message.tool_calls


def test_prefix_of_the_last_turn_is_reused(server: Server) -> None:
    client, messages = server.client, [{"role": "user", "content": "the people " * 60}]
    options: dict[str, Any] = {"model": "x", "max_tokens": 20, "temperature": 0}
    before = server.metrics()["twofold_prompt_tokens_total"]
    first = client.chat.completions.create(messages=messages, **options)  # type: ignore[arg-type]
    after = server.metrics()["twofold_prompt_tokens_total"]
    messages += [{"role": "assistant", "content": first.choices[0].message.content or ""}]
    messages += [{"role": "user", "content": "what"}]
    second = client.chat.completions.create(messages=messages, **options)  # type: ignore[arg-type]
    decoded = server.metrics()["twofold_prompt_tokens_total"] - after
    assert after - before > 100 and decoded < 40
    assert second.usage and second.usage.prompt_tokens_details
    assert second.usage.prompt_tokens_details.cached_tokens == second.usage.prompt_tokens - decoded


def test_models_and_tokens(server: Server, llm: twofold.Llama) -> None:
    assert [model.id for model in server.client.models.list()] == ["llama"]
    data = json.dumps({"input": PROMPT}).encode()
    assert server.post("/extras/tokenize/count", data)[2]["count"] == len(llm.tokenize(PROMPT.encode()))


# ---- refusals ----------------------------------------------------------------------------------------


def test_wrong_key(server: Server) -> None:
    with pytest.raises(openai.AuthenticationError, match="API key"):
        server.client.with_options(api_key="other").completions.create(model="x", prompt="a")
    for path in ("/v1/chat/completions", "/metrics", "/v1/models", "/none"):
        assert server.post(path, b"{}", key="")[0] == 401
    assert urllib.request.urlopen(f"http://127.0.0.1:{server.port}/health").status == 200


@pytest.mark.parametrize("stream", [False, True])
def test_too_long(server: Server, stream: bool) -> None:
    for prompt, count in (("the people " * 600, 2000), ("the people " * 1100, 1)):
        with pytest.raises(openai.BadRequestError, match="maximum context length is 2048 tokens") as caught:
            server.client.completions.create(model="x", prompt=prompt, max_tokens=count, stream=stream)
        assert caught.value.code == "context_length_exceeded" and caught.value.type == "invalid_request_error"
    messages: Any = [{"role": "user", "content": "the people " * 1200}]
    with pytest.raises(openai.BadRequestError, match="context"):
        server.client.chat.completions.create(model="x", messages=messages, stream=stream)
    filled = server.client.chat.completions.create(
        model="x", messages=[{"role": "user", "content": "the people " * 990}]
    )
    assert filled.usage and filled.usage.total_tokens == 2048  # without max_tokens: as many as fit


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n": 2}, "n: only 1"),
        ({"prompt": ["a", "b"]}, "prompt: one text"),
        ({"suffix": "b"}, "suffix"),
        ({"echo": True, "logprobs": 1}, "echo with logprobs"),
        ({"logprobs": 21}, "logprobs 21"),
        ({"max_tokens": 0}, "max_tokens 0"),
        ({"min_p": 5}, "min_p"),
        ({"stop": ["a", ""]}, "stop"),
        ({"draft_tokens": 33}, "draft_tokens 33: an integer from 0 to 32"),
        ({"logit_bias": {"512": 1}}, "token ids from 0 to 511"),
        ({"logit_bias": {"5": -101}}, "-100 to 100"),
        ({"grammar": "root ::= [a-"}, "cannot read this grammar"),
        ({"grammar": 'root ::= "a"', "min_tokens": 6}, "min_tokens"),
    ],
)
def test_values_that_are_refused(server: Server, change: dict[str, Any], message: str) -> None:
    status, _, answer = server.post("/v1/completions", json.dumps({"prompt": PROMPT, **change}).encode())
    assert (status, answer["error"]["type"]) == (400, "invalid_request_error")
    assert message in answer["error"]["message"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "u"}]}]}, "type text"),
        ({"messages": [{"role": "nobody", "content": "a"}]}, "messages.0"),
        ({"response_format": {"type": "json_schema"}}, "json_schema.schema is missing"),
        ({"response_format": {"type": "json_object", "schema": {"$ref": "#/none"}}}, "grammar"),
        ({"response_format": {"type": "json_object", "schema": {"maxLength": 1001}}}, "up to 1000"),
        ({"response_format": {"type": "json_object", "schema": [{"items": {"minItems": 1e9}}]}}, "up to 1000"),
        ({"response_format": {"type": "json_object", "schema": {"pattern": "^(a{2,99999999999}b)$"}}}, "up to 1000"),
        ({"response_format": {"type": "json_object", "schema": [{"maxItems": 999}] * 11}}, "10000 together"),
        ({"functions": [{"name": "f"}]}, "use tools"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"maxItems": 1e4}}}]}, "up to 1000"),
        ({"tools": [{"type": "function"}]}, "functions with names"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "not JSON that can be read"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "none"}}}, "no such tool"),
        ({"tools": TOOLS * 2, "tool_choice": "required"}, "several"),
    ],
)
def test_chats_that_are_refused(server: Server, change: dict[str, Any], message: str) -> None:
    status, _, answer = server.post("/v1/chat/completions", json.dumps({"messages": MESSAGES, **change}).encode())
    assert status == 400 and message in answer["error"]["message"]


def test_bodies_and_paths_that_are_refused(server: Server) -> None:
    assert server.post("/v1/completions", b"{")[0] == 400
    assert server.post("/v1/completions", b'{"prompt": "a", "temperature": NaN}')[0] == 400
    assert server.post("/v1/completions", b'{"prompt": "a", "temperature": 1e999}')[0] == 400
    status, _, answer = server.post("/v1/completions", json.dumps({"prompt": "a" * 100_000}).encode())
    assert (status, answer["error"]["message"]) == (413, "the body is larger than 100000 bytes")
    request = urllib.request.Request(f"http://127.0.0.1:{server.port}/v1/completions", b"{}", auth())
    request.add_header("Content-Type", "text/plain")  # what a page elsewhere may send without asking
    with pytest.raises(urllib.error.HTTPError, match="415"):
        urllib.request.urlopen(request)
    assert server.post("/v1/embeddings", b"{}")[0] == 404
    status, headers, _ = server.post("/v1/models", b"{}")
    assert (status, headers["allow"]) == (405, "GET")
    assert server.client.completions.create(model="x", prompt=PROMPT, max_tokens=4).choices[0].text  # it still answers


# ---- queue and clients that leave --------------------------------------------------------------------


def in_thread(action: Callable[[], Any]) -> threading.Thread:
    thread = threading.Thread(target=action)
    thread.start()
    return thread


def test_first_come_first_served_and_a_full_queue(server: Server) -> None:
    finished: list[int] = []

    def ask(number: int) -> None:
        server.client.completions.create(model="x", prompt=f"{number} {PROMPT}", max_tokens=300)
        finished.append(number)

    stream = server.client.completions.create(**LONG, stream=True)
    next(iter(stream))
    threads = []
    for number in range(QUEUE):
        threads.append(in_thread(lambda number=number: ask(number)))  # type: ignore[misc]
        server.wait_for("twofold_queue_length", number + 1)
    assert server.client.models.list().data  # does not wait
    with pytest.raises(openai.RateLimitError, match=f"{QUEUE} requests wait") as caught:
        server.client.completions.create(model="x", prompt=PROMPT)
    assert int(caught.value.response.headers["retry-after"]) >= 1
    assert finished == [] and server.metrics()["twofold_running_requests"] == 1
    stream.close()
    for thread in threads:
        thread.join()
    assert finished == list(range(QUEUE))


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_the_model(server: Server, stream: bool) -> None:
    before = server.metrics()
    connection = http.client.HTTPConnection("127.0.0.1", server.port)
    connection.request("POST", "/v1/completions", json.dumps({**LONG, "stream": stream}).encode(), auth())
    server.wait_for("twofold_running_requests", 1)
    waiting = http.client.HTTPConnection("127.0.0.1", server.port)
    waiting.request("POST", "/v1/completions", json.dumps(LONG).encode(), auth())
    server.wait_for("twofold_queue_length", 1)
    waiting.close()
    server.wait_for("twofold_queue_length", 0)
    assert server.metrics()["twofold_running_requests"] == 1
    connection.close()
    server.client.completions.create(model="x", prompt=PROMPT, max_tokens=4)
    after = server.metrics()
    made = after["twofold_generated_tokens_total"] - before["twofold_generated_tokens_total"]
    assert 4 <= made < LONG["max_tokens"] / 2
    for when in ("queued", "running"):
        name = f"twofold_disconnects_total{{{when}}}"
        assert after[name] == before[name] + 1


def test_metrics(server: Server) -> None:
    before = server.metrics()
    server.client.completions.create(model="x", prompt=PROMPT, max_tokens=40, temperature=0)
    server.wait_for(
        "twofold_requests_total{/v1/completions,200}", before["twofold_requests_total{/v1/completions,200}"] + 1
    )
    after = server.metrics()

    def grown(name: str) -> float:
        return after[name] - before[name]

    assert grown("twofold_generated_tokens_total") == 40
    assert grown("twofold_request_seconds_count{/v1/completions}") == 1
    assert grown("twofold_first_token_seconds_count") == 1
    assert grown("twofold_drafted_tokens_total") > grown("twofold_accepted_tokens_total") > 0
    assert grown("twofold_accepted_tokens_total") == sum(
        grown(f"twofold_accepted_at_total{{{i}}}") for i in range(1, 5)
    )
    assert 40 / 5 <= grown("twofold_checks_total") < 40
    assert 1 < after["twofold_tokens_per_check"] < 5 and after["twofold_tokens_per_second"] > 0
    shares = [after[f"twofold_acceptance{{{i}}}"] for i in range(1, 5)]
    assert shares == sorted(shares, reverse=True) and 0 < shares[0] < 1
    assert after["process_resident_memory_bytes"] > 1e7
    server.post("/v1/completions", b'{"n": 2}')
    assert (
        server.metrics()["twofold_requests_total{/v1/completions,400}"]
        == after["twofold_requests_total{/v1/completions,400}"] + 1
    )


# ---- starting and ending -----------------------------------------------------------------------------


def test_sigterm_lets_the_answer_end_and_refuses_the_rest(tiny_pair: Path) -> None:
    with served(tiny_pair, "--ctx", "2048", "--grace", "30") as server:
        stream = iter(server.client.completions.create(**LONG, stream=True))
        parts = [next(stream)]
        waiting: list[Exception] = []

        def wait() -> None:
            try:
                server.client.completions.create(model="x", prompt=PROMPT)
            except openai.OpenAIError as error:
                waiting.append(error)

        thread = in_thread(wait)
        server.wait_for("twofold_queue_length", 1)
        server.process.send_signal(signal.SIGTERM)
        thread.join()
        assert "shutting down" in str(waiting[0]) and isinstance(waiting[0], openai.InternalServerError)
        with pytest.raises(urllib.error.HTTPError, match="503"):
            urllib.request.urlopen(f"http://127.0.0.1:{server.port}/health")
        parts += stream
        assert parts[-1].choices[0].finish_reason == "length"
        assert sum(len(part.choices[0].logprobs.tokens) for part in parts if part.choices[0].logprobs) == 1900
        assert server.process.wait(10) == 0


def test_answers_are_cut_when_the_grace_is_over(tiny_pair: Path) -> None:
    with served(tiny_pair, "--ctx", "2048", "--grace", "0.1") as server:
        stream = iter(server.client.completions.create(**LONG, stream=True))
        parts = [next(stream)]
        server.process.send_signal(signal.SIGINT)
        parts += stream  # ends in order, though early
        assert parts[-1].choices[0].finish_reason == "length" and len(parts) < 1900
        assert server.process.wait(10) == 0


def test_a_second_signal_cuts(tiny_pair: Path) -> None:
    with served(tiny_pair, "--ctx", "2048") as server:
        stream = iter(server.client.completions.create(**LONG, stream=True))
        parts = [next(stream)]
        for _ in range(2):
            server.process.send_signal(signal.SIGTERM)
            time.sleep(0.1)
        parts += stream
        assert parts[-1].choices[0].finish_reason == "length" and len(parts) < 1900
        assert server.process.wait(10) == 0


def test_what_the_command_line_refuses(
    tiny_pair: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert main(["serve", str(tiny_pair), "--port", str(taken.getsockname()[1])]) == 1
    assert "choose another --host or --port" in capsys.readouterr().err
    assert main(["serve", str(tiny_pair), "--port", "0", "--chat-format", "none"]) == 1
    assert "chatml-function-calling" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    assert main(["serve", str(tiny_pair)]) == 1
    assert "pip install twofold[server]" in capsys.readouterr().err


async def ask(gate: Gate, path: str, method: str, send: Callable[[Any], Any]) -> None:
    """Send a request to a gate in this process; the client stays."""
    given: list[Any] = [{"type": "http.request", "body": b'{"prompt": "a"}'}]

    async def receive() -> Any:
        return given.pop() if given else await asyncio.Event().wait()

    headers = [(b"content-type", b"application/json")]
    await gate({"type": "http", "method": method, "path": path, "headers": headers}, receive, send)


def test_nothing_is_answered_while_loading() -> None:
    async def status(path: str, method: str) -> int:
        sent: list[Any] = []

        async def send(message: Any) -> None:
            sent.append(message)

        await ask(Gate(Limits()), path, method, send)
        return int(sent[0]["status"])

    assert asyncio.run(status("/health", "GET")) == 503
    assert asyncio.run(status("/v1/completions", "POST")) == 503
    assert asyncio.run(status("/metrics", "GET")) == 200


def test_a_slow_reader_does_not_hold_the_model() -> None:
    class Model:
        def n_vocab(self) -> int:
            return 1

        def begin(self, job: Job) -> None:
            pass

        def end(self) -> None:
            pass

    async def application(_: Any, receive: Any, send: Any) -> None:
        await receive()
        headers = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for event in (b"data: {}\n\n", b"data: [DONE]\n\n", b""):
            await send({"type": "http.response.body", "body": event, "more_body": bool(event)})

    async def run() -> None:
        gate, sent, ready = Gate(Limits()), dict[str, list[Any]](slow=[], quick=[]), asyncio.Event()
        gate.open(application, Model())  # type: ignore[arg-type]

        async def slow(message: Any) -> None:
            await ready.wait()
            sent["slow"].append(message)

        async def quick(message: Any) -> None:
            sent["quick"].append(message)

        first = asyncio.ensure_future(ask(gate, "/v1/completions", "POST", slow))
        await asyncio.sleep(0.1)
        await ask(gate, "/v1/completions", "POST", quick)
        assert len(sent["quick"]) == 4 and not sent["slow"] and not first.done()
        ready.set()
        await first
        assert sent["slow"] == sent["quick"]

    asyncio.run(asyncio.wait_for(run(), 5))


# ---- parts -------------------------------------------------------------------------------------------


def test_a_prompt_is_left_after_the_batch(tiny_pair: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = ServedLlama(tiny_pair, n_ctx=1024, n_batch=32, verbose=False)
    model.serve(None, app.chat_handler(model))
    job = Job()
    remember = twofold.Llama._remember_batch
    batches = []

    def stop_after_two(self: Any, batch: Any, position: int) -> None:
        remember(self, batch, position)
        batches.append(position)
        if len(batches) == 2:
            job.stop()

    monkeypatch.setattr(twofold.Llama, "_remember_batch", stop_after_two)
    model.begin(job)
    made = model.create_completion("the people " * 200, max_tokens=5)
    model.end()
    assert batches == [0, 32] and made["usage"]["completion_tokens"] == 0
    again = Job()
    model.begin(again)
    model.create_completion("the people " * 200, max_tokens=5)
    model.end()
    assert again.tokens == 5 and again.cached_tokens == 64  # what was decoded is kept
    model.close()


def test_most_tokens_of_prompt_and_answer(tiny_pair: Path) -> None:
    model = ServedLlama(tiny_pair, n_ctx=256, verbose=False)
    expected = model.create_completion(PROMPT, max_tokens=64, temperature=0.0)["choices"][0]["text"]
    model.serve(64, app.chat_handler(model))
    texts: list[str] = []
    for stream in (False, True):
        job = Job()
        model.begin(job)
        made = model.create_completion(PROMPT, max_tokens=None, temperature=0.0, stream=stream)
        parts = [part["choices"][0] for part in (made if stream else [made])]
        model.end()
        assert job.prompt_tokens + job.tokens == 64 and parts[-1]["finish_reason"] == "length"
        texts.append("".join(part["text"] for part in parts))
    assert texts[0] == texts[1] == expected[: len(texts[0])] != ""
    job = Job(max_tokens=64)
    model.begin(job)
    with pytest.raises(errors.ArgumentError, match="length is 64 tokens, however you requested"):
        model.create_completion(PROMPT, max_tokens=64)
    model.end()
    assert isinstance(job.error, errors.ArgumentError)
    model.max_length = len(model.tokenize(PROMPT.encode())) + 3
    model.begin(Job())
    grammar = llama_cpp.LlamaGrammar.from_string('root ::= "éé"')
    choice = model.create_completion(PROMPT, max_tokens=None, grammar=grammar, logprobs=1)["choices"][0]
    assert choice["text"] == "é" and len(choice["logprobs"]["tokens"]) == 3  # the last one is half a character
    model.end()
    model.close()


def test_turns() -> None:
    async def run() -> None:
        turns, order = Turns(2), []

        async def use(number: int) -> None:
            await turns.enter()
            order.append(number)
            await asyncio.sleep(0)
            turns.leave()

        await turns.enter()
        first, second = (asyncio.ensure_future(use(number)) for number in (1, 2))
        await asyncio.sleep(0)
        with pytest.raises(QueueFull):
            await turns.enter()
        turns.leave()  # to the first, which goes in the same moment
        first.cancel()
        await second
        assert order == [2] and not turns.busy
        await turns.enter()
        third = asyncio.ensure_future(use(3))
        await asyncio.sleep(0)
        turns.close()
        with pytest.raises(Closed):
            await third
        assert turns.busy
        turns.leave()
        await turns.idle()

    asyncio.run(asyncio.wait_for(run(), 5))


def chunks(*texts: str) -> list[dict[str, Any]]:
    parts = [{"choices": [{"delta": {"content": text}, "finish_reason": None}]} for text in texts]
    return [*parts, {"choices": [{"delta": {}, "finish_reason": "stop"}]}]


def stream_of(llm: twofold.Llama, text: str) -> tuple[str, list[str], str]:
    """Content, names of calls and finish reason of a streamed answer with this text."""
    pieces = [text[i : i + 3] for i in range(0, len(text), 3)]
    request = {"tools": TOOLS, "tool_choice": "auto", "stream": True}
    *parts, last = toolcalls.answer(lambda **_: iter(chunks(*pieces)), llm, request)
    deltas = [part["choices"][0]["delta"] for part in parts]
    names = [call["function"]["name"] for delta in deltas for call in delta.get("tool_calls", ())]
    return "".join(delta.get("content") or "" for delta in deltas), names, last["choices"][0]["finish_reason"]


CALL = '{"name": "measure", "arguments": {"ok": true}}'


@pytest.mark.parametrize(
    ("text", "said", "count"),
    [
        (f"Well. <tool_call>\n{CALL}\n</tool_call>\n<tool_call>{CALL}", "Well. ", 2),
        (f"```json\n{CALL}\n```", "", 1),
        (CALL, "", 1),
        (f"so: {CALL}", None, 0),
        ("a <tool b <tool_call>{broken", None, 0),
        (CALL.replace("measure", "other"), None, 0),
        (f"<tool_call>{CALL}</tool_call><tool_call>x</tool_call>", None, 0),
        ("{} is empty", None, 0),
    ],
)
def test_tool_calls_in_the_text(llm: twofold.Llama, text: str, said: str | None, count: int) -> None:
    found, calls = toolcalls.parse(text, {"measure"})
    assert found == (text if said is None else said.strip()) and len(calls) == count
    assert all(json.loads(call["function"]["arguments"]) == {"ok": True} for call in calls)
    reason = "tool_calls" if count else "stop"
    assert stream_of(llm, text) == (text if said is None else said, ["measure"] * count, reason)


def test_defaults_that_differ_from_llama_cpp() -> None:
    read = body.read(b'{"prompt": ["a"], "temperature": null}', chat=False, vocabulary=5)
    assert json.loads(read.body) == {"prompt": "a", "repeat_penalty": 1.0}
    assert (read.max_tokens, read.draft_tokens, read.include_usage) == (16, None, False)
    with pytest.raises(errors.ArgumentError, match="not a JSON object"):
        body.read(b"[]", chat=False, vocabulary=5)
