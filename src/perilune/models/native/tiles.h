/* Products of bfloat16 matrices with the tile unit of Intel processors (AMX, since Sapphire Rapids).
 *
 * A tile instruction multiplies 16 rows with 16 outputs over 32 inputs. Every element of the result adds its inputs in
 * the same order, independently of the row, of the number of rows and of the thread. So the bits of a row do not depend
 * on other rows. */
#pragma once
#include <stdatomic.h>
#include "vector.h"
#if defined(__AMX_BF16__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#define HAS_TILES 1
#endif

#define SIDE 16          /* rows of a tile; also its outputs */
#define TILE_INPUTS 32   /* inputs of one instruction */
#define INPUTS_AT_ONCE 512 /* this part of a panel stays in the L1 cache; reloading sums is exact */
#define ROWS_AT_ONCE_BYTES (768 * 1024) /* size of the rows that stay in the L2 cache */

/* Round two rows of 16 floats to bfloat16. Each pair holds the two elements of a column. */
INLINE void pair_rows(const float *low, const float *high, uint32_t *pairs)
{
    for (int i = 0; i < SIDE; i++) pairs[i] = (uint32_t)narrow(low[i]) | (uint32_t)narrow(high[i]) << 16;
}

/* Round `words` pairs of consecutive floats to bfloat16. */
INLINE void round_pairs(const float *x, int64_t words, uint32_t *pairs)
{
    for (int64_t j = 0; j < words; j++)
        pairs[j] = (uint32_t)narrow(x[2 * j]) | (uint32_t)narrow(x[2 * j + 1]) << 16;
}

/* to[j][i] = from[i][j] for 16 x 16 words. */
INLINE void transpose_words(const uint32_t *from, uint32_t *to, int64_t to_stride)
{
    for (int j = 0; j < SIDE; j++)
        for (int i = 0; i < SIDE; i++) to[j * to_stride + i] = from[i * SIDE + j];
}

/* rounded[row - from][k] = x[k][row] for rows [from, to). The number of inputs must be even. `stride` is the number of
 * floats between rows of x. */
static void round_across(
    const float *x, int64_t stride, int64_t from, int64_t to, int64_t inputs, uint16_t *rounded)
{
    for (int64_t k = 0; k < inputs; k += 2 * SIDE)
        for (int64_t row = from; row < to; row += SIDE) {
            uint32_t pairs[SIDE * SIDE], across[SIDE * SIDE];
            int64_t rows = to - row < SIDE ? to - row : SIDE, words = inputs - k < 2 * SIDE ? (inputs - k) / 2 : SIDE;
            for (int64_t j = 0; j < words; j++) {
                const float *low = x + (k + 2 * j) * stride + row, *high = low + stride;
                if (rows == SIDE) pair_rows(low, high, pairs + j * SIDE);
                else {
                    float some[2 * SIDE] = {0};
                    memcpy(some, low, rows * sizeof(float));
                    memcpy(some + SIDE, high, rows * sizeof(float));
                    pair_rows(some, some + SIDE, pairs + j * SIDE);
                }
            }
            transpose_words(pairs, across, SIDE);
            for (int64_t r = 0; r < rows; r++)
                memcpy(rounded + (row - from + r) * inputs + k, across + r * SIDE, words * sizeof(uint32_t));
        }
}

#ifdef HAS_TILES

/* Return whether this process may use the tiles. Linux requires that a process requests permission once. */
static int has_tiles(void)
{
    static atomic_int known; /* 0: not requested; 1: allowed; 2: refused */
    int state = atomic_load(&known);
    if (!state) {
        const int request_permission = 0x1023, tile_data = 18;
        state = syscall(SYS_arch_prctl, request_permission, tile_data) ? 2 : 1;
        atomic_store(&known, state);
    }
    return state == 1;
}

/* Tiles 0 to 3 hold the sums of the (row block, output block) pairs (0, 0), (0, 1), (1, 0) and (1, 1). Tiles 4 and 5 hold
 * the rows of x, and tiles 6 and 7 the weights of the outputs. */
static void configure_tiles(int rows)
{
    struct {
        uint8_t palette, start, reserved[14];
        uint16_t bytes[16];
        uint8_t rows[16];
    } config = {.palette = 1};
    int of_block[2] = {rows < SIDE ? rows : SIDE, rows - SIDE};
    for (int tile = 0; tile < 8; tile++) {
        int count = tile < 4 ? of_block[tile / 2] : tile < 6 ? of_block[tile - 4] : SIDE;
        if (count <= 0) continue;
        config.rows[tile] = (uint8_t)count;
        config.bytes[tile] = 64;
    }
    _tile_loadconfig(&config);
}

/* out[rows][32] += x w^T for up to 32 rows, one panel and inputs [from, to). If `from` is 0, out begins at zero. */
INLINE void tile_block(
    const uint16_t *x, int64_t x_stride, const uint16_t *panel, int64_t from, int64_t to, float *out,
    int64_t out_stride, const int both)
{
    const int64_t x_bytes = x_stride * 2, out_bytes = out_stride * 4, panel_bytes = 128;
    if (from == 0) {
        _tile_zero(0);
        _tile_zero(1);
        if (both) {
            _tile_zero(2);
            _tile_zero(3);
        }
    } else {
        _tile_loadd(0, out, out_bytes);
        _tile_loadd(1, out + SIDE, out_bytes);
        if (both) {
            _tile_loadd(2, out + SIDE * out_stride, out_bytes);
            _tile_loadd(3, out + SIDE * out_stride + SIDE, out_bytes);
        }
    }
    for (int64_t k = from; k < to; k += TILE_INPUTS) {
        _tile_loadd(6, panel + k * TILE_INPUTS, panel_bytes);
        _tile_loadd(4, x + k, x_bytes);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, panel + k * TILE_INPUTS + TILE_INPUTS, panel_bytes);
        _tile_dpbf16ps(1, 4, 7);
        if (both) {
            _tile_loadd(5, x + SIDE * x_stride + k, x_bytes);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, out, out_bytes);
    _tile_stored(1, out + SIDE, out_bytes);
    if (both) {
        _tile_stored(2, out + SIDE * out_stride, out_bytes);
        _tile_stored(3, out + SIDE * out_stride + SIDE, out_bytes);
    }
}

/* Multiply all rows of x with panels [first, last). The number of inputs must be a multiple of 32. The product with an
 * incomplete last panel goes to a buffer first, because only its first `left` columns exist in `out`. */
static void product_tiles(
    const uint16_t *x, int64_t x_stride, const uint16_t *panels, int64_t inputs, int64_t outputs, int64_t first,
    int64_t last, float *out, int64_t out_stride, int64_t count)
{
    const int64_t width = 2 * SIDE, fitting = ROWS_AT_ONCE_BYTES / (inputs * 2) / width * width;
    const int64_t most = fitting > 4 * width ? fitting : 4 * width;
    int configured = 0;
    for (int64_t chunk = 0; chunk < count; chunk += most) {
        int64_t end = chunk + most < count ? chunk + most : count;
        for (int64_t panel = first; panel < last; panel++) {
            int64_t left = outputs - panel * width, at_once = left < width ? inputs : INPUTS_AT_ONCE;
            const uint16_t *weight = panels + panel * inputs * width;
            for (int64_t from = 0; from < inputs; from += at_once) {
                int64_t to = from + at_once + INPUTS_AT_ONCE / 2 < inputs ? from + at_once : inputs;
                for (int64_t row = chunk, rows; row < end; row += rows) {
                    rows = end - row < width ? end - row : width;
                    if (rows != configured) configure_tiles(configured = (int)rows);
                    const uint16_t *some = x + row * x_stride;
                    float *sums = out + row * out_stride + panel * width, cut[4 * SIDE * SIDE];
                    float *target = left < width ? cut : sums;
                    int64_t stride = left < width ? width : out_stride;
                    if (rows > SIDE) tile_block(some, x_stride, weight, from, to, target, stride, 1);
                    else tile_block(some, x_stride, weight, from, to, target, stride, 0);
                    for (int64_t r = 0; left < width && r < rows; r++)
                        memcpy(sums + r * out_stride, cut + r * width, left * sizeof(float));
                }
                if (to == inputs) break;
            }
        }
    }
    _tile_release();
}

#else
static int has_tiles(void) { return 0; }
#endif
