/* Stands in for ggml_types.c where ggml's libraries are not at hand: the types of base that there are kernels for,
 * as base_panels.c and base_supers.c read them. The same test with ggml's own quantizers runs on the machine that
 * builds. */
#include "ggml.h"
#include "test.h"

typedef struct form {
    int32_t type;
    tf_type info;
    int64_t scale_at; /* of the block's first scale in float16 */
    int64_t scales;   /* float16 numbers there: d, or d and dmin */
} form;

static const form *find(int32_t type) {
    static const form forms[] = {
        {GGML_TYPE_Q4_0, {"q4_0", 32, 18, true, false}, 0, 1},
        {GGML_TYPE_Q8_0, {"q8_0", 32, 34, true, false}, 0, 1},
        {GGML_TYPE_Q2_K, {"q2_K", 256, 84, true, false}, 80, 2},
        {GGML_TYPE_Q3_K, {"q3_K", 256, 110, true, false}, 108, 1},
        {GGML_TYPE_Q4_K, {"q4_K", 256, 144, true, false}, 0, 2},
        {GGML_TYPE_Q5_K, {"q5_K", 256, 176, true, false}, 0, 2},
        {GGML_TYPE_Q6_K, {"q6_K", 256, 210, true, false}, 208, 1},
    };
    for (size_t i = 0; i < sizeof forms / sizeof *forms; i++) {
        if (forms[i].type == type) {
            return &forms[i];
        }
    }
    return NULL;
}

tf_status tf_type_get(int32_t type, tf_type *out) {
    if (find(type) == NULL) {
        return tf_fail(TF_ERR_ARGUMENT, "no type %d without ggml", type);
    }
    *out = find(type)->info;
    return TF_OK;
}

/* Any bytes are blocks, if their scales are of a size. */
tf_status tf_quantize(int32_t type, const float *src, int64_t rows, int64_t width, const float *imatrix, void *dst,
                      size_t dst_bytes) {
    (void)src, (void)rows, (void)width, (void)imatrix;
    const form *form = find(type);
    if (form == NULL) {
        return tf_fail(TF_ERR_ARGUMENT, "no type %d without ggml", type);
    }
    uint8_t *bytes = dst;
    uint64_t state = 1;
    for (size_t i = 0; i < dst_bytes; i++) {
        bytes[i] = (uint8_t)(test_random(&state) >> 40);
    }
    for (size_t at = (size_t)form->scale_at; at < dst_bytes; at += (size_t)form->info.block_bytes) {
        for (size_t i = 0; i < (size_t)form->scales * 2; i += 2) {
            const uint16_t half = (uint16_t)(0x1000 | (test_random(&state) >> 40 & 0x83ff)); /* 2^-11 to 2^-10 */
            memcpy(bytes + at + i, &half, sizeof half);
        }
    }
    return TF_OK;
}

/* Bits first to first + count - 1 of a byte. */
static int field(uint8_t byte, int64_t first, int count) { return byte >> first & ((1 << count) - 1); }

/* Scale or min of block b of Q4_K and Q5_K. */
static int packed_scale(const uint8_t *scales, int64_t b, bool min) {
    const int64_t own = b % 4 + (min ? 4 : 0);
    return b < 4 ? field(scales[own], 0, 6) : field(scales[8 + b % 4], min ? 4 : 0, 4) | field(scales[own], 6, 2) << 4;
}

static float weight_32(int32_t type, const uint8_t *block, int64_t i, float d) {
    if (type == GGML_TYPE_Q8_0) {
        return d * (float)(int8_t)block[2 + i];
    }
    return d * (float)(field(block[2 + i % 16], i / 16 * 4, 4) - 8);
}

static float weight_256(int32_t type, const uint8_t *p, int64_t i, float d, float dmin) {
    const int64_t two = i / 128 * 32 + i % 32, two_bit = i % 128 / 32 * 2, four = i / 64 * 32 + i % 32;
    if (type == GGML_TYPE_Q2_K) {
        return d * (float)(field(p[i / 16], 0, 4) * field(p[16 + two], two_bit, 2)) - dmin * (float)(p[i / 16] >> 4);
    }
    if (type == GGML_TYPE_Q3_K) {
        const int64_t s = i / 16;
        const int scale = field(p[96 + s % 8], s / 8 * 4, 4) + field(p[104 + s % 4], s / 4 * 2, 2) * 16 - 32;
        return d * (float)(scale * (field(p[32 + two], two_bit, 2) + field(p[i % 32], i / 32, 1) * 4 - 4));
    }
    if (type == GGML_TYPE_Q6_K) {
        const int code = field(p[i / 128 * 64 + i % 64], i % 128 / 64 * 4, 4) + field(p[128 + two], two_bit, 2) * 16;
        return d * (float)((int8_t)p[192 + i / 16] * (code - 32));
    }
    const int high = type == GGML_TYPE_Q5_K ? field(p[16 + i % 32], i / 32, 1) * 16 : 0;
    const int code = field(p[(type == GGML_TYPE_Q5_K ? 48 : 16) + four], i % 64 / 32 * 4, 4) + high;
    return d * (float)(packed_scale(p + 4, i / 32, false) * code) - dmin * (float)packed_scale(p + 4, i / 32, true);
}

tf_status tf_dequantize(int32_t type, const void *src, size_t src_bytes, float *dst, int64_t n) {
    (void)src_bytes;
    const form *form = find(type);
    if (form == NULL) {
        return tf_fail(TF_ERR_ARGUMENT, "no type %d without ggml", type);
    }
    for (int64_t i = 0; i < n; i++) {
        const uint8_t *block = (const uint8_t *)src + i / form->info.block * form->info.block_bytes;
        uint16_t halves[2] = {0};
        memcpy(halves, block + form->scale_at, (size_t)form->scales * 2);
        const float d = tf_half_to_float(halves[0]), dmin = tf_half_to_float(halves[1]);
        dst[i] = form->info.block == 32 ? weight_32(type, block, i % 32, d) : weight_256(type, block, i % 256, d, dmin);
    }
    return TF_OK;
}
