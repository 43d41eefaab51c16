/* nvrtc.h -- finds NVIDIA's compiler, torch's own copy, at run time like the driver. */
#ifndef ORT_CUDA_NVRTC_H
#define ORT_CUDA_NVRTC_H

#include "core/ctx.h"

#include <stddef.h>

/* The library's version, 10 * major + minor; what it compiles is only good for it. E_RUNTIME without the library. */
MUST_USE status nvrtc_version(ctx *c, int *version);

/* Compiles kernels for an architecture (90: sm_90); the text may include what kernels of this folder do. The image is
 * the caller's, to be given to free. E_RUNTIME, with the compiler's first lines, when it refuses. */
MUST_USE status nvrtc_compile(ctx *c, const char *text, int architecture, void **image, size_t *bytes);

/* The text of all that may be included: what compiled kernels depend on, beside their own. NULL ends the list. */
extern const char *const nvrtc_headers[], *const nvrtc_header_names[];
enum { NVRTC_HEADERS = 10 };

#endif
