/* A graph in pieces. ggml has computed a piece, and nothing after it, when its last node's result is changed; no later
 * op has been fused with it. The same is done by ggml's scheduler for its eval callback. */
#include "plugin.h"

/* The piece as a graph of its own, made of public calls. It does not know how often results are used elsewhere, which
 * keeps backends from fusing ops. */
static enum ggml_status compute_copy(tf_compute_function compute, ggml_backend_t backend, struct ggml_cgraph *graph,
                                     int first, int end) {
    const size_t n = (size_t)(end - first);
    struct ggml_context *ctx =
        ggml_init((struct ggml_init_params){ggml_graph_overhead_custom(n, false) + 1024, NULL, true});
    if (ctx == NULL) {
        return GGML_STATUS_ALLOC_FAILED;
    }
    struct ggml_cgraph *piece = ggml_new_graph_custom(ctx, n, false);
    for (int i = first; i < end; i++) {
        ggml_graph_add_node(piece, ggml_graph_node(graph, i));
    }
    const enum ggml_status status = compute(backend, piece);
    ggml_backend_synchronize(backend);
    ggml_free(ctx);
    return status;
}

static enum ggml_status compute_piece(tf_compute_function compute, ggml_backend_t backend, struct ggml_cgraph *graph,
                                      tf_view_function view, int first, int end) {
    if (view == NULL) {
        return compute_copy(compute, backend, graph, first, end);
    }
    tf_graph_view piece = view(graph, first, end);
    return compute(backend, (struct ggml_cgraph *)(void *)&piece);
}

enum ggml_status tf_segments_compute(tf_compute_function compute, ggml_backend_t backend, struct ggml_cgraph *graph,
                                     tf_view_function view, const tf_visitor *visitor) {
    const int n = ggml_graph_n_nodes(graph);
    int first = 0;
    for (int i = 0; i < n; i++) {
        struct ggml_tensor *node = ggml_graph_node(graph, i);
        if (!visitor->wants(visitor->user, node)) {
            continue;
        }
        const enum ggml_status status = compute_piece(compute, backend, graph, view, first, i + 1);
        if (status != GGML_STATUS_SUCCESS) {
            return status;
        }
        ggml_backend_synchronize(backend);
        if (!visitor->apply(visitor->user, node)) {
            return GGML_STATUS_FAILED;
        }
        first = i + 1;
    }
    if (first == 0) {
        return compute(backend, graph);
    }
    return first < n ? compute_piece(compute, backend, graph, view, first, n) : GGML_STATUS_SUCCESS;
}
