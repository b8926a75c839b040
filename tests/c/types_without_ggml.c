/* Stands in for ggml_types.c where ggml's libraries are not at hand: the three types that bases have, as
 * base_panels.c reads them. The same test with ggml's own quantizers runs on the machine that builds. */
#include "ggml.h"
#include "test.h"

enum { BLOCK_MAX = 84 };

tf_status tf_type_get(int32_t type, tf_type *out) {
    switch (type) {
        case GGML_TYPE_Q4_0: *out = (tf_type){"q4_0", 32, 18, true, false}; return TF_OK;
        case GGML_TYPE_Q8_0: *out = (tf_type){"q8_0", 32, 34, true, false}; return TF_OK;
        case GGML_TYPE_Q2_K: *out = (tf_type){"q2_K", 256, BLOCK_MAX, true, false}; return TF_OK;
        default: return tf_fail(TF_ERR_ARGUMENT, "no type %d without ggml", type);
    }
}

/* Offset of a block's first scale; a second one follows in Q2_K. */
static size_t scale_at(int32_t type) { return type == GGML_TYPE_Q2_K ? 80 : 0; }

/* Any bytes are blocks, if their scales are of a size. */
tf_status tf_quantize(int32_t type, const float *src, int64_t rows, int64_t width, const float *imatrix, void *dst,
                      size_t dst_bytes) {
    (void)src, (void)rows, (void)width, (void)imatrix;
    tf_type info = {0};
    const tf_status status = tf_type_get(type, &info);
    uint8_t *bytes = dst;
    uint64_t state = 1;
    for (size_t i = 0; status == TF_OK && i < dst_bytes; i++) {
        bytes[i] = (uint8_t)(test_random(&state) >> 40);
    }
    for (size_t at = scale_at(type); status == TF_OK && at < dst_bytes; at += (size_t)info.block_bytes) {
        for (size_t i = 0; i < (type == GGML_TYPE_Q2_K ? 4 : 2); i += 2) {
            const uint16_t half = (uint16_t)(0x1000 | (test_random(&state) >> 40 & 0x83ff)); /* 2^-11 to 2^-10 */
            memcpy(bytes + at + i, &half, sizeof half);
        }
    }
    return status;
}

static float weight(int32_t type, const uint8_t *block, int64_t i) {
    uint16_t halves[2] = {0};
    memcpy(halves, block + scale_at(type), type == GGML_TYPE_Q2_K ? 4 : 2);
    const float d = tf_half_to_float(halves[0]);
    if (type == GGML_TYPE_Q8_0) {
        return d * (float)(int8_t)block[2 + i];
    }
    if (type == GGML_TYPE_Q4_0) {
        return d * (float)((block[2 + i % 16] >> (i / 16 * 4) & 15) - 8);
    }
    const int scale = block[i / 16], code = block[16 + i / 128 * 32 + i % 32] >> (i % 128 / 32 * 2) & 3;
    return d * (float)((scale & 15) * code) - tf_half_to_float(halves[1]) * (float)(scale >> 4);
}

tf_status tf_dequantize(int32_t type, const void *src, size_t src_bytes, float *dst, int64_t n) {
    (void)src_bytes;
    tf_type info = {0};
    const tf_status status = tf_type_get(type, &info);
    for (int64_t i = 0; status == TF_OK && i < n; i++) {
        dst[i] = weight(type, (const uint8_t *)src + i / info.block * info.block_bytes, i % info.block);
    }
    return status;
}
