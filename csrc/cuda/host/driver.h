/* driver.h -- finds NVIDIA's driver at run time: devices, kernels by name, launches.
 *
 * Nothing here is linked or required, and no header of CUDA is included: the entry points are declared once, in
 * DRIVER_FUNCTIONS. Without a driver, or in a build without kernels, opening a device says so in a sentence, and the
 * CPU side is as it is. Memory, streams and events are torch's: what this layer holds of its own (a context, the
 * kernels, one page of pinned memory) it holds for the life of the process. */
#ifndef ORT_CUDA_DRIVER_H
#define ORT_CUDA_DRIVER_H

#include "cuda/kernels/fault.h"
#include "ops/op.h"

enum { MOST_DEVICES = 64 };

/* What torch lets kernels do, added up. TF32 for products and for convolutions; SAME_BITS: only what gives the same bits
 * every time. */
typedef enum math_mode { TF32_PRODUCTS = 1, TF32_CONVOLUTIONS = 2, SAME_BITS = 4 } math_mode;

/* How a run goes on a device, between cuda_begin and cuda_end. */
typedef struct cuda_run {
    int device;
    void *stream;                /* torch's; NULL is the default stream */
    cuda_fault *fault;           /* as kernels see it */
    bool dry;                    /* everything but launching: can this node run here? */
    int math;                    /* a math_mode */
    void *previous;              /* the thread's context before */
    const uint64_t *seed;        /* where kernels find the run's seed; NULL: it goes with each of them */
    struct measuring *measuring; /* of a dry run: what it measures besides (cuda/libraries/measure.h), or NULL */
    struct chain_list *chains;   /* of a dry run: where it lists the chains to compile (compile.h), or NULL */
} cuda_run;

/* Sets `out` up: the device opened when it was not, its context current. E_UNSUPPORTED where there is no such device
 * or no kernels, E_RUNTIME where there is no driver, and when a kernel has met bad data since the last look. cuda_end
 * must follow OK. */
MUST_USE status cuda_begin(ctx *c, int device, void *stream, cuda_run *out);
/* Restores the context. Looks for bad data too, unless `s`, the status of what ran, is an error already. Waits for
 * nothing: what is still under way is seen at the next look. */
MUST_USE status cuda_end(ctx *c, const cuda_run *r, status s);

/* A child of fork that has no CUDA of its own: it must not wait for a lock, and can give nothing back. */
bool cuda_is_forked(void);
/* An error with the reason unless kernels can run here. */
MUST_USE status cuda_available(ctx *c, int *devices);

/* A kernel: a name in the image; static, looked up at its first use. */
typedef struct kernel {
    const char *name;
    void *_Atomic function;
} kernel;

/* Loads an image that was compiled for this architecture, for the life of the process: *f, with its name in that image,
 * is ready. The image is no longer needed then. */
MUST_USE status cuda_load(ctx *c, const void *image, kernel *f);
/* Of a device that was opened: 90 is sm_90. */
int cuda_architecture(int device);

enum { MOST_BLOCKS = 1 << 16, WARP = 32, MOST_THREADS = 1024 };

/* Threads and blocks of a launch along x; y and z are 1. */
typedef struct geometry {
    int64_t blocks;
    int threads;
} geometry;

/* Starts kernel `f` with one argument, the structure at `args`. Nothing is started for 0 blocks. */
MUST_USE status cuda_launch(ctx *c, const call *k, kernel *f, geometry g, const void *args);
/* The same with several parameters, and bytes of shared memory that the kernel does not declare itself. */
MUST_USE status cuda_launch_with(ctx *c, const call *k, kernel *f, geometry g, int shared, void **parameters);
/* `bytes` bytes of a value; zero bytes. */
MUST_USE status cuda_fill(ctx *c, const call *k, void *memory, unsigned char byte, size_t bytes);
MUST_USE status cuda_clear(ctx *c, const call *k, void *memory, size_t bytes);
/* `bytes` of the device's memory to other memory of its own. */
MUST_USE status cuda_copy_bytes(ctx *c, const call *k, void *to, const void *from, size_t bytes);
/* `bytes` of host memory, which may change when this returns, to the device. Waits. */
MUST_USE status cuda_upload(ctx *c, const cuda_run *r, void *to, const void *from, size_t bytes);

/* The other way round. Waits. */
MUST_USE status cuda_download(ctx *c, const cuda_run *r, void *to, const void *from, size_t bytes);

/* --- numbers that come back ---------------------------------------------------------------------------------------- */

/* An int64 of the device's on its way to the host. */
typedef struct cuda_number cuda_number;

/* Starts reading what is at `from` when the run's stream gets there. Waits for nothing. *out: to be freed. */
MUST_USE status cuda_number_read(ctx *c, const cuda_run *r, const void *from, cuda_number **out);
/* Waits until it is there, not for what the stream was given since; between cuda_begin and cuda_end. */
MUST_USE status cuda_number_get(ctx *c, cuda_number *n, int64_t *out);
/* Waits for one that is still under way. NULL is nothing. */
void cuda_number_free(cuda_number *n);

/* --- time --------------------------------------------------------------------------------------------------------- */

/* What is to be measured: starts something on the run's stream. */
typedef status cuda_work(ctx *c, void *arg);
/* Seconds that the device takes for it. Waits. */
MUST_USE status cuda_seconds(ctx *c, const cuda_run *r, cuda_work *work, void *arg, double *seconds);
/* Whether the run's stream is being captured, by whomever: then nothing may wait. */
MUST_USE status cuda_is_captured(ctx *c, const cuda_run *r, bool *out);
/* The same of a stream, where no device need be open: false while the driver is not. */
MUST_USE status cuda_captured(ctx *c, void *stream, bool *out);
/* "NVIDIA H200 (sm_90)" */
enum { CUDA_NAME = 160 };
MUST_USE status cuda_name(ctx *c, int device, char name[CUDA_NAME]);

/* --- graphs: what was started once, to be started again as a whole ------------------------------------------------- */

/* From OK to cuda_capture_end, what this thread starts at `to`, which is `r` with another stream, is written down in
 * place of being started. One thread at a time: others wait. */
MUST_USE status cuda_capture_begin(ctx *c, const cuda_run *r, cuda_run *to);
/* `s`: the status of what was to be started. OK: *captured is the caller's; otherwise NULL. */
MUST_USE status cuda_capture_end(ctx *c, const cuda_run *to, status s, void **captured);
/* Makes the graph ready for starting and gives it back in any case. *executable: one to take over, or NULL; afterwards
 * the caller's, NULL on errors. *updated: it was taken over. */
MUST_USE status cuda_graph_make(ctx *c, void *captured, void **executable, bool *updated);
MUST_USE status cuda_graph_start(ctx *c, const cuda_run *r, void *executable);
/* Gives back; NULL is nothing. What has been started goes on. */
void cuda_graph_forget(void *executable);
/* On the run's stream: a number of 64 bits, which goes with the call; bytes of the device's memory. */
MUST_USE status cuda_set_u64(ctx *c, const cuda_run *r, void *to, uint64_t x);
MUST_USE status cuda_move(ctx *c, const cuda_run *r, void *to, const void *from, size_t bytes);

/* --- geometry ------------------------------------------------------------------------------------------------------ */

/* `count` things, `each` of them a block, in a launch of at most MOST_BLOCKS: kernels stride over what is left. */
geometry geometry_over(int64_t count, int64_t each, int threads);
/* A block for each of `rows` rows of `width` elements, with as many threads as have something to do. */
geometry geometry_rows(int64_t rows, int64_t width);

#endif
