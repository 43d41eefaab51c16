/* attention.h -- calls torch's attention kernels for GPUs through its C shim: cuDNN's, flash attention, and the
 * memory-efficient one.
 *
 * Each leaves y and, of each row, the log of the sum of its exponentials, so backward may take another than forward did;
 * but not where elements are dropped: there only flash attention is asked, or, of what that does not take, the
 * memory-efficient kernel. cuDNN's backward adds in any order; that of flash attention adds in one order where torch is
 * told to (torch.use_deterministic_algorithms), the memory-efficient one always does, with a single split of the keys.
 * These two take sequences of different lengths, too. */
#ifndef ORT_CUDA_ATTENTION_LIBRARY_H
#define ORT_CUDA_ATTENTION_LIBRARY_H

#include "core/torch_lib.h"
#include "cuda/host/driver.h"

enum {
    ATTENTION_Q,
    ATTENTION_K,
    ATTENTION_V,
    ATTENTION_Y,
    ATTENTION_DY,
    ATTENTION_SUMS,
    ATTENTION_DRAWN,
    ATTENTION_STARTS_Q, /* int32 [batch + 1] where each sequence's rows begin; the last: where they end */
    ATTENTION_STARTS_K,
    ATTENTION_BIAS, /* [B, H, Q, K] in the type of the queries; its rows lie on 16 bytes */
    ATTENTION_SEED, /* of the memory-efficient kernel, with the place in torch's generator: on the CPU, or, while a graph
                       is captured, on the GPU */
    ATTENTION_OFFSET
}; /* of call.in */
/* Of call.out, forward: y, sums, drawn (a state of random numbers; of the memory-efficient kernel two numbers);
 * backward: the gradients of q, k, v, and the bias, [B, H, Q, K] with rows that may be longer. */

typedef struct attention_call {
    torch_call call;
    aten nothing; /* an undefined tensor, or NULL */
    int64_t queries, keys, heads, groups, width, value_width;
    dtype type;
    double scale, ratio;
    bool causal, kept, same_bits; /* kept: sums are wanted; same_bits: in every run */
    bool
        listed; /* operands are rows of all sequences, [T, H, D], of at most `queries` and `keys` each, with their starts */
    bool biased, bias_slope; /* there is a bias; its gradient is wanted */
    int architecture;
} attention_call;

typedef struct attention_kernel {
    const char *name;
    bool heads_first; /* operands are [B, H, S, D], else [B, S, H, D]; both of any strides */
    bool flat;        /* listed: operands are [T, H, D] and sums [H, T], else [1, T, H, D] and [B, H, S] */
    int rank;         /* of the sums: 3 is [B, H, S]; 0: what forward has returned, 3 or 4, which is [B, H, S, 1] */
    int round;        /* a head has so many sums, or the next multiple */
    bool (*takes)(const attention_call *a);
    int (*forward)(attention_call *a); /* 0: there are results */
    int (*backward)(attention_call *a);
} attention_kernel;

/* Whether, with dropout, the memory-efficient kernel is the one that is asked: flash attention takes no biases, 16-bit
 * floats alone, and values as wide as keys. */
bool attention_draws_numbers(const attention_call *a);
/* The next behind `f`, NULL the first, that takes this call and has not failed; NULL: there is no further one. */
const attention_kernel *attention_kernel_next(const attention_call *a, const attention_kernel *f);
/* It has failed. After the second time it is not asked again for calls of this form, and the user is told once
 * (cuda/host/refusals.h). */
void attention_kernel_failed(const attention_call *a, const attention_kernel *f);
/* The rank of the sums that backward is to be given; 0: not known, since there was no forward. */
int attention_kernel_rank(const attention_kernel *f);
/* As if none had failed. */
void attention_kernels_forget(void);

#endif
