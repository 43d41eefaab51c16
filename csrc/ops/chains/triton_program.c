/* triton_program.c -- writes the program of one Triton kernel: pointwise operators, reductions and norms of rows.
 *
 * The node has a program, as text: a line an operand, a step or the results, each value numbered in that order. Python
 * writes the kernel's source from it (ortmodule/triton_kernels/), and compiles or interprets that. What changes from
 * node to node but not the source (sizes, strides, parameters of steps, the seed) are arguments. */
#include "ops/chains/triton.h"

#include "graph/triton.h"
#include "ops/norms/norm.h"
#include "ops/pointwise/dropout.h"
#include "ops/pointwise/pointwise.h"
#include "ops/queries.h"
#include "ops/reductions/reduce_kernel.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

enum { MOST_STEPS_PARAMS = 2, PROGRAMS = 264, NAME_BYTES = 64 };

/* --- operators of rows ------------------------------------------------------------------------------------------------ */

/* Operands and results by letter. w: all elements; r: a number for each row; c: one for each element of a row, the same for
 * all rows; C: the same as sums over rows, of which each block of the kernel leaves its own. */
typedef struct row_operator {
    const char *name, *operands, *results;
    bool has_epsilon;
} row_operator;

static const row_operator row_operators[] = {
    {"Softmax", "w", "w", false},
    {"LogSoftmax", "w", "w", false},
    {"SoftmaxGrad", "ww", "w", false},
    {"LogSoftmaxGrad", "ww", "w", false},
    {"LayerNormalization", "wcc", "wrr", true},
    {"LayerNormGrad", "wwcrrw", "wCC", false},
    {"RMSNormalization", "wc", "wr", true},
    {"RMSNormGrad", "wwcrrw", "wC", false},
    {NULL, NULL, NULL, false},
};

static const row_operator *row_operator_of(const node *n) {
    for (const row_operator *r = row_operators; r->name; r++)
        if (strcmp(r->name, n->op->name) == 0) return r;
    return NULL;
}

/* The operand whose shape its elements have. */
static const value *elements_of(const node *n) {
    const row_operator *r = row_operator_of(n);
    return n->in[r && r->operands[0] == 'w' && r->operands[1] == 'w' ? 1 : 0];
}

bool triton_folds(const node *n, shape *s, int *kept) {
    const row_operator *r = row_operator_of(n);
    int64_t axis;

    if (!r) return fused_rows_folds(n, s, kept);
    *s = elements_of(n)->shape;
    axis = node_int(n, "axis");
    *kept = (int)(axis < 0 ? axis + s->rank : axis);
    if (strstr(r->name, "Softmax") && *kept != s->rank - 1) return false;
    return *kept >= 0 && *kept < s->rank && shape_count(s) > 0;
}

/* --- rules ------------------------------------------------------------------------------------------------------------ */

static bool axis_equal(int64_t a, int64_t b, int rank) { return (a < 0 ? a + rank : a) == (b < 0 ? b + rank : b); }

static bool holds_condition(const node *n, const triton_condition *w) {
    const bool is_axes = strcmp(w->name, "axes") == 0, is_axis = strcmp(w->name, "axis") == 0;
    const int rank = is_axes || is_axis ? n->in[0]->shape.rank : 0;
    const attr *a = node_attr(n, w->name);
    int64_t numbers[MAX_RANK], axis;
    int count = 0;

    if (is_axes && reduction_of(n->op)) {
        while (count < MAX_RANK && written_axis(n, count, &axis)) numbers[count++] = axis;
    } else if (a && a->kind == ATTR_INT) {
        numbers[count++] = a->i;
    } else if (a && a->kind == ATTR_INTS) {
        for (int i = 0; i < a->count && count < MAX_RANK; i++) numbers[count++] = a->ints[i];
    } else {
        return a && w->wanted != WANTED_NUMBERS;
    }
    if (w->wanted != WANTED_NUMBERS) return w->wanted == WANTED_CONSTANT || count == 1;
    if (count != w->count) return false;
    for (int i = 0; i < count; i++)
        if (!axis_equal(numbers[i], w->numbers[i], rank)) return false;
    return true;
}

/* That whose type says what a node computes in. */
static const value *last_operand(const node *n) { return n->op->pointwise ? n->in[n->n_in - 1] : n->in[0]; }

bool triton_takes(const graph *g, const node *n, bool *counts) {
    for (int i = 0; i < g->triton->n_operators; i++) {
        const triton_operator *o = &g->triton->operators[i];
        if (strcmp(o->name, n->op->name) != 0) continue;
        if (!n->n_in || !last_operand(n) || !(o->classes >> tile_class_of(last_operand(n)->type) & 1)) return false;
        for (int j = 0; j < o->n_conditions; j++)
            if (!holds_condition(n, &o->conditions[j])) return false;
        *counts = !o->is_no_op;
        return true;
    }
    return false;
}

/* --- what may be one kernel ------------------------------------------------------------------------------------------- */

static int64_t rows_of(const triton_chain *ch) { return shape_span(&ch->rows.shape, 0, ch->rows.kept); }
bool triton_holds(const triton_chain *ch, const node *n) {
    shape s;
    int kept;

    if (triton_folds(n, &s, &kept))
        return shape_equal(&s, &ch->rows.shape) && (ch->rows.kept < 0 || ch->rows.kept == kept);
    if (row_operator_of(n)) return false;
    if (ch->rows.kept < 0) return n->n_out == 1 && shape_equal(&n->out[0]->shape, &ch->rows.shape) && fused_holds(n);
    return fused_rows_holds(&ch->rows, n);
}

static bool is_reshaped(const value *v, const value *source) {
    while (v != source && v->def && strcmp(v->def->op->name, "Reshape") == 0) v = v->def->in[0];
    return v == source;
}

/* How an operand is read: a letter of row_operator. Of pointwise nodes: 'p'. */
static char letter_of(const node *n, int i) {
    const row_operator *r = row_operator_of(n);
    if (r) return i < (int)strlen(r->operands) ? r->operands[i] : 'c';
    return reduction_of(n->op) ? 'w' : 'p';
}

bool triton_reads(const triton_chain *ch, const node *n, int i) {
    value *v = n->in[i];
    const value *source = fused_rows_source(v);
    const row_operator *r = row_operator_of(source->def);
    const char letter = letter_of(n, i);

    if (r && r->results[source->def_index] == 'C') return false;
    if (letter == 'w') return is_reshaped(v, fused_rows_source(v)) && shape_equal(&v->shape, &ch->rows.shape);
    if (letter == 'r') return is_reshaped(v, fused_rows_source(v)) && shape_count(&v->shape) == rows_of(ch);
    if (letter == 'c') return false;
    if (ch->rows.kept < 0) return is_reshaped(v, fused_rows_source(v)) && shape_equal(&v->shape, &ch->rows.shape);
    return fused_rows_reads(&ch->rows, n, v);
}

/* --- making one ------------------------------------------------------------------------------------------------------- */

typedef struct writer {
    char *text;
    size_t room, length;
    value *in[TRITON_READS], *made[TRITON_NODES * 3];
    int n_in, n_made, n_params, n_constants;
    value *constants[TRITON_READS];
    double params[TRITON_NODES * MOST_STEPS_PARAMS];
    int64_t draws[TRITON_NODES];
    char letters[TRITON_NODES * 3]; /* of what is made */
    bool random;
} writer;

static void put(writer *w, const char *format, ...) __attribute__((format(printf, 2, 3)));
static void put(writer *w, const char *format, ...) {
    va_list list;
    va_start(list, format);
    const size_t left = w->length < w->room ? w->room - w->length : 0;
    const int n = vsnprintf(left ? w->text + w->length : NULL, left, format, list);
    va_end(list);
    if (n > 0) w->length += (size_t)n;
}

static int place_of(value *const *list, int count, const value *v) {
    for (int i = 0; i < count; i++)
        if (list[i] == v) return i;
    return -1;
}

static shape totals_of(const triton_chain *ch) {
    shape s = ch->rows.shape;
    for (int d = ch->rows.kept; d < s.rank; d++) s.dim[d] = 1;
    return s;
}

/* As the kernel sees an operand that no node of it makes: it broadcasts to all elements. */
static status fit(graph *g, const triton_chain *ch, const node *n, int i, value **v) {
    const char letter = letter_of(n, i);
    shape s = ch->rows.shape;

    if (letter == 'w') return OK;
    if (letter == 'c') {
        s.rank -= ch->rows.kept;
        for (int d = 0; d < s.rank; d++) s.dim[d] = ch->rows.shape.dim[ch->rows.kept + d];
    } else if (letter == 'r' || fused_rows_small(&ch->rows, n)) {
        s = shape_count(&(*v)->shape) == 1 ? SCALAR : totals_of(ch);
    } else {
        return OK;
    }
    return shape_equal(&s, &(*v)->shape) ? OK : emit_reshape(g, *v, &s, v);
}

static bool is_inlined(const graph *g, const value *v) {
    return g->triton->inlines && v->data && shape_count(&v->shape) == 1 && (dtype_is_float(v->type) || v->type == BOOL);
}

/* Lists what is not made here: first operands, then constants, which have numbers of their own in the text. */
static status list_operands(graph *g, const triton_chain *ch, writer *w) {
    for (int i = 0; i < ch->n_nodes; i++) {
        node *n = ch->nodes[i];
        const bool folds = reduction_of(n->op) != NULL;
        for (int j = 0; j < n->n_in && (j == 0 || !folds); j++) {
            value *v = n->in[j];
            if (!v || place_of(w->made, w->n_made, fused_rows_source(v)) >= 0) continue;
            TRY(fit(g, ch, n, j, &v));
            value **list = is_inlined(g, v) ? w->constants : w->in;
            int *count = is_inlined(g, v) ? &w->n_constants : &w->n_in;
            if (place_of(list, *count, v) >= 0) continue;
            if (*count == TRITON_READS) return fail(g->c, E_INVALID, "a Triton kernel has too many operands");
            list[(*count)++] = v;
        }
        for (int j = 0; j < n->n_out; j++)
            if (n->out[j]) w->made[w->n_made++] = n->out[j];
    }
    return OK;
}

static void put_operands(writer *w, bool rows) {
    put(w, "%s\n", rows ? "rows" : "elements");
    for (int i = 0; i < w->n_in; i++) put(w, "operand %s\n", dtype_name(w->in[i]->type));
    for (int i = 0; i < w->n_constants; i++) {
        const double x = dtype_get(w->constants[i]->type, w->constants[i]->data, 0);
        uint64_t bits;
        memcpy(&bits, &x, sizeof bits);
        put(w, "constant %s %016llx\n", dtype_name(w->constants[i]->type), (unsigned long long)bits);
    }
}

/* The number of an operand in the text; -1: it is absent. */
static status number_of(graph *g, const triton_chain *ch, const writer *w, const node *n, int i, int *out) {
    value *v = i < n->n_in ? n->in[i] : NULL;
    int at;

    *out = -1;
    if (!v) return OK;
    if ((at = place_of(w->made, w->n_made, fused_rows_source(v))) >= 0) {
        *out = w->n_in + w->n_constants + at;
        return OK;
    }
    TRY(fit(g, ch, n, i, &v)); /* an equal node is not emitted twice */
    if ((at = place_of(w->constants, w->n_constants, v)) >= 0) *out = w->n_in + at;
    else *out = place_of(w->in, w->n_in, v);
    return *out >= 0 ? OK : fail(g->c, E_INVALID, "an operand of a Triton kernel is lost");
}

static void add_params(writer *w, const node *n, const row_operator *r) {
    double param[TILE_PARAMS] = {0};
    const bool draws = n->op->pointwise && n->op->pointwise->draws;

    if (r ? !r->has_epsilon : !n->op->pointwise || !n->op->pointwise->params[0]) {
        put(w, " -");
        return;
    }
    if (r) param[0] = node_float(n, "epsilon");
    else tile_parameters(n, param);
    put(w, " %s%d", draws ? "draws" : "given", w->n_params);
    w->params[2 * w->n_params] = param[0], w->params[2 * w->n_params + 1] = param[1];
    w->draws[w->n_params++] = draws;
    w->random |= draws;
}

static status put_step(graph *g, const triton_chain *ch, writer *w, const node *n) {
    const row_operator *r = row_operator_of(n);
    const bool folds = reduction_of(n->op) != NULL;
    const int operands = r ? (int)strlen(r->operands) : folds ? 1 : n->n_in;
    int number;

    put(w, "step %s", n->op->name);
    add_params(w, n, r);
    for (int i = 0; i < operands; i++) {
        TRY(number_of(g, ch, w, n, i, &number));
        put(w, " %d", number);
    }
    put(w, " ->");
    for (int i = 0; i < (r ? (int)strlen(r->results) : 1); i++) {
        const value *v = i < n->n_out ? n->out[i] : NULL;
        const char letter = r ? r->results[i] : folds || fused_rows_small(&ch->rows, n) ? 'r' : 'w';
        if (!v) {
            put(w, " -");
            continue;
        }
        put(w, " %c:%s", letter, dtype_name(v->type));
        w->letters[w->n_made] = letter;
        w->made[w->n_made++] = n->out[i];
    }
    put(w, "\n");
    return OK;
}

static status put_program(graph *g, const triton_chain *ch, writer *w) {
    w->room = (size_t)(ch->n_nodes + TRITON_READS * 2 + 2) * (NAME_BYTES * 5);
    TRY(NEW(g->c, w->text, w->room));
    TRY(list_operands(g, ch, w));
    w->n_made = 0;
    put_operands(w, ch->rows.kept >= 0);
    for (int i = 0; i < ch->n_nodes; i++) TRY(put_step(g, ch, w, ch->nodes[i]));
    put(w, "results");
    for (int i = 0; i < ch->n_gives; i++)
        put(w, " %d", w->n_in + w->n_constants + place_of(w->made, w->n_made, ch->gives[i]));
    put(w, "\n");
    return w->length < w->room ? OK : fail(g->c, E_INVALID, "a Triton kernel's program is too long");
}

/* The nodes as they were, for a look at them. */
static status original_of(graph *g, const triton_chain *ch, const char **out) {
    writer w = {.room = (size_t)ch->n_nodes * (NAME_BYTES * 4 + SHAPE_TEXT) + 1};
    char text[SHAPE_TEXT];

    TRY(NEW(g->c, w.text, w.room));
    for (int i = 0; i < ch->n_nodes; i++) {
        const node *n = ch->nodes[i];
        put(&w, "%%%d = %.*s(", n->out[0] ? n->out[0]->id : -1, NAME_BYTES, n->op->name);
        for (int j = 0; j < n->n_in; j++) put(&w, "%s%%%d", j ? ", " : "", n->in[j] ? n->in[j]->id : -1);
        if (n->out[0]) put(&w, ") %s%s", dtype_name(n->out[0]->type), shape_text(&n->out[0]->shape, text));
        put(&w, "  %.*s\n", NAME_BYTES, n->name ? n->name : "");
        if (w.length >= w.room) break;
    }
    *out = w.text;
    return OK;
}

/* What the node's result becomes for those who read it. */
static status restore(graph *g, const value *as, char letter, value **v) {
    static const int64_t first[] = {0};

    if (letter == 'C') {
        TRY(emit_reduce(g, "ReduceSum", *v, 1, first, false, v));
        if ((*v)->type != as->type) TRY(emit_cast(g, *v, as->type, v));
    }
    return shape_equal(&(*v)->shape, &as->shape) ? OK : emit_reshape(g, *v, &as->shape, v);
}

status triton_emit(graph *g, const triton_chain *ch, value **out) {
    triton_chain settled = *ch;
    const int64_t *dims = ch->rows.shape.dim;
    int64_t types[TRITON_GIVES], letters[TRITON_GIVES], programs;
    const char *original;
    writer *w;

    TRY(NEW(g->c, w, 1));
    if (settled.rows.kept < 0) settled.rows.kept = ch->rows.shape.rank;
    programs = rows_of(&settled) < PROGRAMS ? rows_of(&settled) : PROGRAMS;
    if (ch->rows.kept < 0) settled.rows.kept = -1;
    TRY(put_program(g, &settled, w));
    TRY(original_of(g, ch, &original));
    for (int i = 0; i < ch->n_gives; i++) {
        letters[i] = w->letters[place_of(w->made, w->n_made, ch->gives[i])];
        types[i] = letters[i] == 'C' && ch->gives[i]->type != F64 ? F32 : ch->gives[i]->type;
    }
    const attr attrs[] = {
        STRING("program", w->text),
        STRING("original", original),
        {.name = "params", .kind = ATTR_FLOATS, .count = 2 * w->n_params, .floats = w->params},
        INTS("draws", w->n_params, w->draws),
        INTS("types", ch->n_gives, types),
        INTS("letters", ch->n_gives, letters),
        INTS("shape", ch->rows.shape.rank, dims),
        INT("kept", ch->rows.kept),
        INT("programs", programs),
        {.name = NULL},
    };
    TRY(graph_emit(g, w->random ? "TritonChainRandom" : "TritonChain", attrs, w->n_in, w->in, ch->n_gives, out));
    for (int i = 0; i < ch->n_gives; i++) TRY(restore(g, ch->gives[i], (char)letters[i], &out[i]));
    return OK;
}
