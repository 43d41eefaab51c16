/* scatter_rows_combine.h -- serves scatter_rows.c as a template: rows, each with the updates that are sent to it. */

/* Rows [from, to) of block `o`, columns [at, at + n); `ahead` is AHEAD updates further on. The first sum of a row is of
 * zero and an update, which needs no zeros in memory. */
SIMD static void NAME(rows)(const row_scatter *s, int64_t o, int64_t from, int64_t to, int64_t at, int64_t n,
                            place *ahead) {
    enum { IN_A_LINE = CACHE_LINE / sizeof(T) };
    const T *updates = (const T *)s->updates + o * s->count * s->width + at;
    _Alignas(CACHE_LINE) A acc[COLUMNS];
    for (int64_t r = from; r < to; r++) {
        T *out = (T *)s->out + (o * s->rows + r) * s->width + at;
        if (r + 1 < to && !s->streams && (s->base != s->out || s->head[r + 1] >= 0))
            prefetch(out + s->width, n * (int64_t)sizeof(T));
        if (s->head[r] < 0 && !s->streams) {
            if (!s->base) memset(out, 0, (size_t)n * sizeof(T));
            continue;
        }
        const bool begun = s->base || s->how != COMBINE_ADD || s->head[r] < 0;
        for (int64_t i = 0; begun && i < n; i++) acc[i] = s->base ? GET(out[i]) : 0;
        for (int64_t k = s->head[r]; k >= 0; k = s->next[k]) {
            const bool more = next_update(s, ahead);
            const T *x = updates + k * s->width, *later = more ? updates + ahead->k * s->width : x;
            for (int64_t i = 0, m; i < n; i += m) {
                m = n - i < PIECE ? n - i : PIECE;
                prefetch(later + i, m * (int64_t)sizeof(T));
                if (begun || k != s->head[r]) NAME(take)(s->how, acc + i, x + i, m);
                else
                    for (int64_t j = i; j < i + m; j++) acc[j] = (A)((U)0 + (U)GET(x[j]));
            }
        }
        for (int64_t i = 0; s->streams && i < n; i += IN_A_LINE) {
            _Alignas(CACHE_LINE) T line[IN_A_LINE];
            for (int j = 0; j < IN_A_LINE; j++) line[j] = PUT(acc[i + j]);
            stream_line(out + i, line);
        }
        for (int64_t i = 0; !s->streams && i < n; i++) out[i] = PUT(acc[i]);
    }
}
