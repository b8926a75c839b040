/* The definition of the residual product. */
#include <math.h>

#include "kernels.h"

/* Code of row `lane`, column `column`, with the bits of planes that are not read left zero. */
static inline int32_t code(const tf_planes *planes, int64_t panel, int64_t lane, int64_t column) {
    const int64_t chunk = column / 4, byte = lane * 4 + column % 4;
    const int64_t two = panel * planes->width * 4 + chunk / 4 * 64 + byte;
    const uint8_t four = planes->plane4[panel * planes->width * 8 + chunk / 2 * 64 + byte];
    int32_t value = four >> (chunk % 2 * 4) << 4 & 0xf0;
    if (planes->bits >= 6) {
        value |= (planes->plane6[two] >> (chunk % 4 * 2) & 3) << 2;
    }
    if (planes->bits == 8) {
        value |= planes->plane8[two] >> (chunk % 4 * 2) & 3;
    }
    return value;
}

static int32_t dot(const tf_planes *planes, int64_t panel, int64_t lane, int64_t block, const int8_t *q, int32_t n,
                   int32_t j) {
    int32_t sum = 0;
    for (int64_t i = block * TF_BLOCK; i < (block + 1) * TF_BLOCK; i++) {
        sum += code(planes, panel, lane, i) * q[(i / 4 * n + j) * 4 + i % 4];
    }
    return sum;
}

static void run(const tf_planes *planes, int64_t panel, const tf_columns *x, float *tile) {
    const int64_t groups = tf_groups(planes->width, planes->group);
    const int64_t blocks = planes->width / TF_BLOCK, group_blocks = planes->group / TF_BLOCK;
    const uint16_t *scales = planes->scales + panel * groups * TF_PANEL_ROWS;
    for (int32_t j = 0; j < x->n; j++) {
        for (int64_t lane = 0; lane < TF_PANEL_ROWS; lane++) {
            float result = 0.0f;
            for (int64_t g = 0; g < groups; g++) {
                float sum = x->offset[g * x->n + j];
                for (int64_t b = g * group_blocks; b < blocks && b < (g + 1) * group_blocks; b++) {
                    const float scale = x->scale[b * x->n + j];
                    sum = fmaf((float)dot(planes, panel, lane, b, x->q, x->n, j), scale, sum);
                    if (tf_has_low(x, b)) {
                        sum = fmaf((float)dot(planes, panel, lane, b, x->low, x->n, j), scale * TF_LOW, sum);
                    }
                }
                result = fmaf(sum, tf_half_to_float(scales[g * TF_PANEL_ROWS + lane]), result);
            }
            tile[j * TF_PANEL_ROWS + lane] = result;
        }
    }
}

static float quantize(const float *x, int8_t *high, int8_t *low, int32_t *sums) {
    float largest = 0.0f;
    for (int i = 0; i < TF_BLOCK; i++) {
        const float magnitude = fabsf(x[i]);
        largest = magnitude > largest || isnan(magnitude) ? magnitude : largest;
    }
    const float inverse = largest > 0.0f ? TF_LARGEST / largest : 0.0f;
    int32_t halves[4] = {0};
    for (int i = 0; i < TF_BLOCK; i++) {
        const float value = nearbyintf(x[i] * inverse);
        const int32_t code = fabsf(value) <= TF_LARGEST ? (int32_t)value : 0; /* NaN: the scale carries it on */
        high[i] = (int8_t)((code + 128) >> 8);
        low[i] = (int8_t)(code - high[i] * 256);
        halves[i / 16] += high[i];
        halves[2 + i / 16] += low[i];
    }
    sums[0] = tf_pack_sums(halves[0], halves[1]);
    sums[1] = tf_pack_sums(halves[2], halves[3]);
    return largest / TF_LARGEST;
}

static bool always(void) { return true; }

const tf_kernel tf_kernel_scalar = {.name = "scalar",
                                    .run = run,
                                    .run_supers = tf_supers_scalar,
                                    .quantize = quantize,
                                    .max_columns = TF_MAX_COLUMNS,
                                    .supported = always};
