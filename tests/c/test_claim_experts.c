/* Claimed products with experts: which columns go where, and that each is multiplied by its expert. */
#include "engine_setup.h"
#include "ggml-cpu.h"
#include "routing.h"

enum { WIDTH = 512, UP = 48, GATE = 16, EXPERTS = 5, SLOTS = 2, MOST = 20 };

static const test_file file = {6,
                               64,
                               3,
                               {{"blk.0.ffn_up_exps.weight", UP, WIDTH, EXPERTS},
                                {"blk.0.ffn_gate_exps.weight", GATE, WIDTH, EXPERTS},
                                {"blk.0.ffn_up_shexp.weight", GATE, WIDTH, 1}}};

/* The expert of a slot: 0 most often, 3 never. */
static int32_t chosen(int64_t token, int64_t slot) {
    static const int32_t of[4][SLOTS] = {{0, 4}, {2, 0}, {0, 1}, {1, 2}};
    return of[token % 4][slot];
}

/* ---- sorting ----------------------------------------------------------------------------------- */

static void check_routing(const tf_routing *r, int64_t columns, int32_t block) {
    bool seen[MOST * SLOTS] = {false};
    CHECK(r->blocks[0] == 0 && r->starts[0] == 0 && r->starts[r->blocks[r->count]] == columns);
    CHECK(r->count <= tf_routing_most(EXPERTS, columns));
    CHECK(r->blocks[r->count] <= tf_routing_most_blocks(EXPERTS, columns, block));
    for (int32_t i = 0; i < r->count; i++) {
        CHECK(i == 0 || r->used[i] > r->used[i - 1]);
        CHECK(r->blocks[i + 1] > r->blocks[i]);
        for (int32_t b = r->blocks[i]; b < r->blocks[i + 1]; b++) {
            const int32_t n = r->starts[b + 1] - r->starts[b];
            CHECK(n >= 1 && n <= block && (n == block || b + 1 == r->blocks[i + 1])); /* full, but for the last */
            for (int32_t c = r->starts[b]; c < r->starts[b + 1]; c++) {
                CHECK(chosen(r->order[c] / SLOTS, r->order[c] % SLOTS) == r->used[i] && !seen[r->order[c]]);
                seen[r->order[c]] = true;
            }
        }
    }
}

static void test_routing(int64_t tokens, int32_t block) {
    int32_t ids[MOST][SLOTS + 1];
    for (int64_t t = 0; t < tokens; t++) {
        ids[t][0] = chosen(t, 0);
        ids[t][1] = chosen(t, 1);
        ids[t][SLOTS] = 99; /* beside the view */
    }
    const struct ggml_tensor view = {.ne = {SLOTS, tokens, 1, 1}, .nb = {4, sizeof ids[0]}, .data = ids};
    tf_routing *r = tf_routing_new(EXPERTS, tokens * SLOTS, block);
    CHECK(r != NULL);
    for (int i = 0; i < 2; i++) { /* and once more with the same memory */
        tf_routing_sort(r, &view);
        check_routing(r, tokens * SLOTS, block);
    }
    free(r);
}

/* ---- products ---------------------------------------------------------------------------------- */

typedef struct scene {
    setup s;
    test_graph g;
    int64_t tokens;
    struct ggml_tensor *weights[3], *x, *own, *ids[2]; /* x: one for all slots; own: one for each */
    float *bases[3], *sums[3];                         /* sums: base weights + residual */
} scene;

static void read_weights(scene *c, int i) {
    const struct ggml_tensor *w = c->weights[i];
    const int64_t n = ggml_nelements(w), each = w->ne[0] * w->ne[1];
    void *data = test_alloc(ggml_nbytes(w));
    ggml_backend_tensor_get(w, data, 0, ggml_nbytes(w));
    c->bases[i] = test_alloc((size_t)n * sizeof(float));
    c->sums[i] = test_alloc((size_t)n * sizeof(float));
    CHECK(tf_dequantize((int32_t)w->type, data, ggml_nbytes(w), c->bases[i], n) == TF_OK);
    free(data);
    tf_residual_tensor t;
    CHECK(tf_residual_get(c->s.residual, i, &t) == TF_OK);
    for (int64_t expert = 0; expert < t.experts; expert++) {
        const tf_planes planes = tf_residual_planes(&t, expert);
        CHECK(tf_residual_decode(&planes, c->sums[i] + expert * each) == TF_OK);
    }
    for (int64_t k = 0; k < n; k++) {
        c->sums[i][k] += c->bases[i][k];
    }
}

static void scene_new(scene *c, enum ggml_type type, int64_t tokens) {
    *c = (scene){.s = set_up(&file, 3), .tokens = tokens};
    tf_engine_claim(c->s.engine, true);
    test_graph_new(&c->g);
    ggml_backend_cpu_set_n_threads(c->g.cpu, 3); /* not as many as the engine has */
    for (int i = 0; i < 3; i++) {
        c->weights[i] = weight(&c->g, &file.tensors[i], type);
    }
    c->x = test_graph_data(&c->g, NULL, GGML_TYPE_F32, WIDTH, 1, tokens);
    c->own = test_graph_data(&c->g, NULL, GGML_TYPE_F32, WIDTH, SLOTS, tokens);
    for (int i = 0; i < 2; i++) {
        c->ids[i] = test_graph_data(&c->g, NULL, GGML_TYPE_I32, EXPERTS, tokens, 1); /* of which SLOTS are used */
    }
}

static void scene_ready(scene *c) {
    test_graph_ready(&c->g);
    for (int i = 0; i < 3; i++) {
        set_gaussian(c->weights[i], 0.02f, (uint64_t)i + 1);
        read_weights(c, i);
    }
    int32_t ids[MOST * EXPERTS];
    for (int i = 0; i < 2; i++) { /* of the second ids, the slots are exchanged */
        for (int64_t k = 0; k < c->tokens * EXPERTS; k++) {
            ids[k] = k % EXPERTS < SLOTS ? chosen(k / EXPERTS, (k % EXPERTS + i) % SLOTS) : 99;
        }
        ggml_backend_tensor_set(c->ids[i], ids, 0, ggml_nbytes(c->ids[i]));
    }
}

static void scene_free(scene *c) {
    tear_down(&c->s, &c->g);
    for (int i = 0; i < 3; i++) {
        free(c->bases[i]);
        free(c->sums[i]);
    }
}

/* Nodes of which the engine may hold columns until they are computed anew, as a model's are. */
static struct ggml_tensor *computed(scene *c, struct ggml_tensor *x) { return ggml_scale(c->g.nodes, x, 1.0f); }

static struct ggml_tensor *view_of_ids(scene *c, int which) {
    struct ggml_tensor *all = c->ids[which];
    return ggml_view_2d(c->g.nodes, all, SLOTS, c->tokens, all->nb[1], 0);
}

static struct ggml_tensor *multiply(scene *c, int weight, struct ggml_tensor *x, struct ggml_tensor *ids) {
    struct ggml_tensor *w = c->weights[weight];
    return test_graph_result(&c->g,
                             ids != NULL ? ggml_mul_mat_id(c->g.nodes, w, x, ids) : ggml_mul_mat(c->g.nodes, w, x));
}

/* One product of the graph: its weight, whether inputs are the slots' own, which ids (-1: no experts). */
typedef struct expected {
    const struct ggml_tensor *result;
    int weight;
    bool own;
    int ids;
} expected;

static void check_result(const scene *c, const expected *e, bool verify, const float *x, const float *own) {
    const struct ggml_tensor *w = c->weights[e->weight];
    const int64_t rows = w->ne[1], slots = e->ids < 0 ? 1 : SLOTS;
    const float *all = verify ? c->sums[e->weight] : c->bases[e->weight];
    float *got = test_graph_get(e->result);
    double *want = test_alloc((size_t)(rows * slots * c->tokens) * sizeof *want);
    for (int64_t i = 0; i < slots * c->tokens; i++) {
        const int64_t token = i / slots, slot = i % slots;
        const float *from = e->own ? own + i * WIDTH : x + token * WIDTH;
        const float *matrix = all + (e->ids < 0 ? 0 : chosen(token, (slot + e->ids) % SLOTS)) * rows * WIDTH;
        for (int64_t row = 0; row < rows; row++) {
            double sum = 0.0;
            for (int64_t k = 0; k < WIDTH; k++) {
                sum += (double)matrix[row * WIDTH + k] * from[k];
            }
            want[i * rows + row] = sum;
        }
        CHECK(test_relative_rms(got + i * rows, want + i * rows, rows) < 0.015);
    }
    free(want);
    free(got);
}

/* Products that share columns with the one before and such that only seem to; draft and verify by turns. */
static void test_products(enum ggml_type type, int64_t tokens) {
    scene c;
    scene_new(&c, type, tokens);
    struct ggml_tensor *x = computed(&c, c.x), *own = computed(&c, c.own);
    struct ggml_tensor *ids = view_of_ids(&c, 0), *others = view_of_ids(&c, 1);
    const expected all[] = {{multiply(&c, 0, x, ids), 0, false, 0},    {multiply(&c, 1, x, ids), 1, false, 0},
                            {multiply(&c, 1, x, others), 1, false, 1}, {multiply(&c, 2, x, NULL), 2, false, -1},
                            {multiply(&c, 0, x, others), 0, false, 1}, {multiply(&c, 0, own, others), 0, true, 1},
                            {multiply(&c, 1, own, ids), 1, true, 0}};
    scene_ready(&c);
    for (uint64_t pass = 0; pass < 4; pass++) {
        tf_engine_begin(c.s.engine, pass % 2 == 0 ? TF_DRAFT : TF_VERIFY);
        for (uint64_t ubatch = 0; ubatch < 2; ubatch++) {
            float *values = test_gaussians(tokens * WIDTH, 1.0f, pass * 4 + ubatch);
            float *own_values = test_gaussians(tokens * SLOTS * WIDTH, 1.0f, pass * 4 + ubatch + 100);
            test_graph_set(c.x, values);
            test_graph_set(c.own, own_values);
            test_graph_run(&c.g, c.s.engine);
            for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
                check_result(&c, &all[i], pass % 2 == 1, values, own_values);
            }
            free(values);
            free(own_values);
        }
        CHECK(tf_engine_end(c.s.engine) == TF_OK);
    }
    const tf_counters counters = tf_engine_counters(c.s.engine);
    CHECK(counters.base_bytes > 0 && counters.compute_s == 0.0); /* nothing observed */
    scene_free(&c);
}

/* Verifies `tokens` tokens, of which the first are the same; the results of `up`. */
static float *results_of(int64_t tokens, uint64_t *bytes_read) {
    scene c;
    scene_new(&c, GGML_TYPE_Q2_K, tokens);
    const struct ggml_tensor *y = multiply(&c, 0, computed(&c, c.x), view_of_ids(&c, 0));
    multiply(&c, 1, c.x, view_of_ids(&c, 0));
    multiply(&c, 2, c.x, NULL);
    scene_ready(&c);
    float *values = test_gaussians(tokens * WIDTH, 1.0f, 7);
    test_graph_set(c.x, values);
    float *got = run(&c.g, c.s.engine, TF_VERIFY, y);
    *bytes_read = tf_engine_counters(c.s.engine).residual_bytes;
    free(values);
    scene_free(&c);
    return got;
}

/* A token's bits do not depend on the others, and the bytes that are read are of the experts in use. */
static void test_tokens_beside_others(void) {
    uint64_t one_bytes, all_bytes;
    float *one = results_of(1, &one_bytes), *all = results_of(MOST, &all_bytes);
    CHECK(memcmp(one, all, UP * SLOTS * sizeof *one) == 0);
    uint64_t each = 0, shared = 0; /* 2 of the experts are used by token 0, 4 by all */
    for (int plane = 4; plane <= 6; plane += 2) {
        each += (uint64_t)(tf_plane_bytes(UP, WIDTH, 64, plane) + tf_plane_bytes(GATE, WIDTH, 64, plane));
        shared += (uint64_t)tf_plane_bytes(GATE, WIDTH, 64, plane);
    }
    each += (uint64_t)(tf_plane_bytes(UP, WIDTH, 64, 0) + tf_plane_bytes(GATE, WIDTH, 64, 0));
    shared += (uint64_t)tf_plane_bytes(GATE, WIDTH, 64, 0);
    CHECK(one_bytes == 2 * each + shared && all_bytes == 4 * each + shared);
    free(one);
    free(all);
}

int main(void) {
    for (int64_t tokens = 1; tokens <= MOST; tokens++) {
        test_routing(tokens, 8);
        test_routing(tokens, 3);
    }
    static const int64_t tokens[] = {1, 4, MOST};
    for (int i = 0; i < 3; i++) {
        test_products(GGML_TYPE_Q2_K, tokens[i]);
        test_products(GGML_TYPE_Q6_K, tokens[i]);
        test_products(GGML_TYPE_Q4_0, tokens[i]);
        test_products(GGML_TYPE_Q8_0, tokens[i]);
    }
    test_tokens_beside_others();
    return 0;
}
