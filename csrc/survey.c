/* Where every part of a model lies, as the graph that runs has it: llama.cpp has no public list of its tensors. And
 * what the Python package asks about devices. */
#include <string.h>

#include "engine_state.h"

static void tell(tf_engine *e, const struct ggml_tensor *t) {
    const struct ggml_tensor *owner = t->view_src != NULL ? t->view_src : t;
    if (owner->buffer == NULL) {
        return;
    }
    size_t length = 0;
    const char *plain = tf_plain_name(owner->name, &length);
    char name[GGML_MAX_NAME + 1] = {0};
    memcpy(name, plain, length);
    ggml_backend_dev_t dev = ggml_backend_buft_get_device(ggml_backend_buffer_get_type(owner->buffer));
    const tf_seen seen = {.name = name,
                          .op = ggml_op_name(owner->op),
                          .device = dev != NULL ? ggml_backend_dev_name(dev) : "CPU",
                          .host = tf_on_host(owner),
                          .bytes = ggml_nbytes(owner),
                          .residual = tf_registry_find(&e->registry, owner->name) != NULL};
    e->survey(e->survey_user, &seen);
}

void tf_survey_node(tf_engine *e, const struct ggml_tensor *node) {
    for (int i = 0; i < GGML_MAX_SRC && node->src[i] != NULL; i++) {
        const struct ggml_tensor *owner = node->src[i]->view_src != NULL ? node->src[i]->view_src : node->src[i];
        if (owner->op == GGML_OP_NONE) {
            tell(e, owner);
        }
        if (i == 0 && tf_registry_find(&e->registry, owner->name) != NULL && !tf_on_host(node)) {
            tf_engine_device_of(e, node);
        }
    }
    if (node->view_src == NULL) {
        tell(e, node);
    }
}

/* ---- public ---------------------------------------------------------------------------------- */

void tf_engine_survey(tf_engine *e, tf_survey_sink sink, void *user) {
    e->survey = sink;
    e->survey_user = user;
}

tf_status tf_engine_stage(tf_engine *e, int64_t columns, uint64_t bytes) {
    if (columns < 0 || (columns > 0 && (bytes < TF_STAGE_LEAST || bytes > TF_STAGE_MOST))) {
        return tf_fail(TF_ERR_ARGUMENT, "staging from %lld columns on, with %llu bytes: 0 columns, or %d to %d MiB",
                       (long long)columns, (unsigned long long)bytes, TF_STAGE_LEAST >> 20, TF_STAGE_MOST >> 20);
    }
    if (e->devices != NULL) {
        return tf_fail(TF_ERR_ARGUMENT, "staging is chosen before the first decode");
    }
    if (e->ahead == NULL && e->threads > 1) {
        e->ahead = tf_ahead_new(&e->registry, e->kernel, e->pool);
    }
    e->use_devices = true;
    e->stage_columns = columns;
    e->stage_bytes = (size_t)bytes;
    return TF_OK;
}

int32_t tf_engine_device_count(const tf_engine *e) {
    int32_t count = 0;
    for (const tf_device *d = e->devices; d != NULL; d = d->next) {
        count++;
    }
    return count;
}

tf_status tf_engine_device(const tf_engine *e, int32_t index, tf_device_use *out) {
    const tf_device *d = e->devices;
    for (int32_t i = 0; i < index && d != NULL; i++) {
        d = d->next;
    }
    if (d == NULL || index < 0) {
        return tf_fail(TF_ERR_MISSING, "no device %d", index);
    }
    struct ggml_backend_dev_props props;
    ggml_backend_dev_get_props(d->dev, &props);
    *out = (tf_device_use){.name = ggml_backend_dev_name(d->dev),
                           .adds = d->adds,
                           .pinned = ggml_backend_dev_host_buffer_type(d->dev) != NULL,
                           .async = props.caps.async,
                           .stage_columns = d->stage != NULL ? e->stage_columns : 0,
                           .stage_bytes = d->stage != NULL ? e->stage_bytes : 0};
    return TF_OK;
}
