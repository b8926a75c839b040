"""The loop: prompt, then rounds of draft and check (docs/algorithm.md), behind llama_cpp.Llama's methods."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any

from twofold import errors, speculate
from twofold.decoder import BaseLlama, make_sampler
from twofold.pace import Pace
from twofold.propose import Proposer
from twofold.stats import Meter, Stats

MAX_DRAFT = 32


class LoopingLlama(BaseLlama):
    """llama_cpp.Llama whose tokens come of drafts and checks; :class:`twofold.Llama` says how, and loads the pair."""

    input_ids: Any  # of llama_cpp.Llama
    scores: Any
    n_tokens: int
    _stats: Stats
    _pace: Pace
    _proposer: Proposer | None
    _residual_bits: int
    _row: int  # of the last decode: whose logits the token handed out was chosen from

    def eval(self, tokens: Sequence[int]) -> None:
        """Decode tokens with the full model after those already in the cache."""
        tokens = [*self._shorten(self.n_tokens), *tokens]
        speculate.feed(self._decoder, tokens, self.n_tokens, all_rows=self._logits_all, after=self._remember_batch)
        self._requires_eval = False

    def _shorten(self, length: int) -> list[int]:
        """Cut the text back to its first `length` tokens; return those of them that have to be decoded again."""
        self.n_tokens = self._decoder.keep(length)
        return [int(token) for token in self.input_ids[self.n_tokens : length]]

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
                    meter.update_prompt()
                    pending, drafted, checked = [], [], False
                row = 0 if drafted else -1
                for place in range(len(drafted) + 1):
                    token = choose(row + place)
                    self._row = row + place
                    agreed = place < len(drafted) and token == drafted[place]
                    stats.count_token(from_draft=agreed)
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
                    if not agreed:
                        if checked:
                            stats.count_outcome(place + 1)
                            self._pace.outcome(place)
                        break
                    stats.agreed_by_position[place] += 1
                    self._advance(place + 1)
                if not pending:
                    drafted, checked = self._round(token, stats), True
                    meter.update()
        finally:
            if self._running is running and self._decoder.is_open:
                self._shorten(self.n_tokens)
                self._requires_eval = True
            meter.update()

    def _last_again(self) -> list[int]:
        """Take the last token back, to be decoded once more, if its logits are not those of the last decode."""
        if not (self._requires_eval and self.n_tokens):
            return []
        last = int(self.input_ids[self.n_tokens - 1])
        return [*self._shorten(self.n_tokens - 1), last]

    def sample(self, *arguments: Any, **settings: Any) -> int:
        """Sample what follows the text so far, as llama_cpp.Llama.sample does."""
        again = self._last_again()
        if again:
            self.eval(again)
        return int(super().sample(*arguments, **settings))

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
        most = min(MAX_DRAFT, room, self._decoder.max_batch - 1) if self._residual_bits else 0
        self.input_ids[self.n_tokens] = last
        text = self.input_ids[: self.n_tokens + 1]
        how = speculate.Drafting(self._pace, self._sampler, self._proposer, text)
        length, drafted, before = self._pace.begin(most), list[int](), (stats.draft_s, stats.verify_s)
        with stats.timed("verify_s"):  # it may decode again what the last check had to give up
            self._decoder.truncate(self.n_tokens)
        if length:
            with stats.timed("draft_s"):
                drafted = speculate.draft(self._decoder, last, self.n_tokens, length, how)
        stats.count_draft(len(drafted))
        with stats.timed("verify_s"):
            speculate.check(self._decoder, last, drafted, self.n_tokens)
        self._pace.end(len(drafted), stats.draft_s - before[0], stats.verify_s - before[1])
        self.input_ids[self.n_tokens : self.n_tokens + 1 + len(drafted)] = [last, *drafted]
        self._advance(0)
        return drafted

    def _reuse_prefix(self, tokens: list[int]) -> list[int]:
        """Cut the cache back to what it shares with `tokens`; return the tokens still to be decoded."""
        if not tokens:
            start = self.token_bos() if self.token_bos() != -1 else self.token_eos()
            tokens = [start]
        shared = self.longest_token_prefix(self._input_ids.tolist(), tokens)
        self.n_tokens = self._decoder.keep(min(shared, len(tokens) - 1))  # the last one is decoded for its logits
        return tokens[self.n_tokens :]
