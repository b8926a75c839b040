/* NAME.residual.gguf: mapped, checked, and handed out as planes that point into the mapping.
 * Nothing here trusts the file: every size follows from shapes that are checked first. */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "ggml.h"
#include "gguf.h"
#include "twofold.h"

struct tf_residual {
    char *label; /* for messages: the path */
    const uint8_t *data;
    size_t bytes;
    bool mapped;
    struct gguf_context *keys;
    int32_t bits, group;
    int64_t count;
    tf_residual_tensor *tensors;
};

#define FAIL(residual, status, ...) fail((residual)->label, status, __VA_ARGS__)

static tf_status fail(const char *label, tf_status status, const char *what, const char *value) {
    return tf_fail(status, "%s: %s%s", label, what, value);
}

static tf_status read_u32(const tf_residual *r, const char *key, uint32_t *out) {
    const int64_t id = gguf_find_key(r->keys, key);
    if (id < 0 || gguf_get_kv_type(r->keys, id) != GGUF_TYPE_UINT32) {
        return FAIL(r, TF_ERR_FORMAT, "not a twofold residual: no integer key ", key);
    }
    *out = gguf_get_val_u32(r->keys, id);
    return TF_OK;
}

/* An array of u64 with one value a tensor. */
static tf_status read_u64s(const tf_residual *r, const char *key, const uint64_t **out) {
    const int64_t id = gguf_find_key(r->keys, key);
    if (id < 0 || gguf_get_kv_type(r->keys, id) != GGUF_TYPE_ARRAY ||
        gguf_get_arr_type(r->keys, id) != GGUF_TYPE_UINT64 || (int64_t)gguf_get_arr_n(r->keys, id) != r->count) {
        return FAIL(r, TF_ERR_FORMAT, "no 64-bit integer for each tensor in key ", key);
    }
    *out = gguf_get_arr_data(r->keys, id);
    return TF_OK;
}

/* The bytes of tensor NAME.SUFFIX, which must be as many as the shape asks for. */
static tf_status find_bytes(const tf_residual *r, const char *name, const char *suffix, int64_t want,
                            const uint8_t **out) {
    char full[2 * GGML_MAX_NAME];
    snprintf(full, sizeof full, "%s.%s", name, suffix);
    const int64_t id = gguf_find_tensor(r->keys, full);
    if (id < 0) {
        return FAIL(r, TF_ERR_FORMAT, "truncated or foreign: no tensor ", full);
    }
    const size_t have = gguf_get_tensor_size(r->keys, id);
    const size_t offset = gguf_get_data_offset(r->keys) + gguf_get_tensor_offset(r->keys, id);
    if (have != (size_t)want) {
        return FAIL(r, TF_ERR_FORMAT, "wrong size of tensor ", full);
    }
    if (offset > r->bytes || have > r->bytes - offset) {
        return FAIL(r, TF_ERR_FORMAT, "truncated: the file ends before the data of tensor ", full);
    }
    if (offset % 32 != 0) {
        return FAIL(r, TF_ERR_FORMAT, "misaligned data of tensor ", full);
    }
    *out = r->data + offset;
    return TF_OK;
}

static tf_status read_tensor(tf_residual *r, tf_residual_tensor *t) {
    const int64_t rows = t->rows, width = t->width;
    tf_status status = tf_check_shape(rows, width, r->group, r->bits);
    if (status != TF_OK || t->experts < 1 || t->experts > 65536 || rows > INT64_MAX / 16 / width / t->experts) {
        return FAIL(r, TF_ERR_FORMAT, "impossible shape of tensor ", t->name);
    }
    t->planes = (tf_planes){.rows = rows, .width = width, .group = r->group, .bits = r->bits};
    const struct {
        const char *suffix;
        int32_t plane;
        uint8_t **out;
    } parts[] = {{"scales", 0, (uint8_t **)&t->planes.scales},
                 {"plane4", 4, &t->planes.plane4},
                 {"plane6", 6, &t->planes.plane6},
                 {"plane8", 8, &t->planes.plane8}};
    for (size_t i = 0; i < sizeof parts / sizeof *parts && status == TF_OK; i++) {
        if (parts[i].plane <= r->bits) {
            const int64_t want = tf_plane_bytes(rows, width, r->group, parts[i].plane) * t->experts;
            const uint8_t *found = NULL;
            status = find_bytes(r, t->name, parts[i].suffix, want, &found);
            *parts[i].out = (uint8_t *)(uintptr_t)found;
        }
    }
    return status;
}

static tf_status read_tensors(tf_residual *r) {
    const int64_t id = gguf_find_key(r->keys, "twofold.tensor.names");
    if (id < 0 || gguf_get_kv_type(r->keys, id) != GGUF_TYPE_ARRAY ||
        gguf_get_arr_type(r->keys, id) != GGUF_TYPE_STRING) {
        return FAIL(r, TF_ERR_FORMAT, "not a twofold residual: no key ", "twofold.tensor.names");
    }
    r->count = (int64_t)gguf_get_arr_n(r->keys, id);
    r->tensors = calloc((size_t)r->count + 1, sizeof *r->tensors);
    if (r->tensors == NULL) {
        return FAIL(r, TF_ERR_MEMORY, "out of memory", "");
    }
    const uint64_t *rows, *widths, *experts, *types, *prints;
    tf_status status = read_u64s(r, "twofold.tensor.rows", &rows);
    status = status != TF_OK ? status : read_u64s(r, "twofold.tensor.widths", &widths);
    status = status != TF_OK ? status : read_u64s(r, "twofold.tensor.experts", &experts);
    status = status != TF_OK ? status : read_u64s(r, "twofold.tensor.base_types", &types);
    status = status != TF_OK ? status : read_u64s(r, "twofold.tensor.fingerprints", &prints);
    for (int64_t i = 0; i < r->count && status == TF_OK; i++) {
        r->tensors[i] = (tf_residual_tensor){.name = gguf_get_arr_str(r->keys, id, (size_t)i),
                                             .rows = (int64_t)rows[i],
                                             .width = (int64_t)widths[i],
                                             .experts = (int64_t)experts[i],
                                             .base_type = (int32_t)types[i],
                                             .fingerprint = prints[i]};
        status = read_tensor(r, &r->tensors[i]);
    }
    return status;
}

static tf_status read_all(tf_residual *r) {
    if (r->bytes < 4 || memcmp(r->data, "GGUF", 4) != 0) {
        return FAIL(r, TF_ERR_FORMAT, "not a GGUF file", "");
    }
    r->keys = gguf_init_from_buffer(r->data, r->bytes, (struct gguf_init_params){true, NULL});
    if (r->keys == NULL) {
        return FAIL(r, TF_ERR_FORMAT, "truncated or damaged: its header cannot be read", "");
    }
    uint32_t version = 0, bits = 0, group = 0;
    tf_status status = read_u32(r, "twofold.format_version", &version);
    if (status == TF_OK && version != TF_FORMAT_VERSION) {
        return tf_fail(TF_ERR_VERSION, "%s: residual format version %u, but this twofold reads version %d", r->label,
                       version, TF_FORMAT_VERSION);
    }
    status = status != TF_OK ? status : read_u32(r, "twofold.bits", &bits);
    status = status != TF_OK ? status : read_u32(r, "twofold.group", &group);
    if (status != TF_OK) {
        return status;
    }
    r->bits = (int32_t)bits;
    r->group = (int32_t)group;
    if (tf_check_shape(1, TF_WIDTH_MULTIPLE, r->group, r->bits) != TF_OK) {
        return FAIL(r, TF_ERR_FORMAT, "impossible bits or group", "");
    }
    return read_tensors(r);
}

static tf_status finish(tf_residual *r, tf_residual **out) {
    if (r->label == NULL) {
        tf_residual_free(r);
        return tf_fail(TF_ERR_MEMORY, "out of memory");
    }
    const tf_status status = read_all(r);
    if (status != TF_OK) {
        tf_residual_free(r);
        return status;
    }
    *out = r;
    return TF_OK;
}

tf_status tf_residual_from_memory(const void *data, size_t bytes, const char *label, tf_residual **out) {
    *out = NULL;
    tf_residual *r = calloc(1, sizeof *r);
    if (r == NULL) {
        return tf_fail(TF_ERR_MEMORY, "out of memory");
    }
    *r = (tf_residual){.label = strdup(label), .data = data, .bytes = bytes};
    return finish(r, out);
}

tf_status tf_residual_open(const char *path, tf_residual **out) {
    *out = NULL;
    const int file = open(path, O_RDONLY | O_CLOEXEC);
    struct stat info;
    if (file < 0 || fstat(file, &info) != 0) {
        const int error = errno;
        if (file >= 0) {
            close(file);
        }
        return tf_fail(TF_ERR_IO, "%s: %s", path, strerror(error));
    }
    const size_t bytes = (size_t)info.st_size;
    void *data = bytes > 0 ? mmap(NULL, bytes, PROT_READ, MAP_SHARED, file, 0) : MAP_FAILED;
    close(file);
    if (data == MAP_FAILED) {
        return tf_fail(TF_ERR_FORMAT, "%s: cannot be mapped (%zu bytes)", path, bytes);
    }
    tf_residual *r = calloc(1, sizeof *r);
    if (r == NULL) {
        munmap(data, bytes);
        return tf_fail(TF_ERR_MEMORY, "out of memory");
    }
    *r = (tf_residual){.label = strdup(path), .data = data, .bytes = bytes, .mapped = true};
    return finish(r, out);
}

void tf_residual_free(tf_residual *r) {
    if (r != NULL) {
        gguf_free(r->keys);
        if (r->mapped) {
            munmap((void *)(uintptr_t)r->data, r->bytes);
        }
        free(r->tensors);
        free(r->label);
        free(r);
    }
}

int32_t tf_residual_bits(const tf_residual *r) { return r->bits; }
int32_t tf_residual_group(const tf_residual *r) { return r->group; }
int64_t tf_residual_count(const tf_residual *r) { return r->count; }

tf_status tf_residual_get(const tf_residual *r, int64_t index, tf_residual_tensor *out) {
    if (index < 0 || index >= r->count) {
        return tf_fail(TF_ERR_ARGUMENT, "no residual tensor %lld", (long long)index);
    }
    *out = r->tensors[index];
    return TF_OK;
}

/* Reads a page range in: at once where the kernel can (Linux 5.14), else page by page. */
static void populate(uintptr_t first, size_t bytes, size_t page) {
#ifdef MADV_POPULATE_READ
    if (madvise((void *)first, bytes, MADV_POPULATE_READ) == 0) {
        return;
    }
#endif
    for (uintptr_t at = first; at < first + bytes; at += page) {
        (void)*(const volatile uint8_t *)at;
    }
}

tf_status tf_residual_load(const tf_residual_tensor *t, int32_t bits, bool lock) {
    const size_t page = (size_t)sysconf(_SC_PAGESIZE);
    const void *parts[] = {t->planes.scales, t->planes.plane4, t->planes.plane6, t->planes.plane8};
    for (int32_t i = 0; i < 4; i++) {
        const int32_t plane = i == 0 ? 0 : 2 + 2 * i;
        if (parts[i] == NULL || plane > bits) {
            continue;
        }
        const size_t size = (size_t)(tf_plane_bytes(t->rows, t->width, t->planes.group, plane) * t->experts);
        const uintptr_t first = (uintptr_t)parts[i] / page * page;
        const size_t bytes = (uintptr_t)parts[i] + size - first;
        populate(first, bytes, page);
        if (lock && mlock((const void *)first, bytes) != 0) {
            return tf_fail(TF_ERR_MEMORY, "cannot lock %zu bytes of %s: %s (ulimit -l)", bytes, t->name,
                           strerror(errno));
        }
    }
    return TF_OK;
}

tf_planes tf_residual_planes(const tf_residual_tensor *t, int64_t expert) {
    tf_planes planes = t->planes;
    planes.scales += expert * tf_plane_bytes(t->rows, t->width, planes.group, 0) / (int64_t)sizeof(uint16_t);
    planes.plane4 += expert * tf_plane_bytes(t->rows, t->width, planes.group, 4);
    if (planes.plane6 != NULL) {
        planes.plane6 += expert * tf_plane_bytes(t->rows, t->width, planes.group, 6);
    }
    if (planes.plane8 != NULL) {
        planes.plane8 += expert * tf_plane_bytes(t->rows, t->width, planes.group, 8);
    }
    return planes;
}

static uint64_t fnv1a(uint64_t hash, const void *data, size_t bytes) {
    for (size_t i = 0; i < bytes; i++) {
        hash = (hash ^ ((const uint8_t *)data)[i]) * 0x100000001b3u;
    }
    return hash;
}

enum { WINDOWS = 64, WINDOW = 1024 };

uint64_t tf_window_count(uint64_t bytes) { return bytes <= WINDOWS * WINDOW ? 1 : WINDOWS; }

tf_window tf_fingerprint_window(uint64_t bytes, uint64_t index) {
    if (bytes <= WINDOWS * WINDOW) {
        return (tf_window){0, bytes};
    }
    return (tf_window){(bytes - WINDOW) / (WINDOWS - 1) * index, WINDOW};
}

uint64_t tf_fingerprint(int32_t type, const int64_t *ne, const void *data, uint64_t bytes) {
    uint64_t hash = fnv1a(0xcbf29ce484222325u, &type, sizeof type);
    hash = fnv1a(hash, ne, 4 * sizeof *ne);
    for (uint64_t i = 0; i < tf_window_count(bytes); i++) {
        const tf_window window = tf_fingerprint_window(bytes, i);
        hash = fnv1a(hash, (const uint8_t *)data + window.offset, window.bytes);
    }
    return hash;
}
