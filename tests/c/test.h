/* test.h -- finds and counts the C tests: a test is a function, found without a list. main.c runs them.
 *
 *   TEST(two_and_two) { CHECK(2 + 2 == 4); }
 */
#ifndef ORT_TEST_H
#define ORT_TEST_H

#include "core/ctx.h"

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct test {
    const char *name, *file;
    void (*run)(void);
    struct test *next;
} test;

void test_add(test *t);
/* Counts a check, and prints it when it does not hold; returns `held`. */
bool test_check(bool held, const char *file, int line, const char *what, const char *detail);

#define TEST(name_)                                                                                                    \
    static void name_(void);                                                                                           \
    __attribute__((constructor)) static void add_##name_(void) {                                                       \
        static test self = {#name_, __FILE__, name_, NULL};                                                            \
        test_add(&self);                                                                                               \
    }                                                                                                                  \
    static void name_(void)

#define CHECK(condition) test_check((condition), __FILE__, __LINE__, #condition, NULL)
/* A call that returns a status and writes its sentence into the context `c`. */
#define CHECK_OK(c, call) test_check((call) == OK, __FILE__, __LINE__, #call, (c)->err.text)
#define CHECK_FAILS(c, code, sentence, call)                                                                           \
    test_check((call) == (code) && strstr((c)->err.text, (sentence)) != NULL, __FILE__, __LINE__, #call, (c)->err.text)

#endif
