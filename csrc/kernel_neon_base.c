/* NEON with the dot product extension (kernel_neon.c), bases of Q2_K to Q6_K. All codes are positive as they are.
 * `bits` and `n` are constants wherever they are passed on. */
#include "kernel_neon.h"

/* Moves the bits of every byte down. */
INLINE uint8x16_t down(uint8x16_t v, int by) {
    switch (by) {
        case 0: return v;
        case 1: return vshrq_n_u8(v, 1);
        case 2: return vshrq_n_u8(v, 2);
        case 3: return vshrq_n_u8(v, 3);
        case 4: return vshrq_n_u8(v, 4);
        case 5: return vshrq_n_u8(v, 5);
        case 6: return vshrq_n_u8(v, 6);
        default: return vshrq_n_u8(v, 7);
    }
}

/* Chunk c of sub-block `half`, joined of low and high planes. low: what it has of 64-byte groups. */
INLINE int8x16_t unpack(const uint8x16_t *low, uint8x16_t high, int half, int c, int bits) {
    const uint8x16_t lower = bits <= 3 ? down(low[0], 2 * c) : down(low[c / 2], c % 2 * 4);
    uint8x16_t codes = lower;
    if (bits == 3) {
        codes = vsliq_n_u8(lower, down(high, tf_high_bit(half * 4 + c)), 2);
    } else if (bits == 5) {
        codes = vsliq_n_u8(lower, down(high, tf_high_bit(half * 4 + c)), 4);
    } else if (bits == 6) {
        codes = vsliq_n_u8(lower, down(high, 2 * c), 4);
    }
    return vreinterpretq_s8_u8(vandq_u8(codes, vdupq_n_u8((uint8_t)((1 << bits) - 1))));
}

/* Adds a sub-block of 16 inputs of 4 rows to the dot products of n columns. block: of the first of the rows. */
INLINE void add_dots(const uint8_t *block, int half, const int8_t *q, int32x4_t *dots, int bits, int n) {
    int8x16_t x[TF_MAX_COLUMNS];
    load_inputs(q + half * 16 * n, x, n);
    const uint8_t *at = block + half * (bits <= 3 ? 64 : 128), *highs = block + tf_high_planes(bits);
    const uint8x16_t low[2] = {vld1q_u8(at), bits <= 3 ? vdupq_n_u8(0) : vld1q_u8(at + 64)};
    const uint8x16_t high = bits == 2 || bits == 4 ? low[0] : vld1q_u8(bits == 6 ? highs + half * 64 : highs);
    UNROLL
    for (int c = 0; c < 4; c++) {
        multiply(unpack(low, high, half, c, bits), x, c, dots, n);
    }
}

/* Scales and mins of both sub-blocks, for 4 rows. */
typedef struct factors {
    int32x4_t scale_a, scale_b, min_a, min_b;
} factors;

INLINE int32x4_t masked(uint32x4_t v, int at, uint32_t mask) {
    return vreinterpretq_s32_u32(vandq_u32(vshlq_u32(v, vdupq_n_s32(-at)), vdupq_n_u32(mask)));
}

INLINE factors load_factors(const uint8_t *bytes, int bits) {
    if (tf_super_signed(bits)) {
        const int32x4_t both = vreinterpretq_s32_s16(vmovl_s8(vld1_s8((const int8_t *)bytes))), zero = vdupq_n_s32(0);
        return (factors){vshrq_n_s32(vshlq_n_s32(both, 16), 16), vshrq_n_s32(both, 16), zero, zero};
    }
    const uint32x4_t both = vreinterpretq_u32_u16(vmovl_u8(vld1_u8(bytes))); /* first | second << 16 */
    if (bits == 2) {
        return (factors){masked(both, 0, 15), masked(both, 16, 15), masked(both, 4, 15), masked(both, 20, 15)};
    }
    const int32x4_t scale = masked(both, 0, 255), min = masked(both, 16, 255);
    return (factors){scale, scale, min, min};
}

/* Four rows of a block. */
INLINE void add_quarter(const uint8_t *block, const factors *f, const int8_t *q, const int32_t *column_sums,
                        const float *scale, float factor, float32x4_t *sums, float32x4_t *mins, int bits, int n) {
    const int32_t offset = tf_super_signed(bits) ? 1 << (bits - 1) : 0;
    int32x4_t first[TF_MAX_COLUMNS], second[TF_MAX_COLUMNS];
    for (int j = 0; j < n; j++) {
        first[j] = vdupq_n_s32(-offset * (int16_t)column_sums[j]);
        second[j] = vdupq_n_s32(-offset * (column_sums[j] >> 16));
    }
    const bool one_scale = bits == 4 || bits == 5;
    add_dots(block, 0, q, first, bits, n);
    add_dots(block, 1, q, one_scale ? first : second, bits, n);
    for (int j = 0; j < n; j++) {
        const float unit = scale[j] * factor;
        int32x4_t product = vmulq_s32(first[j], f->scale_a);
        if (!one_scale) {
            product = vmlaq_s32(product, second[j], f->scale_b);
        }
        sums[j] = vfmaq_n_f32(sums[j], vcvtq_f32_s32(product), unit);
        if (!tf_super_signed(bits)) {
            const int32x4_t minimum =
                vmlaq_n_s32(vmulq_n_s32(f->min_a, (int16_t)column_sums[j]), f->min_b, column_sums[j] >> 16);
            mins[j] = vfmaq_n_f32(mins[j], vcvtq_f32_s32(minimum), unit);
        }
    }
}

/* Block b of a super; q, column_sums: of its 32 inputs, high or low. */
INLINE void add_block(const uint8_t *super, int b, const int8_t *q, const int32_t *column_sums, const float *scale,
                      float factor, quarter *sums, quarter *mins, int bits, int n) {
    for (int r = 0; r < QUARTERS; r++) {
        const factors f = load_factors(super + tf_super_scales(bits) + b * 32 + r * 8, bits);
        add_quarter(super + b * 64 * bits + r * 16, &f, q, column_sums, scale, factor, sums[r], mins[r], bits, n);
    }
}

INLINE void add_super(const uint8_t *super, int64_t s, const tf_columns *x, quarter *results, int bits, int n) {
    quarter sums[QUARTERS], mins[QUARTERS];
    fill(sums, zeros, n);
    fill(mins, zeros, n);
    for (int b = 0; b < TF_SUPER / TF_BLOCK; b++) {
        const int64_t block = s * (TF_SUPER / TF_BLOCK) + b, at = block * n, q = block * TF_BLOCK * n;
        add_block(super, b, x->q + q, x->sums + at, x->scale + at, 1.0f, sums, mins, bits, n);
        if (tf_has_low(x, block)) {
            add_block(super, b, x->low + q, x->low_sums + at, x->scale + at, TF_LOW, sums, mins, bits, n);
        }
    }
    const uint16_t *d = (const uint16_t *)(const void *)(super + tf_super_d(bits));
    for (int r = 0; r < QUARTERS; r++) {
        const float32x4_t scale = vmulq_n_f32(load_halves(d + r * 4), 128.0f);
        const float32x4_t minus = vmulq_n_f32(load_halves(d + TF_PANEL_ROWS + r * 4), -128.0f);
        for (int j = 0; j < n; j++) {
            results[r][j] = vfmaq_f32(results[r][j], scale, sums[r][j]);
            if (!tf_super_signed(bits)) {
                results[r][j] = vfmaq_f32(results[r][j], minus, mins[r][j]);
            }
        }
    }
}

INLINE void panel_n(const tf_base *base, int64_t panel, const tf_columns *x, float *tile, int bits, int n) {
    const int64_t supers = base->width / TF_SUPER, bytes = tf_super_bytes(bits);
    const uint8_t *super = base->supers + panel * supers * bytes;
    quarter results[QUARTERS];
    fill(results, zeros, n);
    for (int64_t s = 0; s < supers; s++) {
        add_super(super + s * bytes, s, x, results, bits, n);
    }
    store(results, tile, n);
}

INLINE void panel_bits(const tf_base *base, int64_t panel, const tf_columns *x, float *tile, int bits) {
    switch (x->n) {
        case 1: panel_n(base, panel, x, tile, bits, 1); break;
        case 2: panel_n(base, panel, x, tile, bits, 2); break;
        case 3: panel_n(base, panel, x, tile, bits, 3); break;
        case 4: panel_n(base, panel, x, tile, bits, 4); break;
        case 5: panel_n(base, panel, x, tile, bits, 5); break;
        case 6: panel_n(base, panel, x, tile, bits, 6); break;
        case 7: panel_n(base, panel, x, tile, bits, 7); break;
        default: panel_n(base, panel, x, tile, bits, 8); break;
    }
}

void tf_supers_neon(const tf_base *base, int64_t panel, const tf_columns *x, float *tile) {
    switch (base->bits) {
        case 2: panel_bits(base, panel, x, tile, 2); break;
        case 3: panel_bits(base, panel, x, tile, 3); break;
        case 4: panel_bits(base, panel, x, tile, 4); break;
        case 5: panel_bits(base, panel, x, tile, 5); break;
        default: panel_bits(base, panel, x, tile, 6); break;
    }
}
