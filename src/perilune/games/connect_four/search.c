/* Monte Carlo tree search in many trees at once. Each call of `descend` adds at most one node to every tree.
 *
 * Every node has bounds on its exact score, for the player to move. A score is 22 minus the winner's stones at the
 * end of the game, negative for a loss. Equal bounds mean that the node is solved. */
#include <math.h>

#include "lines.h"

#define NONE 0 /* in `children`: not created yet; the root, node 0, is no node's child */

/* Nodes are numbered within their tree. The root has the number 0. */
struct forest {
    uint64_t *own, *stones;     /* [trees, nodes] */
    int32_t *children, *visits; /* [trees, nodes, COLUMNS] */
    float *priors, *totals;     /* likewise; totals are sums of outcomes for the player to move at the node */
    int32_t *parents;           /* [trees, nodes] */
    int8_t *columns;            /* the move that leads to the node */
    float *values;              /* for the player to move: the network's, or exact if the node is solved */
    int8_t *lower, *upper;      /* bounds on the score */
    uint8_t *moves;             /* bit c: column c is searched */
    int32_t *leaves;            /* [trees], where the last descent ended */
    int64_t trees, nodes;
};

/* As in board.py. */
static float value_of(int score)
{
    return score > 0 ? 0.5f + (float)score / 36.0f : score < 0 ? -0.5f + (float)score / 36.0f : 0.0f;
}

/* The scores of winning with the next move, and of losing to the reply, with `count` stones on the board. */
static int win_now(int count) { return (SQUARES + 1 - count) / 2; }
static int lose_next(int count) { return -((SQUARES - count) / 2); }

/* Bit c is set if column c contains one of the squares. */
static uint8_t columns_of(uint64_t squares)
{
    uint8_t columns = 0;
    for (int c = 0; c < COLUMNS; c++)
        if (squares & column(c)) columns |= (uint8_t)(1 << c);
    return columns;
}

/* Set the moves and the bounds of a new node. The bounds are exact if the game is over or the next two moves decide it.
 * Moves that let the opponent win with the reply are left out. */
static void set_up(const struct forest *f, int64_t node)
{
    uint64_t own = f->own[node], stones = f->stones[node], other = own ^ stones;
    int count = stones_of(stones), lower = lose_next(count), upper = win_now(count + 2);
    uint64_t squares = (stones + BOTTOM) & BOARD, threats = completing(other, stones);
    uint64_t blocks = squares & threats, safe = (blocks ? blocks : squares) & ~(threats >> 1);
    if (blocks & (blocks - 1)) safe = 0; /* two threats, one move */
    if (has_four(other)) lower = upper = -(22 - stones_of(other));
    else if (stones == BOARD) lower = upper = 0;
    else if (completing(own, stones) & squares) lower = upper = win_now(count);
    else if (!safe) upper = lower;
    else lower = lose_next(count + 2);
    f->moves[node] = columns_of(safe);
    f->lower[node] = (int8_t)lower, f->upper[node] = (int8_t)upper;
    f->values[node] = value_of(lower); /* the network's value replaces it unless the node is solved */
}

/* Set the bounds of a node from those of its children (Cazenave and Saffidine, "Score bounded Monte-Carlo tree search",
 * Computers and Games 2010). */
static void narrow_bounds(const struct forest *f, int64_t first, int64_t node)
{
    int lower = f->lower[node], upper = INT8_MIN;
    for (int c = 0; c < COLUMNS; c++) {
        if (!(f->moves[node] >> c & 1)) continue;
        int64_t child = f->children[node * COLUMNS + c];
        if (child == NONE) {
            upper = f->upper[node];
            continue;
        }
        int least = -f->upper[first + child], most = -f->lower[first + child];
        if (least > lower) lower = least;
        if (most > upper) upper = most;
    }
    if (upper > f->upper[node]) upper = f->upper[node];
    f->lower[node] = (int8_t)lower, f->upper[node] = (int8_t)upper;
    if (lower == upper) f->values[node] = value_of(lower);
}

/* The column with the highest PUCT score, except columns that are proven not to be better than another. At the root,
 * columns without simulations come first, so that a move is not overlooked because of its prior. */
static int chosen_column(const struct forest *f, int64_t first, int64_t node, float exploration)
{
    const int32_t *visits = f->visits + node * COLUMNS;
    const float *priors = f->priors + node * COLUMNS, *totals = f->totals + node * COLUMNS;
    int all = 0, best = 0;
    for (int c = 0; c < COLUMNS; c++) all += visits[c];
    float scale = exploration * sqrtf((float)(all + 1)), highest = -INFINITY;
    for (int c = 0; c < COLUMNS; c++) {
        if (!(f->moves[node] >> c & 1)) continue;
        float mean = f->values[node];
        int64_t child = f->children[node * COLUMNS + c];
        if (child != NONE) {
            int least = -f->upper[first + child], most = -f->lower[first + child];
            if (most <= f->lower[node] && least < f->lower[node]) continue;
            mean = fminf(fmaxf(totals[c] / (float)visits[c], value_of(least)), value_of(most));
        }
        float score = mean + scale * priors[c] / (float)(1 + visits[c]);
        if (child == NONE && node == first) score = 1e6f + priors[c];
        if (score > highest) highest = score, best = c;
    }
    return best;
}

/* Set up the roots. They have no exact bounds, because they are searched to find the best move: among the moves that
 * do not lose at once, or among all if the next two moves decide the game. */
void perilune_four_begin(struct forest *f)
{
    for (int64_t t = 0; t < f->trees; t++) {
        int64_t root = t * f->nodes;
        int count = stones_of(f->stones[root]);
        set_up(f, root);
        if (f->lower[root] == f->upper[root]) f->moves[root] = columns_of((f->stones[root] + BOTTOM) & BOARD);
        f->lower[root] = (int8_t)lose_next(count), f->upper[root] = (int8_t)win_now(count);
    }
}

/* Create node number `fresh` in every tree whose descent does not end at a solved node, and set `leaves`. */
void perilune_four_descend(struct forest *f, int64_t fresh, float exploration)
{
    for (int64_t t = 0; t < f->trees; t++) {
        int64_t first = t * f->nodes, at = first;
        while (at == first || f->lower[at] != f->upper[at]) {
            int c = chosen_column(f, first, at, exploration);
            int32_t *child = f->children + at * COLUMNS + c;
            if (*child != NONE) {
                at = first + *child;
                continue;
            }
            int64_t node = first + fresh;
            *child = (int32_t)fresh;
            f->own[node] = f->own[at] ^ f->stones[at];
            f->stones[node] = f->stones[at] | ((f->stones[at] + BOTTOM) & column(c));
            f->parents[node] = (int32_t)(at - first);
            f->columns[node] = (int8_t)c;
            set_up(f, node);
            at = node;
            break;
        }
        f->leaves[t] = (int32_t)(at - first);
    }
}

/* Take the network's priors [trees, COLUMNS] and values [trees] for the nodes that are new, and update all nodes
 * above the leaves. */
void perilune_four_absorb(struct forest *f, int64_t fresh, const float *priors, const float *values)
{
    for (int64_t t = 0; t < f->trees; t++) {
        int64_t first = t * f->nodes, at = first + f->leaves[t];
        if (f->leaves[t] == fresh) {
            float sum = 0.0f;
            for (int c = 0; c < COLUMNS; c++) sum += f->moves[at] >> c & 1 ? priors[t * COLUMNS + c] : 0.0f;
            for (int c = 0; c < COLUMNS; c++) f->priors[at * COLUMNS + c] = priors[t * COLUMNS + c] / fmaxf(sum, 1e-6f);
            if (f->lower[at] != f->upper[at]) f->values[at] = values[t];
        }
        float value = f->values[at];
        while (at != first) {
            int64_t parent = first + f->parents[at], edge = parent * COLUMNS + f->columns[at];
            value = -value;
            f->visits[edge]++;
            f->totals[edge] += value;
            narrow_bounds(f, first, parent);
            if (f->lower[parent] == f->upper[parent]) value = f->values[parent];
            at = parent;
        }
    }
}
