/* The thread pool. Workers spin for a moment after a job, because the next one of the same pass comes
 * within microseconds, then sleep. On a busy machine a worker may wake late: the caller shuts the job
 * when no work is left and waits only for those inside. */
#include "pool.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>

enum { SPINS = 4000, CLOSED = 1 << 15, ACTIVE = CLOSED - 1, GENERATION_SHIFT = 16 };

struct tf_pool {
    int32_t threads;
    pthread_t *workers;
    int32_t started;
    pthread_mutex_t mutex;
    pthread_cond_t wake;
    atomic_int sleepers;
    atomic_bool quit;
    /* generation << 16 | closed | threads inside */
    _Atomic uint64_t state;
    tf_job job;
    void *argument;
};

typedef struct worker_start {
    tf_pool *pool;
    int32_t index;
} worker_start;

void tf_relax(int spins) {
    if (spins >= SPINS) {
        sched_yield();
        return;
    }
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static bool news(tf_pool *pool, uint64_t seen) {
    return atomic_load(&pool->state) >> GENERATION_SHIFT != seen || atomic_load(&pool->quit);
}

/* Returns when there is a generation after `seen`, or the pool quits. */
static void wait_for_news(tf_pool *pool, uint64_t seen) {
    for (int i = 0; i < SPINS; i++) {
        if (news(pool, seen)) {
            return;
        }
        tf_relax(i);
    }
    pthread_mutex_lock(&pool->mutex);
    atomic_fetch_add(&pool->sleepers, 1);
    while (!news(pool, seen)) {
        pthread_cond_wait(&pool->wake, &pool->mutex);
    }
    atomic_fetch_sub(&pool->sleepers, 1);
    pthread_mutex_unlock(&pool->mutex);
}

/* Counts this thread in, unless the job is over. */
static bool join(tf_pool *pool, uint64_t *seen) {
    uint64_t state = atomic_load(&pool->state);
    do {
        *seen = state >> GENERATION_SHIFT;
        if (state & CLOSED) {
            return false;
        }
    } while (!atomic_compare_exchange_weak(&pool->state, &state, state + 1));
    return true;
}

static void *work(void *argument) {
    const worker_start start = *(worker_start *)argument;
    free(argument);
    tf_pool *pool = start.pool;
    uint64_t seen = 0;
    for (;;) {
        wait_for_news(pool, seen);
        if (atomic_load(&pool->quit)) {
            return NULL;
        }
        if (join(pool, &seen)) {
            pool->job(pool->argument, start.index, pool->threads);
            atomic_fetch_sub(&pool->state, 1);
        }
    }
}

tf_status tf_pool_new(int32_t threads, tf_pool **out) {
    *out = NULL;
    if (threads < 1 || threads > 1024) {
        return tf_fail(TF_ERR_ARGUMENT, "%d threads: 1 to 1024 are allowed", threads);
    }
    tf_pool *pool = calloc(1, sizeof *pool);
    pthread_t *workers = calloc((size_t)threads, sizeof *workers);
    if (pool == NULL || workers == NULL) {
        free(pool);
        free(workers);
        return tf_fail(TF_ERR_MEMORY, "out of memory");
    }
    pool->threads = threads;
    pool->workers = workers;
    pthread_mutex_init(&pool->mutex, NULL);
    pthread_cond_init(&pool->wake, NULL);
    atomic_init(&pool->state, CLOSED);
    for (int32_t i = 1; i < threads; i++) {
        worker_start *start = malloc(sizeof *start);
        if (start != NULL) {
            *start = (worker_start){pool, i};
        }
        if (start == NULL || pthread_create(&workers[pool->started], NULL, work, start) != 0) {
            free(start);
            tf_pool_free(pool);
            return tf_fail(TF_ERR_MEMORY, "cannot start thread %d of %d", i + 1, threads);
        }
        pool->started++;
    }
    *out = pool;
    return TF_OK;
}

static void wake_sleepers(tf_pool *pool) {
    if (atomic_load(&pool->sleepers) > 0) {
        pthread_mutex_lock(&pool->mutex);
        pthread_cond_broadcast(&pool->wake);
        pthread_mutex_unlock(&pool->mutex);
    }
}

void tf_pool_free(tf_pool *pool) {
    if (pool == NULL) {
        return;
    }
    pthread_mutex_lock(&pool->mutex);
    atomic_store(&pool->quit, true);
    pthread_cond_broadcast(&pool->wake);
    pthread_mutex_unlock(&pool->mutex);
    for (int32_t i = 0; i < pool->started; i++) {
        pthread_join(pool->workers[i], NULL);
    }
    pthread_cond_destroy(&pool->wake);
    pthread_mutex_destroy(&pool->mutex);
    free(pool->workers);
    free(pool);
}

int32_t tf_pool_threads(const tf_pool *pool) { return pool->threads; }

void tf_pool_start(tf_pool *pool, tf_job job, void *argument) {
    tf_pool_finish(pool);
    pool->job = job;
    pool->argument = argument;
    const uint64_t generation = (atomic_load(&pool->state) >> GENERATION_SHIFT) + 1;
    atomic_store(&pool->state, generation << GENERATION_SHIFT);
    wake_sleepers(pool);
}

void tf_pool_finish(tf_pool *pool) {
    atomic_fetch_or(&pool->state, CLOSED);
    for (int spins = 0; atomic_load(&pool->state) & ACTIVE; spins++) {
        tf_relax(spins);
    }
}

void tf_pool_run(tf_pool *pool, tf_job job, void *argument) {
    if (pool->threads == 1) {
        job(argument, 0, 1);
        return;
    }
    tf_pool_start(pool, job, argument);
    job(argument, 0, pool->threads);
    tf_pool_finish(pool);
}
