/* The paged KV cache: functions that store keys and values, and attention over them. */
#pragma once
#include <stdlib.h>
#include "attention.h"
#include "threads.h"

/* The cache of one layer. */
struct cache {
    void *keys, *values; /* [blocks][KV][D][16] and [blocks][KV][16][D] */
    float *key_scales, *value_scales; /* [blocks][KV][16], int8 only */
    int64_t kind, table; /* enum cache_kind; index of the block table */
};

/* The store for the routes of a step: experts[blocks][16][layers][experts per token], with 1 or 2 bytes per element.
 * `experts` is null if routes are not recorded. `table` is the index of the block table. `layers` is the number of
 * layers with experts. */
struct route_store {
    void *experts;
    int64_t table, bytes, layers;
};

/* The tokens of one step. Row r is the token at position positions[r] of sequence sequence[r]. `tables` has the blocks
 * of each sequence. */
struct step {
    int64_t rows, sequences, tables_stride, logit_count;
    const int64_t *tokens, *positions, *logit_rows;
    const int64_t *sequence;
    const int32_t *tables; /* [windows][sequences][tables_stride] */
    float *logits;         /* [logit_count][V] */
    struct route_store routes;
};

INLINE int64_t block_of(const struct step *step, int64_t table, int64_t row, int64_t position)
{
    return step->tables[(table * step->sequences + step->sequence[row]) * step->tables_stride + position / BLOCK];
}

/* Store a key and a value of one head, float[D] each, in the slot `at` of block `place`. */
static void store_token(const struct cache *cache, int64_t place, int64_t size, int64_t at, const float *k, const float *v)
{
    int64_t start = place * size * BLOCK;
    if (cache->kind == CACHE_INT8) {
        int8_t *keys = (int8_t *)cache->keys + start, *values = (int8_t *)cache->values + start;
        float k_top = 1e-30f, v_top = 1e-30f;
        for (int64_t d = 0; d < size; d++) {
            k_top = fabsf(k[d]) > k_top ? fabsf(k[d]) : k_top;
            v_top = fabsf(v[d]) > v_top ? fabsf(v[d]) : v_top;
        }
        cache->key_scales[place * BLOCK + at] = k_top / 127.0f;
        cache->value_scales[place * BLOCK + at] = v_top / 127.0f;
        for (int64_t d = 0; d < size; d++) {
            keys[d * BLOCK + at] = (int8_t)lrintf(k[d] / k_top * 127.0f);
            values[at * size + d] = (int8_t)lrintf(v[d] / v_top * 127.0f);
        }
    } else if (cache->kind == CACHE_BFLOAT16) {
        uint16_t *keys = (uint16_t *)cache->keys + start, *values = (uint16_t *)cache->values + start;
        for (int64_t d = 0; d < size; d++) keys[d * BLOCK + at] = narrow(k[d]), values[at * size + d] = narrow(v[d]);
    } else {
        float *keys = (float *)cache->keys + start, *values = (float *)cache->values + start;
        for (int64_t d = 0; d < size; d++) keys[d * BLOCK + at] = k[d];
        memcpy(values + at * size, v, size * sizeof(float));
    }
}

/* The arguments of a layer's attention in a step. The input is q[rows][heads * D], the output out[rows][heads * D]. */
struct attention {
    const struct cache *cache;
    const struct step *step;
    const float *q;
    float *out;
    int64_t heads, kv_heads, size, window, q_stride, out_stride;
    float scale;
    const float *sinks; /* [heads], or null */
};

/* Buffers of one thread, for sequences of up to `longest` positions. `longest` is a multiple of 16. */
struct attention_buffers {
    float *scores;
    const void **pointers;
    int64_t longest;
};

static int64_t longest_of(const struct step *step)
{
    int64_t last = 0;
    for (int64_t row = 0; row < step->rows; row++) last = step->positions[row] > last ? step->positions[row] : last;
    return (last / BLOCK + 1) * BLOCK;
}

static int allocate_attention(struct attention_buffers *buffers, int64_t longest)
{
    buffers->longest = longest;
    buffers->scores = malloc(MAX_HEADS * longest * sizeof(float));
    buffers->pointers = malloc(2 * 4 * longest / BLOCK * sizeof(void *)); /* for two pairs */
    return !buffers->scores || !buffers->pointers;
}

static void free_attention(struct attention_buffers *buffers)
{
    free(buffers->scores);
    free(buffers->pointers);
}

#define HEADS(COUNT, KIND)                                                                                   \
    attend_heads(q, a->size, kv, start, position + 1, a->size, a->scale, buffers->scores, buffers->longest, out, a->size, sinks, \
                 0, COUNT, KIND);                                                                            \
    break
#define DEFINE_ATTEND(NAME, KIND)                                                                      \
    static __attribute__((noinline)) void NAME(const struct attention *a, const struct attention_buffers *buffers, \
        const struct blocks *kv, const float *q, float *out, const float *sinks, int64_t start, int64_t position, \
        int64_t count)                                                                                 \
    {                                                                                                  \
        switch (count) {                                                                               \
        case 1: HEADS(1, KIND);                                                                        \
        case 2: HEADS(2, KIND);                                                                        \
        case 3: HEADS(3, KIND);                                                                        \
        default: HEADS(4, KIND);                                                                       \
        }                                                                                              \
    }
DEFINE_ATTEND(attend_float32, CACHE_FLOAT32)
DEFINE_ATTEND(attend_bfloat16, CACHE_BFLOAT16)
DEFINE_ATTEND(attend_int8, CACHE_INT8)

/* The blocks of one (row, key-value head) pair. */
struct pair {
    struct blocks blocks;
    int64_t row, head, position, start;
};

static void find_pair(
    const struct attention *a, const struct attention_buffers *buffers, int64_t index, int64_t slot, struct pair *pair)
{
    const struct cache *cache = a->cache;
    int64_t most = buffers->longest / BLOCK, bytes = element_bytes(cache->kind) * a->size * BLOCK;
    const void **keys = buffers->pointers + slot * 4 * most, **values = keys + most;
    const float **key_scales = (const float **)(values + most), **value_scales = key_scales + most;
    pair->row = index % a->step->rows, pair->head = index / a->step->rows;
    pair->position = a->step->positions[pair->row];
    pair->start = a->window && pair->position + 1 > a->window ? pair->position + 1 - a->window : 0;
    for (int64_t block = pair->start / BLOCK; block <= pair->position / BLOCK; block++) {
        int64_t place = block_of(a->step, cache->table, pair->row, block * BLOCK) * a->kv_heads + pair->head;
        keys[block] = (const char *)cache->keys + place * bytes;
        values[block] = (const char *)cache->values + place * bytes;
        if (cache->kind != CACHE_INT8) continue;
        key_scales[block] = cache->key_scales + place * BLOCK;
        value_scales[block] = cache->value_scales + place * BLOCK;
    }
    pair->blocks = (struct blocks){.keys = keys, .values = values, .key_scales = key_scales, .value_scales = value_scales};
}

/* Compute attention for this thread's share of the (key-value head, row) pairs. The rows of a sequence follow each other
 * and read the same keys, which therefore stay in the cache of the core. */
static void attend_pairs(const struct attention *a, const struct attention_buffers *buffers, int64_t rank, int64_t threads)
{
    int64_t group = a->heads / a->kv_heads, from, to, kind = a->cache->kind;
    struct pair pairs[2];
    split_range(a->step->rows * a->kv_heads, 1, rank, threads, &from, &to);
    if (from < to) find_pair(a, buffers, from, 0, &pairs[0]);
    for (int64_t index = from; index < to; index++) {
        struct pair *pair = &pairs[(index - from) % 2], *next = &pairs[(index - from + 1) % 2];
        if (index + 1 < to) {
            find_pair(a, buffers, index + 1, (index - from + 1) % 2, next);
            pair->blocks.ahead = next->blocks.keys;
            /* pointers before `start` are not set */
            pair->blocks.ahead_end = next->start ? 0 : next->position / BLOCK + 1;
        }
        for (int64_t done = 0; done < group; done += MAX_HEADS) {
            int64_t count = group - done < MAX_HEADS ? group - done : MAX_HEADS;
            int64_t at = (pair->head * group + done) * a->size;
            const float *q = a->q + pair->row * a->q_stride + at;
            float *out = a->out + pair->row * a->out_stride + at;
            const float *sinks = a->sinks ? a->sinks + pair->head * group + done : NULL;
            if (kind == CACHE_INT8)
                attend_int8(a, buffers, &pair->blocks, q, out, sinks, pair->start, pair->position, count);
            else if (kind == CACHE_BFLOAT16)
                attend_bfloat16(a, buffers, &pair->blocks, q, out, sinks, pair->start, pair->position, count);
            else attend_float32(a, buffers, &pair->blocks, q, out, sinks, pair->start, pair->position, count);
        }
    }
}

/* Store k and v, float[rows][KV * D] each, for rows [from, to). */
static void store_rows(
    const struct attention *a, const float *k, int64_t k_stride, const float *v, int64_t v_stride, int64_t from,
    int64_t to)
{
    for (int64_t row = from; row < to; row++) {
        int64_t position = a->step->positions[row];
        int64_t place = block_of(a->step, a->cache->table, row, position) * a->kv_heads;
        for (int64_t head = 0; head < a->kv_heads; head++)
            store_token(a->cache, place + head, a->size, position % BLOCK, k + row * k_stride + head * a->size,
                 v + row * v_stride + head * a->size);
    }
}

/* The attention of one layer, including storing k and v, for a decoder whose other operations torch computes. */
struct attention_call {
    struct attention attention;
    const float *k, *v;
    int64_t k_stride, v_stride;
    atomic_int failed;
};

static void attention_part(void *argument, int64_t rank, struct team *team)
{
    struct attention_call *call = argument;
    const struct attention *a = &call->attention;
    struct attention_buffers buffers;
    int64_t from, to;
    if (allocate_attention(&buffers, longest_of(a->step))) atomic_store(&call->failed, 1);
    split_range(a->step->rows, 1, rank, team->size, &from, &to);
    store_rows(a, call->k, call->k_stride, call->v, call->v_stride, from, to);
    barrier(team); /* rows attend to keys that other threads store */
    if (!atomic_load(&call->failed)) attend_pairs(a, &buffers, rank, team->size);
    free_attention(&buffers);
}

int perilune_attend_paged(struct attention_call *call, int64_t threads)
{
    atomic_store(&call->failed, 0);
    run_threads(attention_part, call, threads);
    return atomic_load(&call->failed);
}
