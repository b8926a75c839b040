"""Hyper-parameters of a tiny model of each architecture that the pinned llama.cpp knows.

Which keys an architecture needs are facts of llama.cpp's loaders. One common set serves most of them, since a loader
ignores what it does not ask for; `_OWN` has what sets the others apart.
"""

from __future__ import annotations

from typing import TypeAlias

# Lists of integers are written as unsigned 32-bit ones unless they are wrapped in `Wide`.
Value: TypeAlias = "bool | int | float | list[int] | list[float] | Wide"


def _words(text: str) -> list[str]:
    return text.split()


# In the order of llama.cpp's own table (llama-arch.cpp).
NAMES = _words("""
    clip llama llama4 deci falcon grok gpt2 gptj gptneox mpt baichuan starcoder refact bert modern-bert nomic-bert
    nomic-bert-moe neo-bert jina-bert-v2 jina-bert-v3 eurobert bloom stablelm qwen qwen2 qwen2moe qwen2vl qwen3
    qwen3moe qwen3next qwen3vl qwen3vlmoe qwen35 qwen35moe qwen4exp phi2 phi3 phimoe plamo plamo2 plamo3 codeshell
    orion internlm2 minicpm minicpm3 gemma gemma2 gemma3 gemma3n gemma4 gemma4-assistant gemma-embedding starcoder2
    mamba mamba2 maple jamba falcon-h1 xverse command-r cohere2 cohere2moe dbrx olmo olmo2 olmoe muse-glimmer
    openelm arctic deepseek deepseek2 deepseek2-ocr deepseek32 deepseek4 chatglm glm4 glm4moe glm-dsa bitnet t5
    t5encoder jais jais2 nemotron nemotron_h nemotron_h_moe exaone exaone4 exaone-moe rwkv6 rwkv6qwen2 rwkv7 arwkv7
    granite granitemoe granitehybrid graniteswitch granite_swa chameleon wavtokenizer-dec plm bailingmoe bailingmoe2
    bailingmoe3 dots1 dots3note arcee afmoe laguna ernie4_5 ernie4_5-moe hunyuan-moe hunyuan-dense hunyuan_vl hy_v3
    hy_v4 smollm3 gpt-oss lfm2 lfm2moe dream smallthinker llada llada-moe seed_oss grovemoe apertus minimax-01
    hrm_text minimax-m2 minimax-m3 cogvlm rnd1 pangu-embedded mistral3 eagle3 dflash mistral4 paddleocr mimo2 step35
    spark2_5 llama-embed maincoder kimi-linear kimi-k3 glm5-next talkie mellum nanbeige qwen3tts pockettts
""")
WITH_EXPERTS = _words("llama minicpm granite mistral3 gemma4")  # as well as without
# Architectures whose feed-forward layers are experts.
EXPERTS = _words("""
    llama4 cohere2moe grok qwen2moe qwen3moe qwen3next qwen3vlmoe qwen35moe qwen4exp phimoe dbrx olmoe arctic
    deepseek deepseek2 deepseek2-ocr deepseek32 dots3note deepseek4 glm4moe glm-dsa exaone-moe bailingmoe
    bailingmoe2 bailingmoe3 dots1 afmoe ernie4_5-moe hunyuan-moe hy_v3 hy_v4 gpt-oss lfm2moe smallthinker llada-moe
    grovemoe minimax-01 minimax-m2 minimax-m3 rnd1 paddleocr mimo2 kimi-linear kimi-k3 glm5-next step35 mistral4
    mellum laguna maple nemotron_h_moe nomic-bert-moe granitemoe jamba
""")
# Multi-head latent attention.
_LATENT = _words("""
    deepseek2 deepseek32 glm-dsa dots3note kimi-linear bailingmoe3 kimi-k3 glm5-next mistral4 hy_v4 minicpm3 plm
""")
# A list of heads by layer says which layers are recurrent: those with none.
_MIXED = _words("""
    plamo2 jamba nemotron_h nemotron_h_moe granitehybrid lfm2 lfm2moe kimi-linear bailingmoe3 kimi-k3 glm5-next
""")
# The pattern of sliding windows is given layer by layer.
_WINDOW_LIST = _words("""
    gemma4-assistant cohere2moe mimo2 step35 spark2_5 muse-glimmer granite_swa dots3note maple gemma4
""")

WIDTH, FF, VOCAB, CONTEXT = 256, 512, 512, 512


class Wide(list[int]):
    """A list of unsigned 64-bit integers."""


_OWN_LAYERS = {"llama4": 4, "gemma4": 6, "gemma3n": 22, "deepseek4": 4, "hrm_text": 6}
_OWN_LAYERS |= {"nemotron_h": 3, "nemotron_h_moe": 3}
_OWN_HEADS = {"deepseek4": 8, "qwen3": 4, "muse-glimmer": 4, "afmoe": 4, "rwkv6qwen2": 4}
_OWN_HEADS_KV = {"qwen3": 1, "muse-glimmer": 2, "afmoe": 2, "deepseek4": 1, "minicpm3": 2, "plm": 2}
_OWN_HEADS_KV |= {"rwkv6": 0, "rwkv7": 0}
# Models that mask images' tokens, speak, or look up a token by its name need more than the common vocabulary.
_OWN_VOCAB = {"chameleon": 10240, "qwen3tts": 3072, "phi3": 544}


def keys(arch: str, experts: bool | None = None) -> dict[str, Value]:
    """Return the keys of a tiny model, without the architecture's name in front.

    Parameters
    ----------
    arch
        one of `NAMES`.
    experts
        whether its feed-forward layers are experts; default: as is usual for the architecture.
    """
    layers, heads = _OWN_LAYERS.get(arch, 2), _OWN_HEADS.get(arch, 2)
    size = WIDTH // heads
    made = _sizes(arch, layers) | _heads(arch, layers, heads) | _numbers(layers, heads)
    made |= _recurrent(arch, heads)
    if arch in EXPERTS if experts is None else experts:
        made |= _experts(arch)
    if arch in _LATENT:
        made |= _latent(arch)
    window = [int(layer % 2) for layer in range(layers)]
    made["attention.sliding_window_pattern"] = window if arch in _WINDOW_LIST else 2
    return made | _own(arch, layers, size)


def _sizes(arch: str, layers: int) -> dict[str, Value]:
    made: dict[str, Value] = {"vocab_size": _OWN_VOCAB.get(arch, VOCAB), "context_length": CONTEXT}
    made |= {"embedding_length": WIDTH, "features_length": WIDTH, "block_count": layers}
    made |= {"leading_dense_block_count": 1, "feed_forward_length": FF}
    if arch in ("nemotron_h", "nemotron_h_moe"):  # the layers with a feed-forward part have nothing else
        made["feed_forward_length"] = [FF if layer == layers - 1 else 0 for layer in range(layers)]
    return made


def _heads(arch: str, layers: int, heads: int) -> dict[str, Value]:
    fewer = _OWN_HEADS_KV.get(arch, 1 if arch in _LATENT else heads)
    made: dict[str, Value] = {"attention.head_count": heads, "attention.head_count_kv": fewer}
    if arch in _MIXED:
        made["attention.head_count_kv"] = [0 if layer == 1 else fewer for layer in range(layers)]
        if arch != "glm5-next":
            made["attention.head_count"] = [0 if layer == 1 else heads for layer in range(layers)]
    return made


def _numbers(layers: int, heads: int) -> dict[str, Value]:
    quarter = WIDTH // heads // 4
    return {
        "use_parallel_residual": False,
        "logit_scale": 1.0,
        "full_attention_interval": 2,
        "attention.max_alibi_bias": 8.0,
        "attention.clamp_kqv": 1.0,
        "attention.layer_norm_epsilon": 1e-5,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "attention.group_norm_epsilon": 1e-5,
        "attention.group_norm_groups": 8,
        "attention.q_lora_rank": 128,
        "attention.kv_lora_rank": 128,
        "attention.relative_buckets_count": 8,
        "attention.sliding_window": 32,
        "attention.indexer.head_count": 64,
        "attention.indexer.key_length": 128,
        "attention.indexer.top_k": 131072,  # everything: a choice of few flips with any rounding
        "attention.indexer.block_size": 4,
        "attention.indexer.kpool": 4,
        "attention.indexer.kpool_select_tail": True,
        "attention.indexer.local_blocks": 1,
        "rope.dimension_sections": [quarter] * 4,
        "rope.scaling.original_context_length": CONTEXT,
        "posnet.embedding_length": WIDTH,
        "posnet.block_count": layers,
        "convnext.embedding_length": WIDTH,
        "convnext.block_count": layers,
        "xielu.alpha_n": 1.0,
        "xielu.alpha_p": 1.0,
        "xielu.beta": 1.0,
        "xielu.eps": 1e-7,
        "residual_scale": 1.0,
        "attn_res.block_size": 12,
        "activation.situ_beta": 4.0,
        "activation.situ_linear_beta": 25.0,
    }


def _recurrent(arch: str, heads: int) -> dict[str, Value]:
    inner = WIDTH if arch in ("qwen3next", "qwen35", "qwen35moe", "qwen4exp") else 2 * WIDTH
    return {
        "ssm.inner_size": inner,
        "ssm.conv_kernel": 4,
        "ssm.state_size": 128,
        "ssm.time_step_rank": heads,
        "ssm.group_count": 0 if arch == "plamo2" else 2,
        "kda.head_dim": 128,
        "kda.safe_gate": True,
        "kda.gate_lower_bound": -5.0,
        "wkv.head_size": 64,
        "time_mix_extra_dim": 32,
        "time_decay_extra_dim": 64,
        "token_shift_count": 1 if arch in ("rwkv6qwen2", "arwkv7") else 2,
        "rescale_every_n_layers": 0,
        "attention.decay_lora_rank": 64,
        "attention.iclr_lora_rank": 64,
        "attention.value_residual_mix_lora_rank": 32,
        "attention.gate_lora_rank": 64,
        "shortconv.l_cache": 3,
    }


def _experts(arch: str) -> dict[str, Value]:
    return {
        "expert_feed_forward_length": FF // 2,
        "expert_shared_feed_forward_length": FF // 2,
        "expert_chunk_feed_forward_length": FF // 2,
        "expert_latent_length": FF // 2,
        "interleave_moe_layer_step": 2,
        "moe_every_n_layers": 2,
        "expert_count": 4,
        "expert_used_count": 2,
        "expert_shared_count": 1,
        "expert_gating_func": 4 if arch == "deepseek4" else 2,
        "expert_group_scale": 1.0,
        "experts_per_group": 1,
        "expert_weights_scale": 1.0,
        "expert_weights_norm": True,
    }


def _latent(arch: str) -> dict[str, Value]:
    rope = 0 if arch == "glm5-next" else 64
    made: dict[str, Value] = {"attention.key_length": 128 + rope, "attention.value_length": 128}
    made |= {"attention.key_length_mla": 192, "attention.value_length_mla": 128, "rope.dimension_count": rope}
    if arch in ("minicpm3", "plm"):  # keys and values as of any attention once they are expanded
        made = {"attention.key_length": 192, "attention.value_length": 128, "rope.dimension_count": 64}
    return made


def _own(arch: str, layers: int, head: int) -> dict[str, Value]:
    """Return what no other architecture reads as this one does."""
    alternating = [1 - layer % 2 for layer in range(layers)]
    clamps: dict[str, Value] = {"swiglu_clamp_exp": 10.0, "expert_weights_scale": 1.0, "expert_weights_norm": True}
    table: dict[str, dict[str, Value]] = {
        "deepseek4": {
            "attention.key_length": head,
            "attention.value_length": head,
            "rope.dimension_count": head // 2,
            "attention.q_lora_rank": 64,
            "attention.output_group_count": 8,
            "attention.output_lora_rank": 32,
            "attention.compress_ratios": [0, 0, 4, 128],
            "attention.compress_rope_freq_base": 160000.0,
            "hash_layer_count": 0,
            **_hyper(2),
            **clamps,
        },
        "dots3note": {
            "attention.kv_lora_rank_swa": 128,
            "attention.key_length_swa": 192,
            "attention.value_length_swa": 128,
            "attention.key_length_mla_swa": 192,
            "attention.value_length_mla_swa": 128,
            "rope.freq_base_swa": 10000.0,
            "attention.indexer.types": alternating,
        },
        "hy_v4": {**_hyper(2), **clamps, "hyper_connection.magnitude": 2.0, "attention.indexer.types": alternating},
        "gemma4": {
            "embedding_length_per_layer_input": WIDTH // 2,
            "attention.shared_kv_layers": 2,
            "attention.key_length_swa": head,
            "attention.value_length_swa": head,
            "rope.freq_base_swa": 10000.0,
            "attention.sliding_window_pattern": [1 - layer % 2 for layer in range(layers)],
        },
        "gemma3n": {"embedding_length_per_layer_input": WIDTH // 2, "attention.sliding_window_pattern": 5},
        "minimax-m3": {"rope.dimension_count": 64, "attention.indexer.head_count": 2},
        "qwen4exp": {**_grams(layers), "attention.indexer.key_length": head},
        "glm5-next": _grams(layers),
        "bailingmoe3": {
            "rope.dimension_sections": [8, 12, 12, 0],
            "swiglu_clamp_exp": [0.0, 4.0],
            "swiglu_clamp_shexp": [0.0, 5.0],
        },
        "hrm_text": {"hrm.layers_per_stack": 1, "hrm.h_cycles": 2, "hrm.l_cycles": 2},
        "maple": {"swiglu_clamp_exp": 7.0},
        "graniteswitch": {
            "adapters.count": 1,
            "adapters.lora_rank": 32,
            "adapters.token_ids_activate": [500],
            "adapters.token_ids_substitute": [501],
        },
    }
    return table.get(arch, {})


def _hyper(iterations: int) -> dict[str, Value]:
    made: dict[str, Value] = {"hyper_connection.count": 4, "hyper_connection.sinkhorn_iterations": iterations}
    return made | {"hyper_connection.epsilon": 1e-6, "hyper_connection.low_rank": 8}


def _grams(layers: int) -> dict[str, Value]:
    """Embeddings looked up by the last n tokens; their history is part of the recurrent state."""
    size, per_gram = 3, 2
    count = (size - 1) * per_gram
    return _hyper(2) | {
        "attention.compress_ratios": [4] * layers,
        "ple.layers": [0],
        "ple.ngram_size": size,
        "ple.heads_per_ngram": per_gram,
        "ple.conv_kernel": 4,
        "ple.eos_token_id": 0,
        "embedding_length_per_layer_input": WIDTH // count,
        "ple.layer_multipliers": Wide([1, 3, 5]),
        "ple.head_offsets": Wide([head * VOCAB for head in range(count)]),
        "ple.head_vocab_sizes": Wide([VOCAB] * count),
    }
