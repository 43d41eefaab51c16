/* gemm_table.c -- keeps an open-addressed table of words, one an entry: the class above, the way in the lowest bits. */
#include "gemm/gemm_table.h"

#include "core/parallel.h"

#include <inttypes.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>

/* --- classes ------------------------------------------------------------------------------------------------------ */

/* Fields of a class, from the lowest bit on. */
enum { BITS_TYPE = 4, BITS_FLAG = 1, BITS_LAYOUT = 2, BITS_SIZE = 6, BITS_THREADS = 10, BITS_WAY = 4 };
enum { MOST_THREADS = (1 << BITS_THREADS) - 1 };
_Static_assert((int)DTYPE_COUNT <= 1 << BITS_TYPE && (int)GEMM_WAYS <= 1 << BITS_WAY, "fields hold their values");

typedef struct fields {
    int type, wide_a, wide_b, wide_c;
    int a, b;           /* index into LAYOUTS */
    int m, n, k, pairs; /* exponents of 2 */
    int threads;
} fields;

static const char LAYOUTS[] = "NT-";

typedef void field_fn(void *arg, int *field, int bits);

static void each_field(fields *f, field_fn *visit, void *arg) {
    visit(arg, &f->type, BITS_TYPE);
    visit(arg, &f->wide_a, BITS_FLAG);
    visit(arg, &f->wide_b, BITS_FLAG);
    visit(arg, &f->wide_c, BITS_FLAG);
    visit(arg, &f->a, BITS_LAYOUT);
    visit(arg, &f->b, BITS_LAYOUT);
    visit(arg, &f->m, BITS_SIZE);
    visit(arg, &f->n, BITS_SIZE);
    visit(arg, &f->k, BITS_SIZE);
    visit(arg, &f->pairs, BITS_SIZE);
    visit(arg, &f->threads, BITS_THREADS);
}

typedef struct word {
    uint64_t bits;
    int at;
} word;

static void put(void *arg, int *field, int bits) {
    word *w = arg;
    w->bits |= (uint64_t)*field << w->at;
    w->at += bits;
}

static void take(void *arg, int *field, int bits) {
    word *w = arg;
    *field = (int)(w->bits & ((UINT64_C(1) << bits) - 1));
    w->bits >>= bits;
}

static gemm_class pack(fields f) {
    word w = {0, 0};
    each_field(&f, put, &w);
    return w.bits;
}

static fields unpack(gemm_class c) {
    word w = {c, 0};
    fields f;
    each_field(&f, take, &w);
    return f;
}

/* The least e with size <= 2^e. */
static int exponent(int64_t size) {
    int e = 0;
    while (e < 62 && (INT64_C(1) << e) < size) e++;
    return e;
}

static int layout_of(int64_t rows, int64_t cols, int64_t row, int64_t col) {
    gemm_stored s;
    return gemm_as_stored(rows, cols, row, col, &s) ? s.transposed == 'T' : 2;
}

gemm_class gemm_class_of(const gemm *g) {
    const int threads = parallel_threads();
    return pack((fields){.type = (int)g->type,
                         .wide_a = g->wide_a,
                         .wide_b = g->wide_b,
                         .wide_c = g->wide_c,
                         .a = layout_of(g->m, g->k, g->a_row, g->a_col),
                         .b = layout_of(g->k, g->n, g->b_row, g->b_col),
                         .m = exponent(g->m),
                         .n = exponent(g->n),
                         .k = exponent(g->k),
                         .pairs = exponent(gemm_pairs(g)),
                         .threads = threads < MOST_THREADS ? threads : MOST_THREADS});
}

const char *gemm_class_text(gemm_class c, char text[GEMM_CLASS_TEXT]) {
    const fields f = unpack(c);
    (void)snprintf(
        text, GEMM_CLASS_TEXT, "%s%s%s%s %c%c %" PRIu64 "x%" PRIu64 "x%" PRIu64 " pairs %" PRIu64 " threads %d",
        dtype_name((dtype)f.type), f.wide_a ? "+a" : "", f.wide_b ? "+b" : "", f.wide_c ? "+c" : "", LAYOUTS[f.a],
        LAYOUTS[f.b], UINT64_C(1) << f.m, UINT64_C(1) << f.n, UINT64_C(1) << f.k, UINT64_C(1) << f.pairs, f.threads);
    return text;
}

/* The index of a letter, -1 if it is none. */
static int layout_named(char letter) {
    const char *at = letter ? strchr(LAYOUTS, letter) : NULL;
    return at ? (int)(at - LAYOUTS) : -1;
}

bool gemm_class_parse(const char *text, gemm_class *out) {
    char types[32], a, b, again[GEMM_CLASS_TEXT];
    int64_t m, n, k, pairs;
    int threads, type = F32;

    if (sscanf(text, "%31[a-z0-9+] %c%c %18" SCNd64 "x%18" SCNd64 "x%18" SCNd64 " pairs %18" SCNd64 " threads %4d",
               types, &a, &b, &m, &n, &k, &pairs, &threads) != 8)
        return false;
    const size_t length = strcspn(types, "+");
    while (type < DTYPE_COUNT &&
           (strlen(dtype_name((dtype)type)) != length || strncmp(dtype_name((dtype)type), types, length) != 0))
        type++;
    if (type == DTYPE_COUNT || layout_named(a) < 0 || layout_named(b) < 0) return false;
    if (m < 1 || n < 1 || k < 1 || pairs < 1 || threads < 1 || threads > MOST_THREADS) return false;
    *out = pack((fields){.type = type,
                         .wide_a = strstr(types, "+a") != NULL,
                         .wide_b = strstr(types, "+b") != NULL,
                         .wide_c = strstr(types, "+c") != NULL,
                         .a = layout_named(a),
                         .b = layout_named(b),
                         .m = exponent(m),
                         .n = exponent(n),
                         .k = exponent(k),
                         .pairs = exponent(pairs),
                         .threads = threads});
    return strcmp(gemm_class_text(*out, again), text) == 0;
}

/* --- entries ------------------------------------------------------------------------------------------------------ */

enum { SLOTS = 8192, MOST_ENTRIES = SLOTS * 3 / 4 };

static _Atomic uint64_t slots[SLOTS];
static atomic_int entries;
static atomic_int_fast64_t uses[GEMM_WAYS];

static size_t first_slot(gemm_class c) { return (size_t)((c * UINT64_C(0x9e3779b97f4a7c15)) >> 51); }
_Static_assert(SLOTS == 1 << (64 - 51), "a hash is a slot");

static uint64_t entry_of(gemm_class c, gemm_way way) { return c << BITS_WAY | (uint64_t)way; }

gemm_way gemm_table_get(gemm_class c) {
    uint64_t found;

    for (size_t i = first_slot(c); (found = atomic_load_explicit(&slots[i], memory_order_relaxed)); i = (i + 1) % SLOTS)
        if (found >> BITS_WAY == c) return (gemm_way)(found & ((1 << BITS_WAY) - 1));
    return GEMM_DEFAULT;
}

bool gemm_table_set(gemm_class c, gemm_way way) {
    size_t i = first_slot(c);

    for (;;) {
        uint64_t found = atomic_load(&slots[i]);
        if (found && found >> BITS_WAY != c) {
            i = (i + 1) % SLOTS;
            continue;
        }
        if (!found && atomic_load(&entries) >= MOST_ENTRIES) return false;
        if (!atomic_compare_exchange_strong(&slots[i], &found, entry_of(c, way))) continue; /* another thread's */
        if (!found) atomic_fetch_add(&entries, 1);
        return true;
    }
}

bool gemm_table_empty(void) { return atomic_load_explicit(&entries, memory_order_relaxed) == 0; }

void gemm_table_clear(void) {
    for (size_t i = 0; i < SLOTS; i++) {
        uint64_t found = atomic_load(&slots[i]);
        if (found) atomic_store(&slots[i], entry_of(found >> BITS_WAY, GEMM_DEFAULT));
    }
}

void gemm_table_used(gemm_way way) { atomic_fetch_add_explicit(&uses[way], 1, memory_order_relaxed); }
int64_t gemm_table_uses(gemm_way way) { return atomic_load_explicit(&uses[way], memory_order_relaxed); }
