/* fault_page.h -- takes what kernels have reported, while threads of the GPU go on reporting. */
#ifndef ORT_CUDA_FAULT_PAGE_H
#define ORT_CUDA_FAULT_PAGE_H

#include "cuda/kernels/fault.h"

#include <stdbool.h>

/* True with the whole report of one thread, if there is one: it is gone from the page, and the next may come. Threads of
 * the host may ask at once: one gets it. */
bool fault_take(cuda_fault *page, cuda_fault *out);

#endif
