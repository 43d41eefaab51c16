/* fake_dnn.c -- makes a libcudnn.so.9 that convolves on the CPU, and norms and pools (fake_dnn_norms.c).
 *
 * It checks what it is told: handles, sizes, types, workspace, and that of the algorithms that its heuristic names one is
 * used that works, fits and gives the same bits every time. It fails calls on request, with the driver's others (fake.h).
 *     fake_dnn_refuse(on)   from now on no convolution, norm or pool is taken
 *     fake_dnn_fail(n, s)   the n-th convolution, norm or pool from now on is refused with the status s; 0: none
 *     fake_dnn_products()   how many products were computed
 *     fake_dnn_spare()      how many of them ran by the second algorithm that can be used
 *     fake_dnn_prefer(on)   from now on that algorithm is the faster one
 *     fake_dnn_rounded()    how many of them were allowed TF32
 *     fake_dnn_narrow()     how many of them were of 16-bit floats */
#include "fake_dnn.h"

#include <stddef.h>

enum { DEFAULT_MATH, TENSOR_OP_MATH, CONVERTING_MATH, FMA_MATH };
enum { NEEDED = 512, GOOD = 5, SPARE = 2, UNSTEADY = 7, HUNGRY = 1, BROKEN = 3, ROUNDING = 4, WORK_LINE = 256 };

typedef struct sliding {
    int rank, pad[AXES], stride[AXES], dilation[AXES], type, groups, math;
} sliding;

typedef struct answer {
    int algorithm, status;
    float time;
    size_t workspace;
    int deterministic, math, reserved[3];
} answer;

int fake_dnn_refusing;
static int fail_at, fail_with, products, rounded, narrow, spare, spare_is_faster;
EXPORT void fake_dnn_refuse(int on);
EXPORT void fake_dnn_fail(int n, int status);
EXPORT int fake_dnn_spare(void);
EXPORT void fake_dnn_prefer(int on);
EXPORT int fake_dnn_products(void);
EXPORT int fake_dnn_rounded(void);
EXPORT int fake_dnn_narrow(void);
void fake_dnn_refuse(int on) { fake_dnn_refusing = on; }
void fake_dnn_fail(int n, int status) {
    fail_at = n;
    fail_with = status;
}
int fake_dnn_spare(void) { return spare; }
void fake_dnn_prefer(int on) { spare_is_faster = on; }
int fake_dnn_fails(void) { return fail_at && --fail_at == 0 ? fail_with : SUCCESS; }
int fake_dnn_products(void) { return products; }
int fake_dnn_rounded(void) { return rounded; }
int fake_dnn_narrow(void) { return narrow; }

/* --- descriptions ------------------------------------------------------------------------------------------------- */

MAKES(cudnnCreate, handle, cudnnDestroy)
MAKES(cudnnCreateTensorDescriptor, tensor, cudnnDestroyTensorDescriptor)
MAKES(cudnnCreateFilterDescriptor, tensor, cudnnDestroyFilterDescriptor)
MAKES(cudnnCreateConvolutionDescriptor, sliding, cudnnDestroyConvolutionDescriptor)

EXPORT int cudnnSetStream(void *h, void *stream);
int cudnnSetStream(void *h, void *stream) {
    ENTER();
    if (!h) return complain("a stream for no handle");
    ((handle *)h)->stream = stream;
    return SUCCESS;
}

static int set_tensor(tensor *t, int type, int rank, const int *size) {
    if (!t || (type != FLOAT && type != DOUBLE && type != HALF && type != BFLOAT16)) return complain("a tensor's type");
    if (rank < 4 || rank > MOST_RANK) return complain("a tensor's rank");
    for (int i = 0; i < rank; i++)
        if (size[i] < 1) return complain("a tensor's sizes");
    t->type = type;
    t->rank = rank;
    memcpy(t->size, size, sizeof(int) * (size_t)rank);
    return SUCCESS;
}

EXPORT int cudnnSetTensorNdDescriptor(void *d, int type, int rank, const int *size, const int *stride);
int cudnnSetTensorNdDescriptor(void *d, int type, int rank, const int *size, const int *stride) {
    int64_t step = 1;

    ENTER();
    for (int i = rank - 1; i >= 0; i--) {
        if (stride[i] != step) return complain("a tensor that is not dense");
        step *= size[i];
    }
    return set_tensor(d, type, rank, size);
}

EXPORT int cudnnSetFilterNdDescriptor(void *d, int type, int format, int rank, const int *size);
int cudnnSetFilterNdDescriptor(void *d, int type, int format, int rank, const int *size) {
    ENTER();
    return format != 0 ? complain("the order of weights") : set_tensor(d, type, rank, size);
}

EXPORT int cudnnSetConvolutionNdDescriptor(void *d, int rank, const int *pad, const int *stride, const int *dilation,
                                           int mode, int type);
int cudnnSetConvolutionNdDescriptor(void *d, int rank, const int *pad, const int *stride, const int *dilation, int mode,
                                    int type) {
    sliding *w = d;

    ENTER();
    if (!w || rank < 2 || rank > AXES || mode != 1 || (type != FLOAT && type != DOUBLE)) return complain("a window");
    *w = (sliding){.rank = rank, .type = type, .groups = 1};
    for (int i = 0; i < rank; i++) {
        if (pad[i] < 0 || stride[i] < 1 || dilation[i] < 1) return complain("a window's numbers");
        w->pad[i] = pad[i];
        w->stride[i] = stride[i];
        w->dilation[i] = dilation[i];
    }
    return SUCCESS;
}

EXPORT int cudnnSetConvolutionGroupCount(void *d, int groups);
int cudnnSetConvolutionGroupCount(void *d, int groups) {
    ENTER();
    if (!d || groups < 1) return complain("groups");
    ((sliding *)d)->groups = groups;
    return SUCCESS;
}

EXPORT int cudnnSetConvolutionMathType(void *d, int math);
int cudnnSetConvolutionMathType(void *d, int math) {
    ENTER();
    if (!d || (math != DEFAULT_MATH && math != TENSOR_OP_MATH && math != FMA_MATH)) return complain("a kind of math");
    ((sliding *)d)->math = math;
    return SUCCESS;
}

/* --- choosing ----------------------------------------------------------------------------------------------------- */

/* What is wrong about these sizes, or NULL. */
static const char *wrong_sizes(const tensor *x, const tensor *w, const sliding *v, const tensor *y) {
    if (!x || !w || !v || !y) return "operands of a convolution";
    if (x->rank != w->rank || x->rank != y->rank || x->rank != v->rank + 2) return "ranks of a convolution";
    if (x->type != w->type || x->type != y->type) return "a convolution of two types";
    if ((x->type == DOUBLE) != (v->type == DOUBLE)) return "a convolution computed in another type";
    if (v->math == TENSOR_OP_MATH && x->type != HALF && x->type != BFLOAT16) return "rounding that was not asked for";
    if (x->size[0] != y->size[0]) return "images of a convolution";
    if (x->size[1] != w->size[1] * v->groups || w->size[0] != y->size[1] || w->size[0] % v->groups != 0)
        return "channels of a convolution";
    for (int i = 0; i < v->rank; i++) {
        const int room = x->size[2 + i] + 2 * v->pad[i] - v->dilation[i] * (w->size[2 + i] - 1) - 1;
        if (room < 0 || room / v->stride[i] + 1 != y->size[2 + i]) return "sizes of a convolution";
    }
    return NULL;
}

/* The math that its algorithms are named with, which is not what was asked for with 16-bit floats. */
static int named_math(const tensor *x, const sliding *v) { return x->type == FLOAT ? v->math : DEFAULT_MATH; }

static int choose(void *h, const tensor *x, const tensor *w, const sliding *v, const tensor *y, int most, int *count,
                  answer *answers) {
    const int math = named_math(x, v);
    const answer all[] = {{BROKEN, NOT_SUPPORTED, 0, 0, 1, math, {0}},
                          {UNSTEADY, SUCCESS, 1, NEEDED, 0, math, {0}},
                          {HUNGRY, SUCCESS, 2, (size_t)1 << 40, 1, math, {0}},
                          {ROUNDING, SUCCESS, 3, NEEDED, x->type == FLOAT, CONVERTING_MATH, {0}},
                          {ROUNDING, SUCCESS, 3, NEEDED, v->math == FMA_MATH, TENSOR_OP_MATH, {0}},
                          {GOOD, SUCCESS, 4, NEEDED, 1, math, {0}},
                          {SPARE, SUCCESS, 5, NEEDED, 1, math, {0}}};
    const int n = (int)(sizeof all / sizeof all[0]);
    const char *wrong;

    ENTER();
    if (!h || most < n) return complain("a question for algorithms");
    if ((wrong = wrong_sizes(x, w, v, y))) return complain(wrong);
    if (fake_dnn_refusing) return NOT_SUPPORTED;
    memcpy(answers, all, sizeof all);
    *count = n;
    return SUCCESS;
}

#define CHOICE(name, first, second, third, ...)                                                                        \
    EXPORT int name(void *h, void *first, void *second, void *window, void *third, int most, int *count, answer *out); \
    int name(void *h, void *first, void *second, void *window, void *third, int most, int *count, answer *out) {       \
        return choose(h, __VA_ARGS__, most, count, out);                                                               \
    }
CHOICE(cudnnGetConvolutionForwardAlgorithm_v7, x, w, y, x, w, window, y)
CHOICE(cudnnGetConvolutionBackwardDataAlgorithm_v7, w, y, x, x, w, window, y)
CHOICE(cudnnGetConvolutionBackwardFilterAlgorithm_v7, x, y, w, x, w, window, y)

/* --- computing ---------------------------------------------------------------------------------------------------- */

typedef enum target { Y, X, W } target;

typedef struct job {
    tensor x, w, y;
    sliding v;
    target to;
    double alpha, beta;
    const void *of[3]; /* operands; the result's is `result` */
    void *result, *work;
    size_t work_bytes;
    int how;
} job;

static int run_convolution(const void *data) {
    const job *j = data;
    const tensor *result = j->to == Y ? &j->y : j->to == X ? &j->x : &j->w;
    const int type = cuda_type(result->type), last = AXES - j->v.rank;
    const int in = j->w.size[1], out = j->w.size[0] / j->v.groups;
    int xs[AXES], ws[AXES], ys[AXES], o[AXES], e[AXES];
    double *sums = calloc((size_t)count_of(result), sizeof(double));

    if (!sums) return NO_MEMORY;
    axes_of(&j->x, xs), axes_of(&j->w, ws), axes_of(&j->y, ys);
    memset(j->work, 0xa5, j->work_bytes);
    products++;
    rounded += j->x.type == FLOAT && j->v.math == DEFAULT_MATH;
    spare += j->how == SPARE;
    fake_spend((j->how == SPARE) == spare_is_faster ? 1 : 2);
    narrow += j->x.type == HALF || j->x.type == BFLOAT16;
    for (int64_t y = 0; y < count_of(&j->y); y++) {
        int64_t rest = y;
        for (int i = AXES - 1; i >= 0; rest /= ys[i--]) o[i] = (int)(rest % ys[i]);
        const int channel = (int)(rest % j->y.size[1]), group = channel / out;
        const int64_t image = rest / j->y.size[1];
        for (int64_t tap = 0; tap < (int64_t)in * ws[0] * ws[1] * ws[2]; tap++) {
            int64_t left = tap, x, inside = 1;
            for (int i = AXES - 1; i >= 0; left /= ws[i--]) e[i] = (int)(left % ws[i]);
            x = image * j->x.size[1] + group * in + left;
            for (int i = 0; i < AXES; i++) {
                const sliding *v = &j->v;
                const int64_t at = i < last ? 0
                                            : (int64_t)o[i] * v->stride[i - last] - v->pad[i - last] +
                                                  (int64_t)e[i] * v->dilation[i - last];
                inside = inside && at >= 0 && at < xs[i];
                x = x * xs[i] + at;
            }
            if (!inside) continue;
            const int64_t w = (int64_t)channel * in * ws[0] * ws[1] * ws[2] + tap;
            if (j->to == Y) sums[y] += get(type, j->of[X], x) * get(type, j->of[W], w);
            else if (j->to == X) sums[x] += get(type, j->of[Y], y) * get(type, j->of[W], w);
            else sums[w] += get(type, j->of[Y], y) * get(type, j->of[X], x);
        }
    }
    for (int64_t i = 0; i < count_of(result); i++) {
        const double held = j->beta != 0 ? j->beta * get(type, j->result, i) : 0;
        put(type, j->result, i, j->alpha * sums[i] + held);
    }
    free(sums);
    return SUCCESS;
}

static int start(void *h, const void *alpha, const tensor *x, const tensor *w, const sliding *v, const tensor *y,
                 target to, const void *const of[3], int how, void *work, size_t work_bytes, const void *beta,
                 void *result) {
    const char *wrong;
    int result_of;

    ENTER();
    if (!fake_in_context()) return complain("a convolution without the device's context");
    if ((wrong = wrong_sizes(x, w, v, y))) return complain(wrong);
    if (!h || !alpha || !beta || !result) return complain("operands of a convolution");
    for (int i = 0; i < 3; i++)
        if (i != (int)to && (!of[i] || of[i] == result)) return complain("an operand of a convolution");
    if (how != GOOD && how != SPARE) return complain("an algorithm that was not to be used");
    if (v->math != named_math(x, v)) return complain("an algorithm without the math that it was named with");
    if (!work || work_bytes < NEEDED || (uintptr_t)work % WORK_LINE != 0) return complain("a convolution's workspace");
    if ((result_of = fake_dnn_fails()) != SUCCESS) return result_of;
    const job j = {
        *x,     *w,   *y,         *v, to, factor_of(v->type, alpha), factor_of(v->type, beta), {of[0], of[1], of[2]},
        result, work, work_bytes, how};
    return fake_give(((handle *)h)->stream, run_convolution, &j, sizeof j);
}

#define PRODUCT(name, to, first, second, a, b, ...)                                                                    \
    EXPORT int name(void *h, const void *alpha, void *first, const void *a, void *second, const void *b, void *window, \
                    int how, void *work, size_t work_bytes, const void *beta, void *third, void *result);              \
    int name(void *h, const void *alpha, void *first, const void *a, void *second, const void *b, void *window,        \
             int how, void *work, size_t work_bytes, const void *beta, void *third, void *result) {                    \
        const void *const of[] = {[first##_IS] = a, [second##_IS] = b, [to] = NULL};                                   \
        return start(h, alpha, __VA_ARGS__, to, of, how, work, work_bytes, beta, result);                              \
    }
enum { x_IS = X, w_IS = W, y_IS = Y };
PRODUCT(cudnnConvolutionForward, Y, x, w, a, b, x, w, window, third)
PRODUCT(cudnnConvolutionBackwardData, X, w, y, a, b, third, w, window, y)
PRODUCT(cudnnConvolutionBackwardFilter, W, x, y, a, b, x, third, window, y)
