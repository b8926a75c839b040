/* Observed nodes: ggml has computed the base's product, the residual's is added to it.
 *
 *   x [n][width] --fetch--> float32 --quantize once a distinct x--> kernels --> R x [n][rows] --upload, add there-->
 *
 * Memory the host can see is used where it lies. Where a device cannot add, the result is fetched, added to here, and
 * stored. Many columns are multiplied on the device (stage.c). docs/devices.md counts the bytes. */
#include <stdlib.h>
#include <string.h>

#include "engine_state.h"

/* ---- a node's operands ---------------------------------------------------------------------- */

/* Where the bytes of t can be read: in place, or copied into `held`, unless they are there already. NULL: out of
 * memory. */
static const void *fetch(tf_engine *e, const struct ggml_tensor *t, tf_held *held) {
    if (tf_on_host(t)) {
        return t->data;
    }
    const size_t bytes = ggml_nbytes(t);
    const bool there = held->tensor == t && held->tensor != NULL;
    void *copy = tf_pinned_reserve(&held->memory, tf_tensor_device(t), bytes);
    if (copy != NULL && !there) {
        const double start = tf_now();
        ggml_backend_tensor_get(t, copy, 0, bytes);
        e->counters.from_device_bytes += bytes;
        e->counters.fetch_s += tf_now() - start;
        held->tensor = tf_lasting(t);
    }
    return copy;
}

/* ---- quantizing ------------------------------------------------------------------------------ */

static tf_status quantize(tf_engine *e, int64_t n, int64_t width, int32_t group, const float *x) {
    if (e->ahead != NULL) {
        tf_ahead_finish(e->ahead); /* it reads what is written now */
    }
    tf_activations_shape(&e->activations, n, width, group, e->bits, e->kernel->max_columns, false);
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

/* Makes e->activations hold x. */
static tf_status take_input(tf_engine *e, const struct ggml_tensor *x) {
    if (e->quantized == x) {
        return TF_OK;
    }
    const void *base = fetch(e, x, &e->x);
    const float *columns = base != NULL ? tf_contiguous(x, base, &e->gathered) : NULL;
    if (columns == NULL) {
        return tf_fail(TF_ERR_MEMORY, "out of memory");
    }
    const tf_status status = quantize(e, ggml_nrows(x), x->ne[0], e->group, columns);
    e->quantized = status == TF_OK ? tf_lasting(x) : NULL;
    return status;
}

static tf_status mul_mat(tf_engine *e, const tf_entry *entry, const struct ggml_tensor *node, bool add, float *out) {
    const tf_status status = take_input(e, node->src[1]);
    if (status != TF_OK) {
        return status;
    }
    const tf_product product = {.has_residual = true,
                                .residual = tf_engine_planes(e, entry, 0),
                                .x = &e->activations,
                                .add = add,
                                .out = out,
                                .stride = entry->tensor.rows};
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
    const void *x = fetch(e, node->src[1], &e->x);
    const void *ids = fetch(e, node->src[2], &e->ids);
    if (x == NULL || ids == NULL) {
        return tf_fail(TF_ERR_MEMORY, "out of memory");
    }
    e->quantized = NULL;
    tf_status status = TF_OK;
    for (int64_t expert = 0; expert < entry->tensor.experts && status == TF_OK; expert++) {
        status = expert_product(e, entry, node, expert, x, ids, out);
    }
    return status;
}

/* ---- the three ways ------------------------------------------------------------------------- */

/* Adds R x to out, or with add = false writes it there. */
static tf_status multiply(tf_engine *e, const tf_entry *entry, const struct ggml_tensor *node, bool add, float *out) {
    if (node->op == GGML_OP_MUL_MAT) {
        return mul_mat(e, entry, node, add, out);
    }
    if (!add) {
        memset(out, 0, ggml_nbytes(node));
    }
    return mul_mat_id(e, entry, node, out);
}

/* What a device cannot add: R x is in the buffer, the result comes here and goes back. */
static tf_status add_here(tf_engine *e, struct ggml_tensor *node, const float *product) {
    const double start = tf_now();
    const size_t bytes = ggml_nbytes(node);
    float *sum = tf_buffer_reserve(&e->sum, bytes);
    if (sum == NULL) {
        return tf_fail(TF_ERR_MEMORY, "out of memory");
    }
    ggml_backend_tensor_get(node, sum, 0, bytes);
    for (size_t i = 0; i < bytes / sizeof *sum; i++) {
        sum[i] += product[i];
    }
    ggml_backend_tensor_set(node, sum, 0, bytes);
    e->counters.from_device_bytes += bytes;
    e->counters.store_s += tf_now() - start;
    return TF_OK;
}

/* R x of a node that was begun early; NULL if it was not. */
static const float *begun(tf_engine *e, const tf_entry *entry, const struct ggml_tensor *node) {
    if (e->ahead == NULL || node->op != GGML_OP_MUL_MAT) {
        return NULL;
    }
    const double start = tf_now();
    tf_ahead_learn(e->ahead, entry, node->src[1]);
    const float *product = tf_ahead_take(e->ahead, entry, node->src[1]);
    e->counters.early_nodes += product != NULL;
    e->counters.compute_s += tf_now() - start;
    return product;
}

static tf_status by_cpu(tf_engine *e, tf_device *device, const tf_entry *entry, struct ggml_tensor *node) {
    const size_t bytes = ggml_nbytes(node);
    const float *product = begun(e, entry, node);
    if (product == NULL) {
        float *out = tf_pinned_reserve(&e->result, tf_tensor_device(node), bytes);
        if (out == NULL) {
            return tf_fail(TF_ERR_MEMORY, "out of memory");
        }
        const tf_status status = multiply(e, entry, node, false, out);
        if (status != TF_OK) {
            return status;
        }
        product = out;
    }
    const double start = tf_now();
    e->counters.to_device_bytes += bytes;
    if (device == NULL || !tf_device_add(device, node, product)) {
        return add_here(e, node, product);
    }
    e->counters.store_s += tf_now() - start;
    e->counters.device_adds++;
    return TF_OK;
}

static tf_status by_device(tf_engine *e, tf_device *device, const tf_entry *entry, struct ggml_tensor *node) {
    const double start = tf_now();
    uint64_t uploaded = 0;
    const tf_status status = tf_stage_run(device->stage, e->pool, entry, e->bits, node, &uploaded);
    const tf_planes planes = tf_engine_planes(e, entry, 0);
    e->counters.residual_bytes += tf_residual_bytes_read(&planes);
    e->counters.to_device_bytes += uploaded;
    e->counters.staged_bytes += uploaded;
    e->counters.staged_nodes++;
    e->counters.stage_s += tf_now() - start;
    return status;
}

tf_device *tf_engine_device_of(tf_engine *e, const struct ggml_tensor *node) {
    ggml_backend_dev_t dev = e->use_devices ? tf_tensor_device(node) : NULL;
    tf_device *device = dev != NULL ? tf_device_get(&e->devices, dev) : NULL;
    if (device != NULL && e->stage_columns > 0 && !device->stage_tried) {
        device->stage_tried = true;
        device->stage = tf_stage_new(dev, &e->registry, e->stage_bytes);
    }
    return device;
}

/* Whether so many columns go to the device. */
static bool is_prompt(const tf_engine *e, const tf_device *device, const struct ggml_tensor *x) {
    return e->stage_columns > 0 && ggml_nrows(x) >= e->stage_columns && device != NULL && device->stage != NULL;
}

bool tf_awaits(tf_engine *e, const struct ggml_tensor *node) {
    return e->ahead != NULL && tf_ahead_expects(e->ahead, node) && node->type == GGML_TYPE_F32 &&
           tf_lasting(node) != NULL && tf_tensor_device(node) != NULL && ggml_is_contiguous(node) &&
           !is_prompt(e, tf_engine_device_of(e, node), node);
}

tf_status tf_begin_products(tf_engine *e, const struct ggml_tensor *x) {
    const tf_status status = take_input(e, x);
    if (status == TF_OK) {
        tf_ahead_start(e->ahead, x, &e->activations, e->bits, &e->counters.residual_bytes);
    }
    return status;
}

tf_status tf_observe(tf_engine *e, tf_entry *entry, struct ggml_tensor *node) {
    tf_status status = tf_check_operands(entry, node);
    if (status != TF_OK || ggml_is_empty(node)) {
        return status;
    }
    if (tf_on_host(node)) {
        return multiply(e, entry, node, true, (float *)node->data);
    }
    tf_device *device = tf_engine_device_of(e, node);
    if (is_prompt(e, device, node->src[1]) && tf_stage_can(device->stage, entry, node)) {
        return by_device(e, device, entry, node);
    }
    return by_cpu(e, device, entry, node);
}
