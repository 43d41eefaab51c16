/* network.h -- makes a small model for tests that need a whole one: a Transformer layer and a loss, float64. */
#ifndef ORT_TEST_NETWORK_H
#define ORT_TEST_NETWORK_H

#include "plan/compile.h"

enum { BATCH = 2, TIME = 3, WIDTH = 4, HEADS = 2, HIDDEN = 5, WORDS = 7, TOKENS = BATCH * TIME };
enum { IDS, LABELS, SEEN, TABLE, QKV, QKV_BIAS, SCALE, HIDDEN_WEIGHT, HIDDEN_BIAS, OUT_WEIGHT, INPUTS };

/* From TABLE on they need a gradient. SEEN[i][k]: word i attends to word k. Outputs: the loss, the scores. */
extern const input_spec network_inputs[INPUTS];
status network_make(ctx *c, graph **out);

#endif
