/* graphs.c -- runs models of 1 to 30 nodes forward and backward, planned with all passes and with only the necessary
 * ones. Results may differ as far as they do when every result of every node is rounded otherwise. */
#include "draw.h"
#include "plans.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MOST_BYTES = 4 << 20, FEW = 3, MANY = 12 };

static const double epsilons[DTYPE_COUNT] = {[F32] = 0x1p-23, [F64] = 0x1p-52, [BF16] = 0x1p-7, [F16] = 0x1p-10};

static uint64_t next(uint64_t *state) {
    *state = *state * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
    return *state >> 33;
}

static void fill_memory(void *at, const value *v, uint64_t state) {
    for (int64_t i = 0, n = at ? shape_count(&v->shape) : 0; i < n; i++) {
        const uint64_t x = next(&state);
        const double number = (double)x * 0x1p-29 - 2;
        dtype_set_value(v->type, at, i,
                        dtype_is_float(v->type) ? number
                        : v->type == BOOL       ? x % 4 > 0
                                                : (double)(x % 4));
    }
}

static void fill(void *arg, machine *m) {
    const drawn *d = arg;
    const graph *g = m->p->g;

    for (int i = 0; i < d->model->n_inputs; i++)
        fill_memory(m->memory[AT_INPUT][i], g->inputs[i], d->seed + (unsigned)i);
    for (int i = 0; g->output_grads && i < g->n_outputs; i++)
        if (g->output_grads[i])
            fill_memory(m->memory[AT_OUTPUT_GRAD][i], g->output_grads[i], d->seed + 100u + (unsigned)i);
}

/* --- runs in which every result is a little off --------------------------------------------------------------------- */

/* Where these are, whether something overflows depends on the order of operations. */
static const double HUGE_NUMBERS[DTYPE_COUNT] = {[F32] = 1e15, [F64] = 1e100, [BF16] = 1e15, [F16] = 100};

/* Whether a value of the last disturbed runs was that large, or no number. */
static bool overflows;

/* Of the narrowest float among a plan's values: a difference in it is one in all that follows. */
static double coarsest(const plan *p) {
    double e = 0;
    for (int t = 0; t < p->n_code; t++) {
        const instr *in = &p->code[t];
        for (int i = 0; i < in->node->n_in; i++) e = fmax(e, epsilons[in->in[i].t.type]);
        for (int i = 0; i < in->node->n_out; i++) e = fmax(e, epsilons[in->out[i].t.type]);
    }
    return e;
}

static void disturb(const machine *m, const operand *o, double size, uint64_t *state) {
    char *at = o->place == AT_ARENA ? (char *)m->arena : o->place > AT_CONSTANT ? m->memory[o->place][o->index] : NULL;
    const dtype type = o->t.type;

    if (!at || !dtype_is_float(type)) return;
    at += o->offset;
    for (int64_t i = 0, n = tensor_count(&o->t); i < n; i++) {
        const double x = dtype_get(type, at, i), off = size * ((double)(next(state) % 3) - 1);
        overflows |= !(fabs(x) < HUGE_NUMBERS[type]);
        dtype_set_value(type, at, i, x + x * off);
    }
}

/* Does an operator make integers or truth of floats? Where something overflows in one order alone, these are others. */
static bool decides(const plan *p) {
    for (int t = 0; t < p->n_code; t++) {
        const node *n = p->code[t].node;
        bool takes = false, gives = false;
        for (int i = 0; i < n->n_in; i++) takes |= n->in[i] && dtype_is_float(n->in[i]->type);
        for (int i = 0; i < n->n_out; i++) gives |= n->out[i]->type != DT_NONE && !dtype_is_float(n->out[i]->type);
        if (takes && gives) return true;
    }
    return false;
}

static status run_disturbed(machine *m, double size, uint64_t seed) {
    run r = {.arena = m->arena, .seed = 1};

    size *= coarsest(m->p);
    for (int at = 0; at < PLACES; at++) r.memory[at] = m->memory[at];
    for (int i = 0; i < m->p->g->n_inputs; i++) {
        const value *v = m->p->g->inputs[i];
        operand o = {.t = {.type = v->type, .shape = v->shape}, .place = AT_INPUT, .index = i};
        disturb(m, &o, size, &seed);
    }
    for (int t = 0; t < m->p->n_code; t++) {
        const instr *in = &m->p->code[t];
        TRY(exec_run(&m->c, m->p, t, t + 1, &r));
        for (int i = 0; i < in->node->n_out; i++) disturb(m, &in->out[i], size, &seed);
    }
    return OK;
}

/* --- comparing ------------------------------------------------------------------------------------------------------ */

typedef struct results {
    int count;
    dtype types[MOST_INPUTS + MOST_OUTPUTS];
    int64_t n[MOST_INPUTS + MOST_OUTPUTS];
    double *x[MOST_INPUTS + MOST_OUTPUTS];
} results;

static void add_result(results *r, const value *like, const void *at) {
    const int64_t n = shape_count(&like->shape);
    double *x = calloc((size_t)n + 1, sizeof *x);

    if (!x) abort();
    for (int64_t i = 0; at && i < n; i++) x[i] = dtype_get(like->type, at, i);
    r->types[r->count] = like->type;
    r->n[r->count] = n;
    r->x[r->count++] = x;
}

/* No gradient is zeros. */
static void take_results(const drawn *d, const machine *m, results *r) {
    const graph *g = m->p->g;

    r->count = 0;
    for (int i = 0; i < g->n_outputs; i++) add_result(r, g->outputs[i], m->memory[AT_OUTPUT][i]);
    for (int i = 0; i < d->model->n_inputs; i++)
        add_result(r, g->inputs[i], g->input_grads && g->input_grads[i] ? m->memory[AT_INPUT_GRAD][i] : NULL);
}

static void free_results(results *r) {
    for (int i = 0; i < r->count; i++) free(r->x[i]);
    r->count = 0;
}

/* What overflows is an infinity or, one operation later, no number. */
static double off(double a, double b) { return a == b || (!isfinite(a) && !isfinite(b)) ? 0 : fabs(a - b); }

/* The first place where `a` is not `b` within what the others are off it, -1: none. */
static int64_t differs(const results *a, const results *b, const results *others, int n_others, int i, bool decided,
                       double *allowed) {
    double spread = 0, largest = 0;

    for (int64_t j = 0; j < b->n[i]; j++) {
        if (isfinite(b->x[i][j])) largest = fmax(largest, fabs(b->x[i][j]));
        for (int k = 0; k < n_others; k++) {
            const double x = off(others[k].x[i][j], b->x[i][j]);
            if (isfinite(x)) spread = fmax(spread, x);
        }
    }
    *allowed = 32 * spread + 8 * epsilons[b->types[i]] * largest + (b->types[i] == F16 ? 1e-6 : 1e-36);
    for (int64_t j = 0; j < b->n[i]; j++) {
        bool varies = overflows && (decided || !(isfinite(a->x[i][j]) && isfinite(b->x[i][j])));
        if (off(a->x[i][j], b->x[i][j]) <= *allowed) continue;
        for (int k = 0; k < n_others; k++) /* an integer, or not finite, and not surely so */
            varies |= off(others[k].x[i][j], b->x[i][j]) != 0 &&
                      (!dtype_is_float(b->types[i]) || !isfinite(others[k].x[i][j]) || !isfinite(b->x[i][j]));
        if (!varies) return j;
    }
    return -1;
}

static void show(machine *m, const char *what) {
    const char *text;
    if (graph_print(m->p->g, &text) == OK) fprintf(stderr, "%s:\n%s\n", what, text);
}

static void compare(const drawn *d, machine *with, machine *without) {
    static results a, b, others[MANY];
    const bool decided = decides(without->p);
    int n_others = 0;

    overflows = false;
    take_results(d, with, &a);
    take_results(d, without, &b);
    for (int i = 0; i < a.count; i++) {
        double allowed = 0;
        int64_t j = -1;
        for (int most = FEW; most <= MANY; most *= 2) {
            for (; n_others < most; n_others++) {
                fill((void *)(uintptr_t)d, without);
                if (run_disturbed(without, n_others < FEW ? 2 : 8, (uint64_t)n_others + 1) != OK) goto done;
                take_results(d, without, &others[n_others]);
            }
            if ((j = differs(&a, &b, others, n_others, i, decided, &allowed)) < 0) break;
        }
        if (j < 0) continue;
        show(without, "without passes");
        show(with, "with all passes");
        wrong("%s %d of %s differs at %lld: %.17g with all passes, %.17g without; %g is allowed",
              i < with->p->g->n_outputs ? "output" : "gradient",
              i < with->p->g->n_outputs ? i : i - with->p->g->n_outputs, dtype_name(a.types[i]), (long long)j,
              a.x[i][j], b.x[i][j], allowed);
    }
done:
    free_results(&a);
    free_results(&b);
    for (int k = 0; k < n_others; k++) free_results(&others[k]);
}

static status run_both(machine *m, bool gradient) {
    TRY(machine_forward(m));
    return gradient && m->p->g->input_grads ? machine_backward(m) : OK;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    choices from = {data, data + size};
    planned with, without;
    drawn d;
    ctx c;

    ctx_init(&c);
    const bool gradient = choose(&from, 4) != 3, seen = choose(&from, 4) != 3, clean = choose(&from, 2);
    draw_model(&c, &from, 8, &d);
    compile_options o = {.output_grads = gradient ? d.grads : NULL, .padding_unseen = !seen};
    status a = planned_make(&with, d.model, d.inputs, &o, MOST_BYTES, fill, &d);
    o.disabled_passes = UINT64_MAX & ~(clean ? pass_bit("clean_up") : 0);
    o.padding_unseen = false;
    status b = planned_make(&without, d.model, d.inputs, &o, MOST_BYTES, fill, &d);
    if (a == OK && b == OK) {
        a = run_both(&with.m, gradient);
        b = run_both(&without.m, gradient);
    }
    /* What no kernel computes may have been found unnecessary; and so may what fails while it runs, without `clean_up`. */
    if ((a == OK) != (b == OK) && b != E_UNSUPPORTED && (clean || b != E_RUNTIME))
        wrong("with all passes: %d %s\nwithout: %d %s", a, with.m.c.err.text, b, without.m.c.err.text);
    if (a == OK && b == OK && seen && !with.m.p->random && !without.m.p->random) compare(&d, &with.m, &without.m);
    planned_free(&with);
    planned_free(&without);
    ctx_release(&c);
    return 0;
}
