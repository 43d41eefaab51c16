/* test_gradient.c -- compares a Transformer layer's gradients with differences of its loss, all of it without Python.
 * */
#include "machine.h"
#include "network.h"
#include "test.h"

#include <math.h>

/* The first word sees nothing, the others what precedes them. */
static void fill_inputs(machine *m) {
    static const bool seen[TIME * TIME] = {0, 0, 0, 1, 1, 0, 1, 1, 1};

    memcpy(m->memory[AT_INPUT][SEEN], seen, sizeof seen);
    for (int i = TABLE; i < INPUTS; i++) machine_fill(m, i, (unsigned)i, -1, 1);
    for (int i = 0; i < TOKENS; i++) {
        ((int64_t *)m->memory[AT_INPUT][IDS])[i] = i * 3 % WORDS;
        ((int64_t *)m->memory[AT_INPUT][LABELS])[i] = i * 5 % WORDS;
    }
}

static double loss_of(machine *m) {
    CHECK_OK(&m->c, machine_forward(m));
    return *(double *)m->memory[AT_OUTPUT][0];
}

/* The slope of the loss along one element of an input. */
static double slope(machine *m, int input, int64_t element) {
    const double step = 1e-5;
    double *x = (double *)m->memory[AT_INPUT][input] + element, before = *x, up, down;

    *x = before + step;
    up = loss_of(m);
    *x = before - step;
    down = loss_of(m);
    *x = before;
    return (up - down) / (2 * step);
}

/* The largest difference between the gradient of an input and its slopes. */
static double worst_difference(machine *m, int input) {
    const double *dx = m->memory[AT_INPUT_GRAD][input];
    double worst = 0;

    for (int64_t k = 0; k < shape_count(&network_inputs[input].shape); k++)
        worst = fmax(worst, fabs(dx[k] - slope(m, input, k)));
    return worst;
}

/* Returns how many of the passes changed the graph. */
static int check_gradients(uint64_t disabled_passes) {
    const compile_options o = {.output_grads = (bool[]){true, false}, .disabled_passes = disabled_passes};
    int fired = 0;
    machine m;
    graph *model;
    ctx c;

    ctx_init(&c);
    CHECK_OK(&c, network_make(&c, &model));
    if (CHECK_OK(&m.c, machine_make(&m, model, network_inputs, &o))) {
        fill_inputs(&m);
        *(double *)m.memory[AT_OUTPUT_GRAD][0] = 1;
        loss_of(&m);
        CHECK_OK(&m.c, machine_backward(&m));
        for (int i = 0; i < INPUTS; i++) {
            CHECK((m.memory[AT_INPUT_GRAD][i] != NULL) == network_inputs[i].needs_grad);
            if (network_inputs[i].needs_grad) CHECK(worst_difference(&m, i) < 1e-8);
        }
        for (int i = 0; passes[i]; i++) fired += m.p->fired[i] > 0;
    }
    machine_free(&m);
    ctx_release(&c);
    return fired;
}

TEST(gradients_are_slopes) { CHECK(check_gradients(0) == 8); }
TEST(gradients_are_slopes_without_passes) { CHECK(check_gradients(UINT64_MAX) == 0); }
TEST(gradients_are_slopes_in_graphs_as_they_are_written) { CHECK(check_gradients(pass_bit("clean_up")) > 0); }

TEST(inference_needs_no_gradient) {
    const compile_options o = {.output_grads = NULL};
    machine m;
    graph *model;
    ctx c;

    ctx_init(&c);
    CHECK_OK(&c, network_make(&c, &model));
    CHECK_OK(&m.c, machine_make(&m, model, network_inputs, &o));
    CHECK(m.p->n_code == m.p->n_forward);
    fill_inputs(&m);
    CHECK(loss_of(&m) > 0);
    machine_free(&m);
    ctx_release(&c);
}
