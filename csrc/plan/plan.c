/* plan.c -- lives, in-place results, offsets, instructions. */
#include "plan/plan.h"

#include "core/size.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int64_t alignment_of(const plan *p) { return p->cuda ? PLAN_ALIGNED_ON_GPU : PLAN_ALIGNED; }
#ifdef ORT_SANITIZE
enum { REDZONE = 64 };
#else
enum { REDZONE = 0 };
#endif

/* On a GPU no sanitizer sees into the arena: with this set, cuda/host/redzones.h does. In every build, since the one that has
 * kernels is compiled elsewhere. */
enum { RED_ZONE_ON_GPU = 1024 };
static int64_t red_zone_on_gpu(void) {
    const char *wanted = getenv("ORTMODULE_RED_ZONES");
    return wanted && *wanted && strcmp(wanted, "0") != 0 ? RED_ZONE_ON_GPU : 0;
}

/* Memory of one root value. */
typedef struct block {
    place place;
    int index;
    value *merged; /* in-place: this root's memory is that one's */
    int first, last;
    int64_t bytes, offset, joint; /* the last two: in the arena, and in a joint one */
} block;

typedef struct planner {
    graph *g;
    layout *where;
    block *blocks; /* [value id], meaningful for roots */
    run_order order;
    plan *p;
} planner;

static value *root_of(const planner *pl, const value *v) {
    value *r = pl->where[v->id].root;
    while (pl->blocks[r->id].merged) r = pl->blocks[r->id].merged;
    return r;
}

static block *block_of(const planner *pl, const value *v) { return &pl->blocks[root_of(pl, v)->id]; }

/* --- places and lives ----------------------------------------------------------------------------------------------- */

static void put(planner *pl, const value *v, place where, int index) {
    if (v) pl->blocks[v->id] = (block){.place = where, .index = index};
}

/* A result is the memory of its root. */
static void put_result(planner *pl, const value *v, place where, int index) {
    if (v) put(pl, pl->where[v->id].root, where, index);
}

static void place_all(planner *pl) {
    graph *g = pl->g;

    for (int i = 0; i < g->n_inputs; i++) {
        put(pl, g->inputs[i], AT_INPUT, i);
        pl->blocks[g->inputs[i]->id].last = -1; /* until an instruction reads it */
    }
    for (int i = 0; g->output_grads && i < g->n_outputs; i++) put(pl, g->output_grads[i], AT_OUTPUT_GRAD, i);
    for (int t = 0; t < pl->order.count; t++) {
        const node *n = pl->order.at[t];
        for (int i = 0; i < n->n_in; i++)
            if (n->in[i] && n->in[i]->data) put(pl, n->in[i], AT_CONSTANT, 0);
        for (int i = 0; i < n->n_out; i++) {
            put(pl, n->out[i], AT_ARENA, 0);
            block *b = &pl->blocks[n->out[i]->id];
            b->first = b->last = t;
            b->bytes = value_bytes(n->out[i]);
        }
    }
    /* Constants reached through views only. */
    for (const node *n = g->first; n; n = n->next)
        for (int i = 0; i < n->n_in; i++)
            if (n->in[i] && n->in[i]->data) put(pl, n->in[i], AT_CONSTANT, 0);
    for (int i = 0; i < g->n_outputs; i++) put_result(pl, g->outputs[i], AT_OUTPUT, i);
    for (const state_write *w = g->writes; w; w = w->next) put_result(pl, w->value, AT_WRITE, pl->p->n_writes++);
    for (int i = 0; i < g->n_input_grads; i++) put_result(pl, g->input_grads[i], AT_INPUT_GRAD, i);
}

static void find_lives(planner *pl) {
    for (int t = 0; t < pl->order.count; t++) {
        const node *n = pl->order.at[t];
        for (int i = 0; i < n->n_in; i++)
            if (n->in[i]) block_of(pl, n->in[i])->last = t;
    }
}

static bool wanted(const planner *pl, const value *v) {
    const bool made = v->n_uses > 0 || (v->def && v->def->again && v->def_index == 0);
    return v->type != DT_NONE && (made || pl->blocks[v->id].place != AT_ARENA);
}

/* --- in place ------------------------------------------------------------------------------------------------------- */

static bool may_overwrite(const planner *pl, const node *n, int t, int index) {
    const value *x, *y = n->out[0];
    const block *b;
    tensor tx;

    if (index >= n->n_in || !(x = n->in[index])) return false;
    b = block_of(pl, x);
    tx = layout_tensor(x, pl->where);
    if (b->place != AT_ARENA || b->last != t || pl->where[x->id].offset != 0 || !tensor_contiguous(&tx)) return false;
    if (x->type != y->type || !shape_equal(&x->shape, &y->shape)) return false;
    if (b->bytes != value_bytes(y)) return false;
    /* The memory of a gradient that is given back is there in backward. */
    if (pl->blocks[y->id].place == AT_INPUT_GRAD && b->first < pl->order.n_forward) return false;
    for (int i = 0; i < n->n_in; i++) {
        if (i == index || !n->in[i] || root_of(pl, n->in[i]) != root_of(pl, x)) continue;
        if (n->op->flags & DISJOINT) return false;
        /* Another reader of the same memory must read each place before it is written: only an equal layout does. */
        tensor other = layout_tensor(n->in[i], pl->where);
        if (!shape_equal(&other.shape, &tx.shape) || !tensor_contiguous(&other) || pl->where[n->in[i]->id].offset)
            return false;
    }
    return true;
}

/* What the result has is the operand's, and where the result is given back, the operand is made there. */
static void merge_in_place(planner *pl) {
    for (int t = 0; t < pl->order.count; t++) {
        const node *n = pl->order.at[t];
        value *y = n->out[0];
        const place there = pl->blocks[y->id].place;
        int index = -1;

        if (pl->p->cuda && n->op->flags & INPLACE_ON_CPU) continue;
        if ((there != AT_ARENA && there != AT_INPUT_GRAD) || !wanted(pl, y) || pl->where[y->id].root != y) continue;
        if (n->op->flags & INPLACE_0 && may_overwrite(pl, n, t, 0)) index = 0;
        else if (n->op->flags & INPLACE_1 && may_overwrite(pl, n, t, 1)) index = 1;
        if (index < 0) continue;
        value *x = root_of(pl, n->in[index]);
        pl->blocks[x->id].place = there;
        pl->blocks[x->id].index = pl->blocks[y->id].index;
        pl->blocks[x->id].last = pl->blocks[y->id].last;
        pl->blocks[y->id].merged = x;
    }
}

/* --- offsets -------------------------------------------------------------------------------------------------------- */

enum { LARGEST_FIXED = 1 << 20 }; /* bytes: what is copied in a few microseconds */

static bool is_fixed(const planner *pl, int input) {
    const graph *g = pl->g;
    const value *v = g->inputs[input];
    const int64_t bytes = value_bytes(v);
    const block *b = &pl->blocks[v->id];

    if (b->place != AT_INPUT || b->last < 0 || bytes == 0 || bytes > LARGEST_FIXED) return false;
    return !g->input_grads || input >= g->n_input_grads || !g->input_grads[input];
}

/* What a run on a GPU has in its arena from the beginning on. items[0, n) get offsets. */
static status add_fixed(planner *pl, interval *items, int *n) {
    plan *p = pl->p;

    p->seed_offset = -1;
    if (!p->cuda) return OK;
    TRY(NEW(pl->g->c, p->fixed, pl->g->n_inputs));
    for (int i = 0; i < pl->g->n_inputs; i++) {
        const value *v = pl->g->inputs[i];
        if (!is_fixed(pl, i)) continue;
        const int64_t bytes = value_bytes(v);
        p->fixed[p->n_fixed++] = (fixed_place){.index = i, .bytes = bytes};
        items[(*n)++] = (interval){.bytes = bytes, .first = 0, .last = pl->blocks[v->id].last};
    }
    if (p->random) items[(*n)++] = (interval){.bytes = sizeof(uint64_t), .first = 0, .last = pl->order.count - 1};
    return OK;
}

/* More than any machine has: what follows from it would not fit in 63 bits. */
static const int64_t most_work = INT64_C(1) << 57;

static status check_workspace(ctx *c, const node *n, size_t work) {
    if (work <= (size_t)most_work) return OK;
    return fail(c, E_NOMEM, "out of memory: the workspace of %s (%s) has more than 2^57 bytes", n->op->name,
                n->name ? n->name : "-");
}

/* --- the joint arena --- */

/* The gradients' blocks follow those that are there. A gradient stays to the end. */
static void add_gradients(planner *pl, interval *items, int *n) {
    for (int t = 0; t < pl->order.count; t++)
        for (int i = 0; i < pl->order.at[t]->n_out; i++) {
            const value *v = pl->order.at[t]->out[i];
            const block *b = &pl->blocks[v->id];
            if (b->place != AT_INPUT_GRAD || b->merged || pl->where[v->id].root != v) continue;
            pl->p->of_block[*n] = (block_use){pl->order.at[t], v};
            items[(*n)++] = (interval){.bytes = value_bytes(v), .first = t, .last = pl->order.count - 1};
        }
}

/* Places for all blocks of a step that has its gradients in the arena, where these are large. */
static status assign_joint(planner *pl, const interval *plain) {
    plan *p = pl->p;
    graph *g = pl->g;
    interval *items;
    int n = p->n_blocks;

    p->gradient_bytes = graph_gradients_in_arena(g);
    if (p->gradient_bytes == 0) return OK;
    TRY(NEW(g->c, items, n + g->n_input_grads));
    TRY(NEW(g->c, p->joint_grad, g->n_inputs));
    if (n) memcpy(items, plain, (size_t)n * sizeof *items);
    add_gradients(pl, items, &n);
    TRY(offsets_plan(g->c, items, n, alignment_of(p), REDZONE, &p->joint_bytes));
    for (int i = 0; i < g->n_inputs; i++) p->joint_grad[i] = -1;
    for (int i = 0; i < n; i++) {
        block *b = p->of_block[i].value ? &pl->blocks[p->of_block[i].value->id] : NULL;
        if (!b) p->code[items[i].first].joint_work = items[i].offset;
        else if (b->place == AT_INPUT_GRAD) p->joint_grad[b->index] = items[i].offset;
        else b->joint = items[i].offset;
    }
    p->joint_blocks = items;
    p->n_joint = n;
    return OK;
}

static status assign_offsets(planner *pl) {
    graph *g = pl->g;
    plan *p = pl->p;
    interval *items;
    int n = 0, n_fixed, room = pl->order.count + g->n_inputs + g->n_input_grads + 1;

    for (int t = 0; t < pl->order.count; t++) room += pl->order.at[t]->n_out;
    TRY(NEW(g->c, items, room));
    TRY(NEW(g->c, p->of_block, room));
    TRY(add_fixed(pl, items, &n));
    n_fixed = n;
    for (int t = 0; t < pl->order.count; t++) {
        const node *nd = pl->order.at[t];
        size_t (*workspace)(const node *n) = p->cuda ? nd->op->cuda_workspace : nd->op->workspace;
        size_t work = workspace ? workspace(nd) : 0;
        TRY(check_workspace(g->c, nd, work));
        for (int i = 0; i < nd->n_out; i++) {
            const block *b = &pl->blocks[nd->out[i]->id];
            if (b->place != AT_ARENA || b->merged || !wanted(pl, nd->out[i])) continue;
            p->of_block[n] = (block_use){nd, nd->out[i]};
            items[n++] = (interval){.bytes = b->bytes, .first = b->first, .last = b->last};
        }
        p->code[t].work = p->code[t].joint_work = -1;
        if (!work) continue;
        p->of_block[n] = (block_use){.node = nd};
        items[n++] = (interval){.bytes = (int64_t)work, .first = t, .last = t};
    }
    TRY(offsets_plan(g->c, items, n, alignment_of(p), REDZONE + p->red_zone, &p->arena_bytes));
    for (int i = 0; i < p->n_fixed; i++) p->fixed[i].offset = items[i].offset;
    if (n_fixed > p->n_fixed) p->seed_offset = items[p->n_fixed].offset;
    for (int i = n_fixed; i < n; i++) {
        if (p->of_block[i].value) pl->blocks[p->of_block[i].value->id].offset = items[i].offset;
        else p->code[items[i].first].work = items[i].offset;
    }
    p->blocks = items;
    p->n_blocks = n;
    return assign_joint(pl, items);
}

/* --- constants of a GPU --------------------------------------------------------------------------------------------- */

static void assign_constant(planner *pl, const value *v) {
    plan *p = pl->p;
    value *root = v ? root_of(pl, v) : NULL;

    if (!root || pl->blocks[root->id].place != AT_CONSTANT || pl->blocks[root->id].bytes >= 0) return;
    block *b = &pl->blocks[root->id];
    b->bytes = value_bytes(root);
    b->offset = p->constant_bytes;
    p->constants[p->n_constants++] = (device_constant){root->data, b->bytes, b->offset};
    p->constant_bytes += (b->bytes + alignment_of(p) - 1) / alignment_of(p) * alignment_of(p);
}

/* Every constant that an instruction reads, once. */
static status assign_constants(planner *pl) {
    int room = 0;

    for (int i = 0; i < pl->g->n_values; i++)
        if (pl->blocks[i].place == AT_CONSTANT) pl->blocks[i].bytes = -1;
    for (int t = 0; t < pl->order.count; t++) room += pl->order.at[t]->n_in;
    TRY(NEW(pl->g->c, pl->p->constants, room));
    for (int t = 0; t < pl->order.count; t++)
        for (int i = 0; i < pl->order.at[t]->n_in; i++) assign_constant(pl, pl->order.at[t]->in[i]);
    return OK;
}

/* --- instructions --------------------------------------------------------------------------------------------------- */

static operand encode(const planner *pl, const value *v) {
    operand o = {.t = {.type = DT_NONE}, .place = AT_NOTHING};
    const block *b;

    if (!v) return o;
    b = block_of(pl, v);
    o.t = layout_tensor(v, pl->where);
    o.place = b->place;
    o.index = b->index;
    o.offset = b->offset + pl->where[v->id].offset * (int64_t)dtype_size(v->type);
    o.joint = o.offset - b->offset + b->joint;
    if (b->place == AT_CONSTANT && !pl->p->cuda) o.t.data = (char *)(uintptr_t)root_of(pl, v)->data + o.offset;
    return o;
}

/* Names all that is not there. */
static status check_kernels(const planner *pl) {
    const bool cuda = pl->p->cuda;
    char names[ERR_TEXT / 2] = "";
    size_t used = 0;

    for (int t = 0; t < pl->order.count && used < sizeof names; t++) {
        const node *n = pl->order.at[t];
        if (cuda ? n->op->cuda : n->op->cpu) continue;
        used += (size_t)snprintf(names + used, sizeof names - used, "%s%s (%s)", used ? ", " : "", n->op->name,
                                 n->name ? n->name : "-");
    }
    return used ? fail(pl->g->c, E_UNSUPPORTED, "there is no %s kernel for %s", cuda ? "CUDA" : "CPU", names) : OK;
}

static status encode_all(planner *pl) {
    plan *p = pl->p;

    TRY(check_kernels(pl));
    TRY(NEW(pl->g->c, p->reads_input, pl->g->n_inputs));
    TRY(NEW(pl->g->c, p->reads_output, pl->g->n_outputs));
    for (int t = 0; t < pl->order.count; t++) {
        const node *n = pl->order.at[t];
        instr *in = &p->code[t];
        in->node = n;
        TRY(NEW(pl->g->c, in->in, n->n_in));
        TRY(NEW(pl->g->c, in->out, n->n_out));
        for (int i = 0; i < n->n_in; i++) {
            in->in[i] = encode(pl, n->in[i]);
            if (t < pl->order.n_forward) continue;
            if (in->in[i].place == AT_INPUT) p->reads_input[in->in[i].index] = true;
            if (in->in[i].place == AT_OUTPUT) p->reads_output[in->in[i].index] = true;
        }
        for (int i = 0; i < n->n_out; i++) in->out[i] = encode(pl, wanted(pl, n->out[i]) ? n->out[i] : NULL);
        if (n->n_in + n->n_out > p->most_operands) p->most_operands = n->n_in + n->n_out;
    }
    return OK;
}

/* --- memory of a run ------------------------------------------------------------------------------------------------ */

static void add_result(plan *p, const value *v) {
    if (v) p->run_bytes = size_add(p->run_bytes, value_bytes(v));
}

/* Room for what its node writes elsewhere. */
static void add_offloaded(plan *p, const node *n) {
    if (strcmp(n->op->name, "Offload") != 0) return;
    const int64_t end = size_add(node_int(n, "offset"), value_bytes(n->in[0]));
    if (end > p->offload_bytes) p->offload_bytes = end;
}

static void add_torchs(plan *p, const node *n) {
    const int64_t bytes = p->cuda || !n->op->torch_bytes ? 0 : n->op->torch_bytes(n);
    if (bytes > p->torch_bytes) p->torch_bytes = bytes;
}

static void add_results(plan *p) {
    const graph *g = p->g;

    for (int t = 0; t < p->n_code; t++) {
        add_offloaded(p, p->code[t].node);
        add_torchs(p, p->code[t].node);
    }
    p->run_bytes = size_add(p->arena_bytes, p->torch_bytes);
    for (int i = 0; i < g->n_outputs; i++) add_result(p, g->outputs[i]);
    for (const state_write *w = g->writes; w; w = w->next) add_result(p, w->value);
}

static status plan_in_order(planner *pl, bool cuda) {
    graph *g = pl->g;

    TRY(NEW(g->c, pl->p, 1));
    TRY(NEW(g->c, pl->blocks, g->n_values));
    TRY(NEW(g->c, pl->p->code, pl->order.count));
    pl->p->g = g;
    pl->p->where = pl->where;
    pl->p->cuda = cuda;
    pl->p->red_zone = cuda ? red_zone_on_gpu() : 0;
    pl->p->n_code = pl->order.count;
    pl->p->n_forward = pl->order.n_forward;
    for (int t = 0; t < pl->order.count; t++) pl->p->random |= (pl->order.at[t]->op->flags & RANDOM) != 0;
    place_all(pl);
    find_lives(pl);
    merge_in_place(pl);
    TRY(assign_offsets(pl));
    if (cuda) TRY(assign_constants(pl));
    TRY(encode_all(pl));
    add_results(pl->p);
    return OK;
}

/* The same nodes in the order that was chosen; what it saves before blocks have places it may not save then. */
static status plan_otherwise(planner *written, const order_choice *chosen, bool cuda, plan **out) {
    planner pl = {.g = written->g, .where = written->where, .order = chosen->order};

    *out = written->p;
    if (chosen->rule != AS_WRITTEN) {
        TRY(plan_in_order(&pl, cuda));
        pl.p->order = chosen->rule;
        if (order_is_worth(plan_beside_gradients(pl.p), plan_beside_gradients(*out))) *out = pl.p;
    }
    memcpy((*out)->orders, chosen->bytes, sizeof chosen->bytes);
    return OK;
}

status plan_make(graph *g, bool cuda, plan **out) {
    planner pl = {.g = g};
    order_choice chosen;

    graph_remove_dead(g);
    TRY(layout_make(g, &pl.where));
    TRY(order_make(g, pl.where, &pl.order));
    TRY(plan_in_order(&pl, cuda));
    TRY(order_choose(g, pl.where, cuda, &pl.order, &chosen));
    TRY(plan_otherwise(&pl, &chosen, cuda, out));
    g->host = NULL; /* only of the making */
    return OK;
}

int plan_model_inputs(const plan *p) {
    int n = p->g->n_inputs;
    for (int i = 0; p->g->output_grads && i < p->g->n_outputs; i++) n -= p->g->output_grads[i] != NULL;
    return n;
}
