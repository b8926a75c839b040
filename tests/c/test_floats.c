/* Float16: the bits of ggml's conversions. One NaN is like another: ggml's own differ between processors. */
#include "ggml.h"
#include "test.h"

static void check_to_float(uint16_t half) {
    const float want = ggml_fp16_to_fp32(half), got = tf_half_to_float(half);
    CHECK(isnan(want) ? isnan(got) : memcmp(&want, &got, sizeof want) == 0);
}

static void check_to_half(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    const uint16_t want = ggml_fp32_to_fp16(value), got = tf_float_to_half(value);
    CHECK(isnan(value) ? isnan(tf_half_to_float(got)) : want == got);
}

/* A half, and where rounding goes from it to the next. */
static void check_around(uint16_t half) {
    const float from = ggml_fp16_to_fp32(half);
    const float to = (half & 0x7fff) == 0x7bff ? copysignf(65536.0f, from) : ggml_fp16_to_fp32((uint16_t)(half + 1));
    const float values[] = {from, from + (to - from) / 2.0f};
    for (int i = 0; i < 2; i++) {
        uint32_t bits;
        memcpy(&bits, &values[i], sizeof bits);
        for (uint32_t near = 0; near <= 4; near++) {
            check_to_half(bits - 2 + near);
        }
    }
}

int main(void) {
    for (int32_t half = 0; half <= 0xffff; half++) {
        check_to_float((uint16_t)half);
        check_around((uint16_t)half);
    }
    for (uint64_t bits = 0; bits <= UINT32_MAX; bits += 1021) { /* 1: some minutes */
        check_to_half((uint32_t)bits);
    }
    return 0;
}
