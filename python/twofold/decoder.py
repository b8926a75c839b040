"""The only door to llama_cpp: everything that touches its private parts is here, so its version is pinned.

`BaseLlama` is llama_cpp.Llama with an eval callback and every decode checked; `Decoder` is what the loop in
speculate.py sees of it.
"""

from __future__ import annotations

import ctypes
import inspect
import itertools
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
from llama_cpp import _internals, llama_speculative

from twofold import errors
from twofold._native import Floats, race_sampler
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


def check_architecture(path: Path) -> None:
    """Refuse a model that cannot be drafted and rolled back, or that llama.cpp does not know.

    Raises
    ------
    UnsupportedError
        naming the architecture and the reason.
    """
    with _opened_for_tokens(path) as model:
        _refuse_unsupported(model, path)


def vocabulary(path: Path) -> list[bytes]:
    """Return the texts of a model's tokens, by id; unused ids at the end, which only pad the matrices, are left out.

    Raises
    ------
    UnsupportedError
        if llama.cpp cannot load the model, or its drafts could not be rolled back.
    """
    with _opened_for_tokens(path) as model:
        _refuse_unsupported(model, path)
        vocab = llama_cpp.llama_model_get_vocab(model)
        count = llama_cpp.llama_vocab_n_tokens(vocab)
        while count and llama_cpp.llama_vocab_get_attr(vocab, count - 1) & llama_cpp.LLAMA_TOKEN_ATTR_UNUSED:
            count -= 1
        return [llama_cpp.llama_vocab_get_text(vocab, token) or b"" for token in range(count)]


@contextmanager
def _opened_for_tokens(path: Path) -> Iterator[Any]:
    quiet_log()
    if not path.exists():
        raise errors.FileAccessError(f"{path}: no such file")
    params = llama_cpp.llama_model_default_params()
    params.vocab_only = True
    model = llama_cpp.llama_model_load_from_file(os.fsencode(path), params)
    if model is None:
        raise errors.UnsupportedError(f"{path}: llama.cpp {llama_cpp.__version__} cannot load this model")
    try:
        yield model
    finally:
        llama_cpp.llama_model_free(model)


def _refuse_unsupported(model: Any, path: Path) -> None:
    name = ctypes.create_string_buffer(128)
    llama_cpp.llama_model_meta_val_str(model, b"general.architecture", name, len(name))
    reasons = {
        "it has an encoder": llama_cpp.llama_model_has_encoder(model),
        "it has no decoder": not llama_cpp.llama_model_has_decoder(model),
        "its recurrent state cannot be rolled back yet": llama_cpp.llama_model_is_recurrent(model)
        or llama_cpp.llama_model_is_hybrid(model),
        "it makes embeddings, not text": _is_embedding_model(model, name.value.decode()),
        "it is a diffusion model": llama_cpp.llama_model_is_diffusion(model),
    }
    for reason, applies in reasons.items():
        if applies:
            raise errors.UnsupportedError(
                f"{path}: architecture {name.value.decode()} is not supported: {reason}; run it with llama.cpp itself"
            )


def _is_embedding_model(model: Any, architecture: str) -> bool:
    """Whether attention looks both ways, as files say of BERT-like models."""
    causal = ctypes.create_string_buffer(16)
    key = f"{architecture}.attention.causal".encode()
    llama_cpp.llama_model_meta_val_str(model, key, causal, len(causal))
    return causal.value == b"false" or "bert" in architecture or "embed" in architecture


class BaseLlama(llama_cpp.Llama):  # type: ignore[misc]
    """llama_cpp.Llama whose context runs with an engine's eval callback."""

    _engine: Any  # Engine, Collector or None

    def __init__(self, engine: Engine | Collector | None, **arguments: Any) -> None:
        self._engine = engine
        super().__init__(**arguments)
        self._decoder: Decoder
        if not self.model_params.vocab_only:
            _refuse_unsupported(self._model.model, Path(self.model_path))
            self._decoder = Decoder(self)
            self._ctx.decode = self._decoder.decode_batch  # every path of llama_cpp goes through it

    @property
    def context_params(self) -> Any:
        """llama_context_params as llama_cpp fills them in, with the eval callback added."""
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
        if self.engine is not None and code not in reasons:
            self.engine.end()
        if code != 0:
            raise errors.DecodeError(f"llama_decode returned {code}: {reasons.get(code, 'failed')}")

    @property
    def is_open(self) -> bool:
        """Whether the context still exists."""
        return self._llama._ctx.ctx is not None

    def _check_open(self) -> None:
        if not self.is_open:
            raise errors.DecodeError("the model is closed")

    def decode(self, tokens: Sequence[int], position: int, *, all_rows: bool) -> None:
        """Decode tokens from `position` on; logits of all of them, or of the last."""
        if not self._needs_company(tokens, position):
            self._batch.set_batch(batch=tokens, n_past=position, logits_all=all_rows)
            self.decode_batch(self._batch)
            return
        self._batch.set_batch(batch=[*tokens, *tokens], n_past=position, logits_all=True)
        self._batch.batch.logits[1] = False
        self.decode_batch(self._batch)
        self.truncate(position + 1)

    def _needs_company(self, tokens: Sequence[int], position: int) -> bool:
        """Whether a token has to be decoded beside another one, which is then forgotten.

        ggml's flash attention spreads the keys of a single row over threads once there are many, and so sums them in
        another order than for several rows: a check of one token would round otherwise than a wider one.
        """
        claiming = self.engine is not None and self.engine.claiming and self._mode == Engine.VERIFY
        return claiming and len(tokens) == 1 and self.max_batch > 1 and position + 2 <= self._llama._n_ctx

    def truncate(self, position: int) -> None:
        """Forget everything from `position` on.

        Raises
        ------
        DecodeError
            if the cache cannot drop part of a sequence.
        """
        self._check_open()
        if not self._llama._ctx.kv_cache_seq_rm(0, position, -1):
            raise errors.DecodeError(f"the cache cannot be cut back to {position} tokens")

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


LOG_ERROR = 4  # enum ggml_log_level; llama_cpp takes 3, a warning, for it and so shows warnings and hides errors


@llama_cpp.llama_log_callback  # type: ignore[untyped-decorator]
def _show_errors(level: int, message: bytes, _: Any) -> None:
    if level == LOG_ERROR:
        print(message.decode("utf-8", "replace"), end="", flush=True, file=sys.stderr)


def quiet_log() -> None:
    """Keep llama.cpp's log off standard error, errors excepted."""
    llama_cpp.llama_log_set(_show_errors, None)


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
