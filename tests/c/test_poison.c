/* test_poison.c -- tests that sanitized builds catch a kernel that leaves its memory, also where it stays in the
 * arena.
 *
 * Planted kernels do what is forbidden, each in a process of its own, which must end with a report. */
#include "machine.h"
#include "test.h"

#ifdef ORT_SANITIZE

#include "ops/op.h"

#include <sys/wait.h>
#include <unistd.h>

enum { MANY = 1000, FEW = 3, ZONE = 64 };

/* --- planted kernels ------------------------------------------------------------------------------------------------ */

static int misplaced;      /* the element of its result that a kernel writes */
static const float *stale; /* where a value was */

static status write_cpu(ctx *c, const call *k) {
    (void)c;
    ((volatile float *)k->out[0].data)[misplaced] = 1;
    return OK;
}

static status remember_cpu(ctx *c, const call *k) {
    (void)c;
    stale = k->out[0].data;
    return OK;
}

static status recall_cpu(ctx *c, const call *k) {
    (void)c;
    ((volatile float *)k->out[0].data)[0] = ((volatile const float *)stale)[MANY - 1];
    return OK;
}

static status work_cpu(ctx *c, const call *k) {
    (void)c;
    ((volatile float *)k->work)[FEW] = 1;
    return OK;
}

static size_t work_bytes(const node *n) {
    (void)n;
    return FEW * sizeof(float);
}

static status infer_many(graph *g, node *n) { return set_out(g, n, 0, F32, &SHAPE(MANY)); }
static status infer_few(graph *g, node *n) { return set_out(g, n, 0, F32, &SHAPE(FEW)); }

#define PLANTED(name_, infer_, cpu_)                                                                                   \
    .name = name_, .domain = ORT_DOMAIN, .since = 1, .min_in = 1, .max_in = 1, .max_out = 1, .infer = infer_,          \
    .cpu = cpu_

static const op_def write_many = {PLANTED("Write", infer_many, write_cpu)};
static const op_def write_few = {PLANTED("WriteFew", infer_few, write_cpu)};
static const op_def remember = {PLANTED("Remember", infer_many, remember_cpu)};
static const op_def recall = {PLANTED("Recall", infer_few, recall_cpu)};
static const op_def overwork = {PLANTED("Overwork", infer_few, work_cpu), .workspace = work_bytes};

/* --- models of them ------------------------------------------------------------------------------------------------- */

/* A chain of nodes: the last one's result is an output, the others' are in the arena. */
static void make_chain(ctx *c, int n, const op_def *const *ops, graph **out) {
    value *v = NULL;
    node *made;

    ctx_init(c);
    CHECK_OK(c, graph_new(c, out));
    CHECK_OK(c, graph_add_input(*out, "x", F32, &SHAPE(FEW), &v));
    for (int i = 0; i < n; i++) {
        CHECK_OK(c, graph_add_node(*out, ops[i], ops[i]->name, NULL, 1, &v, 1, &made));
        v = made->out[0];
    }
    CHECK_OK(c, graph_add_output(*out, v));
}

static void run_chain(int n, const op_def *const *ops) {
    static const input_spec few = SPEC(F32, false, FEW);
    static const compile_options inference = {0};
    machine m;
    graph *g;
    ctx c;

    make_chain(&c, n, ops, &g);
    CHECK_OK(&m.c, machine_make(&m, g, &few, &inference));
    CHECK_OK(&m.c, machine_forward(&m));
    machine_free(&m);
    ctx_release(&c);
}

/* --- what happens to them ------------------------------------------------------------------------------------------- */

/* Runs the chain in a child; its exit status, and the beginning of what it wrote to stderr. */
static int run_apart(int n, const op_def *const *ops, char *text, size_t room) {
    size_t used = 0;
    ssize_t more;
    int ends[2], state = -1;
    pid_t child;

    if (!CHECK(pipe(ends) == 0)) return -1;
    (void)fflush(stdout);
    child = fork();
    if (child == 0) {
        (void)dup2(ends[1], STDERR_FILENO);
        (void)close(ends[0]);
        run_chain(n, ops);
        _exit(0);
    }
    (void)close(ends[1]);
    while (used + 1 < room && (more = read(ends[0], text + used, room - 1 - used)) > 0) used += (size_t)more;
    text[used] = '\0';
    (void)close(ends[0]); /* what did not fit is not needed */
    CHECK(child > 0 && waitpid(child, &state, 0) == child);
    return state;
}

#define OPS(...)                                                                                                       \
    (int)(sizeof((const op_def *[]){__VA_ARGS__}) / sizeof(op_def *)), (const op_def *[]) { __VA_ARGS__ }
#define CAUGHT(report, ...)                                                                                            \
    do {                                                                                                               \
        char text_[1 << 16];                                                                                           \
        int state_ = run_apart(OPS(__VA_ARGS__), text_, sizeof text_);                                                 \
        CHECK(!WIFEXITED(state_) || WEXITSTATUS(state_) != 0);                                                         \
        test_check(strstr(text_, report) != NULL, __FILE__, __LINE__, "caught: " report, text_);                       \
    } while (0)

TEST(a_kernel_that_stays_in_its_memory_is_left_alone) {
    char text[4096];

    misplaced = 0;
    CHECK(run_apart(OPS(&write_many, &write_few, &write_few), text, sizeof text) == 0);
    CHECK(text[0] == '\0');
}

TEST(a_write_behind_a_result_is_caught) {
    misplaced = MANY;
    CAUGHT("use-after-poison", &write_many, &write_few);
    misplaced = FEW; /* within the alignment of the next block */
    CAUGHT("use-after-poison", &write_few, &write_few);
}

TEST(a_write_before_a_result_is_caught) {
    misplaced = -1; /* the second block has one before it */
    CAUGHT("AddressSanitizer", &write_few, &write_few);
    CAUGHT("use-after-poison", &remember, &write_few, &recall);
}

TEST(a_write_behind_an_output_is_caught) {
    misplaced = 2 * FEW;
    CAUGHT("heap-buffer-overflow", &write_few);
}

TEST(a_write_behind_the_workspace_is_caught) { CAUGHT("use-after-poison", &overwork, &write_few); }

TEST(a_read_of_a_dead_value_is_caught) {
    misplaced = 0;
    CAUGHT("use-after-poison", &remember, &write_few, &recall, &write_few);
}

TEST(there_is_room_between_blocks) {
    static const input_spec few = SPEC(F32, false, FEW);
    static const compile_options inference = {0};
    static const op_def *const ops[] = {&write_many, &write_few, &overwork, &write_many, &write_few};
    machine m;
    graph *g;
    ctx c;

    make_chain(&c, 5, ops, &g);
    CHECK_OK(&m.c, machine_make(&m, g, &few, &inference));
    CHECK(m.p->n_blocks > 4);
    for (int i = 0; i < m.p->n_blocks; i++)
        for (int k = 0; k < i; k++) {
            const interval *a = &m.p->blocks[i], *b = &m.p->blocks[k];
            if (a->last < b->first || b->last < a->first) continue;
            CHECK(a->offset + a->bytes + ZONE <= b->offset || b->offset + b->bytes + ZONE <= a->offset);
        }
    machine_free(&m);
    ctx_release(&c);
}

#endif
