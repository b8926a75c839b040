"""The door to llama_cpp: everything that touches its private parts is here, so its version is pinned.

`BaseLlama` is llama_cpp.Llama with an eval callback and every decode checked; `Decoder` is what the loop in
speculate.py sees of it.
"""

from __future__ import annotations

import ctypes
import inspect
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
from llama_cpp import _internals, llama_speculative

from twofold import errors, rollback
from twofold._native import Floats, race_sampler
from twofold.architecture import refuse_unsupported
from twofold.collector import Collector
from twofold.engine import Engine

PromptLookup = llama_speculative.LlamaPromptLookupDecoding
SPLIT_MODE_TENSOR = llama_cpp.LLAMA_SPLIT_MODE_TENSOR


def keywords() -> set[str]:
    """Names of the keyword arguments that llama_cpp.Llama really has."""
    parameters = inspect.signature(llama_cpp.Llama.__init__).parameters.values()
    return {p.name for p in parameters if p.kind is not p.VAR_KEYWORD} - {"self"}


def physical_cores() -> int:
    """Cores this process may use, hyperthreads counted once."""
    cores = set()
    for cpu in os.sched_getaffinity(0):
        siblings = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        cores.add(siblings.read_text() if siblings.exists() else str(cpu))
    return len(cores)


class BaseLlama(llama_cpp.Llama):  # type: ignore[misc]
    """llama_cpp.Llama whose context runs with an engine's eval callback.

    `snapshots` is how many tokens at the end of a decode a recurrent state can be set back by, if llama.cpp can do that
    with the model at all.
    """

    _engine: Any  # Engine, Collector or None

    def __init__(self, engine: Engine | Collector | None, *, snapshots: int = 0, **arguments: Any) -> None:
        self._engine, self._snapshots = engine, snapshots
        super().__init__(**arguments)
        self._decoder: Decoder
        if not self.model_params.vocab_only:
            refuse_unsupported(self._model.model, Path(self.model_path))
            self._decoder = Decoder(self)
            self._ctx.decode = self._decoder.decode_foreign  # every path of llama_cpp goes through it

    @property
    def context_params(self) -> Any:
        """llama_context_params as llama_cpp fills them in, with the eval callback and what the model needs added."""
        if getattr(self, "_model", None) is not None and getattr(self, "_ctx", None) is None:
            company = self._engine is not None and self._engine.claiming
            rollback.prepare(self._context_params, self._model.model, self._snapshots, company)
        return self._context_params

    @context_params.setter
    def context_params(self, params: Any) -> None:
        if self._engine is not None:
            callback = llama_cpp.llama_cpp.ggml_backend_sched_eval_callback
            params.cb_eval = ctypes.cast(self._engine.callback, callback)
            params.cb_eval_user_data = self._engine.user_data
        self._context_params = params

    @property
    def model_params(self) -> Any:
        """llama_model_params as llama_cpp fills them in."""
        return self._model_params

    @model_params.setter
    def model_params(self, params: Any) -> None:
        # llama.cpp would rearrange weights for its own CPU kernels, where ours could not read them.
        if self._engine is not None and self._engine.claiming:
            params.use_extra_bufts = False
        self._model_params = params

    @property
    def decoder(self) -> Decoder:
        """What decodes batches; DecodeError for a model loaded with vocab_only."""
        if self.model_params.vocab_only:
            raise errors.DecodeError("the model was loaded with vocab_only=True: it can tokenize, not decode")
        return self._decoder

    def close(self) -> None:
        """Free the context and the model; the engine must live until then."""
        if getattr(self, "_ctx", None) is not None:
            self._ctx.__dict__.pop("decode", None)
        if hasattr(self, "_stack"):  # not where loading failed before there was anything to free
            super().close()


class Decoder:
    """Decodes batches of one sequence in draft or verify mode and gives access to the logits.

    Rows are counted in the last decode, over the tokens whose logits were asked for.
    """

    def __init__(self, llama: Any) -> None:
        self._llama = llama
        self._ctx = llama._ctx.ctx
        self._batch: Any = llama._batch
        self._vocab = llama.n_vocab()
        self._mode = Engine.VERIFY
        self.engine: Engine | Collector | None = llama._engine
        self.rollback = rollback.choose(self._ctx, llama._model.model, self._replay)

    @contextmanager
    def drafting(self) -> Iterator[None]:
        """Run decodes on the base alone."""
        self._mode = Engine.DRAFT
        try:
            yield
        finally:
            self._mode = Engine.VERIFY

    def decode_batch(self, batch: Any) -> None:
        """Run llama_decode and report its failures, and those of the engine inside.

        Raises
        ------
        DecodeError
            if llama.cpp refuses the batch or a residual could not be applied.
        """
        self._check_open()
        if self.engine is not None:
            self.engine.begin(self._mode)
        code = llama_cpp.llama_decode(self._ctx, batch.batch)
        reasons = {1: "no room in the context", 2: "aborted", -1: "invalid batch"}  # with these no graph ran to its end
        try:
            if self.engine is not None and code not in reasons:
                self.engine.end()
            if code != 0:
                raise errors.DecodeError(f"llama_decode returned {code}: {reasons.get(code, 'failed')}")
        except errors.TwofoldError:
            if code not in (1, -1):  # then nothing was computed at all
                self.rollback.spoil()
            raise

    def decode_foreign(self, batch: Any) -> None:
        """Run llama_decode for llama_cpp's own loops, whose tokens are not known here."""
        self.rollback.forget()
        self.decode_batch(batch)

    @property
    def is_open(self) -> bool:
        """Whether the context still exists."""
        return self._llama._ctx.ctx is not None

    def _check_open(self) -> None:
        if not self.is_open:
            raise errors.DecodeError("the model is closed")

    def decode(self, tokens: Sequence[int], position: int, *, all_rows: bool) -> None:
        """Decode tokens from `position` on; logits of all of them, or of the last."""
        company = self._needs_company(tokens, position)
        fed = [*tokens, *tokens] if company else tokens
        self._batch.set_batch(batch=fed, n_past=position, logits_all=all_rows or company)
        if company:
            self._batch.batch.logits[1] = False
            self.rollback.seat(self._batch.batch)
        self.decode_batch(self._batch)
        self.rollback.note(tokens, position, self._mode)
        if company:
            self.rollback.unseat(position + 1)

    def _replay(self, tokens: Sequence[int], position: int, mode: int) -> None:
        """Decode tokens once more, as they were decoded first."""
        before, self._mode = self._mode, mode
        try:
            self.decode(tokens, position, all_rows=False)
        finally:
            self._mode = before

    def _needs_company(self, tokens: Sequence[int], position: int) -> bool:
        """Whether a token has to be decoded beside another one, which is then forgotten.

        ggml's flash attention spreads the keys of a single row over threads once there are many, and so sums them in
        another order than for several rows: a check of one token would round otherwise than a wider one. On a device
        the width of a batch decides about rounding anyway.
        """
        claiming = isinstance(self.engine, Engine) and self.engine.claims and self._mode == Engine.VERIFY
        alone = claiming and len(tokens) == 1 and self.rollback.seats
        return alone and self.max_batch > 1 and position + 2 <= self._llama._n_ctx

    def mark(self) -> None:
        """Prepare for truncating to what is decoded by now, or to any later place."""
        self._check_open()
        self.rollback.mark()

    def truncate(self, position: int) -> None:
        """Forget everything from `position` on.

        Raises
        ------
        DecodeError
            if the memory cannot forget so little: a recurrent state that was not marked before.
        """
        if self.keep(position) != position:
            raise errors.DecodeError(f"the state after {position} tokens is lost; the memory is empty now")

    def keep(self, position: int) -> int:
        """Forget everything from `position` on, or all of it if that cannot be; return how many tokens are left."""
        self._check_open()
        if self.rollback.cut(position):
            return position
        self.rollback.cut(0)
        return 0

    def logits(self, row: int) -> Floats:
        """Logits of a row, float32 ``(n_vocab,)``, in llama.cpp's own memory until the next decode."""
        self._check_open()
        pointer = llama_cpp.llama_get_logits_ith(self._ctx, row)
        if not pointer:
            raise errors.DecodeError(f"no logits for row {row}")
        return np.ctypeslib.as_array(pointer, shape=(self._vocab,))

    def block(self, count: int) -> Floats:
        """Logits of the last decode's first `count` rows, float32 ``(count, n_vocab)``, valid as those of `logits`.

        All rows must have been asked for, of a batch that llama.cpp computes at once (not above n_ubatch).
        """
        first, last = self.logits(0), self.logits(count - 1)
        if last.ctypes.data - first.ctypes.data != (count - 1) * first.nbytes:
            raise errors.DecodeError(f"the last decode does not hold {count} rows of logits in their order")
        return np.lib.stride_tricks.as_strided(first, (count, self._vocab), (first.nbytes, first.itemsize))

    def greedy(self, row: int) -> int:
        """Most likely token of a row; the first of equals, as llama.cpp's greedy sampler takes it."""
        return int(np.argmax(self.logits(row)))

    def confidence(self, row: int, token: int) -> float:
        """Probability of a token under the softmax of a row."""
        logits = self.logits(row)
        with np.errstate(over="ignore"):  # a token that is hopeless has probability 0
            return float(1.0 / np.exp(logits - logits[token]).sum())

    def sample(self, sampler: Any, row: int) -> int:
        """Draw from a row with llama.cpp's sampler chain, which remembers the token."""
        return int(sampler.sample(self._llama._ctx, row))

    @contextmanager
    def guessing(self, sampler: Any) -> Iterator[Callable[[int], int]]:
        """Yield a function that guesses what `sampler` will take from a row; None takes the likeliest token.

        A copy of the chain guesses, with the same random numbers, penalties and grammar: where base and full model
        agree on the probabilities, so do the guess and what the sampler takes then.
        """
        if sampler is None or sampler.custom_samplers:  # functions in Python cannot be copied
            yield self.greedy
            return
        copy = llama_cpp.llama_sampler_clone(sampler.sampler)
        try:
            yield lambda row: int(llama_cpp.llama_sampler_sample(copy, self._ctx, row))
        finally:
            llama_cpp.llama_sampler_free(copy)

    @property
    def has_windows(self) -> bool:
        """Whether layers see a sliding window of the text only."""
        return bool(llama_cpp.llama_model_n_swa(self._llama._model.model))

    @property
    def max_batch(self) -> int:
        """Most tokens of one decode."""
        return int(self._llama.n_batch)


def end_of_generation(llama: Any, token: int) -> bool:
    """Whether a token ends the text."""
    return bool(llama_cpp.llama_vocab_is_eog(llama._model.vocab, token))


def ordinary_tokens(llama: Any) -> list[int]:
    """Tokens that are text: no control tokens, no single bytes, none that are unused."""
    vocab, normal = llama._model.vocab, llama_cpp.LLAMA_TOKEN_ATTR_NORMAL
    return [t for t in range(llama.n_vocab()) if llama_cpp.llama_vocab_get_attr(vocab, t) == normal]


def opening(llama: Any) -> list[int]:
    """Tokens that the model wants before any text: the beginning-of-text token, or none."""
    return [int(llama.token_bos())] if llama._model.add_bos_token() else []


_DEEPEST, _MOST_RULES = 2000, 20000


def make_sampler(llama: Any, **settings: Any) -> _internals.LlamaSampler:
    """Build llama_cpp's sampler chain for these settings; its last member, which draws, is ours.

    Raises
    ------
    ArgumentError
        for a grammar that llama.cpp cannot read; llama_cpp would put a null pointer into the chain.
    """
    grammar = settings.get("grammar")
    if grammar is not None:
        text, root = grammar._grammar.encode(), grammar._root.encode()
        depths = itertools.accumulate((c == ord("(")) - (c == ord(")")) for c in text)
        # llama.cpp calls itself for parentheses in parentheses and rules in rules, until its stack is full.
        if max(depths, default=0) > _DEEPEST:
            raise errors.ArgumentError(f"the grammar has more than {_DEEPEST} parentheses in one another")
        if text.count(b"::=") > _MOST_RULES:
            raise errors.ArgumentError(f"the grammar has more than {_MOST_RULES} rules")
        parsed = llama_cpp.llama_sampler_init_grammar(llama._model.vocab, text, root)
        if not parsed:
            raise errors.ArgumentError("llama.cpp cannot read this grammar; its rules are those of GBNF")
        llama_cpp.llama_sampler_free(parsed)
    sampler = llama._init_sampler(**settings)
    _draw_by_race(sampler.sampler)
    return sampler


def _draw_by_race(chain: Any) -> None:
    """Let a chain that ends in llama.cpp's draw end in one with which drafts are refused less often (csrc/race.c)."""
    last = llama_cpp.llama_sampler_chain_n(chain) - 1
    draw = llama_cpp.llama_sampler_chain_get(chain, last)
    if llama_cpp.llama_sampler_name(draw) != b"dist":
        return
    init = ctypes.cast(llama_cpp.llama_cpp._lib.llama_sampler_init, ctypes.c_void_p).value
    made = race_sampler(init or 0, llama_cpp.llama_sampler_get_seed(draw))
    llama_cpp.llama_sampler_free(llama_cpp.llama_sampler_chain_remove(chain, last))
    llama_cpp.llama_sampler_chain_add(chain, ctypes.cast(made, llama_cpp.llama_cpp.llama_sampler_p_ctypes))
