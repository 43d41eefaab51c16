/* read.c -- reads ONNX bytes into a model graph: names become pointers, nodes get records, and what these do not
 * allow is refused with a sentence that names the node. */
#include "onnx/read.h"

#include "onnx/names.h"
#include "onnx/scan.h"
#include "onnx/tensor.h"
#include "ops/op.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { OLDEST_OPSET = 7, NEWEST_OPSET = 26, MOST_MISSING = 24 };

/* An operator of the file, and how far reading it has come. */
typedef struct step {
    const Onnx__NodeProto *file;
    const char *name;
    const op_def *op; /* NULL: a constant, which is no node here */
    size_t operand;   /* the next one to look at while sorting */
    enum { UNSEEN, OPEN, DONE } state;
} step;

typedef struct missing {
    const char *domain, *op;
    int count;
} missing;

typedef struct reader {
    ctx *c;
    graph *g;
    const Onnx__GraphProto *file;
    name_table names;
    step *steps; /* as in the file */
    int n_steps;
    missing missing[MOST_MISSING];
    int n_missing, n_more; /* n_more: nodes of operators that found no place */
} reader;

static const char *text(const char *s) { return s ? s : ""; }

/* "ai.onnx" is the default domain's other name. */
static const char *domain_of(const char *s) { return !s || strcmp(s, "ai.onnx") == 0 ? "" : s; }

/* --- names ---------------------------------------------------------------------------------------------------------- */

static name_entry *look_up(const reader *r, const char *name) { return names_find(&r->names, name); }

static status define(reader *r, const char *name, value *v, int maker, name_entry **out) {
    name_entry *e;

    if (!*name) return fail(r->c, E_INVALID, "a value without a name");
    e = look_up(r, name);
    if (e->name) return fail(r->c, E_INVALID, "two values have the name \"%s\"", name);
    *e = (name_entry){name, v, maker};
    if (out) *out = e;
    return OK;
}

static status copy_name(reader *r, value *v, const char *name) {
    v->name = arena_text(r->c, name, strlen(name));
    return v->name ? OK : E_NOMEM;
}

/* --- inputs and constants ------------------------------------------------------------------------------------------- */

static status read_dims(reader *r, const Onnx__TensorShapeProto *dims, shape *s) {
    if (dims->n_dim > MAX_RANK)
        return fail(r->c, E_UNSUPPORTED, "it has rank %zu; at most %d are supported", dims->n_dim, MAX_RANK);
    s->rank = (int)dims->n_dim;
    for (int i = 0; i < s->rank; i++) {
        const Onnx__TensorShapeProto__Dimension *d = dims->dim[i];
        bool known = d->value_case == ONNX__TENSOR_SHAPE_PROTO__DIMENSION__VALUE_DIM_VALUE;
        if (known && d->dim_value < 0)
            return fail(r->c, E_INVALID, "dimension %d has the negative size %" PRId64, i, d->dim_value);
        s->dim[i] = known ? d->dim_value : -1;
    }
    return OK;
}

static status read_type(reader *r, const Onnx__ValueInfoProto *info, dtype *type, shape *s) {
    const Onnx__TypeProto *t = info->type;

    *type = DT_NONE;
    *s = (shape){.rank = -1};
    if (!t || t->value_case == ONNX__TYPE_PROTO__VALUE__NOT_SET) return OK;
    if (t->value_case != ONNX__TYPE_PROTO__VALUE_TENSOR_TYPE)
        return fail(r->c, E_UNSUPPORTED, "it is not a tensor but a sequence, map, optional or sparse value");
    if (t->tensor_type->elem_type) {
        *type = dtype_from_onnx(t->tensor_type->elem_type);
        if (*type == DT_NONE)
            return fail(r->c, E_UNSUPPORTED, "it has ONNX element type %d", (int)t->tensor_type->elem_type);
    }
    return t->tensor_type->shape ? read_dims(r, t->tensor_type->shape, s) : OK;
}

static status read_constant(reader *r, const char *name, const Onnx__TensorProto *p, value **out) {
    dtype type;
    shape s;

    TRY(onnx_tensor_check(r->c, p, &type, &s));
    TRY(graph_add_constant(r->g, type, &s, NULL, out));
    onnx_tensor_copy(p, type, (void *)(uintptr_t)(*out)->data);
    return copy_name(r, *out, name);
}

static status read_initializer(reader *r, const Onnx__TensorProto *p) {
    const char *name = text(p->name);
    name_entry *e = look_up(r, name);

    if (!onnx_tensor_has_data(p)) return e->name ? OK : fail(r->c, E_INVALID, "it has no data and is no input");
    if (!e->name) TRY(define(r, name, NULL, -1, &e));
    if (e->v) return fail(r->c, E_INVALID, "two initializers have this name");
    return read_constant(r, name, p, &e->v);
}

static status read_input(reader *r, const Onnx__ValueInfoProto *info) {
    name_entry *e = look_up(r, text(info->name));
    dtype type;
    shape s;

    if (e->v) return OK; /* an initializer */
    TRY(read_type(r, info, &type, &s));
    return graph_add_input(r->g, e->name, type, &s, &e->v);
}

static status read_inputs(reader *r) {
    const Onnx__GraphProto *f = r->file;

    if (f->n_sparse_initializer) return fail(r->c, E_UNSUPPORTED, "the model has sparse initializers");
    for (size_t i = 0; i < f->n_input; i++)
        TRY_AT(r->c, define(r, text(f->input[i]->name), NULL, -1, NULL), "reading input %zu", i);
    for (size_t i = 0; i < f->n_initializer; i++)
        TRY_AT(r->c, read_initializer(r, f->initializer[i]), "reading initializer %s", text(f->initializer[i]->name));
    for (size_t i = 0; i < f->n_input; i++)
        TRY_AT(r->c, read_input(r, f->input[i]), "reading input %s", text(f->input[i]->name));
    return OK;
}

/* --- attributes ----------------------------------------------------------------------------------------------------- */

typedef Onnx__AttributeProto attribute;

/* 0: a kind that no operator here has. */
static attr_kind kind_of(const attribute *p) {
    switch (p->type) {
    case ONNX__ATTRIBUTE_PROTO__ATTRIBUTE_TYPE__INT: return ATTR_INT;
    case ONNX__ATTRIBUTE_PROTO__ATTRIBUTE_TYPE__FLOAT: return ATTR_FLOAT;
    case ONNX__ATTRIBUTE_PROTO__ATTRIBUTE_TYPE__STRING: return ATTR_STRING;
    case ONNX__ATTRIBUTE_PROTO__ATTRIBUTE_TYPE__STRINGS: return ATTR_STRING;
    case ONNX__ATTRIBUTE_PROTO__ATTRIBUTE_TYPE__INTS: return ATTR_INTS;
    case ONNX__ATTRIBUTE_PROTO__ATTRIBUTE_TYPE__FLOATS: return ATTR_FLOATS;
    case ONNX__ATTRIBUTE_PROTO__ATTRIBUTE_TYPE__TENSOR: return ATTR_TENSOR;
    default: return 0;
    }
}

static status read_string(reader *r, const ProtobufCBinaryData *s, const char **out) {
    if (!text_is_valid(s->data, s->len)) return fail(r->c, E_INVALID, "it is not UTF-8 text");
    *out = arena_text(r->c, (const char *)s->data, s->len);
    return *out ? OK : E_NOMEM;
}

/* A list of words is one text, with spaces in between. */
static status read_words(reader *r, const attribute *p, const char **out) {
    size_t length = 1;
    char *words;

    for (size_t i = 0; i < p->n_strings; i++) length += p->strings[i].len + 1;
    TRY(NEW(r->c, words, length));
    *out = words;
    for (size_t i = 0; i < p->n_strings; i++) {
        const ProtobufCBinaryData *s = &p->strings[i];
        if (!text_is_valid(s->data, s->len)) return fail(r->c, E_INVALID, "it is not UTF-8 text");
        if (i) *words++ = ' ';
        if (s->len) memcpy(words, s->data, s->len);
        words += s->len;
    }
    return OK;
}

/* Attributes are float32 in the file, but what was meant is the decimal number that user code wrote in Python, and a
 * float64 model computes with that: 1e-5, not 9.99999974738e-06. It is the shortest decimal that rounds to `x`. */
static double decimal(float x) {
    char digits[32];

    for (int precision = 1; precision < 9; precision++) {
        snprintf(digits, sizeof digits, "%.*g", precision, (double)x);
        if (strtof(digits, NULL) == x) return strtod(digits, NULL);
    }
    return (double)x;
}

static status read_floats(reader *r, const attribute *p, attr *a) {
    double *floats;
    TRY(NEW(r->c, floats, p->n_floats));
    for (size_t i = 0; i < p->n_floats; i++) floats[i] = decimal(p->floats[i]);
    a->floats = floats;
    a->count = (int)p->n_floats;
    return OK;
}

static status read_tensor(reader *r, const attribute *p, attr *a) {
    tensor *t;

    if (!p->t) return fail(r->c, E_INVALID, "it has no tensor");
    TRY(NEW(r->c, t, 1));
    TRY(onnx_tensor_check(r->c, p->t, &t->type, &t->shape));
    if (!(t->data = arena_array(r->c, (size_t)shape_count(&t->shape), dtype_size(t->type)))) return E_NOMEM;
    onnx_tensor_copy(p->t, t->type, t->data);
    stride_contiguous(&t->shape, t->stride);
    a->t = t;
    return OK;
}

static status read_attr(reader *r, const attribute *p, attr *a) {
    *a = (attr){.name = text(p->name), .kind = kind_of(p)};
    if (!*a->name) return fail(r->c, E_INVALID, "it has no name");
    if (p->ref_attr_name) return fail(r->c, E_UNSUPPORTED, "it refers to an attribute of a function");
    switch (a->kind) {
    case ATTR_INT: a->i = p->i; return OK;
    case ATTR_FLOAT: a->f = decimal(p->f); return OK;
    case ATTR_STRING: return p->n_strings ? read_words(r, p, &a->s) : read_string(r, &p->s, &a->s);
    case ATTR_INTS:
        a->ints = p->ints;
        a->count = (int)p->n_ints;
        return OK;
    case ATTR_FLOATS: return read_floats(r, p, a);
    case ATTR_TENSOR: return read_tensor(r, p, a);
    }
    if (p->g || p->n_graphs) return fail(r->c, E_UNSUPPORTED, "it holds a subgraph");
    return fail(r->c, p->type ? E_UNSUPPORTED : E_INVALID, "it is of ONNX attribute type %d", (int)p->type);
}

static status read_attrs(reader *r, const step *s, attr **out) {
    attr *list;

    TRY(NEW(r->c, list, s->file->n_attribute + 1));
    for (size_t i = 0; i < s->file->n_attribute; i++) {
        const attribute *p = s->file->attribute[i];
        TRY_AT(r->c, read_attr(r, p, &list[i]), "reading attribute %s", text(p->name));
        TRY(attr_check(r->c, s->op, &list[i]));
        for (size_t k = 0; k < i; k++)
            if (strcmp(list[k].name, list[i].name) == 0)
                return fail(r->c, E_INVALID, "attribute %s is given twice", list[i].name);
    }
    *out = list;
    return OK;
}

/* --- constant nodes ------------------------------------------------------------------------------------------------- */

/* A number or a list of numbers given as an attribute. */
static status constant_numbers(reader *r, const attr *a, value **out) {
    static const char *const known[] = {
        [ATTR_INT] = "value_int",   [ATTR_FLOAT] = "value_float",   [ATTR_STRING] = "",
        [ATTR_INTS] = "value_ints", [ATTR_FLOATS] = "value_floats", [ATTR_TENSOR] = "",
    };
    bool listed = a->kind == ATTR_INTS || a->kind == ATTR_FLOATS;
    bool floats = a->kind == ATTR_FLOAT || a->kind == ATTR_FLOATS;
    shape s = listed ? SHAPE(a->count) : SCALAR;
    void *data;

    if (strcmp(a->name, known[a->kind]) != 0) return fail(r->c, E_UNSUPPORTED, "a constant given as %s", a->name);
    TRY(graph_add_constant(r->g, floats ? F32 : I64, &s, NULL, out));
    data = (void *)(uintptr_t)(*out)->data;
    for (int64_t i = 0; i < shape_count(&s); i++)
        if (floats) dtype_set_value(F32, data, i, listed ? a->floats[i] : a->f);
        else dtype_set_int(I64, data, i, listed ? a->ints[i] : a->i);
    return OK;
}

static status read_constant_node(reader *r, const step *s, value **out) {
    const attribute *p;
    attr a;

    if (s->file->n_input || s->file->n_output != 1 || s->file->n_attribute != 1)
        return fail(r->c, E_INVALID, "a constant has no operands, one result and one attribute");
    p = s->file->attribute[0];
    if (p->t && strcmp(text(p->name), "value") == 0) return read_constant(r, s->file->output[0], p->t, out);
    TRY_AT(r->c, read_attr(r, p, &a), "reading attribute %s", text(p->name));
    TRY(constant_numbers(r, &a, out));
    return copy_name(r, *out, s->file->output[0]);
}

/* --- operators ------------------------------------------------------------------------------------------------------ */

static void note_missing(reader *r, const char *domain, const char *op) {
    missing *m = r->missing, *end = m + r->n_missing;

    while (m < end && (strcmp(m->op, op) != 0 || strcmp(m->domain, domain) != 0)) m++;
    if (m == r->missing + MOST_MISSING) {
        r->n_more++;
        return;
    }
    if (m == end) *m = (missing){domain, op, 0};
    r->n_missing += m == end;
    m->count++;
}

static status refuse_missing(reader *r) {
    char list[ERR_TEXT];
    size_t used = 0;

    if (!r->n_missing) return OK;
    list[0] = '\0';
    for (int i = 0; i < r->n_missing && used < sizeof list; i++) {
        const missing *m = &r->missing[i];
        used += (size_t)snprintf(list + used, sizeof list - used, "%s%s%s%s (%d)", i ? ", " : "", m->domain,
                                 *m->domain ? "::" : "", m->op, m->count);
    }
    if (r->n_more && used < sizeof list)
        snprintf(list + used, sizeof list - used, " and %d nodes of others", r->n_more);
    return fail(r->c, E_UNSUPPORTED, "at opset %d there is no implementation of these operators (number of nodes): %s",
                r->g->opset, list);
}

static status name_step(reader *r, step *s, int index) {
    size_t room = strlen(text(s->file->op_type)) + 16;
    char *name;

    s->name = text(s->file->name);
    if (*s->name) return OK;
    if (!(name = arena_array(r->c, room, 1))) return E_NOMEM;
    snprintf(name, room, "%s_%d", text(s->file->op_type), index);
    s->name = name;
    return OK;
}

/* Finds the record and announces the results' names; a constant is made at once. */
static status announce(reader *r, step *s, int index) {
    const char *domain = domain_of(s->file->domain), *op = text(s->file->op_type);
    bool constant = !*domain && strcmp(op, "Constant") == 0;
    value *v = NULL;

    if (constant) {
        TRY(read_constant_node(r, s, &v));
        s->state = DONE;
    } else {
        s->op = op_find(domain, op, r->g->opset);
        if (s->op && strcmp(domain, ORT_DOMAIN) == 0 && !(s->op->flags & IN_MODELS)) s->op = NULL;
        if (!s->op) note_missing(r, domain, op);
    }
    for (size_t i = 0; i < s->file->n_output; i++)
        if (*s->file->output[i] || constant) TRY(define(r, s->file->output[i], v, index, NULL));
    return OK;
}

static status announce_all(reader *r) {
    TRY(NEW(r->c, r->steps, r->file->n_node));
    r->n_steps = (int)r->file->n_node;
    for (int i = 0; i < r->n_steps; i++) {
        step *s = &r->steps[i];
        s->file = r->file->node[i];
        TRY(name_step(r, s, i));
        TRY_AT(r->c, announce(r, s, i), "reading %s (%s)", s->name, text(s->file->op_type));
    }
    return refuse_missing(r);
}

/* --- nodes ---------------------------------------------------------------------------------------------------------- */

/* Without the absent ones at the end. */
static int count_names(char *const *list, size_t n) {
    while (n && !*list[n - 1]) n--;
    return (int)n;
}

static status check_arity(reader *r, const op_def *op, int n_in, int n_out) {
    if (n_in < op->min_in || (op->max_in != VARIADIC && n_in > op->max_in)) {
        if (op->max_in == VARIADIC)
            return fail(r->c, E_INVALID, "it has %d operands; %s takes at least %d", n_in, op->name, op->min_in);
        return fail(r->c, E_INVALID, "it has %d operands; %s takes %d to %d", n_in, op->name, op->min_in, op->max_in);
    }
    if (!n_out) return fail(r->c, E_INVALID, "it has no results");
    if (op->max_out != VARIADIC && n_out > op->max_out)
        return fail(r->c, E_INVALID, "it has %d results; %s has at most %d", n_out, op->name, op->max_out);
    return OK;
}

/* Adds the node; its operands exist. */
static status add_step(reader *r, const step *s) {
    int n_in = count_names(s->file->input, s->file->n_input), n_out = count_names(s->file->output, s->file->n_output);
    attr *attrs = NULL;
    value **in;
    node *n;

    TRY(check_arity(r, s->op, n_in, n_out));
    TRY(read_attrs(r, s, &attrs));
    TRY(NEW(r->c, in, n_in));
    for (int i = 0; i < n_in; i++)
        if (*s->file->input[i]) in[i] = look_up(r, s->file->input[i])->v;
    TRY(graph_add_node(r->g, s->op, s->name, attrs, n_in, in, n_out, &n));
    for (int i = 0; i < n_out; i++) {
        const char *name = s->file->output[i];
        if (*name) {
            TRY(copy_name(r, n->out[i], name));
            look_up(r, name)->v = n->out[i];
        } else {
            n->out[i] = NULL;
        }
    }
    return OK;
}

/* The node that makes the next operand of `s` that does not exist yet; NULL when all do. */
static status next_unmade(reader *r, step *s, step **out) {
    *out = NULL;
    while (!*out && s->operand < s->file->n_input) {
        const char *name = s->file->input[s->operand++];
        const name_entry *e = look_up(r, name);
        if (!*name) continue;
        if (!e->name) return fail(r->c, E_INVALID, "operand %zu, \"%s\", is defined nowhere", s->operand - 1, name);
        if (!e->v) *out = &r->steps[e->maker];
    }
    if (*out && (*out)->state == OPEN)
        return fail(r->c, E_INVALID, "it is part of a cycle: it needs the result of %s, which needs its own",
                    (*out)->name);
    return OK;
}

/* Adds `first` after everything it needs, depth first. */
static status add_with_operands(reader *r, step *first, step **stack) {
    int depth = 0;

    if (first->state == DONE) return OK;
    stack[0] = first;
    while (depth >= 0) {
        step *s = stack[depth], *needed;
        s->state = OPEN;
        TRY_AT(r->c, next_unmade(r, s, &needed), "reading %s (%s)", s->name, s->op->name);
        if (needed) {
            stack[++depth] = needed;
            continue;
        }
        TRY_AT(r->c, add_step(r, s), "reading %s (%s)", s->name, s->op->name);
        s->state = DONE;
        depth--;
    }
    return OK;
}

static status read_nodes(reader *r) {
    step **stack;

    TRY(announce_all(r));
    TRY(NEW(r->c, stack, r->n_steps));
    for (int i = 0; i < r->n_steps; i++) TRY(add_with_operands(r, &r->steps[i], stack));
    return OK;
}

/* --- the whole ------------------------------------------------------------------------------------------------------ */

static status read_output(reader *r, const Onnx__ValueInfoProto *info) {
    value *v = look_up(r, text(info->name))->v;

    if (!v) return fail(r->c, E_INVALID, "nothing in the graph has this name");
    if (v->def) TRY(read_type(r, info, &v->type, &v->shape));
    return graph_add_output(r->g, v);
}

static status read_opset(reader *r, const Onnx__ModelProto *model) {
    int64_t opset = 0;

    for (size_t i = 0; i < model->n_opset_import; i++) {
        const Onnx__OperatorSetIdProto *set = model->opset_import[i];
        if (*domain_of(set->domain)) continue;
        if (opset && opset != set->version)
            return fail(r->c, E_INVALID, "the model names two opsets, %" PRId64 " and %" PRId64, opset, set->version);
        opset = set->version;
    }
    if (opset < OLDEST_OPSET || opset > NEWEST_OPSET)
        return fail(r->c, E_INVALID, "the model is of opset %" PRId64 "; %d to %d can be read", opset, OLDEST_OPSET,
                    NEWEST_OPSET);
    r->g->opset = (int)opset;
    return OK;
}

static status read_model(reader *r, const Onnx__ModelProto *model) {
    size_t n_names;

    if (!model->graph) return fail(r->c, E_INVALID, "not an ONNX model: it has no graph");
    if (model->n_functions)
        return fail(r->c, E_UNSUPPORTED, "the model defines functions, \"%s\" and %zu more",
                    text(model->functions[0]->name), model->n_functions - 1);
    r->file = model->graph;
    n_names = r->file->n_input + r->file->n_initializer;
    TRY(read_opset(r, model));
    for (size_t i = 0; i < r->file->n_node; i++) n_names += r->file->node[i]->n_output;
    TRY(names_new(r->c, n_names, &r->names));
    TRY(read_inputs(r));
    TRY(read_nodes(r));
    for (size_t i = 0; i < r->file->n_output; i++)
        TRY_AT(r->c, read_output(r, r->file->output[i]), "reading output %s", text(r->file->output[i]->name));
    return OK;
}

/* The file's messages live in a context of their own, gone when the graph is made. */
static void *take(void *scratch, size_t size) { return arena_array(scratch, size, 1); }
static void give_back(void *scratch, void *memory) { (void)scratch, (void)memory; }

static status parse(ctx *c, ctx *scratch, const void *bytes, size_t n, Onnx__ModelProto **out) {
    ProtobufCAllocator allocator = {take, give_back, scratch};

    scratch->mem.fail_after = c->mem.fail_after;
    *out = onnx__model_proto__unpack(&allocator, n, bytes);
    c->mem.fail_after = scratch->mem.fail_after;
    if (scratch->err.code) return fail(c, scratch->err.code, "%s", scratch->err.text);
    return *out ? OK : fail(c, E_INVALID, "not an ONNX model: its bytes do not parse");
}

status onnx_read(ctx *c, const void *bytes, size_t n, graph **out) {
    reader r = {.c = c};
    ctx scratch;
    Onnx__ModelProto *model;
    status s;

    TRY(onnx_scan(c, bytes, n));
    TRY(graph_new(c, &r.g));
    ctx_init(&scratch);
    s = parse(c, &scratch, bytes, n, &model);
    if (s == OK) s = read_model(&r, model);
    ctx_release(&scratch);
    *out = s == OK ? r.g : NULL;
    return s;
}
