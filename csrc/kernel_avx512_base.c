/* AVX-512 VNNI, bases of Q2_K to Q6_K: a lane is a row. `bits` and `n` are constants wherever they are passed on. */
#include <immintrin.h>

#include "kernels.h"

#define INLINE static inline __attribute__((always_inline))
enum { PREFETCH = 6144 }; /* bytes ahead of the reader, as for the residual */

/* Moves bits up, or down if `by` is negative; what crosses into other bytes is masked by the caller. */
INLINE __m512i shift(__m512i v, int by) {
    return by > 0 ? _mm512_slli_epi16(v, (unsigned)by) : by < 0 ? _mm512_srli_epi16(v, (unsigned)-by) : v;
}

INLINE __m512i and8(__m512i v, int mask) { return _mm512_and_si512(v, _mm512_set1_epi8((char)mask)); }

/* Bits of `a` where the mask has ones, else of `b`. */
INLINE __m512i blend(__m512i a, __m512i b, int mask) {
    return _mm512_ternarylogic_epi64(_mm512_set1_epi8((char)mask), a, b, 0xca);
}

/* Four chunks of 3 bits: those that share nibbles are joined before they are taken apart. */
INLINE void unpack_3(__m512i two, __m512i one, int half, __m512i *codes) {
    const __m512i even = blend(two, shift(one, half == 0 ? 0 : 2), 0x33);
    const __m512i odd = blend(shift(two, -2), shift(one, half == 0 ? -1 : 1), 0x33);
    codes[0] = and8(even, 7);
    codes[1] = and8(odd, 7);
    codes[2] = and8(shift(even, -4), 7);
    codes[3] = and8(shift(odd, -4), 7);
}

/* Codes of the 4 chunks of a sub-block of 16 inputs. */
INLINE void unpack(const uint8_t *block, int half, __m512i *codes, int bits) {
    const uint8_t *high = block + tf_high_planes(bits);
    if (bits <= 3) {
        const __m512i two = _mm512_loadu_si512(block + half * 64);
        if (bits == 3) {
            unpack_3(two, _mm512_loadu_si512(high), half, codes);
        }
        for (int c = 0; bits == 2 && c < 4; c++) {
            codes[c] = and8(shift(two, -2 * c), 3);
        }
        return;
    }
    const __m512i more = bits == 4 ? _mm512_setzero_si512() : _mm512_loadu_si512(bits == 5 ? high : high + half * 64);
    for (int c = 0; c < 4; c++) {
        const __m512i low = shift(_mm512_loadu_si512(block + half * 128 + c / 2 * 64), c % 2 * -4);
        const int up = bits == 5 ? 4 - tf_high_bit(half * 4 + c) : 4 - 2 * c; /* to bit 4 */
        codes[c] = and8(bits == 4 ? low : blend(low, shift(more, up), 0x0f), (1 << bits) - 1);
    }
}

/* Adds a sub-block to the dot products of n columns. */
INLINE void add_dots(const uint8_t *block, int half, const int8_t *q, __m512i *dots, int bits, int n) {
    __m512i codes[4];
    unpack(block, half, codes, bits);
    for (int c = 0; c < 4; c++) {
        for (int j = 0; j < n; j++) {
            const __m512i x = _mm512_set1_epi32(*(const int32_t *)(const void *)(q + ((half * 4 + c) * n + j) * 4));
            dots[j] = _mm512_dpbusd_epi32(dots[j], codes[c], x);
        }
    }
}

/* What a dot product with codes begins with: the part that their offset takes off. The sums are A | B << 16. */
INLINE void begin_dots(const int32_t *column_sums, int half, __m512i *dots, int bits, int n) {
    const int32_t offset = tf_super_signed(bits) ? -(1 << (bits - 1)) : 0;
    for (int j = 0; j < n; j++) {
        const __m512i factors = _mm512_set1_epi32(half == 0 ? offset & 0xffff : (int32_t)((uint32_t)offset << 16));
        dots[j] = offset == 0 ? _mm512_setzero_si512() : _mm512_madd_epi16(_mm512_set1_epi32(column_sums[j]), factors);
    }
}

/* 16-bit pairs A | B << 16 in each lane: what vpmaddwd takes to do both sub-blocks at once. */
INLINE __m512i pair(__m512i a, __m512i b) { return _mm512_mask_mov_epi16(a, 0xaaaaaaaa, _mm512_slli_epi32(b, 16)); }

/* Scales and mins of a block. */
typedef struct factors {
    __m512i pairs, minima; /* scales of A | B << 16; mins likewise */
    __m512 first, second;  /* scales, where dot products do not fit 16 bits */
} factors;

INLINE factors load_factors(const uint8_t *scales, int bits) {
    const __m256i bytes = _mm256_loadu_si256((const __m256i *)scales);
    const __m512i zero = _mm512_setzero_si512();
    factors f = {zero, zero, _mm512_setzero_ps(), _mm512_setzero_ps()};
    if (tf_super_signed(bits)) {
        f.pairs = _mm512_cvtepi8_epi16(bytes);
        f.first = _mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(f.pairs, 16), 16));
        f.second = _mm512_cvtepi32_ps(_mm512_srai_epi32(f.pairs, 16));
        return f;
    }
    const __m512i both = _mm512_cvtepu16_epi32(bytes);
    if (bits == 2) {
        const __m512i spread = _mm512_or_si512(both, _mm512_slli_epi32(both, 8)), nibble = _mm512_set1_epi32(0xf000f);
        f.pairs = _mm512_and_si512(spread, nibble);
        f.minima = _mm512_and_si512(_mm512_srli_epi32(spread, 4), nibble);
        return f;
    }
    const __m512i minimum = _mm512_srli_epi32(both, 8);
    f.minima = _mm512_or_si512(minimum, _mm512_slli_epi32(minimum, 16));
    f.first = _mm512_cvtepi32_ps(_mm512_and_si512(both, _mm512_set1_epi32(0xff)));
    return f;
}

/* Product of a block from the dot products of its sub-blocks, of both together if there is one scale. */
INLINE __m512 combine(const factors *f, __m512i first, __m512i second, int bits) {
    if (bits <= 3) {
        return _mm512_cvtepi32_ps(_mm512_madd_epi16(pair(first, second), f->pairs));
    }
    const __m512 product = _mm512_mul_ps(_mm512_cvtepi32_ps(first), f->first);
    return bits == 6 ? _mm512_fmadd_ps(_mm512_cvtepi32_ps(second), f->second, product) : product;
}

/* Block b of a super; q, column_sums: of its 32 inputs, high or low. */
INLINE void add_block(const uint8_t *super, int b, const int8_t *q, const int32_t *column_sums, const float *scale,
                      float factor, __m512 *sums, __m512 *mins, int bits, int n) {
    const uint8_t *block = super + b * 64 * bits;
    const factors f = load_factors(super + tf_super_scales(bits) + b * 32, bits);
    const bool one_scale = bits == 4 || bits == 5;
    __m512i first[TF_MAX_COLUMNS], second[TF_MAX_COLUMNS];
    begin_dots(column_sums, 0, first, bits, n);
    begin_dots(column_sums, 1, second, bits, n);
    add_dots(block, 0, q, first, bits, n);
    add_dots(block, 1, q, one_scale ? first : second, bits, n);
    for (int j = 0; j < n; j++) {
        const __m512 unit = _mm512_set1_ps(scale[j] * factor);
        sums[j] = _mm512_fmadd_ps(combine(&f, first[j], second[j], bits), unit, sums[j]);
        if (!tf_super_signed(bits)) {
            const __m512i minimum = _mm512_madd_epi16(_mm512_set1_epi32(column_sums[j]), f.minima);
            mins[j] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(minimum), unit, mins[j]);
        }
    }
}

INLINE void prefetch(const uint8_t *super, int b, int bits) {
    const uint8_t *at = super + b * (tf_super_bytes(bits) / 8) + PREFETCH;
    for (int line = 0; line <= bits; line++) {
        _mm_prefetch((const char *)at + line * 64, _MM_HINT_T0);
    }
}

INLINE void add_super(const uint8_t *super, int64_t s, const tf_columns *x, __m512 *results, int bits, int n) {
    __m512 sums[TF_MAX_COLUMNS], mins[TF_MAX_COLUMNS];
    for (int j = 0; j < n; j++) {
        sums[j] = mins[j] = _mm512_setzero_ps();
    }
    for (int b = 0; b < TF_SUPER / TF_BLOCK; b++) {
        const int64_t block = s * (TF_SUPER / TF_BLOCK) + b, at = block * n, q = block * TF_BLOCK * n;
        prefetch(super, b, bits);
        for (int line = 0; x->next != NULL && line < 4; line++) {
            _mm_prefetch((const char *)x->next + block * 256 + line * 64, _MM_HINT_T1);
        }
        add_block(super, b, x->q + q, x->sums + at, x->scale + at, 1.0f, sums, mins, bits, n);
        if (tf_has_low(x, block)) {
            add_block(super, b, x->low + q, x->low_sums + at, x->scale + at, TF_LOW, sums, mins, bits, n);
        }
    }
    const __m256i *halves = (const __m256i *)(super + tf_super_d(bits));
    const __m512 d = _mm512_mul_ps(_mm512_cvtph_ps(_mm256_loadu_si256(halves)), _mm512_set1_ps(128.0f));
    const __m512 dmin = _mm512_mul_ps(_mm512_cvtph_ps(_mm256_loadu_si256(halves + 1)), _mm512_set1_ps(-128.0f));
    for (int j = 0; j < n; j++) {
        results[j] = _mm512_fmadd_ps(d, sums[j], results[j]);
        if (!tf_super_signed(bits)) {
            results[j] = _mm512_fmadd_ps(dmin, mins[j], results[j]);
        }
    }
}

INLINE void panel_n(const tf_base *base, int64_t panel, const tf_columns *x, float *tile, int bits, int n) {
    const int64_t supers = base->width / TF_SUPER, bytes = tf_super_bytes(bits);
    const uint8_t *super = base->supers + panel * supers * bytes;
    __m512 results[TF_MAX_COLUMNS];
    for (int j = 0; j < n; j++) {
        results[j] = _mm512_setzero_ps();
    }
    for (int64_t s = 0; s < supers; s++) {
        add_super(super + s * bytes, s, x, results, bits, n);
    }
    for (int j = 0; j < n; j++) {
        _mm512_storeu_ps(tile + j * TF_PANEL_ROWS, results[j]);
    }
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

void tf_supers_avx512(const tf_base *base, int64_t panel, const tf_columns *x, float *tile) {
    switch (base->bits) {
        case 2: panel_bits(base, panel, x, tile, 2); break;
        case 3: panel_bits(base, panel, x, tile, 3); break;
        case 4: panel_bits(base, panel, x, tile, 4); break;
        case 5: panel_bits(base, panel, x, tile, 5); break;
        default: panel_bits(base, panel, x, tile, 6); break;
    }
}
