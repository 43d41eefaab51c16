/* scatter_lane.h -- serves scatter.c as a template: lane r of ScatterElements. */

static void NAME(lane)(const element_scatter *s, int64_t r, void *work) {
    const shape *shape_ = &s->index->shape;
    const int64_t length = shape_->dim[s->axis], size = s->out->shape.dim[s->axis];
    const int64_t out_step = s->out->stride[s->axis], index_step = s->index->stride[s->axis];
    const int64_t x_step = s->updates->stride[s->axis];
    const int64_t at = lane_offset(shape_, s->axis, s->index->stride, r);
    const T *x = (const T *)s->updates->data + lane_offset(shape_, s->axis, s->updates->stride, r);
    T *out = (T *)s->out->data + lane_offset(shape_, s->axis, s->out->stride, r);
    const bool wide = sizeof(T) == sizeof(A);
    A *acc = wide ? (A *)(void *)out : (A *)work;
    const int64_t acc_step = wide ? out_step : 1;
    for (int64_t j = 0; j < length && !wide; j++) {
        int64_t i = wrap_index(index_at(s->index, at + j * index_step), size);
        acc[i] = GET(out[i * out_step]);
    }
    for (int64_t j = 0; j < length; j++) {
        int64_t i = wrap_index(index_at(s->index, at + j * index_step), size);
        NAME(take)(s->how, acc + i * acc_step, x + j * x_step, 1);
    }
    for (int64_t j = 0; j < length && !wide; j++) {
        int64_t i = wrap_index(index_at(s->index, at + j * index_step), size);
        out[i * out_step] = PUT(acc[i]);
    }
}
