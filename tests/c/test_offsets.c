/* test_offsets.c -- tests the memory planner on intervals alone: random ones, ones like a training graph's, and bad
 * ones. */
#include "plan/offsets.h"

#include "test.h"

#include <stdbool.h>

/* --- making intervals --------------------------------------------------------------------------------------------- */

static uint64_t random_state;

static int random_below(int n) {
    random_state = random_state * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
    return (int)((random_state >> 33) % (uint64_t)n);
}

static interval *make(int count) {
    interval *items = calloc((size_t)count, sizeof *items);
    random_state = 1;
    return items;
}

/* Lives of any length at any time; every tenth block is empty. */
static interval *make_random(int count, int times) {
    interval *items = make(count);
    for (int i = 0; i < count; i++) {
        int a = random_below(times), b = random_below(times);
        items[i] = (interval){.first = a < b ? a : b, .last = a < b ? b : a};
        items[i].bytes = i % 10 ? 1 + random_below(100000) : 0;
    }
    return items;
}

/* Forward, then backward twice as long: most results die at once, the others live until their mirror image in
 * backward; weight gradients live from where they are made to the end. */
static interval *make_training(int count) {
    static const int widths[] = {1, 1, 4, 4, 1, 3, 2, 6};
    interval *items = make(count);
    int forward = count / 3, times = 3 * forward;

    for (int t = 0; t < count; t++) {
        interval *x = &items[t];
        int64_t width = widths[(t * 7919) % 8];
        bool saved = t < forward && random_below(5) < 3, gradient = t >= forward && t % 6 == 0;
        *x = (interval){.bytes = width << 16, .first = t < times ? t : times - 1};
        x->last = saved ? times - 1 - 2 * t : gradient ? times - 1 : x->first + 1 + random_below(3);
        if (gradient) x->bytes = 768 * 48;
        if (x->last >= times) x->last = times - 1;
    }
    return items;
}

/* --- checking a plan ---------------------------------------------------------------------------------------------- */

static bool collide(const interval *a, const interval *b, int64_t redzone) {
    bool together = a->first <= b->last && b->first <= a->last;
    if (!together || !a->bytes || !b->bytes) return false;
    return a->offset < b->offset + b->bytes + redzone && b->offset < a->offset + a->bytes + redzone;
}

static int count_collisions(const interval *items, int count, int64_t redzone) {
    int found = 0;
    for (int i = 0; i < count; i++)
        for (int k = 0; k < i; k++) found += collide(&items[i], &items[k], redzone);
    return found;
}

static int count_misplaced(const interval *items, int count, int64_t alignment, int64_t redzone, int64_t peak) {
    int found = 0;
    for (int i = 0; i < count; i++) {
        int64_t end = items[i].bytes ? items[i].offset + items[i].bytes + redzone : 0;
        found += items[i].offset < 0 || items[i].offset % alignment != 0 || end > peak;
    }
    return found;
}

static int64_t plain_sum(const interval *items, int count, int64_t alignment, int64_t redzone) {
    int64_t sum = 0;
    for (int i = 0; i < count; i++)
        if (items[i].bytes) sum += (items[i].bytes + redzone + alignment - 1) / alignment * alignment;
    return sum;
}

/* Plans, checks everything a plan promises, and returns peak over lower bound. */
static double plan_quality(interval *items, int count, int64_t alignment, int64_t redzone) {
    int64_t peak = -1, bound = -1;
    ctx c;

    ctx_init(&c);
    CHECK_OK(&c, offsets_plan(&c, items, count, alignment, redzone, &peak));
    CHECK_OK(&c, offsets_bound(&c, items, count, alignment, redzone, &bound));
    ctx_release(&c);
    CHECK(count_collisions(items, count, redzone) == 0);
    CHECK(count_misplaced(items, count, alignment, redzone, peak) == 0);
    CHECK(bound <= peak && peak <= plain_sum(items, count, alignment, redzone));
    return bound ? (double)peak / (double)bound : 1;
}

/* --- tests -------------------------------------------------------------------------------------------------------- */

TEST(nothing_needs_no_memory) {
    interval empty[] = {{.first = 3, .last = 3}, {.first = 0, .last = 9}};
    int64_t peak = -1;
    ctx c;

    ctx_init(&c);
    CHECK_OK(&c, offsets_plan(&c, NULL, 0, 64, 0, &peak));
    CHECK(peak == 0);
    CHECK_OK(&c, offsets_plan(&c, empty, 2, 64, 32, &peak));
    CHECK(peak == 0 && empty[0].offset == 0 && empty[1].offset == 0);
    ctx_release(&c);
}

TEST(lives_that_touch_do_not_share) {
    interval items[] = {{.bytes = 64, .first = 0, .last = 1}, {.bytes = 64, .first = 1, .last = 2}};
    int64_t peak;
    ctx c;

    ctx_init(&c);
    CHECK_OK(&c, offsets_plan(&c, items, 2, 64, 0, &peak));
    CHECK(peak == 128);
    items[1].first = 2;
    CHECK_OK(&c, offsets_plan(&c, items, 2, 64, 0, &peak));
    CHECK(peak == 64);
    ctx_release(&c);
}

TEST(a_gap_between_two_lives_is_used) {
    /* The third fits under neither alone, but into what the second leaves beside the first. */
    interval items[] = {{.bytes = 256, .first = 0, .last = 4},
                        {.bytes = 128, .first = 0, .last = 1},
                        {.bytes = 100, .first = 2, .last = 4}};
    int64_t peak;
    ctx c;

    ctx_init(&c);
    CHECK_OK(&c, offsets_plan(&c, items, 3, 64, 0, &peak));
    CHECK(peak == 384 && items[2].offset == items[1].offset);
    ctx_release(&c);
}

TEST(random_lives) {
    for (int count = 1; count <= 500; count = count * 2 + 1)
        for (int times = 1; times <= 1000; times *= 10) {
            interval *items = make_random(count, times);
            plan_quality(items, count, 64, 0);
            plan_quality(items, count, 1, 16);
            plan_quality(items, count, 48, 100);
            free(items);
        }
}

TEST(random_lives_need_little_more_than_the_bound) {
    interval *items = make_random(1000, 1000);
    CHECK(plan_quality(items, 1000, 64, 0) < 1.10);
    free(items);
}

TEST(training_needs_hardly_more_than_the_bound) {
    for (int count = 300; count <= 3000; count *= 10) {
        interval *items = make_training(count);
        CHECK(plan_quality(items, count, 64, 0) < 1.02);
        free(items);
    }
}

TEST(the_same_lives_give_the_same_plan) {
    interval *a = make_random(400, 100), *b = make_random(400, 100);
    plan_quality(a, 400, 64, 0);
    plan_quality(b, 400, 64, 0);
    CHECK(memcmp(a, b, 400 * sizeof *a) == 0);
    free(a);
    free(b);
}

TEST(times_may_be_any_integers) {
    interval items[] = {{.bytes = 64, .first = -2000000000, .last = 2000000000},
                        {.bytes = 64, .first = 1999999999, .last = 2147483647},
                        {.bytes = 64, .first = -2147483647 - 1, .last = -2000000001}};
    CHECK(plan_quality(items, 3, 64, 0) == 1);
}

TEST(bad_lives_are_refused) {
    interval late = {.bytes = 8, .first = 2, .last = 1}, negative = {.bytes = -8};
    interval huge[] = {{.bytes = INT64_MAX - 100}, {.bytes = INT64_MAX - 100}};
    int64_t peak;
    ctx c;

    ctx_init(&c);
    CHECK(offsets_plan(&c, &late, 1, 64, 0, &peak) == E_INVALID);
    CHECK(strstr(c.err.text, "lives from 2 to 1"));
    CHECK(offsets_plan(&c, &negative, 1, 64, 0, &peak) == E_INVALID);
    CHECK(offsets_plan(&c, huge, 2, 64, 0, &peak) == E_NOMEM);
    CHECK(offsets_plan(&c, huge, 1, 0, 0, &peak) == E_INVALID);
    ctx_release(&c);
}

TEST(every_failed_allocation_is_reported) {
    interval *items = make_training(300);
    status s = E_NOMEM;

    for (int64_t after = 0; s == E_NOMEM && after < 100000; after++) {
        int64_t peak;
        ctx c;
        ctx_init(&c);
        c.mem.fail_after = after;
        s = offsets_plan(&c, items, 300, 64, 0, &peak);
        CHECK(s == OK || (s == E_NOMEM && c.mem.fail_after == 0));
        ctx_release(&c);
    }
    CHECK(s == OK);
    free(items);
}
