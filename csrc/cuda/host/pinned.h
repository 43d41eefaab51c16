/* pinned.h -- copies to and from pinned memory of the host on a stream beside that of a run. */
#ifndef ORT_CUDA_PINNED_H
#define ORT_CUDA_PINNED_H

#include "core/offload.h"
#include "cuda/host/driver.h"

/* Memory of `bytes` bytes that copies of this device may use; between cuda_begin and cuda_end. E_NOMEM where there is none. */
MUST_USE status pinned_take(ctx *c, int64_t bytes, offload_room *out);
/* Gives it back, after all copies of the device are over; safe twice. */
void pinned_give(int device, offload_room *room);

/* Starts a copy once the run's stream is where it is now, beside what the stream does from then on. */
MUST_USE status pinned_write(ctx *c, const cuda_run *r, void *to, const void *from, size_t bytes);
MUST_USE status pinned_read(ctx *c, const cuda_run *r, void *to, const void *from, size_t bytes);
/* The run's stream goes on once all copies that were started are over. The host waits for nothing. */
MUST_USE status pinned_wait(ctx *c, const cuda_run *r);

#endif
