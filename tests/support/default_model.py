"""The default model and the same file loaded by transformers: seconds of CPU time, once in each process."""

from __future__ import annotations

import functools

import pytest
import torch
import transformers

from graphrt.models.loading import LoadedModel, load_model
from graphrt.models.smollm import default_model_path

gguf = pytest.importorskip("gguf")


@functools.cache
def default_model() -> LoadedModel:
    """The model in float32 on the CPU. Offline this fails: no other test shows that its tokens are right."""
    return load_model(default_model_path(), device="cpu", dtype=torch.float32)


@functools.cache
def default_oracle() -> transformers.PreTrainedModel:
    path = default_model_path()
    with pytest.MonkeyPatch.context() as patch:  # transformers parses the file twice, and all names 397 times
        for name in ("GGUFReader", "get_tensor_name_map"):
            patch.setattr(gguf, name, functools.cache(getattr(gguf, name)))
        return transformers.AutoModelForCausalLM.from_pretrained(
            path.parent, gguf_file=path.name, dtype=torch.float32, attn_implementation="eager"
        ).eval()
