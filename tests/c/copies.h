/* copies.h -- makes a graph of many copies of one: twice as many copies take a pass twice the work. */
#ifndef ORT_TEST_COPIES_H
#define ORT_TEST_COPIES_H

#include "graph/graph.h"

/* After three measurements, each of something twice as large (effort.h): no block that ran `least` times or more has
 * grown much faster. */
void check_blocks(const char *name, uint64_t least);
/* Runs one pass alone on n, 2n and 4n copies of `g`, side by side: of the same inputs, and of inputs of their own. */
void check_copies(const graph *g, const char *pass);

#endif
