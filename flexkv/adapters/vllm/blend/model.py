"""vLLM's model classes with a forward pass that can blend. A step without blending computes exactly what vLLM's class
computes."""

from __future__ import annotations

from typing import Any, Protocol
from weakref import WeakSet

from vllm.model_executor.models.llama import LlamaForCausalLM
from vllm.model_executor.models.mistral import MistralForCausalLM
from vllm.model_executor.models.qwen2 import Qwen2ForCausalLM
from vllm.model_executor.models.qwen3 import Qwen3ForCausalLM

_models: WeakSet[Any] = WeakSet()


class Step(Protocol):
    """The blending work of one forward pass."""

    def forward(self, input_ids: Any, positions: Any) -> Any:
        """Returns the model's hidden states; None if the model's own forward pass must compute them."""


class BlendingModel:
    """A mixin for a model class of vLLM. It must precede that class in the list of base classes.

    Attributes:
        blend_step: the blending work of the next forward pass; None if there is none. The forward pass sets it to None,
            so that it serves only one forward pass, however late vLLM ends the step.
        blend_config: the configuration with which vLLM made the model.
    """

    blend_step: Step | None = None

    def __init__(self, *, vllm_config: Any, prefix: str = "", **more: Any) -> None:
        parent: Any = super()
        parent.__init__(vllm_config=vllm_config, prefix=prefix, **more)
        self.blend_config = vllm_config
        _models.add(self)

    def forward(
        self,
        input_ids: Any,
        positions: Any,
        intermediate_tensors: Any = None,
        inputs_embeds: Any = None,
        **more: Any,
    ) -> Any:
        step = self.blend_step
        if step is not None:
            self.blend_step = None
            if intermediate_tensors is None and inputs_embeds is None and not more:
                hidden = step.forward(input_ids, positions)
                if hidden is not None:
                    return hidden
        parent: Any = super()
        return parent.forward(input_ids, positions, intermediate_tensors, inputs_embeds, **more)


class FlexKVLlamaForCausalLM(BlendingModel, LlamaForCausalLM):
    """Llama, with blending."""


class FlexKVMistralForCausalLM(BlendingModel, MistralForCausalLM):
    """Mistral without a sliding window, with blending."""


class FlexKVQwen2ForCausalLM(BlendingModel, Qwen2ForCausalLM):
    """Qwen 2 and 2.5, with blending."""


class FlexKVQwen3ForCausalLM(BlendingModel, Qwen3ForCausalLM):
    """Qwen 3, with blending."""


def model_of(vllm_config: Any) -> Any:
    """Returns the model that the engine with this configuration has in this process; None if its class is not one of
    this module's."""
    part = vllm_config.cache_config  # the same object in all parts of an engine
    return next((model for model in list(_models) if model.blend_config.cache_config is part), None)
