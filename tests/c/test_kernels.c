/* Kernels: the scalar one's bits from every other, however the work is cut up; and the right values. */
#include "kernels.h"
#include "test.h"

static const int64_t shapes[][3] = {
    /* rows, width, group */
    {1, 32, 32}, {15, 96, 64}, {16, 96, 1024}, {17, 576, 128}, {33, 1536, 1024}, {70, 64, 32}};

enum { SHAPES = sizeof shapes / sizeof *shapes };

/* Planes of any bytes: every code, and scales that stay finite. */
static tf_planes random_planes(const int64_t *shape, int32_t bits, uint64_t *state, bool extreme) {
    tf_planes p = test_planes(shape[0], shape[1], (int32_t)shape[2], bits);
    uint8_t *const planes[] = {p.plane4, p.plane6, p.plane8};
    for (int i = 0; i < 3; i++) {
        const int64_t bytes = planes[i] != NULL ? tf_plane_bytes(shape[0], shape[1], p.group, 4 + 2 * i) : 0;
        for (int64_t b = 0; b < bytes; b++) {
            planes[i][b] = extreme ? 0xff : (uint8_t)(test_random(state) >> 40);
        }
    }
    for (int64_t i = 0; i < tf_plane_bytes(shape[0], shape[1], p.group, 0) / 2; i++) {
        p.scales[i] = (uint16_t)(test_random(state) >> 40 & 0xbbff);
    }
    return p;
}

/* Columns in buffers of exactly their size, with the sums that belong to their codes. */
static tf_columns random_columns(const int64_t *shape, int32_t n, uint64_t *state, bool extreme) {
    const int64_t width = shape[1], groups = tf_groups(width, (int32_t)shape[2]);
    tf_columns x = {.n = n};
    x.q = test_alloc((size_t)(width * n));
    x.scale = test_alloc((size_t)(width / TF_BLOCK * n) * sizeof *x.scale);
    x.sums = test_alloc((size_t)(width / TF_BLOCK * n) * sizeof *x.sums);
    x.offset = test_alloc((size_t)(groups * n) * sizeof *x.offset);
    for (int64_t i = 0; i < width * n; i++) {
        const int64_t code = (int64_t)(test_random(state) >> 40) % 255 - 127;
        x.q[i] = (int8_t)(!extreme ? code : i / 4 / n % 16 < 8 ? 127 : -127);
    }
    for (int64_t i = 0; i < width / TF_BLOCK * n; i++) {
        x.scale[i] = 1e-3f * fabsf(test_gaussian(state));
        x.sums[i] = test_half_sums(x.q + (i / n * (TF_BLOCK / 4) * n + i % n) * 4, n);
    }
    for (int64_t i = 0; i < groups * n; i++) {
        x.offset[i] = test_gaussian(state);
    }
    return x;
}

static void compare_panels(const tf_kernel *kernel, const tf_planes *planes, const tf_columns *x) {
    const size_t floats = (size_t)x->n * TF_PANEL_ROWS;
    float *want = test_alloc(floats * sizeof *want), *got = test_alloc(floats * sizeof *got);
    for (int64_t panel = 0; panel < tf_panels(planes->rows); panel++) {
        memset(got, 0x55, floats * sizeof *got);
        tf_kernel_scalar.run(planes, panel, x, want);
        kernel->run(planes, panel, x, got);
        CHECK(memcmp(want, got, floats * sizeof *got) == 0);
    }
    free(want);
    free(got);
}

static void free_columns(tf_columns *x) {
    free(x->q);
    free(x->low);
    free(x->scale);
    free(x->sums);
    free(x->offset);
    free(x->flags);
}

/* Low codes for about a quarter of the blocks. */
static void add_low(tf_columns *x, int64_t width, uint64_t *state) {
    x->low = test_alloc((size_t)(width * x->n));
    x->flags = test_alloc((size_t)(width / TF_BLOCK * TF_MAX_COLUMNS));
    for (int64_t i = 0; i < width * x->n; i++) {
        x->low[i] = (int8_t)(test_random(state) >> 40);
    }
    for (int64_t i = 0; i < width / TF_BLOCK * TF_MAX_COLUMNS; i++) { /* of columns that are not there as well */
        x->flags[i] = test_random(state) >> 61 == 0;
    }
}

/* Two panels at once, and several blocks of columns of which the last has fewer. */
static void compare_wide(const tf_kernel *kernel, const tf_planes *planes, const tf_columns *x, int32_t blocks) {
    enum { FLOATS = TF_WIDE_COLUMNS * TF_PANEL_ROWS };
    float *want = test_alloc(FLOATS * sizeof *want);
    float *got = aligned_alloc(64, TF_WIDE_PANELS * FLOATS * sizeof *got);
    for (int64_t panel = 0; panel + TF_WIDE_PANELS <= tf_panels(planes->rows); panel++) {
        memset(got, 0x55, TF_WIDE_PANELS * FLOATS * sizeof *got);
        kernel->run_wide(planes, panel, x, blocks, got);
        for (int64_t i = 0; i < TF_WIDE_PANELS * blocks; i++) {
            const tf_columns *block = &x[i % blocks];
            tf_kernel_scalar.run(planes, panel + i / blocks, block, want);
            const float *tile = got + i / blocks * FLOATS + i % blocks * kernel->max_columns * TF_PANEL_ROWS;
            CHECK(memcmp(want, tile, (size_t)(block->n * TF_PANEL_ROWS) * sizeof *want) == 0);
        }
    }
    free(want);
    free(got);
}

static void test_wide(const tf_kernel *kernel) {
    static const int64_t tall[][3] = {{33, 96, 32}, {48, 576, 96}, {64, 2080, 1024}, {40, 1536, 128}};
    uint64_t state = 13;
    for (int i = 0; i < 4 * 3 * 4 && kernel->run_wide != NULL; i++) {
        const int64_t *shape = tall[i % 4];
        const int32_t bits = 4 + i / 4 % 3 * 2;
        const bool extreme = i / 12 % 2, low = i / 24;
        tf_planes planes = random_planes(shape, bits, &state, extreme);
        for (int32_t last = 1; last <= kernel->max_columns; last++) {
            tf_columns x[3];
            for (int b = 0; b < 3; b++) {
                x[b] = random_columns(shape, b < 2 ? kernel->max_columns : last, &state, extreme);
                if (low) {
                    add_low(&x[b], shape[1], &state);
                }
            }
            compare_wide(kernel, &planes, x, 3);
            compare_wide(kernel, &planes, &x[1], 2);
            if (bits == 4 || last > 4) {
                compare_wide(kernel, &planes, &x[2], 1);
            }
            for (int b = 0; b < 3; b++) {
                free_columns(&x[b]);
            }
        }
        test_planes_free(&planes);
    }
}

static void test_panels(const tf_kernel *kernel) {
    uint64_t state = 11;
    for (int i = 0; i < SHAPES * 2; i++) {
        const bool extreme = i >= SHAPES; /* where 16-bit sums would saturate */
        for (int32_t bits = 4; bits <= 8; bits += 2) {
            tf_planes planes = random_planes(shapes[i % SHAPES], bits, &state, extreme);
            for (int32_t n = 1; n <= kernel->max_columns; n++) {
                tf_columns x = random_columns(shapes[i % SHAPES], n, &state, extreme);
                compare_panels(kernel, &planes, &x);
                free_columns(&x);
            }
            test_planes_free(&planes);
        }
    }
}

static float *product(const tf_planes *p, const char *kernel, int32_t threads, const float *x, int64_t n) {
    float *out = test_alloc((size_t)(n * p->rows) * sizeof *out);
    memset(out, 0xff, (size_t)(n * p->rows) * sizeof *out); /* NaN, to be overwritten */
    CHECK(tf_matmul(p, NULL, kernel, threads, x, n, out) == TF_OK);
    return out;
}

static tf_planes gaussian_planes(const int64_t *shape, int32_t bits) {
    float *weights = test_gaussians(shape[0] * shape[1], 0.02f, (uint64_t)shape[0]);
    tf_planes planes = test_planes(shape[0], shape[1], (int32_t)shape[2], bits);
    CHECK(tf_residual_encode(weights, &planes) == TF_OK);
    free(weights);
    return planes;
}

/* Column by column with the scalar kernel on one thread is what everything else must equal. */
static void compare_products(const tf_planes *p, const float *x, const float *want, int64_t n) {
    for (int32_t k = 0; k < tf_kernel_count(); k++) {
        for (int32_t threads = 1; threads <= 5; threads += 2) {
            float *got = product(p, tf_kernel_name(k), threads, x, n);
            CHECK(memcmp(got, want, (size_t)(n * p->rows) * sizeof *got) == 0);
            free(got);
        }
    }
}

static void test_cuts(void) {
    static const int64_t columns[] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 31, 67};
    for (int s = 0; s < SHAPES * 3; s++) {
        tf_planes p = gaussian_planes(shapes[s / 3], 4 + s % 3 * 2);
        float *x = test_gaussians(67 * p.width, 1.0f, 5);
        float *want = test_alloc((size_t)(67 * p.rows) * sizeof *want);
        for (int64_t j = 0; j < 67; j++) {
            float *one = product(&p, "scalar", 1, x + j * p.width, 1);
            memcpy(want + j * p.rows, one, (size_t)p.rows * sizeof *one);
            free(one);
        }
        for (size_t i = 0; i < sizeof columns / sizeof *columns; i++) {
            compare_products(&p, x, want, columns[i]);
        }
        free(want);
        free(x);
        test_planes_free(&p);
    }
}

static void check_accuracy(const tf_planes *p, const float *x, int64_t n) {
    float *r = test_alloc((size_t)(p->rows * p->width) * sizeof *r);
    double *want = test_alloc((size_t)(n * p->rows) * sizeof *want);
    CHECK(tf_residual_decode(p, r) == TF_OK);
    for (int64_t i = 0; i < n * p->rows; i++) {
        want[i] = 0.0;
        for (int64_t c = 0; c < p->width; c++) {
            want[i] += (double)r[i % p->rows * p->width + c] * x[i / p->rows * p->width + c];
        }
    }
    for (int32_t k = 0; k < tf_kernel_count(); k++) {
        float *got = product(p, tf_kernel_name(k), 1, x, n);
        CHECK(test_relative_rms(got, want, n * p->rows) < 0.006);
        free(got);
    }
    free(r);
    free(want);
}

static void test_accuracy(void) {
    for (int s = 1; s < SHAPES * 3; s++) {
        tf_planes p = gaussian_planes(shapes[s % SHAPES], 4 + s / SHAPES * 2);
        float *x = test_gaussians(33 * p.width, 3.0f, 7);
        check_accuracy(&p, x, 33);
        free(x);
        test_planes_free(&p);
    }
}

/* Column 2 of 5 holds the value: its results are not finite, the others are what they were. */
static void check_nonfinite(const tf_planes *p, float value, int64_t at) {
    float *x = test_gaussians(5 * p->width, 1.0f, 9);
    for (int32_t k = 0; k < tf_kernel_count(); k++) {
        float *want = product(p, tf_kernel_name(k), 1, x, 5);
        const float kept = x[2 * p->width + at];
        x[2 * p->width + at] = value;
        float *got = product(p, tf_kernel_name(k), 1, x, 5);
        x[2 * p->width + at] = kept;
        for (int64_t i = 0; i < 5 * p->rows; i++) {
            CHECK(i / p->rows == 2 ? !isfinite(got[i]) : memcmp(&got[i], &want[i], sizeof *got) == 0);
        }
        free(want);
        free(got);
    }
    free(x);
}

static void test_nonfinite(void) {
    for (int32_t bits = 4; bits <= 8; bits += 2) {
        tf_planes p = gaussian_planes(shapes[3], bits);
        const int64_t places[] = {0, 31, 33, p.width - 1};
        for (int i = 0; i < 4; i++) {
            check_nonfinite(&p, NAN, places[i]);
            check_nonfinite(&p, INFINITY, places[i]);
            check_nonfinite(&p, -INFINITY, places[i]);
        }
        test_planes_free(&p);
    }
}

/* Numbers at the ends of float32: the smallest give next to nothing, the largest do no harm. */
static void test_magnitudes(void) {
    static const float magnitudes[] = {0.0f, 1e-45f, 1e-39f, 3e38f};
    tf_planes p = gaussian_planes(shapes[3], 8);
    for (int i = 0; i < 4; i++) {
        float *x = test_gaussians(p.width, 0.0f, 1);
        x[5] = magnitudes[i];
        x[40] = -magnitudes[i];
        float *want = product(&p, "scalar", 1, x, 1);
        compare_products(&p, x, want, 1);
        for (int64_t row = 0; row < p.rows; row++) {
            CHECK(i == 3 || fabsf(want[row]) <= magnitudes[i]);
        }
        free(want);
        free(x);
    }
    test_planes_free(&p);
}

static void test_refused(void) {
    tf_planes p = gaussian_planes(shapes[0], 8), bad;
    float x[32] = {0}, out[1];
    CHECK(tf_matmul(&p, NULL, "none", 1, x, 1, out) == TF_ERR_ARGUMENT && strstr(tf_error(), "scalar") != NULL);
    CHECK(tf_matmul(&p, NULL, NULL, 0, x, 1, out) == TF_ERR_ARGUMENT);
    CHECK(tf_matmul(&p, NULL, NULL, 1, x, 0, out) == TF_ERR_ARGUMENT);
    CHECK(tf_matmul(&p, NULL, NULL, 1, x, -1, out) == TF_ERR_ARGUMENT);
    CHECK(tf_matmul(NULL, NULL, NULL, 1, x, 1, out) == TF_ERR_ARGUMENT);
    bad = p, bad.bits = 5;
    CHECK(tf_matmul(&bad, NULL, NULL, 1, x, 1, out) == TF_ERR_ARGUMENT);
    bad = p, bad.width = 31;
    CHECK(tf_matmul(&bad, NULL, NULL, 1, x, 1, out) == TF_ERR_ARGUMENT);
    bad = p, bad.plane8 = NULL;
    CHECK(tf_matmul(&bad, NULL, NULL, 1, x, 1, out) == TF_ERR_ARGUMENT);
    test_planes_free(&p);
    CHECK(tf_kernel_name(-1) == NULL && tf_kernel_name(tf_kernel_count()) == NULL);
    setenv("TWOFOLD_KERNEL", "scalar", 1);
    CHECK(strcmp(tf_kernel_default(), "scalar") == 0 && tf_kernel_find(NULL) == &tf_kernel_scalar);
    unsetenv("TWOFOLD_KERNEL");
    CHECK(strcmp(tf_kernel_default(), tf_kernel_name(tf_kernel_count() - 1)) == 0);
}

int main(void) {
    unsetenv("TWOFOLD_KERNEL");
    for (int32_t k = 0; k < tf_kernel_count(); k++) {
        printf("kernel %s\n", tf_kernel_name(k));
        test_panels(tf_kernel_find(tf_kernel_name(k)));
        test_wide(tf_kernel_find(tf_kernel_name(k)));
    }
    test_cuts();
    test_accuracy();
    test_nonfinite();
    test_magnitudes();
    test_refused();
    return 0;
}
