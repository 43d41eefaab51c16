/* test_gradient_sum.c -- tests the pass that adds up gradients which meet in one value, as text before and after. */
#include "build.h"
#include "passes/pipeline.h"
#include "test.h"

/* A graph in its backward: x [rows, 6], an input that is an output, and what products are made of, dy [rows, 8] and
 * w [8, 6], all of one type. */
typedef struct backward {
    ctx c;
    graph *g;
    value *x, *dy, *w;
} backward;

static void begin(backward *b, bool cuda, dtype type, int64_t rows) {
    ctx_init(&b->c);
    b->g = new_graph(&b->c);
    b->g->cuda = cuda;
    b->x = INPUT(b->g, "x", type, rows, 6);
    b->dy = INPUT(b->g, "dy", type, rows, 8);
    b->w = INPUT(b->g, "w", type, 8, 6);
    make_output(b->g, b->x);
    b->g->in_backward = true;
}

static value *product_of(backward *b, const char *op) { return NODE(b->g, "MatMul", NODE(b->g, op, b->dy), b->w); }

/* `reader` of the sum is the gradient of input i. */
static void make_sum(backward *b, int i, const char *reader, value *later, value *earlier) {
    make_gradient(b->g, i, NODE(b->g, reader, NODE(b->g, "Add", later, earlier)));
}

/* NULL: the pass leaves the graph as it is. */
static void end(backward *b, const char *after) {
    b->g->in_backward = false;
    if (after) check_rewrite(b->g, "gradient_sum", after);
    else check_untouched(b->g, "gradient_sum");
    ctx_release(&b->c);
}

TEST(a_product_adds_to_the_gradient_that_is_there) {
    backward b;
    begin(&b, false, F32, 4);
    value *k = INPUT(b.g, "k", F32, 8, 6), *first = NODE(b.g, "MatMul", b.dy, b.w);

    make_sum(&b, 0, "Softmax", NODE(b.g, "MatMul", b.dy, k), first);
    end(&b, "input %0 x float32[4, 6] grad\n"
            "input %1 dy float32[4, 8] grad\n"
            "input %2 w float32[8, 6] grad\n"
            "input %3 k float32[8, 6] grad\n"
            "backward\n"
            "%4 = MatMul(%1 dy, %2 w) float32[4, 6]\n"
            "%5 = MatMulAdd(%4, %1 dy, %3 k, alpha=1) float32[4, 6]\n"
            "%6 = Softmax(%5) float32[4, 6]\n"
            "output %0 x\n"
            "grad %0 x <- %6\n");
}

/* A loop's weight: dy' x of each step comes transposed. */
TEST(transposed_gradients_are_added_as_they_are) {
    backward b;
    begin(&b, false, F32, 4);
    value *k = INPUT(b.g, "k", F32, 8, 6), *l = INPUT(b.g, "l", F32, 8, 6), *parts[3];

    parts[0] = NODE(b.g, "Transpose", NODE(b.g, "MatMul", b.dy, b.w));
    parts[1] = NODE(b.g, "Transpose", NODE(b.g, "MatMul", b.dy, k));
    parts[2] = NODE(b.g, "Transpose", NODE(b.g, "MatMul", b.dy, l));
    make_gradient(b.g, 0, NODE(b.g, "Transpose", NODE(b.g, "Add", parts[2], NODE(b.g, "Add", parts[1], parts[0]))));
    end(&b, "input %0 x float32[4, 6] grad\n"
            "input %1 dy float32[4, 8] grad\n"
            "input %2 w float32[8, 6] grad\n"
            "input %3 k float32[8, 6] grad\n"
            "input %4 l float32[8, 6] grad\n"
            "backward\n"
            "%5 = MatMul(%1 dy, %2 w) float32[4, 6]\n"
            "%6 = MatMulAdd(%5, %1 dy, %3 k, alpha=1) float32[4, 6]\n"
            "%7 = MatMulAdd(%6, %1 dy, %4 l, alpha=1) float32[4, 6]\n"
            "%8 = Transpose(%7, perm=[1, 0]) float32[6, 4]\n"
            "%9 = Transpose(%8, perm=[1, 0]) float32[4, 6]\n"
            "output %0 x\n"
            "grad %0 x <- %9\n");
}

TEST(rows_are_added_to_the_gradient_that_is_there) {
    const attr *attrs = NODE_ATTRS(INT("axis", 0), INTS("shape", 2, ((int64_t[]){40, 6})), INT("padding_idx", 3));
    backward b;
    begin(&b, false, F32, 40);
    value *rows = INPUT(b.g, "rows", F32, 5, 6), *index = INPUT(b.g, "index", I64, 5);
    value *head = NODE(b.g, "MatMul", b.dy, b.w);

    make_sum(&b, 0, "Softmax", NODE_WITH(b.g, "GatherGrad", attrs, rows, index), head);
    end(&b, "input %0 x float32[40, 6] grad\n"
            "input %1 dy float32[40, 8] grad\n"
            "input %2 w float32[8, 6] grad\n"
            "input %3 rows float32[5, 6] grad\n"
            "input %4 index int64[5]\n"
            "backward\n"
            "%5 = MatMul(%1 dy, %2 w) float32[40, 6]\n"
            "%6 = GatherGradAdd(%5, %3 rows, %4 index, axis=0, padding_idx=3) float32[40, 6]\n"
            "%7 = Softmax(%6) float32[40, 6]\n"
            "output %0 x\n"
            "grad %0 x <- %7\n");
}

/* Of 16 bits, to what others read as well; a product of 16 bits that stays wide. */
TEST(a_product_adds_to_any_gradient_on_a_gpu) {
    backward b;
    begin(&b, true, BF16, 4);
    value *y = INPUT(b.g, "y", F32, 4, 6), *before = NODE(b.g, "MatMul", b.dy, b.w), *wide;

    make_output(b.g, y);
    make_sum(&b, 0, "Softmax", product_of(&b, "Neg"), before);
    before = NODE(b.g, "Softmax", cast(b.g, before, F32));
    wide = NODE_WITH(b.g, "MatMulBias", NODE_ATTRS(FLOAT("alpha", 2), INT("wide", 1)), NODE(b.g, "Abs", b.dy), b.w);
    make_gradient(b.g, 3, NODE(b.g, "Add", before, wide));
    end(&b, "input %0 x bfloat16[4, 6] grad\n"
            "input %1 dy bfloat16[4, 8] grad\n"
            "input %2 w bfloat16[8, 6] grad\n"
            "input %3 y float32[4, 6] grad\n"
            "backward\n"
            "%4 = MatMul(%1 dy, %2 w) bfloat16[4, 6]\n"
            "%5 = Neg(%1 dy) bfloat16[4, 8]\n"
            "%6 = MatMulAdd(%4, %5, %2 w, alpha=1) bfloat16[4, 6]\n"
            "%7 = Softmax(%6) bfloat16[4, 6]\n"
            "%8 = Cast(%4, to=1) float32[4, 6]\n"
            "%9 = Softmax(%8) float32[4, 6]\n"
            "%10 = Abs(%1 dy) bfloat16[4, 8]\n"
            "%11 = MatMulAdd(%9, %10, %2 w, alpha=2) float32[4, 6]\n"
            "output %0 x\n"
            "output %3 y\n"
            "grad %0 x <- %7\n"
            "grad %3 y <- %11\n");
}

/* Not for a chain, but for the gradient of a norm, which reads 16 bits as they are. */
TEST(a_product_adds_to_the_gradient_that_a_norm_gets) {
    for (int norm = 0; norm < 2; norm++) {
        backward b;
        begin(&b, true, BF16, 4);
        value *y = INPUT(b.g, "y", F32, 4, 6), *scale = INPUT(b.g, "scale", F32, 6);
        value *inverse = INPUT(b.g, "inverse", F32, 4, 1), *later = product_of(&b, "Neg"), *sum;

        sum = cast(b.g, NODE(b.g, "Add", later, NODE(b.g, "MatMul", b.dy, b.w)), F32);
        make_gradient(b.g, 3, norm ? NODE(b.g, "RMSNormGrad", sum, y, scale, inverse) : NODE(b.g, "Exp", sum));
        if (norm) {
            int fired[MAX_PASSES] = {0};
            b.g->in_backward = false;
            CHECK_OK(&b.c, passes_run(b.g, AFTER_GRADIENT, ~pass_bit("gradient_sum"), fired));
            CHECK(count_nodes(b.g, "MatMulAdd") == 1 && count_nodes(b.g, "Add") == 0);
            ctx_release(&b.c);
        } else {
            end(&b, NULL);
        }
    }
}

TEST(sums_of_gradients_that_stay) {
    enum { OF_16_BITS, AFTER_THE_PRODUCT, WITH_AN_INPUT, READ_BY_A_CHAIN, CASES };

    for (int i = 0; i < CASES; i++) {
        backward b;
        begin(&b, false, i == OF_16_BITS ? BF16 : F32, 4);
        value *y = INPUT(b.g, "y", F32, 4, 6), *product = product_of(&b, "Neg"), *other;

        if (i == AFTER_THE_PRODUCT) other = NODE(b.g, "LogSoftmax", y);
        else other = i == WITH_AN_INPUT ? y : product_of(&b, "Abs");
        if (i == AFTER_THE_PRODUCT || i == WITH_AN_INPUT) make_sum(&b, 0, "Softmax", product, other);
        else make_sum(&b, 0, i == READ_BY_A_CHAIN ? "Sigmoid" : "Softmax", other, product);
        end(&b, NULL);
    }
}
