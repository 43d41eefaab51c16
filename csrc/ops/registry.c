/* registry.c -- finds a record by its name in the families. An operator is added as a row of ops/pointwise/operators.h,
 * or in its family's file only. */
#include "ops/op.h"

#include <stdlib.h>
#include <string.h>

/* Names of the family files. */
/* clang-format off */
#define FAMILIES(X)                                                                                                    \
    X(unary)                                                                                                           \
    X(activation)                                                                                                      \
    X(binary)                                                                                                          \
    X(compare)                                                                                                         \
    X(select) X(view) X(slice) X(movement) X(sequence) X(index) X(topk) X(nonzero) X(scatter) X(create) X(reduce)      \
        X(cumulative) X(scan) X(softmax) X(attention) X(fused_attention) X(loss) X(linear_loss) X(norm) X(embedding_norm)      \
            X(batchnorm) X(random) X(matmul) X(epilogue) X(einsum) X(conv) X(pool) X(resize) X(rnn) X(rotary) X(rows) X(fused)     \
            X(fused_rows) X(triton) \
                X(host_call) X(offload)
/* clang-format on */

#define X(family) extern const op_def family##_ops[];
FAMILIES(X)
#undef X
#define X(family) family##_ops,
const op_def *const op_families[] = {FAMILIES(X) NULL};
#undef X

/* A hash table of all records by name, made by the loader before the first look-up: the records of one name lie in slots
 * one after another, the one that a name alone means in the first of them. Reading a model and emitting look names up
 * thousands of times. */
enum { SLOTS = 4096 };
static const op_def *records[SLOTS];

static unsigned hash_name(const char *name) {
    unsigned h = 2166136261u;
    for (; *name; name++) h = (h ^ (unsigned char)*name) * 16777619u;
    return h % SLOTS;
}

/* The next record of this name from a slot on, or NULL; the slot is moved behind it. */
static const op_def *next_record(const char *name, unsigned *slot) {
    const op_def *op;
    while ((op = records[*slot])) {
        *slot = (*slot + 1) % SLOTS;
        if (strcmp(op->name, name) == 0) return op;
    }
    return NULL;
}

static int better(const op_def *a, const op_def *b) { /* ONNX before ours, then the newest */
    if (!b) return 1;
    if (a->domain[0] != b->domain[0]) return a->domain[0] == '\0';
    return a->since > b->since;
}

static void add_record(const op_def *op) {
    unsigned slot = hash_name(op->name);
    for (; records[slot]; slot = (slot + 1) % SLOTS)
        if (strcmp(records[slot]->name, op->name) == 0 && better(op, records[slot])) {
            const op_def *other = records[slot];
            records[slot] = op;
            op = other;
        }
    records[slot] = op;
}

__attribute__((constructor)) static void fill_table(void) {
    for (const op_def *const *family = op_families; *family; family++)
        for (const op_def *op = *family; op->name; op++) add_record(op);
}

const op_def *op_find(const char *domain, const char *name, int opset) {
    unsigned slot = hash_name(name);
    const op_def *op;
    while ((op = next_record(name, &slot))) {
        if (domain && strcmp(op->domain, domain) != 0) continue;
        if (!opset || op->domain[0] || op->since <= opset) break;
    }
    return op;
}
