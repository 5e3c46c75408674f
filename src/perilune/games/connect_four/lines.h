/* Words and lines of Connect Four: bit 7 * column + row, the seventh bit of a column empty, as in board.py. */
#pragma once
#include <stdint.h>

#define COLUMNS 7
#define HEIGHT 7
#define SQUARES 42
#define BOTTOM 0x40810204081ull
#define BOARD (BOTTOM * 63)

static const int DIRECTIONS[4] = {1, HEIGHT - 1, HEIGHT, HEIGHT + 1};

static inline uint64_t column(int c) { return 63ull << HEIGHT * c; }

static inline int has_four(uint64_t s)
{
    for (int i = 0; i < 4; i++) {
        uint64_t pairs = s & s >> DIRECTIONS[i];
        if (pairs & pairs >> 2 * DIRECTIONS[i]) return 1;
    }
    return 0;
}
