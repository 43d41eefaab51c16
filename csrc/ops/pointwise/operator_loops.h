/* operator_loops.h -- makes the CPU's loops of the rows of a FAMILY (operators.h), and of their gradients.
 *
 * From here on the names below are those that may be vectorised, of their argument's type; any other function of C's is
 * of that type through tgmath.h. A family's own functions of double come before. */
#include "core/vwide.h"
#include "ops/pointwise/pointwise.h"

#include <tgmath.h> /* after vmath.h */

#undef exp
#undef expm1
#undef log
#undef log1p
#undef erf
#undef tanh
#undef pow
#define exp(x) v_exp(x)
#define expm1(x) v_expm1(x)
#define log(x) v_log(x)
#define log1p(x) v_log1p(x)
#define erf(x) v_erf(x)
#define tanh(x) v_tanh(x)
#define pow(x, y) v_pow(x, y)
#define sigmoid(x) v_sigmoid(x)
#define phi(x, e) v_phi(x, e)

#define LOOPS_LOOP(function, operands, formula, where) FLOAT_WHERE(function, operands, formula, where)
#define LOOP_OPERANDS_1 (x)
#define LOOP_OPERANDS_2 (x, y)
#define LOOPS_OWN(function, operands, formula, where)
/* The float form has no branches, the double form is libm's. */
#define LOOPS_VECTOR(function, operands, formula, where)                                                               \
    TILE_FN(function##_f32, operands, float, float, v##function##f LOOP_OPERANDS_##operands, )                         \
    TILE_FN(function##_f64, operands, double, double, formula, where)

#define FORMULA(name, function, operands, cpu, formula, where) LOOPS_##cpu(function, operands, formula, where)
#include "ops/pointwise/operators.h"
