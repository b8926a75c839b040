/* Claimed nodes: products with a weight in memory the host can see, computed here, base and residual in
 * one pass, by ggml's own threads.
 *
 * The node's op becomes GGML_OP_CUSTOM, whose parameters name a function; ggml's CPU backend runs it like
 * any op, between its own barriers, so nothing is split off, synchronized or oversubscribed. llama.cpp
 * uses a graph again for later batches: the node then still carries our op, and what it was before lies
 * in the part of op_params that ggml does not use for custom ops. */
#include <stdlib.h>
#include <string.h>

#include "engine_state.h"

struct tf_claim {
    tf_claim *next;
    const tf_kernel *kernel;
    tf_product product;
    tf_activations x;
    void *retired; /* memory to free with this claim */
    bool quantize; /* else the claim before has done it */
    tf_quantizing quantizing;
    int32_t share_count;
    tf_share shares[];
};

/* What a node was before it was claimed. */
typedef struct original {
    uint32_t magic;
    int32_t op;
    int32_t first_param;
} original;

enum { MAGIC = 0x7f01d, ORIGINAL_AT = (int)(GGML_MAX_OP_PARAMS - sizeof(original)) };

static void compute(struct ggml_tensor *node, int thread, int threads, void *argument);

/* The op_params that make a node run compute(claim): taken from a custom node that ggml builds. */
static bool custom_params(tf_claim *claim, void *out) {
    struct ggml_context *ctx = ggml_init((struct ggml_init_params){4 * ggml_tensor_overhead(), NULL, true});
    if (ctx == NULL) {
        return false;
    }
    const struct ggml_tensor *made =
        ggml_custom_4d(ctx, GGML_TYPE_F32, 1, 1, 1, 1, NULL, 0, compute, GGML_N_TASKS_MAX, claim);
    memcpy(out, made->op_params, GGML_MAX_OP_PARAMS);
    ggml_free(ctx);
    return true;
}

bool tf_is_claimed(const struct ggml_tensor *node) {
    original was;
    memcpy(&was, (const char *)node->op_params + ORIGINAL_AT, sizeof was);
    return node->op == GGML_OP_CUSTOM && was.magic == MAGIC;
}

void tf_unclaim_node(struct ggml_tensor *node) {
    original was;
    memcpy(&was, (const char *)node->op_params + ORIGINAL_AT, sizeof was);
    memset(node->op_params, 0, sizeof node->op_params);
    node->op = (enum ggml_op)was.op;
    node->op_params[0] = was.first_param;
}

/* ---- in ggml's threads ----------------------------------------------------------------------- */

/* Column j of x, counted over all its dimensions. */
static const float *column(const void *of, int64_t j) {
    const struct ggml_tensor *x = of;
    const int64_t i1 = j % x->ne[1], i2 = j / x->ne[1] % x->ne[2], i3 = j / x->ne[1] / x->ne[2];
    const char *at = (const char *)x->data + (size_t)i1 * x->nb[1] + (size_t)i2 * x->nb[2] + (size_t)i3 * x->nb[3];
    return (const float *)(const void *)at;
}

static void compute(struct ggml_tensor *node, int thread, int threads, void *argument) {
    tf_claim *claim = argument;
    (void)threads;
    if (claim->quantize) {
        tf_quantize_together(&claim->quantizing, &claim->x, claim->kernel, (tf_source){column, node->src[1]});
    }
    tf_shares_run(claim->shares, claim->share_count, thread % claim->share_count, claim->kernel, &claim->product);
}

/* ---- before the graph runs ------------------------------------------------------------------- */

static bool claimable(const tf_engine *e, const struct ggml_tensor *node) {
    const struct ggml_tensor *w = node->src[0], *x = node->src[1];
    return e->claiming && node->op == GGML_OP_MUL_MAT && tf_base_supported((int32_t)w->type) && tf_on_host(w) &&
           tf_on_host(node) && tf_on_host(x) && ggml_is_contiguous(w) && ggml_n_dims(w) <= 2;
}

/* Panels of the weight, made when it is first met. */
static bool ensure_base(tf_engine *e, tf_entry *entry, const struct ggml_tensor *w) {
    if (entry->base.memory != NULL || entry->no_base) {
        return !entry->no_base;
    }
    const tf_residual_tensor *t = &entry->tensor;
    if (tf_base_build(&entry->base, (int32_t)w->type, t->rows, t->width, w->data, e->pool) != TF_OK) {
        entry->no_base = true; /* not tried again: ggml goes on computing it */
        return false;
    }
    e->counters.base_bytes += entry->base.bytes;
    return true;
}

/* Memory for activations. Earlier claims of this decode may still read what the buffer holds: when a
 * larger one takes its place, the claim keeps the old one until the decode is over. */
static uint8_t *activation_memory(tf_engine *e, tf_claim *claim, size_t bytes) {
    if (bytes > e->claim_memory.capacity) {
        tf_buffer larger = {0};
        if (tf_buffer_reserve(&larger, bytes) == NULL) {
            return NULL;
        }
        claim->retired = e->claim_memory.data;
        e->claim_memory = larger;
    }
    return e->claim_memory.data;
}

static bool prepare(tf_engine *e, tf_claim *claim, const tf_entry *entry, const struct ggml_tensor *node) {
    const bool verify = e->mode == TF_VERIFY && e->bits > 0;
    claim->kernel = e->kernel;
    claim->quantize = e->claimed != node->src[1];
    if (claim->quantize) {
        tf_activations_shape(&claim->x, ggml_nrows(node->src[1]), entry->tensor.width, e->group,
                             verify ? e->bits : e->max_bits, e->kernel->max_columns, true);
        claim->x.memory = activation_memory(e, claim, tf_activations_bytes(&claim->x));
        if (claim->x.memory == NULL) {
            return false;
        }
    } else {
        claim->x = e->claims->x;
    }
    claim->product = (tf_product){.base = &entry->base,
                                  .has_residual = verify,
                                  .residual = tf_engine_planes(e, entry, 0),
                                  .x = &claim->x,
                                  .out = (float *)node->data,
                                  .stride = entry->tensor.rows};
    claim->share_count = e->threads;
    tf_shares_init(claim->shares, claim->share_count, &claim->product);
    return true;
}

bool tf_claim_node(tf_engine *e, tf_entry *entry, struct ggml_tensor *node) {
    if (!claimable(e, node) || tf_check_operands(entry, node) != TF_OK || !ensure_base(e, entry, node->src[0])) {
        return false;
    }
    tf_claim *claim = aligned_alloc(64, (sizeof *claim + (size_t)e->threads * sizeof *claim->shares + 63) / 64 * 64);
    char params[GGML_MAX_OP_PARAMS];
    if (claim == NULL || !custom_params(claim, params)) {
        free(claim);
        return false;
    }
    memset(claim, 0, sizeof *claim);
    if (!prepare(e, claim, entry, node)) {
        free(claim);
        return false;
    }
    const original was = {MAGIC, (int32_t)node->op, node->op_params[0]};
    memcpy(node->op_params, params, sizeof params);
    memcpy((char *)node->op_params + ORIGINAL_AT, &was, sizeof was);
    node->op = GGML_OP_CUSTOM;
    claim->next = e->claims;
    e->claims = claim;
    e->claimed = tf_lasting(node->src[1]);
    if (claim->product.has_residual) {
        e->counters.residual_bytes += tf_residual_bytes_read(&claim->product.residual);
    }
    return true;
}

void tf_claims_free(tf_engine *e) {
    while (e->claims != NULL) {
        tf_claim *claim = e->claims;
        e->claims = claim->next;
        free(claim->retired);
        free(claim);
    }
}
