from vllm.config.vllm import VllmConfig, get_layers_from_vllm_config

__all__ = ["VllmConfig", "get_layers_from_vllm_config"]
