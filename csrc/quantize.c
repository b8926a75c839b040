/* Activations in 8 bits, one scale for 32 inputs, and where it pays in 16.
 *
 * The rounding error of a block grows with its scale, so a few blocks with outliers make most of the
 * error. Blocks whose squared scale is above the column's mean times LOW_ABOVE carry their next 8 bits as
 * well, for the base, which is most of the weight; the residual is small and does with 8 bits.
 *
 * Threads share the work in parts of the width, first to round and then, when all scales are known, to settle which
 * blocks carry more. Nothing depends on the parts.
 *
 * Compiled without contraction (CMakeLists.txt), so that every build rounds alike. */
#include "quantize.h"

#include <string.h>

/* 0 would keep all blocks, 1 costs a quarter more time for 8 columns; 2 costs 13 % there, next to nothing up
 * to 5, and takes nearly three quarters of the KL divergence away (docs/log.md). */
#define LOW_ABOVE 2.0f

enum { PART = 4096 }; /* activations of a part, about: a microsecond's work */

/* A part of the width of a block of columns. */
typedef struct part {
    tf_columns to;
    const float *x[TF_MAX_COLUMNS];
    int64_t block, end; /* of 32 inputs */
} part;

/* Parts of a block of columns. */
static int64_t parts_across(const tf_activations *a) {
    const int64_t most = a->starts != NULL ? 1 : a->columns, columns = a->n < most ? a->n : most;
    const int64_t groups = tf_groups(a->width, a->group), parts = tf_ceil_div(a->width * columns, PART);
    return parts < groups ? parts : groups;
}

static int64_t count_parts(const tf_activations *a) { return parts_across(a) * tf_activations_blocks(a); }

static part part_of(const tf_activations *a, int64_t index, const tf_source *x) {
    const int64_t across = parts_across(a), columns = index / across, at = index % across;
    const int64_t groups = tf_groups(a->width, a->group), blocks = a->width / TF_BLOCK;
    const int64_t end = groups * (at + 1) / across * (a->group / TF_BLOCK);
    part p = {.to = tf_activations_block(a, columns),
              .block = groups * at / across * (a->group / TF_BLOCK),
              .end = end < blocks ? end : blocks};
    for (int64_t j = 0; j < p.to.n; j++) {
        p.x[j] = x->column(x->of, tf_activations_start(a, columns) + j);
    }
    return p;
}

/* codes: int8 [32], or NULL for zeros. */
static void put_codes(int8_t *to, int64_t n, const int8_t *codes) {
    for (int64_t i = 0; i < TF_BLOCK / 4; i++) {
        int32_t four = 0;
        if (codes != NULL) {
            memcpy(&four, codes + i * 4, sizeof four);
        }
        memcpy(to + i * n * 4, &four, sizeof four);
    }
}

/* Rounds a block of 32 inputs of column j; returns what it adds to the offset. */
static float round_block(const tf_kernel *kernel, const part *p, int64_t b, int64_t j, float code_offset) {
    const tf_columns *to = &p->to;
    int8_t high[TF_BLOCK], low[TF_BLOCK];
    int32_t sums[2];
    const float scale = kernel->quantize(p->x[j] + b * TF_BLOCK, high, low, sums) * (256.0f / 128.0f);
    const int32_t sum = (int16_t)sums[0] + (sums[0] >> 16);
    to->scale[b * to->n + j] = scale;
    to->sums[b * to->n + j] = sums[0];
    put_codes(to->q + (b * (TF_BLOCK / 4) * to->n + j) * 4, to->n, high);
    return code_offset * (float)sum * scale;
}

static void round_part(const tf_activations *a, const tf_kernel *kernel, const part *p) {
    const int64_t n = p->to.n, group_blocks = a->group / TF_BLOCK;
    const float code_offset = tf_code_offset(a->bits);
    for (int64_t b = p->block, g = b / group_blocks; b < p->end; g++) {
        const int64_t end = b + group_blocks < p->end ? b + group_blocks : p->end;
        float offsets[TF_MAX_COLUMNS] = {0};
        for (; b < end; b++) {
            for (int64_t j = 0; j < n; j++) {
                offsets[j] += round_block(kernel, p, b, j, code_offset);
            }
        }
        memcpy(p->to.offset + g * n, offsets, sizeof *offsets * (size_t)n);
    }
}

/* The squared scale above which a block of each column carries low codes. */
static void low_limits(const tf_activations *a, const tf_columns *to, float *limits) {
    const int64_t n = to->n, blocks = a->width / TF_BLOCK;
    float squares[TF_MAX_COLUMNS] = {0};
    for (int64_t b = 0; b < blocks; b++) {
        for (int64_t j = 0; j < n; j++) {
            squares[j] += to->scale[b * n + j] * to->scale[b * n + j];
        }
    }
    for (int64_t j = 0; j < n; j++) {
        limits[j] = LOW_ABOVE * squares[j] / (float)blocks;
    }
}

/* Low codes of a block, of which at least one column has some: zeros of the others. */
static void put_low(const tf_kernel *kernel, const part *p, int64_t b) {
    const int64_t n = p->to.n;
    for (int64_t j = 0; j < n; j++) {
        int8_t high[TF_BLOCK], low[TF_BLOCK];
        int32_t sums[2] = {0};
        const bool keep = p->to.flags[b * TF_MAX_COLUMNS + j];
        if (keep) {
            kernel->quantize(p->x[j] + b * TF_BLOCK, high, low, sums);
        }
        p->to.low_sums[b * n + j] = sums[1];
        put_codes(p->to.low + (b * (TF_BLOCK / 4) * n + j) * 4, n, keep ? low : NULL);
    }
}

static void settle_part(const tf_activations *a, const tf_kernel *kernel, const part *p) {
    const tf_columns *to = &p->to;
    const int64_t n = to->n;
    float limits[TF_MAX_COLUMNS];
    low_limits(a, to, limits);
    for (int64_t b = p->block; b < p->end; b++) {
        bool any = false;
        for (int64_t j = 0; j < n; j++) {
            const float scale = to->scale[b * n + j];
            const bool keep = scale * scale > limits[j];
            to->flags[b * TF_MAX_COLUMNS + j] = keep;
            any |= keep;
        }
        if (any) {
            put_low(kernel, p, b);
        }
        for (int64_t j = 0; j < n; j++) {
            const int32_t high = to->sums[b * n + j];
            const int32_t low = to->flags[b * TF_MAX_COLUMNS + j] ? to->low_sums[b * n + j] : 0;
            const float sum = (float)(256 * ((int16_t)high + (high >> 16)) + (int16_t)low + (low >> 16));
            to->base_offset[b * n + j] = -128.0f * sum * (to->scale[b * n + j] * TF_LOW);
        }
    }
}

void tf_quantize_together(tf_quantizing *shared, const tf_activations *a, const tf_kernel *kernel, tf_source x) {
    const int64_t parts = count_parts(a);
    for (int phase = 0; phase < (a->for_base ? 2 : 1); phase++) {
        for (int64_t i; (i = atomic_fetch_add(&shared->next[phase], 1)) < parts;) {
            const part p = part_of(a, i, &x);
            (phase == 0 ? round_part : settle_part)(a, kernel, &p);
            atomic_fetch_add(&shared->done[phase], 1);
        }
        for (int spins = 0; atomic_load(&shared->done[phase]) < parts; spins++) {
            tf_relax(spins);
        }
    }
}

typedef struct task {
    tf_quantizing shared;
    const tf_activations *a;
    const tf_kernel *kernel;
    const float *x;
} task;

static const float *dense_column(const void *of, int64_t j) {
    const task *task = of;
    return task->x + j * task->a->width;
}

static void job(void *argument, int32_t thread, int32_t threads) {
    task *task = argument;
    (void)thread;
    (void)threads;
    tf_quantize_together(&task->shared, task->a, task->kernel, (tf_source){dense_column, task});
}

void tf_quantize_columns(tf_pool *pool, const tf_kernel *kernel, const tf_activations *a, const float *x) {
    task task = {.a = a, .kernel = kernel, .x = x};
    if (count_parts(a) == 1) {
        job(&task, 0, 1);
    } else {
        tf_pool_run(pool, job, &task);
    }
}
