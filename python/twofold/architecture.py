"""Which models can be drafted and verified: what llama.cpp says of a file, without reading its weights."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import llama_cpp

from twofold import errors
from twofold.llama_log import quiet_log

# What llama.cpp loads but cannot run by itself.
_UNUSABLE = {
    "gemma4-assistant": "it drafts for another model, whose cache it needs",
    "chameleon": f"llama.cpp {llama_cpp.__version__} masks its image tokens in one row of a batch only",
    "wavtokenizer-dec": "it makes sound, not text",
    "plm": f"llama.cpp {llama_cpp.__version__} itself cannot run it",
}


def check_architecture(path: Path) -> None:
    """Refuse a model that cannot be drafted and verified, or that llama.cpp does not know.

    Raises
    ------
    UnsupportedError
        naming the architecture and the reason.
    """
    with _opened_for_tokens(path) as model:
        refuse_unsupported(model, path)


def vocabulary(path: Path) -> list[bytes]:
    """Return the texts of a model's tokens, by id; unused ids at the end, which only pad the matrices, are left out.

    Raises
    ------
    UnsupportedError
        if llama.cpp cannot load the model, or it cannot draft.
    """
    with _opened_for_tokens(path) as model:
        refuse_unsupported(model, path)
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


def refuse_unsupported(model: Any, path: Path) -> None:
    """Raise UnsupportedError, naming the architecture and the reason, unless a loaded model can be drafted."""
    name = ctypes.create_string_buffer(128)
    llama_cpp.llama_model_meta_val_str(model, b"general.architecture", name, len(name))
    architecture = name.value.decode()
    reasons = {
        "it has an encoder": llama_cpp.llama_model_has_encoder(model),
        "it has no decoder": not llama_cpp.llama_model_has_decoder(model),
        "it makes embeddings, not text": _is_embedding_model(model, architecture),
        "it is a diffusion model": llama_cpp.llama_model_is_diffusion(model),
        _UNUSABLE.get(architecture, ""): architecture in _UNUSABLE,
    }
    for reason, applies in reasons.items():
        if applies:
            raise errors.UnsupportedError(
                f"{path}: architecture {architecture} is not supported: {reason}; run it with llama.cpp itself"
            )


def _is_embedding_model(model: Any, architecture: str) -> bool:
    """Whether attention looks both ways, as files say of BERT-like models."""
    causal = ctypes.create_string_buffer(16)
    key = f"{architecture}.attention.causal".encode()
    llama_cpp.llama_model_meta_val_str(model, key, causal, len(causal))
    return causal.value == b"false" or "bert" in architecture or architecture.endswith(("-embed", "-embedding"))
