/* operators.h -- lists the pointwise operators of floats, a row each, for the CPU, for GPUs and for Python.
 *
 * A file includes the list once for each thing that it makes of the rows:
 *
 *     OPERATOR(name, function, operands, domain, since, cost, attributes, cpu, formula, where,
 *              gradient, formula or rule, where)
 *     FORMULA(name, function, operands, cpu, formula, where)     the family's file has the record: see there why
 *
 * name, function   ONNX's name, or ours; what the functions in C are called. Of an operator of ours without attributes
 *                  that is its name in ATen, too: the exporter, type promotion, the reference and the cases take it.
 * domain, since    ONNX and the first opset of this form; OURS and 1; ENGINE: ours, and no exported model has it
 * cost             COSTLY: it takes longer than loading the result; or 0
 * attributes       NONE, or a set of the family's file, whose values are p0 and p1
 * cpu              what the CPU computes: LOOP the formula, with functions as operator_loops.h names them; VECTOR in
 *                  float32 v<function>f of core/vwide.h, in float64 the formula; OWN functions of the family's file
 * formula, where   of the operands x, y, z, w, whose type is `real`; declarations that the formula uses
 * gradient         OF_OPERAND, OF_RESULT: the operator <name>Grad, whose formula has dy as x, and the operand or the
 *                  result as y. SLOPE: as OF_OPERAND, and x is a factor: it is looked up where it is costly.
 *                  BY: a rule of the family's file, or NULL
 *
 * With FORMULA alone it gives the formulas of all operators and of their gradients. With FAMILY it gives the rows of one
 * file. The C compiler, nvcc and NVRTC read it. */

#define UNARY_FAMILY 1
#define ACTIVATION_FAMILY 2
#define BINARY_FAMILY 3
#define SELECT_FAMILY 4

#ifndef OPERATOR
#define OPERATOR(name, function, operands, domain, since, cost, attributes, cpu, formula, where, gradient, ...)        \
    FORMULA(name, function, operands, cpu, formula, where) FORMULA_##gradient(name, function, __VA_ARGS__)
#define FORMULA_OF_OPERAND(name, function, formula, where) FORMULA(name##Grad, function##_grad, 2, LOOP, formula, where)
#define FORMULA_OF_RESULT(name, function, formula, where) FORMULA(name##Grad, function##_grad, 2, LOOP, formula, where)
#define FORMULA_SLOPE(name, function, formula, where) FORMULA(name##Grad, function##_grad, 2, LOOP, formula, where)
#define FORMULA_BY(name, function, rule)
#endif
#ifndef FORMULA
#define FORMULA(name, function, operands, cpu, formula, where)
#endif

/* clang-format off */

/* --- one operand --------------------------------------------------------------------------------------------------- */

#if !defined FAMILY || FAMILY == UNARY_FAMILY
FORMULA(Abs, abs, 1, LOOP, fabs(x), )
FORMULA(Neg, neg, 1, LOOP, -x, )
FORMULA(Sign, sign, 1, LOOP, (x > 0) - (x < 0), ) /* of NaN: 0 */
OPERATOR(Floor, floor, 1, ONNX, 6, 0, NONE, LOOP, floor(x), , BY, grad_zero)
OPERATOR(Ceil, ceil, 1, ONNX, 6, 0, NONE, LOOP, ceil(x), , BY, grad_zero)
OPERATOR(Round, round, 1, ONNX, 11, 0, NONE, LOOP, rint(x), , BY, grad_zero) /* halves to even */
OPERATOR(Exp, exp, 1, ONNX, 6, COSTLY, NONE, LOOP, exp(x), , BY, grad_exp)
OPERATOR(Log, log, 1, ONNX, 6, COSTLY, NONE, LOOP, log(x), , BY, grad_log)
OPERATOR(Sqrt, sqrt, 1, ONNX, 6, 0, NONE, LOOP, sqrt(x), , OF_RESULT, x / (2 * y), )
OPERATOR(Reciprocal, reciprocal, 1, ONNX, 6, 0, NONE, LOOP, 1 / x, , OF_RESULT, -(x * y * y), )
OPERATOR(Erf, erf, 1, ONNX, 9, COSTLY, NONE, LOOP, erf(x), ,
         OF_OPERAND, (real)1.1283791670955126 * exp(-y * y) * x, )
OPERATOR(Sin, sin, 1, ONNX, 7, COSTLY, NONE, OWN, sin(x), , BY, grad_sin)
OPERATOR(Cos, cos, 1, ONNX, 7, COSTLY, NONE, OWN, cos(x), , BY, grad_cos)
OPERATOR(Tan, tan, 1, ONNX, 7, COSTLY, NONE, OWN, tan(x), , OF_RESULT, x * (1 + y * y), )
OPERATOR(Asin, asin, 1, ONNX, 7, COSTLY, NONE, VECTOR, asin(x), , OF_OPERAND, x / sqrt(1 - y * y), )
OPERATOR(Acos, acos, 1, ONNX, 7, COSTLY, NONE, VECTOR, acos(x), , OF_OPERAND, -x / sqrt(1 - y * y), )
OPERATOR(Atan, atan, 1, ONNX, 7, COSTLY, NONE, VECTOR, atan(x), , OF_OPERAND, x / (1 + y * y), )
OPERATOR(Sinh, sinh, 1, ONNX, 9, COSTLY, NONE, VECTOR, sinh(x), , BY, grad_sinh)
OPERATOR(Cosh, cosh, 1, ONNX, 9, COSTLY, NONE, VECTOR, cosh(x), , BY, grad_cosh)
OPERATOR(Tanh, tanh, 1, ONNX, 6, COSTLY, NONE, LOOP, tanh(x), , OF_RESULT, x * (1 - y * y), )
OPERATOR(Asinh, asinh, 1, ONNX, 9, COSTLY, NONE, VECTOR, asinh(x), , OF_OPERAND, x / sqrt(y * y + 1), )
OPERATOR(Acosh, acosh, 1, ONNX, 9, COSTLY, NONE, VECTOR, acosh(x), , OF_OPERAND, x / sqrt(y * y - 1), )
OPERATOR(Atanh, atanh, 1, ONNX, 9, COSTLY, NONE, VECTOR, atanh(x), , OF_OPERAND, x / (1 - y * y), )
OPERATOR(Trunc, trunc, 1, OURS, 1, 0, NONE, LOOP, trunc(x), , BY, grad_zero)
OPERATOR(Expm1, expm1, 1, OURS, 1, 0, NONE, LOOP, expm1(x), , OF_RESULT, x * (y + 1), )
OPERATOR(Log1p, log1p, 1, OURS, 1, 0, NONE, LOOP, log1p(x), , OF_OPERAND, x / (y + 1), )
OPERATOR(Erfc, erfc, 1, OURS, 1, 0, NONE, VECTOR, erfc(x), ,
         OF_OPERAND, (real)-1.1283791670955126 * exp(-y * y) * x, )
OPERATOR(Lgamma, lgamma, 1, OURS, 1, 0, NONE, VECTOR, lgamma(x), , BY, grad_lgamma)
OPERATOR(Digamma, digamma, 1, OURS, 1, 0, NONE, LOOP, digamma(x), , BY, grad_digamma)
OPERATOR(Trigamma, trigamma, 1, OURS, 1, 0, NONE, VECTOR, trigamma(x), , BY, NULL)
#endif

/* --- activation functions ------------------------------------------------------------------------------------------ */

#define CLIP_01(t) ((t) < 0 ? 0 : (t) > 1 ? 1 : (t)) /* NaN stays */
/* PyTorch's slope is 1 / 6, which the attribute cuts to float32; PyTorch itself does so in the gradient. */
#define IS_ONE_SIXTH(slope) ((float)(slope) == 1.0f / 6)
/* x Phi(x), and its slope Phi(x) + x phi(x). The approximation 0.5 (1 + tanh(u)) of Phi(x) is sigmoid(2u), which keeps
 * its accuracy for negative x; 2u = A x (1 + B x^2). */
#define DENSITY ((real)0.39894228040143268 * e)
#define GELU_A ((real)1.5957691216057308)
#define GELU_B ((real)0.044715)

#if !defined FAMILY || FAMILY == ACTIVATION_FAMILY
FORMULA(Relu, relu, 1, LOOP, x < 0 ? 0 : x, )
FORMULA(ReluGrad, relu_grad, 2, LOOP, y <= 0 ? 0 : x, )
FORMULA(ReluDropoutGrad, relu_dropout_grad, 2, LOOP, y <= 0 ? 0 : x * p0, ) /* y: what a dropout has left of the result */
OPERATOR(LeakyRelu, leaky_relu, 1, ONNX, 6, 0, hundredth, LOOP, x > 0 ? x : p0 * x, , BY, grad_leaky_relu)
FORMULA(LeakyReluGrad, leaky_relu_grad, 2, LOOP, y > 0 ? x : p0 * x, )
FORMULA(PRelu, prelu, 2, LOOP, x > 0 ? x : y * x, )
FORMULA(PReluGrad, prelu_grad, 3, LOOP, y > 0 ? x : z * x, )
FORMULA(PReluSlopeGrad, prelu_slope_grad, 2, LOOP, y > 0 ? 0 : x * y, )
OPERATOR(ThresholdedRelu, thresholded_relu, 1, ONNX, 10, 0, alpha, LOOP, x <= p0 ? 0 : x, ,
         OF_OPERAND, y <= p0 ? 0 : x, )
OPERATOR(HardTanh, hard_tanh, 1, OURS, 1, 0, bounds, LOOP, p0 > x ? p0 : x > p1 ? p1 : x, ,
         OF_OPERAND, (y > p0 && p1 > y) ? x : 0, )
OPERATOR(HardSigmoid, hard_sigmoid, 1, ONNX, 6, 0, line, LOOP,
         CLIP_01(t), const real t = IS_ONE_SIXTH(p0) && p1 == (real)0.5 ? (x + 3) / 6 : p0 * x + p1,
         OF_RESULT, y > 0 && y < 1 ? x * (IS_ONE_SIXTH(p0) ? (real)(1.0f / 6) : p0) : 0, )
OPERATOR(HardSwish, hard_swish, 1, ONNX, 14, 0, NONE, LOOP, CLIP_01(t) * x, const real t = (x + 3) / 6,
         OF_OPERAND, y >= 3 ? x : y <= -3 ? 0 : x * (y / 3 + (real)0.5), )
OPERATOR(Elu, elu, 1, ONNX, 6, COSTLY, alpha, LOOP, x > 0 ? x : p0 * expm1(x), ,
         OF_OPERAND, y > 0 ? x : x * p0 * exp(y), )
OPERATOR(Selu, selu, 1, ONNX, 6, COSTLY, selu, LOOP, (x > 0 ? x : p0 * expm1(x)) * p1, ,
         OF_OPERAND, x * p1 * (y > 0 ? 1 : p0 * exp(y)), )
OPERATOR(Celu, celu, 1, ONNX, 12, COSTLY, alpha, LOOP, x > 0 ? x : p0 * expm1(x / p0), ,
         OF_OPERAND, y > 0 ? x : x * exp(y / p0), )
OPERATOR(Sigmoid, sigmoid, 1, ONNX, 6, COSTLY, NONE, LOOP, sigmoid(x), , OF_RESULT, x * y * (1 - y), )
OPERATOR(Swish, swish, 1, ONNX, 24, COSTLY, alpha, LOOP, sigmoid(p0 * x) * x, ,
         SLOPE, (s * (1 + t * (1 - s))) * x, const real t = p0 * y; const real s = sigmoid(t))
/* Beyond 20 PyTorch's Softplus is x itself, with the gradient 1. */
OPERATOR(Softplus, softplus, 1, ONNX, 1, COSTLY, NONE, LOOP, x > 20 ? x : log1p(exp(x)), ,
         SLOPE, y > 20 ? x : x * sigmoid(y), )
/* tanh(log(1 + e)) = m / (m + 2) with m = e (e + 2) and e = exp(x). From x = 20 on it is 1, and the rest to 1 is 0. */
OPERATOR(Mish, mish, 1, ONNX, 18, COSTLY, NONE, LOOP,
         (m / (m + 2)) * x, const real e = exp(x > 20 ? 20 : x); const real m = e * (e + 2),
         SLOPE, (m / (m + 2) + y * (rest * (2 - rest)) * (e / (1 + e))) * x,
         const real e = exp(y > 20 ? 20 : y); const real m = e * (e + 2); const real rest = y > 20 ? 0 : 2 / (m + 2))
FORMULA(Gelu, gelu, 1, LOOP, phi(x, e) * x, const real e = exp(-x * x / 2))
FORMULA(GeluGrad, gelu_grad, 2, LOOP, (phi(y, e) + y * DENSITY) * x, const real e = exp(-y * y / 2))
OPERATOR(GeluTanh, gelu_tanh, 1, ENGINE, 1, COSTLY, NONE, LOOP, sigmoid(GELU_A * x * (1 + GELU_B * x * x)) * x, ,
         SLOPE, (s + y * s * (1 - s) * (GELU_A * (1 + 3 * GELU_B * y * y))) * x,
         const real s = sigmoid(GELU_A * y * (1 + GELU_B * y * y)))
#endif

/* --- two operands -------------------------------------------------------------------------------------------------- */

/* Of the rest r that division leaves in C. Attribute fmod: the result has the sign of x, as in C; otherwise that of y, as
 * in Python. */
#define MOD_OF_REST p0 == 0 && r != 0 && (r < 0) != (y < 0) ? r + y : r
/* From the exact rest, so that a quotient near a whole number does not round up to it; a quotient of zero has its sign. */
#define FLOOR_OF_REST                                                                                                  \
    y == 0 ? x / y : q == 0 ? copysign(0 * x, x / y) : q - whole > (real)0.5 ? whole + 1 : whole
#define QUOTIENT_OF_REST                                                                                               \
    const real t = (x - r) / y;                                                                                        \
    const real q = r != 0 && (r < 0) != (y < 0) ? t - 1 : t;                                                           \
    const real whole = floor(q)

#if !defined FAMILY || FAMILY == BINARY_FAMILY
FORMULA(Add, add, 2, LOOP, x + y, )
FORMULA(Sub, sub, 2, LOOP, x - y, )
FORMULA(Mul, mul, 2, LOOP, (x * y), )
FORMULA(Div, div, 2, LOOP, x / y, )
FORMULA(DivisorGrad, divisor_grad, 3, LOOP, -(z / y) * x, ) /* of dy, the divisor, the result */
FORMULA(NormQuotient, norm_quotient, 2, OWN, x / y, )
FORMULA(Maximum, max, 2, LOOP, x > y || x != x ? x : y, )
FORMULA(Minimum, min, 2, LOOP, x < y || x != x ? x : y, )
/* Of dy, the operand, the other one; for the minimum the operands change places. */
FORMULA(MaximumGrad, max_grad, 3, LOOP, y < z ? 0 : y == z ? x / 2 : x, )
FORMULA(Pow, pow, 2, OWN, pow(x, y), )
FORMULA(PowGrad, pow_grad, 3, LOOP, z == 0 ? 0 : x * (z * pow(y, z - 1)), )
FORMULA(PowExponentGrad, pow_exponent_grad, 4, LOOP, y == 0 && z >= 0 ? 0 : x * (w * log(y)), )
FORMULA(Mod, mod, 2, OWN, MOD_OF_REST, const real r = fmod(x, y))
FORMULA(Remainder, remainder, 2, OWN, r != 0 && (r < 0) != (y < 0) ? r + y : r, const real r = fmod(x, y))
FORMULA(FloorDiv, floor_div, 2, OWN, FLOOR_OF_REST, const real r = fmod(x, y); QUOTIENT_OF_REST)
OPERATOR(Atan2, atan2, 2, OURS, 1, 0, NONE, VECTOR, atan2(x, y), , BY, grad_atan2)
OPERATOR(Hypot, hypot, 2, OURS, 1, COMMUTATIVE, NONE, VECTOR, hypot(x, y), , BY, grad_hypot)
FORMULA(AlongGrad, along, 3, LOOP, x * (y / z), ) /* of dy, x, a scale */
/* Half the square of a distance up to p0, a line from there on, all over p1. */
FORMULA(Huber, huber, 2, LOOP, (t < p0 ? (real)0.5 * t * t : p0 * (t - (real)0.5 * p0)) * over,
        const real t = fabs(x - y); const real over = 1 / p1)
/* Of dy, x, y: where the distance is infinite, the line's. */
FORMULA(HuberGrad, huber_grad, 3, LOOP, x * (t <= -p0 ? -p0 : t >= p0 ? p0 : t) * over,
        const real t = y - z; const real over = 1 / p1)
#endif

/* --- choices ------------------------------------------------------------------------------------------------------- */

#if !defined FAMILY || FAMILY == SELECT_FAMILY
/* NaN stays, and a bound that is NaN makes everything so; where the bounds cross, the upper one holds. */
FORMULA(Clamp, clamp, 3, LOOP, t > z || z != z ? z : t, const real t = x < y || y != y ? y : x)
FORMULA(ClampGrad, clamp_grad, 4, LOOP, y >= z && y <= w ? x : 0, ) /* of dy, x, the bounds */
#endif

/* clang-format on */

#undef OPERATOR
#undef FORMULA
#undef FORMULA_OF_OPERAND
#undef FORMULA_OF_RESULT
#undef FORMULA_SLOPE
#undef FORMULA_BY
