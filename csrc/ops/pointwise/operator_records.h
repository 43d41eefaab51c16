/* operator_records.h -- gives the records of a FAMILY's rows and of their gradients, inside of the family's list. */
#define DOMAIN_ONNX ""
#define DOMAIN_OURS ORT_DOMAIN
#define DOMAIN_ENGINE ORT_DOMAIN
#define FLAGS_ONNX 0
#define FLAGS_OURS IN_MODELS
#define FLAGS_ENGINE 0
#define INPLACE_OF_1 INPLACE_0
#define INPLACE_OF_2 INPLACE_0 | INPLACE_1
#define INFER_OF_1 infer_same
#define INFER_OF_2 infer_pointwise
/* A family that has sets of attributes defines these two for each. */
#define PARAMS_NONE
#define ATTRS_NONE NULL
#define RULE_OF_OPERAND(...) pointwise_grad_x
#define RULE_OF_RESULT(...) pointwise_grad_y
#define RULE_SLOPE(...) pointwise_grad_x
#define RULE_BY(rule) rule

/* clang-format off */
#define GRADIENT(name_, function, attributes, ...)                                                                     \
    {TILED_GRADIENT(name_, 2, PARAMS_##attributes .fn = {FLOAT_TILES(function)}, __VA_ARGS__),                         \
     .attrs = ATTRS_##attributes},
#define GRADIENT_OF_OPERAND(name_, function, attributes) GRADIENT(name_, function, attributes, .slope = false)
#define GRADIENT_OF_RESULT(name_, function, attributes) GRADIENT(name_, function, attributes, .slope = false)
#define GRADIENT_SLOPE(name_, function, attributes) GRADIENT(name_, function, attributes, .slope = true)
#define GRADIENT_BY(name_, function, attributes)

#define OPERATOR(name_, function_, operands, domain_, since_, cost, attributes, cpu_, formula, where, gradient, ...)   \
    {TILED(#name_, DOMAIN_##domain_, since_, operands, FLOATS, INPLACE_OF_##operands | FLAGS_##domain_ | cost,         \
           INFER_OF_##operands, PARAMS_##attributes .fn = {FLOAT_TILES(function_)}),                                   \
     .attrs = ATTRS_##attributes, .grad = RULE_##gradient(__VA_ARGS__)},                                               \
        GRADIENT_##gradient(#name_ "Grad", function_##_grad, attributes)
/* clang-format on */
#include "ops/pointwise/operators.h"
