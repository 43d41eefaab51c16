/* fault.h -- declares what kernels tell the host, which both read: C and CUDA. */
#ifndef ORT_CUDA_FAULT_H
#define ORT_CUDA_FAULT_H

#include <stdint.h>

/* What a kernel reports when it meets data that it cannot use: an index out of range. It lies in memory that host and
 * device see. Kernels go on with something harmless; the next look of the host's is an error. */
typedef struct cuda_fault {
    int32_t kind; /* 0: none; else a cuda_fault_kind */
    int32_t node; /* its number (cuda/host/named.h) */
    int64_t value, limit;
    int32_t claimed, unused; /* by the thread whose report it is: many may meet such data at once */
} cuda_fault;

typedef enum cuda_fault_kind {
    FAULT_NONE,
    FAULT_INDEX,
    FAULT_LABEL,
    FAULT_DIVISOR,
    FAULT_COUNT,
    FAULT_LENGTH,
    FAULT_PROBABILITY, /* limit: the bits of what is none */
    FAULT_LOG_PROBABILITIES
} cuda_fault_kind;

#endif
