/* ggml's functions for the plugin. It is linked with no ggml: a program brings its own, and it must be that one. The
 * functions that the engine calls are defined here and pass the call on. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

#include "ggml-alloc.h"
#include "ggml.h"
#include "gguf.h"
#include "plugin.h"

typedef const struct ggml_tensor *tensor_in;
typedef struct ggml_tensor *tensor_io;
typedef const struct gguf_context *gguf_in;

/* result, name, parameters, arguments */
#define FUNCTIONS(X)                                                                                                  \
    X(ggml_backend_dev_t, ggml_backend_dev_by_type, (enum ggml_backend_dev_type t), (t))                              \
    X(ggml_backend_dev_t, ggml_backend_dev_get, (size_t i), (i))                                                      \
    X(size_t, ggml_backend_dev_count, (void), ())                                                                     \
    X(ggml_backend_reg_t, ggml_backend_reg_get, (size_t i), (i))                                                      \
    X(size_t, ggml_backend_reg_count, (void), ())                                                                     \
    X(const char *, ggml_backend_reg_name, (ggml_backend_reg_t r), (r))                                               \
    X(void *, ggml_backend_reg_get_proc_address, (ggml_backend_reg_t r, const char *n), (r, n))                       \
    X(const char *, ggml_backend_dev_name, (ggml_backend_dev_t d), (d))                                               \
    X(enum ggml_backend_dev_type, ggml_backend_dev_type, (ggml_backend_dev_t d), (d))                                 \
    X(ggml_backend_reg_t, ggml_backend_dev_backend_reg, (ggml_backend_dev_t d), (d))                                  \
    X(ggml_backend_t, ggml_backend_dev_init, (ggml_backend_dev_t d, const char *p), (d, p))                           \
    X(ggml_backend_buffer_type_t, ggml_backend_dev_buffer_type, (ggml_backend_dev_t d), (d))                          \
    X(ggml_backend_dev_t, ggml_backend_get_device, (ggml_backend_t b), (b))                                           \
    X(const char *, ggml_backend_name, (ggml_backend_t b), (b))                                                       \
    X(void, ggml_backend_free, (ggml_backend_t b), (b))                                                               \
    X(void, ggml_backend_synchronize, (ggml_backend_t b), (b))                                                        \
    X(enum ggml_status, ggml_backend_graph_compute, (ggml_backend_t b, struct ggml_cgraph * g), (b, g))               \
    X(ggml_backend_buffer_type_t, ggml_backend_buffer_get_type, (ggml_backend_buffer_t b), (b))                       \
    X(const char *, ggml_backend_buft_name, (ggml_backend_buffer_type_t t), (t))                                      \
    X(bool, ggml_backend_buffer_is_host, (ggml_backend_buffer_t b), (b))                                              \
    X(void, ggml_backend_buffer_free, (ggml_backend_buffer_t b), (b))                                                 \
    X(void, ggml_backend_tensor_get, (tensor_in t, void *data, size_t at, size_t n), (t, data, at, n))                \
    X(void, ggml_backend_tensor_set, (tensor_io t, const void *data, size_t at, size_t n), (t, data, at, n))          \
    X(ggml_backend_buffer_t, ggml_backend_alloc_ctx_tensors, (struct ggml_context * c, ggml_backend_t b), (c, b))     \
    X(struct ggml_context *, ggml_init, (struct ggml_init_params p), (p))                                             \
    X(void, ggml_free, (struct ggml_context * c), (c))                                                                \
    X(size_t, ggml_tensor_overhead, (void), ())                                                                       \
    X(size_t, ggml_graph_overhead, (void), ())                                                                        \
    X(size_t, ggml_graph_overhead_custom, (size_t n, bool grads), (n, grads))                                         \
    X(struct ggml_cgraph *, ggml_new_graph, (struct ggml_context * c), (c))                                           \
    X(struct ggml_cgraph *, ggml_new_graph_custom, (struct ggml_context * c, size_t n, bool grads), (c, n, grads))    \
    X(void, ggml_build_forward_expand, (struct ggml_cgraph * g, tensor_io t), (g, t))                                 \
    X(void, ggml_graph_add_node, (struct ggml_cgraph * g, tensor_io t), (g, t))                                       \
    X(int, ggml_graph_n_nodes, (struct ggml_cgraph * g), (g))                                                         \
    X(tensor_io, ggml_graph_node, (struct ggml_cgraph * g, int i), (g, i))                                            \
    X(tensor_io, ggml_new_tensor_2d, (struct ggml_context * c, enum ggml_type t, int64_t a, int64_t b), (c, t, a, b)) \
    X(tensor_io, ggml_set_name, (tensor_io t, const char *n), (t, n))                                                 \
    X(tensor_io, ggml_mul_mat, (struct ggml_context * c, tensor_io a, tensor_io b), (c, a, b))                        \
    X(tensor_io, ggml_scale, (struct ggml_context * c, tensor_io a, float s), (c, a, s))                              \
    X(tensor_io, ggml_custom_4d,                                                                                      \
      (struct ggml_context * c, enum ggml_type t, int64_t a, int64_t b, int64_t d, int64_t e, tensor_io *args, int n, \
       ggml_custom_op_t f, int tasks, void *user),                                                                    \
      (c, t, a, b, d, e, args, n, f, tasks, user))                                                                    \
    X(size_t, ggml_nbytes, (tensor_in t), (t))                                                                        \
    X(int64_t, ggml_nrows, (tensor_in t), (t))                                                                        \
    X(int, ggml_n_dims, (tensor_in t), (t))                                                                           \
    X(bool, ggml_is_empty, (tensor_in t), (t))                                                                        \
    X(bool, ggml_is_contiguous, (tensor_in t), (t))                                                                   \
    X(const char *, ggml_type_name, (enum ggml_type t), (t))                                                          \
    X(const char *, ggml_op_name, (enum ggml_op op), (op))                                                            \
    X(struct gguf_context *, gguf_init_from_buffer, (const void *data, size_t n, struct gguf_init_params p),          \
      (data, n, p))                                                                                                   \
    X(void, gguf_free, (struct gguf_context * g), (g))                                                                \
    X(int64_t, gguf_find_key, (gguf_in g, const char *key), (g, key))                                                 \
    X(int64_t, gguf_find_tensor, (gguf_in g, const char *name), (g, name))                                            \
    X(enum gguf_type, gguf_get_kv_type, (gguf_in g, int64_t i), (g, i))                                               \
    X(enum gguf_type, gguf_get_arr_type, (gguf_in g, int64_t i), (g, i))                                              \
    X(size_t, gguf_get_arr_n, (gguf_in g, int64_t i), (g, i))                                                         \
    X(const void *, gguf_get_arr_data, (gguf_in g, int64_t i), (g, i))                                                \
    X(const char *, gguf_get_arr_str, (gguf_in g, int64_t i, size_t k), (g, i, k))                                    \
    X(uint32_t, gguf_get_val_u32, (gguf_in g, int64_t i), (g, i))                                                     \
    X(size_t, gguf_get_data_offset, (gguf_in g), (g))                                                                 \
    X(size_t, gguf_get_tensor_offset, (gguf_in g, int64_t i), (g, i))                                                 \
    X(size_t, gguf_get_tensor_size, (gguf_in g, int64_t i), (g, i))

/* The parameters' names do without parentheses around them, as in any definition. */
#define DEFINE(result, name, parameters, arguments) \
    static __typeof__(name) *at_##name;             \
    result name parameters { return at_##name arguments; }
FUNCTIONS(DEFINE)

static tf_view_function at_graph_view;
static const char *(*at_version)(void);
static char found_in[1024];

static bool look_up(void *library, const char *name, void *function) {
    void *found = dlsym(library, name);
    memcpy(function, &found, sizeof found);
    return found != NULL;
}

const char *tf_ggml_find(const void *caller) {
    Dl_info info;
    void *library = NULL;
    if (dladdr(caller, &info) != 0 && info.dli_fname != NULL) {
        snprintf(found_in, sizeof found_in, "%s", info.dli_fname);
        library = dlopen(info.dli_fname, RTLD_LAZY | RTLD_NOLOAD);
    }
    if (library == NULL) { /* the program itself */
        library = dlopen(NULL, RTLD_LAZY);
    }
#define FIND(result, name, parameters, arguments) \
    if (!look_up(library, #name, &at_##name)) {   \
        return #name;                             \
    }
    FUNCTIONS(FIND)
    look_up(library, "ggml_graph_view", &at_graph_view);
    look_up(library, "ggml_version", &at_version);
    return NULL;
}

tf_view_function tf_ggml_graph_view(void) { return at_graph_view; }
const char *tf_ggml_found_in(void) { return found_in; }
const char *tf_ggml_found_version(void) { return at_version != NULL ? at_version() : "of an unknown version"; }
