/* Where every part of a model lies, as the graph that runs has it: llama.cpp has no public list of its tensors. */
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
