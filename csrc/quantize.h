/* Makes quantized activations of float32 ones. */
#pragma once

#include <stdatomic.h>

#include "activations.h"
#include "pool.h"

/* Where column j begins. */
typedef struct tf_source {
    const float *(*column)(const void *of, int64_t j);
    const void *of;
} tf_source;

/* What threads share that quantize the same activations; zero at first. [0] rounding, [1] settling. */
typedef struct tf_quantizing {
    _Atomic int64_t next[2], done[2];
} tf_quantizing;

/* Takes part in quantizing all columns of a; returns when they are done. */
void tf_quantize_together(tf_quantizing *shared, const tf_activations *a, const tf_kernel *kernel, tf_source x);
/* Quantizes all columns of a, x: float32 [n][width], on the pool. */
void tf_quantize_columns(tf_pool *pool, const tf_kernel *kernel, const tf_activations *a, const float *x);
