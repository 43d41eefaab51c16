/* nccl.h -- finds NCCL, as torch has loaded it, at run time like the driver. What processes with a GPU each do
 * together: sums, parts of sums, gathering, messages. */
#ifndef ORT_CUDA_NCCL_H
#define ORT_CUDA_NCCL_H

#include "cuda/host/library.h"

/* What one process makes and all others of a communicator are told. */
typedef struct nccl_id {
    char bytes[128];
} nccl_id;

/* Numbers of the library's: types, and ways to reduce. */
enum { NCCL_I8, NCCL_U8, NCCL_I32, NCCL_I64 = 4, NCCL_F16 = 6, NCCL_F32, NCCL_F64, NCCL_BF16 };
enum { NCCL_SUM, NCCL_PRODUCT, NCCL_MOST, NCCL_LEAST, NCCL_MEAN };

/* Counts are elements: of what is sent, but for ReduceScatter, whose result has as many. */
#define NCCL_FUNCTIONS(F)                                                                                              \
    F(ncclGetVersion, (int *out))                                                                                      \
    F(ncclGetUniqueId, (nccl_id * out))                                                                                \
    F(ncclCommInitRank, (void **out, int ranks, nccl_id id, int rank))                                                 \
    F(ncclCommDestroy, (void *comm))                                                                                   \
    F(ncclCommAbort, (void *comm))                                                                                     \
    F(ncclCommGetAsyncError, (void *comm, int *out))                                                                   \
    F(ncclGroupStart, (void))                                                                                          \
    F(ncclGroupEnd, (void))                                                                                            \
    F(ncclAllReduce, (const void *from, void *to, size_t count, int type, int how, void *comm, void *stream))          \
    F(ncclReduce, (const void *from, void *to, size_t count, int type, int how, int root, void *comm, void *stream))   \
    F(ncclReduceScatter, (const void *from, void *to, size_t count, int type, int how, void *comm, void *stream))      \
    F(ncclAllGather, (const void *from, void *to, size_t count, int type, void *comm, void *stream))                   \
    F(ncclBroadcast, (const void *from, void *to, size_t count, int type, int root, void *comm, void *stream))         \
    F(ncclSend, (const void *from, size_t count, int type, int peer, void *comm, void *stream))                        \
    F(ncclRecv, (void *to, size_t count, int type, int peer, void *comm, void *stream))

typedef struct nccl_functions {
    NCCL_FUNCTIONS(ENTRY_MEMBER)
} nccl_functions;

/* Loaded when it was not; *out is for the life of the process. E_RUNTIME where the library or one of these is
 * missing. */
MUST_USE status nccl_open(ctx *c, const nccl_functions **out);
/* What a function of NCCL's that did not return 0 means, as an error: E_RUNTIME. */
MUST_USE status nccl_refuse(ctx *c, int result, const char *what);
/* 22809 is 2.28.9. */
MUST_USE status nccl_version(ctx *c, int *out);

#endif
