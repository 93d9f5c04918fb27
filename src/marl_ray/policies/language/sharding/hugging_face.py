"""Write a model in Hugging Face's format, of which no process has all weights.

Each weight goes to its file as it arrives.
"""

import json
import struct
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from marl_ray.policies.language.sharding.stored_weights import FLOAT_TYPES

MAX_FILE_BYTES = 5 << 30
"""Maximum number of bytes of weights of a file, unless a single weight has more."""
DTYPE_NAMES = {dtype: name for name, dtype in FLOAT_TYPES.items()}
"""Number type -> its name in safetensors."""


def write_model(
    folder: Path,
    lm: Any,
    shapes: Mapping[str, Tensor],
    weights: Iterable[tuple[str, Tensor]],
    file_bytes: int = MAX_FILE_BYTES,
) -> None:
    """Write `lm`, whose own weights may be on the meta device, to a new folder.

    `weights` arrive one by one, by the names and in the order, shapes and types of `shapes`, in which tied ones stand
    once. Raises ValueError for a weight that is another one, and for fewer or more weights than `shapes` names.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lm.config.dtype, lm.config.architectures = str(lm.dtype).removeprefix("torch."), [type(lm).__name__]
    lm.config.save_pretrained(folder)
    if lm.can_generate():
        lm.generation_config.save_pretrained(folder)
    files: list[dict[str, Tensor]] = [{}]
    for name, expected in shapes.items():
        if files[-1] and sum(other.nbytes for other in files[-1].values()) + expected.nbytes > file_bytes:
            files.append({})
        files[-1][name] = expected
    stem, count, arriving = SAFE_WEIGHTS_NAME.removesuffix(".safetensors"), len(files), iter(weights)
    places: dict[str, str] = {}
    for number, part in enumerate(files, 1):
        file = SAFE_WEIGHTS_NAME if count == 1 else f"{stem}-{number:05}-of-{count:05}.safetensors"
        places |= dict.fromkeys(part, file)
        _write_file(folder / file, part, arriving)
    if next(arriving, None) is not None:
        raise ValueError("weights: there are more than were expected")
    if count > 1:
        size = {"total_size": sum(expected.nbytes for expected in shapes.values())}
        index = json.dumps({"metadata": size, "weight_map": places}, indent=2, sort_keys=True)
        (folder / SAFE_WEIGHTS_INDEX_NAME).write_text(index + "\n", encoding="utf-8")


def _write_file(path: Path, part: Mapping[str, Tensor], arriving: Iterator[tuple[str, Tensor]]) -> None:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, expected in part.items():
        header[name] = {
            "dtype": DTYPE_NAMES[expected.dtype],
            "shape": list(expected.shape),
            "data_offsets": [end, end + expected.nbytes],
        }
        end += expected.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the numbers begin at a multiple of 8 bytes
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name, expected in part.items():
            arrived, tensor = next(arriving, ("", None))
            description, got = _describe(name, expected), "none" if tensor is None else _describe(arrived, tensor)
            if tensor is None or got != description:
                raise ValueError(f"weights: expected {description}, got {got}")
            file.write(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)


def _describe(name: str, tensor: Tensor) -> str:
    """Return the name, the number type and the shape of a weight."""
    return f"{name} {tensor.dtype} {list(tensor.shape)}"
