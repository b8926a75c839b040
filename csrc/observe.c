/* Observed nodes: ggml has computed the base's product, the residual's is added to it.
 *
 *   x [n][width] --fetch--> float32 --quantize once a distinct x--> kernels --> out [n][rows] --store-->
 *
 * Memory the host can see is used where it lies; other memory is copied both ways. */
#include <stdlib.h>
#include <string.h>

#include "engine_state.h"
#include "ggml-backend.h"

/* ---- a node's operands ---------------------------------------------------------------------- */

/* Where the bytes of t can be read: in place, or copied into b. NULL: out of memory. */
static const void *fetch(tf_engine *e, const struct ggml_tensor *t, tf_buffer *b) {
    if (tf_on_host(t)) {
        return t->data;
    }
    const size_t bytes = ggml_nbytes(t);
    void *copy = tf_buffer_reserve(b, bytes);
    if (copy != NULL) {
        ggml_backend_tensor_get(t, copy, 0, bytes);
        e->counters.from_device_bytes += bytes;
    }
    return copy;
}

/* ---- quantizing ------------------------------------------------------------------------------ */

static tf_status quantize(tf_engine *e, int64_t n, int64_t width, int32_t group, const float *x) {
    tf_activations_shape(&e->activations, n, width, group, e->bits, e->kernel->max_columns);
    tf_status status = tf_activations_reserve(&e->activations);
    if (status == TF_OK) {
        tf_quantize_columns(e->pool, e->kernel, &e->activations, x);
    }
    return status;
}

/* ---- products -------------------------------------------------------------------------------- */

static tf_status run(tf_engine *e, const tf_product *products, int64_t n) {
    const double start = tf_now();
    const tf_status status = tf_products_run(e->pool, e->kernel, products, n);
    e->counters.compute_s += tf_now() - start;
    for (int64_t i = 0; i < n; i++) {
        e->counters.residual_bytes += tf_residual_bytes_read(&products[i].residual);
    }
    return status;
}

static tf_status mul_mat(tf_engine *e, const tf_entry *entry, const struct ggml_tensor *node, float *out) {
    const struct ggml_tensor *x = node->src[1];
    const int64_t n = ggml_nrows(x), rows = entry->tensor.rows;
    if (e->quantized != x) {
        const double start = tf_now();
        const void *base = fetch(e, x, &e->fetched);
        const float *columns = base != NULL ? tf_contiguous(x, base, &e->gathered) : NULL;
        if (columns == NULL) {
            return tf_fail(TF_ERR_MEMORY, "out of memory");
        }
        e->counters.fetch_s += tf_now() - start;
        tf_status status = quantize(e, n, x->ne[0], entry->tensor.planes.group, columns);
        if (status != TF_OK) {
            return status;
        }
        e->quantized = tf_lasting(x);
    }
    const tf_product product = {.has_residual = true,
                                .residual = tf_engine_planes(e, entry, 0),
                                .x = &e->activations,
                                .add = true,
                                .out = out,
                                .stride = rows};
    return run(e, &product, 1);
}

/* The columns that go to one expert: gathered, multiplied, added where they came from. */
static tf_status expert_product(tf_engine *e, const tf_entry *entry, const struct ggml_tensor *node, int64_t expert,
                                const void *x_base, const char *ids, float *out) {
    const struct ggml_tensor *x = node->src[1], *id = node->src[2];
    const int64_t used = id->ne[0], tokens = id->ne[1], width = x->ne[0];
    float *gathered = tf_buffer_reserve(&e->gathered, (size_t)(used * tokens * width) * sizeof *gathered);
    float **outs = tf_buffer_reserve(&e->columns, (size_t)(used * tokens) * sizeof *outs);
    if (gathered == NULL || outs == NULL) {
        return tf_fail(TF_ERR_MEMORY, "out of memory");
    }
    int64_t n = 0;
    for (int64_t t = 0; t < tokens; t++) {
        for (int64_t u = 0; u < used; u++) {
            if (*(const int32_t *)(const void *)(ids + (size_t)t * id->nb[1] + (size_t)u * id->nb[0]) == expert) {
                const float *from = tf_column(x, x_base, u % x->ne[1], t % x->ne[2], 0);
                memcpy(gathered + n * width, from, (size_t)width * sizeof *gathered);
                outs[n++] = out + (t * used + u) * entry->tensor.rows;
            }
        }
    }
    if (n == 0) {
        return TF_OK;
    }
    tf_status status = quantize(e, n, width, entry->tensor.planes.group, gathered);
    const tf_product product = {.has_residual = true,
                                .residual = tf_engine_planes(e, entry, expert),
                                .x = &e->activations,
                                .add = true,
                                .scatter = outs};
    return status != TF_OK ? status : run(e, &product, 1);
}

static tf_status mul_mat_id(tf_engine *e, const tf_entry *entry, const struct ggml_tensor *node, float *out) {
    const double start = tf_now();
    const void *x = fetch(e, node->src[1], &e->fetched);
    const void *ids = fetch(e, node->src[2], &e->ids);
    if (x == NULL || ids == NULL) {
        return tf_fail(TF_ERR_MEMORY, "out of memory");
    }
    e->counters.fetch_s += tf_now() - start;
    e->quantized = NULL;
    tf_status status = TF_OK;
    for (int64_t expert = 0; expert < entry->tensor.experts && status == TF_OK; expert++) {
        status = expert_product(e, entry, node, expert, x, ids, out);
    }
    return status;
}

tf_status tf_observe(tf_engine *e, tf_entry *entry, struct ggml_tensor *node) {
    tf_status status = tf_check_operands(entry, node);
    if (status != TF_OK || ggml_is_empty(node)) {
        return status;
    }
    const bool host = tf_on_host(node);
    float *out = (float *)(uintptr_t)fetch(e, node, &e->result);
    if (out == NULL) {
        return tf_fail(TF_ERR_MEMORY, "out of memory");
    }
    status = node->op == GGML_OP_MUL_MAT ? mul_mat(e, entry, node, out) : mul_mat_id(e, entry, node, out);
    if (status == TF_OK && !host) {
        const double start = tf_now();
        ggml_backend_tensor_set(node, out, 0, ggml_nbytes(node));
        e->counters.to_device_bytes += ggml_nbytes(node);
        e->counters.store_s += tf_now() - start;
    }
    return status;
}
