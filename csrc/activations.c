/* Activations in 8 bits, one scale for 32 inputs, and where it pays in 16.
 *
 * The rounding error of a block grows with its scale, so a few blocks with outliers make most of the
 * error. Blocks whose squared scale is above the column's mean times LOW_ABOVE carry their next 8 bits as
 * well, for the base, which is most of the weight; the residual is small and does with 8 bits.
 *
 * Compiled without contraction (CMakeLists.txt), so that every build rounds alike. */
#include "activations.h"

#include <stdlib.h>
#include <string.h>

/* 0 would keep all blocks, 1 costs a quarter more time for 8 columns; 2 costs 13 % there, next to nothing up
 * to 5, and takes nearly three quarters of the KL divergence away (docs/log.md). */
#define LOW_ABOVE 2.0f

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

void tf_activations_shape(tf_activations *a, int64_t n, int64_t width, int32_t group, int32_t bits, int32_t columns) {
    a->n = n;
    a->width = width;
    a->group = group;
    a->bits = bits;
    a->columns = columns;
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

int64_t tf_activations_blocks(const tf_activations *a) { return tf_ceil_div(a->n, a->columns); }

tf_columns tf_activations_block(const tf_activations *a, int64_t index) {
    const int64_t left = a->n - index * a->columns;
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

static void put_codes(int8_t *to, int64_t n, const int8_t *codes) {
    for (int64_t i = 0; i < TF_BLOCK / 4; i++) {
        memcpy(to + i * n * 4, codes + i * 4, 4);
    }
}

/* Decides which blocks of column `at` keep their low codes, and what the codes' offset adds for the base. */
static void settle_low(const tf_activations *a, const tf_columns *to, int64_t at) {
    static const int8_t zeros[TF_BLOCK] = {0};
    const int64_t n = to->n, blocks = a->width / TF_BLOCK;
    float squares = 0.0f;
    for (int64_t b = 0; b < blocks; b++) {
        squares += to->scale[b * n + at] * to->scale[b * n + at];
    }
    const float limit = LOW_ABOVE * squares / (float)blocks;
    for (int64_t b = 0; b < blocks; b++) {
        const float scale = to->scale[b * n + at];
        const bool keep = scale * scale > limit;
        to->flags[b * TF_MAX_COLUMNS + at] = keep;
        if (!keep) {
            put_codes(to->low + (b * (TF_BLOCK / 4) * n + at) * 4, n, zeros);
            to->low_sums[b * n + at] = 0;
        }
        const int32_t high = to->sums[b * n + at], low = to->low_sums[b * n + at];
        const float sum = (float)(256 * ((int16_t)high + (high >> 16)) + (int16_t)low + (low >> 16));
        to->base_offset[b * n + at] = -128.0f * sum * (scale * TF_LOW);
    }
}

void tf_activations_quantize(const tf_activations *a, const tf_kernel *kernel, int64_t j, const float *x) {
    const tf_columns to = tf_activations_block(a, j / a->columns);
    const int64_t n = to.n, at = j % a->columns, group_blocks = a->group / TF_BLOCK;
    const float code_offset = tf_code_offset(a->bits);
    float offset = 0.0f;
    for (int64_t b = 0; b < a->width / TF_BLOCK; b++) {
        int8_t high[TF_BLOCK], low[TF_BLOCK];
        int32_t sums[2];
        const float scale = kernel->quantize(x + b * TF_BLOCK, high, low, sums) * (256.0f / 128.0f);
        const int32_t sum = (int16_t)sums[0] + (sums[0] >> 16);
        to.scale[b * n + at] = scale;
        to.sums[b * n + at] = sums[0];
        to.low_sums[b * n + at] = sums[1];
        put_codes(to.q + (b * (TF_BLOCK / 4) * n + at) * 4, n, high);
        put_codes(to.low + (b * (TF_BLOCK / 4) * n + at) * 4, n, low);
        offset = (b % group_blocks == 0 ? 0.0f : offset) + code_offset * (float)sum * scale;
        to.offset[b / group_blocks * n + at] = offset;
    }
    settle_low(a, &to, at);
}
