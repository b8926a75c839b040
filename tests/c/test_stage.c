/* Staged residuals: the blocks that cross say what the planes say, and pieces of a matrix add up to its product.
 * Runs on the CPU's backend, or on the device that TWOFOLD_TEST_DEVICE names. */
#include "engine_state.h"
#include "ggml-backend.h"
#include "residual_builder.h"

enum { WIDTH = 288, ROWS = 133, SMALL = 16, N = 40 };

static const test_file file = {8,
                               128,
                               3,
                               {{"blk.0.ffn_up.weight", ROWS, WIDTH, 1},
                                {"blk.0.ffn_gate.weight", SMALL, WIDTH, 1},
                                {"blk.0.ffn_down.weight", ROWS, SMALL * 2, 1}}};

/* ---- conversion ------------------------------------------------------------------------------- */

static void test_conversion(int32_t bits, int32_t group, int64_t first, int64_t rows) {
    tf_planes all = test_planes(ROWS, WIDTH, group, 8);
    float *weights = test_gaussians(ROWS * WIDTH, 0.02f, 7), *want = test_alloc(ROWS * WIDTH * sizeof *want);
    CHECK(tf_residual_encode(weights, &all) == TF_OK);
    tf_planes planes = all;
    planes.bits = bits;
    CHECK(tf_residual_decode(&planes, want) == TF_OK);
    const int64_t blocks = rows * WIDTH / 32;
    uint8_t *out = test_alloc((size_t)blocks * 34);
    uint16_t *half = bits == 8 ? test_alloc((size_t)blocks * sizeof *half) : NULL;
    float *got = test_alloc((size_t)(rows * WIDTH) * sizeof *got);
    tf_stage_convert(&planes, first, rows, out, half);
    CHECK(tf_dequantize(8 /* Q8_0 */, out, (size_t)blocks * 34, got, rows * WIDTH) == TF_OK);
    for (int64_t i = 0; i < rows * WIDTH; i++) {
        const float rest = half != NULL ? tf_half_to_float(half[i / 32]) : 0.0f;
        CHECK((got[i] + rest) / 128.0f == want[first * WIDTH + i]);
    }
    free(got);
    free(half);
    free(out);
    free(want);
    free(weights);
    test_planes_free(&all);
}

/* ---- products --------------------------------------------------------------------------------- */

typedef struct bench {
    uint8_t *data;
    tf_residual *residual;
    tf_registry registry;
    tf_pool *pool;
    ggml_backend_dev_t dev;
    tf_stage *stage;
} bench;

static void set_up(bench *b, size_t bytes) {
    *b = (bench){0};
    size_t size;
    b->data = test_file_bytes(&file, &size);
    CHECK(tf_residual_from_memory(b->data, size, "memory", &b->residual) == TF_OK);
    CHECK(tf_registry_init(&b->registry, b->residual) == TF_OK);
    CHECK(tf_pool_new(2, &b->pool) == TF_OK);
    ggml_backend_load_all();
    const char *name = getenv("TWOFOLD_TEST_DEVICE");
    b->dev = name != NULL ? ggml_backend_dev_by_name(name) : ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
    CHECK(b->dev != NULL);
    b->stage = tf_stage_new(b->dev, &b->registry, bytes);
    CHECK(b->stage != NULL);
}

static void tear_down(bench *b) {
    tf_stage_free(b->stage);
    tf_pool_free(b->pool);
    tf_registry_free(&b->registry);
    tf_residual_free(b->residual);
    free(b->data);
}

/* One product added to a node that holds 1 everywhere; compares with the decoded weights. Returns bytes that crossed.
 */
static uint64_t check_product(bench *b, int64_t index, int32_t bits, uint64_t seed) {
    const tf_entry *entry = &b->registry.entries[index];
    const int64_t rows = entry->tensor.rows, width = entry->tensor.width;
    struct ggml_context *ctx = ggml_init((struct ggml_init_params){ggml_tensor_overhead() * 4, NULL, true});
    struct ggml_tensor *x = ggml_new_tensor_2d(ctx, GGML_TYPE_F32, width, N);
    struct ggml_tensor *node = ggml_mul_mat(ctx, ggml_new_tensor_2d(ctx, GGML_TYPE_F32, width, rows), x);
    ggml_backend_buffer_t buffer = ggml_backend_alloc_ctx_tensors_from_buft(ctx, ggml_backend_dev_buffer_type(b->dev));
    CHECK(buffer != NULL);
    float *columns = test_gaussians(N * width, 1.0f, seed), *out = test_alloc((size_t)(N * rows) * sizeof *out);
    for (int64_t i = 0; i < N * rows; i++) {
        out[i] = 1.0f;
    }
    ggml_backend_tensor_set(x, columns, 0, ggml_nbytes(x));
    ggml_backend_tensor_set(node, out, 0, ggml_nbytes(node));
    uint64_t uploaded = 0;
    CHECK(tf_stage_run(b->stage, b->pool, entry, bits, node, &uploaded) == TF_OK);
    ggml_backend_tensor_get(node, out, 0, ggml_nbytes(node));

    tf_planes planes = tf_residual_planes(&entry->tensor, 0);
    planes.bits = bits;
    float *r = test_alloc((size_t)(rows * width) * sizeof *r);
    CHECK(tf_residual_decode(&planes, r) == TF_OK);
    double *want = test_alloc((size_t)(N * rows) * sizeof *want);
    for (int64_t i = 0; i < N * rows; i++) {
        want[i] = 0.0;
        for (int64_t c = 0; c < width; c++) {
            want[i] += (double)r[i % rows * width + c] * columns[i / rows * width + c];
        }
        out[i] -= 1.0f;
    }
    const double error = test_relative_rms(out, want, N * rows);
    if (getenv("TEST_VERBOSE") != NULL) {
        printf("%s, %d bits: relative error %.6f\n", entry->tensor.name, bits, error);
    }
    CHECK(error < 0.01);
    free(want);
    free(r);
    free(out);
    free(columns);
    ggml_backend_buffer_free(buffer);
    ggml_free(ctx);
    return uploaded;
}

static uint64_t bytes_of(int64_t index, int32_t bits) {
    const test_tensor *t = &file.tensors[index];
    return (uint64_t)(t->rows * t->width / 32 * (bits == 8 ? 36 : 34));
}

/* Matrices take turns, so what was uploaded ahead is used, and where the order changes it must not be. */
static void test_products(size_t bytes) {
    bench b;
    set_up(&b, bytes);
    const int64_t order[] = {0, 1, 2, 0, 1, 2, 2, 0, 0, 1, 2, 1};
    for (int32_t bits = 4; bits <= 8; bits += 2) {
        for (size_t i = 0; i < sizeof order / sizeof *order; i++) {
            check_product(&b, order[i], bits, 10 + i);
        }
    }
    tear_down(&b);
}

/* A pass over the same matrices again moves each once: nothing is uploaded in vain. */
static void test_bytes(void) {
    bench b;
    set_up(&b, 2 << 20);
    for (int64_t i = 0; i < 9; i++) {
        check_product(&b, i % 3, 8, 1);
    }
    for (int64_t i = 0; i < 3; i++) { /* its own bytes are there, those of the next one cross */
        CHECK(check_product(&b, i, 8, 2) == bytes_of((i + 1) % 3, 8));
    }
    CHECK(check_product(&b, 0, 4, 3) == bytes_of(0, 4) + bytes_of(1, 4)); /* not those of other bits */
    tear_down(&b);
}

int main(void) {
    for (int32_t bits = 4; bits <= 8; bits += 2) {
        test_conversion(bits, 128, 0, ROWS);
        test_conversion(bits, 96, 32, 48);
        test_conversion(bits, 32, 128, 5);
    }
    test_products(4 << 20);
    test_products(2 * ((64 << 10) + 30000)); /* pieces of some panels */
    test_bytes();
    return 0;
}
