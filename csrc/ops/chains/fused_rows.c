/* fused_rows.c -- runs FusedRows: reductions of rows and the chains around them, a block of rows after the other, and
 * FusedRowsRandom, the same with a dropout among their steps.
 *
 * A chain that reads a total of its own rows, as x / x.sum(-1, keepdim=True), cannot run in the sweep that makes the
 * total; but it can follow while the row is still in the cache. So a FusedRows is a list of stages, each the program of a
 * Fused or a FusedReduce (ops/chains/fused.c, ops/chains/fused_reduce.c), and all of them run for one block before the next:
 *     x -> ReduceSum -> total         [0: x, 1: total, 2: y]
 *     x, total -> Div -> y            reads=[0, 0, 1], gives=[2]
 * Values are numbered: the node's operands, then what each stage gives, results first. There are values of each element,
 * in the attribute "shape", and of each row, where the axes from "kept" on are 1; a stage whose elements are rows is small.
 * What nothing else needs lives in memory for one block, of which each of "parts" threads has its own. The bits are those of the stages one by one. */
#include "core/scratch.h"
#include "ops/chains/fused.h"
#include "ops/pointwise/lookup.h"
#include "ops/reductions/reduce_kernel.h"

#include <string.h>

enum {
    BLOCK = 1 << 15, /* elements: several values of so many stay in the second cache */
    SHARES = 32,     /* at least so many blocks, for threads to share */
    ROWS_VALUES = ROWS_READS + ROWS_STAGES * (FUSED_RESULTS + FUSED_FOLDS),
};

/* --- the attributes ------------------------------------------------------------------------------------------------- */

/* What the attribute "stages" says of each, in this order. */
enum { OF_READS, OF_STEPS, OF_OPERANDS, OF_RESULTS, OF_FOLDS, IS_SMALL, STAGE_NUMBERS };
enum { STAGE_ATTRS = 8 };

typedef struct stage {
    node node; /* of a FusedReduce with the stage's part of the attributes; without axes */
    attr attrs[STAGE_ATTRS + 1];
    value *in[FUSED_OPERANDS];
    const int64_t *reads;
    int n_results, n_folds, first; /* the number of its first value */
    bool small;
} stage;

typedef struct program {
    shape whole, small;
    int64_t rows, width, block; /* the block in rows */
    int n_stages, n_in, n_values;
    stage stages[ROWS_STAGES];
    value values[ROWS_VALUES]; /* their types and shapes */
    bool is_small[ROWS_VALUES];
    int given[ROWS_VALUES]; /* as which output; or NOWHERE */
} program;

static const char *skip_names(const char *names, int count) {
    for (; count > 0; count--) {
        names += strcspn(names, " ");
        names += *names == ' ';
    }
    return names;
}

static void shapes_of(const node *n, program *p) {
    const attr *dims = node_attr(n, "shape");
    const int kept = (int)node_int(n, "kept");

    p->whole.rank = dims->count;
    for (int i = 0; i < dims->count; i++) p->whole.dim[i] = dims->ints[i];
    p->small = p->whole;
    for (int i = kept; i < dims->count; i++) p->small.dim[i] = 1;
    p->rows = shape_count(&p->small);
    p->width = shape_span(&p->whole, kept, dims->count);
    p->block = BLOCK / (p->width ? p->width : 1);
    if (p->block > p->rows / SHARES) p->block = p->rows / SHARES;
    if (p->block < 1) p->block = 1;
}

static void add_value(program *p, dtype type, bool small) {
    p->values[p->n_values] = (value){.type = type, .shape = small ? p->small : p->whole};
    p->given[p->n_values] = NOWHERE;
    p->is_small[p->n_values++] = small;
}

static status read_program(ctx *c, const node *n, program *p) {
    const attr *stages = node_attr(n, "stages"), *gives = node_attr(n, "gives");
    const int64_t *reads = node_attr(n, "reads")->ints, *operands = node_attr(n, "operands")->ints;
    const int64_t *types = node_attr(n, "types")->ints, *results = node_attr(n, "results")->ints;
    const int64_t *folded = node_attr(n, "folded")->ints;
    const double *params = node_attr(n, "params")->floats;
    const char *steps = node_string(n, "steps"), *folds = node_string(n, "folds");

    p->n_in = n->n_in;
    p->n_values = 0;
    p->n_stages = stages->count / STAGE_NUMBERS;
    if (p->n_in > ROWS_READS || p->n_stages > ROWS_STAGES) return fail(c, E_INVALID, "%s is too long", n->op->name);
    shapes_of(n, p);
    for (int i = 0; i < p->n_in; i++) {
        add_value(p, n->in[i]->type, false);
        p->values[i].shape = n->in[i]->shape;
    }
    for (int i = 0; i < p->n_stages; i++) {
        stage *s = &p->stages[i];
        const int64_t *of = stages->ints + i * STAGE_NUMBERS;
        const int n_steps = (int)of[OF_STEPS];
        const attr attrs[] = {
            STRING("steps", steps),
            INTS("operands", (int)of[OF_OPERANDS], operands),
            INTS("types", n_steps, types),
            {.name = "params", .kind = ATTR_FLOATS, .count = n_steps * TILE_PARAMS, .floats = params},
            INTS("results", (int)of[OF_RESULTS], results),
            STRING("folds", folds),
            INTS("folded", (int)of[OF_FOLDS], folded),
            {.name = NULL},
        };
        _Static_assert(sizeof attrs <= sizeof s->attrs, "all attributes have room");
        memcpy(s->attrs, attrs, sizeof attrs);
        s->reads = reads;
        s->small = of[IS_SMALL] != 0;
        s->n_results = (int)of[OF_RESULTS], s->n_folds = (int)of[OF_FOLDS], s->first = p->n_values;
        s->node = (node){.op = n->op, .name = n->name, .attrs = s->attrs, .in = s->in, .n_in = (int)of[OF_READS]};
        if (s->node.n_in > FUSED_OPERANDS || p->n_values + s->n_results + s->n_folds > ROWS_VALUES)
            return fail(c, E_INVALID, "stage %d of %s is too long", i, n->op->name);
        for (int j = 0; j < s->node.n_in; j++) {
            if (reads[j] < 0 || reads[j] >= p->n_values)
                return fail(c, E_INVALID, "stage %d of %s reads a value that comes later", i, n->op->name);
            s->in[j] = &p->values[reads[j]];
        }
        for (int j = 0; j < s->n_results; j++) add_value(p, (dtype)types[results[j]], s->small);
        for (int j = 0; j < s->n_folds; j++) {
            const int64_t step = folded[j];
            add_value(p, step < 0 ? s->in[s->node.n_in + step]->type : (dtype)types[step], true);
        }
        reads += s->node.n_in, operands += of[OF_OPERANDS], types += n_steps, params += n_steps * TILE_PARAMS;
        results += s->n_results, folded += s->n_folds;
        steps = skip_names(steps, n_steps), folds = skip_names(folds, s->n_folds);
    }
    for (int i = 0; i < gives->count; i++) p->given[gives->ints[i]] = i;
    return OK;
}

static status infer_fused_rows(graph *g, node *n) {
    const attr *gives = node_attr(n, "gives");
    program p;
    shape s;

    for (int i = 0; i < n->n_in; i++) TRY(require(g, n, i));
    TRY(read_program(g->c, n, &p));
    for (int i = 0; i < n->n_in; i++) {
        TRY(shape_broadcast(g->c, &p.whole, &n->in[i]->shape, &s));
        if (!shape_equal(&s, &p.whole)) return fail(g->c, E_SHAPE, "operand %d of %s is too large", i, n->op->name);
    }
    for (int i = 0; i < n->n_out; i++) {
        const value *v = &p.values[gives->ints[i]];
        TRY(set_out(g, n, i, v->type, &v->shape));
    }
    return OK;
}

/* --- memory ---------------------------------------------------------------------------------------------------------
 * First the tables of all stages; then, for each part, the values of a block and the totals of parts of rows. */

static size_t aligned(size_t bytes) { return (bytes + 63) & ~(size_t)63; }

static size_t table_bytes(const program *p, const stage *s) {
    return fused_table_bytes(&s->node, s->small ? &p->small : &p->whole);
}

static size_t slot_bytes(const program *p, int v) {
    return aligned((size_t)(p->block * (p->is_small[v] ? 1 : p->width)) * dtype_size(p->values[v].type));
}

static shape block_shape(const program *p, int64_t rows) { return SHAPE(rows, p->width); }

/* All blocks but the last have one size. */
static size_t partial_bytes(const program *p) {
    const shape full = block_shape(p, p->block), last = block_shape(p, p->rows % p->block);
    const size_t a = fold_source_workspace(&full, 2, FUSED_FOLDS);
    const size_t b = last.dim[0] ? fold_source_workspace(&last, 2, FUSED_FOLDS) : 0;
    return aligned(a > b ? a : b);
}

static size_t part_bytes(const program *p) {
    size_t bytes = partial_bytes(p);
    for (int v = p->n_in; v < p->n_values; v++) bytes += slot_bytes(p, v);
    return bytes;
}

/* So many threads run it at most: those there were when the plan was made. */
static int parts_of(const node *n, const program *p) {
    const int64_t blocks = (p->rows + p->block - 1) / p->block, parts = node_int(n, "parts");
    return (int)(blocks < parts ? blocks : parts);
}

static size_t fused_rows_workspace(const node *n) {
    program p;
    size_t bytes = 0;

    if (read_program(NULL, n, &p) != OK) return 0;
    for (int i = 0; i < p.n_stages; i++) bytes += aligned(table_bytes(&p, &p.stages[i]));
    return bytes + part_bytes(&p) * (size_t)parts_of(n, &p);
}

/* --- running it --------------------------------------------------------------------------------------------------- */

typedef struct job {
    const call *k;
    program p;
    fused_run runs[ROWS_STAGES];
    fused_ends ends[ROWS_STAGES];
    bool needed[ROWS_STAGES], wanted[ROWS_VALUES];
    char *memory; /* of the parts */
    int parts;
} job;

static bool is_given(const job *j, int v) {
    return j->p.given[v] >= 0 && j->p.given[v] < j->k->n_out && tensor_present(&j->k->out[j->p.given[v]]);
}

/* From what is given back to the stages that it takes. */
static void find_needed(job *j) {
    for (int v = j->p.n_in; v < j->p.n_values; v++) j->wanted[v] = is_given(j, v);
    for (int i = j->p.n_stages - 1; i >= 0; i--) {
        const stage *s = &j->p.stages[i];
        for (int v = 0; v < s->n_results + s->n_folds; v++) j->needed[i] |= j->wanted[s->first + v];
        for (int r = 0; r < s->node.n_in && j->needed[i]; r++) j->wanted[s->reads[r]] = true;
    }
}

/* Memory of a value in its part. */
static char *slot(const job *j, char *memory, int v) {
    for (int i = j->p.n_in; i < v; i++) memory += slot_bytes(&j->p, i);
    return memory;
}

/* Where the value's first element of all would be, if its element of row `first` is at the front of its slot. */
static char *origin(const job *j, char *memory, int v, int64_t first) {
    const int64_t before = first * (j->p.is_small[v] ? 1 : j->p.width) * (int64_t)dtype_size(j->p.values[v].type);
    if (is_given(j, v)) return j->k->out[j->p.given[v]].data;
    return (char *)((uintptr_t)slot(j, memory, v) - (uintptr_t)before);
}

static void place_stage(const job *j, const stage *s, char *memory, int64_t first, fused_run *r) {
    for (int i = 0; i < s->node.n_in; i++)
        if (s->reads[i] >= j->p.n_in) r->in[i].data = origin(j, memory, (int)s->reads[i], first);
    for (int i = 0; i < s->n_results; i++)
        if (j->wanted[s->first + i]) r->out[i] = origin(j, memory, s->first + i, first);
}

static void fold_stage(const job *j, int index, char *memory, int64_t first, int64_t rows, const fused_run *r,
                       void *scratch) {
    const stage *s = &j->p.stages[index];
    const shape block = block_shape(&j->p, rows);
    fused_ends ends = j->ends[index];
    tensor out[FUSED_FOLDS];

    for (int i = 0; i < ends.n; i++) {
        const int v = s->first + s->n_results + ends.index[i];
        out[i] = (tensor){.type = j->p.values[v].type};
        out[i].data = origin(j, memory, v, first) + first * (int64_t)dtype_size(out[i].type);
        ends.out[i] = &out[i];
    }
    fused_fold(r, &ends, &block, 2, first * j->p.width, slot(j, memory, j->p.n_values), scratch);
}

static void run_chain(const fused_run *r, int64_t start, int64_t stop, void *scratch) {
    fused_begin(r, scratch);
    for (; start < stop; start += TILE) fused_tile(r, start, stop - start < TILE ? stop - start : TILE, scratch);
}

static void run_block(const job *j, char *memory, int64_t first, int64_t rows, void *scratch) {
    for (int i = 0; i < j->p.n_stages; i++) {
        const stage *s = &j->p.stages[i];
        const int64_t width = s->small ? 1 : j->p.width;
        fused_run r;

        if (!j->needed[i]) continue;
        r = j->runs[i];
        place_stage(j, s, memory, first, &r);
        if (j->ends[i].n) fold_stage(j, i, memory, first, rows, &r, scratch);
        else run_chain(&r, first * width, (first + rows) * width, scratch);
    }
}

static void run_parts(void *arg, int64_t begin, int64_t end, void *scratch) {
    const job *j = arg;
    const program *p = &j->p;
    const int64_t blocks = (p->rows + p->block - 1) / p->block;

    for (int64_t part = begin; part < end; part++)
        for (int64_t b = blocks * part / j->parts; b < blocks * (part + 1) / j->parts; b++) {
            const int64_t first = b * p->block, rows = p->rows - first;
            run_block(j, j->memory + part_bytes(p) * (size_t)part, first, rows < p->block ? rows : p->block, scratch);
        }
}

/* A stage as a call of its own. Values of the block have their first slots here; each part has others. */
static status prepare_stage(ctx *c, job *j, int index, char *table) {
    const stage *s = &j->p.stages[index];
    const shape *elements = s->small ? &j->p.small : &j->p.whole;
    tensor in[FUSED_OPERANDS], out[FUSED_RESULTS + FUSED_FOLDS];
    call k = {.node = &s->node, .in = in, .out = out, .n_in = s->node.n_in, .seed = j->k->seed};

    k.n_out = s->n_results + s->n_folds;
    for (int i = 0; i < k.n_in; i++) {
        const int v = (int)s->reads[i];
        if (v < j->p.n_in) {
            in[i] = j->k->in[v];
            continue;
        }
        in[i] = (tensor){.data = slot(j, j->memory, v), .type = j->p.values[v].type, .shape = j->p.values[v].shape};
        stride_contiguous(&in[i].shape, in[i].stride);
    }
    for (int i = 0; i < k.n_out; i++) {
        const int v = s->first + i;
        out[i] = (tensor){.type = j->wanted[v] ? j->p.values[v].type : DT_NONE, .data = slot(j, j->memory, v)};
    }
    TRY(fused_prepare(c, &k, elements, table, &j->runs[index]));
    TRY(fused_ends_of(c, &k, s->n_results, &j->ends[index]));
    return OK;
}

static status fused_rows_cpu(ctx *c, const call *k) {
    char *table = k->work;
    size_t scratch = 0;
    job j = {.k = k};

    TRY(read_program(c, k->node, &j.p));
    if (j.p.rows == 0 || j.p.width == 0) return fail(c, E_INVALID, "%s has no elements", k->node->op->name);
    find_needed(&j);
    j.parts = parts_of(k->node, &j.p);
    j.memory = table;
    for (int i = 0; i < j.p.n_stages; i++) j.memory += aligned(table_bytes(&j.p, &j.p.stages[i]));
    for (int i = 0; i < j.p.n_stages; i++) {
        if (j.needed[i]) {
            TRY(prepare_stage(c, &j, i, table));
            const size_t bytes = fused_scratch_bytes(&j.runs[i]);
            scratch = bytes > scratch ? bytes : scratch;
        }
        table += aligned(table_bytes(&j.p, &j.p.stages[i]));
    }
    return parallel_for_with(c, j.parts, 1, scratch, run_parts, &j);
}

/* --- making one --------------------------------------------------------------------------------------------------- */

static bool is_chain(const node *n) { return n->op->cpu == fused_cpu || n->op->cpu == fused_reduce_cpu; }

/* How many axes are kept when those of a bit set are folded; -1 unless they are the last. */
static int kept_axes(const shape *s, unsigned axes) {
    int kept = s->rank;
    while (kept > 0 && axes >> (kept - 1) & 1) kept--;
    return axes == (1u << s->rank) - (1u << kept) && kept < s->rank ? kept : -1;
}

bool fused_rows_folds(const node *n, shape *s, int *kept) {
    unsigned axes;

    if (n->op->cpu == fused_reduce_cpu) {
        *s = *fused_reduce_shape(n);
        axes = fused_reduce_axes(n);
    } else {
        if (!reduction_of(n->op) || !n->in[0] || !dtype_is_float(n->in[0]->type)) return false;
        *s = n->in[0]->shape;
        axes = reduced_axes(n);
    }
    *kept = kept_axes(s, axes);
    return *kept >= 0 && shape_count(s) > 0;
}

static int64_t rows_of(const rows_chain *ch) { return shape_span(&ch->shape, 0, ch->kept); }

/* As totals that keep their axes, perhaps without leading axes of size 1. */
static bool is_like_totals(const rows_chain *ch, const shape *s) {
    for (int i = 1; i <= ch->shape.rank; i++) {
        const int axis = ch->shape.rank - i;
        const int64_t is = i <= s->rank ? s->dim[s->rank - i] : 1;
        if (is != (axis < ch->kept ? ch->shape.dim[axis] : 1)) return false;
    }
    return s->rank <= ch->shape.rank;
}

bool fused_rows_small(const rows_chain *ch, const node *n) {
    shape s;
    int kept;
    return !fused_rows_folds(n, &s, &kept) && !shape_equal(&n->out[0]->shape, &ch->shape);
}

/* Of a stage over rows: every operand is one number, or one for each row. */
static bool holds_small(const rows_chain *ch, const node *n) {
    for (int i = 0; i < n->n_in; i++) {
        const int64_t count = shape_count(&n->in[i]->shape);
        if (count != 1 && count != rows_of(ch)) return false;
    }
    return shape_count(&n->out[0]->shape) == rows_of(ch);
}

bool fused_rows_holds(const rows_chain *ch, const node *n) {
    shape s;
    int kept;

    if (fused_rows_folds(n, &s, &kept)) return kept == ch->kept && shape_equal(&s, &ch->shape);
    if (n->op->cpu == fused_reduce_cpu || !(is_chain(n) || fused_holds(n))) return false;
    return shape_equal(&n->out[0]->shape, &ch->shape) || holds_small(ch, n);
}

static bool is_by(const value *v, const char *op) { return v->def && v->def->op && strcmp(v->def->op->name, op) == 0; }

static value *behind_reshapes(value *v) {
    while (is_by(v, "Reshape")) v = v->def->in[0];
    return v;
}

value *fused_rows_source(value *v) {
    while (is_by(v, "Reshape") || is_by(v, "Expand")) v = v->def->in[0];
    return v;
}

bool fused_rows_reads(const rows_chain *ch, const node *n, value *v) {
    const value *source = fused_rows_source(v);

    if (fused_rows_small(ch, n)) return shape_count(&v->shape) == rows_of(ch) && behind_reshapes(v) == source;
    if (is_by(v, "Expand") && shape_equal(&v->shape, &ch->shape)) v = v->def->in[0];
    if (behind_reshapes(v) != source) return false;
    return shape_equal(&v->shape, &ch->shape) || is_like_totals(ch, &v->shape);
}

/* The lists of attributes, as they grow. */
typedef struct lists {
    int64_t operands[ROWS_STAGES * FUSED_STEPS * TILE_OPERANDS], types[ROWS_STAGES * FUSED_STEPS];
    int64_t results[ROWS_STAGES * FUSED_RESULTS], folded[ROWS_STAGES * FUSED_FOLDS];
    int64_t reads[ROWS_STAGES * FUSED_OPERANDS], stages[ROWS_STAGES * STAGE_NUMBERS], gives[ROWS_GIVES];
    double params[ROWS_STAGES * FUSED_STEPS * TILE_PARAMS];
    char steps[ROWS_STAGES * FUSED_STEPS * FUSED_NAME], folds[ROWS_STAGES * FUSED_FOLDS * FUSED_NAME];
    int n_operands, n_types, n_results, n_folded, n_reads, n_gives;
    value *in[ROWS_READS], *made[ROWS_VALUES];
    int n_in, n_made;
} lists;

static void add_names(char *to, const char *names) {
    size_t length = strlen(to);
    if (!*names) return;
    if (length) to[length++] = ' ';
    memcpy(to + length, names, strlen(names) + 1);
}

/* The number of what operand `i` of a stage stands for; one of the node's operands counts from -1 down, since they are
 * not all known yet. */
static status number_of(graph *g, const rows_chain *ch, lists *l, const node *n, int i, int64_t *number) {
    value *v = n->in[i];
    const int made = fused_place(l->made, l->n_made, fused_rows_source(v));
    int at;

    if (made >= 0) {
        *number = made;
        return OK;
    }
    if (fused_rows_small(ch, n)) {
        shape s = ch->shape;
        for (int d = ch->kept; d < s.rank; d++) s.dim[d] = 1;
        if (shape_count(&v->shape) == 1) s = SCALAR;
        if (!shape_equal(&s, &v->shape)) TRY(emit_reshape(g, v, &s, &v));
    }
    at = fused_place(l->in, l->n_in, v);
    if (at < 0) {
        if (l->n_in == ROWS_READS) return fail(g->c, E_INVALID, "a chain of rows has too many operands");
        at = l->n_in;
        l->in[l->n_in++] = v;
    }
    *number = -1 - at;
    return OK;
}

static int64_t *add_all(int64_t *to, int *count, const attr *a) {
    for (int i = 0; i < a->count; i++) to[(*count)++] = a->ints[i];
    return to;
}

static status add_stage(graph *g, const rows_chain *ch, lists *l, const node *n, int index) {
    int64_t *of = l->stages + index * STAGE_NUMBERS;
    const bool chain = is_chain(n), folds = n->op->cpu == fused_reduce_cpu || reduction_of(n->op);

    of[OF_READS] = chain || !folds ? n->n_in : 1;
    for (int i = 0; i < of[OF_READS]; i++) TRY(number_of(g, ch, l, n, i, &l->reads[l->n_reads++]));
    of[IS_SMALL] = fused_rows_small(ch, n);
    if (chain) {
        const attr *types = node_attr(n, "types"), *params = node_attr(n, "params");
        add_all(l->operands, &l->n_operands, node_attr(n, "operands"));
        memcpy(l->params + l->n_types * TILE_PARAMS, params->floats, (size_t)params->count * sizeof *l->params);
        add_all(l->types, &l->n_types, types);
        add_all(l->results, &l->n_results, node_attr(n, "results"));
        add_names(l->steps, node_string(n, "steps"));
        of[OF_STEPS] = types->count;
        of[OF_OPERANDS] = node_attr(n, "operands")->count;
        of[OF_RESULTS] = node_attr(n, "results")->count;
        if (folds) {
            add_all(l->folded, &l->n_folded, node_attr(n, "folded"));
            add_names(l->folds, node_string(n, "folds"));
        }
        of[OF_FOLDS] = folds ? node_attr(n, "folded")->count : 0;
    } else if (folds) {
        of[OF_STEPS] = of[OF_OPERANDS] = of[OF_RESULTS] = 0;
        of[OF_FOLDS] = 1;
        l->folded[l->n_folded++] = -1;
        add_names(l->folds, n->op->name);
    } else {
        of[OF_STEPS] = of[OF_RESULTS] = 1;
        of[OF_OPERANDS] = n->n_in;
        of[OF_FOLDS] = 0;
        for (int i = 0; i < n->n_in; i++) l->operands[l->n_operands++] = i;
        tile_parameters(n, l->params + l->n_types * TILE_PARAMS);
        l->types[l->n_types++] = n->out[0]->type;
        l->results[l->n_results++] = 0;
        add_names(l->steps, n->op->name);
    }
    for (int i = 0; i < n->n_out; i++) l->made[l->n_made++] = n->out[i];
    return OK;
}

status fused_rows_emit(graph *g, const rows_chain *ch, value **out) {
    lists *l;
    bool random = false;

    TRY(NEW(g->c, l, 1));
    for (int i = 0; i < ch->n_stages; i++) {
        TRY(add_stage(g, ch, l, ch->stages[i], i));
        random |= (ch->stages[i]->op->flags & RANDOM) != 0;
    }
    for (int i = 0; i < l->n_reads; i++) l->reads[i] = l->reads[i] < 0 ? -1 - l->reads[i] : l->reads[i] + l->n_in;
    for (int i = 0; i < ch->n_gives; i++) l->gives[i] = l->n_in + fused_place(l->made, l->n_made, ch->gives[i]);
    const attr attrs[] = {
        STRING("steps", l->steps),
        INTS("operands", l->n_operands, l->operands),
        INTS("types", l->n_types, l->types),
        {.name = "params", .kind = ATTR_FLOATS, .count = l->n_types * TILE_PARAMS, .floats = l->params},
        INTS("results", l->n_results, l->results),
        STRING("folds", l->folds),
        INTS("folded", l->n_folded, l->folded),
        INTS("reads", l->n_reads, l->reads),
        INTS("stages", ch->n_stages * STAGE_NUMBERS, l->stages),
        INTS("gives", ch->n_gives, l->gives),
        INTS("shape", ch->shape.rank, ch->shape.dim),
        INT("kept", ch->kept),
        INT("parts", parallel_threads()),
        {.name = NULL},
    };
    TRY(graph_emit(g, random ? "FusedRowsRandom" : "FusedRows", attrs, l->n_in, l->in, ch->n_gives, out));
    for (int i = 0; i < ch->n_gives; i++) TRY(emit_reshape(g, out[i], &ch->gives[i]->shape, &out[i]));
    return OK;
}

/* --- records ------------------------------------------------------------------------------------------------------ */

static const attr rows_attrs[] = {NO_DEFAULT("steps", STRING), NO_DEFAULT("operands", INTS),
                                  NO_DEFAULT("types", INTS),   NO_DEFAULT("params", FLOATS),
                                  NO_DEFAULT("results", INTS), NO_DEFAULT("folds", STRING),
                                  NO_DEFAULT("folded", INTS),  NO_DEFAULT("reads", INTS),
                                  NO_DEFAULT("stages", INTS),  NO_DEFAULT("gives", INTS),
                                  NO_DEFAULT("shape", INTS),   NO_DEFAULT("kept", INT),
                                  NO_DEFAULT("parts", INT),    {.name = NULL}};

#define ROWS(name_, flags_)                                                                                            \
    .name = name_, .domain = ORT_DOMAIN, .since = 1, .min_in = 1, .max_in = VARIADIC, .max_out = VARIADIC,             \
    .plain = ALL_OPERANDS, .flags = STRIDED | (flags_), .attrs = rows_attrs, .infer = infer_fused_rows,                \
    .workspace = fused_rows_workspace, .cpu = fused_rows_cpu

/* clang-format off */
const op_def fused_rows_ops[] = {
    {ROWS("FusedRows", 0)},
    {ROWS("FusedRowsRandom", RANDOM)},
    {0},
};
/* clang-format on */
