/* zoo.h -- makes a model of many kinds of operators, for tests of what every one of them must survive. */
#ifndef ORT_TEST_ZOO_H
#define ORT_TEST_ZOO_H

#include "plan/compile.h"

enum { ZOO_IMAGES, ZOO_FILTERS, ZOO_CHANNELS, ZOO_GATES, ZOO_STATE, ZOO_ROWS, ZOO_INPUTS };

extern const input_spec zoo_inputs[ZOO_INPUTS];
/* Outputs: a float32 scalar that depends on every input that needs a gradient. */
status zoo_make(ctx *c, graph **out);

#endif
