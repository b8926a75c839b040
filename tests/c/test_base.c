/* Base matrices: kernels against the scalar ones, and products against float64. */
#include "ggml.h"
#include "kernels.h"
#include "test.h"

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

/* Two panels at once, and several blocks of columns of which the last has fewer. */
static void compare_wide(const tf_kernel *kernel, const tf_base *base, const tf_columns *x, int32_t blocks) {
    enum { FLOATS = TF_WIDE_COLUMNS * TF_PANEL_ROWS };
    float *want = test_alloc(FLOATS * sizeof *want);
    float *got = aligned_alloc(64, TF_WIDE_PANELS * FLOATS * sizeof *got);
    for (int64_t panel = 0; panel + TF_WIDE_PANELS <= tf_panels(base->rows); panel++) {
        memset(got, 0x55, TF_WIDE_PANELS * FLOATS * sizeof *got);
        kernel->run_supers_wide(base, panel, x, blocks, got);
        for (int64_t i = 0; i < TF_WIDE_PANELS * blocks; i++) {
            const tf_columns *block = &x[i % blocks];
            tf_kernel_scalar.run_supers(base, panel + i / blocks, block, want);
            const float *tile = got + i / blocks * FLOATS + i % blocks * kernel->max_columns * TF_PANEL_ROWS;
            CHECK(memcmp(want, tile, (size_t)(block->n * TF_PANEL_ROWS) * sizeof *want) == 0);
        }
    }
    free(want);
    free(got);
}

static void test_wide_supers(const tf_kernel *kernel) {
    static const int64_t shapes[][2] = {{32, 256}, {33, 512}, {48, 1792}};
    uint64_t state = 17;
    for (int i = 0; i < 3 * 3 && kernel->run_supers_wide != NULL; i++) {
        tf_base base = random_supers(shapes[i % 3][0], shapes[i % 3][1], 2, &state, i / 3);
        for (int32_t last = 1; last <= kernel->max_columns; last++) {
            tf_columns x[3];
            for (int b = 0; b < 3; b++) {
                x[b] = random_columns(base.width, b < 2 ? kernel->max_columns : last, &state, i >= 3);
            }
            compare_wide(kernel, &base, x, 3);
            compare_wide(kernel, &base, &x[1], 2);
            compare_wide(kernel, &base, &x[2], 1);
            for (int b = 0; b < 3; b++) {
                uint8_t *flags = x[b].flags;
                x[b].flags = NULL;
                compare_wide(kernel, &base, &x[b], 1);
                x[b].flags = flags;
                free_columns(&x[b]);
            }
        }
        free(base.supers);
    }
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
    for (int32_t k = 0; k < tf_kernel_count(); k++) {
        const tf_kernel *kernel = tf_kernel_find(tf_kernel_name(k));
        printf("kernel %s\n", kernel->name);
        for (int32_t bits = 2; bits <= 6; bits++) {
            test_supers(kernel, bits);
        }
        test_wide_supers(kernel);
    }
    test_products();
    test_refused();
    return 0;
}
