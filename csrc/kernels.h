/* A kernel multiplies one panel of 16 rows by one block of columns. The scalar kernels are the
 * definition; the others give the same bits, because every lane is a row of its own and does the same
 * floating-point operations in the same order. For planes:
 *
 *   for each group:           sum = x.offset[group]
 *     for each block of 32:   sum = fma(dot(codes, x.q), x.scale[block], sum)     dot is an exact integer
 *   tile = fma(sum, scales[group], tile)
 *
 * and for a base of Q2_K to Q6_K, where A and B are the two sub-blocks of 16 of a block of 32:
 *
 *   for each 256 inputs:
 *     for each block of 32:   sum  = fma(product, x.scale[block], sum)
 *                             mins = fma(minimum, x.scale[block], mins)         not of Q3_K, Q6_K
 *     tile = fma(128 * d, sum, tile), then fma(-128 * dmin, mins, tile)
 *
 *               product                                                 minimum (both are exact integers)
 *   Q2_K        scaleA * dotA + scaleB * dotB                           minA * sumA + minB * sumB
 *   Q4_K, Q5_K  scale * dot                                             min * sum
 *   Q3_K, Q6_K  scaleA * (dotA - 4 or 32 * sumA) + the same of B
 *
 * No product is above 2^24, so float32 may compute it as well.
 *
 * Where x.flags says so, the same is done once more for the block with x.low, at x.scale / 256: these are
 * the next 8 bits of activations whose rounding would weigh most (quantize.c). Nothing depends on how
 * many columns stand beside each other, so neither does a token's result. */
#pragma once

#include <string.h>

#include "base_panels.h"

enum { TF_BLOCK = 32, TF_MAX_COLUMNS = 8, TF_WIDE_PANELS = 2, TF_WIDE_COLUMNS = 64 };

/* 127 * 256: in 8 bits the largest of a block has no error. 127 * 256 + 127 would fit, but be half a step off. */
#define TF_LARGEST 32512.0f
#define TF_LOW (1.0f / 256.0f) /* what a unit of low is to one of q */

/* n columns of activations, quantized (quantize.c), interleaved for broadcast loads. */
typedef struct tf_columns {
    int32_t n;
    int8_t *q;           /* [width / 4][n][4] */
    int8_t *low;         /* [width / 4][n][4]  of blocks with a flag, zero in columns without */
    float *scale;        /* [width / 32][n]    of q, over 128 */
    float *offset;       /* [groups][n]        what the codes' offset adds, summed over the group */
    float *base_offset;  /* [width / 32][n]    the same for base planes: groups of 32, offset -128, q and low */
    int32_t *sums;       /* [width / 32][n]    sums of q over both halves of a block: A | B << 16 */
    int32_t *low_sums;   /* [width / 32][n]    the same of low, in blocks with a flag */
    uint8_t *flags;      /* [width / 32][8]    a byte a column; NULL: low is not used */
    const uint8_t *next; /* read after a base's panel: 256 bytes for 32 inputs, fetched meanwhile; NULL: nothing */
} tf_columns;

/* Sums over both halves of a block in the form that tf_columns holds. */
static inline int32_t tf_pack_sums(int32_t first, int32_t second) {
    return (int32_t)((uint32_t)(first & 0xffff) | (uint32_t)second << 16);
}

/* Whether any column of the block has low codes. */
static inline bool tf_has_low(const tf_columns *x, int64_t block) {
    uint64_t all = 0;
    if (x->flags != NULL) {
        memcpy(&all, x->flags + block * TF_MAX_COLUMNS, sizeof all);
        all <<= 8 * (TF_MAX_COLUMNS - x->n); /* little-endian: drops the bytes of columns that are not there */
    }
    return all != 0;
}

/* tile: float32 [x->n][16], overwritten. */
typedef void (*tf_panel_kernel)(const tf_planes *planes, int64_t panel, const tf_columns *x, float *tile);
/* The same for two panels and several blocks of columns, at most TF_WIDE_COLUMNS in all, each but the last with
 * TF_MAX_COLUMNS. tiles: float32 [2][TF_WIDE_COLUMNS][16], aligned to 64 bytes. */
typedef void (*tf_wide_kernel)(const tf_planes *planes, int64_t panel, const tf_columns *x, int32_t blocks,
                               float *tiles);
/* The same for a base of Q2_K to Q6_K. */
typedef void (*tf_supers_kernel)(const tf_base *base, int64_t panel, const tf_columns *x, float *tile);
/* As tf_wide_kernel, for a base of Q2_K. */
typedef void (*tf_wide_supers_kernel)(const tf_base *base, int64_t panel, const tf_columns *x, int32_t blocks,
                                      float *tiles);
/* Quantizes 32 activations to 16 bits, x = scale * (256 * high + low), and returns scale. sums: of high and of low,
 * as tf_columns has them. */
typedef float (*tf_quantizer)(const float *x, int8_t *high, int8_t *low, int32_t *sums);

typedef struct tf_kernel {
    const char *name;
    tf_panel_kernel run;
    tf_supers_kernel run_supers;
    tf_quantizer quantize;
    int32_t max_columns;                   /* of a block, at most TF_MAX_COLUMNS */
    tf_wide_kernel run_wide;               /* may be NULL */
    tf_wide_supers_kernel run_supers_wide; /* likewise */
    int32_t wide_from[2];                  /* columns from which it is faster: for codes of 4 bits, of more */
    int32_t supers_wide_from;
    bool (*supported)(void);
    /* Does `rounds` times the instruction that products are made of, on registers only; returns the
     * multiplications and additions done. NULL: no peak to compare with. */
    int64_t (*peak)(int64_t rounds);
} tf_kernel;

extern const tf_kernel tf_kernel_scalar;
extern const tf_kernel tf_kernel_avx2;
extern const tf_kernel tf_kernel_avxvnni;
extern const tf_kernel tf_kernel_avx512;
extern const tf_kernel tf_kernel_neon;

/* Their run_supers, which have files of their own. */
void tf_supers_scalar(const tf_base *base, int64_t panel, const tf_columns *x, float *tile);
void tf_supers_avx2(const tf_base *base, int64_t panel, const tf_columns *x, float *tile);
void tf_supers_avxvnni(const tf_base *base, int64_t panel, const tf_columns *x, float *tile);
void tf_supers_avx512(const tf_base *base, int64_t panel, const tf_columns *x, float *tile);
void tf_supers_neon(const tf_base *base, int64_t panel, const tf_columns *x, float *tile);

void tf_wide_avx512(const tf_planes *planes, int64_t panel, const tf_columns *x, int32_t blocks, float *tiles);
void tf_supers_wide_avx512(const tf_base *base, int64_t panel, const tf_columns *x, int32_t blocks, float *tiles);

/* NULL name: the default. Returns NULL, with a message, for a name this CPU cannot run. */
const tf_kernel *tf_kernel_find(const char *name);
