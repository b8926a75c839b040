/* Residual files in memory, written the way the converter writes them (python/twofold/layout.py). */
#pragma once

#include "test.h"

typedef struct test_tensor {
    const char *name;
    int64_t rows, width, experts;
} test_tensor;

typedef struct test_file {
    int32_t bits, group;
    int64_t count;
    test_tensor tensors[8];
} test_file;

/* Weights of a tensor, [experts][rows][width], the same on every call. */
float *test_weights(const test_tensor *tensor);
/* Keys and tensor list, for a test to damage before test_file_finish(). */
tf_gguf *test_file_header(const test_file *file);
tf_gguf *test_file_header_aligned(const test_file *file, uint32_t alignment);
/* The header and, with planes of test_weights(), the data. Frees the header. */
uint8_t *test_file_finish(const test_file *file, tf_gguf *header, size_t *bytes);
/* Both at once. */
uint8_t *test_file_bytes(const test_file *file, size_t *bytes);
