/* offsets.c -- places blocks greedily: in some order, each at the lowest offset that is free for its whole life.
 *
 * Which order is best depends on the graph, so a few are tried, the usual winner first; reaching the lower bound ends
 * the search, and it is reached more often than not.
 *
 * What is free is kept in a segment tree over time. A block's life splits into a few whole subtrees; their roots are
 * the block's *pieces*, and the nodes above those are its *ancestors*. Each tree node has two sets of addresses:
 *   whole   taken by blocks that have this node as a piece, thus at every time below it;
 *   any     taken by blocks that have a piece at or below this node, thus at some time below it.
 * A block collides with the `any` of its pieces and the `whole` of its ancestors, and with nothing else. Blocks packed
 * side by side melt into one range, so the sets stay short and a placement costs microseconds.
 *
 * Where they do not melt, in large graphs of blocks that all differ, the search ends after a number of steps for each block.
 * There is always one plan that takes no search: blocks as an allocator would place them that sees them come and go. */
#include "plan/offsets.h"

#include "core/size.h"
#include "plan/free_list.h"
#include "plan/sweep.h"

#include <inttypes.h>
#include <math.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

/* --- sets of addresses -------------------------------------------------------------------------------------------- */

typedef struct range {
    int64_t low, high; /* [low, high) */
} range;

typedef struct range_set {
    range *at; /* ascending; no two overlap or touch */
    int count, room;
} range_set;

/* The first range that ends above `x`. */
static int range_above(const range_set *s, int64_t x) {
    int low = 0, high = s->count;
    while (low < high) {
        int middle = (low + high) / 2;
        if (s->at[middle].high > x) high = middle;
        else low = middle + 1;
    }
    return low;
}

enum { MOVED_IN_A_STEP = 16 /* ranges */ };

static status range_add(ctx *c, range_set *s, range r, int64_t *steps) {
    int from = range_above(s, r.low - 1), to = from; /* [from, to) melt into the new range */

    for (; to < s->count && s->at[to].low <= r.high; to++) {
        if (s->at[to].low < r.low) r.low = s->at[to].low;
        if (s->at[to].high > r.high) r.high = s->at[to].high;
    }
    if (from == to) TRY(MORE(c, s->at, s->count, s->room));
    *steps += (s->count - to) / MOVED_IN_A_STEP;
    memmove(s->at + from + 1, s->at + to, (size_t)(s->count - to) * sizeof *s->at);
    s->at[from] = r;
    s->count += 1 - (to - from);
    return OK;
}

/* --- the tree ----------------------------------------------------------------------------------------------------- */

/* A block as it is placed: sizes rounded, times renumbered. */
typedef struct block {
    int64_t bytes, offset;
    int first, last;
} block;

typedef struct tree_node {
    range_set whole, any;
} tree_node;

enum { MAX_PARTS = 128 }; /* a life touches at most four nodes on each of 31 levels */

typedef struct parts {
    int count;
    struct part {
        tree_node *node;
        bool piece; /* or an ancestor of one */
    } at[MAX_PARTS];
} parts;

/* `index` is the root of the subtree over [from, to]; its children are 2 * index and 2 * index + 1. */
static void tree_split(tree_node *tree, int index, int from, int to, const block *b, parts *out) {
    bool piece = b->first <= from && to <= b->last;
    int middle = from + (to - from) / 2;

    out->at[out->count++] = (struct part){&tree[index], piece};
    if (piece) return;
    if (b->first <= middle) tree_split(tree, 2 * index, from, middle, b, out);
    if (b->last > middle) tree_split(tree, 2 * index + 1, middle + 1, to, b, out);
}

static int64_t lowest_free(const parts *p, int64_t bytes, int64_t *steps) {
    int64_t offset = 0;
    int agreed = 0; /* so many parts in a row have room at `offset` */

    for (int i = 0; agreed < p->count; i = i + 1 < p->count ? i + 1 : 0) {
        const range_set *taken = p->at[i].piece ? &p->at[i].node->any : &p->at[i].node->whole;
        int64_t before = offset;
        for (int k = range_above(taken, offset); k < taken->count && taken->at[k].low < offset + bytes; k++, ++*steps)
            offset = taken->at[k].high;
        agreed = offset == before ? agreed + 1 : 1;
        ++*steps;
    }
    return offset;
}

static status place_block(ctx *c, tree_node *tree, int leaves, block *b, int64_t *steps) {
    parts p = {.count = 0};
    range taken;

    tree_split(tree, 1, 0, leaves - 1, b, &p);
    b->offset = lowest_free(&p, b->bytes, steps);
    taken = (range){b->offset, b->offset + b->bytes};
    for (int i = 0; i < p.count; i++) {
        TRY(range_add(c, &p.at[i].node->any, taken, steps));
        if (p.at[i].piece) TRY(range_add(c, &p.at[i].node->whole, taken, steps));
    }
    return OK;
}

/* --- orders ------------------------------------------------------------------------------------------------------- */

/* The block with the largest key is placed first. */
typedef double order_key(const block *b);

static double life(const block *b) { return 1.0 + (double)(b->last - b->first); }
static double by_size(const block *b) { return (double)b->bytes; }
static double by_size_and_life(const block *b) { return (double)b->bytes * sqrt(life(b)); }

/* On what training graphs look like, size alone comes within a few percent of the bound, mostly within one. */
static order_key *const orders[] = {by_size, by_size_and_life, life};

/* Looking further than this for a smaller peak costs more than it gains (the unit is one step of lowest_free: 5 ns). */
enum { MAX_STEPS = 1000000 };
/* And a search that takes longer is given up; some tens of steps for a block are the rule. */
enum { MAX_STEPS_OF_ALL = 2 * MAX_STEPS, MAX_STEPS_OF_A_BLOCK = 200 };
static bool good_enough(int64_t peak, int64_t bound) { return peak - bound <= bound / 100; }

typedef struct rank {
    double key;
    int index;
} rank;

static int rank_compare(const void *x, const void *y) {
    const rank *a = x, *b = y;
    if (a->key != b->key) return a->key > b->key ? -1 : 1;
    return a->index - b->index;
}

/* *peak: INT64_MAX if it takes too long. */
static status place_all(ctx *c, block *blocks, int count, int times, order_key *key, int64_t *peak, int64_t *steps) {
    const int64_t most = *steps + MAX_STEPS_OF_ALL + (int64_t)MAX_STEPS_OF_A_BLOCK * count;
    tree_node *tree;
    rank *ranks;
    int leaves = 1;

    while (leaves < times) leaves *= 2;
    TRY(NEW(c, tree, 2 * (size_t)leaves));
    TRY(NEW(c, ranks, count));
    for (int i = 0; i < count; i++) ranks[i] = (rank){key(&blocks[i]), i};
    qsort(ranks, (size_t)count, sizeof *ranks, rank_compare);
    *peak = 0;
    for (int i = 0; i < count && *peak < INT64_MAX; i++) {
        block *b = &blocks[ranks[i].index];
        TRY(place_block(c, tree, leaves, b, steps));
        if (b->offset + b->bytes > *peak) *peak = b->offset + b->bytes;
        if (*steps > most) *peak = INT64_MAX;
    }
    return OK;
}

/* --- in time ------------------------------------------------------------------------------------------------------- */

/* Blocks in the order in which they come or go. */
static status sort_by_time(ctx *c, const block *blocks, int count, bool gone, rank **out) {
    rank *ranks;

    TRY(NEW(c, ranks, count));
    for (int i = 0; i < count; i++) ranks[i] = (rank){-(double)(gone ? blocks[i].last : blocks[i].first), i};
    qsort(ranks, (size_t)count, sizeof *ranks, rank_compare);
    *out = ranks;
    return OK;
}

/* Each block at the lowest offset that is free when it comes. */
static status place_in_time(ctx *c, block *blocks, int count, int64_t *peak) {
    rank *come, *go;
    free_list free;
    int gone = 0;

    TRY(sort_by_time(c, blocks, count, false, &come));
    TRY(sort_by_time(c, blocks, count, true, &go));
    TRY(free_list_new(c, count, &free));
    *peak = 0;
    for (int i = 0; i < count; i++) {
        block *b = &blocks[come[i].index];
        for (; blocks[go[gone].index].last < b->first; gone++)
            free_list_give(&free, blocks[go[gone].index].offset, blocks[go[gone].index].bytes);
        b->offset = free_list_take(&free, b->bytes);
        if (b->offset + b->bytes > *peak) *peak = b->offset + b->bytes;
    }
    return OK;
}

/* --- intervals to blocks ------------------------------------------------------------------------------------------ */

typedef struct problem {
    block *blocks; /* those that have bytes */
    int *item;     /* [count] the interval behind each */
    int count;
    int times;
    int64_t bound;
} problem;

static int int_compare(const void *x, const void *y) {
    int a = *(const int *)x, b = *(const int *)y;
    return (a > b) - (a < b);
}

/* The number of values in `sorted` that are <= x. */
static int count_up_to(const int *sorted, int count, int x) {
    int low = 0, high = count;
    while (low < high) {
        int middle = (low + high) / 2;
        if (sorted[middle] <= x) low = middle + 1;
        else high = middle;
    }
    return low;
}

/* Two lives overlap exactly if one begins during the other: only beginnings matter, so they become the times. */
static status renumber_times(ctx *c, problem *p) {
    int *begins, unique = 0;

    TRY(NEW(c, begins, p->count));
    for (int i = 0; i < p->count; i++) begins[i] = p->blocks[i].first;
    qsort(begins, (size_t)p->count, sizeof *begins, int_compare);
    for (int i = 0; i < p->count; i++)
        if (i == 0 || begins[i] != begins[unique - 1]) begins[unique++] = begins[i];
    for (int i = 0; i < p->count; i++) {
        p->blocks[i].first = count_up_to(begins, unique, p->blocks[i].first) - 1;
        p->blocks[i].last = count_up_to(begins, unique, p->blocks[i].last) - 1;
    }
    p->times = unique;
    return OK;
}

static status find_bound(ctx *c, problem *p) {
    int64_t *change;
    int at;

    TRY(NEW(c, change, p->times + 1));
    for (int i = 0; i < p->count; i++) sweep_add(change, p->blocks[i].first, p->blocks[i].last, p->blocks[i].bytes);
    p->bound = sweep_most(change, p->times, &at);
    return OK;
}

static status read_items(ctx *c, const interval *items, int count, int64_t alignment, int64_t redzone, problem *p) {
    int64_t total = 0;

    if (alignment < 1 || redzone < 0) return fail(c, E_INVALID, "an alignment below 1 or a negative red zone");
    TRY(NEW(c, p->blocks, count));
    TRY(NEW(c, p->item, count));
    for (int i = 0; i < count; i++) {
        int64_t bytes = items[i].bytes;
        if (bytes < 0 || items[i].last < items[i].first)
            return fail(c, E_INVALID, "block %d has %" PRId64 " bytes and lives from %d to %d", i, bytes,
                        items[i].first, items[i].last);
        if (bytes == 0) continue;
        bytes = size_add(size_add(bytes, redzone), alignment - 1);
        if ((total = size_add(total, bytes)) == INT64_MAX)
            return fail(c, E_NOMEM, "the blocks of a plan together have more than 2^63 bytes");
        bytes -= bytes % alignment;
        p->item[p->count] = i;
        p->blocks[p->count++] = (block){.bytes = bytes, .first = items[i].first, .last = items[i].last};
    }
    TRY(renumber_times(c, p));
    return find_bound(c, p);
}

static void keep_best(interval *items, const problem *p, int64_t reached, int64_t *best) {
    if (reached >= *best) return;
    *best = reached;
    for (int i = 0; i < p->count; i++) items[p->item[i]].offset = p->blocks[i].offset;
}

static status plan_offsets(ctx *c, interval *items, int count, int64_t alignment, int64_t redzone, int64_t *peak) {
    problem p = {0};
    int64_t reached, best = INT64_MAX, steps = 0;

    TRY(read_items(c, items, count, alignment, redzone, &p));
    for (size_t k = 0; k < sizeof orders / sizeof *orders; k++) {
        TRY(place_all(c, p.blocks, p.count, p.times, orders[k], &reached, &steps));
        keep_best(items, &p, reached, &best);
        if (good_enough(best, p.bound) || steps > MAX_STEPS) break;
    }
    if (p.count && !good_enough(best, p.bound)) {
        TRY(place_in_time(c, p.blocks, p.count, &reached));
        keep_best(items, &p, reached, &best);
    }
    *peak = p.count ? best : 0;
    return OK;
}

/* --- entry points ------------------------------------------------------------------------------------------------- */

/* The trees are large and needed only here: they live in a context of their own, which is gone on return. */
status offsets_plan(ctx *c, interval *items, int count, int64_t alignment, int64_t redzone, int64_t *peak) {
    ctx scratch;

    for (int i = 0; i < count; i++) items[i].offset = 0;
    ctx_scratch_begin(c, &scratch);
    return ctx_scratch_end(c, &scratch, plan_offsets(&scratch, items, count, alignment, redzone, peak));
}

status offsets_bound(ctx *c, const interval *items, int count, int64_t alignment, int64_t redzone, int64_t *bound) {
    ctx scratch;
    problem p = {0};
    status s;

    ctx_scratch_begin(c, &scratch);
    s = read_items(&scratch, items, count, alignment, redzone, &p);
    *bound = p.bound;
    return ctx_scratch_end(c, &scratch, s);
}
