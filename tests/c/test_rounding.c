/* Rounding with feedback: what a column loses is made up for in the later ones, and only there. */
#include "test.h"

enum { ROWS = 21, WIDTH = 160, GROUP = 64, GROUPS = 3 };

/* Everything in buffers of exactly its size. */
typedef struct work {
    float *values, *factor, *lost;
    uint8_t *codes;
    uint16_t *scales, *group_scales; /* of each value, of each group */
} work;

static work work_new(float deviation) {
    return (work){test_gaussians(ROWS * WIDTH, deviation, 5),  test_alloc(GROUP * GROUP * sizeof(float)),
                  test_alloc(ROWS * GROUP * sizeof(float)),    test_alloc(ROWS * WIDTH),
                  test_alloc(ROWS * WIDTH * sizeof(uint16_t)), test_alloc(ROWS * GROUPS * sizeof(uint16_t))};
}

static void work_free(work *w) {
    free(w->values);
    free(w->factor);
    free(w->lost);
    free(w->codes);
    free(w->scales);
    free(w->group_scales);
}

/* Upper triangle: `diagonal`, and `beside` everywhere above it. */
static void fill_factor(float *factor, float diagonal, float beside) {
    for (int64_t i = 0; i < GROUP * GROUP; i++) {
        const int64_t row = i / GROUP, column = i % GROUP;
        factor[i] = column == row ? diagonal : column > row ? beside : NAN; /* below it nothing is read */
    }
}

static tf_status round_group(work *w, int64_t g, int32_t bits) {
    const int64_t first = g * GROUP, n = WIDTH - first < GROUP ? WIDTH - first : GROUP;
    return tf_residual_round(w->values + first, ROWS, WIDTH, n, w->factor, GROUP, bits, w->scales + first,
                             w->codes + first, w->lost);
}

static void find_scales(work *w, int32_t bits) {
    CHECK(tf_residual_scales(w->values, ROWS, WIDTH, GROUP, bits, w->group_scales) == TF_OK);
    for (int64_t i = 0; i < ROWS * WIDTH; i++) {
        w->scales[i] = w->group_scales[i / WIDTH * GROUPS + i % WIDTH / GROUP];
    }
}

/* Without spreading, the planes are the encoder's, and what is lost is what decoding lacks. */
static void test_same_as_encode(int32_t bits, float deviation) {
    work w = work_new(deviation);
    fill_factor(w.factor, 0.5f, 0.0f);
    memset(w.values + 3 * WIDTH, 0, WIDTH * sizeof *w.values);
    tf_planes plain = test_planes(ROWS, WIDTH, GROUP, bits), packed = test_planes(ROWS, WIDTH, GROUP, bits);
    float *decoded = test_alloc(ROWS * WIDTH * sizeof *decoded);
    find_scales(&w, bits);
    CHECK(tf_residual_encode(w.values, &plain) == TF_OK && tf_residual_decode(&plain, decoded) == TF_OK);
    for (int64_t g = 0; g < GROUPS; g++) {
        const int64_t first = g * GROUP, n = g == 2 ? 32 : GROUP;
        CHECK(round_group(&w, g, bits) == TF_OK);
        for (int64_t i = 0; i < ROWS * n; i++) {
            const int64_t at = i / n * WIDTH + first + i % n;
            CHECK(w.lost[i] == (w.values[at] - decoded[at]) / 0.5f);
        }
    }
    CHECK(tf_residual_pack(w.codes, w.group_scales, &packed) == TF_OK);
    for (int32_t plane = 0; plane <= bits; plane += plane == 0 ? 4 : 2) {
        const void *const parts[] = {plain.scales, packed.scales, plain.plane4, packed.plane4,
                                     plain.plane6, packed.plane6, plain.plane8, packed.plane8};
        const void *const *pair = parts + (plane == 0 ? 0 : plane - 2);
        CHECK(memcmp(pair[0], pair[1], (size_t)tf_plane_bytes(ROWS, WIDTH, GROUP, plane)) == 0);
    }
    test_planes_free(&plain);
    test_planes_free(&packed);
    free(decoded);
    work_free(&w);
}

static float value_of(const work *w, int64_t row, int64_t column, int32_t bits) {
    const float scale = tf_half_to_float(w->group_scales[row * GROUPS]);
    return scale / 128.0f * ((float)w->codes[row * WIDTH + column] + tf_code_offset(bits));
}

/* Column by column, in double: the values that were rounded, and the codes, are those of the definition. */
static void test_spread(int32_t bits) {
    work w = work_new(0.02f);
    fill_factor(w.factor, 2.0f, 0.25f);
    float *before = test_gaussians(ROWS * WIDTH, 0.02f, 5);
    find_scales(&w, bits);
    CHECK(round_group(&w, 0, bits) == TF_OK);
    for (int64_t row = 0; row < ROWS; row++) {
        double carried = 0.0;
        for (int64_t i = 0; i < GROUP; i++) {
            const double target = before[row * WIDTH + i] - carried;
            CHECK(fabs(w.values[row * WIDTH + i] - target) < 1e-6);
            const double step = tf_half_to_float(w.group_scales[row * GROUPS]) / 128.0 * (1 << (8 - bits));
            const double error = w.values[row * WIDTH + i] - value_of(&w, row, i, bits);
            const int code = w.codes[row * WIDTH + i];
            CHECK(fabs(error) <= step * 0.5001 || code == 0 || code == (0xff << (8 - bits) & 0xff));
            CHECK(fabs(w.lost[row * GROUP + i] - error / 2.0) < 1e-6);
            carried += w.lost[row * GROUP + i] * 0.25;
        }
        CHECK(memcmp(w.values + row * WIDTH + GROUP, before + row * WIDTH + GROUP, GROUP * sizeof *before) == 0);
    }
    free(before);
    work_free(&w);
}

/* The converter refuses these before; here nothing may break. */
static void test_nonfinite(void) {
    work w = work_new(1.0f);
    fill_factor(w.factor, 1.0f, 1.0f);
    for (int64_t i = 0; i < ROWS * WIDTH; i++) {
        w.values[i] = i % 3 == 0 ? NAN : i % 3 == 1 ? INFINITY : 1e38f;
    }
    find_scales(&w, 8);
    CHECK(round_group(&w, 0, 8) == TF_OK);
    work_free(&w);
}

static void test_refused(void) {
    work w = work_new(1.0f);
    fill_factor(w.factor, 1.0f, 0.0f);
    find_scales(&w, 8);
    CHECK(round_group(&w, 0, 5) == TF_ERR_ARGUMENT && round_group(&w, 0, 0) == TF_ERR_ARGUMENT);
    CHECK(tf_residual_round(w.values, 0, WIDTH, GROUP, w.factor, GROUP, 8, w.scales, w.codes, w.lost) ==
          TF_ERR_ARGUMENT);
    CHECK(tf_residual_round(w.values, ROWS, WIDTH, WIDTH + 1, w.factor, GROUP, 8, w.scales, w.codes, w.lost) ==
          TF_ERR_ARGUMENT);
    CHECK(tf_residual_round(w.values, ROWS, WIDTH, GROUP, w.factor, GROUP - 1, 8, w.scales, w.codes, w.lost) ==
          TF_ERR_ARGUMENT);
    CHECK(tf_residual_scales(w.values, ROWS, WIDTH, 48, 8, w.group_scales) == TF_ERR_ARGUMENT);
    tf_planes planes = test_planes(ROWS, WIDTH, GROUP, 8), bad = planes;
    bad.group = 48;
    CHECK(tf_residual_pack(w.codes, w.group_scales, &bad) == TF_ERR_ARGUMENT);
    bad = planes;
    bad.plane6 = NULL;
    CHECK(tf_residual_pack(w.codes, w.group_scales, &bad) == TF_ERR_ARGUMENT);
    test_planes_free(&planes);
    work_free(&w);
}

int main(void) {
    for (int32_t bits = 4; bits <= 8; bits += 2) {
        test_same_as_encode(bits, 0.02f);
        test_same_as_encode(bits, 1e-9f); /* scales below all of float16's numbers: zero */
        test_same_as_encode(bits, 1e6f);
        test_spread(bits);
    }
    test_nonfinite();
    test_refused();
    return 0;
}
