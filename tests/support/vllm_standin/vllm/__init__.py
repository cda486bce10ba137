"""Stand-in of the parts of vLLM that graphrt uses; scripts/check_vllm_interface.py compares it with the package."""
