/* triton_fusion.c -- pointwise nodes, reductions and norms of rows that are connected  ->  one TritonChain, which a kernel generated
 * by Python computes
 *
 *     Mul(x, y) -> z;  Softmax(z) -> w;  Cast(w)     ->     TritonChain(x, y)
 *
 * It runs where ORTMODULE_USE_TRITON is on (graph.triton), before the other passes that make chains: these get what it
 * leaves. A group begins with a node and takes those over the same elements, or over rows of them, that read a member's
 * result or are read by a member. It stays convex, as groups of pointwise_fusion do; reshapes and expansions between
 * members do not count. A group with too few nodes is left alone. */
#include "passes/convex.h"
#include "passes/pipeline.h"

#include "graph/triton.h"
#include "ops/queries.h"

/* Nodes between the last member and the next; walks over them. */
enum { WINDOW = 96, SWEEPS = 3 };

typedef struct fuser {
    graph *g;
    convex around;
} fuser;

static bool is_member(const triton_chain *ch, const node *n) { return convex_has(ch->nodes, ch->n_nodes, n); }

static bool is_made(const triton_chain *ch, value *v) {
    const node *n = v ? fused_rows_source(v)->def : NULL;
    return n && is_member(ch, n);
}

/* A node outside the group reads `v`, or what shows it. */
static bool is_needed(const triton_chain *ch, value *v) {
    if (value_is_end(v)) return true;
    for (const use *u = v->uses; u; u = u->next) {
        const node *n = u->user;
        if (!node_is_live(n) || is_member(ch, n)) continue;
        if (fused_rows_source(n->out[0]) != fused_rows_source(v) || is_needed(ch, n->out[0])) return true;
    }
    return false;
}

/* Lists what the group gives, and counts what it reads; false when that is too much. */
static bool list_values(triton_chain *ch) {
    const value *reads[TRITON_READS];
    int n_reads = 0;

    ch->n_gives = 0;
    for (int i = 0; i < ch->n_nodes; i++) {
        node *n = ch->nodes[i];
        for (int j = 0; j < n->n_out; j++) {
            if (!n->out[j] || !is_needed(ch, n->out[j])) continue;
            if (ch->n_gives == TRITON_GIVES) return false;
            ch->gives[ch->n_gives++] = n->out[j];
        }
        for (int j = 0, k; j < n->n_in; j++) {
            if (!n->in[j] || is_made(ch, n->in[j])) continue;
            for (k = 0; k < n_reads && reads[k] != n->in[j]; k++);
            if (k < n_reads) continue;
            if (n_reads == TRITON_READS) return false;
            reads[n_reads++] = n->in[j];
        }
    }
    return true;
}

/* What `reader` reads of `of`: nothing, something, or something that it may not if both are members. */
typedef enum reading { READS_NOTHING, READS, MISREADS } reading;

static reading reading_of(const triton_chain *ch, const node *reader, const node *of) {
    reading r = READS_NOTHING;

    for (int i = 0; i < reader->n_in; i++) {
        value *v = reader->in[i];
        if (!v || fused_rows_source(v)->def != of) continue;
        if (!triton_reads(ch, reader, i)) return MISREADS;
        r = READS;
    }
    return r;
}

static bool is_wide(const graph *g, const shape *s, int kept) {
    return shape_span(s, kept, s->rank) > g->triton->widest;
}

static bool may_join(const fuser *f, const triton_chain *ch, const node *first, const node *n) {
    bool near = false, counts;
    shape s;
    int kept;

    if (n->mark != first->mark || n->backward != first->backward || is_member(ch, n)) return false;
    if (!triton_takes(f->g, n, &counts) || !triton_holds(ch, n)) return false;
    if (triton_folds(n, &s, &kept) && is_wide(f->g, &s, kept)) return false;
    triton_chain with = *ch;
    if (with.rows.kept < 0 && triton_folds(n, &s, &kept)) with.rows.kept = kept;
    for (int i = 0; i < ch->n_nodes; i++) {
        const reading reads = reading_of(&with, n, ch->nodes[i]), read = reading_of(&with, ch->nodes[i], n);
        if (reads == MISREADS || read == MISREADS) return false;
        near |= reads == READS || read == READS;
    }
    return near;
}

static bool join(fuser *f, triton_chain *ch, node *n, const node *first, const node *last) {
    const int kept = ch->rows.kept;
    shape s;

    if (ch->n_nodes == TRITON_NODES) return false;
    ch->nodes[ch->n_nodes++] = n;
    if (kept < 0 && !triton_folds(n, &s, &ch->rows.kept)) ch->rows.kept = -1;
    if (list_values(ch) && convex_holds(&f->around, ch->nodes, ch->n_nodes, first, last)) return true;
    ch->n_nodes--;
    ch->rows.kept = kept;
    return false;
}

static int sweep(fuser *f, triton_chain *ch, node *first, node **last) {
    int joined = 0, distance = 0;
    bool past = first == *last;

    for (node *n = first->next; n && distance < WINDOW && n->mark <= first->mark; n = n->next) {
        distance += past;
        past |= n == *last;
        if (!node_is_live(n) || !may_join(f, ch, first, n) || !join(f, ch, n, first, past ? n : *last)) continue;
        joined++;
        if (!past) continue;
        *last = n;
        distance = 0;
    }
    return joined;
}

static bool has_enough(const fuser *f, const triton_chain *ch) {
    int count = 0;
    for (int i = 0; i < ch->n_nodes; i++) {
        bool counts = false;
        count += triton_takes(f->g, ch->nodes[i], &counts) && counts;
    }
    return count >= f->g->triton->min_nodes;
}

static status replace(fuser *f, triton_chain *ch, node *first, node *last, int *fired) {
    graph *g = f->g;
    value *out[TRITON_GIVES];
    const int mark = first->mark;

    convex_sort(ch->nodes, ch->n_nodes, first);
    if (!list_values(ch) || !convex_holds(&f->around, ch->nodes, ch->n_nodes, first, last)) return OK;
    convex_clear(&f->around, g, ch->nodes, ch->n_nodes, first, last);
    pass_emits(g, last->next, last);
    TRY(triton_emit(g, ch, out));
    for (int i = 0; i < ch->n_gives; i++) TRY(graph_replace(g, ch->gives[i], out[i]));
    for (int i = 0; i < ch->n_nodes; i++) ch->nodes[i]->mark = TAKEN;
    for (node *n = last->next; n != g->before; n = n->next) n->mark = mark;
    ++*fired;
    return OK;
}

static status fuse_from(fuser *f, node *seed, int *fired) {
    triton_chain ch = {.n_nodes = 1, .nodes = {seed}, .rows = {.kept = -1}};
    node *last = seed;
    bool counts;

    if (!seed->op || !seed->n_out || !seed->out[0] || !triton_takes(f->g, seed, &counts)) return OK;
    if (!triton_folds(seed, &ch.rows.shape, &ch.rows.kept)) ch.rows.shape = seed->out[0]->shape, ch.rows.kept = -1;
    else if (is_wide(f->g, &ch.rows.shape, ch.rows.kept)) return OK;
    if (!shape_count(&ch.rows.shape) || !triton_holds(&ch, seed) || !list_values(&ch)) return OK;
    for (int i = 0; i < SWEEPS && sweep(f, &ch, seed, &last); i++);
    return has_enough(f, &ch) ? replace(f, &ch, seed, last, fired) : OK;
}

static status run(graph *g, int *fired) {
    fuser f = {.g = g};
    status s = OK;

    if (!g->triton) return OK;
    graph_mark_phases(g);
    TRY(convex_begin(g, fused_rows_source, &f.around));
    for (node *n = g->first; n && s == OK; n = n->next)
        if (node_is_live(n)) s = fuse_from(&f, n, fired);
    return pass_end(g, s);
}

const pass_def triton_fusion = {.name = "triton_fusion", .stage = LAST, .run = run};
