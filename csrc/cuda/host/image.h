/* image.h -- declares the compiled kernels of each family, for every architecture, as blocks of bytes. */
#ifndef ORT_CUDA_IMAGE_H
#define ORT_CUDA_IMAGE_H

/* NULL ends the list, which is empty in a build without kernels. */
extern const void *const cuda_images[];

/* A place beside each for the driver's library of it, once it is loaded. The driver layer owns what is there. */
extern void *cuda_libraries[];

#endif
