/* update.c -- does what all rules share. Tiles of float32 (float64) tensors are updated where they lie; others in a
 * tile in the first-level cache. */
#include "optim/update.h"

#include <string.h>

const update_rule *update_rule_find(const char *name) {
    static const update_rule *const rules[] = {&adam_rule, &sgd_rule, &adagrad_rule, &lamb_rule};

    for (size_t i = 0; i < sizeof rules / sizeof rules[0]; i++)
        if (strcmp(rules[i]->name, name) == 0) return rules[i];
    return NULL;
}

typedef struct settings {
    const update_rule *rule;
    bool clear, measures;
} settings;

/* A tensor's elements from `first` on, as the type that is computed in: where they lie, or converted into `room`. */
static void *load(const converters *c, void *data, dtype type, int64_t first, int64_t n, void *room) {
    void *source = data ? element_at(data, type, first) : NULL;

    if (!source || !c->in[type]) return source;
    c->in[type](room, source, n);
    return room;
}

static void save(const converters *c, void *data, dtype type, int64_t first, int64_t n, const void *from) {
    if (data && c->out[type]) c->out[type](element_at(data, type, first), from, n);
}

static void update_tile(const void *arg, const tiled *thing, int64_t first, int64_t n, double sums[2]) {
    _Alignas(64) double room[2 + MOST_STATES][TILE];
    const settings *s = arg;
    const update_tensor *t = (const update_tensor *)(const void *)thing;
    const bool wide = t->type == F64;
    const converters *c = wide ? &for_double : &for_float;
    void *weights = t->exact ? (void *)t->exact : t->param;
    const dtype type = t->exact ? F32 : t->type;
    tile part = {
        .p = load(c, weights, type, first, n, room[0]), .g = load(c, t->grad, t->grad_type, first, n, room[1]), .n = n};

    for (int i = 0; i < s->rule->n_states; i++)
        part.state[i] = load(c, t->state[i], t->state_type, first, n, room[2 + i]);
    (s->measures ? s->rule->measure : s->rule->update)[wide](&part, t->factors, sums);
    for (int i = 0; i < s->rule->n_states; i++) save(c, t->state[i], t->state_type, first, n, part.state[i]);
    if (s->measures) return;
    save(c, weights, type, first, n, part.p);
    if (t->exact) save(&for_float, t->param, t->type, first, n, part.p);
    if (s->clear) memset(element_at(t->grad, t->grad_type, first), 0, (size_t)n * dtype_size(t->grad_type));
}

void update_tensors(const update_rule *rule, update_tensor *tensors, int count, const double *numbers, double grad,
                    bool clear_gradients) {
    settings s = {rule, clear_gradients, true};

    for (int i = 0; i < count; i++) rule->factors(numbers, tensors[i].step, grad, tensors[i].factors);
    if (rule->measure[0]) {
        sum_tiles(&tensors->tiles, count, sizeof *tensors, update_tile, &s);
        for (int i = 0; i < count; i++) rule->scale(tensors[i].factors, tensors[i].tiles.sums);
    }
    s.measures = false;
    for_tiles(&tensors->tiles, count, sizeof *tensors, update_tile, &s);
}
