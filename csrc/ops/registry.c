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

/* A hash table of the newest record of each name, made by the loader before the first look-up; older forms are found by
 * walking. Emitting looks names up thousands of times a plan. */
enum { SLOTS = 2048 };
static const op_def *newest[SLOTS];

static unsigned hash_name(const char *name) {
    unsigned h = 2166136261u;
    for (; *name; name++) h = (h ^ (unsigned char)*name) * 16777619u;
    return h;
}

static const op_def **slot_of(const char *name) {
    unsigned h = hash_name(name);
    while (newest[h % SLOTS] && strcmp(newest[h % SLOTS]->name, name) != 0) h++;
    return &newest[h % SLOTS];
}

static int better(const op_def *a, const op_def *b) { /* ONNX before ours, then the newest */
    if (!b) return 1;
    if (a->domain[0] != b->domain[0]) return a->domain[0] == '\0';
    return a->since > b->since;
}

__attribute__((constructor)) static void fill_table(void) {
    for (const op_def *const *family = op_families; *family; family++)
        for (const op_def *op = *family; op->name; op++) {
            const op_def **slot = slot_of(op->name);
            if (better(op, *slot)) *slot = op;
        }
}

const op_def *op_find(const char *domain, const char *name, int opset) {
    const op_def *best = *slot_of(name);

    if (!domain && !opset) return best;
    best = NULL;
    for (const op_def *const *family = op_families; *family; family++)
        for (const op_def *op = *family; op->name; op++) {
            if (strcmp(op->name, name) != 0 || (domain && strcmp(op->domain, domain) != 0)) continue;
            if ((!opset || op->domain[0] || op->since <= opset) && better(op, best)) best = op;
        }
    return best;
}
