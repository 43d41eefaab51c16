"""Gives each process of a distributed training samples that take about as long as those of the others."""

from ortmodule.utils.data.sampler import LoadBalancingDistributedBatchSampler, LoadBalancingDistributedSampler

__all__ = ["LoadBalancingDistributedBatchSampler", "LoadBalancingDistributedSampler"]
