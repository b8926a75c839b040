/* Residual tensors by the name of the weight they belong to. */
#pragma once

#include "base_panels.h"

typedef struct tf_entry {
    tf_residual_tensor tensor;
    tf_base base;     /* panels of the base, where the engine computes it */
    bool no_base;     /* they could not be made */
    uint64_t applied; /* in how many nodes since tf_engine_begin() */
} tf_entry;

typedef struct tf_registry {
    tf_entry *entries;
    int64_t count;
    int64_t *slots; /* open addressing; -1 is free */
    int64_t slot_count;
} tf_registry;

tf_status tf_registry_init(tf_registry *registry, const tf_residual *residual);
void tf_registry_free(tf_registry *registry);
/* NULL if no residual belongs to it. The scheduler calls its copy of weight W "CUDA0#W#0". */
tf_entry *tf_registry_find(const tf_registry *registry, const char *weight_name);
