/* rnn_steps.h -- serves rnn_scan.c as a template: one step of rows [begin, end) of the batch, forward and back.
 *
 * Hidden units do not see one another within a step, though the compiler cannot know that their rows are apart. */

/* --- forward ------------------------------------------------------------------------------------------------------ */

/* Before a row is computed: what it starts from, and what an ended sequence shows. False: the row is done. */
static inline bool NAME(begin_row)(const scan *s, int64_t b) {
    const size_t bytes = (size_t)s->hidden * sizeof(T);
    const T *h = (const T *)s->h + b * s->hidden, *c = (const T *)s->c + b * s->hidden;
    if (s->before) memcpy(ROW(T, s->before, s->hidden), h, bytes);
    if (!ended(s, b)) return true;
    if (s->y) memset(ROW(T, s->y, s->hidden), 0, bytes);
    if (s->cells) memcpy(ROW(T, s->cells, s->hidden), c, bytes);
    return false;
}

SIMD static void NAME(rnn)(void *arg, int64_t begin, int64_t end) {
    const scan *s = arg;
    const int64_t n = s->hidden;
    for (int64_t b = begin; b < end; b++) {
        T *gate = GATE(T, n), *h = (T *)s->h + b * n;
        if (!NAME(begin_row)(s, b)) continue;
        if (s->positive)
            for (int64_t j = 0; j < n; j++) gate[j] = gate[j] <= 0 ? 0 : gate[j];
        else
            for (int64_t j = 0; j < n; j++) gate[j] = v_tanh(gate[j]);
        memcpy(h, gate, (size_t)n * sizeof(T));
        if (s->y) memcpy(ROW(T, s->y, n), h, (size_t)n * sizeof(T));
    }
}

SIMD static void NAME(gru)(void *arg, int64_t begin, int64_t end) {
    const scan *s = arg;
    const int64_t n = s->hidden;
    const T *bias = s->bias;
    for (int64_t b = begin; b < end; b++) {
        const T *z = ROW(const T, s->z, 3 * n), *u = (const T *)s->u + b * 3 * n;
        T *gate = GATE(T, 4 * n), *h = (T *)s->h + b * n;
        if (!NAME(begin_row)(s, b)) continue;
#pragma GCC ivdep
        for (int64_t j = 0; j < n; j++) {
            const T update = v_sigmoid(z[j] + u[j] + bias[j]), reset = v_sigmoid(z[n + j] + u[n + j] + bias[n + j]);
            const T inner = u[2 * n + j] + bias[2 * n + j], fresh = v_tanh(z[2 * n + j] + reset * inner);
            gate[j] = update;
            gate[n + j] = reset;
            gate[2 * n + j] = fresh;
            gate[3 * n + j] = inner;
            h[j] = fresh + update * (h[j] - fresh);
        }
        if (s->y) memcpy(ROW(T, s->y, n), h, (size_t)n * sizeof(T));
    }
}

SIMD static void NAME(lstm)(void *arg, int64_t begin, int64_t end) {
    const scan *s = arg;
    const int64_t n = s->hidden;
    for (int64_t b = begin; b < end; b++) {
        T *gate = GATE(T, 4 * n), *h = (T *)s->h + b * n, *c = (T *)s->c + b * n;
        if (!NAME(begin_row)(s, b)) continue;
#pragma GCC ivdep
        for (int64_t j = 0; j < n; j++) {
            const T in = v_sigmoid(gate[j]), out = v_sigmoid(gate[n + j]), keep = v_sigmoid(gate[2 * n + j]);
            const T fresh = v_tanh(gate[3 * n + j]), cell = keep * c[j] + in * fresh;
            gate[j] = in;
            gate[n + j] = out;
            gate[2 * n + j] = keep;
            gate[3 * n + j] = fresh;
            c[j] = cell;
            h[j] = out * v_tanh(cell);
        }
        if (s->y) memcpy(ROW(T, s->y, n), h, (size_t)n * sizeof(T));
        if (s->cells) memcpy(ROW(T, s->cells, n), c, (size_t)n * sizeof(T));
    }
}

/* --- back --------------------------------------------------------------------------------------------------------- */

/* An ended sequence passes dh and dc on as they are; the others add dy to dh, and leave in dh what does not go through
 * r: the rest is added by a product. */
static inline bool NAME(begin_row_back)(const scan *s, int64_t b) {
    T *dh = (T *)s->h + b * s->hidden;
    if (ended(s, b)) {
        memset(ROW(T, s->dz, s->gates * s->hidden), 0, (size_t)(s->gates * s->hidden) * sizeof(T));
        if (s->du) memset(ROW(T, s->du, s->gates * s->hidden), 0, (size_t)(s->gates * s->hidden) * sizeof(T));
        return false;
    }
    if (s->dy) {
        const T *dy = ROW(const T, s->dy, s->hidden);
        for (int64_t j = 0; j < s->hidden; j++) dh[j] += dy[j];
    }
    return true;
}

SIMD static void NAME(rnn_back)(void *arg, int64_t begin, int64_t end) {
    const scan *s = arg;
    const int64_t n = s->hidden;
    for (int64_t b = begin; b < end; b++) {
        const T *h = ROW(const T, s->gate, n);
        T *dz = ROW(T, s->dz, n), *dh = (T *)s->h + b * n;
        if (!NAME(begin_row_back)(s, b)) continue;
#pragma GCC ivdep
        for (int64_t j = 0; j < n; j++) {
            dz[j] = s->positive ? (h[j] > 0 ? dh[j] : 0) : dh[j] * (1 - h[j] * h[j]);
            dh[j] = 0;
        }
    }
}

SIMD static void NAME(gru_back)(void *arg, int64_t begin, int64_t end) {
    const scan *s = arg;
    const int64_t n = s->hidden;
    for (int64_t b = begin; b < end; b++) {
        const T *gate = ROW(const T, s->gate, 4 * n), *before = ROW(const T, s->before_in, n);
        T *dz = ROW(T, s->dz, 3 * n), *du = ROW(T, s->du, 3 * n), *dh = (T *)s->h + b * n;
        if (!NAME(begin_row_back)(s, b)) continue;
#pragma GCC ivdep
        for (int64_t j = 0; j < n; j++) {
            const T update = gate[j], reset = gate[n + j], fresh = gate[2 * n + j], inner = gate[3 * n + j];
            const T dn = dh[j] * (1 - update) * (1 - fresh * fresh);
            du[j] = dz[j] = dh[j] * (before[j] - fresh) * update * (1 - update);
            du[n + j] = dz[n + j] = dn * inner * reset * (1 - reset);
            dz[2 * n + j] = dn;
            du[2 * n + j] = dn * reset;
            dh[j] *= update;
        }
    }
}

SIMD static void NAME(lstm_back)(void *arg, int64_t begin, int64_t end) {
    const scan *s = arg;
    const int64_t n = s->hidden, earlier = s->reverse ? 1 : -1, t = s->t + earlier;
    for (int64_t b = begin; b < end; b++) {
        const T *gate = ROW(const T, s->gate, 4 * n), *cells = ROW(const T, s->cells_in, n);
        const T *c = t < 0 || t >= s->steps ? (const T *)s->first_c + b * n : cells + earlier * s->batch * n;
        T *dz = ROW(T, s->dz, 4 * n), *dh = (T *)s->h + b * n, *dc = (T *)s->c + b * n;
        if (!NAME(begin_row_back)(s, b)) continue;
#pragma GCC ivdep
        for (int64_t j = 0; j < n; j++) {
            const T in = gate[j], out = gate[n + j], keep = gate[2 * n + j], fresh = gate[3 * n + j];
            const T seen = v_tanh(cells[j]), d = dc[j] + dh[j] * out * (1 - seen * seen);
            dz[j] = d * fresh * in * (1 - in);
            dz[n + j] = dh[j] * seen * out * (1 - out);
            dz[2 * n + j] = d * c[j] * keep * (1 - keep);
            dz[3 * n + j] = d * in * (1 - fresh * fresh);
            dc[j] = d * keep;
            dh[j] = 0;
        }
    }
}
