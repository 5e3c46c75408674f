/* Many search trees side by side: down all of them to a leaf each, and back up with what the leaves are worth. */
#include <math.h>

#include "lines.h"

#define NONE 0 /* of children: the root is nobody's child */

/* `nodes` nodes for each of `trees` trees; a node's number counts within its tree, 0 is the root. */
struct forest {
    uint64_t *own, *stones;
    int32_t *children, *visits; /* [trees, nodes, COLUMNS] */
    float *priors, *totals;     /* likewise; totals are outcomes for whoever is to move at the node */
    int32_t *parents;
    int8_t *columns;            /* that led to the node */
    float *worth;               /* to whoever is to move, as the network has it, exact where it is over */
    uint8_t *over;
    int32_t *leaves;            /* [trees], where the last descent ended */
    int64_t trees, nodes;
};

static int chosen(const struct forest *f, int64_t node, uint64_t stones, float exploration)
{
    const int32_t *visits = f->visits + node * COLUMNS;
    const float *priors = f->priors + node * COLUMNS, *totals = f->totals + node * COLUMNS;
    int all = 0, best = 0;
    for (int c = 0; c < COLUMNS; c++) all += visits[c];
    float eager = exploration * sqrtf((float)(all + 1)), most = -INFINITY;
    for (int c = 0; c < COLUMNS; c++) {
        if (!((stones + BOTTOM) & column(c))) continue;
        float mean = visits[c] ? totals[c] / (float)visits[c] : f->worth[node];
        float promise = mean + eager * priors[c] / (float)(1 + visits[c]);
        if (promise > most) most = promise, best = c;
    }
    return best;
}

/* Make node number `fresh` in every tree that does not end in a game that is over; `leaves` says where. */
void perilune_four_descend(struct forest *f, int64_t fresh, float exploration)
{
    for (int64_t t = 0; t < f->trees; t++) {
        int64_t first = t * f->nodes, at = first;
        while (!f->over[at]) {
            int c = chosen(f, at, f->stones[at], exploration);
            int32_t *child = f->children + at * COLUMNS + c;
            if (*child != NONE) {
                at = first + *child;
                continue;
            }
            int64_t node = first + fresh;
            uint64_t move = (f->stones[at] + BOTTOM) & column(c);
            *child = (int32_t)fresh;
            f->own[node] = f->own[at] ^ f->stones[at];
            f->stones[node] = f->stones[at] | move;
            f->parents[node] = (int32_t)(at - first);
            f->columns[node] = (int8_t)c;
            int lost = has_four(f->own[at] | move);
            f->over[node] = lost || f->stones[node] == BOARD;
            f->worth[node] = lost ? -1.0f : 0.0f;
            at = node;
            break;
        }
        f->leaves[t] = (int32_t)(at - first);
    }
}

/* Take in what the network says of node `fresh` where it is new, [trees, COLUMNS] and [trees], and count all leaves. */
void perilune_four_absorb(struct forest *f, int64_t fresh, const float *priors, const float *values)
{
    for (int64_t t = 0; t < f->trees; t++) {
        int64_t first = t * f->nodes, at = first + f->leaves[t];
        if (f->leaves[t] == fresh && !f->over[at]) {
            for (int c = 0; c < COLUMNS; c++) f->priors[at * COLUMNS + c] = priors[t * COLUMNS + c];
            f->worth[at] = values[t];
        }
        float value = -f->worth[at];
        while (at != first) {
            int64_t edge = (first + f->parents[at]) * COLUMNS + f->columns[at];
            f->visits[edge]++;
            f->totals[edge] += value;
            value = -value;
            at = first + f->parents[at];
        }
    }
}
