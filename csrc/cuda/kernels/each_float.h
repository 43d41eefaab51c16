/* each_float.h -- includes the file TEMPLATE once for each float type, for kernels; then forgets TEMPLATE.
 *
 * T is an element in memory, A what is computed with (float for the 16-bit types), GET and PUT go from T to A and back,
 * NAME(f) is f_f32, f_f64, f_bf16 or f_f16; TYPE is T among the dtypes; NARROW is there for the 16-bit types; SUM and MOST are block_sum and block_max of A,
 * ROUNDED_PRODUCT and FMA say how a product is rounded that is added to; NUMBER_AT reads an A from an element of any float type; TAKE, GIVE, READ_PIECE, WRITE_PIECE,
 * TAKE_PIECES, READ_PIECES and READ_EVEN are those of cuda/kernels/pieces.h. */
#define JOIN_NAMES(f, suffix) f##_##suffix

#define A float
#define SUM block_sum_f32
#define MOST block_max_f32
#define EXP expf
#define LOG logf
#define SQRT sqrtf
#define ROUNDED_PRODUCT times_f32
#define FMA fmaf
#define NUMBER_AT number_f32
#define TAKE take_float
#define GIVE give_float
#define READ_PIECE read_float
#define TAKE_PIECES take_pieces_float
#define READ_PIECES read_pieces_float
#define READ_EVEN read_even_float
#define ROUND_TO_BF16 round_to_bf16
#define WRITE_PIECE write_float

#define T float
#define TYPE F32
#define NAME(f) JOIN_NAMES(f, f32)
#define GET(x) (x)
#define PUT(x) (x)
#include TEMPLATE
#undef T
#undef TYPE
#undef NAME
#undef GET
#undef PUT

#define NARROW
#define T bf16
#define TYPE BF16
#define NAME(f) JOIN_NAMES(f, bf16)
#define GET(x) bf16_to_f32(x)
#define PUT(x) f32_to_bf16(x)
#include TEMPLATE
#undef T
#undef TYPE
#undef NAME
#undef GET
#undef PUT

#define T f16
#define TYPE F16
#define NAME(f) JOIN_NAMES(f, f16)
#define GET(x) f16_to_f32(x)
#define PUT(x) f32_to_f16(x)
#include TEMPLATE
#undef T
#undef TYPE
#undef NAME
#undef GET
#undef PUT
#undef NARROW
#undef A
#undef SUM
#undef MOST
#undef EXP
#undef LOG
#undef SQRT
#undef ROUNDED_PRODUCT
#undef FMA
#undef NUMBER_AT
#undef TAKE
#undef GIVE
#undef READ_PIECE
#undef TAKE_PIECES
#undef READ_PIECES
#undef READ_EVEN
#undef ROUND_TO_BF16
#undef WRITE_PIECE

#define A double
#define SUM block_sum_f64
#define MOST block_max_f64
#define EXP exp
#define LOG log
#define SQRT sqrt
#define ROUNDED_PRODUCT times_f64
#define FMA fma
#define NUMBER_AT number_f64
#define TAKE take_double
#define GIVE give_double
#define READ_PIECE read_double
#define TAKE_PIECES take_pieces_double
#define READ_PIECES read_pieces_double
#define READ_EVEN read_even_double
#define ROUND_TO_BF16(x) (void)(x)
#define WRITE_PIECE write_double

#define T double
#define TYPE F64
#define NAME(f) JOIN_NAMES(f, f64)
#define GET(x) (x)
#define PUT(x) (x)
#include TEMPLATE
#undef T
#undef TYPE
#undef NAME
#undef GET
#undef PUT

#undef A
#undef SUM
#undef MOST
#undef EXP
#undef LOG
#undef SQRT
#undef ROUNDED_PRODUCT
#undef FMA
#undef NUMBER_AT
#undef TAKE
#undef GIVE
#undef READ_PIECE
#undef TAKE_PIECES
#undef READ_PIECES
#undef READ_EVEN
#undef ROUND_TO_BF16
#undef WRITE_PIECE

#undef TEMPLATE
#undef JOIN_NAMES
