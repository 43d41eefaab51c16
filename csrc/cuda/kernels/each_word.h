/* each_word.h -- includes the file TEMPLATE once for words of 1, 2, 4 and 8 bytes; then forgets TEMPLATE.
 *
 * For kernels that move elements of any type. W is a word, NAME(f) is f_1, f_2, f_4 or f_8. */
#define JOIN_NAMES(f, suffix) f##_##suffix

#define W uint8_t
#define NAME(f) JOIN_NAMES(f, 1)
#include TEMPLATE
#undef W
#undef NAME

#define W uint16_t
#define NAME(f) JOIN_NAMES(f, 2)
#include TEMPLATE
#undef W
#undef NAME

#define W uint32_t
#define NAME(f) JOIN_NAMES(f, 4)
#include TEMPLATE
#undef W
#undef NAME

#define W uint64_t
#define NAME(f) JOIN_NAMES(f, 8)
#include TEMPLATE
#undef W
#undef NAME

#undef TEMPLATE
#undef JOIN_NAMES
