/* fake_attention.h -- computes attention in float64 over what fake_torch.c's tensors hold: of sequences, and of lists
 * of rows. */
#ifndef FAKE_ATTENTION_H
#define FAKE_ATTENTION_H

/* --- attention ---------------------------------------------------------------------------------------------------- */

static int number_type(int type) { return type == FLOAT32 ? R_32F : type == HALF ? R_16F : R_16BF; }
static int64_t at(const tensor *t, int64_t b, int64_t s, int64_t h) {
    return b * t->stride[0] + s * t->stride[1] + h * t->stride[2];
}
static double element(const tensor *t, int64_t i) { return get(number_type(t->type), t->data, i); }
static void set(tensor *t, int64_t i, double x) { put(number_type(t->type), t->data, i, x); }

/* A call, with operands as [B, S, H, D]; heads of keys are shared. */
typedef struct work {
    int kernel;
    tensor q, k, v;
    bool causal;
    double scale, dropout;
    const uint64_t *drawn;
    const tensor *bias; /* or NULL, as its gradient */
    tensor *dbias;
    const int32_t *starts[2]; /* of listed queries and keys, [sequences + 1]; or NULL */
    int64_t sequences, sequence, longest[2];
} work;

/* As the other of [B, S, H, D] and [B, H, S, D]. */
static tensor turned(const tensor *t) {
    tensor x = *t;
    x.dim[1] = t->dim[2], x.dim[2] = t->dim[1];
    x.stride[1] = t->stride[2], x.stride[2] = t->stride[1];
    return x;
}

static tensor tokens_first(int kernel, const tensor *t) { return kernel == CUDNN && is(t) ? turned(t) : *t; }

static bool operand_fits(int kernel, const tensor *t, const tensor *like, bool aligned) {
    const int64_t step = t->type == FLOAT32 ? 4 : 8;
    if (!is(t) || t->rank != 4 || t->stride[3] != 1 || t->type != like->type) return false;
    if (t->type != HALF && t->type != BFLOAT16 && (kernel != EFFICIENT || t->type != FLOAT32)) return false;
    for (int d = 0; d < 3; d++)
        if (aligned && t->dim[d] > 1 && t->stride[d] % step) return false;
    return t->dim[0] == like->dim[0] && (!aligned || (uintptr_t)t->data % 16 == 0);
}

static const char *wrong(const work *w) {
    const uint64_t *on = _ZN3c104impl26raw_local_dispatch_key_setE;
    const tensor *q = &w->q, *k = &w->k, *v = &w->v;
    if (on[0] || on[1]) return "attention sees what the user has switched on";
    if (fake_capturing() && (!fake_user_captures() || w->starts[0])) return "attention by torch during a capture";
    if (!fake_in_context()) return "attention without the device's context";
    if (!operand_fits(w->kernel, q, q, true) || !operand_fits(w->kernel, k, q, true) ||
        !operand_fits(w->kernel, v, q, true))
        return "operands of attention";
    if (k->dim[3] != q->dim[3] || v->dim[1] != k->dim[1] || v->dim[2] != k->dim[2] || q->dim[2] % k->dim[2])
        return "sizes of attention";
    if (w->kernel == EFFICIENT && q->dim[2] != k->dim[2]) return "fewer heads of keys than it takes";
    if (w->kernel == FLASH && q->dim[3] != v->dim[3]) return "other widths than it takes";
    const bool by_flash = !w->bias && q->type != FLOAT32 && q->dim[3] == v->dim[3];
    if (w->dropout != 0 && w->kernel != (by_flash ? FLASH : EFFICIENT)) return "dropout that is not asked for there";
    return w->dropout < 0 || w->dropout >= 1 ? "a form of attention" : NULL;
}

/* What a weight is multiplied by: whether it is dropped follows from what was drawn, and its place. */
static double kept(const work *w, int64_t b, int64_t h, int64_t i, int64_t j) {
    if (w->dropout == 0) return 1;
    const int64_t queries = w->starts[0] ? w->longest[0] : w->q.dim[1];
    const int64_t keys = w->starts[0] ? w->longest[1] : w->k.dim[1];
    const int64_t place = (((b + w->sequence) * w->q.dim[2] + h) * queries + i) * keys + j;
    uint64_t x = (w->drawn[0] ^ w->drawn[1] * 0x9E3779B97F4A7C15u) + (uint64_t)place * 0xBF58476D1CE4E5B9u;
    x = (x ^ x >> 31) * 0x94D049BB133111EBu;
    return (double)((x ^ x >> 29) >> 11) / 9007199254740992.0 < w->dropout ? 0 : 1 / (1 - w->dropout);
}

static int64_t group(const work *w, int64_t h) { return h * w->k.dim[2] / w->q.dim[2]; }

static double score(const work *w, int64_t b, int64_t h, int64_t i, int64_t j) {
    const int64_t qi = at(&w->q, b, i, h), kj = at(&w->k, b, j, group(w, h));
    double sum = 0;
    for (int64_t d = 0; d < w->q.dim[3]; d++) sum += element(&w->q, qi + d) * element(&w->k, kj + d);
    return w->scale * sum + (w->bias ? element(w->bias, at(w->bias, b, h, i) + j) : 0);
}

static void attend(const work *w, int64_t b, int64_t h, int64_t i, tensor *y, tensor *lse, double *x) {
    const int64_t keys = w->causal ? i + 1 : w->k.dim[1];
    double most = -INFINITY, total = 0;

    for (int64_t j = 0; j < keys; j++) most = fmax(most, x[j] = score(w, b, h, i, j));
    const bool nothing = most == -INFINITY; /* then there are zeros, and a sum of 1 */
    if (nothing) most = 0;
    for (int64_t j = 0; j < keys; j++) total += x[j] = exp(x[j] - most);
    if (nothing) total = 1;
    for (int64_t j = 0; j < keys; j++) x[j] *= kept(w, b, h, i, j);
    for (int64_t d = 0; d < w->v.dim[3]; d++) {
        double sum = 0;
        for (int64_t j = 0; j < keys; j++) sum += x[j] * element(&w->v, at(&w->v, b, j, group(w, h)) + d);
        set(y, at(y, b, i, h) + d, sum / total);
    }
    if (lse) set(lse, b * lse->stride[0] + h * lse->stride[1] + i, most + log(total));
}

/* --- lists of rows --- */

static int lengths[2][MOST], sequences;

int fake_lengths(int side, int *out, int n) {
    for (int i = 0; i < n && i < sequences; i++) out[i] = lengths[side][i];
    return sequences;
}

/* [T, H, D] as [1, T, H, D]. */
static tensor as_one(const tensor *t) {
    tensor x = *t;
    if (!is(t) || t->rank != 3) return x;
    x.rank = 4;
    x.dim[0] = 1, x.stride[0] = t->dim[0] * t->stride[0];
    for (int d = 0; d < 3; d++) x.dim[d + 1] = t->dim[d], x.stride[d + 1] = t->stride[d];
    return x;
}

static tensor rows_of(const tensor *t, int64_t from, int64_t count) {
    tensor x = *t;
    x.data += from * t->stride[1] * (t->type == FLOAT32 ? 4 : 2);
    x.dim[1] = count;
    return x;
}

/* The sums of one sequence: [heads, rows], or one of [sequences, heads, room]. */
static tensor sums_of(const work *w, const tensor *lse, int64_t s) {
    tensor x = *lse;
    const bool flat = lse->rank == 2;
    x.data += (flat ? w->starts[0][s] : s * lse->stride[0]) * (int64_t)sizeof(float);
    x.stride[1] = lse->stride[flat ? 0 : 1], x.stride[0] = 0;
    return x;
}

static work part_of(const work *w, int64_t s) {
    work p = *w;
    const int64_t q = w->starts[0][s], k = w->starts[1][s];
    p.sequence = s;
    p.q = rows_of(&w->q, q, w->starts[0][s + 1] - q);
    p.k = rows_of(&w->k, k, w->starts[1][s + 1] - k);
    p.v = rows_of(&w->v, k, w->starts[1][s + 1] - k);
    return p;
}

/* Takes note of the lists. */
static const char *take_starts(work *w, const tensor *starts_q, const tensor *starts_k, int64_t longest_q,
                               int64_t longest_k) {
    const tensor *starts[] = {starts_q, starts_k}, *rows[] = {&w->q, &w->k};
    const int64_t longest[] = {longest_q, longest_k};

    sequences = 0;
    for (int i = 0; i < 2; i++) {
        const tensor *t = starts[i];
        if (!is(t) || t->type != INT32 || t->rank != 1 || t->dim[0] < 2 || t->stride[0] != 1)
            return "starts of sequences";
        const int32_t *at = w->starts[i] = (const int32_t *)(const void *)t->data;
        w->sequences = t->dim[0] - 1;
        w->longest[i] = longest[i];
        if (longest[i] < 1 || longest[i] > rows[i]->dim[1]) return "the longest of sequences";
        if (at[0] != 0 || at[w->sequences] > rows[i]->dim[1]) return "where sequences start and end";
        for (int64_t s = 0; s < w->sequences; s++) {
            if (at[s + 1] < at[s] || at[s + 1] - at[s] > longest[i]) return "a length of a sequence";
            if (s < MOST) lengths[i][s] = at[s + 1] - at[s];
        }
    }
    if (starts_q->dim[0] != starts_k->dim[0]) return "numbers of sequences";
    for (int64_t s = 0; w->causal && s < w->sequences; s++)
        if (lengths[0][s] != lengths[1][s]) return "a triangle over sequences of different lengths";
    sequences = (int)w->sequences;
    return NULL;
}

/* What flash attention writes for queries without keys; the memory-efficient kernel is not relied on. */
static void attend_nothing(const work *w, tensor *y, tensor *lse) {
    for (int64_t n = 0; w->kernel == FLASH && n < w->q.dim[1] * w->q.dim[2]; n++) {
        const int64_t i = n / w->q.dim[2], h = n % w->q.dim[2];
        for (int64_t d = 0; d < w->v.dim[3]; d++) set(y, at(y, 0, i, h) + d, 0);
        set(lse, h * lse->stride[1] + i, INFINITY);
    }
}

static int forward_listed(const work *w, int64_t room, tensor **y, tensor **lse) {
    const char *what = wrong(w);

    if (!enter() || w->kernel == lacks || lacks == KERNELS) return 1;
    if (what) return complain(what);
    *y = make(w->q.type, 4, (int64_t[]){1, w->q.dim[1], w->q.dim[2], w->v.dim[3]});
    if (w->kernel == FLASH) *lse = make(FLOAT32, 2, (int64_t[]){w->q.dim[2], w->q.dim[1]});
    else *lse = make(FLOAT32, 3, (int64_t[]){w->sequences, w->q.dim[2], room});
    double *x = calloc((size_t)w->k.dim[1] + 1, sizeof *x);
    for (int64_t s = 0; s < w->sequences; s++) {
        const work p = part_of(w, s);
        tensor out = rows_of(*y, w->starts[0][s], p.q.dim[1]), sums = sums_of(w, *lse, s);
        if (p.k.dim[1] == 0) attend_nothing(&p, &out, &sums);
        for (int64_t n = 0; p.k.dim[1] && n < p.q.dim[1] * p.q.dim[2]; n++)
            attend(&p, 0, n % p.q.dim[2], n / p.q.dim[2], &out, room ? &sums : NULL, x);
    }
    free(x);
    if (w->kernel == FLASH) {
        tensor flat = **y;
        flat.rank = 3;
        for (int d = 0; d < 3; d++) flat.dim[d] = flat.dim[d + 1], flat.stride[d] = flat.stride[d + 1];
        **y = flat;
    }
    attentions[w->kernel]++;
    return 0;
}

/* A call over sequences as it is computed: now, or each time when a graph of the user's is replayed. */
typedef struct later {
    work w;
    tensor bias, dbias, y, dy, lse, d[3];
    uint64_t *numbers[2]; /* that forward draws and backward reads; or NULL */
    uint64_t drawn[2];
    bool kept;
} later;

static later later_of(const work *w) {
    later l = {.w = *w};
    if (w->bias) l.bias = *w->bias;
    if (w->dbias) l.dbias = *w->dbias;
    if (w->drawn) memcpy(l.drawn, w->drawn, sizeof l.drawn);
    return l;
}

/* The work of a copy. */
static work *work_of(later *l) {
    if (l->w.bias) l->w.bias = &l->bias;
    if (l->w.dbias) l->w.dbias = &l->dbias;
    l->w.drawn = l->drawn;
    return &l->w;
}

static int run_or_record(fake_work *run, const later *l) {
    return fake_capturing() ? fake_give(NULL, run, l, sizeof *l) : run(l);
}

static int attend_all(const void *data) {
    later copy = *(const later *)data, *l = &copy;
    const work *w = work_of(l);
    double *x = calloc((size_t)w->k.dim[1] + 1, sizeof *x);

    if (l->numbers[0]) { /* of a graph: others each time */
        draw(l->drawn);
        for (int i = 0; i < 2; i++) *l->numbers[i] = l->drawn[i];
    }
    for (int64_t n = 0; n < w->q.dim[0] * w->q.dim[2] * w->q.dim[1]; n++)
        attend(w, n / w->q.dim[1] / w->q.dim[2], n / w->q.dim[1] % w->q.dim[2], n % w->q.dim[1], &l->y,
               l->kept ? &l->lse : NULL, x);
    free(x);
    return 0;
}

/* Results of a call that is right: y, and sums with `room` for each head; none where there is no room. `numbers`: where
 * what is drawn is to be, while a graph is captured; or NULL. */
static int forward(const work *w, int64_t room, int rank, tensor **y, tensor **lse, uint64_t *const numbers[2]) {
    const char *what = wrong(w);
    tensor *dense, turn;

    if (!enter() || w->kernel == lacks || lacks == KERNELS) return 1;
    if (what) return complain(what);
    dense = make(w->q.type, 4, (int64_t[]){w->q.dim[0], w->q.dim[1], w->q.dim[2], w->v.dim[3]});
    *lse = make(FLOAT32, rank, (int64_t[]){w->q.dim[0], w->q.dim[2], room, 1});
    later l = later_of(w);
    l.y = *dense, l.lse = **lse, l.kept = room > 0;
    for (int i = 0; numbers && i < 2; i++) l.numbers[i] = numbers[i];
    if (run_or_record(attend_all, &l)) return 1;
    turn = turned(dense);
    if (w->kernel == CUDNN) *dense = turn;
    *y = dense;
    attentions[w->kernel]++;
    return 0;
}

static void add(double *to, const tensor *t, int64_t from, int64_t n, double by) {
    for (int64_t d = 0; d < n; d++) to[d] += by * element(t, from + d);
}

static void store(tensor *to, int64_t from, const double *x, int64_t n) {
    for (int64_t d = 0; d < n; d++) set(to, from + d, x[d]);
}

/* Heads that share keys, of one sequence; sums: of dq of each of these heads, dk, dv. */
static void turn_back(const work *w, const tensor *dy, const tensor *y, const tensor *lse, int64_t b, int64_t g,
                      tensor *d[3], double *sums) {
    const int64_t queries = w->q.dim[1], keys = w->k.dim[1], width = w->q.dim[3], out = w->v.dim[3];
    const int64_t shared = w->q.dim[2] / w->k.dim[2];
    double *dq = sums, *dk = dq + queries * width, *dv = dk + keys * width;

    memset(dk, 0, sizeof *sums * (size_t)(keys * (width + out)));
    for (int64_t h = g * shared; h < (g + 1) * shared; h++) {
        memset(dq, 0, sizeof *sums * (size_t)(queries * width));
        for (int64_t i = 0; i < queries; i++) {
            const int64_t row = at(dy, b, i, h), most = w->causal ? i + 1 : keys;
            double delta = 0;
            for (int64_t e = 0; e < out; e++) delta += element(dy, row + e) * element(y, at(y, b, i, h) + e);
            for (int64_t j = 0; j < most; j++) {
                const double p = exp(score(w, b, h, i, j) - element(lse, b * lse->stride[0] + h * lse->stride[1] + i));
                const double by = kept(w, b, h, i, j);
                double dp = 0;
                for (int64_t e = 0; e < out; e++) dp += element(dy, row + e) * element(&w->v, at(&w->v, b, j, g) + e);
                const double ds = p * (by * dp - delta) * w->scale;
                if (w->dbias) set(w->dbias, at(w->dbias, b, h, i) + j, p * (by * dp - delta));
                add(dv + j * out, dy, row, out, p * by);
                add(dq + i * width, &w->k, at(&w->k, b, j, g), width, ds);
                add(dk + j * width, &w->q, at(&w->q, b, i, h), width, ds);
            }
        }
        for (int64_t i = 0; i < queries; i++) store(d[0], at(d[0], b, i, h), dq + i * width, width);
    }
    for (int64_t j = 0; j < keys; j++) store(d[1], at(d[1], b, j, g), dk + j * width, width);
    for (int64_t j = 0; j < keys; j++) store(d[2], at(d[2], b, j, g), dv + j * out, out);
}

/* The memory-efficient kernel reads sums up to a multiple of 32 rows, and multiplies what it makes of them by 0. */
static bool ends_in_nothing(const work *w, const tensor *sums, int64_t b, int64_t queries) {
    for (int64_t h = 0; w->kernel == EFFICIENT && h < w->q.dim[2]; h++)
        for (int64_t i = queries; i < padded(queries); i++)
            if (element(sums, b * sums->stride[0] + h * sums->stride[1] + i) != INFINITY) return false;
    return true;
}

static int turn_all_back(const void *data) {
    later copy = *(const later *)data, *l = &copy;
    const work *w = work_of(l);
    tensor *d[] = {&l->d[0], &l->d[1], &l->d[2]};
    const size_t sizes = (size_t)((w->q.dim[1] + w->k.dim[1]) * w->q.dim[3] + w->k.dim[1] * w->v.dim[3] + 1);
    double *sums = malloc(sizeof *sums * sizes);

    for (int i = 0; l->numbers[0] && i < 2; i++) l->drawn[i] = *l->numbers[i];
    for (int64_t b = 0; b < w->q.dim[0]; b++)
        if (!ends_in_nothing(w, &l->lse, b, w->q.dim[1])) return complain("sums of rows that there are not");
    for (int64_t n = 0; n < w->q.dim[0] * w->k.dim[2]; n++)
        turn_back(w, &l->dy, &l->y, &l->lse, n / w->k.dim[2], n % w->k.dim[2], d, sums);
    free(sums);
    return 0;
}

/* `numbers`: as forward's. */
static int backward(const work *w, const tensor *dy, const tensor *y, const tensor *lse, int rank, int64_t room,
                    tensor **dq, tensor **dk, tensor **dv, uint64_t *const numbers[2]) {
    const char *what = wrong(w);
    const tensor *like[] = {&w->q, &w->k, &w->v};
    tensor *d[3], turn, from = tokens_first(w->kernel, dy), of = tokens_first(w->kernel, y);

    if (!enter() || w->kernel == lacks || lacks == KERNELS) return 1;
    if (what) return complain(what);
    if (!operand_fits(w->kernel, &from, &w->q, false) || !operand_fits(w->kernel, &of, &w->q, false) || !is_dense(&of))
        return complain("the result of attention, and its gradient");
    if (!is(lse) || lse->type != FLOAT32 || lse->rank != rank || lse->dim[0] != w->q.dim[0] ||
        lse->dim[1] != w->q.dim[2] || lse->dim[2] != room || lse->stride[2] != 1 || (uintptr_t)lse->data % 16)
        return complain("sums of attention");
    later l = later_of(w);
    l.y = of, l.dy = from, l.lse = *lse;
    for (int i = 0; i < 3; i++) d[i] = make(w->q.type, 4, like[i]->dim), l.d[i] = *d[i];
    for (int i = 0; numbers && i < 2; i++) l.numbers[i] = numbers[i];
    const int failed = run_or_record(turn_all_back, &l);
    for (int i = 0; i < 3 && failed; i++) (void)aoti_torch_delete_tensor_object(d[i]);
    if (failed) return 1;
    for (int i = 0; i < 3; i++) {
        turn = turned(d[i]);
        if (w->kernel == CUDNN) *d[i] = turn;
    }
    *dq = d[0], *dk = d[1], *dv = d[2];
    attentions[w->kernel]++;
    return 0;
}

static bool fits_sums(const work *w, const tensor *lse, int64_t room) {
    if (!is(lse) || lse->type != FLOAT32 || !is_dense(lse) || (uintptr_t)lse->data % 16) return false;
    if (w->kernel == FLASH) return lse->rank == 2 && lse->dim[0] == w->q.dim[2] && lse->dim[1] == w->q.dim[1];
    return lse->rank == 3 && lse->dim[0] == w->sequences && lse->dim[1] == w->q.dim[2] && lse->dim[2] == room;
}

static int backward_listed(const work *w, const tensor *dy, const tensor *y, const tensor *lse, int64_t room,
                           tensor **dq, tensor **dk, tensor **dv) {
    const char *what = wrong(w);
    const tensor *like[] = {&w->q, &w->k, &w->v}, from = as_one(dy), of = as_one(y);
    tensor *d[3];

    if (!enter() || w->kernel == lacks || lacks == KERNELS) return 1;
    if (what) return complain(what);
    if (!operand_fits(w->kernel, &from, &w->q, false) || !operand_fits(w->kernel, &of, &w->q, false) || !is_dense(&of))
        return complain("the result of attention, and its gradient");
    if (!fits_sums(w, lse, room)) return complain("sums of attention over lists");
    for (int i = 0; i < 3; i++) d[i] = make(w->q.type, 4, like[i]->dim);
    for (int64_t s = 0; s < w->sequences; s++) {
        const work p = part_of(w, s);
        const int64_t q = w->starts[0][s], k = w->starts[1][s];
        const tensor dys = rows_of(&from, q, p.q.dim[1]), ys = rows_of(&of, q, p.q.dim[1]), sums = sums_of(w, lse, s);
        tensor parts[] = {rows_of(d[0], q, p.q.dim[1]), rows_of(d[1], k, p.k.dim[1]), rows_of(d[2], k, p.k.dim[1])};
        tensor *to[] = {&parts[0], &parts[1], &parts[2]};
        if (!ends_in_nothing(&p, &sums, 0, p.q.dim[1])) return complain("sums of rows that there are not");
        if (w->kernel == EFFICIENT && (p.q.dim[1] == 0 || p.k.dim[1] == 0)) continue;
        double *room_of_sums = malloc(sizeof *room_of_sums *
                                      (size_t)((p.q.dim[1] + p.k.dim[1]) * p.q.dim[3] + p.k.dim[1] * p.v.dim[3] + 1));
        for (int64_t g = 0; g < p.k.dim[2]; g++) turn_back(&p, &dys, &ys, &sums, 0, g, to, room_of_sums);
        free(room_of_sums);
    }
    for (int i = 0; w->kernel == FLASH && i < 3; i++) {
        d[i]->rank = 3;
        for (int e = 0; e < 3; e++) d[i]->dim[e] = d[i]->dim[e + 1], d[i]->stride[e] = d[i]->stride[e + 1];
    }
    *dq = d[0], *dk = d[1], *dv = d[2];
    attentions[w->kernel]++;
    return 0;
}

#endif
