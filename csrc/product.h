/* Products of a matrix (base, residual, or both) with quantized activations, shared out over threads. */
#pragma once

#include "quantize.h"

/* out_j (+)= (B + R) x_j for every column j of x. */
typedef struct tf_product {
    const tf_base *base; /* NULL: without */
    bool has_residual;
    tf_planes residual;
    const tf_activations *x;
    int64_t first_block, blocks; /* of x, that are multiplied; 0 blocks: all */
    bool add;                    /* to what is there, or overwrite it */
    float *out;                  /* column j at out + j * stride, unless */
    int64_t stride;
    float *const *scatter; /* says where each column goes */
} tf_product;

/* A thread's panels: a cache line each. */
typedef struct tf_share {
    _Alignas(64) _Atomic int64_t next;
    int64_t end;
} tf_share;

/* Panels left to do, one share a thread. */
void tf_shares_init(tf_share *shares, int32_t count, const tf_product *product);
/* Does share `own` of each of n products, then what the others have left; shares: [n][count]. */
void tf_shares_run(tf_share *shares, int32_t count, int32_t own, const tf_kernel *kernel, const tf_product *products,
                   int64_t n);

/* Runs the products together on the pool. */
tf_status tf_products_run(tf_pool *pool, const tf_kernel *kernel, const tf_product *products, int64_t n);
/* Bytes of planes and scales that a residual product reads. */
uint64_t tf_residual_bytes_read(const tf_planes *planes);
