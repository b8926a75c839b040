/* Where the operands of a graph node lie, shared by the engine and by calibration. */
#pragma once

#include "ggml.h"
#include "twofold.h"

typedef struct tf_buffer {
    void *data;
    size_t capacity;
} tf_buffer;

/* Room for `bytes`, whatever the buffer held is lost; NULL if there is none. */
void *tf_buffer_reserve(tf_buffer *buffer, size_t bytes);
/* Name and length of a weight, without what the scheduler puts around it in a copy: "CUDA0#W#0". */
const char *tf_plain_name(const char *name, size_t *length);
bool tf_on_host(const struct ggml_tensor *t);
/* Column (i1, i2, i3) of a tensor whose bytes start at `base`. */
const float *tf_column(const struct ggml_tensor *t, const void *base, int64_t i1, int64_t i2, int64_t i3);
/* Columns of x one after the other; in place where they lie so already. NULL: out of memory. */
const float *tf_contiguous(const struct ggml_tensor *x, const void *base, tf_buffer *gathered);
