"""The files of a language model.

The weights are read at once, or into a model that was built empty, of which each worker reads its part.
"""

import json
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from safetensors import safe_open
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME
from transformers.utils.hub import cached_file, get_checkpoint_shard_files

from marl_ray.errors import MarlRayError, one_line
from marl_ray.policies.language.lora import bare_name, is_adapter
from marl_ray.policies.language.sharding.stored_weights import FLOAT_TYPES, StoredWeights, open_weights, tied_names

NUMBER_TYPES = (*FLOAT_TYPES, "F64")
"""Types of weights that are numbers as they are, by their names in safetensors."""


def load_model(path: str, dtype: torch.dtype, context: int) -> Any:
    """Return a causal language model's weights in `dtype`, on CPU.

    transformers builds the model on the meta device and fills it tensor by tensor from mapped files, so there is never
    more than one copy. Only safetensors are read: other weights are pickles.
    """
    return _load_model(path, _settings(path, context), dtype=dtype)


def _load_model(path: str, settings: Any, **options: Any) -> Any:
    """Return the model that transformers makes of files.

    Raises MarlRayError unless these have all of its weights in their shapes, and no further block.
    """
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            path,
            config=settings,
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are named below
            **options,
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
    _check_blocks(path, lm, info["unexpected_keys"])
    return lm


def _check_blocks(path: str, lm: nn.Module, names: Collection[str]) -> None:
    """Raise MarlRayError if names of weights are those of a block that the model has not."""
    for name in _further_blocks(lm, names):
        raise MarlRayError(f"model.path {path!r}: its config.json has no block for the weight {name}")


def _further_blocks(lm: Any, names: Collection[str]) -> list[str]:
    """Return the names that differ from those of a model's weights by the number of their block alone.

    Blocks that an architecture has for more than the next token, which transformers leaves out, do not count.
    """
    if getattr(lm.config.get_text_config(), "num_nextn_predict_layers", None):
        return []
    parameter_names = {name for name, _ in lm.named_parameters(remove_duplicate=False)}
    forms = {re.sub(r"\.\d+\.", ".*.", name) for name in parameter_names}
    ignored = lm._keys_to_ignore_on_load_unexpected or ()  # noqa: SLF001  transformers'
    return sorted(
        name
        for name in set(names) - parameter_names
        if re.sub(r"\.\d+\.", ".*.", name) in forms and not any(re.search(pattern, name) for pattern in ignored)
    )


def empty_model(path: str, context: int) -> tuple[Any, StoredWeights] | None:
    """Return a causal language model with float32 weights on the meta device, and the files that contain them.

    Returns None if only `load_model` can read it, or say what is wrong with it: transformers converts the weights of some
    architectures, a weight is missing or has another shape, or a file is broken. Draws no random numbers. Raises
    MarlRayError for an index that tells nothing, for a weight that two files have, and for one whose numbers
    need a scale.
    """
    settings = _settings(path, context)
    try:
        stored = open_weights(_files(path))
        with torch.random.fork_rng(devices=[]):
            lm = empty_lm(settings)
        _check_numbers(lm, stored)
        if cached_file(path, "generation_config.json", _raise_exceptions_for_missing_entries=False):
            lm.generation_config = GenerationConfig.from_pretrained(path)
    except MarlRayError as error:
        raise MarlRayError(f"model.path {path!r}: {error}") from error
    except Exception:  # `load_model` names the cause
        return None
    converted = getattr(settings, "quantization_config", None) or (Path(path) / "adapter_config.json").is_file()
    return (lm.eval(), stored) if not converted and _fits(lm, stored) else None


def reads_by_shards(path: str, context: int) -> bool:
    """Return False if a model's files have to be read whole, as `empty_model` says.

    Returns True also while there are no files.
    """
    try:
        _files(path)
    except Exception:  # transformers raises different errors
        return True
    return empty_model(path, context) is not None


def check_same_model(lm: nn.Module, stored: StoredWeights) -> None:
    """Raise MarlRayError unless files contain each weight of a model once, in its shape, and no others.

    The model may have adapters, whose weights the files do not have.
    """
    shapes = {bare_name(name): list(value.shape) for name, value in lm.named_parameters(remove_duplicate=False)}
    tied = [[bare_name(name) for name in names] for names in tied_names(lm) if not is_adapter(names[0])]
    for names in tied:
        held = [name for name in names if name in stored.tensors]
        if not held:
            raise MarlRayError(f"holds a language model of another shape: it lacks {names[0]}")
        for name in held[1:] or held:
            shape, kind = list(stored.tensors[name].shape), stored.tensors[name].kind
            if len(held) > 1 or shape != shapes[name] or kind not in FLOAT_TYPES:
                raise MarlRayError(f"holds a language model of another shape: {name} is {shape}")
    for name in sorted(stored.tensors.keys() - {name for names in tied for name in names}):
        shape = list(stored.tensors[name].shape)
        raise MarlRayError(f"holds a language model of another shape: {name} is {shape}")


def empty_lm(settings: Any) -> Any:
    """Return a causal language model of a config.

    The float32 weights are on the meta device; the buffers have their numbers.
    """
    with init_empty_weights(include_buffers=False):
        lm = AutoModelForCausalLM.from_config(settings, dtype=torch.float32)
    lm.tie_weights()
    return lm


def not_a_model(path: str, error: Exception) -> MarlRayError:
    """Return the error for a folder, or a name at huggingface.co, that transformers does not take."""
    if Path(path).is_dir():
        return MarlRayError(f"model.path {path!r} is no causal language model: {one_line(error)}")
    expected = "expected a folder, or the name of a causal language model at huggingface.co"
    return MarlRayError(f"model.path {path!r} cannot be loaded: {expected}: {one_line(error)}")


def _settings(path: str, context: int) -> Any:
    """Return the model's config. Raises MarlRayError if there is none, or it has fewer positions than `context`."""
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
    """Return the safetensors files of a model, one or several.

    Raises MarlRayError for an index that does not tell them.
    """
    single = cached_file(path, SAFE_WEIGHTS_NAME, _raise_exceptions_for_missing_entries=False)
    if single is None:
        index = cached_file(path, SAFE_WEIGHTS_INDEX_NAME)
        _check_index(Path(str(index)))
        names: list[str] = get_checkpoint_shard_files(path, index)[0]
        return names
    return [single]


def _check_index(index: Path) -> None:
    try:
        content = json.loads(index.read_text(encoding="utf-8"))
        files = content["weight_map"].values()
        is_valid = (
            bool(files) and all(isinstance(file, str) for file in files) and isinstance(content["metadata"], dict)
        )
    except (ValueError, KeyError, TypeError, AttributeError):
        is_valid = False
    if not is_valid:
        raise MarlRayError(
            f"{index.name}: expected a JSON object with metadata, and with weight_map: weight to its file"
        )


def check_files(path: str, lm: nn.Module) -> None:
    """Raise MarlRayError unless a model's folder holds the weights of `lm`, which may be on the meta device.

    No file may be missing or broken, and no weight missing or of another model. Headers are read, and no weights.
    """
    where = f"model.path {path!r}"
    try:
        files = open_weights(_files(path))
        _check_numbers(lm, files)
    except Exception as error:  # a SafetensorError or an OSError
        raise MarlRayError(f"{where}: {_broken_file(path) or one_line(error)}") from error
    stored = files.tensors
    parameters = dict(lm.named_parameters(remove_duplicate=False))
    for name in sorted(parameters.keys() & stored.keys()):
        shape, expected = list(stored[name].shape), list(parameters[name].shape)
        if shape != expected:
            raise MarlRayError(f"{where}: its weight {name} is {shape}, expected {expected}")
    missing = [names[0] for names in tied_names(lm) if not stored.keys() & set(names)]
    if missing and stored.keys() <= parameters.keys():
        raise MarlRayError(f"{where} lacks {len(missing)} weights of its model, such as {missing[0]}")
    if missing:  # transformers may read others under these names
        _load_model(path, lm.config, device_map="meta")
    _check_blocks(path, lm, stored.keys())


def _check_numbers(lm: Any, stored: StoredWeights) -> None:
    """Raise MarlRayError for a weight whose numbers need a scale, in files that say nothing of quantization."""
    if getattr(lm.config, "quantization_config", None):
        return
    for name, _ in lm.named_parameters(remove_duplicate=False):
        kind = stored.tensors[name].kind if name in stored.tensors else NUMBER_TYPES[0]
        if kind not in NUMBER_TYPES:
            raise MarlRayError(f"its weight {name} is of type {kind}, expected one of {', '.join(NUMBER_TYPES)}")


def _broken_file(path: str) -> str | None:
    """Return the first file of a model that cannot be opened, and why; None if all can."""
    try:
        names = _files(path)
    except MarlRayError as error:
        return str(error)
    except Exception:  # a missing file, which the error of transformers names
        return None
    for name in names:
        try:
            safe_open(name, "pt")
        except Exception as error:  # a SafetensorError or an OSError
            return f"{Path(name).name}: {one_line(error)}"
    return None


def _fits(lm: nn.Module, stored: StoredWeights) -> bool:
    """Return True if the files contain each of the model's tensors once, and no further block.

    A tensor is there by its own name and in its shape.
    """
    parameters = dict(lm.named_parameters(remove_duplicate=False))
    for names in tied_names(lm):
        keys = [name for name in names if name in stored.tensors]
        if len(keys) != 1:
            return False
        part = stored.tensors[keys[0]]
        if part.shape != tuple(parameters[keys[0]].shape) or part.kind not in FLOAT_TYPES:
            return False
    if _further_blocks(lm, stored.tensors.keys()):
        return False
    return lm.state_dict().keys() <= parameters.keys()
