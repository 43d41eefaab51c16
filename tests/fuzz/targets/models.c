/* models.c -- writes the model that `graphs` draws from the same bytes, as ONNX, into the file that FUZZ_MODEL names.
 * Its inputs' types and shapes are with it; what computes it there is PyTorch (tests/fuzz/pytorch.py). It is no target
 * of its own. */
#include "draw.h"

#include "onnx/write.h"

#include <stdio.h>
#include <stdlib.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    choices from = {data, data + size};
    const char *path = getenv("FUZZ_MODEL");
    const void *bytes;
    FILE *file;
    size_t n;
    drawn d;
    ctx c;

    ctx_init(&c);
    draw_model(&c, &from, 8, &d);
    for (int i = 0; i < d.model->n_inputs; i++) d.model->inputs[i]->shape = d.inputs[i].shape;
    if (onnx_write(&c, d.model, &bytes, &n) != OK) wrong("the model cannot be written: %s", c.err.text);
    if (path) {
        if (!(file = fopen(path, "wb"))) wrong("%s cannot be written", path);
        if (fwrite(bytes, 1, n, file) != n || fclose(file) != 0) wrong("%s cannot be written", path);
    }
    ctx_release(&c);
    return 0;
}
