/* AVX-512 VNNI, bases of Q2_K to Q6_K: a lane is a row. `bits` and `n` are constants wherever they are passed on. */
#include "kernel_avx512_base.h"

/* Adds a sub-block to the dot products of n columns. */
INLINE void add_dots(const uint8_t *block, int half, const int8_t *q, __m512i *dots, int bits, int n) {
    __m512i codes[4];
    unpack_half(block, half, codes, bits);
    for (int c = 0; c < 4; c++) {
        for (int j = 0; j < n; j++) {
            dots[j] = dot(dots[j], codes[c], q + ((half * 4 + c) * n + j) * 4);
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

INLINE void add_super(const uint8_t *super, int64_t s, const tf_columns *x, __m512 *results, int bits, int n) {
    __m512 sums[TF_MAX_COLUMNS], mins[TF_MAX_COLUMNS];
    for (int j = 0; j < n; j++) {
        sums[j] = mins[j] = _mm512_setzero_ps();
    }
    for (int b = 0; b < TF_SUPER / TF_BLOCK; b++) {
        const int64_t block = s * (TF_SUPER / TF_BLOCK) + b, at = block * n, q = block * TF_BLOCK * n;
        prefetch_super(super + SUPER_AHEAD, b, bits);
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
