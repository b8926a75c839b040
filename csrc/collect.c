/* Calibration: shows the inputs of a model's matrix products to a function, while llama.cpp runs it.
 *
 *   MUL_MAT     x [n][width]                    -> one call
 *   MUL_MAT_ID  x, and which columns go where   -> one call an expert that has columns
 *
 * Or, asked to disturb one matrix, adds noise to its products, so that what an error there does to the
 * model's output can be measured. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "ggml-backend.h"
#include "operands.h"

struct tf_collector {
    tf_collect_sink sink;
    void *user;
    tf_buffer fetched, ids, gathered;
    char disturbed[GGML_MAX_NAME]; /* empty: inputs are shown */
    float amount;
    uint64_t random;
    tf_status status;
    char message[256];
};

static bool fail(tf_collector *c, tf_status status, const char *message) {
    c->status = status;
    strncpy(c->message, message, sizeof c->message - 1);
    return false;
}

typedef struct plain_name {
    char text[GGML_MAX_NAME];
} plain_name;

static plain_name name_of(const struct ggml_tensor *w) {
    plain_name name = {{0}};
    size_t length = 0;
    const char *from = tf_plain_name(w->name, &length);
    memcpy(name.text, from, length < GGML_MAX_NAME ? length : GGML_MAX_NAME - 1);
    return name;
}

static bool is_weight(const struct ggml_tensor *w) {
    static const char end[] = ".weight";
    const plain_name name = name_of(w);
    const size_t length = strlen(name.text);
    return w->op == GGML_OP_NONE && length >= sizeof end && strcmp(name.text + length - sizeof end + 1, end) == 0;
}

static bool wanted(const struct ggml_tensor *node) {
    const bool product = node->op == GGML_OP_MUL_MAT || node->op == GGML_OP_MUL_MAT_ID;
    return product && is_weight(node->src[0]) && node->src[1]->type == GGML_TYPE_F32 &&
           (node->op == GGML_OP_MUL_MAT_ID || ggml_n_dims(node->src[0]) <= 2);
}

/* Where the bytes of t can be read, in place on the host; NULL: out of memory. */
static void *fetch(const struct ggml_tensor *t, tf_buffer *b) {
    if (tf_on_host(t)) {
        return t->data;
    }
    void *copy = tf_buffer_reserve(b, ggml_nbytes(t));
    if (copy != NULL) {
        ggml_backend_tensor_get(t, copy, 0, ggml_nbytes(t));
    }
    return copy;
}

static bool show(tf_collector *c, const struct ggml_tensor *node, int64_t expert, const float *x, int64_t n) {
    const struct ggml_tensor *w = node->src[0];
    const int64_t experts = node->op == GGML_OP_MUL_MAT_ID ? w->ne[2] : 1;
    const plain_name name = name_of(w);
    const tf_collected seen = {name.text, node->src[1]->name, expert, experts, n, w->ne[0], x};
    return c->sink(c->user, &seen) || fail(c, TF_ERR_ARGUMENT, "stopped by the function that was shown the inputs");
}

static bool show_experts(tf_collector *c, const struct ggml_tensor *node, const void *x_base, const char *ids) {
    const struct ggml_tensor *x = node->src[1], *id = node->src[2];
    const int64_t used = id->ne[0], tokens = id->ne[1], width = x->ne[0];
    float *gathered = tf_buffer_reserve(&c->gathered, (size_t)(used * tokens * width) * sizeof *gathered);
    if (gathered == NULL) {
        return fail(c, TF_ERR_MEMORY, "out of memory");
    }
    for (int64_t expert = 0; expert < node->src[0]->ne[2]; expert++) {
        int64_t n = 0;
        for (int64_t i = 0; i < tokens * used; i++) {
            const int64_t t = i / used, u = i % used;
            const void *at = ids + (size_t)t * id->nb[1] + (size_t)u * id->nb[0];
            if (*(const int32_t *)at == expert) {
                const float *from = tf_column(x, x_base, u % x->ne[1], t, 0);
                memcpy(gathered + n++ * width, from, (size_t)width * sizeof *gathered);
            }
        }
        if (n > 0 && !show(c, node, expert, gathered, n)) {
            return false;
        }
    }
    return true;
}

static bool collect(tf_collector *c, const struct ggml_tensor *node) {
    const struct ggml_tensor *x = node->src[1];
    const void *base = fetch(x, &c->fetched);
    if (base == NULL) {
        return fail(c, TF_ERR_MEMORY, "out of memory");
    }
    if (node->op == GGML_OP_MUL_MAT_ID) {
        const void *ids = fetch(node->src[2], &c->ids);
        return ids != NULL ? show_experts(c, node, base, ids) : fail(c, TF_ERR_MEMORY, "out of memory");
    }
    const float *columns = tf_contiguous(x, base, &c->gathered);
    return columns != NULL ? show(c, node, 0, columns, ggml_nrows(x)) : fail(c, TF_ERR_MEMORY, "out of memory");
}

/* Uniform in [-1, 1); xorshift64*, Vigna 2016 (arXiv:1402.6246). */
static float noise(uint64_t *state) {
    *state ^= *state >> 12;
    *state ^= *state << 25;
    *state ^= *state >> 27;
    return (float)((int64_t)(*state * 0x2545f4914f6cdd1du) >> 40) / (float)(1 << 23);
}

/* Noise of `amount` times the root mean square of each column; uniform noise in [-1, 1) has a third of power. */
static bool disturb(tf_collector *c, struct ggml_tensor *node) {
    if (!ggml_is_contiguous(node) || node->type != GGML_TYPE_F32) {
        return fail(c, TF_ERR_UNSUPPORTED, "a product that is not contiguous float32 cannot be disturbed");
    }
    float *y = fetch(node, &c->fetched);
    if (y == NULL) {
        return fail(c, TF_ERR_MEMORY, "out of memory");
    }
    const int64_t width = node->ne[0];
    for (int64_t j = 0; j < ggml_nrows(node); j++) {
        double squares = 0.0;
        for (int64_t i = 0; i < width; i++) {
            squares += (double)y[j * width + i] * (double)y[j * width + i];
        }
        const float scale = c->amount * sqrtf(3.0f * (float)(squares / (double)width));
        for (int64_t i = 0; i < width; i++) {
            y[j * width + i] += scale * noise(&c->random);
        }
    }
    if (!tf_on_host(node)) {
        ggml_backend_tensor_set(node, y, 0, ggml_nbytes(node));
    }
    return true;
}

static bool callback(struct ggml_tensor *node, bool ask, void *collector) {
    tf_collector *c = collector;
    if (ask) {
        return wanted(node) && (c->disturbed[0] == '\0' || strcmp(c->disturbed, name_of(node->src[0]).text) == 0);
    }
    return c->status == TF_OK && (c->disturbed[0] == '\0' ? collect(c, node) : disturb(c, node));
}

/* ---- public ---------------------------------------------------------------------------------- */

tf_status tf_collector_new(tf_collect_sink sink, void *user, tf_collector **out) {
    *out = calloc(1, sizeof **out);
    if (*out == NULL) {
        return tf_fail(TF_ERR_MEMORY, "out of memory");
    }
    (*out)->sink = sink;
    (*out)->user = user;
    return TF_OK;
}

void tf_collector_free(tf_collector *c) {
    if (c != NULL) {
        free(c->fetched.data);
        free(c->ids.data);
        free(c->gathered.data);
        free(c);
    }
}

void tf_collector_disturb(tf_collector *c, const char *weight, float amount) {
    strncpy(c->disturbed, weight, sizeof c->disturbed - 1); /* the last byte stays 0 */
    c->amount = amount;
    c->random = 0x9e3779b97f4a7c15u;
}

tf_status tf_collector_end(tf_collector *c) {
    const tf_status status = c->status;
    c->status = TF_OK;
    return status == TF_OK ? TF_OK : tf_fail(status, "%s", c->message);
}

const void *tf_collector_callback(void) { return (const void *)&callback; }
