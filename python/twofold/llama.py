"""`twofold.Llama`: llama_cpp.Llama that drafts with the base and verifies with base + residual."""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path
from typing import Any, Literal

import numpy as np

from twofold import errors, propose
from twofold.decoder import physical_cores
from twofold.devices import add_rpc_servers, gpu_backends
from twofold.loading import STAGE_BYTES, STAGE_COLUMNS, check_arguments, load_engine, set_bits
from twofold.loop import MAX_DRAFT, LoopingLlama
from twofold.pace import Auto, Fixed
from twofold.pairfile import residual_bytes
from twofold.propose import NGRAM, Proposer
from twofold.rollback import SNAPSHOTS
from twofold.stats import Stats
from twofold.vocabularies import shared_vocabulary
from twofold.whereabouts import Whereabouts, locate


class Llama(LoopingLlama):
    """A pair of files behind llama_cpp.Llama's interface.

    Parameters
    ----------
    model_path
        ``NAME.base.gguf``.
    draft_tokens
        Tokens drafted before each check: ``"auto"`` drafts as far as it pays (pace.py), 0 to 32 always as many; 0
        decodes plainly with the full model. May be changed later.
    residual_bits
        The verifier: 4, 6, 8, or 0 for the base alone; default: all that the file holds. May be changed later.
    residual_path
        Default: ``NAME.residual.gguf`` beside the base.
    drafter
        What guesses for the base to check: ``"ngram"`` looks the last tokens up in the text so far, a path names a
        GGUF file with the same vocabulary, None leaves the base alone. Loaded with the same context and threads.
    claim
        Compute base products in host memory with twofold's own kernels, base and residual in one pass, instead of
        ggml's; default: where all types of the base have such kernels. Drafts then differ from stock llama.cpp's
        by rounding.
    preload
        Read the planes in use into memory while loading (with a progress bar if `verbose`), instead of when they are
        first needed; with `use_mlock` they are locked there too.
    stage_columns
        Prompts decoded so many tokens or more at once are completed on the device that computes them: the residual is
        sent there, matrix by matrix. 0: always by the CPU (docs/devices.md).
    stage_bytes
        Memory taken for that on each device, 1 MiB to 1 GiB.
    rpc_servers
        ``HOST:PORT`` of servers of ggml's RPC backend whose devices are used too, separated by commas; for the rest
        of this process.
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
    whereabouts : Whereabouts or None
        Where the parts of the model lie (whereabouts.py); None if it was not looked after: without a residual, and
        with `n_gpu_layers` 0 where ggml computes the base.
    """

    def __init__(
        self,
        model_path: str | os.PathLike[str],
        *,
        draft_tokens: int | Literal["auto"] = "auto",
        residual_bits: int | None = None,
        residual_path: str | os.PathLike[str] | None = None,
        drafter: str | os.PathLike[str] | None = NGRAM,
        claim: bool | None = None,
        preload: bool = True,
        stage_columns: int = STAGE_COLUMNS,
        stage_bytes: int = STAGE_BYTES,
        rpc_servers: str | None = None,
        **arguments: Any,
    ) -> None:
        check_arguments(arguments)
        arguments.setdefault("n_threads", physical_cores())
        arguments.setdefault("n_threads_batch", arguments["n_threads"])
        # ggml's flash attention computes each token alike whatever stands beside it in the batch; its other attention
        # does not, and a check would differ from plain decoding (docs/log.md).
        arguments.setdefault("flash_attn", True)
        if drafter is not None and drafter != NGRAM:
            shared_vocabulary([Path(model_path), Path(drafter)])
        self.residual_path, self.drafter = residual_path, drafter
        self._stage_columns = stage_columns
        self._stats = Stats()
        self._auto = Auto(MAX_DRAFT)  # it goes on learning from call to call
        self.draft_tokens = draft_tokens
        if rpc_servers:
            add_rpc_servers(rpc_servers)
        engine, stage = None, (stage_columns, stage_bytes)
        if residual_bits != 0 and not arguments.get("vocab_only"):
            engine = load_engine(
                Path(model_path),
                residual_path,
                arguments,
                bits=residual_bits,
                claim=claim,
                preload=preload,
                stage=stage,
            )
        self._residual_bits = 0 if engine is None else set_bits(engine, residual_bits)
        snapshots = SNAPSHOTS if draft_tokens == "auto" else max(1, min(int(draft_tokens), SNAPSHOTS))
        super().__init__(engine, snapshots=snapshots if engine else 0, model_path=os.fspath(model_path), **arguments)
        self._fit_to_context()
        self.whereabouts = self._first_decode(arguments.get("n_gpu_layers", 0), bool(arguments.get("verbose", True)))
        if arguments.get("verbose", True) and self.rollback:
            print(f"twofold: {self.rollback}", file=sys.stderr)
        self._proposer = None if self._engine is None else self._make_proposer(drafter)

    def _make_proposer(self, drafter: str | os.PathLike[str] | None) -> Proposer | None:
        if drafter is None or drafter == NGRAM:
            return propose.make(drafter)
        batch = {"n_threads": self.n_threads, "n_threads_batch": self.n_threads_batch, "n_batch": self.n_batch}
        return propose.make(os.fspath(drafter), n_ctx=self._n_ctx, flash_attn=True, **batch)

    def close(self) -> None:
        """Free the models and the context."""
        proposer = getattr(self, "_proposer", None)
        if isinstance(proposer, propose.Model):
            proposer.close()
        super().close()

    def _fit_to_context(self) -> None:
        """Make room for as many tokens as the context holds: llama.cpp rounds n_ctx up, llama_cpp does not know."""
        if self.input_ids.size < self._n_ctx:
            self.input_ids = np.zeros(self._n_ctx, np.intc)
            if self._logits_all:
                self.scores = np.zeros((self._n_ctx, self._n_vocab), np.single)

    def _first_decode(self, gpu_layers: int, verbose: bool) -> Whereabouts | None:
        """Decode a token: the base is rearranged for our kernels and devices are made ready now, not in a prompt.

        Say where everything lies, and warn of what is on the CPU though all layers were to be on a device.
        """
        engine = self._engine
        if engine is None or self.context_params.embeddings or not (engine.claiming or gpu_layers):
            return None
        with engine.survey() as seen:
            self._decoder.decode([max(self.token_bos(), 0)], 0, all_rows=False)
        self._decoder.truncate(0)
        whole, uses, staging = gpu_layers < 0, engine.device_uses(), self._stage_columns > 0
        found = locate(seen, uses, self.memory["residual_bytes"], all_layers=whole, staging=staging)
        if uses or gpu_backends():  # a build for CPUs is no surprise
            for warning in found.warnings:
                warnings.warn(warning, errors.PlacementWarning, stacklevel=3)
        if verbose:
            print(f"twofold: {found.line()}", file=sys.stderr)
        return found

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
    def draft_tokens(self) -> int | Literal["auto"]:
        """Tokens drafted before each check, or ``auto``."""
        return self._draft_tokens

    @draft_tokens.setter
    def draft_tokens(self, value: int | Literal["auto"]) -> None:
        number = isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_DRAFT
        if value != "auto" and not number:
            raise errors.ArgumentError(f"draft_tokens {value!r}: 'auto' or an integer from 0 to {MAX_DRAFT} is allowed")
        self._draft_tokens = value
        self._pace = self._auto if value == "auto" else Fixed(int(value))

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
    def rollback(self) -> str:
        """How drafts are taken back, in words; nothing where cells of a cache are dropped."""
        return "" if self.model_params.vocab_only else self._decoder.rollback.about

    @property
    def stats(self) -> dict[str, Any]:
        """Statistics of the last call."""
        return self._stats.as_dict()

    # ---- state ---------------------------------------------------------------------------------------

    def save_state(self) -> Any:
        """Save the context, as llama_cpp.Llama.save_state does, and which verifier its entries are of."""
        state = super().save_state()
        state.residual_bits = self._residual_bits
        return state

    def load_state(self, state: Any) -> None:
        """Load a saved context; entries of another verifier are forgotten.

        With sliding windows its tokens are decoded again: llama.cpp would write over cells that have left the window,
        and cutting back brings them into it again.
        """
        super().load_state(state)
        self._decoder.rollback.forget()
        if getattr(state, "residual_bits", self._residual_bits) != self._residual_bits:
            self.reset()
        elif self._decoder.has_windows:
            tokens, self.n_tokens = self.input_ids[: self.n_tokens].tolist(), 0
            self.eval(tokens)

    def __getstate__(self) -> dict[str, Any]:
        """Arguments that make this object again, for pickle."""
        ours: dict[str, Any] = {"draft_tokens": self.draft_tokens, "residual_path": self.residual_path}
        ours["drafter"] = self.drafter
        if self._engine is not None:
            ours |= {"residual_bits": self._residual_bits, "claim": self._engine.claiming}
        return {"residual_bits": 0, **super().__getstate__(), **ours}
