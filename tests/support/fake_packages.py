"""Stand-ins for the peers' packages that compute on CPU, so that the contract runs through the backends' own code.

Each has the calls that its backend makes, with the real packages' shapes, units and habits: memory of pad tokens left
as it was, logarithms to base 2, biases by key position.
"""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import pytest
import torch

from graphrt.backends.base import AttentionBackend
from graphrt.kernels.attention.options import AttentionOptions
from graphrt.kernels.attention.reference import attention_reference

NAN = float("nan")


def install(monkeypatch: pytest.MonkeyPatch, module_name: str, **functions: Any) -> None:
    """Install a module with these functions, so that `import` and `find_spec` find it."""
    module = ModuleType(module_name)
    module.__spec__ = ModuleSpec(module_name, None, origin="fake")
    for name, value in functions.items():
        setattr(module, name, value)
    monkeypatch.setitem(sys.modules, module_name, module)


def install_package(monkeypatch: pytest.MonkeyPatch, backend_name: str, module_name: str) -> None:
    """Replace the package of a backend by the fake one."""
    package = PACKAGES[backend_name]
    names = [name for name in vars(package) if not name.startswith("_")]
    install(monkeypatch, module_name, **{name: getattr(package, name) for name in names})
    monkeypatch.setattr("graphrt.backends.flashinfer._SMALLEST_WORKSPACE", 1 << 10)


def attend(q, k, v, table, lengths, starts, options: AttentionOptions):
    """Return output and natural log-sum-exp [tokens, ...] of packed queries; NaN in padding tokens."""
    out, lse = torch.empty_like(q), torch.empty(q.shape[:2])
    attention_reference(q.contiguous(), k, v, table, lengths, starts, out, options, lse)
    pad = (torch.arange(q.shape[0]) >= starts[-1]) | (lse[:, 0] == -math.inf)
    return torch.where(pad[:, None, None], NAN, out), torch.where(pad[:, None], NAN, lse)


def _starts(q):
    return torch.arange(q.shape[0] + 1, dtype=torch.int32) * q.shape[1]


class FlashAttention3:
    @staticmethod
    def get_scheduler_metadata(*, batch_size, cache_seqlens, num_splits, **kwargs):
        assert num_splits > 0
        return torch.cat([cache_seqlens, torch.zeros(3 * batch_size + 1, dtype=torch.int32)])

    @staticmethod
    def flash_attn_with_kvcache(
        q, k, v, *, cache_seqlens, page_table, softmax_scale, causal, window_size, scheduler_metadata, num_splits,
        return_softmax_lse, cache_leftpad=None, cu_seqlens_q=None, max_seqlen_q=None, sinks=None,
        q_descale=None, k_descale=None, v_descale=None,
    ):  # fmt: skip
        starts = _starts(q) if cu_seqlens_q is None else cu_seqlens_q
        rows, shape = len(cache_seqlens), q.shape
        packed = q if cu_seqlens_q is not None else q.flatten(0, 1)
        if q_descale is not None:
            assert packed.dtype == torch.float8_e4m3fn
            row = torch.searchsorted(starts[1:], torch.arange(len(packed)), right=True).clamp(max=rows - 1)
            scales = q_descale[row].repeat_interleave(shape[-2] // k.shape[2], 1)
            packed = (packed.float() * scales[..., None]).to(torch.bfloat16)
        options = AttentionOptions(
            softmax_scale, causal, window_size[0] + 1, sinks=None if sinks is None else sinks.float(),
            k_scale=None if k_descale is None else k_descale[0].contiguous(),
            v_scale=None if v_descale is None else v_descale[0].contiguous(),
        )  # fmt: skip
        # By the schedule's lengths: a stale one gives a stale result.
        out, lse = attend(packed, k, v, page_table, scheduler_metadata[:rows], starts, options)
        if cu_seqlens_q is not None:
            return out, lse.T, None, None
        return out.view(shape), lse.view(rows, shape[1], -1).transpose(1, 2), None, None


class FlashAttention2:
    @staticmethod
    def _options(softmax_scale, causal, window_size, softcap, alibi_slopes):
        return AttentionOptions(
            softmax_scale, causal, window_size[0] + 1, logits_softcap=softcap, alibi_slopes=alibi_slopes
        )

    @classmethod
    def flash_attn_with_kvcache(
        cls, q, k, v, *, cache_seqlens, block_table, num_splits, return_softmax_lse, alibi_slopes, **kwargs
    ):
        options = cls._options(alibi_slopes=alibi_slopes, **kwargs)
        out, lse = attend(q.flatten(0, 1), k, v, block_table, cache_seqlens, _starts(q), options)
        if alibi_slopes is not None and kwargs["window_size"][0] < 0:
            tokens = torch.arange(len(out))
            at = cache_seqlens[tokens // q.shape[1]] - q.shape[1] + tokens % q.shape[1]
            lse = lse + at[:, None] * alibi_slopes
        return out.view(q.shape), lse.view(q.shape[0], q.shape[1], -1).transpose(1, 2)

    @classmethod
    def flash_attn_varlen_func(
        cls, q, k, v, starts, kv_starts, max_q, max_k, *, block_table, return_attn_probs, **kwargs
    ):
        lengths = (kv_starts[1:] - kv_starts[:-1]).contiguous()
        out, lse = attend(q, k, v, block_table, lengths, starts, cls._options(**kwargs))
        return out, lse.T, None


class _Wrapper:
    def _attend(self, q, cache, starts, return_lse):
        k, v = (c.transpose(1, 2) if self.kv_layout == "HND" else c for c in cache)
        indptr, counts = self.indptr[:-1], self.indptr[1:] - self.indptr[:-1]
        at = indptr[:, None] + torch.arange(self.width)
        listed = torch.arange(self.width) < counts[:, None]
        table = torch.where(listed, self.indices[at.clamp(max=len(self.indices) - 1)], 0).to(torch.int32)
        lengths = ((counts - 1) * self.page_size + self.last_page_len).to(torch.int32)
        options = AttentionOptions(self.scale, True, self.window_left + 1, logits_softcap=self.softcap)
        out, lse = attend(q.to(self.out_dtype), k, v, table, lengths, starts, options)
        return out, lse / math.log(2.0)

    def _keep(self, page_size, options):
        self.page_size, self.scale = page_size, options["sm_scale"]
        self.window_left, self.softcap = options["window_left"], options["logits_soft_cap"]
        self.out_dtype = options["o_data_type"]
        fp8 = options["kv_data_type"].itemsize == 1
        assert self.out_dtype == (torch.float16 if fp8 else options["q_data_type"])


class FlashInfer:
    class BatchDecodeWithPagedKVCacheWrapper(_Wrapper):
        def __init__(
            self, workspace, kv_layout, *, use_cuda_graph, use_tensor_cores, paged_kv_indptr_buffer,
            paged_kv_indices_buffer, paged_kv_last_page_len_buffer, backend,
        ):  # fmt: skip
            self.kv_layout, self.indptr, self.indices = kv_layout, paged_kv_indptr_buffer, paged_kv_indices_buffer
            self.last_page_len = paged_kv_last_page_len_buffer
            self.width = len(self.indices) // len(self.last_page_len)
            self._int_workspace_buffer = self._pin_memory_int_workspace_buffer = torch.zeros(1)

        def plan(self, indptr, indices, last_page_len, num_q_heads, num_kv_heads, head_dim, page_size, **options):
            self.indptr.copy_(indptr)
            self.last_page_len.copy_(last_page_len)
            self.indices[: len(indices)].copy_(indices)
            self._plan_info = [len(last_page_len)]
            self._keep(page_size, options)

        def run(self, q, cache, *, return_lse):
            return self._attend(q, cache, torch.arange(len(q) + 1, dtype=torch.int32), return_lse)

    class BatchPrefillWithPagedKVCacheWrapper(_Wrapper):
        def __init__(self, workspace, kv_layout, *, backend):
            self.kv_layout = kv_layout
            self._int_workspace_buffer = self._pin_memory_int_workspace_buffer = torch.zeros(1)

        def plan(
            self, starts, indptr, indices, last_page_len, num_q_heads, num_kv_heads, head_dim, page_size, *, causal,
            **options,
        ):  # fmt: skip
            assert causal
            self.starts, self.indptr, self.last_page_len = starts.clone(), indptr.clone(), last_page_len.clone()
            self.indices, self.width = indices, int((indptr[1:] - indptr[:-1]).max())
            self._keep(page_size, options)

        def run(self, q, cache, *, return_lse):
            assert len(q) == self.starts[-1]
            return self._attend(q, cache, self.starts, return_lse)


PACKAGES = {"flash_attn2": FlashAttention2, "flash_attn3": FlashAttention3, "flashinfer": FlashInfer}


def on_cpu(cls: type[AttentionBackend]) -> type[AttentionBackend]:
    """A backend as if its kernels ran on CPU: also in float32, with any head and page size."""
    have = cls.capabilities
    dtypes = {"dtypes": (torch.float32, *have.dtypes), "kv_dtypes": (*have.kv_dtypes, torch.float32)}
    anything = replace(have, devices=("cpu",), head_dims=None, page_sizes=None, **dtypes)
    return type(cls.__name__, (cls,), {"capabilities": anything})
