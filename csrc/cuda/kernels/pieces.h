/* pieces.h -- takes AT_ONCE neighbouring elements of any type in pieces of 16 bytes where these can be read and
 * written. */
#ifndef ORT_CUDA_PIECES_H
#define ORT_CUDA_PIECES_H

enum { ROW_PIECE = 8 };
#ifndef AT_ONCE
#define AT_ONCE 4 /* kernels that walk rows take ROW_PIECE, a compiled chain may take 8 (generate.h) */
#endif

/* Pieces that a thread has on their way at a time, and keeps. */
#define PIECES_OF(type) ((type) == F64 ? 2 : 4)
enum { MOST_KEEPING = 256 }; /* threads of a block: so each may have all registers that there are for one */

#ifdef ORT_HOST
#include "cuda/host/driver.h"

/* Blocks that have a row each, whose threads take ROW_PIECE elements at a time. */
static inline geometry geometry_pieces(int64_t rows, int64_t width) {
    return geometry_rows(rows, (width * 4 + ROW_PIECE - 1) / ROW_PIECE);
}
/* The same whose threads keep PIECES_OF(type) pieces each: of floats a warp has 1024 elements. */
static inline geometry geometry_kept(int64_t rows, int64_t width, dtype type) {
    geometry g = geometry_rows(rows, (width * 4 - 1) / (PIECES_OF(type) * ROW_PIECE) + 1);
    if (g.threads > MOST_KEEPING) g.threads = MOST_KEEPING;
    return g;
}
#endif

#ifdef ORT_DEVICE
#include <stdint.h>

/* --- one -------------------------------------------------------------------------------------------------------------- */

DEVICE float get_float(const void *p, int type, int64_t i) {
    return type == F32    ? ((const float *)p)[i]
           : type == BF16 ? bf16_to_f32(((const bf16 *)p)[i])
                          : f16_to_f32(((const f16 *)p)[i]);
}
DEVICE double get_double(const void *p, int type, int64_t i) { return (void)type, ((const double *)p)[i]; }
DEVICE int64_t get_int64_t(const void *p, int type, int64_t i) { return (void)type, ((const int64_t *)p)[i]; }
DEVICE int32_t get_int32_t(const void *p, int type, int64_t i) {
    return type == I32   ? ((const int32_t *)p)[i]
           : type == I16 ? ((const int16_t *)p)[i]
           : type == I8  ? ((const int8_t *)p)[i]
                         : ((const uint8_t *)p)[i];
}
DEVICE uint8_t get_uint8_t(const void *p, int type, int64_t i) { return (void)type, ((const uint8_t *)p)[i]; }

DEVICE void set_float(void *p, int type, int64_t i, float x) {
    if (type == F32) ((float *)p)[i] = x;
    else ((uint16_t *)p)[i] = type == BF16 ? f32_to_bf16(x) : f32_to_f16(x);
}
DEVICE void set_double(void *p, int type, int64_t i, double x) { (void)type, ((double *)p)[i] = x; }
DEVICE void set_int64_t(void *p, int type, int64_t i, int64_t x) { (void)type, ((int64_t *)p)[i] = x; }
DEVICE void set_int32_t(void *p, int type, int64_t i, int32_t x) {
    if (type == I32) ((int32_t *)p)[i] = x;
    else if (type == I16) ((int16_t *)p)[i] = (int16_t)x;
    else ((int8_t *)p)[i] = (int8_t)x;
}
DEVICE void set_uint8_t(void *p, int type, int64_t i, uint8_t x) { (void)type, ((uint8_t *)p)[i] = x; }

/* --- AT_ONCE of them -------------------------------------------------------------------------------------------------- */

#ifdef __CUDACC__
/* Written out: the compiler takes the elements of a structure one by one. */
DEVICE void read_16(const void *p, uint32_t *w) {
    asm volatile("ld.global.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3])
                 : "l"(p)
                 : "memory");
}
DEVICE void read_8(const void *p, uint32_t *w) {
    asm volatile("ld.global.v2.b32 {%0, %1}, [%2];" : "=r"(w[0]), "=r"(w[1]) : "l"(p) : "memory");
}
DEVICE void read_4(const void *p, uint32_t *w) {
    asm volatile("ld.global.b32 %0, [%1];" : "=r"(w[0]) : "l"(p) : "memory");
}
DEVICE void write_16(void *p, const uint32_t *w) {
    asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(w[0]), "r"(w[1]), "r"(w[2]), "r"(w[3])
                 : "memory");
}
DEVICE void write_8(void *p, const uint32_t *w) {
    asm volatile("st.global.v2.b32 [%0], {%1, %2};" ::"l"(p), "r"(w[0]), "r"(w[1]) : "memory");
}
DEVICE void write_4(void *p, const uint32_t *w) {
    asm volatile("st.global.b32 [%0], %1;" ::"l"(p), "r"(w[0]) : "memory");
}
#else
#define PIECE(bytes)                                                                                                   \
    DEVICE void read_##bytes(const void *p, uint32_t *w) {                                                             \
        __builtin_memcpy(w, __builtin_assume_aligned(p, bytes), bytes);                                                \
    }                                                                                                                  \
    DEVICE void write_##bytes(void *p, const uint32_t *w) {                                                            \
        __builtin_memcpy(__builtin_assume_aligned(p, bytes), w, bytes);                                                \
    }
PIECE(16)
PIECE(8)
PIECE(4)
#endif

/* Bytes of an element. */
#define SIZE_OF(type)                                                                                                  \
    ((type) == F64 || (type) == I64                     ? 8                                                            \
     : (type) == F32 || (type) == I32                   ? 4                                                            \
     : (type) == BF16 || (type) == F16 || (type) == I16 ? 2                                                            \
                                                        : 1)
/* What an address is to be a multiple of, for elements to be read or written in pieces. */
#define PIECE_OF(type) (AT_ONCE * SIZE_OF(type) < 16 ? AT_ONCE * SIZE_OF(type) : 16)
enum { MOST_WORDS = 2 * AT_ONCE };

DEVICE void read_words(const void *p, int type, int64_t i, uint32_t w[MOST_WORDS]) {
    const char *from = (const char *)p + i * SIZE_OF(type);
    UNROLL for (int at = 0; at < AT_ONCE * SIZE_OF(type); at += PIECE_OF(type)) {
        if (PIECE_OF(type) == 16) read_16(from + at, w + at / 4);
        else if (PIECE_OF(type) == 8) read_8(from + at, w + at / 4);
        else read_4(from + at, w + at / 4);
    }
}
DEVICE void write_words(void *p, int type, int64_t i, const uint32_t w[MOST_WORDS]) {
    char *to = (char *)p + i * SIZE_OF(type);
    UNROLL for (int at = 0; at < AT_ONCE * SIZE_OF(type); at += PIECE_OF(type)) {
        if (PIECE_OF(type) == 16) write_16(to + at, w + at / 4);
        else if (PIECE_OF(type) == 8) write_8(to + at, w + at / 4);
        else write_4(to + at, w + at / 4);
    }
}

/* Element j of words: as it lies there, or an element becomes x. */
DEVICE uint64_t word_part(const uint32_t *w, int size, int j) {
    return size == 8   ? (uint64_t)w[2 * j + 1] << 32 | w[2 * j]
           : size == 4 ? w[j]
           : size == 2 ? w[j / 2] >> j % 2 * 16 & 0xffffu
                       : w[j / 4] >> j % 4 * 8 & 0xffu;
}
DEVICE void set_word_part(uint32_t *w, int size, int j, uint64_t x) {
    if (size == 8) w[2 * j] = (uint32_t)x, w[2 * j + 1] = (uint32_t)(x >> 32);
    else if (size == 4) w[j] = (uint32_t)x;
    else if (size == 2) w[j / 2] = (j % 2 ? w[j / 2] : 0) | (uint32_t)(x & 0xffffu) << j % 2 * 16;
    else w[j / 4] = (j % 4 ? w[j / 4] : 0) | (uint32_t)(x & 0xffu) << j % 4 * 8;
}

typedef union double_bits {
    double d;
    uint64_t u;
} double_bits;
DEVICE float float_of(uint64_t bits, int type) {
    return type == F32 ? bits_to_f32((uint32_t)bits) : type == BF16 ? bf16_to_f32((bf16)bits) : f16_to_f32((f16)bits);
}
DEVICE uint64_t bits_of_float(float x, int type) {
    return type == F32 ? f32_to_bits(x) : type == BF16 ? f32_to_bf16(x) : f32_to_f16(x);
}
DEVICE double double_of(uint64_t bits, int type) {
    double_bits v;
    v.u = bits;
    return (void)type, v.d;
}
DEVICE uint64_t bits_of_double(double x, int type) {
    double_bits v;
    v.d = x;
    return (void)type, v.u;
}
DEVICE int64_t int64_t_of(uint64_t bits, int type) { return (void)type, (int64_t)bits; }
DEVICE uint64_t bits_of_int64_t(int64_t x, int type) { return (void)type, (uint64_t)x; }
DEVICE int32_t int32_t_of(uint64_t bits, int type) {
    return type == I32 ? (int32_t)bits : type == I16 ? (int16_t)bits : type == I8 ? (int8_t)bits : (uint8_t)bits;
}
DEVICE uint64_t bits_of_int32_t(int32_t x, int type) { return (void)type, (uint32_t)x; }
DEVICE uint8_t uint8_t_of(uint64_t bits, int type) { return (void)type, (uint8_t)bits; }
DEVICE uint64_t bits_of_uint8_t(uint8_t x, int type) { return (void)type, x; }

/* The same of all, as f32_to_bf16 has them: two an instruction, and only where one is NaN one after the other. */
DEVICE void bf16_words(const float x[AT_ONCE], uint32_t w[MOST_WORDS]) {
#if defined __CUDA_ARCH__ && __CUDA_ARCH__ >= 800
    int any = 0;
    UNROLL for (int j = 0; j < AT_ONCE; j += 2) {
        int is_nan;
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(w[j / 2]) : "f"(x[j + 1]), "f"(x[j]));
        asm("{ .reg .pred p; setp.nan.f32 p, %1, %2; selp.s32 %0, 1, 0, p; }"
            : "=r"(is_nan)
            : "f"(x[j]), "f"(x[j + 1]));
        any |= is_nan;
    }
    if (!any) return;
#endif
    UNROLL for (int j = 0; j < AT_ONCE; j++) set_word_part(w, 2, j, f32_to_bf16(x[j]));
}
/* What storing leaves of them. */
DEVICE void round_to_bf16(float x[AT_ONCE]) {
    uint32_t w[MOST_WORDS];
    bf16_words(x, w);
    UNROLL for (int j = 0; j < AT_ONCE; j++) x[j] = bf16_to_f32((bf16)word_part(w, 2, j));
}

#define ALL(T, read, write)                                                                                            \
    DEVICE void read(const void *p, int type, int64_t i, T x[AT_ONCE]) {                                               \
        uint32_t w[MOST_WORDS];                                                                                        \
        read_words(p, type, i, w);                                                                                     \
        UNROLL for (int j = 0; j < AT_ONCE; j++) x[j] = T##_of(word_part(w, SIZE_OF(type), j), type);                  \
    }                                                                                                                  \
    DEVICE void write(void *p, int type, int64_t i, const T x[AT_ONCE]) {                                              \
        uint32_t w[MOST_WORDS];                                                                                        \
        UNROLL for (int j = 0; j < AT_ONCE; j++) set_word_part(w, SIZE_OF(type), j, bits_of_##T(x[j], type));          \
        write_words(p, type, i, w);                                                                                    \
    }
ALL(float, read_as_float, write_as_float)
ALL(int32_t, read_as_int32_t, write_as_int32_t)

/* Elements [i, i + AT_ONCE), i a multiple of it, of memory whose address is a multiple of PIECE_OF(type). Where the type
 * is known only as the kernel runs, it is in each of these calls. */
DEVICE void read_float(const void *p, int type, int64_t i, float x[AT_ONCE]) {
    if (type == F32) read_as_float(p, F32, i, x);
    else if (type == BF16) read_as_float(p, BF16, i, x);
    else read_as_float(p, F16, i, x);
}
DEVICE void write_bf16(void *p, int64_t i, const float x[AT_ONCE]) {
    uint32_t w[MOST_WORDS];
    bf16_words(x, w);
    write_words(p, BF16, i, w);
}
DEVICE void write_float(void *p, int type, int64_t i, const float x[AT_ONCE]) {
    if (type == F32) write_as_float(p, F32, i, x);
    else if (type == BF16) write_bf16(p, i, x);
    else write_as_float(p, F16, i, x);
}
DEVICE void read_int32_t(const void *p, int type, int64_t i, int32_t x[AT_ONCE]) {
    if (type == I32) read_as_int32_t(p, I32, i, x);
    else if (type == I16) read_as_int32_t(p, I16, i, x);
    else if (type == I8) read_as_int32_t(p, I8, i, x);
    else read_as_int32_t(p, U8, i, x);
}
DEVICE void write_int32_t(void *p, int type, int64_t i, const int32_t x[AT_ONCE]) {
    if (type == I32) write_as_int32_t(p, I32, i, x);
    else if (type == I16) write_as_int32_t(p, I16, i, x);
    else write_as_int32_t(p, U8, i, x);
}
ALL(double, read_double, write_double)
ALL(int64_t, read_int64_t, write_int64_t)
ALL(uint8_t, read_uint8_t, write_uint8_t)

#define IS_ALIGNED(p, type) (((uintptr_t)(p) & (PIECE_OF(type) - 1)) == 0)

/* --- of rows ---------------------------------------------------------------------------------------------------------- */

#ifndef IS_CHAIN
/* Elements [begin, end) of a tensor that a block shares out over its threads, AT_ONCE of them a thread, from i, a
 * multiple of it: so what a thread has, and the order of a sum, depend on no address. At either end some are outside.
 * A warp's first element is a multiple of 64, as a dropout wants it, and a warp goes round as a whole. */
#define FOR_PIECES(i, begin, end)                                                                                      \
    for (int64_t i = (begin) / 64 * 64 + (int64_t)AT_ONCE * threadIdx.x; i - threadIdx.x % WARP * AT_ONCE < (end);     \
         i += (int64_t)AT_ONCE * blockDim.x)
/* Element i + j of these, for every j that is inside. */
#define EACH_OF(j, i, begin, end) UNROLL for (int j = 0; j < AT_ONCE; j++) if ((i) + j >= (begin) && (i) + j < (end))
/* Whether a thread may have more of them than those of one i, which it can keep. */
#define ARE_MANY(begin, end) ((end) - (begin) / 64 * 64 > (int64_t)AT_ONCE * blockDim.x)

/* Whether all of a thread's elements are there, and can be read and written as pieces. */
DEVICE int is_piece(const void *p, int type, int64_t i, int64_t begin, int64_t end) {
    return i >= begin && i + AT_ONCE <= end && IS_ALIGNED((const char *)p + i * SIZE_OF(type), type);
}

/* As FOR_PIECES, where a thread has PIECES_OF(type) pieces at a time, PIECE_STEP elements apart; and whether it may have more
 * of them than those of one i. */
#define PIECE_STEP ((int64_t)AT_ONCE * blockDim.x)
#define FOR_ROUNDS(type, i, begin, end)                                                                                \
    for (int64_t i = (begin) / 64 * 64 + (int64_t)AT_ONCE * threadIdx.x; i - threadIdx.x % WARP * AT_ONCE < (end);     \
         i += PIECES_OF(type) * PIECE_STEP)
#define ARE_ROUNDS(type, begin, end) ((end) - (begin) / 64 * 64 > PIECES_OF(type) * PIECE_STEP)

/* Of elements [i, i + AT_ONCE) those that are in [begin, end), a bit each. */
DEVICE uint32_t inside_of(int64_t i, int64_t begin, int64_t end) {
    const int64_t skipped = begin - i, there = end - i;
    const int from = skipped < 0 ? 0 : skipped < AT_ONCE ? (int)skipped : AT_ONCE;
    const int to = there < 0 ? 0 : there < AT_ONCE ? (int)there : AT_ONCE;
    return ((1u << to) - 1) & ~((1u << from) - 1);
}
enum { ALL_INSIDE = (1 << AT_ONCE) - 1 };

#define T float
#define NAME(f) f##_float
#define NUMBER_AT number_f32
#define OF_WORD float_of
#define IS_WIDE 0
#include "cuda/kernels/row_pieces.h"

#define T double
#define NAME(f) f##_double
#define NUMBER_AT number_f64
#define OF_WORD double_of
#define IS_WIDE 1
#include "cuda/kernels/row_pieces.h"

#endif
#endif

#endif
