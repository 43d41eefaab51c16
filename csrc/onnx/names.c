/* names.c -- keeps a hash table that never grows: the number of names is known beforehand. */
#include "onnx/names.h"

#include <string.h>

status names_new(ctx *c, size_t n, name_table *out) {
    size_t slots = 16;
    while (slots < n * 2) slots *= 2;
    out->mask = slots - 1;
    return NEW(c, out->slots, slots);
}

name_entry *names_find(const name_table *t, const char *name) {
    uint64_t h = UINT64_C(14695981039346656037);

    for (const char *p = name; *p; p++) h = (h ^ (unsigned char)*p) * UINT64_C(1099511628211);
    for (h ^= h >> 32;; h++) {
        name_entry *e = &t->slots[h & t->mask];
        if (!e->name || strcmp(e->name, name) == 0) return e;
    }
}
