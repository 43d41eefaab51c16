"""Says what a graph's steps may take of memory by the settings of its module."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Sequence

from ortmodule.core.config import Config
from ortmodule.core.logger import LOGGER, warn_once
from ortmodule.core.settings.setting_types import wishes_of
from ortmodule.engine import memory_goal
from ortmodule.engine.memory_goal import LAYERS_AGAIN, MemoryGoal
from ortmodule.engine.rates import costs
from ortmodule.guards.inventory import Slot
from ortmodule.guards.module_tree import Tree


def goal_of(config: Config, tree: Tree, feeds: Sequence[int | Slot], whole: bool) -> MemoryGoal:
    """Of a graph with these inputs: numbers of the caller's, and tensors of the module. ``whole``: PyTorch runs no part
    of it."""
    hand_over = config.enable_mem_efficient_grad_mgmt
    return MemoryGoal(
        config.memory_opt_level,
        config.memory_budget,
        beside=_bytes_beside(tree, feeds),
        clusters=_clusters(config),
        offload=_offload(config),
        joint_from=0 if hand_over == "1" else memory_goal.JOINT_FROM,
        in_segments=hand_over != "0" and whole,
        layers=config.memory_opt_layers,
        costs=costs,
    )


def _clusters(config: Config) -> tuple[tuple[str, int, int], ...] | None:
    """As MemoryGoal has them."""
    if config.memory_opt_config and not config.memory_opt_level:
        return wishes_of(config.memory_opt_config)
    return () if LOGGER.isEnabledFor(logging.INFO) else None


def _offload(config: Config) -> str | None:
    """As MemoryGoal has it."""
    if config.memory_offload and config.memory_opt_level == LAYERS_AGAIN:
        warn_once("MEMORY_OFFLOAD has no effect at MEMORY_OPT_LEVEL=1: layers are computed again, nothing is offloaded")
        return None
    return (config.memory_offload_path or tempfile.gettempdir()) if config.memory_offload else None


def _bytes_beside(tree: Tree, feeds: Sequence[int | Slot]) -> int:
    """Of the module's tensors that are not fed to the graph."""
    fed = {id(feed.get()) for feed in feeds if isinstance(feed, Slot)}
    others = {id(slot.get()): slot.get() for slot in tree.slots.values()}
    return sum(t.nbytes for key, t in others.items() if key not in fed)
