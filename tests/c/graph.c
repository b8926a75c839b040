#include "graph.h"

#include "ggml-cpu.h"

static struct ggml_context *context(void) {
    struct ggml_context *made =
        ggml_init((struct ggml_init_params){ggml_tensor_overhead() * 64 + ggml_graph_overhead(), NULL, true});
    CHECK(made != NULL);
    return made;
}

void test_graph_new(test_graph *g) {
    *g = (test_graph){.cpu = ggml_backend_cpu_init(), .data = context(), .nodes = context()};
    CHECK(g->cpu != NULL);
    ggml_backend_cpu_set_n_threads(g->cpu, 1);
    g->graph = ggml_new_graph(g->nodes);
}

void test_graph_free(test_graph *g) {
    ggml_backend_sched_free(g->sched);
    ggml_backend_buffer_free(g->buffer);
    ggml_free(g->nodes);
    ggml_free(g->data);
    ggml_backend_free(g->cpu);
}

struct ggml_tensor *test_graph_data(test_graph *g, const char *name, enum ggml_type type, int64_t ne0, int64_t ne1,
                                    int64_t ne2) {
    struct ggml_tensor *t = ggml_new_tensor_3d(g->data, type, ne0, ne1, ne2);
    return name != NULL ? ggml_set_name(t, name) : t;
}

struct ggml_tensor *test_graph_result(test_graph *g, struct ggml_tensor *node) {
    ggml_set_output(node);
    ggml_build_forward_expand(g->graph, node);
    return node;
}

void test_graph_ready(test_graph *g) {
    g->buffer = ggml_backend_alloc_ctx_tensors(g->data, g->cpu);
    CHECK(g->buffer != NULL);
    g->sched = ggml_backend_sched_new(&g->cpu, NULL, 1, 64, false, false);
    CHECK(ggml_backend_sched_alloc_graph(g->sched, g->graph));
}

void test_graph_set(struct ggml_tensor *t, const float *values) {
    const size_t bytes = ggml_nbytes(t);
    void *converted = test_alloc(bytes);
    CHECK(tf_quantize((int32_t)t->type, values, ggml_nrows(t), t->ne[0], NULL, converted, bytes) == TF_OK);
    ggml_backend_tensor_set(t, converted, 0, bytes);
    free(converted);
}

void test_graph_run(test_graph *g, tf_engine *engine) {
    test_graph_watched(g, engine != NULL ? tf_engine_callback() : NULL, engine);
}

void test_graph_watched(test_graph *g, const void *address, void *user) {
    /* POSIX lets a function's address stand in a void pointer, ISO C does not. */
    ggml_backend_sched_eval_callback callback = NULL;
    memcpy(&callback, &address, sizeof callback);
    ggml_backend_sched_set_eval_callback(g->sched, callback, user);
    CHECK(ggml_backend_sched_graph_compute(g->sched, g->graph) == GGML_STATUS_SUCCESS);
}

float *test_graph_get(const struct ggml_tensor *t) {
    float *values = test_alloc(ggml_nbytes(t));
    ggml_backend_tensor_get(t, values, 0, ggml_nbytes(t));
    return values;
}
