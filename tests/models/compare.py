"""Compares the training of a module with PyTorch's, and checks that PyTorch does not run it."""

import inspect
import sys
from contextlib import contextmanager

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

# |g - g'| <= relative * |g| + share * |all gradients|, and the loss.
TOLERANCE = {torch.float32: (1e-4, 1e-6, 1e-5), torch.float64: (1e-10, 1e-12, 1e-11)}

#: ATen calls around a captured module that compute nothing: making memory for outputs and gradients, seeing the same
#: memory as another tensor object (autograd does so with every tensor that enters or leaves a node), the gradient 1
#: that loss.backward() begins with, and drawing the one seed of a run from torch's generator.
BOOKKEEPING = {
    "aten::empty",
    "aten::empty_strided",
    "aten::alias",
    "aten::detach",
    "aten::view",
    "aten::as_strided",
    "aten::ones_like",
    "aten::random_",
}


def loss_of(outputs):
    return outputs if isinstance(outputs, torch.Tensor) else outputs.loss


def step(model, batch):
    """Loss, and gradient by parameter name, of one forward and backward."""
    model.zero_grad(set_to_none=True)
    loss = loss_of(model(**batch))
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters()}


def to(dtype, batch):
    """The batch with its floats in `dtype`."""
    return {k: v.to(dtype) if isinstance(v, torch.Tensor) and v.is_floating_point() else v for k, v in batch.items()}


class InDouble(TorchFunctionMode):
    """Inside, what asks for float32 gets float64. Many models compute norms and softmaxes in float32 whatever their
    type is, so that float64 would be compared at float32's accuracy."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        args = tuple(torch.float64 if x is torch.float32 else x for x in args)
        kwargs = {k: torch.float64 if x is torch.float32 else x for k, x in (kwargs or {}).items()}
        return func(*args, **kwargs)


class Sides(TorchFunctionMode):
    """Inside, ``seen`` gets what each ReLU returns, and what each max pool is given. With ``given``, the same of
    another run, an operand passes where it did there: near 0, or near another element of its window, chance of rounding
    decides, and its gradient depends on that."""

    RELU = (torch.nn.functional.relu, torch.relu, torch.Tensor.relu)
    POOL = (torch.nn.functional.max_pool2d, torch.max_pool2d)

    def __init__(self, given=None):
        super().__init__()
        self.given, self.seen = given, []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func not in self.RELU and func not in self.POOL:
            return func(*args, **kwargs)
        given = None if self.given is None else self.given[len(self.seen)]
        if func in self.POOL:
            self.seen.append(args[0].detach())
            return func(*args, **kwargs) if given is None else pooled_as(given, *args, **kwargs)
        y = func(*args, **kwargs) if given is None else args[0] * (given > 0)
        self.seen.append(y.detach())
        return y


def pooled_as(given, x, *args, **kwargs):
    """Of each window of x the element that is the largest of ``given``."""
    _, places = torch.nn.functional.max_pool2d_with_indices(given.to(x.dtype), *args, **kwargs)
    return x.flatten(-2).gather(-1, places.flatten(-2)).view(places.shape)


def assert_same_step(ours, eager, what):
    (loss, grads), (eager_loss, eager_grads) = ours, eager
    relative, share, of_loss = TOLERANCE[eager_loss.dtype]
    assert abs(loss - eager_loss) <= of_loss * max(1, abs(eager_loss)), f"{what}: loss {loss}, PyTorch's {eager_loss}"
    everything = torch.stack([g.double().norm() for g in eager_grads.values() if g is not None]).norm()
    wrong = []
    for name, expected in eager_grads.items():
        ours = grads[name]
        if ours is None or expected is None:
            if ours is not expected:
                wrong.append(f"{name}: {'no' if ours is None else 'a'} gradient, against PyTorch")
            continue
        off = (ours.double() - expected.double()).norm()
        if not off <= relative * expected.double().norm() + share * everything:
            wrong.append(f"{name}: off by {off:.3g} of {expected.norm():.3g}, all gradients {everything:.3g}")
    assert not wrong, f"{what}: " + "; ".join(wrong)


def assert_same_buffers(ours, eager, what):
    buffers = dict(ours.named_buffers())
    for name, expected in eager.named_buffers():
        torch.testing.assert_close(buffers[name], expected, msg=lambda text, n=name: f"{what}: buffer {n}: {text}")


def tensors_in(outputs):
    """Every tensor of a forward's result, in order."""
    if isinstance(outputs, torch.Tensor):
        return [outputs]
    parts = outputs.values() if isinstance(outputs, dict) else outputs if isinstance(outputs, (tuple, list)) else ()
    return [x for part in parts for x in tensors_in(part)]


# --- proof that PyTorch does not run it -------------------------------------------------------------------------------


class Watch(TorchDispatchMode):
    """Refuses ATen calls that are not in `allowed`, and remembers them: a fallback may swallow the exception.

    Copying into a buffer is allowed: that is how statistics the engine has computed get to where the module keeps them.
    """

    def __init__(self, allowed, buffers):
        super().__init__()
        self.allowed, self.refused = allowed, []
        self.buffers = {buffer.data_ptr() for buffer in buffers}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name().partition(".")[0]
        if name not in self.allowed and not (name == "aten::copy_" and args[0].data_ptr() in self.buffers):
            self.refused.append(name)
            raise AssertionError(f"{name} ran through PyTorch")
        return func(*args, **(kwargs or {}))


@contextmanager
def pytorch_forbidden(ours, eager, allowed=()):
    """Inside, every Python forward of the eager module's parts raises and every ATen call must be allowed."""
    # Watched and not replaced: the engine would see that a class has another forward, and capture that.
    codes = {inspect.unwrap(type(part).forward).__code__: type(part).__name__ for part in eager.modules()}

    def refuse(frame, event, arg):
        if event == "call" and frame.f_code in codes:
            raise AssertionError(f"the Python forward of {codes[frame.f_code]} ran")

    watch, before = Watch(BOOKKEEPING | set(allowed), ours.buffers()), sys.getprofile()
    try:
        with watch:
            sys.setprofile(refuse)
            yield
    finally:
        sys.setprofile(before)
    assert not watch.refused, f"ran through PyTorch: {sorted(set(watch.refused))}"
