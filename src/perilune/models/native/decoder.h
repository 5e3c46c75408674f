/* One step of a decoder over a paged cache: flat tokens in, logits of the chosen rows out. */
#pragma once
#include <stdlib.h>
#include "attention.h"
#include "gemm.h"
#include "rows.h"
#include "threads.h"

#define ROWS_A_THREAD 64 /* with fewer, threads share the columns of a product rather than its rows */
#define APART 16        /* floats between rows: rows a power of two apart share few places in a cache */

enum activation { SILU, GELU_TANH };

/* Pointers that may be null: norms that the architecture lacks. All counts are int64, for the sake of ctypes. */
struct layer {
    struct weight qkv, out, gate_up, down;
    const float *attention_norm, *mlp_norm;         /* before each part */
    const float *attention_out_norm, *mlp_out_norm; /* after each part */
    const float *q_norm, *k_norm;
    const float *cosine, *sine; /* [positions][D / 2] */
    int64_t window;             /* tokens that are seen, the present one among them; 0 means all */
};

struct model {
    int64_t layers, hidden, inner, heads, kv_heads, size, vocabulary;
    int64_t qk_norm_whole; /* norms span all heads of q, and of k */
    int64_t activation;
    int64_t embedding_kind;
    const struct layer *layer;
    const void *embedding; /* [V][hidden] */
    const float *final_norm;
    struct weight head;
    float eps, attention_scale, embedding_scale, logit_cap;
};

struct cache {
    void *keys, *values; /* [layers][blocks][KV][D][16] and [layers][blocks][KV][16][D] */
    float *key_scales, *value_scales; /* [layers][blocks][KV][16], int8 only */
    int64_t blocks, kind;
};

struct step {
    int64_t rows, tables_stride, logit_count;
    const int64_t *tokens, *positions, *logit_rows;
    const int32_t *sequence; /* of each row */
    const int32_t *tables;   /* [sequences][tables_stride], block numbers */
    float *logits;           /* [logit_count][V] */
};

/* What the threads of a step share. Rows of every buffer are `stride` floats apart. */
struct job {
    const struct model *model;
    const struct cache *cache;
    const struct step *step;
    float *x, *h, *wide; /* the residual stream; what a part reads or gives; its inner width */
    int64_t stride, wide_stride, longest;
    int by_rows;
    atomic_int failed;
};

/* One thread's part of the step. */
struct part {
    struct job *job;
    struct team *team;
    int64_t rank, from, to; /* rows */
    uint16_t *rounded;
    float *scores;
    const void **pointers;
};

/* out = x w^T: this thread's rows, or, when rows are few, its columns; then all wait for each other. */
static void multiply(struct part *part, const float *x, int64_t x_stride, const struct weight *w, float *out, int64_t out_stride)
{
    int64_t first = 0, last = panel_count(w), from = part->from, to = part->to;
    if (!part->job->by_rows) {
        share(panel_count(w), 1, part->rank, part->team->size, &first, &last);
        from = 0, to = part->job->step->rows;
        meet(part->team); /* x is complete */
    }
    product(x + from * x_stride, x_stride, w, first, last, out + from * out_stride, out_stride, to - from, part->rounded);
    if (!part->job->by_rows) meet(part->team);
}

INLINE v16 gelu_tanh(v16 x)
{
    v16 inner = splat(0.7978845608f) * (x + splat(0.044715f) * x * x * x);
    return x / (splat(1.0f) + exponential(splat(-2.0f) * inner)); /* x (1 + tanh(inner)) / 2 */
}

/* `norm` may be null: then the row is only copied. */
static void norm_rows(const struct part *part, const float *x, const float *norm, float *out)
{
    const struct model *m = part->job->model;
    int64_t stride = part->job->stride;
    for (int64_t row = part->from; row < part->to; row++)
        if (norm) rms_norm_row(x + row * stride, norm, m->hidden, m->eps, out + row * stride);
        else memcpy(out + row * stride, x + row * stride, m->hidden * sizeof(float));
}

/* x += norm(y), y with its own distance between rows; without a norm x += y. */
static void add_rows(const struct part *part, float *y, int64_t y_stride, const float *norm)
{
    const struct model *m = part->job->model;
    for (int64_t row = part->from; row < part->to; row++) {
        float *to = part->job->x + row * part->job->stride, *from = y + row * y_stride;
        if (norm) rms_norm_row(from, norm, m->hidden, m->eps, from);
        for (int64_t i = 0; i < m->hidden; i += LANES) store(to + i, load(to + i) + load(from + i));
    }
}

static void embed_rows(const struct part *part)
{
    const struct model *m = part->job->model;
    for (int64_t row = part->from; row < part->to; row++) {
        int64_t token = part->job->step->tokens[row];
        float *x = part->job->x + row * part->job->stride;
        for (int64_t i = 0; i < m->hidden; i += LANES) {
            v16 value = load_element(m->embedding, token * m->hidden + i, (int)m->embedding_kind);
            store(x + i, m->embedding_scale == 1.0f ? value : value * splat(m->embedding_scale));
        }
    }
}

INLINE int64_t block_of(const struct step *step, int64_t row, int64_t position)
{
    return step->tables[(int64_t)step->sequence[row] * step->tables_stride + position / BLOCK];
}

/* Keep one key and value, float[D] each, of one head in their block. */
static void keep(const struct cache *cache, int64_t place, int64_t size, int64_t at, const float *k, const float *v)
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

/* Norm and rotate q and k of this thread's rows, and keep k and v. */
static void place_rows(const struct part *part, int64_t index)
{
    struct job *job = part->job;
    const struct model *m = job->model;
    const struct layer *layer = &m->layer[index];
    int64_t q_width = m->heads * m->size, k_width = m->kv_heads * m->size;
    for (int64_t row = part->from; row < part->to; row++) {
        float *q = job->wide + row * job->wide_stride, *k = q + q_width, *v = k + k_width;
        int64_t position = job->step->positions[row];
        const float *cosine = layer->cosine + position * m->size / 2, *sine = layer->sine + position * m->size / 2;
        if (layer->q_norm && m->qk_norm_whole) {
            rms_norm_row(q, layer->q_norm, q_width, m->eps, q);
            rms_norm_row(k, layer->k_norm, k_width, m->eps, k);
        }
        for (int64_t head = 0; head < m->heads + m->kv_heads; head++) {
            float *at = q + head * m->size;
            const float *norm = head < m->heads ? layer->q_norm : layer->k_norm;
            if (norm && !m->qk_norm_whole) rms_norm_row(at, norm, m->size, m->eps, at);
            rotate_row(at, cosine, sine, m->size / 2, 1.0f, at);
        }
        int64_t place = (index * job->cache->blocks + block_of(job->step, row, position)) * m->kv_heads;
        for (int64_t head = 0; head < m->kv_heads; head++)
            keep(job->cache, place + head, m->size, position % BLOCK, k + head * m->size, v + head * m->size);
    }
}

#define HEADS(COUNT, KIND)                                                                                     \
    attend_heads(q, m->size, &kv, start, position + 1, m->size, m->attention_scale, part->scores, job->longest, \
                 out, m->size, 0, COUNT, KIND)
#define ALL_HEADS(KIND)                                                                      \
    switch (count) {                                                                         \
    case 1: HEADS(1, KIND); break;                                                           \
    case 2: HEADS(2, KIND); break;                                                           \
    case 3: HEADS(3, KIND); break;                                                           \
    default: HEADS(4, KIND);                                                                 \
    }
#define DEFINE_ATTEND(NAME, KIND)                                                                            \
    static __attribute__((noinline)) void NAME(const struct part *part, const struct model *m,               \
        struct blocks kv, const float *q, float *out, int64_t start, int64_t position, int64_t count)        \
    {                                                                                                        \
        struct job *job = part->job;                                                                         \
        ALL_HEADS(KIND)                                                                                      \
    }
DEFINE_ATTEND(attend_float32, CACHE_FLOAT32)
DEFINE_ATTEND(attend_bfloat16, CACHE_BFLOAT16)
DEFINE_ATTEND(attend_int8, CACHE_INT8)

/* Attention of some (row, key-value head) pairs over the cache; the result goes to h. */
static void attend_pairs(const struct part *part, int64_t index)
{
    struct job *job = part->job;
    const struct model *m = job->model;
    const struct cache *cache = job->cache;
    int64_t group = m->heads / m->kv_heads, window = m->layer[index].window, most = job->longest / BLOCK, from, to;
    int64_t bytes = element_bytes(cache->kind) * m->size * BLOCK;
    const void **keys = part->pointers, **values = keys + most;
    const float **key_scales = (const float **)(values + most), **value_scales = key_scales + most;
    struct blocks kv = {keys, values, key_scales, value_scales};
    share(job->step->rows * m->kv_heads, 1, part->rank, part->team->size, &from, &to);
    for (int64_t pair = from; pair < to; pair++) {
        int64_t row = pair / m->kv_heads, head = pair % m->kv_heads, position = job->step->positions[row];
        int64_t start = window && position + 1 > window ? position + 1 - window : 0;
        for (int64_t block = start / BLOCK; block <= position / BLOCK; block++) {
            int64_t number = block_of(job->step, row, block * BLOCK);
            int64_t place = (index * cache->blocks + number) * m->kv_heads + head;
            keys[block] = (const char *)cache->keys + place * bytes;
            values[block] = (const char *)cache->values + place * bytes;
            if (cache->kind != CACHE_INT8) continue;
            key_scales[block] = cache->key_scales + place * BLOCK;
            value_scales[block] = cache->value_scales + place * BLOCK;
        }
        for (int64_t done = 0; done < group; done += MOST_HEADS) {
            int64_t count = group - done < MOST_HEADS ? group - done : MOST_HEADS, at = (head * group + done) * m->size;
            const float *q = job->wide + row * job->wide_stride + at;
            float *out = job->h + row * job->stride + at;
            if (cache->kind == CACHE_INT8) attend_int8(part, m, kv, q, out, start, position, count);
            else if (cache->kind == CACHE_BFLOAT16) attend_bfloat16(part, m, kv, q, out, start, position, count);
            else attend_float32(part, m, kv, q, out, start, position, count);
        }
    }
}

/* wide = activation(gate) * up, in place. */
static void gate_rows(const struct part *part)
{
    const struct model *m = part->job->model;
    int64_t half = (m->inner + PANEL - 1) / PANEL * PANEL;
    for (int64_t row = part->from; row < part->to; row++) {
        float *gate = part->job->wide + row * part->job->wide_stride, *up = gate + half;
        for (int64_t i = 0; i < half; i += LANES) {
            v16 x = load(gate + i);
            store(gate + i, (m->activation == GELU_TANH ? gelu_tanh(x) : silu(x)) * load(up + i));
        }
    }
}

static void logits_of_rows(struct part *part)
{
    struct job *job = part->job;
    const struct model *m = job->model;
    int64_t count = job->step->logit_count, from, to, first, last;
    share(count, 1, part->rank, part->team->size, &from, &to);
    meet(part->team); /* every row of x is complete */
    for (int64_t i = from; i < to; i++)
        rms_norm_row(job->x + job->step->logit_rows[i] * job->stride, m->final_norm, m->hidden, m->eps,
                     job->h + i * job->stride);
    meet(part->team);
    share(panel_count(&m->head), 1, part->rank, part->team->size, &first, &last);
    product(job->h, job->stride, &m->head, first, last, job->step->logits, m->vocabulary, count, part->rounded);
    if (m->logit_cap <= 0.0f) return;
    int64_t columns = last * PANEL < m->vocabulary ? last * PANEL : m->vocabulary;
    for (int64_t i = 0; i < count; i++)
        for (int64_t v = first * PANEL; v < columns; v++) {
            float *logit = job->step->logits + i * m->vocabulary + v;
            *logit = m->logit_cap * tanhf(*logit / m->logit_cap);
        }
}

static void step_part(void *argument, int64_t rank, struct team *team)
{
    struct job *job = argument;
    const struct model *m = job->model;
    struct part part = {.job = job, .team = team, .rank = rank};
    int64_t rows = job->step->rows, widest = job->stride > job->wide_stride ? job->stride : job->wide_stride;
    share(rows, 1, rank, team->size, &part.from, &part.to);
    part.scores = malloc(MOST_HEADS * job->longest * sizeof(float));
    part.pointers = malloc(4 * job->longest / BLOCK * sizeof(void *));
    part.rounded = malloc(rows * widest * sizeof(uint16_t));
    if (!part.scores || !part.pointers || !part.rounded) atomic_store(&job->failed, 1);
    meet(team);
    if (!atomic_load(&job->failed)) {
        embed_rows(&part);
        for (int64_t index = 0; index < m->layers; index++) {
            const struct layer *layer = &m->layer[index];
            norm_rows(&part, job->x, layer->attention_norm, job->h);
            multiply(&part, job->h, job->stride, &layer->qkv, job->wide, job->wide_stride);
            place_rows(&part, index);
            meet(team); /* a row attends to what other threads have kept */
            attend_pairs(&part, index);
            if (job->by_rows) meet(team); /* pairs are shared otherwise than rows */
            multiply(&part, job->h, job->stride, &layer->out, job->wide, job->wide_stride);
            add_rows(&part, job->wide, job->wide_stride, layer->attention_out_norm);
            norm_rows(&part, job->x, layer->mlp_norm, job->h);
            multiply(&part, job->h, job->stride, &layer->gate_up, job->wide, job->wide_stride);
            gate_rows(&part);
            multiply(&part, job->wide, job->wide_stride, &layer->down, job->h, job->stride);
            add_rows(&part, job->h, job->stride, layer->mlp_out_norm);
        }
        logits_of_rows(&part);
    }
    free(part.scores);
    free(part.pointers);
    free(part.rounded);
}

/* 0, or 1 where memory ran out. Positions, tokens and blocks were checked by the caller. */
int perilune_step(const struct model *m, const struct cache *cache, const struct step *step, int64_t threads)
{
    struct job job = {.model = m, .cache = cache, .step = step};
    int64_t q_width = m->heads * m->size, inner = (m->inner + PANEL - 1) / PANEL * PANEL, last = 0;
    int64_t qkv = q_width + 2 * m->kv_heads * m->size, wide = qkv > 2 * inner ? qkv : 2 * inner;
    for (int64_t row = 0; row < step->rows; row++) last = step->positions[row] > last ? step->positions[row] : last;
    job.longest = (last / BLOCK + 1) * BLOCK;
    job.stride = (m->hidden > q_width ? m->hidden : q_width) + APART;
    job.wide_stride = (wide > m->hidden ? wide : m->hidden) + APART;
    int64_t most = step->rows > step->logit_count ? step->rows : step->logit_count;
    job.x = malloc(most * job.stride * sizeof(float));
    job.h = malloc(most * job.stride * sizeof(float));
    job.wide = malloc(step->rows * job.wide_stride * sizeof(float));
    job.by_rows = step->rows >= ROWS_A_THREAD * threads || threads == 1;
    if (!job.x || !job.h || !job.wide) job.failed = 1;
    else run_together(step_part, &job, threads);
    free(job.x);
    free(job.h);
    free(job.wide);
    return atomic_load(&job.failed);
}
