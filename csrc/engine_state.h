/* The engine's insides, shared by engine.c (life and modes), observe.c (adds a residual to a result) and
 * claim.c (computes base and residual instead of ggml). */
#pragma once

#include "ahead.h"
#include "device.h"
#include "engine.h"
#include "operands.h"
#include "product.h"
#include "registry.h"
#include "stage.h"

typedef struct tf_claim tf_claim;

/* A copy of what lies on a device. */
typedef struct tf_held {
    tf_pinned memory;
    const struct ggml_tensor *tensor; /* whose bytes they are, until it is computed anew; NULL: nobody's */
} tf_held;

struct tf_engine {
    tf_registry registry;
    tf_pool *pool;
    const tf_kernel *kernel;
    int32_t threads;
    int32_t bits, max_bits, group;
    bool claiming;
    tf_mode mode;
    tf_status status; /* first failure since begin */
    char message[512];
    tf_counters counters;

    /* observe.c: the src1 that `activations` hold, until it is computed anew: one llama_decode may run its
     * graph several times, over parts of the batch. */
    tf_activations activations;
    const struct ggml_tensor *quantized;
    tf_held x, ids;
    tf_pinned result; /* R x on its way to a device */
    tf_buffer sum, columns, gathered;
    tf_device *devices;    /* that nodes were met on */
    bool use_devices;      /* compute there ourselves: not where a front end wraps the devices' own functions */
    int64_t stage_columns; /* from how many on prompts are staged; 0: never */
    size_t stage_bytes;    /* of each device, for that */
    tf_ahead *ahead;       /* NULL: nothing is begun early */
    const struct ggml_tensor *awaited; /* asked for because it is what products wait for */

    /* survey.c */
    tf_survey_sink survey;
    void *survey_user;

    /* claim.c */
    tf_claim *claims;                  /* of this decode, the latest first */
    const struct ggml_tensor *claimed; /* the src1 that the latest quantizes, until it is computed anew */
    const struct ggml_tensor *routed;  /* the src2 that says which experts its columns go to; NULL: not known to last */
    tf_buffer claim_memory;
};

tf_status tf_check_operands(const tf_entry *entry, const struct ggml_tensor *node);
/* x if the engine will be asked about it before it changes; NULL for an input of the graph. */
const struct ggml_tensor *tf_lasting(const struct ggml_tensor *x);
/* Planes of an expert at the bits in use. */
tf_planes tf_engine_planes(const tf_engine *e, const tf_entry *entry, int64_t expert);
void tf_engine_fail(tf_engine *e, tf_status status);
double tf_now(void);

tf_status tf_observe(tf_engine *e, tf_entry *entry, struct ggml_tensor *node);
/* Whether the node's value is wanted, to begin with the products that it will be an input of. */
bool tf_awaits(tf_engine *e, const struct ggml_tensor *node);
/* Begins with them. */
tf_status tf_begin_products(tf_engine *e, const struct ggml_tensor *x);
/* The device of a node in memory that the host cannot see, made ready if it is met first; else NULL. */
tf_device *tf_engine_device_of(tf_engine *e, const struct ggml_tensor *node);
/* Tells the sink where a node and what it reads lie. */
void tf_survey_node(tf_engine *e, const struct ggml_tensor *node);

/* Makes the node ours if it can be; otherwise leaves it as ggml's. */
bool tf_claim_node(tf_engine *e, tf_entry *entry, struct ggml_tensor *node);
/* Gives a node that an earlier decode claimed back to ggml. */
void tf_unclaim_node(struct ggml_tensor *node);
bool tf_is_claimed(const struct ggml_tensor *node);
void tf_claims_free(tf_engine *e);
