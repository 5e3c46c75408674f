/* The same arithmetic as single operations, for learning and for what samples outside a step. */
#pragma once
#include "decoder.h"

/* Numbers of rows below which a second thread costs more than it brings. */
#define ROWS_TO_SHARE 64

/* float weight[O][I], its rows `stride` apart, into panels of `kind`; `halves` > 1 pads each of that many equal
 * parts of the outputs to whole panels. For INT8 `scale` (float[panels * 32]) is written too. */
void perilune_pack(
    const float *weight, int64_t outputs, int64_t inputs, int64_t stride, int64_t kind, void *panels, float *scale)
{
    for (int64_t panel = 0; panel * PANEL < outputs; panel++)
        for (int64_t c = 0; c < PANEL; c++) {
            int64_t o = panel * PANEL + c;
            const float *row = o < outputs ? weight + o * stride : 0;
            float top = 1e-30f;
            if (kind == INT8) {
                for (int64_t k = 0; row && k < inputs; k++) top = fabsf(row[k]) > top ? fabsf(row[k]) : top;
                scale[o] = top / 127.0f;
            }
            for (int64_t k = 0; k < inputs; k++) {
                int64_t at = (panel * inputs + k) * PANEL + c;
                float value = row ? row[k] : 0.0f;
                if (kind == FLOAT32) ((float *)panels)[at] = value;
                if (kind == INT8) ((int8_t *)panels)[at] = (int8_t)lrintf(value / top * 127.0f);
                if (kind == BFLOAT16)
                    ((uint16_t *)panels)[(panel * inputs + k / 2 * 2) * PANEL + 2 * c + k % 2] = narrow(value);
            }
        }
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
    share(l->rows, TILE_ROWS, rank, team->size, &from, &to);
    product(l->x + from * l->x_stride, l->x_stride, l->weight, 0, panel_count(l->weight),
            l->out + from * l->weight->outputs, l->weight->outputs, to - from,
            l->rounded ? l->rounded + from * l->x_stride : 0);
}

/* out[rows][O] = x[rows][I] weight^T + bias; `rounded` is room for x in bfloat16 where the weight is that. */
void perilune_linear(
    const float *x, int64_t rows, int64_t x_stride, const struct weight *weight, float *out, uint16_t *rounded,
    int64_t threads)
{
    struct linear l = {x, weight, out, rounded, rows, x_stride};
    run_together(linear_part, &l, rows < ROWS_TO_SHARE ? 1 : threads);
}

/* out = x / rms(x) * weight for rows[count] of `size`; row r takes weight r % weights. `factor` is 1 / rms. */
void perilune_rms_norm(
    const float *x, int64_t rows, int64_t size, const float *weight, int64_t weights, float eps, float *out,
    float *factor)
{
    for (int64_t row = 0; row < rows; row++) {
        float f = rms_norm_row(x + row * size, weight + row % weights * size, size, eps, out + row * size);
        if (factor) factor[row] = f;
    }
}

/* x[rows][heads][D] turned by cosine and sine[rows][D / 2]; `direction` -1 turns back. */
void perilune_rotate(
    const float *x, int64_t rows, int64_t heads, int64_t size, const float *cosine, const float *sine,
    int64_t direction, float *out)
{
    float turned[4096];
    for (int64_t row = 0; row < rows; row++) {
        const float *s = sine + row * size / 2;
        if (direction < 0) {
            for (int64_t i = 0; i < size / 2; i++) turned[i] = -s[i];
            s = turned;
        }
        for (int64_t head = 0; head < heads; head++) {
            int64_t at = (row * heads + head) * size;
            rotate_row(x + at, cosine + row * size / 2, s, size / 2, out + at);
        }
    }
}

/* out = silu(gate) * up */
void perilune_swiglu(const float *gate, const float *up, int64_t count, float *out)
{
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) store(out + i, silu(load(gate + i)) * load(up + i));
    if (i < count)
        store_first(out + i, silu(load_first(gate + i, count - i, 0)) * load_first(up + i, count - i, 0), count - i);
}

/* log softmax(scale * logits)[token] for each row; -infinity and NaN come out as such. */
void perilune_token_logprobs(
    const float *logits, int64_t rows, int64_t size, const int64_t *tokens, float scale, float *out, float *log_total)
{
    for (int64_t row = 0; row < rows; row++) {
        const float *at = logits + row * size;
        float total = log_sum_exp(at, size, scale);
        out[row] = at[tokens[row]] * scale - total;
        if (log_total) log_total[row] = total;
    }
}

/* One token for each row, drawn with uniform[row] in [0, 1), or the likeliest where scale is 0; its log-prob
 * is under the distribution it was drawn from (under the unscaled one where scale is 0). */
int perilune_draw(
    const float *logits, int64_t rows, int64_t size, const float *scales, const double *uniform, int64_t *tokens,
    float *logprobs)
{
    double *sums = malloc(((size + STRIDE - 1) / STRIDE) * sizeof(double));
    if (!sums) return 1;
    for (int64_t row = 0; row < rows; row++) {
        const float *at = logits + row * size;
        float scale = scales[row] == 0.0f ? 1.0f : scales[row], total = log_sum_exp(at, size, scale);
        int64_t token = 0;
        if (scales[row] == 0.0f) {
            for (int64_t i = 1; i < size; i++) token = at[i] > at[token] ? i : token;
        } else
            token = invert_cumulative(at, size, scale, total, uniform[row], sums);
        tokens[row] = token;
        logprobs[row] = at[token] * scale - total;
    }
    free(sums);
    return 0;
}
