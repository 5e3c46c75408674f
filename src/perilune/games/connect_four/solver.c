/* Connect Four, solved: alpha-beta over bitboards with a table of positions met before.
 *
 * A score is how early the game is won: 22 less the winner's stones at its end, negative for a loss, 0 for a draw.
 */
#include "lines.h"

#define MIRRORED_BELOW 16 /* stones; mirror images are looked up together while that saves more than it costs */
#define NEVER INT8_MIN

static const int CENTRE_FIRST[COLUMNS] = {3, 2, 4, 1, 5, 0, 6};

/* `entries` are 64-bit words, 1 << bits of them: a position's key above, what is known of its score in 8 bits. */
struct table {
    uint64_t *entries;
    int64_t bits;
    int64_t nodes;
};

static int stones_of(uint64_t words) { return __builtin_popcountll(words); }

/* Empty squares that would make four. */
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

static uint64_t mirrored(uint64_t words)
{
    uint64_t found = 0;
    for (int c = 0; c < COLUMNS; c++) found |= (words >> HEIGHT * c & 127) << HEIGHT * (COLUMNS - 1 - c);
    return found;
}

static uint64_t key_of(uint64_t own, uint64_t stones, int count)
{
    uint64_t key = own + stones;
    if (count >= MIRRORED_BELOW) return key;
    uint64_t other = mirrored(own) + mirrored(stones);
    return key < other ? key : other;
}

static uint64_t *entry_of(const struct table *t, uint64_t key)
{
    return t->entries + (key * 0x9E3779B97F4A7C15ull >> (64 - t->bits));
}

/* What is kept of a score: at least, or at most, so much. 0 is nothing. */
static uint64_t at_least(int score) { return (uint64_t)(score + 64) | 128; }
static uint64_t at_most(int score) { return (uint64_t)(score + 64); }

/* The score within (low, high), else a bound on it. Whoever is to move has no line to complete. */
static int search(struct table *t, uint64_t own, uint64_t stones, int low, int high)
{
    t->nodes++;
    int count = stones_of(stones);
    uint64_t other = own ^ stones, threats = completing(other, stones);
    uint64_t moves = (stones + BOTTOM) & BOARD, forced = moves & threats;
    if (forced) {
        if (forced & (forced - 1)) return -(SQUARES - count) / 2;
        moves = forced;
    }
    moves &= ~(threats >> 1); /* a stone there would lift the other's onto the square */
    if (!moves) return -(SQUARES - count) / 2;
    if (count >= SQUARES - 2) return 0;

    int worst = -(SQUARES - 2 - count) / 2, best = (SQUARES - 1 - count) / 2;
    if (low < worst && (low = worst) >= high) return low;
    if (high > best && (high = best) <= low) return high;
    uint64_t key = key_of(own, stones, count), *entry = entry_of(t, key), known = *entry;
    if (known >> 8 == key && known & 255) {
        int score = (int)(known & 127) - 64;
        if (known & 128) {
            if (low < score && (low = score) >= high) return low;
        } else if (high > score && (high = score) <= low)
            return high;
    }

    uint64_t order[COLUMNS];
    int worth[COLUMNS], found = 0;
    for (int i = 0; i < COLUMNS; i++) { /* most squares threatened first, then nearest to the centre */
        uint64_t move = moves & column(CENTRE_FIRST[i]);
        if (!move) continue;
        int threatened = stones_of(completing(own | move, stones | move)), place = found++;
        for (; place && worth[place - 1] < threatened; place--) {
            order[place] = order[place - 1];
            worth[place] = worth[place - 1];
        }
        order[place] = move;
        worth[place] = threatened;
    }
    for (int i = 0; i < found; i++) {
        int score = -search(t, other, stones | order[i], -high, -low);
        if (score >= high) {
            *entry = key << 8 | at_least(score);
            return score;
        }
        if (score > low) low = score;
    }
    *entry = key << 8 | at_most(low);
    return low;
}

/* The score, or `least` where it is no more, or `most` where it is no less. */
static int solve(struct table *t, uint64_t own, uint64_t stones, int least, int most)
{
    int count = stones_of(stones);
    if (count == SQUARES) return 0;
    int low = -(SQUARES - count) / 2, high = (SQUARES + 1 - count) / 2;
    if (completing(own, stones) & (stones + BOTTOM)) return high < least ? least : high > most ? most : high;
    if (low < least) low = least;
    if (high > most) high = most;
    while (low < high) { /* halve what is left, near 0 first: short searches settle most of it */
        int middle = low + (high - low) / 2;
        if (middle <= 0 && low / 2 < middle) middle = low / 2;
        else if (middle >= 0 && high / 2 > middle) middle = high / 2;
        int score = search(t, own, stones, middle, middle + 1);
        if (score <= middle) high = score < low ? low : score;
        else low = score > high ? high : score;
    }
    return low;
}

/* Scores of games that are not over, kept within [least, most]. */
void perilune_four_scores(
    struct table *t, const uint64_t *own, const uint64_t *stones, int64_t count, int least, int most, int8_t *out)
{
    for (int64_t i = 0; i < count; i++) out[i] = (int8_t)solve(t, own[i], stones[i], least, most);
}

/* Of each game and column: the score after playing it, for whoever plays it; NEVER where it is full. */
void perilune_four_columns(
    struct table *t, const uint64_t *own, const uint64_t *stones, int64_t count, int least, int most, int8_t *out)
{
    for (int64_t i = 0; i < count; i++)
        for (int c = 0; c < COLUMNS; c++) {
            uint64_t move = (stones[i] + BOTTOM) & column(c);
            int now = (SQUARES + 1 - stones_of(stones[i])) / 2, score;
            if (!move) score = NEVER;
            else if (has_four(own[i] | move)) score = now < most ? now : most;
            else score = -solve(t, own[i] ^ stones[i], stones[i] | move, -most, -least);
            out[i * COLUMNS + c] = (int8_t)score;
        }
}

/* 1, 0 or -1: won, undecided or lost within so many moves. The game is not over. */
static int foreseen(uint64_t own, uint64_t stones, int moves, int low, int high)
{
    uint64_t possible = (stones + BOTTOM) & BOARD;
    if (!possible || !moves) return 0;
    if (completing(own, stones) & possible) return 1;
    int best = -1;
    for (int i = 0; i < COLUMNS && best < high; i++) {
        uint64_t move = possible & column(CENTRE_FIRST[i]);
        if (!move) continue;
        int value = -foreseen(own ^ stones, stones | move, moves - 1, -high, -(best > low ? best : low));
        if (value > best) best = value;
    }
    return best;
}

/* Of each game and column: what so many moves, that one among them, show; NEVER where it is full. */
void perilune_four_foreseen(
    const uint64_t *own, const uint64_t *stones, int64_t count, int moves, int8_t *out)
{
    for (int64_t i = 0; i < count; i++)
        for (int c = 0; c < COLUMNS; c++) {
            uint64_t move = (stones[i] + BOTTOM) & column(c);
            int value;
            if (!move) value = NEVER;
            else if (has_four(own[i] | move)) value = 1;
            else value = -foreseen(own[i] ^ stones[i], stones[i] | move, moves - 1, -1, 1);
            out[i * COLUMNS + c] = (int8_t)value;
        }
}
