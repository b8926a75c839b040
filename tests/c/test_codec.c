/* The residual codec: errors within what the format promises, planes that nest, arguments refused. */
#include "test.h"

/* Half a cell, in 1/128 of the scale. */
static double half_cell(int32_t bits) { return bits == 4 ? 8.0 : bits == 6 ? 2.0 : 0.5; }

static double scale_of(const tf_planes *p, int64_t row, int64_t column) {
    const int64_t groups = tf_groups(p->width, p->group);
    return tf_half_to_float(p->scales[(row / 16 * groups + column / p->group) * 16 + row % 16]);
}

/* The float16 nearest to what puts the group's largest magnitude on the outermost value. */
static void check_scale(const tf_planes *p, const float *weights, int64_t row, int64_t first) {
    double largest = 0.0;
    for (int64_t i = first; i < p->width && i < first + p->group; i++) {
        largest = fmax(largest, fabs(weights[row * p->width + i]));
    }
    const double ideal = fmin(largest * 128.0 / (128.0 - half_cell(p->bits)), 65504.0);
    CHECK(fabs(scale_of(p, row, first) - ideal) <= fmax(ideal * 0x1.001p-11, 0x1.001p-25));
}

/* Decoded values are within half a cell of the weights; beyond the scale, at the outermost value. */
static void check_errors(const tf_planes *p, const float *weights, const float *decoded) {
    const double half = half_cell(p->bits) / 128.0;
    for (int64_t row = 0; row < p->rows; row++) {
        for (int64_t i = 0; i < p->width; i++) {
            const double scale = scale_of(p, row, i), weight = weights[row * p->width + i];
            const double error = fabs(decoded[row * p->width + i] - weight);
            const double beyond = fmax(0.0, fabs(weight) - scale);
            CHECK(error <= (scale * half + beyond) * 1.00001);
        }
    }
}

/* Rows of the last panel that are not there must add nothing. */
static void check_padding(const tf_planes *p) {
    const int64_t groups = tf_groups(p->width, p->group), last = tf_panels(p->rows) - 1;
    for (int64_t row = p->rows; row < (last + 1) * 16; row++) {
        for (int64_t g = 0; g < groups; g++) {
            CHECK(p->scales[(last * groups + g) * 16 + row % 16] == 0);
        }
    }
}

/* Reading fewer planes gives the middle of the cell that the code lies in. */
static void check_nesting(const tf_planes *p, const float *weights, const float *decoded) {
    for (int32_t bits = 4; bits < p->bits; bits += 2) {
        tf_planes fewer = *p;
        fewer.bits = bits;
        fewer.plane8 = NULL;
        fewer.plane6 = bits >= 6 ? p->plane6 : NULL;
        float *coarse = test_alloc((size_t)(p->rows * p->width) * sizeof *coarse);
        CHECK(tf_residual_decode(&fewer, coarse) == TF_OK);
        check_errors(&fewer, weights, coarse);
        for (int64_t i = 0; i < p->rows * p->width; i++) {
            const double scale = scale_of(p, i / p->width, i % p->width);
            const double most = (half_cell(bits) - half_cell(p->bits)) / 128.0 * scale;
            CHECK(fabs(coarse[i] - decoded[i]) <= most * 1.00001);
        }
        free(coarse);
    }
}

static void round_trip(int64_t rows, int64_t width, int32_t group, int32_t bits, float deviation) {
    float *weights = test_gaussians(rows * width, deviation, (uint64_t)(rows * width));
    memset(weights + rows / 2 * width, 0, (size_t)width * sizeof *weights);
    tf_planes planes = test_planes(rows, width, group, bits);
    CHECK(tf_residual_encode(weights, &planes) == TF_OK);
    float *decoded = test_alloc((size_t)(rows * width) * sizeof *decoded);
    CHECK(tf_residual_decode(&planes, decoded) == TF_OK);
    for (int64_t row = 0; row < rows; row++) {
        for (int64_t first = 0; first < width; first += group) {
            check_scale(&planes, weights, row, first);
        }
    }
    check_errors(&planes, weights, decoded);
    check_padding(&planes);
    check_nesting(&planes, weights, decoded);
    for (int64_t i = 0; i < width; i++) {
        CHECK(decoded[rows / 2 * width + i] == 0.0f);
    }
    test_planes_free(&planes);
    free(decoded);
    free(weights);
}

static void test_round_trips(void) {
    static const int64_t rows[] = {1, 15, 16, 17, 33}, widths[] = {32, 96, 576, 1536};
    static const int32_t groups[] = {32, 64, 128, 1024};
    for (int i = 0; i < 5 * 4 * 4; i++) {
        for (int32_t bits = 4; bits <= 8; bits += 2) {
            round_trip(rows[i % 5], widths[i / 5 % 4], groups[i / 20], bits, 0.02f);
        }
    }
    /* Scales below float16's normal numbers, below all its numbers, and above the largest. */
    static const float deviations[] = {1e-7f, 1e-9f, 1e-38f, 3e4f, 1e6f, 1e37f};
    for (int i = 0; i < 6; i++) {
        for (int32_t bits = 4; bits <= 8; bits += 2) {
            round_trip(17, 96, 64, bits, deviations[i]);
        }
    }
}

/* The place of one weight's code, as docs/format.md words it. */
static void test_layout(void) {
    enum { ROWS = 33, WIDTH = 96, ROW = 21, COLUMN = 45 };
    float weights[ROWS * WIDTH] = {0};
    tf_planes planes = test_planes(ROWS, WIDTH, 32, 8);
    weights[ROW * WIDTH + COLUMN] = 0.125f; /* the largest of its group: code 255 */
    CHECK(tf_residual_encode(weights, &planes) == TF_OK);
    const int64_t lane = ROW % 16 * 4 + COLUMN % 4, chunk = COLUMN / 4;
    const int64_t four = ROW / 16 * WIDTH * 8 + chunk / 2 * 64 + lane;
    const int64_t two = ROW / 16 * WIDTH * 4 + chunk / 4 * 64 + lane;
    CHECK((planes.plane4[four] >> chunk % 2 * 4 & 15) == 15);
    CHECK((planes.plane6[two] >> chunk % 4 * 2 & 3) == 3);
    CHECK((planes.plane8[two] >> chunk % 4 * 2 & 3) == 3);
    planes.plane4[four] &= (uint8_t)~(15 << chunk % 2 * 4);
    planes.plane6[two] = planes.plane8[two] = 0;
    for (int64_t i = 0; i < 3 * WIDTH * 8; i++) { /* every other weight is zero: code 128, or no row */
        CHECK((planes.plane4[i] & 0x77) == 0);
        CHECK(i >= 3 * WIDTH * 4 || (planes.plane6[i] == 0 && planes.plane8[i] == 0));
    }
    test_planes_free(&planes);
}

static void refused(tf_planes planes) {
    float one[33 * 33] = {0};
    CHECK(tf_residual_encode(one, &planes) == TF_ERR_ARGUMENT);
    CHECK(tf_error()[0] != '\0');
    CHECK(tf_residual_decode(&planes, one) == TF_ERR_ARGUMENT);
}

static void test_refused(void) {
    tf_planes good = test_planes(16, 32, 32, 8), bad;
    static const int32_t bits[] = {-4, 0, 1, 5, 7, 16}, groups[] = {-32, 0, 16, 33, 48, 1056, 2048};
    static const int64_t sizes[] = {-32, 0, (int64_t)INT32_MAX + 1, INT64_MAX};
    for (size_t i = 0; i < sizeof bits / sizeof *bits; i++) {
        bad = good, bad.bits = bits[i], refused(bad);
    }
    for (size_t i = 0; i < sizeof groups / sizeof *groups; i++) {
        bad = good, bad.group = groups[i], refused(bad);
    }
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        bad = good, bad.rows = sizes[i], refused(bad);
        bad = good, bad.width = sizes[i], refused(bad);
    }
    bad = good, bad.width = 33, refused(bad);
    bad = good, bad.scales = NULL, refused(bad);
    bad = good, bad.plane4 = NULL, refused(bad);
    bad = good, bad.plane6 = NULL, refused(bad);
    bad = good, bad.plane8 = NULL, refused(bad);
    CHECK(tf_plane_bytes(16, 32, 32, 5) == 0);
    test_planes_free(&good);
}

/* The converter refuses these before; here nothing may break. */
static void test_nonfinite(void) {
    float weights[16 * 32], decoded[16 * 32];
    for (int i = 0; i < 16 * 32; i++) {
        weights[i] = i % 3 == 0 ? NAN : i % 3 == 1 ? INFINITY : -INFINITY;
    }
    tf_planes planes = test_planes(16, 32, 32, 8);
    CHECK(tf_residual_encode(weights, &planes) == TF_OK);
    CHECK(tf_residual_decode(&planes, decoded) == TF_OK);
    CHECK(tf_check_finite(decoded, 16 * 32) == TF_OK);
    test_planes_free(&planes);
}

int main(void) {
    test_round_trips();
    test_layout();
    test_refused();
    test_nonfinite();
    return 0;
}
