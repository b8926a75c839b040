/* Our functions in place of some of ggml's: a device's init_backend, and in each backend it makes graph_compute and
 * free. Objects are compared with what public functions say of them before a word is changed. */
#include <stdint.h>
#include <string.h>
#include <unistd.h>

#include "plugin.h"

enum { MAX_DEVICES = 128 };

typedef struct hook {
    ggml_backend_dev_t device;
    bool on_cpu, refused;
    tf_init_function init;
    tf_compute_function compute;
    tf_free_function free;
} hook;

static hook hooks[MAX_DEVICES];
static atomic_int hook_count;
static atomic_llong made, alive;
static ggml_backend_reg_t hooked_reg;
static tf_proc_function proc;
static tf_computer computer;

void tf_hooks_set_computer(tf_computer function) { computer = function; }
int64_t tf_hooks_made(void) { return atomic_load(&made); }
int64_t tf_hooks_alive(void) { return atomic_load(&alive); }

static hook *find(ggml_backend_dev_t device) {
    for (int i = 0; i < atomic_load(&hook_count); i++) {
        if (hooks[i].device == device) {
            return &hooks[i];
        }
    }
    return NULL;
}

/* Whether the bytes can be written: the kernel says so without a signal if they cannot. */
static bool writable(void *at, size_t bytes) {
    int ends[2];
    if (pipe(ends) != 0) {
        return false;
    }
    const bool good = write(ends[1], at, bytes) == (ssize_t)bytes && read(ends[0], at, bytes) == (ssize_t)bytes;
    close(ends[0]);
    close(ends[1]);
    return good;
}

/* ---- what objects look like ------------------------------------------------------------------- */

typedef const char *(*name_function)(void *object);

static const char *name_by(tf_slot slot, void *object) { return slot != NULL ? ((name_function)slot)(object) : NULL; }

const char *tf_layout_check(ggml_backend_dev_t device) {
    ggml_backend_reg_t reg = ggml_backend_dev_backend_reg(device);
    if (reg == NULL || device->reg != reg) {
        return "a device does not hold its registry where it should";
    }
    if (name_by(device->slots[TF_DEVICE_NAME], device) != ggml_backend_dev_name(device)) {
        return "a device's functions do not begin where they should";
    }
    if (name_by(reg->slots[TF_REG_NAME], reg) != ggml_backend_reg_name(reg)) {
        return "a registry's functions do not begin where they should";
    }
    return NULL;
}

/* Functions of a backend: what follows them is its device. 0: neither of the tables that are known. */
static int backend_slots(ggml_backend_t backend) {
    static const int known[] = {14, 16};
    const ggml_backend_dev_t device = ggml_backend_get_device(backend);
    for (size_t i = 0; device != NULL && i < sizeof known / sizeof *known; i++) {
        if ((uintptr_t)backend->slots[known[i]] == (uintptr_t)device) {
            return known[i];
        }
    }
    return 0;
}

/* ---- our functions ---------------------------------------------------------------------------- */

static enum ggml_status hooked_compute(ggml_backend_t backend, struct ggml_cgraph *graph) {
    const hook *h = find(ggml_backend_get_device(backend));
    return computer(h->compute, backend, graph, h->on_cpu);
}

static void hooked_free(ggml_backend_t backend) {
    const hook *h = find(ggml_backend_get_device(backend));
    h->free(backend);
    atomic_fetch_sub(&alive, 1);
    tf_models_forget();
}

/* NULL, or why this backend is left as it is. */
static const char *hook_backend(hook *h, ggml_backend_t backend) {
    const int slots = backend_slots(backend);
    if (slots == 0) {
        return "a backend does not hold its device where it should";
    }
    if (name_by(backend->slots[TF_BACKEND_NAME], backend) != ggml_backend_name(backend)) {
        return "a backend's functions do not begin where they should";
    }
    const int compute_at = slots - TF_BACKEND_COMPUTE_FROM_END;
    const tf_compute_function compute = (tf_compute_function)backend->slots[compute_at];
    const tf_free_function free = (tf_free_function)backend->slots[TF_BACKEND_FREE];
    if ((h->compute != NULL && (h->compute != compute || h->free != free)) || compute == NULL || free == NULL) {
        return "a device makes backends with different functions";
    }
    if (!writable(backend->slots, (size_t)slots * sizeof *backend->slots)) {
        return "a backend's functions cannot be replaced";
    }
    h->compute = compute;
    h->free = free;
    backend->slots[compute_at] = (tf_slot)hooked_compute;
    backend->slots[TF_BACKEND_FREE] = (tf_slot)hooked_free;
    atomic_fetch_add(&made, 1);
    atomic_fetch_add(&alive, 1);
    return NULL;
}

static ggml_backend_t hooked_init(ggml_backend_dev_t device, const char *parameters) {
    tf_hook_all();
    hook *h = find(device);
    ggml_backend_t backend = h->init(device, parameters);
    if (backend == NULL || h->refused) {
        return backend;
    }
    if (atomic_load(&tf_the_plugin.active)) { /* not for the self-test, nor to list devices */
        tf_plugin_preload();
    }
    pthread_mutex_lock(&tf_the_plugin.lock);
    const char *problem = hook_backend(h, backend);
    h->refused = problem != NULL;
    pthread_mutex_unlock(&tf_the_plugin.lock);
    if (problem != NULL) {
        tf_plugin_refuse("device %s: %s (another version of ggml's backend interface?)", ggml_backend_dev_name(device),
                         problem);
    }
    return backend;
}

static void *hooked_proc(ggml_backend_reg_t reg, const char *name) {
    tf_hook_all();
    const bool extra = strcmp(name, "ggml_backend_dev_get_extra_bufts") == 0;
    return extra && tf_the_plugin.claim && atomic_load(&tf_the_plugin.active) ? NULL : proc(reg, name);
}

/* ---- putting them there ----------------------------------------------------------------------- */

static const char *add_hook(ggml_backend_dev_t device) {
    const int n = atomic_load(&hook_count);
    if (n == MAX_DEVICES) {
        return "too many devices";
    }
    const char *problem = tf_layout_check(device);
    if (problem != NULL) {
        return problem;
    }
    if (!writable(&device->slots[TF_DEVICE_INIT], sizeof(tf_slot))) {
        return "its functions cannot be replaced";
    }
    hooks[n] = (hook){.device = device,
                      .on_cpu = ggml_backend_dev_type(device) == GGML_BACKEND_DEVICE_TYPE_CPU,
                      .init = (tf_init_function)device->slots[TF_DEVICE_INIT]};
    atomic_store(&hook_count, n + 1);
    device->slots[TF_DEVICE_INIT] = (tf_slot)hooked_init;
    tf_plugin_say(2, "device %s is watched", ggml_backend_dev_name(device));
    return NULL;
}

const char *tf_hook_device(ggml_backend_dev_t device) {
    pthread_mutex_lock(&tf_the_plugin.lock);
    const char *problem = find(device) != NULL ? NULL : add_hook(device);
    pthread_mutex_unlock(&tf_the_plugin.lock);
    return problem;
}

const char *tf_hook_registry(ggml_backend_reg_t reg) {
    if (!writable(&reg->slots[TF_REG_PROC], sizeof(tf_slot))) {
        return "the CPU's functions cannot be replaced";
    }
    hooked_reg = reg;
    proc = (tf_proc_function)reg->slots[TF_REG_PROC];
    reg->slots[TF_REG_PROC] = (tf_slot)hooked_proc;
    /* Any name will do to see that the call arrives: what it does is the same. */
    return proc != NULL ? NULL : "the CPU has no functions to ask for";
}

void tf_hook_all(void) {
    for (size_t i = 0; atomic_load(&tf_the_plugin.active) && i < ggml_backend_dev_count(); i++) {
        ggml_backend_dev_t device = ggml_backend_dev_get(i);
        const char *problem = tf_hook_device(device);
        if (problem != NULL) {
            tf_plugin_refuse("device %s: %s", ggml_backend_dev_name(device), problem);
        }
    }
}

void tf_unhook_all(void) {
    pthread_mutex_lock(&tf_the_plugin.lock);
    for (int i = 0; i < atomic_load(&hook_count); i++) {
        hooks[i].device->slots[TF_DEVICE_INIT] = (tf_slot)hooks[i].init;
    }
    atomic_store(&hook_count, 0);
    if (hooked_reg != NULL) {
        hooked_reg->slots[TF_REG_PROC] = (tf_slot)proc;
        hooked_reg = NULL;
    }
    pthread_mutex_unlock(&tf_the_plugin.lock);
}
