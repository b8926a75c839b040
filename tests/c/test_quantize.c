/* Activations quantized: every kernel as the scalar one, however many columns and threads there are. */
#include "quantize.h"
#include "test.h"

static tf_pool *pool; /* three threads */

static tf_columns quantized(const tf_kernel *kernel, const float *x, tf_activations *a) {
    tf_activations_shape(a, 1, TF_BLOCK, 32, 8, 1, true);
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
    tf_activations_shape(&many, N, WIDTH, GROUP, 6, kernel->max_columns, true);
    tf_activations_shape(&one, 1, WIDTH, GROUP, 6, kernel->max_columns, true);
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

int main(void) {
    CHECK(tf_pool_new(3, &pool) == TF_OK);
    for (int32_t k = 0; k < tf_kernel_count(); k++) {
        const tf_kernel *kernel = tf_kernel_find(tf_kernel_name(k));
        printf("kernel %s\n", kernel->name);
        test_quantizer(kernel);
        test_parts(kernel);
    }
    tf_pool_free(pool);
    return 0;
}
