#include "base_panels.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "ggml.h"

/* ggml's blocks, as ggml-common.h documents them (that header is not public). */
typedef struct q4_0 {
    uint16_t d;
    uint8_t codes[16]; /* i and i + 16 share a byte */
} q4_0;
typedef struct q8_0 {
    uint16_t d;
    int8_t codes[32];
} q8_0;

bool tf_base_supported(int32_t type) {
    return tf_super_bits(type) != 0 || type == GGML_TYPE_Q4_0 || type == GGML_TYPE_Q8_0;
}

bool tf_base_has_kernel(int32_t type) { return tf_base_supported(type); }

/* Place of (lane, input) in 64-byte groups of `chunks` chunks of 4 inputs. */
static int64_t place(int64_t lane, int64_t input, int64_t chunks) {
    return input / 4 / chunks * 64 + lane * 4 + input % 4;
}

/* scale * factor in float16; factor is a power of two, so this is exact unless it overflows. */
static tf_status scaled(uint16_t half, float factor, uint16_t *out) {
    const float value = tf_half_to_float(half) * factor;
    if (!(value < 65504.0f && value > -65504.0f)) {
        return tf_fail(TF_ERR_UNSUPPORTED, "a block scale of %g is too large", (double)value / (double)factor);
    }
    *out = tf_float_to_half(value);
    return TF_OK;
}

static tf_status put_q4_0(tf_base *base, int64_t row, const q4_0 *blocks) {
    const int64_t panel = row / TF_PANEL_ROWS, lane = row % TF_PANEL_ROWS, n = base->width / 32;
    uint8_t *plane = base->planes.plane4 + panel * base->width * 8;
    for (int64_t b = 0; b < n; b++) {
        for (int64_t i = 0; i < 32; i++) {
            const int code = blocks[b].codes[i % 16] >> (i / 16 * 4) & 15;
            const int64_t input = b * 32 + i;
            plane[place(lane, input, 2)] |= (uint8_t)(code << (input / 4 % 2 * 4));
        }
        tf_status status = scaled(blocks[b].d, 8.0f, &base->planes.scales[(panel * n + b) * TF_PANEL_ROWS + lane]);
        if (status != TF_OK) {
            return status;
        }
    }
    return TF_OK;
}

static tf_status put_q8_0(tf_base *base, int64_t row, const q8_0 *blocks) {
    const int64_t panel = row / TF_PANEL_ROWS, lane = row % TF_PANEL_ROWS, n = base->width / 32;
    uint8_t *four = base->planes.plane4 + panel * base->width * 8;
    uint8_t *six = base->planes.plane6 + panel * base->width * 4;
    uint8_t *eight = base->planes.plane8 + panel * base->width * 4;
    for (int64_t b = 0; b < n; b++) {
        for (int64_t i = 0; i < 32; i++) {
            const int code = blocks[b].codes[i] + 128;
            const int64_t input = b * 32 + i, shift = input / 4 % 4 * 2;
            four[place(lane, input, 2)] |= (uint8_t)(code >> 4 << (input / 4 % 2 * 4));
            six[place(lane, input, 4)] |= (uint8_t)((code >> 2 & 3) << shift);
            eight[place(lane, input, 4)] |= (uint8_t)((code & 3) << shift);
        }
        tf_status status = scaled(blocks[b].d, 128.0f, &base->planes.scales[(panel * n + b) * TF_PANEL_ROWS + lane]);
        if (status != TF_OK) {
            return status;
        }
    }
    return TF_OK;
}

/* The memory of base, zeroed: rows that pad the last panel stay zero. */
static tf_status allocate(tf_base *base) {
    const int64_t rows = base->rows, width = base->width;
    const int32_t bits = base->type == GGML_TYPE_Q8_0 ? 8 : 4;
    int64_t sizes[4] = {tf_panels(rows) * (width / TF_SUPER) * tf_super_bytes(base->bits)};
    if (base->bits == 0) {
        sizes[0] = tf_plane_bytes(rows, width, 32, 4);
        sizes[1] = tf_plane_bytes(rows, width, 32, 0);
        sizes[2] = bits == 8 ? tf_plane_bytes(rows, width, 32, 6) : 0;
        sizes[3] = sizes[2];
    }
    base->bytes = (size_t)(sizes[0] + sizes[1] + sizes[2] + sizes[3] + 63) / 64 * 64;
    base->memory = aligned_alloc(64, base->bytes);
    if (base->memory == NULL) {
        return tf_fail(TF_ERR_MEMORY, "out of memory for %zu bytes of base panels", base->bytes);
    }
    memset(base->memory, 0, base->bytes);
    uint8_t *at = base->memory;
    base->supers = base->bits != 0 ? at : NULL;
    base->planes = (tf_planes){rows, width, 32, bits, .plane4 = at};
    base->planes.plane6 = bits == 8 ? at + sizes[0] : NULL;
    base->planes.plane8 = bits == 8 ? at + sizes[0] + sizes[2] : NULL;
    base->planes.scales = (uint16_t *)(void *)(at + sizes[0] + sizes[2] + sizes[3]);
    return TF_OK;
}

typedef struct build {
    tf_base *base;
    const void *data;
    _Atomic int64_t next_panel;
    _Atomic int failed;
} build;

static tf_status put_row(tf_base *base, int64_t row, const void *data) {
    switch (base->type) {
        case GGML_TYPE_Q4_0: return put_q4_0(base, row, (const q4_0 *)data + row * (base->width / 32));
        case GGML_TYPE_Q8_0: return put_q8_0(base, row, (const q8_0 *)data + row * (base->width / 32));
        default: tf_super_put_row(base, row, data); return TF_OK;
    }
}

static void build_job(void *argument, int32_t thread, int32_t threads) {
    build *b = argument;
    (void)thread;
    (void)threads;
    for (int64_t panel; (panel = atomic_fetch_add(&b->next_panel, 1)) < tf_panels(b->base->rows);) {
        const int64_t first = panel * TF_PANEL_ROWS;
        for (int64_t row = first; row < first + TF_PANEL_ROWS && row < b->base->rows; row++) {
            if (put_row(b->base, row, b->data) != TF_OK) {
                atomic_store(&b->failed, 1);
            }
        }
    }
}

tf_status tf_base_build(tf_base *base, int32_t type, int64_t rows, int64_t width, const void *data, tf_pool *pool) {
    *base = (tf_base){.type = type, .bits = tf_super_bits(type), .rows = rows, .width = width};
    if (!tf_base_supported(type) || rows < 1 || width < 1 || width % (base->bits != 0 ? TF_SUPER : 32) != 0) {
        return tf_fail(TF_ERR_UNSUPPORTED, "no kernel for a base of type %d and width %lld", type, (long long)width);
    }
    const tf_status status = allocate(base);
    if (status != TF_OK) {
        return status;
    }
    build b = {.base = base, .data = data};
    tf_pool_run(pool, build_job, &b);
    if (atomic_load(&b.failed)) {
        tf_base_free(base);
        return tf_fail(TF_ERR_UNSUPPORTED, "a block scale is too large for panels");
    }
    return TF_OK;
}

tf_base tf_base_expert(const tf_base *base, int64_t expert, int64_t rows) {
    const int64_t panel = expert * (rows / TF_PANEL_ROWS), width = base->width;
    tf_base one = *base;
    one.rows = one.planes.rows = rows;
    if (base->supers != NULL) {
        one.supers += panel * (width / TF_SUPER) * tf_super_bytes(base->bits);
        return one;
    }
    one.planes.plane4 += panel * width * 8;
    one.planes.scales += panel * (width / 32) * TF_PANEL_ROWS;
    if (one.planes.bits == 8) {
        one.planes.plane6 += panel * width * 4;
        one.planes.plane8 += panel * width * 4;
    }
    return one;
}

void tf_base_free(tf_base *base) {
    free(base->memory);
    *base = (tf_base){.type = -1};
}
