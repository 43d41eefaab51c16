/* triton.h -- starts a Triton kernel: its program, how operands are read, and its arguments. */
#ifndef ORT_OPS_TRITON_H
#define ORT_OPS_TRITON_H

#include "ops/op.h"

enum { TRITON_ARGUMENTS = 512, TRITON_HOW = 64 };
/* Ways to cut a kernel into blocks that are compared, and the text of one. */
enum { TRITON_WAYS = 8, TRITON_WAY = 32 };

/* In the order in which the kernel takes them. */
typedef struct triton_argument {
    int64_t value;
    dtype type;    /* of the elements that `value` is the address of; DT_NONE: it is a number */
    int64_t count; /* of these elements */
} triton_argument;

typedef struct triton_launch {
    const char *program;
    /* A letter an operand, as docs/architecture/triton.md lists them, '|', one a result, '|', and what else a kernel is for. */
    char how[TRITON_HOW];
    int64_t rows, width; /* without rows: 1, and all elements */
    int64_t programs;    /* so many blocks; 0: as many as there are blocks of rows */
    int64_t times;       /* 0, or so many times these: of attention's heads */
    char text[128];      /* what `program` points to, where no node has it */
    int n_arguments;
    triton_argument arguments[TRITON_ARGUMENTS];
} triton_launch;

/* A kernel that was compiled. */
typedef struct triton_image {
    void *bytes; /* a cubin; the receiver's, to be given to free; NULL: it cannot be cut so */
    size_t n_bytes;
    char name[128];
    int threads, block;  /* of a block; how many rows, or elements, it takes */
    int shared, scratch; /* bytes of shared memory; pointers that the kernel takes after its arguments */
} triton_image;

/* What makes kernels of programs: Python (py/triton.c). Called without locks; failures are E_FOREIGN. */
typedef struct triton_maker {
    bool interprets; /* also what is for an emulated GPU, whose memory is the CPU's */
    status (*interpret)(ctx *c, const triton_launch *l);
    /* `way`: how it is cut, one of `ways`; "": as the maker likes, which is the first of them. */
    status (*compile)(ctx *c, const triton_launch *l, int architecture, const char *way, triton_image *out);
    status (*ways)(ctx *c, const triton_launch *l, char ways[TRITON_WAYS][TRITON_WAY], int *count);
} triton_maker;

/* The process's; set once before the first plan with kernels. */
void triton_set_maker(const triton_maker *maker);
/* E_UNSUPPORTED where there is none. */
MUST_USE status triton_get_maker(ctx *c, const triton_maker **out);
/* `seed`: where the run's seed is in memory; NULL: it is the call's. */
MUST_USE status triton_launch_of(ctx *c, const call *k, const uint64_t *seed, triton_launch *out);

#endif
