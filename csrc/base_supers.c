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

/* Adds codes that lie in `run` bytes, those of the first `run` inputs in the lowest bits and so on, moved up by `up`.
 */
static inline void read_codes(uint8_t *to, const uint8_t *from, int run, int bits, int up) {
    for (int k = 0; k < 8 / bits; k++) {
        for (int i = 0; i < run; i++) {
            to[k * run + i] |= (uint8_t)((from[i] >> (k * bits) & ((1 << bits) - 1)) << up);
        }
    }
}

/* The 2 bits of 256 codes as Q2_K has them, the 4 bits as Q4_K does. */
static void read_two_bits(uint8_t *to, const uint8_t *from, int up) {
    read_codes(to, from, 32, 2, up);
    read_codes(to + 128, from + 32, 32, 2, up);
}

static void read_four_bits(uint8_t *to, const uint8_t *from) {
    for (int i = 0; i < 4; i++) {
        read_codes(to + i * 64, from + i * 32, 32, 4, 0);
    }
}

static void read_q2_k(const q2_k *from, super *to) {
    read_two_bits(to->codes, from->codes, 0);
    memcpy(to->scales, from->scales, sizeof to->scales);
    to->d = from->d;
    to->dmin = from->dmin;
}

static void read_q3_k(const q3_k *from, super *to) {
    read_two_bits(to->codes, from->low, 0);
    read_codes(to->codes, from->high, 32, 1, 2);
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
    read_four_bits(to->codes, from->codes);
    scale_and_min(from->scales, to);
    to->d = from->d;
    to->dmin = from->dmin;
}

static void read_q5_k(const q5_k *from, super *to) {
    read_four_bits(to->codes, from->low);
    read_codes(to->codes, from->high, 32, 1, 4);
    scale_and_min(from->scales, to);
    to->d = from->d;
    to->dmin = from->dmin;
}

static void read_q6_k(const q6_k *from, super *to) {
    read_codes(to->codes, from->low, 64, 4, 0);
    read_codes(to->codes + 128, from->low + 64, 64, 4, 0);
    read_two_bits(to->codes, from->high, 4);
    memcpy(to->scales, from->scales, sizeof to->scales);
    to->d = from->d;
}

/* Adds four codes, a byte each, moved up by `up`. */
static void put_four(uint8_t *at, uint32_t codes, int32_t up) {
    uint32_t there;
    memcpy(&there, at, sizeof there);
    there |= codes << up;
    memcpy(at, &there, sizeof there);
}

/* The codes of 32 inputs of a row. */
static void put_codes(uint8_t *block, int64_t lane, const uint8_t *codes, int32_t bits) {
    enum { BYTES = 0x01010101 };
    const int32_t low = tf_low_bits(bits), high = bits - low;
    uint8_t *lows = block + lane * 4, *highs = lows + tf_high_planes(bits);
    for (int64_t chunk = 0; chunk < 8; chunk++) {
        uint32_t four;
        memcpy(&four, codes + chunk * 4, sizeof four);
        put_four(lows + chunk * low / 8 * 64, four & ((1u << low) - 1) * BYTES, (int32_t)(chunk * low % 8));
        if (high != 0) {
            const int32_t up = high == 1 ? tf_high_bit(chunk) : (int32_t)(chunk * high % 8);
            put_four(highs + chunk * high / 8 * 64, four >> low & ((1u << high) - 1) * BYTES, up);
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
