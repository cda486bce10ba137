from dataclasses import dataclass, field

from vllm.config.cache import CacheConfig
from vllm.config.compilation import CompilationConfig
from vllm.config.model import ModelConfig
from vllm.config.scheduler import SchedulerConfig
from vllm.config.speculative import SpeculativeConfig


@dataclass
class VllmConfig:
    model_config: ModelConfig
    scheduler_config: SchedulerConfig
    compilation_config: CompilationConfig = field(default_factory=CompilationConfig)
    speculative_config: SpeculativeConfig | None = None
    cache_config: CacheConfig = field(default_factory=CacheConfig)


def get_layers_from_vllm_config(vllm_config, layer_type, layer_names=None):
    layers = vllm_config.compilation_config.static_forward_context
    return {name: layers[name] for name in layer_names or layers if isinstance(layers[name], layer_type)}
