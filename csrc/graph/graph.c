/* graph.c -- keeps the structure: makes nodes and values, keeps uses true, replaces, removes. */
#include "core/hash.h"
#include "core/size.h"
#include "ops/op.h"

#include <stdlib.h>
#include <string.h>

status graph_new(ctx *c, graph **out) {
    graph *g;
    TRY(NEW(c, g, 1));
    g->c = g->scratch = c;
    *out = g;
    return OK;
}

/* --- values ------------------------------------------------------------------------------------------------------- */

static status new_value(graph *g, dtype type, const shape *s, value **out) {
    value *v;
    TRY(NEW(g->c, v, 1));
    v->id = g->n_values++;
    v->type = type;
    v->shape = s ? *s : (shape){.rank = -1};
    v->input = -1;
    *out = v;
    return OK;
}

/* The room follows from the count, since nothing is ever taken out. */
static status append(ctx *c, value ***list, int *count, value *v) {
    int room = *count;

    if (*count & (*count - 1)) room++; /* no power of two: there is some */
    TRY(MORE(c, *list, *count, room));
    (*list)[(*count)++] = v;
    return OK;
}

status graph_add_input(graph *g, const char *name, dtype type, const shape *s, value **out) {
    value *v;
    TRY(new_value(g, type, s, &v));
    if (name && !(v->name = arena_text(g->c, name, strlen(name)))) return E_NOMEM;
    v->input = g->n_inputs;
    TRY(append(g->c, &g->inputs, &g->n_inputs, v));
    *out = v;
    return OK;
}

/* --- ends --------------------------------------------------------------------------------------------------------- */

/* Where an end is now: the list of outputs moves when it grows. */
static value **place_of(const graph *g, const graph_end *e) { return e->output >= 0 ? &g->outputs[e->output] : e->at; }

/* Behind the others: ends that are taken away one by one, in their order, are found at once. */
static void add_end(value *v, graph_end *e) {
    if (!v->ends) v->last_end = &v->ends;
    *v->last_end = e;
    v->last_end = &e->next;
    e->next = NULL;
    v->n_ends++;
}

static graph_end *take_end(const graph *g, value *v, value *const *at) {
    for (graph_end **link = &v->ends; *link; link = &(*link)->next) {
        graph_end *e = *link;
        if (place_of(g, e) != at) continue;
        if (!(*link = e->next)) v->last_end = link;
        v->n_ends--;
        return e;
    }
    return NULL;
}

static status new_end(graph *g, value **at, graph_end **out) {
    const bool output = at >= g->outputs && at < g->outputs + g->n_outputs;

    TRY(NEW(g->c, *out, 1));
    (*out)->output = output ? (int)(at - g->outputs) : -1;
    (*out)->at = at;
    return OK;
}

status graph_set_end(graph *g, value **at, value *v) {
    graph_end *e = *at ? take_end(g, *at, at) : NULL;

    g->tidy = false;
    *at = NULL;
    if (!v) return OK;
    if (!e) TRY(new_end(g, at, &e));
    *at = v;
    add_end(v, e);
    return OK;
}

status graph_add_output(graph *g, value *v) {
    TRY(append(g->c, &g->outputs, &g->n_outputs, NULL));
    return graph_set_end(g, &g->outputs[g->n_outputs - 1], v);
}

static void move_ends(const graph *g, value *from, value *to) {
    while (from->ends) {
        value **at = place_of(g, from->ends);
        add_end(to, take_end(g, from, at));
        *at = to;
    }
}

/* --- constants ---------------------------------------------------------------------------------------------------- */

status graph_add_constant(graph *g, dtype type, const shape *s, const void *data, value **out) {
    char *copy;
    value *v;

    TRY(shape_check(g->c, s));
    TRY(new_value(g, type, s, &v));
    if (!(copy = arena_array(g->c, (size_t)shape_count(s), dtype_size(type)))) return E_NOMEM;
    if (data) memcpy(copy, data, (size_t)shape_count(s) * dtype_size(type));
    v->data = copy;
    *out = v;
    return OK;
}

status graph_share_constant(graph *g, const value *from, value **out) {
    TRY(new_value(g, from->type, &from->shape, out));
    (*out)->data = from->data;
    (*out)->name = from->name;
    return OK;
}

status graph_scalar(graph *g, dtype type, double x, value **out) {
    union {
        int64_t align;
        char bytes[8];
    } one = {0};
    dtype_set_value(type, one.bytes, 0, x);
    return graph_add_constant(g, type, &SCALAR, one.bytes, out);
}

status graph_ints(graph *g, int count, const int64_t *x, value **out) {
    return graph_add_constant(g, I64, &SHAPE(count), x, out);
}

static status note_pending(graph *g, value *v, int64_t key) {
    if (g->n_pending == 0) g->pending = v;
    for (int i = 0; i < g->n_pending; i++)
        if (g->pending_sizes[i].v == v) return fail(g->c, E_PENDING, "a size is decided by data");
    TRY(MORE(g->c, g->pending_sizes, g->n_pending, g->pending_room));
    g->pending_sizes[g->n_pending++] = (pending_size){key, v};
    return fail(g->c, E_PENDING, "a size is decided by data");
}

status graph_data_size(graph *g, value *v, int64_t *size) {
    const int64_t key = g->place ? g->place + g->n_asked++ : 0;

    for (int i = 0; g->place && !v->sized && i < g->n_known; i++)
        if (g->known[i].key == key) v->sized = -(i + 1);
    if (!g->place && !v->sized && g->n_sized < g->n_sizes) v->sized = ++g->n_sized;
    if (!v->sized) return note_pending(g, v, key);
    *size = v->sized < 0 ? g->known[-v->sized - 1].size : g->sizes[v->sized - 1];
    return OK;
}

/* --- uses --------------------------------------------------------------------------------------------------------- */

static void put_first(use *u, value *v) {
    u->next = v->uses;
    u->link = &v->uses;
    if (u->next) u->next->link = &u->next;
    v->uses = u;
    v->n_uses++;
}

static void add_use(value *v, node *user, int index) {
    use *u = &user->reads[index];
    if (!v) return;
    u->user = user;
    u->index = index;
    put_first(u, v);
}

static void drop_use(value *v, node *user, int index) {
    use *u = &user->reads[index];
    if (!v || !u->link) return;
    *u->link = u->next;
    if (u->next) u->next->link = u->link;
    u->link = NULL;
    v->n_uses--;
}

void graph_set_operand(graph *g, node *n, int index, value *v) {
    g->tidy = false;
    drop_use(n->in[index], n, index);
    n->in[index] = v;
    add_use(v, n, index);
}

node *value_first_reader(const value *v) {
    node *first = NULL;
    for (const use *u = v->uses; u; u = u->next)
        if (!first || node_is_before(u->user, first)) first = u->user;
    return first;
}

/* --- nodes -------------------------------------------------------------------------------------------------------- */

/* Between neighbours there is room for many more nodes, most of which come in right behind each other: a new place is
 * near its predecessor's. */
enum { NEAR = 64, PLACE_BITS = 62 };
static const int64_t apart = INT64_C(1) << 32;

/* Where there is no room left, nodes nearby get other places: all in the smallest range of 2^bits places, around `n`, that
 * has no more than 1.5^bits nodes. So an insertion costs O(log n) on average, wherever all of them are (order
 * maintenance, Bender et al. 2002). */
static void make_room(node *n) {
    const int64_t at = n->prev ? n->prev->place : 0;
    const node *last = n;
    node *first = n;
    int64_t count = 1;
    double most = 1;

    for (int bits = 1; bits <= PLACE_BITS; bits++) {
        const int64_t size = INT64_C(1) << bits, low = at & -size;
        for (; first->prev && first->prev->place >= low; first = first->prev) count++;
        for (; last->next && last->next->place - low < size; last = last->next) count++;
        if ((double)count > (most *= 1.5)) continue;
        const int64_t step = size / count;
        for (int64_t i = 0; i < count; i++, first = first->next) first->place = low + i * step;
        return;
    }
}

static void find_place(node *n) {
    const int64_t before = n->prev ? n->prev->place : 0, room = n->next ? n->next->place - before : apart;

    n->place = before + (n->next ? room / NEAR + 1 : apart);
    if (n->next && n->place >= n->next->place) make_room(n);
}

static void link_node(graph *g, node *n) {
    n->next = g->before;
    n->prev = g->before ? g->before->prev : g->last;
    if (n->prev) n->prev->next = n;
    else g->first = n;
    if (n->next) n->next->prev = n;
    else g->last = n;
    find_place(n);
}

static void take_out(graph *g, node *n) {
    if (n->prev) n->prev->next = n->next;
    else g->first = n->next;
    if (n->next) n->next->prev = n->prev;
    else g->last = n->prev;
    n->prev = n->next = NULL;
}

void graph_move(graph *g, node *n, node *before) {
    node *cursor = g->before;

    if (n == before) return;
    take_out(g, n);
    g->before = before;
    link_node(g, n);
    g->before = cursor;
}

static void unlink_node(graph *g, node *n) {
    for (int i = 0; i < n->n_in; i++) drop_use(n->in[i], n, i);
    take_out(g, n);
    n->mark = -1; /* the hash table may still point here: an unlinked node is never reused */
    n->op = NULL;
}

static status copy_tensor(ctx *c, const tensor *from, const tensor **out) {
    size_t bytes = (size_t)tensor_count(from) * dtype_size(from->type);
    tensor *to;

    TRY(NEW(c, to, 1));
    *to = *from;
    if (!(to->data = arena_array(c, bytes, 1))) return E_NOMEM;
    if (bytes) memcpy(to->data, from->data, bytes);
    *out = to;
    return OK;
}

static status copy_attrs(ctx *c, const attr *from, const attr **out) {
    attr *to;
    size_t n = 0;

    *out = NULL;
    if (!from || !from->name) return OK;
    while (from[n].name) n++;
    TRY(NEW(c, to, n + 1));
    for (size_t i = 0; i < n; i++) {
        to[i] = from[i];
        if (!(to[i].name = arena_text(c, from[i].name, strlen(from[i].name)))) return E_NOMEM;
        if (from[i].s && !(to[i].s = arena_text(c, from[i].s, strlen(from[i].s)))) return E_NOMEM;
        if (from[i].ints) {
            int64_t *ints;
            TRY(NEW(c, ints, from[i].count));
            memcpy(ints, from[i].ints, (size_t)from[i].count * sizeof *ints);
            to[i].ints = ints;
        }
        if (from[i].floats) {
            double *floats;
            TRY(NEW(c, floats, from[i].count));
            memcpy(floats, from[i].floats, (size_t)from[i].count * sizeof *floats);
            to[i].floats = floats;
        }
        if (from[i].t) TRY(copy_tensor(c, from[i].t, &to[i].t));
    }
    *out = to;
    return OK;
}

status graph_make_node(graph *g, const op_def *op, const char *name, const attr *attrs, int n_in, value *const *in,
                       int n_out, node **out) {
    node *n;

    TRY(NEW(g->c, n, 1));
    n->op = op;
    n->name = name;
    n->n_in = n_in;
    n->n_out = n_out;
    n->backward = g->in_backward;
    TRY(copy_attrs(g->c, attrs, &n->attrs));
    TRY(NEW(g->c, n->in, n_in));
    TRY(NEW(g->c, n->reads, n_in));
    TRY(NEW(g->c, n->out, n_out));
    if (n_in) memcpy(n->in, in, (size_t)n_in * sizeof *in);
    for (int i = 0; i < n_out; i++) {
        TRY(new_value(g, DT_NONE, NULL, &n->out[i]));
        n->out[i]->def = n;
        n->out[i]->def_index = i;
    }
    *out = n;
    return OK;
}

/* The place of an operator in graph.made. */
static unsigned place_in_made(const char *op) {
    uint64_t h = 0;
    for (; *op; op++) h = hash_mix(h, (unsigned char)*op);
    return (unsigned)h % (8 * sizeof((graph *)0)->made);
}

static void note_made(graph *g, const op_def *op) {
    const unsigned place = place_in_made(op->name);
    const uint64_t bit = UINT64_C(1) << place % 64;

    g->n_made += !(g->made[place / 64] & bit);
    g->made[place / 64] |= bit;
}

bool graph_has_made(const graph *g, const char *op) {
    const unsigned place = place_in_made(op);
    return g->made[place / 64] >> place % 64 & 1;
}

void graph_insert_node(graph *g, node *n) {
    n->id = g->n_nodes++;
    note_made(g, n->op);
    g->tidy = false;
    for (int i = 0; i < n->n_in; i++) add_use(n->in[i], n, i);
    link_node(g, n);
}

status graph_add_node(graph *g, const op_def *op, const char *name, const attr *attrs, int n_in, value *const *in,
                      int n_out, node **out) {
    const char *copy = name ? arena_text(g->c, name, strlen(name)) : NULL;
    if (name && !copy) return E_NOMEM;
    TRY(graph_make_node(g, op, copy, attrs, n_in, in, n_out, out));
    graph_insert_node(g, *out);
    return OK;
}

status graph_add_write(graph *g, value *input, value *v) {
    state_write *w, **last = g->writes ? g->last_write : &g->writes;
    TRY(NEW(g->c, w, 1));
    *w = (state_write){input, NULL, NULL};
    TRY(graph_set_end(g, &w->value, v));
    *last = w;
    g->last_write = &w->next;
    return OK;
}

/* --- changing ----------------------------------------------------------------------------------------------------- */

status graph_replace(graph *g, value *from, value *to) {
    if (from == to) return OK;
    g->tidy = false;
    while (from->uses) {
        use *u = from->uses;
        drop_use(from, u->user, u->index);
        u->user->in[u->index] = to;
        put_first(u, to);
    }
    move_ends(g, from, to);
    to->needs_grad |= from->needs_grad;
    return OK;
}

static void mark_list(value *const *list, int count) {
    for (int i = 0; list && i < count; i++)
        if (list[i] && list[i]->def) list[i]->def->mark = 1;
}

void graph_remove_dead(graph *g) {
    if (g->tidy) return;
    g->tidy = true;
    for (node *n = g->first; n; n = n->next) n->mark = (n->op->flags & EFFECT) != 0;
    mark_list(g->outputs, g->n_outputs);
    mark_list(g->input_grads, g->n_input_grads);
    for (state_write *w = g->writes; w; w = w->next) mark_list(&w->value, 1);
    for (node *n = g->last, *prev; n; n = prev) {
        prev = n->prev;
        if (n->mark) mark_list(n->in, n->n_in);
        else unlink_node(g, n);
    }
}

/* Calls `each` with all values that the graph has, those that are read twice twice. */
static void each_value(graph *g, void (*each)(graph *g, value *v)) {
    for (int i = 0; i < g->n_inputs; i++) each(g, g->inputs[i]);
    for (const node *n = g->first; n; n = n->next) {
        for (int i = 0; i < n->n_in; i++)
            if (n->in[i]) each(g, n->in[i]);
        for (int i = 0; i < n->n_out; i++)
            if (n->out[i]) each(g, n->out[i]);
    }
    for (int i = 0; i < g->n_outputs; i++) each(g, g->outputs[i]);
    for (int i = 0; i < g->n_input_grads; i++)
        if (g->input_grads[i]) each(g, g->input_grads[i]);
    for (const state_write *w = g->writes; w; w = w->next) each(g, w->value);
}

static void forget_number(graph *g, value *v) { (void)g, v->id = -1; }
static void give_number(graph *g, value *v) {
    if (v->id < 0) v->id = g->n_values++;
}

void graph_renumber(graph *g) {
    each_value(g, forget_number);
    g->n_values = 0;
    each_value(g, give_number);
}

static void want(value *const *list, int count, int mark) {
    for (int i = 0; list && i < count; i++)
        if (list[i] && list[i]->def && list[i]->def->mark < mark) list[i]->def->mark = mark;
}

void graph_mark_phases(graph *g) {
    for (node *n = g->first; n; n = n->next) n->mark = n->op->flags & EFFECT ? PHASE_FORWARD : PHASE_NONE;
    want(g->outputs, g->n_outputs, PHASE_FORWARD);
    for (state_write *w = g->writes; w; w = w->next) want(&w->value, 1, PHASE_FORWARD);
    want(g->input_grads, g->n_input_grads, PHASE_BACKWARD);
    /* Backwards over a topological order: a node's mark is final when it is reached. */
    for (node *n = g->last; n; n = n->prev) want(n->in, n->n_in, n->mark);
}

int64_t graph_gradients_in_arena(const graph *g) {
    int64_t sum = 0;

    if (g->cuda || g->joint_from == 0) return 0;
    for (int i = 0; i < g->n_input_grads; i++)
        if (g->input_grads[i]) sum = size_add(sum, value_bytes(g->input_grads[i]));
    return sum < g->joint_from ? 0 : sum;
}
