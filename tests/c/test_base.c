/* What kernels do beside the residual: quantize activations, and multiply base matrices. */
#include "ggml.h"
#include "quantize.h"
#include "test.h"

/* ---- quantizing ------------------------------------------------------------------------------ */

static tf_pool *pool; /* three threads */

static tf_columns quantized(const tf_kernel *kernel, const float *x, tf_activations *a) {
    tf_activations_shape(a, 1, TF_BLOCK, 32, 8, 1);
    CHECK(tf_activations_reserve(a) == TF_OK);
    memset(a->memory, 0, tf_activations_bytes(a));
    tf_quantize_columns(pool, kernel, a, x);
    return tf_activations_block(a, 0);
}

/* Everything that is kept of the activations must be the same; one NaN is like another. */
static void check_quantizer(const tf_kernel *kernel, const float *values) {
    float *x = test_alloc(TF_BLOCK * sizeof *x);
    memcpy(x, values, TF_BLOCK * sizeof *x);
    tf_activations want = {0}, got = {0};
    const tf_columns columns = quantized(&tf_kernel_scalar, x, &want);
    quantized(kernel, x, &got);
    int8_t codes[4][TF_BLOCK];
    int32_t sums[2][2];
    tf_kernel_scalar.quantize(x, codes[0], codes[1], sums[0]);
    kernel->quantize(x, codes[2], codes[3], sums[1]);
    CHECK(memcmp(codes[0], codes[2], 2 * TF_BLOCK) == 0 && memcmp(sums[0], sums[1], sizeof sums[0]) == 0);
    free(x);
    for (size_t i = 0; i < tf_activations_bytes(&want); i += sizeof(float)) {
        float a, b;
        memcpy(&a, want.memory + i, sizeof a);
        memcpy(&b, got.memory + i, sizeof b);
        CHECK((isnan(a) && isnan(b)) || memcmp(&a, &b, sizeof a) == 0);
    }
    const float step = columns.scale[0] * 128.0f;
    for (int i = 0; i < TF_BLOCK; i++) {
        CHECK(columns.q[i] >= -127);
        CHECK(!(step > 1e-30f && step < 1e30f) || fabsf(values[i] - step * columns.q[i]) <= step * 0.503f);
    }
    tf_activations_free(&want);
    tf_activations_free(&got);
}

static void test_quantizer(const tf_kernel *kernel) {
    static const float odd[] = {0.0f,  -0.0f,  1e-45f, -1e-39f, 1e-37f,   5e-37f,    1e-36f, 1e30f,
                                3e38f, -3e38f, NAN,    -NAN,    INFINITY, -INFINITY, 0.5f,   -127.0f};
    uint64_t state = 3;
    float x[TF_BLOCK];
    for (int round = 0; round < 2000; round++) {
        const float deviation = powf(10.0f, (float)(round % 80) - 42.0f);
        for (int i = 0; i < TF_BLOCK; i++) {
            x[i] = deviation * test_gaussian(&state);
        }
        check_quantizer(kernel, x);
    }
    for (int i = 0; i < 16 * TF_BLOCK * 2; i++) { /* one odd value among zeros, among others */
        for (int j = 0; j < TF_BLOCK; j++) {
            x[j] = i / 16 / TF_BLOCK == 0 ? 0.0f : test_gaussian(&state);
        }
        x[i / 16 % TF_BLOCK] = odd[i % 16];
        check_quantizer(kernel, x);
    }
    for (int i = 0; i < TF_BLOCK; i++) {
        x[i] = i == 0 ? 127.0f : (float)i - 16.5f; /* halfway between two codes */
    }
    check_quantizer(kernel, x);
}

/* Column j of `many` has what `one` has, which holds that column alone. */
static void check_column(const tf_columns *many, int64_t j, const tf_columns *one, int64_t width, int64_t groups) {
    const int64_t n = many->n;
    for (int64_t g = 0; g < groups; g++) {
        CHECK(many->offset[g * n + j] == one->offset[g]);
    }
    for (int64_t b = 0; b < width / TF_BLOCK; b++) {
        const bool low = many->flags[b * TF_MAX_COLUMNS + j] != 0;
        CHECK(many->scale[b * n + j] == one->scale[b] && many->sums[b * n + j] == one->sums[b]);
        CHECK(many->base_offset[b * n + j] == one->base_offset[b]);
        CHECK(low == (one->flags[b * TF_MAX_COLUMNS] != 0));
        CHECK(!tf_has_low(many, b) || many->low_sums[b * n + j] == (low ? one->low_sums[b] : 0));
        for (int64_t i = b * TF_BLOCK / 4; i < (b + 1) * TF_BLOCK / 4; i++) {
            static const int8_t zeros[4];
            CHECK(memcmp(many->q + (i * n + j) * 4, one->q + i * 4, 4) == 0);
            CHECK(!tf_has_low(many, b) || memcmp(many->low + (i * n + j) * 4, low ? one->low + i * 4 : zeros, 4) == 0);
        }
    }
}

/* A column's activations do not depend on what else is quantized, by how many threads and in how many parts. */
static void test_parts(const tf_kernel *kernel) {
    enum { WIDTH = 2208, N = 11, GROUP = 96 }; /* 23 groups; parts of 4, 6 or 8 of them */
    float *x = test_gaussians(N * WIDTH, 1.0f, 9);
    for (int i = 0; i < N * WIDTH; i += 1117) {
        x[i] *= 40.0f; /* some blocks need more bits */
    }
    tf_activations many = {0}, one = {0};
    tf_activations_shape(&many, N, WIDTH, GROUP, 6, kernel->max_columns);
    tf_activations_shape(&one, 1, WIDTH, GROUP, 6, kernel->max_columns);
    CHECK(tf_activations_reserve(&many) == TF_OK && tf_activations_reserve(&one) == TF_OK);
    for (int round = 0; round < 50; round++) {
        memset(many.memory, 0x55, tf_activations_bytes(&many));
        tf_quantize_columns(pool, kernel, &many, x);
        for (int64_t j = 0; j < N; j++) {
            memset(one.memory, 0xaa, tf_activations_bytes(&one));
            tf_quantize_columns(pool, &tf_kernel_scalar, &one, x + j * WIDTH);
            const tf_columns block = tf_activations_block(&many, j / many.columns);
            const tf_columns alone = tf_activations_block(&one, 0);
            check_column(&block, j % many.columns, &alone, WIDTH, tf_groups(WIDTH, GROUP));
        }
    }
    tf_activations_free(&many);
    tf_activations_free(&one);
    free(x);
}

/* ---- supers: Q2_K to Q6_K ---------------------------------------------------------------------- */

/* Random bytes, or all of one value: codes, scales and mins as large as they can be, or scales of -128. */
static tf_base random_supers(int64_t rows, int64_t width, int32_t bits, uint64_t *state, int extreme) {
    const int64_t supers = tf_panels(rows) * (width / TF_SUPER), bytes = tf_super_bytes(bits);
    tf_base base = {.bits = bits, .rows = rows, .width = width};
    base.supers = test_alloc((size_t)(supers * bytes));
    for (int64_t i = 0; i < supers * bytes; i++) {
        const bool scale = i % bytes >= tf_super_scales(bits);
        const uint8_t random = (uint8_t)(test_random(state) >> 40);
        base.supers[i] = extreme == 0 ? random : extreme == 1 ? 0xff : scale ? 0x80 : 0;
    }
    for (int64_t i = 0; i < supers * 32; i++) {
        const uint16_t half = (uint16_t)(test_random(state) >> 40 & 0xbbff);
        memcpy(base.supers + i / 32 * bytes + tf_super_d(bits) + i % 32 * 2, &half, sizeof half);
    }
    return base;
}

/* Columns in buffers of exactly their size, with the sums that belong to their codes. */
static tf_columns random_columns(int64_t width, int32_t n, uint64_t *state, bool extreme) {
    const int64_t blocks = width / TF_BLOCK;
    tf_columns x = {.n = n, .q = test_alloc((size_t)(width * n)), .low = test_alloc((size_t)(width * n))};
    x.scale = test_alloc((size_t)(blocks * n) * sizeof *x.scale);
    x.sums = test_alloc((size_t)(blocks * n) * sizeof *x.sums);
    x.low_sums = test_alloc((size_t)(blocks * n) * sizeof *x.low_sums);
    x.flags = test_alloc((size_t)(blocks * TF_MAX_COLUMNS));
    for (int64_t i = 0; i < width * n; i++) {
        x.q[i] = (int8_t)(extreme ? -127 : (int64_t)(test_random(state) >> 40) % 255 - 127);
        x.low[i] = (int8_t)(extreme ? -128 : test_random(state) >> 40);
    }
    for (int64_t i = 0; i < blocks * n; i++) {
        const int64_t first = (i / n * (TF_BLOCK / 4) * n + i % n) * 4;
        x.sums[i] = test_half_sums(x.q + first, n);
        x.low_sums[i] = test_half_sums(x.low + first, n);
        x.scale[i] = 1e-3f * fabsf(test_gaussian(state));
    }
    for (int64_t i = 0; i < blocks * TF_MAX_COLUMNS; i++) { /* of columns that are not there as well */
        x.flags[i] = extreme || test_random(state) >> 62 == 0;
    }
    return x;
}

static void free_columns(tf_columns *x) {
    free(x->q);
    free(x->low);
    free(x->scale);
    free(x->sums);
    free(x->low_sums);
    free(x->flags);
}

static void compare_supers(const tf_kernel *kernel, const tf_base *base, tf_columns x, bool low) {
    const size_t floats = (size_t)x.n * TF_PANEL_ROWS;
    float *want = test_alloc(floats * sizeof *want), *got = test_alloc(floats * sizeof *got);
    x.flags = low ? x.flags : NULL;
    for (int64_t panel = 0; panel < tf_panels(base->rows); panel++) {
        memset(got, 0x55, floats * sizeof *got);
        tf_kernel_scalar.run_supers(base, panel, &x, want);
        kernel->run_supers(base, panel, &x, got);
        CHECK(memcmp(want, got, floats * sizeof *got) == 0);
    }
    free(want);
    free(got);
}

static void test_supers(const tf_kernel *kernel, int32_t bits) {
    static const int64_t shapes[][2] = {{1, 256}, {16, 512}, {17, 256}, {33, 1536}};
    uint64_t state = 13;
    for (int i = 0; i < 4 * 3; i++) {
        tf_base base = random_supers(shapes[i % 4][0], shapes[i % 4][1], bits, &state, i / 4);
        for (int32_t n = 1; n <= kernel->max_columns; n++) {
            tf_columns x = random_columns(base.width, n, &state, i >= 4);
            compare_supers(kernel, &base, x, false);
            compare_supers(kernel, &base, x, true);
            free_columns(&x);
        }
        free(base.supers);
    }
}

/* ---- products --------------------------------------------------------------------------------- */

/* Base, residual, and the sum of both as it must be read. */
typedef struct matrices {
    tf_base_data base;
    tf_planes residual;
    float *sum;
} matrices;

static matrices make(int32_t type, int64_t rows, int64_t width, int32_t bits) {
    tf_type info;
    CHECK(tf_type_get(type, &info) == TF_OK);
    const size_t bytes = (size_t)(rows * width / info.block * info.block_bytes);
    const int64_t n = rows * width;
    void *data = test_alloc(bytes);
    float *weights = test_gaussians(n, 0.02f, 1), *rest = test_gaussians(n, 0.005f, 2);
    matrices m = {{type, rows, width, data}, test_planes(rows, width, 64, bits), test_alloc((size_t)n * sizeof(float))};
    CHECK(tf_quantize(type, weights, rows, width, NULL, data, bytes) == TF_OK);
    CHECK(tf_dequantize(type, data, bytes, weights, n) == TF_OK);
    CHECK(tf_residual_encode(rest, &m.residual) == TF_OK);
    CHECK(tf_residual_decode(&m.residual, rest) == TF_OK);
    for (int64_t i = 0; i < n; i++) {
        m.sum[i] = weights[i] + rest[i];
    }
    free(weights);
    free(rest);
    return m;
}

static float *product(const matrices *m, const char *kernel, int32_t threads, const float *x, int64_t n) {
    float *out = test_alloc((size_t)(n * m->base.rows) * sizeof *out);
    memset(out, 0xff, (size_t)(n * m->base.rows) * sizeof *out);
    CHECK(tf_matmul(&m->residual, &m->base, kernel, threads, x, n, out) == TF_OK);
    return out;
}

static void check_product(const matrices *m, const float *x, int64_t n) {
    const int64_t rows = m->base.rows, width = m->base.width;
    float *scalar = product(m, "scalar", 1, x, n);
    double errors = 0.0, sizes = 0.0; /* squared; a product's size is |w| |x|: itself it may happen to be next to 0 */
    for (int64_t i = 0; i < n * rows; i++) {
        double want = 0.0, w2 = 0.0, x2 = 0.0;
        for (int64_t c = 0; c < width; c++) {
            const double w = m->sum[i % rows * width + c], value = x[i / rows * width + c];
            want += w * value;
            w2 += w * w;
            x2 += value * value;
        }
        errors += (scalar[i] - want) * (scalar[i] - want);
        sizes += w2 * x2;
    }
    CHECK(sqrt(errors / sizes) < (n * rows > 100 ? 0.006 : 0.02)); /* a few vary more */
    for (int32_t k = 0; k < tf_kernel_count(); k++) {
        float *got = product(m, tf_kernel_name(k), 1 + k, x, n);
        CHECK(memcmp(got, scalar, (size_t)(n * rows) * sizeof *got) == 0);
        free(got);
    }
    free(scalar);
}

static void test_products(void) {
    static const int32_t types[] = {GGML_TYPE_Q4_0, GGML_TYPE_Q8_0, GGML_TYPE_Q2_K, GGML_TYPE_Q3_K,
                                    GGML_TYPE_Q4_K, GGML_TYPE_Q5_K, GGML_TYPE_Q6_K};
    static const int64_t rows[] = {1, 16, 33}, columns[] = {1, 5, 33};
    for (int i = 0; i < 7 * 3; i++) {
        CHECK(tf_base_has_kernel(types[i / 3]));
        matrices m = make(types[i / 3], rows[i % 3], 512, 4 + i % 3 * 2);
        for (int c = 0; c < 3; c++) {
            float *x = test_gaussians(columns[c] * 512, 1.0f, 4);
            check_product(&m, x, columns[c]);
            free(x);
        }
        free((void *)(uintptr_t)m.base.data);
        test_planes_free(&m.residual);
        free(m.sum);
    }
}

static void test_refused(void) {
    float x[512] = {0}, out[32];
    const uint16_t blocks[9] = {0x7bff}; /* Q4_0 with the largest scale there is, which panels cannot hold */
    const tf_base_data huge = {GGML_TYPE_Q4_0, 1, 32, blocks}, ragged = {GGML_TYPE_Q2_K, 1, 96, blocks},
                       foreign = {GGML_TYPE_F32, 1, 32, x};
    CHECK(tf_matmul(NULL, &huge, NULL, 1, x, 1, out) == TF_ERR_UNSUPPORTED);
    CHECK(tf_matmul(NULL, &ragged, NULL, 1, x, 1, out) == TF_ERR_UNSUPPORTED);
    CHECK(tf_matmul(NULL, &foreign, NULL, 1, x, 1, out) == TF_ERR_UNSUPPORTED);
    CHECK(!tf_base_has_kernel(GGML_TYPE_F32) && !tf_base_has_kernel(-1));
    matrices m = make(GGML_TYPE_Q4_0, 16, 64, 4);
    m.base.rows = 15;
    CHECK(tf_matmul(&m.residual, &m.base, NULL, 1, x, 1, out) == TF_ERR_ARGUMENT);
    free((void *)(uintptr_t)m.base.data);
    test_planes_free(&m.residual);
    free(m.sum);
}

int main(void) {
    CHECK(tf_pool_new(3, &pool) == TF_OK);
    for (int32_t k = 0; k < tf_kernel_count(); k++) {
        const tf_kernel *kernel = tf_kernel_find(tf_kernel_name(k));
        printf("kernel %s\n", kernel->name);
        for (int32_t bits = 2; bits <= 6; bits++) {
            test_supers(kernel, bits);
        }
        test_quantizer(kernel);
        test_parts(kernel);
    }
    test_products();
    test_refused();
    tf_pool_free(pool);
    return 0;
}
