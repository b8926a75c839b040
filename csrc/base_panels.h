/* A base matrix in memory the host can see, rearranged once into panels of 16 rows like the residual's,
 * so that base and residual are one pass. It takes about as many bytes as ggml's own form. */
#pragma once

#include "pool.h"

enum { TF_SUPER = 256 };

/* Q2_K to Q6_K are told apart by the bits of their codes, 2 to 6. Each panel and 256 inputs ("a super") are
 * 512 * bits + 320 bytes:
 *   512 * bits  codes    [8 blocks of 32 inputs][low planes, high planes]
 *          256  scales   [8 blocks][16 rows][2] see below
 *           64  d, dmin  [16 rows] float16 each; dmin is 0 where there is none
 * Planes are made of 64-byte groups [16 rows][4 inputs]; as many chunks of 4 inputs as fit share a byte:
 *   low planes   the lower 4 bits of a code from 4 bits on: [4], 2 chunks a byte; else 2 bits: [2], 4 chunks
 *   high planes  what bits are left: 2 as above, or 1: [1], 8 chunks a byte in the order of tf_high_bit()
 * Weight and scale bytes:
 *   Q2_K        d * scale * code - dmin * min     of both sub-blocks of 16, scale | min << 4
 *   Q4_K, Q5_K  d * scale * code - dmin * min     scale, min of the block
 *   Q3_K, Q6_K  d * scale * (code - 4 or 32)      of both sub-blocks, signed
 * Q4_0 and Q8_0 are residual planes of 4 and 8 bits with a scale for 32 inputs, whose codes stand for
 * scale * (code - 128) / 128. */
typedef struct tf_base {
    int32_t type; /* of ggml; -1: none */
    int32_t bits; /* of codes in supers; 0: planes are used */
    int64_t rows, width;
    tf_planes planes; /* Q4_0, Q8_0 */
    uint8_t *supers;  /* [panels][width / 256][tf_super_bytes(bits)] */
    void *memory;
    size_t bytes;
} tf_base;

static inline int64_t tf_super_scales(int32_t bits) { return 512 * bits; } /* offset of the scales */
static inline int64_t tf_super_d(int32_t bits) { return 512 * bits + 256; }
static inline int64_t tf_super_bytes(int32_t bits) { return 512 * bits + 320; }

/* Q3_K, Q6_K: no min, signed scales, an offset that is taken off the codes. */
static inline bool tf_super_signed(int32_t bits) { return bits == 3 || bits == 6; }
/* Bits of the codes that the low planes hold, and offset of the high planes in a block. */
static inline int32_t tf_low_bits(int32_t bits) { return bits < 4 ? 2 : 4; }
static inline int64_t tf_high_planes(int32_t bits) { return 64 * tf_low_bits(bits); }
/* Where a byte of the 1-bit plane has the bit of chunk 0 to 7: in an order in which one shift moves the bits of
 * two chunks to where kernels want them. */
static inline int32_t tf_high_bit(int64_t chunk) {
    return (int32_t)(chunk % 2 + chunk / 2 % 2 * 4 + (chunk < 4 ? 2 : 0));
}

/* Bits of codes of a ggml type that supers hold, 0 of any other. */
int32_t tf_super_bits(int32_t type);
/* Puts a row into supers that are zero. data: all rows of the type as ggml lays them out. */
void tf_super_put_row(const tf_base *base, int64_t row, const void *data);

/* Whether there is a kernel for this ggml type. */
bool tf_base_supported(int32_t type);
/* data: rows of the type as ggml lays them out. */
tf_status tf_base_build(tf_base *base, int32_t type, int64_t rows, int64_t width, const void *data, tf_pool *pool);
/* Of the rows of all experts one behind the other: those of one expert, which are whole panels. */
tf_base tf_base_expert(const tf_base *base, int64_t expert, int64_t rows);
void tf_base_free(tf_base *base);
