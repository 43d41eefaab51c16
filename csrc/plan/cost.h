/* cost.h -- estimates how long nodes take from what they multiply and move. */
#ifndef ORT_PLAN_COST_H
#define ORT_PLAN_COST_H

#include "ops/op.h"

/* What is slower than matrix products, or than the memory beside the processor, so many times. Convolutions, attention and
 * recurrent layers multiply at half of the speed of products, or less (measured on two cores with AMX, float32: 180 GFLOP/s
 * in products, 95 in convolutions, 50 in gradients of their weights, 70 to 85 in attention). engine/rates.py reads these. */
enum { SLOWER_KERNELS = 2, SLOWER_FILES = 8, SLOWER_BUSES = 60 };

/* What nodes do, added up. */
typedef struct work_sum {
    double products[2]; /* multiplications and additions of matrix products: of wide types, and of types of 16 bits */
    double others;      /* those of other kernels: convolutions, attention, recurrent layers */
    double bytes;       /* that are read or written */
    double moved;       /* bytes that go to other memory, or come from there */
} work_sum;

/* Adds what the node does. Every type and shape is known. */
MUST_USE status work_of_node(ctx *c, const node *n, work_sum *sum);

/* How long each takes beside a multiplication or addition of a product of wide types. */
typedef struct cost_rates {
    double narrow; /* one of a product of types of 16 bits */
    double others; /* one of another kernel */
    double byte;   /* that is read or written */
} cost_rates;

/* Of a processor that was not measured; `cuda`: of a GPU. */
cost_rates cost_rates_usual(bool cuda);

/* What it does, in multiplications of a product: comparable within one plan only. Every type and shape is known. */
MUST_USE status cost_of_node(ctx *c, const node *n, const cost_rates *r, double *out);

/* The same of `bytes` bytes that go to a file, or from a GPU (`cuda`) to memory of the host, and come back. */
double cost_of_moving(int64_t bytes, const cost_rates *r, bool cuda);

#endif
