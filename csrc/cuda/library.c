/* library.c -- dlopen and dlsym. */
#include "cuda/library.h"

#include <dlfcn.h>
#include <string.h>

static void *find(const char *const *sonames, const char **found) {
    static const int loaded_first[] = {RTLD_NOLOAD, 0};
    for (size_t way = 0; way < 2; way++)
        for (const char *const *name = sonames; *name; name++) {
            void *handle = dlopen(*name, RTLD_LAZY | RTLD_LOCAL | loaded_first[way]);
            *found = *name;
            if (handle) return handle;
        }
    *found = sonames[0];
    return NULL;
}

status library_open(ctx *c, const char *what, const char *const *sonames, const entry_point *rows, size_t n,
                    void *functions, size_t size) {
    const char *name;
    void *handle = find(sonames, &name);

    if (!handle) return fail(c, E_RUNTIME, "there is no %s: %s was not found", what, name);
    for (size_t i = 0; i < n; i++) {
        void *symbol = dlsym(handle, rows[i].name);
        if (!symbol) {
            memset(functions, 0, size);
            (void)dlclose(handle);
            return fail(c, E_RUNTIME, "the %s is too old: %s has no %s", what, name, rows[i].name);
        }
        memcpy((char *)functions + rows[i].member, &symbol, sizeof symbol); /* ISO C has no cast between the two */
    }
    return OK;
}
