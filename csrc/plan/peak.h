/* peak.h -- says when a plan's arena holds the most, and what is the largest there. */
#ifndef ORT_PLAN_PEAK_H
#define ORT_PLAN_PEAK_H

#include "plan/plan.h"

enum { LARGEST_NAMED = 3, LARGEST_TEXT = 600 /* bytes that the sentence about them may take */ };

/* The first instruction at which the blocks of the arena, or of the joint one, have the most bytes in all, and how many. */
MUST_USE status plan_peak(ctx *c, const plan *p, bool joint, int *at, int64_t *bytes);

/* Names the largest blocks of that time, and what forward gives, with their bytes: "Gemm (/fc1) with 4096 bytes, ...". */
MUST_USE status plan_largest(ctx *c, const plan *p, char *text, size_t size);

/* E_NOMEM, with a sentence that names the largest blocks, where no run on the CPU could ever have the memory it needs. */
MUST_USE status plan_check_limit(ctx *c, const plan *p);
/* The same where there is not so much memory now. `joint`: for a run with a joint arena. */
MUST_USE status plan_check_memory(ctx *c, const plan *p, bool joint);
/* E_NOMEM with the same sentence, of a run whose arena was refused. */
MUST_USE status plan_no_memory(ctx *c, const plan *p, bool joint);

#endif
