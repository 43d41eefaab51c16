/* peak.c -- finds when a plan's arena holds the most and what is the largest there, and refuses what does not fit. */
#include "plan/peak.h"

#include "core/limit.h"
#include "core/memory.h"
#include "plan/sweep.h"

#include <inttypes.h>
#include <stdio.h>

status plan_peak(ctx *c, const plan *p, bool joint, int *at, int64_t *bytes) {
    int n;
    const interval *blocks = plan_arena_blocks(p, joint, &n);
    int64_t *change;

    TRY(NEW(c, change, p->n_code + 1));
    for (int i = 0; i < n; i++) sweep_add(change, blocks[i].first, blocks[i].last, blocks[i].bytes);
    *bytes = sweep_most(change, p->n_code, at);
    return OK;
}

/* --- the largest ---------------------------------------------------------------------------------------------------- */

typedef struct row {
    const node *node;
    const char *what;
    int64_t bytes;
} row;

typedef struct rows {
    row at[LARGEST_NAMED]; /* descending */
} rows;

static void add_row(rows *r, const node *n, const char *what, int64_t bytes) {
    int k = LARGEST_NAMED;

    if (!n) return;
    while (k > 0 && bytes > r->at[k - 1].bytes) k--;
    for (int i = LARGEST_NAMED - 1; i > k; i--) r->at[i] = r->at[i - 1];
    if (k < LARGEST_NAMED) r->at[k] = (row){n, what, bytes};
}

static void add_result(rows *r, const value *v) {
    if (v && v->def) add_row(r, v->def, "", value_bytes(v));
}

status plan_largest(ctx *c, const plan *p, char *text, size_t size) {
    const graph *g = p->g;
    const bool joint = p->joint_bytes > 0;
    rows r = {0};
    size_t used = 0;
    int64_t bytes;
    int at, n;

    *text = '\0';
    TRY(plan_peak(c, p, joint, &at, &bytes));
    const interval *blocks = plan_arena_blocks(p, joint, &n);
    for (int i = 0; i < n; i++)
        if (blocks[i].first <= at && at <= blocks[i].last)
            add_row(&r, p->of_block[i].node, p->of_block[i].value ? "" : "workspace of ", blocks[i].bytes);
    for (int i = 0; i < g->n_outputs; i++) add_result(&r, g->outputs[i]);
    for (const state_write *w = g->writes; w; w = w->next) add_result(&r, w->value);
    for (int i = 0; i < LARGEST_NAMED && r.at[i].bytes > 0 && used < size; i++)
        used += (size_t)snprintf(text + used, size - used, "%s%s%s (%s) with %" PRId64 " bytes", i ? ", " : "",
                                 r.at[i].what, r.at[i].node->op->name, r.at[i].node->name ? r.at[i].node->name : "-",
                                 r.at[i].bytes);
    return OK;
}

/* --- what does not fit -------------------------------------------------------------------------------------------------- */

static status too_large(ctx *c, const plan *p, int64_t bytes, size_t there, const char *what) {
    char largest[LARGEST_TEXT];

    TRY(plan_largest(c, p, largest, sizeof largest));
    return fail(c, E_NOMEM, "out of memory: a run takes %" PRId64 " bytes; %zu bytes %s; the largest: %s", bytes, there,
                what, largest);
}

status plan_no_memory(ctx *c, const plan *p, bool joint) {
    char largest[LARGEST_TEXT];

    TRY(plan_largest(c, p, largest, sizeof largest));
    return fail(c, E_NOMEM, "out of memory: a run takes %" PRId64 " bytes, which cannot be had; the largest: %s",
                p->run_bytes - p->arena_bytes + plan_arena_bytes(p, joint), largest);
}

status plan_check_memory(ctx *c, const plan *p, bool joint) {
    const int64_t bytes = p->run_bytes - p->arena_bytes + plan_arena_bytes(p, joint);

    if (p->cuda || bytes == 0 || memory_would_fit((size_t)bytes)) return OK;
    return too_large(c, p, bytes, memory_limits_now().room, "are free");
}

status plan_check_limit(ctx *c, const plan *p) {
    enum { LOOKED_AT = 16 << 20 };
    const size_t most = p->run_bytes > LOOKED_AT ? memory_limits_now().most : SIZE_MAX;

    return p->cuda || (size_t)p->run_bytes <= most
               ? OK
               : too_large(c, p, p->run_bytes, most, "are all that this process may use");
}
