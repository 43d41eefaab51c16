/* tensor.c -- reads the elements of a TensorProto: as raw bytes, or as a list of one of its four number types. */
#include "onnx/tensor.h"

#include <inttypes.h>
#include <string.h>

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "raw_data is little-endian and is copied as it is");

/* --- reading ------------------------------------------------------------------------------------------------------ */

/* The list that elements of a type are stored in, when they are not raw. */
typedef enum list { LIST_FLOAT, LIST_DOUBLE, LIST_INT64, LIST_INT32, LISTS } list;

static list list_of(dtype type) {
    return type == F32 ? LIST_FLOAT : type == F64 ? LIST_DOUBLE : type == I64 ? LIST_INT64 : LIST_INT32;
}

static size_t list_length(const Onnx__TensorProto *p, list which) {
    const size_t lengths[LISTS] = {p->n_float_data, p->n_double_data, p->n_int64_data, p->n_int32_data};
    return lengths[which];
}

static size_t lists_length(const Onnx__TensorProto *p) {
    size_t n = p->n_string_data + p->n_uint64_data;
    for (list l = 0; l < LISTS; l++) n += list_length(p, l);
    return n;
}

bool onnx_tensor_has_data(const Onnx__TensorProto *p) {
    bool external = p->n_external_data || (p->has_data_location && p->data_location);
    bool empty = false;
    for (size_t i = 0; i < p->n_dims; i++) empty |= p->dims[i] == 0;
    return empty || external || p->raw_data.len || lists_length(p);
}

static status check_shape(ctx *c, const Onnx__TensorProto *p, shape *s) {
    if (p->n_dims > MAX_RANK)
        return fail(c, E_UNSUPPORTED, "a tensor of rank %zu; at most %d are supported", p->n_dims, MAX_RANK);
    *s = (shape){.rank = (int)p->n_dims};
    for (size_t i = 0; i < p->n_dims; i++) {
        if (p->dims[i] < 0)
            return fail(c, E_INVALID, "dimension %zu of a tensor has the negative size %" PRId64, i, p->dims[i]);
        s->dim[i] = p->dims[i];
    }
    return shape_check(c, s);
}

status onnx_tensor_check(ctx *c, const Onnx__TensorProto *p, dtype *type, shape *s) {
    size_t raw = p->raw_data.len, listed = lists_length(p), expected;

    *type = dtype_from_onnx(p->data_type);
    if (*type == DT_NONE) return fail(c, E_UNSUPPORTED, "a tensor of ONNX element type %d", (int)p->data_type);
    if (p->n_external_data || (p->has_data_location && p->data_location))
        return fail(c, E_UNSUPPORTED, "a tensor whose data lies in another file");
    if (p->segment) return fail(c, E_UNSUPPORTED, "a tensor stored in segments");
    TRY(check_shape(c, p, s));

    expected = (size_t)shape_count(s);
    if (raw && listed) return fail(c, E_INVALID, "a tensor that has its data twice, raw and as a list");
    if (raw || !listed) {
        expected *= dtype_size(*type);
        if (raw != expected) return fail(c, E_INVALID, "a tensor of %zu bytes has %zu bytes of data", expected, raw);
        return OK;
    }
    if (listed != list_length(p, list_of(*type)))
        return fail(c, E_INVALID, "a tensor of %s has data of another type", dtype_name(*type));
    if (listed != expected)
        return fail(c, E_INVALID, "a tensor of %zu elements has %zu elements of data", expected, listed);
    return OK;
}

/* Narrow integers, and the bits of 16-bit floats, are the low bytes of an int32. */
static void copy_narrow(const Onnx__TensorProto *p, dtype type, unsigned char *to) {
    size_t size = dtype_size(type);
    for (size_t i = 0; i < p->n_int32_data; i++) {
        int32_t x = type == BOOL ? p->int32_data[i] != 0 : p->int32_data[i];
        memcpy(to + i * size, &x, size);
    }
}

void onnx_tensor_copy(const Onnx__TensorProto *p, dtype type, void *to) {
    const void *const lists[LISTS] = {p->float_data, p->double_data, p->int64_data};
    list which = list_of(type);
    size_t n = list_length(p, which), raw = p->raw_data.len;
    unsigned char *truth = to;

    if (raw) memcpy(to, p->raw_data.data, raw);
    else if (which == LIST_INT32) copy_narrow(p, type, to);
    else if (n) memcpy(to, lists[which], n * dtype_size(type));
    for (size_t i = 0; type == BOOL && i < raw; i++) truth[i] = truth[i] != 0;
}

/* --- writing ------------------------------------------------------------------------------------------------------ */

status onnx_tensor_make(ctx *c, const char *name, dtype type, const shape *s, const void *data,
                        Onnx__TensorProto **out) {
    Onnx__TensorProto *p;

    TRY(NEW(c, p, 1));
    onnx__tensor_proto__init(p);
    p->name = (char *)(uintptr_t)name;
    p->has_data_type = 1;
    p->data_type = dtype_table[type].onnx;
    p->n_dims = (size_t)s->rank;
    TRY(NEW(c, p->dims, s->rank));
    memcpy(p->dims, s->dim, (size_t)s->rank * sizeof *p->dims);
    p->has_raw_data = 1;
    p->raw_data.len = (size_t)shape_count(s) * dtype_size(type);
    p->raw_data.data = (uint8_t *)(uintptr_t)data;
    *out = p;
    return OK;
}
