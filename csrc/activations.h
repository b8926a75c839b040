/* Activations, quantized once and used by every residual that multiplies them. */
#pragma once

#include "kernels.h"

typedef struct tf_activations {
    int64_t n, width;    /* columns, inputs */
    int32_t group, bits; /* what the offsets were made for */
    int32_t columns;     /* of a block */
    size_t capacity;
    uint8_t *memory;
} tf_activations;

/* Makes room for n columns in blocks of at most `columns`. */
tf_status tf_activations_reserve(tf_activations *a, int64_t n, int64_t width, int32_t group, int32_t bits,
                                 int32_t columns);
void tf_activations_free(tf_activations *a);
int64_t tf_activations_blocks(const tf_activations *a);
/* Block `index`: where its columns are, or go. */
tf_columns tf_activations_block(const tf_activations *a, int64_t index);
/* Quantizes the columns of one block; x: float32 [n][width], columns `stride` floats apart. */
void tf_activations_quantize(const tf_activations *a, int64_t index, const float *x, int64_t stride);
