/* image.c -- puts the files that ORT_CUDA_IMAGES lists, as rows IMAGE(name, "path"), into the extension. */
#include "cuda/host/image.h"

#include <stddef.h>

#ifdef ORT_CUDA_IMAGES
#define IMAGE(name, path)                                                                                              \
    __asm__(".section .rodata\n"                                                                                       \
            ".balign 64\n"                                                                                             \
            "cuda_image_" #name ":\n"                                                                                  \
            ".incbin \"" path "\"\n"                                                                                   \
            ".byte 0\n"                                                                                                \
            ".previous\n");                                                                                            \
    extern const char cuda_image_##name[] __attribute__((visibility("hidden")));
#include ORT_CUDA_IMAGES
#undef IMAGE
#endif

const void *const cuda_images[] = {
#ifdef ORT_CUDA_IMAGES
#define IMAGE(name, path) cuda_image_##name,
#include ORT_CUDA_IMAGES
#endif
    NULL,
};

void *cuda_libraries[sizeof cuda_images / sizeof *cuda_images];
