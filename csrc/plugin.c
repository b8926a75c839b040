/* What llama.cpp's loader calls, settings, and what happens when something is not as it should be.
 *
 * The loader may call ggml_backend_init() several times. It gets a registry without devices, which also tells whether
 * the plugin is at work: ggml_backend_reg_get_proc_address(reg, "twofold_active") is not NULL then. */
#define _GNU_SOURCE
#include "plugin.h"

#include <errno.h>
#include <sched.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

tf_plugin tf_the_plugin = {.log = 1};

/* ---- saying and refusing ---------------------------------------------------------------------- */

static void line(const char *format, va_list arguments) {
    char text[1024];
    vsnprintf(text, sizeof text, format, arguments);
    fprintf(stderr, "twofold: %s\n", text);
}

void tf_plugin_say(int32_t level, const char *format, ...) {
    if (level <= tf_the_plugin.log) {
        va_list arguments;
        va_start(arguments, format);
        line(format, arguments);
        va_end(arguments);
    }
}

void tf_plugin_refuse(const char *format, ...) {
    char problem[768];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(problem, sizeof problem, format, arguments);
    va_end(arguments);
    if (tf_the_plugin.strict) {
        fprintf(stderr, "twofold: %s; the program ends (TWOFOLD_STRICT)\n", problem);
        fflush(NULL);
        _exit(1); /* not exit(): other threads and backends may be at work, and ggml's locks held */
    }
    fprintf(stderr, "twofold: %s; the base is served alone\n", problem);
    atomic_store(&tf_the_plugin.active, false);
}

__attribute__((destructor)) static void say_totals(void) {
    if (tf_the_plugin.engine != NULL) {
        const tf_counters c = tf_engine_counters(tf_the_plugin.engine);
        tf_plugin_say(2,
                      "%llu products completed, %.3f GB of residual read, %.3f GB of base rearranged; fetch %.2f s, "
                      "compute %.2f s, store %.2f s",
                      (unsigned long long)c.nodes, 1e-9 * (double)c.residual_bytes, 1e-9 * (double)c.base_bytes,
                      c.fetch_s, c.compute_s, c.store_s);
    }
}

/* ---- settings --------------------------------------------------------------------------------- */

/* The processors this program may use; of two threads a core, one. */
static int32_t default_threads(void) {
    cpu_set_t set;
    const int32_t processors = sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 1;
    FILE *file = fopen("/sys/devices/system/cpu/smt/active", "r");
    const bool two_a_core = file != NULL && fgetc(file) == '1';
    if (file != NULL) {
        fclose(file);
    }
    return two_a_core && processors > 1 ? processors / 2 : processors;
}

/* NULL, or the name of a variable that holds something else. */
static const char *number(const char *name, int32_t least, int32_t most, int32_t unset, int32_t *out) {
    const char *value = getenv(name);
    *out = unset;
    if (value == NULL || *value == '\0') {
        return NULL;
    }
    char *end;
    errno = 0;
    const long read = strtol(value, &end, 10);
    if (errno != 0 || *end != '\0' || read < least || read > most) {
        return name;
    }
    *out = (int32_t)read;
    return NULL;
}

/* Whether the engine has kernels for all the types of base that the residual completes. */
static bool has_kernels(const tf_residual *residual) {
    for (int64_t i = 0; i < tf_residual_count(residual); i++) {
        tf_residual_tensor tensor;
        tf_residual_get(residual, i, &tensor);
        if (!tf_base_supported(tensor.base_type)) {
            return false;
        }
    }
    return true;
}

static bool open_residual(const char *path, int32_t threads) {
    tf_plugin *p = &tf_the_plugin;
    if (tf_residual_open(path, &p->residual) != TF_OK || tf_engine_new(p->residual, threads, &p->engine) != TF_OK ||
        (p->bits >= 0 && tf_engine_set_bits(p->engine, p->bits) != TF_OK)) {
        tf_plugin_refuse("%s", tf_error());
        return false;
    }
    p->bits = p->engine->bits;
    p->claim = p->claim && has_kernels(p->residual);
    return true;
}

static void preload(void) {
    for (int64_t i = 0; i < tf_residual_count(tf_the_plugin.residual); i++) {
        tf_residual_tensor tensor;
        tf_residual_get(tf_the_plugin.residual, i, &tensor);
        tf_residual_load(&tensor, tf_the_plugin.bits, false);
    }
}

void tf_plugin_preload(void) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, preload);
}

static bool read_settings(void) {
    tf_plugin *p = &tf_the_plugin;
    int32_t strict, claim, self_draft, threads;
    const char *wrong = number("TWOFOLD_STRICT", 0, 1, 0, &strict);
    p->strict = wrong == NULL && strict != 0;
    wrong = wrong != NULL ? wrong : number("TWOFOLD_LOG", 0, 2, 1, &p->log);
    wrong = wrong != NULL ? wrong : number("TWOFOLD_CLAIM", 0, 1, 1, &claim);
    wrong = wrong != NULL ? wrong : number("TWOFOLD_SELF_DRAFT", 0, 1, 0, &self_draft);
    wrong = wrong != NULL ? wrong : number("TWOFOLD_BITS", 0, 8, -1, &p->bits);
    wrong = wrong != NULL ? wrong : number("TWOFOLD_THREADS", 1, 1024, default_threads(), &threads);
    if (wrong != NULL) {
        p->log = p->log < 0 || p->log > 2 ? 1 : p->log;
        tf_plugin_refuse("%s=%s is not a number that is allowed", wrong, getenv(wrong));
        return false;
    }
    p->claim = claim != 0;
    p->self_draft = self_draft != 0;
    const char *path = getenv("TWOFOLD_RESIDUAL");
    if (path == NULL || *path == '\0') {
        tf_plugin_refuse("TWOFOLD_RESIDUAL names no file");
        return false;
    }
    return open_residual(path, threads);
}

/* ---- starting --------------------------------------------------------------------------------- */

/* NULL if ggml's backend interface has the version that is known here. */
static const char *check_version(void) {
    static char problem[128];
    for (size_t i = 0; i < ggml_backend_reg_count(); i++) {
        const int version = ggml_backend_reg_get(i)->api_version;
        if (version != TF_BACKEND_API) {
            snprintf(problem, sizeof problem, "ggml's backend interface has version %d, this plugin knows %d", version,
                     TF_BACKEND_API);
            return problem;
        }
    }
    return NULL;
}

static const char *try_hooks(void) {
    ggml_backend_dev_t cpu = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
    if (cpu == NULL) {
        return "no CPU backend is loaded";
    }
    const char *problem = tf_hook_device(cpu);
    problem = problem != NULL ? problem : tf_selftest(cpu);
    return problem != NULL ? problem : tf_hook_registry(ggml_backend_dev_backend_reg(cpu));
}

static const char *reg_name(ggml_backend_reg_t reg) {
    (void)reg;
    return "twofold";
}

static size_t no_devices(ggml_backend_reg_t reg) {
    (void)reg;
    return 0;
}

static ggml_backend_dev_t no_device(ggml_backend_reg_t reg, size_t index) {
    (void)reg;
    (void)index;
    return NULL;
}

static bool is_active(void) { return atomic_load(&tf_the_plugin.active); }

static void *proc_address(ggml_backend_reg_t reg, const char *name) {
    (void)reg;
    return strcmp(name, "twofold_active") == 0 && is_active() ? (void *)(uintptr_t)&is_active : NULL;
}

static struct ggml_backend_reg registry = {
    .api_version = TF_BACKEND_API,
    .slots = {[TF_REG_NAME] = (tf_slot)reg_name,
              [TF_REG_DEVICE_COUNT] = (tf_slot)no_devices,
              [TF_REG_DEVICE] = (tf_slot)no_device,
              [TF_REG_PROC] = (tf_slot)proc_address},
};

/* NULL if the loader cannot take what would be returned. */
static ggml_backend_reg_t start(const void *caller) {
    pthread_mutexattr_t kind;
    pthread_mutexattr_init(&kind);
    pthread_mutexattr_settype(&kind, PTHREAD_MUTEX_RECURSIVE);
    pthread_mutex_init(&tf_the_plugin.lock, &kind);
    int32_t strict;
    tf_the_plugin.strict = number("TWOFOLD_STRICT", 0, 1, 0, &strict) == NULL && strict != 0;
    const char *missing = tf_ggml_find(caller);
    if (missing != NULL) {
        tf_plugin_refuse("the program does not give its ggml away (no function %s; is it built with static libraries?)",
                         missing);
        return NULL;
    }
    const char *problem = check_version();
    if (problem != NULL) {
        tf_plugin_refuse("%s", problem);
        return NULL;
    }
    if (!read_settings()) {
        return &registry;
    }
    problem = try_hooks();
    if (problem != NULL) {
        tf_unhook_all();
        tf_plugin_refuse("%s (ggml %s in %s): nothing is changed", problem, tf_ggml_found_version(),
                         tf_ggml_found_in());
        return &registry;
    }
    tf_hooks_set_computer(tf_models_compute);
    atomic_store(&tf_the_plugin.active, true);
    tf_plugin_say(1, "%s completes its base, %d bits, %d threads, products %s", getenv("TWOFOLD_RESIDUAL"),
                  tf_the_plugin.bits, tf_the_plugin.engine->threads,
                  tf_the_plugin.claim ? "in host memory by twofold's kernels" : "by ggml");
    tf_plugin_say(2, "ggml %s in %s", tf_ggml_found_version(), tf_ggml_found_in());
    return &registry;
}

__attribute__((visibility("default"))) ggml_backend_reg_t ggml_backend_init(void);
ggml_backend_reg_t ggml_backend_init(void) {
    static pthread_mutex_t once = PTHREAD_MUTEX_INITIALIZER;
    static ggml_backend_reg_t started;
    static bool tried;
    const void *caller = __builtin_return_address(0);
    pthread_mutex_lock(&once);
    if (!tried) {
        tried = true;
        started = start(caller);
    }
    pthread_mutex_unlock(&once);
    tf_hook_all();
    return started;
}
