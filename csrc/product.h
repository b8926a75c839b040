/* Residual products: panels shared out over threads. */
#pragma once

#include "activations.h"
#include "pool.h"

/* out[j][row] += (R x_j)[row] for every column j of x. */
typedef struct tf_product {
    tf_planes planes;
    const tf_activations *x;
    float *const *out; /* [x->n], each to `rows` floats */
} tf_product;

/* Runs the products together; each is one matrix and one set of columns. */
tf_status tf_products_run(tf_pool *pool, const tf_kernel *kernel, const tf_product *products, int64_t n);
/* Bytes of planes and scales that a product reads. */
uint64_t tf_product_bytes(const tf_planes *planes);
