"""The tensors of the paged KV cache."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch

from graphrt.cache.aliasing import CacheTensor, check_disjoint
from graphrt.cache.groups import cache_layer_groups
from graphrt.kernels.attention.options import FP8_DTYPES
from graphrt.kernels.cache.copy import PagePacker, Pages
from graphrt.kernels.cache.write import check_kv_scale, write_kv
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
from graphrt.kernels.errors import CapacityError, ConfigError, ShapeError, UnsupportedError
from graphrt.kernels.types import KVLayout
from graphrt.spec import MAX_PAGES, KVCacheSpec


class KVCache:
    """K and V tensors of every layer, in pages.

    groups      the spec of each KV group; one group if all layers are alike. null_page is always an int
    group_of    [layers] group of each layer
    k, v                per layer [num_pages, page_size, num_kv_heads, head_dim]  dtype of its group, on `device`.
                        A view in NHD order; an HND cache has permuted strides. v may have a different head size
    k_scales, v_scales  per layer [num_kv_heads], or [1] if passed in that shape   float32, on `device`.
                        Scales of an fp8 cache: key = stored value * k_scale; 1.0 unless given. Fill them in place with
                        calibrated values before the first step, because stored values are not converted later. Must be
                        finite and not 0 at `capture()`. Empty if no group is fp8
    num_pages   total pages of all pools
    pool_pages  pages of each pool, including the null page

    Create a cache with `allocate`, or from your own tensors with `KVCache(spec, k, v)`. Such tensors need a last
    stride of 1. Other strides are arbitrary, but no two elements may overlap. The tensors may be views of shared
    memory, such as K and V of one pool. Groups that share page ids may share the memory of a page. Graphs contain the
    addresses, so the tensors must not be freed or moved while a runtime uses them.

    Layers with `AttentionSpec.kv_shared_with` and encoder layers are not counted here. A model with only encoder layers
    has a cache without groups: `KVCache.allocate((), (), device)`.

    Raises:
        ConfigError: if `groups` are wrong, if K and V are not one tensor per layer, or if tensors overlap.
        ShapeError: if a tensor does not match its group.
    """

    def __init__(
        self,
        groups: KVCacheSpec | Sequence[KVCacheSpec],
        k: Sequence[torch.Tensor],
        v: Sequence[torch.Tensor],
        *,
        k_scales: Sequence[torch.Tensor] | None = None,
        v_scales: Sequence[torch.Tensor] | None = None,
        device: torch.device | None = None,
    ) -> None:
        specs = check_groups(groups)
        for name, tensors in (("k", k), ("v", v)):
            check_sequence(name, tensors, of="tensors, one per layer")
        self.group_of = cache_layer_groups(specs)
        layers = len(self.group_of)
        if len(k) != layers or len(v) != layers:
            raise ConfigError(
                f"KVCache: expected {layers} K and V tensors, one per layer, got {len(k)} and {len(v)}; pass one K "
                f"and one V tensor per layer"
            )
        pages = dict[int, int]()
        if layers:
            check_tensor("k[0]", k[0])
            device = k[0].device
        elif device is None:
            raise ConfigError("groups: empty; pass a KVCacheSpec, or pass device= for a cache without layers")
        for layer, (group, *pair) in enumerate(zip(self.group_of, k, v, strict=True)):
            spec = specs[group]
            size, heads, *dims = spec.page_shape
            for name, tensor, dim in zip("kv", pair, dims, strict=True):
                check_tensor(
                    f"{name}[{layer}]", tensor, shape=(None, size, heads, dim), dtype=spec.dtype, device=device
                )
                count = pages.setdefault(spec.pool, tensor.shape[0])
                check_int("KVCache.num_pages", count, 2, MAX_PAGES, advice="one page is the null page")
                if tensor.shape[0] != count:
                    raise ShapeError(
                        f"{name}[{layer}]: expected {count} pages, as in the other layers of its pool, got "
                        f"{tensor.shape[0]}; use another pool for groups with separate memory"
                    )
                check_unit_stride(f"{name}[{layer}]", tensor)
                check_no_overlap(f"{name}[{layer}]", tensor)
                if tensor.requires_grad:
                    raise ShapeError(f"{name}[{layer}]: requires gradients; pass tensor.detach()")
        if sorted(pages) != list(range(len(pages))):
            raise ConfigError(
                f"KVCacheSpec.pool: expected pools 0 to {len(pages) - 1}, got {sorted(pages)}; number them from 0"
            )
        if device.type != "meta":
            pairs = enumerate(zip(k, v, strict=True))
            check_disjoint(
                CacheTensor(2 * layer + at, f"{name}[{layer}]", tensor, group, specs[group].pool)
                for (layer, pair), group in zip(pairs, self.group_of, strict=True)
                for at, (name, tensor) in enumerate(zip("kv", pair, strict=True))
            )
        self.pool_pages = tuple(pages[pool] for pool in range(len(pages)))
        self.groups = tuple(spec.resolve(pages[spec.pool]) for spec in specs)
        null_pages: dict[int, int | str] = {}
        for spec in self.groups:
            if null_pages.setdefault(spec.pool, spec.null_page) != spec.null_page:
                raise ConfigError(
                    f"KVCacheSpec.null_page: expected {null_pages[spec.pool]}, as in another group of pool "
                    f"{spec.pool}, got {spec.null_page}; pass the same page, because groups of one pool share page ids"
                )
        self.k = tuple(k)
        self.v = tuple(v)
        self.device = device
        self._packers: dict[int, PagePacker] = {}
        self.k_scales = _scales("k_scales", k_scales, self._layer_specs, device)
        self.v_scales = _scales("v_scales", v_scales, self._layer_specs, device)

    @classmethod
    def allocate(
        cls, groups: KVCacheSpec | Sequence[KVCacheSpec], num_pages: int | Sequence[int], device: torch.device | str
    ) -> KVCache:
        """Allocate a zeroed cache, one allocation per pool. The scales of fp8 groups are 1.

        num_pages   pages of each pool; an int applies to every pool

        Does not depend on torch's default device, default dtype or inference mode.

        Raises:
            ConfigError: if an argument is wrong.
            CapacityError: if the cache does not fit into the memory of the device.
        """
        specs = check_groups(groups)
        device = check_device(device)
        counts = pages_of_pools(num_pages, specs, advice="the null page and at least one more")
        k: dict[int, torch.Tensor] = {}
        v: dict[int, torch.Tensor] = {}
        with torch.inference_mode(False):  # tensors made in inference mode cannot be written outside of it
            for pool, count in zip(sorted({spec.pool for spec in specs}), counts, strict=True):
                _allocate_pool([spec for spec in specs if spec.pool == pool], count, device, k, v)
            layers = range(len(cache_layer_groups(specs)))
            return cls(specs, [k[layer] for layer in layers], [v[layer] for layer in layers], device=device)

    @property
    def _layer_specs(self) -> list[KVCacheSpec]:
        return [self.groups[group] for group in self.group_of]

    @property
    def num_pages(self) -> int:
        return sum(self.pool_pages)

    @property
    def pools(self) -> tuple[tuple[int, int], ...]:
        """Number of pages and null page of each pool."""
        null_pages = {spec.pool: spec.null_page for spec in self.groups}
        return tuple((count, int(null_pages[pool])) for pool, count in enumerate(self.pool_pages))

    @property
    def nbytes(self) -> int:
        """Bytes of all pages. Groups of one pool share the pages."""
        of_pool = [[spec for spec in self.groups if spec.pool == pool] for pool in range(len(self.pool_pages))]
        return sum(count * bytes_per_page(specs) for count, specs in zip(self.pool_pages, of_pool, strict=True))

    def named_tensors(self) -> Iterable[tuple[str, torch.Tensor]]:
        """Return name and tensor of every layer's K, V and scales. Graphs contain the addresses of these tensors."""
        for layer, pair in enumerate(zip(self.k, self.v, strict=True)):
            for name, tensor in zip("kv", pair, strict=True):
                yield f"kv_cache.{name}[{layer}]", tensor
        for layer, pair in enumerate(zip(self.k_scales, self.v_scales, strict=True)):
            for name, scale in zip(("k_scales", "v_scales"), pair, strict=True):
                yield f"kv_cache.{name}[{layer}]", scale

    def of_group(self, group: int) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
        """Return the K tensors and the V tensors of a group's layers. Raises: ConfigError: if there is no group."""
        group = check_int("group", group, 0, len(self.groups) - 1, advice="pass a KV group of the cache")
        layers = [layer for layer, owner in enumerate(self.group_of) if owner == group]
        return tuple(self.k[layer] for layer in layers), tuple(self.v[layer] for layer in layers)

    def check_contents(self, *, has_drafts: bool = False) -> None:
        """Raise ConfigError if a scale is 0, NaN or infinite, or if a null page contains NaN or infinity.

        Kernels may read the null page before the window of a request, and with drafts after the pages of a request that
        has fewer drafts than its graph. Zero times NaN is NaN.
        """
        for name, scales in (("k_scales", self.k_scales), ("v_scales", self.v_scales)):
            for layer, scale in enumerate(scales):
                wrong = scale[~scale.isfinite() | (scale == 0)]
                if self._layer_specs[layer].dtype in FP8_DTYPES and len(wrong):
                    raise ConfigError(
                        f"kv_cache.{name}[{layer}]: expected finite numbers other than 0, got {wrong[0].item()}; fill "
                        "it with calibrated scales, or with ones"
                    )
        for number, group in enumerate(self.groups):
            drops_pages = group.sliding_window is not None or group.attention_chunk_size is not None
            if not (drops_pages or (has_drafts and not group.cross)):
                continue
            for tensor in (t for tensors in self.of_group(number) for t in tensors):
                page = tensor[int(group.null_page)].float()
                if not bool(page.isfinite().all()):
                    raise ConfigError(
                        f"kv_cache: expected finite numbers in page {group.null_page}, the null page of KV group "
                        f"{number}, got {page[~page.isfinite()][0].item()}; fill it with zeros"
                    )

    def copy_pages(self, src_pages: Pages, dst_pages: Pages, *, group: int = 0) -> None:
        """Copy page src_pages[i] to dst_pages[i] in all layers of a group, for copy on write.

        src_pages, dst_pages   lists, arrays or host tensors of int page ids

        Runs on the current stream.

        Raises:
            ShapeError: if the lists differ in length or are not lists of int, if a page is out of range, or if a page
                is written twice. Nothing is written.
            ConfigError: if there is no such group.
        """
        self.packer(group).copy(src_pages, dst_pages)

    def slots(self, pages: Pages, num_tokens: int, *, layer: int = 0) -> torch.Tensor:
        """Return the flat KV slots of tokens that fill `pages` in order, for `write`.

        pages       list, array or host tensor of int page ids, in the order of the sequence
        num_tokens  number of tokens
        layer       any layer of the group that the pages belong to

        Returns [num_tokens] int64 on the device, copied on the current stream. Use torch.cat for several sequences.

        Raises:
            ShapeError: if `pages` is not a list of int, is too short, or lists a page twice, the null page or a page
            out of range.
            ConfigError: if there is no such layer, or num_tokens < 0.
            UnsupportedError: if the group has context_parallel_size > 1.
        """
        group = self.groups[self.group_of[self._checked_layer(layer)]]
        num_tokens = check_int("num_tokens", num_tokens, 0, advice="pass the tokens to write")
        if group.context_parallel_size > 1:
            raise UnsupportedError("slots: not supported with context_parallel_size > 1; only steps write such a cache")
        last, size = self.pool_pages[group.pool] - 1, group.page_size
        found = check_ints("pages", pages, 0, last, advice="pass allocated pages", error=ShapeError)
        if group.null_page in found.tolist() or len(set(found.tolist())) < len(found):
            raise ShapeError(
                f"pages: {shown(found.tolist())} lists a page twice or the null page; pass allocated pages"
            )
        if len(found) * size < num_tokens:
            raise ShapeError(
                f"pages: expected at least {group.pages_for(num_tokens)} pages for {num_tokens} tokens, got "
                f"{len(found)}; "
                "allocate more"
            )
        positions = torch.arange(num_tokens, device="cpu")
        slots = torch.as_tensor(found, dtype=torch.int64, device="cpu")[positions // size] * size + positions % size
        return slots.to(self.device)

    def write(self, layer: int, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor) -> None:
        """Write keys and values of packed tokens to one layer, for example encoder outputs for a cross layer.

        layer   index of the cache layer; layers of the model without their own KV are not counted
        k       [tokens, num_kv_heads, head_dim]     float16, bfloat16 or float32, on the device; divided by k_scales in
                an fp8 cache
        v       [tokens, num_kv_heads, v_head_dim]   dtype of k
        slots   [tokens] int64 on the device, from `slots`; a token with slot -1 is not written

        One launch on the current stream, without a sync. Steps that read the values must run after it. Use the stream
        of the manager, or an event. Capture-safe: the device reads `slots`, so a captured encoder can write to
        different pages in each replay. The device does not check the slots.

        Raises:
            ShapeError: if a tensor does not match the layer. Nothing is written.
            ConfigError: if there is no such layer.
        """
        layer = self._checked_layer(layer)
        for name, tensor, cache in (("k", k, self.k[layer]), ("v", v, self.v[layer])):
            check_tensor(name, tensor, shape=(None, *cache.shape[2:]))
            check_unit_stride(name, tensor)
        scales = (self.k_scales[layer], self.v_scales[layer]) if self.k[layer].dtype in FP8_DTYPES else (None, None)
        write_kv(k[:, :0], k, v, self.k[layer], self.v[layer], slots, slots, k_scale=scales[0], v_scale=scales[1])

    def _checked_layer(self, layer: int) -> int:
        return check_int("layer", layer, 0, len(self.k) - 1, advice="pass a layer of the cache")

    def packer(self, group: int) -> PagePacker:
        """Return the packer of a group, which copies pages of all layers to and from one block of bytes."""
        k, v = self.of_group(group)
        if (packer := self._packers.get(int(group))) is None:
            packer = self._packers[int(group)] = PagePacker((*k, *v))
        return packer


def check_groups(groups: KVCacheSpec | Sequence[KVCacheSpec]) -> tuple[KVCacheSpec, ...]:
    """Return the groups as a tuple. Raises ConfigError if `groups` is not a KVCacheSpec or a sequence of them."""
    if isinstance(groups, KVCacheSpec):
        return (groups,)
    check_sequence("groups", groups, of="KVCacheSpec per KV group", error=ConfigError)
    for index, spec in enumerate(groups):
        check_instance(f"groups[{index}]", spec, KVCacheSpec, advice="pass the specs that kv_groups() returns")
    return tuple(groups)


def pages_of_pools(num_pages: int | Sequence[int], groups: Sequence[KVCacheSpec], advice: str) -> tuple[int, ...]:
    """Return the pages of each pool, given as one number or one per pool. Raises: ConfigError: if `num_pages` is
    neither of these."""
    pools = len({spec.pool for spec in groups})
    counts = list(num_pages) if isinstance(num_pages, (list, tuple)) else [num_pages] * pools
    if len(counts) != pools:
        raise ConfigError(
            f"num_pages: expected one int, or a sequence of {pools}, one per pool, got {shown(num_pages)}; {advice}"
        )
    return tuple(check_int("num_pages", count, 2, MAX_PAGES, advice=advice) for count in counts)


def bytes_per_page(groups: Sequence[KVCacheSpec]) -> int:
    """Return the bytes of one page of a pool, large enough for every group of the pool."""
    return max(spec.layer_bytes_per_page for spec in groups) * max(spec.num_layers for spec in groups)


def _allocate_pool(
    groups: Sequence[KVCacheSpec],
    num_pages: int,
    device: torch.device,
    k: dict[int, torch.Tensor],
    v: dict[int, torch.Tensor],
) -> None:
    """Allocate one pool and add the tensors of each layer to `k` and `v`, as views of one allocation.

    If all groups have pages of equal shape, the allocation of a layer contains all keys, then all values. Otherwise
    each page contains its keys, then its values, so that a page covers the same bytes in every group.
    """
    layers = max(spec.num_layers for spec in groups)
    nbytes = bytes_per_page(groups) // layers
    alike = len({(spec.page_shape, spec.dtype) for spec in groups}) == 1
    storage = _zeros((layers, num_pages, nbytes), device)
    for spec in groups:
        size, heads, *dims = spec.page_shape
        key_bytes = size * heads * dims[0] * spec.dtype.itemsize
        for at, layer in enumerate(range(spec.num_layers) if spec.layers is None else spec.layers):
            split = num_pages * key_bytes
            halves = storage[at].flatten().tensor_split([split]) if alike else storage[at].tensor_split([key_bytes], 1)
            for tensors, half, dim in zip((k, v), halves, dims, strict=True):
                used = half if alike else half[:, : size * heads * dim * spec.dtype.itemsize]
                flat = used.view(spec.dtype).view(num_pages, -1)
                heads_first = spec.layout is KVLayout.HND
                page = flat.unflatten(1, (heads, size, dim) if heads_first else (size, heads, dim))
                tensors[layer] = page.transpose(1, 2) if heads_first else page


def _zeros(shape: tuple[int, int, int], device: torch.device) -> torch.Tensor:
    nbytes = math.prod(shape)
    try:
        if nbytes < 1 << 62:  # larger sizes overflow in torch
            return torch.zeros(shape, dtype=torch.uint8, device=device)
        cause = None
    except RuntimeError as error:
        cause = error
    raise CapacityError(
        f"num_pages: {shape[1]} pages of {nbytes // shape[1]} bytes do not fit into the memory of {device}; lower "
        f"num_pages"
    ) from cause


def _scales(
    name: str, given: Sequence[torch.Tensor] | None, layers: Sequence[KVCacheSpec], device: torch.device
) -> tuple[torch.Tensor, ...]:
    """Check and return the scales of every layer; ones if not given, and () if the cache is not fp8."""
    if given is None:
        if not any(spec.dtype in FP8_DTYPES for spec in layers):
            return ()
        # Separate tensors, not rows of one, because kernels are specialized on whether an address is a multiple of 16.
        with torch.inference_mode(False):  # callers may fill them outside of inference mode
            return tuple(torch.ones(spec.num_kv_heads, dtype=torch.float32, device=device) for spec in layers)
    if len(check_sequence(name, given, of="tensors, one per layer")) != len(layers):
        raise ConfigError(f"{name}: expected {len(layers)} tensors, got {len(given)}; pass one per layer")
    for layer, (scale, spec) in enumerate(zip(given, layers, strict=True)):
        check_kv_scale(f"{name}[{layer}]", scale, spec.dtype, spec.num_kv_heads, device)
    return tuple(given)
