"""The files of a language model: read at once, or into a model that was built empty, of which each worker reads its part."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME
from transformers.utils.hub import cached_file, get_checkpoint_shard_files

from marl_ray.errors import MarlRayError, one_line
from marl_ray.policies.language.lora import bare_name
from marl_ray.policies.language.sharding.gather_shards import own_part

FLOATS = {"F32", "F16", "BF16"}
"""Number types that float32 contains, so that weights are equal however they are converted on the way."""


@dataclass(frozen=True)
class StoredWeights:
    """Files of weights. They are open, so that they can still be read after their folder is deleted."""

    files: Mapping[str, Any]
    """Name of a weight -> the open safetensors file that contains it. Its tensors are views of the mapped file."""

    @torch.no_grad()
    def read_into(self, lm: nn.Module, device: torch.device) -> None:
        """Give a model's weights on the meta device their values, on `device` and in their own type. Of a weight that is
        sharded only this worker's shard is read."""
        state: dict[str, nn.Parameter] = {}
        for tied in tied_names(lm):
            parameter = lm.get_parameter(tied[0])
            if parameter.is_meta:
                value = nn.Parameter(self._read(tied, parameter, device), parameter.requires_grad)
                state |= dict.fromkeys(tied, value)
        lm.load_state_dict(state, strict=False, assign=True)

    @torch.no_grad()
    def read_complete(self, tied: list[str], parameter: Tensor, device: torch.device) -> Tensor:
        """The complete value of a weight on the meta device, one of `tied` names, on `device` and in the weight's type."""
        key = self._key(tied)
        return torch.empty_like(parameter, device=device).copy_(self.files[key].get_slice(key)[:])

    def _key(self, tied: list[str]) -> str:
        return next(filter(self.files.__contains__, map(bare_name, tied)))

    def _read(self, tied: list[str], parameter: Tensor, device: torch.device) -> Tensor:
        if not isinstance(parameter, DTensor):
            return self.read_complete(tied, parameter, device)
        key = self._key(tied)
        stored = self.files[key].get_slice(key)
        mesh, local = parameter.device_mesh, parameter.to_local()
        own = torch.empty(local.shape, dtype=local.dtype, device=device).copy_(stored[own_part(parameter)])
        shape, stride = parameter.shape, parameter.stride()
        return DTensor.from_local(own, mesh, parameter.placements, run_check=False, shape=shape, stride=stride)


def load_model(path: str, dtype: torch.dtype, context: int) -> Any:
    """A causal language model's weights in `dtype`, on CPU.

    transformers builds the model on the meta device and fills it tensor by tensor from mapped files, so there is never
    more than one copy. Only safetensors are read: other weights are pickles.
    """
    settings = _settings(path, context)
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            path,
            config=settings,
            dtype=dtype,
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are named below
        )
    except Exception as error:  # transformers raises different errors for different models
        reason = _broken_file(path) or one_line(error)
        raise MarlRayError(f"model.path {path!r} is no causal language model: {reason}") from error
    lm, info = loaded
    for name, shape, expected in sorted(info["mismatched_keys"]):
        raise MarlRayError(f"model.path {path!r}: its weight {name} is {list(shape)}, expected {list(expected)}")
    missing = sorted(info["missing_keys"])
    if missing:
        raise MarlRayError(f"model.path {path!r} lacks {len(missing)} weights of its model, such as {missing[0]}")
    return lm


def empty_model(path: str, context: int) -> tuple[Any, StoredWeights] | None:
    """A causal language model with float32 weights on the meta device, and the files that contain them.

    None if only `load_model` can read it, or say what is wrong with it: transformers converts the weights of some
    architectures, a weight is missing or has another shape, or a file is broken. Draws no random numbers.
    """
    settings = _settings(path, context)
    try:
        stored = StoredWeights(_opened(path))
        with torch.random.fork_rng(devices=[]):
            lm = empty_lm(settings)
        if cached_file(path, "generation_config.json", _raise_exceptions_for_missing_entries=False):
            lm.generation_config = GenerationConfig.from_pretrained(path)
    except Exception:  # `load_model` names the cause
        return None
    converted = getattr(settings, "quantization_config", None) or (Path(path) / "adapter_config.json").is_file()
    return (lm.eval(), stored) if not converted and _fits(lm, stored) else None


def empty_lm(settings: Any) -> Any:
    """A causal language model of a config. Its float32 weights are on the meta device; its buffers have their numbers."""
    with init_empty_weights(include_buffers=False):
        lm = AutoModelForCausalLM.from_config(settings, dtype=torch.float32)
    lm.tie_weights()
    return lm


def tied_names(lm: nn.Module) -> list[list[str]]:
    """The names of each parameter, of which a tied one has several."""
    names: dict[int, list[str]] = {}
    for name, parameter in lm.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return list(names.values())


def not_a_model(path: str, error: Exception) -> MarlRayError:
    """The error for a folder, or a name at huggingface.co, that transformers does not take."""
    if Path(path).is_dir():
        return MarlRayError(f"model.path {path!r} is no causal language model: {one_line(error)}")
    expected = "expected a folder, or the name of a causal language model at huggingface.co"
    return MarlRayError(f"model.path {path!r} cannot be loaded: {expected}: {one_line(error)}")


def _settings(path: str, context: int) -> Any:
    """The model's config. Raises MarlRayError if there is none, or it has fewer positions than `context`."""
    if path.startswith(("/", ".", "~")) and not Path(path).is_dir():
        raise MarlRayError(f"model.path {path!r} is no folder")
    try:
        settings = AutoConfig.from_pretrained(path)
    except Exception as error:  # transformers raises different errors for different models
        raise not_a_model(path, error) from error
    positions = getattr(settings.get_text_config(), "max_position_embeddings", None) or context
    if positions < context:
        raise MarlRayError(f"model.context={context}: {path!r} has positions for {positions} tokens")
    return settings


def _files(path: str) -> list[str]:
    """The safetensors files of a model, one or several."""
    single = cached_file(path, SAFE_WEIGHTS_NAME, _raise_exceptions_for_missing_entries=False)
    if single is None:
        index = cached_file(path, SAFE_WEIGHTS_INDEX_NAME)
        names: list[str] = get_checkpoint_shard_files(path, index)[0]
        return names
    return [single]


def check_files(path: str, lm: nn.Module) -> None:
    """Raise MarlRayError if a file of a model's folder is missing or broken, or a weight of it is missing or of another
    model than `lm`, which may be on the meta device. Headers are read, and no weights."""
    where = f"model.path {path!r}"
    try:
        stored = _opened(path)
    except Exception as error:  # a SafetensorError or an OSError
        raise MarlRayError(f"{where}: {_broken_file(path) or one_line(error)}") from error
    own = dict(lm.named_parameters(remove_duplicate=False))
    for name in sorted(own.keys() & stored.keys()):
        shape = stored[name].get_slice(name).get_shape()
        if shape != list(own[name].shape):
            raise MarlRayError(f"{where}: its weight {name} is {shape}, expected {list(own[name].shape)}")
    missing = [names[0] for names in tied_names(lm) if not stored.keys() & set(names)]
    if missing and stored.keys() <= own.keys():  # otherwise transformers may read others under these names
        raise MarlRayError(f"{where} lacks {len(missing)} weights of its model, such as {missing[0]}")


def _broken_file(path: str) -> str | None:
    """The first file of a model that cannot be opened, and why; None if all can."""
    try:
        names = _files(path)
    except Exception:  # a missing file, which the error of transformers names
        return None
    for name in names:
        try:
            safe_open(name, "pt")
        except Exception as error:  # a SafetensorError or an OSError
            return f"{Path(name).name}: {one_line(error)}"
    return None


def _opened(path: str) -> dict[str, Any]:
    """Name of a weight -> its open file. Opening compares a file's length with its header."""
    files: dict[str, Any] = {}
    for name in _files(path):
        file: Any = safe_open(name, "pt")
        files |= dict.fromkeys(file.keys(), file)
    return files


def _fits(lm: nn.Module, stored: StoredWeights) -> bool:
    """True if the files contain each of the model's tensors once, by its own name, and in its shape."""
    parameters = dict(lm.named_parameters(remove_duplicate=False))
    for names in tied_names(lm):
        keys = [name for name in names if name in stored.files]
        if len(keys) != 1:
            return False
        part = stored.files[keys[0]].get_slice(keys[0])
        if part.get_shape() != list(parameters[keys[0]].shape) or part.get_dtype() not in FLOATS:
            return False
    return lm.state_dict().keys() <= parameters.keys()
