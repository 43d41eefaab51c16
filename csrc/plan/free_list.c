/* free_list.c -- keeps free ranges of addresses as a treap: taking and giving back take logarithmic time. */
#include "plan/free_list.h"

#include "core/hash.h"

#include <stdbool.h>

enum { NONE = 0 };

static int64_t longest_of(const free_list *f, int n) { return f->at[n].longest; }

static void update(free_list *f, int n) {
    free_range *x = &f->at[n];
    x->longest = x->high - x->low;
    if (longest_of(f, x->left) > x->longest) x->longest = longest_of(f, x->left);
    if (longest_of(f, x->right) > x->longest) x->longest = longest_of(f, x->right);
}

/* All of `a` is below all of `b`. */
static int join(free_list *f, int a, int b) {
    if (!a || !b) return a ? a : b;
    const bool first = f->at[a].priority > f->at[b].priority;
    if (first) f->at[a].right = join(f, f->at[a].right, b);
    else f->at[b].left = join(f, a, f->at[b].left);
    update(f, first ? a : b);
    return first ? a : b;
}

/* Ranges below `address`, and those above. */
static void split(free_list *f, int n, int64_t address, int *below, int *above) {
    if (!n) {
        *below = *above = NONE;
        return;
    }
    if (f->at[n].low < address) {
        split(f, f->at[n].right, address, &f->at[n].right, above);
        *below = n;
    } else {
        split(f, f->at[n].left, address, below, &f->at[n].left);
        *above = n;
    }
    update(f, n);
}

static int new_range(free_list *f, int64_t low, int64_t high) {
    int n = f->unused;
    if (n) f->unused = f->at[n].left;
    else n = ++f->count;
    f->at[n] = (free_range){.low = low, .high = high, .longest = high - low, .priority = hash_mix(0, (uint64_t)n)};
    return n;
}

static void drop(free_list *f, int n) {
    f->at[n].left = f->unused;
    f->unused = n;
}

status free_list_new(ctx *c, int most, free_list *out) {
    *out = (free_list){0};
    TRY(NEW(c, out->at, (size_t)most + 3)); /* none, one between any two blocks and at both ends */
    out->root = new_range(out, 0, INT64_MAX);
    return OK;
}

/* Takes it from the subtree, which has room, and returns what is left of that. */
static int take(free_list *f, int n, int64_t bytes, int64_t *offset) {
    free_range *x = &f->at[n];

    if (longest_of(f, x->left) >= bytes) x->left = take(f, x->left, bytes, offset);
    else if (x->high - x->low >= bytes) {
        *offset = x->low;
        x->low += bytes;
        if (x->low == x->high) {
            const int rest = join(f, x->left, x->right);
            drop(f, n);
            return rest;
        }
    } else x->right = take(f, x->right, bytes, offset);
    update(f, n);
    return n;
}

int64_t free_list_take(free_list *f, int64_t bytes) {
    int64_t offset = 0;
    f->root = take(f, f->root, bytes, &offset);
    return offset;
}

/* Without the last range of it, if that ends at `address`: `low` is where that begins then. */
static int without_last(free_list *f, int n, int64_t address, int64_t *low) {
    free_range *x = &f->at[n];

    if (!n) return NONE;
    if (x->right) x->right = without_last(f, x->right, address, low);
    else if (x->high == address) {
        const int rest = x->left;
        *low = x->low;
        drop(f, n);
        return rest;
    }
    update(f, n);
    return n;
}

static int without_first(free_list *f, int n, int64_t address, int64_t *high) {
    free_range *x = &f->at[n];

    if (!n) return NONE;
    if (x->left) x->left = without_first(f, x->left, address, high);
    else if (x->low == address) {
        const int rest = x->right;
        *high = x->high;
        drop(f, n);
        return rest;
    }
    update(f, n);
    return n;
}

void free_list_give(free_list *f, int64_t offset, int64_t bytes) {
    int64_t low = offset, high = offset + bytes;
    int below, above;

    split(f, f->root, offset, &below, &above);
    below = without_last(f, below, offset, &low);
    above = without_first(f, above, offset + bytes, &high);
    f->root = join(f, join(f, below, new_range(f, low, high)), above);
}
