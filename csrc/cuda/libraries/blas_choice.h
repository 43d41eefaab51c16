/* blas_choice.h -- products as cuBLASLt tells them apart, and the algorithms that measuring has chosen for some of them. */
#ifndef ORT_CUDA_BLAS_CHOICE_H
#define ORT_CUDA_BLAS_CHOICE_H

#include "core/ctx.h"
#include "core/dtype.h"

/* What the library's choice depends on. Operands as the library sees them: its A is our B. Without padding, for memcmp. */
typedef struct blas_key {
    int32_t device, type, result_type, epilogue, beta, tf32, trans_a, trans_b;
    int64_t rows, cols, inner, a_ld, b_ld, c_ld;
    int64_t batch, a_step, b_step, c_step;
    int64_t a_aligned, b_aligned, c_aligned, added_aligned; /* bytes */
    int64_t vector_aligned, extra_aligned;                  /* what an epilogue reads or leaves; 0: there is none */
    uint64_t workspace;
} blas_key;

/* The library's structure that holds an algorithm. It may be kept, for the same version of the library. */
typedef struct blas_algorithm {
    uint64_t data[8];
} blas_algorithm;

uint64_t blas_hash(const blas_key *k);

/* "bfloat16 float32 512x64x128 NT ...": all but the device. The other way round false: it is no such text. */
enum { BLAS_KEY_TEXT = 320, BLAS_ALGORITHM_TEXT = 8 * 16 + 1 };
const char *blas_key_text(const blas_key *k, char text[BLAS_KEY_TEXT]); /* returns `text` */
bool blas_key_parse(const char *text, int device, blas_key *out);
const char *blas_algorithm_text(const blas_algorithm *a, char text[BLAS_ALGORITHM_TEXT]);
bool blas_algorithm_parse(const char *text, blas_algorithm *out);

/* One table for the process; callers hold blas.c's lock. An entry may be replaced. */
const blas_algorithm *blas_choice_get(const blas_key *k);         /* NULL: there is none */
bool blas_choice_set(const blas_key *k, const blas_algorithm *a); /* false: the table is full */
void blas_choices_clear(void);

#endif
