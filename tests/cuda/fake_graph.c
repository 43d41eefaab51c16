/* fake_graph.c -- captures streams of the emulated driver, and starts graphs of what was captured.
 *
 * A graph is a list of work with copies of all arguments, so what changes them afterwards shows. It checks the order of
 * calls, and that an executable graph is updated only by one of the same kinds of work.
 *     fake_graphs()    graphs that were started
 *     fake_user_capture(on)  from now on the caller of the engine captures the default stream, which gets nothing to run;
 *                            0: the capture has ended
 *     fake_user_replay()     runs what was captured, as often as it is called */
#include "fake.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

enum {
    SUCCESS,
    INVALID_VALUE = 1,
    OUT_OF_MEMORY = 2,
    INVALID_HANDLE = 400,
    CAPTURE_INVALIDATED = 901,
    CAPTURE_UNMATCHED = 903,
    WRONG_THREAD = 908,
    UPDATE_FAILURE = 910
};
enum { NON_BLOCKING = 1, THREAD_LOCAL = 1 };

typedef struct item {
    fake_work *run;
    void *data;
    struct item *next;
} item;

typedef enum kind { STREAM = 0x5354, GRAPH = 0x4752, EXECUTABLE = 0x4558, GONE = 0 } kind;

/* A stream's items are those of the capture that goes on there. */
typedef struct thing {
    kind kind;
    item *first, **last;
} thing;

static _Thread_local thing *capturing;
static _Thread_local int poisoned;
static thing users = {.kind = GRAPH, .last = &users.first}; /* its items are those of the caller's capture */
static int user_captures;
static int started, given;

int fake_graphs(void) { return started; }
int fake_given(void) { return given; }
int fake_capturing(void) { return capturing != NULL || user_captures; }
int fake_user_captures(void) { return user_captures; }

static int complain(int result, const char *what) {
    fake_complain(what);
    return result;
}

static thing *make(kind of) {
    thing *t = calloc(1, sizeof *t);
    if (!t) return NULL;
    t->kind = of;
    t->last = &t->first;
    fake_hold(1);
    return t;
}

static int add(thing *to, fake_work *run, const void *data, unsigned long bytes) {
    item *i = malloc(sizeof *i);
    void *copy = malloc(bytes);

    if (!i || !copy) {
        free(i), free(copy);
        return OUT_OF_MEMORY;
    }
    *i = (item){.run = run, .data = memcpy(copy, data, bytes)};
    *to->last = i;
    to->last = &i->next;
    return SUCCESS;
}

static void clear(thing *t) {
    for (item *i = t->first, *next; i; i = next) {
        next = i->next;
        free(i->data);
        free(i);
    }
    t->first = NULL;
    t->last = &t->first;
}

/* The memory stays readable, so that a second time is seen. */
static int give_back(thing *t, kind of, const char *what) {
    if (!t || t->kind != of) return complain(INVALID_HANDLE, what);
    clear(t);
    t->kind = GONE;
    fake_hold(-1);
    return SUCCESS;
}

int fake_is_stream(const void *stream) { return stream && ((const thing *)stream)->kind == STREAM; }

void fake_poison(void) { poisoned = capturing != NULL; }

EXPORT void fake_user_capture(int on);
EXPORT int fake_user_replay(void);
void fake_user_capture(int on) {
    if (on) clear(&users);
    user_captures = on;
}
int fake_user_replay(void) {
    int result = SUCCESS;
    for (const item *i = users.first; i && result == SUCCESS; i = i->next) result = i->run(i->data);
    return result;
}

int fake_give(void *stream, fake_work *run, const void *data, unsigned long bytes) {
    thing *t = stream;

    if (t && t->kind != STREAM) return complain(INVALID_HANDLE, "a stream that there is not");
    if (t != capturing) return complain(INVALID_HANDLE, "work outside of the stream that is captured");
    if (t && poisoned) return CAPTURE_INVALIDATED;
    if (t || user_captures) return add(t ? t : &users, run, data, bytes);
    given++;
    return run(data);
}

#define ENTER()                                                                                                        \
    do {                                                                                                               \
        if (!fake_enter()) return OUT_OF_MEMORY;                                                                       \
        if (!fake_in_context()) return complain(INVALID_HANDLE, "a call without the device's context");                \
    } while (0)

EXPORT int cuStreamCreate(void **out, unsigned flags);
EXPORT int cuStreamBeginCapture_v2(void *stream, int mode);
EXPORT int cuStreamEndCapture(void *stream, void **graph);
EXPORT int cuGraphDestroy(void *graph);
EXPORT int cuGraphInstantiateWithFlags(void **out, void *graph, unsigned long long flags);
EXPORT int cuGraphExecUpdate_v2(void *executable, void *graph, void *why);
EXPORT int cuGraphExecDestroy(void *executable);
EXPORT int cuGraphLaunch(void *executable, void *stream);

int cuStreamCreate(void **out, unsigned flags) {
    ENTER();
    if (flags != NON_BLOCKING || fake_capturing()) return complain(INVALID_VALUE, "a stream is made");
    return (*out = make(STREAM)) ? SUCCESS : OUT_OF_MEMORY;
}

int cuStreamBeginCapture_v2(void *stream, int mode) {
    thing *t = stream;

    ENTER();
    if (!t || t->kind != STREAM || mode != THREAD_LOCAL) return complain(INVALID_HANDLE, "a capture that begins");
    if (fake_capturing() || t->first) return complain(INVALID_HANDLE, "a capture begins in another");
    capturing = t;
    return SUCCESS;
}

/* On request it fails, and ends the capture all the same. */
int cuStreamEndCapture(void *stream, void **graph) {
    const int fails = !fake_enter();
    thing *t = stream, *made;

    *graph = NULL;
    if (!t || t != capturing) return complain(t ? WRONG_THREAD : CAPTURE_UNMATCHED, "a capture that did not begin");
    capturing = NULL;
    if (fails || poisoned || !(made = make(GRAPH))) {
        const int result = poisoned ? CAPTURE_INVALIDATED : OUT_OF_MEMORY;
        clear(t);
        poisoned = 0;
        return result;
    }
    if (t->first) made->first = t->first, made->last = t->last;
    t->first = NULL;
    t->last = &t->first;
    *graph = made;
    return SUCCESS;
}

int cuGraphDestroy(void *graph) {
    (void)fake_enter();
    return give_back(graph, GRAPH, "a graph given back that there is not");
}

int cuGraphExecDestroy(void *executable) {
    (void)fake_enter();
    return give_back(executable, EXECUTABLE, "an executable graph given back that there is not");
}

int cuGraphInstantiateWithFlags(void **out, void *graph, unsigned long long flags) {
    const thing *g = graph;
    thing *made;

    ENTER();
    if (!g || g->kind != GRAPH || flags) return complain(INVALID_HANDLE, "a graph that there is not");
    if (fake_capturing()) return complain(INVALID_HANDLE, "a graph is made ready during a capture");
    if (!(made = make(EXECUTABLE))) return OUT_OF_MEMORY;
    *made = (thing){.kind = EXECUTABLE, .first = g->first};
    if (!g->first) made->last = &made->first;
    ((thing *)graph)->first = NULL;
    ((thing *)graph)->last = &((thing *)graph)->first;
    *out = made;
    return SUCCESS;
}

/* The same kinds of work in the same order. */
int cuGraphExecUpdate_v2(void *executable, void *graph, void *why) {
    thing *e = executable, *g = graph;
    const item *a, *b;
    item *moved;

    ENTER();
    if (!e || e->kind != EXECUTABLE || !g || g->kind != GRAPH || !why)
        return complain(INVALID_HANDLE, "an executable graph is updated");
    for (a = e->first, b = g->first; a && b && a->run == b->run; a = a->next, b = b->next) {
    }
    if (a || b) return UPDATE_FAILURE;
    moved = e->first;
    e->first = g->first;
    g->first = moved;
    return SUCCESS;
}

int cuGraphLaunch(void *executable, void *stream) {
    const thing *e = executable;

    ENTER();
    if (!e || e->kind != EXECUTABLE) return complain(INVALID_HANDLE, "an executable graph that there is not");
    if (stream || fake_capturing()) return complain(INVALID_HANDLE, "a graph is started in a stream that there is not");
    started++;
    given++;
    for (const item *i = e->first; i; i = i->next) {
        const int result = i->run(i->data);
        if (result != SUCCESS) return result;
    }
    return SUCCESS;
}
