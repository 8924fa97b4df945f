"""Has Triton's interpreter make each type once: making types is most of the time of a small kernel."""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
from triton.language import core
from triton.runtime import interpreter


def share() -> None:
    """From here on, in this process."""
    builder = interpreter.interpreter_builder
    # Checks of overflow are computed but asserted only under `debug`, which the interpreter has not.
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
    core.block_type.__init__ = _blocks(core.block_type.__init__)
    core.tensor.__init__ = _tensors(core.tensor.__init__)
    interpreter._get_np_dtype = _np_dtypes(interpreter._get_np_dtype)
    interpreter._convert_float = _conversions(interpreter._convert_float)


def _blocks(make: Callable[..., None]) -> Callable[..., None]:
    """Equal types share all that they have."""
    known: dict[Any, dict[str, Any]] = {}

    def init(self: Any, element_ty: Any, shape: Any) -> None:
        key = (element_ty.name, getattr(element_ty, "address_space", 0), *[getattr(size, "value", size) for size in shape])
        if key in known:
            self.__dict__ = known[key]
        else:
            make(self, element_ty, shape)
            known[key] = self.__dict__

    return init


def _tensors(make: Callable[..., None]) -> Callable[..., None]:
    """Their types have all of them but the handle."""

    def init(self: Any, handle: Any, type: Any) -> None:  # noqa: A002
        if "of_tensors" in type.__dict__:
            self.__dict__.update(type.of_tensors)
            self.handle = handle
        else:
            make(self, handle, type)
            type.of_tensors = {name: value for name, value in self.__dict__.items() if name != "handle"}

    return init


def _np_dtypes(make: Callable[..., Any]) -> Callable[..., Any]:
    def np_dtype(type: Any) -> Any:  # noqa: A002
        if "np_dtype" not in type.__dict__:
            type.np_dtype = make(type)
        return type.np_dtype

    return np_dtype


def _conversions(make: Callable[..., Any]) -> Callable[..., Any]:
    """Between fp32 and bf16 bits are shifted, as others are converted in dozens of steps."""

    def convert(data: Any, source: Any, target: Any, rounding: Any) -> Any:
        if (source.name, target.name) == ("bf16", "fp32"):
            return data.view(np.uint16).astype(np.uint32) << 16
        if (source.name, target.name, rounding) == ("fp32", "bf16", None):
            return (data.view(np.uint32) >> 16).astype(np.uint16)
        return make(data, source, target, rounding)

    return convert
