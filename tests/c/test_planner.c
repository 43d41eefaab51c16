/* test_planner.c -- tests plans of random graphs, without kernels: orders, lives, offsets, what backward computes
 * again, sweeps. */
#include "core/hash.h"
#include "passes/convex.h"
#include "plan/peak.h"
#include "plan/plan.h"

#include "build.h"
#include "test.h"

enum { STREAMS = 3, NODES = 40, SEEDS = 12, TARGETS = 12 };

/* --- random graphs -------------------------------------------------------------------------------------------------- */

typedef struct dice {
    uint64_t state;
} dice;

static int below(dice *d, int n) {
    d->state = d->state * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
    return (int)((d->state >> 33) % (uint64_t)n);
}

/* Values of one shape each, from one input each. */
typedef struct stream {
    value *made[NODES + 1], *gradient;
    int count;
} stream;

static value *random_node(graph *g, dice *d, const stream *s) {
    static const char *const unary[] = {"Exp", "Sigmoid", "Tanh", "Sqrt"}, *const binary[] = {"Add", "Mul", "Div"};
    value *x = s->made[s->count - 1 - below(d, s->count < 3 ? s->count : 3)], *y = s->made[below(d, s->count)];

    if (below(d, 3)) return NODE(g, unary[below(d, LENGTH(unary))], x);
    return NODE(g, binary[below(d, LENGTH(binary))], x, y);
}

/* Forward makes values from those before; backward reads about half of them in reverse. */
static graph *random_graph(ctx *c, uint64_t seed) {
    dice d = {seed};
    graph *g = new_graph(c);
    stream streams[STREAMS] = {{.count = 0}};
    value *sum = NULL, *dy;
    const shape scalar = {.rank = 0};

    for (int k = 0; k < STREAMS; k++) streams[k].made[streams[k].count++] = INPUT(g, "x", F32, 16 << (2 * k), 32);
    for (int i = 0; i < NODES; i++) {
        stream *s = &streams[below(&d, STREAMS)];
        s->made[s->count] = random_node(g, &d, s);
        s->count++;
    }
    for (int k = 0; k < STREAMS; k++) {
        value *part = NODE_WITH(g, "ReduceSum", NODE_ATTRS(INT("keepdims", 0)), streams[k].made[streams[k].count - 1]);
        sum = sum ? NODE(g, "Add", sum, part) : part;
    }
    make_output(g, sum);
    must(c, graph_add_input(g, NULL, F32, &scalar, &dy));
    g->in_backward = true;
    for (int k = 0; k < STREAMS; k++) {
        stream *s = &streams[k];
        s->gradient = NODE(g, "Mul", s->made[s->count - 1], dy);
        for (int i = s->count - 1; i > 0; i--)
            if (below(&d, 2)) s->gradient = NODE(g, "Mul", s->gradient, s->made[i]);
    }
    g->in_backward = false;
    for (int k = 0; k < STREAMS; k++) make_gradient(g, k, streams[k].gradient);
    return g;
}

/* --- what is computed ----------------------------------------------------------------------------------------------- */

static uint64_t hash_of_given(const value *v) {
    return v->data ? hash_mix(2, *(const uint32_t *)v->data) : hash_mix(1, (uint64_t)(v->input + 1));
}

static bool is_move(const node *n) { return strcmp(n->op->name, "Offload") == 0 || strcmp(n->op->name, "Reload") == 0; }

/* Of the value that it writes out or reads back; they agree on the place. */
static uint64_t of_moved(const node *n, const uint64_t *of) {
    if (n->in[0]->def && is_move(n->in[0]->def)) CHECK(node_int(n, "offset") == node_int(n->in[0]->def, "offset"));
    return of[n->in[0]->id];
}

/* Of what the node computes: its operator, and what it reads. */
static void hash_node(const node *n, uint64_t *of) {
    uint64_t h = (uint64_t)(uintptr_t)n->op;

    for (int i = 0; i < n->n_in; i++)
        if (n->in[i]) h = hash_mix(h, n->in[i]->def ? of[n->in[i]->id] : hash_of_given(n->in[i]));
    for (int i = 0; i < n->n_out; i++) of[n->out[i]->id] = is_move(n) ? of_moved(n, of) : hash_mix(h, (uint64_t)i);
}

/* A hash of the expression behind every gradient, in the order of the graph. */
static void hash_gradients(ctx *c, const graph *g, uint64_t out[STREAMS]) {
    uint64_t *of;

    must(c, NEW(c, of, g->n_values));
    for (const node *n = g->first; n; n = n->next) hash_node(n, of);
    for (int k = 0; k < STREAMS; k++) out[k] = of[g->input_grads[k]->id];
}

static bool overlap(const interval *a, const interval *b) {
    const bool together = a->first <= b->last && b->first <= a->last;
    return together && a->offset < b->offset + b->bytes && b->offset < a->offset + a->bytes;
}

/* The same of the joint arena, whose blocks are those of the other and the gradients, which stay to the end. */
static void check_joint(ctx *c, const plan *p, int64_t sum) {
    int64_t live;
    int at;

    CHECK(p->n_joint == p->n_blocks + STREAMS && p->gradient_bytes > 0);
    CHECK_OK(c, plan_peak(c, p, true, &at, &live));
    for (int i = 0; i < p->n_joint; i++) {
        const interval *b = &p->joint_blocks[i];
        CHECK(b->offset >= 0 && b->offset % PLAN_ALIGNED == 0 && b->offset + b->bytes <= p->joint_bytes);
        if (i < p->n_blocks) CHECK(b->first == p->blocks[i].first && b->last == p->blocks[i].last);
        else CHECK(b->first >= p->n_forward && b->last == p->n_code - 1);
        if (i >= p->n_blocks) sum += (b->bytes + 1023) / PLAN_ALIGNED * PLAN_ALIGNED;
        for (int k = 0; k < i; k++) CHECK(!overlap(b, &p->joint_blocks[k]));
    }
    CHECK(live <= p->joint_bytes && p->joint_bytes <= sum && p->gradient_bytes <= p->joint_bytes);
    for (int i = 0; i < p->g->n_inputs; i++) {
        const bool has = i < p->g->n_input_grads && p->g->input_grads[i];
        CHECK(has ? p->joint_grad[i] >= 0 : p->joint_grad[i] == -1);
    }
}

/* Instructions are the graph's nodes, each behind what makes its operands, none in the other phase or past what others see:
 * what they compute in this order are the same expressions. */
static void check_order(ctx *c, const plan *p) {
    uint64_t *written, *planned;
    const node *seen = p->g->first;

    must(c, NEW(c, written, p->g->n_values));
    must(c, NEW(c, planned, p->g->n_values));
    for (const node *n = p->g->first; n; n = n->next) hash_node(n, written);
    for (int t = 0; t < p->n_code; t++) {
        const node *n = p->code[t].node;
        CHECK((n->mark == PHASE_FORWARD) == (t < p->n_forward));
        hash_node(n, planned);
        for (int i = 0; i < n->n_out; i++)
            CHECK(planned[n->out[i]->id] == written[n->out[i]->id] && written[n->out[i]->id]);
        if (!node_is_seen(n)) continue;
        while (seen && !node_is_seen(seen)) seen = seen->next;
        CHECK(seen == n);
        seen = n->next;
    }
}

/* No two blocks share an address at one time, and the arena lies between what lives at one time and the sum of all. */
static plan *check_plan(ctx *c, graph *g) {
    int64_t live, sum = 0;
    plan *p;
    int at;

    g->joint_from = 1;
    CHECK_OK(c, plan_make(g, false, &p));
    check_order(c, p);
    CHECK_OK(c, plan_peak(c, p, false, &at, &live));
    for (int i = 0; i < p->n_blocks; i++) {
        const interval *b = &p->blocks[i];
        CHECK(0 <= b->first && b->first <= b->last && b->last < p->n_code && b->offset + b->bytes <= p->arena_bytes);
        sum += (b->bytes + 1023) / PLAN_ALIGNED * PLAN_ALIGNED; /* with a red zone */
        for (int k = 0; k < i; k++) CHECK(!overlap(b, &p->blocks[k]));
    }
    CHECK(live <= p->arena_bytes && p->arena_bytes <= sum);
    check_joint(c, p, sum);
    return p;
}

/* --- tests ---------------------------------------------------------------------------------------------------------- */

TEST(random_graphs_have_plans_without_overlap) {
    for (uint64_t seed = 0; seed < SEEDS; seed++) {
        ctx c;
        ctx_init(&c);
        check_plan(&c, random_graph(&c, seed));
        ctx_release(&c);
    }
}

/* Another order is one of the same steps, each behind what makes its operands, none out of its range. */
static void check_rule(ctx *c, const order_facts *f, order_rule way, int64_t *peak) {
    const order_problem *p = f->p;
    bool *made, *ran;
    int *order;

    must(c, NEW(c, order, p->n_steps));
    must(c, NEW(c, made, p->n_values));
    must(c, NEW(c, ran, p->n_steps));
    CHECK_OK(c, order_by(c, f, way, order));
    for (int k = 0; k < p->n_ranges; k++)
        for (int t = p->ranges[k]; t < p->ranges[k + 1]; t++) {
            const order_step *s = &p->steps[order[t]];
            CHECK(p->ranges[k] <= order[t] && order[t] < p->ranges[k + 1] && !ran[order[t]]);
            ran[order[t]] = true;
            for (int i = 0; i < s->n_in; i++) CHECK(made[s->in[i]]);
            for (int i = 0; i < s->n_out; i++) made[s->out[i]] = true;
        }
    CHECK_OK(c, order_peak(c, p, order, peak));
}

TEST(orders_keep_what_steps_need) {
    enum { STEPS = 300, RANGE = 60 };
    int better = 0;

    for (uint64_t seed = 0; seed < SEEDS; seed++) {
        static order_step steps[STEPS];
        static int in[STEPS][2], out[STEPS], ranges[STEPS / RANGE + 1];
        static int64_t bytes[STEPS];
        static bool to_end[STEPS];
        order_problem p = {.n_steps = STEPS,
                           .n_values = STEPS,
                           .steps = steps,
                           .bytes = bytes,
                           .to_end = to_end,
                           .ranges = ranges,
                           .n_ranges = STEPS / RANGE};
        int64_t written, peak, all = 0;
        dice d = {seed};
        order_facts f;
        ctx c;

        ctx_init(&c);
        for (int t = 0; t < STEPS; t++) {
            steps[t] = (order_step){.in = in[t], .out = &out[t], .n_out = 1, .in_place = below(&d, 2) == 0};
            steps[t].work = below(&d, 4) ? 0 : below(&d, 1000);
            out[t] = t;
            bytes[t] = below(&d, 1000);
            to_end[t] = below(&d, 20) == 0;
            all += bytes[t] + steps[t].work;
            if (t > 0) in[t][steps[t].n_in++] = t - 1 - below(&d, t < 90 ? t : 90);
            if (t > 1 && below(&d, 2) && in[t][0] != t / 2) in[t][steps[t].n_in++] = t / 2;
        }
        for (int k = 0; k <= STEPS / RANGE; k++) ranges[k] = k * RANGE;
        CHECK_OK(&c, order_facts_new(&c, &p, &f));
        check_rule(&c, &f, AS_WRITTEN, &written);
        for (order_rule way = AS_WRITTEN + 1; way < ORDER_RULES; way++) {
            check_rule(&c, &f, way, &peak);
            CHECK(peak > 0 && peak <= all);
            better += peak < written;
        }
        ctx_release(&c);
    }
    CHECK(better > 0);
}

/* Backward of a tied head: beside the gradient of the logits that of the weights need not be there while all activations
 * are, also where each layer reads something that is made again, of old operands alone. */
TEST(depth_first_makes_again_what_the_chain_waits_for) {
    enum { COUNT = 8, HEAD = COUNT, WEIGHTS, DOWN, STEPS = DOWN + 2 * COUNT + 2, LARGE = 100, SMALL = 3, KEPT = 10 };
    static order_step steps[STEPS];
    static int in[STEPS][3], out[STEPS], ranges[] = {0, COUNT, STEPS};
    static int64_t bytes[STEPS];
    static bool to_end[STEPS];
    order_problem p = {STEPS, STEPS, steps, bytes, to_end, ranges, 2};
    int64_t written, peak;
    order_facts f;
    int t = 0;
    ctx c;

    for (int i = 0; i < STEPS; i++) steps[i] = (order_step){.in = in[i], .out = &out[i], .n_out = 1}, out[i] = i;
    for (; t < COUNT; t++) bytes[t] = KEPT, steps[t].n_in = t > 0, in[t][0] = t - 1;
    bytes[HEAD] = bytes[WEIGHTS] = LARGE, bytes[DOWN] = SMALL;
    steps[HEAD].n_in = steps[WEIGHTS].n_in = steps[DOWN].n_in = 1;
    in[HEAD][0] = COUNT - 1, in[WEIGHTS][0] = in[DOWN][0] = HEAD;
    t = DOWN + 1;
    for (int layer = COUNT - 1, gradient = DOWN; layer >= 0; layer--, gradient = t - 1) {
        bytes[t] = SMALL, steps[t].n_in = 1, in[t++][0] = layer; /* again */
        bytes[t] = SMALL, steps[t].n_in = 3, in[t][0] = gradient, in[t][1] = t - 1, in[t][2] = layer, t++;
    }
    bytes[t] = LARGE, to_end[t] = steps[t].in_place = true, steps[t].n_in = 2, in[t][0] = WEIGHTS, in[t][1] = t - 1;
    ctx_init(&c);
    CHECK_OK(&c, order_facts_new(&c, &p, &f));
    check_rule(&c, &f, AS_WRITTEN, &written);
    check_rule(&c, &f, DEPTH_FIRST, &peak);
    CHECK(t == STEPS - 1 && written == 2 * LARGE + COUNT * KEPT + SMALL);
    CHECK(peak < 2 * LARGE + 2 * KEPT);
    ctx_release(&c);
}

/* The order that a plan has needs what the plan says, and is another only where that needs less. */
TEST(other_orders_are_beside_that_of_the_plan) {
    for (uint64_t seed = 0; seed < SEEDS; seed++) {
        int64_t live;
        int at;
        ctx c;

        ctx_init(&c);
        const plan *p = check_plan(&c, random_graph(&c, seed));
        CHECK_OK(&c, plan_peak(&c, p, true, &at, &live));
        CHECK(p->orders[p->order] >= live); /* of operands that could make room it knows one for each step */
        CHECK(p->order == AS_WRITTEN || order_is_worth(p->orders[p->order], p->orders[AS_WRITTEN]));
        for (order_rule way = AS_WRITTEN; way < ORDER_RULES; way++) CHECK(p->orders[way] >= p->gradient_bytes);
        ctx_release(&c);
    }
}

/* So many large values, each summed up to one number, all large ones written before all sums. */
static graph *sums(ctx *c, int count) {
    graph *g = new_graph(c);
    value *x = INPUT(g, "x", F32, 64, 64), *sum = NULL, **large;

    must(c, NEW(c, large, count));
    for (int i = 0; i < count; i++) large[i] = NODE(g, "Mul", x, number(g, F32, i + 2));
    for (int i = 0; i < count; i++) {
        value *part = NODE_WITH(g, "ReduceSum", NODE_ATTRS(INT("keepdims", 0)), large[i]);
        sum = sum ? NODE(g, "Add", sum, part) : part;
    }
    make_output(g, sum);
    return g;
}

TEST(the_order_that_needs_the_least_is_taken) {
    enum { COUNT = 16, LARGE = 64 * 64 * 4 };
    plan *p;
    ctx c;

    ctx_init(&c);
    CHECK_OK(&c, plan_make(sums(&c, COUNT), false, &p));
    check_order(&c, p);
    CHECK(p->orders[AS_WRITTEN] >= COUNT * LARGE);
    CHECK(p->orders[SMALLEST_FIRST] >= LARGE && p->orders[SMALLEST_FIRST] < 3 * LARGE && p->orders[LATEST] < 3 * LARGE);
    CHECK(p->order != AS_WRITTEN && p->arena_bytes < 3 * LARGE);
    ctx_release(&c);
}

/* A graph that computes again, or offloads, what is requested: the same gradients, in a plan without overlap. */
static recompute_result planned_to(uint64_t seed, const recompute_request *request) {
    uint64_t stored[STREAMS], again[STREAMS];
    recompute_result r;
    graph *g;
    ctx c;

    ctx_init(&c);
    g = random_graph(&c, seed);
    hash_gradients(&c, g, stored);
    CHECK_OK(&c, recompute(g, request, &r));
    CHECK_OK(&c, graph_verify(g));
    hash_gradients(&c, g, again);
    CHECK(memcmp(stored, again, sizeof stored) == 0);
    check_plan(&c, g);
    ctx_release(&c);
    return r;
}

static void check_sweeps(recompute_request request, int least_again) {
    int again = 0;
    for (uint64_t seed = 0; seed < SEEDS; seed++) {
        request.target = 0;
        const recompute_result least = planned_to(seed, &request);
        int64_t peak = INT64_MAX;
        double cost = 0;
        for (int k = TARGETS; k >= 0; k--) {
            const int64_t target = request.target = least.before * k / TARGETS;
            const recompute_result r = planned_to(seed, &request);
            CHECK(r.before == least.before && r.after >= least.after);
            CHECK(r.after <= target || (target < least.after && r.after == least.after)); /* the least, and no more */
            CHECK(r.after <= peak && r.cost >= cost && r.cost <= least.cost);
            CHECK((r.count + r.n_offloaded == 0) == (r.cost == 0));
            peak = r.after;
            cost = r.cost;
        }
        again += least.count + least.n_offloaded;
    }
    CHECK(again > least_again);
}

TEST(recomputed_values_are_equal_and_sweeps_are_monotonic) {
    check_sweeps((recompute_request){.goal = RECOMPUTE_TO}, 3 * SEEDS);
}

TEST(offloaded_values_are_equal_and_sweeps_are_monotonic) {
    check_sweeps((recompute_request){.goal = RECOMPUTE_TO, .offload = true}, 3 * SEEDS);
}

TEST(all_that_lowers_the_peak_may_be_offloaded) {
    for (uint64_t seed = 0; seed < SEEDS; seed++) {
        const recompute_result r = planned_to(seed, &(recompute_request){.goal = OFFLOAD_ALL});
        CHECK(r.count == 0 && r.n_offloaded > 0 && r.after < r.before);
    }
}
