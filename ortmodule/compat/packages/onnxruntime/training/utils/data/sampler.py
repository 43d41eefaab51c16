"""Stands for `onnxruntime.training.utils.data.sampler`, which is `ortmodule.utils.data.sampler`."""

from ortmodule.utils.data.sampler import LoadBalancingDistributedBatchSampler, LoadBalancingDistributedSampler

__all__ = ["LoadBalancingDistributedBatchSampler", "LoadBalancingDistributedSampler"]
