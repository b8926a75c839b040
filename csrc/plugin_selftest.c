/* Before anything is changed for good: a graph of two nodes on the CPU, computed through the hooks, cut after the first
 * node and changed there, then with that node computed by us. Any surprise and the plugin stays out of the way. */
#include <string.h>

#include "ggml-alloc.h"
#include "plugin.h"

enum { WIDTH = 32, ROWS = 4, ADDED = 3, CLAIMED = 7 };

typedef struct bench {
    struct ggml_context *ctx;
    struct ggml_tensor *w, *x, *product, *twice, *custom;
    struct ggml_cgraph *graph;
    ggml_backend_buffer_t buffer;
    bool claim;
    int computed;
} bench;

static bench *current; /* for the computer, which knows only backends */
static tf_view_function view;

static void fill(struct ggml_tensor *node, int thread, int threads, void *user) {
    (void)threads;
    (void)user;
    for (int i = 0; thread == 0 && i < ROWS; i++) {
        ((float *)node->data)[i] = CLAIMED;
    }
}

static bool wants(void *user, struct ggml_tensor *node) {
    bench *b = user;
    if (node != b->product) {
        return false;
    }
    if (b->claim) {
        memcpy(node->op_params, b->custom->op_params, sizeof node->op_params);
        node->op = GGML_OP_CUSTOM;
    }
    return !b->claim;
}

static bool apply(void *user, struct ggml_tensor *node) {
    float values[ROWS];
    (void)user;
    ggml_backend_tensor_get(node, values, 0, sizeof values);
    for (int i = 0; i < ROWS; i++) {
        values[i] += ADDED;
    }
    ggml_backend_tensor_set(node, values, 0, sizeof values);
    return true;
}

static enum ggml_status computer(tf_compute_function compute, ggml_backend_t backend, struct ggml_cgraph *graph,
                                 bool on_cpu) {
    current->computed += on_cpu;
    const tf_visitor visitor = {wants, apply, current};
    return tf_segments_compute(compute, backend, graph, view, &visitor);
}

static const char *check_header(void) {
    enum { OBJECT = 32 }; /* what ggml keeps before each object of a context */
    if (ggml_tensor_overhead() != sizeof(struct ggml_tensor) + OBJECT) {
        return "tensors have another size";
    }
    if (strcmp(ggml_op_name(GGML_OP_MUL_MAT), "MUL_MAT") != 0 || strcmp(ggml_op_name(GGML_OP_NONE), "NONE") != 0 ||
        strcmp(ggml_op_name(GGML_OP_MUL_MAT_ID), "MUL_MAT_ID") != 0 ||
        strcmp(ggml_op_name(GGML_OP_CUSTOM), "CUSTOM") != 0) {
        return "ops have other numbers";
    }
    return NULL;
}

static const char *build(bench *b, ggml_backend_t backend) {
    const size_t bytes = 16 * ggml_tensor_overhead() + ggml_graph_overhead();
    b->ctx = ggml_init((struct ggml_init_params){bytes, NULL, true});
    if (b->ctx == NULL) {
        return "no memory";
    }
    b->w = ggml_set_name(ggml_new_tensor_2d(b->ctx, GGML_TYPE_F32, WIDTH, ROWS), "a weight");
    b->x = ggml_new_tensor_2d(b->ctx, GGML_TYPE_F32, WIDTH, 1);
    b->product = ggml_mul_mat(b->ctx, b->w, b->x);
    b->twice = ggml_scale(b->ctx, b->product, 2.0f);
    b->custom = ggml_custom_4d(b->ctx, GGML_TYPE_F32, ROWS, 1, 1, 1, NULL, 0, fill, GGML_N_TASKS_MAX, NULL);
    b->graph = ggml_new_graph(b->ctx);
    ggml_build_forward_expand(b->graph, b->twice);
    b->buffer = ggml_backend_alloc_ctx_tensors(b->ctx, backend);
    if (b->buffer == NULL || ggml_graph_n_nodes(b->graph) != 2 || ggml_graph_node(b->graph, 0) != b->product) {
        return "a graph of two nodes is not one";
    }
    if (b->product->op != GGML_OP_MUL_MAT || b->product->src[0] != b->w || b->product->src[1] != b->x ||
        b->product->ne[0] != ROWS || strcmp(b->w->name, "a weight") != 0 || b->w->buffer != b->buffer ||
        b->w->nb[1] != WIDTH * sizeof(float) || b->custom->op != GGML_OP_CUSTOM || !tf_on_host(b->w)) {
        return "tensors are laid out otherwise";
    }
    float ones[WIDTH * ROWS];
    for (int i = 0; i < WIDTH * ROWS; i++) {
        ones[i] = 1.0f;
    }
    ggml_backend_tensor_set(b->w, ones, 0, sizeof ones);
    ggml_backend_tensor_set(b->x, ones, 0, WIDTH * sizeof *ones);
    return NULL;
}

/* Computes the graph and compares all results. */
static bool gives(bench *b, ggml_backend_t backend, float expected) {
    float values[ROWS];
    const int before = b->computed;
    if (ggml_backend_graph_compute(backend, b->graph) != GGML_STATUS_SUCCESS || b->computed != before + 1) {
        return false;
    }
    ggml_backend_tensor_get(b->twice, values, 0, sizeof values);
    for (int i = 0; i < ROWS; i++) {
        if (values[i] != expected) {
            return false;
        }
    }
    return true;
}

static const char *try_out(bench *b, ggml_backend_t backend) {
    const char *problem = build(b, backend);
    if (problem != NULL) {
        return problem;
    }
    current = b;
    view = tf_ggml_graph_view();
    if (!gives(b, backend, 2 * (WIDTH + ADDED))) {
        return "a graph cut in two gives another result";
    }
    view = NULL;
    if (!gives(b, backend, 2 * (WIDTH + ADDED))) {
        return "a graph copied in two pieces gives another result";
    }
    b->claim = true;
    if (!gives(b, backend, 2 * CLAIMED)) {
        return "a node of our own gives another result";
    }
    return NULL;
}

const char *tf_selftest(ggml_backend_dev_t cpu) {
    const char *problem = check_header();
    if (problem != NULL) {
        return problem;
    }
    const int64_t made = tf_hooks_made(), alive = tf_hooks_alive();
    tf_hooks_set_computer(computer);
    ggml_backend_t backend = ggml_backend_dev_init(cpu, NULL);
    if (backend == NULL || tf_hooks_made() != made + 1) {
        if (backend != NULL) {
            ggml_backend_free(backend);
        }
        return "the CPU's backends are not made where they should";
    }
    bench b = {0};
    problem = try_out(&b, backend);
    if (b.buffer != NULL) {
        ggml_backend_buffer_free(b.buffer);
    }
    ggml_free(b.ctx);
    ggml_backend_free(backend);
    current = NULL;
    return problem == NULL && tf_hooks_alive() != alive ? "backends are not freed where they should" : problem;
}
