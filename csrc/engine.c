/* The engine's life and modes: what happens to a graph node whose weight has a residual.
 *
 *                         draft mode                     verify mode
 *   claimed (claim.c)     base, by our kernel            base + residual in one pass, by our kernels
 *   observed (observe.c)  base, by ggml                  base by ggml, then the residual is added */
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "engine_state.h"
#include "ggml-backend.h"

double tf_now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

tf_status tf_check_operands(const tf_entry *entry, const struct ggml_tensor *node) {
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

const struct ggml_tensor *tf_lasting(const struct ggml_tensor *x) { return x->op != GGML_OP_NONE ? x : NULL; }

tf_planes tf_engine_planes(const tf_engine *e, const tf_entry *entry, int64_t expert) {
    tf_planes planes = tf_residual_planes(&entry->tensor, expert);
    planes.bits = e->bits;
    return planes;
}

/* ---- what a front end calls ------------------------------------------------------------------ */

void tf_engine_fail(tf_engine *e, tf_status status) {
    if (status != TF_OK && e->status == TF_OK) {
        e->status = status;
        strncpy(e->message, tf_error(), sizeof e->message - 1);
    }
}

bool tf_engine_wants(tf_engine *e, struct ggml_tensor *node) {
    e->quantized = e->quantized == node ? NULL : e->quantized;
    e->claimed = e->claimed == node ? NULL : e->claimed;
    e->x.tensor = e->x.tensor == node ? NULL : e->x.tensor;
    e->ids.tensor = e->ids.tensor == node ? NULL : e->ids.tensor;
    if (e->survey != NULL) {
        tf_survey_node(e, node);
    }
    if (tf_is_claimed(node)) {
        tf_unclaim_node(node);
    }
    const bool verify = e->mode == TF_VERIFY && e->bits > 0;
    const bool product = node->op == GGML_OP_MUL_MAT || node->op == GGML_OP_MUL_MAT_ID;
    tf_entry *entry = product ? tf_registry_find(&e->registry, node->src[0]->name) : NULL;
    if (entry == NULL) {
        e->awaited = verify && tf_awaits(e, node) ? node : e->awaited;
        return e->awaited == node;
    }
    if (!(verify || e->claiming)) {
        return false;
    }
    if (tf_claim_node(e, entry, node)) {
        entry->applied++;
        e->counters.nodes++;
        return false;
    }
    return verify;
}

bool tf_engine_apply(tf_engine *e, struct ggml_tensor *node) {
    if (node == e->awaited) {
        e->awaited = NULL;
        if (e->status == TF_OK) {
            tf_engine_fail(e, tf_begin_products(e, node));
        }
        return e->status == TF_OK;
    }
    tf_entry *entry = tf_registry_find(&e->registry, node->src[0]->name);
    if (e->status == TF_OK) {
        tf_engine_fail(e, tf_observe(e, entry, node));
    }
    entry->applied++;
    e->counters.nodes++;
    return e->status == TF_OK;
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
    e->threads = threads;
    e->bits = e->max_bits = tf_residual_bits(residual);
    e->group = tf_residual_group(residual);
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
        tf_ahead_free(e->ahead);
        tf_pool_free(e->pool);
        tf_registry_free(&e->registry);
        tf_activations_free(&e->activations);
        tf_claims_free(e);
        tf_devices_free(e->devices);
        tf_pinned *copies[] = {&e->x.memory, &e->ids.memory, &e->result};
        for (size_t i = 0; i < sizeof copies / sizeof *copies; i++) {
            tf_pinned_free(copies[i]);
        }
        tf_buffer *buffers[] = {&e->sum, &e->columns, &e->gathered, &e->claim_memory};
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
    if (e->ahead != NULL) {
        tf_ahead_finish(e->ahead);
    }
    return TF_OK;
}

void tf_engine_claim(tf_engine *e, bool on) { e->claiming = on; }

void tf_engine_begin(tf_engine *e, tf_mode mode) {
    e->mode = mode;
    e->status = TF_OK;
    e->quantized = e->claimed = e->routed = e->awaited = e->x.tensor = e->ids.tensor = NULL;
    if (e->ahead != NULL) {
        tf_ahead_finish(e->ahead);
    }
    tf_claims_free(e);
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
