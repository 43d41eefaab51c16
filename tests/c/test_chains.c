/* test_chains.c -- tests that kernels of a GPU know every step that a chain of pointwise operators may have. */
#include "cuda/host/driver.h"
#include "cuda/host/generate.h"

#include "test.h"

/* As fused_holds: what another kernel than the usual one checks for integers is left out. */
static bool may_be_step(const op_def *op, dtype type) {
    return op->pointwise && (op->cpu == pointwise_cpu || op->pointwise->draws || dtype_is_float(type));
}

TEST(every_step_has_a_kernel) {
    int steps = 0;

    for (int f = 0; op_families[f]; f++)
        for (const op_def *op = op_families[f]; op->name; op++)
            for (int from = F32; from < DTYPE_COUNT; from++)
                for (int to = F32; to < DTYPE_COUNT && may_be_step(op, (dtype)from); to++) {
                    const tile_class of = tile_class_of((dtype)from), makes = tile_class_of((dtype)to);
                    const bool is_test = chain_step_kind(op, of, TILE_BOOL) >= 0;
                    if (!tile_function(op, (dtype)from, (dtype)to)) continue;
                    if (!op->pointwise->choose && !is_test && makes != of) continue;
                    if (!op->pointwise->choose && is_test && makes != TILE_BOOL) continue;
                    steps++;
                    if (chain_step_kind(op, of, makes) < 0)
                        test_check(false, __FILE__, __LINE__, op->name, dtype_name((dtype)from));
                }
    CHECK(steps > 500);
}
