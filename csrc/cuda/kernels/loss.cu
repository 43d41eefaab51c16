/* loss.cu -- mirrors ops/losses/loss.c: CrossEntropy, Nll and their gradients.
 *
 * A block has a sample: its classes are `inner` apart, and a thread takes eight neighbours at a time, once: it adds up
 * exponentials as it looks for the maximum. Losses of samples are
 * kept in float64, and a single block adds them up: their order depends on their number alone. A label that is no class is
 * reported, and makes NaN. */
#ifndef T
#include "cuda/kernels/loss.h"

#define AT_ONCE ROW_PIECE
#include "cuda/kernels/pieces.h"

#ifdef ORT_HOST
#include <string.h>

kernel_fn cross_entropy_cuda, cross_entropy_grad_cuda;
kernel_fn nll_cuda, nll_grad_cuda;
size_t cross_entropy_cuda_workspace(const node *n);
size_t nll_cuda_workspace(const node *n);

loss_args loss_args_of(const call *k, const shape *s, int labels, int weights) {
    loss_args a = {.labels = k->in[labels].data,
                   .label_type = k->in[labels].type,
                   .classes = s->dim[s->rank > 1],
                   .inner = s->rank > 1 ? shape_span(s, 2, s->rank) : 1,
                   .line = shape_span(s, s->rank > 1, s->rank),
                   .samples = tensor_count(&k->in[labels]),
                   .ignores = node_has(k->node, "ignore_index"),
                   .ignored = node_int(k->node, "ignore_index"),
                   .each = strcmp(node_string(k->node, "reduction"), "none") == 0,
                   .mean = strcmp(node_string(k->node, "reduction"), "mean") == 0,
                   .smoothing = node_has(k->node, "smoothing") ? node_float(k->node, "smoothing") : 0,
                   .node = cuda_named(k->node),
                   .fault = k->cuda->fault};
    if (weights < k->n_in && tensor_present(&k->in[weights])) {
        a.weights = k->in[weights].data;
        a.weight_type = k->in[weights].type;
    }
    return a;
}

status loss_run(ctx *c, const call *k, dtype type, const loss_args *a) {
    static kernel rows[DTYPE_COUNT] = FLOAT_KERNELS(cross_entropy);
    return cuda_launch(c, k, &rows[type], geometry_pieces(a->samples, a->classes), a);
}

status loss_grad_run(ctx *c, const call *k, dtype type, const loss_args *a) {
    static kernel rows[DTYPE_COUNT] = FLOAT_KERNELS(cross_entropy_grad);
    return cuda_launch(c, k, &rows[type], geometry_pieces(a->samples, a->classes), a);
}

status loss_join_run(ctx *c, const call *k, dtype type, const loss_args *a) {
    static kernel join[DTYPE_COUNT] = FLOAT_KERNELS(cross_entropy_join);
    return cuda_launch(c, k, &join[type], (geometry){1, 512}, a);
}

status loss_divisor_run(ctx *c, const call *k, const loss_args *a) {
    static kernel divisor = {.name = "loss_divisor"};
    return cuda_launch(c, k, &divisor, (geometry){1, 512}, a);
}

/* Losses, and lse where it is not asked for. */
size_t cross_entropy_cuda_workspace(const node *n) { return 16 * (size_t)shape_count(&n->in[1]->shape); }

status cross_entropy_cuda(ctx *c, const call *k) {
    const dtype type = k->in[0].type;
    loss_args a = loss_args_of(k, &k->in[0].shape, 1, 2);

    a.x = k->in[0].data;
    a.losses = k->work;
    a.lse = k->n_out > 1 && tensor_present(&k->out[1]) ? k->out[1].data : a.losses ? a.losses + a.samples : NULL;
    a.divisor = k->n_out > 2 && tensor_present(&k->out[2]) ? k->out[2].data : NULL;
    a.out = k->out[0].data;
    TRY(loss_run(c, k, type, &a));
    return loss_join_run(c, k, k->out[0].type, &a);
}

/* Operands: dloss, logits, labels, lse, divisor, weights. */
status cross_entropy_grad_cuda(ctx *c, const call *k) {
    loss_args a = loss_args_of(k, &k->in[1].shape, 2, 5);

    a.dloss = k->in[0].data;
    a.dloss_type = k->in[0].type;
    a.x = k->in[1].data;
    a.lse = k->in[3].data;
    a.divisor = k->in[4].data;
    a.out = k->out[0].data;
    return loss_grad_run(c, k, k->in[1].type, &a);
}

size_t nll_cuda_workspace(const node *n) { return 8 * (size_t)shape_count(&n->in[1]->shape); }

status nll_cuda(ctx *c, const call *k) {
    static kernel each[DTYPE_COUNT] = FLOAT_KERNELS(nll);
    const dtype type = k->in[0].type;
    loss_args a = loss_args_of(k, &k->in[0].shape, 1, 2);

    a.x = k->in[0].data;
    a.losses = k->work;
    a.divisor = k->n_out > 1 && tensor_present(&k->out[1]) ? k->out[1].data : NULL;
    a.out = k->out[0].data;
    TRY(cuda_launch(c, k, &each[type], geometry_over(a.samples, 128, 128), &a));
    return loss_join_run(c, k, type, &a);
}

/* Operands: dloss, labels, divisor, weights. */
status nll_grad_cuda(ctx *c, const call *k) {
    static kernel each[DTYPE_COUNT] = FLOAT_KERNELS(nll_grad);
    const tensor *dx = &k->out[0];
    loss_args a = loss_args_of(k, &dx->shape, 1, 3);

    a.dloss = k->in[0].data;
    a.dloss_type = k->in[0].type;
    a.divisor = k->in[2].data;
    a.out = dx->data;
    TRY(cuda_clear(c, k, dx->data, (size_t)tensor_count(dx) * dtype_size(dx->type)));
    return cuda_launch(c, k, &each[dx->type], geometry_over(a.samples, 128, 128), &a);
}
#endif

#ifdef ORT_DEVICE
/* The weight of a sample and its label; -1 where it does not count, -2 where it is none. */
DEVICE double label_at(const loss_args *a, int64_t sample, int64_t *label) {
    const int64_t found = integer_at(a->labels, a->label_type, sample);
    if (a->ignores && found == a->ignored) {
        *label = -1;
        return 0;
    }
    if (found < 0 || found >= a->classes) {
        *label = -2;
        return NAN;
    }
    *label = found;
    return a->weights ? number_f64(a->weights, a->weight_type, found) : 1;
}

/* What smoothing gives to class `i`: ops/losses/loss.c. */
DEVICE double share_of(const loss_args *a, int64_t i) {
    return a->smoothing / (double)a->classes * (a->weights ? number_f64(a->weights, a->weight_type, i) : 1);
}

/* Where the classes of a sample begin, and as pieces: where they lie together as elements of the tensor. */
DEVICE int64_t start_of(const loss_args *a, int64_t sample) {
    return quotient(sample, a->inner) * a->line + remainder_of(sample, a->inner);
}
DEVICE int64_t begin_of(const loss_args *a, int64_t sample) { return a->inner == 1 ? sample * a->line : 0; }

/* One block: what the loss is divided by, before there are losses; and 1, which is the gradient that arrives there. */
KERNEL(loss_divisor, loss_args) {
    double weight = 0;

    FOR_THREADS(i, a.samples) {
        int64_t label;
        weight += label_at(&a, i, &label);
    }
    weight = block_sum_f64(weight);
    if (threadIdx.x != 0) return;
    a.divisor[0] = a.mean ? weight : 1;
    a.divisor[1] = 1;
}

#define TEMPLATE "cuda/kernels/loss.cu"
#include "cuda/kernels/each_float.h"
#endif

#else /* the template */

/* Elements i + j of a sample's, from `begin` on; those outside are 0. */
DEVICE void NAME(take)(const loss_args *a, int64_t sample, int64_t i, int64_t begin, A x[AT_ONCE]) {
    const int64_t start = start_of(a, sample) - begin * a->inner, end = begin + a->classes;
    if (a->inner == 1 && is_piece(a->x, TYPE, i, begin, end)) {
        READ_PIECE(a->x, TYPE, i, x);
        return;
    }
    UNROLL for (int j = 0; j < AT_ONCE; j++) {
        const int is_there = i + j >= begin && i + j < end;
        x[j] = is_there ? GET(((const T *)a->x)[start + (i + j) * a->inner]) : 0;
    }
}

/* What is taken from numbers of which x is the largest: nothing, where all are -inf, so that they count 0. */
DEVICE A NAME(finite)(A x) { return x == -(A)INFINITY ? 0 : x; }

/* A thread's next elements: `total` is the sum of exp(x - most) of all so far, and scaled anew where there is a larger one. */
DEVICE void NAME(add_exponentials)(int64_t i, int64_t begin, int64_t end, const A x[AT_ONCE], A *most, A *total) {
    A high = *most;
    EACH_OF(j, i, begin, end) high = x[j] > high ? x[j] : high;
    const A by = NAME(finite)(high);
    *total *= EXP(*most - by);
    EACH_OF(j, i, begin, end) *total += EXP(x[j] - by);
    *most = high;
}

KERNEL(NAME(cross_entropy), loss_args) {
    FOR_BLOCKS(sample, a.samples) {
        const int64_t begin = begin_of(&a, sample), end = begin + a.classes;
        const int many = ARE_MANY(begin, end);
        A most = -(A)INFINITY, total = 0, x[AT_ONCE] = {0};
        int64_t label;
        const double weight = label_at(&a, sample, &label);

        if (label < 0) {
            if (threadIdx.x == 0) {
                a.lse[sample] = NAN; /* ops/losses/loss_rows.h */
                a.losses[sample] = label == -1 ? 0 : NAN;
                if (label == -2)
                    report(a.fault, FAULT_LABEL, a.node, integer_at(a.labels, a.label_type, sample), a.classes);
            }
            continue;
        }
        NOT_UNROLLED FOR_PIECES(i, begin, end) {
            NAME(take)(&a, sample, i, begin, x);
            NAME(add_exponentials)(i, begin, end, x, &most, &total);
        }
        const A own = most;
        most = MOST(most);
        total = SUM(total * EXP(own - NAME(finite)(most)));
        double shares = 0, shared = 0;
        if (a.smoothing > 0) {
            NOT_UNROLLED FOR_PIECES(i, begin, end) {
                if (many) NAME(take)(&a, sample, i, begin, x);
                EACH_OF(j, i, begin, end) {
                    const double share = share_of(&a, i + j - begin);
                    shares += share;
                    shared += share * (double)(x[j] - most);
                }
            }
            shares = block_sum_f64(shares);
            shared = block_sum_f64(shared);
        }
        if (threadIdx.x == 0) {
            const double lse = (double)most + log((double)total);
            a.lse[sample] = lse;
            a.losses[sample] = (1 - a.smoothing) * weight *
                               (lse - (double)GET(((const T *)a.x)[start_of(&a, sample) + label * a.inner]));
            if (a.smoothing > 0) a.losses[sample] += shares * log((double)total) - shared;
        }
    }
}

/* One block. */
KERNEL(NAME(cross_entropy_join), loss_args) {
    const double nothing = a.smoothing > 0 && a.classes == 0 ? NAN : 0; /* a share of no classes */
    double sum = threadIdx.x == 0 ? nothing : 0, weight = 0;

    FOR_THREADS(i, a.samples) {
        int64_t label;
        weight += label_at(&a, i, &label);
        sum += a.losses[i];
        if (a.each) ((T *)a.out)[i] = PUT((A)(a.losses[i] + nothing));
    }
    weight = block_sum_f64(weight);
    sum = block_sum_f64(sum);
    if (threadIdx.x != 0) return;
    if (a.divisor) *a.divisor = a.mean ? weight : 1;
    if (!a.each) *(T *)a.out = PUT((A)(a.mean ? sum / weight : sum));
}

KERNEL(NAME(cross_entropy_grad), loss_args) {
    FOR_BLOCKS(sample, a.samples) {
        const int64_t start = start_of(&a, sample), begin = begin_of(&a, sample), end = begin + a.classes;
        int64_t label;
        const double own = (1 - a.smoothing) * label_at(&a, sample, &label);
        const double up = number_f64(a.dloss, a.dloss_type, a.each ? sample : 0) / *a.divisor;
        double shares = 0;
        if (a.smoothing > 0) {
            FOR_THREADS(i, a.classes) shares += share_of(&a, i);
            shares = block_sum_f64(shares);
        }
        const A scale = (A)((own + shares) * up);
        const A high = (A)a.lse[sample], low = (A)(a.lse[sample] - (double)high);

        FOR_PIECES(i, begin, end) {
            A x[AT_ONCE];
            NAME(take)(&a, sample, i, begin, x);
            EACH_OF(j, i, begin, end) {
                const int64_t own_class = i + j - begin;
                const A p = EXP(x[j] - high - low);
                A v = (p - (own_class == label ? 1 : 0)) * scale;
                if (a.smoothing > 0)
                    v = p * scale - (A)((share_of(&a, own_class) + (own_class == label ? own : 0)) * up);
                x[j] = label == -1 ? 0 : v;
            }
            if (a.out && a.inner == 1 && is_piece(a.out, TYPE, i, begin, end)) {
                WRITE_PIECE(a.out, TYPE, i, x);
            } else if (a.out) {
                EACH_OF(j, i, begin, end)((T *)a.out)[start + (i + j - begin) * a.inner] = PUT(x[j]);
            }
            if (a.narrow) GIVE(a.narrow, a.narrow_type, i, begin, end, x);
        }
    }
}

/* Where the element of a sample and its label is. */
#define ELEMENT(a, sample, label)                                                                                      \
    ((quotient(sample, a.inner) * a.classes + (label)) * a.inner + remainder_of(sample, a.inner))

KERNEL(NAME(nll), loss_args) {
    FOR_EACH(sample, a.samples) {
        int64_t label;
        const double weight = label_at(&a, sample, &label);

        if (label == -2) report(a.fault, FAULT_LABEL, a.node, integer_at(a.labels, a.label_type, sample), a.classes);
        a.losses[sample] = label == -1   ? 0
                           : label == -2 ? NAN
                                         : -weight * (double)GET(((const T *)a.x)[ELEMENT(a, sample, label)]);
    }
}

KERNEL(NAME(nll_grad), loss_args) {
    FOR_EACH(sample, a.samples) {
        int64_t label;
        const double weight = label_at(&a, sample, &label);
        const double up = number_f64(a.dloss, a.dloss_type, a.each ? sample : 0) / *a.divisor;

        if (label >= 0) ((T *)a.out)[ELEMENT(a, sample, label)] = PUT((A)(-weight * up));
    }
}
#undef ELEMENT
#endif
