/* Attention of the query heads of one token over blocks of 16 keys and values.
 *
 * A block of keys is [D][16], so a key is a column. A block of values is [16][D]. The result of a query depends only on
 * the keys and values that it attends to, in the order of their positions. So the result has the same bits in decoding,
 * in chunked prefill and in learning.
 */
#pragma once
#include "vector.h"

#define BLOCK 16
#define MAX_HEADS 4 /* maximum number of query heads of one key-value head that are computed together */

enum cache_kind { CACHE_FLOAT32, CACHE_BFLOAT16, CACHE_INT8 };

INLINE int64_t element_bytes(int64_t kind) { return kind == CACHE_FLOAT32 ? 4 : kind == CACHE_BFLOAT16 ? 2 : 1; }

/* Blocks of one element type. In int8 each token has a scale, and an element is value * scale. */
struct blocks {
    const void *const *keys;
    const void *const *values;
    const float *const *key_scales;
    const float *const *value_scales;
    const void *const *ahead; /* blocks of keys of the next pair, to prefetch while the values are read */
    int64_t ahead_end;        /* number of blocks in `ahead`; 0 to prefetch none */
};

/* The number of vectors of keys or values that are read together: enough to hide the latency of the multiply-adds, and
 * few enough for all sums to stay in registers. */
INLINE int vectors_at_once(const int heads)
{
    return LANES == 16 ? 4 : heads == 1 ? 8 : heads == 2 ? 4 : 2;
}
/* The number of blocks of keys that are read together. */
INLINE int blocks_at_once(const int heads) { return vectors_at_once(heads) > PARTS ? vectors_at_once(heads) / PARTS : 1; }
#define MAX_VECTORS 8

INLINE vec load_element(const void *p, int64_t index, const int kind)
{
    if (kind == CACHE_BFLOAT16) return widen((const uint16_t *)p + index);
    if (kind == CACHE_INT8) return widen_bytes((const int8_t *)p + index);
    return load((const float *)p + index);
}

/* scores = scale q k^T for `count` blocks from `block` on. */
INLINE void block_scores(
    const float *q, int64_t q_stride, const struct blocks *kv, int64_t block, int64_t size, float scale,
    float *scores, int64_t scores_stride, const int heads, const int count, const int kind)
{
    const int vectors = count * PARTS;
    vec acc[MAX_HEADS][MAX_VECTORS];
    UNROLL for (int h = 0; h < heads; h++)
        UNROLL for (int j = 0; j < vectors; j++) acc[h][j] = splat(0.0f);
    for (int64_t d = 0; d < size; d++) {
        vec key[MAX_VECTORS];
        UNROLL for (int b = 0; b < count; b++)
            __builtin_prefetch((const char *)kv->values[block + b] + d * BLOCK * element_bytes(kind));
        UNROLL for (int j = 0; j < vectors; j++)
            key[j] = load_element(kv->keys[block + j / PARTS], d * BLOCK + j % PARTS * LANES, kind);
        UNROLL for (int h = 0; h < heads; h++) {
            vec value = splat(q[h * q_stride + d]);
            UNROLL for (int j = 0; j < vectors; j++) acc[h][j] += value * key[j];
        }
    }
    UNROLL for (int j = 0; j < vectors; j++) {
        vec factor = splat(scale);
        if (kind == CACHE_INT8) factor *= load(kv->key_scales[block + j / PARTS] + j % PARTS * LANES);
        UNROLL for (int h = 0; h < heads; h++)
            store(scores + h * scores_stride + block * BLOCK + j * LANES, acc[h][j] * factor);
    }
}

/* scores = scale q k^T for blocks [first, last). */
INLINE void scores_of(
    const float *q, int64_t q_stride, const struct blocks *kv, int64_t first, int64_t last, int64_t size, float scale,
    float *scores, int64_t scores_stride, const int heads, const int kind)
{
    const int many = blocks_at_once(heads);
    int64_t block = first;
    for (; block + many <= last; block += many)
        block_scores(q, q_stride, kv, block, size, scale, scores, scores_stride, heads, many, kind);
    for (; many > 1 && block < last; block++)
        block_scores(q, q_stride, kv, block, size, scale, scores, scores_stride, heads, 1, kind);
}

/* out = factor * weights v over blocks [first, end), for `vectors` vectors of columns from `column` on. */
INLINE void weighted_columns(
    const struct blocks *kv, int64_t first, int64_t end, int64_t size, int64_t column, const float *weights,
    int64_t stride, const float *factor, float *out, int64_t out_stride, const int heads, const int vectors,
    const int kind)
{
    vec acc[MAX_HEADS][MAX_VECTORS];
    UNROLL for (int h = 0; h < heads; h++)
        UNROLL for (int j = 0; j < vectors; j++) acc[h][j] = splat(0.0f);
    for (int64_t block = first; block < end; block++) {
        const char *ahead = block < kv->ahead_end ? kv->ahead[block] : kv->values[block];
        for (int t = 0; t < BLOCK; t++) {
            vec value[MAX_VECTORS];
            UNROLL for (int j = 0; j < vectors; j++)
                __builtin_prefetch(ahead + (t * size + column + j * LANES) * element_bytes(kind));
            UNROLL for (int j = 0; j < vectors; j++)
                value[j] = load_element(kv->values[block], t * size + column + j * LANES, kind);
            UNROLL for (int h = 0; h < heads; h++) {
                vec weight = splat(weights[h * stride + block * BLOCK + t]);
                UNROLL for (int j = 0; j < vectors; j++) acc[h][j] += weight * value[j];
            }
        }
    }
    UNROLL for (int h = 0; h < heads; h++)
        UNROLL for (int j = 0; j < vectors; j++)
            store(out + h * out_stride + column + j * LANES, acc[h][j] * splat(factor[h]));
}

/* out = factor * weights v over blocks [first, end). */
INLINE void weighted_values(
    const struct blocks *kv, int64_t first, int64_t end, int64_t size, const float *weights, int64_t stride,
    const float *factor, float *out, int64_t out_stride, const int heads, const int kind)
{
    const int many = vectors_at_once(heads);
    int64_t column = 0;
    for (; column + many * LANES <= size; column += many * LANES)
        weighted_columns(kv, first, end, size, column, weights, stride, factor, out, out_stride, heads, many, kind);
    for (; column < size; column += LANES)
        weighted_columns(kv, first, end, size, column, weights, stride, factor, out, out_stride, heads, 1, kind);
}

/* softmax(scale q k^T) v of `heads` queries at one position that share keys and values.
 *
 * The queries see positions [start, end). `scores` is a buffer of heads * scores_stride floats. `log_total`, if not
 * null, receives the log of the denominator of each softmax, that is, the log of the sum of exp(scale q k). `sinks`, if
 * not null, has one attention sink per query: a score that counts in the denominator and has no value. */
INLINE void attend_heads(
    const float *q, int64_t q_stride, const struct blocks *kv, int64_t start, int64_t end, int64_t size, float scale,
    float *scores, int64_t scores_stride, float *out, int64_t out_stride, const float *sinks, float *log_total,
    const int heads, const int kind)
{
    int64_t first = start / BLOCK, last = (end + BLOCK - 1) / BLOCK;
    scores_of(q, q_stride, kv, first, last, size, scale, scores, scores_stride, heads, kind);
    float factor[MAX_HEADS];
    for (int h = 0; h < heads; h++) {
        float *row = scores + h * scores_stride;
        struct lanes top = splat_lanes(-INFINITY), total = splat_lanes(0.0f);
        for (int64_t block = first; block < last; block++)
            FOR_PARTS {
                float *at = row + block * BLOCK + p * LANES;
                ivec position = count_from(block * BLOCK + p * LANES);
                vec x = blend((position >= (int32_t)start) & (position < (int32_t)end), load(at), splat(-INFINITY));
                store(at, x);
                top.part[p] = larger(x, top.part[p]);
            }
        float highest = maximum(top);
        if (sinks && sinks[h] > highest) highest = sinks[h];
        for (int64_t block = first; block < last; block++)
            FOR_PARTS {
                float *at = row + block * BLOCK + p * LANES;
                vec x = exponential(load(at) - splat(highest));
                total.part[p] += x;
                if (kind == CACHE_INT8) x *= load(kv->value_scales[block] + p * LANES);
                store(at, x);
            }
        float denominator = sum(total);
        if (sinks) denominator += exponential(splat(sinks[h] - highest))[0];
        factor[h] = 1.0f / denominator;
        if (log_total) log_total[h] = highest + logf(denominator);
    }
    weighted_values(kv, first, last, size, scores, scores_stride, factor, out, out_stride, heads, kind);
}
