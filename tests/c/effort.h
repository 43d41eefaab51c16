/* effort.h -- measures how much work something is, in basic blocks of what makes a plan (PLANNING in setup.py), each
 * by itself. No time is measured, so a busy machine changes nothing. */
#ifndef ORT_TEST_EFFORT_H
#define ORT_TEST_EFFORT_H

#include <stdint.h>

/* Blocks are counted anew from here on. The counts of the two measurements before are kept. */
void effort_begin(void);
/* Blocks that have run since then. */
uint64_t effort_blocks(void);
/* Of the three last measurements, of something that is twice as large each time: how much more often a block ran, at
 * least, from each to the next; of the block of which that is most, among those that ran `least` times in the last one. */
double effort_growth(uint64_t least);
/* Where that block is, for addr2line. */
uintptr_t effort_place(void);

#endif
