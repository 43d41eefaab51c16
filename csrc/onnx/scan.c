/* scan.c -- walks over the wire format once, before the protobuf library parses it.
 *
 * The library recurses as deep as the file says, keeps a copy of every field it does not know, and needs up to a few
 * hundred bytes for a message of two. So a small hostile file could overflow the stack or fill the memory. Here a
 * stack of fixed size replaces recursion, and the memory that parsing would take is added up beforehand.
 *
 * Which fields are messages is read from the descriptors that the library itself parses by. */
#include "onnx/scan.h"

#include "onnx-ml.pb-c.h"

#include <inttypes.h>

enum {
    MAX_DEPTH = 64,       /* messages within messages; a subgraph takes three */
    MAX_UNKNOWN = 65536,  /* fields of newer versions of the format */
    ALLOCATION = 64,      /* the arena's alignment */
    FIELD_RECORD = 80,    /* what the library notes of each field while it parses a message, at worst */
    UNKNOWN_RECORD = 128, /* the same for one it does not know */
    MAX_FACTOR = 32,      /* memory for parsing over bytes of the file: exported models need 8 to 12 */
    FREE_MEMORY = 32 << 20,
};

enum { WIRE_VARINT = 0, WIRE_64 = 1, WIRE_BYTES = 2, WIRE_32 = 5 };

typedef struct level {
    const ProtobufCMessageDescriptor *type;
    const uint8_t *end;
    uint64_t seen; /* fields that may come once, by index */
} level;

typedef struct scanner {
    ctx *c;
    const uint8_t *start, *at;
    size_t memory, max_memory;
    int unknown, depth;
    level stack[MAX_DEPTH]; /* stack[depth] is the message being read */
} scanner;

/* --- text --------------------------------------------------------------------------------------------------------- */

bool text_is_valid(const uint8_t *s, size_t length) {
    static const uint32_t smallest[] = {1, 0x80, 0x800, 0x10000}; /* by number of continuation bytes; no NUL */

    for (size_t i = 0; i < length;) {
        uint32_t code = s[i++];
        int more = code < 0x80 ? 0 : code >= 0xf0 ? 3 : code >= 0xe0 ? 2 : 1;
        if ((code >= 0x80 && code < 0xc0) || code >= 0xf8 || (size_t)more > length - i) return false;
        if (more) code &= 0x3fu >> more;
        for (int k = 0; k < more; k++, i++) {
            if ((s[i] & 0xc0) != 0x80) return false;
            code = code << 6 | (s[i] & 0x3fu);
        }
        if (code < smallest[more] || code > 0x10ffff || (code >= 0xd800 && code < 0xe000)) return false;
    }
    return true;
}

/* --- pieces of the wire format -------------------------------------------------------------------------------------- */

static level *top(scanner *s) { return &s->stack[s->depth]; }

static status malformed(scanner *s, const char *what) {
    return fail(s->c, E_INVALID, "not an ONNX model: %s (%s, byte %zu)", what, top(s)->type->short_name,
                (size_t)(s->at - s->start));
}

static status read_varint(scanner *s, uint64_t *out) {
    const uint8_t *end = top(s)->end;

    *out = 0;
    for (int shift = 0; s->at < end; shift += 7) {
        uint64_t byte = *s->at++;
        if (shift == 63 && byte > 1) return malformed(s, "a number of more than 64 bits");
        *out |= (byte & 0x7f) << shift;
        if (byte < 0x80) return OK;
    }
    return malformed(s, "the bytes end inside a number");
}

static status skip(scanner *s, uint64_t length) {
    if (length > (uint64_t)(top(s)->end - s->at)) return malformed(s, "a field runs past the end of its message");
    s->at += length;
    return OK;
}

static status spend(scanner *s, size_t bytes) {
    s->memory += bytes;
    return s->memory <= s->max_memory ? OK : malformed(s, "far more fields than a model of this size has");
}

/* Memory of one allocation of `n` bytes and of one place in a list. */
static size_t allocation(size_t n) { return (n + ALLOCATION - 1) / ALLOCATION * ALLOCATION + sizeof(void *); }

/* --- fields --------------------------------------------------------------------------------------------------------- */

static unsigned wire_of(ProtobufCType type) {
    switch (type) {
    case PROTOBUF_C_TYPE_FLOAT:
    case PROTOBUF_C_TYPE_FIXED32:
    case PROTOBUF_C_TYPE_SFIXED32: return WIRE_32;
    case PROTOBUF_C_TYPE_DOUBLE:
    case PROTOBUF_C_TYPE_FIXED64:
    case PROTOBUF_C_TYPE_SFIXED64: return WIRE_64;
    case PROTOBUF_C_TYPE_STRING:
    case PROTOBUF_C_TYPE_BYTES:
    case PROTOBUF_C_TYPE_MESSAGE: return WIRE_BYTES;
    default: return WIRE_VARINT;
    }
}

static status enter(scanner *s, const ProtobufCMessageDescriptor *type, uint64_t length) {
    if (s->depth + 1 == MAX_DEPTH) return malformed(s, "messages nested more than 64 deep");
    s->depth++;
    *top(s) = (level){.type = type, .end = s->at + length};
    return spend(s, allocation(type->sizeof_message));
}

/* A string, bytes, a message, or a packed list of numbers. */
static status scan_bytes(scanner *s, const ProtobufCFieldDescriptor *field, uint64_t length) {
    const uint8_t *text = s->at;

    if (length > (uint64_t)(top(s)->end - s->at)) return skip(s, length);
    if (field->type == PROTOBUF_C_TYPE_MESSAGE) return enter(s, field->descriptor, length);
    s->at += length;
    if (field->type == PROTOBUF_C_TYPE_STRING && !text_is_valid(text, (size_t)length))
        return malformed(s, "a name that is not UTF-8 text");
    /* A packed number takes eight times its byte at worst. */
    return spend(s, allocation((size_t)length * (wire_of(field->type) == WIRE_VARINT ? 8 : 1) + 1));
}

static status scan_unknown(scanner *s, uint64_t length) {
    if (++s->unknown > MAX_UNKNOWN) return malformed(s, "too many unknown fields");
    TRY(skip(s, length));
    return spend(s, UNKNOWN_RECORD + (size_t)length);
}

static status check_known(scanner *s, const ProtobufCFieldDescriptor *field, unsigned wire) {
    bool repeated = field->label == PROTOBUF_C_LABEL_REPEATED;
    uint64_t bit = UINT64_C(1) << ((field - top(s)->type->fields) & 63);
    unsigned expected = wire_of(field->type);

    if (wire != expected && !(repeated && wire == WIRE_BYTES)) return malformed(s, "a field of the wrong kind");
    if (repeated) return OK;
    if (top(s)->seen & bit) return malformed(s, "a field that may come once comes twice");
    top(s)->seen |= bit;
    return OK;
}

static status scan_field(scanner *s) {
    const ProtobufCFieldDescriptor *field;
    uint64_t tag, length = 0;
    unsigned wire;

    TRY(read_varint(s, &tag));
    wire = (unsigned)(tag & 7);
    if (tag > UINT32_MAX || tag >> 3 == 0) return malformed(s, "a field without a valid number");
    field = protobuf_c_message_descriptor_get_field(top(s)->type, (unsigned)(tag >> 3));
    if (field) TRY(check_known(s, field, wire));
    TRY(spend(s, FIELD_RECORD));
    switch (wire) {
    case WIRE_VARINT: TRY(read_varint(s, &tag)); break;
    case WIRE_64: length = 8; break;
    case WIRE_32: length = 4; break;
    case WIRE_BYTES: TRY(read_varint(s, &length)); break;
    default: return malformed(s, "a field of an unknown wire type");
    }
    if (!field) return scan_unknown(s, length);
    return wire == WIRE_BYTES ? scan_bytes(s, field, length) : skip(s, length);
}

status onnx_scan(ctx *c, const void *bytes, size_t n) {
    scanner s = {.c = c, .start = bytes, .at = bytes};

    if (n > INT32_MAX) return fail(c, E_INVALID, "a model of %zu bytes: at most 2 GB can be read", n);
    s.max_memory = n * MAX_FACTOR + FREE_MEMORY;
    s.stack[0] = (level){.type = &onnx__model_proto__descriptor, .end = s.start + n};
    while (s.depth >= 0) {
        if (s.at == top(&s)->end) s.depth--;
        else TRY(scan_field(&s));
    }
    return OK;
}
