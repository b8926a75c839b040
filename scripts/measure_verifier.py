#!/usr/bin/env python3
"""Compare a pair with the model it is made of, its verifier as well as its draft.

Merges the pair into a float32 GGUF, runs that through plain llama.cpp, and prints the mean KL divergence (nats) of
the verifier's logits from it, and how many logits are equal bit for bit. The draft is held against stock llama.cpp on
the base file, and both against stock llama.cpp on the base's weights in float32, where nothing rounds activations.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import numpy.typing as npt

import twofold
from twofold.exact import float32_file
from twofold.llama_log import quiet_log
from twofold.merge import merge

Logits = npt.NDArray[np.float32]


def kl_divergence(reference: Logits, other: Logits) -> npt.NDArray[np.float64]:
    """KL divergence of each row's softmax, in nats.

    Parameters
    ----------
    reference, other
        Logits, float32 ``(tokens, n_vocab)``.

    Returns
    -------
    float64 ``(tokens,)``
    """

    def log_softmax(logits: Logits) -> npt.NDArray[np.float64]:
        shifted = logits.astype(np.float64) - logits.max(axis=1, keepdims=True)
        return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True)))

    p, q = log_softmax(reference), log_softmax(other)
    return np.asarray((np.exp(p) * (p - q)).sum(axis=1))


def logits_of(llm: Any, tokens: list[int], *, draft: bool = False) -> Logits:
    """Logits after each token, float32 ``(tokens, n_vocab)``; of the base alone if `draft`."""
    llm.reset()
    if not draft:
        llm.eval(tokens)
        return np.array(llm.scores[: len(tokens)])
    with llm._decoder.drafting():
        llm.eval(tokens)
    return np.array(llm.scores[: len(tokens)])


def measure(base: Path, text: str, count: int, reference_type: str, options: dict[str, Any]) -> dict[str, Any]:
    """Return the figures for one pair over the first `count` tokens of `text`."""
    settings = {"n_ctx": count, "n_batch": min(count, 512), "logits_all": True, "verbose": False}
    pair = twofold.Llama(base, **settings, **options)
    tokens = pair.tokenize(text.encode(), add_bos=True)[:count]
    verifier, drafts = logits_of(pair, tokens), logits_of(pair, tokens, draft=True)
    engine = pair._engine
    claiming = engine is not None and engine.claiming
    pair.close()
    same = {"flash_attn": True, "n_threads": pair.n_threads}
    plain_options = {key: value for key, value in options.items() if key in {"n_gpu_layers", "flash_attn"}}
    stock = llama_cpp.Llama(str(base), **{**same, **settings, **plain_options})
    stock_drafts = logits_of(stock, tokens)
    stock.close()
    with tempfile.TemporaryDirectory() as folder:
        with float32_file(base, Path(folder)) as path:
            exact = llama_cpp.Llama(str(path), **{**same, **settings})
            exact_drafts = logits_of(exact, tokens)
            exact.close()
        merged_path = merge(base, Path(folder) / "merged.gguf", type=reference_type).path
        merged = llama_cpp.Llama(str(merged_path), **{**same, **settings})
        reference = logits_of(merged, tokens)
        merged.close()
        q8_path = merge(base, Path(folder) / "q8_0.gguf", type="q8_0").path
        q8 = llama_cpp.Llama(str(q8_path), **{**same, **settings})
        q8_kld = kl_divergence(reference, logits_of(q8, tokens)).mean()
        q8.close()
    kld = kl_divergence(reference, verifier)
    return {
        "base": base.name,
        "tokens": len(tokens),
        "claim": claiming,
        "verifier_kld_mean": float(kld.mean()),
        "verifier_kld_p99": float(np.quantile(kld, 0.99)),
        "verifier_top1": float((reference.argmax(1) == verifier.argmax(1)).mean()),
        "q8_0_kld_mean": float(q8_kld),
        "base_kld_mean": float(kl_divergence(reference, stock_drafts).mean()),
        "draft_against_stock_kld_mean": float(kl_divergence(stock_drafts, drafts).mean()),
        "draft_against_exact_kld_mean": float(kl_divergence(exact_drafts, drafts).mean()),
        "stock_against_exact_kld_mean": float(kl_divergence(exact_drafts, stock_drafts).mean()),
        "draft_bits_equal": bool(np.array_equal(stock_drafts, drafts)),
    }


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", type=Path, help="NAME.base.gguf")
    parser.add_argument("--text", type=Path, default=Path(__file__), help="default: this script")
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--reference-type", default="f32", choices=["f32", "f16"])
    parser.add_argument("--option", action="append", default=[], metavar="NAME=VALUE", help="integer for twofold.Llama")
    args = parser.parse_args()
    quiet_log()
    options = {name: int(value) for name, value in (option.split("=", 1) for option in args.option)}
    if "claim" in options:
        options["claim"] = bool(options["claim"])
    print(json.dumps(measure(args.base, args.text.read_text(), args.tokens, args.reference_type, options), indent=2))


if __name__ == "__main__":
    main()
