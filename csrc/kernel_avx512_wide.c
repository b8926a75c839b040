/* AVX-512 VNNI for many columns: codes of two panels are unpacked once into a buffer that stays in the first-level
 * cache, a piece of the width at a time, and all columns are multiplied by them, 4 at a time: 8 dot products, their
 * sums and results are 24 of the 32 registers, and a broadcast serves both panels. */
#include "kernel_avx512.h"

enum { PANELS = TF_WIDE_PANELS, CHUNK = 64, PASS = 4, PIECE = 512 };

/* A piece of the width: whole groups, of about PIECE inputs. */
typedef struct piece {
    int64_t group, groups_end, block, blocks_end, group_blocks;
    const uint16_t *scales[PANELS];
    streams next[PANELS]; /* what to fetch meanwhile */
    const uint8_t *codes; /* [chunk][PANELS][16 rows][4 inputs] */
} piece;

INLINE void unpack_piece(const streams *p, const piece *t, uint8_t *codes, int bits) {
    for (int panel = 0; panel < PANELS; panel++) {
        uint8_t *to = codes + panel * CHUNK;
        for (int64_t u = t->block * 2; u < t->blocks_end * 2; u++) {
            __m512i unit[4];
            unpack(p[panel].p4 + u * 128, p[panel].p6 + u * 64, p[panel].p8 + u * 64, unit, bits);
            for (int c = 0; c < 4; c++, to += PANELS * CHUNK) {
                _mm512_store_si512(to, unit[c]);
            }
        }
    }
}

/* Adds a block of 32 inputs to the sums of n columns. */
INLINE void add_block(const uint8_t *codes, const int8_t *q, int64_t stride, const float *scale, float factor,
                      __m512 (*sums)[PASS], int n) {
    __m512i dots[PANELS][PASS];
    for (int j = 0; j < n; j++) {
        dots[0][j] = dots[1][j] = _mm512_setzero_si512();
    }
#pragma GCC unroll 8
    for (int c = 0; c < TF_BLOCK / 4; c++) {
        const __m512i first = _mm512_load_si512(codes + c * PANELS * CHUNK);
        const __m512i second = _mm512_load_si512(codes + c * PANELS * CHUNK + CHUNK);
#pragma GCC unroll 4
        for (int j = 0; j < n; j++) {
            const __m512i x = _mm512_set1_epi32(*(const int32_t *)(const void *)(q + c * stride + j * 4));
            dots[0][j] = _mm512_dpbusd_epi32(dots[0][j], first, x);
            dots[1][j] = _mm512_dpbusd_epi32(dots[1][j], second, x);
        }
        __asm__ volatile("" ::: "memory"); /* keeps GCC from loading later chunks already, for which it has no registers */
    }
#pragma GCC unroll 4
    for (int j = 0; j < n; j++) {
        const __m512 unit = _mm512_set1_ps(scale[j] * factor);
        sums[0][j] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dots[0][j]), unit, sums[0][j]);
        sums[1][j] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dots[1][j]), unit, sums[1][j]);
    }
}

/* Columns `first` to `first` + n of x. out: [TF_WIDE_COLUMNS][16] of each panel, of which column `first` is the first. */
INLINE void pass_n(const piece *t, const tf_columns *x, int64_t first, float *out, const streams *fetch, int bits,
                   int columns, bool low, int n) {
    enum { NEXT_PANEL = TF_WIDE_COLUMNS * TF_PANEL_ROWS };
    const int64_t stride = 4 * columns;
    __m512 results[PANELS][PASS], sums[PANELS][PASS];
    for (int j = 0; j < n; j++) {
        const float *at = out + j * TF_PANEL_ROWS;
        results[0][j] = t->group == 0 ? _mm512_setzero_ps() : _mm512_load_ps(at);
        results[1][j] = t->group == 0 ? _mm512_setzero_ps() : _mm512_load_ps(at + NEXT_PANEL);
    }
    int64_t b = t->block;
    const uint8_t *codes = t->codes;
    for (int64_t g = t->group; g < t->groups_end; g++) {
        const int64_t end = b + t->group_blocks < t->blocks_end ? b + t->group_blocks : t->blocks_end;
        for (int j = 0; j < n; j++) {
            sums[0][j] = sums[1][j] = _mm512_set1_ps(x->offset[g * columns + first + j]);
        }
        for (; b < end; b++, codes += TF_BLOCK / 4 * PANELS * CHUNK) {
            const int64_t at = b * TF_BLOCK * columns + first * 4;
            const float *scale = x->scale + b * columns + first;
            if (fetch != NULL) {
                prefetch(fetch, (b - t->block) * 2, 0, bits);
                prefetch(fetch, (b - t->block) * 2 + 1, 0, bits);
            }
            add_block(codes, x->q + at, stride, scale, 1.0f, sums, n);
            if (low && tf_has_low(x, b)) {
                add_block(codes, x->low + at, stride, scale, TF_LOW, sums, n);
            }
        }
        for (int panel = 0; panel < PANELS; panel++) {
            const __m256i *half = (const __m256i *)(t->scales[panel] + g * TF_PANEL_ROWS);
            const __m512 scale = _mm512_cvtph_ps(_mm256_loadu_si256(half));
            for (int j = 0; j < n; j++) {
                results[panel][j] = _mm512_fmadd_ps(sums[panel][j], scale, results[panel][j]);
            }
        }
    }
    for (int j = 0; j < n; j++) {
        _mm512_store_ps(out + j * TF_PANEL_ROWS, results[0][j]);
        _mm512_store_ps(out + j * TF_PANEL_ROWS + NEXT_PANEL, results[1][j]);
    }
}

INLINE void pass(const piece *t, const tf_columns *x, int64_t first, float *out, const streams *fetch, int bits) {
    if (x->n == TF_MAX_COLUMNS && x->flags == NULL) {
        pass_n(t, x, first, out, fetch, bits, TF_MAX_COLUMNS, false, PASS);
        return;
    }
    switch (x->n - first) {
        case 1: pass_n(t, x, first, out, fetch, bits, x->n, true, 1); break;
        case 2: pass_n(t, x, first, out, fetch, bits, x->n, true, 2); break;
        case 3: pass_n(t, x, first, out, fetch, bits, x->n, true, 3); break;
        default: pass_n(t, x, first, out, fetch, bits, x->n, true, PASS); break;
    }
}

/* Where the piece after t begins, in these panels or the two that come next. */
INLINE streams after(const streams *p, const tf_planes *planes, int64_t block, int bits) {
    const int64_t left = planes->width - block * TF_BLOCK;
    const int64_t to = left > 0 ? block * TF_BLOCK : planes->width * PANELS; /* in inputs from the panel's start */
    (void)bits;
    return (streams){p->p4 + to * 8, p->p6 + to * 4, p->p8 + to * 4};
}

INLINE void wide(const tf_planes *planes, int64_t panel, const tf_columns *x, int32_t blocks, float *tiles, int bits) {
    _Alignas(64) uint8_t codes[PANELS * TF_PANEL_ROWS * 1024]; /* the longest group */
    const int64_t groups = tf_groups(planes->width, planes->group);
    const int64_t many = planes->group < PIECE ? PIECE / planes->group : 1;
    piece t = {.group_blocks = planes->group / TF_BLOCK, .codes = codes};
    streams p[PANELS];
    for (int i = 0; i < PANELS; i++) {
        p[i] = panel_streams(planes, panel + i, bits);
        t.scales[i] = planes->scales + (panel + i) * groups * TF_PANEL_ROWS;
    }
    for (; t.group < groups; t.group += many) {
        t.groups_end = t.group + many < groups ? t.group + many : groups;
        t.block = t.group * t.group_blocks;
        t.blocks_end = t.groups_end == groups ? planes->width / TF_BLOCK : t.groups_end * t.group_blocks;
        unpack_piece(p, &t, codes, bits);
        int64_t passes = 0;
        for (int32_t i = 0; i < blocks; i++) {
            for (int64_t first = 0; first < x[i].n; first += PASS, passes++) {
                streams next;
                if (passes < PANELS) {
                    next = after(&p[passes], planes, t.blocks_end, bits);
                }
                pass(&t, &x[i], first, tiles + (i * TF_MAX_COLUMNS + first) * TF_PANEL_ROWS,
                     passes < PANELS ? &next : NULL, bits);
            }
        }
    }
}

void tf_wide_avx512(const tf_planes *planes, int64_t panel, const tf_columns *x, int32_t blocks, float *tiles) {
    switch (planes->bits) {
        case 4: wide(planes, panel, x, blocks, tiles, 4); break;
        case 6: wide(planes, panel, x, blocks, tiles, 6); break;
        default: wide(planes, panel, x, blocks, tiles, 8); break;
    }
}
