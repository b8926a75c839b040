/* The collector: whose inputs are shown, in which order, and noise on the products of one matrix. */
#include "graph.h"

enum { WIDTH = 64, ROWS = 24, TOKENS = 6, EXPERTS = 4, USED = 2, MOST = 8 };

typedef struct shown {
    char weight[GGML_MAX_NAME], input[GGML_MAX_NAME];
    int64_t expert, experts, n;
    float x[TOKENS * USED][WIDTH];
} shown;

static shown seen[MOST];
static int count, allowed; /* so many are taken, the next is answered with false */

static bool sink(void *user, const tf_collected *what) {
    CHECK(user == &count && what->width == WIDTH && what->n <= TOKENS * USED && count < MOST);
    if (count == allowed) {
        return false;
    }
    shown *s = &seen[count++];
    *s = (shown){.expert = what->expert, .experts = what->experts, .n = what->n};
    strncpy(s->weight, what->weight, sizeof s->weight - 1);
    strncpy(s->input, what->input, sizeof s->input - 1);
    memcpy(s->x, what->x, (size_t)(what->n * WIDTH) * sizeof(float));
    return true;
}

static tf_collector *collector_new(void) {
    tf_collector *c = NULL;
    CHECK(tf_collector_new(sink, &count, &c) == TF_OK);
    count = 0;
    allowed = MOST;
    return c;
}

static void run(test_graph *g, tf_collector *c) {
    count = 0;
    test_graph_watched(g, tf_collector_callback(), c);
}

static void set_gaussian(struct ggml_tensor *t, uint64_t seed) {
    float *values = test_gaussians(ggml_nelements(t), 1.0f, seed);
    test_graph_set(t, values);
    free(values);
}

/* Names as they are in files, as the scheduler calls copies, and what is no weight of a file. */
static void test_names(void) {
    static const char *const names[] = {"blk.0.a.weight", "CUDA0#blk.0.b.weight#0", "cache_k_l0", "#.weight#",
                                        "weight"};
    tf_collector *c = collector_new();
    test_graph g;
    test_graph_new(&g);
    struct ggml_tensor *x = test_graph_data(&g, "attn_norm-0", GGML_TYPE_F32, WIDTH, TOKENS, 1), *w[5];
    for (int i = 0; i < 5; i++) {
        w[i] = test_graph_data(&g, names[i], i == 1 ? GGML_TYPE_Q4_0 : GGML_TYPE_F32, WIDTH, ROWS, 1);
        test_graph_result(&g, ggml_mul_mat(g.nodes, w[i], x));
    }
    struct ggml_tensor *made = ggml_set_name(ggml_scale(g.nodes, w[0], 2.0f), "made.weight");
    test_graph_result(&g, ggml_mul_mat(g.nodes, made, x)); /* computed, so no weight of the file */
    test_graph_ready(&g);
    for (int i = 0; i < 5; i++) {
        set_gaussian(w[i], (uint64_t)i);
    }
    set_gaussian(x, 9);
    float *values = test_graph_get(x);
    run(&g, c);
    CHECK(tf_collector_end(c) == TF_OK && count == 2);
    for (int i = 0; i < 2; i++) {
        CHECK(strcmp(seen[i].weight, i == 0 ? "blk.0.a.weight" : "blk.0.b.weight") == 0);
        CHECK(strcmp(seen[i].input, "attn_norm-0") == 0);
        CHECK(seen[i].expert == 0 && seen[i].experts == 1 && seen[i].n == TOKENS);
        CHECK(memcmp(seen[i].x, values, TOKENS * WIDTH * sizeof(float)) == 0);
    }
    free(values);
    test_graph_free(&g);
    tf_collector_free(c);
}

/* Columns that do not follow each other come out in the order of the product's. */
static void test_strided(void) {
    tf_collector *c = collector_new();
    test_graph g;
    test_graph_new(&g);
    struct ggml_tensor *w = test_graph_data(&g, "a.weight", GGML_TYPE_F32, WIDTH, ROWS, 1);
    struct ggml_tensor *x = test_graph_data(&g, NULL, GGML_TYPE_F32, WIDTH, 3, 2);
    test_graph_result(&g, ggml_mul_mat(g.nodes, w, ggml_permute(g.nodes, x, 0, 2, 1, 3)));
    test_graph_ready(&g);
    set_gaussian(w, 1);
    set_gaussian(x, 2);
    float *values = test_graph_get(x);
    run(&g, c);
    CHECK(tf_collector_end(c) == TF_OK && count == 1 && seen[0].n == 6);
    for (int64_t i = 0; i < 6; i++) {
        CHECK(memcmp(seen[0].x[i], values + (i % 2 * 3 + i / 2) * WIDTH, sizeof seen[0].x[i]) == 0);
    }
    free(values);
    test_graph_free(&g);
    tf_collector_free(c);
}

/* columns: 1 for each token, or one for every expert that it uses. */
static void test_experts(int64_t columns) {
    static const int32_t chosen[TOKENS * EXPERTS] = {0, 3, -1, -1, 3, 1, -1, -1, 1, 0, -1, -1, /* rows are longer */
                                                     3, 0, -1, -1, 0, 1, -1, -1, 3, 1, -1, -1};
    tf_collector *c = collector_new();
    test_graph g;
    test_graph_new(&g);
    struct ggml_tensor *w = test_graph_data(&g, "up_exps.weight", GGML_TYPE_F32, WIDTH, ROWS, EXPERTS);
    struct ggml_tensor *x = test_graph_data(&g, NULL, GGML_TYPE_F32, WIDTH, columns, TOKENS);
    struct ggml_tensor *all = test_graph_data(&g, NULL, GGML_TYPE_I32, EXPERTS, TOKENS, 1);
    struct ggml_tensor *ids = ggml_view_2d(g.nodes, all, USED, TOKENS, all->nb[1], 0);
    test_graph_result(&g, ggml_mul_mat_id(g.nodes, w, x, ids));
    test_graph_ready(&g);
    set_gaussian(w, 1);
    set_gaussian(x, 2);
    ggml_backend_tensor_set(all, chosen, 0, sizeof chosen);
    float *values = test_graph_get(x);
    run(&g, c);
    CHECK(tf_collector_end(c) == TF_OK && count == 3); /* nobody asks for expert 2 */
    for (int i = 0; i < 3; i++) {
        int64_t n = 0;
        CHECK(seen[i].experts == EXPERTS && seen[i].expert == (i == 2 ? 3 : i));
        for (int64_t t = 0; t < TOKENS; t++) {
            for (int64_t u = 0; u < USED; u++) {
                if (chosen[t * EXPERTS + u] == seen[i].expert) {
                    const float *column = values + (t * columns + u % columns) * WIDTH;
                    CHECK(n < seen[i].n && memcmp(seen[i].x[n++], column, WIDTH * sizeof *column) == 0);
                }
            }
        }
        CHECK(n == seen[i].n);
    }
    free(values);
    test_graph_free(&g);
    tf_collector_free(c);
}

/* Two products of one input. */
typedef struct pair {
    test_graph g;
    struct ggml_tensor *y[2];
} pair;

static pair pair_new(void) {
    pair p;
    test_graph_new(&p.g);
    struct ggml_tensor *x = test_graph_data(&p.g, NULL, GGML_TYPE_F32, WIDTH, TOKENS, 1), *w[2];
    for (int i = 0; i < 2; i++) {
        w[i] = test_graph_data(&p.g, i == 0 ? "a.weight" : "b.weight", GGML_TYPE_F32, WIDTH, ROWS, 1);
        p.y[i] = test_graph_result(&p.g, ggml_mul_mat(p.g.nodes, w[i], x));
    }
    test_graph_ready(&p.g);
    set_gaussian(x, 1);
    set_gaussian(w[0], 2);
    set_gaussian(w[1], 3);
    return p;
}

static double rms(const float *values, int64_t n) {
    double squares = 0.0;
    for (int64_t i = 0; i < n; i++) {
        squares += (double)values[i] * values[i];
    }
    return sqrt(squares / (double)n);
}

/* Noise of the size asked for, on this matrix alone, the same after each call. */
static void check_noise(pair *p, tf_collector *c, const float *const clean[2], float amount) {
    tf_collector_disturb(c, "b.weight", amount);
    run(&p->g, c);
    CHECK(tf_collector_end(c) == TF_OK && count == 0);
    float *other = test_graph_get(p->y[0]), *noisy = test_graph_get(p->y[1]);
    tf_collector_disturb(c, "b.weight", amount);
    run(&p->g, c);
    float *again = test_graph_get(p->y[1]);
    CHECK(memcmp(other, clean[0], ggml_nbytes(p->y[0])) == 0);
    CHECK(memcmp(noisy, again, ggml_nbytes(p->y[1])) == 0);
    for (int64_t j = 0; j < TOKENS; j++) {
        float noise[ROWS];
        for (int64_t i = 0; i < ROWS; i++) {
            noise[i] = noisy[j * ROWS + i] - clean[1][j * ROWS + i];
        }
        const double size = rms(clean[1] + j * ROWS, ROWS);
        CHECK(fabs(rms(noise, ROWS) / size - amount) <= 0.4 * amount);
        for (int64_t i = 0; i < ROWS; i++) {
            CHECK(fabsf(noise[i]) <= 1.74 * amount * size);
        }
    }
    free(other);
    free(noisy);
    free(again);
}

static void test_disturb(void) {
    tf_collector *c = collector_new();
    pair p = pair_new();
    run(&p.g, c);
    CHECK(tf_collector_end(c) == TF_OK && count == 2);
    float *const clean[2] = {test_graph_get(p.y[0]), test_graph_get(p.y[1])};
    check_noise(&p, c, (const float *const *)clean, 0.1f);
    check_noise(&p, c, (const float *const *)clean, 0.5f);
    static const char *const none[] = {"b", "c.weight",
                                       "b.weight.and.more.than.sixty.four.bytes.of.a.name.for.no.weight"};
    for (int i = 0; i < 3; i++) {
        tf_collector_disturb(c, none[i], 0.5f);
        run(&p.g, c);
        float *same = test_graph_get(p.y[1]);
        CHECK(count == 0 && memcmp(same, clean[1], ggml_nbytes(p.y[1])) == 0);
        free(same);
    }
    tf_collector_disturb(c, "", 0.0f);
    run(&p.g, c);
    CHECK(count == 2);
    free(clean[0]);
    free(clean[1]);
    test_graph_free(&p.g);
    tf_collector_free(c);
}

/* A sink that says no is told to the caller once; the next run is a new one. */
static void test_stop(void) {
    tf_collector *c = collector_new();
    pair p = pair_new();
    allowed = 1;
    run(&p.g, c);
    CHECK(count == 1 && tf_collector_end(c) == TF_ERR_ARGUMENT && strstr(tf_error(), "stopped") != NULL);
    allowed = MOST;
    run(&p.g, c);
    CHECK(count == 2 && tf_collector_end(c) == TF_OK);
    test_graph_free(&p.g);
    tf_collector_free(c);
    tf_collector_free(NULL);
}

int main(void) {
    test_names();
    test_strided();
    test_experts(1);
    test_experts(USED);
    test_disturb();
    test_stop();
    return 0;
}
