/* combining_take.h -- serves combining.h as a template: acc (op)= x, n times. */

#define IS_NAN(x) ((x) != (x)) /* never of an integer, about which compilers warn elsewhere */

static inline void NAME(take)(combining how, A *restrict acc, const T *restrict x, int64_t n) {
    switch (how) {
    case COMBINE_ADD:
        for (int64_t i = 0; i < n; i++) acc[i] = (A)((U)acc[i] + (U)GET(x[i]));
        break;
    case COMBINE_MUL:
        for (int64_t i = 0; i < n; i++) acc[i] = (A)((U)acc[i] * (U)GET(x[i]));
        break;
    case COMBINE_MAX:
        for (int64_t i = 0; i < n; i++) {
            A a = acc[i], b = GET(x[i]);
            acc[i] = a > b || IS_NAN(a) ? a : b;
        }
        break;
    case COMBINE_MIN:
        for (int64_t i = 0; i < n; i++) {
            A a = acc[i], b = GET(x[i]);
            acc[i] = a < b || IS_NAN(a) ? a : b;
        }
        break;
    case COMBINE_NONE: break;
    }
}

#undef IS_NAN
