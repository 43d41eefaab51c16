"""Lists cases of Einsum."""

import torch

from tests.ops.cases import FLOAT, Case, t


def einsum(equation, *shapes, **kwargs):
    return Case(
        "Einsum",
        [t(*s) for s in shapes],
        lambda *x: torch.einsum(equation, *x),
        attrs={"equation": equation},
        name=equation.replace(" ", ""),
        resize=False,
        **kwargs,
    )


CASES = [
    einsum("ij,jk->ik", (3, 4), (4, 5), dtypes=FLOAT + ("int64", "int32")),
    einsum("ij,jk", (3, 4), (4, 5)),
    einsum("bij,bjk->bik", (2, 3, 4), (2, 4, 5)),
    einsum("bij,bkj->bki", (2, 3, 4), (2, 5, 4)),
    einsum("bqhd,bkhd->bhqk", (2, 5, 3, 4), (2, 6, 3, 4)),
    einsum("bhqk,bkhd->bqhd", (2, 3, 5, 6), (2, 6, 3, 4)),
    einsum("bsd,dhk->bshk", (2, 3, 4), (4, 5, 6)),
    einsum("bshk,dhk->bsd", (2, 3, 5, 6), (4, 5, 6)),
    einsum("...ij,...jk->...ik", (2, 3, 4), (2, 4, 5)),
    einsum("...ij,...jk->...ik", (2, 1, 3, 4), (6, 4, 5)),
    einsum("...ij,...jk", (2, 3, 4), (4, 5)),
    einsum("i...j,jk->k...i", (2, 3, 4, 5), (5, 6)),
    einsum("...i->...", (2, 3, 4)),
    einsum("...i->i", (2, 3, 4)),
    einsum("ij->ji", (3, 4)),
    einsum("ba", (3, 4)),
    einsum("ij->", (3, 4)),
    einsum("ij->j", (3, 4)),
    einsum("ii->i", (4, 4)),
    einsum("ii->", (4, 4)),
    einsum("ii", (4, 4)),
    einsum("iji->j", (4, 3, 4)),
    einsum("iijj->ij", (3, 3, 4, 4)),
    einsum("iii->i", (3, 3, 3)),
    einsum("i,i->", (5,), (5,)),
    einsum("i,i->i", (5,), (5,)),
    einsum("i,j->ij", (5,), (4,)),
    einsum("i,j->ji", (5,), (4,)),
    einsum(",->", (), ()),
    einsum("->", ()),
    einsum(",i->i", (), (3,)),
    einsum("ij,ij->", (3, 4), (3, 4)),
    einsum("ij,k->ik", (3, 4), (5,)),
    einsum("ijk,ijl,ijm->klm", (2, 3, 4), (2, 3, 5), (2, 3, 6)),
    einsum("ab,bc,cd->ad", (2, 3), (3, 4), (4, 5)),
    einsum("ab,bc,cd,de->ae", (2, 3), (3, 4), (4, 5), (5, 2)),
    einsum("a,b,c->abc", (2,), (3,), (4,)),
    einsum("bi,oij,bj->bo", (2, 3), (4, 3, 5), (2, 5)),
    einsum("ij,ij->ij", (3, 1), (3, 4)),
    einsum("ij,ij->i", (3, 1), (3, 4)),
    einsum("ij,jk->ik", (3, 1), (4, 5)),
    einsum("ij,ij->i", (1, 4), (3, 4)),
    einsum(" a b , b c -> c a ", (2, 3), (3, 4)),
    einsum("Ab,bA", (2, 3), (3, 2)),
    einsum("aB", (2, 3)),
    einsum("ij,jk->ik", (3, 0), (0, 5)),
    einsum("ij,jk->ik", (0, 3), (3, 5)),
    einsum("ij->i", (0, 3)),
    einsum("abcdef,abcdef->abdf", (2, 1, 2, 3, 2, 2), (2, 1, 2, 3, 2, 2)),
    einsum("abcd,ebfd,d->facb", (2, 3, 4, 5), (2, 3, 6, 5), (5,)),
    einsum("bnqd,bnkd->bnqk", (1, 2, 3, 4), (1, 2, 5, 4)),
    einsum("nhwc,hkc->nhwk", (2, 3, 4, 5), (3, 6, 5)),
    einsum("ij,j", (3, 4), (4,)),
]
