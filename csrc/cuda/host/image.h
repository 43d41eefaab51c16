/* image.h -- the compiled kernels of each family, for every architecture, as blocks of bytes in the extension. */
#ifndef ORT_CUDA_IMAGE_H
#define ORT_CUDA_IMAGE_H

enum { MOST_IMAGES = 32 };

/* NULL ends the list, which is empty in a build without kernels. */
extern const void *const cuda_images[];

#endif
