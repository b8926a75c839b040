/* Blocks of Q2_K to Q6_K, put into supers. */
#include <string.h>

#include "base_panels.h"
#include "ggml.h"

/* ggml's blocks, as ggml-common.h documents them (that header is not public). */
typedef struct q2_k {
    uint8_t scales[16]; /* scale | min << 4 */
    uint8_t codes[64];  /* 128 inputs in 32 bytes: input i in byte i % 32, bits i / 32 * 2 */
    uint16_t d, dmin;
} q2_k;
typedef struct q3_k {
    uint8_t high[32];   /* bit 2 of input i in byte i % 32, bit i / 32 */
    uint8_t low[64];    /* bits 0-1, as in Q2_K */
    uint8_t scales[12]; /* 6 bits: 4 in the nibbles of 8 bytes, then 2 in 4 bytes */
    uint16_t d;
} q3_k;
typedef struct q4_k {
    uint16_t d, dmin;
    uint8_t scales[12]; /* 6 bits a scale and 6 bits a min, see scale_and_min() */
    uint8_t codes[128]; /* 64 inputs in 32 bytes: input i in byte i % 32, bits i / 32 * 4 */
} q4_k;
typedef struct q5_k {
    uint16_t d, dmin;
    uint8_t scales[12];
    uint8_t high[32]; /* bit 4 of input i in byte i % 32, bit i / 32 */
    uint8_t low[128];
} q5_k;
typedef struct q6_k {
    uint8_t low[128]; /* 128 inputs in 64 bytes: input i in byte i % 64, bits i / 64 * 4 */
    uint8_t high[64]; /* bits 4-5, as the codes of Q2_K */
    int8_t scales[16];
    uint16_t d;
} q6_k;

/* A block as supers have it. */
typedef struct super {
    uint8_t codes[TF_SUPER];
    uint8_t scales[8][2];
    uint16_t d, dmin;
} super;

static int two_bits(const uint8_t *codes, int i) { return codes[i / 128 * 32 + i % 32] >> (i % 128 / 32 * 2) & 3; }
static int four_bits(const uint8_t *codes, int i) { return codes[i / 64 * 32 + i % 32] >> (i % 64 / 32 * 4) & 15; }
static int one_bit(const uint8_t *codes, int i) { return codes[i % 32] >> (i / 32) & 1; }

static void read_q2_k(const q2_k *from, super *to) {
    for (int i = 0; i < TF_SUPER; i++) {
        to->codes[i] = (uint8_t)two_bits(from->codes, i);
    }
    memcpy(to->scales, from->scales, sizeof to->scales);
    to->d = from->d;
    to->dmin = from->dmin;
}

static void read_q3_k(const q3_k *from, super *to) {
    for (int i = 0; i < TF_SUPER; i++) {
        to->codes[i] = (uint8_t)(two_bits(from->low, i) | one_bit(from->high, i) << 2);
    }
    for (int i = 0; i < 16; i++) {
        const int low = from->scales[i % 8] >> (i / 8 * 4) & 15, high = from->scales[8 + i % 4] >> (i / 4 * 2) & 3;
        to->scales[i / 2][i % 2] = (uint8_t)((low | high << 4) - 32);
    }
    to->d = from->d;
}

/* Four scales and four mins have 6 bits of a byte of their own; the others have a nibble, and the two bits that
 * are left of the first ones' bytes. */
static void scale_and_min(const uint8_t *packed, super *to) {
    for (int i = 0; i < 4; i++) {
        to->scales[i][0] = packed[i] & 63;
        to->scales[i][1] = packed[4 + i] & 63;
        to->scales[4 + i][0] = (uint8_t)((packed[8 + i] & 15) | packed[i] >> 6 << 4);
        to->scales[4 + i][1] = (uint8_t)(packed[8 + i] >> 4 | packed[4 + i] >> 6 << 4);
    }
}

static void read_q4_k(const q4_k *from, super *to) {
    for (int i = 0; i < TF_SUPER; i++) {
        to->codes[i] = (uint8_t)four_bits(from->codes, i);
    }
    scale_and_min(from->scales, to);
    to->d = from->d;
    to->dmin = from->dmin;
}

static void read_q5_k(const q5_k *from, super *to) {
    for (int i = 0; i < TF_SUPER; i++) {
        to->codes[i] = (uint8_t)(four_bits(from->low, i) | one_bit(from->high, i) << 4);
    }
    scale_and_min(from->scales, to);
    to->d = from->d;
    to->dmin = from->dmin;
}

static void read_q6_k(const q6_k *from, super *to) {
    for (int i = 0; i < TF_SUPER; i++) {
        const int low = from->low[i / 128 * 64 + i % 64] >> (i % 128 / 64 * 4) & 15;
        to->codes[i] = (uint8_t)(low | two_bits(from->high, i) << 4);
    }
    memcpy(to->scales, from->scales, sizeof to->scales);
    to->d = from->d;
}

/* The codes of 32 inputs of a row. */
static void put_codes(uint8_t *block, int64_t lane, const uint8_t *codes, int32_t bits) {
    const int32_t low = tf_low_bits(bits), high = bits - low;
    uint8_t *lows = block + lane * 4, *highs = lows + tf_high_planes(bits);
    for (int64_t chunk = 0; chunk < 8; chunk++) {
        const int64_t low_group = chunk * low / 8 * 64, high_group = chunk * high / 8 * 64;
        const int32_t low_at = (int32_t)(chunk * low % 8);
        const int32_t high_at = high == 1 ? tf_high_bit(chunk) : (int32_t)(chunk * high % 8);
        for (int64_t i = 0; i < 4; i++) {
            const int32_t code = codes[chunk * 4 + i];
            lows[low_group + i] |= (uint8_t)((code & ((1 << low) - 1)) << low_at);
            if (high != 0) {
                highs[high_group + i] |= (uint8_t)(code >> low << high_at);
            }
        }
    }
}

static void put(uint8_t *to, int64_t lane, const super *from, int32_t bits) {
    for (int64_t b = 0; b < 8; b++) {
        put_codes(to + b * 64 * bits, lane, from->codes + b * 32, bits);
        memcpy(to + tf_super_scales(bits) + b * 32 + lane * 2, from->scales[b], 2);
    }
    memcpy(to + tf_super_d(bits) + lane * 2, &from->d, 2);
    memcpy(to + tf_super_d(bits) + 32 + lane * 2, &from->dmin, 2);
}

int32_t tf_super_bits(int32_t type) {
    switch (type) {
        case GGML_TYPE_Q2_K: return 2;
        case GGML_TYPE_Q3_K: return 3;
        case GGML_TYPE_Q4_K: return 4;
        case GGML_TYPE_Q5_K: return 5;
        case GGML_TYPE_Q6_K: return 6;
        default: return 0;
    }
}

void tf_super_put_row(const tf_base *base, int64_t row, const void *data) {
    const int64_t n = base->width / TF_SUPER, bytes = tf_super_bytes(base->bits);
    uint8_t *to = base->supers + row / TF_PANEL_ROWS * n * bytes;
    for (int64_t s = 0; s < n; s++) {
        const int64_t at = row * n + s;
        super from = {.dmin = 0};
        switch (base->bits) {
            case 2: read_q2_k((const q2_k *)data + at, &from); break;
            case 3: read_q3_k((const q3_k *)data + at, &from); break;
            case 4: read_q4_k((const q4_k *)data + at, &from); break;
            case 5: read_q5_k((const q5_k *)data + at, &from); break;
            default: read_q6_k((const q6_k *)data + at, &from); break;
        }
        put(to + s * bytes, row % TF_PANEL_ROWS, &from, base->bits);
    }
}
