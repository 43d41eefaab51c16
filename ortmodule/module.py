"""Wraps a module, which still is the user's module.

The object that `ORTModule(model)` returns is an instance of a class derived from both ORTModule and the model's own
class, and shares the model's `__dict__`: both have the same parameters, submodules, hooks and attributes. Only
`forward` is another, and what belongs to the wrapper alone lives in a slot outside of that dictionary.
"""

from __future__ import annotations

import copy
import functools
import inspect
import sys
import types
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import nn

from ortmodule.core.config import Config, DebugOptions
from ortmodule.core.errors import ArgumentTypeError, StateError
from ortmodule.core.torch_private import is_fx_tracing
from ortmodule.debug.explain import explain
from ortmodule.debug.graph_dump import Saver
from ortmodule.debug.memory.recompute_table import ClusterTable
from ortmodule.debug.observers import Observers
from ortmodule.debug.onnx_interpreter import evaluate
from ortmodule.guards.sharding.sharded import is_sharded
from ortmodule.host.fallback import THREAD
from ortmodule.runtime.attachments import Attachments
from ortmodule.runtime.dispatcher import Dispatcher


class _Forward:
    """The attribute `forward` of a wrapped class.

    Unlike a method it also beats an entry `forward` in the dictionary that wrapper and model share: that one belongs to
    the model, and is what PyTorch runs. Assigning to the wrapper's `forward` replaces it for the wrapper only: it is
    captured, but for calls in which it calls the forward that it replaces (as accelerate's does, and TRL's in some).
    """

    def __init__(self, original: Any) -> None:
        @functools.wraps(original)
        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                dispatcher = self._ortmodule
            except AttributeError:
                # An assigned forward that is captured is a function of the plain module.
                dispatcher = THREAD.in_assigned
                if dispatcher is None or dispatcher.module is not self:
                    raise
            return dispatcher(args, kwargs)

        forward.__signature__ = inspect.signature(original)  # type: ignore[attr-defined]  # inspect reads it
        del forward.__wrapped__  # or who unwraps it would get past the engine
        self.function, self.original = forward, original

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        if instance is None:
            # torch.fx looks at the code of the function that it traces.
            return self.original if is_fx_tracing() else self.function
        assigned = instance._ortmodule.assigned
        return types.MethodType(self.function, instance) if assigned is None else assigned

    def __set__(self, instance: Any, value: Any) -> None:
        dispatcher = instance._ortmodule
        if self._is_own(value, instance):
            dispatcher.assign(None)
        elif isinstance(value, _Assigned) and value.dispatcher is dispatcher:
            dispatcher.assign(value, value.forward, value.__wrapped__)
        else:
            assigned = _Assigned(dispatcher, value, instance)
            dispatcher.assign(assigned, assigned.forward, value)

    def __delete__(self, instance: Any) -> None:
        instance._ortmodule.assign(None)

    def _is_own(self, value: Any, instance: Any) -> bool:
        return isinstance(value, types.MethodType) and value.__func__ is self.function and value.__self__ is instance


class _Assigned:
    """A forward that a script has put in place of a wrapped module's, with that one's attributes."""

    def __init__(self, dispatcher: Dispatcher, given: Callable, instance: Any) -> None:
        self.dispatcher, self.__wrapped__ = dispatcher, given
        # Of the module, whose attributes guards know.
        if isinstance(given, types.MethodType) and given.__self__ is instance:
            given = types.MethodType(given.__func__, dispatcher.module)
        self.forward: Callable = given

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.dispatcher.assigned is self and THREAD.in_assigned is not self.dispatcher:
            return self.dispatcher.call_assigned(args, kwargs)
        # Another one that took its place calls it.
        return (self.forward if THREAD.in_assigned is self.dispatcher else self.__wrapped__)(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__wrapped__, name)

    def __eq__(self, other: object) -> bool:
        return self is other or self.__wrapped__ == other

    def __hash__(self) -> int:
        return hash(self.__wrapped__)


class ORTModule(nn.Module):
    """``ORTModule(model)`` trains and evaluates ``model`` through the engine.

    ``model``: any `torch.nn.Module`. The result is an instance of its class, too, and shares everything with it:
    parameters, buffers, submodules, attributes. Wrap before DistributedDataParallel or DeepSpeed.
    ``debug_options``: a :class:`DebugOptions`. ``config``: a :class:`Config`, all settings; the environment beats it.
    """

    __slots__ = ("_ortmodule",)
    _ortmodule: Dispatcher
    _wrapped_class: ClassVar[type[nn.Module]]

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        if cls is not ORTModule:  # for an `__init__` that the caller calls, of a plain model as well
            return cls._wrapped_class.__new__(cls._wrapped_class, *args, **kwargs)
        return _wrap(*args, **kwargs)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if not hasattr(cls, "_wrapped_class"):
            text = "ORTModule(model) is an instance of the model's own class, and is not derived from"
            raise ArgumentTypeError(f"class {cls.__name__}: {text}: write methods into the model's class")

    def __init__(
        self, model: nn.Module, debug_options: DebugOptions | None = None, config: Config | None = None
    ) -> None:
        pass  # made by __new__, around a module that is initialised already

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":  # unless the model has one: what scripts for ONNX Runtime's ORTModule save and change
                return self._ortmodule.module
            raise

    def __deepcopy__(self, memo: dict) -> ORTModule:
        return _wrap(copy.deepcopy(self._ortmodule.module, memo), self._ortmodule.debug, self._ortmodule.given)

    def __reduce_ex__(self, protocol: Any) -> tuple:
        return _wrap, (self._ortmodule.module, self._ortmodule.debug, self._ortmodule.given)

    def __prepare_scriptable__(self) -> nn.Module:
        """What `torch.jit.script` compiles: the plain module, whose calls pass the engine."""
        return self._ortmodule.module

    def _replicate_for_data_parallel(self) -> Any:
        raise StateError("ORTModule does not work inside nn.DataParallel: use DistributedDataParallel")


class _MakesPlain(type):
    """Of wrappers' classes: `type(wrapped)(config)`, as `from_pretrained` does, is a plain model. Attributes that are
    set there, or deleted, are those of the model's class."""

    _wrapped_class: type[nn.Module]

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return cls._wrapped_class(*args, **kwargs)

    def __setattr__(cls, name: str, value: Any) -> None:
        type.__setattr__(cls._owner(name), name, value)

    def __delattr__(cls, name: str) -> None:
        type.__delattr__(cls._owner(name), name)

    def _owner(cls, name: str) -> Any:
        own = name in vars(cls) or name.startswith("__") or "_wrapped_class" not in vars(cls)
        return cls if own else cls._wrapped_class


@functools.cache
def _metaclass(of: type) -> type:
    """The metaclass of wrappers' classes of a class whose metaclass is ``of``."""
    return types.new_class(of.__name__, (_MakesPlain, of) if of is not type else (_MakesPlain,))


def _wrapper(model: Any) -> str:
    """The name of what trains a module on several processes, if ``model`` is that and not the module."""
    if isinstance(model, nn.parallel.DistributedDataParallel):
        return "DistributedDataParallel"
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")  # each takes long to import
    if fsdp is not None and isinstance(model, fsdp.FullyShardedDataParallel):
        return "FullyShardedDataParallel"
    deepspeed: Any = sys.modules.get("deepspeed")
    engine = getattr(deepspeed, "DeepSpeedEngine", None)
    return "deepspeed.initialize" if engine is not None and isinstance(model, engine) else ""


def _wrap(model: nn.Module, debug_options: DebugOptions | None = None, config: Config | None = None) -> Any:
    if isinstance(model, ORTModule):
        raise ArgumentTypeError("the module is an ORTModule already")
    if isinstance(model, nn.DataParallel):
        raise ArgumentTypeError(
            "nn.DataParallel is not supported: wrap the module itself and use DistributedDataParallel"
        )
    if name := _wrapper(model):
        raise ArgumentTypeError(
            f"ORTModule comes before {name}: wrap the module itself, {name}(ORTModule(module), ...)"
        )
    if not isinstance(model, nn.Module):
        raise ArgumentTypeError(f"ORTModule wraps a torch.nn.Module, not {_described(model)}")
    dispatcher = Dispatcher(model, debug_options, config, _ATTACHMENTS)
    try:
        wrapped: Any = object.__new__(_class_for(model))
    except TypeError as error:
        if not dispatcher.fallback.at_wrapping(str(error)):
            raise
        return model
    object.__setattr__(wrapped, "__dict__", model.__dict__)
    object.__setattr__(wrapped, "_ortmodule", dispatcher)
    return wrapped


_ATTACHMENTS = Attachments(Observers.of, Saver.of, explain, ClusterTable.of, evaluate, _wrap)


def rewrap(wrapped: ORTModule, config: Config) -> None:
    """``wrapped`` has these settings from now on; its graphs are made anew."""
    before = wrapped._ortmodule
    dispatcher = Dispatcher(before.module, before.debug, config, _ATTACHMENTS)
    object.__setattr__(wrapped, "_ortmodule", dispatcher)


def _class_for(model: nn.Module) -> type:
    if isinstance(model, torch.jit.ScriptModule):
        raise ArgumentTypeError("a ScriptModule cannot be wrapped: pass the module that it was made from")
    return _wrapped_class(type(model))  # type: ignore[arg-type]  # torch annotates __hash__ in its own way


def _described(value: Any) -> str:
    return f"the class {value.__name__}: make an instance first" if isinstance(value, type) else type(value).__name__


def _is_or_wraps(self: ORTModule, other: object) -> bool:
    return self is other or self._ortmodule.module is other


def _change_class(self: ORTModule, cls: Any) -> None:
    """The plain module gets another class, derived from its own, as `torch.nn.utils.parametrize` makes one; the wrapper
    is of that, too. One that FSDP2 makes is the wrapper's alone, as are the hooks and the state that come with it."""
    module, before = self._ortmodule.module, type(self)
    if is_sharded(cls) and not is_sharded(before):
        vars(object)["__class__"].__set__(self, cls)
        return
    if cls is ORTModule:  # parametrize takes the first base of a class for the one that there was before
        plain: Any = type(module).__bases__[0]
    elif issubclass(cls, before):
        bases = tuple(type(module) if base is before else base for base in cls.__bases__)
        body = {name: value for name, value in vars(cls).items() if name not in ("__dict__", "__weakref__")}
        if not hasattr(type(module), "__deepcopy__"):  # of which parametrize gives a class one that has none
            body.setdefault("__deepcopy__", _copied_by_attributes)
        plain = types.new_class(cls.__name__, bases, exec_body=lambda namespace: namespace.update(body))
    else:
        raise ArgumentTypeError(
            f"the class of an ORTModule becomes one that is derived from it, which {cls.__name__} is not"
        )
    module.__class__ = plain
    vars(object)["__class__"].__set__(self, _wrapped_class(plain))


def _copied_by_attributes(module: nn.Module, memo: dict) -> nn.Module:
    memo[id(module)] = made = type(module).__new__(type(module))
    vars(made).update(copy.deepcopy(vars(module), memo))
    return made


def _hash_of_module(self: ORTModule) -> int:
    return hash(self._ortmodule.module)


@functools.cache
def _wrapped_class(cls: Any) -> type:
    """A class that is both; the same one for every module of ``cls``."""
    body = {
        "__doc__": cls.__doc__,
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__slots__": (),
        "_wrapped_class": cls,
        "forward": _Forward(cls.forward),
        "__class__": property(type, _change_class),
    }
    if is_sharded(cls):  # FSDP2 finds what it knows of a module by the module
        body |= {"__eq__": _is_or_wraps, "__hash__": _hash_of_module}
    of: Any = type(cls)
    made_by = {"metaclass": _metaclass(of)}
    return types.new_class(cls.__name__, (ORTModule, cls), made_by, lambda namespace: namespace.update(body))
