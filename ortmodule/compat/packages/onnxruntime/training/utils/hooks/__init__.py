"""Stands for `onnxruntime.training.utils.hooks`, which is `ortmodule.compat.hooks`."""

from ortmodule.compat.hooks import GlobalSubscriberManager, StatisticsSubscriber, inspect_activation

__all__ = ["GlobalSubscriberManager", "StatisticsSubscriber", "inspect_activation"]
