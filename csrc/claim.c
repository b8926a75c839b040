/* Claimed nodes: products with a weight in memory the host can see, computed here, base and residual in
 * one pass, by ggml's own threads.
 *
 * The node's op becomes GGML_OP_CUSTOM, whose parameters name a function; ggml's CPU backend runs it like
 * any op, between its own barriers, so nothing is split off, synchronized or oversubscribed. llama.cpp
 * uses a graph again for later batches: the node then still carries our op, and what it was before lies
 * in the part of op_params that ggml does not use for custom ops.
 *
 * With experts, which columns go to which one is known when the node runs. The thread that comes first sorts them:
 * every expert in use is a product, with blocks of columns of its own. */
#include <stdlib.h>
#include <string.h>

#include "engine_state.h"
#include "routing.h"

typedef enum stage { UNROUTED, ROUTING, ROUTED } stage;

struct tf_claim {
    tf_claim *next;
    tf_engine *engine;
    const tf_entry *entry;
    struct ggml_tensor *node;
    tf_claim *source; /* the claim whose x this one multiplies: itself, or an earlier one */
    tf_activations x;
    tf_quantizing quantizing;
    void *retired;       /* memory to free with this claim */
    tf_routing *routing; /* where this claim quantizes columns for experts */
    atomic_int stage;    /* of that and of what follows from it */
    int32_t share_count;
    int64_t count; /* products */
    tf_product *products;
    tf_base *bases;    /* of the products, where they are of experts */
    float **columns;   /* where the results of sorted columns go; NULL: not of experts */
    tf_share shares[]; /* [products][share_count] */
};

/* What a node was before it was claimed. */
typedef struct original {
    uint32_t magic;
    int32_t op;
    int32_t first_param;
} original;

enum { MAGIC = 0x7f01d, ORIGINAL_AT = (int)(GGML_MAX_OP_PARAMS - sizeof(original)) };

static void compute(struct ggml_tensor *node, int thread, int threads, void *argument);

static void release(tf_claim *claim) {
    if (claim != NULL) {
        free(claim->retired);
        free(claim->routing);
        free(claim);
    }
}

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

/* Column j of the node's input, counted over all its dimensions; of the sorted ones where there are experts. */
static const float *column(const void *of, int64_t j) {
    const tf_claim *claim = of;
    const struct ggml_tensor *x = claim->node->src[1];
    if (claim->routing != NULL) {
        const int64_t slots = claim->node->src[2]->ne[0], i = claim->routing->order[j];
        return tf_column(x, x->data, i % slots % x->ne[1], i / slots, 0);
    }
    return tf_column(x, x->data, j % x->ne[1], j / x->ne[1] % x->ne[2], j / x->ne[1] / x->ne[2]);
}

static void init_product(tf_claim *claim, int64_t index, const tf_base *base, int64_t expert) {
    const tf_engine *e = claim->engine;
    claim->products[index] = (tf_product){.base = base,
                                          .has_residual = e->mode == TF_VERIFY && e->bits > 0,
                                          .residual = tf_engine_planes(e, claim->entry, expert),
                                          .x = &claim->source->x,
                                          .out = (float *)claim->node->data,
                                          .stride = claim->entry->tensor.rows};
    tf_shares_init(&claim->shares[index * claim->share_count], claim->share_count, &claim->products[index]);
}

static void count_bytes(const tf_claim *claim, const tf_product *product) {
    if (product->has_residual) {
        claim->engine->counters.residual_bytes += tf_residual_bytes_read(&product->residual);
    }
}

/* A product for each expert in use. */
static void init_products_of_experts(tf_claim *claim) {
    tf_claim *source = claim->source;
    const tf_routing *r = source->routing;
    if (source == claim) {
        tf_routing_sort(claim->routing, claim->node->src[2]);
        claim->x.starts = r->starts;
        claim->x.blocks = r->blocks[r->count];
    }
    for (int64_t i = 0; i < source->x.n; i++) {
        claim->columns[i] = (float *)claim->node->data + r->order[i] * claim->entry->tensor.rows;
    }
    claim->count = r->count;
    for (int64_t i = 0; i < claim->count; i++) {
        claim->bases[i] = tf_base_expert(&claim->entry->base, r->used[i], claim->entry->tensor.rows);
        init_product(claim, i, &claim->bases[i], r->used[i]);
        claim->products[i].first_block = r->blocks[i];
        claim->products[i].blocks = r->blocks[i + 1] - r->blocks[i];
        claim->products[i].scatter = claim->columns;
        count_bytes(claim, &claim->products[i]);
    }
}

/* Has it done by the thread that comes first. */
static void route(tf_claim *claim) {
    int expected = UNROUTED;
    if (atomic_compare_exchange_strong(&claim->stage, &expected, ROUTING)) {
        init_products_of_experts(claim);
        atomic_store(&claim->stage, ROUTED);
    }
    for (int spins = 0; atomic_load(&claim->stage) != ROUTED; spins++) {
        tf_relax(spins);
    }
}

static void compute(struct ggml_tensor *node, int thread, int threads, void *argument) {
    tf_claim *claim = argument;
    const tf_kernel *kernel = claim->engine->kernel;
    (void)node;
    (void)threads;
    if (claim->columns != NULL) {
        route(claim);
    }
    if (claim->source == claim) {
        tf_quantize_together(&claim->quantizing, &claim->x, kernel, (tf_source){column, claim});
    }
    tf_shares_run(claim->shares, claim->share_count, thread % claim->share_count, kernel, claim->products,
                  claim->count);
}

/* ---- before the graph runs ------------------------------------------------------------------- */

static bool claimable(const tf_engine *e, const struct ggml_tensor *node) {
    const struct ggml_tensor *w = node->src[0], *x = node->src[1], *ids = node->src[2];
    if (!e->claiming || !tf_base_supported((int32_t)w->type) || !ggml_is_contiguous(w) || !tf_on_host(w) ||
        !tf_on_host(node) || !tf_on_host(x)) {
        return false;
    }
    if (node->op == GGML_OP_MUL_MAT) {
        return ggml_n_dims(w) <= 2;
    }
    return w->ne[1] % TF_PANEL_ROWS == 0 && ids->type == GGML_TYPE_I32 && tf_on_host(ids);
}

/* Panels of the weight, made when it is first met. */
static bool ensure_base(tf_engine *e, tf_entry *entry, const struct ggml_tensor *w) {
    if (entry->base.memory != NULL || entry->no_base) {
        return !entry->no_base;
    }
    const tf_residual_tensor *t = &entry->tensor;
    if (tf_base_build(&entry->base, (int32_t)w->type, t->rows * t->experts, t->width, w->data, e->pool) != TF_OK) {
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

/* The latest claim if it has the node's columns in the order that the node needs them in. */
static tf_claim *same_columns(const tf_engine *e, const struct ggml_tensor *node) {
    tf_claim *latest = e->claims;
    if (latest == NULL || e->claimed != node->src[1] || (node->op == GGML_OP_MUL_MAT_ID) != (latest->columns != NULL)) {
        return NULL;
    }
    return node->op == GGML_OP_MUL_MAT || e->routed == node->src[2] ? latest->source : NULL;
}

/* Memory of a claim with `products` and, of experts, `columns`: one piece. */
static tf_claim *allocate(const tf_engine *e, int64_t products, int64_t columns) {
    const size_t shares = (size_t)(products * e->threads) * sizeof(tf_share);
    const size_t more = (size_t)products * (sizeof(tf_product) + sizeof(tf_base)) + (size_t)columns * sizeof(float *);
    const size_t bytes = (sizeof(tf_claim) + shares + more + 63) / 64 * 64;
    tf_claim *claim = aligned_alloc(64, bytes);
    if (claim != NULL) {
        memset(claim, 0, bytes);
        claim->share_count = e->threads;
        claim->count = products;
        claim->products = (tf_product *)(void *)((char *)claim->shares + shares);
        claim->bases = (tf_base *)(void *)(claim->products + products);
        claim->columns = columns > 0 ? (float **)(void *)(claim->bases + products) : NULL;
    }
    return claim;
}

/* What is quantized for the claim, and room for it. */
static bool prepare_input(tf_engine *e, tf_claim *claim, int64_t columns) {
    const bool verify = e->mode == TF_VERIFY && e->bits > 0;
    const tf_residual_tensor *t = &claim->entry->tensor;
    tf_activations_shape(&claim->x, columns, t->width, e->group, verify ? e->bits : e->max_bits, e->kernel->max_columns,
                         true);
    if (claim->columns != NULL) {
        claim->routing = tf_routing_new(t->experts, columns, e->kernel->max_columns);
        if (claim->routing == NULL) {
            return false;
        }
        claim->x.starts = claim->routing->starts;
        claim->x.blocks = tf_routing_most_blocks(t->experts, columns, e->kernel->max_columns);
    }
    claim->x.memory = activation_memory(e, claim, tf_activations_bytes(&claim->x));
    return claim->x.memory != NULL;
}

/* A claim of the node, and the op_params for it. What can fail comes first: once an input has room, an earlier claim's
 * memory may hang on this one. */
static tf_claim *prepare(tf_engine *e, const tf_entry *entry, struct ggml_tensor *node, void *params) {
    const bool experts = node->op == GGML_OP_MUL_MAT_ID;
    const int64_t columns = experts ? node->src[2]->ne[0] * node->src[2]->ne[1] : ggml_nrows(node->src[1]);
    tf_claim *claim =
        experts ? allocate(e, tf_routing_most(entry->tensor.experts, columns), columns) : allocate(e, 1, 0);
    if (claim == NULL || !custom_params(claim, params)) {
        release(claim);
        return NULL;
    }
    claim->engine = e;
    claim->entry = entry;
    claim->node = node;
    claim->source = same_columns(e, node);
    if (claim->source == NULL) {
        claim->source = claim;
        if (!prepare_input(e, claim, columns)) {
            release(claim);
            return NULL;
        }
    }
    if (!experts) {
        init_product(claim, 0, &entry->base, 0);
        count_bytes(claim, &claim->products[0]);
    }
    return claim;
}

bool tf_claim_node(tf_engine *e, tf_entry *entry, struct ggml_tensor *node) {
    if (!claimable(e, node) || tf_check_operands(entry, node) != TF_OK || !ensure_base(e, entry, node->src[0])) {
        return false;
    }
    char params[GGML_MAX_OP_PARAMS];
    tf_claim *claim = prepare(e, entry, node, params);
    if (claim == NULL) {
        return false;
    }
    const original was = {MAGIC, (int32_t)node->op, node->op_params[0]};
    memcpy(node->op_params, params, sizeof params);
    memcpy((char *)node->op_params + ORIGINAL_AT, &was, sizeof was);
    node->op = GGML_OP_CUSTOM;
    claim->next = e->claims;
    e->claims = claim;
    e->claimed = tf_lasting(node->src[1]);
    e->routed = node->src[2] != NULL ? tf_lasting(node->src[2]) : NULL;
    return true;
}

void tf_claims_free(tf_engine *e) {
    while (e->claims != NULL) {
        tf_claim *claim = e->claims;
        e->claims = claim->next;
        release(claim);
    }
}
