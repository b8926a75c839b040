/* Where quantized activations lie: blocks of up to 8 columns, each with its parts one behind the other.
 * quantize.c fills them. */
#include "activations.h"

#include <stdlib.h>

static size_t align64(size_t bytes) { return (bytes + 63) / 64 * 64; }

/* Bytes of the parts of a block of columns: q and low, what there is of a 32, what there is of a group. */
typedef struct parts {
    size_t q, blocks, groups, flags;
} parts;

static parts part_bytes(const tf_activations *a) {
    const size_t columns = (size_t)a->columns, width = (size_t)a->width;
    return (parts){align64(width * columns), align64(width / TF_BLOCK * columns * sizeof(float)),
                   align64((size_t)tf_groups(a->width, a->group) * columns * sizeof(float)),
                   align64(width / TF_BLOCK * TF_MAX_COLUMNS)};
}

static size_t block_bytes(const tf_activations *a) {
    const parts p = part_bytes(a);
    return 2 * p.q + 4 * p.blocks + p.groups + p.flags;
}

void tf_activations_shape(tf_activations *a, int64_t n, int64_t width, int32_t group, int32_t bits, int32_t columns,
                          bool for_base) {
    a->n = n;
    a->width = width;
    a->group = group;
    a->bits = bits;
    a->columns = columns;
    a->for_base = for_base;
    a->starts = NULL;
}

size_t tf_activations_bytes(const tf_activations *a) { return block_bytes(a) * (size_t)tf_activations_blocks(a); }

tf_status tf_activations_reserve(tf_activations *a) {
    const size_t bytes = tf_activations_bytes(a);
    if (bytes > a->capacity) {
        free(a->memory);
        a->memory = aligned_alloc(64, bytes);
        a->capacity = a->memory != NULL ? bytes : 0;
    }
    return a->memory != NULL ? TF_OK : tf_fail(TF_ERR_MEMORY, "out of memory for %zu bytes of activations", bytes);
}

void tf_activations_free(tf_activations *a) {
    free(a->memory);
    *a = (tf_activations){0};
}

int64_t tf_activations_blocks(const tf_activations *a) {
    return a->starts != NULL ? a->blocks : tf_ceil_div(a->n, a->columns);
}

int64_t tf_activations_start(const tf_activations *a, int64_t index) {
    return a->starts != NULL ? a->starts[index] : index * a->columns;
}

tf_columns tf_activations_block(const tf_activations *a, int64_t index) {
    const int64_t end = a->starts != NULL ? a->starts[index + 1] : a->n, left = end - tf_activations_start(a, index);
    const parts p = part_bytes(a);
    uint8_t *at = a->memory + block_bytes(a) * (size_t)index;
    uint8_t *blocks = at + 2 * p.q;
    return (tf_columns){.n = left < a->columns ? (int32_t)left : a->columns,
                        .q = (int8_t *)at,
                        .low = (int8_t *)(at + p.q),
                        .scale = (float *)(void *)blocks,
                        .base_offset = (float *)(void *)(blocks + p.blocks),
                        .sums = (int32_t *)(void *)(blocks + 2 * p.blocks),
                        .low_sums = (int32_t *)(void *)(blocks + 3 * p.blocks),
                        .offset = (float *)(void *)(blocks + 4 * p.blocks),
                        .flags = blocks + 4 * p.blocks + p.groups};
}
