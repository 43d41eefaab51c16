"""Every differentiable operator of PyTorch as a module of its own, through ORTModule."""
