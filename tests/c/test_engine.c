/* The engine in real graphs: draft leaves them alone, verify adds what the residual says. */
#include "engine_setup.h"

enum { WIDTH = 96, ROWS = 33, OTHER_ROWS = 16, EXPERTS = 4 };

static const test_file file = {
    8, 64, 2, {{"blk.0.ffn_up.weight", ROWS, WIDTH, 1}, {"blk.0.ffn_gate.weight", OTHER_ROWS, WIDTH, 1}}};
static const test_file moe_file = {6, 32, 1, {{"blk.0.ffn_up_exps.weight", ROWS, WIDTH, EXPERTS}}};

/* Runs base, draft and verify, and compares them; x: the columns of src1, one after the other. */
static void check_modes(const setup *s, test_graph *g, const struct ggml_tensor *result, const float *x, int64_t n) {
    float *base = run(g, NULL, TF_DRAFT, result), *draft = run(g, s->engine, TF_DRAFT, result);
    CHECK(memcmp(base, draft, ggml_nbytes(result)) == 0);
    for (int32_t bits = 0; bits <= tf_residual_bits(s->residual); bits += bits == 0 ? 4 : 2) {
        CHECK(tf_engine_set_bits(s->engine, bits) == TF_OK);
        float *got = run(g, s->engine, TF_VERIFY, result);
        if (bits == 0) {
            CHECK(memcmp(base, got, ggml_nbytes(result)) == 0);
        } else {
            check_added(s, 0, 0, bits, got, base, x, n);
        }
        free(got);
    }
    free(base);
    free(draft);
}

static void test_mul_mat(enum ggml_type type, int64_t n) {
    setup s = set_up(&file, 1);
    test_graph g;
    test_graph_new(&g);
    struct ggml_tensor *w = weight(&g, &file.tensors[0], type),
                       *x = test_graph_data(&g, NULL, GGML_TYPE_F32, WIDTH, n, 1);
    struct ggml_tensor *y = test_graph_result(&g, ggml_mul_mat(g.nodes, w, x));
    test_graph_ready(&g);
    float *values = test_gaussians(n * WIDTH, 1.0f, 3);
    set_gaussian(w, 0.1f, 1);
    test_graph_set(x, values);
    check_modes(&s, &g, y, values, n);
    const tf_counters counters = tf_engine_counters(s.engine);
    CHECK(counters.nodes == 3 && counters.residual_bytes > 0 && counters.to_device_bytes == 0);
    free(values);
    tear_down(&s, &g);
}

/* With base weights of float32 the whole result is known exactly: W x + R x. */
static void test_whole_result(void) {
    setup s = set_up(&file, 1);
    test_graph g;
    test_graph_new(&g);
    struct ggml_tensor *w = weight(&g, &file.tensors[0], GGML_TYPE_F32);
    struct ggml_tensor *x = test_graph_data(&g, NULL, GGML_TYPE_F32, WIDTH, 4, 1);
    struct ggml_tensor *y = test_graph_result(&g, ggml_mul_mat(g.nodes, w, x));
    test_graph_ready(&g);
    float *values = test_gaussians(4 * WIDTH, 1.0f, 3), *weights = test_gaussians(ROWS * WIDTH, 0.02f, 1);
    test_graph_set(w, weights);
    test_graph_set(x, values);
    float *got = run(&g, s.engine, TF_VERIFY, y), base[4 * ROWS];
    for (int64_t i = 0; i < 4 * ROWS; i++) {
        double sum = 0.0;
        for (int64_t c = 0; c < WIDTH; c++) {
            sum += (double)weights[i % ROWS * WIDTH + c] * values[i / ROWS * WIDTH + c];
        }
        base[i] = (float)sum;
    }
    check_added(&s, 0, 0, 8, got, base, values, 4);
    free(got);
    free(values);
    free(weights);
    tear_down(&s, &g);
}

/* ---- experts --------------------------------------------------------------------------------- */

/* Every (token, slot) is checked by itself. columns: 1, or one for every slot. */
static void test_mul_mat_id(enum ggml_type type, int64_t columns) {
    enum { USED = 2, TOKENS = 5 };
    static const int32_t chosen[TOKENS * USED] = {0, 3, 3, 1, 1, 0, 3, 0, 0, 1}; /* nobody asks for expert 2 */
    setup s = set_up(&moe_file, 1);
    test_graph g;
    test_graph_new(&g);
    struct ggml_tensor *w = weight(&g, &moe_file.tensors[0], type);
    struct ggml_tensor *x = test_graph_data(&g, NULL, GGML_TYPE_F32, WIDTH, columns, TOKENS);
    struct ggml_tensor *ids = test_graph_data(&g, NULL, GGML_TYPE_I32, USED, TOKENS, 1);
    struct ggml_tensor *y = test_graph_result(&g, ggml_mul_mat_id(g.nodes, w, x, ids));
    test_graph_ready(&g);
    float *values = test_gaussians(columns * TOKENS * WIDTH, 1.0f, 3);
    set_gaussian(w, 0.1f, 1);
    test_graph_set(x, values);
    ggml_backend_tensor_set(ids, chosen, 0, sizeof chosen);
    float *base = run(&g, NULL, TF_DRAFT, y), *draft = run(&g, s.engine, TF_DRAFT, y);
    float *got = run(&g, s.engine, TF_VERIFY, y);
    CHECK(memcmp(base, draft, ggml_nbytes(y)) == 0);
    for (int64_t i = 0; i < TOKENS * USED; i++) {
        const float *column = values + (i / USED * columns + i % USED % columns) * WIDTH;
        check_added(&s, 0, chosen[i], 6, got + i * ROWS, base + i * ROWS, column, 1);
    }
    free(base);
    free(draft);
    free(got);
    free(values);
    tear_down(&s, &g);
}

/* ---- src1 that lies in other ways -------------------------------------------------------------- */

typedef enum layout { PERMUTED, STRIDED, STRIDED_3D } layout;

static struct ggml_tensor *view_of(test_graph *g, struct ggml_tensor *x, layout kind) {
    switch (kind) {
        case PERMUTED: return ggml_permute(g->nodes, x, 0, 2, 1, 3);
        case STRIDED: return ggml_view_2d(g->nodes, x, WIDTH, 6, 2 * x->nb[1], x->nb[1]);
        default: return ggml_view_3d(g->nodes, x, WIDTH, 2, 2, 2 * x->nb[1], x->nb[2], x->nb[1]);
    }
}

/* Index in x, of 3 x 4 columns, of column i of the view. */
static int64_t column_of(layout kind, int64_t i) {
    switch (kind) {
        case PERMUTED: return i % 3 * 4 + i / 3;
        case STRIDED: return i * 2 + 1;
        default: return i / 2 * 4 + i % 2 * 2 + 1;
    }
}

static void test_layout(layout kind) {
    setup s = set_up(&file, 1);
    test_graph g;
    test_graph_new(&g);
    struct ggml_tensor *w = weight(&g, &file.tensors[0], GGML_TYPE_F32);
    struct ggml_tensor *x = test_graph_data(&g, NULL, GGML_TYPE_F32, WIDTH, 4, 3);
    struct ggml_tensor *view = view_of(&g, x, kind);
    struct ggml_tensor *y = test_graph_result(&g, ggml_mul_mat(g.nodes, w, view));
    const int64_t n = ggml_nrows(view);
    test_graph_ready(&g);
    float *values = test_gaussians(12 * WIDTH, 1.0f, 3), columns[12 * WIDTH];
    for (int64_t i = 0; i < n; i++) {
        memcpy(columns + i * WIDTH, values + column_of(kind, i) * WIDTH, WIDTH * sizeof *columns);
    }
    set_gaussian(w, 0.1f, 1);
    test_graph_set(x, values);
    check_modes(&s, &g, y, columns, n);
    free(values);
    tear_down(&s, &g);
}

int main(void) {
    static const int64_t columns[] = {1, 2, 5, 9, MAX_N};
    for (int i = 0; i < 5; i++) {
        test_mul_mat(GGML_TYPE_F32, columns[i]);
        test_mul_mat(GGML_TYPE_Q4_0, columns[i]);
    }
    test_whole_result();
    test_mul_mat_id(GGML_TYPE_F32, 1);
    test_mul_mat_id(GGML_TYPE_Q4_0, 1);
    test_mul_mat_id(GGML_TYPE_F32, 2);
    test_layout(PERMUTED);
    test_layout(STRIDED_3D);
    test_layout(STRIDED);
    return 0;
}
