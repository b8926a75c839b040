#include "residual_builder.h"

#include "ggml.h"

static const struct {
    const char *suffix;
    int32_t plane;
} parts[] = {{"scales", 0}, {"plane4", 4}, {"plane6", 6}, {"plane8", 8}};

enum { PARTS = sizeof parts / sizeof *parts };

float *test_weights(const test_tensor *t) {
    return test_gaussians(t->experts * t->rows * t->width, 0.02f, (uint64_t)(t->rows * 31 + t->width));
}

static uint64_t shape_key(const test_tensor *t, const char *key) {
    return strcmp(key, "twofold.tensor.rows") == 0      ? (uint64_t)t->rows
           : strcmp(key, "twofold.tensor.widths") == 0  ? (uint64_t)t->width
           : strcmp(key, "twofold.tensor.experts") == 0 ? (uint64_t)t->experts
                                                        : 2;
}

static void set_lists(tf_gguf *header, const test_file *file) {
    static const char *const keys[] = {"twofold.tensor.experts", "twofold.tensor.rows", "twofold.tensor.widths",
                                       "twofold.tensor.base_types", "twofold.tensor.fingerprints"};
    const char *names[8];
    uint64_t values[8];
    for (int64_t i = 0; i < file->count; i++) {
        names[i] = file->tensors[i].name;
    }
    CHECK(tf_gguf_set_strings(header, "twofold.tensor.names", names, (size_t)file->count) == TF_OK);
    for (size_t k = 0; k < sizeof keys / sizeof *keys; k++) {
        for (int64_t i = 0; i < file->count; i++) {
            values[i] = shape_key(&file->tensors[i], keys[k]);
        }
        CHECK(tf_gguf_set_u64s(header, keys[k], values, (size_t)file->count) == TF_OK);
    }
}

tf_gguf *test_file_header_aligned(const test_file *file, uint32_t alignment) {
    tf_gguf *header;
    CHECK(tf_gguf_new(NULL, alignment, &header) == TF_OK);
    CHECK(tf_gguf_set_string(header, "general.architecture", "twofold-residual") == TF_OK);
    CHECK(tf_gguf_set_u32(header, "twofold.format_version", TF_FORMAT_VERSION) == TF_OK);
    CHECK(tf_gguf_set_u32(header, "twofold.bits", (uint32_t)file->bits) == TF_OK);
    CHECK(tf_gguf_set_u32(header, "twofold.group", (uint32_t)file->group) == TF_OK);
    CHECK(tf_gguf_set_string(header, "twofold.base", "base.gguf") == TF_OK);
    set_lists(header, file);
    for (int64_t i = 0; i < file->count; i++) {
        const test_tensor *t = &file->tensors[i];
        for (int p = 0; p < PARTS && parts[p].plane <= file->bits; p++) {
            char name[128];
            snprintf(name, sizeof name, "%s.%s", t->name, parts[p].suffix);
            const int64_t ne = tf_plane_bytes(t->rows, t->width, file->group, parts[p].plane) * t->experts;
            CHECK(tf_gguf_add(header, name, GGML_TYPE_I8, 1, &ne) == TF_OK);
        }
    }
    return header;
}

tf_gguf *test_file_header(const test_file *file) { return test_file_header_aligned(file, 64); }

/* Planes of expert `expert`, put where the tensor list says they are. */
static void put_planes(const test_file *file, const test_tensor *t, int64_t expert, const float *weights,
                       uint8_t *const *at) {
    tf_planes planes = test_planes(t->rows, t->width, file->group, file->bits);
    CHECK(tf_residual_encode(weights + expert * t->rows * t->width, &planes) == TF_OK);
    const void *from[PARTS] = {planes.scales, planes.plane4, planes.plane6, planes.plane8};
    for (int p = 0; p < PARTS && parts[p].plane <= file->bits; p++) {
        const size_t bytes = (size_t)tf_plane_bytes(t->rows, t->width, file->group, parts[p].plane);
        memcpy(at[p] + (size_t)expert * bytes, from[p], bytes);
    }
    test_planes_free(&planes);
}

uint8_t *test_file_finish(const test_file *file, tf_gguf *header, size_t *bytes) {
    const int64_t listed = tf_gguf_tensor_count(header);
    tf_tensor last;
    CHECK(tf_gguf_tensor(header, listed - 1, &last) == TF_OK);
    const size_t data = tf_gguf_data_offset(header);
    *bytes = data + last.offset + last.bytes;
    uint8_t *out = test_alloc(*bytes);
    memset(out, 0, *bytes);
    CHECK(tf_gguf_meta(header, out, tf_gguf_meta_bytes(header)) == TF_OK);
    int64_t index = 0;
    for (int64_t i = 0; i < file->count; i++) {
        const test_tensor *t = &file->tensors[i];
        uint8_t *at[PARTS] = {NULL};
        for (int p = 0; p < PARTS && parts[p].plane <= file->bits; p++) {
            tf_tensor tensor;
            CHECK(tf_gguf_tensor(header, index++, &tensor) == TF_OK);
            at[p] = out + data + tensor.offset;
        }
        float *weights = test_weights(t);
        for (int64_t expert = 0; expert < t->experts; expert++) {
            put_planes(file, t, expert, weights, at);
        }
        free(weights);
    }
    tf_gguf_free(header);
    return out;
}

uint8_t *test_file_bytes(const test_file *file, size_t *bytes) {
    return test_file_finish(file, test_file_header(file), bytes);
}
