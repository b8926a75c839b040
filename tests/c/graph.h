/* A ggml graph on the CPU backend, run by the scheduler with the engine's callback. */
#pragma once

#include "ggml-backend.h"
#include "ggml.h"
#include "test.h"

typedef struct test_graph {
    ggml_backend_t cpu;
    struct ggml_context *data, *nodes; /* weights and inputs; what is computed */
    ggml_backend_buffer_t buffer;
    ggml_backend_sched_t sched;
    struct ggml_cgraph *graph;
} test_graph;

void test_graph_new(test_graph *g);
void test_graph_free(test_graph *g);
/* A weight or input; named if name is not NULL. */
struct ggml_tensor *test_graph_data(test_graph *g, const char *name, enum ggml_type type, int64_t ne0, int64_t ne1,
                                    int64_t ne2);
/* A result to be read after the run; returns it. */
struct ggml_tensor *test_graph_result(test_graph *g, struct ggml_tensor *node);
/* After all tensors and results: allocates. Data may be set from here on. */
void test_graph_ready(test_graph *g);
/* Of any type: quantized if it must be. */
void test_graph_set(struct ggml_tensor *t, const float *values);
/* Without an engine there is no callback. */
void test_graph_run(test_graph *g, tf_engine *engine);
/* With a callback given by its address, which may be NULL. */
void test_graph_watched(test_graph *g, const void *callback, void *user);
/* The values of a contiguous float32 tensor. */
float *test_graph_get(const struct ggml_tensor *t);
