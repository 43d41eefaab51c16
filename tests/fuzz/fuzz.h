/* fuzz.h -- declares a fuzz target: a function of some bytes, which ends the program where the engine is wrong.
 *
 * The names are libFuzzer's, so that other fuzzers can be linked with a target instead of driver.c. */
#ifndef ORT_FUZZ_H
#define ORT_FUZZ_H

#include <stddef.h>
#include <stdint.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

/* Ends the program with this sentence: the driver keeps the bytes. */
void wrong(const char *format, ...) __attribute__((format(printf, 1, 2), noreturn));

/* Bytes as choices: behind their end all choices are the first. */
typedef struct choices {
    const uint8_t *at, *end;
} choices;

/* [0, below) */
static inline unsigned choose(choices *from, unsigned below) {
    unsigned x = from->at < from->end ? *from->at++ : 0;
    return below ? x % below : 0;
}

#endif
