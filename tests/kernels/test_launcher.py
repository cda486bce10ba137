"""Which launches go through Triton's binder, and which use a cached kernel."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from graphrt.kernels import launcher as launcher_module
from graphrt.kernels.launcher import KernelLauncher
from graphrt.kernels.sizes import next_power_of_two


class Kernel:
    """A fake `triton.jit` function that records its launches."""

    arg_names = ("x_ptr", "stride", "out_ptrs", "SIZE", "FLAG")
    params = tuple(SimpleNamespace(name=name, is_constexpr=name.isupper()) for name in arg_names)

    def __init__(self) -> None:
        self.launches: list[tuple[Any, ...]] = []
        self.refuses = False

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        def run(*args: Any, **named: Any) -> Any:
            self.launches.append(("binder", grid, args, named))
            return None if self.refuses else Compiled(self)

        return run


class Compiled:
    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., None]:
        return lambda *args, stream: self.kernel.launches.append(("compiled", grid, args, stream))


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    device = SimpleNamespace(current=0)
    device.get_current_device = lambda: device.current
    device.get_current_stream = lambda index: 70 + index
    monkeypatch.setattr(launcher_module, "driver", SimpleNamespace(active=device))
    monkeypatch.setattr(launcher_module, "JITFunction", Kernel)
    made = Kernel()
    made.device = device  # type: ignore[attr-defined]
    return made


WORDS = torch.zeros(64)
X, OUT = WORDS[:8], (WORDS[16:24], None)
CALL: dict[str, Any] = {"grid": (3, 2), "x": X, "stride": 8, "out": OUT, "SIZE": 8, "FLAG": True, "num_warps": 4}


def launch(launcher: KernelLauncher, **changed: Any) -> None:
    call = CALL | changed
    launcher(call.pop("grid"), call.pop("x"), call.pop("stride"), call.pop("out"), **call)


def test_the_second_launch_uses_the_cached_kernel(kernel: Kernel) -> None:
    launcher = KernelLauncher(kernel)
    launch(launcher)
    other = WORDS[32:40]  # other memory, aligned alike
    launch(launcher, x=other, FLAG=True)
    first, second = kernel.launches
    assert first == ("binder", (3, 2), (X, 8, OUT), {"SIZE": 8, "FLAG": True, "num_warps": 4})
    assert second[:2] == ("compiled", (3, 2, 1))
    assert second[2][0] is other
    assert second[2][1:] == (8, OUT, 8, True)
    assert second[3] == 70


@pytest.mark.parametrize(
    "changed",
    [
        {"x": None},
        {"x": X.double()},
        {"x": WORDS[1:9]},
        {"out": (WORDS[17:25], None)},
        {"out": (None, WORDS[16:24])},
        {"stride": 1},
        {"grid": (3, 1)},
        {"SIZE": 16},
        {"FLAG": False},
        {"num_warps": 8},
        {"num_stages": 4},
    ],
    ids=lambda changed: "-".join(changed),
)
def test_a_different_launch_uses_the_binder(kernel: Kernel, changed: dict[str, Any]) -> None:
    launcher = KernelLauncher(kernel)
    for _ in range(2):
        launch(launcher)
        launch(launcher, **changed)
    assert [way for way, *_ in kernel.launches] == ["binder", "binder", "compiled", "compiled"]


def test_each_device_has_its_own_cached_kernel(kernel: Kernel) -> None:
    launcher = KernelLauncher(kernel)
    for device in (0, 1, 1):
        kernel.device.current = device  # type: ignore[attr-defined]
        launch(launcher)
    assert [way for way, *_ in kernel.launches] == ["binder", "binder", "compiled"]
    assert kernel.launches[-1][-1] == 71


def test_a_launch_rejected_by_a_hook_is_not_cached(kernel: Kernel) -> None:
    launcher = KernelLauncher(kernel)
    kernel.refuses = True
    launch(launcher)
    launch(launcher)
    assert [way for way, *_ in kernel.launches] == ["binder", "binder"]


def test_the_cache_is_bounded(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher_module, "_MOST_KNOWN", 2)
    launcher = KernelLauncher(kernel)
    for stride in (1, 2, 3, 3, 1):
        launch(launcher, stride=stride)
    assert [way for way, *_ in kernel.launches] == ["binder", "binder", "binder", "compiled", "binder"]


def test_next_power_of_two() -> None:
    assert [next_power_of_two(n) for n in (1, 2, 3, 4, 5, 128, 129)] == [1, 2, 4, 4, 8, 128, 256]
