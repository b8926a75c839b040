/* Products begun early: those that are taken have the bits of ordinary ones, and only the right ones can be taken. */
#include "ahead.h"
#include "residual_builder.h"

enum { WIDTH = 96, N = 5, THREADS = 3, COUNT = 3 };

static const test_file file = {8,
                               64,
                               COUNT,
                               {{"blk.0.attn_q.weight", 133, WIDTH, 1},
                                {"blk.0.attn_k.weight", 16, WIDTH, 1},
                                {"blk.0.ffn_down.weight", 33, 2 * WIDTH, 1}}};

typedef struct bench {
    uint8_t *data;
    tf_residual *residual;
    tf_registry registry;
    tf_pool *pool;
    tf_ahead *ahead;
    const tf_kernel *kernel;
    tf_activations x;
} bench;

static void set_up(bench *b) {
    *b = (bench){.kernel = tf_kernel_find(NULL)};
    size_t size;
    b->data = test_file_bytes(&file, &size);
    CHECK(tf_residual_from_memory(b->data, size, "memory", &b->residual) == TF_OK);
    CHECK(tf_registry_init(&b->registry, b->residual) == TF_OK);
    CHECK(tf_pool_new(THREADS, &b->pool) == TF_OK);
    b->ahead = tf_ahead_new(&b->registry, b->kernel, b->pool);
    CHECK(b->ahead != NULL);
}

static void tear_down(bench *b) {
    tf_ahead_free(b->ahead);
    tf_activations_free(&b->x);
    tf_pool_free(b->pool);
    tf_registry_free(&b->registry);
    tf_residual_free(b->residual);
    free(b->data);
}

static void quantize(bench *b, uint64_t seed) {
    float *values = test_gaussians(N * WIDTH, 1.0f, seed);
    tf_activations_shape(&b->x, N, WIDTH, file.group, 8, b->kernel->max_columns, false);
    CHECK(tf_activations_reserve(&b->x) == TF_OK);
    tf_quantize_columns(b->pool, b->kernel, &b->x, values);
    free(values);
}

static void check_taken(bench *b, int64_t index, const struct ggml_tensor *x) {
    const tf_entry *entry = &b->registry.entries[index];
    const float *got = tf_ahead_take(b->ahead, entry, x);
    CHECK(got != NULL);
    const int64_t floats = N * entry->tensor.rows;
    float *copy = test_alloc((size_t)floats * sizeof *copy), *want = test_alloc((size_t)floats * sizeof *want);
    memcpy(copy, got, (size_t)floats * sizeof *copy);
    const tf_product product = {.has_residual = true,
                                .residual = tf_residual_planes(&entry->tensor, 0),
                                .x = &b->x,
                                .out = want,
                                .stride = entry->tensor.rows};
    CHECK(tf_products_run(b->pool, b->kernel, &product, 1) == TF_OK);
    CHECK(memcmp(copy, want, (size_t)floats * sizeof *want) == 0);
    CHECK(tf_ahead_take(b->ahead, entry, x) == NULL); /* once */
    free(want);
    free(copy);
}

int main(void) {
    bench b;
    set_up(&b);
    const tf_entry *entries = b.registry.entries;
    struct ggml_tensor x = {.name = "attn_norm-0"}, other = {.name = "attn_norm-1"}, again = {.name = "attn_norm-0"};
    uint64_t bytes = 0;
    CHECK(!tf_ahead_expects(b.ahead, &x));
    for (int i = 0; i < 2; i++) {
        tf_ahead_learn(b.ahead, &entries[0], &x);
        tf_ahead_learn(b.ahead, &entries[1], &x);
        tf_ahead_learn(b.ahead, &entries[2], &x); /* wrong: of another width */
    }
    CHECK(tf_ahead_expects(b.ahead, &again) && !tf_ahead_expects(b.ahead, &other));
    for (uint64_t i = 0; i < 300; i++) {
        quantize(&b, i);
        tf_ahead_start(b.ahead, &x, &b.x, 8, &bytes);
        CHECK(tf_ahead_take(b.ahead, &entries[0], &again) == NULL); /* another input */
        CHECK(tf_ahead_take(b.ahead, &entries[2], &x) == NULL);
        check_taken(&b, (int64_t)(i % 2), &x);
        if (i % 3 != 0) { /* else it is dropped */
            check_taken(&b, (int64_t)(1 - i % 2), &x);
        }
        tf_ahead_finish(b.ahead);
        CHECK(tf_ahead_take(b.ahead, &entries[1], &x) == NULL);
    }
    uint64_t once = 0;
    for (int64_t i = 0; i < 2; i++) {
        const tf_planes planes = tf_residual_planes(&entries[i].tensor, 0);
        once += tf_residual_bytes_read(&planes);
    }
    CHECK(bytes == 300 * once);
    tear_down(&b);
    return 0;
}
