/* What every C test program uses. */
#pragma once

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "twofold.h"

#define CHECK(condition)                                                                               \
    do {                                                                                               \
        if (!(condition)) {                                                                            \
            fprintf(stderr, "%s:%d: %s (tf_error: %s)\n", __FILE__, __LINE__, #condition, tf_error()); \
            exit(1);                                                                                   \
        }                                                                                              \
    } while (0)

/* malloc() of exactly this size, so that a sanitizer sees the first byte read beyond it. */
static inline void *test_alloc(size_t bytes) {
    void *memory = malloc(bytes);
    CHECK(memory != NULL);
    return memory;
}

/* xorshift64*: the same numbers everywhere. */
static inline uint64_t test_random(uint64_t *state) {
    *state ^= *state >> 12;
    *state ^= *state << 25;
    *state ^= *state >> 27;
    return *state * 0x2545f4914f6cdd1du;
}

/* Of deviation 1: twelve uniform numbers summed. */
static inline float test_gaussian(uint64_t *state) {
    double sum = -6.0;
    for (int i = 0; i < 12; i++) {
        sum += (double)(test_random(state) >> 11) / 9007199254740992.0;
    }
    return (float)sum;
}

static inline float *test_gaussians(int64_t n, float deviation, uint64_t seed) {
    float *values = test_alloc((size_t)n * sizeof *values);
    uint64_t state = seed * 2 + 1;
    for (int64_t i = 0; i < n; i++) {
        values[i] = deviation * test_gaussian(&state);
    }
    return values;
}

/* Planes for a matrix, each in a buffer of exactly its size. */
static inline tf_planes test_planes(int64_t rows, int64_t width, int32_t group, int32_t bits) {
    tf_planes planes = {.rows = rows, .width = width, .group = group, .bits = bits};
    planes.scales = test_alloc((size_t)tf_plane_bytes(rows, width, group, 0));
    planes.plane4 = test_alloc((size_t)tf_plane_bytes(rows, width, group, 4));
    planes.plane6 = bits >= 6 ? test_alloc((size_t)tf_plane_bytes(rows, width, group, 6)) : NULL;
    planes.plane8 = bits == 8 ? test_alloc((size_t)tf_plane_bytes(rows, width, group, 8)) : NULL;
    return planes;
}

static inline void test_planes_free(tf_planes *planes) {
    free(planes->scales);
    free(planes->plane4);
    free(planes->plane6);
    free(planes->plane8);
}

/* Sums of both halves of a block of 32 codes of one column among n, as tf_columns holds them. */
static inline int32_t test_half_sums(const int8_t *codes, int32_t n) {
    int32_t halves[2] = {0, 0};
    for (int i = 0; i < 32; i++) {
        halves[i / 16] += codes[i / 4 * 4 * n + i % 4];
    }
    return (int32_t)((uint32_t)(halves[0] & 0xffff) | (uint32_t)halves[1] << 16);
}

/* Root mean square of got - want, over that of want. */
static inline double test_relative_rms(const float *got, const double *want, int64_t n) {
    double error = 0.0, power = 0.0;
    for (int64_t i = 0; i < n; i++) {
        error += (got[i] - want[i]) * (got[i] - want[i]);
        power += want[i] * want[i];
    }
    return sqrt(error / power);
}
