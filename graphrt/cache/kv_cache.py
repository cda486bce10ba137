"""The paged KV cache: its tensors, and the host-side allocator of pages."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch

from graphrt.cache.aliasing import Placed, check_disjoint
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
from graphrt.kernels.errors import CapacityError, ConfigError, ShapeError
from graphrt.kernels.types import KVLayout
from graphrt.spec import MAX_PAGES, KVCacheSpec


class KVCache:
    """K and V tensors of every layer, in pages.

    groups      the spec of each KV group, one where layers are alike; null pages by their numbers, also where "last"
                was given
    group_of    [layers] the group of each layer
    k, v                per layer [num_pages, page_size, num_kv_heads, head_dim]  dtype of its group  device
                        the logical NHD view; an HND cache has permuted strides; values have their own head size
    k_scales, v_scales  per layer [num_kv_heads] (or [1], if given)               float32     device
                        of an fp8 cache: key = stored value * k_scale. 1.0 unless given; fill them in place with what
                        the model was calibrated for before the first step, since stored values are not converted.
                        Finite and not 0, from `capture` on. Empty where no group is fp8
    num_pages   pages of all pools together
    pool_pages  pages of each pool, null pages included

    Built with `allocate`, or around tensors that the caller owns (`KVCache(spec, k, v)`): any strides, the last one 1;
    no two elements of the cache may lie in one place. Tensors may be views of shared memory, as K and V of one pool. A
    page may be the same bytes in several groups that share page ids. Graphs hold these addresses: the tensors must stay
    where they are as long as a runtime uses them.

    A layer here is one with keys and values of its own; what `AttentionSpec.kv_shared_with` names is not counted again,
    and encoder layers have none. A model of these alone has a cache without groups, `KVCache.allocate((), (), device)`.
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
                f"KVCache: expected {layers} K and V tensors, one per layer, got {len(k)} and {len(v)}; "
                "pass those of every layer"
            )
        pages = dict[int, int]()
        if layers:
            check_tensor("k[0]", k[0])
            device = k[0].device
        elif device is None:
            raise ConfigError("groups: expected at least one KVCacheSpec, or a device without any, got neither")
        for layer, (group, *pair) in enumerate(zip(self.group_of, k, v, strict=True)):
            spec = specs[group]
            size, heads, *dims = spec.page_shape
            for name, tensor, dim in zip("kv", pair, dims, strict=True):
                check_tensor(
                    f"{name}[{layer}]", tensor, shape=(None, size, heads, dim), dtype=spec.dtype, device=device
                )
                count = pages.setdefault(spec.pool, tensor.shape[0])
                check_int("KVCache.num_pages", count, 2, MAX_PAGES, advice="one of them is the null page")
                if tensor.shape[0] != count:
                    raise ShapeError(
                        f"{name}[{layer}]: expected {count} pages as in the other layers of its pool, got "
                        f"{tensor.shape[0]}; give groups of other memory a pool of their own"
                    )
                check_unit_stride(f"{name}[{layer}]", tensor)
                check_no_overlap(f"{name}[{layer}]", tensor)
                if tensor.requires_grad:
                    raise ShapeError(
                        f"{name}[{layer}]: expected a tensor without gradient, got one that requires it; detach() it"
                    )
        if sorted(pages) != list(range(len(pages))):
            raise ConfigError(
                f"KVCacheSpec.pool: expected pools 0 to {len(pages) - 1}, got {sorted(pages)}; number them from 0"
            )
        if device.type != "meta":
            pairs = enumerate(zip(k, v, strict=True))
            check_disjoint(
                Placed(2 * layer + at, f"{name}[{layer}]", tensor, group, specs[group].pool)
                for (layer, pair), group in zip(pairs, self.group_of, strict=True)
                for at, (name, tensor) in enumerate(zip("kv", pair, strict=True))
            )
        self.pool_pages = tuple(pages[pool] for pool in range(len(pages)))
        self.groups = tuple(spec.resolve(pages[spec.pool]) for spec in specs)
        _check_null_pages(self.groups)
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
        """A zeroed cache in the groups' layouts, as one allocation per pool; fp8 groups have scales of 1.

        num_pages   pages of each pool: one number where there is one pool, or where all have as many

        torch's default device, default dtype and inference mode make no difference.

        Raises: ConfigError for a wrong argument, CapacityError where the device has not as much memory.
        """
        specs = check_groups(groups)
        device = check_device("device", device)
        pools = {spec.pool for spec in specs}
        counts = num_pages if isinstance(num_pages, (list, tuple)) else [num_pages] * len(pools)
        if len(counts) != len(pools):
            raise ConfigError(f"num_pages: expected one number per pool, {len(pools)}, got {shown(num_pages)}")
        k: dict[int, torch.Tensor] = {}
        v: dict[int, torch.Tensor] = {}
        with torch.inference_mode(False):  # what is made in that mode could not be written outside of it
            for pool, given in zip(sorted(pools), counts, strict=True):
                count = check_int("num_pages", given, 2, MAX_PAGES, advice="the null page and one to use")
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
        """Pages and null page of each pool."""
        null_pages = {spec.pool: spec.null_page for spec in self.groups}
        return tuple((count, int(null_pages[pool])) for pool, count in enumerate(self.pool_pages))

    @property
    def nbytes(self) -> int:
        """Bytes of all pages. Groups of a pool share them."""
        of_pool = [[spec for spec in self.groups if spec.pool == pool] for pool in range(len(self.pool_pages))]
        return sum(count * bytes_per_page(specs) for count, specs in zip(self.pool_pages, of_pool, strict=True))

    def named_tensors(self) -> Iterable[tuple[str, torch.Tensor]]:
        """Name and tensor of every layer's K and V, and of their scales, if there are any: what graphs hold."""
        for layer, pair in enumerate(zip(self.k, self.v, strict=True)):
            for name, tensor in zip("kv", pair, strict=True):
                yield f"kv_cache.{name}[{layer}]", tensor
        for layer, pair in enumerate(zip(self.k_scales, self.v_scales, strict=True)):
            for name, scale in zip(("k_scales", "v_scales"), pair, strict=True):
                yield f"kv_cache.{name}[{layer}]", scale

    def of_group(self, group: int) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
        """K and V tensors of a group's layers. Raises: ConfigError for a group that is not there."""
        group = check_int("group", group, 0, len(self.groups) - 1, advice="pass a KV group of the cache")
        layers = [layer for layer, owner in enumerate(self.group_of) if owner == group]
        return tuple(self.k[layer] for layer in layers), tuple(self.v[layer] for layer in layers)

    def check_contents(self) -> None:
        """Raise ConfigError unless scales are finite and not 0, and the null pages of groups with a window or chunks
        hold finite numbers.

        Keys are divided by their scale when they are stored: 0 would make all of them alike. In groups with a window
        the null page stands before what a row sees, and kernels may read it: zero times NaN is NaN.
        """
        for name, scales in (("k_scales", self.k_scales), ("v_scales", self.v_scales)):
            for layer, scale in enumerate(scales):
                wrong = scale[~scale.isfinite() | (scale == 0)]
                if self._layer_specs[layer].dtype in FP8_DTYPES and len(wrong):
                    raise ConfigError(
                        f"kv_cache.{name}[{layer}]: expected finite numbers other than 0, got {wrong[0].item()}; fill "
                        "it with what the model was calibrated for, or with ones"
                    )
        for number, group in enumerate(self.groups):
            if group.sliding_window is None and group.attention_chunk_size is None:
                continue
            for tensor in (t for tensors in self.of_group(number) for t in tensors):
                page = tensor[int(group.null_page)].float()
                if not bool(page.isfinite().all()):
                    raise ConfigError(
                        f"kv_cache: expected finite numbers in page {group.null_page}, the null page of KV group "
                        f"{number}, got {page[~page.isfinite()][0].item()}; fill it with zeros"
                    )

    def copy_pages(self, src_pages: Pages, dst_pages: Pages, *, group: int = 0) -> None:
        """Copy whole pages of a group, all its layers: page src_pages[i] to dst_pages[i] (copy on write).

        src_pages, dst_pages   lists, arrays or host tensors of ints

        Runs on the current stream.
        Raises: ShapeError for lists of different lengths, pages out of range, a page that is written twice, or what is
        no list of ints; ConfigError for a group that is not there. Nothing is written then.
        """
        self.packer(group).copy(src_pages, dst_pages)

    def slots(self, pages: Pages, num_tokens: int, *, layer: int = 0) -> torch.Tensor:
        """Flat KV slots [num_tokens] int64, on the device, of tokens that fill `pages` in order: for `write`.

        pages   list, array or host tensor of ints; page ids as the batches of the sequence list them
        layer   any layer of the group that the pages belong to

        Slots of several sequences are joined by torch.cat. Copied on the current stream.
        Raises: ShapeError for pages out of range, the null page, a page listed twice, too few pages, or what is no list
        of ints; ConfigError for a layer that is not there and for num_tokens < 0.
        """
        group = self.groups[self.group_of[self._checked_layer(layer)]]
        num_tokens = check_int("num_tokens", num_tokens, 0, advice="pass the tokens to write")
        last, size = self.pool_pages[group.pool] - 1, group.page_size
        found = check_ints("pages", pages, 0, last, advice="pass pages that an allocator gave", error=ShapeError)
        if group.null_page in found.tolist() or len(set(found.tolist())) < len(found):
            raise ShapeError(
                f"pages: expected different ones and not the null page {group.null_page}, got {shown(found.tolist())}; "
                "pass pages that an allocator gave"
            )
        if len(found) * size < num_tokens:
            raise ShapeError(
                f"pages: expected {group.pages_for(num_tokens)} for {num_tokens} tokens, got {len(found)}; allocate as "
                "many"
            )
        places = torch.arange(num_tokens, device="cpu")
        slots = torch.as_tensor(found, dtype=torch.int64, device="cpu")[places // size] * size + places % size
        return slots.to(self.device)

    def write(self, layer: int, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor) -> None:
        """Write keys and values of packed tokens to one layer, as an encoder does for a cross layer.

        layer   a layer of the cache, not of the model: cross layers are counted among those with keys and values
        k       [tokens, num_kv_heads, head_dim]     float16, bfloat16 or float32  device; divided by the k_scales of an
                fp8 cache
        v       [tokens, num_kv_heads, v_head_dim]   dtype of k
        slots   [tokens]  int64  device; as `slots` makes them, and -1 for a token that is not written

        One launch on the current stream, no sync: steps that read it must come behind. They do on the stream of the
        manager, else by an event. Capture-safe: slots are read on the device, so one captured encoder writes to other
        pages at every replay; the caller vouches for those.

        Raises: ShapeError for tensors that do not fit the layer, ConfigError for a layer that is not there; nothing is
        written then.
        """
        layer = self._checked_layer(layer)
        for name, tensor in (("k", k), ("v", v)):
            check_tensor(name, tensor, shape=(None, None, None))
            check_unit_stride(name, tensor)
        scales = (self.k_scales[layer], self.v_scales[layer]) if self.k[layer].dtype in FP8_DTYPES else (None, None)
        write_kv(k[:, :0], k, v, self.k[layer], self.v[layer], slots, slots, k_scale=scales[0], v_scale=scales[1])

    def _checked_layer(self, layer: int) -> int:
        return check_int("layer", layer, 0, len(self.k) - 1, advice="pass a layer of the cache")

    def packer(self, group: int) -> PagePacker:
        """What gathers pages of a group, all its layers, into one block of bytes, and scatters them again.

        Raises: ConfigError for a group that is not there.
        """
        k, v = self.of_group(group)
        if (packer := self._packers.get(int(group))) is None:
            packer = self._packers[int(group)] = PagePacker((*k, *v))
        return packer


def check_groups(groups: KVCacheSpec | Sequence[KVCacheSpec]) -> tuple[KVCacheSpec, ...]:
    """The groups as a tuple, also of one. Raises: ConfigError for what is none."""
    if isinstance(groups, KVCacheSpec):
        return (groups,)
    check_sequence("groups", groups, of="KVCacheSpec per KV group", error=ConfigError)
    for index, spec in enumerate(groups):
        check_instance(f"groups[{index}]", spec, KVCacheSpec, advice="pass the specs that kv_groups() makes")
    return tuple(groups)


def bytes_per_page(groups: Sequence[KVCacheSpec]) -> int:
    """Bytes of one page of a pool: the most bytes and the most layers that one of its groups needs."""
    return max(spec.layer_bytes_per_page for spec in groups) * max(spec.num_layers for spec in groups)


def _allocate_pool(
    groups: Sequence[KVCacheSpec],
    num_pages: int,
    device: torch.device,
    k: dict[int, torch.Tensor],
    v: dict[int, torch.Tensor],
) -> None:
    """Add each layer's tensors of one pool, by the layer's number: views of one allocation.

    Where all pages look alike, each tensor of the pool has its keys first, then its values. Else each page has its keys
    first, then its values, so that a page is the same bytes in every group.
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


def _check_null_pages(groups: Sequence[KVCacheSpec]) -> None:
    null_pages: dict[int, int | str] = {}
    for spec in groups:
        if null_pages.setdefault(spec.pool, spec.null_page) != spec.null_page:
            raise ConfigError(
                f"KVCacheSpec.null_page: expected {null_pages[spec.pool]}, as another group of pool {spec.pool} has, "
                f"got {spec.null_page}; groups of a pool share their page ids"
            )


def _zeros(shape: tuple[int, int, int], device: torch.device) -> torch.Tensor:
    nbytes = math.prod(shape)
    try:
        if nbytes < 1 << 62:  # beyond that a size wraps
            return torch.zeros(shape, dtype=torch.uint8, device=device)
        cause = None
    except RuntimeError as error:
        cause = error
    raise CapacityError(
        f"num_pages: expected a cache that fits {device}, got {shape[1]} pages of {nbytes // shape[1]} bytes; lower it"
    ) from cause


def _scales(
    name: str, given: Sequence[torch.Tensor] | None, layers: Sequence[KVCacheSpec], device: torch.device
) -> tuple[torch.Tensor, ...]:
    """The scales of every layer, checked; ones where none are given, and none for a cache that is not fp8."""
    if given is None:
        if not any(spec.dtype in FP8_DTYPES for spec in layers):
            return ()
        # Tensors of their own, not rows of one: kernels are specialised on whether an address is a multiple of 16.
        with torch.inference_mode(False):  # the caller fills them in place, at any time
            return tuple(torch.ones(spec.num_kv_heads, dtype=torch.float32, device=device) for spec in layers)
    if len(check_sequence(name, given, of="tensors, one per layer")) != len(layers):
        raise ConfigError(f"{name}: expected {len(layers)} tensors, one per layer, got {len(given)}")
    for layer, (scale, spec) in enumerate(zip(given, layers, strict=True)):
        check_kv_scale(f"{name}[{layer}]", scale, spec.dtype, spec.num_kv_heads, device)
    return tuple(given)
