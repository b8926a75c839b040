/* AVX-512 VNNI for many columns of a Q2_K base: two panels at a time, so that a broadcast serves both, and 4 columns. A
 * super is unpacked into a buffer that stays in the first-level cache while all columns are multiplied by it. There
 * codes of Q2_K are multiplied by their scales, which makes at most 3 * 15: both sub-blocks of a block are one dot
 * product then. */
#include "kernel_avx512_base.h"

enum { BITS = 2 };
enum { BLOCKS = TF_SUPER / TF_BLOCK, CHUNKS = TF_BLOCK / 4 };

/* A super of two panels. */
typedef struct unpacked {
    _Alignas(64) uint8_t codes[BLOCKS][CHUNKS][PANELS][64];
    __m512i minima[BLOCKS][PANELS];
} unpacked;

typedef struct panels {
    const uint8_t *at[PANELS];
    int64_t supers;
} panels;

INLINE const uint8_t *super_at(const panels *p, int i, int64_t s) { return p->at[i] + s * tf_super_bytes(BITS); }

/* The scale of a sub-block in both 16-bit halves of its row. */
INLINE __m512i twice(__m512i pairs, int half) {
    return half == 0 ? _mm512_mask_mov_epi16(pairs, 0xaaaaaaaa, _mm512_slli_epi32(pairs, 16))
                     : _mm512_mask_mov_epi16(pairs, 0x55555555, _mm512_srli_epi32(pairs, 16));
}

/* Block b of panel i. */
INLINE void unpack_block(const panels *p, int64_t s, int b, int i, unpacked *to) {
    const uint8_t *super = super_at(p, i, s);
    const int64_t over = s * tf_super_bytes(BITS) + SUPER_AHEAD >= p->supers * tf_super_bytes(BITS) ? p->supers : 0;
    prefetch_super(super + SUPER_AHEAD + over * tf_super_bytes(BITS), b, BITS); /* behind one panel lies the other */
    const factors f = load_factors(super + tf_super_scales(BITS) + b * 32, BITS);
#pragma GCC unroll 2
    for (int half = 0; half < 2; half++) {
        __m512i codes[4];
        unpack_half(super + b * 64 * BITS, half, codes, BITS);
        const __m512i scale = twice(f.pairs, half);
#pragma GCC unroll 4
        for (int c = 0; c < 4; c++) {
            _mm512_store_si512(to->codes[b][half * 4 + c][i], _mm512_mullo_epi16(codes[c], scale));
        }
    }
    to->minima[b][i] = f.minima;
}

/* What a pass unpacks of the next super beside its blocks: block after block of one panel, or of both. */
typedef struct feed {
    const panels *p;
    int64_t s;
    unpacked *to; /* NULL: nothing */
    int panel;
    bool both;
} feed;

INLINE void unpack_some(const feed *f, int b) {
    if (f->to != NULL) {
        unpack_block(f->p, f->s, b, f->panel, f->to);
        if (f->both) {
            unpack_block(f->p, f->s, b, 1, f->to);
        }
    }
}

/* Adds block b to the sums of n columns. */
INLINE void add_block(const unpacked *t, int b, const int8_t *q, int64_t stride, const int32_t *column_sums,
                      const float *scale, float factor, __m512 (*sums)[PASS], __m512 (*mins)[PASS], int n) {
    __m512i dots[PANELS][PASS];
    dot_unpacked(t->codes[b][0][0], q, stride, dots, n);
#pragma GCC unroll 4
    for (int j = 0; j < n; j++) {
        const __m512 unit = _mm512_set1_ps(scale[j] * factor);
        const __m512i column = _mm512_set1_epi32(column_sums[j]);
#pragma GCC unroll 2
        for (int i = 0; i < PANELS; i++) {
            const __m512 dot = _mm512_cvtepi32_ps(dots[i][j]);
            sums[i][j] = _mm512_fmadd_ps(dot, unit, sums[i][j]);
            const __m512 minimum = _mm512_cvtepi32_ps(_mm512_madd_epi16(column, t->minima[b][i]));
            mins[i][j] = _mm512_fmadd_ps(minimum, unit, mins[i][j]);
        }
    }
}

/* The sums of super s to the results. */
INLINE void end_super(const panels *p, int64_t s, __m512 (*sums)[PASS], __m512 (*mins)[PASS], float *out, int n) {
#pragma GCC unroll 2
    for (int i = 0; i < PANELS; i++) {
        const __m256i *halves = (const __m256i *)(super_at(p, i, s) + tf_super_d(BITS));
        const __m512 d = _mm512_mul_ps(_mm512_cvtph_ps(_mm256_loadu_si256(halves)), _mm512_set1_ps(128.0f));
        const __m512 dmin = _mm512_mul_ps(_mm512_cvtph_ps(_mm256_loadu_si256(halves + 1)), _mm512_set1_ps(-128.0f));
        float *at = out + i * TF_WIDE_COLUMNS * TF_PANEL_ROWS;
#pragma GCC unroll 4
        for (int j = 0; j < n; j++, at += TF_PANEL_ROWS) {
            const __m512 result = _mm512_fmadd_ps(d, sums[i][j], _mm512_load_ps(at));
            _mm512_store_ps(at, _mm512_fmadd_ps(dmin, mins[i][j], result));
        }
    }
}

/* Multiplies columns `first` to `first` + n of x, which has `columns`, by super s. out: where column `first` goes. */
INLINE void pass_n(const panels *p, const unpacked *t, int64_t s, const tf_columns *x, int64_t first, float *out,
                   feed feed, int columns, int n) {
    __m512 sums[PANELS][PASS], mins[PANELS][PASS];
    for (int j = 0; j < n; j++) {
        sums[0][j] = sums[1][j] = mins[0][j] = mins[1][j] = _mm512_setzero_ps();
    }
    for (int b = 0; b < BLOCKS; b++) {
        const int64_t block = s * BLOCKS + b, at = block * columns + first;
        const int64_t q = (block * CHUNKS * columns + first) * 4, stride = 4 * columns;
        unpack_some(&feed, b);
        add_block(t, b, x->q + q, stride, x->sums + at, x->scale + at, 1.0f, sums, mins, n);
        if (tf_has_low(x, block)) {
            add_block(t, b, x->low + q, stride, x->low_sums + at, x->scale + at, TF_LOW, sums, mins, n);
        }
    }
    end_super(p, s, sums, mins, out, n);
}

INLINE void pass(const panels *p, const unpacked *t, int64_t s, const tf_columns *x, int64_t first, float *out,
                 feed f) {
    if (x->n == TF_MAX_COLUMNS) {
        pass_n(p, t, s, x, first, out, f, TF_MAX_COLUMNS, PASS);
        return;
    }
    switch (x->n - first) {
        case 1: pass_n(p, t, s, x, first, out, f, x->n, 1); break;
        case 2: pass_n(p, t, s, x, first, out, f, x->n, 2); break;
        case 3: pass_n(p, t, s, x, first, out, f, x->n, 3); break;
        default: pass_n(p, t, s, x, first, out, f, x->n, PASS); break;
    }
}

void tf_supers_wide_avx512(const tf_base *base, int64_t panel, const tf_columns *x, int32_t blocks, float *tiles) {
    const int32_t n = (blocks - 1) * TF_MAX_COLUMNS + x[blocks - 1].n;
    for (int i = 0; i < PANELS; i++) {
        memset(tiles + i * TF_WIDE_COLUMNS * TF_PANEL_ROWS, 0, sizeof(float) * TF_PANEL_ROWS * (size_t)n);
    }
    unpacked t[2];
    const int64_t supers = base->width / TF_SUPER, bytes = tf_super_bytes(BITS);
    const uint8_t *at = base->supers + panel * supers * bytes;
    const panels p = {{at, at + supers * bytes}, supers};
    const int64_t passes = (n + PASS - 1) / PASS;
    const feed begin = {&p, 0, &t[0], 0, true};
    for (int b = 0; b < BLOCKS; b++) {
        unpack_some(&begin, b);
    }
    for (int64_t s = 0; s < supers; s++) {
        int64_t done = 0;
        for (int32_t i = 0; i < blocks; i++) {
            for (int64_t first = 0; first < x[i].n; first += PASS, done++) {
                const bool wanted = s + 1 < supers && done < (passes == 1 ? 1 : PANELS);
                const feed f = {&p, s + 1, wanted ? &t[(s + 1) % 2] : NULL, (int)done, passes == 1};
                float *out = tiles + (i * TF_MAX_COLUMNS + first) * TF_PANEL_ROWS;
                pass(&p, &t[s % 2], s, &x[i], first, out, f);
            }
        }
    }
}
