#!/usr/bin/env python3
"""Load a running `twofold serve` with clients that chat, complete, stream and leave, and report what it did.

    twofold serve model.base.gguf --queue 32 &
    python scripts/load_server.py --clients 8 --seconds 300 --json load.json

Exit status 1 if a request failed or the server's memory grew by more than --growth.
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import statistics
import sys
import threading
import time
import urllib.parse
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families
from tqdm import tqdm

TOPICS = ["hash tables", "the tides", "bread", "a lighthouse", "prime numbers", "rivers", "photosynthesis", "chess"]
SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "size": {"enum": ["small", "large"]}},
    "required": ["ok", "size"],
}
# kind: weight. Those that leave close the connection before the answer is complete.
KINDS = {"chat": 3, "chat stream": 3, "completion": 2, "completion stream": 2, "schema": 1, "leave": 2, "too long": 1}


@dataclass
class Result:
    """What one request did: its kind, outcome, seconds, and seconds to its first event."""

    kind: str
    outcome: str
    seconds: float
    first: float | None = None


@dataclass
class Load:
    """Clients and what they found."""

    host: str
    key: str | None
    tokens: int
    results: list[Result] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def connect(self) -> http.client.HTTPConnection:
        """Open a connection."""
        return http.client.HTTPConnection(self.host, timeout=300)

    def headers(self) -> dict[str, str]:
        """Headers of a request."""
        key = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        return {"Content-Type": "application/json", **key}

    def metrics(self) -> dict[str, float]:
        """Return samples without labels."""
        connection = self.connect()
        connection.request("GET", "/metrics", headers=self.headers())
        text = connection.getresponse().read().decode()
        connection.close()
        families = list(text_string_to_metric_families(text))
        return {s.name: s.value for family in families for s in family.samples if not s.labels}

    def client(self, seed: int, until: float) -> None:
        """Send requests until the time is over."""
        chance = random.Random(seed)
        history: list[dict[str, str]] = []
        while time.monotonic() < until:
            kind = chance.choices(list(KINDS), list(KINDS.values()))[0]
            begun = time.perf_counter()
            try:
                outcome, first = self.one(kind, chance, history)
            except (OSError, http.client.HTTPException, ValueError, KeyError) as error:
                outcome, first = "failed", None
                with self.lock:
                    self.failures.append(f"{kind}: {error!r}")
            with self.lock:
                self.results.append(Result(kind, outcome, time.perf_counter() - begun, first))
            if outcome == "queue full":
                time.sleep(1)

    def one(self, kind: str, chance: random.Random, history: list[dict[str, str]]) -> tuple[str, float | None]:
        """Send one request; return its outcome and the time to its first event."""
        path, body = self.body(kind, chance, history)
        connection = self.connect()
        begun = time.perf_counter()
        try:
            connection.request("POST", path, json.dumps(body), self.headers())
            if kind == "leave" and not body.get("stream"):
                time.sleep(chance.random())
                return "left", None
            response = connection.getresponse()
            if response.status == 429:
                return "queue full", None
            if kind == "too long":
                return self.expect(response.status == 400, response), None
            if response.status != 200:
                return self.expect(False, response), None
            if body.get("stream"):
                return self.read_stream(response, begun, leave=kind == "leave")
            answer = json.loads(response.read())
            if kind == "schema":
                json.loads(answer["choices"][0]["message"]["content"])
            if kind == "chat":
                history += [body["messages"][-1], answer["choices"][0]["message"]]
                del history[:-6]
            return "answered", None
        finally:
            connection.close()

    def body(self, kind: str, chance: random.Random, history: list[dict[str, str]]) -> tuple[str, dict[str, Any]]:
        """Make a request."""
        text = f"Tell me about {chance.choice(TOPICS)}."
        stream = "stream" in kind or (kind == "leave" and chance.random() < 0.7)
        body: dict[str, Any] = {"model": "load", "max_tokens": chance.randint(4, self.tokens), "stream": stream}
        if kind in ("completion", "completion stream", "leave"):
            return "/v1/completions", {**body, "prompt": text}
        if kind == "too long":
            return "/v1/completions", {**body, "prompt": text, "max_tokens": 10**6}
        if kind == "schema":
            body |= {"max_tokens": 200, "response_format": {"type": "json_object", "schema": SCHEMA}}
        messages = [*(history if kind == "chat" else []), {"role": "user", "content": text}]
        return "/v1/chat/completions", {**body, "messages": messages}

    def expect(self, right: bool, response: http.client.HTTPResponse) -> str:
        """Note a status that should not be."""
        said = response.read().decode("utf-8", "replace")
        if right:
            return "refused, as it should"
        with self.lock:
            self.failures.append(f"{response.status}: {said[:200]}")
        return "failed"

    @staticmethod
    def read_stream(response: http.client.HTTPResponse, begun: float, leave: bool) -> tuple[str, float | None]:
        """Read events up to the last, or up to the third."""
        first, count = None, 0
        for line in response:
            if not line.startswith(b"data:"):
                continue
            first = first or time.perf_counter() - begun
            count += 1
            if line.startswith(b"data: [DONE]"):
                return ("left" if leave else "answered"), first
            if b'"error"' in line:
                raise ValueError(line.decode())
            if leave and count == 3:
                return "left", first
        raise ValueError("the stream ended without [DONE]")


def percentiles(values: list[float]) -> dict[str, float]:
    """Median, 95th, 99th percentile and maximum."""
    if len(values) < 2:
        return {"p50": values[0], "p95": values[0], "p99": values[0], "max": values[0]} if values else {}
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    return {"p50": cuts[49], "p95": cuts[94], "p99": cuts[98], "max": max(values)}


def report(load: Load, before: dict[str, float], after: dict[str, float], seconds: float, memory: list[float]) -> Any:
    """Everything that is printed."""
    answered = [r for r in load.results if r.outcome == "answered"]
    tokens = after["twofold_generated_tokens_total"] - before["twofold_generated_tokens_total"]
    kinds = sorted({r.kind for r in answered})
    return {
        "seconds": seconds,
        "requests": len(load.results),
        "outcomes": dict(Counter(r.outcome for r in load.results)),
        "failures": len(load.failures),
        "first_failures": load.failures[:5],
        "generated_tokens": tokens,
        "tokens_per_second": tokens / seconds,
        "tokens_per_check": after["twofold_tokens_per_check"],
        "latency_s": {k: percentiles([r.seconds for r in answered if r.kind == k]) for k in kinds},
        "first_event_s": percentiles([r.first for r in answered if r.first is not None]),
        "resident_bytes": {"start": memory[0], "quarter": memory[len(memory) // 4], "end": memory[-1]},
        "open_files": {"start": before["process_open_fds"], "end": after["process_open_fds"]},
    }


def main(argv: list[str] | None = None) -> int:
    """Run the command line.

    Parameters
    ----------
    argv : list of str, optional
        Arguments without the program's name; `sys.argv` by default.

    Returns
    -------
    int
        0, or 1 if a request failed or memory grew.
    """
    parser = argparse.ArgumentParser(description="Load a running twofold serve and report what it did.")
    parser.add_argument("--url", default="http://127.0.0.1:8080", help="of the server (default: %(default)s)")
    parser.add_argument("--api-key", help="if the server wants one")
    parser.add_argument("--clients", type=int, default=8, help="at the same time (default: 8)")
    parser.add_argument("--seconds", type=float, default=300, help="(default: 300)")
    parser.add_argument("--tokens", type=int, default=64, help="most tokens of an answer (default: 64)")
    parser.add_argument("--growth", type=float, default=10, help="MB that memory may grow after a quarter of the time")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report as JSON")
    parser.add_argument("--progress", action="store_true", help="show the progress bar even if stderr is no terminal")
    a = parser.parse_args(argv)
    load = Load(urllib.parse.urlsplit(a.url).netloc, a.api_key, a.tokens)
    load.one("completion", random.Random(0), [])  # what the first request allocates is no growth
    before, start = load.metrics(), time.monotonic()
    clients = [threading.Thread(target=load.client, args=(i, start + a.seconds)) for i in range(a.clients)]
    for client in clients:
        client.start()
    memory = [before["process_resident_memory_bytes"]]
    hidden = not (a.progress or sys.stderr.isatty())
    with tqdm(total=round(a.seconds), unit="s", disable=hidden) as bar:
        while time.monotonic() < start + a.seconds:
            time.sleep(min(1, a.seconds / 20))
            memory.append(load.metrics()["process_resident_memory_bytes"])
            bar.update(round(time.monotonic() - start) - bar.n)
    for client in clients:
        client.join()
    seconds = time.monotonic() - start
    time.sleep(1)
    after = load.metrics()
    memory.append(after["process_resident_memory_bytes"])
    found = report(load, before, after, seconds, memory)
    text = json.dumps(found, indent=2)
    print(text)
    if a.json:
        a.json.write_text(text + "\n")
    grown = found["resident_bytes"]["end"] - found["resident_bytes"]["quarter"] > a.growth * 1e6
    return 1 if load.failures or grown else 0


if __name__ == "__main__":
    raise SystemExit(main())
