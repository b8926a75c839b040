/* The residual file: what the writer made is read back; whatever is damaged gives a status. */
#include <unistd.h>

#include "ggml.h"
#include "residual_builder.h"

static const test_file file = {8, 64, 2, {{"blk.0.ffn_up_exps.weight", 17, 96, 3}, {"output.weight", 33, 32, 1}}};

static void quiet(enum ggml_log_level level, const char *text, void *unused) {
    (void)level;
    (void)text;
    (void)unused;
}

/* Opens a copy of exactly this size; the file is read far enough to touch all that it promises. */
static tf_status try_open(const uint8_t *data, size_t bytes) {
    uint8_t *copy = test_alloc(bytes);
    memcpy(copy, data, bytes);
    tf_residual *residual;
    tf_status status = tf_residual_from_memory(copy, bytes, "the label", &residual);
    CHECK((status == TF_OK) == (residual != NULL));
    if (status == TF_OK) {
        for (int64_t i = 0; i < tf_residual_count(residual); i++) {
            tf_residual_tensor t;
            CHECK(tf_residual_get(residual, i, &t) == TF_OK);
            float *out = test_alloc((size_t)(t.rows * t.width) * sizeof *out);
            const tf_planes planes = tf_residual_planes(&t, t.experts - 1);
            CHECK(tf_residual_decode(&planes, out) == TF_OK);
            free(out);
        }
        tf_residual_free(residual);
    } else {
        CHECK(strstr(tf_error(), "the label") != NULL);
    }
    free(copy);
    return status;
}

static tf_status finish_and_try(tf_gguf *header) {
    size_t bytes;
    uint8_t *data = test_file_finish(&file, header, &bytes);
    const tf_status status = try_open(data, bytes);
    free(data);
    return status;
}

/* ---- what was written ------------------------------------------------------------------------ */

static void check_expert(const tf_residual_tensor *t, int64_t expert, const float *weights) {
    const int64_t n = t->rows * t->width;
    tf_planes want = test_planes(t->rows, t->width, t->planes.group, t->planes.bits);
    CHECK(tf_residual_encode(weights + expert * n, &want) == TF_OK);
    float *got = test_alloc((size_t)n * sizeof *got), *expected = test_alloc((size_t)n * sizeof *expected);
    const tf_planes planes = tf_residual_planes(t, expert);
    CHECK(tf_residual_decode(&planes, got) == TF_OK);
    CHECK(tf_residual_decode(&want, expected) == TF_OK);
    CHECK(memcmp(got, expected, (size_t)n * sizeof *got) == 0);
    free(got);
    free(expected);
    test_planes_free(&want);
}

static void check_contents(const tf_residual *residual, const test_file *want) {
    CHECK(tf_residual_bits(residual) == want->bits && tf_residual_group(residual) == want->group);
    CHECK(tf_residual_count(residual) == want->count);
    for (int64_t i = 0; i < want->count; i++) {
        tf_residual_tensor t;
        CHECK(tf_residual_get(residual, i, &t) == TF_OK);
        CHECK(strcmp(t.name, want->tensors[i].name) == 0 && t.rows == want->tensors[i].rows);
        CHECK(t.width == want->tensors[i].width && t.experts == want->tensors[i].experts);
        CHECK(t.base_type == 2 && t.fingerprint == 2 && t.planes.bits == want->bits);
        float *weights = test_weights(&want->tensors[i]);
        for (int64_t expert = 0; expert < t.experts; expert++) {
            check_expert(&t, expert, weights);
        }
        free(weights);
    }
    tf_residual_tensor none;
    CHECK(tf_residual_get(residual, -1, &none) == TF_ERR_ARGUMENT);
    CHECK(tf_residual_get(residual, want->count, &none) == TF_ERR_ARGUMENT);
}

static void test_round_trip(void) {
    for (int32_t bits = 4; bits <= 8; bits += 2) {
        test_file one = file;
        one.bits = bits;
        size_t bytes;
        uint8_t *data = test_file_bytes(&one, &bytes);
        tf_residual *residual;
        CHECK(tf_residual_from_memory(data, bytes, "memory", &residual) == TF_OK);
        check_contents(residual, &one);
        tf_residual_free(residual);
        free(data);
    }
}

/* The writer keeps to the alignment that it writes down, however the sizes fall. */
static void test_alignment(void) {
    static const uint32_t alignments[] = {32, 64, 4096};
    char name[16] = "";
    for (size_t i = 0; i < 8 * 3; i++) {
        name[i / 3] = 'n'; /* moves the end of the header */
        tf_gguf *header = test_file_header_aligned(&file, alignments[i % 3]);
        CHECK(tf_gguf_alignment(header) == alignments[i % 3]);
        CHECK(tf_gguf_set_string(header, name, "") == TF_OK);
        CHECK(finish_and_try(header) == TF_OK);
    }
    tf_gguf *none;
    CHECK(tf_gguf_new(NULL, 0, &none) == TF_ERR_ARGUMENT && none == NULL);
    CHECK(tf_gguf_new(NULL, 48, &none) == TF_ERR_ARGUMENT && none == NULL);
}

/* A file of a foreign writer, whose planes may lie where kernels cannot read them. */
static void test_misaligned(void) {
    char name[40] = "";
    for (size_t i = 0; i < 32; i++) {
        name[i] = 'n';
        tf_gguf *header = test_file_header_aligned(&file, 1);
        CHECK(tf_gguf_set_string(header, name, "") == TF_OK);
        const tf_status status = tf_gguf_meta_bytes(header) % 32 == 0 ? TF_OK : TF_ERR_FORMAT;
        CHECK(finish_and_try(header) == status);
    }
}

static void write_file(const char *path, const void *data, size_t bytes) {
    FILE *out = fopen(path, "wb");
    CHECK(out != NULL);
    CHECK(fwrite(data, 1, bytes, out) == bytes);
    CHECK(fclose(out) == 0);
}

static void test_on_disk(void) {
    char folder[] = "twofold-XXXXXX", path[64];
    CHECK(mkdtemp(folder) != NULL);
    snprintf(path, sizeof path, "%s/r.gguf", folder);
    tf_residual *residual;
    CHECK(tf_residual_open(path, &residual) == TF_ERR_IO && residual == NULL);
    CHECK(strstr(tf_error(), path) != NULL);
    CHECK(tf_residual_open(folder, &residual) != TF_OK && residual == NULL);
    write_file(path, "", 0);
    CHECK(tf_residual_open(path, &residual) == TF_ERR_FORMAT && residual == NULL);
    size_t bytes;
    uint8_t *data = test_file_bytes(&file, &bytes);
    write_file(path, data, bytes);
    CHECK(tf_residual_open(path, &residual) == TF_OK);
    check_contents(residual, &file);
    tf_residual_free(residual);
    free(data);
    unlink(path);
    rmdir(folder);
}

/* ---- damage ---------------------------------------------------------------------------------- */

static void test_truncated(void) {
    size_t bytes;
    uint8_t *data = test_file_bytes(&file, &bytes);
    CHECK(try_open(data, bytes) == TF_OK);
    for (size_t cut = 0; cut < bytes; cut = cut < 4 ? cut + 1 : (cut / 64 + 1) * 64) {
        CHECK(try_open(data, cut) == TF_ERR_FORMAT);
    }
    CHECK(try_open(data, bytes - 1) == TF_ERR_FORMAT);
    free(data);
}

static void test_flipped_bytes(void) {
    static const uint8_t masks[] = {0x01, 0x80, 0xff};
    tf_gguf *header = test_file_header(&file);
    const size_t meta = tf_gguf_meta_bytes(header);
    size_t bytes;
    uint8_t *data = test_file_finish(&file, header, &bytes);
    for (size_t at = 0; at < meta; at++) {
        for (int i = 0; i < 3; i++) {
            data[at] ^= masks[i];
            try_open(data, bytes); /* some bytes mean nothing to us */
            data[at] ^= masks[i];
        }
    }
    CHECK(try_open(data, bytes) == TF_OK);
    free(data);
}

static void test_keys(void) {
    static const char *const keys[] = {
        "twofold.format_version",     "twofold.bits",        "twofold.group",         "twofold.tensor.names",
        "twofold.tensor.experts",     "twofold.tensor.rows", "twofold.tensor.widths", "twofold.tensor.base_types",
        "twofold.tensor.fingerprints"};
    const uint64_t numbers[3] = {17, 33, 32};
    const char *strings[3] = {"a", "b", "c"};
    for (int k = 0; k < 9; k++) {
        tf_gguf *h = test_file_header(&file);
        CHECK(tf_gguf_remove(h, keys[k]) == TF_OK && finish_and_try(h) == TF_ERR_FORMAT);
        h = test_file_header(&file);
        CHECK(tf_gguf_set_string(h, keys[k], "8") == TF_OK && finish_and_try(h) == TF_ERR_FORMAT);
        for (size_t n = 0; n <= 3; n++) { /* lists where a number belongs, or of another length */
            h = test_file_header(&file);
            CHECK(tf_gguf_set_u64s(h, keys[k], numbers, n) == TF_OK);
            CHECK(finish_and_try(h) == TF_ERR_FORMAT || (k > 3 && n == 2));
            h = test_file_header(&file);
            CHECK(tf_gguf_set_strings(h, keys[k], strings, n) == TF_OK && finish_and_try(h) == TF_ERR_FORMAT);
        }
        h = test_file_header(&file);
        CHECK(tf_gguf_set_u32(h, keys[k], 3) == TF_OK);
        CHECK(finish_and_try(h) == (k == 0 ? TF_ERR_VERSION : TF_ERR_FORMAT));
    }
}

static void test_numbers(void) {
    static const uint32_t versions[] = {0, 2, UINT32_MAX}, bits[] = {0, 2, 5, 7, 9, 16, UINT32_MAX, 1u << 31},
                          groups[] = {0, 1, 16, 33, 1056, 4096, UINT32_MAX, 1u << 31};
    for (int i = 0; i < 3; i++) {
        tf_gguf *h = test_file_header(&file);
        CHECK(tf_gguf_set_u32(h, "twofold.format_version", versions[i]) == TF_OK);
        CHECK(finish_and_try(h) == TF_ERR_VERSION);
    }
    for (int i = 0; i < 8; i++) {
        tf_gguf *h = test_file_header(&file);
        CHECK(tf_gguf_set_u32(h, "twofold.bits", bits[i]) == TF_OK && finish_and_try(h) == TF_ERR_FORMAT);
        h = test_file_header(&file);
        CHECK(tf_gguf_set_u32(h, "twofold.group", groups[i]) == TF_OK && finish_and_try(h) == TF_ERR_FORMAT);
    }
    tf_gguf *h = test_file_header(&file); /* planes are there, but the scales are for another group */
    CHECK(tf_gguf_set_u32(h, "twofold.group", 32) == TF_OK && finish_and_try(h) == TF_ERR_FORMAT);
}

/* Each shape key, and all three at once, set to numbers whose products overflow in every way. */
static void test_shapes(void) {
    static const char *const keys[] = {"twofold.tensor.rows", "twofold.tensor.widths", "twofold.tensor.experts"};
    static const uint64_t wild[] = {0,         31,        1ull << 31, (1ull << 31) - 32, 1ull << 32,    1ull << 33,
                                    65536,     65537,     1ull << 59, 1ull << 62,        1ull << 63,    UINT64_MAX,
                                    INT64_MAX, INT32_MAX, 1ull << 60, UINT64_MAX - 31,   UINT64_MAX / 3};
    for (size_t i = 0; i < sizeof wild / sizeof *wild; i++) {
        const uint64_t values[2] = {wild[i], wild[i]};
        tf_gguf *all = test_file_header(&file);
        for (int k = 0; k < 3; k++) {
            tf_gguf *one = test_file_header(&file);
            CHECK(tf_gguf_set_u64s(one, keys[k], values, 2) == TF_OK && finish_and_try(one) == TF_ERR_FORMAT);
            CHECK(tf_gguf_set_u64s(all, keys[k], values, 2) == TF_OK);
        }
        CHECK(finish_and_try(all) == TF_ERR_FORMAT);
    }
    const uint64_t most[3][2] = {{INT32_MAX, 33}, {INT32_MAX - 31, 32}, {65536, 1}};
    tf_gguf *h = test_file_header(&file);
    for (int k = 0; k < 3; k++) {
        CHECK(tf_gguf_set_u64s(h, keys[k], most[k], 2) == TF_OK);
    }
    CHECK(finish_and_try(h) == TF_ERR_FORMAT);
}

/* ---- tensors that are not what the keys say ---------------------------------------------------- */

static void test_tensors(void) {
    tf_gguf *h = test_file_header(&file);
    const char *foreign[] = {"blk.0.ffn_up_exps.weight", "blk.7.ffn_up.weight"};
    CHECK(tf_gguf_set_strings(h, "twofold.tensor.names", foreign, 2) == TF_OK && finish_and_try(h) == TF_ERR_FORMAT);
    test_file six = file; /* the keys promise 8 bits, plane8 is not there */
    six.bits = 6;
    h = test_file_header(&six);
    CHECK(tf_gguf_set_u32(h, "twofold.bits", 8) == TF_OK);
    size_t bytes;
    uint8_t *data = test_file_finish(&six, h, &bytes);
    CHECK(try_open(data, bytes) == TF_ERR_FORMAT);
    free(data);
    char longest[200];
    memset(longest, 'n', sizeof longest);
    longest[199] = '\0';
    const char *too_long[] = {longest, "output.weight"};
    h = test_file_header(&file);
    CHECK(tf_gguf_set_strings(h, "twofold.tensor.names", too_long, 2) == TF_OK && finish_and_try(h) == TF_ERR_FORMAT);
}

/* A name that is there twice is refused no later than by the engine. */
static void test_duplicates(void) {
    const test_file one = {4, 32, 2, {{"a.weight", 16, 32, 1}, {"b.weight", 16, 32, 1}}};
    tf_gguf *h = test_file_header(&one);
    const char *twice[] = {"a.weight", "a.weight"};
    CHECK(tf_gguf_set_strings(h, "twofold.tensor.names", twice, 2) == TF_OK);
    size_t bytes;
    uint8_t *data = test_file_finish(&one, h, &bytes);
    tf_residual *residual;
    if (tf_residual_from_memory(data, bytes, "twice", &residual) == TF_OK) {
        tf_engine *engine;
        CHECK(tf_engine_new(residual, 1, &engine) == TF_ERR_FORMAT && engine == NULL);
        CHECK(strstr(tf_error(), "a.weight") != NULL);
        tf_residual_free(residual);
    }
    free(data);
}

int main(void) {
    ggml_log_set(quiet, NULL);
    test_round_trip();
    test_on_disk();
    test_truncated();
    test_flipped_bytes();
    test_keys();
    test_numbers();
    test_shapes();
    test_tensors();
    test_duplicates();
    test_alignment();
    test_misaligned();
    return 0;
}
