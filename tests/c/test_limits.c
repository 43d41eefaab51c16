/* test_limits.c -- tests that limits in files of /proc and of control groups are kept to. A model that claims more is
 * refused with the name of its node.
 *
 * The files are made up, in a folder of the test's; the models are built and planned as always. */
#include "core/limit.h"
#include "core/memory.h"
#include "plan/compile.h"
#include "plan/peak.h"

#include "build.h"
#include "machine.h"
#include "test.h"

#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

enum { KB = 1 << 10, MB = 1 << 20 };
static const size_t GB = (size_t)1 << 30;

/* --- a folder with files -------------------------------------------------------------------------------------------- */

typedef struct folder {
    char path[64];
} folder;

static void add_file(const folder *f, const char *name, const char *text) {
    char path[512];

    snprintf(path, sizeof path, "%s", f->path);
    for (const char *from = name, *slash; (slash = strchr(from, '/')); from = slash + 1) {
        snprintf(path, sizeof path, "%s/%.*s", f->path, (int)(slash - name), name);
        (void)mkdir(path, 0700);
    }
    snprintf(path, sizeof path, "%s/%s", f->path, name);
    FILE *file = fopen(path, "w");
    CHECK(file && fputs(text, file) >= 0);
    if (file) (void)fclose(file);
}

static const char meminfo[] = "MemTotal:       16777216 kB\nMemFree:  1 kB\nMemAvailable:    8388608 kB\n"
                              "SwapTotal:       1048576 kB\nSwapFree:         524288 kB\n"; /* 16, 8, 1 and a half GB */

static folder new_folder(void) {
    folder f = {"/tmp/limits-XXXXXX"};

    CHECK(mkdtemp(f.path) != NULL);
    add_file(&f, "proc/meminfo", meminfo);
    return f;
}

static void remove_folder(const folder *f) {
    char command[128];

    memory_limits_from(NULL);
    snprintf(command, sizeof command, "rm -r '%s'", f->path);
    CHECK(system(command) == 0);
}

static bool limits_are(const folder *f, size_t most, size_t room) {
    memory_limits_from(f->path);
    const memory_limits l = memory_limits_now();
    if (l.most != most || l.room != room) printf("most %zu room %zu\n", l.most, l.room);
    return l.most == most && l.room == room;
}

/* --- reading -------------------------------------------------------------------------------------------------------- */

TEST(the_machine_s_memory_is_a_limit) {
    const folder f = new_folder();
    CHECK(limits_are(&f, 17 * GB, 8 * GB + GB / 2));
    remove_folder(&f);
}

TEST(without_files_nothing_is_limited) {
    const folder f = new_folder();
    char path[128];

    snprintf(path, sizeof path, "%s/proc/meminfo", f.path);
    CHECK(remove(path) == 0);
    CHECK(limits_are(&f, SIZE_MAX, SIZE_MAX));
    CHECK(memory_fits(SIZE_MAX / 8));
    remove_folder(&f);
}

#ifndef ORT_SANITIZE /* whose own memory is beyond any limit: the process ends when it maps more */
TEST(addresses_are_a_limit) {
    const folder f = new_folder();
    const size_t page = (size_t)sysconf(_SC_PAGESIZE);
    struct rlimit was, now;
    char statm[64];

    CHECK(getrlimit(RLIMIT_AS, &was) == 0 && was.rlim_cur == RLIM_INFINITY && !memory_addresses_limited());
    snprintf(statm, sizeof statm, "%zu 5 4 3 0 2 0\n", 3 * GB / page);
    add_file(&f, "proc/self/statm", statm);
    now = (struct rlimit){.rlim_cur = 10 * GB, .rlim_max = was.rlim_max};
    CHECK(setrlimit(RLIMIT_AS, &now) == 0);
    CHECK(memory_addresses_limited() && limits_are(&f, 10 * GB, 7 * GB));
    now.rlim_cur = 2 * GB; /* less than there is */
    CHECK(setrlimit(RLIMIT_AS, &now) == 0);
    CHECK(limits_are(&f, 2 * GB, 0));
    CHECK(setrlimit(RLIMIT_AS, &was) == 0);
    CHECK(limits_are(&f, 17 * GB, 8 * GB + GB / 2));
    remove_folder(&f);
}
#endif

static const char second_mount[] = "22 1 0:1 / /proc rw - proc proc rw\n"
                                   "31 22 0:28 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n";

/* Version 2: the least of the own group and of all above it, each less what it uses that is no file's. */
TEST(groups_of_version_2_are_limits) {
    const folder f = new_folder();

    add_file(&f, "proc/self/mountinfo", second_mount);
    add_file(&f, "proc/self/cgroup", "0::/system.slice/job.scope\n");
    add_file(&f, "sys/fs/cgroup/system.slice/job.scope/memory.max", "max\n");
    add_file(&f, "sys/fs/cgroup/system.slice/job.scope/memory.current", "1000\n");
    add_file(&f, "sys/fs/cgroup/system.slice/memory.max", "1073741824\n");
    add_file(&f, "sys/fs/cgroup/system.slice/memory.current", "805306368\n");
    add_file(&f, "sys/fs/cgroup/system.slice/memory.stat", "anon 1\ninactive_file 268435456\nactive_file 0\n");
    CHECK(limits_are(&f, GB, GB / 2));

    add_file(&f, "sys/fs/cgroup/system.slice/job.scope/memory.max", "268435456\n"); /* without a memory.stat */
    CHECK(limits_are(&f, GB / 4, GB / 4 - 1000));

    add_file(&f, "sys/fs/cgroup/system.slice/memory.max", "134217728\n"); /* a parent allows less, and has none left */
    CHECK(limits_are(&f, GB / 8, 0));
    remove_folder(&f);
}

TEST(groups_of_version_1_are_limits) {
    const folder f = new_folder();

    add_file(&f, "proc/self/mountinfo",
             "31 23 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw\n"
             "34 31 0:31 / /sys/fs/cgroup/cpuset rw - cgroup cgroup rw,cpuset\n"
             "35 31 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
             "41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n");
    add_file(&f, "proc/self/cgroup", "9:name=systemd:/\n4:hugetlb,memory:/a/b\n0::/\n");
    add_file(&f, "sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n");
    add_file(&f, "sys/fs/cgroup/memory/memory.usage_in_bytes", "5\n");
    add_file(&f, "sys/fs/cgroup/memory/a/memory.limit_in_bytes", "2147483648\n");
    add_file(&f, "sys/fs/cgroup/memory/a/memory.usage_in_bytes", "1610612736\n");
    add_file(&f, "sys/fs/cgroup/memory/a/memory.stat",
             "inactive_file 7\ntotal_inactive_file 268435456\ntotal_active_file 268435456\n");
    add_file(&f, "sys/fs/cgroup/memory/a/b/memory.limit_in_bytes", "9223372036854771712\n");
    add_file(&f, "sys/fs/cgroup/memory/a/b/memory.usage_in_bytes", "9\n");
    CHECK(limits_are(&f, 2 * GB, GB));
    remove_folder(&f);
}

/* A container sees its group where the hierarchy is mounted, and reads a name that only the machine knows. */
TEST(a_container_s_own_group_is_a_limit) {
    const folder f = new_folder();

    add_file(&f, "proc/self/mountinfo", "41 31 0:38 /docker/1234 /sys/fs/cgroup ro - cgroup2 cgroup rw\n");
    add_file(&f, "proc/self/cgroup", "0::/docker/1234\n");
    add_file(&f, "sys/fs/cgroup/memory.max", "1073741824\n");
    add_file(&f, "sys/fs/cgroup/memory.current", "0\n");
    CHECK(limits_are(&f, GB, GB));
    add_file(&f, "proc/self/cgroup", "0::/../../elsewhere\n");
    CHECK(limits_are(&f, GB, GB));
    add_file(&f, "proc/self/cgroup", "0::/docker/1234/inner\n");
    add_file(&f, "sys/fs/cgroup/inner/memory.max", "1048576\n");
    add_file(&f, "sys/fs/cgroup/inner/memory.current", "1048000\n");
    CHECK(limits_are(&f, MB, 576));
    remove_folder(&f);
}

/* --- keeping to it -------------------------------------------------------------------------------------------------- */

/* A group of version 2 that may use `bytes` and uses nothing. */
static folder limited_to(size_t bytes) {
    const folder f = new_folder();
    char text[32];

    snprintf(text, sizeof text, "%zu\n", bytes);
    add_file(&f, "proc/self/mountinfo", second_mount);
    add_file(&f, "proc/self/cgroup", "0::/\n");
    add_file(&f, "sys/fs/cgroup/memory.max", text);
    add_file(&f, "sys/fs/cgroup/memory.current", "0\n");
    memory_limits_from(f.path);
    return f;
}

TEST(blocks_keep_to_the_limit) {
    const folder f = limited_to(64 * MB);
    void *m = memory_take(65 * MB);

    CHECK(m == NULL);
    memory_give(m);
    m = memory_take(60 * MB);
    CHECK(m != NULL);
    memory_give(m);
    CHECK(!memory_would_fit(256 * MB));
    memory_trim();
    remove_folder(&f);
    m = memory_take(65 * MB);
    CHECK(m != NULL);
    memory_give(m);
    memory_trim();
}

TEST(building_keeps_to_the_limit) {
    const folder f = limited_to(64 * MB);
    char *p;
    ctx c;

    ctx_init(&c);
    CHECK_FAILS(&c, E_NOMEM, "out of memory", NEW(&c, p, 65 * MB));
    CHECK_OK(&c, NEW(&c, p, 32 * MB));
    ctx_release(&c);
    remove_folder(&f);
}

/* y = op(x, ...), which a run makes; its node is named "big". */
static status plan_of_one(ctx *c, const char *op, const attr *attrs, int n, const int64_t (*lists)[2], plan **out) {
    value *in[4] = {NULL};
    graph *g;
    node *made;

    TRY(graph_new(c, &g));
    g->opset = 18;
    TRY(graph_add_input(g, "x", F32, &(shape){.rank = -1}, &in[0]));
    for (int i = 0; i < n; i++)
        if (lists[i][0] >= 0) TRY(graph_ints(g, 2, lists[i], &in[i + 1]));
    TRY(graph_add_node(g, op_find("", op, 18), "big", attrs, n + 1, in, 1, &made));
    TRY(graph_add_node(g, op_find("", "Tanh", 18), "after", NULL, 1, made->out, 1, &made));
    TRY(graph_add_output(g, made->out[0]));
    const input_spec spec = SPEC(F32, true, 2, 2);
    return compile(c, g, &spec, &(compile_options){.output_grads = (bool[]){false}}, out);
}

/* A model of a hundred bytes; its result has 2^26 elements, in 256 MB. */
TEST(a_plan_that_no_run_has_memory_for_is_refused_with_its_node) {
    static const int64_t repeats[][2] = {{1 << 12, 1 << 12}};
    const folder f = limited_to(64 * MB);
    plan *p;
    ctx c;

    ctx_init(&c);
    CHECK_FAILS(
        &c, E_NOMEM,
        "; 67108864 bytes are all that this process may use; the largest: Contiguous (big) with 268435456 bytes",
        plan_of_one(&c, "Tile", NULL, 1, repeats, &p));
    ctx_release(&c);
    remove_folder(&f);

    ctx_init(&c);
    CHECK_OK(&c, plan_of_one(&c, "Tile", NULL, 1, repeats, &p));
    CHECK(p->run_bytes >= 256 * (int64_t)MB);
    CHECK_OK(&c, plan_check_memory(&c, p, false));
    memory_limits_from(NULL);
    const folder again = limited_to(64 * MB);
    CHECK_FAILS(&c, E_NOMEM, "; 67108864 bytes are free; the largest: Contiguous (big) with 268435456 bytes",
                plan_check_memory(&c, p, false));
    ctx_release(&c);
    remove_folder(&again);
}

/* A table for each axis: 2^24 places, and weights that outgrow them, while the graph is made. */
TEST(tables_of_a_resize_keep_to_the_limit_with_the_node) {
    static const int64_t sizes[][2] = {{-1}, {-1}, {2, 1 << 24}};
    const folder f = limited_to(64 * MB);
    plan *p;
    ctx c;

    ctx_init(&c);
    CHECK_FAILS(&c, E_NOMEM, "big", plan_of_one(&c, "Resize", NODE_ATTRS(STRING("mode", "linear")), 3, sizes, &p));
    ctx_release(&c);
    remove_folder(&f);
}

/* Reflecting takes a list of places. */
TEST(places_of_a_pad_keep_to_the_limit_with_the_node) {
    const int64_t pads[] = {0, (1 << 22) - 1, 0, (1 << 22) - 1};
    const folder f = limited_to(64 * MB);
    value *x, *amount;
    graph *g;
    node *n;
    plan *p;
    ctx c;

    ctx_init(&c);
    CHECK_OK(&c, graph_new(&c, &g));
    g->opset = 18;
    CHECK_OK(&c, graph_add_input(g, "x", F32, &(shape){.rank = -1}, &x));
    CHECK_OK(&c, graph_ints(g, 4, pads, &amount));
    CHECK_OK(&c, graph_add_node(g, op_find("", "Pad", 18), "big", NODE_ATTRS(STRING("mode", "reflect")), 2,
                                (value *[]){x, amount}, 1, &n));
    CHECK_OK(&c, graph_add_output(g, n->out[0]));
    const input_spec spec = SPEC(F32, true, 1, 1 << 22);
    CHECK_FAILS(&c, E_NOMEM, "big", compile(&c, g, &spec, &(compile_options){.output_grads = (bool[]){false}}, &p));
    ctx_release(&c);
    remove_folder(&f);
}

/* Constants of a megabyte less a little, a thousand times: the first are folded, the others are computed in each run. */
TEST(folding_ends_before_it_fills_the_memory) {
    enum { NODES = 1000, EACH = 200 * KB };
    const folder f = limited_to(GB);
    graph *g;
    ctx c;

    ctx_init(&c);
    g = new_graph(&c);
    value *x, *sizes = INT_LIST(g, 2, EACH / 2), *sum = number(g, F32, 0);
    CHECK_OK(&c, graph_add_constant(g, F32, &SHAPE(2, 1), (float[]){1, 2}, &x)); /* not one number, repeated */
    for (int i = 0; i < NODES; i++) {
        value *y = NODE(g, "Mul", NODE(g, "Expand", x, sizes), number(g, F32, i));
        y = NODE_WITH(g, "ReduceSum", NODE_ATTRS(INT("keepdims", 0)), y);
        sum = NODE(g, "Add", sum, y);
    }
    CHECK(c.mem.total < 64 * (size_t)MB);
    CHECK(count_nodes(g, "Mul") > NODES / 2 && count_nodes(g, "Mul") < NODES - 4);
    make_output(g, sum);
    ctx_release(&c);
    remove_folder(&f);
}
