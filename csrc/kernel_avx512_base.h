/* What the AVX-512 kernels of bases share: how codes and scales are unpacked. `bits` is a constant wherever it is
 * passed on. */
#pragma once

#include "kernel_avx512.h"

enum { SUPER_AHEAD = 6144 }; /* bytes that are fetched early */

/* Moves bits up, or down if `by` is negative; what crosses into other bytes is masked by the caller. */
INLINE __m512i shift(__m512i v, int by) {
    return by > 0 ? _mm512_slli_epi16(v, (unsigned)by) : by < 0 ? _mm512_srli_epi16(v, (unsigned)-by) : v;
}

/* Four chunks of 3 bits: those that share nibbles are joined before they are taken apart. */
INLINE void unpack_3(__m512i two, __m512i one, int half, __m512i *codes) {
    const __m512i even = blend(two, shift(one, half == 0 ? 0 : 2), 0x33);
    const __m512i odd = blend(shift(two, -2), shift(one, half == 0 ? -1 : 1), 0x33);
    codes[0] = and8(even, 7);
    codes[1] = and8(odd, 7);
    codes[2] = and8(shift(even, -4), 7);
    codes[3] = and8(shift(odd, -4), 7);
}

/* Codes of the 4 chunks of a sub-block of 16 inputs. */
INLINE void unpack_half(const uint8_t *block, int half, __m512i *codes, int bits) {
    const uint8_t *high = block + tf_high_planes(bits);
    if (bits <= 3) {
        const __m512i two = _mm512_loadu_si512(block + half * 64);
        if (bits == 3) {
            unpack_3(two, _mm512_loadu_si512(high), half, codes);
        }
        for (int c = 0; bits == 2 && c < 4; c++) {
            codes[c] = and8(shift(two, -2 * c), 3);
        }
        return;
    }
    const __m512i more = bits == 4 ? _mm512_setzero_si512() : _mm512_loadu_si512(bits == 5 ? high : high + half * 64);
    for (int c = 0; c < 4; c++) {
        const __m512i low = shift(_mm512_loadu_si512(block + half * 128 + c / 2 * 64), c % 2 * -4);
        const int up = bits == 5 ? 4 - tf_high_bit(half * 4 + c) : 4 - 2 * c; /* to bit 4 */
        codes[c] = and8(bits == 4 ? low : blend(low, shift(more, up), 0x0f), (1 << bits) - 1);
    }
}

/* Scales and mins of a block. */
typedef struct factors {
    __m512i pairs, minima; /* scales of A | B << 16; mins likewise */
    __m512 first, second;  /* scales, where dot products do not fit 16 bits */
} factors;

INLINE factors load_factors(const uint8_t *scales, int bits) {
    const __m256i bytes = _mm256_loadu_si256((const __m256i *)scales);
    const __m512i zero = _mm512_setzero_si512();
    factors f = {zero, zero, _mm512_setzero_ps(), _mm512_setzero_ps()};
    if (tf_super_signed(bits)) {
        f.pairs = _mm512_cvtepi8_epi16(bytes);
        f.first = _mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(f.pairs, 16), 16));
        f.second = _mm512_cvtepi32_ps(_mm512_srai_epi32(f.pairs, 16));
        return f;
    }
    const __m512i both = _mm512_cvtepu16_epi32(bytes);
    if (bits == 2) {
        const __m512i spread = _mm512_or_si512(both, _mm512_slli_epi32(both, 8)), nibble = _mm512_set1_epi32(0xf000f);
        f.pairs = _mm512_and_si512(spread, nibble);
        f.minima = _mm512_and_si512(_mm512_srli_epi32(spread, 4), nibble);
        return f;
    }
    const __m512i minimum = _mm512_srli_epi32(both, 8);
    f.minima = _mm512_or_si512(minimum, _mm512_slli_epi32(minimum, 16));
    f.first = _mm512_cvtepi32_ps(_mm512_and_si512(both, _mm512_set1_epi32(0xff)));
    return f;
}

/* Fetches what block b of a super takes, about. */
INLINE void prefetch_super(const uint8_t *super, int b, int bits) {
    const uint8_t *at = super + b * (tf_super_bytes(bits) / 8);
    for (int line = 0; line <= bits; line++) {
        _mm_prefetch((const char *)at + line * 64, _MM_HINT_T0);
    }
}
