/* blas_choice.c -- keys of products as text and back, and the table of chosen algorithms. */
#include "cuda/libraries/blas_choice.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

uint64_t blas_hash(const blas_key *k) {
    uint64_t words[sizeof *k / sizeof(uint64_t)], h = 14695981039346656037u;
    _Static_assert(sizeof *k % sizeof(uint64_t) == 0, "a key is made of words");
    memcpy(words, k, sizeof words);
    for (size_t i = 0; i < sizeof words / sizeof words[0]; i++) h = (h ^ words[i]) * 1099511628211u;
    return h ^ h >> 32;
}

/* --- texts -------------------------------------------------------------------------------------------------------- */

static char letter(int32_t transposed) { return transposed ? 'T' : 'N'; }

const char *blas_key_text(const blas_key *k, char text[BLAS_KEY_TEXT]) {
    (void)snprintf(text, BLAS_KEY_TEXT,
                   "%s %s %c%c %" PRId64 "x%" PRId64 "x%" PRId64 " lines %" PRId64 ",%" PRId64 ",%" PRId64
                   " batch %" PRId64 " by %" PRId64 ",%" PRId64 ",%" PRId64 " aligned %" PRId64 ",%" PRId64 ",%" PRId64
                   ",%" PRId64 ",%" PRId64 ",%" PRId64 " epilogue %d beta %d tf32 %d workspace %" PRIu64,
                   dtype_name((dtype)k->type), dtype_name((dtype)k->result_type), letter(k->trans_a),
                   letter(k->trans_b), k->rows, k->cols, k->inner, k->a_ld, k->b_ld, k->c_ld, k->batch, k->a_step,
                   k->b_step, k->c_step, k->a_aligned, k->b_aligned, k->c_aligned, k->added_aligned, k->vector_aligned,
                   k->extra_aligned, k->epilogue, k->beta, k->tf32, k->workspace);
    return text;
}

static int32_t float_named(const char *name) {
    for (int t = F32; t <= F16; t++)
        if (strcmp(dtype_name((dtype)t), name) == 0) return t;
    return DT_NONE;
}

/* A text counts as a key's when it is the one that the key has. */
bool blas_key_parse(const char *text, int device, blas_key *out) {
    char type[16], result[16], transposed[3], again[BLAS_KEY_TEXT];
    blas_key k;

    memset(&k, 0, sizeof k);
    const int read = sscanf(text,
                            "%15s %15s %2s %" SCNd64 "x%" SCNd64 "x%" SCNd64 " lines %" SCNd64 ",%" SCNd64 ",%" SCNd64
                            " batch %" SCNd64 " by %" SCNd64 ",%" SCNd64 ",%" SCNd64 " aligned %" SCNd64 ",%" SCNd64
                            ",%" SCNd64 ",%" SCNd64 ",%" SCNd64 ",%" SCNd64 " epilogue %" SCNd32 " beta %" SCNd32
                            " tf32 %" SCNd32 " workspace %" SCNu64,
                            type, result, transposed, &k.rows, &k.cols, &k.inner, &k.a_ld, &k.b_ld, &k.c_ld, &k.batch,
                            &k.a_step, &k.b_step, &k.c_step, &k.a_aligned, &k.b_aligned, &k.c_aligned, &k.added_aligned,
                            &k.vector_aligned, &k.extra_aligned, &k.epilogue, &k.beta, &k.tf32, &k.workspace);
    if (read != 23) return false;
    k.device = device;
    k.type = float_named(type);
    k.result_type = float_named(result);
    k.trans_a = transposed[0] == 'T';
    k.trans_b = transposed[1] == 'T';
    if (k.type == DT_NONE || k.result_type == DT_NONE || strcmp(blas_key_text(&k, again), text) != 0) return false;
    *out = k;
    return true;
}

const char *blas_algorithm_text(const blas_algorithm *a, char text[BLAS_ALGORITHM_TEXT]) {
    for (int i = 0; i < 8; i++) (void)snprintf(text + 16 * (size_t)i, 17, "%016" PRIx64, a->data[i]);
    return text;
}

bool blas_algorithm_parse(const char *text, blas_algorithm *out) {
    if (strlen(text) != BLAS_ALGORITHM_TEXT - 1 || strspn(text, "0123456789abcdef") != BLAS_ALGORITHM_TEXT - 1)
        return false;
    for (int i = 0; i < 8; i++)
        if (sscanf(text + 16 * (size_t)i, "%16" SCNx64, &out->data[i]) != 1) return false;
    return true;
}

/* --- the table ---------------------------------------------------------------------------------------------------- */

enum { SLOTS = 4096, MOST = SLOTS / 2 };

typedef struct choice {
    bool used;
    blas_key of;
    blas_algorithm algorithm;
} choice;

static choice choices[SLOTS];
static int count;

/* Where it is, or would be. */
static choice *find(const blas_key *k) {
    uint64_t at = blas_hash(k);
    while (choices[at % SLOTS].used && memcmp(&choices[at % SLOTS].of, k, sizeof *k) != 0) at++;
    return &choices[at % SLOTS];
}

const blas_algorithm *blas_choice_get(const blas_key *k) {
    const choice *c = count ? find(k) : NULL;
    return c && c->used ? &c->algorithm : NULL;
}

bool blas_choice_set(const blas_key *k, const blas_algorithm *a) {
    choice *c = find(k);

    if (!c->used && count == MOST) return false;
    count += !c->used;
    *c = (choice){true, *k, *a};
    return true;
}

void blas_choices_clear(void) {
    if (count) memset(choices, 0, sizeof choices);
    count = 0;
}
