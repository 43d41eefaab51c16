/* nvrtc_headers.c -- holds the headers of kernels as text, for kernels that are compiled at run time. Those of
 * the standard library are not there then; NVRTC knows its functions by itself. */
#include "cuda/libraries/nvrtc.h"

/* Included so that this file is compiled again when one of them changes. */
#include "cuda/kernels/chain.h"
#include "cuda/kernels/elements.h"
#include "cuda/kernels/fault.h"
#include "cuda/kernels/kernel.h"
#include "cuda/kernels/philox.h"
#include "cuda/kernels/pieces.h"
#include "cuda/kernels/steps.h"
#include "ops/pointwise/operators.h"

#define HEADER(name, folder)                                                                                           \
    __asm__(".section .rodata\n"                                                                                       \
            "cuda_header_" #name ":\n"                                                                                 \
            ".incbin \"csrc/" folder "/" #name ".h\"\n"                                                                \
            ".byte 0\n"                                                                                                \
            ".previous\n");                                                                                            \
    extern const char cuda_header_##name[] __attribute__((visibility("hidden")));
HEADER(chain, "cuda/kernels")
HEADER(elements, "cuda/kernels")
HEADER(fault, "cuda/kernels")
HEADER(kernel, "cuda/kernels")
HEADER(philox, "cuda/kernels")
HEADER(pieces, "cuda/kernels")
HEADER(steps, "cuda/kernels")
HEADER(operators, "ops/pointwise")

static const char of_math[] = "#define INFINITY __int_as_float(0x7f800000)\n"
                              "#define NAN __int_as_float(0x7fffffff)\n";
static const char of_stdint[] = "typedef signed char int8_t;\ntypedef unsigned char uint8_t;\n"
                                "typedef short int16_t;\ntypedef unsigned short uint16_t;\n"
                                "typedef int int32_t;\ntypedef unsigned int uint32_t;\n"
                                "typedef long int64_t;\ntypedef unsigned long uint64_t;\n"
                                "typedef unsigned long uintptr_t;\n"
                                "#define INT32_MIN (-2147483647 - 1)\n#define INT32_MAX 2147483647\n"
                                "#define INT64_MIN (-9223372036854775807L - 1)\n";

const char *const nvrtc_headers[] = {cuda_header_chain,
                                     cuda_header_elements,
                                     cuda_header_fault,
                                     cuda_header_kernel,
                                     cuda_header_philox,
                                     cuda_header_pieces,
                                     cuda_header_steps,
                                     cuda_header_operators,
                                     of_math,
                                     of_stdint,
                                     NULL};
const char *const nvrtc_header_names[] = {"cuda/kernels/chain.h",
                                          "cuda/kernels/elements.h",
                                          "cuda/kernels/fault.h",
                                          "cuda/kernels/kernel.h",
                                          "cuda/kernels/philox.h",
                                          "cuda/kernels/pieces.h",
                                          "cuda/kernels/steps.h",
                                          "ops/pointwise/operators.h",
                                          "math.h",
                                          "stdint.h",
                                          NULL};
_Static_assert(sizeof nvrtc_headers / sizeof *nvrtc_headers == NVRTC_HEADERS + 1, "nvrtc.h counts them");
