/* test_tuning.c -- tests classes of products, the table of ways, and measuring. There is no torch in this program, so
 * of libraries nothing is chosen here. */
#include "exec/tune.h"

#include "test.h"

/* m x k times k x n, all dense. */
static gemm dense(dtype type, int64_t m, int64_t n, int64_t k) {
    return (gemm){
        .type = type, .m = m, .n = n, .k = k, .alpha = 1, .a_row = k, .a_col = 1, .b_row = n, .b_col = 1, .c_row = n};
}

TEST(classes_are_told_apart_and_read_back) {
    char text[GEMM_CLASS_TEXT];
    gemm g = dense(BF16, 100, 64, 300), other = g;
    gemm_class c = gemm_class_of(&g), again = 0;

    CHECK(strncmp(gemm_class_text(c, text), "bfloat16 NN 128x64x512 pairs 1 threads ", 39) == 0);
    CHECK(gemm_class_parse(text, &again) && again == c);
    other.m = 65; /* of the same power of two */
    CHECK(gemm_class_of(&other) == c);
    other.m = 64;
    CHECK(gemm_class_of(&other) != c);
    other = g;
    other.wide_c = true;
    CHECK(gemm_class_of(&other) != c);
    CHECK(strncmp(gemm_class_text(gemm_class_of(&other), text), "bfloat16+c NN ", 14) == 0);
    CHECK(gemm_class_parse(text, &again) && again == gemm_class_of(&other));
    other = g;
    other.b_row = 1;
    other.b_col = g.k;
    CHECK(strstr(gemm_class_text(gemm_class_of(&other), text), " NT ") != NULL);
    other.a_col = 2;
    other.a_row = 2 * g.k;
    CHECK(strstr(gemm_class_text(gemm_class_of(&other), text), " -T ") != NULL);
}

TEST(texts_that_are_no_class) {
    static const char *const bad[] = {"",
                                      "bfloat16",
                                      "bfloat17 NN 1x1x1 pairs 1 threads 1",
                                      "float32 NX 1x1x1 pairs 1 threads 1",
                                      "float32 NN 3x1x1 pairs 1 threads 1",
                                      "float32 NN 0x1x1 pairs 1 threads 1",
                                      "float32 NN 1x1x1 pairs 1 threads 0",
                                      "float32 NN 1x1x1 pairs 1 threads 1024",
                                      "float32 NN 1x1x1 pairs 1 threads 1 more",
                                      "float32+d NN 1x1x1 pairs 1 threads 1",
                                      "float32 NN 999999999999999999999x1x1 pairs 1 threads 1"};
    gemm_class c;
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) CHECK(!gemm_class_parse(bad[i], &c));
    CHECK(gemm_class_parse("float32 NN 1x1x1 pairs 1 threads 1", &c));
}

TEST(what_the_table_says_is_run) {
    float a[6] = {1, 2, 3, 4, 5, 6}, b[6] = {1, 0, 2, 1, 0, 3}, c[4] = {0};
    gemm g = dense(F32, 2, 2, 3);
    const int64_t before = gemm_table_uses(GEMM_REFERENCE), other = gemm_table_uses(GEMM_BLAS);

    g.a = a;
    g.b = b;
    g.c = c;
    const gemm_class class = gemm_class_of(&g);
    CHECK(gemm_table_get(class) == GEMM_DEFAULT);
    CHECK(gemm_table_set(class, GEMM_REFERENCE) && gemm_table_get(class) == GEMM_REFERENCE);
    gemm_run(&g);
    CHECK(c[0] == 5 && c[1] == 11 && c[2] == 14 && c[3] == 23);
    CHECK(gemm_table_uses(GEMM_REFERENCE) == before + 1);
    /* A way that cannot: there is no BLAS in this program. */
    CHECK(gemm_table_set(class, GEMM_BLAS) && gemm_table_get(class) == GEMM_BLAS);
    memset(c, 0, sizeof c);
    gemm_run(&g);
    CHECK(c[0] == 5 && c[1] == 11 && c[2] == 14 && c[3] == 23);
    CHECK(gemm_table_uses(GEMM_BLAS) == other);
    gemm_table_clear();
    CHECK(gemm_table_get(class) == GEMM_DEFAULT);
    gemm_run(&g);
    CHECK(gemm_table_uses(GEMM_REFERENCE) == before + 1);
}

TEST(ways_have_names) {
    for (int way = 0; way < GEMM_WAYS; way++) CHECK(gemm_way_named(gemm_way_name((gemm_way)way)) == (gemm_way)way);
    CHECK(gemm_way_named("abacus") == GEMM_WAYS);
}

/* Every way of a product gives its result. */
TEST(ways_agree) {
    enum { M = 40, N = 48, K = 64 };
    static const dtype types[] = {F32, BF16, F16, F64};

    for (size_t t = 0; t < sizeof types / sizeof *types; t++) {
        const dtype type = types[t];
        char *a = calloc(M * K, dtype_size(type)), *b = calloc(K * N, dtype_size(type));
        char *c = calloc(M * N, dtype_size(type));
        gemm g = dense(type, M, N, K);
        for (int64_t i = 0; i < M * K; i++) dtype_set_int(type, a, i, i * 7 % 3 - 1);
        for (int64_t i = 0; i < K * N; i++) dtype_set_int(type, b, i, i * 5 % 4 - 1);
        g.a = a;
        g.b = b;
        g.c = c;
        for (int way = 1; way < GEMM_WAYS; way++) {
            memset(c, 0, M * N * dtype_size(type));
            if (!gemm_run_by((gemm_way)way, &g)) continue;
            int wrong = 0;
            for (int64_t i = 0; i < M; i++)
                for (int64_t j = 0; j < N; j++) {
                    int64_t sum = 0;
                    for (int64_t k = 0; k < K; k++)
                        sum += dtype_get_int(type, a, i * K + k) * dtype_get_int(type, b, k * N + j);
                    wrong += dtype_get_int(type, c, i * N + j) != sum;
                }
            test_check(wrong == 0, __FILE__, __LINE__, "a way agrees", gemm_way_name((gemm_way)way));
        }
        free(a);
        free(b);
        free(c);
    }
}

/* Operands of any strides get memory of their own, which sanitized builds watch. */
TEST(measuring_chooses_a_way_that_can) {
    for (int trial = 0; trial < 12; trial++) {
        gemm g = dense(trial % 2 ? BF16 : F32, 20 + trial, 33, 50);
        tuned found;

        if (trial % 3 == 1) { /* backwards */
            g.a_row = -g.a_row;
            g.b_col = -2;
            g.b_row = 2 * g.n;
        }
        if (trial % 4 == 2) {
            g.n_batch = 2;
            g.batch[0] = 3;
            g.batch[1] = 2;
            g.a_step[1] = 5; /* overlapping: operands are only read */
            g.c_step[0] = 2 * g.m * g.n;
            g.c_step[1] = g.m * g.n;
        }
        if (!tune_product(&g, trial % 2 ? 0 : 1e-9, &found)) {
            CHECK(gemm_packed_way(&g) == GEMM_DEFAULT); /* nothing to choose from */
            continue;
        }
        int ways = 0;
        for (int way = 0; way < GEMM_WAYS; way++) ways += found.seconds[way] > 0;
        CHECK(ways > 1 && found.seconds[found.best] > 0);
        gemm_simplify(&g);
        CHECK(found.of == gemm_class_of(&g));
        CHECK(gemm_table_get(found.of) == GEMM_DEFAULT); /* measuring says, a plan's tuning sets */
    }
    gemm none = dense(F32, 0, 4, 4);
    tuned found;
    CHECK(!tune_product(&none, 0, &found));
}
