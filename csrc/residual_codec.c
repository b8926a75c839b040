/* The residual's codes and where they lie (docs/format.md has the same in words).
 *
 * weight = scale * (code + offset) / 128, code 0..255, offset = tf_code_offset(bits).
 *
 * A panel is 16 rows. Along the width it is cut into chunks of 4 inputs: byte r * 4 + j of a chunk is
 * row r, input j, which is what a 4-way byte dot product with one row a lane wants. Four chunks share
 * 64 bytes of a 2-bit plane (chunk c in bits 2c, 2c + 1), two share 64 bytes of the 4-bit plane. */
#include <math.h>
#include <string.h>

#include "twofold.h"

enum { CHUNK = 4, CHUNK_BYTES = CHUNK * TF_PANEL_ROWS };

tf_status tf_check_shape(int64_t rows, int64_t width, int32_t group, int32_t bits) {
    if (bits != 4 && bits != 6 && bits != 8) {
        return tf_fail(TF_ERR_ARGUMENT, "residual bits %d: 4, 6 and 8 are allowed", bits);
    }
    if (group < 32 || group > 1024 || group % 32 != 0) {
        return tf_fail(TF_ERR_ARGUMENT, "group %d: multiples of 32 from 32 to 1024 are allowed", group);
    }
    if (rows < 1 || rows > INT32_MAX || width < 1 || width > INT32_MAX || width % TF_WIDTH_MULTIPLE != 0) {
        return tf_fail(TF_ERR_ARGUMENT, "a matrix of %lld rows of width %lld: widths are multiples of %d",
                       (long long)rows, (long long)width, TF_WIDTH_MULTIPLE);
    }
    return TF_OK;
}

int64_t tf_plane_bytes(int64_t rows, int64_t width, int32_t group, int32_t plane) {
    const int64_t panels = tf_panels(rows);
    switch (plane) {
        case 0: return panels * tf_groups(width, group) * TF_PANEL_ROWS * (int64_t)sizeof(uint16_t);
        case 4: return panels * width * (TF_PANEL_ROWS / 2);
        case 6:
        case 8: return panels * width * (TF_PANEL_ROWS / 4);
        default: return 0;
    }
}

/* Scale that puts the largest magnitude at the outermost value the bits can hold. */
static uint16_t group_scale(const float *values, int64_t n, int32_t bits) {
    float largest = 0.0f;
    for (int64_t i = 0; i < n; i++) {
        largest = fmaxf(largest, fabsf(values[i]));
    }
    const float outermost = -tf_code_offset(bits);
    return tf_float_to_half(fminf(largest * 128.0f / outermost, 65504.0f));
}

static uint8_t encode(float value, float scale) {
    if (scale == 0.0f) {
        return 128;
    }
    const float code = floorf(value / scale * 128.0f) + 128.0f;
    return (uint8_t)fminf(fmaxf(code, 0.0f), 255.0f);
}

static void put(const tf_planes *to, int64_t panel, int64_t row, int64_t column, uint8_t code) {
    const int64_t chunk = column / CHUNK;
    const int64_t byte = row * CHUNK + column % CHUNK;
    const int64_t two = panel * to->width * 4 + chunk / 4 * CHUNK_BYTES + byte;
    to->plane4[panel * to->width * 8 + chunk / 2 * CHUNK_BYTES + byte] |= (uint8_t)((code >> 4) << (chunk % 2 * 4));
    if (to->bits >= 6) {
        to->plane6[two] |= (uint8_t)((code >> 2 & 3) << (chunk % 4 * 2));
    }
    if (to->bits == 8) {
        to->plane8[two] |= (uint8_t)((code & 3) << (chunk % 4 * 2));
    }
}

static uint8_t get(const tf_planes *from, int64_t panel, int64_t row, int64_t column) {
    const int64_t chunk = column / CHUNK;
    const int64_t byte = row * CHUNK + column % CHUNK;
    const int64_t two = panel * from->width * 4 + chunk / 4 * CHUNK_BYTES + byte;
    int code = from->plane4[panel * from->width * 8 + chunk / 2 * CHUNK_BYTES + byte] >> (chunk % 2 * 4) << 4;
    if (from->bits >= 6) {
        code |= (from->plane6[two] >> (chunk % 4 * 2) & 3) << 2;
    }
    if (from->bits == 8) {
        code |= from->plane8[two] >> (chunk % 4 * 2) & 3;
    }
    return (uint8_t)code;
}

tf_status tf_check_planes(const tf_planes *planes) {
    tf_status status = tf_check_shape(planes->rows, planes->width, planes->group, planes->bits);
    if (status == TF_OK &&
        (planes->plane4 == NULL || planes->scales == NULL || (planes->bits >= 6 && planes->plane6 == NULL) ||
         (planes->bits == 8 && planes->plane8 == NULL))) {
        status = tf_fail(TF_ERR_ARGUMENT, "a plane that %d bits need is missing", planes->bits);
    }
    return status;
}

static void clear(const tf_planes *out) {
    const int32_t bits = out->bits;
    memset(out->plane4, 0, (size_t)tf_plane_bytes(out->rows, out->width, out->group, 4));
    memset(out->scales, 0, (size_t)tf_plane_bytes(out->rows, out->width, out->group, 0));
    if (bits >= 6) {
        memset(out->plane6, 0, (size_t)tf_plane_bytes(out->rows, out->width, out->group, 6));
    }
    if (bits == 8) {
        memset(out->plane8, 0, (size_t)tf_plane_bytes(out->rows, out->width, out->group, 8));
    }
}

tf_status tf_residual_encode(const float *residual, const tf_planes *out) {
    tf_status status = tf_check_planes(out);
    if (status != TF_OK) {
        return status;
    }
    const int64_t groups = tf_groups(out->width, out->group);
    clear(out);
    for (int64_t row = 0; row < out->rows; row++) {
        const int64_t panel = row / TF_PANEL_ROWS, lane = row % TF_PANEL_ROWS;
        for (int64_t g = 0; g < groups; g++) {
            const int64_t first = g * out->group;
            const int64_t n = out->width - first < out->group ? out->width - first : out->group;
            const float *values = residual + row * out->width + first;
            const uint16_t half = group_scale(values, n, out->bits);
            const float scale = tf_half_to_float(half);
            out->scales[(panel * groups + g) * TF_PANEL_ROWS + lane] = half;
            for (int64_t i = 0; i < n; i++) {
                put(out, panel, lane, first + i, encode(values[i], scale));
            }
        }
    }
    return TF_OK;
}

tf_status tf_residual_scales(const float *residual, int64_t rows, int64_t width, int32_t group, int32_t bits,
                             uint16_t *scales) {
    tf_status status = tf_check_shape(rows, width, group, bits);
    for (int64_t row = 0; row < rows && status == TF_OK; row++) {
        for (int64_t first = 0; first < width; first += group) {
            const int64_t n = width - first < group ? width - first : group;
            *scales++ = group_scale(residual + row * width + first, n, bits);
        }
    }
    return status;
}

tf_status tf_residual_round(float *values, int64_t rows, int64_t stride, int64_t n, const float *factor,
                            int64_t factor_stride, int32_t bits, const uint16_t *scales, uint8_t *codes, float *lost) {
    tf_status status = tf_check_shape(rows, TF_WIDTH_MULTIPLE, TF_WIDTH_MULTIPLE, bits);
    if (status == TF_OK && (n < 1 || n > stride || n > factor_stride)) {
        status = tf_fail(TF_ERR_ARGUMENT, "%lld columns of %lld, with a factor of %lld", (long long)n,
                         (long long)stride, (long long)factor_stride);
    }
    if (status != TF_OK) {
        return status;
    }
    const float offset = tf_code_offset(bits);
    const uint8_t mask = (uint8_t)(0xff << (8 - bits));
    for (int64_t row = 0; row < rows; row++) {
        float *v = values + row * stride, *e = lost + row * n;
        for (int64_t i = 0; i < n; i++) {
            const float scale = tf_half_to_float(scales[row * stride + i]);
            const uint8_t code = encode(v[i], scale) & mask;
            const float value = scale / 128.0f * ((float)code + offset);
            const float *f = factor + i * factor_stride;
            codes[row * stride + i] = code;
            e[i] = (v[i] - value) / f[i];
            for (int64_t k = i + 1; k < n; k++) {
                v[k] -= e[i] * f[k];
            }
        }
    }
    return TF_OK;
}

tf_status tf_residual_pack(const uint8_t *codes, const uint16_t *scales, const tf_planes *out) {
    tf_status status = tf_check_planes(out);
    if (status != TF_OK) {
        return status;
    }
    const int64_t groups = tf_groups(out->width, out->group);
    clear(out);
    for (int64_t row = 0; row < out->rows; row++) {
        const int64_t panel = row / TF_PANEL_ROWS, lane = row % TF_PANEL_ROWS;
        for (int64_t g = 0; g < groups; g++) {
            out->scales[(panel * groups + g) * TF_PANEL_ROWS + lane] = scales[row * groups + g];
        }
        for (int64_t i = 0; i < out->width; i++) {
            put(out, panel, lane, i, codes[row * out->width + i]);
        }
    }
    return TF_OK;
}

tf_status tf_residual_decode(const tf_planes *planes, float *out) {
    tf_status status = tf_check_planes(planes);
    if (status != TF_OK) {
        return status;
    }
    const int64_t groups = tf_groups(planes->width, planes->group);
    const float offset = tf_code_offset(planes->bits);
    for (int64_t row = 0; row < planes->rows; row++) {
        const int64_t panel = row / TF_PANEL_ROWS, lane = row % TF_PANEL_ROWS;
        const uint16_t *scales = planes->scales + panel * groups * TF_PANEL_ROWS + lane;
        for (int64_t column = 0; column < planes->width; column++) {
            const float scale = tf_half_to_float(scales[column / planes->group * TF_PANEL_ROWS]) / 128.0f;
            out[row * planes->width + column] = scale * ((float)get(planes, panel, lane, column) + offset);
        }
    }
    return TF_OK;
}
