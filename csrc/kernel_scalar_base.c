/* The definition of the products of Q2_K to Q6_K bases. */
#include <math.h>

#include "kernels.h"

/* Code of an input of a block. */
static int32_t code(const uint8_t *block, int64_t lane, int64_t input, int32_t bits) {
    const int64_t chunk = input / 4;
    const int32_t low = tf_low_bits(bits), high = bits - low;
    const uint8_t *at = block + lane * 4 + input % 4, *highs = at + tf_high_planes(bits);
    int32_t value = at[chunk * low / 8 * 64] >> (chunk * low % 8) & ((1 << low) - 1);
    if (high == 1) {
        value |= (*highs >> tf_high_bit(chunk) & 1) << low;
    } else if (high == 2) {
        value |= (highs[chunk / 4 * 64] >> (chunk % 4 * 2) & 3) << low;
    }
    return value;
}

/* One column of a block of 32 inputs, as x->q or x->low has it. */
typedef struct inputs {
    const int8_t *q; /* [8][n][4] */
    int64_t n;
    int32_t first, second; /* sums of both halves */
} inputs;

static int32_t dot(const uint8_t *block, int64_t lane, const inputs *x, int64_t half, int32_t bits) {
    int32_t sum = 0;
    for (int64_t i = half * 16; i < half * 16 + 16; i++) {
        sum += code(block, lane, i, bits) * x->q[i / 4 * 4 * x->n + i % 4];
    }
    return sum;
}

/* scales: the two bytes of the row. */
static int32_t product(const uint8_t *block, int64_t lane, const inputs *x, const uint8_t *scales, int32_t bits) {
    const int32_t first = dot(block, lane, x, 0, bits), second = dot(block, lane, x, 1, bits);
    if (bits == 2) {
        return (scales[0] & 15) * first + (scales[1] & 15) * second;
    }
    if (tf_super_signed(bits)) {
        const int32_t offset = 1 << (bits - 1);
        return (int8_t)scales[0] * (first - offset * x->first) + (int8_t)scales[1] * (second - offset * x->second);
    }
    return scales[0] * (first + second);
}

static int32_t minimum(const inputs *x, const uint8_t *scales, int32_t bits) {
    if (bits == 2) {
        return (scales[0] >> 4) * x->first + (scales[1] >> 4) * x->second;
    }
    return tf_super_signed(bits) ? 0 : scales[1] * (x->first + x->second);
}

static inputs column(const int8_t *q, const int32_t *sums, int64_t block, int64_t n, int64_t j) {
    const int32_t both = sums[block * n + j];
    return (inputs){q + (block * (TF_BLOCK / 4) * n + j) * 4, n, (int16_t)both, both >> 16};
}

/* Adds 256 inputs of one row and column to `tile`. */
static float add_super(const uint8_t *super, int64_t lane, const tf_columns *x, int64_t s, int32_t j, float tile,
                       int32_t bits) {
    const uint16_t *d = (const uint16_t *)(const void *)(super + tf_super_d(bits));
    float sum = 0.0f, mins = 0.0f;
    for (int64_t b = 0; b < TF_SUPER / TF_BLOCK; b++) {
        const int64_t block = s * (TF_SUPER / TF_BLOCK) + b;
        const uint8_t *codes = super + b * 64 * bits, *scales = super + tf_super_scales(bits) + b * 32 + lane * 2;
        const float scale = x->scale[block * x->n + j];
        const inputs high = column(x->q, x->sums, block, x->n, j);
        sum = fmaf((float)product(codes, lane, &high, scales, bits), scale, sum);
        mins = fmaf((float)minimum(&high, scales, bits), scale, mins);
        if (tf_has_low(x, block)) {
            const inputs low = column(x->low, x->low_sums, block, x->n, j);
            sum = fmaf((float)product(codes, lane, &low, scales, bits), scale * TF_LOW, sum);
            mins = fmaf((float)minimum(&low, scales, bits), scale * TF_LOW, mins);
        }
    }
    tile = fmaf(tf_half_to_float(d[lane]) * 128.0f, sum, tile);
    if (tf_super_signed(bits)) {
        return tile;
    }
    return fmaf(tf_half_to_float(d[TF_PANEL_ROWS + lane]) * -128.0f, mins, tile);
}

void tf_supers_scalar(const tf_base *base, int64_t panel, const tf_columns *x, float *tile) {
    const int64_t supers = base->width / TF_SUPER, bytes = tf_super_bytes(base->bits);
    const uint8_t *first = base->supers + panel * supers * bytes;
    for (int32_t j = 0; j < x->n; j++) {
        for (int64_t lane = 0; lane < TF_PANEL_ROWS; lane++) {
            float result = 0.0f;
            for (int64_t s = 0; s < supers; s++) {
                result = add_super(first + s * bytes, lane, x, s, j, result, base->bits);
            }
            tile[j * TF_PANEL_ROWS + lane] = result;
        }
    }
}
