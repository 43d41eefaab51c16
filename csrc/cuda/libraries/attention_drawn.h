/* attention_drawn.h -- says what torch's memory-efficient kernel drew elements by, which backward has to have.
 *
 * It lies beside the run's activations on the GPU, too, where reading it waits for all that the GPU still has to do. */
#ifndef ORT_CUDA_ATTENTION_DRAWN_H
#define ORT_CUDA_ATTENTION_DRAWN_H

#include "cuda/libraries/attention.h"

/* Whose numbers: of a node with dropout, by its key, in a run, by its seed, that keeps them at `place` of a GPU. */
typedef struct attention_drawn {
    const void *place;
    uint64_t seed;
    int64_t key;
} attention_drawn;

/* Where the two numbers are that a kernel of torch's has returned: of flash attention side by side on the GPU; of the
 * memory-efficient kernel on the CPU, but while a graph is captured on the GPU, since each replay draws others. */
typedef struct attention_drawn_at {
    const void *number[2];
    bool there; /* on the GPU */
} attention_drawn_at;

/* Of what forward has drawn; false: they are not as they should be. */
bool attention_drawn_where(const attention_call *a, attention_drawn_at *out);
/* Remembers `words` for as long as there is room: those of earlier runs make way. */
void attention_drawn_keep(const attention_drawn *of, const uint64_t words[2]);
/* From now on they are not known: a graph that is captured draws others each time. */
void attention_drawn_forget(const attention_drawn *of);
/* False: they are not known any more, `words` is as it was. */
bool attention_drawn_find(const attention_drawn *of, uint64_t words[2]);

#endif
