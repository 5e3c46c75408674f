/* The gated delta rule and the short convolution before it, forward and backward (see models/recurrence.py).
 *
 * The columns of a head's state are independent of each other. Threads therefore split heads and columns, and each
 * thread processes all tokens of its columns in order. So a token has the same bits in decoding, in prefill and in
 * learning. */
#pragma once
#include <stdlib.h>
#include "threads.h"
#include "vector.h"

/* The `length` tokens from `start` on. The state before them is in row `from` of the states (zeros if `from` is
 * negative), and the state after them goes to row `to`. */
struct piece {
    int64_t start, length, from, to;
};

/* Strides are numbers of floats between tokens. Outputs and all gradients are contiguous. */
struct delta {
    const float *q, *k, *v;         /* [N][key_heads][Dk], the same, [N][heads][Dv] */
    const float *decay, *strength;  /* [N][heads] */
    int64_t q_stride, k_stride, v_stride, heads, key_heads, key_size, value_size, tokens, pieces;
    const struct piece *piece;      /* a piece follows the piece whose final state it starts from */
    float *states, *out;            /* [rows][heads][Dk][Dv], [N][heads][Dv] */
    const float *grad_out;
    float *grad_q, *grad_k, *grad_v, *grad_decay, *grad_strength, *grad_states; /* zero-initialized */
    atomic_int failed;
};

#define FORWARD_VECTORS 4  /* vectors of columns computed together; a state of 128 rows of them fits the L1 cache */
#define HEADS_TO_SHARE 16  /* with fewer tokens times heads, a second thread costs more time than it saves */
#define BACKWARD_VECTORS (2 * PARTS) /* as FORWARD_VECTORS; 64 states of 128 rows of them fit the L2 cache */
#define MAX_COLUMN_VECTORS 8

INLINE int64_t padded_rows(int64_t rows) { return (rows + WIDE - 1) / WIDE * WIDE; }

/* Copy columns of a state into rows of `vectors` vectors, padded with zeros. */
INLINE void load_columns(
    float *to, int64_t rows, const float *from, const struct delta *d, int64_t column, const int vectors)
{
    for (int64_t i = 0; i < rows; i++)
        for (int j = 0; j < vectors; j++) {
            int64_t at = column + j * LANES;
            int some = from && i < d->key_size;
            store(to + (i * vectors + j) * LANES,
                  some ? load_first(from + i * d->value_size + at, d->value_size - at, 0.0f) : splat(0.0f));
        }
}

INLINE void store_columns(float *to, const float *from, const struct delta *d, int64_t column, const int vectors)
{
    for (int64_t i = 0; i < d->key_size; i++)
        for (int j = 0; j < vectors; j++) {
            int64_t at = column + j * LANES;
            store_first(to + i * d->value_size + at, load(from + (i * vectors + j) * LANES), d->value_size - at);
        }
}

INLINE float *state_of(float *states, const struct delta *d, int64_t row, int64_t head)
{
    return row < 0 ? 0 : states + (row * d->heads + head) * d->key_size * d->value_size;
}

/* For decay a and strength b: error = v - a state^T k; after = a state + b k error^T; out = after^T q. `after` may be
 * `state`. */
INLINE void delta_token(
    const float *state, float *after, const float *q, const float *k, float decay, float strength, int64_t size,
    const vec *v, vec *error, vec *out, const int vectors)
{
    vec found[2][MAX_COLUMN_VECTORS], change[MAX_COLUMN_VECTORS];
    UNROLL for (int j = 0; j < vectors; j++) found[0][j] = found[1][j] = out[j] = splat(0.0f);
    int64_t i = 0;
    for (; i + 2 <= size; i += 2)
        UNROLL for (int r = 0; r < 2; r++)
            UNROLL for (int j = 0; j < vectors; j++)
                found[r][j] += splat(k[i + r]) * load(state + ((i + r) * vectors + j) * LANES);
    for (; i < size; i++)
        for (int j = 0; j < vectors; j++) found[0][j] += splat(k[i]) * load(state + (i * vectors + j) * LANES);
    UNROLL for (int j = 0; j < vectors; j++) {
        error[j] = v[j] - splat(decay) * (found[0][j] + found[1][j]);
        change[j] = splat(strength) * error[j];
    }
    for (i = 0; i < size; i++)
        UNROLL for (int j = 0; j < vectors; j++) {
            int64_t at = (i * vectors + j) * LANES;
            vec value = round_now(splat(decay) * load(state + at)) + splat(k[i]) * change[j];
            store(after + at, value);
            out[j] += splat(q[i]) * value;
        }
}

INLINE void scan_columns(const struct delta *d, int64_t head, int64_t column, float *state, const int vectors)
{
    int64_t key_head = head / (d->heads / d->key_heads) * d->key_size, held = -1;
    for (const struct piece *p = d->piece; p < d->piece + d->pieces; p++) {
        if (p->from < 0 || p->from != held)
            load_columns(state, d->key_size, state_of(d->states, d, p->from, head), d, column, vectors);
        for (int64_t n = p->start; n < p->start + p->length; n++) {
            vec v[FORWARD_VECTORS], error[FORWARD_VECTORS], out[FORWARD_VECTORS];
            const float *value = d->v + n * d->v_stride + head * d->value_size;
            float *to = d->out + (n * d->heads + head) * d->value_size;
            for (int j = 0, at = (int)column; j < vectors; j++, at += LANES)
                v[j] = load_first(value + at, d->value_size - at, 0.0f);
            delta_token(state, state, d->q + n * d->q_stride + key_head, d->k + n * d->k_stride + key_head,
                        d->decay[n * d->heads + head], d->strength[n * d->heads + head], d->key_size, v, error, out, vectors);
            for (int j = 0, at = (int)column; j < vectors; j++, at += LANES)
                store_first(to + at, out[j], d->value_size - at);
        }
        store_columns(state_of(d->states, d, p->to, head), state, d, column, vectors);
        held = p->to;
    }
}

static void scan_part(void *argument, int64_t rank, struct team *team)
{
    struct delta *d = argument;
    int64_t width = FORWARD_VECTORS * LANES, blocks = (d->value_size + width - 1) / width, from, to;
    float *state = malloc(d->key_size * width * sizeof(float));
    if (!state) atomic_store(&d->failed, 1);
    split_range(d->heads * blocks, 1, rank, team->size, &from, &to);
    for (int64_t unit = from; unit < to && state; unit++) {
        int64_t head = unit / blocks, column = unit % blocks * width;
        if (column + width <= d->value_size) {
            scan_columns(d, head, column, state, FORWARD_VECTORS);
            continue;
        }
        for (; column < d->value_size; column += LANES) scan_columns(d, head, column, state, 1);
    }
    free(state);
}

/* out[i] = the sum of the lanes of all[i], for i from 0 to 15. */
#if LANES == 16
#define FOLD(a, b, LOW, HIGH) (SHUFFLE_BOTH(a, b, LOW) + SHUFFLE_BOTH(a, b, HIGH))
#define LOW_8 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23
#define HIGH_8 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31
#define LOW_4 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27
#define HIGH_4 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31
#define LOW_2 0, 1, 4, 5, 8, 9, 12, 13, 16, 17, 20, 21, 24, 25, 28, 29
#define HIGH_2 2, 3, 6, 7, 10, 11, 14, 15, 18, 19, 22, 23, 26, 27, 30, 31
#define LOW_1 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30
#define HIGH_1 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31
INLINE void sums_of(const struct lanes *all, float *out)
{
    vec x[WIDE];
    for (int i = 0; i < 16; i++) x[i] = all[i].part[0];
    for (int i = 0; i < 16; i += 2) x[i / 2] = FOLD(x[i], x[i + 1], LOW_8, HIGH_8);
    for (int i = 0; i < 8; i += 2) x[i / 2] = FOLD(x[i], x[i + 1], LOW_4, HIGH_4);
    for (int i = 0; i < 4; i += 2) x[i / 2] = FOLD(x[i], x[i + 1], LOW_2, HIGH_2);
    store(out, FOLD(x[0], x[1], LOW_1, HIGH_1));
}
#else
INLINE void sums_of(const struct lanes *all, float *out)
{
    for (int i = 0; i < WIDE; i++) out[i] = sum(all[i]);
}
#endif

INLINE void add_first(float *to, vec x, int64_t count)
{
    store_first(to, load_first(to, count, 0.0f) + x, count);
}

INLINE void add_sums(float *to, const float *sums, int64_t count)
{
    for (int64_t i = 0; i < WIDE && i < count; i++) to[i] += sums[i];
}

/* Buffers of one thread for a piece: its states, the errors and the gradient of a state; q and k of a token, padded. */
struct history {
    float *states, *errors, *grad, *q, *k;
};

/* Compute the gradients of token n. h->grad holds dS, the gradient of the state after the token, and receives the
 * gradient of the state before it. With C = b error:
 * dS += q do^T; dq = S do; dC = dS^T k; db = dC . error; dv = b dC; dk = dS C - a S_before dv; dS -= k dv^T;
 * da = dS . S_before; dS *= a. */
INLINE void delta_token_backward(
    const struct delta *d, const struct history *h, int64_t n, int64_t t, int64_t head, int64_t column, const int vectors)
{
    int64_t rows = padded_rows(d->key_size), size = rows * vectors * LANES, scalar = n * d->heads + head;
    int64_t key_head = n * d->key_heads + head / (d->heads / d->key_heads);
    const float *before = h->states + t * size, *after = before + size;
    float *grad_q = d->grad_q + key_head * d->key_size, *grad_k = d->grad_k + key_head * d->key_size;
    vec decay = splat(d->decay[scalar]), strength = splat(d->strength[scalar]);
    vec own[BACKWARD_VECTORS], error[BACKWARD_VECTORS], of_change[BACKWARD_VECTORS];
    struct lanes along[WIDE];
    float sums[WIDE];
    UNROLL for (int j = 0; j < vectors; j++) {
        int64_t at = column + j * LANES;
        own[j] = load_first(d->grad_out + scalar * d->value_size + at, d->value_size - at, 0.0f);
        error[j] = load(h->errors + (t * vectors + j) * LANES);
        of_change[j] = splat(0.0f);
    }
    for (int64_t i = 0; i < rows; i += WIDE) {
        UNROLL for (int r = 0; r < WIDE; r++) {
            along[r] = splat_lanes(0.0f);
            UNROLL for (int j = 0; j < vectors; j++) {
                int64_t at = ((i + r) * vectors + j) * LANES;
                vec grad = load(h->grad + at) + splat(h->q[i + r]) * own[j];
                store(h->grad + at, grad);
                along[r].part[j % PARTS] += load(after + at) * own[j];
                of_change[j] += splat(h->k[i + r]) * grad;
            }
        }
        sums_of(along, sums);
        add_sums(grad_q + i, sums, d->key_size - i);
    }
    struct lanes of_strength = splat_lanes(0.0f), of_decay = splat_lanes(0.0f);
    vec grad_v[BACKWARD_VECTORS], change[BACKWARD_VECTORS];
    UNROLL for (int j = 0; j < vectors; j++) {
        int64_t at = column + j * LANES;
        of_strength.part[j % PARTS] += of_change[j] * error[j];
        grad_v[j] = strength * of_change[j];
        change[j] = strength * error[j];
        store_first(d->grad_v + scalar * d->value_size + at, grad_v[j], d->value_size - at);
    }
    for (int64_t i = 0; i < rows; i += WIDE) {
        UNROLL for (int r = 0; r < WIDE; r++) {
            along[r] = splat_lanes(0.0f);
            UNROLL for (int j = 0; j < vectors; j++) {
                int64_t at = ((i + r) * vectors + j) * LANES;
                vec grad = load(h->grad + at), state = load(before + at);
                along[r].part[j % PARTS] += grad * change[j];
                along[r].part[j % PARTS] -= decay * state * grad_v[j];
                grad -= splat(h->k[i + r]) * grad_v[j];
                of_decay.part[j % PARTS] += grad * state;
                store(h->grad + at, decay * grad);
            }
        }
        sums_of(along, sums);
        add_sums(grad_k + i, sums, d->key_size - i);
    }
    d->grad_decay[scalar] += sum(of_decay);
    d->grad_strength[scalar] += sum(of_strength);
}

INLINE void scan_columns_backward(
    const struct delta *d, const struct history *h, int64_t head, int64_t column, const int vectors)
{
    int64_t rows = padded_rows(d->key_size), size = rows * vectors * LANES;
    int64_t key_head = head / (d->heads / d->key_heads) * d->key_size, bytes = d->key_size * sizeof(float);
    for (const struct piece *p = d->piece + d->pieces - 1; p >= d->piece; p--) {
        load_columns(h->states, rows, state_of(d->states, d, p->from, head), d, column, vectors);
        load_columns(h->grad, rows, state_of(d->grad_states, d, p->to, head), d, column, vectors);
        for (int64_t t = 0; t < p->length; t++) {
            int64_t n = p->start + t, scalar = n * d->heads + head;
            vec v[BACKWARD_VECTORS], error[BACKWARD_VECTORS], out[BACKWARD_VECTORS];
            for (int j = 0; j < vectors; j++) {
                int64_t at = column + j * LANES;
                v[j] = load_first(d->v + n * d->v_stride + head * d->value_size + at, d->value_size - at, 0.0f);
            }
            memcpy(h->k, d->k + n * d->k_stride + key_head, bytes);
            delta_token(h->states + t * size, h->states + (t + 1) * size, h->q, h->k, d->decay[scalar],
                        d->strength[scalar], rows, v, error, out, vectors);
            for (int j = 0; j < vectors; j++) store(h->errors + (t * vectors + j) * LANES, error[j]);
        }
        for (int64_t t = p->length - 1; t >= 0; t--) {
            memcpy(h->q, d->q + (p->start + t) * d->q_stride + key_head, bytes);
            memcpy(h->k, d->k + (p->start + t) * d->k_stride + key_head, bytes);
            delta_token_backward(d, h, p->start + t, t, head, column, vectors);
        }
        if (p->from < 0) continue;
        load_columns(h->states, rows, state_of(d->grad_states, d, p->from, head), d, column, vectors);
        for (int64_t i = 0; i < size; i += LANES) store(h->grad + i, load(h->grad + i) + load(h->states + i));
        store_columns(state_of(d->grad_states, d, p->from, head), h->grad, d, column, vectors);
    }
}

/* One thread computes all heads that share a key, so the sums for the key's gradient have a fixed order. */
static void scan_backward_part(void *argument, int64_t rank, struct team *team)
{
    struct delta *d = argument;
    int64_t width = BACKWARD_VECTORS * LANES, rows = padded_rows(d->key_size), group = d->heads / d->key_heads;
    int64_t longest = 0, from, to;
    for (int64_t p = 0; p < d->pieces; p++) longest = d->piece[p].length > longest ? d->piece[p].length : longest;
    float *buffer = calloc((longest + 2) * rows * width + longest * width + 2 * rows, sizeof(float));
    if (!buffer) atomic_store(&d->failed, 1);
    struct history h = {.grad = buffer, .states = buffer + rows * width};
    h.errors = h.states + (longest + 1) * rows * width;
    h.q = h.errors + longest * width;
    h.k = h.q + rows;
    split_range(d->key_heads, 1, rank, team->size, &from, &to);
    for (int64_t head = from * group; head < to * group && buffer; head++) {
        int64_t column = 0;
        for (; column + width <= d->value_size; column += width)
            scan_columns_backward(d, &h, head, column, BACKWARD_VECTORS);
        for (; column < d->value_size; column += WIDE) scan_columns_backward(d, &h, head, column, PARTS);
    }
    free(buffer);
}

static int run_delta(struct delta *d, work *function, int64_t threads)
{
    atomic_store(&d->failed, 0);
    run_threads(function, d, d->tokens * d->heads < HEADS_TO_SHARE ? 1 : threads);
    return atomic_load(&d->failed);
}

int perilune_scan(struct delta *d, int64_t threads) { return run_delta(d, scan_part, threads); }

int perilune_scan_backward(struct delta *d, int64_t threads) { return run_delta(d, scan_backward_part, threads); }

#define CHANNELS_AT_ONCE 256 /* channels of the gradient per block: they fill whole pages and fit the L1 cache */

/* out[n] = silu(sum over taps of x[taps[n][tap]] weight[tap]). An index of N or more is a row of `before`, after
 * subtracting N. */
struct convolution {
    const float *x, *before, *weight; /* [N][C] with `stride` floats between rows, [rows][C], [K][C] */
    const int64_t *taps;              /* [N][K] */
    int64_t tokens, channels, width, stride;
    float *out;                       /* [N][C] */
    const float *grad_out;            /* [N][C] */
    float *grad_x, *grad_weight;      /* zeros[N][C] and [K][C] */
};

INLINE const float *tap_of(const struct convolution *c, int64_t n, int64_t tap)
{
    int64_t row = c->taps[n * c->width + tap];
    return row < c->tokens ? c->x + row * c->stride : c->before + (row - c->tokens) * c->channels;
}

INLINE vec convolved(const struct convolution *c, int64_t n, int64_t channel)
{
    vec total = splat(0.0f);
    for (int64_t tap = 0; tap < c->width; tap++)
        total += load_first(tap_of(c, n, tap) + channel, c->channels - channel, 0.0f) *
                 load_first(c->weight + tap * c->channels + channel, c->channels - channel, 0.0f);
    return total;
}

static void convolve_part(void *argument, int64_t rank, struct team *team)
{
    struct convolution *c = argument;
    int64_t from, to;
    split_range(c->tokens, 1, rank, team->size, &from, &to);
    for (int64_t n = from; n < to; n++)
        for (int64_t channel = 0; channel < c->channels; channel += LANES)
            store_first(c->out + n * c->channels + channel, silu(convolved(c, n, channel)), c->channels - channel);
}

/* Add the gradients of token n for the channels of one vector. */
INLINE void convolve_token_backward(const struct convolution *c, int64_t n, int64_t channel)
{
    int64_t left = c->channels - channel;
    vec total = convolved(c, n, channel), gate = splat(1.0f) / (splat(1.0f) + exponential(-total));
    vec grad = load_first(c->grad_out + n * c->channels + channel, left, 0.0f);
    grad *= gate * (splat(1.0f) + total * (splat(1.0f) - gate));
    for (int64_t tap = 0; tap < c->width; tap++) {
        int64_t row = c->taps[n * c->width + tap], at = tap * c->channels + channel;
        add_first(c->grad_weight + at, grad * load_first(tap_of(c, n, tap) + channel, left, 0.0f), left);
        if (row < c->tokens)
            add_first(c->grad_x + row * c->channels + channel, grad * load_first(c->weight + at, left, 0.0f), left);
    }
}

/* Threads split the channels. So the sums for rows that several tokens use have a fixed order. */
static void convolve_backward_part(void *argument, int64_t rank, struct team *team)
{
    struct convolution *c = argument;
    int64_t from, to;
    split_range(c->channels, CHANNELS_AT_ONCE, rank, team->size, &from, &to);
    for (int64_t first = from; first < to; first += CHANNELS_AT_ONCE) {
        int64_t last = first + CHANNELS_AT_ONCE < to ? first + CHANNELS_AT_ONCE : to;
        for (int64_t n = 0; n < c->tokens; n++)
            for (int64_t channel = first; channel < last; channel += LANES) convolve_token_backward(c, n, channel);
    }
}

void perilune_convolve(struct convolution *c, int64_t threads)
{
    run_threads(convolve_part, c, c->tokens < ROWS_TO_SHARE ? 1 : threads);
}

void perilune_convolve_backward(struct convolution *c, int64_t threads)
{
    run_threads(convolve_backward_part, c, c->tokens < ROWS_TO_SHARE ? 1 : threads);
}
