"""``fake_cuda``: tensors that say ``cuda:0`` and compute on the CPU, so that guards can run where there is no GPU.

It shows which calls *would* make the host wait or allocate; nothing of time, streams, graphs or kernels. Values are real, so a
loop takes the branches that it takes on a GPU. Beneath is a wrapper tensor and two modes; where PyTorch refuses to touch a CUDA
tensor in a build without CUDA before any mode is asked, the call is carried out here (``indexing``).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from dspark_lab.errors import LabError
from dspark_lab.guards import watch
from dspark_lab.guards.indexing import get_item, set_item

DEVICE = torch.device("cuda", 0)
_CPU = torch.device("cpu")
_active: list[_FakeDispatch] = []
_SAME_SHELL = torch._has_compatible_shallow_copy_type  # pyright: ignore[reportPrivateImportUsage]


class FakeCudaTensor(Tensor):
    """A tensor that says ``cuda:0``; ``_on_cpu`` holds its values."""

    _on_cpu: Tensor

    @staticmethod
    def __new__(cls, on_cpu: Tensor) -> FakeCudaTensor:
        made = Tensor._make_wrapper_subclass(  # pyright: ignore[reportAttributeAccessIssue]
            cls,
            on_cpu.size(),
            strides=on_cpu.stride(),
            storage_offset=on_cpu.storage_offset(),
            dtype=on_cpu.dtype,
            device=DEVICE,
            requires_grad=False,
        )
        made._on_cpu = on_cpu
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # pyright: ignore

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"fake_cuda({self.cpu()!r}, device='{DEVICE}')"

    __str__ = __repr__
    __format__ = object.__format__  # type: ignore[assignment]


def is_active() -> bool:
    """Whether a fake device is there."""
    return bool(_active)


def is_fake(value: Any) -> bool:
    return isinstance(value, FakeCudaTensor)


def storage_of(tensor: Tensor) -> int:
    """A number for the storage behind a tensor, the same for views of it."""
    real = tensor._on_cpu if isinstance(tensor, FakeCudaTensor) else tensor
    try:
        return real.untyped_storage()._cdata
    except (RuntimeError, NotImplementedError):
        return id(real)


@contextmanager
def fake_cuda() -> Iterator[torch.device]:
    """A fake CUDA device in this region and thread: ``torch.tensor(n, device="cuda")``, ``.to``, arithmetic, indexing, ``.item()``,
    pinned memory, ``torch.cuda.Event`` and ``Stream`` work on the CPU. Enter it before a guard. Gives the device.

    Raises:
        LabError: entered twice or inside a guard; inside the region, where a call cannot be faked.
    """
    if _active:
        raise LabError("fake_cuda() is open already; one fake device is enough.")
    if watch.is_armed():
        raise LabError(
            "fake_cuda() inside a guard would be seen by nobody; enter it first: with fake_cuda(), no_host_sync(): …"
        )
    if torch.cuda.is_available():
        torch.cuda.init()  # the real one first: PyTorch asks for it once only
    lifted = torch._C._only_lift_cpu_tensors()
    with ExitStack() as stack:
        for name, value in _stand_ins().items():
            stack.enter_context(patch.object(torch.cuda, name, value))
        torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(…, device=) asks the modes for its copy
        stack.callback(torch._C._set_only_lift_cpu_tensors, lifted)
        mode = _FakeDispatch()
        _active.append(mode)
        stack.callback(_active.clear)
        stack.enter_context(mode)
        stack.enter_context(_FakeFunction())
        yield DEVICE


def _stand_ins() -> dict[str, Any]:
    """What replaces names of ``torch.cuda``. Streams do nothing and every event is over as soon as it is recorded."""

    class FakeEvent:
        def __init__(self, enable_timing: bool = False, blocking: bool = False, **_: Any) -> None: ...
        def record(self, stream: Any = None) -> None: ...
        def wait(self, stream: Any = None) -> None: ...
        def synchronize(self) -> None: ...
        def query(self) -> bool:
            return True

    class FakeStream:
        def __init__(self, device: Any = None, priority: int = 0, **_: Any) -> None:
            self.device = DEVICE

        def synchronize(self) -> None: ...
        def wait_event(self, event: Any) -> None: ...
        def wait_stream(self, stream: Any) -> None: ...
        def query(self) -> bool:
            return True

        def record_event(self, event: Any = None) -> Any:
            return event or torch.cuda.Event()

        def __enter__(self) -> Any:
            return self

        def __exit__(self, *_: Any) -> None: ...

    default = FakeStream()

    @contextmanager
    def stream(stream: Any) -> Iterator[Any]:
        yield stream

    def synchronize(device: Any = None) -> None: ...

    return {
        "_lazy_init": lambda: None,
        "is_available": lambda: True,
        "is_initialized": lambda: False,  # nobody should ask the real driver anything
        "is_current_stream_capturing": lambda: False,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda device: None,
        "get_device_name": lambda device=None: "fake CUDA device",
        "current_stream": lambda device=None: default,
        "default_stream": lambda device=None: default,
        "synchronize": synchronize,
        "stream": stream,
        "Event": FakeEvent,
        "Stream": FakeStream,
    }


def _with_index(value: Any) -> Any:
    """``cuda`` as ``cuda:0``: a build without CUDA cannot look the index up."""
    if value == "cuda" or (isinstance(value, torch.device) and value.type == "cuda"):
        return DEVICE
    return value


class _FakeFunction(TorchFunctionMode):
    """Calls that a build without CUDA refuses before any dispatch mode is asked."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = {k: _with_index(v) for k, v in (kwargs or {}).items()}
        args = tuple(_with_index(a) for a in args)
        if func is Tensor.cuda:
            return args[0].to(DEVICE, non_blocking=kwargs.get("non_blocking", args[2] if len(args) > 2 else False))
        if func is Tensor.pin_memory:
            return _active[-1].pin(args[0].clone())
        if func is _SAME_SHELL:  # asked by module.to: may the parameter keep its shell
            return is_fake(args[0]) == is_fake(args[1])
        if args and isinstance(args[0], FakeCudaTensor):
            done = _on_fake(func, args, kwargs)
            if done is not None:
                return done.value
        elif func is Tensor.__setitem__ and args and isinstance(args[2], FakeCudaTensor):
            return set_item(*args)
        elif func is Tensor.__getitem__ and any(isinstance(k, FakeCudaTensor) for k in tree_leaves(args[1])):
            return get_item(*args)
        try:
            return func(*args, **kwargs)
        except RuntimeError as e:
            if "not linked with support for cuda" in str(e) or "compiled with CUDA" in str(e):
                name = resolve_name(func) or getattr(func, "__name__", str(func))
                raise LabError(f"the fake CUDA device does not cover {name}; run this test on a GPU.") from e
            raise


_NUMBERS: dict[Any, Any] = {Tensor.__int__: int, Tensor.__index__: int, Tensor.__float__: float, Tensor.__bool__: bool}


def _on_fake(func: Any, args: Any, kwargs: Any) -> SimpleNamespace | None:
    """Calls on a fake tensor that need another way; None where the usual one works."""
    x = args[0]
    if func is Tensor.__getitem__:
        return SimpleNamespace(value=get_item(*args))
    if func is Tensor.__setitem__:
        return SimpleNamespace(value=set_item(*args))
    if func in (Tensor.nonzero, torch.nonzero):
        rows = torch.ops.aten.nonzero.default(x)
        as_tuple = kwargs.get("as_tuple", False)
        return SimpleNamespace(value=tuple(torch.ops.aten.unbind.int(rows, 1)) if as_tuple else rows)
    if func in _NUMBERS:
        return SimpleNamespace(value=_NUMBERS[func](torch.ops.aten._local_scalar_dense.default(x)))
    if func is Tensor.copy_:
        source = args[1] if len(args) > 1 else kwargs["src"]
        non_blocking = args[2] if len(args) > 2 else kwargs.get("non_blocking", False)
        return SimpleNamespace(value=torch.ops.aten.copy_.default(x, source, non_blocking))
    if func is Tensor.new_tensor:
        kwargs = {"dtype": x.dtype, "device": DEVICE} | kwargs
        return SimpleNamespace(value=torch.tensor(args[1], **kwargs))
    if func is Tensor.tolist:
        return SimpleNamespace(value=torch.ops.aten._to_copy.default(x, device=_CPU).tolist())
    if func in (Tensor.numpy, Tensor.__array__):
        raise TypeError(
            "can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() to copy the tensor to host memory first."
        )
    if func is Tensor.data_ptr:
        return SimpleNamespace(value=x._on_cpu.data_ptr())
    return None


class _FakeDispatch(TorchDispatchMode):
    """Everything that reaches the dispatcher, factories with ``device="cuda"`` among it."""

    def __init__(self) -> None:
        super().__init__()
        self._pinned: dict[int, Any] = {}

    def pin(self, tensor: Tensor) -> Tensor:
        self._pinned[storage_of(tensor)] = tensor.untyped_storage()  # held, so that the number is not given away
        return tensor

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = func._schema.name
        if name == "aten::is_pinned":
            return not is_fake(args[0]) and storage_of(args[0]) in self._pinned
        pinned = kwargs.pop("pin_memory", None)
        if name == "aten::_to_copy" and is_fake(args[0]) and kwargs.get("non_blocking"):
            pinned = kwargs.get("device") == _CPU
        out = _run(func, args, kwargs)
        return self.pin(out) if pinned and isinstance(out, Tensor) and not is_fake(out) else out


def _run(func: Any, args: Any, kwargs: Any) -> Any:
    """Carry an operation out on the CPU, and dress what comes out as it would be on the device."""
    leaves = tree_leaves((args, kwargs))
    fakes = [x for x in leaves if isinstance(x, FakeCudaTensor)]
    device = kwargs.get("device")
    if device is None:
        device = next((x for x in leaves if isinstance(x, torch.device)), None)
    to_device = bool(fakes) if device is None else device.type == "cuda"
    name = func._schema.name
    if fakes and name not in ("aten::copy_", "aten::_to_copy", "aten::to"):
        _same_device(name, leaves)
    if name in ("aten::copy_", "aten::_foreach_copy_"):
        to_device = is_fake(args[0] if name == "aten::copy_" else args[0][0])
    if name in ("aten::_local_scalar_dense", "aten::item", "aten::is_nonzero", "aten::equal"):
        to_device = False
    on_cpu = tree_map(
        lambda x: x._on_cpu if isinstance(x, FakeCudaTensor) else _CPU if _is_cuda(x) else x, (args, kwargs)
    )
    out = func(*on_cpu[0], **on_cpu[1])
    if name in ("aten::to", "aten::_to_copy") and fakes and device is not None and device.type == "cpu":
        return out.clone() if out is fakes[0]._on_cpu else out
    if name == "aten::to" and not fakes and to_device and out is args[0]:
        out = out.clone()
    worn = {id(x._on_cpu): x for x in fakes}

    def dress(x: Any) -> Any:
        if not isinstance(x, Tensor) or is_fake(x):
            return x
        if id(x) in worn:
            if worn[id(x)].shape != x.shape:
                raise LabError(f"the fake CUDA device does not cover {name}, which changes a tensor's shape in place.")
            return worn[id(x)]
        return FakeCudaTensor(x) if to_device else x

    return tree_map(dress, out)


def _is_cuda(value: Any) -> bool:
    return isinstance(value, torch.device) and value.type == "cuda"


def _same_device(name: str, leaves: list[Any]) -> None:
    """CPU tensors beside device ones are legal as single numbers and as indices alone, as on a GPU."""
    strangers = [x for x in leaves if isinstance(x, Tensor) and not is_fake(x) and x.dim()]
    if strangers and not name.startswith(("aten::index", "aten::_index_put")):
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu! ({name})"
        )
