"""What a call did: tokens, checks, acceptance, seconds, bytes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from twofold.engine import Engine

_CROSSING = ("to_device_bytes", "from_device_bytes")
_COUNTED = ("residual_bytes", *_CROSSING, "staged_bytes")


@dataclass
class Stats:
    """Statistics of one call.

    Attributes
    ----------
    prompt_tokens
        decoded for the prompt; fewer than it has where the cache held its beginning.
    tokens
        handed to the caller.
    from_draft
        of each of them: whether it is a draft token that the verifier agreed with, or the verifier's own.
    checks
        verifying decodes after the prompt's; each yields the accepted drafts and one token of its own.
    complete_checks, complete_tokens
        checks that the caller did not cut short, and what they yielded.
    drafted, accepted
        draft tokens made, and how many of them the verifier would have chosen too.
    drafted_by_position, agreed_by_position
        the same by place in the draft.
    prompt_s, draft_s, verify_s
        seconds in llama.cpp and the engine: prompt, drafts, checks.
    counters
        bytes since the call began.
    prompt_counters
        the part of them that is the prompt's.
    """

    prompt_tokens: int = 0
    tokens: int = 0
    from_draft: list[bool] = field(default_factory=list)
    checks: int = 0
    complete_checks: int = 0
    complete_tokens: int = 0
    drafted_by_position: list[int] = field(default_factory=list)
    agreed_by_position: list[int] = field(default_factory=list)
    prompt_s: float = 0.0
    draft_s: float = 0.0
    verify_s: float = 0.0
    counters: dict[str, float] = field(default_factory=dict)
    prompt_counters: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Add the time of a block to ``prompt_s``, ``draft_s`` or ``verify_s``."""
        start = time.perf_counter()
        try:
            yield
        finally:
            setattr(self, name, getattr(self, name) + time.perf_counter() - start)

    def count_draft(self, length: int) -> None:
        """Count a draft that goes into a check."""
        self.checks += 1
        missing = length - len(self.drafted_by_position)
        self.drafted_by_position += [0] * missing
        self.agreed_by_position += [0] * missing
        for position in range(length):
            self.drafted_by_position[position] += 1

    def count_token(self, from_draft: bool) -> None:
        """Count a token for the caller."""
        self.tokens += 1
        self.from_draft.append(from_draft)

    def count_outcome(self, tokens: int) -> None:
        """Count a check whose tokens were all wanted; the last one of a call is often cut short."""
        self.complete_checks += 1
        self.complete_tokens += tokens

    @property
    def tokens_per_check(self) -> float:
        """Tokens that a check yields: accepted drafts and one of the verifier's own. The prompt's token is not one."""
        if self.complete_checks:
            return self.complete_tokens / self.complete_checks
        return (self.tokens - 1) / self.checks if self.checks else 0.0

    @property
    def accepted_by_position(self) -> list[float]:
        """Share of the drafts whose token at this place, and all before it, the verifier agreed with."""
        pairs = zip(self.agreed_by_position, self.drafted_by_position, strict=True)
        return [agreed / drafted for agreed, drafted in pairs]

    def as_dict(self) -> dict[str, Any]:
        """Return everything for JSON and for ``llm.stats``."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "tokens": self.tokens,
            "checks": self.checks,
            "complete_checks": self.complete_checks,
            "tokens_per_check": self.tokens_per_check,
            "drafted": sum(self.drafted_by_position),
            "accepted": sum(self.agreed_by_position),
            "accepted_by_position": self.accepted_by_position,
            "prompt_s": self.prompt_s,
            "draft_s": self.draft_s,
            "verify_s": self.verify_s,
            **{name: int(self.counters.get(name, 0)) for name in _COUNTED},
            **{f"{name}_a_check": self.crossed(name) / self.checks if self.checks else 0.0 for name in _CROSSING},
            **{f"{name}_a_token": self.crossed(name) / self._later if self._later else 0.0 for name in _CROSSING},
        }

    @property
    def _later(self) -> int:
        """Tokens after the prompt's own."""
        return max(self.tokens - 1, 0)

    def crossed(self, name: str) -> float:
        """Return the bytes of a counter that are not the prompt's; drafts move none, so they are the checks'."""
        return self.counters.get(name, 0) - self.prompt_counters.get(name, 0)

    @property
    def rate(self) -> float:
        """Tokens a second, over draft and verify time, without the prompt and the token it yields."""
        seconds = self.draft_s + self.verify_s
        return (self.tokens - 1) / seconds if seconds > 0 and self.tokens > 1 else 0.0

    def live(self) -> str:
        """Return a short line while tokens are still coming."""
        drafted = sum(self.drafted_by_position)
        share = f"{sum(self.agreed_by_position) / drafted:.0%} of drafts accepted" if drafted else "no drafts"
        return f"{self.tokens} tokens, {self.rate:.1f} tok/s, {self.tokens_per_check:.2f} tokens a check, {share}"

    def line(self) -> str:
        """One line for people."""
        shares = " ".join(f"{share:.0%}" for share in self.accepted_by_position) or "no drafts"
        return (
            f"{self.tokens} tokens, {self.rate:.1f} tok/s, {self.checks} checks, {self.tokens_per_check:.2f} tokens a "
            f"check (accepted {shares}); prompt {self.prompt_s:.2f} s, draft {self.draft_s:.2f} s, verify "
            f"{self.verify_s:.2f} s; residual read {self.counters.get('residual_bytes', 0) / 1e9:.2f} GB"
            f"{self._device_part()}"
        )

    def _device_part(self) -> str:
        """Say what crossed to and from devices; nothing where there are none."""
        to, back = (self.counters.get(name, 0) for name in _CROSSING)
        if not (to or back):
            return ""
        a_check = [self.crossed(name) / max(self.checks, 1) / 1e6 for name in _CROSSING]
        share = f"{a_check[0]:.2f} and {a_check[1]:.2f} MB a check"
        return f"; to devices {to / 1e6:.1f} MB, from them {back / 1e6:.1f} MB ({share})"


class Meter:
    """Takes the engine's counters since it was made."""

    def __init__(self, engine: Engine | None, stats: Stats) -> None:
        self._engine, self._stats = engine, stats
        self._before = engine.counters() if engine else {}
        self.update()

    def update(self) -> None:
        """Write what has come since into the stats."""
        now = self._engine.counters() if self._engine else {}
        self._stats.counters = {key: value - self._before[key] for key, value in now.items()}

    def update_prompt(self) -> None:
        """Do the same after a prompt: what has come since the last update is its part."""
        before, part = self._stats.counters, self._stats.prompt_counters
        self.update()
        for key, value in self._stats.counters.items():
            part[key] = part.get(key, 0) + value - before.get(key, 0)
