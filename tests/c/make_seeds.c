/* Writes the seeds of fuzz_residual.c into a folder: make_seeds tests/c/seeds */
#include "residual_builder.h"

static void write_file(const char *folder, const char *name, const uint8_t *data, size_t bytes) {
    char path[1024];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    FILE *file = fopen(path, "wb");
    CHECK(file != NULL);
    CHECK(fwrite(data, 1, bytes, file) == bytes);
    CHECK(fclose(file) == 0);
}

static const test_file plain = {4, 32, 1, {{"blk.0.ffn_up.weight", 17, 96, 1}}};

static void write_header(const char *folder, const char *name, const test_file *file, tf_gguf *header) {
    size_t bytes;
    uint8_t *data = test_file_finish(file, header, &bytes);
    write_file(folder, name, data, bytes);
    free(data);
}

static void write_good(const char *folder) {
    static const struct {
        const char *name;
        test_file file;
    } seeds[] = {
        {"good_r4", {4, 32, 2, {{"blk.0.attn_q.weight", 16, 64, 1}, {"output.weight", 1, 32, 1}}}},
        {"good_r6", {6, 64, 2, {{"blk.0.attn_q.weight", 17, 96, 1}, {"output.weight", 33, 64, 1}}}},
        {"good_r8", {8, 1024, 1, {{"blk.0.ffn_down.weight", 15, 96, 1}}}},
        {"good_moe", {8, 32, 2, {{"blk.0.ffn_up_exps.weight", 9, 32, 4}, {"output.weight", 16, 32, 1}}}},
    };
    for (size_t i = 0; i < sizeof seeds / sizeof *seeds; i++) {
        write_header(folder, seeds[i].name, &seeds[i].file, test_file_header(&seeds[i].file));
    }
}

/* Files whose keys promise something else than their tensors hold. */
static void write_bad_keys(const char *folder) {
    static const struct {
        const char *name, *key;
        uint64_t value;
    } seeds[] = {
        {"bad_rows_huge", "twofold.tensor.rows", UINT64_MAX / 2},
        {"bad_width_ragged", "twofold.tensor.widths", 97},
        {"bad_experts_zero", "twofold.tensor.experts", 0},
        {"bad_experts_many", "twofold.tensor.experts", 65536},
    };
    for (size_t i = 0; i < sizeof seeds / sizeof *seeds; i++) {
        tf_gguf *header = test_file_header(&plain);
        CHECK(tf_gguf_set_u64s(header, seeds[i].key, &seeds[i].value, 1) == TF_OK);
        write_header(folder, seeds[i].name, &plain, header);
    }
}

static void write_bad_headers(const char *folder) {
    tf_gguf *header = test_file_header(&plain);
    CHECK(tf_gguf_set_u32(header, "twofold.format_version", 2) == TF_OK);
    write_header(folder, "bad_version", &plain, header);
    header = test_file_header_aligned(&plain, 1);
    CHECK(tf_gguf_meta_bytes(header) % 32 != 0);
    write_header(folder, "bad_misaligned", &plain, header);
    static const test_file pair = {4, 32, 2, {{"a.weight", 16, 32, 1}, {"b.weight", 16, 32, 1}}};
    const char *twice[] = {"a.weight", "a.weight"};
    header = test_file_header(&pair);
    CHECK(tf_gguf_set_strings(header, "twofold.tensor.names", twice, 2) == TF_OK);
    write_header(folder, "twice", &pair, header);
}

static void write_bad_bytes(const char *folder) {
    size_t bytes;
    uint8_t *data = test_file_bytes(&plain, &bytes);
    write_file(folder, "bad_header_only", data, 512);
    write_file(folder, "bad_data_cut", data, bytes - 1);
    write_file(folder, "bad_magic_only", data, 4);
    memset(data + 8, 0xff, 8); /* number of tensors */
    write_file(folder, "bad_tensor_count", data, bytes);
    free(data);
}

int main(int argc, char **argv) {
    CHECK(argc == 2);
    write_good(argv[1]);
    write_bad_keys(argv[1]);
    write_bad_headers(argv[1]);
    write_bad_bytes(argv[1]);
    return 0;
}
