/* A few threads that run one function together. */
#pragma once

#include "twofold.h"

typedef struct tf_pool tf_pool;

/* A turn of a waiting loop: a pause at first, then the CPU is given to others, on a busy machine to the
 * thread that is waited for. */
void tf_relax(int spins);

/* What every thread that joins in is given: its index among `threads`. A job must come out right
 * however few of them come, for run() does not wait for a thread that has not woken up. */
typedef void (*tf_job)(void *argument, int32_t thread, int32_t threads);

tf_status tf_pool_new(int32_t threads, tf_pool **out);
void tf_pool_free(tf_pool *pool);
int32_t tf_pool_threads(const tf_pool *pool);
/* The caller is thread 0. Returns when every thread that joined has returned. */
void tf_pool_run(tf_pool *pool, tf_job job, void *argument);
/* The other threads begin with a job, the caller goes on. Any later call waits for it first. */
void tf_pool_start(tf_pool *pool, tf_job job, void *argument);
/* Lets nobody else join that job and returns when those inside have; nothing to do is fine. */
void tf_pool_finish(tf_pool *pool);
