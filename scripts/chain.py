"""What a sampler chain of llama.cpp makes of logits: exact probabilities, for measurements and tests."""

from __future__ import annotations

import ctypes
from typing import Any

import llama_cpp
import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int32]
Probabilities = npt.NDArray[np.float64]
_TOKEN = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])


def distribution(sampler: Any, logits: npt.NDArray[np.float32]) -> tuple[Ids, Probabilities]:
    """Return the tokens that a chain leaves, in the order it draws them in, and their probabilities.

    The chain's last member draws and is left out, so no random number is used and nothing is remembered.

    Parameters
    ----------
    sampler
        of ``decoder.make_sampler``.
    logits
        float32 ``(n_vocab,)``.
    """
    tokens = np.zeros(len(logits), _TOKEN)
    tokens["id"], tokens["logit"] = np.arange(len(logits)), logits
    data = tokens.ctypes.data_as(ctypes.POINTER(llama_cpp.llama_token_data))
    array = llama_cpp.llama_token_data_array(data=data, size=len(tokens), selected=-1, sorted=False)
    for place in range(llama_cpp.llama_sampler_chain_n(sampler.sampler) - 1):
        llama_cpp.llama_sampler_apply(llama_cpp.llama_sampler_chain_get(sampler.sampler, place), ctypes.byref(array))
    left = np.ctypeslib.as_array(array.data, (array.size,)).view(_TOKEN)  # a sampler may put the data elsewhere
    weights = np.exp(left["logit"].astype(np.float64) - float(left["logit"].max()))
    return left["id"].copy(), weights / weights.sum()


def accept(sampler: Any, token: int) -> None:
    """Let a chain remember a token, as it does with those it draws."""
    llama_cpp.llama_sampler_accept(sampler.sampler, token)
