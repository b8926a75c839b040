"""`twofold.Llama`: llama_cpp.Llama that drafts with the base and verifies with base + residual."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from twofold import errors, speculate
from twofold.decoder import BaseLlama, make_sampler, physical_cores
from twofold.loading import check_arguments, load_engine, set_bits
from twofold.pairfile import residual_bytes
from twofold.stats import Meter, Stats

MAX_DRAFT = 32


class Llama(BaseLlama):
    """A pair of files behind llama_cpp.Llama's interface.

    Parameters
    ----------
    model_path
        ``NAME.base.gguf``.
    draft_tokens
        Tokens drafted before each check, 0 to 32; 0 decodes plainly with the full model. May be changed later.
    residual_bits
        The verifier: 4, 6, 8, or 0 for the base alone; default: all that the file holds. May be changed later.
    residual_path
        Default: ``NAME.residual.gguf`` beside the base.
    claim
        Compute base products in host memory with twofold's own kernels, base and residual in one pass, instead of
        ggml's; default: where all types of the base have such kernels. Drafts then differ from stock llama.cpp's
        by rounding.
    preload
        Read the planes in use into memory while loading (with a progress bar if `verbose`), instead of when they are
        first needed; with `use_mlock` they are locked there too.
    **arguments
        Those of llama_cpp.Llama. `n_threads` and `n_threads_batch` default to the number of cores, `flash_attn` to
        True; the residual is multiplied by `n_threads_batch` threads.

    Raises
    ------
    UnknownArgumentError
        for a keyword that neither has (llama_cpp swallows those).
    ArgumentError, UnsupportedError
        for values outside what is allowed, or settings that cannot be drafted and verified.
    FileAccessError, FormatError, FormatVersionError, MismatchError
        if the residual is missing, damaged, of another version or of another base.

    Attributes
    ----------
    stats : dict
        Of the last call (:class:`twofold.stats.Stats`).
    """

    input_ids: Any  # of llama_cpp.Llama
    scores: Any
    n_tokens: int
    _row: int  # of the last decode: whose logits the token handed out was chosen from

    def __init__(
        self,
        model_path: str | os.PathLike[str],
        *,
        draft_tokens: int = 4,
        residual_bits: int | None = None,
        residual_path: str | os.PathLike[str] | None = None,
        claim: bool | None = None,
        preload: bool = True,
        **arguments: Any,
    ) -> None:
        check_arguments(arguments)
        arguments.setdefault("n_threads", physical_cores())
        arguments.setdefault("n_threads_batch", arguments["n_threads"])
        # ggml's flash attention computes each token alike whatever stands beside it in the batch; its other attention
        # does not, and a check would differ from plain decoding (docs/log.md).
        arguments.setdefault("flash_attn", True)
        self.residual_path = residual_path
        self._stats = Stats()
        self.draft_tokens = draft_tokens
        engine = None
        if residual_bits != 0 and not arguments.get("vocab_only"):
            engine = load_engine(
                Path(model_path), residual_path, arguments, bits=residual_bits, claim=claim, preload=preload
            )
        self._residual_bits = 0 if engine is None else set_bits(engine, residual_bits)
        super().__init__(engine, model_path=os.fspath(model_path), **arguments)
        self._fit_to_context()
        self._make_base_panels()

    def _fit_to_context(self) -> None:
        """Make room for as many tokens as the context holds: llama.cpp rounds n_ctx up, llama_cpp does not know."""
        if self.input_ids.size < self._n_ctx:
            self.input_ids = np.zeros(self._n_ctx, np.intc)
            if self._logits_all:
                self.scores = np.zeros((self._n_ctx, self._n_vocab), np.single)

    def _make_base_panels(self) -> None:
        """Decode a token, so that the base is rearranged for our kernels now and not in the first prompt."""
        if self._engine is None or not self._engine.claiming or self.context_params.embeddings:
            return
        self._decoder.decode([max(self.token_bos(), 0)], 0, all_rows=False)
        self._decoder.truncate(0)

    @property
    def memory(self) -> dict[str, int]:
        """Bytes of RAM: the residual planes in use, and the base rearranged for our kernels."""
        if self._engine is None:
            return {"residual_bytes": 0, "base_panel_bytes": 0}
        tensors = self._engine.residual.tensors()
        return {
            "residual_bytes": sum(residual_bytes(tensor, self._residual_bits) for tensor in tensors),
            "base_panel_bytes": int(self._engine.counters()["base_bytes"]),
        }

    # ---- settings ------------------------------------------------------------------------------------

    @property
    def draft_tokens(self) -> int:
        """Tokens drafted before each check."""
        return self._draft_tokens

    @draft_tokens.setter
    def draft_tokens(self, value: int) -> None:
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_DRAFT:
            raise errors.ArgumentError(f"draft_tokens {value!r}: an integer from 0 to {MAX_DRAFT} is allowed")
        self._draft_tokens = value

    @property
    def residual_bits(self) -> int:
        """Bits of residual that the verifier reads; 0: the base alone."""
        return self._residual_bits

    @residual_bits.setter
    def residual_bits(self, value: int) -> None:
        if self._engine is None:
            raise errors.ArgumentError("the model was loaded with residual_bits=0, without its residual")
        if value != self._residual_bits:
            self._residual_bits = set_bits(self._engine, value)
            self.reset()  # cached entries are of the other verifier

    @property
    def stats(self) -> dict[str, Any]:
        """Statistics of the last call."""
        return self._stats.as_dict()

    # ---- decoding ------------------------------------------------------------------------------------

    def eval(self, tokens: Sequence[int]) -> None:
        """Decode tokens with the full model after those already in the cache."""
        self._decoder.truncate(self.n_tokens)
        speculate.feed(
            self._decoder, list(tokens), self.n_tokens, all_rows=self._logits_all, after=self._remember_batch
        )
        self._requires_eval = False

    def _remember_batch(self, batch: Sequence[int], position: int) -> None:
        self.input_ids[position : position + len(batch)] = batch
        self.n_tokens = position + len(batch)
        if self._logits_all:
            for row in range(len(batch)):
                self.scores[position + row] = self._decoder.logits(row)

    def generate(
        self,
        tokens: Sequence[int],
        top_k: int = 40,
        top_p: float = 0.95,
        min_p: float = 0.05,
        typical_p: float = 1.0,
        temp: float = 0.80,
        repeat_penalty: float = 1.0,
        reset: bool = True,
        frequency_penalty: float = 0.0,
        presence_penalty: float = 0.0,
        tfs_z: float = 1.0,
        mirostat_mode: int = 0,
        mirostat_tau: float = 5.0,
        mirostat_eta: float = 0.1,
        penalize_nl: bool = True,
        logits_processor: Any = None,
        stopping_criteria: Any = None,
        grammar: Any = None,
    ) -> Generator[int, Sequence[int] | None, None]:
        """Yield tokens that continue `tokens`, as llama_cpp.Llama.generate does.

        The verifier's sampler chain decides at every place, so the text is distributed as the full model's;
        drafts only save it the trouble of decoding token by token.

        Raises
        ------
        DecodeError
            when the context is full, or llama.cpp or the engine fail.
        """
        if self.model_params.vocab_only:
            raise errors.UnsupportedError("the model was loaded with vocab_only=True: it can tokenize, not generate")
        plain = repeat_penalty == 1.0 and frequency_penalty == presence_penalty == 0.0
        choose = self._decoder.greedy
        self._sampler: Any = None
        if temp != 0.0 or not plain or logits_processor is not None or grammar is not None:
            self._sampler = make_sampler(
                self,
                top_k=top_k,
                top_p=top_p,
                min_p=min_p,
                typical_p=typical_p,
                temp=temp,
                repeat_penalty=repeat_penalty,
                frequency_penalty=frequency_penalty,
                presence_penalty=presence_penalty,
                tfs_z=tfs_z,
                mirostat_mode=mirostat_mode,
                mirostat_tau=mirostat_tau,
                mirostat_eta=mirostat_eta,
                penalize_nl=penalize_nl,
                logits_processor=logits_processor,
                grammar=grammar,
            )
            sampler = self._sampler

            def choose(row: int) -> int:
                return self._decoder.sample(sampler, row)

        yield from self._rounds(list(tokens), reset, choose, stopping_criteria)

    def _rounds(
        self, tokens: list[int], reset: bool, choose: Callable[[int], int], stopping_criteria: Any
    ) -> Generator[int, Sequence[int] | None, None]:
        """Prompt, then rounds of draft and check, until the caller stops."""
        self._stats = stats = Stats()
        self._running = running = object()  # a later call owns the cache
        meter = Meter(self._engine, stats)
        drafted: list[int] = []
        checked = False  # whether the rows to read are a check's
        try:
            pending = self._reuse_prefix(tokens) if reset else tokens or self._last_again()
            while True:
                if pending:
                    stats.prompt_tokens += len(pending)
                    with stats.timed("prompt_s"):
                        self.eval(pending)
                    meter.update()
                    pending, drafted, checked = [], [], False
                row = 0 if drafted else -1
                for place in range(len(drafted) + 1):
                    token = choose(row + place)
                    self._row = row + place
                    stats.tokens += 1
                    if stopping_criteria is not None and stopping_criteria(
                        self._input_ids, self._decoder.logits(row + place)
                    ):
                        return
                    sent = yield token
                    if self._running is not running:
                        raise errors.DecodeError("another call has used the model since; start again")
                    if sent is not None and len(sent):
                        pending = [token, *(int(other) for other in sent)]
                        break
                    if place == len(drafted) or token != drafted[place]:
                        if checked:
                            stats.count_outcome(place + 1)
                        break
                    stats.agreed_by_position[place] += 1
                    self._advance(place + 1)
                self._decoder.truncate(self.n_tokens)
                if not pending:
                    drafted, checked = self._round(token, stats), True
                    meter.update()
        finally:
            if self._running is running and self._decoder.is_open:
                self._decoder.truncate(self.n_tokens)
                self._requires_eval = True
            meter.update()

    def _last_again(self) -> list[int]:
        """Take the last token back, to be decoded once more, if its logits are not those of the last decode."""
        if not (self._requires_eval and self.n_tokens):
            return []
        self.n_tokens -= 1
        return [int(self.input_ids[self.n_tokens])]

    def sample(self, *arguments: Any, **settings: Any) -> int:
        """Sample what follows the text so far, as llama_cpp.Llama.sample does."""
        again = self._last_again()
        if again:
            self.eval(again)
        return int(super().sample(*arguments, **settings))

    def save_state(self) -> Any:
        """Save the context, as llama_cpp.Llama.save_state does, and which verifier its entries are of."""
        state = super().save_state()
        state.residual_bits = self._residual_bits
        return state

    def load_state(self, state: Any) -> None:
        """Load a saved context; entries of another verifier are forgotten."""
        super().load_state(state)
        if getattr(state, "residual_bits", self._residual_bits) != self._residual_bits:
            self.reset()

    def _advance(self, place: int) -> None:
        """Count one more decoded token as part of the text."""
        if self._logits_all:
            self.scores[self.n_tokens] = self._decoder.logits(place)
        self.n_tokens += 1

    def _round(self, last: int, stats: Stats) -> list[int]:
        """Draft after `last`, check, and leave the check's logits to be read; return the draft."""
        room = self._n_ctx - self.n_tokens - 1
        if room < 0:
            raise errors.DecodeError(f"the context of {self._n_ctx} tokens is full")
        length = min(self.draft_tokens if self._residual_bits else 0, room, self._decoder.max_batch - 1)
        drafted: list[int] = []
        if length:
            with stats.timed("draft_s"):
                drafted = speculate.draft(self._decoder, last, self.n_tokens, length)
        stats.count_draft(len(drafted))
        with stats.timed("verify_s"):
            speculate.check(self._decoder, last, drafted, self.n_tokens)
        self.input_ids[self.n_tokens : self.n_tokens + 1 + len(drafted)] = [last, *drafted]
        self._advance(0)
        return drafted

    def _reuse_prefix(self, tokens: list[int]) -> list[int]:
        """Cut the cache back to what it shares with `tokens`; return the tokens still to be decoded."""
        if not tokens:
            start = self.token_bos() if self.token_bos() != -1 else self.token_eos()
            tokens = [start]
        shared = self.longest_token_prefix(self._input_ids.tolist(), tokens)
        keep = min(shared, len(tokens) - 1)  # the last one is decoded again for its logits
        self._decoder.truncate(keep)
        self.n_tokens = keep
        return tokens[keep:]

    def __getstate__(self) -> dict[str, Any]:
        """Arguments that make this object again, for pickle."""
        ours: dict[str, Any] = {"draft_tokens": self.draft_tokens, "residual_path": self.residual_path}
        if self._engine is not None:
            ours |= {"residual_bits": self._residual_bits, "claim": self._engine.claiming}
        return {"residual_bits": 0, **super().__getstate__(), **ours}
