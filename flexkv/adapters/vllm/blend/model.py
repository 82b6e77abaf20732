"""vLLM's model classes with a forward pass that may blend. Without a plan, it equals the parent's bit for bit."""

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
        """The model's hidden states; None if the model itself must compute them."""


class BlendingModel:
    """A mixin that comes before a model class of vLLM.

    Attributes:
        blend_step: the blending work of the next forward pass; None for none. The forward pass takes it, so that it
            serves only one forward pass, however late vLLM ends the step.
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
    """Llama."""


class FlexKVMistralForCausalLM(BlendingModel, MistralForCausalLM):
    """Mistral without a window."""


class FlexKVQwen2ForCausalLM(BlendingModel, Qwen2ForCausalLM):
    """Qwen 2 and 2.5."""


class FlexKVQwen3ForCausalLM(BlendingModel, Qwen3ForCausalLM):
    """Qwen 3."""


def model_of(vllm_config: Any) -> Any:
    """This process's model of the engine with this configuration; None if its class is none of these."""
    part = vllm_config.cache_config  # the same object for every part of an engine
    return next((model for model in list(_models) if model.blend_config.cache_config is part), None)
