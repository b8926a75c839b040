/* A base matrix in memory the host can see, rearranged once into panels of 16 rows like the residual's,
 * so that base and residual are one pass. It takes as many bytes as ggml's own form. */
#pragma once

#include "pool.h"

enum { TF_SUPER = 256, TF_SUPER_BYTES = 1344 };

/* Q2_K: w = d * scale * code - dmin * min, 2-bit codes, a 4-bit scale and min for 16 inputs. For each
 * panel and 256 inputs, 1344 bytes:
 *   1024  codes    [16 sub-blocks][16 rows x 4 inputs] 4 chunks share a byte, as in a 2-bit plane
 *    256  scales   [8 blocks of 32][16 rows][2 sub-blocks] scale | min << 4
 *     64  d, dmin  [16 rows] float16 each
 * Q4_0 and Q8_0 are residual planes of 4 and 8 bits with a scale for 32 inputs, whose codes stand for
 * scale * (code - 128) / 128. */
typedef struct tf_base {
    int32_t type; /* of ggml; -1: none */
    int64_t rows, width;
    tf_planes planes; /* Q4_0, Q8_0 */
    uint8_t *supers;  /* Q2_K: [panels][width / 256][1344] */
    void *memory;
    size_t bytes;
} tf_base;

/* Whether there is a kernel for this ggml type. */
bool tf_base_supported(int32_t type);
/* data: rows of the type as ggml lays them out. */
tf_status tf_base_build(tf_base *base, int32_t type, int64_t rows, int64_t width, const void *data, tf_pool *pool);
void tf_base_free(tf_base *base);
