/* Which columns of a product with experts (MUL_MAT_ID) go to which expert. A column is one of the slots for experts of
 * one token. */
#pragma once

#include "ggml.h"
#include "twofold.h"

typedef struct tf_routing {
    int64_t experts; /* of the weight */
    int32_t block;   /* most columns of a block */
    int32_t count;   /* experts in use */
    int32_t *used;   /* [count] these, ascending */
    int32_t *blocks; /* [count + 1] the first block of columns of each */
    int32_t *starts; /* [blocks + 1] the first column of each block */
    int32_t *order;  /* [columns] token * slots + slot, by expert */
    int32_t *counts; /* [experts] columns of each */
} tf_routing;

/* Room for the routing of `columns` columns, to free with free(); NULL: out of memory. */
tf_routing *tf_routing_new(int64_t experts, int64_t columns, int32_t block);
/* Most experts in use, and most blocks of columns. */
int64_t tf_routing_most(int64_t experts, int64_t columns);
int64_t tf_routing_most_blocks(int64_t experts, int64_t columns, int32_t block);
/* ids: the expert of each slot, int32 [tokens][slots]. */
void tf_routing_sort(tf_routing *r, const struct ggml_tensor *ids);
