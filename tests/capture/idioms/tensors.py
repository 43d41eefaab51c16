"""Writes shapes, indices, reductions and changes in place as public code does."""

import math

import torch
import torch.nn.functional as F


def rms_norm(self, x):
    h = x.to(torch.float32)
    v = h.pow(2).mean(-1, keepdim=True)
    return self.v(self.w * (h * torch.rsqrt(v + 1e-06)).to(x.dtype))


def manual_layer_norm(self, x):
    u = x.mean(-1, keepdim=True)
    v = (x - u).pow(2).mean(-1, keepdim=True)
    return self.v(self.w * ((x - u) / torch.sqrt(v + 1e-05)))


def layer_norm_shape(self, x):
    return self.v(F.layer_norm(x, x.shape[-1:]))


def gelu_tanh(self, x):
    h = self.v(x)
    return 0.5 * h * (1 + torch.tanh(math.sqrt(2 / math.pi) * (h + 0.044715 * torch.pow(h, 3))))


def swiglu(self, x):
    a, b = self.qkv(x)[..., :16].chunk(2, -1)
    return self.v(F.silu(a) * b)


def masked_assign(self, x):
    h = self.v(x)
    h[h < 0] = 0
    return h


def mask_index_assign_rows(self, x):
    h = self.v(x).clone()
    h[:, 0] = x[:, -1]
    h[..., ::2] *= 2
    return h


def index_put_learned(self, x):
    m = x[..., 0] > 0
    h = self.v(x).clone()
    h[m] = self.w
    return h


def where_scalar(self, x):
    return torch.where(self.v(x) > 0, 1.0, 0.5) * self.q(x)


def boolean_select(self, x):
    h = self.v(x)
    return h[x[..., 0] > 0].sum(0)


def nonzero_select(self, x):
    i = (x[..., 0] > 0).nonzero(as_tuple=True)
    return self.v(x)[i].sum()


def topk_gate(self, x):
    p = self.v(x).softmax(-1)
    w, i = torch.topk(p, 2, -1)
    w = w / w.sum(-1, keepdim=True)
    return torch.zeros_like(p).scatter_(-1, i, w) @ self.emb.weight[:8]


def one_hot_gate(self, x):
    i = self.v(x).argmax(-1)
    return F.one_hot(i, 8).to(x.dtype) @ self.emb.weight[:8] + self.q(x)


def normalize_cos(self, x):
    return F.normalize(self.q(x), dim=-1) @ F.normalize(self.k(x), dim=-1).mT * self.scale.exp().clamp(max=100)


def cdist(self, x):
    return torch.cdist(self.q(x), self.k(x) + 1)


def unfold(self, x):
    return F.pad(self.v(x), (0, 0, 2, 0)).unfold(1, 3, 1).mean(-1)


def interpolate_like(self, x):
    h = F.interpolate(self.v(x).transpose(1, 2), scale_factor=2, mode="nearest")
    return F.interpolate(h, size=x.shape[1:2]).transpose(1, 2)


def adaptive_pool(self, x):
    return F.adaptive_avg_pool1d(self.v(x).transpose(1, 2), 1).squeeze(-1)


def max_over_time(self, x):
    return torch.max(self.v(x), dim=1)[0]


def amax_values(self, x):
    v, i = self.v(x).max(dim=1)
    return v + i.float()


def sort_and_gather(self, x):
    h = self.v(x)
    o = h[..., 0].argsort(1, descending=True)
    return h.gather(1, o[..., None].expand_as(h))


def cumulative(self, x):
    h = self.v(x)
    return h.cumsum(1) / torch.arange(1, x.shape[1] + 1)[None, :, None]


def flip_bidirectional(self, x):
    return self.v(x) + self.q(x.flip(1)).flip(1)


def reversed_list(self, x):
    return torch.stack([h for h in reversed(self.v(x).unbind(-1))], -1)


def list_of_columns(self, x):
    h = self.v(x)
    return torch.stack([h[..., i] * i for i in range(h.shape[-1])], -1)


def zip_chunks(self, x):
    return sum(a * b for a, b in zip(self.q(x).chunk(2, -1), self.k(x).chunk(2, -1), strict=True))


def sizes_product(self, x):
    return self.v(x.reshape(x.shape[0] * x.shape[1], -1)).reshape(x.shape)


def numel_scale(self, x):
    return self.v(x) / x.numel() ** 0.5


def math_of_length(self, x):
    return self.v(x) * math.log(x.shape[1]) / math.sqrt(x.shape[-1])


def tensor_of_length(self, x):
    return self.v(x) * torch.tensor(x.shape[1]).float().log()


def new_tensor_lists(self, x):
    return self.v(x) + x.new_tensor([0.1] * 8)


def linspace_len(self, x):
    return self.v(x) * torch.linspace(0, 1, x.shape[1])[None, :, None]


def expand_as(self, x):
    return self.w.expand_as(x) * self.v(x)


def broadcast_tensors(self, x):
    a, b = torch.broadcast_tensors(self.w, x)
    return self.v(a * b)


def star_shapes(self, x):
    *b, c = x.shape
    return self.v(x.view(*b, 2, c // 2).flatten(-2))


def squeeze_all(self, x):
    return self.v(x[:, :1]).squeeze(1).unsqueeze(1)


def ellipsis(self, x):
    return self.v(x)[..., None, :].sum(-2)


def cat_shifted(self, x):
    h = self.v(x)
    return torch.cat((torch.zeros_like(h[:, :1]), h[:, :-1]), 1)


def repeat_interleave(self, x):
    return self.v(x).repeat_interleave(2, dim=1)


def tile_repeat(self, x):
    return self.w.repeat(x.shape[0], x.shape[1], 1) * self.v(x)


def logsumexp(self, x):
    return torch.logsumexp(self.v(x), -1)


def clamp_ste(self, x):
    h = self.v(x)
    return h + (h.clamp(-1, 1) - h).detach()


def scatter_mean(self, x):
    i = (x[..., 0] > 0).long()
    o = torch.zeros(x.shape[0], 2, 8).scatter_add(1, i[..., None].expand(-1, -1, 8), self.v(x))
    return o


def index_add(self, x):
    return torch.zeros(2, 8).index_add(0, torch.arange(x.shape[1]) % 2, self.v(x).mean(0))


def bincount_like(self, x):
    i = (x[..., 0] > 0).long().flatten()
    c = torch.zeros(2).scatter_add_(0, i, torch.ones(i.numel()))
    return self.v(x) * c.clamp(min=1).reciprocal().sum()


def isnan_fix(self, x):
    h = self.v(x)
    return torch.nan_to_num(torch.where(torch.isnan(h), torch.zeros_like(h), h))


def glu(self, x):
    return F.glu(self.qkv(x)[..., :16], dim=-1)


def tensor_split_sizes(self, x):
    a, b = self.v(x).split([3, 5], -1)
    return torch.cat((b, a), -1)


def outer_sum(self, x):
    h = self.v(x)
    return h[:, :, None] + h[:, None]


def triangular_indices(self, x):
    i, j = torch.triu_indices(8, 8, 1)
    h = self.v(x)
    return h[..., i] * h[..., j]


def contiguous_format(self, x):
    return self.v(x.contiguous().clone(memory_format=torch.contiguous_format))


def movedim_swapaxes(self, x):
    return self.v(x).movedim(1, 0).swapaxes(0, 1)


def T_property(self, x):
    return self.v(x[0]).T


def sum_list_tensors(self, x):
    return sum([self.q(x), self.k(x), self.v(x)]) / 3


def stack_max(self, x):
    return torch.stack([self.q(x), self.k(x)]).max(0).values


def embedding_bag(self, x):
    i = (x[..., 0].abs() * 3).long().clamp(max=15)
    return F.embedding_bag(i, self.emb.weight, mode="mean") + self.v(x).mean(1)


def addmm_addcmul(self, x):
    return torch.addcmul(self.v(x), x, self.w, value=0.5) + torch.lerp(x, self.q(x), 0.3)


def shifts(self, x):
    i = (x.abs() * 3).long()
    i <<= 1
    i >>= 2
    i |= 1
    i &= 3
    i ^= 2
    return self.emb(i).sum(-2) + self.v(x)


def conv1d_gpt2(self, x):
    return torch.addmm(self.v.bias, x.view(-1, x.size(-1)), self.v.weight).view(x.size())
