/* fused.c -- owns Fused: a chain or tree of pointwise operators that runs tile by tile, and FusedRandom, the same with a
 * dropout among its steps.
 *
 * The node's attributes are a program. Each step names a pointwise operator; its operands are numbered, the node's own
 * first and then the steps' results:
 *     Fused(a, b, c, steps="Mul Add", operands=[0, 1, 3, 2], results=[1])     a * b + c
 * For one tile after the other all operands are loaded, and the steps' own tile functions run over buffers that stay in
 * the first cache; only results are written to memory. A step of a narrow type is rounded to it, as if it had been
 * stored: so every result has the same bits as the nodes would give one by one, and a value may be computed again where
 * it is needed instead of being kept. Tiles begin at multiples of TILE, which is where random bits are drawn from.
 *
 * The first result may be the memory of the first operand: then it is written when all steps of a tile have run. */
#include "ops/chains/fused.h"

#include "core/philox.h"
#include "core/scratch.h"
#include "core/stream.h"
#include "ops/pointwise/lookup.h"

#include <string.h>

/* --- the program -------------------------------------------------------------------------------------------------- */

static bool native(const fused_step *s) { return tile_is_native(s->type); }

/* The next name of a list with spaces. */
const op_def *fused_operator(const char **names) {
    char name[FUSED_NAME];
    size_t length = strcspn(*names, " ");

    if (length == 0 || length >= FUSED_NAME) return NULL;
    memcpy(name, *names, length);
    name[length] = '\0';
    *names += length + ((*names)[length] == ' ');
    return op_find(NULL, name, 0);
}

static const attr *list_of(const node *n, const char *name) { return node_attr(n, name); }

static dtype operand_type(const fused_program *p, const tensor *in, int i) {
    return i < p->n_in ? in[i].type : p->steps[i - p->n_in].type;
}

/* Steps with their functions, from the attributes. */
static status read_steps(ctx *c, const call *k, fused_program *p) {
    const char *names = node_string(k->node, "steps");
    const attr *operands = list_of(k->node, "operands"), *types = list_of(k->node, "types");
    const attr *params = list_of(k->node, "params");
    int at = 0;

    p->n_in = k->n_in;
    p->n_steps = types->count;
    for (int i = 0; i < p->n_steps; i++) {
        fused_step *s = &p->steps[i];
        const op_def *op = fused_operator(&names);
        if (!op || !op->pointwise) return fail(c, E_INVALID, "step %d of a fused chain has no operator", i);
        *s = (fused_step){.op = op, .type = (dtype)types->ints[i], .n_in = op->min_in, .draws = op->pointwise->draws};
        s->last = s->result = s->buffer = NOWHERE;
        for (int j = 0; j < s->n_in; j++) s->in[j] = (int)operands->ints[at++];
        for (int j = 0; j < TILE_PARAMS; j++) s->param[j] = params->floats[i * TILE_PARAMS + j];
        s->fn = tile_function(op, operand_type(p, k->in, s->in[s->n_in - 1]), s->type);
        if (!s->fn) return fail(c, E_UNSUPPORTED, "%s does not compute %s", op->name, dtype_name(s->type));
    }
    return OK;
}

/* From the results that are wanted back to the steps and operands that they need. */
static void find_wanted(const call *k, fused_program *p) {
    const attr *results = list_of(k->node, "results"), *folded = list_of(k->node, "folded");
    const bool in_place = p->n_in && k->n_out && k->out[0].data && k->out[0].data == k->in[0].data;

    for (int i = 0; i < k->n_out; i++) {
        const bool folds = i >= results->count;
        const int64_t step = folds ? folded->ints[i - results->count] : results->ints[i];
        if (!tensor_present(&k->out[i])) continue;
        if (step < 0) {
            p->read[p->n_in + step] = true;
            continue;
        }
        fused_step *s = &p->steps[step];
        s->wanted = true;
        if (folds) {
            s->folded = true;
            s->last = p->n_steps;
            continue;
        }
        s->result = i;
        s->late = in_place && i == 0;
        if (s->late) s->last = p->n_steps;
    }
    for (int i = p->n_steps - 1; i >= 0; i--) {
        const fused_step *s = &p->steps[i];
        for (int j = 0; s->wanted && j < s->n_in; j++) {
            if (s->in[j] < p->n_in) {
                p->read[s->in[j]] = true;
                continue;
            }
            fused_step *from = &p->steps[s->in[j] - p->n_in];
            from->wanted = true;
            if (from->last < i) from->last = i;
        }
    }
}

/* A buffer for every step that is not written straight to its place; one that is read for the last time is free for
 * the step that reads it, when that is its first or second operand and of the same size. */
static void assign_buffers(fused_program *p) {
    bool used[FUSED_STEPS + 1] = {false};

    for (int i = 0; i < p->n_steps; i++) {
        fused_step *s = &p->steps[i];
        if (!s->wanted) continue;
        const bool direct = s->result >= 0 && native(s) && !s->late;
        for (int j = 0; j < s->n_in && j < 2 && !direct && s->buffer < 0; j++) {
            fused_step *from = s->in[j] < p->n_in ? NULL : &p->steps[s->in[j] - p->n_in];
            if (from && from->last == i && from->buffer >= 0 && tile_element(from->type) == tile_element(s->type))
                s->buffer = from->buffer;
        }
        if (!direct && s->buffer < 0) {
            s->buffer = 0;
            while (used[s->buffer]) s->buffer++;
            if (s->buffer >= p->n_buffers) p->n_buffers = s->buffer + 1;
        }
        for (int j = 0; j < s->n_in; j++) {
            fused_step *from = s->in[j] < p->n_in ? NULL : &p->steps[s->in[j] - p->n_in];
            if (from && from->last == i && from->buffer >= 0) used[from->buffer] = false;
        }
        if (s->buffer >= 0) used[s->buffer] = s->last >= 0;
    }
}

/* --- running it --------------------------------------------------------------------------------------------------- */

typedef union buffer {
    _Alignas(64) char bytes[TILE * 8];
} buffer;

/* Followed by the tiles of operands and the buffers of steps. */
typedef struct scratch {
    _Alignas(64) uint32_t bits[TILE + PHILOX_GROUP];
    const void *at[FUSED_OPERANDS + FUSED_STEPS]; /* the tile of each operand and step */
    tile_buffer *in;
    buffer *steps;
} scratch;

static void run_step(const fused_run *r, int index, int64_t start, int64_t n, scratch *w) {
    const fused_program *p = &r->program;
    const fused_step *s = &p->steps[index];
    const void *in[TILE_OPERANDS + 1];
    char *place = s->result < 0 ? NULL : r->out[s->result] + start * (int64_t)dtype_size(s->type);
    void *out = s->buffer < 0 ? (void *)place : w->steps[s->buffer].bytes;

    for (int i = 0; i < s->n_in; i++) in[i] = w->at[s->in[i]];
    if (s->draws) {
        const int64_t skipped = start % PHILOX_GROUP, groups = (skipped + n + PHILOX_GROUP - 1) / PHILOX_GROUP;
        philox_fill(r->seed, (uint32_t)s->param[1], start / PHILOX_GROUP, groups, w->bits);
        in[s->n_in] = w->bits + skipped;
    }
    if (s->table) lookup_tile(s->table, n, s->n_in > 1 ? in[0] : NULL, in[s->n_in - 1], out);
    else s->fn(n, out, in, s->param);
    if (!native(s) && s->last >= 0 && (!s->table || s->n_in > 1)) tile_round(s->type, out, n);
    if (place && s->buffer >= 0 && !s->late) tile_store(s->type, out, n, place, s->streams);
    w->at[p->n_in + index] = out;
}

size_t fused_scratch_bytes(const fused_run *r) {
    return sizeof(scratch) + sizeof(tile_buffer) * (size_t)r->program.n_in +
           sizeof(buffer) * (size_t)r->program.n_buffers;
}

void fused_begin(const fused_run *r, void *memory) {
    const fused_program *p = &r->program;
    scratch *w = memory;

    w->in = (tile_buffer *)(w + 1);
    w->steps = (buffer *)(w->in + p->n_in);
    for (int i = 0; i < p->n_in; i++)
        if (p->read[i]) tile_begin(&r->in[i], r->count < TILE ? r->count : TILE, &w->in[i]);
}

void fused_tile(const fused_run *r, int64_t start, int64_t n, void *memory) {
    const fused_program *p = &r->program;
    scratch *w = memory;

    for (int i = 0; i < p->n_in; i++)
        if (p->read[i]) w->at[i] = tile_read(&r->in[i], start, n, &w->in[i]);
    for (int i = 0; i < p->n_steps; i++)
        if (p->steps[i].wanted) run_step(r, i, start, n, w);
    for (int i = 0; i < p->n_steps; i++) {
        const fused_step *s = &p->steps[i];
        if (!s->late) continue;
        char *place = r->out[s->result] + start * (int64_t)dtype_size(s->type);
        tile_store(s->type, w->at[p->n_in + i], n, place, false);
    }
}

const void *fused_made(const fused_run *r, const void *memory, int step) {
    const scratch *w = memory;
    return w->at[r->program.n_in + step];
}

static void run_tiles(void *arg, int64_t begin, int64_t end, void *memory) {
    const fused_run *r = arg;

    fused_begin(r, memory);
    for (int64_t tile = begin; tile < end; tile++) {
        const int64_t start = tile * TILE;
        fused_tile(r, start, r->count - start < TILE ? r->count - start : TILE, memory);
    }
    end_streams();
}

status fused_read(ctx *c, const call *k, fused_program *p) {
    *p = (fused_program){.n_in = 0};
    TRY(read_steps(c, k, p));
    find_wanted(k, p);
    return OK;
}

/* Tables for steps that are looked up. */
size_t fused_table_bytes(const node *n, const shape *s) {
    const attr *types = list_of(n, "types"), *operands = list_of(n, "operands");
    const char *names = node_string(n, "steps");
    size_t bytes = 0;

    if (shape_count(s) < LOOKUP_LEAST) return 0;
    for (int i = 0, at = 0; i < types->count; i++) {
        const op_def *op = fused_operator(&names);
        if (!op) return 0;
        at += op->min_in;
        const int64_t last = operands->ints[at - 1];
        const dtype from = last < n->n_in ? n->in[last]->type : (dtype)types->ints[last - n->n_in];
        if (lookup_of(op, from, (dtype)types->ints[i]) != NO_LOOKUP) bytes += LOOKUP_BYTES;
    }
    return bytes;
}

static size_t fused_workspace(const node *n) { return n->n_out ? fused_table_bytes(n, &n->out[0]->shape) : 0; }

static void make_tables(const call *k, char *work, fused_program *p) {
    for (int i = 0; i < p->n_steps; i++) {
        fused_step *s = &p->steps[i];
        const lookup_kind kind = lookup_of(s->op, operand_type(p, k->in, s->in[s->n_in - 1]), s->type);
        if (kind == NO_LOOKUP || !s->wanted) continue;
        lookup_make(kind, s->fn, s->param, (float *)(void *)work);
        s->table = (const float *)(void *)work;
        work += LOOKUP_BYTES;
    }
}

status fused_prepare(ctx *c, const call *k, const shape *s, void *work, fused_run *r) {
    const int n_results = list_of(k->node, "results")->count;

    *r = (fused_run){.count = shape_count(s), .seed = k->seed};
    TRY(fused_read(c, k, &r->program));
    assign_buffers(&r->program);
    for (int i = 0; i < n_results; i++)
        if (tensor_present(&k->out[i])) r->out[i] = k->out[i].data;
    for (int i = 0; i < k->n_in; i++) r->in[i] = tile_source_of(&k->in[i], s);
    if (r->count >= LOOKUP_LEAST) make_tables(k, work, &r->program);
    return OK;
}

status fused_cpu(ctx *c, const call *k) {
    fused_run r;

    for (int i = 0; i < k->n_out; i++) {
        if (!tensor_present(&k->out[i])) continue;
        TRY(fused_prepare(c, k, &k->out[i].shape, k->work, &r));
        for (fused_step *s = r.program.steps; s < r.program.steps + r.program.n_steps; s++)
            s->streams = s->result >= 0 && tile_streams(&k->out[s->result], k->in, k->n_in);
        return parallel_for_with(c, (r.count + TILE - 1) / TILE, 1 + GRAIN / TILE / r.program.n_steps,
                                 fused_scratch_bytes(&r), run_tiles, &r);
    }
    return OK;
}

/* --- making one --------------------------------------------------------------------------------------------------- */

static bool is_random(const node *n) { return (n->op->flags & RANDOM) != 0; }

bool fused_holds(const node *n) {
    const op_def *op = n->op;
    shape s = SCALAR;

    if (!op->pointwise || n->n_in != op->min_in || n->n_out != 1) return false;
    if (op_find(NULL, op->name, 0) != op || strlen(op->name) >= FUSED_NAME) return false;
    for (int i = 0; i < n->n_in; i++) {
        const shape *si = n->in[i] ? &n->in[i]->shape : NULL;
        if (!si || si->rank > n->out[0]->shape.rank) return false;
        for (int d = 1; d <= si->rank; d++) {
            int64_t size = n->out[0]->shape.dim[n->out[0]->shape.rank - d];
            if (si->dim[si->rank - d] != size && si->dim[si->rank - d] != 1) return false;
            if (d > s.rank) s.dim[s.rank++] = 1; /* counted from the last */
            if (si->dim[si->rank - d] != 1) s.dim[d - 1] = size;
        }
    }
    /* What the operands broadcast to must be the result's shape: nothing else tells a chain its shape. */
    if (s.rank != n->out[0]->shape.rank) return false;
    for (int d = 1; d <= s.rank; d++)
        if (s.dim[d - 1] != n->out[0]->shape.dim[s.rank - d]) return false;
    const dtype last = n->in[n->n_in - 1]->type;
    /* Another kernel than the usual one checks for a division of integers by zero, or is a dropout. */
    if (op->cpu != pointwise_cpu && !op->pointwise->draws && !dtype_is_float(last)) return false;
    return tile_function(op, last, n->out[0]->type) != NULL;
}

static bool used_elsewhere(const value *v, const fused_chain *ch) {
    for (const use *u = v->uses; u; u = u->next) {
        bool inside = false;
        for (int i = 0; i < ch->n_steps; i++) inside |= ch->steps[i] == u->user;
        if (!inside) return true;
    }
    return false;
}

/* The operand whose memory the first result may take goes first. Without a result, one of the chain's own shape: a total
 * must not take the memory of what is still read. */
static void prefer_first(value **in, int n_in, const fused_chain *ch) {
    const value *result = ch->n_results ? ch->steps[ch->results[0]]->out[0] : NULL;
    const shape *s = &ch->steps[0]->out[0]->shape;

    for (int i = 0; i < n_in; i++) {
        value *v = in[i];
        if (!shape_equal(&v->shape, s)) continue;
        if (result && (!v->def || v->type != result->type || used_elsewhere(v, ch))) continue;
        in[i] = in[0];
        in[0] = v;
        return;
    }
}

/* The totals of FusedReduce have all axes; the node's may have lost some. */
static status emit_reduced(graph *g, const fused_chain *ch, const attr *attrs, int n_in, value *const *in, bool random,
                           value **out) {
    int64_t folded[FUSED_FOLDS], axes[MAX_RANK];
    char names[FUSED_FOLDS * FUSED_NAME];
    size_t length = 0;
    int n_axes = 0;

    for (int i = 0; i < ch->n_folds; i++) {
        const char *name = ch->folds[i]->op->name;
        for (int j = 0; j < ch->n_steps; j++)
            if (ch->steps[j]->out[0] == ch->folds[i]->in[0]) folded[i] = j;
        if (i) names[length++] = ' ';
        memcpy(names + length, name, strlen(name) + 1);
        length += strlen(name);
    }
    for (int d = 0; d < MAX_RANK; d++)
        if (ch->axes >> d & 1) axes[n_axes++] = d;
    const attr all[] = {attrs[0],
                        attrs[1],
                        attrs[2],
                        attrs[3],
                        attrs[4],
                        STRING("folds", names),
                        INTS("folded", ch->n_folds, folded),
                        INTS("axes", n_axes, axes),
                        {.name = NULL}};
    TRY(graph_emit(g, random ? "FusedReduceRandom" : "FusedReduce", all, n_in, in, ch->n_results + ch->n_folds, out));
    for (int i = 0; i < ch->n_folds; i++) {
        value **y = &out[ch->n_results + i];
        TRY(emit_reshape(g, *y, &ch->folds[i]->out[0]->shape, y));
    }
    return OK;
}

status fused_emit(graph *g, const fused_chain *ch, value **out) {
    node *const *steps = ch->steps;
    value *in[FUSED_OPERANDS], *made[FUSED_STEPS];
    int64_t operands[FUSED_STEPS * TILE_OPERANDS], types[FUSED_STEPS], ends[FUSED_RESULTS];
    double params[FUSED_STEPS * TILE_PARAMS];
    char names[FUSED_STEPS * FUSED_NAME];
    int n_in = 0, n_operands = 0;
    size_t length = 0;
    bool random = false;

    for (int i = 0; i < ch->n_steps; i++) made[i] = steps[i]->out[0];
    for (int i = 0; i < ch->n_steps; i++)
        for (int j = 0; j < steps[i]->n_in; j++) {
            value *v = steps[i]->in[j];
            if (fused_place(made, i, v) < 0 && fused_place(in, n_in, v) < 0) {
                if (n_in == FUSED_OPERANDS) return fail(g->c, E_INVALID, "a fused chain has too many operands");
                in[n_in++] = v;
            }
        }
    prefer_first(in, n_in, ch);
    for (int i = 0; i < ch->n_steps; i++) {
        size_t more = strlen(steps[i]->op->name);
        if (i) names[length++] = ' ';
        memcpy(names + length, steps[i]->op->name, more);
        length += more;
        for (int j = 0; j < steps[i]->n_in; j++) {
            int from = fused_place(made, i, steps[i]->in[j]);
            operands[n_operands++] = from >= 0 ? n_in + from : fused_place(in, n_in, steps[i]->in[j]);
        }
        types[i] = steps[i]->out[0]->type;
        tile_parameters(steps[i], params + i * TILE_PARAMS);
        random |= is_random(steps[i]);
    }
    names[length] = '\0';
    for (int i = 0; i < ch->n_results; i++) ends[i] = ch->results[i];
    const attr attrs[] = {
        STRING("steps", names),
        INTS("operands", n_operands, operands),
        INTS("types", ch->n_steps, types),
        {.name = "params", .kind = ATTR_FLOATS, .count = ch->n_steps * TILE_PARAMS, .floats = params},
        INTS("results", ch->n_results, ends),
        {.name = NULL},
    };
    if (ch->n_folds) return emit_reduced(g, ch, attrs, n_in, in, random, out);
    return graph_emit(g, random ? "FusedRandom" : "Fused", attrs, n_in, in, ch->n_results, out);
}

static status infer_fused(graph *g, node *n) {
    const attr *types = list_of(n, "types"), *results = list_of(n, "results");
    shape s = SCALAR;

    for (int i = 0; i < n->n_in; i++) {
        TRY(require(g, n, i));
        TRY(shape_broadcast(g->c, &s, &n->in[i]->shape, &s));
    }
    for (int i = 0; i < n->n_out; i++) TRY(set_out(g, n, i, (dtype)types->ints[results->ints[i]], &s));
    return OK;
}

/* --- records ------------------------------------------------------------------------------------------------------ */

static const attr fused_attrs[] = {NO_DEFAULT("steps", STRING), NO_DEFAULT("operands", INTS),
                                   NO_DEFAULT("types", INTS),   NO_DEFAULT("params", FLOATS),
                                   NO_DEFAULT("results", INTS), {.name = NULL}};

static const attr reduce_attrs[] = {
    NO_DEFAULT("steps", STRING),  NO_DEFAULT("operands", INTS), NO_DEFAULT("types", INTS),
    NO_DEFAULT("params", FLOATS), NO_DEFAULT("results", INTS),  NO_DEFAULT("folds", STRING),
    NO_DEFAULT("folded", INTS),   NO_DEFAULT("axes", INTS),     {.name = NULL}};

#define CHAIN(name_, flags_)                                                                                           \
    .name = name_, .domain = ORT_DOMAIN, .since = 1, .min_in = 1, .max_in = VARIADIC, .max_out = VARIADIC,             \
    .plain = ALL_OPERANDS, .flags = STRIDED | INPLACE_0 | (flags_), .attrs = fused_attrs, .infer = infer_fused,        \
    .workspace = fused_workspace, .cpu = fused_cpu, .cuda = fused_cuda
#define REDUCED(name_, flags_)                                                                                         \
    .name = name_, .domain = ORT_DOMAIN, .since = 1, .min_in = 1, .max_in = VARIADIC, .max_out = VARIADIC,             \
    .plain = ALL_OPERANDS, .flags = STRIDED | INPLACE_0 | (flags_), .attrs = reduce_attrs,                             \
    .infer = infer_fused_reduce, .workspace = fused_reduce_workspace, .cpu = fused_reduce_cpu, .cuda = fused_cuda,     \
    .cuda_workspace = fused_reduce_cuda_workspace

/* clang-format off */
const op_def fused_ops[] = {
    {CHAIN("Fused", 0)},
    {CHAIN("FusedRandom", RANDOM)},
    {REDUCED("FusedReduce", 0)},
    {REDUCED("FusedReduceRandom", RANDOM)},
    {0},
};
/* clang-format on */
