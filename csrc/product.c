/* Every thread owns a contiguous run of panels of every product, so that it streams memory of its own,
 * and when it is done takes what the others have left. The width is never split: a row's sum is made
 * by one thread, so results do not depend on the number of threads. */
#include "product.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

enum { TAKE = 4 }; /* panels at a time */

typedef struct share {
    _Atomic int64_t next;
    int64_t end;
    char padding[64 - 2 * sizeof(int64_t)]; /* a cache line each */
} share;

typedef struct task {
    const tf_kernel *kernel;
    const tf_product *products;
    int64_t n;
    int32_t threads;
    share *shares; /* [n][threads] */
} task;

static void add_tile(const tf_product *product, int64_t panel, int64_t first_column, int32_t columns,
                     const float *tile) {
    const int64_t first = panel * TF_PANEL_ROWS;
    const int64_t left = product->planes.rows - first;
    const int64_t rows = left < TF_PANEL_ROWS ? left : TF_PANEL_ROWS;
    for (int32_t j = 0; j < columns; j++) {
        float *out = product->out[first_column + j] + first;
        for (int64_t row = 0; row < rows; row++) {
            out[row] += tile[j * TF_PANEL_ROWS + row];
        }
    }
}

static void run_panel(const tf_kernel *kernel, const tf_product *product, int64_t panel) {
    float tile[TF_MAX_COLUMNS * TF_PANEL_ROWS];
    for (int64_t block = 0; block < tf_activations_blocks(product->x); block++) {
        const tf_columns x = tf_activations_block(product->x, block);
        kernel->run(&product->planes, panel, &x, tile);
        add_tile(product, panel, block * product->x->columns, x.n, tile);
    }
}

static void drain(const task *task, int64_t index, share *from) {
    for (;;) {
        const int64_t first = atomic_fetch_add_explicit(&from->next, TAKE, memory_order_relaxed);
        if (first >= from->end) {
            return;
        }
        for (int64_t panel = first; panel < first + TAKE && panel < from->end; panel++) {
            run_panel(task->kernel, &task->products[index], panel);
        }
    }
}

static void job(void *argument, int32_t thread, int32_t threads) {
    const task *task = argument;
    for (int64_t i = 0; i < task->n; i++) {
        drain(task, i, &task->shares[i * threads + thread]);
    }
    for (int64_t i = 0; i < task->n; i++) {
        for (int32_t k = 1; k < threads; k++) {
            drain(task, i, &task->shares[i * threads + (thread + k) % threads]);
        }
    }
}

tf_status tf_products_run(tf_pool *pool, const tf_kernel *kernel, const tf_product *products, int64_t n) {
    const int32_t threads = tf_pool_threads(pool);
    share *shares = aligned_alloc(64, sizeof *shares * (size_t)(n * threads));
    if (shares == NULL) {
        return tf_fail(TF_ERR_MEMORY, "out of memory");
    }
    for (int64_t i = 0; i < n; i++) {
        const int64_t panels = tf_panels(products[i].planes.rows);
        for (int32_t t = 0; t < threads; t++) {
            atomic_init(&shares[i * threads + t].next, panels * t / threads);
            shares[i * threads + t].end = panels * (t + 1) / threads;
        }
    }
    task task = {kernel, products, n, threads, shares};
    tf_pool_run(pool, job, &task);
    free(shares);
    return TF_OK;
}

uint64_t tf_product_bytes(const tf_planes *planes) {
    uint64_t bytes = 0;
    for (int32_t plane = 4; plane <= planes->bits; plane += 2) {
        bytes += (uint64_t)tf_plane_bytes(planes->rows, planes->width, planes->group, plane);
    }
    return bytes + (uint64_t)tf_plane_bytes(planes->rows, planes->width, planes->group, 0);
}

static tf_status multiply(tf_pool *pool, const tf_planes *planes, const tf_kernel *kernel, const float *x, int64_t n,
                          float *out) {
    tf_activations a = {0};
    float **columns = malloc(sizeof *columns * (size_t)n);
    tf_status status = tf_activations_reserve(&a, n, planes->width, planes->group, planes->bits, kernel->max_columns);
    if (status == TF_OK && columns != NULL) {
        for (int64_t i = 0; i < tf_activations_blocks(&a); i++) {
            tf_activations_quantize(&a, i, x + i * a.columns * planes->width, planes->width);
        }
        for (int64_t j = 0; j < n; j++) {
            columns[j] = out + j * planes->rows;
        }
        const tf_product product = {*planes, &a, columns};
        status = tf_products_run(pool, kernel, &product, 1);
    } else if (status == TF_OK) {
        status = tf_fail(TF_ERR_MEMORY, "out of memory");
    }
    free(columns);
    tf_activations_free(&a);
    return status;
}

tf_status tf_matmul(const tf_planes *planes, const char *kernel_name, int32_t threads, const float *x, int64_t n,
                    float *out) {
    const tf_kernel *kernel = tf_kernel_find(kernel_name);
    if (kernel == NULL) {
        return TF_ERR_ARGUMENT;
    }
    tf_status status = tf_check_shape(planes->rows, planes->width, planes->group, planes->bits);
    if (status != TF_OK) {
        return status;
    }
    if (n < 1) {
        return tf_fail(TF_ERR_ARGUMENT, "%lld columns", (long long)n);
    }
    tf_pool *pool;
    status = tf_pool_new(threads, &pool);
    if (status == TF_OK) {
        status = multiply(pool, planes, kernel, x, n, out);
        tf_pool_free(pool);
    }
    return status;
}
