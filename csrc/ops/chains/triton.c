/* triton.c -- runs TritonChain and TritonChainRandom, which have a program: the arguments of their kernels. */
#include "ops/chains/triton.h"

#include "graph/triton.h"
#include "ops/pointwise/dropout.h"
#include "ops/pointwise/pointwise.h"
#include "ops/queries.h"

#include <string.h>

static const triton_maker *_Atomic process_maker;

void triton_set_maker(const triton_maker *maker) { process_maker = maker; }

status triton_get_maker(ctx *c, const triton_maker **out) {
    *out = process_maker;
    return *out ? OK : fail(c, E_UNSUPPORTED, "this process makes no Triton kernels");
}

static shape shape_of(const node *n) {
    const int64_t *dims;
    shape s = {.rank = node_ints(n, "shape", &dims)};
    for (int i = 0; i < s.rank; i++) s.dim[i] = dims[i];
    return s;
}

static status infer_triton(graph *g, node *n) {
    const int64_t *types, *letters;
    const int kept = (int)node_int(n, "kept");
    shape whole = shape_of(n), totals = whole, sums = {.rank = 2};

    (void)node_ints(n, "types", &types), (void)node_ints(n, "letters", &letters);
    sums.dim[0] = node_int(n, "programs");
    sums.dim[1] = kept < 0 ? 1 : shape_span(&whole, kept, whole.rank);
    for (int d = kept; kept >= 0 && d < totals.rank; d++) totals.dim[d] = 1;
    for (int i = 0; i < n->n_out; i++)
        TRY(set_out(g, n, i, (dtype)types[i], letters[i] == 'C' ? &sums : letters[i] == 'r' ? &totals : &whole));
    return OK;
}

static void add(triton_launch *l, int64_t given, dtype type, int64_t count) {
    l->arguments[l->n_arguments++] = (triton_argument){given, type, count};
}

static void add_number(triton_launch *l, int64_t number) { add(l, number, DT_NONE, 0); }

/* D: as the elements lie; S: one element; R, C: one for each row, or column; 2 and up: so many dimensions. */
static char reach_of(const tile_source *s, const triton_launch *l) {
    if (s->rank == 1) return s->stride[0] == 1 ? 'D' : s->stride[0] == 0 ? 'S' : '1';
    if (s->rank == 2 && s->dim[0] == l->rows && s->stride[0] == 1 && s->stride[1] == 0) return 'R';
    if (s->rank == 2 && s->dim[0] == l->rows && s->stride[0] == 0 && s->stride[1] == 1) return 'C';
    return (char)('0' + s->rank);
}

static int64_t span_of(const tile_source *s) {
    int64_t last = 0;
    for (int d = 0; d < s->rank; d++) last += (s->dim[d] - 1) * s->stride[d];
    return last + 1;
}

static void add_operands(const call *k, const shape *s, triton_launch *l, char **how) {
    tile_source sources[TRITON_READS];

    for (int i = 0; i < k->n_in; i++) {
        sources[i] = tile_source_of(&k->in[i], s);
        *(*how)++ = reach_of(&sources[i], l);
        add(l, (int64_t)(intptr_t)k->in[i].data, k->in[i].type, span_of(&sources[i]));
    }
    for (int i = 0; i < k->n_in; i++) {
        if (reach_of(&sources[i], l) > '9') continue;
        for (int d = 1; d < sources[i].rank; d++) add_number(l, sources[i].dim[d]);
        for (int d = 0; d < sources[i].rank; d++) add_number(l, sources[i].stride[d]);
    }
}

/* The bits of the parameters: of a dropout its factor, and its key beside its threshold. */
static void add_parameters(const call *k, triton_launch *l) {
    const attr *params = node_attr(k->node, "params"), *draws = node_attr(k->node, "draws");

    for (int i = 0; i < draws->count; i++) {
        double given[2] = {params->floats[2 * i], params->floats[2 * i + 1]};
        int64_t bits[2];
        if (draws->ints[i]) {
            const double ratio = given[0];
            const uint32_t key = (uint32_t)given[1];
            given[0] = dropout_factor(ratio);
            memcpy(bits, given, sizeof bits);
            bits[1] = (int64_t)((uint64_t)dropout_threshold(ratio) << 32 | key);
        } else {
            memcpy(bits, given, sizeof bits);
        }
        add_number(l, bits[0]), add_number(l, bits[1]);
    }
}

/* Whether all that lies as the elements do may be read 16 bytes at a time. */
static bool is_aligned(const triton_launch *l) {
    bool aligned = l->width % 16 == 0;
    for (int i = 0; i < l->n_arguments; i++)
        aligned = aligned && (l->arguments[i].type == DT_NONE || l->arguments[i].value % 16 == 0);
    return aligned;
}

status triton_launch_of(ctx *c, const call *k, const uint64_t *seed, triton_launch *out) {
    const shape s = shape_of(k->node);
    const int kept = (int)node_int(k->node, "kept");
    const attr *letters = node_attr(k->node, "letters");
    char *how = out->how;

    *out = (triton_launch){.program = node_string(k->node, "program"), .rows = 1, .width = shape_count(&s)};
    if (k->n_in > TRITON_READS || k->n_out > TRITON_GIVES)
        return fail(c, E_INVALID, "%s has too many operands", k->node->op->name);
    if (kept >= 0) out->rows = shape_span(&s, 0, kept), out->width = shape_span(&s, kept, s.rank);
    add_operands(k, &s, out, &how);
    *how++ = '|';
    for (int i = 0; i < k->n_out; i++) {
        const bool wanted = tensor_present(&k->out[i]);
        if (letters->ints[i] == 'C') out->programs = node_int(k->node, "programs");
        *how++ = wanted ? 'y' : 'n';
        if (wanted) add(out, (int64_t)(intptr_t)k->out[i].data, k->out[i].type, tensor_count(&k->out[i]));
    }
    *how++ = '|';
    if (shape_count(&s) > INT32_MAX) *how++ = 'w';
    if (seed) *how++ = 's';
    if (is_aligned(out)) *how++ = 'a';
    *how = '\0';
    add_number(out, out->rows), add_number(out, out->width);
    add_parameters(k, out);
    if (!(k->node->op->flags & RANDOM)) return OK;
    if (seed) {
        add(out, (int64_t)(intptr_t)seed, I64, 1);
    } else {
        add_number(out, (int64_t)(k->seed & 0xffffffffu));
        add_number(out, (int64_t)(k->seed >> 32));
    }
    return OK;
}

static status triton_cpu(ctx *c, const call *k) {
    const triton_maker *maker;
    triton_launch l;

    TRY(triton_get_maker(c, &maker));
    TRY(triton_launch_of(c, k, NULL, &l));
    return maker->interpret(c, &l);
}

kernel_fn triton_cuda; /* cuda/kernels/triton.c */

/* --- records ---------------------------------------------------------------------------------------------------------- */

static const attr triton_attrs[] = {NO_DEFAULT("program", STRING), NO_DEFAULT("original", STRING),
                                    NO_DEFAULT("params", FLOATS),  NO_DEFAULT("draws", INTS),
                                    NO_DEFAULT("types", INTS),     NO_DEFAULT("letters", INTS),
                                    NO_DEFAULT("shape", INTS),     NO_DEFAULT("kept", INT),
                                    NO_DEFAULT("programs", INT),   {.name = NULL}};

#define KERNEL(name_, flags_)                                                                                          \
    .name = name_, .domain = ORT_DOMAIN, .since = 1, .max_in = VARIADIC, .max_out = VARIADIC, .plain = ALL_OPERANDS,   \
    .flags = STRIDED | KEEP | (flags_), .attrs = triton_attrs, .infer = infer_triton, .cpu = triton_cpu,               \
    .cuda = triton_cuda

/* clang-format off */
const op_def triton_ops[] = {
    {KERNEL("TritonChain", 0)},
    {KERNEL("TritonChainRandom", RANDOM)},
    {0},
};
/* clang-format on */
