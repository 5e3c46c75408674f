/* Causal attention of packed sequences, forward and backward.
 *
 * Sequence s begins with a prefix of prefixes[s] tokens from prefix_starts[s] on, which other sequences may share. Its
 * own lengths[s] tokens from starts[s] on follow. All indices refer to the flat list of tokens. */
#pragma once
#include <stdlib.h>
#include "attention.h"
#include "threads.h"

/* Strides are numbers of floats between rows of q, k, v and their gradients. Outputs are contiguous. */
struct packed {
    const float *q, *k, *v;
    int64_t q_stride, k_stride, v_stride, heads, kv_heads, size, window, sequences;
    const int64_t *starts, *lengths, *prefix_starts, *prefixes;
    float scale;
    const float *sinks; /* [heads], or null; used forward only, because log_total includes them */
    float *out, *log_total;
    /* The backward pass computes the gradients of q, k and v from the gradient of out. The caller must initialize
     * those of k and v with zeros. A family consists of consecutive sequences that share a prefix. One thread computes
     * a whole family, so the sums for the prefix have a fixed order. */
    const float *grad_out;
    float *grad_q, *grad_k, *grad_v;
    const int64_t *family; /* [families + 1]: family f has the sequences family[f] to family[f + 1] - 1 */
    int64_t families, longest;
    atomic_int failed;
    atomic_long next;
};

/* Buffers of one thread: keys and values of one sequence and head, padded with zeros, as columns [block][D][16] and as
 * rows [token][D]; scores and their gradients; gradients of keys and values. */
struct gathered {
    float *key_columns, *value_columns, *key_rows, *value_rows, *scores, *grads, *grad_keys, *grad_values;
    const void **pointers; /* to the blocks of key columns, value rows, value columns and key rows, in this order */
};

/* The flat index of token t of sequence s, whose prefix comes first. */
INLINE int64_t token_at(const struct packed *p, int64_t s, int64_t t)
{
    return t < p->prefixes[s] ? p->prefix_starts[s] + t : p->starts[s] + t - p->prefixes[s];
}

static void gather(const struct packed *p, int64_t s, int64_t head, struct gathered *g, int backward)
{
    int64_t size = p->size, tokens = p->prefixes[s] + p->lengths[s], padded = (tokens + BLOCK - 1) / BLOCK * BLOCK;
    for (int64_t t = 0; t < padded; t++) {
        int64_t column = t / BLOCK * BLOCK * size + t % BLOCK, real = t < tokens, token = real ? token_at(p, s, t) : 0;
        const float *k = p->k + token * p->k_stride + head * size, *v = p->v + token * p->v_stride + head * size;
        for (int64_t d = 0; d < size; d++) {
            float key = real ? k[d] : 0.0f, value = real ? v[d] : 0.0f;
            g->key_columns[column + d * BLOCK] = key;
            if (backward) g->value_columns[column + d * BLOCK] = value, g->key_rows[t * size + d] = key;
            else g->value_rows[t * size + d] = value;
        }
    }
}

static int allocate_gathered(const struct packed *p, struct gathered *g, int backward)
{
    int64_t floats = p->longest * p->size, most = p->longest / BLOCK;
    int64_t total = (backward ? 5 : 2) * floats + 2 * MAX_HEADS * p->longest;
    float *buffers = malloc(total * sizeof(float));
    g->pointers = malloc(4 * most * sizeof(void *));
    g->key_columns = buffers;
    if (!buffers || !g->pointers) return 1;
    g->value_rows = g->value_columns = buffers + floats;
    g->key_rows = buffers + 2 * floats;
    g->grad_keys = buffers + 3 * floats;
    g->grad_values = buffers + 4 * floats;
    g->scores = buffers + (backward ? 5 : 2) * floats;
    g->grads = g->scores + MAX_HEADS * p->longest;
    for (int64_t b = 0; b < most; b++) {
        int64_t at = b * BLOCK * p->size;
        g->pointers[b] = g->key_columns + at;
        g->pointers[most + b] = g->value_rows + at;
        g->pointers[2 * most + b] = g->value_columns + at;
        g->pointers[3 * most + b] = g->key_rows + at;
    }
    return 0;
}

static void free_gathered(struct gathered *g)
{
    free(g->key_columns);
    free(g->pointers);
}

INLINE int64_t first_seen(const struct packed *p, int64_t position)
{
    return p->window && position + 1 > p->window ? position + 1 - p->window : 0;
}

#define FOR_HEADS(CALL)            \
    switch (count) {               \
    case 1: CALL(1); break;        \
    case 2: CALL(2); break;        \
    case 3: CALL(3); break;        \
    default: CALL(4);              \
    }

static void packed_part(void *argument, int64_t rank, struct team *team)
{
    struct packed *p = argument;
    (void)rank, (void)team;
    struct gathered g;
    int64_t size = p->size, group = p->heads / p->kv_heads, most = p->longest / BLOCK;
    if (allocate_gathered(p, &g, 0)) atomic_store(&p->failed, 1);
    struct blocks kv = {.keys = g.pointers, .values = g.pointers + most};
    while (!atomic_load(&p->failed)) {
        int64_t pair = atomic_fetch_add(&p->next, 1);
        if (pair >= p->sequences * p->kv_heads) break;
        int64_t s = pair / p->kv_heads, head = pair % p->kv_heads;
        gather(p, s, head, &g, 0);
        for (int64_t i = 0; i < p->lengths[s]; i++) {
            int64_t position = p->prefixes[s] + i, row = p->starts[s] + i;
            for (int64_t done = 0; done < group; done += MAX_HEADS) {
                int64_t first = head * group + done, count = group - done < MAX_HEADS ? group - done : MAX_HEADS;
                const float *q = p->q + row * p->q_stride + first * size;
                float *out = p->out + (row * p->heads + first) * size, *total = p->log_total + row * p->heads + first;
#define FORWARD(COUNT)                                                                                        \
    attend_heads(q, size, &kv, first_seen(p, position), position + 1, size, p->scale, g.scores, p->longest, out, size, \
                 p->sinks ? p->sinks + first : NULL, total, COUNT, CACHE_FLOAT32)
                FOR_HEADS(FORWARD)
            }
        }
    }
    free_gathered(&g);
}

/* grad[t] += sum over heads of weights[h][t] * x[h], for t in [from, to). */
INLINE void add_outer(
    float *grad, int64_t from, int64_t to, int64_t size, const float *weights, int64_t stride, const float *x,
    const int heads)
{
    for (int64_t d = 0; d < size; d += LANES) {
        vec row[MAX_HEADS];
        UNROLL for (int h = 0; h < heads; h++) row[h] = load(x + h * size + d);
        for (int64_t t = from; t < to; t++) {
            vec sum = load(grad + t * size + d);
            UNROLL for (int h = 0; h < heads; h++) sum += splat(weights[h * stride + t]) * row[h];
            store(grad + t * size + d, sum);
        }
    }
}

/* p = exp(s - log_total); dv += p do; dp = do v; ds = p (dp - do.out) scale; dq = ds k; dk += ds q
 * (Dao, "FlashAttention-2", 2023, algorithm 2, without tiling over queries). */
INLINE void backward_of_query(
    const struct packed *packed, struct gathered *g, int64_t row, int64_t first, int64_t position, const int heads)
{
    int64_t size = packed->size, longest = packed->longest, most = longest / BLOCK, start = first_seen(packed, position);
    int64_t from = start / BLOCK, to = position / BLOCK + 1, at = (row * packed->heads + first) * size;
    const float *q = packed->q + row * packed->q_stride + first * size;
    const float *grad = packed->grad_out + at, *out = packed->out + at;
    struct blocks keys = {.keys = g->pointers, .values = g->pointers}, values = {.keys = g->pointers + 2 * most, .values = g->pointers + 3 * most};
    scores_of(q, size, &keys, from, to, size, packed->scale, g->scores, longest, heads, CACHE_FLOAT32);
    scores_of(grad, size, &values, from, to, size, 1.0f, g->grads, longest, heads, CACHE_FLOAT32);
    float factor[MAX_HEADS];
    for (int h = 0; h < heads; h++) {
        struct lanes along = splat_lanes(0.0f);
        for (int64_t d = 0; d < size; d += WIDE)
            FOR_PARTS along.part[p] += load(grad + h * size + d + p * LANES) * load(out + h * size + d + p * LANES);
        vec mean = splat(sum(along)), total = splat(packed->log_total[row * packed->heads + first + h]);
        float *s = g->scores + h * longest, *d = g->grads + h * longest;
        for (int64_t t = from * BLOCK; t < to * BLOCK; t += LANES) {
            ivec place = count_from(t), seen = (place >= (int32_t)start) & (place <= (int32_t)position);
            vec weight = blend(seen, exponential(load(s + t) - total), splat(0.0f));
            store(s + t, weight);
            store(d + t, weight * (load(d + t) - mean) * splat(packed->scale));
        }
        factor[h] = 1.0f;
    }
    add_outer(g->grad_values, from * BLOCK, position + 1, size, g->scores, longest, grad, heads);
    add_outer(g->grad_keys, from * BLOCK, position + 1, size, g->grads, longest, q, heads);
    weighted_values(&values, from, to, size, g->grads, longest, factor, packed->grad_q + at, size, heads, CACHE_FLOAT32);
}

static void backward_of_sequence(const struct packed *p, struct gathered *g, int64_t s, int64_t head)
{
    int64_t size = p->size, group = p->heads / p->kv_heads, tokens = p->prefixes[s] + p->lengths[s];
    gather(p, s, head, g, 1);
    memset(g->grad_keys, 0, tokens * size * sizeof(float));
    memset(g->grad_values, 0, tokens * size * sizeof(float));
    for (int64_t i = 0; i < p->lengths[s]; i++)
        for (int64_t done = 0; done < group; done += MAX_HEADS) {
            int64_t count = group - done < MAX_HEADS ? group - done : MAX_HEADS;
#define BACKWARD(COUNT) \
    backward_of_query(p, g, p->starts[s] + i, head * group + done, p->prefixes[s] + i, COUNT)
            FOR_HEADS(BACKWARD)
        }
    for (int64_t t = 0; t < tokens; t++) {
        int64_t at = (token_at(p, s, t) * p->kv_heads + head) * size;
        for (int64_t d = 0; d < size; d += LANES) {
            store(p->grad_k + at + d, load(p->grad_k + at + d) + load(g->grad_keys + t * size + d));
            store(p->grad_v + at + d, load(p->grad_v + at + d) + load(g->grad_values + t * size + d));
        }
    }
}

static void packed_backward_part(void *argument, int64_t rank, struct team *team)
{
    struct packed *p = argument;
    (void)rank, (void)team;
    struct gathered g;
    if (allocate_gathered(p, &g, 1)) atomic_store(&p->failed, 1);
    while (!atomic_load(&p->failed)) {
        int64_t pair = atomic_fetch_add(&p->next, 1);
        if (pair >= p->families * p->kv_heads) break;
        int64_t family = pair / p->kv_heads, head = pair % p->kv_heads;
        for (int64_t s = p->family[family]; s < p->family[family + 1]; s++) backward_of_sequence(p, &g, s, head);
    }
    free_gathered(&g);
}

static int run_packed(struct packed *p, work *function, int64_t threads)
{
    p->longest = BLOCK;
    for (int64_t s = 0; s < p->sequences; s++) {
        int64_t tokens = (p->prefixes[s] + p->lengths[s] + BLOCK - 1) / BLOCK * BLOCK;
        if (tokens > p->longest) p->longest = tokens;
    }
    atomic_store(&p->failed, 0);
    atomic_store(&p->next, 0);
    run_threads(function, p, threads);
    return atomic_load(&p->failed);
}

int perilune_attend_packed(struct packed *p, int64_t threads) { return run_packed(p, packed_part, threads); }

int perilune_attend_packed_backward(struct packed *p, int64_t threads)
{
    return run_packed(p, packed_backward_part, threads);
}
