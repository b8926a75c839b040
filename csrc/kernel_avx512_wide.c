/* AVX-512 VNNI for many columns: two panels at a time, so that a broadcast serves both, and 4 columns: 8 dot products.
 * Codes of 6 and 8 bits are unpacked once into a buffer that stays in the first-level cache, a piece of the width at a
 * time, and all columns multiplied by them: the sums and results of 4 columns are 16 more of the 32 registers.
 * 4 bits are unpacked anew for each 4 columns, which costs less than the stores, and the sums of 8 columns stay in
 * registers. */
#include "kernel_avx512.h"

enum { CHUNK = 64, PIECE = 256, LONGEST_GROUP = 1024, UNIT = 4 * PANELS * CHUNK };
enum { AHEAD = 40 }; /* units that are fetched early; 20 to 72 differ by little more than runs do */

/* A piece of the width: whole groups, of about PIECE inputs. */
typedef struct piece {
    int64_t group, groups_end, block, blocks_end, group_blocks;
    const uint16_t *scales[PANELS];
    const uint8_t *codes; /* [chunk][PANELS][16 rows][4 inputs] */
} piece;

/* Codes of 16 inputs, of one of the panels. */
INLINE void unpack_unit(const streams *p, int64_t unit, int64_t units, uint8_t *to, int bits) {
    __m512i codes[4];
    const int64_t ahead = unit + AHEAD;
    prefetch(p, ahead + (ahead >= units ? units : 0), bits); /* behind this panel lies the other of the pair */
    unpack(p->p4 + unit * 128, p->p6 + unit * 64, p->p8 + unit * 64, codes, bits);
#pragma GCC unroll 4
    for (int c = 0; c < 4; c++) {
        _mm512_store_si512(to + c * PANELS * CHUNK, codes[c]);
    }
}

/* Adds dot products of a block of 32 inputs to the sums of n columns. */
INLINE void add_dots(__m512i (*dots)[PASS], const float *scale, float factor, __m512 (*sums)[PASS], int n) {
#pragma GCC unroll 4
    for (int j = 0; j < n; j++) {
        const __m512 unit = _mm512_set1_ps(scale[j] * factor);
        sums[0][j] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dots[0][j]), unit, sums[0][j]);
        sums[1][j] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dots[1][j]), unit, sums[1][j]);
    }
}

/* Multiplies a block of 32 inputs and adds it to the sums of n columns. */
INLINE void add_block(const uint8_t *codes, const int8_t *q, int64_t stride, const float *scale, float factor,
                      __m512 (*sums)[PASS], int n) {
    __m512i dots[PANELS][PASS];
    dot_unpacked(codes, q, stride, dots, n);
    add_dots(dots, scale, factor, sums, n);
}

/* What a pass unpacks of the next piece beside each 32 inputs: one or both units of a panel. A burst of stores would
 * stop the products (docs/log.md), one now and then is nearly free. */
typedef struct feed {
    const streams *p;
    int64_t unit, left;
    uint8_t *to;
    bool both;
    int64_t units; /* of a panel */
} feed;

INLINE void unpack_some(feed *f, int bits) {
    if (f->left > 0) {
        unpack_unit(f->p, f->unit, f->units, f->to, bits);
        if (f->both) {
            unpack_unit(f->p, f->unit + 1, f->units, f->to + UNIT, bits);
        }
        f->unit += 2;
        f->to += 2 * UNIT;
        f->left--;
    }
}

/* Multiplies columns `first` to `first` + n of x, which has `columns`. out: where column `first` goes in the tiles. */
INLINE void pass_n(const piece *t, const tf_columns *x, int64_t first, float *out, feed feed, int columns, bool low,
                   int n, int bits) {
    enum { NEXT_PANEL = TF_WIDE_COLUMNS * TF_PANEL_ROWS, STEP = TF_BLOCK / 4 * PANELS * CHUNK };
    const uint8_t *codes = t->codes;
    const int64_t at = (t->block * (TF_BLOCK / 4) * columns + first) * 4;
    const int8_t *q = x->q + at, *q_low = low ? x->low + at : NULL;
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
            unpack_some(&feed, bits);
            add_block(codes, q, 4 * columns, scale, 1.0f, sums, n);
            if (low && tf_has_low(x, b)) {
                add_block(codes, q_low + (q - x->q - at), 4 * columns, scale, TF_LOW, sums, n);
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

INLINE void pass_low(const piece *t, const tf_columns *x, int64_t first, float *out, feed feed, bool low, int bits) {
    if (x->n == TF_MAX_COLUMNS) {
        pass_n(t, x, first, out, feed, TF_MAX_COLUMNS, low, PASS, bits);
        return;
    }
    switch (x->n - first) {
        case 1: pass_n(t, x, first, out, feed, x->n, low, 1, bits); break;
        case 2: pass_n(t, x, first, out, feed, x->n, low, 2, bits); break;
        case 3: pass_n(t, x, first, out, feed, x->n, low, 3, bits); break;
        default: pass_n(t, x, first, out, feed, x->n, low, PASS, bits); break;
    }
}

INLINE void pass(const piece *t, const tf_columns *x, int64_t first, float *out, feed feed, int bits) {
    if (x->n == TF_MAX_COLUMNS && x->flags == NULL) {
        pass_n(t, x, first, out, feed, TF_MAX_COLUMNS, false, PASS, bits);
    } else if (x->flags == NULL) {
        pass_low(t, x, first, out, feed, false, bits);
    } else {
        pass_low(t, x, first, out, feed, true, bits);
    }
}

/* Of what the passes unpack: a unit each if there are four of them, else the first two both units. */
INLINE feed feed_of(const streams *p, const piece *next, uint8_t *codes, int64_t pass, int64_t passes, int64_t units) {
    const int64_t blocks = next->blocks_end - next->block;
    const bool both = passes < 4;
    const int64_t panel = both ? pass : pass / 2, half = both ? 0 : pass % 2;
    if (panel >= PANELS) {
        return (feed){NULL, 0, 0, NULL, false, 0};
    }
    return (feed){&p[panel], next->block * 2 + half, blocks, codes + half * UNIT + panel * CHUNK, both, units};
}

INLINE void next_piece(piece *t, const tf_planes *planes) {
    const int64_t groups = tf_groups(planes->width, planes->group);
    const int64_t many = planes->group < PIECE ? PIECE / planes->group : 1;
    t->group = t->groups_end;
    t->groups_end = t->group + many < groups ? t->group + many : groups;
    t->block = t->blocks_end;
    t->blocks_end = t->groups_end < groups ? t->groups_end * t->group_blocks : planes->width / TF_BLOCK;
}

INLINE void many(const tf_planes *planes, int64_t panel, const tf_columns *x, int32_t blocks, float *tiles, int bits) {
    _Alignas(64) uint8_t codes[2][PANELS * TF_PANEL_ROWS * LONGEST_GROUP];
    piece t = {.group_blocks = planes->group / TF_BLOCK}, next;
    streams p[PANELS];
    const int64_t units = planes->width / (TF_BLOCK / 2), groups = tf_groups(planes->width, planes->group);
    for (int i = 0; i < PANELS; i++) {
        p[i] = panel_streams(planes, panel + i, bits);
        t.scales[i] = planes->scales + (panel + i) * groups * TF_PANEL_ROWS;
    }
    const int64_t passes = ((blocks - 1) * TF_MAX_COLUMNS + x[blocks - 1].n + PASS - 1) / PASS;
    next_piece(&t, planes);
    for (int i = 0; i < PANELS; i++) {
        feed all = {&p[i], 0, t.blocks_end, codes[0] + i * CHUNK, true, units};
        while (all.left > 0) {
            unpack_some(&all, bits);
        }
    }
    for (int side = 0; t.block < t.blocks_end; t = next, side ^= 1) {
        t.codes = codes[side];
        next = t;
        next_piece(&next, planes);
        for (int64_t g = t.group; g < t.groups_end; g++) {
            prefetch_scales(t.scales[0], g + PANELS * groups); /* of the next pair */
            prefetch_scales(t.scales[1], g + PANELS * groups);
        }
        int64_t done = 0;
        for (int32_t i = 0; i < blocks; i++) {
            for (int64_t first = 0; first < x[i].n; first += PASS, done++) {
                pass(&t, &x[i], first, tiles + (i * TF_MAX_COLUMNS + first) * TF_PANEL_ROWS,
                     feed_of(p, &next, codes[side ^ 1], done, passes, units), bits);
            }
        }
    }
}

/* The same of 4-bit codes as they lie in the planes: unpacked again for each 4 columns, as stores would cost more. */
INLINE void add_nibbles(const streams *p, int64_t b, const int8_t *q, int64_t stride, const float *scale, float factor,
                        __m512 (*sums)[PASS], int n) {
    __m512i dots[PANELS][PASS];
    for (int j = 0; j < n; j++) {
        dots[0][j] = dots[1][j] = _mm512_setzero_si512();
    }
#pragma GCC unroll 8
    for (int c = 0; c < TF_BLOCK / 4; c++, q += stride) {
        const __m512i one = _mm512_loadu_si512(p[0].p4 + b * 256 + c / 2 * 64);
        const __m512i two = _mm512_loadu_si512(p[1].p4 + b * 256 + c / 2 * 64);
        const __m512i first = and8(c % 2 == 0 ? left(one, 4) : one, 0xf0);
        const __m512i second = and8(c % 2 == 0 ? left(two, 4) : two, 0xf0);
        dot_chunks(first, second, q, dots, n);
    }
    add_dots(dots, scale, factor, sums, n);
}

/* The sums of a group to the results. */
INLINE void end_group(const uint16_t *const *scales, int64_t group, __m512 (*sums)[PASS], float *out, int n) {
    for (int panel = 0; panel < PANELS; panel++) {
        const __m256i *halves = (const __m256i *)(scales[panel] + group * TF_PANEL_ROWS);
        const __m512 unit = _mm512_cvtph_ps(_mm256_loadu_si256(halves));
        float *at = out + panel * TF_WIDE_COLUMNS * TF_PANEL_ROWS;
#pragma GCC unroll 4
        for (int j = 0; j < n; j++, at += TF_PANEL_ROWS) {
            _mm512_store_ps(at, _mm512_fmadd_ps(sums[panel][j], unit, _mm512_load_ps(at)));
        }
    }
}

/* A block of columns, 4-bit codes. */
INLINE void few_n(const tf_planes *planes, int64_t panel, const tf_columns *x, float *tiles, int n) {
    const int left_n = n < PASS ? n : PASS, right_n = n - left_n;
    const int64_t groups = tf_groups(planes->width, planes->group);
    const int64_t blocks = planes->width / TF_BLOCK, group_blocks = planes->group / TF_BLOCK;
    const streams p[PANELS] = {panel_streams(planes, panel, 4), panel_streams(planes, panel + 1, 4)};
    const uint16_t *const scales[PANELS] = {planes->scales + panel * groups * TF_PANEL_ROWS,
                                            planes->scales + (panel + 1) * groups * TF_PANEL_ROWS};
    for (int64_t g = 0, b = 0; g < groups; g++) {
        const int64_t end = b + group_blocks < blocks ? b + group_blocks : blocks;
        __m512 first[PANELS][PASS], rest[PANELS][PASS];
#pragma GCC unroll 4
        for (int j = 0; j < PASS; j++) {
            first[0][j] = first[1][j] = _mm512_set1_ps(x->offset[g * n + (j < n ? j : 0)]);
            rest[0][j] = rest[1][j] = _mm512_set1_ps(x->offset[g * n + (j + PASS < n ? j + PASS : 0)]);
        }
        prefetch_scales(scales[0], g + PANELS * groups); /* of the next pair */
        prefetch_scales(scales[1], g + PANELS * groups);
        for (; b < end; b++) {
#pragma GCC unroll 2
            for (int i = 0; i < PANELS; i++) {
                const int64_t ahead = b * 2 + AHEAD, at = ahead + (ahead >= blocks * 2 ? blocks * 2 : 0);
                prefetch(&p[i], at, 4);
                prefetch(&p[i], at + 1, 4);
            }
            const int8_t *q = x->q + b * TF_BLOCK * n;
            const float *scale = x->scale + b * n;
            add_nibbles(p, b, q, 4 * n, scale, 1.0f, first, left_n);
            add_nibbles(p, b, q + 4 * PASS, 4 * n, scale + PASS, 1.0f, rest, right_n);
            if (tf_has_low(x, b)) {
                const int8_t *low = x->low + b * TF_BLOCK * n;
                add_nibbles(p, b, low, 4 * n, scale, TF_LOW, first, left_n);
                add_nibbles(p, b, low + 4 * PASS, 4 * n, scale + PASS, TF_LOW, rest, right_n);
            }
        }
        end_group(scales, g, first, tiles, left_n);
        end_group(scales, g, rest, tiles + PASS * TF_PANEL_ROWS, right_n);
    }
}

static __attribute__((noinline)) void few(const tf_planes *planes, int64_t panel, const tf_columns *x, float *tiles) {
    switch (x->n) {
        case 1: few_n(planes, panel, x, tiles, 1); break;
        case 2: few_n(planes, panel, x, tiles, 2); break;
        case 3: few_n(planes, panel, x, tiles, 3); break;
        case 4: few_n(planes, panel, x, tiles, 4); break;
        case 5: few_n(planes, panel, x, tiles, 5); break;
        case 6: few_n(planes, panel, x, tiles, 6); break;
        case 7: few_n(planes, panel, x, tiles, 7); break;
        default: few_n(planes, panel, x, tiles, 8); break;
    }
}

/* A function for each, or GCC runs out of registers. */
static __attribute__((noinline)) void many_6(const tf_planes *planes, int64_t panel, const tf_columns *x,
                                             int32_t blocks, float *tiles) {
    many(planes, panel, x, blocks, tiles, 6);
}

static __attribute__((noinline)) void many_8(const tf_planes *planes, int64_t panel, const tf_columns *x,
                                             int32_t blocks, float *tiles) {
    many(planes, panel, x, blocks, tiles, 8);
}

void tf_wide_avx512(const tf_planes *planes, int64_t panel, const tf_columns *x, int32_t blocks, float *tiles) {
    const int32_t n = (blocks - 1) * TF_MAX_COLUMNS + x[blocks - 1].n;
    for (int i = 0; i < PANELS; i++) {
        memset(tiles + i * TF_WIDE_COLUMNS * TF_PANEL_ROWS, 0, sizeof(float) * TF_PANEL_ROWS * (size_t)n);
    }
    for (int32_t i = 0; planes->bits == 4 && i < blocks; i++) {
        few(planes, panel, &x[i], tiles + i * TF_MAX_COLUMNS * TF_PANEL_ROWS);
    }
    if (planes->bits != 4) {
        (planes->bits == 6 ? many_6 : many_8)(planes, panel, x, blocks, tiles);
    }
}
