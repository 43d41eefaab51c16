"""Many threads report a fault at once, and the host takes reports meanwhile: each is one thread's, and whole.

The emulated GPU runs one thread after the other. So here the function by which kernels report and the one by which the
host takes are compiled into a program whose threads are the machine's.
"""

import subprocess

from tests.cuda.nvidia import ROOT

PROGRAM = """
#include <pthread.h>
#include <sched.h>
#define __threadfence_system() (__sync_synchronize(), sched_yield())
#include "cuda/host/fault_page.h"
#include "cuda/kernels/kernel.h"
#include <stdio.h>
#include <time.h>

enum { REPORTERS = 3, TAKERS = 2, WANTED = 5000, SECONDS = 60 };
static cuda_fault page;
static int taken, mixed;

static int goes_on(void) {
    static time_t end;
    sched_yield();
    if (!end) end = time(NULL) + SECONDS;
    return __atomic_load_n(&taken, __ATOMIC_RELAXED) < WANTED && time(NULL) < end;
}

static void *report_many(void *arg) {
    for (int64_t x = *(int *)arg; goes_on();)
        for (int i = 0; i < 50; i++, x += REPORTERS) report(&page, 1 + (int)(x % 7), (int)x, x, ~x);
    return NULL;
}

static void *take_all(void *arg) {
    cuda_fault f;
    (void)arg;
    while (goes_on())
        for (int i = 0; i < 50; i++)
            if (fault_take(&page, &f)) {
                __atomic_add_fetch(&taken, 1, __ATOMIC_RELAXED);
                if (f.limit != ~f.value || f.node != (int)f.value || f.kind != 1 + f.value % 7)
                    __atomic_add_fetch(&mixed, 1, __ATOMIC_RELAXED);
            }
    return NULL;
}

int main(void) {
    pthread_t threads[REPORTERS + TAKERS];
    int names[REPORTERS + TAKERS];
    cuda_fault f;

    for (int i = 0; i < REPORTERS + TAKERS; i++) {
        names[i] = i;
        if (pthread_create(&threads[i], NULL, i < REPORTERS ? report_many : take_all, &names[i])) return 1;
    }
    for (int i = 0; i < REPORTERS + TAKERS; i++) pthread_join(threads[i], NULL);
    fault_take(&page, &f);
    report(&page, FAULT_LABEL, 5, 6, 7);
    const int works = fault_take(&page, &f) && f.kind == FAULT_LABEL && f.node == 5 && f.value == 6 && f.limit == 7;
    printf("%d %d %d %d", taken, mixed, works, fault_take(&page, &f));
    return 0;
}
"""


def test_reports_of_many_threads_are_not_mixed(tmp_path):
    (tmp_path / "reports.c").write_text(PROGRAM)
    command = ["gcc", "-std=gnu11", "-O2", "-w", "-pthread", "-DORT_DEVICE", f"-I{ROOT / 'csrc'}"]
    command += [f"-I{ROOT / 'tests/cuda'}", tmp_path / "reports.c", ROOT / "csrc/cuda/host/fault_page.c", "-lm"]
    subprocess.run([*command, "-o", tmp_path / "reports"], check=True)
    said = subprocess.run([tmp_path / "reports"], capture_output=True, text=True, check=True, timeout=300).stdout
    taken, mixed, works, again = map(int, said.split())
    assert mixed == 0
    assert taken >= 5000, "the page belongs to a report that is not there"
    assert works and not again, "what is reported when all has been taken is taken, once"
