/* Bitboards of Connect Four: a square is bit 7 * column + row, and the seventh bit of a column is empty (board.py). */
#pragma once
#include <stdint.h>

#define COLUMNS 7
#define HEIGHT 7
#define SQUARES 42
#define BOTTOM 0x40810204081ull
#define BOARD (BOTTOM * 63)

static const int DIRECTIONS[4] = {1, HEIGHT - 1, HEIGHT, HEIGHT + 1};

static inline uint64_t column(int c) { return 63ull << HEIGHT * c; }

static inline int stones_of(uint64_t words) { return __builtin_popcountll(words); }

static inline int has_four(uint64_t s)
{
    for (int i = 0; i < 4; i++) {
        uint64_t pairs = s & s >> DIRECTIONS[i];
        if (pairs & pairs >> 2 * DIRECTIONS[i]) return 1;
    }
    return 0;
}

/* Empty squares that would complete four in line with the stones `s`. */
static inline uint64_t completing(uint64_t s, uint64_t taken)
{
    uint64_t found = s << 1 & s << 2 & s << 3;
#pragma GCC unroll 3
    for (int i = 1; i < 4; i++) {
        int d = DIRECTIONS[i];
        uint64_t below = s << d & s << 2 * d, above = s >> d & s >> 2 * d;
        found |= (below & (s << 3 * d | s >> d)) | (above & (s >> 3 * d | s << d));
    }
    return found & BOARD & ~taken;
}
