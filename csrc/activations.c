/* 8-bit activations, one scale for 32 inputs: q = round(x / scale), scale = largest magnitude / 127.
 * Compiled without contraction (CMakeLists.txt), so that every build rounds alike. */
#include "activations.h"

#include <stdlib.h>
#include <string.h>

static size_t align64(size_t bytes) { return (bytes + 63) / 64 * 64; }

/* Bytes of the parts of a block: q, then scales, offsets, base offsets, sums. */
typedef struct parts {
    size_t q, blocks, groups;
} parts;

static parts part_bytes(const tf_activations *a) {
    const size_t columns = (size_t)a->columns, width = (size_t)a->width;
    return (parts){align64(width * columns), align64(width / TF_BLOCK * columns * sizeof(float)),
                   align64((size_t)tf_groups(a->width, a->group) * columns * sizeof(float))};
}

static size_t block_bytes(const tf_activations *a) {
    const parts p = part_bytes(a);
    return p.q + 3 * p.blocks + p.groups;
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
    return (tf_columns){.n = left < a->columns ? (int32_t)left : a->columns,
                        .q = (int8_t *)at,
                        .scale = (float *)(void *)(at + p.q),
                        .base_offset = (float *)(void *)(at + p.q + p.blocks),
                        .sums = (int32_t *)(void *)(at + p.q + 2 * p.blocks),
                        .offset = (float *)(void *)(at + p.q + 3 * p.blocks)};
}

static int32_t sum_16(const int8_t *codes) {
    int32_t sum = 0;
    for (int i = 0; i < 16; i++) {
        sum += codes[i];
    }
    return sum;
}

void tf_activations_quantize(const tf_activations *a, const tf_kernel *kernel, int64_t j, const float *x) {
    const tf_columns to = tf_activations_block(a, j / a->columns);
    const int64_t n = to.n, at = j % a->columns, group_blocks = a->group / TF_BLOCK;
    const float code_offset = tf_code_offset(a->bits);
    float offset = 0.0f;
    for (int64_t b = 0; b < a->width / TF_BLOCK; b++) {
        int8_t codes[TF_BLOCK];
        const float scale = kernel->quantize(x + b * TF_BLOCK, codes) / 128.0f;
        for (int64_t i = 0; i < TF_BLOCK / 4; i++) {
            memcpy(to.q + ((b * (TF_BLOCK / 4) + i) * n + at) * 4, codes + i * 4, 4);
        }
        const int32_t first = sum_16(codes), second = sum_16(codes + 16);
        const float sum = (float)(first + second);
        offset = (b % group_blocks == 0 ? 0.0f : offset) + code_offset * sum * scale;
        to.scale[b * n + at] = scale;
        to.offset[b / group_blocks * n + at] = offset;
        to.base_offset[b * n + at] = -128.0f * sum * scale;
        to.sums[b * n + at] = (int32_t)((uint32_t)(first & 0xffff) | (uint32_t)second << 16);
    }
}
