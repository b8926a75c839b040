/* AVX2 and AVX-VNNI (kernel_avx2.c), bases of Q2_K to Q6_K: 8 rows at a time, a lane is a row. `bits` and `n` are
 * constants wherever they are passed on. */
#include <immintrin.h>

#include "kernels.h"

#define INLINE static inline __attribute__((always_inline))
enum { MAX_COLUMNS = 4, PREFETCH = 6144 /* bytes ahead of the reader, as in kernel_avx512.c */ };

INLINE __m256i load(const uint8_t *from) { return _mm256_loadu_si256((const __m256i *)from); }
INLINE __m256i and8(__m256i a, int mask) { return _mm256_and_si256(a, _mm256_set1_epi8((char)mask)); }

/* Moves bits up, or down if `by` is negative; what crosses into other bytes is masked by the caller. */
INLINE __m256i shift(__m256i v, int by) {
    return by > 0 ? _mm256_slli_epi16(v, by) : by < 0 ? _mm256_srli_epi16(v, -by) : v;
}

/* Four chunks of 3 bits: those that share nibbles are joined before they are taken apart. */
INLINE void unpack_3(__m256i two, __m256i one, int half, __m256i *codes) {
    const __m256i even = _mm256_or_si256(and8(two, 0x33), and8(shift(one, half == 0 ? 0 : 2), 0x44));
    const __m256i odd = _mm256_or_si256(and8(shift(two, -2), 0x33), and8(shift(one, half == 0 ? -1 : 1), 0x44));
    codes[0] = and8(even, 7);
    codes[1] = and8(odd, 7);
    codes[2] = and8(shift(even, -4), 7);
    codes[3] = and8(shift(odd, -4), 7);
}

/* Codes of the 4 chunks of a sub-block of 16 inputs. block: of the first of the 8 rows. */
INLINE void unpack(const uint8_t *block, int half, __m256i *codes, int bits) {
    const uint8_t *high = block + tf_high_planes(bits);
    if (bits <= 3) {
        const __m256i two = load(block + half * 64);
        if (bits == 3) {
            unpack_3(two, load(high), half, codes);
        }
        for (int c = 0; bits == 2 && c < 4; c++) {
            codes[c] = and8(shift(two, -2 * c), 3);
        }
        return;
    }
    const __m256i more = bits == 4 ? _mm256_setzero_si256() : load(bits == 5 ? high : high + half * 64);
    for (int c = 0; c < 4; c++) {
        const __m256i low = shift(load(block + half * 128 + c / 2 * 64), c % 2 * -4);
        const int up = bits == 5 ? 4 - tf_high_bit(half * 4 + c) : 4 - 2 * c; /* to bit 4 */
        codes[c] = and8(low, 15);
        if (bits != 4) {
            codes[c] = _mm256_or_si256(codes[c], and8(shift(more, up), bits == 5 ? 0x10 : 0x30));
        }
    }
}

/* Adds two chunks to a dot product. Without VNNI they are added in 16 bits: 63 * 128 * 4 still fits. */
INLINE __m256i multiply(__m256i dot, const __m256i *codes, __m256i x0, __m256i x1) {
#ifdef TF_AVXVNNI
    return _mm256_dpbusd_avx_epi32(_mm256_dpbusd_avx_epi32(dot, codes[0], x0), codes[1], x1);
#else
    const __m256i sum = _mm256_add_epi16(_mm256_maddubs_epi16(codes[0], x0), _mm256_maddubs_epi16(codes[1], x1));
    return _mm256_add_epi32(dot, _mm256_madd_epi16(sum, _mm256_set1_epi16(1)));
#endif
}

/* Adds a sub-block to the dot products of n columns. */
INLINE void add_dots(const uint8_t *block, int half, const int8_t *q, __m256i *dots, int bits, int n) {
    __m256i codes[4];
    unpack(block, half, codes, bits);
    for (int c = 0; c < 4; c += 2) {
        for (int j = 0; j < n; j++) {
            const int8_t *at = q + ((half * 4 + c) * n + j) * 4;
            dots[j] = multiply(dots[j], codes + c, _mm256_set1_epi32(*(const int32_t *)(const void *)at),
                               _mm256_set1_epi32(*(const int32_t *)(const void *)(at + n * 4)));
        }
    }
}

/* What a dot product with codes begins with: the part that their offset takes off. The sums are A | B << 16. */
INLINE void begin_dots(const int32_t *column_sums, int half, __m256i *dots, int bits, int n) {
    const int32_t offset = tf_super_signed(bits) ? -(1 << (bits - 1)) : 0;
    for (int j = 0; j < n; j++) {
        const __m256i factors = _mm256_set1_epi32(half == 0 ? offset & 0xffff : (int32_t)((uint32_t)offset << 16));
        dots[j] = offset == 0 ? _mm256_setzero_si256() : _mm256_madd_epi16(_mm256_set1_epi32(column_sums[j]), factors);
    }
}

/* Scales and mins of a block. */
typedef struct factors {
    __m256i pairs, minima; /* scales of A | B << 16; mins likewise */
    __m256 first, second;  /* scales, where dot products do not fit 16 bits */
} factors;

INLINE factors load_factors(const uint8_t *scales, int bits) {
    const __m128i bytes = _mm_loadu_si128((const __m128i *)scales);
    const __m256i zero = _mm256_setzero_si256();
    factors f = {zero, zero, _mm256_setzero_ps(), _mm256_setzero_ps()};
    if (tf_super_signed(bits)) {
        f.pairs = _mm256_cvtepi8_epi16(bytes);
        f.first = _mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_slli_epi32(f.pairs, 16), 16));
        f.second = _mm256_cvtepi32_ps(_mm256_srai_epi32(f.pairs, 16));
        return f;
    }
    const __m256i both = _mm256_cvtepu16_epi32(bytes);
    if (bits == 2) {
        const __m256i spread = _mm256_or_si256(both, _mm256_slli_epi32(both, 8)), nibble = _mm256_set1_epi32(0xf000f);
        f.pairs = _mm256_and_si256(spread, nibble);
        f.minima = _mm256_and_si256(_mm256_srli_epi32(spread, 4), nibble);
        return f;
    }
    const __m256i minimum = _mm256_srli_epi32(both, 8);
    f.minima = _mm256_or_si256(minimum, _mm256_slli_epi32(minimum, 16));
    f.first = _mm256_cvtepi32_ps(_mm256_and_si256(both, _mm256_set1_epi32(0xff)));
    return f;
}

/* Product of a block from the dot products of its sub-blocks, of both together if there is one scale. */
INLINE __m256 combine(const factors *f, __m256i first, __m256i second, int bits) {
    if (bits <= 3) {
        const __m256i pairs = _mm256_blend_epi16(first, _mm256_slli_epi32(second, 16), 0xaa);
        return _mm256_cvtepi32_ps(_mm256_madd_epi16(pairs, f->pairs));
    }
    const __m256 product = _mm256_mul_ps(_mm256_cvtepi32_ps(first), f->first);
    return bits == 6 ? _mm256_fmadd_ps(_mm256_cvtepi32_ps(second), f->second, product) : product;
}

/* Block b of a super, 8 rows from part * 8 on; q, column_sums: of its 32 inputs, high or low. */
INLINE void add_block(const uint8_t *super, int b, int part, const int8_t *q, const int32_t *column_sums,
                      const float *scale, float factor, __m256 *sums, __m256 *mins, int bits, int n) {
    const uint8_t *block = super + b * 64 * bits + part * 32;
    const factors f = load_factors(super + tf_super_scales(bits) + b * 32 + part * 16, bits);
    const bool one_scale = bits == 4 || bits == 5;
    __m256i first[MAX_COLUMNS], second[MAX_COLUMNS];
    begin_dots(column_sums, 0, first, bits, n);
    begin_dots(column_sums, 1, second, bits, n);
    add_dots(block, 0, q, first, bits, n);
    add_dots(block, 1, q, one_scale ? first : second, bits, n);
    for (int j = 0; j < n; j++) {
        const __m256 unit = _mm256_set1_ps(scale[j] * factor);
        sums[j] = _mm256_fmadd_ps(combine(&f, first[j], second[j], bits), unit, sums[j]);
        if (!tf_super_signed(bits)) {
            const __m256i minimum = _mm256_madd_epi16(_mm256_set1_epi32(column_sums[j]), f.minima);
            mins[j] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(minimum), unit, mins[j]);
        }
    }
}

INLINE void prefetch(const uint8_t *super, int b, int bits) {
    const uint8_t *at = super + b * (tf_super_bytes(bits) / 8) + PREFETCH;
    for (int line = 0; line <= bits; line++) {
        _mm_prefetch((const char *)at + line * 64, _MM_HINT_T0);
    }
}

/* Of one or both halves of a panel. */
typedef __m256 halves[2][MAX_COLUMNS];

INLINE void clear(halves v, int n) {
    for (int j = 0; j < n; j++) {
        v[0][j] = v[1][j] = _mm256_setzero_ps();
    }
}

/* `parts` halves of a panel, from `from` on. */
INLINE void add_super(const uint8_t *super, int64_t s, int from, const tf_columns *x, halves results, int parts,
                      int bits, int n) {
    halves sums, mins;
    clear(sums, n);
    clear(mins, n);
    for (int b = 0; b < TF_SUPER / TF_BLOCK; b++) {
        const int64_t block = s * (TF_SUPER / TF_BLOCK) + b, at = block * n, q = block * TF_BLOCK * n;
        const bool has_low = tf_has_low(x, block);
        prefetch(super, b, bits);
        for (int p = 0; p < parts; p++) {
            add_block(super, b, from + p, x->q + q, x->sums + at, x->scale + at, 1.0f, sums[p], mins[p], bits, n);
            if (has_low) {
                add_block(super, b, from + p, x->low + q, x->low_sums + at, x->scale + at, TF_LOW, sums[p], mins[p],
                          bits, n);
            }
        }
    }
    for (int p = 0; p < parts; p++) {
        const __m128i *at = (const __m128i *)(super + tf_super_d(bits)) + from + p;
        const __m256 d = _mm256_mul_ps(_mm256_cvtph_ps(_mm_loadu_si128(at)), _mm256_set1_ps(128.0f));
        const __m256 dmin = _mm256_mul_ps(_mm256_cvtph_ps(_mm_loadu_si128(at + 2)), _mm256_set1_ps(-128.0f));
        for (int j = 0; j < n; j++) {
            results[p][j] = _mm256_fmadd_ps(d, sums[p][j], results[p][j]);
            if (!tf_super_signed(bits)) {
                results[p][j] = _mm256_fmadd_ps(dmin, mins[p][j], results[p][j]);
            }
        }
    }
}

/* One pass reads memory once and in order; of several columns two passes are faster, because the sums of both
 * halves do not fit the registers. */
INLINE void panel_n(const tf_base *base, int64_t panel, const tf_columns *x, float *tile, int bits, int n) {
    const int64_t supers = base->width / TF_SUPER, bytes = tf_super_bytes(bits);
    const uint8_t *super = base->supers + panel * supers * bytes;
    const int parts = n == 1 ? 2 : 1;
    for (int from = 0; from < 2; from += parts) {
        halves results;
        clear(results, n);
        for (int64_t s = 0; s < supers; s++) {
            add_super(super + s * bytes, s, from, x, results, parts, bits, n);
        }
        for (int i = 0; i < parts * n; i++) {
            _mm256_storeu_ps(tile + i % n * TF_PANEL_ROWS + (from + i / n) * 8, results[i / n][i % n]);
        }
    }
}

INLINE void panel_bits(const tf_base *base, int64_t panel, const tf_columns *x, float *tile, int bits) {
    switch (x->n) {
        case 1: panel_n(base, panel, x, tile, bits, 1); break;
        case 2: panel_n(base, panel, x, tile, bits, 2); break;
        case 3: panel_n(base, panel, x, tile, bits, 3); break;
        default: panel_n(base, panel, x, tile, bits, 4); break;
    }
}

#ifdef TF_AVXVNNI
#define RUN tf_supers_avxvnni
#else
#define RUN tf_supers_avx2
#endif

void RUN(const tf_base *base, int64_t panel, const tf_columns *x, float *tile) {
    switch (base->bits) {
        case 2: panel_bits(base, panel, x, tile, 2); break;
        case 3: panel_bits(base, panel, x, tile, 3); break;
        case 4: panel_bits(base, panel, x, tile, 4); break;
        case 5: panel_bits(base, panel, x, tile, 5); break;
        default: panel_bits(base, panel, x, tile, 6); break;
    }
}
