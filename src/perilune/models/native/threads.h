/* A pool of threads that run one function together and meet at barriers. */
#pragma once
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <unistd.h>

#define MAX_THREADS 64
#define SPINS 2000 /* a few microseconds of busy waiting before a thread sleeps or yields */

struct team {
    int64_t size;
    atomic_int arrived, phase;
};

typedef void work(void *argument, int64_t rank, struct team *team);

static struct {
    pthread_mutex_t lock;
    pthread_cond_t wake, done;
    int64_t started, busy; /* threads that exist, including the caller; threads that still run the function */
    atomic_long turn;      /* number of calls of `run_threads`, which wakes the threads */
    work *function;
    void *argument;
    struct team team;
    pid_t process;
} pool = {.lock = PTHREAD_MUTEX_INITIALIZER, .wake = PTHREAD_COND_INITIALIZER, .done = PTHREAD_COND_INITIALIZER};

static pthread_mutex_t run_lock = PTHREAD_MUTEX_INITIALIZER;

static inline void relax(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

/* Barrier: wait for all threads of the team. */
static void barrier(struct team *team)
{
    if (team->size == 1) return;
    int phase = atomic_load(&team->phase);
    if (atomic_fetch_add(&team->arrived, 1) == team->size - 1) {
        atomic_store(&team->arrived, 0);
        atomic_fetch_add(&team->phase, 1);
        return;
    }
    for (int spin = 0; atomic_load(&team->phase) == phase; spin++) {
        if (spin < SPINS) relax();
        else sched_yield();
    }
}

static void *worker(void *rank_pointer)
{
    int64_t rank = (int64_t)(intptr_t)rank_pointer;
    long seen = 0; /* when a thread starts, `turn` is at least 1 */
    for (;;) {
        for (int spin = 0; spin < SPINS && atomic_load(&pool.turn) == seen; spin++) relax();
        pthread_mutex_lock(&pool.lock);
        while (atomic_load(&pool.turn) == seen) pthread_cond_wait(&pool.wake, &pool.lock);
        seen = atomic_load(&pool.turn);
        int64_t size = pool.team.size;
        pthread_mutex_unlock(&pool.lock);
        if (rank >= size) continue;
        pool.function(pool.argument, rank, &pool.team);
        pthread_mutex_lock(&pool.lock);
        if (--pool.busy == 0) pthread_cond_signal(&pool.done);
        pthread_mutex_unlock(&pool.lock);
    }
    return 0;
}

/* Run `function` on `size` threads, including this one, and return when all have finished. */
static void run_threads(work *function, void *argument, int64_t size)
{
    if (size <= 1) {
        struct team alone = {.size = 1};
        function(argument, 0, &alone);
        return;
    }
    if (size > MAX_THREADS) size = MAX_THREADS;
    pthread_mutex_lock(&run_lock);
    pthread_mutex_lock(&pool.lock);
    if (pool.process != getpid()) { /* a fork copies none of the threads */
        pool.process = getpid();
        pool.started = 1;
        atomic_store(&pool.turn, 0);
    }
    for (; pool.started < size; pool.started++) {
        pthread_t thread;
        if (pthread_create(&thread, 0, worker, (void *)(intptr_t)pool.started)) {
            size = pool.started;
            break;
        }
        pthread_detach(thread);
    }
    pool.team.size = size;
    atomic_store(&pool.team.arrived, 0);
    pool.function = function;
    pool.argument = argument;
    pool.busy = size - 1;
    atomic_fetch_add(&pool.turn, 1);
    pthread_cond_broadcast(&pool.wake);
    pthread_mutex_unlock(&pool.lock);
    function(argument, 0, &pool.team);
    pthread_mutex_lock(&pool.lock);
    while (pool.busy) pthread_cond_wait(&pool.done, &pool.lock);
    pthread_mutex_unlock(&pool.lock);
    pthread_mutex_unlock(&run_lock);
}

/* The range [from, to) of `count` items for this rank, in multiples of `step`. */
static inline void split_range(int64_t count, int64_t step, int64_t rank, int64_t size, int64_t *from, int64_t *to)
{
    int64_t steps = (count + step - 1) / step;
    *from = steps * rank / size * step;
    *to = steps * (rank + 1) / size * step;
    if (*to > count) *to = count;
    if (*from > count) *from = count;
}
