/* row_fusion.c -- reductions of rows and the chains that read their totals  ->  one FusedRows, which runs them for a
 * block of rows after the other, so that rows are still in the cache when they are read again
 *
 *     ReduceSum(x, axis -1) -> s;  Fused(x, s, steps="Div Tanh") -> y     ->     FusedRows(x) -> y
 *
 * It comes after pointwise_fusion: stages are what that pass has left, a Fused, a FusedReduce, a lone pointwise node or a
 * lone reduction. A group begins with a fold of rows and takes what reads a member's result, over the same elements or
 * over the same rows, and what folds an operand that a member reads. It stays convex, as groups there do; reshapes and
 * expansions of totals between members do not count. A group without a stage that reads totals is left alone: nothing in
 * it would be read once more. A chain that is folded along columns, too, as for the gradient of a scale, is no stage. */
#include "passes/convex.h"
#include "passes/pipeline.h"

#include "ops/queries.h"

enum {
    WINDOW = 64,          /* nodes between the last member and the next */
    WORTHWHILE = 1 << 16, /* elements: fewer stay in the cache anyway */
    WIDEST = 1 << 16,     /* elements of a row; a wider one does not stay */
    FEWEST = 16,          /* rows, for threads to share */
    SWEEPS = 2,
};

typedef struct fuser {
    graph *g;
    convex around;
} fuser;

static bool is_member(const rows_chain *ch, const node *n) { return convex_has(ch->stages, ch->n_stages, n); }

/* The member that makes what `v` shows, perhaps reshaped or expanded. */
static node *maker(const rows_chain *ch, value *v) {
    node *n = v ? fused_rows_source(v)->def : NULL;
    return n && is_member(ch, n) ? n : NULL;
}

static bool is_whole(const rows_chain *ch, const value *v) { return v && shape_equal(&v->shape, &ch->shape); }

static bool is_read_by(const node *n, const value *v) {
    for (int i = 0; i < n->n_in; i++)
        if (n->in[i] == v) return true;
    return false;
}

/* A whole operand that a member reads, too. */
static bool shares_operand(const rows_chain *ch, const node *n) {
    for (int i = 0; i < n->n_in; i++)
        for (int j = 0; j < ch->n_stages && is_whole(ch, n->in[i]) && !n->in[i]->data; j++)
            if (is_read_by(ch->stages[j], n->in[i])) return true;
    return false;
}

/* What `reader` reads of `of`: nothing, something, or something that it may not if both are stages. */
typedef enum reading { READS_NOTHING, READS, MISREADS } reading;

static reading reading_of(const rows_chain *ch, const node *reader, const node *of) {
    reading r = READS_NOTHING;

    for (int i = 0; i < reader->n_in; i++) {
        value *v = reader->in[i];
        if (!v || fused_rows_source(v)->def != of) continue;
        if (!fused_rows_reads(ch, reader, v)) return MISREADS;
        r = READS;
    }
    return r;
}

/* A node outside the group reads `v`, or what shows it. */
static bool is_needed(const fuser *f, const rows_chain *ch, const value *v) {
    if (value_is_end(v)) return true;
    for (const use *u = v->uses; u; u = u->next) {
        const node *n = u->user;
        if (!node_is_live(n) || is_member(ch, n)) continue;
        if (fused_rows_source(n->out[0]) != fused_rows_source((value *)(uintptr_t)v)) return true;
        if (is_needed(f, ch, n->out[0])) return true;
    }
    return false;
}

/* Lists what the group gives, and counts what it reads; false when that is too much. */
static bool list_values(const fuser *f, rows_chain *ch) {
    value *reads[ROWS_READS];
    int n_reads = 0;

    ch->n_gives = 0;
    for (int i = 0; i < ch->n_stages; i++) {
        const node *n = ch->stages[i];
        for (int j = 0; j < n->n_out; j++) {
            if (!n->out[j] || !is_needed(f, ch, n->out[j])) continue;
            if (ch->n_gives == ROWS_GIVES) return false;
            ch->gives[ch->n_gives++] = n->out[j];
        }
        for (int j = 0, k; j < n->n_in; j++) {
            if (maker(ch, n->in[j])) continue;
            for (k = 0; k < n_reads && reads[k] != n->in[j]; k++);
            if (k < n_reads) continue;
            if (n_reads == ROWS_READS) return false;
            reads[n_reads++] = n->in[j];
        }
    }
    return true;
}

static bool join(fuser *f, rows_chain *ch, node *n, const node *first, const node *last) {
    if (ch->n_stages == ROWS_STAGES) return false;
    ch->stages[ch->n_stages++] = n;
    if (list_values(f, ch) && convex_holds(&f->around, ch->stages, ch->n_stages, first, last)) return true;
    ch->n_stages--;
    return false;
}

static bool may_join(const rows_chain *ch, const node *first, const node *n) {
    bool near = false;
    shape s;
    int kept;

    if (n->mark != first->mark || n->backward != first->backward || is_member(ch, n)) return false;
    if (!n->op || !fused_rows_holds(ch, n)) return false;
    for (int i = 0; i < ch->n_stages; i++) {
        const reading reads = reading_of(ch, n, ch->stages[i]), read = reading_of(ch, ch->stages[i], n);
        if (reads == MISREADS || read == MISREADS) return false;
        near |= reads == READS || read == READS;
    }
    if (near) return true;
    return fused_rows_folds(n, &s, &kept) && shares_operand(ch, n);
}

static int sweep(fuser *f, rows_chain *ch, node *first, node **last) {
    int joined = 0, distance = 0;
    bool past = first == *last;

    for (node *n = first->next; n && distance < WINDOW && n->mark <= first->mark; n = n->next) {
        distance += past;
        past |= n == *last;
        if (!node_is_live(n) || !may_join(ch, first, n) || !join(f, ch, n, first, past ? n : *last)) continue;
        joined++;
        if (!past) continue;
        *last = n;
        distance = 0;
    }
    return joined;
}

/* A stage over elements reads what was folded of them, perhaps through stages over rows. */
static bool is_worthwhile(const rows_chain *ch) {
    for (int i = 0; i < ch->n_stages; i++)
        for (int j = 0; j < ch->stages[i]->n_in && !fused_rows_small(ch, ch->stages[i]); j++) {
            value *v = ch->stages[i]->in[j];
            if (maker(ch, v) && !is_whole(ch, fused_rows_source(v))) return true;
        }
    return false;
}

static status replace(fuser *f, rows_chain *ch, node *first, node *last) {
    graph *g = f->g;
    value *out[ROWS_GIVES];
    const int mark = first->mark;

    convex_sort(ch->stages, ch->n_stages, first);
    if (!list_values(f, ch) || !convex_holds(&f->around, ch->stages, ch->n_stages, first, last)) return OK;
    convex_clear(&f->around, g, ch->stages, ch->n_stages, first, last);
    pass_emits(g, last->next, last);
    TRY(fused_rows_emit(g, ch, out));
    for (int i = 0; i < ch->n_gives; i++) TRY(graph_replace(g, ch->gives[i], out[i]));
    for (int i = 0; i < ch->n_stages; i++) ch->stages[i]->mark = TAKEN;
    for (node *n = last->next; n != g->before; n = n->next) n->mark = mark;
    return OK;
}

static status fuse_from(fuser *f, node *seed, int *fired) {
    rows_chain ch = {.n_stages = 1, .stages = {seed}};
    node *last = seed;

    if (!seed->op || !fused_rows_folds(seed, &ch.shape, &ch.kept)) return OK;
    const int64_t rows = shape_span(&ch.shape, 0, ch.kept), width = shape_span(&ch.shape, ch.kept, ch.shape.rank);
    if (rows * width < WORTHWHILE || rows < FEWEST || width > WIDEST || !list_values(f, &ch)) return OK;
    for (int i = 0; i < SWEEPS && sweep(f, &ch, seed, &last); i++);
    if (!is_worthwhile(&ch)) return OK;
    ++*fired;
    return replace(f, &ch, seed, last);
}

static status run(graph *g, int *fired) {
    fuser f = {.g = g};
    status s = OK;

    graph_mark_phases(g);
    TRY(convex_begin(g, fused_rows_source, &f.around));
    for (node *n = g->first; n && s == OK; n = n->next)
        if (node_is_live(n)) s = fuse_from(&f, n, fired);
    return pass_end(g, s);
}

const pass_def row_fusion = {.name = "row_fusion", .stage = LAST, .device = FOR_CPUS, .run = run};
