/* Which weights in a graph the residual belongs to, and the engine's part in computing it.
 *
 * A program may load several models, and drop them again: names alone do not tell. A weight is checked when it is first
 * met, by its bytes where they can be read, and known by its address from then on. */
#include <stdlib.h>
#include <string.h>

#include "plugin.h"

typedef enum verdict { UNKNOWN = 0, OURS, DRAFTER, FOREIGN } verdict;

enum { COPIES = 4 };

/* Of a residual tensor: the weights of that name that were met. */
typedef struct known {
    const struct ggml_tensor *weight[COPIES];
    verdict verdict[COPIES];
    uint64_t applied;
} known;

static known *models;     /* one for each entry of the engine's registry */
static int64_t belonging; /* weights found to be ours since the last forgetting */
static int64_t unread;    /* of those, weights whose bytes could not be read */
static tf_entry *first;   /* the first that was met: when it comes again, a pass is over */
static bool others;       /* another model has been reported */
static bool complete;     /* a whole pass has been seen to apply every residual */

/* ---- does it belong? -------------------------------------------------------------------------- */

/* The bytes of a weight, or those of its fingerprint's windows in a copy that is else empty. NULL: not readable. */
static const void *weight_bytes(ggml_backend_t backend, const struct ggml_tensor *w, void **copy) {
    *copy = NULL;
    if (tf_on_host(w)) {
        return w->data;
    }
    ggml_backend_buffer_t buffer = w->view_src != NULL ? w->view_src->buffer : w->buffer;
    if (ggml_backend_buffer_get_type(buffer) != ggml_backend_dev_buffer_type(ggml_backend_get_device(backend))) {
        return NULL; /* a special buffer: its layout is its own, and not every one can be read */
    }
    const size_t bytes = ggml_nbytes(w);
    *copy = calloc(1, bytes);
    for (uint64_t i = 0; *copy != NULL && i < tf_window_count(bytes); i++) {
        const tf_window window = tf_fingerprint_window(bytes, i);
        ggml_backend_tensor_get(w, (char *)*copy + window.offset, window.offset, window.bytes);
    }
    return *copy;
}

/* Whether the weight is the one that the residual was made for. */
static bool belongs(ggml_backend_t backend, const tf_residual_tensor *t, const struct ggml_tensor *w) {
    if ((int32_t)w->type != t->base_type || w->ne[0] != t->width || w->ne[1] != t->rows ||
        w->ne[2] * w->ne[3] != t->experts) {
        return false;
    }
    if (strchr(w->name, '#') != NULL) { /* a copy that the scheduler made: of experts, only those in use */
        return true;
    }
    void *copy;
    const void *bytes = weight_bytes(backend, w, &copy);
    const bool same = bytes == NULL || tf_fingerprint((int32_t)w->type, w->ne, bytes, ggml_nbytes(w)) == t->fingerprint;
    unread += bytes == NULL;
    free(copy);
    return same;
}

static verdict judge(ggml_backend_t backend, const tf_entry *entry, known *k, const struct ggml_tensor *w) {
    if (!belongs(backend, &entry->tensor, w)) {
        if (belonging == 0) {
            tf_plugin_refuse("the residual does not belong to this model: %s is not the weight it was made for",
                             entry->tensor.name);
        } else if (!others) {
            others = true;
            tf_plugin_say(1, "another model is loaded, whose %s has no residual: it is left alone", entry->tensor.name);
        }
        return FOREIGN;
    }
    belonging++;
    const bool second = k->verdict[0] == OURS && strchr(w->name, '#') == NULL;
    return second && tf_the_plugin.self_draft ? DRAFTER : OURS;
}

static verdict verdict_of(ggml_backend_t backend, const tf_entry *entry, const struct ggml_tensor *w) {
    known *k = &models[entry - tf_the_plugin.engine->registry.entries];
    int i = 0;
    for (; i < COPIES && k->weight[i] != NULL; i++) {
        if (k->weight[i] == w) {
            return k->verdict[i];
        }
    }
    const verdict found = judge(backend, entry, k, w);
    i = i < COPIES ? i : COPIES - 1; /* the scheduler's copies may be many: those are cheap to judge again */
    k->weight[i] = w;
    k->verdict[i] = found;
    return found;
}

void tf_models_forget(void) {
    pthread_mutex_lock(&tf_the_plugin.lock);
    /* A drafter is told from its verifier by who came first, so both must be gone. */
    if (models != NULL && (!tf_the_plugin.self_draft || tf_hooks_alive() == 0)) {
        memset(models, 0, (size_t)tf_the_plugin.engine->registry.count * sizeof *models);
        belonging = unread = 0;
        first = NULL;
        complete = false;
    }
    pthread_mutex_unlock(&tf_the_plugin.lock);
}

/* ---- a pass ----------------------------------------------------------------------------------- */

/* After the first whole pass: has every residual been applied? */
static void check_complete(const tf_entry *entry) {
    const tf_registry *r = &tf_the_plugin.engine->registry;
    if (first == NULL) {
        first = (tf_entry *)(uintptr_t)entry;
    } else if (entry == first && !complete) {
        complete = true;
        for (int64_t i = 0; i < r->count; i++) {
            if (models[i].applied == 0) {
                tf_plugin_refuse(
                    "the residual of %s was never applied: the graph does not use this weight in a matrix "
                    "product of its own",
                    r->entries[i].tensor.name);
                return;
            }
        }
        if (unread > 0) {
            tf_plugin_say(1,
                          "%lld weights lie where they cannot be read: their names and shapes fit, their bytes were "
                          "not compared",
                          (long long)unread);
        }
    }
}

static tf_entry *entry_of(const struct ggml_tensor *node) {
    const bool product = node->op == GGML_OP_MUL_MAT || node->op == GGML_OP_MUL_MAT_ID;
    return product ? tf_registry_find(&tf_the_plugin.engine->registry, node->src[0]->name) : NULL;
}

/* Whether the graph has products of ours. Judges every weight before anything is computed. */
static bool concerns_us(ggml_backend_t backend, struct ggml_cgraph *graph) {
    bool any = false;
    for (int i = 0; i < ggml_graph_n_nodes(graph) && atomic_load(&tf_the_plugin.active); i++) {
        const struct ggml_tensor *node = ggml_graph_node(graph, i);
        const tf_entry *entry = entry_of(node);
        if (entry != NULL && verdict_of(backend, entry, node->src[0]) == OURS) {
            check_complete(entry);
            models[entry - tf_the_plugin.engine->registry.entries].applied++;
            any = true;
        }
    }
    return any && atomic_load(&tf_the_plugin.active);
}

typedef struct pass {
    ggml_backend_t backend;
    tf_engine *engine;
} pass;

static bool wants(void *user, struct ggml_tensor *node) {
    const pass *p = user;
    const tf_entry *entry = entry_of(node);
    const verdict found = entry != NULL ? verdict_of(p->backend, entry, node->src[0]) : FOREIGN;
    if (entry != NULL && found == FOREIGN) {
        p->engine->quantized = p->engine->claimed = NULL;
        return false;
    }
    p->engine->mode = found == DRAFTER ? TF_DRAFT : TF_VERIFY;
    return tf_engine_wants(p->engine, node);
}

static bool apply(void *user, struct ggml_tensor *node) { return tf_engine_apply(((pass *)user)->engine, node); }

static void give_back(struct ggml_cgraph *graph) {
    for (int i = 0; i < ggml_graph_n_nodes(graph); i++) {
        struct ggml_tensor *node = ggml_graph_node(graph, i);
        if (tf_is_claimed(node)) {
            tf_unclaim_node(node);
        }
    }
}

static enum ggml_status compute_with_engine(tf_compute_function compute, ggml_backend_t backend,
                                            struct ggml_cgraph *graph, bool on_cpu) {
    tf_engine *e = tf_the_plugin.engine;
    pass p = {backend, e};
    const tf_visitor visitor = {wants, apply, &p};
    tf_engine_begin(e, TF_VERIFY);
    tf_engine_claim(e, on_cpu && tf_the_plugin.claim);
    const enum ggml_status status = tf_segments_compute(compute, backend, graph, tf_ggml_graph_view(), &visitor);
    give_back(graph);
    if (e->status != TF_OK) {
        tf_plugin_refuse("%s", e->message);
    }
    return status;
}

enum ggml_status tf_models_compute(tf_compute_function compute, ggml_backend_t backend, struct ggml_cgraph *graph,
                                   bool on_cpu) {
    if (!atomic_load(&tf_the_plugin.active)) {
        return compute(backend, graph);
    }
    pthread_mutex_lock(&tf_the_plugin.lock);
    if (models == NULL) {
        models = calloc((size_t)tf_the_plugin.engine->registry.count + 1, sizeof *models);
    }
    enum ggml_status status = GGML_STATUS_ALLOC_FAILED;
    bool ours = false;
    if (models != NULL) {
        ours = concerns_us(backend, graph);
        status = ours ? compute_with_engine(compute, backend, graph, on_cpu) : GGML_STATUS_SUCCESS;
    }
    pthread_mutex_unlock(&tf_the_plugin.lock);
    return ours || models == NULL ? status : compute(backend, graph);
}
