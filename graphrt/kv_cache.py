"""The paged KV cache: its tensors, and the host-side allocator of pages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from graphrt.kernels.attention.options import FP8_DTYPES
from graphrt.kernels.cache.copy import copy_pages, swap_pages
from graphrt.kernels.cache.write import check_kv_scale
from graphrt.kernels.checks import check_int, check_no_overlap, check_tensor, check_unit_stride
from graphrt.kernels.errors import CapacityError, ConfigError
from graphrt.kernels.types import KVLayout
from graphrt.spec import KVCacheSpec


class KVCache:
    """K and V tensors of every layer, in pages.

    k, v                per layer [num_pages, page_size, num_kv_heads, head_dim]  spec.dtype  device
                        the logical NHD view; an HND cache has permuted strides
    k_scales, v_scales  per layer [num_kv_heads] (or [1], if given)               float32     device
                        of an fp8 cache: key = stored value * k_scale. 1.0 unless given; fill them in place with what
                        the model was calibrated for before the first step, since stored values are not converted.
                        Empty for other dtypes

    Built with `allocate`, or around tensors that the caller owns (`KVCache(spec, k, v)`): any strides, the last one 1;
    no two elements of a layer may lie in one place. K and V may be views of one pool, and layers may share tensors.
    Graphs hold these addresses: the tensors must stay where they are as long as a runtime uses them.
    """

    def __init__(
        self,
        spec: KVCacheSpec,
        k: Sequence[torch.Tensor],
        v: Sequence[torch.Tensor],
        *,
        k_scales: Sequence[torch.Tensor] | None = None,
        v_scales: Sequence[torch.Tensor] | None = None,
    ) -> None:
        if len(k) != spec.num_layers or len(v) != spec.num_layers:
            raise ConfigError(
                f"KVCache: expected {spec.num_layers} K and V tensors, one per layer, got {len(k)} and {len(v)}"
            )
        page = (spec.page_size, spec.num_kv_heads, spec.head_dim)
        check_tensor("k[0]", k[0], shape=(None, *page))
        num_pages, device = k[0].shape[0], k[0].device
        if num_pages < 2:
            raise ConfigError(f"KVCache: expected at least 2 pages, the null page and one to use, got {num_pages}")
        for layer, pair in enumerate(zip(k, v, strict=True)):
            for name, tensor in zip("kv", pair, strict=True):
                check_tensor(f"{name}[{layer}]", tensor, shape=(num_pages, *page), dtype=spec.dtype, device=device)
                check_unit_stride(f"{name}[{layer}]", tensor)
                check_no_overlap(f"{name}[{layer}]", tensor)
            if device.type != "meta" and pair[0].is_set_to(pair[1]):
                raise ConfigError(
                    f"v[{layer}]: expected other memory than that of k[{layer}], got the same; values would overwrite "
                    "keys, pass two tensors"
                )
        if spec.null_page >= num_pages:
            raise ConfigError(f"KVCache: expected null_page < num_pages={num_pages}, got {spec.null_page}")
        self.spec = spec
        self.k = tuple(k)
        self.v = tuple(v)
        self.num_pages = int(num_pages)
        self.device = device
        self.k_scales = _scales("k_scales", k_scales, spec, device)
        self.v_scales = _scales("v_scales", v_scales, spec, device)

    @classmethod
    def allocate(cls, spec: KVCacheSpec, num_pages: int, device: torch.device | str) -> KVCache:
        """A zeroed cache of `num_pages` pages in `spec.layout`, as one allocation; an fp8 cache has scales of 1."""
        num_pages = check_int("num_pages", num_pages, 2, advice="the null page and one to use")
        heads_first = spec.layout is KVLayout.HND
        page = (spec.num_kv_heads, spec.page_size) if heads_first else (spec.page_size, spec.num_kv_heads)
        storage = torch.zeros(
            (spec.num_layers, 2, num_pages, *page, spec.head_dim), dtype=spec.dtype, device=torch.device(device)
        )
        logical = storage.transpose(3, 4) if heads_first else storage
        return cls(spec, [layer[0] for layer in logical], [layer[1] for layer in logical])

    @property
    def nbytes(self) -> int:
        """Bytes of all pages."""
        return self.num_pages * self.spec.bytes_per_page

    def named_tensors(self) -> Iterable[tuple[str, torch.Tensor]]:
        """Name and tensor of every layer's K and V, and of their scales, if there are any: what graphs hold."""
        for layer in range(self.spec.num_layers):
            yield f"kv_cache.k[{layer}]", self.k[layer]
            yield f"kv_cache.v[{layer}]", self.v[layer]
        for layer, pair in enumerate(zip(self.k_scales, self.v_scales, strict=True)):
            for name, scale in zip(("k_scales", "v_scales"), pair, strict=True):
                yield f"kv_cache.{name}[{layer}]", scale

    def copy_pages(self, src_pages: Sequence[int], dst_pages: Sequence[int]) -> None:
        """Copy whole pages inside the cache, all layers: page src_pages[i] to dst_pages[i] (copy on write).

        Runs on the current stream. Raises ShapeError for lists of different lengths, pages out of range or a page
        that is written twice; nothing is written then.
        """
        copy_pages(self.k, self.v, src_pages, dst_pages)

    def swap_pages(self, other: KVCache, src_pages: Sequence[int], dst_pages: Sequence[int]) -> None:
        """Copy whole pages of this cache into `other`, which may be on another device (swap out, or in).

        fp8 pages are copied as they are, scales are not: pages of a cache are for a runtime with equal scales.
        Runs on the current stream. A swap to the host waits, since the host may read the pages next; the others do
        not. Raises ShapeError as `copy_pages`.
        """
        swap_pages((*self.k, *self.v), (*other.k, *other.v), src_pages, dst_pages)


def _scales(
    name: str, given: Sequence[torch.Tensor] | None, spec: KVCacheSpec, device: torch.device
) -> tuple[torch.Tensor, ...]:
    """The scales of every layer, checked; ones where none are given, and none for a cache that is not fp8."""
    if given is None:
        # Tensors of their own, not rows of one: kernels are specialised on whether an address is a multiple of 16.
        layers = range(spec.num_layers if spec.dtype in FP8_DTYPES else 0)
        return tuple(torch.ones(spec.num_kv_heads, dtype=torch.float32, device=device) for _ in layers)
    if len(given) != spec.num_layers:
        raise ConfigError(f"{name}: expected {spec.num_layers} tensors, one per layer, got {len(given)}")
    for layer, scale in enumerate(given):
        check_kv_scale(f"{name}[{layer}]", scale, spec.dtype, spec.num_kv_heads, device)
    return tuple(given)


class PageAllocator:
    """Hands out page ids and counts who shares them. Host-side only; the null page is never handed out.

    Pages are reference counted: `allocate` gives pages with one owner, `share` adds an owner (a common prompt prefix,
    read-only from then on), `free` takes one away and returns the page when none is left.
    """

    def __init__(self, num_pages: int, null_page: int = 0) -> None:
        if not 0 <= null_page < num_pages or num_pages < 2:
            raise ConfigError(f"PageAllocator: expected null_page < num_pages >= 2, got {null_page} of {num_pages}")
        self.num_pages = num_pages
        self.null_page = null_page
        # A stack: pages freed last are handed out first, while they may still be in the L2 cache.
        self._free = [page for page in range(num_pages - 1, -1, -1) if page != null_page]
        self._owners = [0] * num_pages

    @property
    def num_free(self) -> int:
        """Pages that can be allocated now."""
        return len(self._free)

    def owners(self, page: int) -> int:
        """How many owners a page has; 0 when it is free."""
        return self._owners[page]

    def allocate(self, count: int) -> list[int]:
        """`count` pages with one owner each. Raises CapacityError, with nothing changed, when fewer are free."""
        if count < 0:
            raise ConfigError(f"count: expected >= 0 pages, got {count}")
        if count > len(self._free):
            raise CapacityError(
                f"pages: expected at most {len(self._free)} free of {self.num_pages - 1}, got a request for {count}; "
                "free finished sequences or build a larger cache"
            )
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._owners[page] = 1
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """Add an owner to each of `pages`. Raises ConfigError, with nothing changed, if one of them is free."""
        pages = list(pages)
        self._require_owned(pages, "share")
        for page in pages:
            self._owners[page] += 1

    def free(self, pages: Iterable[int]) -> None:
        """Take an owner from each of `pages`. Raises ConfigError, with nothing changed, if one has too few."""
        pages = list(pages)
        self._require_owned(pages, "free")
        for page in pages:
            self._owners[page] -= 1
            if self._owners[page] == 0:
                self._free.append(page)

    def _require_owned(self, pages: Sequence[int], verb: str) -> None:
        taken: dict[int, int] = {}
        for page in pages:
            taken[page] = taken.get(page, 0) + (verb == "free")
            in_range = 0 <= page < self.num_pages and page != self.null_page
            if not in_range or self._owners[page] < max(1, taken[page]):
                have = self._owners[page] if 0 <= page < self.num_pages else 0
                raise ConfigError(f"{verb}: expected an allocated page, got page {page} with {have} owners")
