"""`write_kv` with one wrong argument at a time, rotation widths, and the epsilon of the norm."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from graphrt.kernels.cache.write import Rotary, write_kv
from graphrt.kernels.errors import ShapeError

TOKENS, HEADS, KV_HEADS, DIM, PAGES, PAGE = 3, 4, 2, 8, 5, 4


def arguments() -> dict[str, torch.Tensor]:
    return {
        "q": torch.zeros(TOKENS, HEADS, DIM),
        "k": torch.zeros(TOKENS, KV_HEADS, DIM),
        "v": torch.zeros(TOKENS, KV_HEADS, DIM),
        "k_cache": torch.zeros(PAGES, PAGE, KV_HEADS, DIM),
        "v_cache": torch.zeros(PAGES, PAGE, KV_HEADS, DIM),
        "slot_mapping": torch.arange(TOKENS),
        "positions": torch.arange(TOKENS),
        "rotary.cos_sin": torch.zeros(TOKENS, DIM),
        "rotary.q_norm": torch.zeros(DIM),
        "rotary.k_norm": torch.zeros(DIM),
    }


def run(given: dict[str, torch.Tensor]) -> None:
    given = dict(given)
    eps = given.pop("eps", 1e-6)
    plain = {name: tensor for name, tensor in given.items() if not name.startswith("rotary.")}
    rotary = {name.removeprefix("rotary."): tensor for name, tensor in given.items() if name.startswith("rotary.")}
    write_kv(**plain, rotary=Rotary(**rotary, norm_eps=eps))


WRONG: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "dtype": lambda t: t.to(torch.complex64),
    "rank": lambda t: t.unsqueeze(0),
    "device": lambda t: t.to("meta"),
    "stride": lambda t: t.repeat_interleave(2, -1)[..., ::2],
}
SIZED = {  # extents that other arguments determine
    "k": (0, 2), "v": (0, 1, 2), "k_cache": (2, 3), "v_cache": (0, 1, 2, 3), "slot_mapping": (0,), "positions": (0,),
    "rotary.q_norm": (0,), "rotary.k_norm": (0,),
}  # fmt: skip
FIRST = {  # the error names another argument, which does not fit the wrong one
    ("q", "device"): "k", ("k", "heads"): "v", ("k_cache", "pages"): "v_cache",
    ("v", "longer 2"): "v_cache",  # values have their own head size
}  # fmt: skip


@pytest.mark.parametrize("name", arguments())
def test_every_argument_is_checked(name: str) -> None:
    run(arguments())
    cases = dict(WRONG)
    for dim in SIZED.get(name, ()):
        cases[f"longer {dim}"] = lambda t, dim=dim: torch.cat([t, t.narrow(dim, 0, 1)], dim)
    for what, change in cases.items():
        given = arguments()
        given[name] = change(given[name])
        with pytest.raises(ShapeError) as caught:
            run(given)
        assert str(caught.value).startswith(f"{FIRST.get((name, what), name)}: expected"), what


@pytest.mark.parametrize("name", ["q", "k_cache", "v_cache"])
def test_an_overlapping_output_raises(name: str) -> None:
    given = arguments()
    given[name] = given[name][:1].expand_as(given[name])
    with pytest.raises(ShapeError, match=f"{name}: elements may share memory"):
        run(given)


@pytest.mark.parametrize(("width", "good"), [(1, False), (2, True), (6, True), (7, False), (8, True), (10, False)])
def test_rotary_width_is_even_and_at_most_head_dim(width: int, good: bool) -> None:
    given = arguments() | {"rotary.cos_sin": torch.zeros(TOKENS, width)}
    if good:
        run(given)
    else:
        with pytest.raises(
            ShapeError, match=f"rotary.cos_sin: expected an even width from 2 to head_dim=8, got {width}"
        ):
            run(given)


def test_defaults_of_rotary() -> None:
    table = torch.zeros(1, 2)
    rotary = Rotary(table)
    assert (rotary.q_norm, rotary.k_norm, rotary.norm_eps) == (None, None, 1e-6)
    assert replace(rotary, norm_eps=1.0).cos_sin is table


@pytest.mark.parametrize("eps", [0.1, 0.7])
def test_norm_eps_is_added_to_the_mean_square(kernel_device: torch.device, rng: torch.Generator, eps: float) -> None:
    given = {name: tensor.to(kernel_device) for name, tensor in arguments().items()}
    heads = torch.randn(2, TOKENS, HEADS, DIM, generator=rng).to(kernel_device)
    given["q"], given["k"] = heads[0].clone(), heads[1, :, :KV_HEADS].clone()
    given["rotary.cos_sin"][:, : DIM // 2] = 1.0  # no rotation
    for name in ("rotary.q_norm", "rotary.k_norm"):
        given[name].fill_(2.0)
    q, k = (2 * x / (x.square().mean(-1, keepdim=True) + eps).sqrt() for x in (given["q"], given["k"]))
    run(given | {"eps": eps})
    torch.testing.assert_close(given["q"], q)
    torch.testing.assert_close(given["k_cache"].flatten(0, 1)[:TOKENS], k)
