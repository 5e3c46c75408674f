/* out[n, o] = sum over k of x[n, k] * weight[o, k], as one chain of fused multiply-adds in the order of k.
 *
 * The weight is stored in panels of 32 outputs, [panel][k][32], and read once from front to back. A tile keeps up to
 * 12 rows times 32 outputs in registers for the whole sum, so the bits of a row do not depend on the other rows,
 * on their number, or on the thread.
 */
#pragma once
#include "tiles.h"

#define PANEL 32
#define TILE_ROWS 12
#define APART 16 /* padding floats between rows: a stride of a power of two causes cache conflicts */

enum weight_kind { FLOAT32, BFLOAT16, INT8 };

/* A weight packed by `perilune_pack`. `scale` is per output, for INT8 only; `bias` may be null. */
struct weight {
    const void *panels;
    const float *scale;
    const float *bias;
    int64_t outputs, inputs;
    int64_t kind;
};

INLINE int64_t panels_of(int64_t outputs) { return (outputs + PANEL - 1) / PANEL; }
INLINE int64_t panel_count(const struct weight *w) { return panels_of(w->outputs); }

/* One row of float32 or bfloat16 panels, unpacked. */
static void unpack_row(const struct weight *w, int64_t row, float *out)
{
    int64_t start = row / PANEL * w->inputs * PANEL, c = row % PANEL;
    if (w->kind == FLOAT32)
        for (int64_t k = 0; k < w->inputs; k++) out[k] = ((const float *)w->panels)[start + k * PANEL + c];
    else
        for (int64_t k = 0; k < w->inputs; k++) {
            uint32_t bits = (uint32_t)((const uint16_t *)w->panels)[start + k / 2 * 2 * PANEL + 2 * c + k % 2] << 16;
            memcpy(out + k, &bits, sizeof bits);
        }
}

typedef v16 tile[TILE_ROWS][2];

INLINE void tile_float32(tile acc, const float *x, int64_t stride, const float *panel, int64_t inputs, const int rows)
{
    for (int64_t k = 0; k < inputs; k++, panel += PANEL) {
        v16 low = load(panel), high = load(panel + LANES);
#pragma GCC unroll 12
        for (int r = 0; r < rows; r++) {
            v16 value = splat(x[r * stride + k]);
            acc[r][0] += value * low;
            acc[r][1] += value * high;
        }
    }
}

INLINE void tile_int8(tile acc, const float *x, int64_t stride, const int8_t *panel, int64_t inputs, const int rows)
{
    for (int64_t k = 0; k < inputs; k++, panel += PANEL) {
        v16 low = widen_bytes(panel), high = widen_bytes(panel + LANES);
#pragma GCC unroll 12
        for (int r = 0; r < rows; r++) {
            v16 value = splat(x[r * stride + k]);
            acc[r][0] += value * low;
            acc[r][1] += value * high;
        }
    }
}

/* Panels of bfloat16 hold pairs, [panel][k / 2][32][2]; x holds rounded pairs. */
INLINE void tile_bfloat16(
    tile acc, const uint16_t *x, int64_t stride, const uint16_t *panel, int64_t inputs, const int rows)
{
    for (int64_t k = 0; k < inputs; k += 2, panel += 2 * PANEL) {
#ifdef __AVX512BF16__
        __m512bh low = (__m512bh)_mm512_loadu_si512(panel), high = (__m512bh)_mm512_loadu_si512(panel + 2 * LANES);
#pragma GCC unroll 12
        for (int r = 0; r < rows; r++) {
            int32_t pair;
            memcpy(&pair, x + r * stride + k, 4);
            __m512bh value = (__m512bh)_mm512_set1_epi32(pair);
            acc[r][0] = (v16)_mm512_dpbf16_ps((__m512)acc[r][0], low, value);
            acc[r][1] = (v16)_mm512_dpbf16_ps((__m512)acc[r][1], high, value);
        }
#else
        u16_word low, high;
        memcpy(&low, panel, 64);
        memcpy(&high, panel + 2 * LANES, 64);
#pragma GCC unroll 12
        for (int r = 0; r < rows; r++) {
            uint32_t first = (uint32_t)x[r * stride + k] << 16, second = (uint32_t)x[r * stride + k + 1] << 16;
            float a, b;
            memcpy(&a, &first, 4);
            memcpy(&b, &second, 4);
            acc[r][0] += splat(a) * (v16)(low << 16);
            acc[r][1] += splat(a) * (v16)(high << 16);
            acc[r][0] += splat(b) * (v16)(low & 0xffff0000u);
            acc[r][1] += splat(b) * (v16)(high & 0xffff0000u);
        }
#endif
    }
}

INLINE void tile_of(
    tile acc, const void *x, int64_t stride, const struct weight *w, int64_t panel, const int rows, const int kind)
{
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++) acc[r][0] = acc[r][1] = splat(0.0f);
    int64_t offset = panel * w->inputs * PANEL;
    if (kind == FLOAT32) tile_float32(acc, x, stride, (const float *)w->panels + offset, w->inputs, rows);
    if (kind == INT8) tile_int8(acc, x, stride, (const int8_t *)w->panels + offset, w->inputs, rows);
    if (kind == BFLOAT16) tile_bfloat16(acc, x, stride, (const uint16_t *)w->panels + offset, w->inputs, rows);
    if (kind == INT8) {
        v16 low = load(w->scale + panel * PANEL), high = load(w->scale + panel * PANEL + LANES);
#pragma GCC unroll 12
        for (int r = 0; r < rows; r++) acc[r][0] *= low, acc[r][1] *= high;
    }
    if (w->bias) {
        v16 low = load(w->bias + panel * PANEL), high = load(w->bias + panel * PANEL + LANES);
#pragma GCC unroll 12
        for (int r = 0; r < rows; r++) acc[r][0] += low, acc[r][1] += high;
    }
}

/* One tile of the product, written to `out`. */
INLINE void product_tile(
    const void *x, int64_t x_stride, const struct weight *w, int64_t panel, float *out, int64_t out_stride,
    const int rows, const int kind)
{
    tile acc;
    tile_of(acc, x, x_stride, w, panel, rows, kind);
    int64_t left = w->outputs - panel * PANEL;
    out += panel * PANEL;
    if (left >= PANEL) {
#pragma GCC unroll 12
        for (int r = 0; r < rows; r++) {
            store(out + r * out_stride, acc[r][0]);
            store(out + r * out_stride + LANES, acc[r][1]);
        }
        return;
    }
    for (int r = 0; r < rows; r++) {
        float columns[PANEL];
        store(columns, acc[r][0]);
        store(columns + LANES, acc[r][1]);
        memcpy(out + r * out_stride, columns, left * sizeof(float));
    }
}

#define CHUNK_BYTES (256 * 1024)

#define TILES(KIND)                                                                             \
    switch (rows) {                                                                             \
    case 1: TILE(1, KIND); case 2: TILE(2, KIND); case 3: TILE(3, KIND); case 4: TILE(4, KIND); \
    case 5: TILE(5, KIND); case 6: TILE(6, KIND); case 7: TILE(7, KIND); case 8: TILE(8, KIND); \
    case 9: TILE(9, KIND); case 10: TILE(10, KIND); case 11: TILE(11, KIND);                    \
    default: TILE(12, KIND);                                                                    \
    }
#define TILE(ROWS, KIND)                                                \
    product_tile(from, x_stride, w, panel, to, out_stride, ROWS, KIND); \
    break

/* All rows of x times panels [first, last), in chunks of rows that fit the L2 cache. */
#define DEFINE_PRODUCT(NAME, TYPE, KIND)                                                                 \
    static __attribute__((noinline)) void NAME(const TYPE *x, int64_t x_stride, const struct weight *w,  \
        int64_t first, int64_t last, float *out, int64_t out_stride, int64_t count)                      \
    {                                                                                                    \
        int64_t most = CHUNK_BYTES / ((int64_t)sizeof(TYPE) * x_stride) / TILE_ROWS * TILE_ROWS;         \
        if (most < TILE_ROWS) most = TILE_ROWS;                                                          \
        for (int64_t chunk = 0; chunk < count; chunk += most) {                                          \
            int64_t end = chunk + most < count ? chunk + most : count;                                   \
            for (int64_t panel = first; panel < last; panel++)                                           \
                for (int64_t row = chunk, rows; row < end; row += rows) {                                \
                    int64_t tiles = (end - row + TILE_ROWS - 1) / TILE_ROWS;                             \
                    rows = (end - row + tiles - 1) / tiles;                                              \
                    const TYPE *from = x + row * x_stride;                                               \
                    float *to = out + row * out_stride;                                                  \
                    TILES(KIND)                                                                          \
                }                                                                                        \
        }                                                                                                \
    }

DEFINE_PRODUCT(product_float32, float, FLOAT32)
DEFINE_PRODUCT(product_int8, float, INT8)
DEFINE_PRODUCT(product_bfloat16, uint16_t, BFLOAT16)

INLINE void add_bias(const struct weight *w, int64_t first, int64_t last, float *out, int64_t stride, int64_t count)
{
    int64_t from = first * PANEL, to = last * PANEL < w->outputs ? last * PANEL : w->outputs;
    for (int64_t row = 0; row < count; row++)
        for (int64_t o = from; o < to; o++) out[row * stride + o] += w->bias[o];
}

/* out = x w^T + bias for panels [first, last) of a bfloat16 weight. The inputs alone decide how, so that a row has the
 * same bits in every call. */
static void product_rounded(
    const uint16_t *x, int64_t x_stride, const struct weight *w, int64_t first, int64_t last, float *out,
    int64_t out_stride, int64_t count)
{
#ifdef HAS_TILES
    if (w->inputs % TILE_INPUTS == 0 && has_tiles()) {
        product_tiles(x, x_stride, w->panels, w->inputs, w->outputs, first, last, out, out_stride, count);
        if (w->bias) add_bias(w, first, last, out, out_stride, count);
        return;
    }
#endif
    product_bfloat16(x, x_stride, w, first, last, out, out_stride, count);
}

/* out = x w^T for panels [first, last). `rounded` is a buffer for x in bfloat16, for bfloat16 weights. */
static void product(
    const float *x, int64_t x_stride, const struct weight *w, int64_t first, int64_t last, float *out,
    int64_t out_stride, int64_t count, uint16_t *rounded)
{
    if (count <= 0 || first >= last) return;
    if (w->kind == BFLOAT16) {
        for (int64_t row = 0; row < count; row++)
            for (int64_t i = 0; i < w->inputs; i++) rounded[row * x_stride + i] = narrow(x[row * x_stride + i]);
        product_rounded(rounded, x_stride, w, first, last, out, out_stride, count);
    } else if (w->kind == INT8)
        product_int8(x, x_stride, w, first, last, out, out_stride, count);
    else
        product_float32(x, x_stride, w, first, last, out, out_stride, count);
}
