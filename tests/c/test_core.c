/* test_core.c -- tests errors, the arena, element types and shapes. */
#include "core/dtype.h"
#include "core/half.h"
#include "core/shape.h"
#include "core/vmath.h"

#include "test.h"

#include <math.h>
#include <string.h>

/* --- errors ------------------------------------------------------------------------------------------------------- */

static status inner(ctx *c) { return fail(c, E_SHAPE, "axis %d is missing", 3); }

static status outer(ctx *c) {
    TRY_AT(c, inner(c), "looking at %s", "x");
    return OK;
}

TEST(an_error_tells_what_and_where) {
    ctx c;

    ctx_init(&c);
    CHECK(outer(&c) == E_SHAPE);
    CHECK(c.err.code == E_SHAPE);
    CHECK(strcmp(c.err.text, "axis 3 is missing\n  while looking at x") == 0);
    CHECK(fail(&c, E_TYPE, "new") == E_TYPE);
    CHECK(strcmp(c.err.text, "new") == 0);
    ctx_release(&c);
}

TEST(a_long_error_is_cut) {
    char long_text[3 * ERR_TEXT];
    ctx c;

    ctx_init(&c);
    memset(long_text, 'x', sizeof long_text - 1);
    long_text[sizeof long_text - 1] = 0;
    CHECK(fail(&c, E_INVALID, "%s", long_text) == E_INVALID);
    CHECK(strlen(c.err.text) == ERR_TEXT - 1);
    CHECK(blame(&c, E_INVALID, "%s", long_text) == E_INVALID);
    CHECK(strlen(c.err.text) == ERR_TEXT - 1);

    CHECK(fail(&c, E_INVALID, "%.*s", ERR_TEXT - 4, long_text) == E_INVALID);
    for (int i = 0; i < 3; i++) CHECK(blame(&c, E_INVALID, "%s", "more") == E_INVALID);
    CHECK(strlen(c.err.text) < ERR_TEXT);
    ctx_release(&c);
}

/* --- arena -------------------------------------------------------------------------------------------------------- */

TEST(the_arena_gives_zeroed_aligned_memory) {
    ctx c;

    ctx_init(&c);
    for (size_t bytes = 0; bytes < 300000; bytes = bytes * 3 + 1) {
        unsigned char *p = arena_array(&c, bytes, 1);
        int sum = 0;
        CHECK(p != NULL && (uintptr_t)p % (bytes < 64 ? 16 : 64) == 0);
        for (size_t i = 0; i < bytes; i++) sum |= p[i];
        CHECK(sum == 0);
        memset(p, 0xff, bytes);
    }
    ctx_release(&c);
    ctx_release(&c);
}

/* A node's lists have some bytes each. */
TEST(small_things_lie_close_together) {
    enum { COUNT = 1000, BYTES = 24 };
    ctx c;

    ctx_init(&c);
    for (int i = 0; i < COUNT; i++) {
        char *small = arena_array(&c, BYTES, 1), *large = i % 100 ? NULL : arena_array(&c, 64, 1);
        CHECK(small != NULL && (!large || (uintptr_t)large % 64 == 0));
        memset(small, 1, BYTES);
    }
#ifndef ORT_SANITIZE
    CHECK(c.mem.total <= 64 * 1024);
#endif
    ctx_release(&c);
}

TEST(a_size_that_overflows_is_out_of_memory) {
    ctx c;

    ctx_init(&c);
    CHECK(arena_array(&c, SIZE_MAX / 2, 4) == NULL);
    CHECK(c.err.code == E_NOMEM);
    CHECK(arena_array(&c, SIZE_MAX - 1, 1) == NULL);
    ctx_release(&c);
}

TEST(allocations_fail_when_told_to) {
    int *p;
    ctx c;

    ctx_init(&c);
    c.mem.fail_after = 2;
    CHECK(NEW(&c, p, 4) == OK);
    CHECK(arena_text(&c, "name", 4) != NULL);
    CHECK(NEW(&c, p, 4) == E_NOMEM);
    CHECK(arena_text(&c, "name", 4) == NULL);
    ctx_release(&c);
}

TEST(a_text_is_copied_and_ended) {
    ctx c;
    char *t;

    ctx_init(&c);
    t = arena_text(&c, "abcdef", 3);
    CHECK(t && strcmp(t, "abc") == 0);
    t = arena_text(&c, "", 0);
    CHECK(t && t[0] == 0);
    ctx_release(&c);
}

/* --- element types ------------------------------------------------------------------------------------------------ */

TEST(every_type_is_found_by_its_numbers) {
    for (int t = F32; t < DTYPE_COUNT; t++) {
        const dtype_info *info = &dtype_table[t];
        CHECK(info->name && info->size > 0);
        CHECK(dtype_from_onnx(info->onnx) == (dtype)t);
        CHECK(dtype_from_dlpack(info->dlpack_code, info->dlpack_bits) == (dtype)t);
        CHECK(!!(SET(t) & FLOATS) == info->is_float && !!(SET(t) & INTEGERS) == info->is_int);
    }
    CHECK(dtype_from_onnx(0) == DT_NONE);
    CHECK(dtype_from_onnx(99) == DT_NONE);
    CHECK(dtype_from_dlpack(2, 128) == DT_NONE);
}

TEST(small_integers_survive_every_type) {
    for (int t = F32; t < DTYPE_COUNT; t++)
        for (int64_t x = 0; x <= (t == BOOL ? 1 : 100); x++) {
            int64_t two[2] = {0};
            dtype_set_int((dtype)t, two, 1, x);
            CHECK(dtype_get_int((dtype)t, two, 1) == x && dtype_get_int((dtype)t, two, 0) == 0);
            dtype_set_value((dtype)t, two, 1, (double)x);
            CHECK(dtype_get((dtype)t, two, 1) == (double)x && dtype_get((dtype)t, two, 0) == 0);
        }
}

TEST(large_integers_are_exact) {
    int64_t x = INT64_C(9007199254740993), out = 0; /* 2^53 + 1 is no double */
    dtype_set_int(I64, &out, 0, x);
    CHECK(out == x && dtype_get_int(I64, &out, 0) == x);
}

TEST(bfloat16_rounds_to_the_nearest_even) {
    CHECK(f32_to_bf16(1.0f) == 0x3f80);
    CHECK(f32_to_bf16(1.00390625f) == 0x3f80); /* half way: down to the even one */
    CHECK(f32_to_bf16(1.01171875f) == 0x3f82); /* half way: up to the even one */
    CHECK(f32_to_bf16(1.00390637f) == 0x3f81); /* a little more than half way */
    CHECK(f32_to_bf16(-1.01171875f) == 0xbf82);
    CHECK(f32_to_bf16(3.4028234e38f) == 0x7f80); /* overflows to infinity */
    CHECK(f32_to_bf16(0.0f) == 0 && f32_to_bf16(-0.0f) == 0x8000);
    CHECK(f32_to_bf16(INFINITY) == 0x7f80 && f32_to_bf16(-INFINITY) == 0xff80);
}

TEST(every_bfloat16_survives_float32) {
    for (unsigned u = 0; u < 0x10000; u++) {
        float x = bf16_to_f32((bf16)u);
        if (isnan(x)) CHECK(isnan(bf16_to_f32(f32_to_bf16(x))));
        else CHECK(f32_to_bf16(x) == u);
    }
}

TEST(a_nan_stays_a_nan) {
    /* The only payload bit is among those that are cut off. */
    CHECK(isnan(bf16_to_f32(f32_to_bf16(f32_of_bits(0x7f800001u)))));
    CHECK(isnan(bf16_to_f32(f32_to_bf16(f32_of_bits(0xffffffffu)))));
    for (int t = F32; t <= F16; t++) {
        int64_t one = 0;
        dtype_set_value((dtype)t, &one, 0, NAN);
        CHECK(isnan(dtype_get((dtype)t, &one, 0)));
    }
}

/* --- shapes ------------------------------------------------------------------------------------------------------- */

TEST(shapes_as_text) {
    char text[SHAPE_TEXT];
    shape wide = {.rank = MAX_RANK}, unknown = {.rank = -1};

    CHECK(strcmp(shape_text(&SHAPE(2, 3), text), "[2, 3]") == 0);
    CHECK(strcmp(shape_text(&SCALAR, text), "[]") == 0);
    CHECK(strcmp(shape_text(&unknown, text), "[?]") == 0);
    for (int i = 0; i < MAX_RANK; i++) wide.dim[i] = INT64_MIN;
    CHECK(strlen(shape_text(&wide, text)) < SHAPE_TEXT);
}

TEST(shapes_broadcast_as_in_numpy) {
    shape out;
    ctx c;

    ctx_init(&c);
    CHECK_OK(&c, shape_broadcast(&c, &SHAPE(2, 1, 3), &SHAPE(4, 1), &out));
    CHECK(shape_equal(&out, &SHAPE(2, 4, 3)));
    CHECK_OK(&c, shape_broadcast(&c, &SCALAR, &SHAPE(0, 2), &out));
    CHECK(shape_equal(&out, &SHAPE(0, 2)));
    CHECK_OK(&c, shape_broadcast(&c, &SHAPE(0, 1), &SHAPE(1, 5), &out));
    CHECK(shape_equal(&out, &SHAPE(0, 5)));
    out = SHAPE(1, 3);
    CHECK_OK(&c, shape_broadcast(&c, &out, &SHAPE(2, 1), &out));
    CHECK(shape_equal(&out, &SHAPE(2, 3)));
    ctx_release(&c);
}

TEST(shapes_that_do_not_broadcast_are_named) {
    shape out;
    ctx c;

    ctx_init(&c);
    CHECK(shape_broadcast(&c, &SHAPE(2, 3), &SHAPE(2, 4), &out) == E_SHAPE);
    CHECK(strstr(c.err.text, "[2, 3]") && strstr(c.err.text, "[2, 4]") && strstr(c.err.text, "axis -1 is 3"));
    CHECK(shape_broadcast(&c, &SHAPE(0), &SHAPE(2), &out) == E_SHAPE);
    ctx_release(&c);
}

TEST(sizes_are_checked) {
    shape deep = {.rank = MAX_RANK + 1};
    ctx c;

    ctx_init(&c);
    CHECK_OK(&c, shape_check(&c, &SCALAR));
    CHECK_OK(&c, shape_check(&c, &SHAPE(0, INT64_C(1) << 40)));
    CHECK(shape_check(&c, &SHAPE(-1)) == E_SHAPE);
    CHECK(shape_check(&c, &deep) == E_UNSUPPORTED);
    CHECK(shape_check(&c, &SHAPE(INT64_C(1) << 40, INT64_C(1) << 40)) == E_NOMEM);
    CHECK(shape_check(&c, &SHAPE(INT64_C(1) << 48)) == E_NOMEM);
    ctx_release(&c);
}

/* All float16 numbers, then floats on both sides of every rounding boundary: as one by one, whatever the CPU has. */
TEST(many_halves_convert_as_single_ones) {
    static uint16_t half[65536], back[65536];
    static float wide[65536], rounded[65536];

    for (int i = 0; i < 65536; i++) half[i] = (uint16_t)i;
    f16_widen(half, 65536, wide);
    for (int i = 0; i < 65536; i++) {
        const float one = f16_bits_to_f32(half[i]);
        CHECK(isnan(one) ? isnan(wide[i]) : bits_of_f32(one) == bits_of_f32(wide[i]));
    }
    for (uint32_t low = 0xfffu; low <= 0x1001u; low++) {
        for (uint32_t i = 0; i < 65536; i++)
            rounded[i] = wide[i] = f32_of_bits(bits_of_f32(f16_bits_to_f32((uint16_t)i)) + low);
        f16_narrow(wide, 65533, back); /* no whole number of vectors */
        f16_round(rounded, 65533);
        for (int i = 0; i < 65533; i++) {
            const uint16_t one = f32_to_f16_bits(wide[i]);
            if (isnan(wide[i])) CHECK(isnan(f16_bits_to_f32(back[i])) && isnan(rounded[i]));
            else CHECK(one == back[i] && bits_of_f32(f16_bits_to_f32(one)) == bits_of_f32(rounded[i]));
        }
    }
}

TEST(axes_count_from_either_end) {
    int axis;
    ctx c;

    ctx_init(&c);
    CHECK(shape_axis(&c, -1, 3, &axis) == OK && axis == 2);
    CHECK(shape_axis(&c, 0, 3, &axis) == OK && axis == 0);
    CHECK(shape_axis(&c, -1, 0, &axis) == OK && axis == 0);
    CHECK(shape_axis(&c, 3, 3, &axis) == E_SHAPE);
    CHECK(strstr(c.err.text, "axis 3 is out of range for a tensor of rank 3"));
    CHECK(shape_axis(&c, -4, 3, &axis) == E_SHAPE);
    ctx_release(&c);
}

TEST(strides_say_what_is_contiguous) {
    tensor t = {.type = F32, .shape = SHAPE(2, 3, 4)}, wide;

    stride_contiguous(&t.shape, t.stride);
    CHECK(t.stride[0] == 12 && t.stride[1] == 4 && t.stride[2] == 1);
    CHECK(tensor_contiguous(&t));
    t.stride[1] = 8;
    CHECK(!tensor_contiguous(&t));

    t = (tensor){.type = F32, .shape = SHAPE(1, 3), .stride = {77, 1}}; /* the stride of one element means nothing */
    CHECK(tensor_contiguous(&t));
    wide = tensor_expand(&t, &SHAPE(5, 2, 3));
    CHECK(wide.stride[0] == 0 && wide.stride[1] == 0 && wide.stride[2] == 1 && !tensor_contiguous(&wide));
    t = (tensor){.type = F32, .shape = SHAPE(0, 3), .stride = {9, 9}};
    CHECK(tensor_contiguous(&t));
}
