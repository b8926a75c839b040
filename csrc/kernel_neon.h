/* What both NEON files use: 16 rows are four quarters, a quarter's codes of a chunk of 4 inputs one register. */
#pragma once

#include <arm_neon.h>

#include "kernels.h"

#define INLINE static inline __attribute__((always_inline))
/* Of the loops around dot_lane(): its lane is part of the instruction, so it has to become a constant. */
#if defined(__clang__)
#define UNROLL _Pragma("clang loop unroll(full)")
#else
#define UNROLL _Pragma("GCC unroll 8")
#endif

enum { QUARTERS = 4 }; /* of a panel, 4 rows each */
typedef float32x4_t quarter[TF_MAX_COLUMNS];
static const float zeros[TF_MAX_COLUMNS];

INLINE int32x4_t dot_lane(int32x4_t dot, int8x16_t codes, int8x16_t x, int lane) {
    switch (lane) {
        case 0: return vdotq_laneq_s32(dot, codes, x, 0);
        case 1: return vdotq_laneq_s32(dot, codes, x, 1);
        case 2: return vdotq_laneq_s32(dot, codes, x, 2);
        default: return vdotq_laneq_s32(dot, codes, x, 3);
    }
}

/* 16 inputs of n columns. The compiler must not know that they are the same for every quarter: clang would
 * make a register of each lane, far more than there are. */
INLINE void load_inputs(const int8_t *q, int8x16_t *x, int n) {
    for (int i = 0; i < n; i++) {
        x[i] = vld1q_s8(q + i * 16);
        __asm__ volatile("" : "+w"(x[i]));
    }
}

/* Adds chunk c of 4 rows to the dot products of n columns. */
INLINE void multiply(int8x16_t codes, const int8x16_t *x, int c, int32x4_t *dots, int n) {
    UNROLL
    for (int j = 0; j < n; j++) {
        dots[j] = dot_lane(dots[j], codes, x[(c * n + j) / 4], (c * n + j) % 4);
    }
}

INLINE float32x4_t load_halves(const uint16_t *halves) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(halves))); }

/* Of each column, for all rows. */
INLINE void fill(quarter *v, const float *values, int n) {
    for (int i = 0; i < QUARTERS * n; i++) {
        v[i / n][i % n] = vdupq_n_f32(values[i % n]);
    }
}

INLINE void store(const quarter *v, float *tile, int n) {
    for (int i = 0; i < QUARTERS * n; i++) {
        vst1q_f32(tile + i % n * TF_PANEL_ROWS + i / n * 4, v[i / n][i % n]);
    }
}
