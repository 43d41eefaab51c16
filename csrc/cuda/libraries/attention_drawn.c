/* attention_drawn.c -- a table of numbers by which torch drew elements, one place for each hash. */
#include "cuda/libraries/attention_drawn.h"

#include <pthread.h>
#include <string.h>

enum { BITS = 12 };

static struct {
    attention_drawn of;
    uint64_t words[2];
} table[1 << BITS];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static unsigned place_of(const attention_drawn *of) {
    uint64_t h = (uint64_t)(uintptr_t)of->place ^ of->seed ^ ((uint64_t)of->key << 32);
    h *= UINT64_C(0x9e3779b97f4a7c15);
    return (unsigned)(h >> (64 - BITS));
}

void attention_drawn_keep(const attention_drawn *of, const uint64_t words[2]) {
    const unsigned at = place_of(of);
    pthread_mutex_lock(&lock);
    table[at].of = *of;
    memcpy(table[at].words, words, sizeof table[at].words);
    pthread_mutex_unlock(&lock);
}

bool attention_drawn_find(const attention_drawn *of, uint64_t words[2]) {
    const unsigned at = place_of(of);
    pthread_mutex_lock(&lock);
    const attention_drawn *own = &table[at].of;
    const bool known = own->place == of->place && own->seed == of->seed && own->key == of->key;
    if (known) memcpy(words, table[at].words, sizeof table[at].words);
    pthread_mutex_unlock(&lock);
    return known;
}
