/* test_hostile.c -- tests that no bytes do harm: truncated, random, nested, lying about sizes, flooding; no allocation
 * fails badly. */
#include "sample.h"

#include "onnx/read.h"
#include "onnx/write.h"

#include <sys/resource.h>

static uint64_t random_state = 1;

static uint32_t random_below(uint32_t n) {
    random_state = random_state * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
    return (uint32_t)(random_state >> 33) % n;
}

/* --- hostile bytes -------------------------------------------------------------------------------------------------- */

/* Reads any bytes; a graph that comes out must be sound, and a refusal must have a sentence. */
static status try_bytes(const blob *b) {
    graph *g = NULL;
    ctx c;
    status s = read_blob(&c, b, &g);

    if (s == OK) CHECK_OK(&c, graph_verify(g));
    else CHECK(g == NULL && c.err.text[0] && (s == E_INVALID || s == E_UNSUPPORTED || s == E_NOMEM));
    ctx_release(&c);
    return s;
}

TEST(truncated_anywhere) {
    blob file = make_sample_file();
    size_t n = file.n;
    int readable = 0;

    for (file.n = 0; file.n < n; file.n++) readable += try_bytes(&file) == OK;
    CHECK(readable <= 1); /* without our own opset, the last field */
    CHECK(try_bytes(&file) == OK);
    blob_free(&file);
}

TEST(random_bytes) {
    for (int round = 0; round < 20000; round++) {
        unsigned char bytes[64];
        blob b = {.at = bytes, .n = random_below(sizeof bytes)};
        for (size_t i = 0; i < b.n; i++) bytes[i] = (unsigned char)random_below(256);
        try_bytes(&b);
    }
}

static void mutate(blob *b) {
    size_t at = random_below((uint32_t)b->n), length = random_below(16), left = b->n - at;

    if (length > left) length = left;
    switch (random_below(5)) {
    case 0: b->at[at] = (unsigned char)random_below(256); break;
    case 1: b->at[at] ^= (unsigned char)(1u << random_below(8)); break;
    case 2:
        memmove(b->at + at, b->at + at + length, left - length);
        b->n -= length;
        break;
    case 3: memmove(b->at + at, b->at + random_below((uint32_t)(b->n - length)), length); break;
    default: memset(b->at + at, 0xff, length); break;
    }
}

TEST(random_mutations) {
    blob file = make_sample_file();

    for (int round = 0; round < 20000; round++) {
        blob b = {0};
        put_raw(&b, file.at, file.n);
        for (uint32_t n = 1 + random_below(4); n && b.n; n--) mutate(&b);
        try_bytes(&b);
        blob_free(&b);
    }
    blob_free(&file);
}

/* `levels` messages of field number `field` within one another. The inside is built first, from the back. */
static blob nested(int levels, const int *fields, int n_fields) {
    blob b = {0};
    for (int i = 0; i < levels; i++) {
        blob outer = {0};
        put_message(&outer, fields[i % n_fields], &b);
        b = outer;
    }
    return b;
}

TEST(deep_nesting) {
    static const int subgraphs[] = {ATTRIBUTE_G, NODE_ATTRIBUTE, GRAPH_NODE}, sequences[] = {1, 4},
                     one[] = {MODEL_GRAPH};
    model m = tiny_model();
    blob file = {0}, inner = nested(4998, subgraphs, 3), info = {0};

    put_message(&file, MODEL_GRAPH, &inner);
    REFUSED(E_INVALID, "more than 64 deep", file);
    put_text(&info, 1, "x");
    inner = nested(5000, sequences, 2);
    put_message(&info, 2, &inner);
    put_message(&m.graph, GRAPH_INPUT, &info);
    REFUSED(E_INVALID, "more than 64 deep", finish(&m));
    file = nested(5000, one, 1); /* field 7 of a graph is unknown: bytes */
    CHECK(try_bytes(&file) == E_INVALID);
    blob_free(&file);
}

TEST(lengths_that_lie) {
    static const uint64_t lengths[] = {2, 127, 65536, INT32_MAX, UINT32_MAX, INT64_MAX, UINT64_MAX};

    for (size_t i = 0; i < sizeof lengths / sizeof *lengths; i++)
        for (int field = 1; field < 30; field++) {
            blob b = {0};
            put_varint(&b, (uint64_t)field << 3 | 2);
            put_varint(&b, lengths[i]);
            put_raw(&b, "\0", 1);
            CHECK(try_bytes(&b) == E_INVALID);
            blob_free(&b);
        }
}

TEST(numbers_that_never_end) {
    blob b = {0};
    put_raw(&b, "\x08\xff\xff\xff\xff\xff\xff\xff\xff\xff\x7f", 11);
    REFUSED(E_INVALID, "more than 64 bits", b);
    b = (blob){0};
    put_raw(&b, "\x08\x80\x80\x80\x80\x80\x80\x80\x80\x80\x80\x01", 12);
    REFUSED(E_INVALID, "more than 64 bits", b);
    b = (blob){0};
    put_raw(&b, "\x08\x80", 2);
    REFUSED(E_INVALID, "end inside a number", b);
    b = (blob){0};
    put_raw(&b, "\x0b\x0c", 2);
    REFUSED(E_INVALID, "wrong kind", b);
    b = (blob){0};
    put_raw(&b, "\x83\x06\x84\x06", 4);
    REFUSED(E_INVALID, "unknown wire type", b);
    b = (blob){0};
    put_raw(&b, "\0\0", 2);
    REFUSED(E_INVALID, "valid number", b);
}

TEST(names_that_are_no_text) {
    static const char *const bad[] = {"\xff", "a\x80", "\xc0\x80", "\xed\xa0\x80", "\xf4\x90\x80\x80", "\xe2\x82"};
    model m;
    blob info = {0};

    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        m = tiny_model();
        add_output(&m, bad[i]);
        REFUSED(E_INVALID, "not UTF-8", finish(&m));
    }
    m = tiny_model();
    put_bytes(&info, 1, "a\0b", 3);
    put_message(&m.graph, GRAPH_INPUT, &info);
    REFUSED(E_INVALID, "not UTF-8", finish(&m));
    m = tiny_model();
    add_input(&m, "\xc3\xa9t\xc3\xa9 \xe2\x82\xac \xf0\x9f\x99\x82");
    info = finish(&m);
    CHECK(try_bytes(&info) == OK);
    blob_free(&info);
}

/* Kilobytes of memory at most so far. */
static long peak_memory(void) {
    struct rusage usage;
    getrusage(RUSAGE_SELF, &usage);
    return usage.ru_maxrss;
}

static void check_flood(const char *unit, size_t n, int outer) {
    enum { BYTES = 21 << 20, ALLOWED = 256 << 10 };
    blob b = {0}, file = {0};
    long before;

    for (size_t i = 0; i + n <= BYTES; i += n) put_raw(&b, unit, n);
    if (outer) put_message(&file, outer, &b);
    else file = b;
    put_int(&file, 1, 8);
    before = peak_memory();
    CHECK(try_bytes(&file) == E_INVALID);
    CHECK(peak_memory() - before < ALLOWED);
    blob_free(&file);
}

TEST(floods_of_fields) {
    check_flood("\x9a\x06\x00", 3, 0); /* unknown, empty */
    check_flood("\x98\x06\x01", 3, 0); /* unknown numbers */
    check_flood("\x9a\x06\x0c"
                "abcdefghijkl",
                15, 0);
    check_flood("\x08\x08", 2, 0);           /* one that may come once */
    check_flood("\x0a\x00", 2, MODEL_GRAPH); /* nodes without anything */
    check_flood("\x0a\x02\x0a\x00", 4, MODEL_GRAPH);
    check_flood("\x5a\x00", 2, MODEL_GRAPH); /* inputs */
}

/* --- memory ---------------------------------------------------------------------------------------------------------- */

TEST(every_failed_allocation_of_reading) {
    blob file = make_sample_file();
    status s = E_NOMEM;
    int64_t after;

    for (after = 0; s == E_NOMEM && after < 100000; after++) {
        graph *g = NULL;
        ctx c;
        ctx_init(&c);
        c.mem.fail_after = after;
        s = onnx_read(&c, file.at, file.n, &g);
        CHECK(s == OK ? g != NULL : s == E_NOMEM && strstr(c.err.text, "out of memory") && c.mem.fail_after == 0);
        ctx_release(&c);
    }
    CHECK(s == OK && after > 300);
    blob_free(&file);
}

TEST(every_failed_allocation_of_writing) {
    status s = E_NOMEM;
    graph *g;
    ctx c, w;

    ctx_init(&c);
    g = make_sample(&c);
    for (int64_t after = 0; s == E_NOMEM && after < 100000; after++) {
        const void *bytes;
        size_t n;
        ctx_init(&w);
        w.mem.fail_after = after;
        s = onnx_write(&w, g, &bytes, &n);
        CHECK(s == OK || (s == E_NOMEM && w.mem.fail_after == 0));
        ctx_release(&w);
    }
    CHECK(s == OK);
    ctx_release(&c);
}
