/* named.c -- says which node a number in a fault stands for: a table that grows to a limit, and forgets nothing. */
#include "cuda/host/named.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

enum { MOST_NAMED = 1 << 14, MOST_LOOKS = 32 };

typedef struct entry {
    const char *op; /* a record's, which stays; NULL: free */
    char *name;
} entry;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static entry table[MOST_NAMED];

static uint32_t hash(uint32_t h, const char *s) {
    for (; *s; s++) h = (h ^ (unsigned char)*s) * 16777619u;
    return h;
}

/* With the lock. The number of a place, from 1. */
static int32_t find(const char *op, const char *name) {
    const uint32_t start = hash(hash(2166136261u, op), name);

    for (uint32_t i = 0; i < MOST_LOOKS; i++) {
        const uint32_t at = (start + i) % MOST_NAMED;
        entry *e = &table[at];
        if (!e->op) {
            if (!(e->name = malloc(strlen(name) + 1))) return 0;
            memcpy(e->name, name, strlen(name) + 1);
            e->op = op;
        }
        if (e->op == op && strcmp(e->name, name) == 0) return (int32_t)at + 1;
    }
    return 0;
}

int32_t cuda_named(const node *n) {
    (void)pthread_mutex_lock(&lock);
    const int32_t number = find(n->op->name, n->name ? n->name : "-");
    (void)pthread_mutex_unlock(&lock);
    return number;
}

status cuda_blame(ctx *c, status s, int32_t number) {
    const char *op = NULL, *name = NULL;

    if (number > 0 && number <= MOST_NAMED) {
        (void)pthread_mutex_lock(&lock);
        op = table[number - 1].op;
        name = table[number - 1].name;
        (void)pthread_mutex_unlock(&lock);
    }
    return op ? blame(c, s, "running %s (%s)", op, name) : s;
}
