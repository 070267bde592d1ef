"""A run's model with its adapter, on the meta device: PEFT merges each layer when its base weight comes by.

Nothing but the adapter has memory. PEFT itself computes what a merged layer is (rsLoRA, DoRA and transposed layers are
its business), in fp32.
"""

from __future__ import annotations

from typing import Any, Literal, cast

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from sft_play.errors import ModelError
from sft_play.finished.run import FinishedRun
from sft_play.training.checkpoints.full_state_dict import ADAPTER_FILE, is_duplicate_name, model_names_by_saved_name
from sft_play.training.model.model_loading import TORCH_DTYPES, quantization_config
from sft_play.training.model.nf4_experts import nf4_roundtrip
from sft_play.training.prepare.model_spec import build_model_spec
from sft_play.training.prepare.tokenizer import added_token_rows

# Of a QLoRA run: which weights the adapter is added to, the base's own or what NF4 makes of them.
MergeBase = Literal["original", "dequantized"]


class AdaptedModel:
    """The run's model on the meta device with its adapter, whose layers are merged as base weights come by."""

    def __init__(self, run: FinishedRun, *, base: MergeBase | None) -> None:
        self.run, self.base = run, base
        self.precision = run.plan().precision
        trusts_code = run.config.model.trust_remote_code
        self.tokenizer = AutoTokenizer.from_pretrained(run.weights, trust_remote_code=trusts_code)
        self.model_spec = build_model_spec(
            run.config, self.precision, tokenizer_size=len(self.tokenizer),
            new_rows=added_token_rows(self.tokenizer, run.config),
        )  # fmt: skip
        self.base_model = self._build_meta_model()
        self.tensor_names = frozenset(self.base_model.state_dict())
        """Names of all tensors of the model as transformers holds it, tied ones too."""
        tied_sources = dict(getattr(self.base_model, "all_tied_weights_keys", None) or {})
        self.quantized_names = self._find_quantized_names() if base == "dequantized" else frozenset()
        self.adapted_layers: dict[str, Any] = {}
        self.fully_trained_tensors: dict[str, torch.Tensor] = {}
        self.trained_embedding_rows: dict[str, tuple[list[int], torch.Tensor]] = {}
        """By name, embeddings of which only some rows were trained: the indices of these rows, and the rows."""
        self._load_adapter(self._build_meta_model())
        shared = next(
            (name for name, source in tied_sources.items() if {name, source} <= self.adapted_layers.keys()), None
        )
        if shared is not None:
            raise ModelError(
                f"the adapter cannot be merged: blocks of a {type(self.base_model).__name__} share "
                f"{tied_sources[shared]}, and each "
                "has changes of its own to it; serve the base with the adapter"
            )
        self.untied_sources = {name: source for name, source in tied_sources.items() if self._is_untied(name, source)}
        """Tensors that the base ties to others and that training made different, with the name of the other."""
        self.tied_tensors = frozenset(tied_sources) - set(self.untied_sources)

    def _build_meta_model(self) -> Any:
        with torch.device("meta"):
            trusts_code = self.run.config.model.trust_remote_code
            config = self.model_spec.hf_config
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, trust_remote_code=trusts_code)
            if self.model_spec.resize_to is not None:
                # new rows from the mean of the old ones (the default) need numbers, which meta tensors lack
                model.resize_token_embeddings(self.model_spec.resize_to, mean_resizing=False)
        model.sft_tower = self.model_spec.text_tower
        return model.eval()

    def _find_quantized_names(self) -> frozenset[str]:
        from transformers.quantizers import AutoHfQuantizer

        # transformers decides which layers it leaves alone (the head, what a class excludes), so it is asked again
        model = self._build_meta_model()
        quantization = quantization_config(
            self.precision, quantizes_experts=self.run.config.tuning.has_quantized_experts
        )
        quantizer = AutoHfQuantizer.from_config(quantization, pre_quantized=False)
        quantizer.preprocess_model(model=model, dtype=TORCH_DTYPES[self.precision.load], device_map=None)
        names = [name for name, _ in model.named_parameters()]
        return frozenset(name for name in names if quantizer.param_needs_quantization(model, name))

    def _load_adapter(self, model: Any) -> None:
        from peft import get_peft_model
        from peft.tuners.lora import LoraLayer
        from peft.tuners.lora.layer import ParamWrapper
        from peft.utils import ModulesToSaveWrapper, TrainableTokensWrapper
        from safetensors.torch import load_file

        file = self.run.weights / ADAPTER_FILE
        # a product of two bf16 factors, or a sum with a bf16 weight, would round what was trained
        tower = self.model_spec.text_tower
        to_full_name = str if tower is None else tower.to_full_name
        saved = {
            to_full_name(name): tensor.float()
            for name, tensor in load_file(file).items()
            if not is_duplicate_name(name)
        }
        peft_model = get_peft_model(model, cast("Any", self.model_spec.peft_config))
        names = model_names_by_saved_name(peft_model)
        mismatched_names = sorted(set(names) ^ set(saved))
        if mismatched_names:
            raise ModelError(f"{file} is the adapter of another model: {mismatched_names[0]} is in one of them only")
        for name, tensor in saved.items():
            shape = tuple(peft_model.get_parameter(names[name]).shape)
            if shape != tuple(tensor.shape):
                shapes = f"{name} has the shape {tuple(tensor.shape)}, and this model's has {shape}"
                raise ModelError(f"{file} is the adapter of another model: {shapes}")
        # PEFT's own loading would move what it reads to where the base is, which is nowhere
        peft_model.load_state_dict({names[name]: tensor for name, tensor in saved.items()}, strict=False, assign=True)
        base_model = peft_model.get_base_model()
        for module_name, module in base_model.named_modules():
            if isinstance(module, ParamWrapper):  # nested, where a module has several such weights
                experts = module_name.removesuffix(".base_layer")
                self.adapted_layers[f"{experts}.{module.parameter_name}"] = module
            elif isinstance(module, LoraLayer):
                self.adapted_layers[f"{module_name}.weight"] = module
            elif isinstance(module, ModulesToSaveWrapper):
                for name, parameter in module.modules_to_save["default"].named_parameters():
                    self.fully_trained_tensors[f"{module_name}.{name}"] = parameter.detach()
            elif isinstance(module, TrainableTokensWrapper) and module.token_adapter.tied_adapter is None:
                adapter = module.token_adapter
                trained = adapter.trainable_tokens_delta["default"].detach()
                self.trained_embedding_rows[f"{module_name}.weight"] = (adapter.token_indices["default"], trained)

    def _is_untied(self, name: str, source: str) -> bool:
        if (name in self.fully_trained_tensors) != (source in self.fully_trained_tensors):
            return True
        return name in self.fully_trained_tensors and not torch.equal(
            self.fully_trained_tensors[name], self.fully_trained_tensors[source]
        )

    def trained_shape(self, name: str, base_shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of a tensor after training, given the base's: embeddings may have more rows."""
        if name in self.trained_embedding_rows:
            return (max(base_shape[0], max(self.trained_embedding_rows[name][0]) + 1), *base_shape[1:])
        return tuple(self.fully_trained_tensors[name].shape) if name in self.fully_trained_tensors else base_shape

    def trained_tensor(self, name: str, base_tensor: torch.Tensor) -> torch.Tensor:
        """The tensor of this name as it is after training, given the base's; in fp32 where training changed it."""
        if name in self.fully_trained_tensors:
            return self.fully_trained_tensors[name]
        if name in self.trained_embedding_rows:
            row_indices, trained = self.trained_embedding_rows[name]
            table = base_tensor.new_zeros(self.trained_shape(name, tuple(base_tensor.shape)), dtype=torch.float32)
            table[: len(base_tensor)] = base_tensor
            table[row_indices] = trained
            return table
        layer = self.adapted_layers.get(name)
        if layer is None and name not in self.quantized_names:
            return base_tensor
        weight = self._training_weight(name, base_tensor)
        if layer is None:
            return weight
        return _merge_layer(layer, weight)

    def _training_weight(self, name: str, base_tensor: torch.Tensor) -> torch.Tensor:
        """The base's weight in fp32, rounded to NF4 and back where the adapter is merged into such."""
        if name not in self.quantized_names:
            return base_tensor.float()
        # from the dtype in which training loaded it before it quantised: from fp32 other values would round otherwise
        return nf4_roundtrip(base_tensor.to(TORCH_DTYPES[self.precision.load]))


def _merge_layer(layer: Any, weight: torch.Tensor) -> torch.Tensor:
    base_layer, parameter_name = layer.get_base_layer(), getattr(layer, "parameter_name", "weight")
    meta_weight = getattr(base_layer, parameter_name)
    setattr(base_layer, parameter_name, nn.Parameter(weight.clone(), requires_grad=False))
    try:
        layer.merge(safe_merge=True)  # merges a copy, and raises ValueError unless all of it is finite (PEFT 0.21)
        result: torch.Tensor = getattr(base_layer, parameter_name).data
    except ValueError as error:
        raise ModelError(f"the adapter makes values that are not finite: {error}") from None
    finally:
        # back to the meta device: kept in its layer, every merged weight would stay in RAM
        layer.merged_adapters.clear()
        setattr(base_layer, parameter_name, meta_weight)
    return result
