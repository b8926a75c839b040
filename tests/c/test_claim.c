/* Claimed nodes: base and residual computed by our kernels, in ggml's threads, from the same graphs. */
#include "engine_setup.h"
#include "ggml-cpu.h"

enum { WIDTH = 512, UP = 33, GATE = 16, MOST = 9 };

static const test_file file = {
    8, 64, 2, {{"blk.0.ffn_up.weight", UP, WIDTH, 1}, {"blk.0.ffn_gate.weight", GATE, WIDTH, 1}}};

typedef struct scene {
    setup s;
    test_graph g;
    struct ggml_tensor *weights[2], *input;
    float *sums[2]; /* base weights + residual, as they must be read */
    float *bases[2];
} scene;

static void scene_new(scene *c, enum ggml_type type, int64_t columns, int64_t slices) {
    c->s = set_up(&file, 2);
    tf_engine_claim(c->s.engine, true);
    test_graph_new(&c->g);
    ggml_backend_cpu_set_n_threads(c->g.cpu, 3); /* not as many as the engine has */
    c->weights[0] = weight(&c->g, &file.tensors[0], type);
    c->weights[1] = weight(&c->g, &file.tensors[1], type);
    c->input = test_graph_data(&c->g, NULL, GGML_TYPE_F32, WIDTH, columns, slices);
}

static struct ggml_tensor *multiply(scene *c, int weight, struct ggml_tensor *x) {
    return test_graph_result(&c->g, ggml_mul_mat(c->g.nodes, c->weights[weight], x));
}

static void scene_ready(scene *c) {
    test_graph_ready(&c->g);
    for (int i = 0; i < 2; i++) {
        const int64_t n = ggml_nelements(c->weights[i]);
        const size_t bytes = ggml_nbytes(c->weights[i]);
        void *data = test_alloc(bytes);
        set_gaussian(c->weights[i], 0.02f, (uint64_t)i + 1);
        ggml_backend_tensor_get(c->weights[i], data, 0, bytes);
        c->bases[i] = test_alloc((size_t)n * sizeof(float));
        c->sums[i] = test_alloc((size_t)n * sizeof(float));
        CHECK(tf_dequantize((int32_t)c->weights[i]->type, data, bytes, c->bases[i], n) == TF_OK);
        free(data);
        tf_residual_tensor t;
        CHECK(tf_residual_get(c->s.residual, i, &t) == TF_OK);
        CHECK(tf_residual_decode(&t.planes, c->sums[i]) == TF_OK);
        for (int64_t k = 0; k < n; k++) {
            c->sums[i][k] += c->bases[i][k];
        }
    }
}

static void scene_free(scene *c) {
    tear_down(&c->s, &c->g);
    for (int i = 0; i < 2; i++) {
        free(c->bases[i]);
        free(c->sums[i]);
    }
}

static void check_result(const float *weights, const struct ggml_tensor *result, const float *x) {
    float *got = test_graph_get(result);
    double want[MOST * UP] = {0};
    for (int64_t i = 0; i < ggml_nelements(result); i++) {
        for (int64_t k = 0; k < WIDTH; k++) {
            want[i] += (double)weights[i % result->ne[0] * WIDTH + k] * x[i / result->ne[0] * WIDTH + k];
        }
    }
    CHECK(test_relative_rms(got, want, ggml_nelements(result)) < 0.01);
    free(got);
}

/* Draft and verify by turns on the same graph, as speculation does, each for several ubatches of new inputs.
 * order: columns of the input in the order the products see them. */
static void run_all(scene *c, struct ggml_tensor *const *results, const int *weights, int n, const int64_t *order) {
    const int64_t columns = ggml_nrows(c->input), used = ggml_nelements(results[0]) / results[0]->ne[0];
    for (uint64_t pass = 0; pass < 4; pass++) {
        tf_engine_begin(c->s.engine, pass % 2 == 0 ? TF_DRAFT : TF_VERIFY);
        for (uint64_t ubatch = 0; ubatch < 3; ubatch++) {
            float *values = test_gaussians(columns * WIDTH, 1.0f, pass * 3 + ubatch), seen[MOST * WIDTH];
            test_graph_set(c->input, values);
            test_graph_run(&c->g, c->s.engine);
            for (int64_t j = 0; j < used; j++) {
                memcpy(seen + j * WIDTH, values + (order != NULL ? order[j] : j) * WIDTH, WIDTH * sizeof *seen);
            }
            for (int i = 0; i < n; i++) {
                check_result((pass % 2 == 0 ? c->bases : c->sums)[weights[i]], results[i], seen);
            }
            free(values);
        }
        CHECK(tf_engine_end(c->s.engine) == TF_OK);
    }
    const tf_counters counters = tf_engine_counters(c->s.engine);
    CHECK(counters.base_bytes > 0 && counters.fetch_s == 0.0 && counters.compute_s == 0.0); /* nothing observed */
}

static void test_types(enum ggml_type type, int64_t columns) {
    scene c;
    scene_new(&c, type, columns, 1);
    struct ggml_tensor *const results[] = {multiply(&c, 0, c.input), multiply(&c, 1, c.input)};
    scene_ready(&c);
    run_all(&c, results, (const int[]){0, 1}, 2, NULL);
    scene_free(&c);
}

/* Two inputs of different lengths; one weight twice on the same input. */
static void test_several_inputs(void) {
    scene c;
    scene_new(&c, GGML_TYPE_Q8_0, 4, 1);
    struct ggml_tensor *scaled = ggml_scale(c.g.nodes, c.input, 1.0f);
    struct ggml_tensor *const results[] = {multiply(&c, 1, scaled), multiply(&c, 0, scaled), multiply(&c, 1, c.input),
                                           multiply(&c, 0, c.input), multiply(&c, 0, c.input)};
    scene_ready(&c);
    run_all(&c, results, (const int[]){1, 0, 1, 0, 0}, 5, NULL);
    scene_free(&c);
}

static void test_weight_used_twice(bool computed) {
    scene c;
    scene_new(&c, GGML_TYPE_Q4_0, 4, 1);
    struct ggml_tensor *x = computed ? ggml_scale(c.g.nodes, c.input, 1.0f) : c.input;
    struct ggml_tensor *const results[] = {multiply(&c, 1, x), multiply(&c, 0, x), multiply(&c, 0, x)};
    scene_ready(&c);
    run_all(&c, results, (const int[]){1, 0, 0}, 3, NULL);
    scene_free(&c);
}

/* The second product needs more memory for activations than the first, which must keep what it was given. */
static void test_growing_inputs(void) {
    scene c;
    scene_new(&c, GGML_TYPE_Q8_0, MOST, 1);
    struct ggml_tensor *first = ggml_view_2d(c.g.nodes, c.input, WIDTH, 1, c.input->nb[1], 0);
    struct ggml_tensor *small = multiply(&c, 0, first), *large = multiply(&c, 1, c.input);
    scene_ready(&c);
    run_all(&c, (struct ggml_tensor *const[]){large, small}, (const int[]){1, 0}, 2, NULL);
    scene_free(&c);
}

static void test_layouts(void) {
    static const int64_t permuted[] = {0, 4, 1, 5, 2, 6, 3, 7}, strided[] = {1, 3, 5, 7};
    scene c;
    scene_new(&c, GGML_TYPE_Q8_0, 4, 2);
    struct ggml_tensor *x = ggml_permute(c.g.nodes, c.input, 0, 2, 1, 3);
    struct ggml_tensor *const results[] = {multiply(&c, 0, x), multiply(&c, 1, x)};
    scene_ready(&c);
    run_all(&c, results, (const int[]){0, 1}, 2, permuted);
    scene_free(&c);
    scene_new(&c, GGML_TYPE_Q8_0, 4, 2);
    x = ggml_view_2d(c.g.nodes, c.input, WIDTH, 4, 2 * c.input->nb[1], c.input->nb[1]);
    struct ggml_tensor *const others[] = {multiply(&c, 0, x), multiply(&c, 1, x)};
    scene_ready(&c);
    run_all(&c, others, (const int[]){0, 1}, 2, strided);
    scene_free(&c);
}

/* A graph that was claimed goes back to ggml when claiming is switched off: its own bits again. */
static void test_given_back(void) {
    scene c;
    scene_new(&c, GGML_TYPE_Q4_0, 5, 1);
    struct ggml_tensor *result = multiply(&c, 0, c.input);
    scene_ready(&c);
    set_gaussian(c.input, 1.0f, 3);
    test_graph_run(&c.g, NULL);
    float *before = test_graph_get(result);
    free(run(&c.g, c.s.engine, TF_DRAFT, result));
    tf_engine_claim(c.s.engine, false);
    float *after = run(&c.g, c.s.engine, TF_DRAFT, result);
    CHECK(memcmp(before, after, ggml_nbytes(result)) == 0);
    free(before);
    free(after);
    scene_free(&c);
}

int main(void) {
    static const int64_t columns[] = {1, 2, 5, MOST};
    for (int i = 0; i < 4; i++) {
        test_types(GGML_TYPE_Q4_0, columns[i]);
        test_types(GGML_TYPE_Q8_0, columns[i]);
        test_types(GGML_TYPE_Q2_K, columns[i]);
        test_types(GGML_TYPE_Q3_K, columns[i]);
        test_types(GGML_TYPE_Q6_K, columns[i]);
    }
    test_growing_inputs();
    test_layouts();
    test_given_back();
    test_several_inputs();
    test_weight_used_twice(true);
    test_weight_used_twice(false);
    return 0;
}
