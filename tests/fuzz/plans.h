/* plans.h -- plans a model graph for shapes and runs it, as Python does. */
#ifndef ORT_FUZZ_PLANS_H
#define ORT_FUZZ_PLANS_H

#include "machine.h"

/* Sizes that data decides, of one model. */
enum { MOST_SIZES = 64 };

typedef struct planned {
    machine m;
    known_size known[MOST_SIZES];
    int64_t sizes[MOST_SIZES];
    int n_known, n_sizes;
} planned;

/* Fills the inputs' memory before a run; NULL: zeros. */
typedef void fill_fn(void *arg, machine *m);

/* Plans; runs prologues over inputs that `fill` has filled, as long as there are any. planned_free works after a failure,
 * too. E_UNSUPPORTED: a run would take more than `most` bytes, so nothing has been run. */
status planned_make(planned *p, const graph *model, const input_spec *inputs, const compile_options *o, int64_t most,
                    fill_fn *fill, void *arg);
void planned_free(planned *p);

/* Ends the program unless all places of the plan lie in its arena, and no two blocks that live at once have a byte in
 * common. */
void check_plan(const plan *p);

/* Bytes of all memory of a run. */
int64_t plan_bytes(const plan *p);

#endif
