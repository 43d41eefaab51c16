/* library.c -- calls dlopen and dlsym. */
#define _GNU_SOURCE
#include "cuda/host/library.h"

#include <dlfcn.h>
#include <glob.h>
#include <link.h>
#include <stdio.h>
#include <string.h>

/* Libraries that torch has loaded, and where its packages have others, seen from their folder. */
static const char *const neighbours[] = {"libcudart.so.13", "libcublasLt.so.13", "libcudart.so.12", "libcublasLt.so.12",
                                         NULL};
static const char *const folders[] = {
    ".", "../../cuda_nvrtc/lib", "../../cudnn/lib", "../../nccl/lib", "../../cublas/lib", NULL};

enum { LONGEST_PATH = 4096 };

/* NVRTC opens its built-in functions by name, in folders that the loader knows. `folder` is where it lies itself. */
static void load_builtins(const char *folder) {
    char pattern[LONGEST_PATH];
    glob_t found;

    if (snprintf(pattern, sizeof pattern, "%s/libnvrtc-builtins.so.*", folder) >= LONGEST_PATH) return;
    if (glob(pattern, 0, NULL, &found) == 0)
        for (size_t i = 0; i < found.gl_pathc; i++) (void)dlopen(found.gl_pathv[i], RTLD_LAZY | RTLD_LOCAL);
    globfree(&found);
}

/* The library at a path, which the loader does not know, nor what it opens itself. */
static void *open_at(const char *folder, const char *name) {
    char path[LONGEST_PATH];
    void *found = NULL;

    if (snprintf(path, sizeof path, "%s/%s", folder, name) < LONGEST_PATH) found = dlopen(path, RTLD_LAZY | RTLD_LOCAL);
    if (found && strncmp(name, "libnvrtc.", strlen("libnvrtc.")) == 0) load_builtins(folder);
    return found;
}

/* Beside a library that is loaded already: packages of Python's are in no folder that the loader looks into. */
static void *find_beside(const char *neighbour, const char *name) {
    void *handle = dlopen(neighbour, RTLD_LAZY | RTLD_NOLOAD), *found = NULL;
    struct link_map *map = NULL;
    char folder[LONGEST_PATH];

    if (!handle) return NULL;
    if (dlinfo(handle, RTLD_DI_LINKMAP, &map) == 0 && map->l_name && strchr(map->l_name, '/')) {
        const int length = (int)(strrchr(map->l_name, '/') - map->l_name);
        for (int i = 0; folders[i] && !found; i++)
            if (snprintf(folder, sizeof folder, "%.*s/%s", length, map->l_name, folders[i]) < LONGEST_PATH)
                found = open_at(folder, name);
    }
    (void)dlclose(handle);
    return found;
}

static void *find(const char *const *sonames, const char **found) {
    static const int loaded_first[] = {RTLD_NOLOAD, 0};
    for (size_t way = 0; way < 2; way++)
        for (const char *const *name = sonames; *name; name++) {
            void *handle = dlopen(*name, RTLD_LAZY | RTLD_LOCAL | loaded_first[way]);
            *found = *name;
            if (handle) return handle;
        }
    for (int i = 0; neighbours[i]; i++)
        for (const char *const *name = sonames; *name; name++) {
            void *handle = find_beside(neighbours[i], *name);
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
