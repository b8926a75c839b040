"""Counters for Prometheus."""

from __future__ import annotations

import time
from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from twofold.server.model import Job

_SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class Metrics:
    """What ``/metrics`` shows; docs/server.md explains each.

    Parameters
    ----------
    waiting
        tells how many requests wait for the model.
    running
        tells how many it works on.
    """

    content_type = CONTENT_TYPE_LATEST

    def __init__(self, waiting: Callable[[], float], running: Callable[[], float]) -> None:
        self._registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)

        def counter(name: str, about: str, labels: tuple[str, ...] = ()) -> Counter:
            return Counter(f"twofold_{name}", about, labels, registry=registry)

        def gauge(name: str, about: str, labels: tuple[str, ...] = ()) -> Gauge:
            return Gauge(f"twofold_{name}", about, labels, registry=registry)

        self._requests = counter("requests", "Requests answered", ("path", "status"))
        self._duration = Histogram(
            "twofold_request_seconds",
            "From request to the end of its answer, waiting included",
            ("path",),
            buckets=_SECONDS,
            registry=registry,
        )
        self._first = Histogram(
            "twofold_first_token_seconds",
            "From request to first token, waiting included",
            buckets=_SECONDS,
            registry=registry,
        )
        self._counted = {
            "tokens": counter("generated_tokens", "Tokens of answers"),
            "prompt": counter("prompt_tokens", "Tokens of prompts that were decoded"),
            "cached": counter("cached_prompt_tokens", "Tokens of prompts that were in the cache"),
            "checks": counter("checks", "Verifying decodes after the prompt"),
            "drafted": counter("drafted_tokens", "Tokens drafted"),
            "accepted": counter("accepted_tokens", "Drafted tokens that were accepted"),
            "complete_checks": counter("complete_checks", "Checks that the end of an answer did not cut short"),
            "complete_tokens": counter("complete_check_tokens", "Tokens that those checks yielded"),
        }
        self._places = counter("drafted_at", "Drafts that had a token at this place", ("position",))
        self._agreed = counter("accepted_at", "Drafts accepted up to this place", ("position",))
        self._spent = counter("model_seconds", "Seconds in the model", ("phase",))
        self._rate = gauge("tokens_per_second", "Tokens a second of draft and check in the last answer")
        self._per_check = gauge("tokens_per_check", "Tokens that a check yields, since the start")
        self._acceptance = gauge("acceptance", "Share of drafts accepted up to here, since the start", ("position",))
        self._left = counter("disconnects", "Clients that left before their answer was complete", ("when",))
        gauge("queue_length", "Requests waiting for the model").set_function(waiting)
        gauge("running_requests", "Requests the model works on").set_function(running)
        self._sums: dict[str, float] = {}
        self._by_place: dict[int, list[int]] = {}

    def render(self) -> bytes:
        """Text of the exposition."""
        return bytes(generate_latest(self._registry))

    def answered(self, path: str, status: int, started: float) -> None:
        """Count a request that began at `started` of ``time.perf_counter``."""
        self._requests.labels(path, str(status)).inc()
        self._duration.labels(path).observe(time.perf_counter() - started)

    def left(self, when: str) -> None:
        """Count a client that left: ``queued`` or ``running``."""
        self._left.labels(when).inc()

    def worked(self, job: Job, started: float) -> None:
        """Count what the model did for a job."""
        if job.first_token is not None:
            self._first.observe(job.first_token - started)
        self._add("tokens", job.tokens)
        self._add("cached", job.cached_tokens)
        for name, value in job.sums().items():
            self._add(name, value)
        for call in job.calls:
            self._add("prompt", call.prompt_tokens)
            self._add("checks", call.checks)
            self._add("complete_checks", call.complete_checks)
            self._add("complete_tokens", call.complete_tokens)
            for phase in ("prompt", "draft", "verify"):
                self._spent.labels(phase).inc(getattr(call, f"{phase}_s"))
            pairs = zip(call.drafted_by_position, call.agreed_by_position, strict=True)
            for place, (drafted, agreed) in enumerate(pairs, start=1):
                self._place(place, drafted, agreed)
        self._gauges(job)

    def _add(self, name: str, value: float) -> None:
        self._counted[name].inc(value)
        self._sums[name] = self._sums.get(name, 0) + value

    def _place(self, place: int, drafted: int, agreed: int) -> None:
        self._places.labels(str(place)).inc(drafted)
        self._agreed.labels(str(place)).inc(agreed)
        sums = self._by_place.setdefault(place, [0, 0])
        sums[0] += drafted
        sums[1] += agreed
        if sums[0]:
            self._acceptance.labels(str(place)).set(sums[1] / sums[0])

    def _gauges(self, job: Job) -> None:
        seconds = sum(call.draft_s + call.verify_s for call in job.calls)
        made = sum(max(call.tokens - 1, 0) for call in job.calls)  # the prompt yields the first
        if seconds > 0 and made:
            self._rate.set(made / seconds)
        if self._sums.get("complete_checks"):
            self._per_check.set(self._sums["complete_tokens"] / self._sums["complete_checks"])
