/* The thread pool: every piece of work once, whoever comes; no thread left behind. */
#include <stdatomic.h>
#include <unistd.h>

#include "pool.h"
#include "test.h"

enum { PIECES = 37, MAX_THREADS = 8 };

typedef struct work {
    atomic_int next;
    atomic_int done[PIECES];
    atomic_int came[MAX_THREADS];
    int32_t threads;
} work;

static void take(void *argument, int32_t thread, int32_t threads) {
    work *w = argument;
    CHECK(threads == w->threads && thread >= 0 && thread < threads);
    atomic_fetch_add(&w->came[thread], 1);
    for (int piece; (piece = atomic_fetch_add(&w->next, 1)) < PIECES;) {
        atomic_fetch_add(&w->done[piece], 1);
    }
}

/* The work is freed at once, so that a sanitizer sees a thread that comes after run() has returned. */
static void run_once(tf_pool *pool) {
    work *w = calloc(1, sizeof *w);
    CHECK(w != NULL);
    w->threads = tf_pool_threads(pool);
    tf_pool_run(pool, take, w);
    for (int i = 0; i < PIECES; i++) {
        CHECK(atomic_load(&w->done[i]) == 1);
    }
    CHECK(atomic_load(&w->came[0]) == 1);
    for (int i = 0; i < MAX_THREADS; i++) {
        CHECK(atomic_load(&w->came[i]) <= 1);
    }
    free(w);
}

static void test_jobs(int32_t threads) {
    tf_pool *pool;
    CHECK(tf_pool_new(threads, &pool) == TF_OK);
    CHECK(tf_pool_threads(pool) == threads);
    for (int i = 0; i < 2000; i++) {
        run_once(pool);
    }
    for (int i = 0; i < 40; i++) { /* long enough apart for the workers to fall asleep */
        usleep(1000);
        run_once(pool);
    }
    tf_pool_free(pool);
}

/* The caller goes on and helps later; nobody is inside when finish() returns, and run() finishes what was started. */
static void test_start(int32_t threads) {
    tf_pool *pool;
    CHECK(tf_pool_new(threads, &pool) == TF_OK);
    tf_pool_finish(pool);
    for (int i = 0; i < 500; i++) {
        work *w = calloc(1, sizeof *w);
        CHECK(w != NULL);
        w->threads = threads;
        tf_pool_start(pool, take, w);
        take(w, 0, threads);
        if (i % 2 == 0) {
            tf_pool_finish(pool);
        } else {
            run_once(pool);
        }
        for (int k = 0; k < PIECES; k++) {
            CHECK(atomic_load(&w->done[k]) == 1);
        }
        free(w);
    }
    tf_pool_free(pool);
}

static atomic_int inside;

static void stay(void *argument, int32_t thread, int32_t threads) {
    (void)argument;
    (void)thread;
    (void)threads;
    atomic_store(&inside, 1);
    usleep(5000);
    atomic_store(&inside, 0);
}

static void look(void *argument, int32_t thread, int32_t threads) {
    (void)argument;
    (void)thread;
    (void)threads;
    CHECK(atomic_load(&inside) == 0);
}

/* A job waits for one that was started before. */
static void test_one_at_a_time(void) {
    tf_pool *pool;
    CHECK(tf_pool_new(2, &pool) == TF_OK);
    tf_pool_start(pool, stay, NULL);
    for (int i = 0; i < 10000 && atomic_load(&inside) == 0; i++) {
        usleep(100);
    }
    CHECK(atomic_load(&inside) == 1);
    tf_pool_run(pool, look, NULL);
    tf_pool_free(pool);
}

/* Waits, for a while, until every thread has come: one that sleeps must be woken up. */
static void gather(void *argument, int32_t thread, int32_t threads) {
    atomic_int *here = argument;
    (void)thread;
    atomic_fetch_add(here, 1);
    for (int i = 0; i < 10000 && atomic_load(here) < threads; i++) {
        usleep(1000);
    }
}

static void test_everybody_comes(int32_t threads) {
    tf_pool *pool;
    CHECK(tf_pool_new(threads, &pool) == TF_OK);
    for (int i = 0; i < 5; i++) {
        atomic_int here;
        atomic_init(&here, 0);
        usleep(5000);
        tf_pool_run(pool, gather, &here);
        CHECK(atomic_load(&here) == threads);
    }
    tf_pool_free(pool);
}

static void test_create_destroy(void) {
    for (int i = 0; i < 300; i++) {
        tf_pool *pool;
        CHECK(tf_pool_new(1 + i % MAX_THREADS, &pool) == TF_OK);
        for (int jobs = 0; jobs < i % 3; jobs++) {
            run_once(pool);
        }
        tf_pool_free(pool);
    }
    tf_pool_free(NULL);
}

static void test_refused(void) {
    static const int32_t threads[] = {INT32_MIN, -1, 0, 1025, INT32_MAX};
    for (size_t i = 0; i < sizeof threads / sizeof *threads; i++) {
        tf_pool *pool;
        CHECK(tf_pool_new(threads[i], &pool) == TF_ERR_ARGUMENT);
        CHECK(pool == NULL);
    }
}

int main(void) {
    for (int32_t threads = 1; threads <= MAX_THREADS; threads++) {
        test_jobs(threads);
        test_everybody_comes(threads);
        test_start(threads);
    }
    test_one_at_a_time();
    test_create_destroy();
    test_refused();
    return 0;
}
