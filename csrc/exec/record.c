/* record.c -- shows an instruction as a range in the trace of torch's profiler. */
#include "exec/record.h"

#include "ops/op.h"
#include "plan/recompute.h"

#include <stdio.h>
#include <string.h>

enum { NAME_TEXT = 400, PATH_TEXT = 300 };

void record_module_path(const char *name, char *out, size_t size) {
    size_t used = 0, last = 0; /* last: where the latest step of the path begins */

    while (*name == '/') name++;
    for (const char *next; (next = strchr(name, '/')); name = next + strspn(next, "/")) {
        const size_t length = (size_t)(next - name), before = used - last;
        if (strncmp(name, CHECKPOINT_STEP, strlen(CHECKPOINT_STEP)) == 0) continue;
        /* A module of a list repeats the list's own name: "layers", "layers.0". */
        if (before && length > before && name[before] == '.' && strncmp(name, out + last, before) == 0) used = last;
        else if (used && used + 1 < size) out[used++] = '.';
        last = used;
        for (const char *c = name; c < next && used + 1 < size; c++) out[used++] = *c;
    }
    out[used] = '\0';
}

void record_begin(const node *n, const tensor *operands, bool cuda, torch_range *range) {
    char name[NAME_TEXT], path[PATH_TEXT];

    record_module_path(n->name ? n->name : "", path, sizeof path);
    snprintf(name, sizeof name, "ortmodule::%s%s%s", n->op->name, *path ? " " : "", path);
    torch_range_begin(name, cuda ? 0 : n->n_in, operands, range);
}
