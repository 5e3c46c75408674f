/* Matrix products: out[n, o] = sum over k of x[n, k] * weight[o, k]. Each sum is one chain of fused multiply-adds in
 * the order of k.
 *
 * The weight is stored in panels of 32 outputs, [panel][k][32]. A tile is the product of some rows and one panel or a
 * part of a panel. It stays in registers for the whole sum. So the bits of a row do not depend on the other rows, on
 * their number, on the thread, or on the number of registers.
 */
#pragma once
#include "tiles.h"

#define PANEL 32
#define TILE_ROWS (REGISTERS == 32 && LANES == 16 ? 12 : 6)
#define TILE_SUMS (REGISTERS == 32 ? 24 : 12) /* vectors of sums in a tile */
#define PANEL_VECTORS (PANEL / LANES)
#define APART 16 /* padding floats between rows: a stride of a power of two causes cache conflicts */

enum weight_kind { FLOAT32, BFLOAT16, INT8 };

/* A weight packed by `perilune_pack`. INT8 has one `scale` per output. `bias` may be null. */
struct weight {
    const void *panels;
    const float *scale;
    const float *bias;
    int64_t outputs, inputs;
    int64_t kind;
};

INLINE int64_t panels_of(int64_t outputs) { return (outputs + PANEL - 1) / PANEL; }
INLINE int64_t panel_count(const struct weight *w) { return panels_of(w->outputs); }

/* Copy row `row` of a float32 or bfloat16 weight from its panel to `out`. */
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

typedef vec tile[TILE_ROWS][PANEL_VECTORS];

INLINE int vectors_of(const int rows)
{
    return rows * PANEL_VECTORS <= TILE_SUMS ? PANEL_VECTORS : TILE_SUMS / TILE_ROWS;
}

INLINE void tile_float32(
    tile acc, const float *x, int64_t stride, const float *panel, int64_t inputs, const int rows, const int vectors)
{
    for (int64_t k = 0; k < inputs; k++, panel += PANEL) {
        vec outputs[PANEL_VECTORS];
        UNROLL for (int j = 0; j < vectors; j++) outputs[j] = load(panel + j * LANES);
        UNROLL for (int r = 0; r < rows; r++) {
            vec value = splat(x[r * stride + k]);
            UNROLL for (int j = 0; j < vectors; j++) acc[r][j] += value * outputs[j];
        }
    }
}

INLINE void tile_int8(
    tile acc, const float *x, int64_t stride, const int8_t *panel, int64_t inputs, const int rows, const int vectors)
{
    for (int64_t k = 0; k < inputs; k++, panel += PANEL) {
        vec outputs[PANEL_VECTORS];
        UNROLL for (int j = 0; j < vectors; j++) outputs[j] = widen_bytes(panel + j * LANES);
        UNROLL for (int r = 0; r < rows; r++) {
            vec value = splat(x[r * stride + k]);
            UNROLL for (int j = 0; j < vectors; j++) acc[r][j] += value * outputs[j];
        }
    }
}

/* Panels of bfloat16 have the layout [panel][k / 2][32][2]. x is rounded to bfloat16. */
INLINE void tile_bfloat16(
    tile acc, const uint16_t *x, int64_t stride, const uint16_t *panel, int64_t inputs, const int rows,
    const int vectors)
{
    for (int64_t k = 0; k < inputs; k += 2, panel += 2 * PANEL) {
        word outputs[PANEL_VECTORS];
        UNROLL for (int j = 0; j < vectors; j++) outputs[j] = load_words(panel + 2 * j * LANES);
        UNROLL for (int r = 0; r < rows; r++) {
#if LANES == 16 && defined(__AVX512BF16__)
            int32_t pair;
            memcpy(&pair, x + r * stride + k, 4);
            __m512bh value = (__m512bh)_mm512_set1_epi32(pair);
            for (int j = 0; j < vectors; j++)
                acc[r][j] = (vec)_mm512_dpbf16_ps((__m512)acc[r][j], (__m512bh)outputs[j], value);
#else
            uint32_t bits;
            memcpy(&bits, x + r * stride + k, 4);
            word pair = bits + (word){0};
            vec first = (vec)(pair << 16), second = (vec)(pair & 0xffff0000u);
            UNROLL for (int j = 0; j < vectors; j++) acc[r][j] += first * (vec)(outputs[j] << 16);
            UNROLL for (int j = 0; j < vectors; j++) acc[r][j] += second * (vec)(outputs[j] & 0xffff0000u);
#endif
        }
    }
}

/* Compute x w^T for `vectors` vectors of outputs, beginning with output `first`. */
INLINE void tile_of(
    tile acc, const void *x, int64_t stride, const struct weight *w, int64_t first, const int rows, const int vectors,
    const int kind)
{
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int j = 0; j < vectors; j++) acc[r][j] = splat(0.0f);
    int64_t column = first % PANEL, offset = (first - column) * w->inputs + (kind == BFLOAT16 ? 2 : 1) * column;
    if (kind == FLOAT32)
        tile_float32(acc, x, stride, (const float *)w->panels + offset, w->inputs, rows, vectors);
    if (kind == INT8) tile_int8(acc, x, stride, (const int8_t *)w->panels + offset, w->inputs, rows, vectors);
    if (kind == BFLOAT16)
        tile_bfloat16(acc, x, stride, (const uint16_t *)w->panels + offset, w->inputs, rows, vectors);
    if (kind == INT8)
        UNROLL for (int r = 0; r < rows; r++)
            UNROLL for (int j = 0; j < vectors; j++) acc[r][j] *= load(w->scale + first + j * LANES);
    if (w->bias)
        UNROLL for (int r = 0; r < rows; r++)
            UNROLL for (int j = 0; j < vectors; j++) acc[r][j] += load(w->bias + first + j * LANES);
}

/* Multiply some rows of x with one panel, and write the result to `out`. */
INLINE void product_panel(
    const void *x, int64_t x_stride, const struct weight *w, int64_t panel, float *out, int64_t out_stride,
    const int rows, const int kind)
{
    const int vectors = vectors_of(rows);
    for (int64_t first = panel * PANEL; first < (panel + 1) * PANEL; first += vectors * LANES) {
        tile acc;
        tile_of(acc, x, x_stride, w, first, rows, vectors, kind);
        int64_t left = w->outputs - first;
        UNROLL for (int r = 0; r < rows; r++) {
            float columns[PANEL], *to = left >= vectors * LANES ? out + r * out_stride + first : columns;
            UNROLL for (int j = 0; j < vectors; j++) store(to + j * LANES, acc[r][j]);
            if (to == columns && left > 0) memcpy(out + r * out_stride + first, columns, left * sizeof(float));
        }
    }
}

#define CHUNK_BYTES (256 * 1024)

#define TILE(ROWS, KIND)                                                                           \
    case ROWS:                                                                                     \
        if (ROWS <= TILE_ROWS) product_panel(from, x_stride, w, panel, to, out_stride, ROWS, KIND); \
        break;
#define TILES(KIND)                                                                                              \
    switch (rows) {                                                                                              \
    TILE(1, KIND) TILE(2, KIND) TILE(3, KIND) TILE(4, KIND) TILE(5, KIND) TILE(6, KIND)                          \
    TILE(7, KIND) TILE(8, KIND) TILE(9, KIND) TILE(10, KIND) TILE(11, KIND) TILE(12, KIND)                       \
    }

/* Multiply all rows of x with panels [first, last), in chunks of rows that fit the L2 cache. */
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

/* out = x w^T + bias for panels [first, last) of a bfloat16 weight. The choice of the algorithm depends only on the
 * number of inputs and on the processor, so a row has the same bits in every call. */
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

/* out = x w^T + bias for panels [first, last). For bfloat16 weights, `rounded` is a buffer for x in bfloat16. */
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
