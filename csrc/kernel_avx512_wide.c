/* AVX-512 VNNI for many columns: codes of two panels are unpacked once into a buffer that stays in the first-level
 * cache, a piece of the width at a time, and all columns are multiplied by them, 4 at a time: 8 dot products, their
 * sums and results are 24 of the 32 registers, and a broadcast serves both panels. */
#include "kernel_avx512.h"

enum { PANELS = TF_WIDE_PANELS, CHUNK = 64, PASS = 4, PIECE = 256, LONGEST_GROUP = 1024 };

/* A piece of the width: whole groups, of about PIECE inputs. */
typedef struct piece {
    int64_t group, groups_end, block, blocks_end, group_blocks;
    const uint16_t *scales[PANELS];
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
    for (int c = 0; c < TF_BLOCK / 4; c++, q += stride) {
        const __m512i first = _mm512_load_si512(codes + c * PANELS * CHUNK);
        const __m512i second = _mm512_load_si512(codes + c * PANELS * CHUNK + CHUNK);
#pragma GCC unroll 4
        for (int j = 0; j < n; j++) {
            const __m512i x = _mm512_set1_epi32(*(const int32_t *)(const void *)(q + j * 4));
            dots[0][j] = _mm512_dpbusd_epi32(dots[0][j], first, x);
            dots[1][j] = _mm512_dpbusd_epi32(dots[1][j], second, x);
        }
        __asm__ volatile("" ::: "memory"); /* or GCC loads all chunks first, and has no registers left */
    }
#pragma GCC unroll 4
    for (int j = 0; j < n; j++) {
        const __m512 unit = _mm512_set1_ps(scale[j] * factor);
        sums[0][j] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dots[0][j]), unit, sums[0][j]);
        sums[1][j] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dots[1][j]), unit, sums[1][j]);
    }
}

/* What a pass fetches from memory beside each 32 inputs: two lines from either place. */
typedef struct ahead {
    const uint8_t *a, *b;
    int64_t step;
} ahead;

/* Multiplies columns `first` to `first` + n of x, which has `columns`. out: where column `first` goes in the tiles. */
INLINE void pass_n(const piece *t, const tf_columns *x, int64_t first, float *out, ahead ahead, int columns, bool low,
                   int n) {
    enum { NEXT_PANEL = TF_WIDE_COLUMNS * TF_PANEL_ROWS, STEP = TF_BLOCK / 4 * PANELS * CHUNK };
    const uint8_t *codes = t->codes;
    const int8_t *q = x->q + (t->block * (TF_BLOCK / 4) * columns + first) * 4;
    const int64_t to_low = x->low - x->q;
    const float *scale = x->scale + t->block * columns + first, *offset = x->offset + t->group * columns + first;
    __m512 results[PANELS][PASS], sums[PANELS][PASS];
    for (int j = 0; j < n; j++) {
        results[0][j] = _mm512_load_ps(out + j * TF_PANEL_ROWS);
        results[1][j] = _mm512_load_ps(out + NEXT_PANEL + j * TF_PANEL_ROWS);
    }
    for (int64_t g = t->group, b = t->block; g < t->groups_end; g++, offset += columns) {
        const int64_t end = b + t->group_blocks < t->blocks_end ? b + t->group_blocks : t->blocks_end;
        for (int j = 0; j < n; j++) {
            sums[0][j] = sums[1][j] = _mm512_set1_ps(offset[j]);
        }
        for (; b < end; b++, codes += STEP, q += TF_BLOCK * columns, scale += columns) {
            if (ahead.a != NULL) {
                _mm_prefetch((const char *)ahead.a, _MM_HINT_T0);
                _mm_prefetch((const char *)ahead.a + 64, _MM_HINT_T0);
                _mm_prefetch((const char *)ahead.b, _MM_HINT_T0);
                _mm_prefetch((const char *)ahead.b + 64, _MM_HINT_T0);
                ahead.a += ahead.step;
                ahead.b += ahead.step;
            }
            add_block(codes, q, 4 * columns, scale, 1.0f, sums, n);
            if (low && tf_has_low(x, b)) {
                add_block(codes, q + to_low, 4 * columns, scale, TF_LOW, sums, n);
            }
        }
        for (int panel = 0; panel < PANELS; panel++) {
            const __m256i *halves = (const __m256i *)(t->scales[panel] + g * TF_PANEL_ROWS);
            const __m512 unit = _mm512_cvtph_ps(_mm256_loadu_si256(halves));
            for (int j = 0; j < n; j++) {
                results[panel][j] = _mm512_fmadd_ps(sums[panel][j], unit, results[panel][j]);
            }
        }
    }
    for (int j = 0; j < n; j++) {
        _mm512_store_ps(out + j * TF_PANEL_ROWS, results[0][j]);
        _mm512_store_ps(out + NEXT_PANEL + j * TF_PANEL_ROWS, results[1][j]);
    }
}

INLINE void pass_low(const piece *t, const tf_columns *x, int64_t first, float *out, ahead ahead, bool low) {
    if (x->n == TF_MAX_COLUMNS) {
        pass_n(t, x, first, out, ahead, TF_MAX_COLUMNS, low, PASS);
        return;
    }
    switch (x->n - first) {
        case 1: pass_n(t, x, first, out, ahead, x->n, low, 1); break;
        case 2: pass_n(t, x, first, out, ahead, x->n, low, 2); break;
        case 3: pass_n(t, x, first, out, ahead, x->n, low, 3); break;
        default: pass_n(t, x, first, out, ahead, x->n, low, PASS); break;
    }
}

static __attribute__((noinline)) void other_pass(const piece *t, const tf_columns *x, int64_t first, float *out,
                                                 ahead ahead) {
    if (x->flags != NULL) {
        pass_low(t, x, first, out, ahead, true);
    } else {
        pass_low(t, x, first, out, ahead, false);
    }
}

INLINE void pass(const piece *t, const tf_columns *x, int64_t first, float *out, ahead ahead) {
    if (x->n == TF_MAX_COLUMNS && x->flags == NULL) { /* the call alone would cost 3 % */
        pass_n(t, x, first, out, ahead, TF_MAX_COLUMNS, false, PASS);
    } else {
        other_pass(t, x, first, out, ahead);
    }
}

/* What comes two pieces later (one later would be needed as soon as the last pass ends), spread over 4 passes, so that
 * memory is never idle for long. Behind these panels lie the next two. */
INLINE ahead ahead_of(const streams *p, const tf_planes *planes, const piece *t, int64_t pass, int bits) {
    const int64_t next = (2 * t->blocks_end - t->block) * TF_BLOCK;
    const int64_t at = next < planes->width ? next : next + planes->width * (PANELS - 1);
    if (pass < 2) {
        return (ahead){p[pass].p4 + at * 8, p[pass].p4 + at * 8 + 128, 256};
    }
    if (pass == 2 && bits >= 6) {
        return (ahead){p[0].p6 + at * 4, p[1].p6 + at * 4, 128};
    }
    if (pass == 3 && bits == 8) {
        return (ahead){p[0].p8 + at * 4, p[1].p8 + at * 4, 128};
    }
    return (ahead){NULL, NULL, 0};
}

INLINE void next_piece(piece *t, const tf_planes *planes) {
    const int64_t groups = tf_groups(planes->width, planes->group);
    const int64_t many = planes->group < PIECE ? PIECE / planes->group : 1;
    t->group = t->groups_end;
    t->groups_end = t->group + many < groups ? t->group + many : groups;
    t->block = t->blocks_end;
    t->blocks_end = t->groups_end < groups ? t->groups_end * t->group_blocks : planes->width / TF_BLOCK;
}

INLINE void wide(const tf_planes *planes, int64_t panel, const tf_columns *x, int32_t blocks, float *tiles, int bits) {
    _Alignas(64) uint8_t codes[PANELS * TF_PANEL_ROWS * LONGEST_GROUP];
    piece t = {.group_blocks = planes->group / TF_BLOCK, .codes = codes};
    streams p[PANELS];
    for (int i = 0; i < PANELS; i++) {
        p[i] = panel_streams(planes, panel + i, bits);
        t.scales[i] = planes->scales + (panel + i) * tf_groups(planes->width, planes->group) * TF_PANEL_ROWS;
    }
    memset(tiles, 0, sizeof(float) * PANELS * TF_WIDE_COLUMNS * TF_PANEL_ROWS);
    while (t.blocks_end < planes->width / TF_BLOCK) {
        next_piece(&t, planes);
        unpack_piece(p, &t, codes, bits);
        int64_t done = 0;
        for (int32_t i = 0; i < blocks; i++) {
            for (int64_t first = 0; first < x[i].n; first += PASS, done++) {
                pass(&t, &x[i], first, tiles + (i * TF_MAX_COLUMNS + first) * TF_PANEL_ROWS,
                     ahead_of(p, planes, &t, done, bits));
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
