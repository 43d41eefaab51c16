/* traffic.c -- adds up bytes by kernel, by thread and by piece of memory. */
#include "traffic.h"

#include <stdio.h>
#include <string.h>

enum { KERNELS = 512, NAME = 64, WATCHED = 8, MOST_THREADS = 1024 };

typedef struct row {
    char kernel[NAME];
    unsigned long numbers[TRAFFIC_NUMBERS];
} row;

typedef struct watched {
    uintptr_t from;
    unsigned long bytes, seen[2];
} watched;

/* Of the driver's library, where the kernels' constants are. */
extern const char __ehdr_start[] __attribute__((visibility("hidden")));
extern const char _end[] __attribute__((visibility("hidden")));

static row rows[KERNELS];
static int n_rows, n_watched, is_full;
static row *now;
static watched pieces[WATCHED];
static unsigned long of_thread[MOST_THREADS];
static uintptr_t argument;
static unsigned long argument_bytes;

int fake_traffic_is_counted(void) {
#ifdef RACES
    return 1;
#else
    return 0;
#endif
}

void fake_traffic_forget(void) {
    n_rows = n_watched = is_full = 0;
    now = NULL;
    memset(rows, 0, sizeof rows);
}

int fake_traffic_kernels(void) { return is_full ? -1 : n_rows; }
const char *fake_traffic_name(int i) { return rows[i].kernel; }
unsigned long fake_traffic_of(int i, int what) { return rows[i].numbers[what]; }

void fake_traffic_watch(int which, const char *from, unsigned long bytes) {
    pieces[which] = (watched){.from = (uintptr_t)from, .bytes = bytes};
    if (which >= n_watched) n_watched = which + 1;
}
unsigned long fake_traffic_watched(int which, int is_write) { return pieces[which].seen[is_write]; }

void traffic_begin(const char *kernel, const void *of_kernel, unsigned long bytes) {
    int i = 0;

    argument = (uintptr_t)of_kernel;
    argument_bytes = bytes;
    while (i < n_rows && strncmp(rows[i].kernel, kernel, NAME - 1) != 0) i++;
    now = i < KERNELS ? &rows[i] : NULL;
    is_full |= !now;
    if (now && i == n_rows) (void)snprintf(rows[n_rows++].kernel, NAME, "%s", kernel);
    if (now) now->numbers[TRAFFIC_LAUNCHES]++;
}

void traffic_block(void) { memset(of_thread, 0, sizeof of_thread); }

void traffic_see(uintptr_t address, int is_write, int is_first, unsigned thread) {
    if (!now || address - argument < argument_bytes) return;
    if (address >= (uintptr_t)__ehdr_start && address < (uintptr_t)_end) return;
    now->numbers[is_write ? TRAFFIC_WRITTEN : TRAFFIC_READ]++;
    if (is_first) now->numbers[is_write ? TRAFFIC_FIRST_WRITTEN : TRAFFIC_FIRST_READ]++;
    if (!is_write && ++of_thread[thread] > now->numbers[TRAFFIC_MOST]) now->numbers[TRAFFIC_MOST] = of_thread[thread];
    for (int i = 0; i < n_watched; i++)
        if (address - pieces[i].from < pieces[i].bytes) pieces[i].seen[is_write]++;
}
