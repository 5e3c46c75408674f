/* A solver for Connect Four: alpha-beta search over bitboards with a transposition table.
 *
 * A score is 22 minus the winner's stones at the end of the game, negative for a loss, 0 for a draw. */
#include "lines.h"

#define MIRRORED_BELOW 16 /* stones; with fewer, mirror images share an entry, which saves more than it costs */
#define NEVER INT8_MIN

static const int CENTRE_FIRST[COLUMNS] = {3, 2, 4, 1, 5, 0, 6};

/* `entries` has 1 << bits words of 64 bits: the key of a position, and in the lowest 8 bits a bound on its score. */
struct table {
    uint64_t *entries;
    int64_t bits;
    int64_t nodes;
};

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

/* The lowest 8 bits of an entry: a lower or an upper bound on the score; 0 if there is none. */
static uint64_t at_least(int score) { return (uint64_t)(score + 64) | 128; }
static uint64_t at_most(int score) { return (uint64_t)(score + 64); }

/* The score if it is within (low, high), otherwise a bound on it. The player to move cannot win at once. */
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
    moves &= ~(threats >> 1); /* the opponent would win on the square above */
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
    for (int i = 0; i < COLUMNS; i++) { /* moves with the most threats first, then the most central */
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

/* The score, limited to [least, most]. */
static int solve(struct table *t, uint64_t own, uint64_t stones, int least, int most)
{
    int count = stones_of(stones);
    if (count == SQUARES) return 0;
    int low = -(SQUARES - count) / 2, high = (SQUARES + 1 - count) / 2;
    if (completing(own, stones) & (stones + BOTTOM)) return high < least ? least : high > most ? most : high;
    if (low < least) low = least;
    if (high > most) high = most;
    while (low < high) { /* bisect, near 0 first, because searches there are short */
        int middle = low + (high - low) / 2;
        if (middle <= 0 && low / 2 < middle) middle = low / 2;
        else if (middle >= 0 && high / 2 > middle) middle = high / 2;
        int score = search(t, own, stones, middle, middle + 1);
        if (score <= middle) high = score < low ? low : score;
        else low = score > high ? high : score;
    }
    return low;
}

/* The scores of games that are not over, limited to [least, most]. */
void perilune_four_scores(
    struct table *t, const uint64_t *own, const uint64_t *stones, int64_t count, int least, int most, int8_t *out)
{
    for (int64_t i = 0; i < count; i++) out[i] = (int8_t)solve(t, own[i], stones[i], least, most);
}

/* For each game and column: the score of the move for the player who makes it; NEVER if the column is full. */
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

/* 1, 0 or -1: won, undecided or lost within `moves` moves. The game is not over. */
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

/* For each game and column: the outcome within `moves` moves, including this one; NEVER if the column is full. */
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
