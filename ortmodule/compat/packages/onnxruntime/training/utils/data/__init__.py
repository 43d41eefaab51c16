"""Stands for `onnxruntime.training.utils.data`, which is `ortmodule.utils.data`."""

from ortmodule.utils.data import LoadBalancingDistributedBatchSampler, LoadBalancingDistributedSampler

__all__ = ["LoadBalancingDistributedBatchSampler", "LoadBalancingDistributedSampler"]
