/* Front end 2: libggml-twofold.so, which a stock llama.cpp loads as if it were a backend.
 *
 *   plugin.c           what the loader calls; settings; what happens when something is not as it should be
 *   plugin_ggml.c      ggml's functions, found in the library that loaded this one
 *   plugin_hooks.c     puts our functions in place of devices' and backends'
 *   plugin_segments.c  cuts a graph where a residual has to be added
 *   plugin_models.c    which weights the residual belongs to; the engine's part of a graph
 *   plugin_selftest.c  tries all of it before anything is changed for good */
#pragma once

#include <pthread.h>
#include <stdatomic.h>

#include "engine_state.h"
#include "ggml_private.h"

typedef struct tf_plugin {
    atomic_bool active;
    bool strict;     /* TWOFOLD_STRICT: end the program instead of serving the base alone */
    bool claim;      /* TWOFOLD_CLAIM */
    bool self_draft; /* TWOFOLD_SELF_DRAFT */
    int32_t log;     /* TWOFOLD_LOG: 0 errors only, 1, 2 more */
    int32_t bits;
    tf_residual *residual;
    tf_engine *engine;
    pthread_mutex_t lock; /* of engine and models; recursive */
} tf_plugin;

extern tf_plugin tf_the_plugin;

/* A line on standard error, if TWOFOLD_LOG is at least `level`. */
void tf_plugin_say(int32_t level, const char *format, ...) TF_PRINTF(2, 3);
/* Says what is wrong; from now on the base is served alone, or the program ends if it is to be strict. */
void tf_plugin_refuse(const char *format, ...) TF_PRINTF(1, 2);

/* Reads the planes in use into memory, once. */
void tf_plugin_preload(void);

/* ---- plugin_ggml.c ---------------------------------------------------------------------------- */

/* Finds ggml's functions in the library that `caller` lies in, or in what it depends on. NULL if all are there, else
 * the name of one that is not. */
const char *tf_ggml_find(const void *caller);
/* Part of a graph, without copying it; NULL where ggml does not export that function. The struct is opaque, and at
 * least as large as ggml's own, which is returned through a pointer. */
typedef struct tf_graph_view {
    _Alignas(16) char bytes[512];
} tf_graph_view;
typedef tf_graph_view (*tf_view_function)(struct ggml_cgraph *graph, int first, int end);
tf_view_function tf_ggml_graph_view(void);
const char *tf_ggml_found_in(void); /* path of that library */
const char *tf_ggml_found_version(void);

/* ---- plugin_segments.c ------------------------------------------------------------------------ */

typedef struct tf_visitor {
    bool (*wants)(void *user, struct ggml_tensor *node); /* before the node is computed: cut after it? */
    bool (*apply)(void *user, struct ggml_tensor *node); /* its result is there; false: stop */
    void *user;
} tf_visitor;

/* Computes the graph, in pieces that end with the nodes that are wanted. */
enum ggml_status tf_segments_compute(tf_compute_function compute, ggml_backend_t backend, struct ggml_cgraph *graph,
                                     tf_view_function view, const tf_visitor *visitor);

/* ---- plugin_hooks.c --------------------------------------------------------------------------- */

/* What takes the place of a backend's graph_compute. */
typedef enum ggml_status (*tf_computer)(tf_compute_function compute, ggml_backend_t backend, struct ggml_cgraph *graph,
                                        bool on_cpu);

/* NULL if the objects of this device lie in memory as declared, else what does not. */
const char *tf_layout_check(ggml_backend_dev_t device);
/* Hooks one device. NULL, or what went wrong. */
const char *tf_hook_device(ggml_backend_dev_t device);
/* Hooks the CPU's registry: its special buffers hide the weights that we compute, and are left out. */
const char *tf_hook_registry(ggml_backend_reg_t reg);
/* Hooks all devices that are not yet. */
void tf_hook_all(void);
void tf_unhook_all(void);
void tf_hooks_set_computer(tf_computer computer);
/* Backends made through a hooked device, so far, and now alive. */
int64_t tf_hooks_made(void);
int64_t tf_hooks_alive(void);

/* ---- plugin_models.c -------------------------------------------------------------------------- */

enum ggml_status tf_models_compute(tf_compute_function compute, ggml_backend_t backend, struct ggml_cgraph *graph,
                                   bool on_cpu);
/* Weights that were met may be gone. */
void tf_models_forget(void);

/* ---- plugin_selftest.c ------------------------------------------------------------------------ */

/* NULL, or what is not as expected. The CPU device must be hooked. */
const char *tf_selftest(ggml_backend_dev_t cpu);
