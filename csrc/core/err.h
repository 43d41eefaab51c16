/* err.h -- defines must-use status codes; the sentence that goes with one is kept in the context. */
#ifndef ORT_CORE_ERR_H
#define ORT_CORE_ERR_H

typedef enum status {
    OK = 0,
    E_NOMEM,       /* an allocation failed, or a size does not fit in 63 bits */
    E_INVALID,     /* the model, or an argument, is malformed */
    E_SHAPE,       /* shapes that do not go together */
    E_TYPE,        /* element types that do not go together */
    E_UNSUPPORTED, /* well-formed, but nothing here computes it: the caller may let PyTorch do it */
    E_RUNTIME,     /* found while running: an index out of range, a library call that failed */
    E_PENDING,     /* a size that only running can tell is needed first: graph.pending is the value that holds it */
    E_DATA,        /* an operand has to be numbers, and is computed from data: graph.asked is that operand */
    E_FOREIGN,     /* a callback failed and has already set its own exception */
} status;

#define MUST_USE __attribute__((warn_unused_result))

enum { ERR_TEXT = 2048 };

typedef struct err {
    status code;
    char text[ERR_TEXT]; /* NUL-terminated; truncated, never overrun */
} err;

struct ctx;

/* Writes the sentence and returns `code`: `return fail(c, E_SHAPE, "...")`. Overwrites an older one. */
MUST_USE status fail(struct ctx *c, status code, const char *format, ...) __attribute__((format(printf, 3, 4)));
/* Appends "\n  while <text>" to the sentence of `code` and returns `code`. */
MUST_USE status blame(struct ctx *c, status code, const char *format, ...) __attribute__((format(printf, 3, 4)));

#define TRY(expr)                                                                                                      \
    do {                                                                                                               \
        status try_status_ = (expr);                                                                                   \
        if (try_status_ != OK) return try_status_;                                                                     \
    } while (0)

#define TRY_AT(c, expr, ...)                                                                                           \
    do {                                                                                                               \
        status try_status_ = (expr);                                                                                   \
        if (try_status_ != OK) return blame((c), try_status_, __VA_ARGS__);                                            \
    } while (0)

#endif
