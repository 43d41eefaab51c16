/* gemm_packed.c -- products of our own for CPUs with AVX-512: blocks, panels and threads around the inner kernels.
 *
 * C is cut among the threads. A thread goes through its part by blocks of A's rows that fit the second-level cache, and
 * in each by slices of K; it packs both operands as the inner kernel reads them:
 *
 *     A panel: rows         a block of them stays in the second-level cache
 *     B panel: PANEL_COLS columns   one stays near while the block passes by
 *
 * The kernel keeps a block of sums in registers over a slice. Sums over several slices are kept in float32 until the
 * last one: in C itself when that is float32 and near, else beside A's block, for as many columns as there is room for.
 * A's block has all slices where they fit, so that it is packed once: for all pairs of a batch that share it, as the
 * images of a convolution share its weights. Some columns go through all slices then, before the next ones do.
 *
 * Operands come from memory, the weights of a model at least: what B's next panels are packed from is asked for while
 * the present ones are multiplied, which leaves memory alone otherwise. */
#include "gemm/gemm_prepack.h"

#include "core/ints.h"
#include "core/parallel.h"
#include "core/prefetch.h"
#include "core/torch_lib.h"

#if defined(__x86_64__) && defined(__GNUC__)

#include <pthread.h>

enum {
    MOST_ROOM = 320 << 10, /* words of a kernel's A and sums: 1.3 MB of a second-level cache of 2 MB */
    PANEL_UNITS = 768,     /* of all of B's panels: 98 KB */
    FEW_BLOCKS = 6,        /* of A's, so that reading B takes longer than multiplying */
    NEAR = 48 << 8,        /* words of the first cache */
    LEAST_COLS = 224,      /* of sums that are kept beside C, unless A is packed as a whole: of so many rows, */
    LEAST_ROWS = 256,
    WORTH_CUTTING = 1 << 18,
    LONG = 1024 /* from here on torch's bfloat16 product is as fast as ours with AVX-512-BF16 */
};

/* --- the parts of C --------------------------------------------------------------------------------------------------- */

typedef struct area {
    int64_t row, col, rows, cols;
    int64_t pairs; /* that share A: the next of the innermost batch dimension */
} area;

/* How an area is gone through. */
typedef struct blocking {
    int64_t slice, depth; /* of K: units, elements */
    int64_t rows;         /* of a block of A */
    int64_t a_units;      /* of K that are packed at once: a slice, or all of it */
    int64_t group;        /* of columns of B that are packed at once */
    int64_t cols;         /* that go through all slices before the next ones do */
    bool beside;          /* sums of several slices are kept beside C */
} blocking;

static blocking blocking_of(const gemm *g, const gemm_kernel *kn, area r) {
    const int64_t units = gemm_units(kn, g->k), all = whole(r.rows, kn->rows);
    blocking x = {.slice = gemm_slice(kn, g->k), .cols = r.cols};

    x.depth = x.slice / kn->step_units * kn->step_depth;
    x.beside = (kn->apart || gemm_type_c(g) != F32) && x.depth < g->k;
    x.group = least(all <= FEW_BLOCKS * kn->rows ? PANEL_UNITS : kn->panels, PANEL_UNITS / x.slice) * PANEL_COLS;
    x.a_units = x.slice;
    if (x.beside && kn->room_a / units >= least(all, LEAST_ROWS)) x.a_units = units;
    x.rows = x.beside && x.a_units < units ? least(kn->room_a / x.a_units, (kn->room - kn->room_a) / LEAST_COLS)
                                           : kn->room_a / x.a_units;
    x.rows = whole(parts(all, parts(all, x.rows / kn->rows * kn->rows)), kn->rows);
    if (x.beside) {
        x.cols = (kn->room - x.rows * x.a_units) / x.rows / PANEL_COLS * PANEL_COLS;
        if (x.a_units == units) x.cols = least(x.cols, x.group);
        x.cols = least(x.cols, r.cols);
    }
    return x;
}

/* --- an area ---------------------------------------------------------------------------------------------------------- */

/* An area that is being multiplied. */
typedef struct job {
    const gemm *g;
    const gemm_kernel *kn;
    area r;
    blocking x;
    const char *a, *b;               /* of the area's first row, and column */
    char *c;                         /* of both */
    int64_t b_step, c_step;          /* bytes from pair to pair */
    const gemm_prepacked *prepacked; /* B, or NULL: its panels are packed in */
    uint32_t *room, *b_panels;       /* A's block and, behind it, sums beside C; B's panels */
    uint32_t largest_a, largest_b;   /* of what is packed */
} job;

/* Where B's panels that are packed come from. */
typedef struct place {
    int64_t top; /* of the block of A's rows that they are multiplied with */
    int64_t pair;
    int64_t left; /* of the columns that go through all slices */
    int64_t k;
    int64_t col; /* from `left` on */
} place;

static place following(const job *w, place p) {
    const blocking *x = &w->x;

    p.col += x->group;
    if (p.col < least(x->cols, w->r.cols - p.left)) return p;
    p.col = 0;
    p.k += x->depth;
    if (p.k < w->g->k) return p;
    p.k = 0;
    p.left += x->cols;
    if (p.left < w->r.cols) return p;
    p.left = 0;
    if (++p.pair < w->r.pairs) return p;
    p.pair = 0;
    p.top += x->rows;
    return p;
}

static int64_t cols_at(const job *w, place p) {
    return least(w->x.group, least(w->x.cols, w->r.cols - p.left) - p.col);
}

static const char *a_at(const job *w, place p) {
    const gemm *g = w->g;
    return w->a + (p.top * g->a_row + p.k * g->a_col) * (int64_t)dtype_size(gemm_type_a(g));
}

static const char *b_at(const job *w, place p) {
    const gemm *g = w->g;
    return w->b + p.pair * w->b_step +
           ((p.left + p.col) * g->b_col + p.k * g->b_row) * (int64_t)dtype_size(gemm_type_b(g));
}

/* One block of sums by the kernel's other one, from the operands as they lie. */
static void run_other(const gemm *g, const gemm_kernel *other, const char *a, const char *b, int64_t rows, int64_t cols,
                      int64_t deep, gemm_target t) {
    enum { MOST_ROWS = 16 };
    const int64_t units = gemm_units(other, deep);
    const int64_t a_size = (int64_t)dtype_size(gemm_type_a(g)), c_size = (int64_t)dtype_size(t.type);
    _Alignas(64) uint32_t a_panel[PANEL_UNITS * MOST_ROWS], b_panel[PANEL_UNITS * PANEL_COLS];

    other->pack_b(b_panel, b, gemm_type_b(g), cols, deep, g->b_col, g->b_row);
    for (int64_t i = 0; i < rows; i += other->rows) {
        const int64_t n = least(other->rows, rows - i);
        other->pack_a(a_panel, a + i * g->a_row * a_size, gemm_type_a(g), n, deep, g->a_row, g->a_col);
        other->run(units, a_panel, b_panel, n, cols, &t);
        t.c = (char *)t.c + other->rows * t.row * c_size;
        if (t.more) t.more += other->rows * t.more_row;
    }
}

/* The panels of B at a place, packed where they were not before. */
static const uint32_t *panels_at(job *w, place p, int64_t cols, int64_t deep) {
    const gemm *g = w->g;
    const int64_t slice = p.k / w->x.depth, panel = (w->r.col + p.left + p.col) / PANEL_COLS;

    if (!w->prepacked) {
        w->largest_b = w->kn->pack_b(w->b_panels, b_at(w, p), gemm_type_b(g), cols, deep, g->b_col, g->b_row);
        return w->b_panels;
    }
    w->largest_b = gemm_prepacked_largest(w->prepacked, slice, panel, parts(cols, PANEL_COLS));
    return gemm_prepacked_panel(w->prepacked, slice, deep, panel);
}

/* The lines of a prepacked panel that a step reads, of which each block asks for some. */
static gemm_ahead prepacked_ahead(const job *w, place p, int64_t j, int64_t i, int64_t blocks) {
    const int64_t step = w->kn->step_units * PANEL_COLS * 4, lines = step / CACHE_LINE, share = parts(lines, blocks);
    const int64_t first = i * share, deep = least(w->x.depth, w->g->k - p.k);
    const int64_t panel = (w->r.col + p.left + p.col) / PANEL_COLS + j;
    gemm_ahead x = {.lines = least(share, lines - first), .line = CACHE_LINE, .bytes = CACHE_LINE, .step = step};

    if (j * PANEL_COLS >= cols_at(w, p) || x.lines <= 0 || x.lines > w->kn->asks) return (gemm_ahead){0};
    x.at = (const char *)gemm_prepacked_panel(w->prepacked, p.k / w->x.depth, deep, panel) + first * CACHE_LINE;
    return x;
}

/* What of B's panel `j` at a place to come is asked for while block `i` of so many passes by. */
static gemm_ahead ahead_of(const job *w, place p, int64_t j, int64_t i, int64_t blocks) {
    const gemm *g = w->g;
    const int64_t size = (int64_t)dtype_size(gemm_type_b(g)), step = w->kn->step_depth;
    const bool along = g->b_row == 1; /* columns are lines of memory */

    if (p.top >= w->r.rows) return (gemm_ahead){0};
    if (w->prepacked) return prepacked_ahead(w, p, j, i, blocks);
    if (!along && g->b_col != 1) return (gemm_ahead){0};
    const int64_t cols = least(PANEL_COLS, cols_at(w, p) - j * PANEL_COLS);
    const int64_t lines = along ? cols : step, share = parts(lines, blocks), first = i * share;
    gemm_ahead x = {.lines = least(share, lines - first)};
    if (cols <= 0 || x.lines <= 0) return (gemm_ahead){0};
    x.line = (along ? g->b_col : g->b_row) * size;
    x.bytes = (along ? step : cols) * size;
    if (x.lines * parts(x.bytes, CACHE_LINE) > w->kn->asks) return (gemm_ahead){0};
    x.step = step * g->b_row * size;
    x.at = b_at(w, p) + j * PANEL_COLS * g->b_col * size + first * x.line;
    return x;
}

/* Packs B's panels, and A's block where it begins, and multiplies them. */
static void run_panels(job *w, place p) {
    const gemm *g = w->g;
    const gemm_kernel *kn = w->kn;
    const blocking x = w->x;
    const dtype c_type = gemm_type_c(g);
    const int64_t a_size = (int64_t)dtype_size(gemm_type_a(g)), b_size = (int64_t)dtype_size(gemm_type_b(g));
    const int64_t c_size = (int64_t)dtype_size(c_type);
    const int64_t rows = least(x.rows, w->r.rows - p.top), cols = cols_at(w, p);
    const int64_t blocks = parts(rows, kn->rows), panels = parts(cols, PANEL_COLS);
    const int64_t deep = least(x.depth, g->k - p.k), deep_units = gemm_units(kn, deep);
    const bool all_of_a = x.a_units >= gemm_units(kn, g->k), last = p.k + x.depth >= g->k, sums = x.beside && !last;
    const int64_t a_deep = all_of_a ? g->k : deep, a_units = gemm_units(kn, a_deep);
    const uint32_t *a_block = w->room + (all_of_a ? gemm_units(kn, p.k) * kn->rows : 0);
    float *beside = (float *)(w->room + x.rows * x.a_units) + p.col;
    char *c_here = w->c + p.pair * w->c_step + (p.top * g->c_row + p.left + p.col) * c_size;
    const place next = following(w, p);
    gemm_target t = {.type = sums ? F32 : c_type, .row = sums ? x.cols : g->c_row, .alpha = 1};

    if (!sums) {
        t.alpha = (float)g->alpha;
        t.beta = !x.beside && p.k > 0 ? 1 : (float)g->beta;
    }
    if (x.beside && p.k > 0) t.more_row = x.cols;
    if (p.col == 0 && (!all_of_a || (p.pair == 0 && p.left == 0 && p.k == 0)))
        w->largest_a = kn->pack_a(w->room, a_at(w, p), gemm_type_a(g), rows, a_deep, g->a_row, g->a_col);
    const uint32_t *b_panels = panels_at(w, p, cols, deep);
    t.keeps_a = deep_units * (kn->rows + panels * PANEL_COLS) <= NEAR;
    const bool holds = !kn->holds || kn->holds(w->largest_a, w->largest_b, deep);
    for (int64_t n = 0; n < blocks * panels; n++) {
        const int64_t i = t.keeps_a ? n / panels : n % blocks, j = t.keeps_a ? n % panels : n / blocks;
        const int64_t row = i * kn->rows, col = j * PANEL_COLS;
        const int64_t tall = least(kn->rows, rows - row), wide = least(PANEL_COLS, cols - col);
        t.c = sums ? (void *)(beside + row * x.cols + col) : c_here + (row * g->c_row + col) * c_size;
        t.more = t.more_row ? beside + row * x.cols + col : NULL;
        t.ahead = ahead_of(w, next, j, i, blocks);
        if (holds) kn->run(deep_units, a_block + row * a_units, b_panels + col * deep_units, tall, wide, &t);
        else
            run_other(g, kn->other, a_at(w, p) + row * g->a_row * a_size, b_at(w, p) + col * g->b_col * b_size, tall,
                      wide, deep, t);
    }
}

/* How one pair's C is cut: `down` times `across` areas; or `pairs` of those that `shared` share A are one area, whole. */
typedef struct cut {
    const gemm *g;
    const gemm_kernel *kernel;
    int64_t down, across, rows, cols, shared, pairs;
} cut;

static void run_area(const cut *x, gemm_offsets at, area r) {
    const gemm *g = x->g;
    const gemm_kernel *kn = x->kernel;
    const int64_t a_size = (int64_t)dtype_size(gemm_type_a(g)), b_size = (int64_t)dtype_size(gemm_type_b(g));
    const int64_t c_size = (int64_t)dtype_size(gemm_type_c(g)), last = g->n_batch - 1;
    _Alignas(64) uint32_t room[MOST_ROOM], b_panels[PANEL_UNITS * PANEL_COLS];
    job w = {.g = g,
             .kn = kn,
             .r = r,
             .x = blocking_of(g, kn, r),
             .a = (const char *)g->a + (at.a + r.row * g->a_row) * a_size,
             .b = (const char *)g->b + (at.b + r.col * g->b_col) * b_size,
             .c = (char *)g->c + (at.c + r.row * g->c_row + r.col) * c_size,
             .b_step = r.pairs > 1 ? g->b_step[last] * b_size : 0,
             .c_step = r.pairs > 1 ? g->c_step[last] * c_size : 0,
             .prepacked = gemm_prepacked_for(g, kn),
             .room = room,
             .b_panels = b_panels};

    for (place p = {0}; p.top < r.rows; p = following(&w, p)) run_panels(&w, p);
}

static void run_areas(void *arg, int64_t begin, int64_t end) {
    const cut *x = arg;
    const gemm *g = x->g;

    if (x->kernel->enter) x->kernel->enter();
    for (int64_t i = begin; i < end; i++) {
        const int64_t lots = parts(x->shared, x->pairs), within = i % (x->down * x->across);
        const int64_t lot = i / (x->down * x->across), first = lot % lots * x->pairs;
        area r = {.row = within / x->across * x->rows, .col = within % x->across * x->cols};
        r.rows = least(x->rows, g->m - r.row);
        r.cols = least(x->cols, g->n - r.col);
        r.pairs = least(x->pairs, x->shared - first);
        if (r.rows > 0 && r.cols > 0) run_area(x, gemm_batch_at(g, lot / lots * x->shared + first), r);
    }
    if (x->kernel->leave) x->kernel->leave();
}

/* As many areas as there are threads, cut so that least is packed twice. */
static void cut_among(cut *x, int64_t threads) {
    const gemm *g = x->g;
    double best = -1;

    for (int64_t down = 1; down <= threads; down++) {
        int64_t across = parts(threads, down);
        double twice = (double)down / (double)g->m + (double)across / (double)g->n;
        if (best >= 0 && twice >= best) continue;
        best = twice;
        x->down = down;
        x->across = across;
    }
    x->rows = whole(parts(g->m, x->down), x->kernel->rows);
    x->cols = whole(parts(g->n, x->across), PANEL_COLS);
}

/* Pairs that share A go together, a lot for each thread, where that leaves none of them waiting for long. */
static void join_pairs(cut *x, int64_t pairs, int64_t threads) {
    const gemm *g = x->g;
    const int last = g->n_batch - 1;

    if (last < 0 || g->a_step[last] != 0) return;
    if (g->batch[last] % threads == 0 || g->batch[last] >= 4 * threads) x->shared = g->batch[last];
    x->pairs = pairs / x->shared >= 4 * threads ? x->shared : parts(x->shared, threads);
}

void gemm_packed_with(const gemm *g, const gemm_kernel *kernel) {
    cut x = {.g = g, .kernel = kernel, .down = 1, .across = 1, .rows = g->m, .cols = g->n, .shared = 1, .pairs = 1};
    const int64_t threads = parallel_threads(), pairs = gemm_pairs(g);
    int64_t work = g->m * g->n * g->k;

    join_pairs(&x, pairs, threads);
    const int64_t lots = pairs / x.shared * parts(x.shared, x.pairs);
    if (x.shared == 1 && pairs < 4 * threads && work >= WORTH_CUTTING) cut_among(&x, threads);
    work = work / (x.down * x.across) * x.pairs;
    parallel_for(lots * x.down * x.across, parallel_rows(work / 16), run_areas, &x);
}

/* --- which kernel ----------------------------------------------------------------------------------------------------- */

static struct {
    const gemm_kernel *f32, *split, *bf16; /* NULL: this CPU has none */
    const gemm_kernel *way[GEMM_WAYS];     /* of the ways that have one, where this CPU has it */
    bool library_is_narrow;                /* MKL takes its way for older CPUs on those of other makers */
} here;
static pthread_once_t once = PTHREAD_ONCE_INIT;

static void look(void) {
    __builtin_cpu_init();
    here.way[GEMM_PACKED_F32] = gemm_kernel_f32.can() ? &gemm_kernel_f32 : NULL;
    here.way[GEMM_PACKED_BF16] = gemm_kernel_bf16.can() ? &gemm_kernel_bf16 : NULL;
    here.way[GEMM_PACKED_AMX] = gemm_kernel_amx.can() ? &gemm_kernel_amx : NULL;
    here.way[GEMM_PACKED_AMX_F32] = here.split = gemm_kernel_amx_f32.can() ? &gemm_kernel_amx_f32 : NULL;
    here.f32 = here.bf16 = here.way[GEMM_PACKED_F32];
    if (here.way[GEMM_PACKED_BF16]) here.bf16 = here.way[GEMM_PACKED_BF16];
    if (here.way[GEMM_PACKED_AMX]) here.bf16 = here.way[GEMM_PACKED_AMX];
    here.library_is_narrow = __builtin_cpu_is("amd");
}

/* Splitting a float takes as long as multiplying it some fifty times: nanoseconds for each element along K, of one thread
 * of a Xeon (512 x 768 x 768: 1.3 times as fast as the library, 64 x 768 x 768: 0.8 times). */
static bool pays_to_split(const gemm *g) {
    const double tall = (double)whole(g->m, here.split->rows), wide = (double)whole(g->n, PANEL_COLS);
    const double block = 0.0071 + 0.11 / (double)g->k, element = 0.35, library = 0.0125;

    return g->type == F32 && tall * wide * block + (tall + wide) * element < (double)g->m * (double)g->n * library;
}

static const gemm_kernel *kernel_for(const gemm *g) {
    pthread_once(&once, look);
    if (here.split && pays_to_split(g)) return here.split;
    return g->type == F32 || g->type == F16 ? here.f32 : g->type == BF16 ? here.bf16 : NULL;
}

bool gemm_packed_pays(const gemm *g) {
    const gemm_kernel *kernel = kernel_for(g);

    if (!kernel) return false;
    if (g->wide_a || g->wide_b || g->wide_c) return true; /* no library takes them */
    if (g->m < 4 || g->n < 8) return false;
    if (g->type == F32) return kernel == here.split || here.library_is_narrow;
    if (kernel == &gemm_kernel_bf16) return g->k <= LONG;
    return kernel == &gemm_kernel_amx || !torch_has_narrow(g->type);
}

bool gemm_sums_wide(dtype type) { return kernel_for(&(gemm){.type = type}) != NULL; }

bool gemm_rounds(dtype type) {
    const gemm_kernel *kernel = kernel_for(&(gemm){.type = type});
    return kernel && kernel != here.f32;
}

static bool run_kernel(const gemm_kernel *kernel, gemm *g) {
    if (!kernel) return false;
    if (kernel == here.f32 && (gemm_type_a(g) != g->type || gemm_type_b(g) != g->type)) return false;
    gemm_packed_with(g, kernel);
    return true;
}

bool gemm_packed(gemm *g) { return run_kernel(kernel_for(g), g); }

bool gemm_packed_by(gemm_way way, gemm *g) {
    if (way == GEMM_PACKED_AMX_F32 ? g->type != F32 : way != GEMM_PACKED_F32 && g->type != BF16) return false;
    return kernel_for(g) && run_kernel(here.way[way], g);
}

size_t gemm_prepack_bytes(const gemm *g) {
    return g->k > 0 && g->n > 0 && gemm_packed_pays(g) ? gemm_prepack_bytes_with(g, kernel_for(g)) : 0;
}

void gemm_prepack(const gemm *g, void *to) { gemm_prepack_with(g, kernel_for(g), to); }

gemm_way gemm_packed_way(const gemm *g) {
    const gemm_kernel *kernel = kernel_for(g);
    for (int way = 0; way < GEMM_WAYS; way++)
        if (kernel && here.way[way] == kernel) return (gemm_way)way;
    return GEMM_DEFAULT;
}

#else

bool gemm_packed_pays(const gemm *g) { return (void)g, false; }
bool gemm_packed(gemm *g) { return (void)g, false; }
bool gemm_packed_by(gemm_way way, gemm *g) { return (void)way, (void)g, false; }
gemm_way gemm_packed_way(const gemm *g) { return (void)g, GEMM_DEFAULT; }
bool gemm_sums_wide(dtype type) { return (void)type, false; }
bool gemm_rounds(dtype type) { return (void)type, false; }
size_t gemm_prepack_bytes(const gemm *g) { return (void)g, 0; }
void gemm_prepack(const gemm *g, void *to) { (void)g, (void)to; }

#endif
