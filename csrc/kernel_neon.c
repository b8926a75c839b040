/* NEON with the dot product extension: a register holds 4 rows x 4 inputs of a chunk, sdot multiplies it
 * by 4 inputs of a column, taken from a lane of a register that holds them for up to 4 columns or chunks.
 *
 * sdot wants signed codes. Of 4 bits the code's upper half (0..15) and of 6 bits its upper part (0..63) are
 * positive as they are, so these are multiplied and the integer sum is shifted; of 8 bits the code less
 * 128 is multiplied and 128 times the sum of the inputs added. The integers come out the same. */
#include "kernel_neon.h"

#if defined(__linux__)
#include <sys/auxv.h>
#elif defined(__APPLE__)
#include <sys/sysctl.h>
#endif

/* Chunk c of a 2-bit plane in bits 0-1, its neighbours' bits above. */
INLINE uint8x16_t two_bits(uint8x16_t two, int c) {
    return c == 0 ? two : c == 1 ? vshrq_n_u8(two, 2) : c == 2 ? vshrq_n_u8(two, 4) : vshrq_n_u8(two, 6);
}

/* Chunk c, as the signed numbers that are multiplied (see above). */
INLINE int8x16_t unpack(const uint8x16_t *a, uint8x16_t b, uint8x16_t d, int c, int bits) {
    const uint8x16_t top = c % 2 == 0 ? vandq_u8(a[c / 2], vdupq_n_u8(0x0f)) : vshrq_n_u8(a[c / 2], 4);
    if (bits == 4) {
        return vreinterpretq_s8_u8(top);
    }
    if (bits == 6) {
        return vreinterpretq_s8_u8(vsliq_n_u8(two_bits(b, c), top, 2));
    }
    const uint8x16_t low = vsliq_n_u8(two_bits(d, c), two_bits(b, c), 2);
    return vreinterpretq_s8_u8(vsliq_n_u8(low, top, 4));
}

/* A panel's planes. */
typedef struct streams {
    const uint8_t *p4, *p6, *p8;
} streams;

/* Adds 16 inputs (4 chunks) of 4 rows to the dot products of n columns. */
INLINE void unit(streams at, const int8_t *q, int32x4_t *dots, int bits, int n) {
    int8x16_t x[TF_MAX_COLUMNS];
    load_inputs(q, x, n);
    uint8x16_t a[2] = {vld1q_u8(at.p4), vld1q_u8(at.p4 + 64)};
    const uint8x16_t b = bits >= 6 ? vld1q_u8(at.p6) : a[0], d = bits == 8 ? vld1q_u8(at.p8) : a[0];
    if (bits == 8) { /* flips the uppermost bit of both codes in a byte: 128 less, as a signed number */
        a[0] = veorq_u8(a[0], vdupq_n_u8(0x88));
        a[1] = veorq_u8(a[1], vdupq_n_u8(0x88));
    }
    UNROLL
    for (int c = 0; c < 4; c++) {
        multiply(unpack(a, b, d, c, bits), x, c, dots, n);
    }
}

/* 128 times the sum of 32 inputs, from the sums of both halves. */
INLINE int32_t sum_128(int32_t halves) { return 128 * ((int16_t)halves + (halves >> 16)); }

/* Adds block b of 32 inputs, as x->q or x->low has them, to the sums of n columns. */
INLINE void block_sums(const streams *p, int64_t b, const tf_columns *x, const int8_t *q, const int32_t *column_sums,
                       float factor, quarter *sums, int bits, int n) {
    for (int r = 0; r < QUARTERS; r++) {
        int32x4_t dots[TF_MAX_COLUMNS];
        for (int j = 0; j < n; j++) {
            dots[j] = vdupq_n_s32(bits == 8 ? sum_128(column_sums[b * n + j]) : 0);
        }
        for (int u = 0; u < 2; u++) {
            const int64_t at = b * 2 + u;
            unit((streams){p->p4 + at * 128 + r * 16, p->p6 + at * 64 + r * 16, p->p8 + at * 64 + r * 16},
                 q + at * 16 * n, dots, bits, n);
        }
        for (int j = 0; j < n; j++) {
            const int32x4_t dot = bits == 8 ? dots[j] : bits == 6 ? vshlq_n_s32(dots[j], 2) : vshlq_n_s32(dots[j], 4);
            sums[r][j] = vfmaq_n_f32(sums[r][j], vcvtq_f32_s32(dot), x->scale[b * n + j] * factor);
        }
    }
}

INLINE void panel_n(const tf_planes *planes, int64_t panel, const tf_columns *x, float *tile, int bits, int n) {
    const int64_t groups = tf_groups(planes->width, planes->group);
    const int64_t blocks = planes->width / TF_BLOCK, group_blocks = planes->group / TF_BLOCK;
    const uint8_t *p4 = planes->plane4 + panel * planes->width * 8;
    const streams p = {p4, bits >= 6 ? planes->plane6 + panel * planes->width * 4 : p4,
                       bits == 8 ? planes->plane8 + panel * planes->width * 4 : p4};
    const uint16_t *scales = planes->scales + panel * groups * TF_PANEL_ROWS;
    quarter results[QUARTERS], sums[QUARTERS];
    fill(results, zeros, n);
    for (int64_t g = 0, b = 0; g < groups; g++) {
        const int64_t end = (g + 1) * group_blocks < blocks ? (g + 1) * group_blocks : blocks;
        fill(sums, x->offset + g * n, n);
        for (; b < end; b++) {
            block_sums(&p, b, x, x->q, x->sums, 1.0f, sums, bits, n);
            if (tf_has_low(x, b)) {
                block_sums(&p, b, x, x->low, x->low_sums, TF_LOW, sums, bits, n);
            }
        }
        for (int r = 0; r < QUARTERS; r++) {
            const float32x4_t scale = load_halves(scales + g * TF_PANEL_ROWS + r * 4);
            for (int j = 0; j < n; j++) {
                results[r][j] = vfmaq_f32(results[r][j], sums[r][j], scale);
            }
        }
    }
    store(results, tile, n);
}

INLINE void panel_bits(const tf_planes *planes, int64_t panel, const tf_columns *x, float *tile, int bits) {
    switch (x->n) {
        case 1: panel_n(planes, panel, x, tile, bits, 1); break;
        case 2: panel_n(planes, panel, x, tile, bits, 2); break;
        case 3: panel_n(planes, panel, x, tile, bits, 3); break;
        case 4: panel_n(planes, panel, x, tile, bits, 4); break;
        case 5: panel_n(planes, panel, x, tile, bits, 5); break;
        case 6: panel_n(planes, panel, x, tile, bits, 6); break;
        case 7: panel_n(planes, panel, x, tile, bits, 7); break;
        default: panel_n(planes, panel, x, tile, bits, 8); break;
    }
}

static void run(const tf_planes *planes, int64_t panel, const tf_columns *x, float *tile) {
    switch (planes->bits) {
        case 4: panel_bits(planes, panel, x, tile, 4); break;
        case 6: panel_bits(planes, panel, x, tile, 6); break;
        default: panel_bits(planes, panel, x, tile, 8); break;
    }
}

/* Four codes; zero for NaN, and for what a tiny block's infinite inverse makes. */
INLINE int32x4_t quantize_4(const float *x, float inverse) {
    const float32x4_t value = vrndnq_f32(vmulq_n_f32(vld1q_f32(x), inverse));
    const uint32x4_t valid = vcaleq_f32(value, vdupq_n_f32(TF_LARGEST));
    return vandq_s32(vcvtq_s32_f32(value), vreinterpretq_s32_u32(valid));
}

static float quantize(const float *x, int8_t *high, int8_t *low, int32_t *sums) {
    float32x4_t most = vabsq_f32(vld1q_f32(x));
    for (int i = 4; i < TF_BLOCK; i += 4) {
        most = vmaxq_f32(most, vabsq_f32(vld1q_f32(x + i))); /* NaN if either is */
    }
    const float largest = vmaxvq_f32(most);
    const float inverse = largest > 0.0f ? TF_LARGEST / largest : 0.0f; /* NaN: 0 */
    for (int i = 0; i < TF_BLOCK; i += 8) {
        const int32x4_t a = quantize_4(x + i, inverse), b = quantize_4(x + i + 4, inverse);
        const int16x8_t top = vcombine_s16(vrshrn_n_s32(a, 8), vrshrn_n_s32(b, 8)); /* (code + 128) >> 8 */
        vst1_s8(high + i, vmovn_s16(top));
        vst1_s8(low + i, vmovn_s16(vcombine_s16(vmovn_s32(a), vmovn_s32(b)))); /* the low byte: code - 256 top */
    }
    sums[0] = tf_pack_sums(vaddlvq_s8(vld1q_s8(high)), vaddlvq_s8(vld1q_s8(high + 16)));
    sums[1] = tf_pack_sums(vaddlvq_s8(vld1q_s8(low)), vaddlvq_s8(vld1q_s8(low + 16)));
    return largest / TF_LARGEST;
}

static bool supported(void) {
#if defined(__linux__)
    return getauxval(AT_HWCAP) >> 20 & 1; /* HWCAP_ASIMDDP, which old headers lack */
#elif defined(__APPLE__)
    int has = 0;
    size_t size = sizeof has;
    return sysctlbyname("hw.optional.arm.FEAT_DotProd", &has, &size, NULL, 0) == 0 && has != 0;
#else
    return false;
#endif
}

const tf_kernel tf_kernel_neon = {.name = "neon-dotprod",
                                  .run = run,
                                  .run_supers = tf_supers_neon,
                                  .quantize = quantize,
                                  .max_columns = TF_MAX_COLUMNS,
                                  .supported = supported};
