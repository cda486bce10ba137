from dataclasses import dataclass


@dataclass
class CacheConfig:
    kv_sharing_fast_prefill: bool = False
