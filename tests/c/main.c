/* main.c -- runs the tests whose name or file contains the first argument; all without one. With a second argument, 0 or
 * 1, every other one of them. */
#include "test.h"

enum { MOST_SHOWN = 8 }; /* failed checks of one test */

static test *tests, **last = &tests;
static int failed_checks;

void test_add(test *t) {
    *last = t;
    last = &t->next;
}

bool test_check(bool held, const char *file, int line, const char *what, const char *detail) {
    if (held || ++failed_checks > MOST_SHOWN) return held;
    printf("  FAILED %s:%d: %s\n", file, line, what);
    if (detail && *detail) printf("    %s\n", detail);
    return held;
}

int main(int argc, char **argv) {
    const char *only = argc > 1 ? argv[1] : "";
    const int share = argc > 2 ? atoi(argv[2]) : -1;
    int passed = 0, failed = 0, seen = 0;

    setvbuf(stdout, NULL, _IOLBF, 0);
    for (test *t = tests; t; t = t->next) {
        if (!strstr(t->name, only) && !strstr(t->file, only)) continue;
        if (share >= 0 && seen++ % 2 != share) continue;
        failed_checks = 0;
        t->run();
        printf("%s %s\n", failed_checks ? "FAILED" : "ok", t->name);
        if (failed_checks) failed++;
        else passed++;
    }
    printf("%d passed, %d failed\n", passed, failed);
    return failed || !passed;
}
