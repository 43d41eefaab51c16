/* scan.h -- checks a file's bytes before the protobuf library sees them. */
#ifndef ORT_ONNX_SCAN_H
#define ORT_ONNX_SCAN_H

#include "core/ctx.h"

#include <stdbool.h>
#include <stdint.h>

/* Refuses what the library would crash or choke on: depth, sizes past the end, floods of fields, names that are no
 * text. Allocates nothing. */
MUST_USE status onnx_scan(ctx *c, const void *bytes, size_t n);
/* UTF-8 without a NUL: fit for names and messages. */
bool text_is_valid(const uint8_t *text, size_t length);

#endif
