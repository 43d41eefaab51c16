/* exec.c -- interprets instructions: operands' addresses, the kernel, the next one. */
#include "exec/exec.h"

#include "core/memory.h"
#include "exec/record.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>

#ifdef ORT_SANITIZE
#include <sanitizer/asan_interface.h>

/* Blocks are poisoned except while they live, so an overrun into a neighbour or a read of a dead value is reported. */
static void poison_all(const plan *p, const run *r, int from) {
    const int64_t bytes = plan_arena_bytes(p, r->joint);
    int n;
    const interval *blocks = plan_arena_blocks(p, r->joint, &n);

    if (bytes) ASAN_POISON_MEMORY_REGION(r->arena, (size_t)bytes);
    for (int i = 0; i < n; i++)
        if (blocks[i].first < from && blocks[i].last >= from)
            ASAN_UNPOISON_MEMORY_REGION((char *)r->arena + blocks[i].offset, (size_t)blocks[i].bytes);
}

static void poison_step(const plan *p, const run *r, int t, bool before) {
    int n;
    const interval *blocks = plan_arena_blocks(p, r->joint, &n);

    for (int i = 0; i < n; i++) {
        char *bytes = (char *)r->arena + blocks[i].offset;
        if (before && blocks[i].first == t) ASAN_UNPOISON_MEMORY_REGION(bytes, (size_t)blocks[i].bytes);
        if (!before && blocks[i].last == t) ASAN_POISON_MEMORY_REGION(bytes, (size_t)blocks[i].bytes);
    }
}

static void unpoison_all(const plan *p, const run *r) {
    const int64_t bytes = plan_arena_bytes(p, r->joint);
    if (bytes) ASAN_UNPOISON_MEMORY_REGION(r->arena, (size_t)bytes);
}
#else
static inline void poison_all(const plan *p, const run *r, int from) { (void)p, (void)r, (void)from; }
static inline void poison_step(const plan *p, const run *r, int t, bool before) {
    (void)p, (void)r, (void)t, (void)before;
}
static inline void unpoison_all(const plan *p, const run *r) { (void)p, (void)r; }
#endif

#ifdef ORT_BROKEN
/* A build for tests of what finds mistakes: the kernels of the operator that ORTMODULE_BROKEN names compute something
 * else at one place of their first result. */
static bool is_broken(const node *n) {
    const char *name = getenv("ORTMODULE_BROKEN"), *step = node_string(n, "steps");
    size_t length = name ? strlen(name) : 0;

    if (!length) return false;
    while (*step) { /* of a fused chain */
        size_t own = strcspn(step, " ");
        if (own == length && strncmp(step, name, own) == 0) return true;
        step += own + (step[own] == ' ');
    }
    return strcmp(name, n->op->name) == 0;
}

static void spoil(const node *n, const tensor *result) {
    if (!is_broken(n) || !result->data || !dtype_is_float(result->type)) return;
    int64_t last = tensor_count(result) - 1;
    double x = last < 0 ? 0 : dtype_get(result->type, result->data, last);
    if (last >= 0) dtype_set_value(result->type, result->data, last, 1.5 * x + 0.25);
}
#else
static inline void spoil(const node *n, const tensor *result) { (void)n, (void)result; }
#endif

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* Runs of one plan at once add to the same times. */
static void add_seconds(double *to, double x) {
    double before, after;

    __atomic_load(to, &before, __ATOMIC_RELAXED);
    do after = before + x;
    while (!__atomic_compare_exchange(to, &before, &after, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
}

static tensor resolve(const run *r, const operand *o) {
    tensor t = o->t;
    if (o->place == AT_ARENA) t.data = (char *)r->arena + (r->joint ? o->joint : o->offset);
    else if (o->place == AT_CONSTANT && r->cuda) t.data = (char *)(uintptr_t)r->constants + o->offset;
    else if (o->place > AT_CONSTANT) t.data = (char *)r->memory[o->place][o->index] + o->offset;
    return t;
}

static status step(ctx *c, const instr *in, const run *r, tensor *operands) {
    const node *n = in->node;
    call k = {.node = n, .n_in = n->n_in, .n_out = n->n_out, .seed = r->seed, .host = r->host, .room = r->room};
    tensor *results = operands + n->n_in;

    for (int i = 0; i < n->n_in; i++) operands[i] = resolve(r, &in->in[i]);
    for (int i = 0; i < n->n_out; i++) results[i] = resolve(r, &in->out[i]);
    k.cuda = r->cuda;
    k.in = operands;
    k.out = results;
    if (in->work >= 0) k.work = (char *)r->arena + (r->joint ? in->joint_work : in->work);
    if (r->cuda) return n->op->cuda(c, &k);
    TRY(n->op->cpu(c, &k));
    if (n->n_out) spoil(n, &results[0]);
    return OK;
}

/* The same, with all that watches it. */
static status step_watched(ctx *c, const plan *p, int t, const run *r, tensor *operands) {
    const instr *in = &p->code[t];
    const double start = r->seconds ? now() : 0;
    torch_range range = {0};
    status s;

    if (r->recorded) {
        for (int i = 0; i < in->node->n_in; i++) operands[i] = resolve(r, &in->in[i]);
        record_begin(in->node, operands, r->cuda != NULL, &range);
    }
    s = step(c, in, r, operands);
    torch_range_end(&range);
    if (r->seconds) add_seconds(&r->seconds[t], now() - start);
    return s;
}

static status blame_node(ctx *c, status s, const node *n) {
    return blame(c, s, "running %s (%s)", n->op->name, n->name ? n->name : "-");
}

/* Room for the operands of any instruction: of nearly all plans on the stack. */
enum { FEW_OPERANDS = 64 };
typedef struct room {
    tensor few[FEW_OPERANDS], *operands;
} room;

static status make_room(ctx *c, const plan *p, room *m) {
    m->operands = m->few;
    if (p->most_operands <= FEW_OPERANDS) return OK;
    if ((m->operands = memory_take(sizeof(tensor) * (size_t)p->most_operands))) return OK;
    return fail(c, E_NOMEM, "out of memory: an instruction has %d operands", p->most_operands);
}

static void give_room(room *m) {
    if (m->operands != m->few) memory_give(m->operands);
}

status exec_run(ctx *c, const plan *p, int from, int to, const run *r) {
    const bool watched = r->seconds || r->recorded;
    status s = OK;
    room m;

    TRY(make_room(c, p, &m));

    poison_all(p, r, from);
    for (int t = from; t < to && s == OK; t++) {
        poison_step(p, r, t, true);
        s = watched ? step_watched(c, p, t, r, m.operands) : step(c, &p->code[t], r, m.operands);
        poison_step(p, r, t, false);
        if (s != OK) s = blame_node(c, s, p->code[t].node);
    }
    unpoison_all(p, r);
    give_room(&m);
    return s;
}

/* Operands without memory: what is known of an instruction when its plan is made. */
static call without_memory(const instr *in, tensor *operands) {
    const node *n = in->node;

    for (int i = 0; i < n->n_in; i++) operands[i] = in->in[i].t;
    for (int i = 0; i < n->n_out; i++) operands[n->n_in + i] = in->out[i].t;
    return (call){.node = n, .n_in = n->n_in, .n_out = n->n_out, .in = operands, .out = operands + n->n_in};
}

status exec_products(ctx *c, const plan *p, product_fn *each, void *arg) {
    room m;

    TRY(make_room(c, p, &m));
    for (int t = 0; t < p->n_code; t++) {
        const call k = without_memory(&p->code[t], m.operands);
        if (k.node->op->products) k.node->op->products(&k, each, arg);
    }
    give_room(&m);
    return OK;
}

status exec_check(ctx *c, const plan *p, const struct cuda_run *where) {
    status s = OK;
    room m;

    TRY(make_room(c, p, &m));
    for (int t = 0; t < p->n_code && s == OK; t++) {
        call k = without_memory(&p->code[t], m.operands);
        k.cuda = where;
        s = k.node->op->cuda(c, &k);
        if (s != OK) s = blame_node(c, s, k.node);
    }
    give_room(&m);
    return s;
}
