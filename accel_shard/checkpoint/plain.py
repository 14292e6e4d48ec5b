"""Plain data, to JSON and back without loss: what a snapshot holds beside tensors. No pickle.

Numbers, strings, booleans, None, lists, tuples, dictionaries with any plain keys, bytes, small tensors and numpy
arrays survive; anything else is refused by the path at which it was found.
"""

from __future__ import annotations

import base64
from typing import Any

import torch

from accel_shard.errors import SnapshotError

__all__ = ["decode", "encode"]

_TAG = "__accel_shard__"


def encode(value: Any, path: str) -> Any:
    """Return JSON data that :func:`decode` turns back into an equal value.

    Raises:
        SnapshotError: naming ``path`` and the type of what would need pickle.
    """
    if value is None or (isinstance(value, (bool, int, float, str)) and type(value) in (bool, int, float, str)):
        return value
    if isinstance(value, list):
        return [encode(item, f"{path}[{i}]") for i, item in enumerate(value)]
    if type(value) is tuple:
        return {_TAG: "tuple", "items": [encode(item, f"{path}[{i}]") for i, item in enumerate(value)]}
    if isinstance(value, dict):
        if all(isinstance(key, str) and key != _TAG for key in value):
            return {key: encode(item, f"{path}.{key}") for key, item in value.items()}
        pairs = [[encode(key, f"{path} key"), encode(item, f"{path}[{key!r}]")] for key, item in value.items()]
        return {_TAG: "dict", "items": pairs}
    if isinstance(value, bytes):
        return {_TAG: "bytes", "data": base64.b64encode(value).decode()}
    if isinstance(value, torch.Tensor) and hasattr(value, "untyped_storage"):
        host = value.detach().cpu().contiguous()
        raw = host.reshape(-1).view(torch.uint8).numpy().tobytes()
        name = str(host.dtype).removeprefix("torch.")
        return {_TAG: "tensor", "dtype": name, "shape": list(host.shape), "data": base64.b64encode(raw).decode()}
    return _encode_numpy(value, path)


def _encode_numpy(value: Any, path: str) -> Any:
    import numpy as np

    if isinstance(value, np.generic):
        value = np.asarray(value)
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
        data = base64.b64encode(np.ascontiguousarray(value).tobytes()).decode()
        return {_TAG: "array", "dtype": value.dtype.str, "shape": list(value.shape), "data": data}
    raise SnapshotError(
        f"{path} is a {type(value).__module__}.{type(value).__qualname__}, which would need pickle. Allowed: numbers, "
        "strings, booleans, None, lists, tuples, dictionaries, bytes, tensors and numpy arrays."
    )


def decode(value: Any) -> Any:
    """Return what :func:`encode` was given."""
    if isinstance(value, list):
        return [decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    kind = value.get(_TAG)
    if kind is None:
        return {key: decode(item) for key, item in value.items()}
    if kind == "tuple":
        return tuple(decode(item) for item in value["items"])
    if kind == "dict":
        return {decode(key): decode(item) for key, item in value["items"]}
    raw = base64.b64decode(value["data"])
    if kind == "bytes":
        return raw
    if kind == "tensor":
        flat = torch.frombuffer(bytearray(raw), dtype=torch.uint8) if raw else torch.empty(0, dtype=torch.uint8)
        return flat.view(getattr(torch, value["dtype"])).reshape(value["shape"])
    import numpy as np

    array = np.frombuffer(raw, dtype=np.dtype(value["dtype"])).reshape(value["shape"]).copy()
    return array[()] if not value["shape"] else array
