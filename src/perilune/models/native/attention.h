/* Attention of the query heads of one token over blocks of 16 keys and values.
 *
 * A block of keys is [D][16] (a key is a column), a block of values [16][D]. The result of a query depends only on
 * its own keys and values in the order of their positions. So it has the same bits in sampling, in chunked prefill
 * and in learning.
 */
#pragma once
#include "vector.h"

#define BLOCK 16
#define MOST_HEADS 4 /* query heads of one key-value head that are computed together */

enum cache_kind { CACHE_FLOAT32, CACHE_BFLOAT16, CACHE_INT8 };

INLINE int64_t element_bytes(int64_t kind) { return kind == CACHE_FLOAT32 ? 4 : kind == CACHE_BFLOAT16 ? 2 : 1; }

/* Blocks of one element type. In int8 each token has a scale, and an element is value * scale. */
struct blocks {
    const void *const *keys;
    const void *const *values;
    const float *const *key_scales;
    const float *const *value_scales;
    const void *const *ahead; /* the keys to prefetch while the values are read */
    int64_t ahead_end;        /* their number of blocks */
};

INLINE v16 load_element(const void *p, int64_t index, const int kind)
{
    if (kind == CACHE_BFLOAT16) return widen((const uint16_t *)p + index);
    if (kind == CACHE_INT8) return widen_bytes((const int8_t *)p + index);
    return load((const float *)p + index);
}

INLINE void block_scores(
    const float *q, int64_t q_stride, const struct blocks *kv, int64_t block, int64_t size, float scale,
    float *scores, int64_t scores_stride, const int heads, const int count, const int kind)
{
    v16 acc[MOST_HEADS][4];
#pragma GCC unroll 4
    for (int h = 0; h < heads; h++)
#pragma GCC unroll 4
        for (int b = 0; b < count; b++) acc[h][b] = splat(0.0f);
    for (int64_t d = 0; d < size; d++) {
        v16 key[4];
#pragma GCC unroll 4
        for (int b = 0; b < count; b++)
            __builtin_prefetch((const char *)kv->values[block + b] + d * BLOCK * element_bytes(kind));
#pragma GCC unroll 4
        for (int b = 0; b < count; b++) key[b] = load_element(kv->keys[block + b], d * BLOCK, kind);
#pragma GCC unroll 4
        for (int h = 0; h < heads; h++) {
            v16 value = splat(q[h * q_stride + d]);
#pragma GCC unroll 4
            for (int b = 0; b < count; b++) acc[h][b] += value * key[b];
        }
    }
#pragma GCC unroll 4
    for (int b = 0; b < count; b++) {
        v16 factor = splat(scale);
        if (kind == CACHE_INT8) factor *= load(kv->key_scales[block + b]);
#pragma GCC unroll 4
        for (int h = 0; h < heads; h++)
            store(scores + h * scores_stride + (block + b) * BLOCK, acc[h][b] * factor);
    }
}

INLINE void weighted_values(
    const struct blocks *kv, int64_t first, int64_t end, int64_t size, int64_t column, const float *weights,
    int64_t stride, const float *factor, float *out, int64_t out_stride, const int heads, const int vectors,
    const int kind)
{
    v16 acc[MOST_HEADS][4];
#pragma GCC unroll 4
    for (int h = 0; h < heads; h++)
#pragma GCC unroll 4
        for (int j = 0; j < vectors; j++) acc[h][j] = splat(0.0f);
    for (int64_t block = first; block < end; block++) {
        const char *ahead = block < kv->ahead_end ? kv->ahead[block] : kv->values[block];
        for (int t = 0; t < BLOCK; t++) {
            v16 value[4];
#pragma GCC unroll 4
            for (int j = 0; j < vectors; j++)
                __builtin_prefetch(ahead + (t * size + column + j * LANES) * element_bytes(kind));
#pragma GCC unroll 4
            for (int j = 0; j < vectors; j++)
                value[j] = load_element(kv->values[block], t * size + column + j * LANES, kind);
#pragma GCC unroll 4
            for (int h = 0; h < heads; h++) {
                v16 weight = splat(weights[h * stride + block * BLOCK + t]);
#pragma GCC unroll 4
                for (int j = 0; j < vectors; j++) acc[h][j] += weight * value[j];
            }
        }
    }
#pragma GCC unroll 4
    for (int h = 0; h < heads; h++)
#pragma GCC unroll 4
        for (int j = 0; j < vectors; j++)
            store(out + h * out_stride + column + j * LANES, acc[h][j] * splat(factor[h]));
}

/* softmax(scale q k^T) v of `heads` queries at one position that share keys and values.
 *
 * The queries see positions [start, end). `scores` is a buffer of heads * scores_stride floats. If `log_total` is not
 * null, it receives the log of the denominator of each softmax, scale included. `sinks`, unless null, has a score for
 * each query that belongs to no position and has no value. */
INLINE void attend_heads(
    const float *q, int64_t q_stride, const struct blocks *kv, int64_t start, int64_t end, int64_t size, float scale,
    float *scores, int64_t scores_stride, float *out, int64_t out_stride, const float *sinks, float *log_total,
    const int heads, const int kind)
{
    int64_t first = start / BLOCK, last = (end + BLOCK - 1) / BLOCK, block = first;
    for (; block + 4 <= last; block += 4)
        block_scores(q, q_stride, kv, block, size, scale, scores, scores_stride, heads, 4, kind);
    for (; block < last; block++)
        block_scores(q, q_stride, kv, block, size, scale, scores, scores_stride, heads, 1, kind);
    float factor[MOST_HEADS];
    for (int h = 0; h < heads; h++) {
        float *row = scores + h * scores_stride;
        v16 top = splat(-INFINITY), total = splat(0.0f);
        for (block = first; block < last; block++) {
            i16 position = LANE + (int32_t)(block * BLOCK);
            v16 x = load(row + block * BLOCK);
            x = blend((position >= (int32_t)start) & (position < (int32_t)end), x, splat(-INFINITY));
            store(row + block * BLOCK, x);
            top = larger(x, top);
        }
        float highest = maximum(top);
        if (sinks && sinks[h] > highest) highest = sinks[h];
        for (block = first; block < last; block++) {
            v16 x = exponential(load(row + block * BLOCK) - splat(highest));
            total += x;
            if (kind == CACHE_INT8) x *= load(kv->value_scales[block]);
            store(row + block * BLOCK, x);
        }
        float denominator = sum(total);
        if (sinks) denominator += exponential(splat(sinks[h] - highest))[0];
        factor[h] = 1.0f / denominator;
        if (log_total) log_total[h] = highest + logf(denominator);
    }
    int64_t column = 0;
    for (; column + 4 * LANES <= size; column += 4 * LANES)
        weighted_values(kv, first, last, size, column, scores, scores_stride, factor, out, out_stride, heads, 4, kind);
    for (; column < size; column += LANES)
        weighted_values(kv, first, last, size, column, scores, scores_stride, factor, out, out_stride, heads, 1, kind);
}
