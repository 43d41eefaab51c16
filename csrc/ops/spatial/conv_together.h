/* conv_together.h -- serves conv_kernel.c as a template: small images side by side, channel by channel, and back. */

/* Channels [begin, end). Several at a time: of an image they follow one another. */
static void NAME(put_together)(void *arg, int64_t begin, int64_t end) {
    const together *t = arg;
    for (int64_t block = begin; block < end; block += TOGETHER)
        for (int64_t image = 0; image < t->images; image++) {
            const T *from = (const T *)t->apart + (image * t->channels + block) * t->plane;
            T *to = (T *)t->wide + block * t->images * t->plane + image * t->plane;
            for (int64_t i = least(TOGETHER, end - block); i > 0; i--, to += t->images * t->plane)
                for (int64_t p = 0; p < t->plane; p++) to[p] = *from++;
        }
}

static void NAME(take_apart)(void *arg, int64_t begin, int64_t end) {
    const together *t = arg;
    for (int64_t block = begin; block < end; block += TOGETHER)
        for (int64_t image = 0; image < t->images; image++) {
            T *to = (T *)t->apart + (image * t->channels + block) * t->plane;
            const T *from = (const T *)t->wide + block * t->images * t->plane + image * t->plane;
            for (int64_t i = least(TOGETHER, end - block); i > 0; i--, from += t->images * t->plane)
                for (int64_t p = 0; p < t->plane; p++, to++) *to = t->add ? *to + from[p] : from[p];
        }
}
