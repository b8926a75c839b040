/* AVX-512 VNNI: one 64-byte register holds a chunk (16 rows x 4 inputs), vpdpbusd multiplies it by 4
 * broadcast inputs of each column. */
#include <math.h>

#include "kernel_avx512.h"

/* Units of 16 inputs that are fetched early: on Zen 5 64 to 128 differ little and 48 is slower, on Ice Lake 96 is
 * slower by 2 %. */
enum { AHEAD = 64 };

/* Adds 16 inputs (4 chunks) to the dot products of n columns. */
INLINE void unit(const uint8_t *p4, const uint8_t *p6, const uint8_t *p8, const int8_t *q, __m512i *dots, int bits,
                 int n) {
    __m512i codes[4];
    unpack(p4, p6, p8, codes, bits);
#pragma GCC unroll 4
    for (int c = 0; c < 4; c++) {
#pragma GCC unroll 8
        for (int j = 0; j < n; j++) {
            dots[j] = dot(dots[j], codes[c], q + (c * n + j) * 4);
        }
    }
}

/* Adds block b of 32 inputs, as x->q or x->low has them, to the sums of n columns. */
INLINE void block_sums(const streams *p, int64_t b, const tf_columns *x, const int8_t *q, float factor, __m512 *sums,
                       int bits, int n) {
    __m512i dots[TF_MAX_COLUMNS];
    for (int j = 0; j < n; j++) {
        dots[j] = _mm512_setzero_si512();
    }
#pragma GCC unroll 2
    for (int u = 0; u < 2; u++) {
        const int64_t at = b * 2 + u;
        prefetch(p, at + AHEAD, bits);
        unit(p->p4 + at * 128, p->p6 + at * 64, p->p8 + at * 64, q + at * 16 * n, dots, bits, n);
    }
    for (int j = 0; j < n; j++) {
        const __m512 scale = _mm512_set1_ps(x->scale[b * n + j] * factor);
        sums[j] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dots[j]), scale, sums[j]);
    }
}

INLINE void panel_n(const tf_planes *planes, int64_t panel, const tf_columns *x, float *tile, int bits, int n) {
    const int64_t groups = tf_groups(planes->width, planes->group);
    const int64_t blocks = planes->width / TF_BLOCK, group_blocks = planes->group / TF_BLOCK;
    const streams p = panel_streams(planes, panel, bits);
    const int64_t groups_ahead = AHEAD * 16 / planes->group;
    const uint16_t *scales = planes->scales + panel * groups * TF_PANEL_ROWS;
    __m512 results[TF_MAX_COLUMNS];
    for (int j = 0; j < n; j++) {
        results[j] = _mm512_setzero_ps();
    }
    for (int64_t g = 0, b = 0; g < groups; g++) {
        const int64_t end = (g + 1) * group_blocks < blocks ? (g + 1) * group_blocks : blocks;
        __m512 sums[TF_MAX_COLUMNS];
        for (int j = 0; j < n; j++) {
            sums[j] = _mm512_set1_ps(x->offset[g * n + j]);
        }
        prefetch_scales(scales, g + groups_ahead);
        for (; b < end; b++) {
            block_sums(&p, b, x, x->q, 1.0f, sums, bits, n);
            if (tf_has_low(x, b)) {
                streams again = p;
                /* or GCC would keep all codes for the case that they are used again */
                __asm__ volatile("" : "+r"(again.p4), "+r"(again.p6), "+r"(again.p8));
                block_sums(&again, b, x, x->low, TF_LOW, sums, bits, n);
            }
        }
        const __m512 scale = _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(scales + g * TF_PANEL_ROWS)));
        for (int j = 0; j < n; j++) {
            results[j] = _mm512_fmadd_ps(sums[j], scale, results[j]);
        }
    }
    for (int j = 0; j < n; j++) {
        _mm512_storeu_ps(tile + j * TF_PANEL_ROWS, results[j]);
    }
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

/* Sum of 16 signed bytes. */
INLINE int32_t sum_16(__m128i codes) {
    const __m128i sums = _mm_sad_epu8(_mm_xor_si128(codes, _mm_set1_epi8((char)0x80)), _mm_setzero_si128());
    return _mm_cvtsi128_si32(sums) + _mm_extract_epi32(sums, 2) - 16 * 128;
}

static float quantize(const float *x, int8_t *high, int8_t *low, int32_t *sums) {
    const __m512 a = _mm512_loadu_ps(x), b = _mm512_loadu_ps(x + 16);
    float largest = _mm512_reduce_max_ps(_mm512_max_ps(_mm512_abs_ps(a), _mm512_abs_ps(b)));
    if (_mm512_cmp_ps_mask(a, b, _CMP_UNORD_Q)) {
        largest = NAN;
    }
    const __m512 inverse = _mm512_set1_ps(largest > 0.0f ? TF_LARGEST / largest : 0.0f);
    int32_t halves[4];
    const __m512 parts[2] = {_mm512_mul_ps(a, inverse), _mm512_mul_ps(b, inverse)};
    for (int i = 0; i < 2; i++) {
        const __m512i code = _mm512_maskz_cvtps_epi32(_mm512_cmp_ps_mask(parts[i], parts[i], _CMP_ORD_Q), parts[i]);
        const __m512i top = _mm512_srai_epi32(_mm512_add_epi32(code, _mm512_set1_epi32(128)), 8);
        const __m128i tops = _mm512_cvtepi32_epi8(top), lows = _mm512_cvtepi32_epi8(code); /* code - 256 top */
        _mm_storeu_si128((__m128i *)(high + i * 16), tops);
        _mm_storeu_si128((__m128i *)(low + i * 16), lows);
        halves[i] = sum_16(tops);
        halves[2 + i] = sum_16(lows);
    }
    sums[0] = tf_pack_sums(halves[0], halves[1]);
    sums[1] = tf_pack_sums(halves[2], halves[3]);
    return largest / TF_LARGEST;
}

static int64_t peak(int64_t rounds) {
    enum { CHAINS = 12 };
    __m512i dots[CHAINS];
    for (int i = 0; i < CHAINS; i++) {
        dots[i] = _mm512_set1_epi32(i);
    }
    const __m512i a = _mm512_set1_epi8(3), b = _mm512_set1_epi8(5);
    for (int64_t r = 0; r < rounds; r++) {
        for (int i = 0; i < CHAINS; i++) {
            dots[i] = _mm512_dpbusd_epi32(dots[i], a, b);
        }
    }
    for (int i = 0; i < CHAINS; i++) {
        __asm__ volatile("" : : "v"(dots[i])); /* they are needed */
    }
    return rounds * CHAINS * 64 * 2;
}

static bool supported(void) {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni") &&
           __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}

const tf_kernel tf_kernel_avx512 = {.name = "avx512-vnni",
                                    .run = run,
                                    .run_supers = tf_supers_avx512,
                                    .quantize = quantize,
                                    .max_columns = TF_MAX_COLUMNS,
                                    .run_wide = tf_wide_avx512,
                                    .run_supers_wide = tf_supers_wide_avx512,
                                    .wide_from = {4, 9},
                                    .supers_wide_from = 8,
                                    .supported = supported,
                                    .peak = peak};
