#include "engine_setup.h"

setup set_up(const test_file *what, int64_t tensors) {
    test_file part = *what;
    part.count = tensors;
    setup s;
    size_t bytes;
    s.data = test_file_bytes(&part, &bytes);
    CHECK(tf_residual_from_memory(s.data, bytes, "memory", &s.residual) == TF_OK);
    CHECK(tf_engine_new(s.residual, 2, &s.engine) == TF_OK);
    return s;
}

void tear_down(setup *s, test_graph *g) {
    test_graph_free(g);
    tf_engine_free(s->engine);
    tf_residual_free(s->residual);
    free(s->data);
}

struct ggml_tensor *weight(test_graph *g, const test_tensor *t, enum ggml_type type) {
    return test_graph_data(g, t->name, type, t->width, t->rows, t->experts);
}

void set_gaussian(struct ggml_tensor *t, float deviation, uint64_t seed) {
    float *values = test_gaussians(ggml_nelements(t), deviation, seed);
    test_graph_set(t, values);
    free(values);
}

void check_added(const setup *s, int64_t index, int64_t expert, int32_t bits, const float *got, const float *base,
                 const float *x, int64_t n) {
    tf_residual_tensor t;
    CHECK(tf_residual_get(s->residual, index, &t) == TF_OK);
    tf_planes planes = tf_residual_planes(&t, expert);
    planes.bits = bits;
    float *r = test_alloc((size_t)(t.rows * t.width) * sizeof *r);
    CHECK(tf_residual_decode(&planes, r) == TF_OK);
    double want[MAX_N * MAX_ROWS] = {0};
    float added[MAX_N * MAX_ROWS];
    for (int64_t i = 0; i < n * t.rows; i++) {
        for (int64_t c = 0; c < t.width; c++) {
            want[i] += (double)r[i % t.rows * t.width + c] * x[i / t.rows * t.width + c];
        }
        added[i] = got[i] - base[i];
    }
    CHECK(test_relative_rms(added, want, n * t.rows) < 0.01);
    free(r);
}

float *run(test_graph *g, tf_engine *engine, tf_mode mode, const struct ggml_tensor *result) {
    if (engine != NULL) {
        tf_engine_begin(engine, mode);
    }
    test_graph_run(g, engine);
    CHECK(engine == NULL || tf_engine_end(engine) == TF_OK);
    return test_graph_get(result);
}
