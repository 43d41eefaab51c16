"""Linear algebra of complex matrices, which PyTorch runs inside the graph: results and gradients are PyTorch's."""

import pytest
import torch
from torch import linalg, nn

from ortmodule import ORTModule, explain

pytestmark = pytest.mark.filterwarnings("ignore")


def hermitian(a):
    return a + a.mH


def positive(a):
    return a @ a.mH + 3 * torch.eye(3)


#: Of what does not depend on the phases of vectors.
FUNCTIONS = {
    "eigvalsh": lambda a, b: linalg.eigvalsh(hermitian(a)),
    "eigh": lambda a, b: linalg.eigh(hermitian(a))[1].abs() + linalg.eigh(hermitian(a))[0],
    "eig": lambda a, b: linalg.eig(a)[0].abs(),
    "eigvals": lambda a, b: linalg.eigvals(a).abs(),
    "svd": lambda a, b: linalg.svd(a)[0].abs() + linalg.svd(a)[1],
    "svdvals": lambda a, b: linalg.svdvals(a),
    "qr": lambda a, b: linalg.qr(a)[0].abs() + linalg.qr(a)[1].abs(),
    "cholesky": lambda a, b: linalg.cholesky(positive(a)).abs(),
    "solve": lambda a, b: linalg.solve(positive(a), b).abs(),
    "solve_triangular": lambda a, b: linalg.solve_triangular(positive(a).tril(), b, upper=False).abs(),
    "inv": lambda a, b: linalg.inv(positive(a)).abs(),
    "det": lambda a, b: linalg.det(a).abs(),
    "slogdet": lambda a, b: linalg.slogdet(a)[0].real + linalg.slogdet(a)[1],
    "lstsq": lambda a, b: linalg.lstsq(a, b)[0].abs(),
    "matrix_exp": lambda a, b: linalg.matrix_exp(a * 0.1).abs(),
    "matrix_power": lambda a, b: linalg.matrix_power(a, 3).abs(),
    "pinv": lambda a, b: linalg.pinv(a).abs(),
    "lu": lambda a, b: linalg.lu(a)[2].abs(),
    "norm": lambda a, b: linalg.norm(a),
    "nuclear norm": lambda a, b: linalg.norm(a, "nuc"),
    "spectral norm": lambda a, b: linalg.norm(a, 2),
    "vector_norm": lambda a, b: linalg.vector_norm(a, 3),
    "cond": lambda a, b: linalg.cond(a),
    "multi_dot": lambda a, b: linalg.multi_dot([a, b, a]).abs(),
    "cross": lambda a, b: linalg.cross(a, b).abs(),
}


class Function(nn.Module):
    def __init__(self, function):
        super().__init__()
        random = torch.Generator().manual_seed(0)
        self.a, self.b = (nn.Parameter(torch.randn(3, 3, dtype=torch.cfloat, generator=random)) for _ in range(2))
        self.function = function

    def forward(self, x):
        return self.function(self.a, self.b) * x


@pytest.mark.parametrize("name", FUNCTIONS)
def test_results_and_gradients(name):
    found = []
    for module in (ORTModule(Function(FUNCTIONS[name])), Function(FUNCTIONS[name])):
        for x in (torch.tensor(1.0), torch.tensor(2.0)):
            module.zero_grad()
            result = module(x)
            result.sum().backward()
        found.append([result.detach(), module.a.grad, module.b.grad])
        if isinstance(module, ORTModule):
            assert explain(module).captured, explain(module).fallback
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)
