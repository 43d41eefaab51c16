/* cap.c -- makes the CPU of a test build (ORTMODULE_CPU in setup.py) seem to lack what is newer than AVX2, or
 * all beyond the baseline. The linker puts this in the place of libgcc's function that asks the CPU, which every choice
 * of a kernel calls first (target_clones) or relies on (__builtin_cpu_supports). It runs before relocations are complete,
 * so it calls nothing outside of the object that it is linked into. */

#pragma GCC visibility push(hidden)
/* libgcc's, whose layout is part of its interface to compiled code. */
extern volatile struct {
    unsigned vendor, type, subtype, features;
} __cpu_model;
extern volatile unsigned __cpu_features2[3];
int __real___cpu_indicator_init(void);
int __wrap___cpu_indicator_init(void);
#pragma GCC visibility pop

/* Clears the bits by which the CPU has something newer than AVX2: those whose absence one of the tests notices. */
#define NOTICES(name) (__builtin_cpu_supports(name) != 0)

static int newer(void) {
    __asm__ volatile("" ::: "memory");
    return NOTICES("avx512f") + NOTICES("avx512vl") + NOTICES("avx512bw") + NOTICES("avx512dq") + NOTICES("avx512cd") +
           NOTICES("avx512vbmi") + NOTICES("avx512vnni") + NOTICES("avx512bf16") + NOTICES("avx512fp16") +
           NOTICES("amx-tile") + NOTICES("amx-bf16") + NOTICES("amx-int8") + NOTICES("x86-64-v4");
}

static void clear_newer(volatile unsigned *word) {
    for (unsigned bit = 1; bit != 0; bit <<= 1) {
        if (!(*word & bit)) continue;
        const int before = newer();
        *word &= ~bit;
        if (newer() == before) *word |= bit;
    }
}

int __wrap___cpu_indicator_init(void) {
    const int result = __real___cpu_indicator_init();
#ifdef ORT_CAP_AVX2
    clear_newer(&__cpu_model.features);
    for (int i = 0; i < 3; i++) clear_newer(&__cpu_features2[i]);
#else
    __cpu_model.features = 0;
    for (int i = 0; i < 3; i++) __cpu_features2[i] = 0;
    (void)clear_newer;
#endif
    return result;
}
