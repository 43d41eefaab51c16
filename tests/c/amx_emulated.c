/* amx_emulated.c -- compiles the AMX kernel with arrays for tiles. So what surrounds the instructions is tested on
 * every CPU. */
#define AMX_EMULATED
#define gemm_kernel_amx gemm_kernel_amx_emulated
#define gemm_kernel_amx_f32 gemm_kernel_amx_f32_emulated
#include "gemm/gemm_amx.c"
