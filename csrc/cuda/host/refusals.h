/* refusals.h -- notes what a library of NVIDIA's did not take, though it might have: kernels of ours, or
 * other algorithms, did it. Nothing is wrong then, but slower; Python tells it once (py/module.c). */
#ifndef ORT_CUDA_REFUSALS_H
#define ORT_CUDA_REFUSALS_H

#include "core/ctx.h"

#include <stdbool.h>

enum { MOST_REFUSALS = 64, REFUSAL_LIBRARY = 16, REFUSAL_TEXT = 768 };

typedef struct refusal {
    char library[REFUSAL_LIBRARY]; /* "cuBLASLt" */
    char text[REFUSAL_TEXT];       /* a sentence with the library's reason */
} refusal;

/* Takes c's error, with what it was about, as a refusal, and forgets the error. The last MOST_REFUSALS are kept, all
 * are counted. */
void refusal_note(ctx *c, const char *library, const char *format, ...) __attribute__((format(printf, 3, 4)));
/* How many there were in this process. */
int refusals_count(void);
/* The i-th. False: there is none, or it was not kept. */
bool refusals_get(int i, refusal *out);

#endif
