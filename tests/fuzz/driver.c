/* driver.c -- runs a fuzz target over a corpus and over mutations of it, and keeps what reaches code that nothing reached
 * before. Everywhere where there is gcc; its options are libFuzzer's.
 *
 *   TARGET [-max_total_time=S] [-runs=N] [-seed=N] [-max_len=N] [-timeout=S] [-dict=FILE] [-artifact_prefix=P] CORPUS...
 *
 * A CORPUS is a folder, or a file; new entries go into the first folder. Without code that is counted (COVERAGE=1) the
 * corpus stays what it is. The last line says how many runs there were; bytes that end the program are in
 * P + "crash-...". Without -runs and -max_total_time the corpus is run, and nothing else. */
#include "fuzz.h"

#include <dirent.h>
#include <errno.h>
#include <signal.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <time.h>

enum { CELLS = 1 << 16, MOST_ENTRIES = 1 << 16, MOST_WORDS = 1024, WORD = 64 };

typedef struct entry {
    uint8_t *at;
    size_t n;
} entry;

static entry entries[MOST_ENTRIES], words[MOST_WORDS];
static size_t n_entries, n_words, longest = 4096;
static uint8_t *now; /* what is being run */
static size_t now_n;
static const char *prefix = "", *first_folder;
static int64_t runs;
static unsigned limit = 20;

/* --- what is reached: how often, in powers of two ------------------------------------------------------------------ */

static uint8_t hits[CELLS], seen[CELLS];
static size_t n_seen;

void __sanitizer_cov_trace_pc(void);
void __sanitizer_cov_trace_pc(void) {
    uintptr_t pc = (uintptr_t)__builtin_return_address(0);
    uint8_t *hit = &hits[(pc ^ pc >> 16) % CELLS];
    if (*hit < 255) ++*hit;
}

static uint8_t bucket(uint8_t n) {
    return (uint8_t)(n < 4 ? n : n < 8 ? 4 : n < 16 ? 8 : n < 32 ? 16 : n < 128 ? 32 : 64);
}

static bool reached_more(void) {
    bool more = false;

    for (size_t i = 0; i < CELLS; i += 8) {
        uint64_t eight;
        memcpy(&eight, hits + i, 8);
        for (size_t j = i; eight && j < i + 8; j++) {
            const uint8_t new = (uint8_t)(bucket(hits[j]) & ~seen[j]);
            n_seen += new && !seen[j];
            seen[j] |= new;
            more |= new != 0;
        }
    }
    return more;
}

/* --- ending -------------------------------------------------------------------------------------------------------- */

void __sanitizer_set_death_callback(void (*callback)(void)) __attribute__((weak));

#define SEEN __attribute__((visibility("default")))

/* A model may ask for memory that there is not: the engine says so. Each sanitizer ends the program in its way. */
const char *__asan_default_options(void) SEEN;
const char *__asan_default_options(void) {
    return "allocator_may_return_null=1:max_allocation_size_mb=512:detect_stack_use_after_return=1";
}
const char *__ubsan_default_options(void) SEEN;
const char *__ubsan_default_options(void) { return "print_stacktrace=1:abort_on_error=1"; }
const char *__tsan_default_options(void) SEEN;
const char *__tsan_default_options(void) { return "halt_on_error=1:abort_on_error=1"; }

static uint64_t hash_of(const uint8_t *at, size_t n) {
    uint64_t h = UINT64_C(14695981039346656037);
    for (size_t i = 0; i < n; i++) h = (h ^ at[i]) * UINT64_C(1099511628211);
    return h;
}

static void write_file(const char *folder, const char *name, const uint8_t *at, size_t n) {
    char path[4096];
    FILE *file;

    snprintf(path, sizeof path, "%s%s%016llx", folder, name, (unsigned long long)hash_of(at, n));
    if (!(file = fopen(path, "wb"))) {
        fprintf(stderr, "%s: %s\n", path, strerror(errno));
        return;
    }
    fwrite(at, 1, n, file);
    fclose(file);
    if (strcmp(name, "/")) fprintf(stderr, "the bytes are in %s\n", path);
}

static void keep_crash(void) {
    static bool done;
    if (!done && now) write_file(prefix, "crash-", now, now_n);
    done = true;
}

static void on_signal(int number) {
    if (number == SIGPROF) fprintf(stderr, "a run takes more than %u seconds of the CPU\n", limit);
    keep_crash();
    signal(SIGABRT, SIG_DFL);
    abort();
}

void wrong(const char *format, ...) {
    va_list args;
    va_start(args, format);
    fputs("WRONG: ", stderr);
    vfprintf(stderr, format, args);
    fputc('\n', stderr);
    va_end(args);
    keep_crash();
    abort();
}

/* --- running ------------------------------------------------------------------------------------------------------- */

/* Of the CPU: a busy machine is no fault. 0: none. */
static void set_limit(unsigned s) {
    const struct itimerval t = {.it_value = {.tv_sec = s}};
    setitimer(ITIMER_PROF, &t, NULL);
}

static bool run(const uint8_t *at, size_t n) {
    now = malloc(n ? n : 1); /* exactly so many bytes: a sanitizer knows where they end */
    if (!now) abort();
    if (n) memcpy(now, at, n);
    now_n = n;
    memset(hits, 0, sizeof hits);
    set_limit(limit);
    LLVMFuzzerTestOneInput(now, n);
    set_limit(0);
    free(now);
    now = NULL;
    runs++;
    return reached_more();
}

static uint64_t state = 1;

static size_t below(size_t n) {
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return n ? (size_t)((state * UINT64_C(0x2545f4914f6cdd1d)) >> 33) % n : 0;
}

static void add_entry(const uint8_t *at, size_t n) {
    entry *e = n_entries < MOST_ENTRIES ? &entries[n_entries++] : &entries[below(MOST_ENTRIES)];
    free(e->at);
    if (!(e->at = malloc(n ? n : 1))) abort();
    if (n) memcpy(e->at, at, n);
    e->n = n;
}

/* Room for `n` bytes at `at`, or their removal. */
static size_t insert(uint8_t *b, size_t size, size_t at, const uint8_t *from, size_t n) {
    if (size + n > longest) return size;
    memmove(b + at + n, b + at, size - at);
    memmove(b + at, from, n);
    return size + n;
}

static size_t mutate(uint8_t *b, size_t n) {
    static const uint8_t odd[] = {0, 1, 2, 3, 7, 8, 16, 64, 127, 128, 129, 254, 255};
    const size_t at = below(n + 1), left = n - at;
    size_t count = 1 + below(below(4) ? 8 : 64);
    const entry *other = &entries[below(n_entries)], *word = &words[below(n_words)];

    if (count > left) count = left;
    switch (below(10)) {
    case 0:
        if (left) b[at] ^= (uint8_t)(1u << below(8));
        return n;
    case 1:
        if (left) b[at] = (uint8_t)below(256);
        return n;
    case 2:
        if (left) b[at] = odd[below(sizeof odd)];
        return n;
    case 3:
        if (left) b[at] = (uint8_t)(b[at] + below(9) - 4);
        return n;
    case 4: memmove(b + at, b + at + count, left - count); return n - count;
    case 5: return insert(b, n, at, (uint8_t[]){(uint8_t)below(256)}, 1);
    case 6: { /* a piece of its own, elsewhere */
        uint8_t piece[64];
        memcpy(piece, b + at, count);
        return insert(b, n, below(n + 1), piece, count);
    }
    case 7: /* a piece of another */
    case 8: {
        const size_t from = below(other->n + 1);
        count = 1 + below(128);
        if (count > other->n - from) count = other->n - from;
        if (below(2)) return insert(b, n, at, other->at + from, count);
        if (count > left) count = left;
        memcpy(b + at, other->at + from, count);
        return n;
    }
    default:
        if (!n_words) return n;
        if (below(2)) return insert(b, n, at, word->at, word->n);
        if (word->n <= left) memcpy(b + at, word->at, word->n);
        return n;
    }
}

/* A mutation of an entry. Where there is no dictionary bytes are choices, and any will do: now and then all are new. */
static size_t make(uint8_t *b) {
    const entry *e = &entries[below(4) ? below(n_entries) : n_entries - 1 - below(n_entries < 32 ? n_entries : 32)];
    size_t n = e->n < longest ? e->n : longest;

    if (!n_words && !below(4)) {
        n = below(below(2) ? longest + 1 : longest / 8 + 1);
        for (size_t i = 0; i < n; i++) b[i] = (uint8_t)below(256);
        return n;
    }
    if (n) memcpy(b, e->at, n);
    for (size_t i = 1 + below(below(3) ? 4 : 24); i; i--) n = mutate(b, n);
    return n;
}

static void try_one(uint8_t *b) {
    const size_t n = make(b);
    if (!run(b, n)) return;
    add_entry(b, n);
    if (first_folder) write_file(first_folder, "/", b, n);
}

/* --- reading ------------------------------------------------------------------------------------------------------- */

static void read_entry(const char *path) {
    FILE *file = fopen(path, "rb");
    uint8_t *bytes = malloc(1 << 24);
    size_t n;

    if (!file || !bytes) {
        fprintf(stderr, "%s: %s\n", path, strerror(errno));
        exit(2);
    }
    n = fread(bytes, 1, 1 << 24, file);
    fclose(file);
    add_entry(bytes, n);
    free(bytes);
}

static int visible(const struct dirent *d) { return d->d_name[0] != '.'; }

static void read_corpus(const char *path) {
    struct dirent **names;
    struct stat about;
    int n;

    if (stat(path, &about) == 0 && !S_ISDIR(about.st_mode)) {
        read_entry(path);
        return;
    }
    if ((n = scandir(path, &names, visible, alphasort)) < 0) {
        fprintf(stderr, "%s: %s\n", path, strerror(errno));
        exit(2);
    }
    if (!first_folder) first_folder = path;
    for (int i = 0; i < n; i++) {
        char file[4096];
        snprintf(file, sizeof file, "%s/%s", path, names[i]->d_name);
        if (stat(file, &about) == 0 && S_ISREG(about.st_mode)) read_entry(file);
        free(names[i]);
    }
    free(names);
}

/* A word a line, in quotes: "a\x00b". */
static void read_words(const char *path) {
    FILE *file = fopen(path, "r");
    char line[1024];

    if (!file) {
        fprintf(stderr, "%s: %s\n", path, strerror(errno));
        exit(2);
    }
    while (fgets(line, sizeof line, file) && n_words < MOST_WORDS) {
        const char *from = strchr(line, '"'), *to = strrchr(line, '"');
        entry *w = &words[n_words];
        if (line[0] == '#' || !from || to == from) continue;
        if (!(w->at = malloc(WORD))) abort();
        for (from++; from < to && w->n < WORD; from++) {
            unsigned code;
            if (from[0] == '\\' && from[1] == 'x' && sscanf(from + 2, "%2x", &code) == 1) from += 3;
            else code = (unsigned char)*from;
            w->at[w->n++] = (uint8_t)code;
        }
        n_words++;
    }
    fclose(file);
}

static double seconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

int main(int argc, char **argv) {
    const double began = seconds();
    double most = 0, told = began;
    int64_t most_runs = 0;
    uint8_t *room;

    for (int i = 1; i < argc; i++) {
        const char *value = strchr(argv[i], '=') ? strchr(argv[i], '=') + 1 : "";
        if (argv[i][0] != '-') read_corpus(argv[i]);
        else if (strncmp(argv[i], "-max_total_time=", 16) == 0) most = atof(value);
        else if (strncmp(argv[i], "-runs=", 6) == 0) most_runs = atoll(value);
        else if (strncmp(argv[i], "-seed=", 6) == 0) state = (uint64_t)atoll(value) * UINT64_C(0x9e3779b97f4a7c15) + 1;
        else if (strncmp(argv[i], "-max_len=", 9) == 0) longest = (size_t)atoll(value);
        else if (strncmp(argv[i], "-timeout=", 9) == 0) limit = (unsigned)atoi(value);
        else if (strncmp(argv[i], "-dict=", 6) == 0) read_words(value);
        else if (strncmp(argv[i], "-artifact_prefix=", 17) == 0) prefix = value;
        else {
            fprintf(stderr, "%s is no option here: see tests/fuzz/driver.c\n", argv[i]);
            return 2;
        }
    }
    if (__sanitizer_set_death_callback) __sanitizer_set_death_callback(keep_crash);
    else
        for (int i = 0; i < 4; i++) signal(((int[]){SIGSEGV, SIGBUS, SIGFPE, SIGILL})[i], on_signal);
    signal(SIGABRT, on_signal);
    signal(SIGPROF, on_signal);
    if (!n_entries) add_entry((const uint8_t *)"", 0);
    for (size_t i = 0, n = n_entries; i < n; i++) (void)run(entries[i].at, entries[i].n);
    if (!(room = malloc(longest + 1))) return 2;
    while ((most_runs && runs < most_runs) || (most > 0 && seconds() - began < most)) {
        try_one(room);
        if ((runs & 255) || seconds() - told < 60) continue;
        told = seconds();
        printf("%lld executions, %zu entries, %zu places reached\n", (long long)runs, n_entries, n_seen);
        fflush(stdout);
    }
    printf("%lld executions in %.0f seconds, %zu entries, %zu places reached\n", (long long)runs, seconds() - began,
           n_entries, n_seen);
    free(room);
    return 0;
}
