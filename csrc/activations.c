/* 8-bit activations, one scale per 32 inputs: q = round(x / scale), scale = largest magnitude / 127.
 * Written so that every compiler does the same float operations: no contraction (see CMakeLists.txt). */
#include "activations.h"

#include <math.h>
#include <stdlib.h>

static size_t align64(size_t bytes) { return (bytes + 63) / 64 * 64; }

/* Bytes of one block of `columns` columns: q, scales, offsets. */
static size_t block_bytes(const tf_activations *a) {
    const size_t columns = (size_t)a->columns, width = (size_t)a->width;
    return align64(width * columns) + align64(width / TF_BLOCK * columns * sizeof(float)) +
           align64((size_t)tf_groups(a->width, a->group) * columns * sizeof(float));
}

tf_status tf_activations_reserve(tf_activations *a, int64_t n, int64_t width, int32_t group, int32_t bits,
                                 int32_t columns) {
    a->n = n;
    a->width = width;
    a->group = group;
    a->bits = bits;
    a->columns = columns;
    const size_t bytes = block_bytes(a) * (size_t)tf_activations_blocks(a);
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
    const size_t columns = (size_t)a->columns, width = (size_t)a->width;
    uint8_t *at = a->memory + block_bytes(a) * (size_t)index;
    tf_columns block = {.n = left < a->columns ? (int32_t)left : a->columns};
    block.q = (int8_t *)at;
    at += align64(width * columns);
    block.scale = (float *)at;
    at += align64(width / TF_BLOCK * columns * sizeof(float));
    block.offset = (float *)at;
    return block;
}

/* Quantizes 32 inputs into q (4 of a column together, columns n * 4 apart); returns their sum. */
static int32_t quantize_32(const float *x, int8_t *q, int32_t n, float *scale) {
    float largest = 0.0f;
    for (int i = 0; i < TF_BLOCK; i++) {
        const float magnitude = fabsf(x[i]);
        largest = magnitude > largest || isnan(magnitude) ? magnitude : largest;
    }
    const float inverse = largest > 0.0f ? 127.0f / largest : 0.0f;
    *scale = largest / 127.0f;
    int8_t codes[TF_BLOCK];
    int32_t sum = 0;
    for (int i = 0; i < TF_BLOCK; i++) {
        const float code = nearbyintf(x[i] * inverse);
        codes[i] = code >= -127.0f && code <= 127.0f ? (int8_t)code : 0; /* NaN: the scale carries it on */
        sum += codes[i];
    }
    for (int i = 0; i < TF_BLOCK; i++) {
        q[i / 4 * 4 * n + i % 4] = codes[i];
    }
    return sum;
}

void tf_activations_quantize(const tf_activations *a, int64_t index, const float *x, int64_t stride) {
    const tf_columns block = tf_activations_block(a, index);
    const int64_t group_blocks = a->group / TF_BLOCK, blocks = a->width / TF_BLOCK;
    const float code_offset = tf_code_offset(a->bits);
    for (int32_t j = 0; j < block.n; j++) {
        const float *column = x + j * stride;
        float offset = 0.0f;
        for (int64_t b = 0; b < blocks; b++) {
            float scale;
            const int32_t sum =
                quantize_32(column + b * TF_BLOCK, block.q + (b * TF_BLOCK * block.n + j * 4), block.n, &scale);
            scale /= 128.0f;
            offset = (b % group_blocks == 0 ? 0.0f : offset) + code_offset * (float)sum * scale;
            block.scale[b * block.n + j] = scale;
            block.offset[b / group_blocks * block.n + j] = offset;
        }
    }
}
