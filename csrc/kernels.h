/* A kernel multiplies one panel of 16 rows by one block of columns. The scalar kernel is the
 * definition; the others give the same bits, because every lane is a row of its own and does the same
 * floating-point operations in the same order:
 *
 *   for each group:           sum = x.offset[group]
 *     for each block of 32:   sum = fma(dot(codes, x.q), x.scale[block], sum)     dot is an exact integer
 *   tile = fma(sum, scales[group], tile)
 *
 * Nothing depends on how many columns stand beside each other, so neither does a token's result. */
#pragma once

#include "twofold.h"

enum { TF_BLOCK = 32, TF_MAX_COLUMNS = 8 };

/* n columns of activations, quantized (activations.c), interleaved for broadcast loads. */
typedef struct tf_columns {
    int32_t n;
    int8_t *q;     /* [width / 4][n][4] */
    float *scale;  /* [width / 32][n]   of x, over 128 */
    float *offset; /* [groups][n]       what tf_code_offset() adds, summed over the group */
} tf_columns;

/* tile: float32 [x->n][16], overwritten. */
typedef void (*tf_panel_kernel)(const tf_planes *planes, int64_t panel, const tf_columns *x, float *tile);

typedef struct tf_kernel {
    const char *name;
    tf_panel_kernel run;
    int32_t max_columns; /* of a block, at most TF_MAX_COLUMNS */
    bool (*supported)(void);
} tf_kernel;

extern const tf_kernel tf_kernel_scalar;
extern const tf_kernel tf_kernel_avx2;
extern const tf_kernel tf_kernel_avxvnni;
extern const tf_kernel tf_kernel_avx512;

/* NULL name: the default. Returns NULL, with a message, for a name this CPU cannot run. */
const tf_kernel *tf_kernel_find(const char *name);
