/* AVX-512 VNNI: one 64-byte register holds a chunk (16 rows x 4 inputs), vpdpbusd multiplies it by 4
 * broadcast inputs of each column. */
#include <immintrin.h>

#include "kernels.h"

#define INLINE static inline __attribute__((always_inline))
enum { PREFETCH = 6144 }; /* bytes ahead of the reader; 4-12 KiB measured alike, none is slower */

/* Bits 4-7 of chunk c (0 or 1 of the 64 bytes). */
INLINE __m512i high(__m512i four, int c) {
    const __m512i mask = _mm512_set1_epi8((char)0xf0);
    return _mm512_and_si512(c == 0 ? _mm512_slli_epi16(four, 4) : four, mask);
}

/* The 2 bits of chunk c (0-3), moved to bit `to`; the neighbours' bits are left in. */
INLINE __m512i two_bits(__m512i two, int c, int to) {
    const int left = to - 2 * c;
    return left > 0 ? _mm512_slli_epi16(two, (unsigned)left) : left < 0 ? _mm512_srli_epi16(two, (unsigned)-left) : two;
}

/* codes | (extra & mask) in one instruction. */
INLINE __m512i or_masked(__m512i codes, __m512i extra, char mask) {
    return _mm512_ternarylogic_epi64(codes, extra, _mm512_set1_epi8(mask), 0xf8);
}

INLINE __m512i unpack(const __m512i *a, __m512i b, __m512i d, int c, int bits) {
    __m512i codes = high(a[c / 2], c % 2);
    if (bits >= 6) {
        codes = or_masked(codes, two_bits(b, c, 2), 0x0c);
    }
    if (bits == 8) {
        codes = or_masked(codes, two_bits(d, c, 0), 0x03);
    }
    return codes;
}

/* Adds 16 inputs (4 chunks) to the dot products of n columns. */
INLINE void unit(const uint8_t *p4, const uint8_t *p6, const uint8_t *p8, const int8_t *q, __m512i *dots, int bits,
                 int n) {
    const __m512i a[2] = {_mm512_loadu_si512(p4), _mm512_loadu_si512(p4 + 64)};
    const __m512i b = bits >= 6 ? _mm512_loadu_si512(p6) : a[0];
    const __m512i d = bits == 8 ? _mm512_loadu_si512(p8) : a[0];
    for (int c = 0; c < 4; c++) {
        const __m512i codes = unpack(a, b, d, c, bits);
        for (int j = 0; j < n; j++) {
            const __m512i x = _mm512_set1_epi32(*(const int32_t *)(q + (c * n + j) * 4));
            dots[j] = _mm512_dpbusd_epi32(dots[j], codes, x);
        }
    }
}

INLINE void panel_n(const tf_planes *planes, int64_t panel, const tf_columns *x, float *tile, int bits, int n) {
    const int64_t groups = tf_groups(planes->width, planes->group);
    const int64_t blocks = planes->width / TF_BLOCK, group_blocks = planes->group / TF_BLOCK;
    const uint8_t *p4 = planes->plane4 + panel * planes->width * 8;
    const uint8_t *p6 = bits >= 6 ? planes->plane6 + panel * planes->width * 4 : p4;
    const uint8_t *p8 = bits == 8 ? planes->plane8 + panel * planes->width * 4 : p4;
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
        for (; b < end; b++) {
            __m512i dots[TF_MAX_COLUMNS];
            for (int j = 0; j < n; j++) {
                dots[j] = _mm512_setzero_si512();
            }
            for (int u = 0; u < 2; u++) {
                const int64_t at = b * 2 + u;
                _mm_prefetch((const char *)(p4 + at * 128 + PREFETCH), _MM_HINT_T0);
                _mm_prefetch((const char *)(p4 + at * 128 + 64 + PREFETCH), _MM_HINT_T0);
                if (bits >= 6) {
                    _mm_prefetch((const char *)(p6 + at * 64 + PREFETCH), _MM_HINT_T0);
                }
                if (bits == 8) {
                    _mm_prefetch((const char *)(p8 + at * 64 + PREFETCH), _MM_HINT_T0);
                }
                unit(p4 + at * 128, p6 + at * 64, p8 + at * 64, x->q + at * 16 * n, dots, bits, n);
            }
            for (int j = 0; j < n; j++) {
                sums[j] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dots[j]), _mm512_set1_ps(x->scale[b * n + j]), sums[j]);
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

static bool supported(void) {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vnni");
}

const tf_kernel tf_kernel_avx512 = {"avx512-vnni", run, TF_MAX_COLUMNS, supported};
