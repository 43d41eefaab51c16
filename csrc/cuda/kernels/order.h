/* order.h -- numbers sorted by keys: which updates go to one row, in their own order (order.cu). */
#ifndef ORT_CUDA_ORDER_H
#define ORT_CUDA_ORDER_H

#include "cuda/host/driver.h"

/* Of `count` numbers 0, 1, ..., `key[i]` and `index[i]` by the rising key, equal keys by the rising number. */
typedef struct cuda_order {
    int32_t *key, *index;
} cuda_order;

/* Bytes of memory for an order of so many; none for more than there can be. */
size_t cuda_order_bytes(int64_t count);
/* Starts sorting the keys that lie at the beginning of `work`, `count` of them, from 0 to `limit` - 1. The result lies in
 * `work`; where nothing runs, work and result may be NULL. E_UNSUPPORTED beyond 2^31. */
MUST_USE status cuda_order_by(ctx *c, const call *k, void *work, int64_t count, int64_t limit, cuda_order *out);

#endif
