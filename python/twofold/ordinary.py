"""An ordinary GGUF, run by llama_cpp's own loop and timed: what twofold's speed is compared with."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from twofold.decoder import BaseLlama, PromptLookup


class Lookup(PromptLookup):  # type: ignore[misc]
    """llama_cpp's prompt lookup; it notes its time, and how long the text was at each draft."""

    def __init__(self, length: int) -> None:
        super().__init__(num_pred_tokens=length)
        self.seconds = 0.0
        self.lengths: list[int] = []

    def __call__(self, input_ids: Any, /, **arguments: Any) -> Any:
        """Draft what followed the last tokens where they stood before."""
        start = time.perf_counter()
        found = super().__call__(input_ids, **arguments)
        self.lengths.append(len(input_ids))
        self.seconds += time.perf_counter() - start
        return found


class OrdinaryLlama(BaseLlama):
    """llama_cpp.Llama for an ordinary GGUF.

    Attributes
    ----------
    decode_s
        seconds in `eval` so far; may be set back.
    """

    def __init__(self, model_path: str | os.PathLike[str], *, n_ctx: int, **arguments: Any) -> None:
        """Load it; `n_ctx` must be a multiple of 256, so that llama.cpp does not round it up."""
        self.decode_s = 0.0
        # A batch as large as the context makes llama_cpp reserve rows of logits for all of it, which lookup needs.
        super().__init__(None, model_path=os.fspath(model_path), n_ctx=n_ctx, n_batch=n_ctx, **arguments)

    def eval(self, tokens: Sequence[int]) -> None:
        """Decode tokens, as llama_cpp.Llama.eval does."""
        start = time.perf_counter()
        super().eval(tokens)
        self.decode_s += time.perf_counter() - start

    @contextmanager
    def looking_up(self, length: int) -> Iterator[Lookup]:
        """Let `generate` draft up to `length` tokens by prompt lookup."""
        lookup = Lookup(length)
        self.draft_model: Lookup | None = lookup
        self._logits_all = True
        try:
            yield lookup
        finally:
            self.draft_model, self._logits_all = None, False
