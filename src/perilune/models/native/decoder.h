/* One step of a decoder over a paged KV cache. The input is a flat list of tokens, one per row. The output is the
 * logits of the rows in `logit_rows`. */
#pragma once
#include "experts.h"
#include "paged.h"

#define ROWS_A_THREAD 64 /* with fewer rows, threads split the columns of a product instead of its rows */

/* The weights of one layer. A norm that the architecture lacks is null. All counts are int64, which simplifies the
 * ctypes structures. */
struct layer {
    struct weight qkv, out, gate_up, down;
    const float *attention_norm, *mlp_norm;         /* applied to the input of attention and MLP */
    const float *attention_out_norm, *mlp_out_norm; /* applied to the output of attention and MLP */
    const float *q_norm, *k_norm;
    const float *sinks;         /* [heads], see attend_heads */
    const float *cosine, *sine; /* [positions][D / 2] */
    int64_t window;             /* number of tokens that a query sees, including its own; 0 means all */
    struct weight router;       /* selects the experts, which replace gate_up and down */
    const struct expert *experts;
    int64_t sparse_index;       /* index among the layers with experts */
};

struct model {
    int64_t layers, hidden, inner, heads, kv_heads, size, vocabulary;
    int64_t experts, experts_per_token, expert_inner, normalized; /* 0 experts: a dense model */
    int64_t qk_norm_whole; /* one norm over all heads of q, and one over k */
    int64_t activation;
    int64_t embedding_kind;
    const struct layer *layer;
    const void *embedding; /* [V][hidden]; null if tied to the head */
    const float *final_norm;
    struct weight head;
    float eps, attention_scale, embedding_scale;
};

/* State shared by the threads of a step. Strides are numbers of floats between rows. */
struct job {
    const struct model *model;
    const struct cache *caches; /* [layers] */
    const struct step *step;
    float *x, *h, *wide; /* residual stream; input or output of attention or MLP; q, k and v, or inner activations */
    int64_t stride, wide_stride;
    struct mixture mixture;
    int by_rows; /* whether threads split the rows of products; otherwise they split the columns */
    atomic_int failed;
};

/* The share of one thread in a step. */
struct part {
    struct job *job;
    struct team *team;
    int64_t rank, from, to; /* number of the thread; its rows are [from, to) */
    uint16_t *rounded;      /* buffer for rows in bfloat16 */
    struct attention_buffers buffers;
};

/* out = x w^T. If the threads split rows, this thread computes its rows. Otherwise it computes its columns of all rows,
 * between two barriers. */
static void multiply(struct part *part, const float *x, int64_t x_stride, const struct weight *w, float *out, int64_t out_stride)
{
    int64_t first = 0, last = panel_count(w), from = part->from, to = part->to;
    if (!part->job->by_rows) {
        split_range(panel_count(w), 1, part->rank, part->team->size, &first, &last);
        from = 0, to = part->job->step->rows;
        barrier(part->team); /* x is complete */
    }
    product(x + from * x_stride, x_stride, w, first, last, out + from * out_stride, out_stride, to - from, part->rounded);
    if (!part->job->by_rows) barrier(part->team);
}

/* Normalize each row of this thread, or copy it if `norm` is null. */
static void norm_rows(const struct part *part, const float *x, const float *norm, float *out)
{
    const struct model *m = part->job->model;
    int64_t stride = part->job->stride;
    for (int64_t row = part->from; row < part->to; row++)
        if (norm) rms_norm_row(x + row * stride, norm, m->hidden, m->eps, out + row * stride);
        else memcpy(out + row * stride, x + row * stride, m->hidden * sizeof(float));
}

/* x += norm(y), or x += y if `norm` is null. */
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
        if (!m->embedding) unpack_row(&m->head, token, x);
        for (int64_t i = 0; i < m->hidden; i += LANES) {
            vec value = m->embedding ? load_element(m->embedding, token * m->hidden + i, (int)m->embedding_kind) : load(x + i);
            store(x + i, m->embedding_scale == 1.0f ? value : value * splat(m->embedding_scale));
        }
    }
}

/* Normalize and rotate q and k in this thread's rows of `wide`. Each row contains q, k and v. */
static void norm_rotate_rows(const struct part *part, const struct layer *layer)
{
    struct job *job = part->job;
    const struct model *m = job->model;
    int64_t q_width = m->heads * m->size, k_width = m->kv_heads * m->size;
    for (int64_t row = part->from; row < part->to; row++) {
        float *q = job->wide + row * job->wide_stride, *k = q + q_width;
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
    }
}

/* Compute attention from q, k and v in `wide`, and write the result to h. */
static void attend(const struct part *part, int64_t index)
{
    struct job *job = part->job;
    const struct model *m = job->model;
    const struct layer *layer = &m->layer[index];
    int64_t q_width = m->heads * m->size, k_width = m->kv_heads * m->size;
    struct attention a = {.cache = job->caches + index, .step = job->step, .q = job->wide, .out = job->h,
                          .heads = m->heads, .kv_heads = m->kv_heads, .size = m->size, .window = layer->window,
                          .q_stride = job->wide_stride, .out_stride = job->stride, .scale = m->attention_scale,
                          .sinks = layer->sinks};
    norm_rotate_rows(part, layer);
    store_rows(&a, job->wide + q_width, job->wide_stride, job->wide + q_width + k_width, job->wide_stride, part->from,
              part->to);
    barrier(part->team); /* rows attend to keys that other threads store */
    attend_pairs(&a, &part->buffers, part->rank, part->team->size);
    barrier(part->team); /* other threads may have computed rows of this thread */
}

/* Compute the feed-forward network of a dense layer, from h to h. */
static void feed_dense(struct part *part, const struct layer *layer)
{
    struct job *job = part->job;
    int64_t half = panels_of(job->model->inner) * PANEL;
    multiply(part, job->h, job->stride, &layer->gate_up, job->wide, job->wide_stride);
    for (int64_t row = part->from; row < part->to; row++) {
        float *gate = job->wide + row * job->wide_stride;
        gate_row(gate, gate + half, half, job->model->activation);
    }
    multiply(part, job->wide, job->wide_stride, &layer->down, job->h, job->stride);
}

/* Store the chosen experts of this thread's rows in the slots of their tokens. */
static void record_routes(const struct part *part, int64_t index)
{
    const struct step *step = part->job->step;
    const struct route_store *store = &step->routes;
    int64_t count = part->job->mixture.per_token;
    for (int64_t row = part->from; row < part->to; row++) {
        int64_t position = step->positions[row];
        int64_t slot = block_of(step, store->table, row, position) * BLOCK + position % BLOCK;
        int64_t start = (slot * store->layers + index) * count;
        const int64_t *chosen = part->job->mixture.chosen + row * count;
        for (int64_t k = 0; k < count; k++)
            if (store->bytes == 1) ((uint8_t *)store->experts)[start + k] = (uint8_t)chosen[k];
            else ((uint16_t *)store->experts)[start + k] = (uint16_t)chosen[k];
    }
}

/* Compute the mixture of experts of a sparse layer, from h to h. */
static void feed_experts(struct part *part, const struct layer *layer)
{
    struct job *job = part->job;
    struct mixture *mixture = &job->mixture;
    multiply(part, job->h, job->stride, &layer->router, job->wide, job->wide_stride);
    for (int64_t row = part->from; row < part->to; row++)
        route_token(mixture, row, job->wide + row * job->wide_stride);
    if (job->step->routes.experts) record_routes(part, layer->sparse_index);
    barrier(part->team);
    if (part->rank == 0) group_by_expert(mixture, job->step->rows);
    barrier(part->team);
    for (int64_t row = part->from; row < part->to; row++) scatter_token(mixture, row, job->h + row * job->stride);
    barrier(part->team);
    run_experts(mixture, layer->experts, part->rank, part->team, part->rounded);
    for (int64_t row = part->from; row < part->to; row++) combine_token(mixture, row, job->h + row * job->stride);
}

static void logits_of_rows(struct part *part)
{
    struct job *job = part->job;
    const struct model *m = job->model;
    int64_t count = job->step->logit_count, from, to, first, last;
    split_range(count, 1, part->rank, part->team->size, &from, &to);
    barrier(part->team); /* every row of x is complete */
    for (int64_t i = from; i < to; i++)
        rms_norm_row(job->x + job->step->logit_rows[i] * job->stride, m->final_norm, m->hidden, m->eps,
                     job->h + i * job->stride);
    barrier(part->team);
    split_range(panel_count(&m->head), 1, part->rank, part->team->size, &first, &last);
    product(job->h, job->stride, &m->head, first, last, job->step->logits, m->vocabulary, count, part->rounded);
}

static void step_part(void *argument, int64_t rank, struct team *team)
{
    struct job *job = argument;
    const struct model *m = job->model;
    struct part part = {.job = job, .team = team, .rank = rank};
    int64_t rows = job->step->rows, widest = job->stride > job->wide_stride ? job->stride : job->wide_stride;
    if (widest < job->mixture.wide_stride) widest = job->mixture.wide_stride;
    split_range(rows, 1, rank, team->size, &part.from, &part.to);
    part.rounded = malloc(rows * widest * sizeof(uint16_t));
    if (allocate_attention(&part.buffers, longest_of(job->step)) || !part.rounded) atomic_store(&job->failed, 1);
    barrier(team);
    if (!atomic_load(&job->failed)) {
        embed_rows(&part);
        for (int64_t index = 0; index < m->layers; index++) {
            const struct layer *layer = &m->layer[index];
            norm_rows(&part, job->x, layer->attention_norm, job->h);
            multiply(&part, job->h, job->stride, &layer->qkv, job->wide, job->wide_stride);
            attend(&part, index);
            multiply(&part, job->h, job->stride, &layer->out, job->wide, job->wide_stride);
            add_rows(&part, job->wide, job->wide_stride, layer->attention_out_norm);
            norm_rows(&part, job->x, layer->mlp_norm, job->h);
            if (layer->experts) feed_experts(&part, layer);
            else feed_dense(&part, layer);
            add_rows(&part, job->h, job->stride, layer->mlp_out_norm);
        }
        logits_of_rows(&part);
    }
    free_attention(&part.buffers);
    free(part.rounded);
}

/* Compute a step. Returns 1 if memory ran out, else 0. The caller must have checked positions, tokens and blocks. */
int perilune_step(const struct model *m, const struct cache *caches, const struct step *step, int64_t threads)
{
    struct job job = {.model = m, .caches = caches, .step = step};
    int64_t q_width = m->heads * m->size, inner = panels_of(m->inner) * PANEL;
    int64_t qkv = q_width + 2 * m->kv_heads * m->size, wide = qkv > 2 * inner ? qkv : 2 * inner;
    if (wide < m->experts) wide = m->experts; /* the router's logits */
    job.stride = (m->hidden > q_width ? m->hidden : q_width) + APART;
    job.wide_stride = (wide > m->hidden ? wide : m->hidden) + APART;
    int64_t most = step->rows > step->logit_count ? step->rows : step->logit_count;
    job.x = malloc(most * job.stride * sizeof(float));
    job.h = malloc(most * job.stride * sizeof(float));
    job.wide = malloc(step->rows * job.wide_stride * sizeof(float));
    job.by_rows = step->rows >= ROWS_A_THREAD * threads || threads == 1;
    job.mixture = (struct mixture){.experts = m->experts, .per_token = m->experts_per_token, .hidden = m->hidden,
                                   .inner = m->expert_inner, .normalized = m->normalized, .activation = m->activation};
    int no_memory = m->experts && allocate_mixture(&job.mixture, step->rows);
    if (!job.x || !job.h || !job.wide || no_memory) job.failed = 1;
    else run_threads(step_part, &job, threads);
    free(job.x);
    free(job.h);
    free(job.wide);
    free_mixture(&job.mixture);
    return atomic_load(&job.failed);
}
