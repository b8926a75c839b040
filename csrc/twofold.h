/* What the C files share beside the public interface. */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "twofold_api.h"

#if defined(__GNUC__)
#define TF_PRINTF(at, first) __attribute__((format(printf, at, first)))
#else
#define TF_PRINTF(at, first)
#endif

/* Stores a message for tf_error() and returns status. */
tf_status tf_fail(tf_status status, const char *format, ...) TF_PRINTF(2, 3);

static inline int64_t tf_ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
static inline int64_t tf_panels(int64_t rows) { return tf_ceil_div(rows, TF_PANEL_ROWS); }
static inline int64_t tf_groups(int64_t width, int32_t group) { return tf_ceil_div(width, group); }

/* TF_OK if bits, group and width are ones the format allows. */
tf_status tf_check_shape(int64_t rows, int64_t width, int32_t group, int32_t bits);

/* The same of planes, and that none is missing. */
tf_status tf_check_planes(const tf_planes *planes);

/* What has to be added to a code whose low planes are not read, and 128 taken off: the code then
 * stands for the middle of the values that it can mean. */
static inline float tf_code_offset(int32_t bits) { return (bits == 4 ? 8.0f : bits == 6 ? 2.0f : 0.5f) - 128.0f; }

/* The parts of a tensor's data that its fingerprint is made of. */
typedef struct tf_window {
    uint64_t offset, bytes;
} tf_window;
uint64_t tf_window_count(uint64_t bytes);
tf_window tf_fingerprint_window(uint64_t bytes, uint64_t index);

float tf_half_to_float(uint16_t half);
uint16_t tf_float_to_half(float value);
