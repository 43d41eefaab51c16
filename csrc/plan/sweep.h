/* sweep.h -- counts the bytes that are needed at each time, from lives: one sweep finds when these are the most. */
#ifndef ORT_PLAN_SWEEP_H
#define ORT_PLAN_SWEEP_H

#include <stdint.h>

/* `change` has a number for each time, and one more: the bytes that come then, less those that are gone. Adds a block that
 * is needed from `first` to `last`, both included. */
static inline void sweep_add(int64_t *change, int first, int last, int64_t bytes) {
    change[first] += bytes;
    change[last + 1] -= bytes;
}

/* The most bytes at one of the times [0, times), and the first time that has them; 0 at time 0 where there is nothing. */
static inline int64_t sweep_most(const int64_t *change, int times, int *at) {
    int64_t now = 0, most = 0;

    *at = 0;
    for (int t = 0; t < times; t++)
        if ((now += change[t]) > most) {
            most = now;
            *at = t;
        }
    return most;
}

#endif
