/* The operations of a decoding step as separate functions, for the learner and for sampling with torch. */
#pragma once
#include "decoder.h"

/* Below these sizes a second thread costs more time than it saves. */
#define ROWS_TO_SHARE 64
#define DRAWS_TO_SHARE (1 << 16) /* in logits */
#define ELEMENTS_TO_SHARE (1 << 17)

struct packing {
    const float *weight;
    int64_t outputs, inputs, stride, kind;
    void *panels;
    float *scale;
    void (*pack)(const struct packing *p, int64_t panel);
};

/* Pack one panel of a weight[O][I] as float32 or int8. */
static void pack_panel(const struct packing *p, int64_t panel)
{
    const float *rows[PANEL];
    float top[PANEL];
    for (int64_t c = 0; c < PANEL; c++) {
        rows[c] = panel * PANEL + c < p->outputs ? p->weight + (panel * PANEL + c) * p->stride : 0;
        top[c] = 1e-30f;
        for (int64_t k = 0; p->kind == INT8 && rows[c] && k < p->inputs; k++)
            top[c] = fabsf(rows[c][k]) > top[c] ? fabsf(rows[c][k]) : top[c];
        if (p->kind == INT8) p->scale[panel * PANEL + c] = top[c] / 127.0f;
    }
    for (int64_t start = 0; start < p->inputs; start += SIDE) /* a piece of the panel stays in the cache */
        for (int64_t c = 0; c < PANEL; c++)
            for (int64_t k = start; k < p->inputs && k < start + SIDE; k++) {
                int64_t at = (panel * p->inputs + k) * PANEL + c;
                float value = rows[c] ? rows[c][k] : 0.0f;
                if (p->kind == FLOAT32) ((float *)p->panels)[at] = value;
                else ((int8_t *)p->panels)[at] = (int8_t)lrintf(value / top[c] * 127.0f);
            }
}

/* Pack one panel of a weight[O][I] as bfloat16: [I / 2][32 outputs][pair of inputs]. */
static void pack_pairs(const struct packing *p, int64_t panel)
{
    uint32_t *to = (uint32_t *)p->panels + panel * p->inputs / 2 * PANEL;
    for (int64_t k = 0; k < p->inputs; k += 2 * SIDE)
        for (int64_t first = 0; first < PANEL; first += SIDE) {
            uint32_t pairs[SIDE * SIDE] = {0}, across[SIDE * SIDE];
            int64_t words = p->inputs - k < 2 * SIDE ? (p->inputs - k) / 2 : SIDE;
            for (int64_t c = 0; c < SIDE && panel * PANEL + first + c < p->outputs; c++)
                round_pairs(p->weight + (panel * PANEL + first + c) * p->stride + k, words, pairs + c * SIDE);
            transpose_words(pairs, across, SIDE);
            for (int64_t j = 0; j < words; j++)
                memcpy(to + (k / 2 + j) * PANEL + first, across + j * SIDE, SIDE * sizeof(uint32_t));
        }
}

/* Pack one panel of a weight[I][O] in the layout of `pack_pairs`. */
static void pack_pairs_across(const struct packing *p, int64_t panel)
{
    int64_t first = panel * PANEL, count = p->outputs - first < PANEL ? p->outputs - first : PANEL;
    for (int64_t k = 0; k < p->inputs; k += 2) {
        float rows[2][PANEL] = {0};
        uint16_t *to = (uint16_t *)p->panels + (panel * p->inputs + k) * PANEL;
        const float *low = p->weight + k * p->stride + first, *high = low + p->stride;
        if (count < PANEL) {
            memcpy(rows[0], low, count * sizeof(float));
            memcpy(rows[1], high, count * sizeof(float));
            low = rows[0], high = rows[1];
        }
        for (int64_t c = 0; c < PANEL; c += SIDE) {
            uint32_t pairs[SIDE];
            pair_rows(low + c, high + c, pairs);
            memcpy(to + 2 * c, pairs, sizeof pairs);
        }
    }
}

static void pack_part(void *argument, int64_t rank, struct team *team)
{
    const struct packing *p = argument;
    int64_t from, to;
    split_range(panels_of(p->outputs), 1, rank, team->size, &from, &to);
    for (int64_t panel = from; panel < to; panel++) p->pack(p, panel);
}

/* Pack a float weight[O][I] into panels of `kind`. With `across`, the weight is [I][O]. `stride` is the number of
 * floats between rows. BFLOAT16 needs an even I, and `across` needs BFLOAT16. INT8 also writes `scale`,
 * float[panels * 32], with one scale per output. */
void perilune_pack(
    const float *weight, int64_t outputs, int64_t inputs, int64_t stride, int64_t kind, int64_t across, void *panels,
    float *scale, int64_t threads)
{
    struct packing packing = {weight, outputs, inputs, stride, kind, panels, scale, pack_panel};
    if (kind == BFLOAT16) packing.pack = across ? pack_pairs_across : pack_pairs;
    run_threads(pack_part, &packing, outputs * inputs < ELEMENTS_TO_SHARE ? 1 : threads);
}

int64_t perilune_has_tiles(void) { return has_tiles(); }

int64_t perilune_has_bfloat16(void)
{
#ifdef __AVX512BF16__
    return 1;
#else
    return has_tiles();
#endif
}

struct linear {
    const float *x;
    const struct weight *weight;
    float *out;
    uint16_t *rounded;
    int64_t rows, x_stride;
};

static void linear_part(void *argument, int64_t rank, struct team *team)
{
    struct linear *l = argument;
    int64_t from, to;
    split_range(l->rows, l->rounded ? 2 * SIDE : TILE_ROWS, rank, team->size, &from, &to);
    product(l->x + from * l->x_stride, l->x_stride, l->weight, 0, panel_count(l->weight),
            l->out + from * l->weight->outputs, l->weight->outputs, to - from,
            l->rounded ? l->rounded + from * l->x_stride : 0);
}

/* out[rows][O] = x[rows][I] weight^T + bias. For bfloat16 weights, `rounded` is a buffer for x in bfloat16. */
void perilune_linear(
    const float *x, int64_t rows, int64_t x_stride, const struct weight *weight, float *out, uint16_t *rounded,
    int64_t threads)
{
    struct linear l = {x, weight, out, rounded, rows, x_stride};
    run_threads(linear_part, &l, rows < ROWS_TO_SHARE ? 1 : threads);
}

static void linear_across_part(void *argument, int64_t rank, struct team *team)
{
    struct linear *l = argument;
    int64_t from, to, inputs = l->weight->inputs;
    split_range(l->rows, 2 * SIDE, rank, team->size, &from, &to);
    uint16_t *rounded = l->rounded + from * inputs;
    round_across(l->x, l->x_stride, from, to, inputs, rounded);
    product_rounded(rounded, inputs, l->weight, 0, panel_count(l->weight), l->out + from * l->weight->outputs,
                    l->weight->outputs, to - from);
}

/* out[rows][O] = x[I][rows]^T weight^T for a bfloat16 weight; `rounded` is a buffer for x. */
void perilune_linear_across(
    const float *x, int64_t rows, int64_t x_stride, const struct weight *weight, float *out, uint16_t *rounded,
    int64_t threads)
{
    struct linear l = {x, weight, out, rounded, rows, x_stride};
    run_threads(linear_across_part, &l, rows < ROWS_TO_SHARE ? 1 : threads);
}

/* The arguments of an operation on rows. Each operation uses some of them; their meaning depends on the operation. */
struct rows {
    const float *a, *b, *c, *d;
    float *out, *second, *third;
    const int64_t *tokens;
    int64_t count, size, modulus, stride;
    float number;
    void (*function)(const struct rows *rows, int64_t from, int64_t to, int64_t rank);
};

static void rows_part(void *argument, int64_t rank, struct team *team)
{
    const struct rows *rows = argument;
    int64_t from, to;
    split_range(rows->count, 1, rank, team->size, &from, &to);
    rows->function(rows, from, to, rank);
}

static void run_rows(struct rows *rows, int64_t threads)
{
    run_threads(rows_part, rows, rows->count < ROWS_TO_SHARE ? 1 : threads);
}

static void rms_norm_part(const struct rows *r, int64_t from, int64_t to, int64_t rank)
{
    (void)rank;
    for (int64_t row = from; row < to; row++) {
        const float *weight = r->b + row % r->modulus * r->size;
        float factor = rms_norm_row(r->a + row * r->size, weight, r->size, r->number, r->out + row * r->size);
        if (r->second) r->second[row] = factor;
    }
}

/* out = x / rms(x) * weight for rows of `size` elements. Row r uses the weight r % weights. `factor` receives 1 / rms
 * of each row. */
void perilune_rms_norm(
    const float *x, int64_t count, int64_t size, const float *weight, int64_t weights, float eps, float *out,
    float *factor, int64_t threads)
{
    struct rows rows = {.a = x, .b = weight, .out = out, .second = factor, .count = count, .size = size,
                        .modulus = weights, .number = eps, .function = rms_norm_part};
    run_rows(&rows, threads);
}

/* Let n = f x and g = w dy. Then dx = f (g - n mean(n g)), and dw is the sum of n dy over the rows. Each thread computes
 * the sum over its own rows. */
static void rms_norm_backward_part(const struct rows *r, int64_t from, int64_t to, int64_t rank)
{
    float *sums = r->second + rank * r->modulus * r->size;
    for (int64_t row = from; row < to; row++) {
        const float *x = r->a + row * r->size, *dy = r->d + row * r->size, *w = r->b + row % r->modulus * r->size;
        float *dx = r->out + row * r->size, *dw = sums + row % r->modulus * r->size;
        struct lanes along = splat_lanes(0.0f);
        for (int64_t i = 0; i < r->size; i += WIDE)
            FOR_PARTS along.part[p] += load(x + i + p * LANES) * load(w + i + p * LANES) * load(dy + i + p * LANES);
        vec factor = splat(r->c[row]), mean = splat(sum(along) / (float)r->size) * factor;
        for (int64_t i = 0; i < r->size; i += LANES) {
            vec n = load(x + i) * factor, g = load(dy + i);
            store(dw + i, load(dw + i) + n * g);
            store(dx + i, factor * (round_now(load(w + i) * g) - n * mean));
        }
    }
}

/* `grad_weight` is zeros[threads][weights * size]. Its first row receives the sum over the threads. */
void perilune_rms_norm_backward(
    const float *x, int64_t count, int64_t size, const float *weight, int64_t weights, const float *factor,
    const float *grad, float *grad_x, float *grad_weight, int64_t threads)
{
    struct rows rows = {.a = x, .b = weight, .c = factor, .d = grad, .out = grad_x, .second = grad_weight,
                        .count = count, .size = size, .modulus = weights, .function = rms_norm_backward_part};
    run_rows(&rows, threads);
    for (int64_t rank = 1; rank < threads; rank++)
        for (int64_t i = 0; i < weights * size; i++) grad_weight[i] += grad_weight[rank * weights * size + i];
}

static void rotate_part(const struct rows *r, int64_t from, int64_t to, int64_t rank)
{
    (void)rank;
    int64_t half = r->size / 2, heads = r->modulus;
    for (int64_t row = from; row < to; row++)
        for (int64_t head = 0; head < heads; head++) {
            int64_t at = (row * heads + head) * r->size;
            const float *cosine = r->b + row * r->stride, *sine = r->c + row * r->stride;
            rotate_row(r->a + at, cosine, sine, half, r->number, r->out + at);
        }
}

/* Rotate x[rows][heads][D] by cosine[rows][D / 2] and sine[rows][D / 2], with `stride` floats between their rows.
 * Direction -1 is the inverse rotation. */
void perilune_rotate(
    const float *x, int64_t count, int64_t heads, int64_t size, const float *cosine, const float *sine,
    int64_t stride, float direction, float *out, int64_t threads)
{
    struct rows rows = {.a = x, .b = cosine, .c = sine, .out = out, .count = count, .size = size,
                        .modulus = heads, .stride = stride, .number = direction, .function = rotate_part};
    run_rows(&rows, threads);
}

static void gated_part(const struct rows *r, int64_t from, int64_t to, int64_t rank)
{
    (void)rank;
    int64_t i = from * r->size, end = to * r->size;
    for (; i < end; i += LANES) {
        vec gate = load_first(r->a + i, end - i, 0.0f), up = load_first(r->b + i, end - i, 0.0f);
        store_first(r->out + i, gated(gate, up, r->modulus), end - i);
    }
}

/* out = activation(gate) * up */
void perilune_gated(
    const float *gate, const float *up, int64_t count, int64_t size, int64_t activation, float *out, int64_t threads)
{
    struct rows rows = {.a = gate, .b = up, .out = out, .count = count, .size = size, .modulus = activation, .function = gated_part};
    run_rows(&rows, threads);
}

/* dgate = dy u s (1 + g (1 - s)) and dup = dy g s, s = 1 / (1 + exp(-g)) */
static void swiglu_backward_part(const struct rows *r, int64_t from, int64_t to, int64_t rank)
{
    (void)rank;
    for (int64_t i = from * r->size, end = to * r->size; i < end; i += LANES) {
        int64_t left = end - i;
        vec g = load_first(r->a + i, left, 0.0f), u = load_first(r->b + i, left, 0.0f);
        vec dy = load_first(r->c + i, left, 0.0f);
        vec s = splat(1.0f) / (splat(1.0f) + exponential(-g));
        store_first(r->out + i, dy * u * s * (splat(1.0f) + g * (splat(1.0f) - s)), left);
        store_first(r->second + i, dy * g * s, left);
    }
}

void perilune_swiglu_backward(
    const float *gate, const float *up, const float *grad, int64_t count, int64_t size, float *grad_gate,
    float *grad_up, int64_t threads)
{
    struct rows rows = {.a = gate, .b = up, .c = grad, .out = grad_gate, .second = grad_up, .count = count,
                        .size = size, .function = swiglu_backward_part};
    run_rows(&rows, threads);
}

struct routes {
    float *logits, *weights;
    const int64_t *given;
    int64_t *chosen, rows, experts, per_token, normalized;
};

static void route_part(void *argument, int64_t rank, struct team *team)
{
    struct routes *r = argument;
    int64_t from, to;
    split_range(r->rows, 1, rank, team->size, &from, &to);
    for (int64_t row = from; row < to; row++)
        route_row(r->logits + row * r->experts, r->experts, r->per_token, r->normalized,
                  r->given ? r->given + row * r->per_token : NULL, r->weights + row * r->per_token, r->chosen + row * r->per_token);
}

/* Compute weights[rows][per_token] and the chosen experts from the router's logits[rows][experts], and overwrite the
 * logits. If `given` is not null, its experts replace the choice, except in rows of -1. */
void perilune_route(
    float *logits, int64_t rows, int64_t experts, int64_t per_token, int64_t normalized, const int64_t *given,
    float *weights, int64_t *chosen, int64_t threads)
{
    struct routes routes = {logits, weights, given, chosen, rows, experts, per_token, normalized};
    run_threads(route_part, &routes, rows < ROWS_TO_SHARE ? 1 : threads);
}

static void token_logprobs_part(const struct rows *r, int64_t from, int64_t to, int64_t rank)
{
    (void)rank;
    for (int64_t row = from; row < to; row++) {
        const float *x = r->a + row * r->size;
        struct softmax s = softmax_of(x, r->size, r->number);
        r->out[row] = log_probability(x[r->tokens[row]], s);
        r->second[2 * row] = s.shift;
        r->second[2 * row + 1] = s.offset;
        if (!r->third) continue;
        struct lanes mean = splat_lanes(0.0f);
        for (int64_t i = 0; i < r->size; i += WIDE) {
            struct lanes some = load_lanes(x + i, r->size - i, -INFINITY);
            FOR_PARTS {
                vec logprob = scaled(some.part[p], s) - splat(s.offset), weight = exponential(logprob);
                mean.part[p] += blend(weight > splat(0.0f), weight * logprob, splat(0.0f));
            }
        }
        r->third[row] = -sum(mean);
    }
}

/* Compute log softmax(scale * logits)[token] of each row. normalizers[count][2] receives the shift and the offset of
 * the softmax. `entropy`, if not null, receives the entropy. Minus infinity and NaN propagate. */
void perilune_token_logprobs(
    const float *logits, int64_t count, int64_t size, const int64_t *tokens, float scale, float *out,
    float *normalizers, float *entropy, int64_t threads)
{
    struct rows rows = {.a = logits, .tokens = tokens, .out = out, .second = normalizers, .third = entropy,
                        .count = count, .size = size, .number = scale, .function = token_logprobs_part};
    run_rows(&rows, threads);
}

static void token_logprobs_backward_part(const struct rows *r, int64_t from, int64_t to, int64_t rank)
{
    (void)rank;
    for (int64_t row = from; row < to; row++) {
        const float *x = r->a + row * r->size;
        struct softmax s = {r->b[2 * row], r->number, r->b[2 * row + 1]};
        float *out = r->out + row * r->size, factor = r->c[row] * r->number;
        for (int64_t i = 0; i < r->size; i += LANES) {
            vec logprob = scaled(load_first(x + i, r->size - i, -INFINITY), s) - splat(s.offset);
            store_first(out + i, splat(-factor) * exponential(logprob), r->size - i);
        }
        out[r->tokens[row]] += factor;
    }
}

/* Compute the gradient of the logits from the gradient of the log-probs: scale * grad * (onehot(token) - softmax). */
void perilune_token_logprobs_backward(
    const float *logits, int64_t count, int64_t size, const int64_t *tokens, float scale, const float *normalizers,
    const float *grad, float *out, int64_t threads)
{
    struct rows rows = {.a = logits, .b = normalizers, .c = grad, .tokens = tokens, .out = out, .count = count,
                        .size = size, .number = scale, .function = token_logprobs_backward_part};
    run_rows(&rows, threads);
}

/* Sample `count` tokens. Token i comes from the logits in row rows[i], or in row i if `rows` is null. uniform[i] in
 * [0, 1) selects it. If scales[i] is 0, it is the most likely token. `logprobs` receives the log-prob under the scaled
 * distribution, or under the unscaled one if the scale is 0. */
struct draws {
    const float *logits, *scales;
    const int64_t *rows;
    const double *uniform;
    int64_t count, size, *tokens;
    float *logprobs;
    atomic_int failed;
};

static void draw_part(void *argument, int64_t rank, struct team *team)
{
    struct draws *d = argument;
    int64_t from, to;
    split_range(d->count, 1, rank, team->size, &from, &to);
    double *sums = malloc(((d->size + STRIDE - 1) / STRIDE) * sizeof(double));
    if (!sums) atomic_store(&d->failed, 1);
    for (int64_t i = from; i < to && sums; i++) {
        const float *at = d->logits + (d->rows ? d->rows[i] : i) * d->size;
        int greedy = d->scales[i] == 0.0f;
        struct softmax s = softmax_of(at, d->size, greedy ? 1.0f : d->scales[i]);
        int64_t token = 0;
        for (int64_t v = 1; greedy && v < d->size; v++) token = at[v] > at[token] ? v : token;
        if (!greedy) token = invert_cumulative(at, d->size, s, d->uniform[i], sums);
        d->tokens[i] = token;
        d->logprobs[i] = log_probability(at[token], s);
    }
    free(sums);
}

int perilune_draw(struct draws *draws, int64_t threads)
{
    atomic_store(&draws->failed, 0);
    run_threads(draw_part, draws, draws->count * draws->size < DRAWS_TO_SHARE ? 1 : threads);
    return atomic_load(&draws->failed);
}
