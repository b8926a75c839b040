/* What the plugin has in place of device.c, ahead.c, stage.c and survey.c: it wraps the devices' own functions, so a
 * backend instance of ours would come by its own hooks. Results are fetched, added to and stored. */
#include <stdlib.h>

#include "engine_state.h"

void *tf_pinned_reserve(tf_pinned *p, ggml_backend_dev_t dev, size_t bytes) {
    (void)dev;
    if (bytes > p->capacity) {
        tf_pinned_free(p);
        p->buffer = malloc(bytes);
        p->capacity = p->buffer != NULL ? bytes : 0;
    }
    return p->buffer;
}

void tf_pinned_free(tf_pinned *p) {
    free(p->buffer);
    *p = (tf_pinned){0};
}

ggml_backend_dev_t tf_tensor_device(const struct ggml_tensor *t) {
    (void)t;
    return NULL;
}

tf_device *tf_device_get(tf_device **list, ggml_backend_dev_t dev) {
    (void)list;
    (void)dev;
    return NULL;
}

void tf_devices_free(tf_device *list) { (void)list; }

bool tf_device_add(tf_device *d, const struct ggml_tensor *node, const float *values) {
    (void)d;
    (void)node;
    (void)values;
    return false;
}

tf_stage *tf_stage_new(ggml_backend_dev_t dev, const tf_registry *registry, size_t bytes) {
    (void)dev;
    (void)registry;
    (void)bytes;
    return NULL;
}

bool tf_stage_can(const tf_stage *stage, const tf_entry *entry, const struct ggml_tensor *node) {
    (void)stage;
    (void)entry;
    (void)node;
    return false;
}

tf_status tf_stage_run(tf_stage *stage, tf_pool *pool, const tf_entry *entry, int32_t bits,
                       const struct ggml_tensor *node, uint64_t *uploaded) {
    (void)stage;
    (void)pool;
    (void)entry;
    (void)bits;
    (void)node;
    (void)uploaded;
    return tf_fail(TF_ERR_UNSUPPORTED, "the plugin stages nothing");
}

void tf_ahead_free(tf_ahead *a) { (void)a; }
void tf_ahead_finish(tf_ahead *a) { (void)a; }

void tf_ahead_learn(tf_ahead *a, const tf_entry *entry, const struct ggml_tensor *x) {
    (void)a;
    (void)entry;
    (void)x;
}

bool tf_ahead_expects(const tf_ahead *a, const struct ggml_tensor *x) {
    (void)a;
    (void)x;
    return false;
}

void tf_ahead_start(tf_ahead *a, const struct ggml_tensor *x, const tf_activations *quantized, int32_t bits,
                    uint64_t *bytes) {
    (void)a;
    (void)x;
    (void)quantized;
    (void)bits;
    (void)bytes;
}

const float *tf_ahead_take(tf_ahead *a, const tf_entry *entry, const struct ggml_tensor *x) {
    (void)a;
    (void)entry;
    (void)x;
    return NULL;
}

void tf_survey_node(tf_engine *e, const struct ggml_tensor *node) {
    (void)e;
    (void)node;
}
