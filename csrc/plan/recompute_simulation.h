/* recompute_simulation.h -- simulates a step of training with some values made again, in bytes and cost. */
#ifndef ORT_PLAN_RECOMPUTE_SIMULATION_H
#define ORT_PLAN_RECOMPUTE_SIMULATION_H

#include "plan/recompute_choice.h"

enum { NEVER = -1 };

/* When each value is there, in half steps: at 2t + 1 step t has made its results, and at 2t it has not yet. */
typedef struct lives {
    int *born, *last; /* [value] as it is made first, and read last, by what keeps it */
    int *first;       /* [value] when backward reads it first */
    int *again_born, *again_last;
    bool *ran_again; /* [step] */
    int written;     /* the value that is being written, of problems with `beside` */
    int read_at;     /* half step at which one was read back last */
    int now;         /* steps so far, those that run again included */
    int64_t *change; /* [half steps] bytes that come and go */
    double cost;
} lives;

typedef struct chooser {
    const recompute_problem *p;
    bool *kept_for; /* [value] backward reads what forward makes */
    bool *again, *offloaded;
    int *stashes;                /* [value] options that have been taken and keep it in their place */
    int *queue, *stamp, stamped; /* steps that one value needs; stamp[step] == stamped: it is in the queue */
    int64_t looks;               /* at steps and operands that chooser_steps_for has left */
    int64_t peak;
    int at; /* half step of the peak */
} chooser;

MUST_USE status chooser_new(ctx *c, const recompute_problem *p, chooser *s, lives *l);
/* Fills `l` for what is made again now, and sets s->peak and s->at. */
void chooser_simulate(chooser *s, lives *l);
/* Nothing has run yet. */
void lives_clear(const recompute_problem *p, lives *l);
/* Is what forward has made of it there in backward? */
bool chooser_has(const chooser *s, int v);
/* Of the peak one part at least is saved, or what was not asked for is left. */
enum { WORTH_IT = 32 };

/* Is it kept, and could be made again, or offloaded, as far as it is concerned? */
bool chooser_may_drop(const chooser *s, int v);
/* So many looks for each step and operand on average. */
void chooser_allow(chooser *s, int looks);
/* The steps that run for `step` to run again, the last first: s->queue[0, count). With `l`, those that ran again already
 * are left out. Returns the count, or NEVER where one of them must not run twice, or no looks are left; *cost: of all. */
int chooser_steps_for(chooser *s, const lives *l, int step, double *cost);
/* What it has come to, after a simulation. */
void chooser_result(const chooser *s, const lives *l, recompute_choice *out);

#endif
