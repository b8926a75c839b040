/* AVX2, compiled twice: with TF_AVXVNNI for CPUs that have the 256-bit dot product, and without, where
 * vpmaddubsw takes its place. That one adds pairs in 16 bits and saturates, so the codes are fed to it in
 * parts of which two chunks cannot reach 32767: 6 bits (63 * 128 * 4 = 32256), or 4, and 2 more for 8 bits.
 * The integers come out the same. */
#include <immintrin.h>
#include <math.h>

#include "kernels.h"

#define INLINE static inline __attribute__((always_inline))
enum { MAX_COLUMNS = 4 };

INLINE __m256i and8(__m256i a, int mask) { return _mm256_and_si256(a, _mm256_set1_epi8((char)mask)); }

/* Chunk c of 4-bit codes, in bits 0-3. */
INLINE __m256i four_bits(__m256i four, int c) { return and8(c % 2 ? _mm256_srli_epi16(four, 4) : four, 0x0f); }

/* Chunk c of a 2-bit plane, in bits 0-1. */
INLINE __m256i two_bits(__m256i two, int c) { return and8(_mm256_srli_epi16(two, 2 * c), 0x03); }

INLINE __m256i load(const uint8_t *from) { return _mm256_loadu_si256((const __m256i *)from); }

/* One chunk of 8 rows. codes = top << shift() | low. */
typedef struct codes {
    __m256i top, low;
} codes;

#ifdef TF_AVXVNNI
INLINE int shift(int bits) {
    (void)bits;
    return 0; /* the dot product takes whole bytes */
}

INLINE codes unpack(__m256i a, __m256i b, __m256i d, int c, int bits) {
    __m256i all = and8(c % 2 ? a : _mm256_slli_epi16(a, 4), 0xf0);
    if (bits >= 6) {
        const __m256i six = c == 0 ? _mm256_slli_epi16(b, 2) : _mm256_srli_epi16(b, 2 * (c - 1));
        all = _mm256_or_si256(all, and8(six, 0x0c));
    }
    if (bits == 8) {
        all = _mm256_or_si256(all, two_bits(d, c));
    }
    return (codes){all, _mm256_setzero_si256()};
}

/* Adds two chunks to a dot product. */
INLINE __m256i multiply(__m256i dot, const codes *w, __m256i x0, __m256i x1, int bits) {
    (void)bits;
    return _mm256_dpbusd_avx_epi32(_mm256_dpbusd_avx_epi32(dot, w[0].top, x0), w[1].top, x1);
}
#else
/* What is left to shift when a block is done. */
INLINE int shift(int bits) { return bits == 4 ? 4 : bits == 6 ? 2 : 0; }

INLINE codes unpack(__m256i a, __m256i b, __m256i d, int c, int bits) {
    codes out = {four_bits(a, c), _mm256_setzero_si256()};
    if (bits >= 6) {
        out.top = _mm256_or_si256(_mm256_slli_epi16(out.top, 2), two_bits(b, c));
    }
    if (bits == 8) {
        out.low = two_bits(d, c);
    }
    return out;
}

/* Adds two chunks to a dot product. */
INLINE __m256i multiply(__m256i dot, const codes *w, __m256i x0, __m256i x1, int bits) {
    const __m256i ones = _mm256_set1_epi16(1);
    const __m256i top = _mm256_add_epi16(_mm256_maddubs_epi16(w[0].top, x0), _mm256_maddubs_epi16(w[1].top, x1));
    __m256i sum = _mm256_madd_epi16(top, ones);
    if (bits == 8) {
        const __m256i low = _mm256_add_epi16(_mm256_maddubs_epi16(w[0].low, x0), _mm256_maddubs_epi16(w[1].low, x1));
        sum = _mm256_add_epi32(_mm256_slli_epi32(sum, 2), _mm256_madd_epi16(low, ones));
    }
    return _mm256_add_epi32(dot, sum);
}
#endif

/* A panel's planes. */
typedef struct streams {
    const uint8_t *p4, *p6, *p8;
} streams;

/* Dot products of both halves of a panel over block b: twice the chains of one half, and x is loaded once. */
INLINE void block_dots(const streams *p, int64_t b, const int8_t *q, __m256i (*dots)[MAX_COLUMNS], int bits, int n) {
    for (int j = 0; j < n; j++) {
        dots[0][j] = dots[1][j] = _mm256_setzero_si256();
    }
    for (int pair = 0; pair < 4; pair++) {
        const int64_t unit = b * 2 + pair / 2, four = unit * 128 + pair % 2 * 64;
        codes w[2][2];
        for (int half = 0; half < 2; half++) {
            const __m256i a = load(p->p4 + four + half * 32);
            const __m256i six = bits >= 6 ? load(p->p6 + unit * 64 + half * 32) : a;
            const __m256i eight = bits == 8 ? load(p->p8 + unit * 64 + half * 32) : a;
            w[half][0] = unpack(a, six, eight, pair % 2 * 2, bits);
            w[half][1] = unpack(a, six, eight, pair % 2 * 2 + 1, bits);
        }
        for (int j = 0; j < n; j++) {
            const int8_t *at = q + ((b * 8 + pair * 2) * n + j) * 4;
            const __m256i x0 = _mm256_set1_epi32(*(const int32_t *)(const void *)at);
            const __m256i x1 = _mm256_set1_epi32(*(const int32_t *)(const void *)(at + n * 4));
            dots[0][j] = multiply(dots[0][j], w[0], x0, x1, bits);
            dots[1][j] = multiply(dots[1][j], w[1], x0, x1, bits);
        }
    }
}

/* Adds block b, as x->q or x->low has it, to the sums of n columns. */
INLINE void block_sums(const streams *p, int64_t b, const tf_columns *x, const int8_t *q, float factor,
                       __m256 (*sums)[MAX_COLUMNS], int bits, int n) {
    __m256i dots[2][MAX_COLUMNS];
    block_dots(p, b, q, dots, bits, n);
    for (int j = 0; j < n; j++) {
        const __m256 scale = _mm256_set1_ps(x->scale[b * n + j] * factor);
        for (int half = 0; half < 2; half++) {
            const __m256i dot = _mm256_slli_epi32(dots[half][j], shift(bits));
            sums[half][j] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(dot), scale, sums[half][j]);
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
    __m256 results[2][MAX_COLUMNS], sums[2][MAX_COLUMNS];
    for (int j = 0; j < n; j++) {
        results[0][j] = results[1][j] = _mm256_setzero_ps();
    }
    for (int64_t g = 0, b = 0; g < groups; g++) {
        const int64_t end = (g + 1) * group_blocks < blocks ? (g + 1) * group_blocks : blocks;
        for (int j = 0; j < n; j++) {
            sums[0][j] = sums[1][j] = _mm256_set1_ps(x->offset[g * n + j]);
        }
        for (; b < end; b++) {
            block_sums(&p, b, x, x->q, 1.0f, sums, bits, n);
            if (tf_has_low(x, b)) {
                block_sums(&p, b, x, x->low, TF_LOW, sums, bits, n);
            }
        }
        for (int half = 0; half < 2; half++) {
            const __m128i *from = (const __m128i *)(scales + g * TF_PANEL_ROWS + half * 8);
            const __m256 scale = _mm256_cvtph_ps(_mm_loadu_si128(from));
            for (int j = 0; j < n; j++) {
                results[half][j] = _mm256_fmadd_ps(sums[half][j], scale, results[half][j]);
            }
        }
    }
    for (int j = 0; j < n; j++) {
        _mm256_storeu_ps(tile + j * TF_PANEL_ROWS, results[0][j]);
        _mm256_storeu_ps(tile + j * TF_PANEL_ROWS + 8, results[1][j]);
    }
}

INLINE void panel_bits(const tf_planes *planes, int64_t panel, const tf_columns *x, float *tile, int bits) {
    switch (x->n) {
        case 1: panel_n(planes, panel, x, tile, bits, 1); break;
        case 2: panel_n(planes, panel, x, tile, bits, 2); break;
        case 3: panel_n(planes, panel, x, tile, bits, 3); break;
        default: panel_n(planes, panel, x, tile, bits, 4); break;
    }
}

static void run(const tf_planes *planes, int64_t panel, const tf_columns *x, float *tile) {
    switch (planes->bits) {
        case 4: panel_bits(planes, panel, x, tile, 4); break;
        case 6: panel_bits(planes, panel, x, tile, 6); break;
        default: panel_bits(planes, panel, x, tile, 8); break;
    }
}

/* The low bytes of 8 integers. */
INLINE __m128i low_bytes(__m256i v) {
    const __m256i masked = _mm256_and_si256(v, _mm256_set1_epi32(0xff));
    const __m128i words = _mm_packus_epi32(_mm256_castsi256_si128(masked), _mm256_extracti128_si256(masked, 1));
    return _mm_packus_epi16(words, words);
}

/* Sum of 16 signed bytes. */
INLINE int32_t sum_16(const int8_t *codes) {
    const __m128i shifted = _mm_xor_si128(_mm_loadu_si128((const __m128i *)codes), _mm_set1_epi8((char)0x80));
    const __m128i sums = _mm_sad_epu8(shifted, _mm_setzero_si128());
    return _mm_cvtsi128_si32(sums) + _mm_extract_epi32(sums, 2) - 16 * 128;
}

static float quantize(const float *x, int8_t *high, int8_t *low, int32_t *sums) {
    const __m256 sign = _mm256_set1_ps(-0.0f);
    __m256 most = _mm256_setzero_ps(), odd = _mm256_setzero_ps();
    for (int i = 0; i < TF_BLOCK; i += 8) {
        const __m256 v = _mm256_loadu_ps(x + i);
        most = _mm256_max_ps(_mm256_andnot_ps(sign, v), most);
        odd = _mm256_or_ps(odd, _mm256_cmp_ps(v, v, _CMP_UNORD_Q));
    }
    float parts[8], largest = 0.0f;
    _mm256_storeu_ps(parts, most);
    for (int i = 0; i < 8; i++) {
        largest = parts[i] > largest ? parts[i] : largest;
    }
    largest = _mm256_movemask_ps(odd) ? NAN : largest;
    const __m256 inverse = _mm256_set1_ps(largest > 0.0f ? TF_LARGEST / largest : 0.0f);
    for (int i = 0; i < TF_BLOCK; i += 8) {
        const __m256 v = _mm256_mul_ps(_mm256_loadu_ps(x + i), inverse);
        const __m256i ordered = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_ORD_Q));
        const __m256i code = _mm256_and_si256(_mm256_cvtps_epi32(v), ordered);
        const __m256i top = _mm256_srai_epi32(_mm256_add_epi32(code, _mm256_set1_epi32(128)), 8);
        _mm_storel_epi64((__m128i *)(high + i), low_bytes(top));
        _mm_storel_epi64((__m128i *)(low + i), low_bytes(code)); /* the low byte is code - 256 top */
    }
    sums[0] = tf_pack_sums(sum_16(high), sum_16(high + 16));
    sums[1] = tf_pack_sums(sum_16(low), sum_16(low + 16));
    return largest / TF_LARGEST;
}

static bool has_avx2(void) {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}

#ifdef TF_AVXVNNI
/* __builtin_cpu_supports() of GCC 12 does not know AVX-VNNI: CPUID leaf 7.1, EAX bit 4. */
static bool supported(void) {
    uint32_t a = 7, b = 0, c = 1, d = 0;
    __asm__("cpuid" : "+a"(a), "=b"(b), "+c"(c), "=d"(d));
    return has_avx2() && (a >> 4 & 1);
}

const tf_kernel tf_kernel_avxvnni = {"avx-vnni", run, tf_supers_avxvnni, quantize, MAX_COLUMNS,
                                     NULL,       0,   supported,         NULL};
#else
static bool supported(void) { return has_avx2(); }

const tf_kernel tf_kernel_avx2 = {"avx2", run, tf_supers_avx2, quantize, MAX_COLUMNS, NULL, 0, supported, NULL};
#endif
