#include "operands.h"

#include <stdlib.h>
#include <string.h>

#include "ggml-backend.h"

void *tf_buffer_reserve(tf_buffer *b, size_t bytes) {
    if (bytes > b->capacity) {
        free(b->data);
        b->data = aligned_alloc(64, (bytes + 63) / 64 * 64);
        b->capacity = b->data != NULL ? bytes : 0;
    }
    return b->data;
}

const char *tf_plain_name(const char *name, size_t *length) {
    const char *first = strchr(name, '#'), *last = strrchr(name, '#');
    if (first != NULL && last > first) {
        *length = (size_t)(last - first - 1);
        return first + 1;
    }
    *length = strlen(name);
    return name;
}

bool tf_on_host(const struct ggml_tensor *t) {
    const struct ggml_backend_buffer *b = t->view_src != NULL ? t->view_src->buffer : t->buffer;
    return b == NULL || ggml_backend_buffer_is_host((ggml_backend_buffer_t)(uintptr_t)b);
}

const float *tf_column(const struct ggml_tensor *t, const void *base, int64_t i1, int64_t i2, int64_t i3) {
    return (const float *)((const char *)base + (size_t)i1 * t->nb[1] + (size_t)i2 * t->nb[2] + (size_t)i3 * t->nb[3]);
}

const float *tf_contiguous(const struct ggml_tensor *x, const void *base, tf_buffer *gathered) {
    if (ggml_is_contiguous(x)) {
        return base;
    }
    const size_t row = (size_t)x->ne[0] * sizeof(float);
    char *out = tf_buffer_reserve(gathered, row * (size_t)ggml_nrows(x));
    for (int64_t i3 = 0, at = 0; out != NULL && i3 < x->ne[3]; i3++) {
        for (int64_t i2 = 0; i2 < x->ne[2]; i2++) {
            for (int64_t i1 = 0; i1 < x->ne[1]; i1++, at++) {
                memcpy(out + row * (size_t)at, tf_column(x, base, i1, i2, i3), row);
            }
        }
    }
    return (const float *)(void *)out;
}
