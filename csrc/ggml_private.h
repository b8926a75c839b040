/* The few private parts of ggml's backend interface that the plugin touches: three objects that begin with tables of
 * functions. Their public declarations are opaque. Only what tf_layout_check() and the self-test have confirmed is
 * used.
 *
 *   ggml_backend_reg     int api_version, functions, context
 *   ggml_backend_device  functions, reg, context
 *   ggml_backend         guid, functions, device, context
 *
 * Interface version 2 has had backends with 14 and with 16 functions. What follows the table tells how many there are,
 * and the places used are counted from its ends. */
#pragma once

#include "ggml-backend.h"

enum { TF_BACKEND_API = 2 };

typedef void (*tf_slot)(void);
typedef ggml_backend_t (*tf_init_function)(ggml_backend_dev_t device, const char *parameters);
typedef enum ggml_status (*tf_compute_function)(ggml_backend_t backend, struct ggml_cgraph *graph);
typedef void (*tf_free_function)(ggml_backend_t backend);
typedef void *(*tf_proc_function)(ggml_backend_reg_t reg, const char *name);

enum { TF_REG_NAME = 0, TF_REG_DEVICE_COUNT = 1, TF_REG_DEVICE = 2, TF_REG_PROC = 3, TF_REG_SLOTS = 4 };
enum { TF_DEVICE_NAME = 0, TF_DEVICE_INIT = 5, TF_DEVICE_SLOTS = 15 };
enum { TF_BACKEND_NAME = 0, TF_BACKEND_FREE = 1, TF_BACKEND_COMPUTE_FROM_END = 4 };

struct ggml_backend_reg {
    int api_version;
    tf_slot slots[TF_REG_SLOTS];
    void *context;
};

struct ggml_backend_device {
    tf_slot slots[TF_DEVICE_SLOTS];
    ggml_backend_reg_t reg;
    void *context;
};

/* Functions begin at word 1; their number is found, not declared. */
struct ggml_backend {
    ggml_guid_t guid;
    tf_slot slots[];
};
