/* fake_blas.c -- makes a libcublasLt.so.13 that multiplies on the CPU.
 *
 * It checks what it is told: handles, types, sizes, strides, alignments, the order of calls, and that an algorithm is
 * used for the product it was chosen for. It fails calls on request, with the driver's others (fake.h).
 *     fake_blas_refuse(n)   from now on, 1: products are not taken, 2: the heuristic knows no algorithm, 3: products are
 *                           not taken that have an epilogue but the bias, 4: the heuristic knows none for those,
 *                           0: nothing of this
 *     fake_blas_fail(n, s)  the n-th product from now on is refused with the status s, 13: when its kernel is started, so
 *                           that a capture is lost; 0: none
 *     fake_blas_products()  how many products were computed
 *     fake_blas_rounded()   how many of them were allowed TF32
 *     fake_blas_finished(e) how many had the epilogue e
 *     fake_blas_fastest(i, j)  from now on answer i of the heuristic's is the fastest, and answer j does not run
 *     fake_blas_used(i)     how many products ran by answer i */
enum { SUCCESS, NO_MEMORY = 3, WRONG = 7, FAILED = 13, NOT_SUPPORTED = 15 };

#include "fake_library.h"
#include "fake_numbers.h"

#include <math.h>
#include <stddef.h>

enum { COMPUTE_32F = 68, COMPUTE_64F = 70, COMPUTE_TF32 = 77 };
/* Bits of an epilogue. */
enum { NONE = 1, BIAS = 4, COLUMN_TOTALS = 16, GELU = 32, SLOPE = 64, EXTRA = 128, A_TOTALS = 256, B_TOTALS = 512 };
enum { ANSWERS = 4 };  /* of the heuristic's; the last does not count */
enum { NEEDED = 256 }; /* bytes of the workspace that it uses */
/* Bytes that kernels of the library's read at a time, whatever was said, and that divide the workspace's address. */
enum { LINE = 16, WORK_LINE = 256 };

typedef struct handle {
    char unused;
} handle;

typedef struct description {
    int compute, scale, trans[2], epilogue;
    int64_t extra_ld;
    void *vector, *extra; /* of the epilogue */
} description;

typedef struct layout {
    int type, batch;
    uint64_t rows, cols;
    int64_t ld, step;
} layout;

typedef struct preference {
    uint64_t workspace;
    uint32_t reduction, aligned[4];
} preference;

typedef struct algorithm {
    uint64_t data[8]; /* what it was chosen for; the alignments of matrices, vector, extra; which answer it was */
} algorithm;

typedef struct answer {
    algorithm algorithm;
    size_t workspace;
    int state;
    float waves;
    int reserved[4];
} answer;

static int refusing, fail_at, fail_with, products, rounded, finished[B_TOTALS + 1], fastest, broken = -1, used[ANSWERS];
EXPORT void fake_blas_fastest(int which, int not_running);
EXPORT int fake_blas_used(int which);
void fake_blas_fastest(int which, int not_running) {
    fastest = which;
    broken = not_running;
}
int fake_blas_used(int which) { return used[which]; }
EXPORT void fake_blas_refuse(int on);
EXPORT void fake_blas_fail(int n, int status);
EXPORT int fake_blas_products(void);
EXPORT int fake_blas_rounded(void);
EXPORT int fake_blas_finished(int epilogue);
void fake_blas_refuse(int on) { refusing = on; }
void fake_blas_fail(int n, int status) {
    fail_at = n;
    fail_with = status;
}
int fake_blas_products(void) { return products; }
int fake_blas_rounded(void) { return rounded; }
int fake_blas_finished(int epilogue) { return finished[epilogue]; }

/* --- handles and descriptions ------------------------------------------------------------------------------------- */

EXPORT int cublasLtCreate(void **out);
EXPORT int cublasLtDestroy(void *h);
EXPORT int cublasLtMatmulDescCreate(void **out, int compute, int scale);
EXPORT int cublasLtMatmulDescSetAttribute(void *p, int attribute, const void *value, size_t size);
EXPORT int cublasLtMatmulDescDestroy(void *p);
EXPORT int cublasLtMatrixLayoutCreate(void **out, int type, uint64_t rows, uint64_t cols, int64_t ld);
EXPORT int cublasLtMatrixLayoutSetAttribute(void *p, int attribute, const void *value, size_t size);
EXPORT int cublasLtMatrixLayoutDestroy(void *p);
EXPORT int cublasLtMatmulPreferenceCreate(void **out);
EXPORT int cublasLtMatmulPreferenceSetAttribute(void *p, int attribute, const void *value, size_t size);
EXPORT int cublasLtMatmulPreferenceDestroy(void *p);

int cublasLtCreate(void **out) {
    ENTER();
    if (!fake_in_context()) return complain("cublasLtCreate without the device's context");
    return make(out, &(handle){0}, sizeof(handle));
}

int cublasLtDestroy(void *h) { return give_back(h); }

int cublasLtMatmulDescCreate(void **out, int compute, int scale) {
    ENTER();
    if (compute == COMPUTE_64F ? scale != R_64F : (compute != COMPUTE_32F && compute != COMPUTE_TF32) || scale != R_32F)
        return complain("the types that a product is computed in");
    return make(out, &(description){compute, scale, {0, 0}, NONE, 0, NULL, NULL}, sizeof(description));
}

int cublasLtMatmulDescSetAttribute(void *p, int attribute, const void *value, size_t size) {
    description *d = p;
    static const int known[] = {NONE,          BIAS,
                                GELU,          GELU | BIAS,
                                GELU | EXTRA,  GELU | EXTRA | BIAS,
                                SLOPE | EXTRA, SLOPE | EXTRA | COLUMN_TOTALS,
                                A_TOTALS,      B_TOTALS};
    void *const places[] = {[3] = &d->trans[0], [4] = &d->trans[1], [7] = &d->epilogue,
                            [8] = &d->vector,   [11] = &d->extra,   [12] = &d->extra_ld};
    const size_t sizes[] = {[3] = 4, [4] = 4, [7] = 4, [8] = 8, [11] = 8, [12] = 8};
    int is_known = 0;

    ENTER();
    if (!p || attribute < 0 || attribute > 12 || !places[attribute] || size != sizes[attribute] || !value)
        return complain("an attribute of a product");
    memcpy(places[attribute], value, size);
    if (d->trans[0] < 0 || d->trans[0] > 1 || d->trans[1] < 0 || d->trans[1] > 1) return complain("a transposition");
    for (size_t i = 0; i < sizeof known / sizeof *known; i++) is_known |= known[i] == d->epilogue;
    return is_known ? SUCCESS : complain("an epilogue");
}

int cublasLtMatmulDescDestroy(void *p) { return give_back(p); }

int cublasLtMatrixLayoutCreate(void **out, int type, uint64_t rows, uint64_t cols, int64_t ld) {
    ENTER();
    if (type != R_32F && type != R_64F && type != R_16F && type != R_16BF) return complain("the type of a matrix");
    if (rows == 0 || cols == 0 || ld < (int64_t)rows) return complain("the sizes of a matrix");
    return make(out, &(layout){type, 1, rows, cols, ld, 0}, sizeof(layout));
}

int cublasLtMatrixLayoutSetAttribute(void *p, int attribute, const void *value, size_t size) {
    layout *l = p;

    ENTER();
    if (p && attribute == 5 && size == 4) memcpy(&l->batch, value, size);
    else if (p && attribute == 6 && size == 8) memcpy(&l->step, value, size);
    else return complain("an attribute of a matrix");
    return l->batch > 0 && l->step >= 0 ? SUCCESS : complain("a batch of matrices");
}

int cublasLtMatrixLayoutDestroy(void *p) { return give_back(p); }

int cublasLtMatmulPreferenceCreate(void **out) {
    ENTER();
    return make(out, &(preference){0, 7, {256, 256, 256, 256}}, sizeof(preference));
}

int cublasLtMatmulPreferenceSetAttribute(void *p, int attribute, const void *value, size_t size) {
    preference *f = p;

    ENTER();
    if (p && attribute == 1 && size == 8) memcpy(&f->workspace, value, size);
    else if (p && attribute == 3 && size == 4) memcpy(&f->reduction, value, size);
    else if (p && attribute >= 5 && attribute <= 8 && size == 4) memcpy(&f->aligned[attribute - 5], value, size);
    else return complain("an attribute of a preference");
    return SUCCESS;
}

int cublasLtMatmulPreferenceDestroy(void *p) { return give_back(p); }

/* --- products ----------------------------------------------------------------------------------------------------- */

static uint64_t mix(uint64_t h, const void *data, size_t size) {
    for (size_t i = 0; i < size; i++) h = (h ^ ((const unsigned char *)data)[i]) * 1099511628211u;
    return h;
}

/* What an algorithm was chosen for. */
static uint64_t mark_of(const description *p, const layout *const l[4]) {
    uint64_t h = mix(14695981039346656037u, p, offsetof(description, epilogue) + sizeof p->epilogue);
    h = mix(h, &p->extra_ld, sizeof p->extra_ld);
    for (int i = 0; i < 4; i++) {
        h = mix(h, &l[i]->type, sizeof l[i]->type);
        h = mix(h, &l[i]->batch, sizeof l[i]->batch);
        h = mix(h, &l[i]->rows, sizeof(uint64_t) * 4); /* rows, cols, ld, step */
    }
    return h;
}

static int size_of(int type) { return type == R_64F ? 8 : type == R_32F ? 4 : 2; }

static const char *wrong_sizes(const description *p, const layout *const l[4]) {
    const uint64_t rows = p->trans[0] ? l[0]->cols : l[0]->rows, inner = p->trans[0] ? l[0]->rows : l[0]->cols;
    const uint64_t cols = p->trans[1] ? l[1]->rows : l[1]->cols;
    if ((p->trans[1] ? l[1]->cols : l[1]->rows) != inner) return "matrices whose inner sizes differ";
    for (int i = 2; i < 4; i++)
        if (l[i]->rows != rows || l[i]->cols != cols) return "a result of another size";
    for (int i = 1; i < 4; i++)
        if (l[i]->batch != l[0]->batch) return "batches of different sizes";
    if (l[0]->type != l[1]->type || l[2]->type != l[3]->type) return "matrices of two types";
    if (l[0]->type != l[2]->type && (l[2]->type != R_32F || size_of(l[0]->type) != 2))
        return "a result of another type";
    if ((p->compute == COMPUTE_64F) != (l[0]->type == R_64F)) return "a product computed in another type";
    if (p->compute == COMPUTE_TF32 && l[0]->type != R_32F) return "TF32 of another type";
    if (l[3]->batch > 1 && l[3]->step < l[3]->ld * (int64_t)(cols - 1) + (int64_t)rows) return "results that overlap";
    return NULL;
}

static int has_vector(const description *p) {
    return (p->epilogue & (BIAS | COLUMN_TOTALS | A_TOTALS | B_TOTALS)) != 0;
}

/* What the library says of epilogues: vectors are packed and of the result's type, GELU's operand is too, its lines are
 * a multiple of 8 long; products of two types have no bias and no GELU; float64 has none. */
static const char *wrong_epilogue(const description *p, const layout *const l[4]) {
    if (p->epilogue == NONE) return NULL;
    if (l[0]->type == R_64F) return "an epilogue of float64";
    if (l[3]->batch > 1) return "an epilogue of a batch";
    if (has_vector(p) && !p->vector) return "an epilogue without its vector";
    if (p->epilogue & (BIAS | GELU | SLOPE) && l[0]->type != l[3]->type) return "an epilogue of two types";
    if (!(p->epilogue & EXTRA)) return NULL;
    if (!p->extra) return "an epilogue without its matrix";
    return p->extra_ld % 8 != 0 || p->extra_ld < (int64_t)l[3]->rows ? "the lines of an epilogue's matrix" : NULL;
}

/* With more than a bias. */
static int is_finished(const description *p) { return p->epilogue != NONE && p->epilogue != BIAS; }

static uint64_t alignment(const void *p) { return (uintptr_t)p & (0 - (uintptr_t)p); }

EXPORT int cublasLtMatmulAlgoGetHeuristic(void *h, void *p, void *a, void *b, void *c, void *d, void *wish, int most,
                                          answer *answers, int *count);
int cublasLtMatmulAlgoGetHeuristic(void *h, void *p, void *a, void *b, void *c, void *d, void *wish, int most,
                                   answer *answers, int *count) {
    const layout *const l[] = {a, b, c, d};
    const preference *f = wish;
    const description *of = p;
    const char *wrong;

    ENTER();
    if (!h || !p || !a || !b || !c || !d || !wish || most < 1) return complain("operands of the heuristic");
    if ((wrong = wrong_sizes(p, l))) return complain(wrong);
    if ((wrong = wrong_epilogue(p, l))) return complain(wrong);
    *count = 0;
    if (refusing == 2 || (refusing == 4 && is_finished(of)) || f->workspace < NEEDED) return NOT_SUPPORTED;
    for (int i = 0; i < 4; i++)
        if (f->aligned[i] < (uint32_t)size_of(l[i]->type)) return complain("an alignment");
    *count = most < ANSWERS ? most : ANSWERS;
    for (int j = 0; j < *count; j++) {
        answer *to = &answers[j];
        memset(to, 0, sizeof *to);
        to->algorithm.data[0] = mark_of(p, l);
        for (int i = 0; i < 4; i++) to->algorithm.data[1 + i] = f->aligned[i];
        to->algorithm.data[5] = has_vector(of) ? alignment(of->vector) : 1;
        to->algorithm.data[6] = of->epilogue & EXTRA ? alignment(of->extra) : 1;
        to->algorithm.data[7] = (uint64_t)j;
        to->workspace = NEEDED;
        to->state = j < ANSWERS - 1 ? SUCCESS : NOT_SUPPORTED;
    }
    return SUCCESS;
}

EXPORT int cublasLtMatmulAlgoCheck(void *h, void *p, void *a, void *b, void *c, void *d, const algorithm *how,
                                   answer *out);
int cublasLtMatmulAlgoCheck(void *h, void *p, void *a, void *b, void *c, void *d, const algorithm *how, answer *out) {
    const layout *const l[] = {a, b, c, d};

    ENTER();
    if (!h || !p || !a || !b || !c || !d || !how || !out) return complain("operands of a check");
    memset(out, 0, sizeof *out);
    out->algorithm = *how;
    out->workspace = NEEDED;
    return how->data[0] == mark_of(p, l) && how->data[7] < ANSWERS ? SUCCESS : NOT_SUPPORTED;
}

EXPORT int cublasLtGetProperty(int which, int *out);
int cublasLtGetProperty(int which, int *out) {
    static const int version[] = {13, 1, 0};

    ENTER();
    if (which < 0 || which > 2) return complain("a property of the library");
    *out = version[which];
    return SUCCESS;
}

static double scalar(const description *p, const void *x) {
    return p->scale == R_64F ? *(const double *)x : (double)*(const float *)x;
}

/* An operand as double, rows x cols by columns: [transposed: of its rows]. */
static double *widened(const layout *l, const void *data, int64_t pair, int transposed, uint64_t *rows) {
    double *w = malloc(sizeof(double) * l->rows * l->cols);
    const char *from = (const char *)data + pair * l->step * size_of(l->type);

    *rows = transposed ? l->cols : l->rows;
    for (uint64_t j = 0; w && j < l->cols; j++)
        for (uint64_t i = 0; i < l->rows; i++)
            w[transposed ? j + i * l->cols : i + j * l->rows] = get(l->type, from, (int64_t)i + (int64_t)j * l->ld);
    return w;
}

/* The tanh form, and its slope. */
static double inner_of(double x) { return 0.7978845608028654 * (x + 0.044715 * x * x * x); }
static double gelu(double x) { return 0.5 * x * (1 + tanh(inner_of(x))); }
static double slope(double x) {
    const double t = tanh(inner_of(x));
    return 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * 0.7978845608028654 * (1 + 3 * 0.044715 * x * x);
}

/* What the epilogue makes of a sum; `totals` of rows. */
static double finish(const description *p, int type, int64_t row, int64_t column, double x, double *totals) {
    const int64_t at = row + column * p->extra_ld;

    if (p->epilogue & BIAS) x += get(type, p->vector, row);
    if (p->epilogue & GELU) {
        if (p->epilogue & EXTRA) put(type, p->extra, at, x);
        return gelu(x);
    }
    if (p->epilogue & SLOPE) x *= slope(get(type, p->extra, at));
    totals[row] += x;
    return x;
}

/* The totals that it leaves, of lines of an operand that is [lines, inner] or, `down`, the other way round. */
static void leave_totals(const description *p, int type, const double *operand, uint64_t lines, uint64_t inner,
                         int down) {
    for (uint64_t i = 0; i < lines; i++) {
        double total = 0;
        for (uint64_t k = 0; k < inner; k++) total += operand[down ? k + i * inner : i + k * lines];
        put(type, p->vector, (int64_t)i, total);
    }
}

static int multiply(const description *p, const layout *const l[4], double alpha, const void *a, const void *b,
                    double beta, const void *c, void *d, int64_t pair) {
    uint64_t rows, inner;
    double *left = widened(l[0], a, pair, p->trans[0], &rows), *right = widened(l[1], b, pair, p->trans[1], &inner);
    double *sums = malloc(sizeof(double) * rows), *totals = calloc(rows, sizeof(double));
    const char *added = (const char *)c + pair * l[2]->step * size_of(l[2]->type);
    char *result = (char *)d + pair * l[3]->step * size_of(l[3]->type);
    int done = left && right && sums && totals;

    for (uint64_t j = 0; done && j < l[3]->cols; j++) {
        for (uint64_t i = 0; i < rows; i++) sums[i] = 0;
        for (uint64_t k = 0; k < inner; k++)
            for (uint64_t i = 0; i < rows; i++) sums[i] += left[i + k * rows] * right[k + j * inner];
        for (uint64_t i = 0; i < rows; i++) {
            const int64_t at = (int64_t)i + (int64_t)j * l[3]->ld;
            double x = alpha * sums[i];
            if (beta != 0) x += beta * get(l[2]->type, added, (int64_t)i + (int64_t)j * l[2]->ld);
            put(l[3]->type, result, at, finish(p, l[3]->type, (int64_t)i, (int64_t)j, x, totals));
        }
    }
    for (uint64_t i = 0; done && p->epilogue & COLUMN_TOTALS && i < rows; i++)
        put(l[3]->type, p->vector, (int64_t)i, totals[i]);
    if (done && p->epilogue & A_TOTALS) leave_totals(p, l[3]->type, left, rows, inner, 0);
    if (done && p->epilogue & B_TOTALS) leave_totals(p, l[3]->type, right, l[3]->cols, inner, 1);
    free(left), free(right), free(sums), free(totals);
    return done;
}

static int misaligned(const void *p, uint64_t alignment) { return (uintptr_t)p % alignment != 0; }

/* Whether two matrices share memory; the result must share none with a factor. */
static int meet(const layout *x, const void *a, const layout *y, const void *b) {
    const uintptr_t from = (uintptr_t)a, other = (uintptr_t)b;
    const uintptr_t end =
        from + (uintptr_t)(x->step * (x->batch - 1) + x->ld * (int64_t)(x->cols - 1) + (int64_t)x->rows) *
                   (uintptr_t)size_of(x->type);
    const uintptr_t last =
        other + (uintptr_t)(y->step * (y->batch - 1) + y->ld * (int64_t)(y->cols - 1) + (int64_t)y->rows) *
                    (uintptr_t)size_of(y->type);
    return from < last && other < end;
}

/* A product with all that it was told of, which may be gone when it runs. */
typedef struct job {
    description of;
    layout l[4];
    double alpha, beta;
    const void *a, *b, *c;
    void *d, *work;
    size_t work_bytes;
    int answer;
} job;

static int run_product(const void *data) {
    const job *j = data;
    const layout *const l[] = {&j->l[0], &j->l[1], &j->l[2], &j->l[3]};

    memset(j->work, 0xa5, j->work_bytes);
    products++;
    rounded += j->of.compute == COMPUTE_TF32;
    finished[j->of.epilogue]++;
    used[j->answer]++;
    fake_spend(j->answer == fastest ? 1 : 2 + j->answer);
    for (int64_t pair = 0; pair < j->l[3].batch; pair++)
        if (!multiply(&j->of, l, j->alpha, j->a, j->b, j->beta, j->c, j->d, pair)) return NO_MEMORY;
    return SUCCESS;
}

EXPORT int cublasLtMatmul(void *h, void *p, const void *alpha, const void *a, void *a_layout, const void *b,
                          void *b_layout, const void *beta, const void *c, void *c_layout, void *d, void *d_layout,
                          const algorithm *how, void *work, size_t work_bytes, void *stream);
int cublasLtMatmul(void *h, void *p, const void *alpha, const void *a, void *a_layout, const void *b, void *b_layout,
                   const void *beta, const void *c, void *c_layout, void *d, void *d_layout, const algorithm *how,
                   void *work, size_t work_bytes, void *stream) {
    const layout *const l[] = {a_layout, b_layout, c_layout, d_layout};
    const void *const data[] = {a, b, c, d};
    const description *of = p;

    ENTER();
    if (!fake_in_context()) return complain("a product without the device's context");
    if (!h || !p || !a || !b || !c || !d || !how || !alpha || !beta) return complain("operands of a product");
    if (how->data[0] != mark_of(p, l)) return complain("the algorithm of another product");
    for (int i = 0; i < 4; i++)
        if (misaligned(data[i], how->data[1 + i])) return complain("an operand that is not aligned as was said");
    if (has_vector(of) && (!of->vector || misaligned(of->vector, how->data[5]) || misaligned(of->vector, LINE)))
        return complain("an epilogue's vector that is not aligned as was said");
    if (of->epilogue & EXTRA && (!of->extra || misaligned(of->extra, how->data[6]) || misaligned(of->extra, LINE)))
        return complain("an epilogue's matrix that is not aligned as was said");
    if (work_bytes < NEEDED || !work || misaligned(work, WORK_LINE)) return complain("a workspace");
    if (meet(l[0], a, l[3], d) || meet(l[1], b, l[3], d)) return complain("a result over an operand");
    if (how->data[7] >= ANSWERS - 1) return complain("an answer that does not count");
    if ((int)how->data[7] == broken) return NOT_SUPPORTED;
    if (fail_at && --fail_at == 0) {
        if (fail_with == FAILED) fake_poison();
        return fail_with;
    }
    if (refusing && (refusing < 3 || is_finished(of))) return NOT_SUPPORTED;
    const job j = {*of,
                   {*l[0], *l[1], *l[2], *l[3]},
                   scalar(of, alpha),
                   scalar(of, beta),
                   a,
                   b,
                   c,
                   d,
                   work,
                   work_bytes,
                   (int)how->data[7]};
    return fake_give(stream, run_product, &j, sizeof j);
}
