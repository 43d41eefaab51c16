/* limit.c -- reads from /proc and control groups how much memory there is, and the limit of addresses. */
#include "core/limit.h"

#include <limits.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

static char root[256]; /* what stands before each file's name */

static size_t minus(size_t a, size_t b) { return a > b ? a - b : 0; }
static size_t less(size_t a, size_t b) { return a < b ? a : b; }

/* --- files -------------------------------------------------------------------------------------------------------- */

typedef struct path {
    char text[PATH_MAX];
} path;

/* NULL where it cannot be read, or where the name is too long. */
static FILE *open_file(const char *folder, const char *name) {
    path p;
    const int length = snprintf(p.text, sizeof p.text, "%s%s/%s", root, folder, name);

    return length > 0 && (size_t)length < sizeof p.text ? fopen(p.text, "re") : NULL;
}

/* The number in a file; SIZE_MAX for "max" and where there is no such file. */
static size_t read_number(const char *folder, const char *name) {
    FILE *f = open_file(folder, name);
    unsigned long long n;
    const bool found = f && fscanf(f, "%llu", &n) == 1;

    if (f) (void)fclose(f);
    return found ? (size_t)n : SIZE_MAX;
}

/* The sum of the lines "NAME NUMBER", or "NAME: NUMBER kB", of two names. */
static size_t read_lines(const char *folder, const char *name, const char *a, const char *b, size_t unit) {
    FILE *f = open_file(folder, name);
    unsigned long long n;
    size_t sum = 0;
    char line[256], key[64];

    while (f && fgets(line, sizeof line, f))
        if (sscanf(line, "%63[^: ]%*[: ]%llu", key, &n) == 2 && (strcmp(key, a) == 0 || strcmp(key, b) == 0))
            sum += (size_t)n * unit;
    if (f) (void)fclose(f);
    return sum;
}

/* --- control groups ------------------------------------------------------------------------------------------------- */

typedef struct version {
    const char *type, *limit, *used, *inactive, *active;
} version;

static const version first = {"cgroup", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file",
                              "total_active_file"};
static const version second = {"cgroup2", "memory.max", "memory.current", "inactive_file", "active_file"};

/* Is `word` one of a list's words, between commas? */
static bool listed(const char *list, const char *word) {
    const size_t length = strlen(word);

    for (; *list; list += strcspn(list, ",\n"), list += *list == ',' || *list == '\n')
        if (strncmp(list, word, length) == 0 && strchr(",\n", list[length])) return true;
    return false;
}

/* Where the hierarchy that knows of memory is mounted, and which of its groups lies there. */
static bool find_mount(const version *v, path *at, path *group) {
    FILE *f = open_file("/proc/self", "mountinfo");
    char line[4 * 1024], type[32], options[1024];
    bool found = false;

    /* 36 35 98:0 /root /mount/point rw,noatime shared:1 - type source options */
    while (f && !found && fgets(line, sizeof line, f)) {
        const char *rest = strstr(line, " - ");
        found = rest && sscanf(rest, " - %31s %*s %1023s", type, options) == 2 && strcmp(type, v->type) == 0 &&
                (v == &second || listed(options, "memory")) && strlen(line) < sizeof at->text &&
                sscanf(line, "%*s %*s %*s %s %s", group->text, at->text) == 2;
    }
    if (f) (void)fclose(f);
    return found;
}

/* This process's group in that hierarchy. */
static bool find_group(const version *v, path *group) {
    FILE *f = open_file("/proc/self", "cgroup");
    char line[PATH_MAX];
    bool found = false;

    /* "0::/path" of version 2, "4:memory:/path" of version 1 */
    while (f && !found && fgets(line, sizeof line, f)) {
        char *controllers = strchr(line, ':'), *name = controllers ? strchr(controllers + 1, ':') : NULL;
        if (!name) continue;
        *name++ = 0;
        controllers++;
        found = v == &second ? !*controllers && line[0] == '0' : listed(controllers, "memory");
        name[strcspn(name, "\n")] = 0;
        if (found) memcpy(group->text, name, strlen(name) + 1);
    }
    if (f) (void)fclose(f);
    return found;
}

/* `folder` and all above it, up to the mount point, of which `fixed` characters are. */
static void narrow(const version *v, char *folder, size_t fixed, memory_limits *l) {
    for (;;) {
        const size_t most = read_number(folder, v->limit), used = read_number(folder, v->used);
        if (most < SIZE_MAX / 4) { /* version 1 writes "none" as a number that no machine has */
            const size_t cached = read_lines(folder, "memory.stat", v->inactive, v->active, 1);
            l->most = less(l->most, most);
            if (used < SIZE_MAX) l->room = less(l->room, minus(most, minus(used, cached)));
        }
        char *last = strrchr(folder, '/');
        if (!last || strlen(folder) <= fixed) return;
        *last = 0;
    }
}

static void narrow_by(const version *v, memory_limits *l) {
    path at, mounted, group, folder;

    if (!find_mount(v, &at, &mounted) || !find_group(v, &group)) return;
    /* A container may see its own group at the mount point, under a name that only the machine knows. */
    const size_t above = strcmp(mounted.text, "/") == 0 ? 0 : strlen(mounted.text);
    const bool inside =
        strncmp(group.text, mounted.text, above) == 0 && strchr("/", group.text[above]) && !strstr(group.text, "/..");
    const char *below = inside && strcmp(group.text, "/") != 0 ? group.text + above : "";
    const int length = snprintf(folder.text, sizeof folder.text, "%s%s", at.text, below);

    if (length > 0 && (size_t)length < sizeof folder.text) narrow(v, folder.text, strlen(at.text), l);
}

/* --- addresses ------------------------------------------------------------------------------------------------------ */

/* Bytes of addresses that this process may have; SIZE_MAX: any number. */
static size_t most_addresses(void) {
    struct rlimit of;

    return getrlimit(RLIMIT_AS, &of) == 0 && of.rlim_cur != RLIM_INFINITY ? (size_t)of.rlim_cur : SIZE_MAX;
}

bool memory_addresses_limited(void) { return most_addresses() < SIZE_MAX; }

static void narrow_by_addresses(memory_limits *l) {
    const size_t addresses = most_addresses();
    const size_t mapped = addresses < SIZE_MAX ? read_number("/proc/self", "statm") : SIZE_MAX; /* in pages */

    l->most = less(l->most, addresses);
    l->room = less(l->room, mapped < SIZE_MAX ? minus(addresses, mapped * (size_t)sysconf(_SC_PAGESIZE)) : addresses);
}

/* --- all of it ------------------------------------------------------------------------------------------------------ */

memory_limits memory_limits_now(void) {
    const size_t all = read_lines("/proc", "meminfo", "MemTotal", "SwapTotal", 1024);
    const size_t free_now = read_lines("/proc", "meminfo", "MemAvailable", "SwapFree", 1024);
    memory_limits l = {all ? all : SIZE_MAX, free_now ? free_now : SIZE_MAX};

    narrow_by(&second, &l);
    narrow_by(&first, &l);
    narrow_by_addresses(&l);
    l.room = less(l.room, l.most);
    return l;
}

/* An eighth of what was free may be taken before it is looked at again: others take memory, too. */
enum { SHARE = 8 };
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static size_t unread;

/* Whether there are `bytes`, of which `taken` are no longer free then. */
static bool ask(size_t bytes, size_t taken) {
    bool fits = true;

    (void)pthread_mutex_lock(&lock);
    if (bytes <= unread) {
        unread -= taken;
    } else {
        const size_t room = memory_limits_now().room;
        fits = bytes <= room;
        unread = fits ? (room - bytes) / SHARE : 0;
    }
    (void)pthread_mutex_unlock(&lock);
    return fits;
}

bool memory_fits(size_t bytes) { return ask(bytes, bytes); }
bool memory_would_be_free(size_t bytes) { return ask(bytes, 0); }

void memory_limits_from(const char *folder) {
    (void)pthread_mutex_lock(&lock);
    (void)snprintf(root, sizeof root, "%s", folder ? folder : "");
    unread = 0;
    (void)pthread_mutex_unlock(&lock);
}

/* A child of fork must not find the lock taken by a thread it does not have. */
static void before_fork(void) { (void)pthread_mutex_lock(&lock); }
static void after_fork(void) { (void)pthread_mutex_unlock(&lock); }
__attribute__((constructor)) static void watch_fork(void) { (void)pthread_atfork(before_fork, after_fork, after_fork); }
