"""The paged KV cache: its tensors, and the host-side allocator of pages."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch

from graphrt.kernels.attention.options import FP8_DTYPES
from graphrt.kernels.cache.copy import Pages, copy_pages, swap_pages
from graphrt.kernels.cache.write import check_kv_scale
from graphrt.kernels.checks import (
    check_device,
    check_instance,
    check_int,
    check_ints,
    check_no_overlap,
    check_sequence,
    check_tensor,
    check_unit_stride,
    shown,
)
from graphrt.kernels.errors import CapacityError, ConfigError, ShapeError
from graphrt.kernels.types import KVLayout
from graphrt.spec import MAX_PAGES, KVCacheSpec


class KVCache:
    """K and V tensors of every layer, in pages.

    k, v                per layer [num_pages, page_size, num_kv_heads, head_dim]  spec.dtype  device
                        the logical NHD view; an HND cache has permuted strides
    k_scales, v_scales  per layer [num_kv_heads] (or [1], if given)               float32     device
                        of an fp8 cache: key = stored value * k_scale. 1.0 unless given; fill them in place with what
                        the model was calibrated for before the first step, since stored values are not converted.
                        Empty for other dtypes
    null_page           id of the page that no sequence owns; in `spec` too it is a number, where "last" was given

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
        check_instance("spec", spec, KVCacheSpec, advice="pass the model's KVCacheSpec")
        for name, tensors in (("k", k), ("v", v)):
            check_sequence(name, tensors, of="tensors, one per layer")
        if len(k) != spec.num_layers or len(v) != spec.num_layers:
            raise ConfigError(
                f"KVCache: expected {spec.num_layers} K and V tensors, one per layer, got {len(k)} and {len(v)}; "
                "pass those of every layer"
            )
        page = (spec.page_size, spec.num_kv_heads, spec.head_dim)
        check_tensor("k[0]", k[0], shape=(None, *page))
        num_pages, device = k[0].shape[0], k[0].device
        check_int("KVCache.num_pages", num_pages, 2, MAX_PAGES, advice="one of them is the null page")
        for layer, pair in enumerate(zip(k, v, strict=True)):
            for name, tensor in zip("kv", pair, strict=True):
                check_tensor(f"{name}[{layer}]", tensor, shape=(num_pages, *page), dtype=spec.dtype, device=device)
                check_unit_stride(f"{name}[{layer}]", tensor)
                check_no_overlap(f"{name}[{layer}]", tensor)
                if tensor.requires_grad:
                    raise ShapeError(
                        f"{name}[{layer}]: expected a tensor without gradient, got one that requires it; detach() it"
                    )
            if device.type != "meta" and pair[0].is_set_to(pair[1]):
                raise ConfigError(
                    f"v[{layer}]: expected other memory than that of k[{layer}], got the same; values would overwrite "
                    "keys, pass two tensors"
                )
        self.spec = spec.resolve(int(num_pages))
        assert isinstance(self.spec.null_page, int), "resolved"
        self.null_page = self.spec.null_page
        self.k = tuple(k)
        self.v = tuple(v)
        self.num_pages = int(num_pages)
        self.device = device
        self.k_scales = _scales("k_scales", k_scales, spec, device)
        self.v_scales = _scales("v_scales", v_scales, spec, device)

    @classmethod
    def allocate(cls, spec: KVCacheSpec, num_pages: int, device: torch.device | str) -> KVCache:
        """A zeroed cache of `num_pages` pages in `spec.layout`, as one allocation; an fp8 cache has scales of 1.

        torch's default device, default dtype and inference mode make no difference.

        Raises: ConfigError for a wrong argument, CapacityError where the device has not as much memory.
        """
        check_instance("spec", spec, KVCacheSpec, advice="pass the model's KVCacheSpec")
        device = check_device("device", device)
        num_pages = check_int("num_pages", num_pages, 2, MAX_PAGES, advice="the null page and one to use")
        heads_first = spec.layout is KVLayout.HND
        page = (spec.num_kv_heads, spec.page_size) if heads_first else (spec.page_size, spec.num_kv_heads)
        with torch.inference_mode(False):  # what is made in that mode could not be written outside of it
            storage = _zeros((spec.num_layers, 2, num_pages, *page, spec.head_dim), spec.dtype, device)
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

    def copy_pages(self, src_pages: Pages, dst_pages: Pages) -> None:
        """Copy whole pages inside the cache, all layers: page src_pages[i] to dst_pages[i] (copy on write).

        src_pages, dst_pages   lists, arrays or host tensors of ints

        Runs on the current stream.
        Raises: ShapeError for lists of different lengths, pages out of range, a page that is written twice, or what is
        no list of ints; nothing is written then.
        """
        copy_pages(self.k, self.v, src_pages, dst_pages)

    def swap_pages(self, other: KVCache, src_pages: Pages, dst_pages: Pages) -> None:
        """Copy whole pages of this cache into `other`, which may be on another device (swap out, or in).

        fp8 pages are copied as they are, scales are not: pages of a cache are for a runtime with equal scales.
        Runs on the current stream. A swap to the host waits, since the host may read the pages next; the others do
        not.
        Raises: ShapeError as `copy_pages`, ConfigError where `other` is no KVCache.
        """
        check_instance("other", other, KVCache, advice="pass the cache that takes the pages")
        swap_pages((*self.k, *self.v), (*other.k, *other.v), src_pages, dst_pages)


def _zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    nbytes = math.prod(shape) * dtype.itemsize
    try:
        if nbytes < 1 << 62:  # beyond that a size wraps
            return torch.zeros(shape, dtype=dtype, device=device)
        cause = None
    except RuntimeError as error:
        cause = error
    raise CapacityError(
        f"num_pages: expected a cache that fits {device}, got {shape[2]} pages of {nbytes // shape[2]} bytes; lower it"
    ) from cause


def _scales(
    name: str, given: Sequence[torch.Tensor] | None, spec: KVCacheSpec, device: torch.device
) -> tuple[torch.Tensor, ...]:
    """The scales of every layer, checked; ones where none are given, and none for a cache that is not fp8."""
    if given is None:
        # Tensors of their own, not rows of one: kernels are specialised on whether an address is a multiple of 16.
        layers = range(spec.num_layers if spec.dtype in FP8_DTYPES else 0)
        with torch.inference_mode(False):  # the caller fills them in place, at any time
            return tuple(torch.ones(spec.num_kv_heads, dtype=torch.float32, device=device) for _ in layers)
    if len(check_sequence(name, given, of="tensors, one per layer")) != spec.num_layers:
        raise ConfigError(f"{name}: expected {spec.num_layers} tensors, one per layer, got {len(given)}")
    for layer, scale in enumerate(given):
        check_kv_scale(f"{name}[{layer}]", scale, spec.dtype, spec.num_kv_heads, device)
    return tuple(given)


class PageAllocator:
    """Hands out page ids and counts who shares them. Host-side only; the null page is never handed out.

    Pages are reference counted: `allocate` gives pages with one owner, `share` adds an owner (a common prompt prefix,
    read-only from then on), `free` takes one away and returns the page when none is left.

    Raises: ConfigError for pages that nobody owns and for what is no int, with nothing changed.
    """

    def __init__(self, num_pages: int, null_page: int = 0) -> None:
        self.num_pages = check_int("PageAllocator.num_pages", num_pages, 2, MAX_PAGES, advice="pass the cache's")
        advice = "pass KVCache.null_page"
        self.null_page = check_int("PageAllocator.null_page", null_page, 0, self.num_pages - 1, advice=advice)
        # A stack: pages freed last are handed out first, while they may still be in the L2 cache.
        self._freed: list[int] = []
        self._untouched = 0  # this page and those above it were never handed out
        self._owners: dict[int, int] = {}

    @property
    def num_free(self) -> int:
        """Pages that can be allocated now."""
        return self.num_pages - 1 - len(self._owners)

    def owners(self, page: int) -> int:
        """How many owners a page has; 0 when it is free."""
        return self._owners.get(check_int("page", page, 0, self.num_pages - 1, advice="pass a page of the cache"), 0)

    def allocate(self, count: int) -> list[int]:
        """`count` pages with one owner each. Raises CapacityError, with nothing changed, when fewer are free."""
        count = check_int("count", count, 0, advice="pass how many pages are needed")
        if count > self.num_free:
            raise CapacityError(
                f"pages: expected at most {self.num_free} free of {self.num_pages - 1}, got a request for "
                f"{shown(count)}; free finished sequences or build a larger cache"
            )
        pages = [self._freed.pop() if self._freed else self._next_untouched() for _ in range(count)]
        self._owners.update(dict.fromkeys(pages, 1))
        return pages

    def share(self, pages: Pages) -> None:
        """Add an owner to each of `pages`. Raises ConfigError, with nothing changed, if one of them is free."""
        for page in self._owned(pages, "share"):
            self._owners[page] += 1

    def free(self, pages: Pages) -> None:
        """Take an owner from each of `pages`. Raises ConfigError, with nothing changed, if one has too few."""
        for page in self._owned(pages, "free"):
            self._owners[page] -= 1
            if self._owners[page] == 0:
                del self._owners[page]
                self._freed.append(page)

    def _next_untouched(self) -> int:
        self._untouched += self._untouched == self.null_page
        self._untouched += 1
        return self._untouched - 1

    def _owned(self, pages: Pages, verb: str) -> list[int]:
        advice = "pass pages that allocate() gave"
        found: list[int] = check_ints(
            f"{verb}: pages", pages, 0, self.num_pages - 1, advice=advice, error=ConfigError
        ).tolist()
        taken: dict[int, int] = {}
        for page in found:
            taken[page] = taken.get(page, 0) + (verb == "free")
            if self._owners.get(page, 0) < max(1, taken[page]):
                raise ConfigError(
                    f"{verb}: expected an allocated page, got page {page} with {self._owners.get(page, 0)} owners; "
                    f"{advice}"
                )
        return found
