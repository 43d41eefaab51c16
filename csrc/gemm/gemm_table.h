/* gemm_table.h -- says which way products go where measuring, or the user, has said so; gemm.c asks it first.
 *
 * Products are told apart by class: types, which operands are transposed, sizes rounded up to powers of two, threads.
 * One table for the process, safe from any thread; an entry is never removed, only replaced. */
#ifndef ORT_EXEC_GEMM_TABLE_H
#define ORT_EXEC_GEMM_TABLE_H

#include "gemm/gemm_ways.h"

typedef uint64_t gemm_class; /* never 0 */

/* Of a product as gemm_simplify leaves it, none of whose sizes is 0, run from this thread. */
gemm_class gemm_class_of(const gemm *g);

/* "bfloat16 NT 1024x768x256 pairs 1 threads 2": types, operands ('N', 'T': stored by columns, '-': neither), m x n x k.
 * What is wide follows the type: "bfloat16+a+c". */
enum { GEMM_CLASS_TEXT = 160 };
const char *gemm_class_text(gemm_class c, char text[GEMM_CLASS_TEXT]); /* returns `text` */
bool gemm_class_parse(const char *text, gemm_class *out);              /* false: it is no such text */

/* GEMM_DEFAULT where nothing has been said. */
gemm_way gemm_table_get(gemm_class c);
/* False when the table is full. */
bool gemm_table_set(gemm_class c, gemm_way way);
/* Whether nothing has been set yet. */
bool gemm_table_empty(void);
/* All entries become GEMM_DEFAULT. */
void gemm_table_clear(void);

/* How many products went a way because the table says so. */
void gemm_table_used(gemm_way way);
int64_t gemm_table_uses(gemm_way way);

#endif
