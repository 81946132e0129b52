"""Where a model is: choosing, warning about and moving between devices."""

import os
import sys
import warnings
from typing import Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor, nn

_ALLOW_MPS = "TRANSFORMERLENS_ALLOW_MPS"


@runtime_checkable
class ModelWithCfg(Protocol):
    """A model that has a config and can be moved."""

    cfg: object

    def state_dict(self) -> dict[str, Tensor]:
        """The parameters by name."""
        ...

    def to(self, device_or_dtype: torch.device | str | torch.dtype) -> object:
        """The model elsewhere."""
        ...


Model = TypeVar("Model", bound=nn.Module)


def get_device() -> str:
    """The device to use: "cuda" if there is one, "mps" if `TRANSFORMERLENS_ALLOW_MPS=1` allows it, else "cpu"."""
    if torch.cuda.is_available():
        return "cuda"
    mps = torch.backends.mps
    if mps.is_available() and mps.is_built() and os.environ.get(_ALLOW_MPS, "") == "1":
        return "mps"
    return "cpu"


def warn_if_mps(device: str | torch.device) -> None:
    """A warning on the MPS backend, whose results may be wrong, unless `TRANSFORMERLENS_ALLOW_MPS=1`."""
    kind = device.type if isinstance(device, torch.device) else device
    if kind == "mps" and os.environ.get(_ALLOW_MPS, "") != "1":
        warnings.warn(
            f"MPS backend may produce silently incorrect results (PyTorch {torch.__version__}); "
            f"set {_ALLOW_MPS}=1 to suppress this warning",
            UserWarning,
            stacklevel=2,
        )


def move_to_and_update_config(
    model: Model, device_or_dtype: torch.device | str | torch.dtype, print_details: bool = True
) -> Model:
    """The model moved or cast in place by `nn.Module.to`, with `cfg.device` or `cfg.dtype` updated."""
    cfg = model.cfg
    nn.Module.to(model, device_or_dtype)
    if isinstance(device_or_dtype, torch.dtype):
        if hasattr(cfg, "dtype"):
            cfg.dtype = device_or_dtype
        line = f"Changing model dtype to {device_or_dtype}"
    else:
        warn_if_mps(device_or_dtype)
        name = device_or_dtype.type if isinstance(device_or_dtype, torch.device) else device_or_dtype
        setattr(cfg, "device", name)  # noqa: B010 - what a config is, nobody has said
        line = f"Moving model to device:  {name}"
    if print_details:
        sys.stdout.write(f"{line}\n")
    return model


def print_gpu_mem(step_name: str = "") -> None:
    """Write to stdout how much of the GPU's memory tensors take, in GiB."""
    used = round(torch.cuda.memory_allocated() / 2**30, 2)
    sys.stdout.write(f"{step_name} ~ {used} GiB allocated on GPU.\n")
