/* names.h -- says what each name of a file stands for. */
#ifndef ORT_ONNX_NAMES_H
#define ORT_ONNX_NAMES_H

#include "graph/graph.h"

typedef struct name_entry {
    const char *name; /* NULL: a free slot */
    value *v;         /* NULL until it exists */
    int maker;        /* the node of the file that makes it, or -1 */
} name_entry;

typedef struct name_table {
    name_entry *slots; /* open addressing */
    size_t mask;       /* one less than their number */
} name_table;

/* Room for `n` names. */
MUST_USE status names_new(ctx *c, size_t n, name_table *out);
/* The entry of `name`, or the free one where it belongs; never NULL. Names are not copied. */
name_entry *names_find(const name_table *t, const char *name);

#endif
