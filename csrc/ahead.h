/* Products that are begun as soon as their activations exist, while the device still computes the base's. */
#pragma once

#include "ggml.h"
#include "product.h"
#include "registry.h"

typedef struct tf_ahead tf_ahead;

/* NULL: out of memory, or TWOFOLD_OVERLAP is 0. */
tf_ahead *tf_ahead_new(const tf_registry *registry, const tf_kernel *kernel, tf_pool *pool);
void tf_ahead_free(tf_ahead *a);
/* Notes that x was multiplied by the entry's matrix, so that next time it is known as soon as x is. */
void tf_ahead_learn(tf_ahead *a, const tf_entry *entry, const struct ggml_tensor *x);
/* Whether matrices are known that a node of this name is multiplied by. */
bool tf_ahead_expects(const tf_ahead *a, const struct ggml_tensor *x);
/* Begins with them, in the pool's other threads. quantized: x; it stays as it is until tf_ahead_finish().
 * bytes: of residual that will be read, are added to it. */
void tf_ahead_start(tf_ahead *a, const struct ggml_tensor *x, const tf_activations *quantized, int32_t bits,
                    uint64_t *bytes);
/* R x [n][rows] of the entry, completed with the caller's help; NULL if it was not begun. */
const float *tf_ahead_take(tf_ahead *a, const tf_entry *entry, const struct ggml_tensor *x);
/* Waits for what was begun and forgets it. */
void tf_ahead_finish(tf_ahead *a);
