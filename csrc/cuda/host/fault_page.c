/* fault_page.c -- reads a report and gives its page back, in an order that mixes no two reports. */
#include "cuda/host/fault_page.h"

#include <pthread.h>

/* A page that a thread has claimed is that thread's until its kind is there, then the host's until the claim is gone: so
 * the claim goes last. */
static bool take(cuda_fault *page, cuda_fault *out) {
    const int32_t kind = __atomic_load_n(&page->kind, __ATOMIC_ACQUIRE);

    if (kind == FAULT_NONE) return false;
    *out = (cuda_fault){.kind = kind, .node = page->node, .value = page->value, .limit = page->limit};
    __atomic_store_n(&page->kind, FAULT_NONE, __ATOMIC_RELAXED);
    __atomic_store_n(&page->claimed, 0, __ATOMIC_RELEASE);
    return true;
}

bool fault_take(cuda_fault *page, cuda_fault *out) {
    static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

    if (__atomic_load_n(&page->kind, __ATOMIC_RELAXED) == FAULT_NONE) return false;
    (void)pthread_mutex_lock(&lock);
    const bool found = take(page, out);
    (void)pthread_mutex_unlock(&lock);
    return found;
}
