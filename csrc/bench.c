/* What scripts/bench_kernels.py times: products over matrices that take turns, so that none is found in a
 * cache, the bandwidth of plain reads, and the peak rate of byte dot products. */
#include <stdlib.h>
#include <string.h>

#include "engine_state.h"

/* Matrices that take turns; either part may be missing. */
typedef struct bench_matrices {
    const tf_planes *residuals;
    tf_base *bases;
    int32_t count;
    int64_t rows, width;
} bench_matrices;

static tf_status check_shapes(const bench_matrices *m, const tf_base_data *bases) {
    for (int32_t i = 0; i < m->count; i++) {
        const tf_status status = m->residuals != NULL ? tf_check_planes(&m->residuals[i]) : TF_OK;
        if (status != TF_OK) {
            return status;
        }
        if ((m->residuals != NULL && (m->residuals[i].rows != m->rows || m->residuals[i].width != m->width)) ||
            (bases != NULL && (bases[i].rows != m->rows || bases[i].width != m->width))) {
            return tf_fail(TF_ERR_ARGUMENT, "the matrices have different shapes");
        }
    }
    return TF_OK;
}

static tf_status build_bases(bench_matrices *m, const tf_base_data *data, tf_pool *pool) {
    m->bases = calloc((size_t)m->count, sizeof *m->bases);
    tf_status status = m->bases != NULL ? TF_OK : tf_fail(TF_ERR_MEMORY, "no memory for %d bases", m->count);
    for (int32_t i = 0; i < m->count && status == TF_OK; i++) {
        status = tf_base_build(&m->bases[i], data[i].type, m->rows, m->width, data[i].data, pool);
    }
    return status;
}

static void free_bases(bench_matrices *m) {
    for (int32_t i = 0; i < m->count && m->bases != NULL; i++) {
        tf_base_free(&m->bases[i]);
    }
    free(m->bases);
}

static tf_status bench_product(const bench_matrices *m, const tf_kernel *kernel, tf_pool *pool, const float *x,
                               int64_t n, float *out, int32_t repeats, double *seconds) {
    tf_activations a = {0};
    const tf_planes *r = m->residuals;
    tf_activations_shape(&a, n, m->width, r != NULL ? r->group : 32, r != NULL ? r->bits : 8, kernel->max_columns,
                         m->bases != NULL);
    tf_status status = tf_activations_reserve(&a);
    for (int32_t at = 0; at < repeats && status == TF_OK; at++) {
        const double start = tf_now();
        tf_quantize_columns(pool, kernel, &a, x);
        const tf_product product = {.has_residual = r != NULL,
                                    .residual = r != NULL ? r[at % m->count] : (tf_planes){0},
                                    .base = m->bases != NULL ? &m->bases[at % m->count] : NULL,
                                    .x = &a,
                                    .out = out,
                                    .stride = m->rows};
        status = tf_products_run(pool, kernel, &product, 1);
        seconds[at] = tf_now() - start;
    }
    tf_activations_free(&a);
    return status;
}

tf_status tf_bench_matmul(const tf_planes *residuals, const tf_base_data *bases, int32_t count, const char *kernel_name,
                          int32_t threads, const float *x, int64_t n, float *out, int32_t repeats, double *seconds) {
    const tf_kernel *kernel = tf_kernel_find(kernel_name);
    if (kernel == NULL) {
        return TF_ERR_ARGUMENT;
    }
    if ((residuals == NULL && bases == NULL) || count < 1 || n < 1 || repeats < 1) {
        return tf_fail(TF_ERR_ARGUMENT, "matrices, columns and repeats are needed");
    }
    bench_matrices m = {.residuals = residuals,
                        .count = count,
                        .rows = residuals != NULL ? residuals->rows : bases->rows,
                        .width = residuals != NULL ? residuals->width : bases->width};
    tf_pool *pool = NULL;
    tf_status status = check_shapes(&m, bases);
    status = status != TF_OK ? status : tf_pool_new(threads, &pool);
    if (status == TF_OK && bases != NULL) {
        status = build_bases(&m, bases, pool);
    }
    if (status == TF_OK) {
        status = bench_product(&m, kernel, pool, x, n, out, repeats, seconds);
    }
    free_bases(&m);
    tf_pool_free(pool);
    return status;
}

typedef struct read_task {
    const uint64_t *words;
    size_t count;
    _Atomic size_t next;
    _Atomic uint64_t sum;
} read_task;

static void read_job(void *argument, int32_t thread, int32_t threads) {
    enum { STEP = 1 << 16, AHEAD = 768 };
    read_task *task = argument;
    uint64_t sums[8] = {0};
    (void)thread;
    (void)threads;
    for (size_t first; (first = atomic_fetch_add(&task->next, STEP)) < task->count;) {
        const size_t end = first + STEP < task->count ? first + STEP : task->count;
        for (size_t i = first; i + 8 <= end; i += 8) {
            __builtin_prefetch(task->words + i + AHEAD); /* as the kernels do: 20 % more than without */
            for (int k = 0; k < 8; k++) {
                sums[k] += task->words[i + (size_t)k];
            }
        }
    }
    for (int k = 1; k < 8; k++) {
        sums[0] += sums[k];
    }
    atomic_fetch_add(&task->sum, sums[0]);
}

tf_status tf_bench_read(const void *data, size_t bytes, int32_t threads, int32_t repeats, double *seconds) {
    tf_pool *pool;
    const tf_status status = tf_pool_new(threads, &pool);
    if (status != TF_OK) {
        return status;
    }
    for (int32_t r = 0; r < repeats; r++) {
        read_task task = {.words = data, .count = bytes / sizeof(uint64_t)};
        const double start = tf_now();
        tf_pool_run(pool, read_job, &task);
        seconds[r] = tf_now() - start;
    }
    tf_pool_free(pool);
    return TF_OK;
}

typedef struct peak_task {
    const tf_kernel *kernel;
    int64_t rounds;
    _Atomic int64_t operations;
} peak_task;

static void peak_job(void *argument, int32_t thread, int32_t threads) {
    peak_task *task = argument;
    (void)thread;
    (void)threads;
    atomic_fetch_add(&task->operations, task->kernel->peak(task->rounds));
}

tf_status tf_bench_peak(const char *kernel_name, int32_t threads, int64_t rounds, double *operations_a_second) {
    const tf_kernel *kernel = tf_kernel_find(kernel_name);
    if (kernel == NULL) {
        return TF_ERR_ARGUMENT;
    }
    if (kernel->peak == NULL) {
        return tf_fail(TF_ERR_UNSUPPORTED, "kernel %s has no peak to measure", kernel->name);
    }
    tf_pool *pool;
    const tf_status status = tf_pool_new(threads, &pool);
    if (status != TF_OK) {
        return status;
    }
    double best = 0.0;
    for (int r = 0; r < 5; r++) {
        peak_task task = {.kernel = kernel, .rounds = rounds};
        const double start = tf_now();
        tf_pool_run(pool, peak_job, &task);
        const double rate = (double)atomic_load(&task.operations) / (tf_now() - start);
        best = rate > best ? rate : best;
    }
    *operations_a_second = best;
    tf_pool_free(pool);
    return TF_OK;
}
