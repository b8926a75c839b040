/* An engine over a residual file in memory, and what its graphs must give. */
#pragma once

#include "graph.h"
#include "residual_builder.h"

enum { MAX_N = 32, MAX_ROWS = 33 }; /* of what check_added() compares */

typedef struct setup {
    uint8_t *data;
    tf_residual *residual;
    tf_engine *engine;
} setup;

/* The first `tensors` tensors of the file. */
setup set_up(const test_file *what, int64_t tensors);
void tear_down(setup *s, test_graph *g);
/* The weight a residual belongs to. */
struct ggml_tensor *weight(test_graph *g, const test_tensor *t, enum ggml_type type);
void set_gaussian(struct ggml_tensor *t, float deviation, uint64_t seed);
/* base: what the graph gives without the engine. The rest of `got` must be R x; x: n columns. */
void check_added(const setup *s, int64_t index, int64_t expert, int32_t bits, const float *got, const float *base,
                 const float *x, int64_t n);
/* One pass, which must succeed; without an engine, the graph alone. */
float *run(test_graph *g, tf_engine *engine, tf_mode mode, const struct ggml_tensor *result);
