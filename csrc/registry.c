#include "registry.h"

#include <stdlib.h>
#include <string.h>

#include "operands.h"

static uint64_t hash(const char *name, size_t length) {
    uint64_t h = 0xcbf29ce484222325u;
    for (size_t i = 0; i < length; i++) {
        h = (h ^ (uint8_t)name[i]) * 0x100000001b3u;
    }
    return h;
}

/* Slot of the name, or the free slot where it would go. */
static int64_t probe(const tf_registry *r, const char *name, size_t length) {
    int64_t slot = (int64_t)(hash(name, length) % (uint64_t)r->slot_count);
    while (r->slots[slot] >= 0) {
        const char *known = r->entries[r->slots[slot]].tensor.name;
        if (strncmp(known, name, length) == 0 && known[length] == '\0') {
            break;
        }
        slot = (slot + 1) % r->slot_count;
    }
    return slot;
}

tf_status tf_registry_init(tf_registry *r, const tf_residual *residual) {
    const int64_t count = tf_residual_count(residual);
    *r = (tf_registry){.count = count, .slot_count = 2 * count + 1};
    r->entries = calloc((size_t)count + 1, sizeof *r->entries);
    r->slots = malloc((size_t)r->slot_count * sizeof *r->slots);
    if (r->entries == NULL || r->slots == NULL) {
        tf_registry_free(r);
        return tf_fail(TF_ERR_MEMORY, "out of memory");
    }
    memset(r->slots, 0xff, (size_t)r->slot_count * sizeof *r->slots);
    for (int64_t i = 0; i < count; i++) {
        tf_residual_get(residual, i, &r->entries[i].tensor);
        const char *name = r->entries[i].tensor.name;
        const int64_t slot = probe(r, name, strlen(name));
        if (r->slots[slot] >= 0) {
            tf_registry_free(r);
            return tf_fail(TF_ERR_FORMAT, "the residual holds tensor %s twice", name);
        }
        r->slots[slot] = i;
    }
    return TF_OK;
}

void tf_registry_free(tf_registry *r) {
    for (int64_t i = 0; r->entries != NULL && i < r->count; i++) {
        tf_base_free(&r->entries[i].base);
    }
    free(r->entries);
    free(r->slots);
    *r = (tf_registry){0};
}

tf_entry *tf_registry_find(const tf_registry *r, const char *weight_name) {
    size_t length = 0;
    const char *name = tf_plain_name(weight_name, &length);
    const int64_t found = r->slots[probe(r, name, length)];
    return found >= 0 ? &r->entries[found] : NULL;
}
