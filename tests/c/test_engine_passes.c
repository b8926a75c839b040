/* What happens between tf_engine_begin() and tf_engine_end(): several products, several runs, failures. */
#include "engine_setup.h"

enum { WIDTH = 96, UP = 33, GATE = 16, N = 3 };

static const test_file file = {
    8, 64, 2, {{"blk.0.ffn_up.weight", UP, WIDTH, 1}, {"blk.0.ffn_gate.weight", GATE, WIDTH, 1}}};

/* A graph with both weights, of the given types, and one input. */
typedef struct pair {
    setup s;
    test_graph g;
    struct ggml_tensor *up, *gate, *x;
} pair;

static void pair_new(pair *p) {
    p->s = set_up(&file, 2);
    test_graph_new(&p->g);
    p->up = weight(&p->g, &file.tensors[0], GGML_TYPE_F32);
    p->gate = weight(&p->g, &file.tensors[1], GGML_TYPE_Q4_0);
    p->x = test_graph_data(&p->g, NULL, GGML_TYPE_F32, WIDTH, N, 1);
}

static struct ggml_tensor *multiply(pair *p, struct ggml_tensor *w) {
    return test_graph_result(&p->g, ggml_mul_mat(p->g.nodes, w, p->x));
}

static void pair_ready(pair *p) {
    test_graph_ready(&p->g);
    set_gaussian(p->up, 0.1f, 1);
    set_gaussian(p->gate, 0.1f, 2);
}

/* Runs the graph on new inputs and checks each result; index: which residual belongs to it. */
static void run_and_check(pair *p, struct ggml_tensor *const *results, const int64_t *index, int64_t n, uint64_t seed) {
    float *values = test_gaussians(N * WIDTH, 1.0f, seed), *base[4];
    test_graph_set(p->x, values);
    test_graph_run(&p->g, NULL);
    for (int64_t i = 0; i < n; i++) {
        base[i] = test_graph_get(results[i]);
    }
    test_graph_run(&p->g, p->s.engine);
    for (int64_t i = 0; i < n; i++) {
        float *got = test_graph_get(results[i]);
        check_added(&p->s, index[i], 0, 8, got, base[i], values, N);
        free(got);
        free(base[i]);
    }
    free(values);
}

/* One llama_decode runs its graph once for every ubatch. */
static void run_ubatches(pair *p, struct ggml_tensor *const *results, const int64_t *index, int64_t n) {
    for (uint64_t pass = 0; pass < 2; pass++) {
        tf_engine_begin(p->s.engine, TF_VERIFY);
        for (uint64_t ubatch = 0; ubatch < 3; ubatch++) {
            run_and_check(p, results, index, n, pass * 3 + ubatch);
        }
        CHECK(tf_engine_end(p->s.engine) == TF_OK);
    }
    CHECK(tf_engine_counters(p->s.engine).nodes == 6 * (uint64_t)n);
}

static void test_shared_input(void) {
    pair p;
    pair_new(&p);
    struct ggml_tensor *const results[] = {multiply(&p, p.up), multiply(&p, p.gate)};
    pair_ready(&p);
    run_ubatches(&p, results, (const int64_t[]){0, 1}, 2);
    tear_down(&p.s, &p.g);
}

/* A weight that stands in the graph twice must not make the next run take this run's input for its own. */
static void test_weight_used_twice(bool computed) {
    pair p;
    pair_new(&p);
    struct ggml_tensor *const input = p.x;
    p.x = computed ? ggml_scale(p.g.nodes, input, 1.0f) : input;
    struct ggml_tensor *const results[] = {multiply(&p, p.gate), multiply(&p, p.up), multiply(&p, p.up)};
    p.x = input;
    pair_ready(&p);
    run_ubatches(&p, results, (const int64_t[]){1, 0, 0}, 3);
    tear_down(&p.s, &p.g);
}

/* The scheduler's copy of a weight on another backend has the weight's name in its own. */
static void test_scheduler_copy(void) {
    pair p;
    pair_new(&p);
    ggml_format_name(p.up, "CUDA0#%s#0", file.tensors[0].name);
    struct ggml_tensor *const results[] = {multiply(&p, p.up), multiply(&p, p.gate)};
    pair_ready(&p);
    run_ubatches(&p, results, (const int64_t[]){0, 1}, 2);
    tear_down(&p.s, &p.g);
}

/* ---- failures ------------------------------------------------------------------------------------ */

static void test_never_used(void) {
    pair p;
    pair_new(&p);
    multiply(&p, p.up);
    pair_ready(&p);
    set_gaussian(p.x, 1.0f, 1);
    tf_engine_begin(p.s.engine, TF_VERIFY);
    test_graph_run(&p.g, p.s.engine);
    CHECK(tf_engine_end(p.s.engine) == TF_ERR_NOT_APPLIED);
    CHECK(strstr(tf_error(), "blk.0.ffn_gate.weight") != NULL);
    tf_engine_begin(p.s.engine, TF_DRAFT);
    test_graph_run(&p.g, p.s.engine);
    CHECK(tf_engine_end(p.s.engine) == TF_OK);
    tear_down(&p.s, &p.g);
}

/* The pass fails, naming the weight; a draft pass after it is well again. */
static void check_unsupported(setup *s, test_graph *g, const char *name) {
    tf_engine_begin(s->engine, TF_VERIFY);
    test_graph_run(g, s->engine);
    test_graph_run(g, s->engine);
    CHECK(tf_engine_end(s->engine) == TF_ERR_UNSUPPORTED);
    CHECK(strstr(tf_error(), name) != NULL);
    tf_engine_begin(s->engine, TF_DRAFT);
    test_graph_run(g, s->engine);
    CHECK(tf_engine_end(s->engine) == TF_OK);
    tear_down(s, g);
}

/* A weight and an input of shapes and types that the residual `t` does not fit. */
static void check_misfit(const test_tensor *t, enum ggml_type type, int64_t width, int64_t rows, int64_t experts) {
    const test_file one = {8, 64, 1, {*t}};
    setup s = set_up(&one, 1);
    test_graph g;
    test_graph_new(&g);
    struct ggml_tensor *w = test_graph_data(&g, t->name, type, width, rows, experts);
    struct ggml_tensor *x = test_graph_data(&g, NULL, type, width, N, experts);
    test_graph_result(&g, ggml_mul_mat(g.nodes, w, x));
    test_graph_ready(&g);
    set_gaussian(w, 0.1f, 1);
    set_gaussian(x, 1.0f, 2);
    check_unsupported(&s, &g, t->name);
}

static void test_misfits(void) {
    const test_tensor up = file.tensors[0], experts = {"blk.0.ffn_up_exps.weight", 16, WIDTH, 4};
    check_misfit(&up, GGML_TYPE_F32, WIDTH, UP + 1, 1);
    check_misfit(&up, GGML_TYPE_F32, WIDTH, UP - 1, 1);
    check_misfit(&up, GGML_TYPE_F32, WIDTH - 32, UP, 1);
    check_misfit(&up, GGML_TYPE_F32, WIDTH, UP, 2);
    check_misfit(&up, GGML_TYPE_F16, WIDTH, UP, 1);      /* activations of float16 */
    check_misfit(&experts, GGML_TYPE_F32, WIDTH, 16, 4); /* multiplied as one matrix each */
}

static void test_refused(void) {
    const test_file four = {4, 64, 1, {file.tensors[0]}};
    size_t bytes;
    uint8_t *data = test_file_bytes(&four, &bytes);
    tf_residual *residual;
    CHECK(tf_residual_from_memory(data, bytes, "memory", &residual) == TF_OK);
    tf_engine *engine;
    CHECK(tf_engine_new(residual, 0, &engine) == TF_ERR_ARGUMENT && engine == NULL);
    setenv("TWOFOLD_KERNEL", "abacus", 1);
    CHECK(tf_engine_new(residual, 1, &engine) == TF_ERR_ARGUMENT && engine == NULL);
    unsetenv("TWOFOLD_KERNEL");
    CHECK(tf_engine_new(residual, 1, &engine) == TF_OK);
    static const int32_t bits[] = {-1, 1, 5, 6, 8, 16};
    for (size_t i = 0; i < sizeof bits / sizeof *bits; i++) {
        CHECK(tf_engine_set_bits(engine, bits[i]) == TF_ERR_ARGUMENT);
    }
    CHECK(tf_engine_set_bits(engine, 4) == TF_OK && tf_engine_set_bits(engine, 0) == TF_OK);
    tf_engine_free(engine);
    tf_engine_free(NULL);
    tf_residual_free(residual);
    tf_residual_free(NULL);
    free(data);
}

int main(void) {
    test_shared_input();
    test_scheduler_copy();
    test_never_used();
    test_misfits();
    test_refused();
    test_weight_used_twice(true);
    test_weight_used_twice(false);
    return 0;
}
