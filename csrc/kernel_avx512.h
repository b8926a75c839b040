/* What the AVX-512 kernels of planes share: how codes are unpacked. `bits` is a constant wherever it is passed on. */
#pragma once

#include <immintrin.h>

#include "kernels.h"

#define INLINE static inline __attribute__((always_inline))

INLINE __m512i left(__m512i v, unsigned bits) { return _mm512_slli_epi16(v, bits); }
INLINE __m512i right(__m512i v, unsigned bits) { return _mm512_srli_epi16(v, bits); }

INLINE __m512i and8(__m512i v, int mask) { return _mm512_and_si512(v, _mm512_set1_epi8((char)mask)); }

/* Adds dot products with 4 inputs, the same in all lanes. GCC broadcasts with an instruction of its own, which on Intel
 * costs up to a twentieth where a core's front end is shared. */
INLINE __m512i dot(__m512i sum, __m512i codes, const int8_t *inputs) {
    __asm__("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(codes), "m"(*(const int32_t *)(const void *)inputs));
    return sum;
}

/* Bits of `a` where the mask has ones, else of `b`. */
INLINE __m512i blend(__m512i a, __m512i b, int mask) {
    return _mm512_ternarylogic_epi64(_mm512_set1_epi8((char)mask), a, b, 0xca);
}

/* Codes of the 4 chunks (16 inputs) of a unit. The 2-bit planes are first joined into low nibbles, those
 * of chunks 0 and 2 in one register, of 1 and 3 in another: fewer shifts than chunk by chunk. */
INLINE void unpack(const uint8_t *p4, const uint8_t *p6, const uint8_t *p8, __m512i *codes, int bits) {
    const __m512i a = _mm512_loadu_si512(p4), b = _mm512_loadu_si512(p4 + 64);
    if (bits == 4) {
        codes[0] = and8(left(a, 4), 0xf0);
        codes[1] = and8(a, 0xf0);
        codes[2] = and8(left(b, 4), 0xf0);
        codes[3] = and8(b, 0xf0);
        return;
    }
    const __m512i six = _mm512_loadu_si512(p6), eight = bits == 8 ? _mm512_loadu_si512(p8) : six;
    const __m512i even = bits == 8 ? blend(left(six, 2), eight, 0xcc) : and8(left(six, 2), 0xcc);
    const __m512i odd = bits == 8 ? blend(six, right(eight, 2), 0xcc) : and8(six, 0xcc);
    codes[0] = blend(left(a, 4), even, 0xf0);
    codes[1] = blend(a, odd, 0xf0);
    codes[2] = blend(left(b, 4), right(even, 4), 0xf0);
    codes[3] = blend(b, right(odd, 4), 0xf0);
}

/* A panel's planes. */
typedef struct streams {
    const uint8_t *p4, *p6, *p8;
} streams;

INLINE streams panel_streams(const tf_planes *planes, int64_t panel, int bits) {
    const uint8_t *p4 = planes->plane4 + panel * planes->width * 8;
    return (streams){p4, bits >= 6 ? planes->plane6 + panel * planes->width * 4 : p4,
                     bits == 8 ? planes->plane8 + panel * planes->width * 4 : p4};
}

/* Fetches a unit of 16 inputs. */
INLINE void prefetch(const streams *p, int64_t unit, int bits) {
    _mm_prefetch((const char *)(p->p4 + unit * 128), _MM_HINT_T0);
    _mm_prefetch((const char *)(p->p4 + unit * 128 + 64), _MM_HINT_T0);
    if (bits >= 6) {
        _mm_prefetch((const char *)(p->p6 + unit * 64), _MM_HINT_T0);
    }
    if (bits == 8) {
        _mm_prefetch((const char *)(p->p8 + unit * 64), _MM_HINT_T0);
    }
}

/* Fetches a panel's scales of a group: a line now and then, too seldom for the CPU to see a stream in it, and a product
 * cannot go on without. */
INLINE void prefetch_scales(const uint16_t *scales, int64_t group) {
    _mm_prefetch((const char *)(scales + group * TF_PANEL_ROWS), _MM_HINT_T0);
}

enum { PANELS = TF_WIDE_PANELS, PASS = 4 }; /* of the wide kernels: what they multiply at a time */

/* Adds dot products of n columns with a chunk of both panels. */
INLINE void dot_chunks(__m512i first, __m512i second, const int8_t *q, __m512i (*dots)[PASS], int n) {
#pragma GCC unroll 4
    for (int j = 0; j < n; j++) {
        const __m512i x = _mm512_set1_epi32(*(const int32_t *)(const void *)(q + j * 4));
        dots[0][j] = _mm512_dpbusd_epi32(dots[0][j], first, x);
        dots[1][j] = _mm512_dpbusd_epi32(dots[1][j], second, x);
    }
    __asm__ volatile("" ::: "memory"); /* or GCC loads all chunks first, and has no registers left */
}

/* Dot products of n columns with 32 inputs of both panels, unpacked: codes [8 chunks][PANELS][64]. */
INLINE void dot_unpacked(const uint8_t *codes, const int8_t *q, int64_t stride, __m512i (*dots)[PASS], int n) {
    for (int j = 0; j < n; j++) {
        dots[0][j] = dots[1][j] = _mm512_setzero_si512();
    }
#pragma GCC unroll 8
    for (int c = 0; c < TF_BLOCK / 4; c++, q += stride) {
        const __m512i first = _mm512_load_si512(codes + c * PANELS * 64);
        const __m512i second = _mm512_load_si512(codes + c * PANELS * 64 + 64);
        dot_chunks(first, second, q, dots, n);
    }
}
