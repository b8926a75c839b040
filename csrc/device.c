/* A device through ggml's public functions: a second backend instance beside the scheduler's. The scheduler has waited
 * for its own when it shows us a node, and we wait for ours before it goes on, so the two never run at once on one
 * tensor. */
#include "device.h"

#include <stdlib.h>

#include "operands.h"
#include "stage.h"

/* ---- host memory for copies ------------------------------------------------------------------- */

static ggml_backend_buffer_t host_buffer(ggml_backend_dev_t dev, size_t bytes) {
    ggml_backend_buffer_type_t pinned = dev != NULL ? ggml_backend_dev_host_buffer_type(dev) : NULL;
    ggml_backend_buffer_t made = pinned != NULL ? ggml_backend_buft_alloc_buffer(pinned, bytes) : NULL;
    return made != NULL ? made : ggml_backend_buft_alloc_buffer(ggml_backend_cpu_buffer_type(), bytes);
}

void *tf_pinned_reserve(tf_pinned *p, ggml_backend_dev_t dev, size_t bytes) {
    if (bytes > p->capacity) {
        tf_pinned_free(p);
        p->buffer = host_buffer(dev, bytes);
        p->capacity = p->buffer != NULL ? bytes : 0;
    }
    return p->buffer != NULL ? ggml_backend_buffer_get_base(p->buffer) : NULL;
}

void tf_pinned_free(tf_pinned *p) {
    ggml_backend_buffer_free(p->buffer);
    *p = (tf_pinned){0};
}

/* ---- a lane ----------------------------------------------------------------------------------- */

static size_t arena_bytes(void) {
    return TF_ARENA_NODES * ggml_tensor_overhead() + ggml_graph_overhead_custom(TF_ARENA_NODES, false);
}

bool tf_lane_open(tf_lane *lane, ggml_backend_dev_t dev) {
    lane->arena = malloc(arena_bytes());
    lane->ctx = lane->arena != NULL ? ggml_init((struct ggml_init_params){arena_bytes(), lane->arena, true}) : NULL;
    lane->backend = lane->ctx != NULL ? ggml_backend_dev_init(dev, NULL) : NULL;
    return lane->backend != NULL;
}

void tf_lane_close(tf_lane *lane) {
    tf_lane_wait(lane);
    ggml_backend_buffer_free(lane->memory);
    ggml_free(lane->ctx);
    if (lane->backend != NULL) {
        ggml_backend_free(lane->backend);
    }
    free(lane->arena);
    *lane = (tf_lane){0};
}

bool tf_lane_reserve(tf_lane *lane, size_t bytes) {
    if (lane->memory == NULL || ggml_backend_buffer_get_size(lane->memory) < bytes) {
        tf_lane_wait(lane);
        ggml_backend_buffer_free(lane->memory);
        lane->memory = ggml_backend_alloc_buffer(lane->backend, bytes);
    }
    return lane->memory != NULL;
}

struct ggml_context *tf_lane_begin(tf_lane *lane) {
    tf_lane_wait(lane);
    ggml_reset(lane->ctx);
    lane->used = 0;
    return lane->ctx;
}

bool tf_lane_place(tf_lane *lane, struct ggml_tensor *t) {
    const size_t align = ggml_backend_buffer_get_alignment(lane->memory);
    const size_t at = (lane->used + align - 1) / align * align;
    const size_t bytes = ggml_backend_buffer_get_alloc_size(lane->memory, t);
    if (at + bytes > ggml_backend_buffer_get_size(lane->memory)) {
        return false;
    }
    lane->used = at + bytes;
    char *base = ggml_backend_buffer_get_base(lane->memory);
    return ggml_backend_tensor_alloc(lane->memory, t, base + at) == GGML_STATUS_SUCCESS;
}

struct ggml_tensor *tf_lane_alias(tf_lane *lane, const struct ggml_tensor *of, int64_t ne0, int64_t ne1) {
    struct ggml_tensor *alias = ggml_new_tensor_2d(lane->ctx, of->type, ne0, ne1);
    ggml_backend_buffer_t buffer = of->view_src != NULL ? of->view_src->buffer : of->buffer;
    return ggml_backend_tensor_alloc(buffer, alias, of->data) == GGML_STATUS_SUCCESS ? alias : NULL;
}

tf_status tf_lane_start(tf_lane *lane, struct ggml_tensor *result) {
    struct ggml_cgraph *graph = ggml_new_graph_custom(lane->ctx, TF_ARENA_NODES, false);
    ggml_build_forward_expand(graph, result);
    for (int i = 0; i < ggml_graph_n_nodes(graph); i++) {
        struct ggml_tensor *t = ggml_graph_node(graph, i);
        if (t->buffer == NULL && t->view_src != NULL && ggml_backend_view_init(t) != GGML_STATUS_SUCCESS) {
            return tf_fail(TF_ERR_MEMORY, "%s cannot make a view", ggml_backend_name(lane->backend));
        }
    }
    lane->busy = true;
    if (ggml_backend_graph_compute_async(lane->backend, graph) != GGML_STATUS_SUCCESS) {
        return tf_fail(TF_ERR_UNSUPPORTED, "%s failed to compute", ggml_backend_name(lane->backend));
    }
    return TF_OK;
}

void tf_lane_wait(tf_lane *lane) {
    if (lane->busy) {
        ggml_backend_synchronize(lane->backend);
        lane->busy = false;
    }
}

/* ---- devices ---------------------------------------------------------------------------------- */

ggml_backend_dev_t tf_tensor_device(const struct ggml_tensor *t) {
    const struct ggml_tensor *owner = t->view_src != NULL ? t->view_src : t;
    return tf_on_host(t) ? NULL : ggml_backend_buft_get_device(ggml_backend_buffer_get_type(owner->buffer));
}

/* Whether the device says that it can add two float32 tensors in place. */
static bool can_add(tf_lane *lane, ggml_backend_dev_t dev) {
    struct ggml_context *ctx = tf_lane_begin(lane);
    struct ggml_tensor *a = ggml_new_tensor_2d(ctx, GGML_TYPE_F32, 64, 2);
    struct ggml_tensor *b = ggml_new_tensor_2d(ctx, GGML_TYPE_F32, 64, 2);
    return ggml_backend_dev_supports_op(dev, ggml_add_inplace(ctx, a, b));
}

tf_device *tf_device_get(tf_device **list, ggml_backend_dev_t dev) {
    for (tf_device *d = *list; d != NULL; d = d->next) {
        if (d->dev == dev) {
            return d;
        }
    }
    tf_device *d = calloc(1, sizeof *d);
    if (d != NULL) {
        d->dev = dev;
        d->next = *list;
        const char *off = getenv("TWOFOLD_DEVICE_ADD"); /* 0: to compare, and to test the other way */
        d->adds = (off == NULL || off[0] != '0') && tf_lane_open(&d->adder, dev) && can_add(&d->adder, dev);
        *list = d;
    }
    return d;
}

void tf_devices_free(tf_device *list) {
    while (list != NULL) {
        tf_device *d = list;
        list = d->next;
        tf_stage_free(d->stage);
        tf_lane_close(&d->adder);
        free(d);
    }
}

static bool start_adding(tf_lane *lane, const struct ggml_tensor *node, const float *values) {
    struct ggml_context *ctx = tf_lane_begin(lane);
    const int64_t width = node->ne[0], rows = ggml_nrows(node);
    struct ggml_tensor *added = ggml_new_tensor_2d(ctx, GGML_TYPE_F32, width, rows);
    struct ggml_tensor *to = tf_lane_alias(lane, node, width, rows);
    if (to == NULL || !tf_lane_reserve(lane, ggml_nbytes(added)) || !tf_lane_place(lane, added)) {
        return false;
    }
    ggml_backend_tensor_set_async(lane->backend, added, values, 0, ggml_nbytes(added));
    return tf_lane_start(lane, ggml_add_inplace(ctx, to, added)) == TF_OK;
}

bool tf_device_add(tf_device *d, const struct ggml_tensor *node, const float *values) {
    d->adds = d->adds && start_adding(&d->adder, node, values);
    tf_lane_wait(&d->adder);
    return d->adds;
}
