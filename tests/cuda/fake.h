/* fake.h -- declares what the fake libraries share; the driver of fake_driver.c has it. */
#ifndef ORT_TEST_FAKE_H
#define ORT_TEST_FAKE_H

#define EXPORT __attribute__((visibility("default")))

/* For tests. */
EXPORT void fake_fail_at(int n);
EXPORT int fake_calls(void);
EXPORT void fake_write_after(int launches, unsigned char *at);
EXPORT int fake_held(void);
EXPORT int fake_graphs(void);
EXPORT const char *fake_complaint(void);
EXPORT void fake_captured_by_others(int on);

/* For other libraries: counts a call, 0 when it is to fail; writes the first thing down that was wrong; counts what is
 * held; whether the device's context is current. */
EXPORT int fake_enter(void);
EXPORT void fake_complain(const char *what);
EXPORT void fake_hold(int more);
EXPORT int fake_in_context(void);

/* Work that a stream was given: run now, or, where what the thread starts there is being captured, kept with a copy of
 * the bytes at `data` for whenever the graph is started. The work returns 0, or what the call is to return. */
typedef int fake_work(const void *data);
EXPORT int fake_give(void *stream, fake_work *run, const void *data, unsigned long bytes);
/* How often a stream was given work that ran: kernels, graphs. */
EXPORT int fake_given(void);
/* What the device has done takes so long; events tell. */
EXPORT void fake_spend(double milliseconds);
/* What this thread captures is of no use any more: a kernel did not start. */
EXPORT void fake_poison(void);
/* Whether this thread is capturing, when it may not wait and not allocate. */
EXPORT int fake_capturing(void);
/* Whether it is the engine's caller who captures. */
EXPORT int fake_user_captures(void);

/* Copies on streams beside the default one: gives one to such a stream; how many were given; makes the first `count`. */
EXPORT int fake_copy_beside(void *stream, void *to, const void *from, unsigned long bytes);
EXPORT int fake_beside(void);
EXPORT void fake_make_beside(int count);
/* Whether it is a stream that was made. */
EXPORT int fake_is_stream(const void *stream);

#endif
