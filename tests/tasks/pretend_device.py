"""A simulated device: its tensors lie in CPU memory, and mixing them with CPU tensors is an error.

Code for a GPU runs here without a GPU and with correct numbers. It fails where a GPU would fail: operations
on tensors of both devices, and `numpy()` on the device. GPU kernels are not covered.

Import it before any module of perilune and in a separate process, because it registers the PyTorch backend
for private devices.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

_setup_privateuseone_for_python_backend("pretend")
torch.pretend.get_amp_supported_dtype = lambda: [torch.bfloat16]  # asked for by recomputation
DEVICE = torch.device("pretend", 0)

_CROSSING = {"aten::copy_", "aten::_to_copy"}
_INDEXED = {"aten::index", "aten::index_put_", "aten::_index_put_impl_"}  # an index may lie on the CPU


class DeviceTensor(torch.Tensor):
    """A tensor that reports the simulated device."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> DeviceTensor:
        outer = torch.Tensor._make_wrapper_subclass(
            cls, inner.size(), strides=inner.stride(), storage_offset=inner.storage_offset(),
            dtype=inner.dtype, device=DEVICE,
        )  # fmt: skip
        outer.inner = inner
        return outer

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})

    def __getitem__(self, key: Any) -> Any:
        return super().__getitem__(_indices(key))

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(_indices(key), value)

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def numpy(self, *_: Any, **__: Any) -> Any:
        raise TypeError("can't convert a device's tensor to numpy")

    __array__ = numpy


class Device(TorchDispatchMode):
    """A context in which the device exists."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


def _run(func: Any, args: Any, kwargs: Any) -> Any:
    name = func._schema.name
    tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
    there = [t for t in tensors if isinstance(t, DeviceTensor)]
    here = [t for t in tensors if not isinstance(t, DeviceTensor) and t.dim() and not t.is_meta]
    indexed_here = name in _INDEXED and not isinstance(args[0], DeviceTensor)
    if there and (indexed_here or (here and name not in _CROSSING | _INDEXED)):
        raise RuntimeError(f"{func}: tensors on the device and on the CPU")
    on_device = bool(there)
    wanted = kwargs.get("device")
    if wanted is not None:
        on_device = torch.device(wanted).type == DEVICE.type
        kwargs = {**kwargs, "device": torch.device("cpu") if on_device else wanted}
    inner_args, inner_kwargs = tree_map_only(DeviceTensor, lambda t: t.inner, (args, kwargs))
    out = func(*inner_args, **inner_kwargs)
    if func._schema.is_mutable and name.endswith("_"):
        return args[0]
    known = {id(t.inner): t for t in there}
    if not on_device:
        return out
    return tree_map_only(Tensor, lambda t: known[id(t)] if id(t) in known else DeviceTensor(t), out)


def _indices(key: Any) -> Any:
    """Convert lists to tensors, which PyTorch would otherwise do out of sight of the dispatch mode."""
    if isinstance(key, list):
        return torch.tensor(key, dtype=torch.int64)
    return tuple(map(_indices, key)) if isinstance(key, tuple) else key


def _here_first(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Wrap `make` to create the tensor on the CPU and then move it, visibly to the dispatch mode."""

    def made(data: Any, *args: Any, device: Any = None, **kwargs: Any) -> Tensor:
        tensor = make(data, *args, **kwargs)
        return tensor if device is None else tensor.to(device)

    return made


torch.tensor, torch.as_tensor = _here_first(torch.tensor), _here_first(torch.as_tensor)
# A wrapped tensor keeps count of its versions, and an inference tensor does not.
torch.inference_mode = lambda mode=True: torch.no_grad()
