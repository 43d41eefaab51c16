/* effort.c -- counts basic blocks that run, by their addresses. */
#include "effort.h"

#include <string.h>

enum { SLOTS = 1 << 16, KEPT = 3 };

static uintptr_t places[SLOTS]; /* open addressing; 0: a free slot */
static uint64_t counts[KEPT][SLOTS], total;
static int now;
static uintptr_t worst;

extern const char __executable_start;

/* Called at the beginning of each basic block. */
void __sanitizer_cov_trace_pc(void);
void __sanitizer_cov_trace_pc(void) {
    const uintptr_t place = (uintptr_t)__builtin_return_address(0);
    unsigned slot = (unsigned)(place * UINT64_C(0x9e3779b97f4a7c15) >> 48);

    while (places[slot] && places[slot] != place) slot = (slot + 1) % SLOTS;
    places[slot] = place;
    counts[now][slot]++;
    total++;
}

void effort_begin(void) {
    now = (now + 1) % KEPT;
    memset(counts[now], 0, sizeof counts[now]);
    total = 0;
}

uint64_t effort_blocks(void) { return total; }

static double times(uint64_t before, uint64_t after) { return (double)after / (double)(before ? before : 1); }

double effort_growth(uint64_t least) {
    const uint64_t *first = counts[(now + 1) % KEPT], *second = counts[(now + 2) % KEPT], *third = counts[now];
    double most = 0;

    for (int i = 0; i < SLOTS; i++) {
        const double earlier = times(first[i], second[i]), later = times(second[i], third[i]);
        const double growth = earlier < later ? earlier : later;
        if (third[i] < least || growth <= most) continue;
        most = growth;
        worst = places[i] - (uintptr_t)&__executable_start;
    }
    return most;
}

uintptr_t effort_place(void) { return worst; }
