/* Float16 and finiteness, in plain C: what the codec and the kernels need of ggml, so that they can be
 * built and tested for processors that ggml is not at hand for. The same bits as ggml's. */
#include <math.h>
#include <string.h>

#include "twofold.h"

float tf_half_to_float(uint16_t half) {
    const uint32_t sign = (uint32_t)(half & 0x8000) << 16, exponent = half >> 10 & 31, mantissa = half & 0x3ff;
    if (exponent == 0) {
        const float magnitude = (float)mantissa * 0x1p-24f;
        return sign != 0 ? -magnitude : magnitude;
    }
    uint32_t bits = sign | (exponent + 112) << 23 | mantissa << 13;
    if (exponent == 31) {
        bits = sign | 0x7f800000 | mantissa << 13 | (mantissa != 0 ? 0x400000 : 0); /* a NaN becomes quiet */
    }
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

uint16_t tf_float_to_half(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    const uint32_t sign = bits >> 16 & 0x8000;
    uint32_t magnitude = bits & 0x7fffffff;
    if (magnitude > 0x7f800000) {
        return (uint16_t)(sign | 0x7e00);
    }
    if (magnitude >= 0x477ff000) { /* 65520: from here on it is nearer to what follows 65504 */
        return (uint16_t)(sign | 0x7c00);
    }
    if (magnitude < 0x38800000) { /* below 2^-14 float16 counts in 2^-24, as float32 does from 0.5 to 1 */
        const float rounded = fabsf(value) + 0.5f;
        memcpy(&magnitude, &rounded, sizeof magnitude);
        return (uint16_t)(sign | (magnitude - 0x3f000000));
    }
    magnitude += 0xfff + (magnitude >> 13 & 1); /* half to even */
    return (uint16_t)(sign | (magnitude - 0x38000000) >> 13);
}

tf_status tf_check_finite(const float *values, int64_t n) {
    for (int64_t i = 0; i < n; i++) {
        if (!isfinite(values[i])) {
            return tf_fail(TF_ERR_NONFINITE, "%s at index %lld", isnan(values[i]) ? "NaN" : "infinity", (long long)i);
        }
    }
    return TF_OK;
}
