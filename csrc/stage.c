/* A prompt's columns are many, so the device multiplies far faster than the CPU, and the residual crosses instead of
 * activations: in pieces of some rows, as Q8_0 blocks, through two lanes that take turns.
 *
 *   CPU     convert 0 | convert 1 | convert 2 |           convert 0 of the next matrix
 *   lane 0            | upload 0, multiply 0  | upload 2, multiply 2 |
 *   lane 1                        | upload 1, multiply 1  |          | upload 0 of the next matrix
 *
 * Each lane is a backend instance, so where ggml's backend is asynchronous both run beside the conversion. The next
 * matrix is the one that followed the last time; its piece is taken only if it is the one that is wanted.
 *
 * weight = scale / 128 * (code + offset). With 4 and 6 bits code + offset is an integer from -126 to 126, so blocks of
 * scale x int8 are exact; with 8 bits it is an integer - 128..127 and one half, and the half is a product of its own:
 * scale / 2 times the sum of 32 inputs. The 128 is taken off the result, because scale / 128 would be a subnormal
 * float16. */
#include "stage.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "kernels.h"

enum { LANES = 2, Q8_BYTES = 34, HALF_BYTES = 2, SLACK = 64 << 10 };

/* Rows of a matrix. */
typedef struct piece {
    const tf_entry *entry; /* NULL: nothing */
    int64_t first, rows;
    int32_t bits;
} piece;

typedef struct slot {
    tf_lane lane;
    tf_pinned host;
    piece holds;
    struct ggml_tensor *blocks, *halves; /* in the lane's memory; halves: NULL for less than 8 bits */
} slot;

struct tf_stage {
    ggml_backend_dev_t dev;
    slot slots[LANES];
    size_t bytes; /* of a slot */
    const tf_registry *registry;
    int64_t *next; /* of each matrix: which came after it, or -1 */
    int64_t last;
};

/* ---- conversion ------------------------------------------------------------------------------- */

/* 16 rows by 32 inputs: the codes, as int8 with their whole offset, [8 chunks of 4 inputs][16 rows][4]. */
static void codes_of_block(const tf_planes *p, int64_t panel, int64_t block, int8_t *codes) {
    const int offset = p->bits == 4 ? 8 - 128 : p->bits == 6 ? 2 - 128 : -128;
    const uint8_t *four = p->plane4 + panel * p->width * 8 + block * 4 * 64;
    const int64_t two = panel * p->width * 4 + block * 2 * 64;
    for (int chunk = 0; chunk < 8; chunk++) {
        const int shift4 = chunk % 2 * 4, shift2 = chunk % 4 * 2;
        const uint8_t *p4 = four + chunk / 2 * 64;
        const uint8_t *p6 = p->bits >= 6 ? p->plane6 + two + chunk / 4 * 64 : NULL;
        const uint8_t *p8 = p->bits == 8 ? p->plane8 + two + chunk / 4 * 64 : NULL;
        int8_t *out = codes + chunk * 64;
        for (int i = 0; i < 64; i++) {
            int code = (p4[i] >> shift4 & 15) << 4;
            code |= p6 != NULL ? (p6[i] >> shift2 & 3) << 2 : 0;
            code |= p8 != NULL ? p8[i] >> shift2 & 3 : 0;
            out[i] = (int8_t)(code + offset);
        }
    }
}

static void convert_panel(const tf_planes *p, int64_t panel, int64_t rows, uint8_t *blocks, uint16_t *half) {
    const int64_t per_row = p->width / TF_BLOCK, groups = tf_groups(p->width, p->group);
    for (int64_t b = 0; b < per_row; b++) {
        int8_t codes[TF_BLOCK * TF_PANEL_ROWS];
        codes_of_block(p, panel, b, codes);
        const uint16_t *scales = p->scales + (panel * groups + b * TF_BLOCK / p->group) * TF_PANEL_ROWS;
        for (int64_t row = 0; row < rows; row++) {
            uint8_t *out = blocks + (row * per_row + b) * Q8_BYTES;
            memcpy(out, &scales[row], sizeof *scales);
            for (int chunk = 0; chunk < 8; chunk++) {
                memcpy(out + 2 + chunk * 4, codes + chunk * 64 + row * 4, 4);
            }
            if (half != NULL) {
                half[row * per_row + b] = tf_float_to_half(0.5f * tf_half_to_float(scales[row]));
            }
        }
    }
}

void tf_stage_convert(const tf_planes *planes, int64_t first, int64_t rows, void *blocks, uint16_t *half) {
    const int64_t per_row = planes->width / TF_BLOCK;
    for (int64_t done = 0; done < rows; done += TF_PANEL_ROWS) {
        const int64_t left = rows - done, n = left < TF_PANEL_ROWS ? left : TF_PANEL_ROWS;
        convert_panel(planes, (first + done) / TF_PANEL_ROWS, n, (uint8_t *)blocks + done * per_row * Q8_BYTES,
                      half != NULL ? half + done * per_row : NULL);
    }
}

typedef struct conversion {
    const tf_planes *planes;
    int64_t first, rows;
    uint8_t *blocks;
    uint16_t *half;
    _Atomic int64_t next;
} conversion;

static void convert_job(void *argument, int32_t thread, int32_t threads) {
    conversion *c = argument;
    (void)thread;
    (void)threads;
    const int64_t per_row = c->planes->width / TF_BLOCK;
    for (int64_t at; (at = atomic_fetch_add(&c->next, TF_PANEL_ROWS)) < c->rows;) {
        const int64_t left = c->rows - at;
        tf_stage_convert(c->planes, c->first + at, left < TF_PANEL_ROWS ? left : TF_PANEL_ROWS,
                         c->blocks + at * per_row * Q8_BYTES, c->half != NULL ? c->half + at * per_row : NULL);
    }
}

/* ---- filling a slot --------------------------------------------------------------------------- */

static bool same(const piece *a, const piece *b) {
    return a->entry == b->entry && a->first == b->first && a->rows == b->rows && a->bits == b->bits;
}

/* Makes room for the piece's tensors in the lane and for their bytes here. */
static uint8_t *slot_prepare(tf_stage *stage, slot *s, const piece *want, size_t *block_bytes) {
    const int64_t width = want->entry->tensor.width, per_row = width / TF_BLOCK;
    struct ggml_context *ctx = tf_lane_begin(&s->lane);
    s->blocks = ggml_new_tensor_2d(ctx, GGML_TYPE_Q8_0, width, want->rows);
    s->halves = want->bits == 8 ? ggml_new_tensor_2d(ctx, GGML_TYPE_F16, per_row, want->rows) : NULL;
    if (!tf_lane_place(&s->lane, s->blocks) || (s->halves != NULL && !tf_lane_place(&s->lane, s->halves))) {
        return NULL;
    }
    *block_bytes = ggml_nbytes(s->blocks);
    const size_t half_bytes = s->halves != NULL ? ggml_nbytes(s->halves) : 0;
    return tf_pinned_reserve(&s->host, stage->dev, *block_bytes + half_bytes);
}

/* Converts and starts uploading, unless the slot holds the piece already. */
static tf_status fill(tf_stage *stage, slot *s, tf_pool *pool, const piece *want, uint64_t *uploaded) {
    if (same(&s->holds, want)) {
        return TF_OK;
    }
    s->holds = (piece){0};
    size_t block_bytes = 0;
    uint8_t *host = slot_prepare(stage, s, want, &block_bytes);
    if (host == NULL) {
        return tf_fail(TF_ERR_MEMORY, "no room to stage %lld rows of %s on %s", (long long)want->rows,
                       want->entry->tensor.name, ggml_backend_dev_name(stage->dev));
    }
    tf_planes planes = tf_residual_planes(&want->entry->tensor, 0);
    planes.bits = want->bits;
    uint16_t *half = s->halves != NULL ? (uint16_t *)(void *)(host + block_bytes) : NULL;
    conversion c = {.planes = &planes, .first = want->first, .rows = want->rows, .blocks = host, .half = half};
    tf_pool_run(pool, convert_job, &c);
    s->lane.busy = true;
    ggml_backend_tensor_set_async(s->lane.backend, s->blocks, host, 0, block_bytes);
    *uploaded += block_bytes;
    if (s->halves != NULL) {
        ggml_backend_tensor_set_async(s->lane.backend, s->halves, half, 0, ggml_nbytes(s->halves));
        *uploaded += ggml_nbytes(s->halves);
    }
    s->holds = *want;
    return TF_OK;
}

/* ---- multiplying ------------------------------------------------------------------------------ */

static struct ggml_tensor *placed(slot *s, struct ggml_tensor *t) { return tf_lane_place(&s->lane, t) ? t : NULL; }

/* The piece's product with x, in the slot's memory. NULL: no room. */
static struct ggml_tensor *product(slot *s, struct ggml_tensor *x) {
    struct ggml_context *ctx = s->lane.ctx;
    struct ggml_tensor *y = placed(s, ggml_mul_mat(ctx, s->blocks, x));
    if (y != NULL) {
        ggml_prec_set_acc(y, GGML_PREC_F32);
    }
    if (y != NULL && s->halves != NULL) {
        const int64_t blocks = x->ne[0] / TF_BLOCK, n = x->ne[1];
        struct ggml_tensor *sums = placed(s, ggml_sum_rows(ctx, ggml_reshape_3d(ctx, x, TF_BLOCK, blocks, n)));
        if (sums == NULL) {
            return NULL;
        }
        struct ggml_tensor *rest = placed(s, ggml_mul_mat(ctx, s->halves, ggml_reshape_2d(ctx, sums, blocks, n)));
        if (rest == NULL) {
            return NULL;
        }
        ggml_prec_set_acc(rest, GGML_PREC_F32);
        y = ggml_add_inplace(ctx, y, rest);
    }
    return y != NULL ? ggml_scale_inplace(ctx, y, 1.0f / 128.0f) : NULL;
}

/* Starts adding the product of what the slot holds to the node's rows. */
static tf_status launch(slot *s, const struct ggml_tensor *node) {
    const struct ggml_tensor *from = node->src[1];
    struct ggml_tensor *x = tf_lane_alias(&s->lane, from, from->ne[0], ggml_nrows(from));
    struct ggml_tensor *to = tf_lane_alias(&s->lane, node, node->ne[0], ggml_nrows(node));
    struct ggml_tensor *y = x != NULL && to != NULL ? product(s, x) : NULL;
    const piece held = s->holds;
    s->holds = (piece){0}; /* the lane's descriptions are used up */
    if (y == NULL) {
        return tf_fail(TF_ERR_MEMORY, "no room for %lld staged rows of %s", (long long)held.rows,
                       held.entry->tensor.name);
    }
    struct ggml_tensor *rows =
        ggml_view_2d(s->lane.ctx, to, held.rows, to->ne[1], to->nb[1], (size_t)held.first * sizeof(float));
    return tf_lane_start(&s->lane, ggml_add_inplace(s->lane.ctx, rows, y));
}

/* ---- public ----------------------------------------------------------------------------------- */

/* Rows of a piece of a matrix for n columns: as even as possible, and what they need fits a slot. 0: nothing fits. */
static int64_t piece_rows(const tf_stage *stage, const tf_entry *entry, int64_t n) {
    const int64_t blocks = entry->tensor.width / TF_BLOCK, rows = entry->tensor.rows;
    const int64_t a_row = blocks * (Q8_BYTES + HALF_BYTES) + 2 * n * (int64_t)sizeof(float);
    const int64_t most = ((int64_t)stage->bytes - SLACK - blocks * n * (int64_t)sizeof(float)) / a_row;
    const int64_t panels = most / TF_PANEL_ROWS, all = tf_panels(rows);
    if (panels < 1) {
        return 0;
    }
    const int64_t pieces = tf_ceil_div(all, panels);
    return tf_ceil_div(all, pieces) * TF_PANEL_ROWS;
}

bool tf_stage_can(const tf_stage *stage, const tf_entry *entry, const struct ggml_tensor *node) {
    const struct ggml_tensor *x = node->src[1];
    return node->op == GGML_OP_MUL_MAT && ggml_is_contiguous(x) && ggml_is_contiguous(node) &&
           tf_tensor_device(x) == stage->dev && tf_tensor_device(node) == stage->dev &&
           piece_rows(stage, entry, ggml_nrows(x)) > 0;
}

static piece piece_at(const tf_entry *entry, int64_t first, int64_t most, int32_t bits) {
    const int64_t left = entry->tensor.rows - first;
    return (piece){entry, first, left < most ? left : most, bits};
}

/* What a slot holds already, or else the one whose work was started first. */
static slot *choose(tf_stage *stage, const piece *want, const slot *latest) {
    for (int i = 0; i < LANES; i++) {
        if (same(&stage->slots[i].holds, want)) {
            return &stage->slots[i];
        }
    }
    return latest == &stage->slots[0] ? &stage->slots[1] : &stage->slots[0];
}

/* Begins with the matrix that will probably be next; a failure only means that it is not there. */
static void fill_ahead(tf_stage *stage, tf_pool *pool, const tf_entry *entry, int32_t bits, int64_t n,
                       const slot *latest, uint64_t *uploaded) {
    const int64_t next = stage->next[entry - stage->registry->entries];
    const tf_entry *guess = next >= 0 ? &stage->registry->entries[next] : NULL;
    const int64_t most = guess != NULL && guess != entry ? piece_rows(stage, guess, n) : 0;
    if (most > 0) {
        const piece want = piece_at(guess, 0, most, bits);
        fill(stage, choose(stage, &want, latest), pool, &want, uploaded);
    }
}

static void note_order(tf_stage *stage, const tf_entry *entry) {
    const int64_t index = entry - stage->registry->entries;
    if (stage->last >= 0) {
        stage->next[stage->last] = index;
    }
    stage->last = index;
}

tf_status tf_stage_run(tf_stage *stage, tf_pool *pool, const tf_entry *entry, int32_t bits,
                       const struct ggml_tensor *node, uint64_t *uploaded) {
    const int64_t n = ggml_nrows(node->src[1]), most = piece_rows(stage, entry, n);
    note_order(stage, entry);
    slot *latest = NULL;
    tf_status status = TF_OK;
    for (int64_t first = 0; status == TF_OK && first < entry->tensor.rows; first += most) {
        const piece want = piece_at(entry, first, most, bits);
        slot *s = choose(stage, &want, latest);
        status = fill(stage, s, pool, &want, uploaded);
        status = status == TF_OK ? launch(s, node) : status;
        latest = s;
    }
    if (status == TF_OK) {
        fill_ahead(stage, pool, entry, bits, n, latest, uploaded);
    }
    for (int i = 0; i < LANES; i++) {
        if (stage->slots[i].holds.entry == NULL) { /* else it only uploads what is to come */
            tf_lane_wait(&stage->slots[i].lane);
        }
    }
    return status;
}

/* Whether the device has all ops of a piece. */
static bool supported(slot *s, ggml_backend_dev_t dev) {
    const int64_t width = 256, rows = 32, n = 64;
    struct ggml_context *ctx = tf_lane_begin(&s->lane);
    s->blocks = ggml_new_tensor_2d(ctx, GGML_TYPE_Q8_0, width, rows);
    s->halves = ggml_new_tensor_2d(ctx, GGML_TYPE_F16, width / TF_BLOCK, rows);
    struct ggml_tensor *to = ggml_new_tensor_2d(ctx, GGML_TYPE_F32, 2 * rows, n);
    struct ggml_tensor *y = product(s, ggml_new_tensor_2d(ctx, GGML_TYPE_F32, width, n));
    if (y == NULL) {
        return false;
    }
    y = ggml_add_inplace(ctx, ggml_view_2d(ctx, to, rows, n, to->nb[1], 0), y);
    struct ggml_cgraph *graph = ggml_new_graph_custom(ctx, TF_ARENA_NODES, false);
    ggml_build_forward_expand(graph, y);
    bool all = true;
    for (int i = 0; i < ggml_graph_n_nodes(graph); i++) {
        all = all && ggml_backend_dev_supports_op(dev, ggml_graph_node(graph, i));
    }
    return all;
}

tf_stage *tf_stage_new(ggml_backend_dev_t dev, const tf_registry *registry, size_t bytes) {
    tf_stage *stage = calloc(1, sizeof *stage);
    if (stage == NULL) {
        return NULL;
    }
    *stage = (tf_stage){.dev = dev, .bytes = bytes / LANES, .registry = registry, .last = -1};
    stage->next = malloc(((size_t)registry->count + 1) * sizeof *stage->next);
    bool works = stage->next != NULL;
    for (int64_t i = 0; works && i < registry->count; i++) {
        stage->next[i] = -1;
    }
    for (int i = 0; works && i < LANES; i++) {
        slot *s = &stage->slots[i];
        works = tf_lane_open(&s->lane, dev) && tf_lane_reserve(&s->lane, stage->bytes) && supported(s, dev);
    }
    if (!works) {
        tf_stage_free(stage);
        return NULL;
    }
    return stage;
}

void tf_stage_free(tf_stage *stage) {
    for (int i = 0; stage != NULL && i < LANES; i++) {
        tf_lane_close(&stage->slots[i].lane);
        tf_pinned_free(&stage->slots[i].host);
    }
    free(stage != NULL ? stage->next : NULL);
    free(stage);
}
