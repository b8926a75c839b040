/* Every thread owns a contiguous run of panels of every product, so that it streams memory of its own,
 * and when it is done takes what the others have left. The width is never split: a row's sum is made
 * by one thread, so results do not depend on the number of threads. */
#include "product.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

enum { TAKE = 4 }; /* panels at a time */

static int64_t product_rows(const tf_product *product) {
    return product->base != NULL ? product->base->rows : product->residual.rows;
}

static void store_tile(const tf_product *product, int64_t panel, int64_t first_column, int32_t columns,
                       const float *tile) {
    const int64_t first = panel * TF_PANEL_ROWS, left = product_rows(product) - first;
    const int64_t rows = left < TF_PANEL_ROWS ? left : TF_PANEL_ROWS;
    for (int32_t j = 0; j < columns; j++) {
        const int64_t column = first_column + j;
        float *out = product->scatter != NULL ? product->scatter[column] : product->out + column * product->stride;
        for (int64_t row = 0; row < rows; row++) {
            out[first + row] = tile[j * TF_PANEL_ROWS + row] + (product->add ? out[first + row] : 0.0f);
        }
    }
}

static void base_tile(const tf_kernel *kernel, const tf_base *base, int64_t panel, tf_columns x, float *tile) {
    if (base->supers != NULL) {
        kernel->run_supers(base, panel, &x, tile);
        return;
    }
    x.offset = x.base_offset;
    kernel->run(&base->planes, panel, &x, tile);
}

static void run_panel(const tf_kernel *kernel, const tf_product *product, int64_t panel) {
    _Alignas(64) float tile[TF_MAX_COLUMNS * TF_PANEL_ROWS], second[TF_MAX_COLUMNS * TF_PANEL_ROWS];
    const bool both = product->base != NULL && product->has_residual;
    for (int64_t block = 0; block < tf_activations_blocks(product->x); block++) {
        tf_columns x = tf_activations_block(product->x, block);
        if (product->base != NULL) {
            base_tile(kernel, product->base, panel, x, tile);
        }
        if (product->has_residual) {
            x.flags = NULL; /* the residual is small: 8 bits do */
            kernel->run(&product->residual, panel, &x, both ? second : tile);
        }
        for (int32_t i = 0; both && i < x.n * TF_PANEL_ROWS; i++) {
            tile[i] += second[i];
        }
        store_tile(product, panel, block * product->x->columns, x.n, tile);
    }
}

void tf_shares_init(tf_share *shares, int32_t count, const tf_product *product) {
    const int64_t panels = tf_panels(product_rows(product));
    for (int32_t t = 0; t < count; t++) {
        atomic_init(&shares[t].next, panels * t / count);
        shares[t].end = panels * (t + 1) / count;
    }
}

static void drain(tf_share *from, const tf_kernel *kernel, const tf_product *product) {
    for (;;) {
        const int64_t first = atomic_fetch_add_explicit(&from->next, TAKE, memory_order_relaxed);
        for (int64_t panel = first; panel < first + TAKE && panel < from->end; panel++) {
            run_panel(kernel, product, panel);
        }
        if (first + TAKE >= from->end) {
            return;
        }
    }
}

void tf_shares_run(tf_share *shares, int32_t count, int32_t own, const tf_kernel *kernel, const tf_product *product) {
    for (int32_t k = 0; k < count; k++) {
        drain(&shares[(own + k) % count], kernel, product);
    }
}

typedef struct task {
    const tf_kernel *kernel;
    const tf_product *products;
    int64_t n;
    tf_share *shares; /* [n][threads] */
} task;

static void job(void *argument, int32_t thread, int32_t threads) {
    const task *task = argument;
    for (int64_t i = 0; i < task->n; i++) {
        drain(&task->shares[i * threads + thread], task->kernel, &task->products[i]);
    }
    for (int64_t i = 0; i < task->n; i++) {
        tf_shares_run(&task->shares[i * threads], threads, thread, task->kernel, &task->products[i]);
    }
}

typedef struct columns_task {
    const tf_kernel *kernel;
    const tf_activations *a;
    const float *x;
    _Atomic int64_t next_block; /* neighbouring columns share cache lines, so one thread does a whole block */
} columns_task;

static void columns_job(void *argument, int32_t thread, int32_t threads) {
    columns_task *task = argument;
    (void)thread;
    (void)threads;
    const tf_activations *a = task->a;
    for (int64_t b; (b = atomic_fetch_add(&task->next_block, 1)) < tf_activations_blocks(a);) {
        for (int64_t j = b * a->columns; j < (b + 1) * a->columns && j < a->n; j++) {
            tf_activations_quantize(a, task->kernel, j, task->x + j * a->width);
        }
    }
}

void tf_quantize_columns(tf_pool *pool, const tf_kernel *kernel, const tf_activations *a, const float *x) {
    columns_task task = {.kernel = kernel, .a = a, .x = x};
    if (tf_activations_blocks(a) == 1) {
        columns_job(&task, 0, 1);
    } else {
        tf_pool_run(pool, columns_job, &task);
    }
}

tf_status tf_products_run(tf_pool *pool, const tf_kernel *kernel, const tf_product *products, int64_t n) {
    const int32_t threads = tf_pool_threads(pool);
    tf_share *shares = aligned_alloc(64, sizeof *shares * (size_t)(n * threads));
    if (shares == NULL) {
        return tf_fail(TF_ERR_MEMORY, "out of memory");
    }
    for (int64_t i = 0; i < n; i++) {
        tf_shares_init(&shares[i * threads], threads, &products[i]);
    }
    task task = {kernel, products, n, shares};
    tf_pool_run(pool, job, &task);
    free(shares);
    return TF_OK;
}

uint64_t tf_residual_bytes_read(const tf_planes *planes) {
    uint64_t bytes = 0;
    for (int32_t plane = 4; plane <= planes->bits; plane += 2) {
        bytes += (uint64_t)tf_plane_bytes(planes->rows, planes->width, planes->group, plane);
    }
    return bytes + (uint64_t)tf_plane_bytes(planes->rows, planes->width, planes->group, 0);
}

static tf_status multiply(tf_pool *pool, tf_product *product, const tf_kernel *kernel, const float *x, int64_t n,
                          int64_t width) {
    tf_activations a = {0};
    const tf_planes *r = &product->residual;
    tf_activations_shape(&a, n, width, product->has_residual ? r->group : 32, product->has_residual ? r->bits : 8,
                         kernel->max_columns);
    tf_status status = tf_activations_reserve(&a);
    if (status == TF_OK) {
        tf_quantize_columns(pool, kernel, &a, x);
        product->x = &a;
        status = tf_products_run(pool, kernel, product, 1);
    }
    tf_activations_free(&a);
    return status;
}

tf_status tf_matmul(const tf_planes *planes, const tf_base_data *base, const char *kernel_name, int32_t threads,
                    const float *x, int64_t n, float *out) {
    const tf_kernel *kernel = tf_kernel_find(kernel_name);
    if (kernel == NULL) {
        return TF_ERR_ARGUMENT;
    }
    if ((planes == NULL && base == NULL) || n < 1) {
        return tf_fail(TF_ERR_ARGUMENT, "a residual or a base, and columns, are needed");
    }
    const int64_t rows = planes != NULL ? planes->rows : base->rows;
    const int64_t width = planes != NULL ? planes->width : base->width;
    tf_status status = planes != NULL ? tf_check_planes(planes) : TF_OK;
    tf_base panels = {.type = -1};
    tf_pool *pool = NULL;
    status = status != TF_OK ? status : tf_pool_new(threads, &pool);
    if (status == TF_OK && base != NULL) {
        status = base->rows == rows && base->width == width
                     ? tf_base_build(&panels, base->type, rows, width, base->data, pool)
                     : tf_fail(TF_ERR_ARGUMENT, "base and residual have different shapes");
    }
    if (status == TF_OK) {
        tf_product product = {.base = base != NULL ? &panels : NULL, .out = out, .stride = rows};
        product.has_residual = planes != NULL;
        product.residual = planes != NULL ? *planes : (tf_planes){0};
        status = multiply(pool, &product, kernel, x, n, width);
    }
    tf_pool_free(pool);
    tf_base_free(&panels);
    return status;
}
