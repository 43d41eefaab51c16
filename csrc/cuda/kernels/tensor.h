/* tensor.h -- multiplies by tensor cores, of sm_80 on: a warp's step is 16 x 8 sums of 16 terms of 16-bit floats.
 *
 * Who has what is NVIDIA's definition of mma.m16n8k16. With `group` = lane / 4 and `pair` = lane % 4 a lane has
 *     A   rows group and group + 8, terms 2 pair, 2 pair + 1 (words 0 and 1), the same + 8 (words 2 and 3)
 *     B   column group, terms 2 pair, 2 pair + 1 (word 0), the same + 8 (word 1)
 *     C   row group, columns 2 pair, 2 pair + 1; row group + 8, the same columns
 * and a word two neighbouring terms, the first in its lower half. Older GPUs and the emulator gather these and multiply. */
#ifndef ORT_CUDA_TENSOR_H
#define ORT_CUDA_TENSOR_H

#if defined __CUDACC__ && __CUDA_ARCH__ >= 800
#define TENSOR_ADD(type)                                                                                               \
    DEVICE void tensor_add_##type(float c[4], const uint32_t a[4], const uint32_t b[2]) {                              \
        asm("mma.sync.aligned.m16n8k16.row.col.f32." #type "." #type ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "       \
            "{%8, %9}, {%0, %1, %2, %3};"                                                                              \
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])                                                           \
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));                                       \
    }
#else
typedef struct tensor_words {
    uint32_t a[4], b[2];
} tensor_words;

DEVICE tensor_words words_of(tensor_words mine, int lane) {
    tensor_words w;
    UNROLL for (int i = 0; i < 4; i++) w.a[i] = __shfl_sync(0xffffffffu, mine.a[i], lane);
    UNROLL for (int i = 0; i < 2; i++) w.b[i] = __shfl_sync(0xffffffffu, mine.b[i], lane);
    return w;
}

#define TENSOR_ADD(type)                                                                                               \
    DEVICE float term_of_##type(const uint32_t *words, int far, int upper) {                                           \
        return type##_to_f32((type)(words[far] >> 16 * upper));                                                        \
    }                                                                                                                  \
    DEVICE void tensor_add_##type(float c[4], const uint32_t a[4], const uint32_t b[2]) {                              \
        const int group = threadIdx.x % WARP / 4, pair = threadIdx.x % 4;                                              \
        const tensor_words mine = {{a[0], a[1], a[2], a[3]}, {b[0], b[1]}};                                            \
        for (int from = 0; from < 4; from++) {                                                                         \
            const tensor_words rows = words_of(mine, 4 * group + from);                                                \
            for (int side = 0; side < 2; side++) {                                                                     \
                const tensor_words column = words_of(mine, 4 * (2 * pair + side) + from);                              \
                for (int far = 0; far < 2; far++)                                                                      \
                    for (int upper = 0; upper < 2; upper++) {                                                          \
                        const float y = term_of_##type(column.b, far, upper);                                          \
                        c[side] += term_of_##type(rows.a, 2 * far, upper) * y;                                         \
                        c[2 + side] += term_of_##type(rows.a, 2 * far + 1, upper) * y;                                 \
                    }                                                                                                  \
            }                                                                                                          \
        }                                                                                                              \
    }
#endif

TENSOR_ADD(bf16)
TENSOR_ADD(f16)

/* --- operands in shared memory ------------------------------------------------------------------------------------ */

/* SIDE lines of DEPTH terms; a line is so much longer that the lanes of a step meet in no bank. For 256 threads. */
enum { TENSOR_SIDE = 64, TENSOR_DEPTH = 32, TENSOR_LINE = TENSOR_DEPTH / 2 + 4, TENSOR_THREADS = 256 };

typedef union tensor_pair {
    uint16_t half[2];
    uint32_t word;
} tensor_pair;

/* Element (i, t) is x[i * line + t * term]; zeros from line `lines` and term `terms` on. */
typedef struct tensor_operand {
    const uint16_t *x;
    int64_t line, term, lines, terms;
} tensor_operand;

typedef struct tensor_eight {
    uint64_t word[2];
} tensor_eight;

/* The first `count` of eight elements, `step` apart. */
DEVICE tensor_eight eight_at(const uint16_t *x, int64_t at, int64_t step, int64_t count) {
    tensor_eight e = {{0, 0}};

    if (count >= 8 && step == 1 && (uintptr_t)(x + at) % sizeof(uint64_t) == 0) {
        e.word[0] = ((const uint64_t *)(x + at))[0];
        e.word[1] = ((const uint64_t *)(x + at))[1];
        return e;
    }
    UNROLL for (int i = 0; i < 8; i++) if (i < count) e.word[i / 4] |= (uint64_t)x[at + i * step] << (16 * (i % 4));
    return e;
}

/* The thread's eight elements of a tile: along the terms where these are neighbours, else along the lines. */
DEVICE tensor_eight tensor_fetch(const tensor_operand *o, int64_t line, int64_t term) {
    const int e = threadIdx.x;

    if (o->term == 1) {
        line += e / 4, term += e % 4 * 8;
        return eight_at(o->x, line * o->line + term, 1, line < o->lines ? o->terms - term : 0);
    }
    line += e % 8 * 8, term += e / 8;
    return eight_at(o->x, line * o->line + term * o->term, o->line, term < o->terms ? o->lines - line : 0);
}

DEVICE void tensor_stage(tensor_pair *to, const tensor_operand *o, tensor_eight x) {
    const int e = threadIdx.x;

    if (o->term == 1) {
        tensor_pair *line = to + e / 4 * TENSOR_LINE + e % 4 * 4;
        UNROLL for (int i = 0; i < 4; i++) line[i].word = (uint32_t)(x.word[i / 2] >> (32 * (i % 2)));
    } else {
        tensor_pair *column = to + e % 8 * 8 * TENSOR_LINE + e / 8 / 2;
        UNROLL for (int i = 0; i < 8; i++) column[i * TENSOR_LINE].half[e / 8 % 2] =
            (uint16_t)(x.word[i / 4] >> (16 * (i % 4)));
    }
}

/* The words of a step from term 2 * `at` on: of 16 lines of A from `line` on, of 8 columns of B. */
DEVICE void tensor_rows(const tensor_pair *from, int line, int at, uint32_t a[4]) {
    const tensor_pair *p = from + (line + threadIdx.x % WARP / 4) * TENSOR_LINE + at + threadIdx.x % 4;
    a[0] = p[0].word;
    a[1] = p[8 * TENSOR_LINE].word;
    a[2] = p[4].word;
    a[3] = p[8 * TENSOR_LINE + 4].word;
}

DEVICE void tensor_columns(const tensor_pair *from, int line, int at, uint32_t b[2]) {
    const tensor_pair *p = from + (line + threadIdx.x % WARP / 4) * TENSOR_LINE + at + threadIdx.x % 4;
    b[0] = p[0].word;
    b[1] = p[4].word;
}

#endif
