/* write.c -- writes a graph into ONNX bytes: messages that point into the graph, packed at once. */
#include "onnx/write.h"

#include "onnx/names.h"
#include "onnx/tensor.h"
#include "ops/op.h"

#include <stdio.h>
#include <string.h>

enum { IR_VERSION = 10, LEAST_OPSET = 7 };

typedef struct writer {
    ctx *c;
    const graph *g;
    Onnx__ModelProto *model;
    Onnx__GraphProto *file;
    name_table taken;
    const char **name; /* [value id] NULL: not written yet */
    bool *returned;    /* [value id] it is among the outputs */
} writer;

/* The library's structures are not const, but packing does not write to them. */
#define MUTABLE(pointer) ((void *)(uintptr_t)(pointer))

#define NEW_MESSAGE(c, pointer, init) (NEW(c, pointer, 1) == OK ? (init(pointer), OK) : E_NOMEM)

/* --- names ---------------------------------------------------------------------------------------------------------- */

static status make_name(writer *w, const value *v, const char **out) {
    size_t room = (v->name ? strlen(v->name) : 0) + 32;
    char *name;

    if (v->name && *v->name && !names_find(&w->taken, v->name)->name) {
        *out = v->name;
        return OK;
    }
    TRY(NEW(w->c, name, room));
    snprintf(name, room, "%s_%d", v->name ? v->name : "v", v->id);
    /* Another name of the model's may look like a made-up one. */
    for (int i = 0; names_find(&w->taken, name)->name; i++)
        snprintf(name, room, "%s_%d_%d", v->name ? v->name : "v", v->id, i);
    *out = name;
    return OK;
}

/* Gives `v` a name, and a constant its initializer. */
static status introduce(writer *w, const value *v) {
    Onnx__TensorProto **initializer = &w->file->initializer[w->file->n_initializer];

    if (w->name[v->id]) return OK;
    TRY(make_name(w, v, &w->name[v->id]));
    names_find(&w->taken, w->name[v->id])->name = w->name[v->id];
    if (!v->data) return OK;
    w->file->n_initializer++;
    return onnx_tensor_make(w->c, w->name[v->id], v->type, &v->shape, v->data, initializer);
}

/* --- types ---------------------------------------------------------------------------------------------------------- */

static status make_dims(ctx *c, const shape *s, Onnx__TensorShapeProto **out) {
    Onnx__TensorShapeProto *p;

    TRY(NEW_MESSAGE(c, p, onnx__tensor_shape_proto__init));
    TRY(NEW(c, p->dim, s->rank));
    p->n_dim = (size_t)s->rank;
    for (int i = 0; i < s->rank; i++) {
        TRY(NEW_MESSAGE(c, p->dim[i], onnx__tensor_shape_proto__dimension__init));
        if (s->dim[i] < 0) continue;
        p->dim[i]->value_case = ONNX__TENSOR_SHAPE_PROTO__DIMENSION__VALUE_DIM_VALUE;
        p->dim[i]->dim_value = s->dim[i];
    }
    *out = p;
    return OK;
}

static status make_type(ctx *c, const value *v, Onnx__TypeProto **out) {
    Onnx__TypeProto *p;
    Onnx__TypeProto__Tensor *t;

    TRY(NEW_MESSAGE(c, p, onnx__type_proto__init));
    TRY(NEW_MESSAGE(c, t, onnx__type_proto__tensor__init));
    p->value_case = ONNX__TYPE_PROTO__VALUE_TENSOR_TYPE;
    p->tensor_type = t;
    t->has_elem_type = v->type != DT_NONE;
    t->elem_type = dtype_table[v->type].onnx;
    if (v->shape.rank >= 0) TRY(make_dims(c, &v->shape, &t->shape));
    *out = p;
    return OK;
}

static bool is_typed(const value *v) { return v->type != DT_NONE || v->shape.rank >= 0; }

static status add_info(writer *w, const value *v, Onnx__ValueInfoProto **list, size_t *n) {
    Onnx__ValueInfoProto *p;

    TRY(NEW_MESSAGE(w->c, p, onnx__value_info_proto__init));
    p->name = MUTABLE(w->name[v->id]);
    if (is_typed(v)) TRY(make_type(w->c, v, &p->type));
    list[(*n)++] = p;
    return OK;
}

/* --- nodes ---------------------------------------------------------------------------------------------------------- */

static status make_floats(ctx *c, const attr *a, Onnx__AttributeProto *p) {
    TRY(NEW(c, p->floats, a->count));
    for (int i = 0; i < a->count; i++) p->floats[i] = (float)a->floats[i];
    p->n_floats = (size_t)a->count;
    return OK;
}

static status make_attr(ctx *c, const attr *a, Onnx__AttributeProto **out) {
    static const Onnx__AttributeProto__AttributeType types[] = {
        [ATTR_INT] = ONNX__ATTRIBUTE_PROTO__ATTRIBUTE_TYPE__INT,
        [ATTR_FLOAT] = ONNX__ATTRIBUTE_PROTO__ATTRIBUTE_TYPE__FLOAT,
        [ATTR_STRING] = ONNX__ATTRIBUTE_PROTO__ATTRIBUTE_TYPE__STRING,
        [ATTR_INTS] = ONNX__ATTRIBUTE_PROTO__ATTRIBUTE_TYPE__INTS,
        [ATTR_FLOATS] = ONNX__ATTRIBUTE_PROTO__ATTRIBUTE_TYPE__FLOATS,
        [ATTR_TENSOR] = ONNX__ATTRIBUTE_PROTO__ATTRIBUTE_TYPE__TENSOR,
    };
    Onnx__AttributeProto *p;

    TRY(NEW_MESSAGE(c, p, onnx__attribute_proto__init));
    *out = p;
    p->name = MUTABLE(a->name);
    p->has_type = 1;
    p->type = types[a->kind];
    switch (a->kind) {
    case ATTR_INT:
        p->has_i = 1;
        p->i = a->i;
        return OK;
    case ATTR_FLOAT:
        p->has_f = 1;
        p->f = (float)a->f;
        return OK;
    case ATTR_STRING:
        p->has_s = 1;
        p->s = (ProtobufCBinaryData){strlen(a->s), MUTABLE(a->s)};
        return OK;
    case ATTR_INTS:
        p->n_ints = (size_t)a->count;
        p->ints = MUTABLE(a->ints);
        return OK;
    case ATTR_FLOATS: return make_floats(c, a, p);
    case ATTR_TENSOR: return onnx_tensor_make(c, NULL, a->t->type, &a->t->shape, a->t->data, &p->t);
    }
    return OK;
}

static status make_attrs(ctx *c, const node *n, Onnx__NodeProto *p) {
    size_t count = 0;

    while (n->attrs && n->attrs[count].name) count++;
    TRY(NEW(c, p->attribute, count));
    for (; p->n_attribute < count; p->n_attribute++)
        TRY(make_attr(c, &n->attrs[p->n_attribute], &p->attribute[p->n_attribute]));
    return OK;
}

/* A result that is not asked for, or that this form of the operator does not have. */
static bool is_absent(const graph *g, const value *v) {
    return !v || (g->specialised && v->type == DT_NONE && !v->n_uses);
}

static status add_results(writer *w, const node *n, Onnx__NodeProto *p) {
    TRY(NEW(w->c, p->output, n->n_out));
    p->n_output = (size_t)n->n_out;
    for (int i = 0; i < n->n_out; i++) {
        const value *v = n->out[i];
        p->output[i] = MUTABLE("");
        if (is_absent(w->g, v)) continue;
        TRY(introduce(w, v));
        p->output[i] = MUTABLE(w->name[v->id]);
        if (is_typed(v) && !w->returned[v->id]) TRY(add_info(w, v, w->file->value_info, &w->file->n_value_info));
    }
    return OK;
}

static status add_node(writer *w, const node *n) {
    Onnx__NodeProto *p;

    TRY(NEW_MESSAGE(w->c, p, onnx__node_proto__init));
    p->name = MUTABLE(n->name);
    p->op_type = MUTABLE(n->op->name);
    if (*n->op->domain) p->domain = MUTABLE(n->op->domain);
    TRY(make_attrs(w->c, n, p));
    TRY(NEW(w->c, p->input, n->n_in));
    p->n_input = (size_t)n->n_in;
    for (int i = 0; i < n->n_in; i++) {
        if (n->in[i]) TRY(introduce(w, n->in[i]));
        p->input[i] = MUTABLE(n->in[i] ? w->name[n->in[i]->id] : "");
    }
    TRY(add_results(w, n, p));
    w->file->node[w->file->n_node++] = p;
    return OK;
}

/* --- what the graph gives back -------------------------------------------------------------------------------------- */

static status add_output(writer *w, const value *v) {
    TRY(introduce(w, v)); /* an output may be a constant */
    return add_info(w, v, w->file->output, &w->file->n_output);
}

static status add_extra(writer *w, const char *what, const value *of, const value *v) {
    size_t room = strlen(what) + strlen(w->name[of->id]) + 2;
    Onnx__StringStringEntryProto *p;

    if (!w->returned[v->id]) TRY(add_output(w, v));
    w->returned[v->id] = true;
    TRY(NEW_MESSAGE(w->c, p, onnx__string_string_entry_proto__init));
    TRY(NEW(w->c, p->key, room));
    snprintf(p->key, room, "%s %s", what, w->name[of->id]);
    p->value = MUTABLE(w->name[v->id]);
    w->model->metadata_props[w->model->n_metadata_props++] = p;
    return OK;
}

static status add_outputs(writer *w) {
    const graph *g = w->g;
    size_t most = (size_t)g->n_outputs * 2 + (size_t)g->n_input_grads;

    for (const state_write *s = g->writes; s; s = s->next) most++;
    TRY(NEW(w->c, w->file->output, most));
    TRY(NEW(w->c, w->model->metadata_props, most));
    for (int i = 0; i < g->n_outputs; i++) TRY(add_output(w, g->outputs[i]));
    for (const state_write *s = g->writes; s; s = s->next) TRY(add_extra(w, "new value of", s->input, s->value));
    for (int i = 0; i < g->n_input_grads; i++)
        if (g->input_grads[i]) TRY(add_extra(w, "gradient of", g->inputs[i], g->input_grads[i]));
    return OK;
}

/* --- the whole ------------------------------------------------------------------------------------------------------ */

static status add_opset(writer *w, const char *domain, int version) {
    Onnx__OperatorSetIdProto *p;

    TRY(NEW_MESSAGE(w->c, p, onnx__operator_set_id_proto__init));
    p->domain = MUTABLE(domain);
    p->has_version = 1;
    p->version = version;
    w->model->opset_import[w->model->n_opset_import++] = p;
    return OK;
}

static status make_model(writer *w) {
    const graph *g = w->g;
    int opset = g->opset > LEAST_OPSET ? g->opset : LEAST_OPSET;

    for (const node *n = g->first; n; n = n->next)
        if (!*n->op->domain && n->op->since > opset) opset = n->op->since;
    TRY(NEW_MESSAGE(w->c, w->model, onnx__model_proto__init));
    TRY(NEW_MESSAGE(w->c, w->file, onnx__graph_proto__init));
    w->model->has_ir_version = 1;
    w->model->ir_version = IR_VERSION;
    w->model->producer_name = MUTABLE("ortmodule");
    w->model->graph = w->file;
    w->file->name = MUTABLE("main");
    TRY(NEW(w->c, w->model->opset_import, 2));
    TRY(add_opset(w, "", opset));
    return add_opset(w, ORT_DOMAIN, 1);
}

static status fill_graph(writer *w) {
    const graph *g = w->g;
    Onnx__GraphProto *file = w->file;

    TRY(names_new(w->c, (size_t)g->n_values, &w->taken));
    TRY(NEW(w->c, w->name, g->n_values));
    TRY(NEW(w->c, w->returned, g->n_values));
    TRY(NEW(w->c, file->input, g->n_inputs));
    TRY(NEW(w->c, file->node, g->n_nodes));
    TRY(NEW(w->c, file->initializer, g->n_values));
    TRY(NEW(w->c, file->value_info, g->n_values));
    for (int i = 0; i < g->n_inputs; i++) {
        TRY(introduce(w, g->inputs[i]));
        TRY(add_info(w, g->inputs[i], file->input, &file->n_input));
    }
    for (int i = 0; i < g->n_outputs; i++) w->returned[g->outputs[i]->id] = true;
    for (const node *n = g->first; n; n = n->next) TRY(add_node(w, n));
    return add_outputs(w);
}

status onnx_write(ctx *c, const graph *g, const void **bytes, size_t *n) {
    writer w = {.c = c, .g = g};
    uint8_t *packed;

    TRY(make_model(&w));
    TRY(fill_graph(&w));
    *n = onnx__model_proto__get_packed_size(w.model);
    if (*n > INT32_MAX) return fail(c, E_INVALID, "a model of %zu bytes: ONNX files hold at most 2 GB", *n);
    TRY(NEW(c, packed, *n));
    onnx__model_proto__pack(w.model, packed);
    *bytes = packed;
    return OK;
}
