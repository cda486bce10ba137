from dataclasses import dataclass

import torch


@dataclass
class ModelConfig:
    dtype: torch.dtype
