/* Every thread owns a contiguous run of panels of every product, so that it streams memory of its own,
 * and when it is done takes what the others have left. The width is never split: a row's sum is made
 * by one thread, so results do not depend on the number of threads. */
#include "product.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

enum { TAKE = 4 }; /* panels at a time */
enum { FEW = 5 };  /* columns, see fetched_beside() */

static int64_t product_rows(const tf_product *product) {
    return product->base != NULL ? product->base->rows : product->residual.rows;
}

/* Products of a few panels and columns: [panel][column][row]. */
typedef struct tiles {
    _Alignas(64) float at[TF_WIDE_PANELS][TF_WIDE_COLUMNS][TF_PANEL_ROWS];
} tiles;

static float *out_rows(const tf_product *product, int64_t panel, int64_t column) {
    float *out = product->scatter != NULL ? product->scatter[column] : product->out + column * product->stride;
    return out + panel * TF_PANEL_ROWS;
}

static void store_tiles(const tf_product *product, int64_t panel, int64_t first_column, int64_t columns,
                        float (*tile)[TF_PANEL_ROWS]) {
    const int64_t first = panel * TF_PANEL_ROWS, left = product_rows(product) - first;
    const int64_t rows = left < TF_PANEL_ROWS ? left : TF_PANEL_ROWS;
    for (int64_t j = 0; j < columns; j++) {
        const int64_t column = first_column + j;
        float *out = out_rows(product, panel, column);
        if (rows == TF_PANEL_ROWS && !product->add) {
            memcpy(out, tile[j], sizeof tile[j]);
            continue;
        }
        for (int64_t row = 0; row < rows; row++) {
            out[row] = tile[j][row] + (product->add ? out[row] : 0.0f);
        }
    }
}

/* Blocks of columns that are multiplied one after the other while the panels' codes are at hand. */
typedef struct columns {
    tf_columns blocks[TF_WIDE_COLUMNS];
    int32_t count;
    int64_t first, n; /* columns */
} columns;

static void columns_from(const tf_activations *x, int64_t block, int64_t end, columns *c) {
    c->first = tf_activations_start(x, block);
    c->n = c->count = 0;
    for (; block < end && c->n + x->columns <= TF_WIDE_COLUMNS; block++, c->count++) {
        c->blocks[c->count] = tf_activations_block(x, block);
        c->n += c->blocks[c->count].n;
    }
}

static void planes_tiles(const tf_kernel *kernel, const tf_planes *planes, int64_t panel, int64_t panels,
                         const columns *x, tiles *out) {
    if (panels == TF_WIDE_PANELS && kernel->run_wide != NULL && x->n >= kernel->wide_from[planes->bits > 4]) {
        kernel->run_wide(planes, panel, x->blocks, x->count, &out->at[0][0][0]);
        return;
    }
    for (int64_t i = 0; i < panels; i++) {
        for (int32_t b = 0; b < x->count; b++) {
            kernel->run(planes, panel + i, &x->blocks[b], out->at[i][b * kernel->max_columns]);
        }
    }
}

/* The residual's first plane is fetched beside few columns of a base: with them memory is what a product waits for, and
 * it would rest meanwhile. At 4 bits the residual is too small for that to gain. */
static const uint8_t *fetched_beside(const tf_product *product, int64_t panel, const columns *x) {
    const tf_planes *planes = &product->residual;
    const bool wanted = product->has_residual && planes->bits > 4 && x->n <= FEW;
    return wanted ? planes->plane4 + panel * planes->width * (TF_PANEL_ROWS / 2) : NULL;
}

static void base_tiles(const tf_kernel *kernel, const tf_product *product, int64_t panel, int64_t panels, columns *x,
                       tiles *out) {
    const tf_base *base = product->base;
    if (base->supers == NULL) {
        columns own = *x;
        for (int32_t b = 0; b < own.count; b++) {
            own.blocks[b].offset = own.blocks[b].base_offset;
        }
        planes_tiles(kernel, &base->planes, panel, panels, &own, out);
        return;
    }
    if (panels == TF_WIDE_PANELS && kernel->run_supers_wide != NULL && base->bits == 2 &&
        x->n >= kernel->supers_wide_from) {
        kernel->run_supers_wide(base, panel, x->blocks, x->count, &out->at[0][0][0]);
        return;
    }
    for (int64_t i = 0; i < panels; i++) {
        for (int32_t b = 0; b < x->count; b++) {
            x->blocks[b].next = fetched_beside(product, panel + i, x);
            kernel->run_supers(base, panel + i, &x->blocks[b], out->at[i][b * kernel->max_columns]);
        }
    }
}

static void run_columns(const tf_kernel *kernel, const tf_product *product, int64_t panel, int64_t panels, columns *x) {
    tiles base, residual;
    for (int64_t i = 0; i < panels; i++) {
        for (int64_t j = 0; j < x->n; j++) {
            __builtin_prefetch(out_rows(product, panel + i, x->first + j), 1);
        }
    }
    if (product->base != NULL) {
        base_tiles(kernel, product, panel, panels, x, &base);
    }
    if (product->has_residual) {
        for (int32_t b = 0; b < x->count; b++) {
            x->blocks[b].flags = NULL; /* the residual is small: 8 bits do */
        }
        planes_tiles(kernel, &product->residual, panel, panels, x, &residual);
    }
    const bool both = product->base != NULL && product->has_residual;
    for (int64_t i = 0; i < panels; i++) {
        float(*sum)[TF_PANEL_ROWS] = product->base != NULL ? base.at[i] : residual.at[i];
        for (int64_t j = 0; both && j < x->n; j++) {
            for (int row = 0; row < TF_PANEL_ROWS; row++) {
                sum[j][row] += residual.at[i][j][row];
            }
        }
        store_tiles(product, panel + i, x->first, x->n, sum);
    }
}

static void run_panels(const tf_kernel *kernel, const tf_product *product, int64_t panel, int64_t panels) {
    const int64_t blocks = product->blocks > 0 ? product->blocks : tf_activations_blocks(product->x);
    for (int64_t block = product->first_block, end = block + blocks; block < end;) {
        columns x;
        columns_from(product->x, block, end, &x);
        run_columns(kernel, product, panel, panels, &x);
        block += x.count;
    }
}

void tf_shares_init(tf_share *shares, int32_t count, const tf_product *product) {
    const int64_t panels = tf_panels(product_rows(product));
    for (int32_t t = 0; t < count; t++) {
        atomic_init(&shares[t].next, t > 0 ? shares[t - 1].end : 0);
        const int64_t end = panels * (t + 1) / count;
        shares[t].end = t + 1 < count ? end / TF_WIDE_PANELS * TF_WIDE_PANELS : end;
    }
}

static void drain(tf_share *from, const tf_kernel *kernel, const tf_product *product) {
    for (;;) {
        const int64_t first = atomic_fetch_add_explicit(&from->next, TAKE, memory_order_relaxed);
        const int64_t end = first + TAKE < from->end ? first + TAKE : from->end;
        for (int64_t panel = first; panel < end; panel += TF_WIDE_PANELS) {
            run_panels(kernel, product, panel, end - panel < TF_WIDE_PANELS ? end - panel : TF_WIDE_PANELS);
        }
        if (first + TAKE >= from->end) {
            return;
        }
    }
}

void tf_shares_run(tf_share *shares, int32_t count, int32_t own, const tf_kernel *kernel, const tf_product *products,
                   int64_t n) {
    for (int64_t i = 0; i < n; i++) {
        drain(&shares[i * count + own], kernel, &products[i]);
    }
    for (int64_t i = 0; i < n; i++) {
        for (int32_t k = 1; k < count; k++) {
            drain(&shares[i * count + (own + k) % count], kernel, &products[i]);
        }
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
    tf_shares_run(task->shares, threads, thread, task->kernel, task->products, task->n);
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
                         kernel->max_columns, product->base != NULL);
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
