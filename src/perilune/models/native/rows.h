/* Operations on single rows: norms, rotation, gates, probabilities. */
#pragma once
#include "vector.h"

/* 1 / sqrt(mean(x^2) + eps) of one row; `size` is a multiple of 16. */
INLINE float inverse_rms(const float *x, int64_t size, float eps)
{
    struct lanes squares = splat_lanes(0.0f);
    for (int64_t i = 0; i < size; i += WIDE)
        FOR_PARTS {
            vec part = load(x + i + p * LANES);
            squares.part[p] += part * part;
        }
    return 1.0f / sqrtf(sum(squares) / (float)size + eps);
}

/* out = x * inverse_rms(x) * weight. Returns inverse_rms(x). `out` may be `x`. */
INLINE float rms_norm_row(const float *x, const float *weight, int64_t size, float eps, float *out)
{
    float factor = inverse_rms(x, size, eps);
    for (int64_t i = 0; i < size; i += LANES) store(out + i, load(x + i) * splat(factor) * load(weight + i));
    return factor;
}

/* Rotary embedding of one head: (a, b) becomes (a cos - b sin, b cos + a sin), where a and b are the two halves of x
 * with `half` elements each. Direction -1 is the inverse rotation. `out` may be `x`. */
INLINE void rotate_row(
    const float *x, const float *cosine, const float *sine, int64_t half, float direction, float *out)
{
    for (int64_t i = 0; i < half; i += LANES) {
        vec a = load(x + i), b = load(x + half + i), c = load(cosine + i), s = load(sine + i) * splat(direction);
        vec low = round_now(a * c) - b * s, high = round_now(b * c) + a * s;
        store(out + i, low);
        store(out + half + i, high);
    }
}

/* x / 2 (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) */
INLINE vec gelu_tanh(vec x)
{
    vec inner = splat(0.7978845608f) * (x + splat(0.044715f) * x * x * x);
    return x / (splat(1.0f) + exponential(splat(-2.0f) * inner)); /* x (1 + tanh(inner)) / 2 */
}

/* The activation of gpt-oss is the product of x / (1 + exp(-1.702 x)), where x is bounded to at most 7, and y + 1,
 * where y is clamped to [-7, 7]. These functions compute its two factors. */
INLINE vec clamped_gate(vec x)
{
    x = blend(x > splat(7.0f), splat(7.0f), x);
    return x / (splat(1.0f) + exponential(splat(-1.702f) * x));
}

INLINE vec clamped_up(vec y)
{
    y = blend(y > splat(7.0f), splat(7.0f), y);
    return blend(y < splat(-7.0f), splat(-7.0f), y) + splat(1.0f);
}

enum activation { SILU, GELU_TANH, CLAMPED };

INLINE vec gated(vec gate, vec up, int64_t activation)
{
    if (activation == CLAMPED) return clamped_gate(gate) * clamped_up(up);
    return (activation == GELU_TANH ? gelu_tanh(gate) : silu(gate)) * up;
}

/* gate = activation(gate) * up. The row needs padding to a multiple of LANES elements. */
INLINE void gate_row(float *gate, const float *up, int64_t count, int64_t activation)
{
    for (int64_t i = 0; i < count; i += LANES) {
        store(gate + i, gated(load(gate + i), load(up + i), activation));
    }
}

/* The distribution softmax(scale * x) of one row: log p(x) = (x - shift) * scale - offset.
 *
 * The largest logit is subtracted before scaling. In the reverse order, a scale of 1e6 (temperature 1e-6) would amplify
 * the rounding errors of large logits to whole nats. At scale 1 the shift includes the log of the sum. */
struct softmax {
    float shift, scale, offset;
};

INLINE struct softmax softmax_of(const float *x, int64_t size, float scale)
{
    struct lanes top = splat_lanes(-INFINITY), total = splat_lanes(0.0f);
    for (int64_t i = 0; i < size; i += WIDE) {
        struct lanes some = load_lanes(x + i, size - i, -INFINITY);
        FOR_PARTS top.part[p] = larger(some.part[p], top.part[p]);
    }
    float highest = maximum(top);
    for (int64_t i = 0; i < size; i += WIDE) {
        struct lanes some = load_lanes(x + i, size - i, -INFINITY);
        FOR_PARTS total.part[p] += exponential((some.part[p] - splat(highest)) * splat(scale));
    }
    float log_total = logf(sum(total));
    if (scale == 1.0f) return (struct softmax){highest + log_total, 1.0f, 0.0f};
    return (struct softmax){highest, scale, log_total};
}

INLINE vec scaled(vec x, struct softmax s) { return (x - splat(s.shift)) * splat(s.scale); }

/* The log-prob of one logit. Sampling, scoring and learning must agree bit for bit. `volatile` prevents the compiler
 * from fusing product and difference in some callers but not in others. */
INLINE float log_probability(float x, struct softmax s)
{
    volatile float product = (x - s.shift) * s.scale;
    return product - s.offset;
}

/* Return the token whose interval of the cumulative distribution contains `uniform`, a number in [0, 1). The token
 * always has a positive probability. Sums are double. One pass computes the partial sums of 256 tokens each, so the
 * search then looks at one group of 256 tokens only. */
#define STRIDE 256
INLINE int64_t invert_cumulative(const float *logits, int64_t size, struct softmax of, double uniform, double *sums)
{
    int64_t strides = (size + STRIDE - 1) / STRIDE, last = 0;
    double total = 0.0;
    for (int64_t s = 0; s < strides; s++) {
        double part = 0.0;
        int64_t end = (s + 1) * STRIDE < size ? (s + 1) * STRIDE : size;
        for (int64_t i = s * STRIDE; i < end; i += WIDE) {
            struct lanes some = load_lanes(logits + i, end - i, -INFINITY);
            FOR_PARTS some.part[p] = exponential(scaled(some.part[p], of));
            part += (double)sum(some);
        }
        total += part;
        sums[s] = total;
    }
    double threshold = uniform * total;
    int64_t s = 0;
    while (s < strides - 1 && sums[s] <= threshold) s++;
    double reached = s ? sums[s - 1] : 0.0;
    int64_t end = (s + 1) * STRIDE < size ? (s + 1) * STRIDE : size;
    for (int64_t i = s * STRIDE; i < end; i += LANES) {
        float weight[LANES];
        store(weight, exponential(scaled(load_first(logits + i, end - i, -INFINITY), of)));
        for (int lane = 0; lane < LANES && i + lane < end; lane++) {
            if (weight[lane] <= 0.0f) continue;
            last = i + lane;
            reached += (double)weight[lane];
            if (reached > threshold) return last;
        }
    }
    return last; /* rounding kept the sum below the threshold: take the last token with a positive weight */
}
