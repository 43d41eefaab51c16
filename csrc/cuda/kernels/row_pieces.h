/* row_pieces.h -- serves pieces.h as a template: elements of rows, AT_ONCE at a time, computed with as T.
 *
 * NAME(f) is f_float or f_double, NUMBER_AT reads a T from an element of any float type, OF_WORD makes one of bits;
 * IS_WIDE: T is float64. All are forgotten. */
#define COUNT PIECES_OF(IS_WIDE ? F64 : F32)

/* Elements i + j of those that p[0] is the first of, from any address; what is not in [begin, end) is 0, or stays. A
 * float64 is no piece among float32s. */
DEVICE void NAME(take)(const void *p, int type, int64_t i, int64_t begin, int64_t end, T x[AT_ONCE]) {
    if ((type == F64) == IS_WIDE && is_piece(p, type, i, begin, end)) {
        NAME(read)(p, type, i, x);
        return;
    }
    UNROLL for (int j = 0; j < AT_ONCE; j++) x[j] = i + j >= begin && i + j < end ? NUMBER_AT(p, type, i + j) : 0;
}

DEVICE void NAME(give)(void *p, int type, int64_t i, int64_t begin, int64_t end, const T x[AT_ONCE]) {
    if ((type == F64) == IS_WIDE && is_piece(p, type, i, begin, end)) {
        NAME(write)(p, type, i, x);
        return;
    }
    EACH_OF(j, i, begin, end) set_number(p, type, i + j, x[j]);
}

/* Pieces k from elements at[k] on, those whose bit k is in `there`, from an aligned address; the others are 0. All are
 * on their way before the first is looked at. */
DEVICE void NAME(read_pieces)(const void *p, int type, const int64_t at[COUNT], uint32_t there, T x[COUNT][AT_ONCE]) {
    uint32_t w[COUNT][MOST_WORDS] = {{0}};
    UNROLL for (int k = 0; k < COUNT; k++) if (there >> k & 1) read_words(p, type, at[k], w[k]);
    UNROLL for (int k = 0; k < COUNT; k++) {
        UNROLL for (int j = 0; j < AT_ONCE; j++) x[k][j] = OF_WORD(word_part(w[k], SIZE_OF(type), j), type);
    }
}

/* Pieces of [begin, end), `step` elements apart from i on; all are multiples of AT_ONCE, from an aligned address. */
DEVICE void NAME(read_even)(const void *p, int type, int64_t i, int64_t step, int64_t begin, int64_t end,
                            T x[COUNT][AT_ONCE]) {
    int64_t at[COUNT];
    uint32_t there = 0;
    UNROLL for (int k = 0; k < COUNT; k++) {
        at[k] = i + k * step;
        there |= (uint32_t)(at[k] >= begin && at[k] < end) << k;
    }
    if (IS_WIDE) NAME(read_pieces)(p, F64, at, there, x);
    else if (type == F32) NAME(read_pieces)(p, F32, at, there, x);
    else if (type == BF16) NAME(read_pieces)(p, BF16, at, there, x);
    else NAME(read_pieces)(p, F16, at, there, x);
}

/* The same of any, from any address; as take_float. */
DEVICE void NAME(take_pieces)(const void *p, int type, int64_t i, int64_t step, int64_t begin, int64_t end,
                              T x[COUNT][AT_ONCE]) {
    if ((type == F64) != IS_WIDE || ((i | step | begin | end) & (AT_ONCE - 1)) != 0 || !IS_ALIGNED(p, type)) {
        UNROLL for (int k = 0; k < COUNT; k++) NAME(take)(p, type, i + k * step, begin, end, x[k]);
        return;
    }
    NAME(read_even)(p, type, i, step, begin, end, x);
}

#undef T
#undef NAME
#undef NUMBER_AT
#undef OF_WORD
#undef IS_WIDE
#undef COUNT
