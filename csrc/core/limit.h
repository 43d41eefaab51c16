/* limit.h -- says how much memory a process may use: of the machine, its control groups, and addresses (RLIMIT_AS).
 *
 * The system promises memory that it does not have, and a control group (a container) has less than the machine says. */
#ifndef ORT_CORE_LIMIT_H
#define ORT_CORE_LIMIT_H

#include <stdbool.h>
#include <stddef.h>

typedef struct memory_limits {
    size_t most; /* bytes that this process may ever use: RAM and swap, or the least of its limits */
    size_t room; /* bytes that it may use besides those that are in use now; what the kernel can drop counts as free */
} memory_limits;

/* As /proc, the control groups, version 1 and 2, and getrlimit say now. What cannot be read limits nothing. */
memory_limits memory_limits_now(void);
/* Is there a limit of addresses, so that one that is reserved is one less? */
bool memory_addresses_limited(void);
/* May so many bytes more be taken? Reads anew only when much has been taken since. Safe from any thread. */
bool memory_fits(size_t bytes);
/* The same of a question: nothing is taken. */
bool memory_would_be_free(size_t bytes);

/* Tests: files are read from this folder instead of "/"; NULL: from "/" again. While no other thread asks. */
void memory_limits_from(const char *root);

#endif
