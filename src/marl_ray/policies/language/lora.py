"""Low-rank adapters inside a language model: added, switched off, merged, written to a folder."""

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeGuard, cast

import torch
from peft import LoraConfig as PeftLoraConfig
from peft import inject_adapter_in_model
from peft.tuners.lora import Linear
from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D
from typing_extensions import override

from marl_ray.config.run.model import LoraConfig
from marl_ray.errors import MarlRayError

ADAPTER = "default"


def add_adapters(lm: PreTrainedModel, config: LoraConfig) -> None:
    """Freeze the model and give its target layers adapters, which change nothing yet.

    The model's object stays the same and gets other layers, so that no wrapper stands between FSDP2 and its decoder
    layers. `all-linear` leaves out the layer that makes the logits and those that peft cannot name. Raises MarlRayError
    if a target names no linear layer, a layer that shares the embedding's weights, or a layer that peft cannot name.
    """
    lm.requires_grad_(False)
    linear = {name: module for name, module in lm.named_modules() if _is_linear(module)}
    unnamed = _expert_layer_names(lm, linear)
    if isinstance(config.targets, str):
        head = lm.get_output_embeddings()
        names = [name for name, module in linear.items() if module is not head and _last_part(name) not in unnamed]
    else:
        names = [name for target in config.targets for name in _layers_of_target(lm, linear, target, unnamed)]
    if not names:
        raise MarlRayError("model.lora.targets: this model has no linear layers that take an adapter")
    transposed = any(isinstance(module, Conv1D) for module in linear.values())
    # peft makes an adapter on the device of its layer's weight. For a weight that is still in its file, a CPU tensor of
    # one number stands in.
    unread = {name: linear[name].weight for name in names if linear[name].weight.is_meta}
    for name, weight in unread.items():
        linear[name].weight = nn.Parameter(torch.zeros((), dtype=weight.dtype).expand(weight.shape), False)
    inject_adapter_in_model(_peft_config(config, names, transposed), lm, ADAPTER)
    for name, weight in unread.items():
        linear[name].weight = weight
    for layer in lm.modules():
        if isinstance(layer, Linear):
            layer.__class__ = AdaptedLinear


def _layers_of_target(
    lm: PreTrainedModel, linear: Mapping[str, nn.Linear | Conv1D], target: str, unnamed: set[str]
) -> list[str]:
    """Return the names of the linear layers that a target names."""
    matching = [name for name in linear if f".{name}".endswith(f".{target}")]
    if not matching:
        raise MarlRayError(f"model.lora.targets: no linear layer is named {target!r}")
    if any(linear[name].weight is lm.get_input_embeddings().weight for name in matching):
        raise MarlRayError(f"model.lora.targets: {target!r} shares its weights with the embedding")
    if unnamed & set(map(_last_part, matching)):
        kind = lm.config.model_type
        raise MarlRayError(
            f"model.lora.targets: peft takes {target!r} of architecture {kind} for its experts, which are no linear layers"
        )
    return matching


def _expert_layer_names(lm: PreTrainedModel, linear: Iterable[str]) -> set[str]:
    """Return the last names of linear layers that peft takes for a mixture's experts or router.

    These layers have no adapters here. transformers keeps experts as one tensor that no layer holds, and peft reads the
    names that they once had, such as `gate_proj`, as that tensor. A shared expert's layers still have these names.
    """

    def is_mistaken(name: str) -> bool:
        peft_config = PeftLoraConfig(target_modules=[name])
        try:
            convert_peft_config_for_transformers(peft_config, lm, None)
        except ValueError:  # peft takes the layer for a part of a tensor
            return True
        return name not in (peft_config.target_modules or ())

    return {name for name in set(map(_last_part, linear)) if is_mistaken(name)}


def _is_linear(module: nn.Module) -> TypeGuard[nn.Linear | Conv1D]:
    """Return True if the module computes a linear layer.

    One that only derives from such a layer does not: Phi-MoE's router returns the chosen experts.
    """
    if type(module) in (nn.Linear, Conv1D):
        return True
    if not isinstance(module, nn.Linear):
        return False
    try:
        with torch.no_grad():
            output = module(module.weight.new_zeros(1, module.in_features))
    except Exception:  # a module that expects other inputs may raise anything
        return False
    return isinstance(output, Tensor) and output.shape == (1, module.out_features)


def _last_part(name: str) -> str:
    return name.rpartition(".")[2]


def _peft_config(config: LoraConfig, targets: list[str] | str, transposed: bool) -> PeftLoraConfig:
    alpha: Any = config.alpha  # peft declares it an int, and only divides it by the rank
    return PeftLoraConfig(r=config.rank, lora_alpha=alpha, target_modules=targets, fan_in_fan_out=transposed)


def adapted_layers(module: nn.Module) -> list[tuple[str, "AdaptedLinear"]]:
    """Return the name and layer of every layer that has an adapter."""
    return [(name, layer) for name, layer in module.named_modules() if isinstance(layer, AdaptedLinear)]


@contextmanager
def without_adapters(module: nn.Module) -> Iterator[None]:
    """Let the model compute without its adapters, within the block."""
    layers = [layer for _, layer in adapted_layers(module)]
    # peft's `enable_adapters` would also freeze the adapters' weights, and FSDP2 remembers that from its first gather.
    for layer in layers:
        layer._disable_adapters = True  # noqa: SLF001  peft's
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False  # noqa: SLF001  peft's


def lay_matrices_together(module: nn.Module) -> None:
    """Move each adapted weight and its adapter's second matrix side by side, so that no product has to copy them."""
    for _, layer in adapted_layers(module):
        base, up = layer.matrix, layer.up
        stacked = torch.cat([base.detach(), up.detach()], 1)
        if layer.fan_in_fan_out:
            stacked = stacked.T.contiguous().T
        parts = stacked.split([base.shape[1], up.shape[1]], 1)
        layer.weight.data = parts[0].T if layer.fan_in_fan_out else parts[0]
        up.data = parts[1]


def merged_weights(module: nn.Module) -> dict[str, Tensor]:
    """Return the module's state with its adapters merged, by the names of the model without adapters.

    Each weight contains its adapter. Sums are in float32, results in the weight's own type: base + alpha / rank * up @
    down (arXiv 2106.09685, equation 3).
    """
    layers, weights = dict(adapted_layers(module)), {}
    for name, value in module.state_dict().items():
        if is_adapter(name):
            continue
        owner, _, kind = name.rpartition(".")
        layer = layers.get(owner.removesuffix(".base_layer"))
        if layer is not None and kind == "weight":
            # A GPU has no room for one more copy of a large model's weights.
            value = merged_weight(layer, value).cpu()
        weights[bare_name(name)] = value.detach().contiguous()
    return weights


def merged_weight(layer: "AdaptedLinear", weight: Tensor) -> Tensor:
    """Return the `weight` of a layer, with the layer's adapter, in the weight's own type; the sum is in float32."""
    delta = (layer.up.float() @ layer.down.float()) * layer.scale
    return (weight.float() + (delta.T if layer.fan_in_fan_out else delta)).to(weight.dtype)


def is_adapter(name: str) -> bool:
    """Return True for the name of an adapter's weight."""
    return ".lora_" in name


def bare_name(name: str) -> str:
    """Return the name that a weight has in the model without adapters."""
    return name.replace(".base_layer.", ".")


def bare_weights(module: nn.Module) -> dict[str, Tensor]:
    """Return the module's state without its adapters, by the names of the model without adapters; nothing is copied."""
    return {bare_name(name): value.detach() for name, value in module.state_dict().items() if not is_adapter(name)}


def save_adapters(module: nn.Module, config: LoraConfig, base: str | None, folder: Path) -> None:
    """Write a folder that `peft.PeftModel.from_pretrained(model, folder)` reads; `base` names the bare model."""
    layers = adapted_layers(module)
    names = sorted({name for name, _ in layers})
    peft = _peft_config(config, names, any(layer.fan_in_fan_out for _, layer in layers))
    peft.task_type, peft.base_model_name_or_path, peft.inference_mode = "CAUSAL_LM", base, True
    peft.save_pretrained(str(folder))
    # peft writes sets in any order, but a bundle's name is a hash of its files, so the lists are sorted.
    path = folder / "adapter_config.json"
    written = json.loads(path.read_text()) | {"target_modules": names}
    path.write_text(json.dumps(written, indent=1, sort_keys=True))
    tensors = {
        f"base_model.model.{name}.lora_{part}.weight": matrix.detach().cpu().contiguous()
        for name, layer in layers
        for part, matrix in (("A", layer.down), ("B", layer.up))
    }
    save_file(tensors, str(folder / "adapter_model.safetensors"), {"format": "pt"})


class AdaptedLinear(Linear):
    """A linear layer with an adapter, whose sum is rounded once.

    In bfloat16 the sum of the rounded outputs of layer and adapter equals the layer's output wherever the adapter's is
    below half a unit in the last place, so a small adapter would have no effect. Here both are one product, [x, s x
    A^T] [W, B]^T, which is added up in float32.
    """

    @property
    def matrix(self) -> Tensor:
        """(outputs, inputs) W; GPT-2 keeps its weights transposed."""
        weight: Tensor = self.weight
        return weight.T if self.fan_in_fan_out else weight

    @property
    def down(self) -> nn.Parameter:
        """(rank, inputs) A."""
        return cast(nn.Parameter, self.lora_A[ADAPTER].weight)

    @property
    def up(self) -> nn.Parameter:
        """(outputs, rank) B."""
        return cast(nn.Parameter, self.lora_B[ADAPTER].weight)

    @property
    def scale(self) -> float:
        """s: alpha / rank."""
        return float(self.scaling[ADAPTER])

    @override
    def forward(self, x: Tensor, *args: object, **kwargs: object) -> Tensor:
        if self.disable_adapters or self.up.dtype == torch.float32:
            return super().forward(x, *args, **kwargs)
        return cast(Tensor, LowRankSum.apply(x, self.matrix, self.bias, self.down, self.up, self.scale))  # type: ignore[no-untyped-call]  # torch's


class LowRankSum(torch.autograd.Function):
    """x W^T + s x A^T B^T + b of frozen W and b.

    The weights' copy that the product needs is not kept for the backward pass, in which FSDP2 gathers them anew.
    """

    @staticmethod
    @override
    def forward(
        ctx: Any, x: Tensor, base: Tensor, bias: Tensor | None, down: Tensor, up: Tensor, scale: float
    ) -> Tensor:
        inner = functional.linear(x, down) * scale
        ctx.save_for_backward(x, inner, base, down, up)
        ctx.scale = scale
        return functional.linear(torch.cat([x, inner], -1), _lay_side_by_side(base, up), bias)

    @staticmethod
    @override
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        x, inner, base, down, up = ctx.saved_tensors
        of_inner = (gradient @ up) * ctx.scale
        rows, inner_rows = gradient.flatten(0, -2), of_inner.flatten(0, -2)
        of_x = gradient @ base + of_inner @ down if ctx.needs_input_grad[0] else None
        return of_x, None, None, inner_rows.T @ x.flatten(0, -2), rows.T @ inner.flatten(0, -2), None


def _lay_side_by_side(base: Tensor, up: Tensor) -> Tensor:
    """Lay the two side by side, (outputs, inputs + rank); without a copy where they lie so."""
    step = base.shape[1] * base.stride(1)
    if (
        base.untyped_storage().data_ptr() == up.untyped_storage().data_ptr()
        and base.stride() == up.stride()
        and up.storage_offset() == base.storage_offset() + step
    ):
        return base.as_strided((len(base), base.shape[1] + up.shape[1]), base.stride(), base.storage_offset())
    return torch.cat([base, up], 1)
