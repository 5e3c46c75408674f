/* A mixture of experts: for each token, the router selects the experts with the largest probabilities.
 *
 * A step groups its rows by expert, so it reads the weights of each expert once. A pair is a token and one of its
 * experts. For each token, the sum over its experts runs from the most probable expert to the least probable. So the
 * bits of a token do not depend on the other tokens.
 */
#pragma once
#include <stdlib.h>
#include "gemm.h"
#include "rows.h"
#include "threads.h"

struct expert {
    struct weight gate_up, down;
};

/* The routes of one layer in one step, and buffers with one row for each pair. */
struct mixture {
    int64_t experts, per_token, hidden, inner, normalized, activation;
    float *weights;  /* [rows][per_token] */
    int64_t *chosen; /* [rows][per_token] experts */
    int64_t *place;  /* [rows][per_token] row of each pair in x and wide */
    int64_t *end;    /* [experts] end of each expert's rows */
    float *x, *wide; /* input of the experts, overwritten by their output; inner activations */
    int64_t stride, wide_stride;
};

/* Overwrite the logits with their softmax, and choose the `per_token` most probable experts. `chosen` receives their
 * indices in descending order of probability; ties are in ascending order of index. `weights` receives their
 * probabilities, divided by their sum if `normalized`. If `given` is not null and does not begin with -1, it contains
 * the experts to use instead of those with the largest probabilities.
 *
 * The function is not inlined, so that the learner and the sampler run the same instructions and round in the same
 * way. */
static __attribute__((noinline)) void route_row(
    float *logits, int64_t experts, int64_t per_token, int64_t normalized, const int64_t *given, float *weights,
    int64_t *chosen)
{
    struct lanes top = splat_lanes(-INFINITY), total = splat_lanes(0.0f);
    for (int64_t i = 0; i < experts; i += WIDE) {
        struct lanes some = load_lanes(logits + i, experts - i, -INFINITY);
        FOR_PARTS top.part[p] = larger(some.part[p], top.part[p]);
    }
    vec highest = splat(maximum(top));
    for (int64_t i = 0; i < experts; i += WIDE) {
        struct lanes some = load_lanes(logits + i, experts - i, -INFINITY);
        FOR_PARTS {
            vec power = exponential(some.part[p] - highest);
            total.part[p] += power;
            store_first(logits + i + p * LANES, power, experts - i - p * LANES);
        }
    }
    float all = sum(total), kept = 0.0f;
    int replayed = given && given[0] >= 0;
    for (int64_t i = 0; i < experts; i++) logits[i] /= all;
    for (int64_t k = 0; k < per_token; k++) {
        int64_t best = replayed ? given[k] : -1;
        for (int64_t e = 0; !replayed && e < experts; e++) {
            int taken = 0;
            for (int64_t j = 0; j < k; j++) taken |= chosen[j] == e;
            if (!taken && (best < 0 || logits[e] > logits[best])) best = e;
        }
        chosen[k] = best;
        weights[k] = logits[best];
        kept += logits[best];
    }
    for (int64_t k = 0; normalized && k < per_token; k++) weights[k] /= kept;
}

static void route_token(const struct mixture *m, int64_t row, float *logits)
{
    int64_t at = row * m->per_token;
    route_row(logits, m->experts, m->per_token, m->normalized, NULL, m->weights + at, m->chosen + at);
}

/* Assign a row to each pair, sorted by expert and then by token. */
static void group_by_expert(struct mixture *m, int64_t rows)
{
    int64_t pairs = rows * m->per_token, start = 0;
    memset(m->end, 0, m->experts * sizeof(int64_t));
    for (int64_t pair = 0; pair < pairs; pair++) m->end[m->chosen[pair]]++;
    for (int64_t e = 0; e < m->experts; e++) {
        int64_t count = m->end[e];
        m->end[e] = start;
        start += count;
    }
    for (int64_t pair = 0; pair < pairs; pair++) m->place[pair] = m->end[m->chosen[pair]]++;
}

static void scatter_token(const struct mixture *m, int64_t row, const float *x)
{
    for (int64_t pair = row * m->per_token; pair < (row + 1) * m->per_token; pair++)
        memcpy(m->x + m->place[pair] * m->stride, x, m->hidden * sizeof(float));
}

/* x = down(activation(gate(x)) * up(x)) for the rows of each expert. This thread computes some columns of each product.
 * The function ends with a barrier. */
static void run_experts(
    const struct mixture *m, const struct expert *experts, int64_t rank, struct team *team, uint16_t *rounded)
{
    int64_t half = panels_of(m->inner), first, last;
    for (int64_t e = 0; e < m->experts; e++) {
        int64_t start = e ? m->end[e - 1] : 0, count = m->end[e] - start;
        float *x = m->x + start * m->stride, *wide = m->wide + start * m->wide_stride;
        /* + e: the larger shares go to a different thread for each expert */
        split_range(half, 1, (rank + e) % team->size, team->size, &first, &last);
        product(x, m->stride, &experts[e].gate_up, first, last, wide, m->wide_stride, count, rounded);
        product(x, m->stride, &experts[e].gate_up, half + first, half + last, wide, m->wide_stride, count, rounded);
        for (int64_t row = 0; row < count; row++) {
            float *gate = wide + row * m->wide_stride + first * PANEL;
            gate_row(gate, gate + half * PANEL, (last - first) * PANEL, m->activation);
        }
    }
    barrier(team);
    for (int64_t e = 0; e < m->experts; e++) {
        int64_t start = e ? m->end[e - 1] : 0, count = m->end[e] - start;
        split_range(panel_count(&experts[e].down), 1, (rank + e) % team->size, team->size, &first, &last);
        product(m->wide + start * m->wide_stride, m->wide_stride, &experts[e].down, first, last,
                m->x + start * m->stride, m->stride, count, rounded);
    }
    barrier(team);
}

/* x *= factor. The function is not inlined, so that the product is rounded before the addition, as in torch. */
static __attribute__((noinline)) void scale_row(float *x, int64_t size, float factor)
{
    for (int64_t i = 0; i < size; i += LANES) store(x + i, load(x + i) * splat(factor));
}

/* out = the weighted sum of the outputs of a token's experts. */
static void combine_token(const struct mixture *m, int64_t row, float *out)
{
    for (int64_t pair = row * m->per_token; pair < (row + 1) * m->per_token; pair++) {
        float *x = m->x + m->place[pair] * m->stride;
        scale_row(x, m->hidden, m->weights[pair]);
        if (pair == row * m->per_token) memcpy(out, x, m->hidden * sizeof(float));
        else
            for (int64_t i = 0; i < m->hidden; i += LANES) store(out + i, load(out + i) + load(x + i));
    }
}

/* Allocate the buffers. Returns 1 if memory ran out. The caller must call `free_mixture` in either case. */
static int allocate_mixture(struct mixture *m, int64_t rows)
{
    int64_t pairs = rows * m->per_token;
    m->stride = m->hidden + APART;
    m->wide_stride = 2 * panels_of(m->inner) * PANEL + APART;
    m->weights = malloc(pairs * sizeof(float));
    m->chosen = malloc(pairs * sizeof(int64_t));
    m->place = malloc(pairs * sizeof(int64_t));
    m->end = malloc(m->experts * sizeof(int64_t));
    m->x = malloc(pairs * m->stride * sizeof(float));
    m->wide = malloc(pairs * m->wide_stride * sizeof(float));
    return !m->weights || !m->chosen || !m->place || !m->end || !m->x || !m->wide;
}

static void free_mixture(struct mixture *m)
{
    free(m->weights);
    free(m->chosen);
    free(m->place);
    free(m->end);
    free(m->x);
    free(m->wide);
}
