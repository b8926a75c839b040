/* Activations, quantized once and used by every matrix that multiplies them. */
#pragma once

#include "kernels.h"

typedef struct tf_activations {
    int64_t n, width;    /* columns, inputs */
    int32_t group, bits; /* of the residual that the offsets are for */
    int32_t columns;     /* of a block */
    bool for_base;       /* else only q, scale, sums and offset are made */
    /* Blocks that are not full: how many, and the first column of each [blocks + 1]. NULL: all but the last are. */
    const int32_t *starts;
    int64_t blocks;
    size_t capacity; /* of memory, if it is owned */
    uint8_t *memory;
} tf_activations;

/* Says what a holds; its memory is left alone. */
void tf_activations_shape(tf_activations *a, int64_t n, int64_t width, int32_t group, int32_t bits, int32_t columns,
                          bool for_base);
size_t tf_activations_bytes(const tf_activations *a);
/* Makes room for what a holds. */
tf_status tf_activations_reserve(tf_activations *a);
void tf_activations_free(tf_activations *a);
int64_t tf_activations_blocks(const tf_activations *a);
/* The first column of block `index`. */
int64_t tf_activations_start(const tf_activations *a, int64_t index);
/* Block `index`: where its columns are, or go. */
tf_columns tf_activations_block(const tf_activations *a, int64_t index);
