/* replay.c -- says which sections there are, what addresses they were recorded with, and when to record. */
#include "cuda/host/replay.h"

#include "cuda/host/refusals.h"
#include "cuda/kernels/torch_attention.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

enum {
    LEAST = 4,   /* instructions of a section that is worth a graph */
    KEPT = 4,    /* recordings of a section */
    SEEN = 8,    /* sets of addresses that it remembers */
    TRIALS = 32, /* recordings, before it is asked whether they are of use */
};

/* Memory that a section uses: a place, and which of it. */
typedef struct slot {
    place place;
    int index;
    int fixed; /* which of the plan's fixed places; -1: none */
} slot;

typedef struct recording {
    void *executable; /* NULL: none */
    uint64_t *key;    /* [n_slots + COMMON] */
    int64_t used;     /* when */
    int nodes;        /* about as many kernels: instructions */
    replay *of;
    struct recording *older, *newer; /* of all that there are, in the order of their use */
} recording;

/* Instructions that become one graph. */
typedef struct section {
    int from, to;
    slot *slots;
    int n_slots;
    uint64_t *key; /* [n_slots + COMMON] of the run that is about to start */
    bool refused, draws;
    uint64_t seen[SEEN];
    int n_seen;
    int64_t recorded, started;
    recording kept[KEPT];
} section;

/* What is run at one time: the forward, the backward, a part of it. */
typedef struct range {
    int from, to;
    section *list;
    int count;
    struct range *next;
} range;

struct replay {
    pthread_mutex_t lock;
    range *ranges;
    const void **last; /* [n_fixed] where a small input was */
    bool *moves;       /* [n_fixed] it has been elsewhere, too */
    void **inputs;     /* [inputs of the graph] where they are for the section that is about to start */
    int64_t clock;
    replay_counts counts;
};

enum { ARENA, CONSTANTS, MATH, COMMON }; /* of a key, before the slots */

/* --- all recordings ----------------------------------------------------------------------------------------------- */

/* The driver keeps memory for each that is in no statistics of torch's, and does not say how much. So their number is
 * bounded, and that of their kernels; the one that was of no use for longest is given back. */
static pthread_mutex_t kept_lock = PTHREAD_MUTEX_INITIALIZER;
static recording *oldest_kept, *newest_kept;
static replay_kept kept;

/* With kept_lock, these four. */
static void unlink_recording(recording *r) {
    *(r->older ? &r->older->newer : &oldest_kept) = r->newer;
    *(r->newer ? &r->newer->older : &newest_kept) = r->older;
    r->older = r->newer = NULL;
    kept.graphs--;
    kept.kernels -= r->nodes;
}

static void link_recording(recording *r) {
    r->older = newest_kept;
    *(newest_kept ? &newest_kept->newer : &oldest_kept) = r;
    newest_kept = r;
    kept.graphs++;
    kept.kernels += r->nodes;
}

static bool too_many(void) { return kept.graphs > MOST_GRAPHS || kept.kernels > MOST_GRAPH_KERNELS; }

/* One that is not `but`, of a plan that does not run, or of `of`, whose lock the caller has. *out: to be forgotten. */
static bool take_oldest(const replay *of, const recording *but, void **out) {
    for (recording *r = oldest_kept; r; r = r->newer) {
        if (r == but || (r->of != of && pthread_mutex_trylock(&r->of->lock) != 0)) continue;
        *out = r->executable;
        r->executable = NULL;
        unlink_recording(r);
        if (r->of != of) (void)pthread_mutex_unlock(&r->of->lock);
        return true;
    }
    return false;
}

/* With the lock of its plan: it has an executable graph, and is of use now. */
static void keep(recording *r) {
    void *executable;
    bool found = true;

    (void)pthread_mutex_lock(&kept_lock);
    link_recording(r);
    while (found && too_many()) {
        found = take_oldest(r->of, r, &executable);
        if (found) cuda_graph_forget(executable);
    }
    (void)pthread_mutex_unlock(&kept_lock);
}

/* It is about to be another one, to be used or to go. */
static void unkeep(recording *r) {
    (void)pthread_mutex_lock(&kept_lock);
    if (r->executable) unlink_recording(r);
    (void)pthread_mutex_unlock(&kept_lock);
}

replay_kept replay_all_kept(void) {
    (void)pthread_mutex_lock(&kept_lock);
    const replay_kept now = kept;
    (void)pthread_mutex_unlock(&kept_lock);
    return now;
}

/* --- sections ----------------------------------------------------------------------------------------------------- */

/* What the host runs, and what torch does, whose results lie in memory of its own. */
static bool runs_elsewhere(const node *n) {
    return strcmp(n->op->name, "HostCall") == 0 || strcmp(n->op->name, "HostGrad") == 0 ||
           strcmp(n->op->name, "HostProbe") == 0 || torch_attention_is(n);
}

static int fixed_of(const plan *p, const operand *o) {
    for (int i = 0; o->place == AT_INPUT && i < p->n_fixed; i++)
        if (p->fixed[i].index == o->index) return i;
    return -1;
}

static void add_slot(const plan *p, section *s, const operand *o) {
    if (o->place <= AT_CONSTANT) return;
    for (int i = 0; i < s->n_slots; i++)
        if (s->slots[i].place == o->place && s->slots[i].index == o->index) return;
    s->slots[s->n_slots++] = (slot){o->place, o->index, fixed_of(p, o)};
}

/* Every operand once. A section has few of these; its instructions have thousands of operands in the arena. */
static bool find_slots(const plan *p, section *s) {
    int most = 0;

    for (int t = s->from; t < s->to; t++) {
        const node *n = p->code[t].node;
        for (int i = 0; i < n->n_in; i++) most += p->code[t].in[i].place > AT_CONSTANT;
        for (int i = 0; i < n->n_out; i++) most += p->code[t].out[i].place > AT_CONSTANT;
    }
    if (!(s->slots = calloc((size_t)most + 1, sizeof *s->slots))) return false;
    for (int t = s->from; t < s->to; t++) {
        const node *n = p->code[t].node;
        for (int i = 0; i < n->n_in; i++) add_slot(p, s, &p->code[t].in[i]);
        for (int i = 0; i < n->n_out; i++) add_slot(p, s, &p->code[t].out[i]);
        s->draws |= (n->op->flags & RANDOM) != 0;
    }
    for (int i = 0; i < KEPT; i++)
        if (!(s->kept[i].key = calloc((size_t)s->n_slots + COMMON, sizeof *s->kept[i].key))) return false;
    return (s->key = calloc((size_t)s->n_slots + COMMON, sizeof *s->key)) != NULL;
}

static bool find_sections(const plan *p, range *of) {
    int from = of->from;

    if (!(of->list = calloc((size_t)((of->to - of->from) / LEAST + 2), sizeof *of->list))) return false;
    for (int t = of->from; t <= of->to; t++) {
        const bool elsewhere = t < of->to && runs_elsewhere(p->code[t].node);
        if (t < of->to && !elsewhere) continue;
        if (t - from >= LEAST) {
            section *s = &of->list[of->count++];
            *s = (section){.from = from, .to = t};
            if (!find_slots(p, s)) return false;
        }
        from = t + 1;
    }
    return true;
}

static void range_free(range *r) {
    for (int i = 0; i < r->count; i++) {
        for (int j = 0; j < KEPT; j++) {
            unkeep(&r->list[i].kept[j]);
            cuda_graph_forget(r->list[i].kept[j].executable);
            free(r->list[i].kept[j].key);
        }
        free(r->list[i].slots);
        free(r->list[i].key);
    }
    free(r->list);
    free(r);
}

/* Made when it is first run; NULL: there is no memory for it. */
static range *find_range(replay *of, const plan *p, int from, int to) {
    range **at = &of->ranges;

    while (*at && ((*at)->from != from || (*at)->to != to)) at = &(*at)->next;
    if (*at) return *at;
    range *made = calloc(1, sizeof *made);
    if (!made) return NULL;
    made->from = from;
    made->to = to;
    if (find_sections(p, made)) return *at = made;
    range_free(made);
    return NULL;
}

replay *replay_new(const plan *p) {
    replay *of = NULL;

    if (!p->cuda || p->g->pending || p->n_code < LEAST || !(of = calloc(1, sizeof *of))) return NULL;
    (void)pthread_mutex_init(&of->lock, NULL);
    of->last = calloc((size_t)p->n_fixed + 1, sizeof *of->last);
    of->moves = calloc((size_t)p->n_fixed + 1, sizeof *of->moves);
    of->inputs = calloc((size_t)p->g->n_inputs + 1, sizeof *of->inputs);
    if (of->last && of->moves && of->inputs) return of;
    replay_free(of);
    return NULL;
}

void replay_free(replay *of) {
    if (!of || cuda_is_forked()) return;
    while (of->ranges) {
        range *next = of->ranges->next;
        range_free(of->ranges);
        of->ranges = next;
    }
    (void)pthread_mutex_destroy(&of->lock);
    free(of->last);
    free(of->moves);
    free(of->inputs);
    free(of);
}

/* --- keys --------------------------------------------------------------------------------------------------------- */

/* Which small inputs have moved since the last time. */
static void watch(replay *of, const section *s, const run *r) {
    for (int i = 0; i < s->n_slots; i++) {
        const int f = s->slots[i].fixed;
        if (f < 0) continue;
        const void *now = r->memory[AT_INPUT][s->slots[i].index];
        of->moves[f] |= of->last[f] && of->last[f] != now;
        of->last[f] = now;
    }
}

static void make_key(const replay *of, const section *s, const run *r, uint64_t *key) {
    key[ARENA] = (uintptr_t)r->arena;
    key[CONSTANTS] = (uintptr_t)r->constants;
    key[MATH] = r->cuda->math;
    for (int i = 0; i < s->n_slots; i++) {
        const int f = s->slots[i].fixed;
        const bool moves = f >= 0 && of->moves[f];
        key[COMMON + i] = moves ? 0 : (uintptr_t)r->memory[s->slots[i].place][s->slots[i].index];
    }
}

static uint64_t hash(const uint64_t *key, int words) {
    uint64_t h = 14695981039346656037u;
    for (int i = 0; i < words; i++) h = (h ^ key[i]) * 1099511628211u;
    return h ^ h >> 32;
}

/* Whether these addresses were seen before; they have been now. */
static bool comes_back(section *s, uint64_t h) {
    for (int i = 0; i < SEEN && i < s->n_seen; i++)
        if (s->seen[i] == h) return true;
    s->seen[s->n_seen++ % SEEN] = h;
    if (s->n_seen == 2 * SEEN) s->n_seen = SEEN;
    return false;
}

/* --- running ------------------------------------------------------------------------------------------------------ */

static status record(ctx *c, const plan *p, const section *s, const run *r, void **captured) {
    cuda_run to;
    run there = *r;

    TRY(cuda_capture_begin(c, r->cuda, &to));
    there.cuda = &to;
    return cuda_capture_end(c, &to, exec_run(c, p, s->from, s->to, &there), captured);
}

static recording *recorded_with(section *s, const uint64_t *key, size_t bytes) {
    for (int i = 0; i < KEPT; i++)
        if (s->kept[i].executable && memcmp(s->kept[i].key, key, bytes) == 0) return &s->kept[i];
    return NULL;
}

static recording *oldest(section *s) {
    recording *found = &s->kept[0];
    for (int i = 1; i < KEPT; i++)
        if (found->executable && (!s->kept[i].executable || s->kept[i].used < found->used)) found = &s->kept[i];
    return found;
}

/* What comes from elsewhere, at its place in the arena; `r` finds it there. */
static status bring(ctx *c, const replay *of, const plan *p, const section *s, run *r, void **inputs, cuda_run *where) {
    for (int i = 0; i < s->n_slots; i++) {
        const int f = s->slots[i].fixed;
        if (f < 0 || !of->moves[f]) continue;
        void *to = (char *)r->arena + p->fixed[f].offset, **input = &inputs[p->fixed[f].index];
        TRY(cuda_move(c, where, to, *input, (size_t)p->fixed[f].bytes));
        *input = to;
    }
    if (!s->draws) return OK;
    where->seed = (const uint64_t *)(const void *)((char *)r->arena + p->seed_offset);
    return cuda_set_u64(c, where, (char *)r->arena + p->seed_offset, r->seed);
}

/* *done is false, without an error, when the addresses are new. */
static status start(ctx *c, replay *of, const plan *p, section *s, run *r, void **inputs, cuda_run *where, bool *done) {
    const int words = COMMON + s->n_slots;
    const size_t bytes = sizeof(uint64_t) * (size_t)words;
    uint64_t *key = s->key;
    recording *found;
    void *captured;
    bool updated;

    watch(of, s, r);
    make_key(of, s, r, key);
    if (!(found = recorded_with(s, key, bytes)) && !comes_back(s, hash(key, words))) return OK;
    TRY(bring(c, of, p, s, r, inputs, where));
    if (!found) {
        found = oldest(s);
        TRY(record(c, p, s, r, &captured));
        unkeep(found);
        TRY(cuda_graph_make(c, captured, &found->executable, &updated));
        memcpy(found->key, key, bytes);
        found->of = of;
        found->nodes = s->to - s->from;
        keep(found);
        s->recorded++;
        of->counts.recorded++;
        of->counts.updated += updated;
    } else {
        unkeep(found);
        keep(found);
    }
    found->used = ++of->clock;
    TRY(cuda_graph_start(c, where, found->executable));
    s->started++;
    of->counts.started++;
    s->refused = s->recorded >= TRIALS && s->started < 2 * s->recorded;
    *done = true;
    return OK;
}

/* With the lock. Until its graph is started nothing of a section has run: what goes wrong before is no error yet. */
static bool started(ctx *c, replay *of, const plan *p, section *s, const run *given, const cuda_run *at) {
    void *const *memory = given->memory[AT_INPUT];
    void **inputs = of->inputs;
    cuda_run where = *at;
    run r = *given;
    bool done = false;

    if (s->refused) return false;
    const int refusals = refusals_count();
    for (int i = 0; i < s->n_slots; i++)
        if (s->slots[i].place == AT_INPUT) inputs[s->slots[i].index] = memory[s->slots[i].index];
    r.memory[AT_INPUT] = inputs;
    r.cuda = &where;
    if (start(c, of, p, s, &r, inputs, &where, &done) != OK) {
        s->refused = refusals == refusals_count(); /* what a library refused, it will not be asked for again */
        c->err = (err){.code = OK};
    }
    return done;
}

status replay_run(ctx *c, replay *of, const plan *p, int from, int to, run *r, cuda_run *where) {
    int at = from;

    r->cuda = where;
    (void)pthread_mutex_lock(&of->lock);
    range *now = find_range(of, p, from, to);
    (void)pthread_mutex_unlock(&of->lock);
    for (int i = 0; now && i < now->count; i++) {
        section *s = &now->list[i];
        TRY(exec_run(c, p, at, s->from, r));
        (void)pthread_mutex_lock(&of->lock);
        const bool done = started(c, of, p, s, r, where);
        (void)pthread_mutex_unlock(&of->lock);
        if (!done) TRY(exec_run(c, p, s->from, s->to, r));
        at = s->to;
    }
    return exec_run(c, p, at, to, r);
}

replay_counts replay_count(replay *of) {
    (void)pthread_mutex_lock(&of->lock);
    const replay_counts n = of->counts;
    (void)pthread_mutex_unlock(&of->lock);
    return n;
}
