/* AVX2, compiled twice: with TF_AVXVNNI for CPUs that have the 256-bit dot product, and without, where
 * vpmaddubsw takes its place. That one adds pairs in 16 bits and saturates, so the codes are fed to it in
 * parts that can be added up for a while before they are widened: all 8 chunks of a block in nibbles
 * (15 * 128 * 16 = 30720), two chunks in 6 bits (63 * 128 * 4 = 32256). The integers come out the same. */
#include <immintrin.h>
#include <math.h>

#include "kernels.h"

#define INLINE static inline __attribute__((always_inline))
/* Keeps GCC from loading or adding up what comes later first: there are 16 registers. */
#define IN_ORDER(v) __asm__ volatile("" : "+x"(v))
enum { MAX_COLUMNS = 4, AHEAD = 48 /* blocks of 32 inputs that are fetched early, as for AVX-512 */ };

INLINE __m256i and8(__m256i a, int mask) { return _mm256_and_si256(a, _mm256_set1_epi8((char)mask)); }
INLINE __m256i left(__m256i v, int by) { return _mm256_slli_epi16(v, by); }
INLINE __m256i right(__m256i v, int by) { return _mm256_srli_epi16(v, by); }
INLINE __m256i load(const uint8_t *from) { return _mm256_loadu_si256((const __m256i *)from); }
INLINE __m256i broadcast(const int8_t *q) { return _mm256_set1_epi32(*(const int32_t *)(const void *)q); }

/* A panel's planes. */
typedef struct streams {
    const uint8_t *p4, *p6, *p8;
} streams;

/* What the planes hold of 16 inputs ("a unit") and 8 rows. */
typedef struct loaded {
    __m256i four[2]; /* chunks 0 and 1, 2 and 3 */
    __m256i six;
    __m256i rest[2]; /* the lower nibbles of chunks 0 and 2, 1 and 3; of 6 bits with anything in their last 2 bits */
} loaded;

INLINE loaded load_unit(const streams *p, int64_t unit, int half, int bits) {
    loaded l = {.four = {load(p->p4 + unit * 128 + half * 32), load(p->p4 + unit * 128 + 64 + half * 32)}};
    l.six = bits >= 6 ? load(p->p6 + unit * 64 + half * 32) : l.four[0];
    l.rest[0] = left(l.six, 2);
    l.rest[1] = l.six;
    if (bits == 8) {
        const __m256i eight = load(p->p8 + unit * 64 + half * 32);
        l.rest[0] = _mm256_or_si256(and8(l.rest[0], 0xcc), and8(eight, 0x33));
        l.rest[1] = _mm256_or_si256(and8(l.rest[1], 0xcc), and8(right(eight, 2), 0x33));
    }
    return l;
}

INLINE __m256i low_nibble(const loaded *l, int c, int bits) {
    return and8(c < 2 ? l->rest[c % 2] : right(l->rest[c % 2], 4), bits == 6 ? 0x0c : 0x0f);
}

#ifdef TF_AVXVNNI
INLINE __m256i code(const loaded *l, int c, int bits) {
    const __m256i high = and8(c % 2 ? l->four[c / 2] : left(l->four[c / 2], 4), 0xf0);
    return bits == 4 ? high : _mm256_or_si256(high, low_nibble(l, c, bits));
}

/* Dot products of both halves of a panel over block b: twice the chains of one half, and x is loaded once. */
INLINE void block_dots(const streams *p, int64_t b, const int8_t *q, __m256i (*dots)[MAX_COLUMNS], int bits, int n) {
    for (int j = 0; j < n; j++) {
        dots[0][j] = dots[1][j] = _mm256_setzero_si256();
    }
    for (int u = 0; u < 2; u++) {
        const loaded first = load_unit(p, b * 2 + u, 0, bits), second = load_unit(p, b * 2 + u, 1, bits);
        for (int c = 0; c < 4; c++) {
            const __m256i w0 = code(&first, c, bits), w1 = code(&second, c, bits);
            for (int j = 0; j < n; j++) {
                const __m256i x = broadcast(q + ((b * 8 + u * 4 + c) * n + j) * 4);
                dots[0][j] = _mm256_dpbusd_avx_epi32(dots[0][j], w0, x);
                dots[1][j] = _mm256_dpbusd_avx_epi32(dots[1][j], w1, x);
                IN_ORDER(dots[1][j]);
            }
        }
    }
}
#else
INLINE __m256i high_nibble(const loaded *l, int c) {
    return and8(c % 2 ? right(l->four[c / 2], 4) : l->four[c / 2], 0x0f);
}

INLINE __m256i six_bits(const loaded *l, int c) {
    const __m256i high = c % 2 ? right(l->four[c / 2], 2) : left(l->four[c / 2], 2);
    return _mm256_or_si256(and8(high, 0x3c), and8(right(l->six, 2 * c), 0x03));
}

/* Adds codes of 4 bits to sums of 16 bits. */
INLINE void add_nibbles(__m256i codes, const int8_t *q, __m256i *sums, int n) {
#pragma GCC unroll 4
    for (int j = 0; j < n; j++) {
        sums[j] = _mm256_add_epi16(sums[j], _mm256_maddubs_epi16(codes, broadcast(q + j * 4)));
        IN_ORDER(sums[j]);
    }
}

/* Adds two chunks of 6 bits. */
INLINE void add_six_bits(__m256i code0, __m256i code1, const int8_t *q, __m256i *dots, int n) {
#pragma GCC unroll 4
    for (int j = 0; j < n; j++) {
        const __m256i first = _mm256_maddubs_epi16(code0, broadcast(q + j * 4));
        const __m256i sums = _mm256_add_epi16(first, _mm256_maddubs_epi16(code1, broadcast(q + (n + j) * 4)));
        dots[j] = _mm256_add_epi32(dots[j], _mm256_madd_epi16(sums, _mm256_set1_epi16(4)));
        IN_ORDER(dots[j]);
    }
}

/* Dot products of half a panel over block b. */
INLINE void half_dots(const streams *p, int64_t b, int half, const int8_t *q, __m256i *dots, int bits, int n) {
    __m256i low[MAX_COLUMNS];
#pragma GCC unroll 4
    for (int j = 0; j < n; j++) {
        low[j] = dots[j] = _mm256_setzero_si256();
    }
#pragma GCC unroll 2
    for (int u = 0; u < 2; u++) {
        const loaded l = load_unit(p, b * 2 + u, half, bits);
        const int8_t *at = q + (b * 8 + u * 4) * n * 4;
#pragma GCC unroll 4
        for (int c = 0; c < 4; c++, at += n * 4) {
            if (bits == 6 && c % 2 == 0) {
                add_six_bits(six_bits(&l, c), six_bits(&l, c + 1), at, dots, n);
            }
            if (bits != 6) {
                add_nibbles(high_nibble(&l, c), at, dots, n);
            }
            if (bits == 8) {
                add_nibbles(low_nibble(&l, c, bits), at, low, n);
            }
        }
    }
#pragma GCC unroll 4
    for (int j = 0; bits != 6 && j < n; j++) {
        dots[j] = _mm256_madd_epi16(dots[j], _mm256_set1_epi16(16));
        if (bits == 8) {
            dots[j] = _mm256_add_epi32(dots[j], _mm256_madd_epi16(low[j], _mm256_set1_epi16(1)));
        }
    }
}

INLINE void block_dots(const streams *p, int64_t b, const int8_t *q, __m256i (*dots)[MAX_COLUMNS], int bits, int n) {
    half_dots(p, b, 0, q, dots[0], bits, n);
    __asm__ volatile("" : "+r"(q)); /* or GCC keeps what it has loaded of q, in memory */
    half_dots(p, b, 1, q, dots[1], bits, n);
}
#endif

/* Adds block b, as x->q or x->low has it, to the sums of n columns. */
INLINE void block_sums(const streams *p, int64_t b, const tf_columns *x, const int8_t *q, float factor,
                       __m256 (*sums)[MAX_COLUMNS], int bits, int n) {
    __m256i dots[2][MAX_COLUMNS];
    block_dots(p, b, q, dots, bits, n);
    for (int j = 0; j < n; j++) {
        const __m256 scale = _mm256_set1_ps(x->scale[b * n + j] * factor);
        for (int half = 0; half < 2; half++) {
            sums[half][j] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(dots[half][j]), scale, sums[half][j]);
        }
    }
}

INLINE void prefetch(const streams *p, int64_t b, int bits) {
    for (int line = 0; line < 4; line++) {
        _mm_prefetch((const char *)p->p4 + b * 256 + line * 64, _MM_HINT_T0);
    }
    for (int line = 0; line < 2; line++) {
        if (bits >= 6) {
            _mm_prefetch((const char *)p->p6 + b * 128 + line * 64, _MM_HINT_T0);
        }
        if (bits == 8) {
            _mm_prefetch((const char *)p->p8 + b * 128 + line * 64, _MM_HINT_T0);
        }
    }
}

INLINE void panel_n(const tf_planes *planes, int64_t panel, const tf_columns *x, float *tile, int bits, int n) {
    const int64_t groups = tf_groups(planes->width, planes->group);
    const int64_t blocks = planes->width / TF_BLOCK, group_blocks = planes->group / TF_BLOCK;
    const uint8_t *p4 = planes->plane4 + panel * planes->width * 8;
    const streams p = {p4, bits >= 6 ? planes->plane6 + panel * planes->width * 4 : p4,
                       bits == 8 ? planes->plane8 + panel * planes->width * 4 : p4};
    const int64_t groups_ahead = AHEAD / group_blocks;
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
        _mm_prefetch((const char *)(scales + (g + groups_ahead) * TF_PANEL_ROWS), _MM_HINT_T0);
        for (; b < end; b++) {
            prefetch(&p, b + AHEAD, bits);
            block_sums(&p, b, x, x->q, 1.0f, sums, bits, n);
            if (tf_has_low(x, b)) {
                streams again = p;
                /* or GCC would keep all codes for the case that they are used again */
                __asm__ volatile("" : "+r"(again.p4), "+r"(again.p6), "+r"(again.p8));
                block_sums(&again, b, x, x->low, TF_LOW, sums, bits, n);
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

const tf_kernel tf_kernel_avxvnni = {.name = "avx-vnni",
                                     .run = run,
                                     .run_supers = tf_supers_avxvnni,
                                     .quantize = quantize,
                                     .max_columns = MAX_COLUMNS,
                                     .supported = supported};
#else
static bool supported(void) { return has_avx2(); }

const tf_kernel tf_kernel_avx2 = {.name = "avx2",
                                  .run = run,
                                  .run_supers = tf_supers_avx2,
                                  .quantize = quantize,
                                  .max_columns = MAX_COLUMNS,
                                  .supported = supported};
#endif
