/* GGUF metadata through ggml's own reader and writer, which know every type of the runtime. ggml
 * aborts on a key of another type or a missing tensor, so every question is checked before it is put. */
#include "gguf.h"

#include <limits.h>
#include <stdlib.h>
#include <string.h>

#include "ggml.h"
#include "twofold.h"

struct tf_gguf {
    struct gguf_context *keys;
    struct ggml_context *shapes; /* the tensors, without data */
    bool is_new;                 /* not read from a file */
};

static tf_gguf *wrap(struct gguf_context *keys, struct ggml_context *shapes, bool is_new) {
    tf_gguf *gguf = malloc(sizeof *gguf);
    if (gguf == NULL) {
        gguf_free(keys);
        ggml_free(shapes);
        return NULL;
    }
    *gguf = (tf_gguf){keys, shapes, is_new};
    return gguf;
}

tf_status tf_gguf_open(const char *path, tf_gguf **out) {
    *out = NULL;
    struct ggml_context *shapes = NULL;
    struct gguf_context *keys = gguf_init_from_file(path, (struct gguf_init_params){true, &shapes});
    if (keys == NULL) {
        return tf_fail(TF_ERR_FORMAT, "ggml %s cannot read it as GGUF", ggml_version());
    }
    *out = wrap(keys, shapes, false);
    return *out != NULL ? TF_OK : tf_fail(TF_ERR_MEMORY, "out of memory");
}

/* An empty GGUF of this alignment. gguf_init_empty() is for 32 bytes, and setting the key later does not
 * change what its writer does; only the reader takes the alignment from the key. */
static struct gguf_context *empty(uint32_t alignment) {
    static const char key[] = "general.alignment";
    uint8_t file[4 + 4 + 8 + 8 + 8 + sizeof key - 1 + 4 + 4], *at = file;
    const uint32_t version = GGUF_VERSION, type = GGUF_TYPE_UINT32;
    const uint64_t tensors = 0, keys = 1, length = sizeof key - 1;
    const struct {
        const void *data;
        size_t bytes;
    } parts[] = {{GGUF_MAGIC, 4}, {&version, 4}, {&tensors, 8}, {&keys, 8},
                 {&length, 8},    {key, length}, {&type, 4},    {&alignment, 4}};
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) {
        memcpy(at, parts[i].data, parts[i].bytes);
        at += parts[i].bytes;
    }
    return gguf_init_from_buffer(file, sizeof file, (struct gguf_init_params){true, NULL});
}

tf_status tf_gguf_new(const tf_gguf *copy_keys_of, uint32_t alignment, tf_gguf **out) {
    *out = NULL;
    if (copy_keys_of != NULL) {
        alignment = tf_gguf_alignment(copy_keys_of);
    }
    struct gguf_context *keys = alignment == GGUF_DEFAULT_ALIGNMENT ? gguf_init_empty() : empty(alignment);
    /* A tensor is described by a ggml_tensor; this context holds one at a time. */
    struct ggml_context *shapes = ggml_init((struct ggml_init_params){ggml_tensor_overhead() * 2, NULL, true});
    if (keys == NULL || shapes == NULL) {
        gguf_free(keys);
        ggml_free(shapes);
        return tf_fail(TF_ERR_ARGUMENT, "no GGUF with an alignment of %u", alignment);
    }
    if (copy_keys_of != NULL) {
        gguf_set_kv(keys, copy_keys_of->keys);
    }
    *out = wrap(keys, shapes, true);
    return *out != NULL ? TF_OK : tf_fail(TF_ERR_MEMORY, "out of memory");
}

void tf_gguf_free(tf_gguf *gguf) {
    if (gguf != NULL) {
        gguf_free(gguf->keys);
        ggml_free(gguf->shapes);
        free(gguf);
    }
}

int64_t tf_gguf_tensor_count(const tf_gguf *gguf) { return gguf_get_n_tensors(gguf->keys); }

tf_status tf_gguf_tensor(const tf_gguf *gguf, int64_t index, tf_tensor *out) {
    if (index < 0 || index >= gguf_get_n_tensors(gguf->keys)) {
        return tf_fail(TF_ERR_ARGUMENT, "no tensor %lld", (long long)index);
    }
    *out = (tf_tensor){
        .name = gguf_get_tensor_name(gguf->keys, index),
        .type = (int32_t)gguf_get_tensor_type(gguf->keys, index),
        .offset = gguf_get_tensor_offset(gguf->keys, index),
        .bytes = gguf_get_tensor_size(gguf->keys, index),
    };
    memcpy(out->ne, gguf_get_tensor_ne(gguf->keys, index), sizeof out->ne);
    return TF_OK;
}

uint64_t tf_gguf_data_offset(const tf_gguf *gguf) {
    return gguf->is_new ? gguf_get_meta_size(gguf->keys) : gguf_get_data_offset(gguf->keys);
}

static tf_status find(const tf_gguf *gguf, const char *key, int64_t *id) {
    *id = gguf_find_key(gguf->keys, key);
    return *id >= 0 ? TF_OK : tf_fail(TF_ERR_MISSING, "no key %s", key);
}

tf_status tf_gguf_int(const tf_gguf *gguf, const char *key, int64_t *out) {
    int64_t id;
    tf_status status = find(gguf, key, &id);
    if (status != TF_OK) {
        return status;
    }
    switch (gguf_get_kv_type(gguf->keys, id)) {
        case GGUF_TYPE_UINT8: *out = gguf_get_val_u8(gguf->keys, id); return TF_OK;
        case GGUF_TYPE_INT8: *out = gguf_get_val_i8(gguf->keys, id); return TF_OK;
        case GGUF_TYPE_UINT16: *out = gguf_get_val_u16(gguf->keys, id); return TF_OK;
        case GGUF_TYPE_INT16: *out = gguf_get_val_i16(gguf->keys, id); return TF_OK;
        case GGUF_TYPE_UINT32: *out = gguf_get_val_u32(gguf->keys, id); return TF_OK;
        case GGUF_TYPE_INT32: *out = gguf_get_val_i32(gguf->keys, id); return TF_OK;
        case GGUF_TYPE_UINT64: *out = (int64_t)gguf_get_val_u64(gguf->keys, id); return TF_OK;
        case GGUF_TYPE_INT64: *out = gguf_get_val_i64(gguf->keys, id); return TF_OK;
        case GGUF_TYPE_BOOL: *out = gguf_get_val_bool(gguf->keys, id); return TF_OK;
        default: return tf_fail(TF_ERR_FORMAT, "key %s is not an integer", key);
    }
}

tf_status tf_gguf_string(const tf_gguf *gguf, const char *key, const char **out) {
    int64_t id;
    tf_status status = find(gguf, key, &id);
    if (status != TF_OK) {
        return status;
    }
    if (gguf_get_kv_type(gguf->keys, id) != GGUF_TYPE_STRING) {
        return tf_fail(TF_ERR_FORMAT, "key %s is not a string", key);
    }
    *out = gguf_get_val_str(gguf->keys, id);
    return TF_OK;
}

tf_status tf_gguf_set_u32(tf_gguf *gguf, const char *key, uint32_t value) {
    gguf_set_val_u32(gguf->keys, key, value);
    return TF_OK;
}

tf_status tf_gguf_set_u64s(tf_gguf *gguf, const char *key, const uint64_t *values, size_t n) {
    gguf_set_arr_data(gguf->keys, key, GGUF_TYPE_UINT64, values, n);
    return TF_OK;
}

tf_status tf_gguf_set_string(tf_gguf *gguf, const char *key, const char *value) {
    gguf_set_val_str(gguf->keys, key, value);
    return TF_OK;
}

tf_status tf_gguf_set_strings(tf_gguf *gguf, const char *key, const char **values, size_t n) {
    gguf_set_arr_str(gguf->keys, key, values, n);
    return TF_OK;
}

tf_status tf_gguf_remove(tf_gguf *gguf, const char *key) {
    gguf_remove_key(gguf->keys, key);
    return TF_OK;
}

tf_status tf_gguf_add(tf_gguf *gguf, const char *name, int32_t type, int32_t n_dims, const int64_t *ne) {
    tf_type info;
    tf_status status = tf_type_get(type, &info);
    if (status != TF_OK) {
        return status;
    }
    if (strlen(name) >= GGML_MAX_NAME) {
        return tf_fail(TF_ERR_ARGUMENT, "tensor name %s is longer than ggml's %d", name, GGML_MAX_NAME - 1);
    }
    if (gguf_find_tensor(gguf->keys, name) >= 0) {
        return tf_fail(TF_ERR_ARGUMENT, "tensor %s is already there", name);
    }
    if (n_dims < 1 || n_dims > GGML_MAX_DIMS || ne[0] % info.block != 0) {
        return tf_fail(TF_ERR_ARGUMENT, "tensor %s: type %s does not fit a width of %lld", name, info.name,
                       (long long)ne[0]);
    }
    ggml_reset(gguf->shapes);
    struct ggml_tensor *tensor = ggml_new_tensor(gguf->shapes, (enum ggml_type)type, n_dims, ne);
    ggml_set_name(tensor, name);
    gguf_add_tensor(gguf->keys, tensor);
    return TF_OK;
}

uint32_t tf_gguf_alignment(const tf_gguf *gguf) { return (uint32_t)gguf_get_alignment(gguf->keys); }

size_t tf_gguf_meta_bytes(const tf_gguf *gguf) { return gguf_get_meta_size(gguf->keys); }

tf_status tf_gguf_meta(const tf_gguf *gguf, void *out, size_t bytes) {
    if (bytes != gguf_get_meta_size(gguf->keys)) {
        return tf_fail(TF_ERR_ARGUMENT, "the metadata takes %zu bytes, not %zu", gguf_get_meta_size(gguf->keys), bytes);
    }
    gguf_get_meta_data(gguf->keys, out);
    return TF_OK;
}
