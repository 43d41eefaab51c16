/* fake_blas.c -- a libcublasLt.so.13 that multiplies on the CPU.
 *
 * It checks what it is told: handles, types, sizes, strides, alignments, the order of calls, and that an algorithm is
 * used for the product it was chosen for. It fails calls on request, with the driver's others (fake.h).
 *     fake_blas_refuse(n)   from now on, 1: products are not taken, 2: the heuristic knows no algorithm, 0: neither
 *     fake_blas_products()  how many products were computed
 *     fake_blas_rounded()   how many of them were allowed TF32 */
#include "fake.h"
#include "fake_numbers.h"

#include <stddef.h>
#include <stdlib.h>

enum { SUCCESS, OUT_OF_MEMORY = 3, INVALID_VALUE = 7, NOT_SUPPORTED = 15 };
enum { COMPUTE_32F = 68, COMPUTE_64F = 70, COMPUTE_TF32 = 77 };
enum { EPILOGUE_NONE = 1, EPILOGUE_BIAS = 4 };
enum { NEEDED = 256 }; /* bytes of the workspace that it uses */

typedef struct handle {
    char unused;
} handle;

typedef struct description {
    int compute, scale, trans[2], epilogue;
    const void *bias;
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
    uint64_t data[8]; /* what it was chosen for, then the alignments */
} algorithm;

typedef struct answer {
    algorithm algorithm;
    size_t workspace;
    int state;
    float waves;
    int reserved[4];
} answer;

static int refusing, products, rounded;
EXPORT void fake_blas_refuse(int on);
EXPORT int fake_blas_products(void);
EXPORT int fake_blas_rounded(void);
void fake_blas_refuse(int on) { refusing = on; }
int fake_blas_products(void) { return products; }
int fake_blas_rounded(void) { return rounded; }

static int complain(const char *what) {
    fake_complain(what);
    return INVALID_VALUE;
}

#define ENTER()                                                                                                        \
    do {                                                                                                               \
        if (!fake_enter()) return OUT_OF_MEMORY;                                                                       \
    } while (0)

static int make(void **out, const void *from, size_t size) {
    if (!(*out = malloc(size))) return OUT_OF_MEMORY;
    memcpy(*out, from, size);
    fake_hold(1);
    return SUCCESS;
}

static int give_back(void *what) {
    if (!what) return complain("nothing was given back");
    free(what);
    fake_hold(-1);
    return SUCCESS;
}

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
    return make(out, &(description){compute, scale, {0, 0}, EPILOGUE_NONE, NULL}, sizeof(description));
}

int cublasLtMatmulDescSetAttribute(void *p, int attribute, const void *value, size_t size) {
    description *d = p;
    void *const places[] = {[3] = &d->trans[0], [4] = &d->trans[1], [7] = &d->epilogue, [8] = &d->bias};
    const size_t sizes[] = {[3] = 4, [4] = 4, [7] = 4, [8] = 8};

    ENTER();
    if (!p || attribute < 0 || attribute > 8 || !places[attribute] || size != sizes[attribute] || !value)
        return complain("an attribute of a product");
    memcpy(places[attribute], value, size);
    if (d->trans[0] < 0 || d->trans[0] > 1 || d->trans[1] < 0 || d->trans[1] > 1) return complain("a transposition");
    if (d->epilogue != EPILOGUE_NONE && d->epilogue != EPILOGUE_BIAS) return complain("an epilogue");
    return SUCCESS;
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
    uint64_t h = mix(14695981039346656037u, p, offsetof(description, bias));
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
    if (of->epilogue == EPILOGUE_BIAS && (!of->bias || l[0]->type == R_64F || l[0]->type != l[3]->type))
        return complain("a vector that is added");
    *count = 0;
    if (refusing == 2 || f->workspace < NEEDED) return NOT_SUPPORTED;
    for (int i = 0; i < 4; i++)
        if (f->aligned[i] < (uint32_t)size_of(l[i]->type)) return complain("an alignment");
    *count = 1;
    memset(answers, 0, sizeof *answers);
    answers->algorithm.data[0] = mark_of(p, l);
    for (int i = 0; i < 4; i++) answers->algorithm.data[1 + i] = f->aligned[i];
    answers->algorithm.data[5] = of->epilogue == EPILOGUE_BIAS ? (uintptr_t)of->bias & (0 - (uintptr_t)of->bias) : 1;
    answers->workspace = NEEDED;
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

static int multiply(const description *p, const layout *const l[4], double alpha, const void *a, const void *b,
                    double beta, const void *c, void *d, int64_t pair) {
    uint64_t rows, inner;
    double *left = widened(l[0], a, pair, p->trans[0], &rows), *right = widened(l[1], b, pair, p->trans[1], &inner);
    double *sums = malloc(sizeof(double) * rows);
    const char *added = (const char *)c + pair * l[2]->step * size_of(l[2]->type);
    char *result = (char *)d + pair * l[3]->step * size_of(l[3]->type);
    int done = left && right && sums;

    for (uint64_t j = 0; done && j < l[3]->cols; j++) {
        for (uint64_t i = 0; i < rows; i++) sums[i] = 0;
        for (uint64_t k = 0; k < inner; k++)
            for (uint64_t i = 0; i < rows; i++) sums[i] += left[i + k * rows] * right[k + j * inner];
        for (uint64_t i = 0; i < rows; i++) {
            const int64_t at = (int64_t)i + (int64_t)j * l[3]->ld;
            double x = alpha * sums[i];
            if (beta != 0) x += beta * get(l[2]->type, added, (int64_t)i + (int64_t)j * l[2]->ld);
            if (p->epilogue == EPILOGUE_BIAS) x += get(l[3]->type, p->bias, (int64_t)i);
            put(l[3]->type, result, at, x);
        }
    }
    free(left), free(right), free(sums);
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
} job;

static int run_product(const void *data) {
    const job *j = data;
    const layout *const l[] = {&j->l[0], &j->l[1], &j->l[2], &j->l[3]};

    memset(j->work, 0xa5, j->work_bytes);
    products++;
    rounded += j->of.compute == COMPUTE_TF32;
    for (int64_t pair = 0; pair < j->l[3].batch; pair++)
        if (!multiply(&j->of, l, j->alpha, j->a, j->b, j->beta, j->c, j->d, pair)) return OUT_OF_MEMORY;
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
    if (of->epilogue == EPILOGUE_BIAS && misaligned(of->bias, how->data[5])) return complain("a vector's alignment");
    if (work_bytes < NEEDED || !work || misaligned(work, 16)) return complain("a workspace");
    if (meet(l[0], a, l[3], d) || meet(l[1], b, l[3], d)) return complain("a result over an operand");
    if (refusing) return NOT_SUPPORTED;
    const job j = {*of,       {*l[0], *l[1], *l[2], *l[3]}, scalar(of, alpha), scalar(of, beta), a, b, c, d, work,
                   work_bytes};
    return fake_give(stream, run_product, &j, sizeof j);
}
