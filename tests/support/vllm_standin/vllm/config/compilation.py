from dataclasses import dataclass, field
from typing import Any


@dataclass
class CompilationConfig:
    max_cudagraph_capture_size: int | None = None
    static_forward_context: dict[str, Any] = field(default_factory=dict)
