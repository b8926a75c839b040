/* The engine: for a graph node W x whose weight has a residual R, adds R x to the node's result.
 *
 *   x [n][width] --fetch--> float32 --quantize once a distinct x--> kernels --> out [n][rows] --store-->
 *
 * Memory the host can see is used where it lies; other memory is copied both ways. */
#include "engine.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "ggml-backend.h"
#include "product.h"
#include "registry.h"

typedef struct buffer {
    void *data;
    size_t capacity;
} buffer;

struct tf_engine {
    tf_registry registry;
    tf_pool *pool;
    const tf_kernel *kernel;
    int32_t bits, max_bits;
    tf_mode mode;
    tf_status status; /* first failure since begin */
    char message[512];
    tf_counters counters;
    tf_activations activations;
    /* The src1 that activations hold. One llama_decode may run its graph several times, over parts of
     * the batch: the pass, counted by the node's own weight, tells them apart. */
    const struct ggml_tensor *quantized;
    uint64_t quantized_pass;
    buffer fetched, result, columns, ids, gathered;
};

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void *reserve(buffer *b, size_t bytes) {
    if (bytes > b->capacity) {
        free(b->data);
        b->data = malloc(bytes);
        b->capacity = b->data != NULL ? bytes : 0;
    }
    return b->data;
}

static bool on_host(const struct ggml_tensor *t) {
    const struct ggml_backend_buffer *b = t->view_src != NULL ? t->view_src->buffer : t->buffer;
    return b == NULL || ggml_backend_buffer_is_host((ggml_backend_buffer_t)(uintptr_t)b);
}

/* ---- a node's operands ---------------------------------------------------------------------- */

/* Where the bytes of t can be read: in place, or copied into b. NULL: out of memory. */
static const void *fetch(tf_engine *e, const struct ggml_tensor *t, buffer *b) {
    if (on_host(t)) {
        return t->data;
    }
    const size_t bytes = ggml_nbytes(t);
    void *copy = reserve(b, bytes);
    if (copy != NULL) {
        ggml_backend_tensor_get(t, copy, 0, bytes);
        e->counters.from_device_bytes += bytes;
    }
    return copy;
}

/* Column (i1, i2, i3) of a tensor whose bytes start at `base`. */
static const float *column(const struct ggml_tensor *t, const void *base, int64_t i1, int64_t i2, int64_t i3) {
    return (const float *)((const char *)base + (size_t)i1 * t->nb[1] + (size_t)i2 * t->nb[2] + (size_t)i3 * t->nb[3]);
}

static tf_status check_operands(const tf_entry *entry, const struct ggml_tensor *node) {
    const struct ggml_tensor *w = node->src[0], *x = node->src[1];
    const tf_residual_tensor *t = &entry->tensor;
    if (w->ne[0] != t->width || w->ne[1] != t->rows || w->ne[2] * w->ne[3] != t->experts) {
        return tf_fail(TF_ERR_UNSUPPORTED, "%s is used as %lld x %lld x %lld, its residual is %lld x %lld x %lld",
                       t->name, (long long)w->ne[0], (long long)w->ne[1], (long long)w->ne[2], (long long)t->width,
                       (long long)t->rows, (long long)t->experts);
    }
    if (x->type != GGML_TYPE_F32 || node->type != GGML_TYPE_F32 || x->nb[0] != sizeof(float) ||
        !ggml_is_contiguous(node)) {
        return tf_fail(TF_ERR_UNSUPPORTED, "%s is multiplied by activations of type %s, float32 is supported", t->name,
                       ggml_type_name(x->type));
    }
    if (node->op == GGML_OP_MUL_MAT && t->experts != 1) {
        return tf_fail(TF_ERR_UNSUPPORTED, "%s holds experts but is multiplied as one matrix", t->name);
    }
    return TF_OK;
}

static tf_planes planes_of(const tf_engine *e, const tf_entry *entry, int64_t expert) {
    tf_planes planes = tf_residual_planes(&entry->tensor, expert);
    planes.bits = e->bits;
    return planes;
}

/* ---- quantizing ------------------------------------------------------------------------------ */

static tf_status quantize(tf_engine *e, int64_t n, int64_t width, int32_t group, const float *x) {
    tf_status status = tf_activations_reserve(&e->activations, n, width, group, e->bits, e->kernel->max_columns);
    for (int64_t i = 0; status == TF_OK && i < tf_activations_blocks(&e->activations); i++) {
        tf_activations_quantize(&e->activations, i, x + i * e->activations.columns * width, width);
    }
    return status;
}

/* Columns of x one after the other; in place where they lie so already. */
static const float *contiguous(tf_engine *e, const struct ggml_tensor *x, const void *base) {
    if (ggml_is_contiguous_1(x) && x->nb[2] == x->nb[1] * (size_t)x->ne[1] && x->nb[3] == x->nb[2] * (size_t)x->ne[2]) {
        return base;
    }
    const size_t row = (size_t)x->ne[0] * sizeof(float);
    char *out = reserve(&e->gathered, row * (size_t)ggml_nrows(x));
    for (int64_t i3 = 0, at = 0; out != NULL && i3 < x->ne[3]; i3++) {
        for (int64_t i2 = 0; i2 < x->ne[2]; i2++) {
            for (int64_t i1 = 0; i1 < x->ne[1]; i1++, at++) {
                memcpy(out + row * (size_t)at, column(x, base, i1, i2, i3), row);
            }
        }
    }
    return (const float *)(void *)out;
}

/* ---- products -------------------------------------------------------------------------------- */

static tf_status run(tf_engine *e, const tf_product *products, int64_t n) {
    const double start = now();
    const tf_status status = tf_products_run(e->pool, e->kernel, products, n);
    e->counters.compute_s += now() - start;
    for (int64_t i = 0; i < n; i++) {
        e->counters.residual_bytes += tf_product_bytes(&products[i].planes);
    }
    return status;
}

static tf_status mul_mat(tf_engine *e, const tf_entry *entry, const struct ggml_tensor *node, float *out) {
    const struct ggml_tensor *x = node->src[1];
    const int64_t n = ggml_nrows(x), rows = entry->tensor.rows;
    if (e->quantized != x || e->quantized_pass != entry->applied) {
        const double start = now();
        const void *base = fetch(e, x, &e->fetched);
        const float *columns = base != NULL ? contiguous(e, x, base) : NULL;
        if (columns == NULL) {
            return tf_fail(TF_ERR_MEMORY, "out of memory");
        }
        e->counters.fetch_s += now() - start;
        tf_status status = quantize(e, n, x->ne[0], entry->tensor.planes.group, columns);
        if (status != TF_OK) {
            return status;
        }
        e->quantized = x;
        e->quantized_pass = entry->applied;
    }
    float **outs = reserve(&e->columns, (size_t)n * sizeof *outs);
    if (outs == NULL) {
        return tf_fail(TF_ERR_MEMORY, "out of memory");
    }
    for (int64_t j = 0; j < n; j++) {
        outs[j] = out + j * rows;
    }
    const tf_product product = {planes_of(e, entry, 0), &e->activations, outs};
    return run(e, &product, 1);
}

/* The columns that go to one expert: gathered, multiplied, added where they came from. */
static tf_status expert_product(tf_engine *e, const tf_entry *entry, const struct ggml_tensor *node, int64_t expert,
                                const void *x_base, const char *ids, float *out) {
    const struct ggml_tensor *x = node->src[1], *id = node->src[2];
    const int64_t used = id->ne[0], tokens = id->ne[1], width = x->ne[0];
    float *gathered = reserve(&e->gathered, (size_t)(used * tokens * width) * sizeof *gathered);
    float **outs = reserve(&e->columns, (size_t)(used * tokens) * sizeof *outs);
    if (gathered == NULL || outs == NULL) {
        return tf_fail(TF_ERR_MEMORY, "out of memory");
    }
    int64_t n = 0;
    for (int64_t t = 0; t < tokens; t++) {
        for (int64_t u = 0; u < used; u++) {
            if (*(const int32_t *)(const void *)(ids + (size_t)t * id->nb[1] + (size_t)u * id->nb[0]) == expert) {
                const float *from = column(x, x_base, u % x->ne[1], t % x->ne[2], 0);
                memcpy(gathered + n * width, from, (size_t)width * sizeof *gathered);
                outs[n++] = out + (t * used + u) * entry->tensor.rows;
            }
        }
    }
    if (n == 0) {
        return TF_OK;
    }
    tf_status status = quantize(e, n, width, entry->tensor.planes.group, gathered);
    const tf_product product = {planes_of(e, entry, expert), &e->activations, outs};
    return status != TF_OK ? status : run(e, &product, 1);
}

static tf_status mul_mat_id(tf_engine *e, const tf_entry *entry, const struct ggml_tensor *node, float *out) {
    const double start = now();
    const void *x = fetch(e, node->src[1], &e->fetched);
    const void *ids = fetch(e, node->src[2], &e->ids);
    if (x == NULL || ids == NULL) {
        return tf_fail(TF_ERR_MEMORY, "out of memory");
    }
    e->counters.fetch_s += now() - start;
    e->quantized = NULL;
    tf_status status = TF_OK;
    for (int64_t expert = 0; expert < entry->tensor.experts && status == TF_OK; expert++) {
        status = expert_product(e, entry, node, expert, x, ids, out);
    }
    return status;
}

static tf_status apply(tf_engine *e, tf_entry *entry, struct ggml_tensor *node) {
    tf_status status = check_operands(entry, node);
    if (status != TF_OK || ggml_is_empty(node)) {
        return status;
    }
    const bool host = on_host(node);
    float *out = (float *)(uintptr_t)fetch(e, node, &e->result);
    if (out == NULL) {
        return tf_fail(TF_ERR_MEMORY, "out of memory");
    }
    status = node->op == GGML_OP_MUL_MAT ? mul_mat(e, entry, node, out) : mul_mat_id(e, entry, node, out);
    if (status == TF_OK && !host) {
        const double start = now();
        ggml_backend_tensor_set(node, out, 0, ggml_nbytes(node));
        e->counters.to_device_bytes += ggml_nbytes(node);
        e->counters.store_s += now() - start;
    }
    return status;
}

/* ---- what a front end calls ------------------------------------------------------------------ */

bool tf_engine_wants(tf_engine *e, const struct ggml_tensor *node) {
    return e->mode == TF_VERIFY && e->bits > 0 && (node->op == GGML_OP_MUL_MAT || node->op == GGML_OP_MUL_MAT_ID) &&
           tf_registry_find(&e->registry, node->src[0]->name) != NULL;
}

bool tf_engine_apply(tf_engine *e, struct ggml_tensor *node) {
    tf_entry *entry = tf_registry_find(&e->registry, node->src[0]->name);
    const tf_status status = e->status == TF_OK ? apply(e, entry, node) : e->status;
    if (status != TF_OK && e->status == TF_OK) {
        e->status = status;
        strncpy(e->message, tf_error(), sizeof e->message - 1);
    }
    entry->applied++;
    e->counters.nodes++;
    return status == TF_OK;
}

/* ---- public ---------------------------------------------------------------------------------- */

tf_status tf_engine_new(const tf_residual *residual, int32_t threads, tf_engine **out) {
    *out = NULL;
    const tf_kernel *kernel = tf_kernel_find(NULL);
    if (kernel == NULL) {
        return TF_ERR_ARGUMENT;
    }
    tf_engine *e = calloc(1, sizeof *e);
    if (e == NULL) {
        return tf_fail(TF_ERR_MEMORY, "out of memory");
    }
    e->kernel = kernel;
    e->bits = e->max_bits = tf_residual_bits(residual);
    e->mode = TF_VERIFY;
    tf_status status = tf_registry_init(&e->registry, residual);
    status = status != TF_OK ? status : tf_pool_new(threads, &e->pool);
    if (status != TF_OK) {
        tf_engine_free(e);
        return status;
    }
    *out = e;
    return TF_OK;
}

void tf_engine_free(tf_engine *e) {
    if (e != NULL) {
        tf_pool_free(e->pool);
        tf_registry_free(&e->registry);
        tf_activations_free(&e->activations);
        buffer *buffers[] = {&e->fetched, &e->result, &e->columns, &e->ids, &e->gathered};
        for (size_t i = 0; i < sizeof buffers / sizeof *buffers; i++) {
            free(buffers[i]->data);
        }
        free(e);
    }
}

tf_status tf_engine_set_bits(tf_engine *e, int32_t bits) {
    if (bits != 0 && bits != 4 && bits != 6 && bits != 8) {
        return tf_fail(TF_ERR_ARGUMENT, "residual bits %d: 0, 4, 6 and 8 are allowed", bits);
    }
    if (bits > e->max_bits) {
        return tf_fail(TF_ERR_ARGUMENT, "residual bits %d: the file holds %d", bits, e->max_bits);
    }
    e->bits = bits;
    e->quantized = NULL;
    return TF_OK;
}

void tf_engine_begin(tf_engine *e, tf_mode mode) {
    e->mode = mode;
    e->status = TF_OK;
    e->quantized = NULL;
    for (int64_t i = 0; i < e->registry.count; i++) {
        e->registry.entries[i].applied = 0;
    }
}

tf_status tf_engine_end(tf_engine *e) {
    if (e->status != TF_OK) {
        return tf_fail(e->status, "%s", e->message);
    }
    if (e->mode == TF_VERIFY && e->bits > 0) {
        for (int64_t i = 0; i < e->registry.count; i++) {
            if (e->registry.entries[i].applied == 0) {
                return tf_fail(TF_ERR_NOT_APPLIED,
                               "the residual of %s was never applied: the graph does not use this weight in a "
                               "matrix product of its own",
                               e->registry.entries[i].tensor.name);
            }
        }
    }
    return TF_OK;
}

tf_counters tf_engine_counters(const tf_engine *e) { return e->counters; }
