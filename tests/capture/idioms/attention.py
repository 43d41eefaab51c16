"""Writes masks, positions, heads and tokens as public code does."""

import math

import torch
import torch.nn.functional as F
from torch import nn


def causal_by_tril(self, x):
    t = x.shape[1]
    m = torch.tril(torch.ones(t, t)).view(1, t, t)
    w = self.q(x) @ self.k(x).transpose(-2, -1) / math.sqrt(x.size(-1))
    return w.masked_fill(m == 0, float("-inf")).softmax(-1) @ self.v(x)


def causal_by_triu_bool(self, x):
    n, t, c = x.size()
    m = torch.triu(torch.ones(t, t, dtype=torch.bool, device=x.device), diagonal=1)
    return F.scaled_dot_product_attention(self.q(x), self.k(x), self.v(x), attn_mask=~m)


def causal_full_inf(self, x):
    t = x.shape[1]
    m = torch.full((t, t), torch.finfo(x.dtype).min, device=x.device)
    c = torch.arange(t, device=x.device)
    m.masked_fill_(c < (c + 1).view(t, 1), 0)
    m = m.to(x.dtype)
    return (self.q(x) @ self.k(x).mT + m[None]).softmax(-1) @ self.v(x)


def buffer_sliced(self, x):
    t = x.shape[1]
    return (self.q(x) @ self.k(x).mT).masked_fill(self.mask[:t, :t] == 0, -1000000000.0).softmax(-1) @ self.v(x)


def inverse_mask_multiplied(self, x):
    m = (x[..., 0] > 0).float()
    e = (1.0 - m[:, None, :]) * -10000.0
    return (self.q(x) @ self.k(x).mT + e).softmax(-1) @ self.v(x)


def relative_bias(self, x):
    t = x.shape[1]
    p = torch.arange(t)[None] - torch.arange(t)[:, None]
    p = p.clamp(-4, 4) + 4
    return (self.q(x) @ self.k(x).mT + self.emb(p)[..., 0]).softmax(-1) @ self.v(x)


def t5_buckets(self, x):
    t = x.shape[1]
    r = torch.arange(t)[None, :] - torch.arange(t)[:, None]
    nb = 8
    b = (r > 0).long() * nb // 2
    r = r.abs()
    me = 2
    small = r < me
    big = me + (torch.log(r.float() / me) / math.log(16 / me) * (4 - me)).long()
    big = torch.min(big, torch.full_like(big, 3))
    b += torch.where(small, r, big)
    return (self.q(x) @ self.k(x).mT + self.emb(b)[..., 0]).softmax(-1) @ self.v(x)


def alibi(self, x):
    t = x.shape[1]
    b = -(torch.arange(t)[None] - torch.arange(t)[:, None]).abs() * 0.5
    return (self.q(x) @ self.k(x).mT + b).softmax(-1) @ self.v(x)


def rotary(self, x):
    t = torch.arange(x.shape[1], dtype=torch.float32)
    f = 1.0 / 10000 ** (torch.arange(0, 8, 2).float() / 8)
    e = torch.outer(t, f)
    e = torch.cat((e, e), -1)

    def rot(u):
        a, b = u.chunk(2, -1)
        return torch.cat((-b, a), -1)

    q = self.q(x)
    q = q * e.cos() + rot(q) * e.sin()
    return self.v(q)


def rotary_complex(self, x):
    f = torch.polar(torch.ones(x.shape[1], 4), torch.outer(torch.arange(x.shape[1]).float(), torch.arange(4).float()))
    q = torch.view_as_complex(self.q(x).float().reshape(*x.shape[:-1], -1, 2))
    return self.v(torch.view_as_real(q * f).flatten(2).type_as(x))


def sinusoids_in_place(self, x):
    pe = torch.zeros(x.shape[1], 8)
    p = torch.arange(0, x.shape[1]).unsqueeze(1)
    d = torch.exp(torch.arange(0, 8, 2) * -(math.log(10000.0) / 8))
    pe[:, 0::2] = torch.sin(p * d)
    pe[:, 1::2] = torch.cos(p * d)
    return self.v(x + pe[None])


def positions_cached(self, x):
    ids = self.ids[:, : x.size(1)]
    return self.v(x + self.emb(ids))


def positions_cumsum(self, x):
    m = (x[..., 0] > -9).int()
    ids = (torch.cumsum(m, 1).type_as(m) * m).long()
    return self.v(x + self.emb(ids))


def heads_view(self, x):
    n, t, _ = x.shape
    q, k, v = [layer(x).view(n, t, 2, 4).transpose(1, 2) for layer in (self.q, self.k, self.v)]
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).contiguous().view(n, t, -1)


def heads_tuple_shape(self, x):
    shape = (*x.shape[:-1], -1, 4)
    q, k, v = (layer(x).view(shape).transpose(1, 2) for layer in (self.q, self.k, self.v))
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(*x.shape[:-1], -1)


def qkv_unbind(self, x):
    n, t, c = x.shape
    q, k, v = self.qkv(x).reshape(n, t, 3, 2, c // 2).permute(2, 0, 3, 1, 4).unbind(0)
    return (q @ k.mT).softmax(-1).matmul(v).transpose(1, 2).reshape(n, t, c)


def qkv_split(self, x):
    q, k, v = self.qkv(x).split(x.size(-1), dim=2)
    return (q @ k.mT).softmax(-1) @ v


def einsum_attention(self, x):
    a = torch.einsum("bid,bjd->bij", self.q(x), self.k(x)).softmax(-1)
    return torch.einsum("bij,bjd->bid", a, self.v(x))


def repeat_kv(self, x):
    n, t, _ = x.shape
    k = self.k(x).view(n, t, 2, 4).transpose(1, 2)
    k = k[:, :, None].expand(n, 2, 2, t, 4).reshape(n, 4, t, 4)
    return k.sum(1)


def cls_token(self, x):
    c = self.cls.expand(x.shape[0], -1, -1)
    return self.v(torch.cat((c, x), 1))[:, 0]


def last_token(self, x):
    n = (x[..., 0] > -9).sum(-1) - 1
    return self.v(x)[torch.arange(x.shape[0]), n]


def gather_last(self, x):
    n = torch.full((x.shape[0],), x.shape[1] - 1)
    return self.v(x).gather(1, n.view(-1, 1, 1).expand(-1, 1, 8)).squeeze(1)


def window_partition(self, x):
    n, t, c = x.shape
    p = -t % 4
    h = F.pad(self.v(x), (0, 0, 0, p))
    h = h.view(n, -1, 4, c)
    return h.mean(2)


def mha(self, x):
    return self.mha(x, x, x, need_weights=False)[0]


def mha_weights_mask(self, x):
    m = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
    return self.mha(x, x, x, attn_mask=m, is_causal=True)[0]


def diffusers(self, x):
    q, k, v = (self.q(x), self.k(x), self.v(x))
    i = torch.empty(q.shape[0], q.shape[1], k.shape[1], dtype=q.dtype, device=q.device)
    a = torch.baddbmm(i, q, k.transpose(-1, -2), beta=0, alpha=0.25)
    del i
    a = a.softmax(dim=-1)
    return torch.bmm(a, v)


def alibi_baddbmm(self, x):
    q, k = (self.q(x), self.k(x))
    al = torch.arange(x.shape[1]).float()[None, None].expand(x.shape[0], 1, -1)
    return al.baddbmm(batch1=q, batch2=k.mT, beta=1.0, alpha=0.3).softmax(-1) @ x


def baddbmm_beta(self, x):
    q, k = (self.q(x), self.k(x))
    return torch.baddbmm(torch.ones(x.shape[0], x.shape[1], x.shape[1]), q, k.mT, beta=0.5, alpha=0.3).softmax(-1) @ x


def mask_and_in_place(self, x):
    m = x[..., 0] > 0
    m &= x[..., 1] > -1
    m |= x[..., 2] > 0
    return self.v(x).masked_fill(~m[..., None], 0)


def iand_slice(self, x):
    m = x > 0
    m[:, 0] &= x[:, 0] < 1
    m[:, 1:] |= m[:, :-1].clone()
    m ^= torch.ones_like(m)
    return self.v(x) * m


def invert_mask_ops(self, x):
    m = x[..., 0] > 0
    m = ~m
    m = m | m.logical_not()
    return self.v(x) * m[..., None]


def interpolate_pos(self, x):
    p = F.interpolate(
        self.emb.weight[None].transpose(1, 2), size=x.shape[1], mode="linear", align_corners=False
    ).transpose(1, 2)
    return self.v(x + p)


def random_masking_given(self, x):
    k = int(x.shape[1] * 0.5)
    n = x[..., 0]
    i = torch.argsort(n, 1)
    r = torch.argsort(i, 1)
    keep = i[:, :k]
    h = torch.gather(self.v(x), 1, keep.unsqueeze(-1).repeat(1, 1, 8))
    m = torch.ones(x.shape[:2])
    m[:, :k] = 0
    return (h, torch.gather(m, 1, r))


def timestep_embedding(self, x):
    t = x[:, 0, 0].abs()
    f = torch.exp(-math.log(10000) * torch.arange(0, 4, dtype=torch.float32) / 4)
    a = t[:, None].float() * f[None]
    e = torch.cat([torch.cos(a), torch.sin(a)], -1)
    return self.v(x) + self.q(e)[:, None]


def extract_schedule(self, x):
    t = (x[:, 0, 0].abs() * 3).long().clamp(max=7)
    a = self.table_buffer.gather(-1, t).reshape(x.shape[0], *(1,) * (len(x.shape) - 1))
    return self.v(x * a)


def diag_mask(self, x):
    z = self.q(x).mean(1)
    sim = z @ z.t()
    sim = sim.masked_fill(torch.eye(len(sim), dtype=torch.bool), -10000.0)
    return sim.softmax(-1) @ z


def stored_attention(self, x):
    a = (self.q(x) @ self.k(x).mT).softmax(-1)
    self.attn = a.detach()
    return a @ self.v(x)


def any_all(self, x):
    m = (x > 10).any(-1, keepdim=True) | (x > -9).all(-1, keepdim=True)
    return self.v(x) * m


def roll_shift(self, x):
    return torch.roll(self.v(x), shifts=(-1,), dims=(1,))
