/* rows.h -- declares what the two kernels of RowCount share. */
#ifndef ORT_OPS_ROWS_H
#define ORT_OPS_ROWS_H

#include <stdint.h>

/* Of a number of rows one sixteenth is the step of the counts that plans are made for. */
static inline int64_t row_step(int64_t rows) { return (rows + 15) / 16; }

#endif
