/* The scheduler shows a product only when it is computed. But it asks about every node before, also about the one that
 * makes the product's input x: asked for that one too, it stops there, x exists, and while the device goes on to the
 * product of the base, our threads multiply x by all residuals that it met the last time.
 *
 *   scheduler's thread   x | quantize | start Q K V of the base ... | take Q, add | ... | take K, add | ...
 *   device                 |          | base Q                      | add         | base K
 *   pool                   |          | R of Q, R of K, R of V ...
 *
 * What is known of x is only its name and may be wrong: a product counts only for the very x and matrix that the graph
 * then shows; what is not asked for is dropped. */
#include "ahead.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "device.h"

enum { MOST = 8 }; /* matrices of one x */

typedef struct begun {
    const tf_entry *entry; /* NULL: taken */
    tf_product product;
    tf_share *shares;
    _Atomic int32_t entered, left;
} begun;

typedef struct slot {
    uint64_t name; /* hash; 0: free */
    int32_t count;
    int64_t entries[MOST];
} slot;

struct tf_ahead {
    const tf_registry *registry;
    const tf_kernel *kernel;
    tf_pool *pool;
    slot *slots; /* open addressing */
    int64_t slot_count;
    const struct ggml_tensor *x; /* whose products are begun; NULL: nobody's */
    begun begun[MOST];
    int32_t count;
    tf_share *shares;
    tf_pinned results;
};

/* ---- which matrices belong to a name ---------------------------------------------------------- */

static uint64_t hash(const char *name) {
    uint64_t h = 0xcbf29ce484222325u;
    for (; *name != '\0'; name++) {
        h = (h ^ (uint8_t)*name) * 0x100000001b3u;
    }
    return h != 0 ? h : 1;
}

/* The slot of a name, or the free one where it would go: there are more slots than matrices, so one is found. */
static slot *find(const tf_ahead *a, const char *name) {
    const uint64_t wanted = hash(name);
    int64_t at = (int64_t)(wanted % (uint64_t)a->slot_count);
    while (a->slots[at].name != 0 && a->slots[at].name != wanted) {
        at = (at + 1) % a->slot_count;
    }
    return &a->slots[at];
}

void tf_ahead_learn(tf_ahead *a, const tf_entry *entry, const struct ggml_tensor *x) {
    const int64_t index = entry - a->registry->entries;
    slot *s = find(a, x->name);
    for (int32_t i = 0; i < s->count; i++) {
        if (s->entries[i] == index) {
            return;
        }
    }
    int64_t used = 0;
    for (int64_t i = 0; i < a->slot_count; i++) {
        used += a->slots[i].name != 0;
    }
    if (s->count == MOST || (s->name == 0 && used + 1 >= a->slot_count)) {
        return; /* names that change from graph to graph: what is known is not used, and no more is learned */
    }
    s->name = hash(x->name);
    s->entries[s->count++] = index;
}

bool tf_ahead_expects(const tf_ahead *a, const struct ggml_tensor *x) { return find(a, x->name)->count > 0; }

/* ---- products --------------------------------------------------------------------------------- */

static void run(tf_ahead *a, begun *b, int32_t thread, int32_t threads) {
    atomic_fetch_add(&b->entered, 1);
    tf_shares_run(b->shares, threads, thread, a->kernel, &b->product, 1);
    atomic_fetch_add(&b->left, 1);
}

static void job(void *argument, int32_t thread, int32_t threads) {
    tf_ahead *a = argument;
    for (int32_t i = 0; i < a->count; i++) {
        run(a, &a->begun[i], thread, threads);
    }
}

void tf_ahead_start(tf_ahead *a, const struct ggml_tensor *x, const tf_activations *quantized, int32_t bits,
                    uint64_t *bytes) {
    tf_ahead_finish(a);
    const slot *s = find(a, x->name);
    const int32_t threads = tf_pool_threads(a->pool);
    size_t floats = 0;
    for (int32_t i = 0; i < s->count; i++) {
        floats += (size_t)(a->registry->entries[s->entries[i]].tensor.rows * quantized->n);
    }
    float *out = tf_pinned_reserve(&a->results, tf_tensor_device(x), floats * sizeof *out);
    if (out == NULL) {
        return; /* they are computed when they are asked for */
    }
    for (int32_t i = 0; i < s->count; i++) {
        const tf_entry *entry = &a->registry->entries[s->entries[i]];
        if (entry->tensor.width != quantized->width || entry->tensor.experts != 1) {
            continue;
        }
        begun *b = &a->begun[a->count++];
        b->entry = entry;
        b->product = (tf_product){.has_residual = true,
                                  .residual = tf_residual_planes(&entry->tensor, 0),
                                  .x = quantized,
                                  .out = out,
                                  .stride = entry->tensor.rows};
        b->product.residual.bits = bits;
        b->shares = a->shares + i * threads;
        atomic_init(&b->entered, 0);
        atomic_init(&b->left, 0);
        tf_shares_init(b->shares, threads, &b->product);
        out += entry->tensor.rows * quantized->n;
        *bytes += tf_residual_bytes_read(&b->product.residual);
    }
    if (a->count > 0) {
        a->x = x;
        tf_pool_start(a->pool, job, a);
    }
}

const float *tf_ahead_take(tf_ahead *a, const tf_entry *entry, const struct ggml_tensor *x) {
    if (a->x != x || x == NULL) {
        return NULL;
    }
    for (int32_t i = 0; i < a->count; i++) {
        begun *b = &a->begun[i];
        if (b->entry == entry) {
            run(a, b, 0, tf_pool_threads(a->pool));
            /* No panel is left to be taken, so whoever comes in now computes nothing. */
            for (int spins = 0; atomic_load(&b->entered) != atomic_load(&b->left); spins++) {
                tf_relax(spins);
            }
            b->entry = NULL;
            return b->product.out;
        }
    }
    return NULL;
}

void tf_ahead_finish(tf_ahead *a) {
    tf_pool_finish(a->pool);
    a->x = NULL;
    a->count = 0;
}

/* ---- life ------------------------------------------------------------------------------------- */

tf_ahead *tf_ahead_new(const tf_registry *registry, const tf_kernel *kernel, tf_pool *pool) {
    const char *off = getenv("TWOFOLD_OVERLAP"); /* 0: to compare */
    tf_ahead *a = off != NULL && off[0] == '0' ? NULL : calloc(1, sizeof *a);
    if (a == NULL) {
        return NULL;
    }
    a->registry = registry;
    a->kernel = kernel;
    a->pool = pool;
    a->slot_count = 2 * registry->count + 1;
    a->slots = calloc((size_t)a->slot_count, sizeof *a->slots);
    a->shares = aligned_alloc(64, sizeof *a->shares * (size_t)(MOST * tf_pool_threads(pool)));
    if (a->slots == NULL || a->shares == NULL) {
        tf_ahead_free(a);
        return NULL;
    }
    return a;
}

void tf_ahead_free(tf_ahead *a) {
    if (a != NULL) {
        tf_ahead_finish(a);
        tf_pinned_free(&a->results);
        free(a->slots);
        free(a->shares);
        free(a);
    }
}
