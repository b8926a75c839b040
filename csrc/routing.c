#include "routing.h"

#include <stdlib.h>
#include <string.h>

int64_t tf_routing_most(int64_t experts, int64_t columns) { return experts < columns ? experts : columns; }

int64_t tf_routing_most_blocks(int64_t experts, int64_t columns, int32_t block) {
    return columns / block + tf_routing_most(experts, columns);
}

tf_routing *tf_routing_new(int64_t experts, int64_t columns, int32_t block) {
    const int64_t most = tf_routing_most(experts, columns), blocks = tf_routing_most_blocks(experts, columns, block);
    const int64_t numbers = most + (most + 1) + (blocks + 1) + columns + experts;
    tf_routing *r = malloc(sizeof *r + (size_t)numbers * sizeof(int32_t));
    if (r == NULL) {
        return NULL;
    }
    int32_t *at = (int32_t *)(r + 1);
    *r = (tf_routing){.experts = experts, .block = block, .used = at, .blocks = at + most};
    r->starts = r->blocks + most + 1;
    r->order = r->starts + blocks + 1;
    r->counts = r->order + columns;
    return r;
}

static int32_t expert_of(const struct ggml_tensor *ids, int64_t token, int64_t slot) {
    const char *at = (const char *)ids->data + (size_t)token * ids->nb[1] + (size_t)slot * ids->nb[0];
    return *(const int32_t *)(const void *)at;
}

/* Blocks of the columns that each expert in use has. */
static void make_blocks(tf_routing *r) {
    int32_t column = 0, block = 0;
    r->count = 0;
    for (int64_t e = 0; e < r->experts; e++) {
        if (r->counts[e] == 0) {
            continue;
        }
        r->used[r->count] = (int32_t)e;
        r->blocks[r->count++] = block;
        for (const int32_t end = column + r->counts[e]; column < end;) {
            r->starts[block++] = column;
            column = end - column < r->block ? end : column + r->block;
        }
    }
    r->blocks[r->count] = block;
    r->starts[block] = column;
}

void tf_routing_sort(tf_routing *r, const struct ggml_tensor *ids) {
    const int64_t slots = ids->ne[0], tokens = ids->ne[1];
    memset(r->counts, 0, (size_t)r->experts * sizeof *r->counts);
    for (int64_t i = 0; i < tokens * slots; i++) {
        r->counts[expert_of(ids, i / slots, i % slots)]++;
    }
    make_blocks(r);
    int32_t next = 0;
    for (int64_t e = 0; e < r->experts; e++) { /* counts become where each expert's columns go */
        const int32_t columns = r->counts[e];
        r->counts[e] = next;
        next += columns;
    }
    for (int64_t i = 0; i < tokens * slots; i++) {
        r->order[r->counts[expert_of(ids, i / slots, i % slots)]++] = (int32_t)i;
    }
}
