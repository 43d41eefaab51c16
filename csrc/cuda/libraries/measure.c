/* measure.c -- times the ways in which a library can do one piece of work, on memory that the caller gave.
 *
 * Each way runs once or twice, which also loads its kernel; then those that may win take turns. The least of a way's
 * turns counts. */
#include "cuda/libraries/measure.h"

#include <time.h>

enum { ROUNDS = 5, MOST_TIMES = 64 };
#define SAMPLE 1e-3  /* seconds of work that are long enough to be measured */
#define CLEARLY 0.97 /* of the best guess's time: less is worth another choice */
#define HOPELESS 2.0 /* times the shortest of the first try */

char *measure_take(const measuring *m, size_t *at, size_t bytes, size_t aligned) {
    const size_t from = *at + (aligned < MEASURE_ALIGNED ? aligned : 0);

    *at = (from + bytes + MEASURE_ALIGNED - 1) / MEASURE_ALIGNED * MEASURE_ALIGNED;
    return m->memory ? m->memory + from : NULL;
}

bool measure_fits(measuring *m, size_t needed) {
    if (needed > m->needed) m->needed = needed;
    return m->memory && needed <= m->bytes;
}

/* Half of its bits are random, and a number of 16 bits or more that starts with any of them is between 1e-20 and 2. */
status measure_fill(ctx *c, const measuring *m) {
    enum { OWN = 1 << 14 };
    uint16_t own[OWN];
    uint64_t state = 1;
    size_t have = m->bytes < sizeof own ? m->bytes : sizeof own;

    for (int i = 0; i < OWN; i++) {
        state = state * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
        own[i] = (uint16_t)(0x3c00 | (state >> 40 & 0x83ff));
    }
    TRY(cuda_upload(c, &m->at, m->memory, own, have));
    for (size_t more; have < m->bytes; have += more) {
        more = m->bytes - have < have ? m->bytes - have : have;
        TRY(cuda_move(c, &m->at, m->memory + have, m->memory, more));
    }
    return OK;
}

/* --- timing ------------------------------------------------------------------------------------------------------- */

typedef struct trial {
    const measuring *m;
    measure_start *start;
    void *arg;
    int way, times;
    bool refused;
} trial;

static status start_some(ctx *c, void *arg) {
    trial *t = arg;

    for (int i = 0; i < t->times && !t->refused; i++) TRY(t->start(c, t->arg, t->way, &t->refused));
    return OK;
}

static status time_it(ctx *c, trial *t, int way, int times, double *seconds) {
    t->way = way;
    t->times = times;
    t->refused = false;
    *seconds = 0;
    TRY(cuda_seconds(c, &t->m->at, start_some, t, seconds));
    *seconds = t->refused ? 0 : *seconds > 0 ? *seconds / times : 1e-9;
    return OK;
}

static double now(void) {
    struct timespec t;
    (void)clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static double least_of(const double *seconds, int count) {
    double least = 0;
    for (int i = 0; i < count; i++)
        if (seconds[i] > 0 && (least == 0 || seconds[i] < least)) least = seconds[i];
    return least;
}

status measure_ways(ctx *c, const measuring *m, int count, measure_start *start, void *arg, double *seconds) {
    const double end = m->limit > 0 ? now() + m->limit : 0;
    trial t = {.m = m, .start = start, .arg = arg};
    double turn;

    for (int i = 0; i < count; i++) {
        seconds[i] = 0;
        TRY(time_it(c, &t, i, 1, &turn));
        if (turn > 0) TRY(time_it(c, &t, i, 1, &seconds[i]));
    }
    const double hopeless = HOPELESS * least_of(seconds, count);
    for (int round = 0; round < ROUNDS && (end == 0 || now() < end); round++)
        for (int i = 0; i < count; i++) {
            if (seconds[i] == 0 || seconds[i] > hopeless) continue;
            const double times = SAMPLE / seconds[i];
            TRY(time_it(c, &t, i, times < 1 ? 1 : times < MOST_TIMES ? (int)times : MOST_TIMES, &turn));
            if (turn > 0 && turn < seconds[i]) seconds[i] = turn;
        }
    return OK;
}

int measure_best(const double *seconds, int count) {
    int best = seconds[0] > 0 ? 0 : -1;
    double least = CLEARLY * seconds[0];

    for (int i = 1; i < count; i++)
        if (seconds[i] > 0 && (least == 0 || seconds[i] < least)) best = i, least = seconds[i];
    return best;
}
