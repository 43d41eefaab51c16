"""Writes state, results, switches and losses of modules as public code does."""

import collections
import dataclasses
import itertools
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint


class Pair(NamedTuple):
    a: torch.Tensor
    b: torch.Tensor


@dataclasses.dataclass
class Data:
    a: torch.Tensor
    b: torch.Tensor | None = None


def conditional_on_training(self, x):
    return self.v(x) if self.training else self.q(x)


def optional_argument(self, x, mask: torch.Tensor | None = None):
    h = self.v(x)
    if mask is not None:
        h = h * mask
    return h


def stochastic_depth_manual(self, x):
    keep = 1.0
    r = keep + torch.zeros((x.shape[0],) + (1,) * (x.ndim - 1), dtype=x.dtype, device=x.device)
    r.floor_()
    return x + self.v(x).div(keep) * r


def layers_list(self, x):
    hs = ()
    for layer in [self.q, self.k, self.v]:
        hs += (x,)
        x = x + layer(x)
    return (x, hs)


def named_children(self, x):
    for _, layer in self.seq.named_children():
        x = layer(x)
    return x


def getattr_layers(self, x):
    for n in ("q", "k"):
        x = getattr(self, n)(x)
    return x


def module_dict(self, x):
    return self.table["a"](x) + self.table["b"](x)


def dict_output(self, x):
    h = self.v(x)
    return {"logits": h, "loss": h.mean(), "none": None}


def ordered_output(self, x):
    h = self.v(x)
    return collections.OrderedDict(out=h, aux=[h.sum(), h.mean()])


def namedtuple_output(self, x):
    return Pair(self.v(x), self.q(x))


def dataclass_output(self, x):
    return Data(self.v(x))


def dataclass_inside(self, x):
    d = Data(self.v(x))
    d.b = self.q(d.a)
    return d.b


def to_dtype_layer(self, x):
    self.v = self.v.to(x.dtype)
    return self.v(x)


def to_like(self, x):
    m = torch.ones(x.shape[1]).to(x)
    return self.v(x * m[None, :, None])


def type_as(self, x):
    return self.v(x.double().mean(-1, keepdim=True).type_as(x) + x)


def detach_target(self, x):
    with torch.no_grad():
        t = self.k(x)
    return F.mse_loss(self.q(x), t)


def stop_grad_branch(self, x):
    return self.q(x) + self.k(x.detach()).detach()


def step_counter(self, x):
    self.steps = self.steps + 1
    return self.v(x)


def step_buffer(self, x):
    self.count += 1
    return self.v(x) * (1 + 0 * self.count)


def ema_buffer(self, x):
    h = self.v(x)
    if self.training:
        with torch.no_grad():
            self.mean.mul_(0.9).add_(h.mean((0, 1)), alpha=0.1)
    return h - self.mean


def copy_buffer(self, x):
    h = self.v(x)
    self.mean.copy_(h.detach().mean((0, 1)))
    return h


def new_buffer(self, x):
    h = self.v(x)
    self.mean = 0.9 * self.mean + 0.1 * h.detach().mean((0, 1))
    return h


def stored_loss(self, x):
    h = self.v(x)
    self.aux = h.pow(2).mean()
    return h


def losses_list(self, x):
    ls = []
    for layer in (self.q, self.k):
        x = layer(x)
        ls.append(x.mean())
    return (x, torch.stack(ls).sum())


def losses_dict_sum(self, x):
    d = {"a": self.q(x).mean(), "b": self.k(x).pow(2).mean()}
    return sum(d.values())


def assert_shapes(self, x):
    assert x.dim() == 3 and x.size(-1) == 8, f"got {x.shape}"
    b, t, c = x.shape
    assert c % 2 == 0
    return self.v(x)


def raise_if_wrong(self, x):
    if x.shape[-1] != 8:
        raise ValueError(f"wrong {x.shape}")
    return self.v(x)


def autocast_off(self, x):
    with torch.autocast("cpu", enabled=False):
        return self.v(x.float())


def set_grad(self, x):
    with torch.set_grad_enabled(self.training):
        return self.v(x)


def nn_sequential(self, x):
    return self.seq(x)


def gru(self, x):
    return self.gru(x)[0]


def lstm_hidden(self, x):
    h = torch.zeros(1, x.shape[0], 8)
    o, (h, c) = self.lstm(x, (h, h.clone()))
    return (o, h)


def checkpointed(self, x):
    return checkpoint(self.v, x, use_reentrant=False)


def callable_default(self, x, act=F.relu):
    return act(self.v(x))


def kwargs_only(self, x, *, scale=2.0, **kw):
    return self.v(x) * scale


def itertools_product(self, x):
    return sum((self.v(x)[..., i] * self.q(x)[..., j] for i, j in itertools.product(range(2), range(3))))


def enumerate_layers_even(self, x):
    for i, layer in enumerate((self.q, self.k, self.v)):
        x = layer(x) if i % 2 == 0 else x + layer(x)
    return x


def bool_of_config(self, x):
    return self.v(x) if self.cfg.use else x


def print_shape_never(self, x):
    if self.debug:
        print(x.shape)
    return self.v(x)


def weight_tied(self, x):
    return F.linear(self.v(x), self.emb.weight)


def weight_normed(self, x):
    w = self.v.weight
    w = w / w.norm(dim=1, keepdim=True).clamp_min(1e-06)
    return F.linear(x, w, self.v.bias)


def lora(self, x):
    return self.v(x) + x @ self.q.weight.t()[:, :2] @ self.k.weight[:2] * 0.5


def in_place_relu(self, x):
    return F.relu(self.v(x), inplace=True)


def in_place_add(self, x):
    h = self.v(x)
    h += x
    h *= 2
    return h


def chunked_ff(self, x):
    return torch.cat([self.v(c) for c in x.chunk(2, dim=-2)], -2)


def film(self, x):
    g, b = self.qkv(x.mean(1))[:, :16].chunk(2, -1)
    return self.v(x) * (1 + g[:, None]) + b[:, None]


def shift_labels(self, x):
    y = (x[..., 0] > 0).long()
    layer = self.v(x)
    a = layer[..., :-1, :].contiguous()
    b = y[..., 1:].contiguous()
    return F.cross_entropy(a.view(-1, 8), b.view(-1))


def ignore_index_loss(self, x):
    y = (x[..., 0] > 0).long()
    y = y.masked_fill(x[..., 1] > 0.5, -100)
    return F.cross_entropy(self.v(x).flatten(0, 1), y.flatten(), ignore_index=-100)


def multi_losses(self, x):
    h = self.v(x)
    loss = F.smooth_l1_loss(h, x) + F.kl_div(h.log_softmax(-1), x.softmax(-1), reduction="batchmean")
    return loss + F.binary_cross_entropy_with_logits(h, (x > 0).float())


def contrastive(self, x):
    a = F.normalize(self.q(x).mean(1), dim=-1)
    b = F.normalize(self.k(x).mean(1), dim=-1)
    layer = a @ b.t() * 5
    y = torch.arange(layer.shape[0])
    return (F.cross_entropy(layer, y) + F.cross_entropy(layer.t(), y)) / 2


def vq(self, x):
    f = self.v(x).reshape(-1, 8)
    e = self.emb.weight
    d = f.pow(2).sum(1, keepdim=True) - 2 * f @ e.t() + e.pow(2).sum(1)
    i = d.argmin(1)
    q = e[i].view_as(x)
    h = self.v(x)
    return (h + (q - h).detach(), F.mse_loss(q, h.detach()) + 0.25 * F.mse_loss(q.detach(), h))


def straight_through(self, x):
    p = self.v(x).softmax(-1)
    h = F.one_hot(p.argmax(-1), 8).float()
    return (h + p - p.detach()) @ self.emb.weight[:8]


def entropy(self, x):
    p = self.v(x).softmax(-1)
    return -(p * p.clamp_min(1e-09).log()).sum(-1).mean()


def len_of_x(self, x):
    return self.v(x) / len(x)


def conv_transpose(self, x):
    return self.conv(x.transpose(1, 2)).transpose(1, 2)
