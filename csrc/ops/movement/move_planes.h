/* move_planes.h -- serves move.c as a template: planes of elements T of N bytes.
 *
 * Strides of columns: fill 1 and 0; transpose 1 and any, with the source's rows adjacent; scatter any and any. */

SIMD static void NAME(fill)(const plane *p) {
    const plane q = *p;
    for (int64_t i = 0; i < q.rows; i++) {
        T *restrict to = (T *)(void *)q.to + i * q.to_row;
        const T x = *((const T *)(const void *)q.from + i * q.from_row);
        int64_t begin = 0;
        if (q.streams) {
            _Alignas(CACHE_LINE) T line[CACHE_LINE / N];
            for (int j = 0; j < CACHE_LINE / N; j++) line[j] = x;
            for (; begin + CACHE_LINE / N <= q.cols; begin += CACHE_LINE / N) stream_line(to + begin, line);
        }
        for (int64_t j = begin; j < q.cols; j++) to[j] = x;
    }
}

SIMD static void NAME(scatter)(const plane *p) {
    const plane q = *p;
    for (int64_t i = 0; i < q.rows; i++) {
        T *restrict to = (T *)(void *)q.to + i * q.to_row;
        const T *restrict from = (const T *)(const void *)q.from + i * q.from_row;
        for (int64_t j = 0; j < q.cols; j++) to[j * q.to_col] = from[j * q.from_col];
    }
}

/* The square that fits vectors. Rows i and i + half in turns, log2(side) times, are its columns. */
SIMD_PART void NAME(square)(T *to, const T *from, int64_t to_row, int64_t from_col) {
    typedef T vector __attribute__((vector_size(16)));
    enum { SIDE = 16 / N };
    vector v[SIDE], w[SIDE];
    for (int j = 0; j < SIDE; j++) memcpy(&v[j], from + j * from_col, 16);
    for (int step = 1; step < SIDE; step *= 2) {
        for (int j = 0; j < SIDE / 2; j++) {
            w[2 * j] = JOIN_NAMES(FIRST, N)(v[j], v[j + SIDE / 2]);
            w[2 * j + 1] = JOIN_NAMES(SECOND, N)(v[j], v[j + SIDE / 2]);
        }
        for (int j = 0; j < SIDE; j++) v[j] = w[j];
    }
    for (int i = 0; i < SIDE; i++) memcpy(to + i * to_row, &v[i], 16);
}

/* The square of whole lines, made of those. A cache keeps few lines that lie a power of two apart: where a square has
 * more than that, or streams, it is made elsewhere, so that each line is read once and written once. */
SIMD_PART void NAME(lines)(T *to, const T *from, int64_t to_row, int64_t from_col, bool streams) {
    enum { SIDE = 16 / N, SQUARE = CACHE_LINE / N, FEW = 16 };
    _Alignas(CACHE_LINE) T lines[SQUARE * SQUARE];
    if (SQUARE <= FEW && !streams) {
        for (int i = 0; i < SQUARE; i += SIDE)
            for (int j = 0; j < SQUARE; j += SIDE)
                NAME(square)(to + i * to_row + j, from + j * from_col + i, to_row, from_col);
        return;
    }
    for (int j = 0; j < SQUARE; j += SIDE)
        for (int i = 0; i < SQUARE; i += SIDE)
            NAME(square)(lines + i * SQUARE + j, from + j * from_col + i, SQUARE, from_col);
    for (int i = 0; i < SQUARE; i++)
        if (streams) stream_line(to + i * to_row, lines + i * SQUARE);
        else memcpy(to + i * to_row, lines + i * SQUARE, CACHE_LINE);
}

/* Squares one after the other along the source's rows where they stream, whose next lines then share no set of a cache
 * with these; else along the destination's, whose lines are in a cache. Lines of the next square are far apart, so that
 * no CPU guesses them; the last one has none, which is asked for all the same. */
SIMD_PART void NAME(squares)(const plane *p, bool streams) {
    enum { SIDE = 16 / N, SQUARE = CACHE_LINE / N };
    const plane q = *p;
    T *to = (T *)(void *)q.to;
    const T *from = (const T *)(const void *)q.from;
    const int64_t rows = q.rows & -SIDE, cols = q.cols & -SIDE;
    const int64_t down = (rows + SQUARE - 1) / SQUARE, across = (cols + SQUARE - 1) / SQUARE;
    int64_t top = 0, left = 0, next_top, next_left;
    for (int64_t square = 1; square <= down * across; square++, top = next_top, left = next_left) {
        next_top = SQUARE * (streams ? square % down : square / across);
        next_left = SQUARE * (streams ? square / down : square % across);
        for (int i = 0; i < SQUARE; i++) __builtin_prefetch(from + (next_left + i) * q.from_col + next_top);
        for (int i = 0; i < SQUARE && !streams; i++) __builtin_prefetch(to + (next_top + i) * q.to_row + next_left, 1);
        if (top + SQUARE <= rows && left + SQUARE <= cols) {
            NAME(lines)(to + top * q.to_row + left, from + left * q.from_col + top, q.to_row, q.from_col, streams);
            continue;
        }
        for (int64_t i = top; i < rows && i < top + SQUARE; i += SIDE)
            for (int64_t j = left; j < cols && j < left + SQUARE; j += SIDE)
                NAME(square)(to + i * q.to_row + j, from + j * q.from_col + i, q.to_row, q.from_col);
    }
    for (int64_t i = 0; i < q.rows; i++)
        for (int64_t j = i < rows ? cols : 0; j < q.cols; j++) to[i * q.to_row + j] = from[j * q.from_col + i];
}

SIMD static void NAME(transpose)(const plane *p) {
    if (p->streams) NAME(squares)(p, true);
    else NAME(squares)(p, false);
}
