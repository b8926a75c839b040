/* Any bytes as a residual file: a status, never a crash. With libFuzzer (TWOFOLD_FUZZ) it makes up the
 * bytes; without, main() replays files. A replayed good_* must be accepted, a bad_* refused. */
#include <string.h>

#include "ggml.h"
#include "test.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void quiet(enum ggml_log_level level, const char *text, void *unused) {
    (void)level;
    (void)text;
    (void)unused;
}

/* The last panel, which reaches to the end of every plane. */
static void decode_last_panel(const tf_residual_tensor *tensor) {
    tf_planes planes = tf_residual_planes(tensor, tensor->experts - 1);
    const int64_t skipped = tf_panels(planes.rows) - 1;
    planes.rows -= skipped * TF_PANEL_ROWS;
    planes.scales += skipped * tf_groups(planes.width, planes.group) * TF_PANEL_ROWS;
    planes.plane4 += skipped * planes.width * 8;
    planes.plane6 = planes.plane6 != NULL ? planes.plane6 + skipped * planes.width * 4 : NULL;
    planes.plane8 = planes.plane8 != NULL ? planes.plane8 + skipped * planes.width * 4 : NULL;
    float *out = test_alloc((size_t)(planes.rows * planes.width) * sizeof *out);
    CHECK(tf_residual_decode(&planes, out) == TF_OK);
    free(out);
}

static tf_status read_everything(const uint8_t *data, size_t size) {
    tf_residual *residual;
    const tf_status status = tf_residual_from_memory(data, size, "fuzz", &residual);
    if (status != TF_OK) {
        return status;
    }
    for (int64_t i = 0; i < tf_residual_count(residual); i++) {
        tf_residual_tensor tensor;
        CHECK(tf_residual_get(residual, i, &tensor) == TF_OK);
        CHECK(strlen(tensor.name) < size);
        decode_last_panel(&tensor);
    }
    tf_engine *engine;
    if (tf_engine_new(residual, 1, &engine) == TF_OK) { /* refuses a name that is there twice */
        tf_engine_free(engine);
    }
    tf_residual_free(residual);
    return TF_OK;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    ggml_log_set(quiet, NULL);
    read_everything(data, size);
    return 0;
}

#ifndef TEST_LIBFUZZER
static void replay(const char *path) {
    FILE *file = fopen(path, "rb");
    CHECK(file != NULL);
    CHECK(fseek(file, 0, SEEK_END) == 0);
    const long size = ftell(file);
    CHECK(size >= 0 && fseek(file, 0, SEEK_SET) == 0);
    uint8_t *data = test_alloc((size_t)size);
    CHECK(fread(data, 1, (size_t)size, file) == (size_t)size);
    fclose(file);
    const tf_status status = read_everything(data, (size_t)size);
    free(data);
    const char *slash = strrchr(path, '/');
    const char *name = slash != NULL ? slash + 1 : path;
    printf("%s: %s\n", name, status == TF_OK ? "accepted" : tf_error());
    CHECK(strncmp(name, "good_", 5) != 0 || status == TF_OK);
    CHECK(strncmp(name, "bad_", 4) != 0 || status != TF_OK);
}

int main(int argc, char **argv) {
    CHECK(argc > 1);
    ggml_log_set(quiet, NULL);
    for (int i = 1; i < argc; i++) {
        replay(argv[i]);
    }
    return 0;
}
#endif
