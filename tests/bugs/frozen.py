"""Injected bugs of the capture: the graph keeps a number, a branch or an address that it had at capture."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import torch

from tests.bugs.bug import add
from tests.bugs.step import PAGE, ROWS, WIDTH, Decode


@add("a frozen max_seq_len", "self.max_seq_len")
class BakedLength(Decode):
    """Keys beyond the longest row of the captured batch are never read."""

    max_seq_len = 1

    def refresh(self, inputs: Mapping[str, Any]) -> None:
        super().refresh(inputs)
        self.max_seq_len = int(inputs["seq_lens"].max()) if self.injected else self.block_table.shape[1] * PAGE

    def seen(self, slots: torch.Tensor) -> torch.Tensor:
        return super().seen(slots) & (torch.arange(slots.shape[1], device=self.device) < self.max_seq_len)


@add("a number among the arguments", "num_draft")
def baked_argument(injected: bool, device: torch.device) -> Any:
    """The number of draft tokens changes from step to step, and the graph always checks as many as at capture."""

    def step(logits: torch.Tensor, num_draft: Any) -> torch.Tensor:
        places = torch.arange(logits.shape[0], device=device)
        return torch.where(places < num_draft, logits.argmax(-1), -1)

    def make_inputs(case: int) -> dict[str, Any]:
        logits = torch.randn(6, 9, generator=torch.Generator().manual_seed(case)).to(device)
        count = (2, 5, 1, 6)[case]
        return {"logits": logits, "num_draft": count if injected else torch.tensor(count, device=device)}

    return step, make_inputs


@add("RoPE factors chosen for the whole batch", "self.is_long")
class BakedFactors(Decode):
    """Long rows use other factors. The host chooses by the longest row, and the graph keeps that branch."""

    is_long = False

    def refresh(self, inputs: Mapping[str, Any]) -> None:
        super().refresh(inputs)
        self.is_long = int(inputs["seq_lens"].max()) > 12

    def rates(self) -> torch.Tensor:
        if self.injected:
            return super().rates() / (3 if self.is_long else 1)
        return super().rates() / torch.where(self.seq_lens > 12, 3, 1)[:, None]

    def angle(self, inputs: Mapping[str, Any], row: int) -> torch.Tensor:
        return super().angle(inputs, row) / (3 if inputs["seq_lens"][row] > 12 else 1)


@add("a metadata kernel skipped after the warm-up", "self.tiles")
class SkippedKernel(Decode):
    """A schedule is computed lazily. The warm-up computed it, so the graph has no kernel that does."""

    tiles: torch.Tensor | None = None

    def refresh(self, inputs: Mapping[str, Any]) -> None:
        super().refresh(inputs)
        self.tiles = None

    def seen(self, slots: torch.Tensor) -> torch.Tensor:
        if self.tiles is None or not self.injected:
            self.tiles = (self.seq_lens + PAGE - 1) // PAGE
        return super().seen(slots) & (torch.arange(slots.shape[1], device=self.device) < self.tiles[:, None] * PAGE)


@add("metadata in a new tensor at each step", "self.tiles")
class NewTensor(Decode):
    """refresh() creates the schedule as a new tensor, and the graph reads the one of its capture."""

    def add_buffers(self) -> None:
        self.tiles = self.ints(ROWS, 1)

    def refresh(self, inputs: Mapping[str, Any]) -> None:
        super().refresh(inputs)
        tiles = (self.seq_lens + PAGE - 1) // PAGE
        if self.injected:
            self.tiles = tiles
        else:
            self.tiles.copy_(tiles)

    def seen(self, slots: torch.Tensor) -> torch.Tensor:
        return super().seen(slots) & (torch.arange(slots.shape[1], device=self.device) < self.tiles[:, None] * PAGE)


@add("a replaced static buffer", "input_ids")
class MovedInput(Decode):
    """refresh() replaces a static buffer by the caller's tensor."""

    def refresh(self, inputs: Mapping[str, Any]) -> None:
        super().refresh(inputs)
        if self.injected:
            self.buffers["input_ids"] = self.input_ids.clone()


@add("weights loaded after the capture", "self.embed")
class NewWeights(Decode):
    """New weights are loaded as new tensors, and the graph reads the old ones."""

    def refresh(self, inputs: Mapping[str, Any]) -> None:
        super().refresh(inputs)
        values = self.first * (1 + inputs["version"])
        if self.injected:
            self.embed = values
        else:
            self.embed.copy_(values)

    def add_buffers(self) -> None:
        self.first = self.embed.clone()

    def eager(self, inputs: Mapping[str, Any]) -> torch.Tensor:
        self.refresh(inputs)
        return super().eager(inputs)

    def make_inputs(self, case: int) -> dict[str, Any]:
        return {**super().make_inputs(case), "version": torch.tensor(case % 2, device=self.device)}


@add("a host plan as a constant", "self.accepted")
class HostPlan(Decode):
    """The step converts a Python list to a tensor, which is a constant of the graph."""

    def add_buffers(self) -> None:
        self.accepted: list[int] = [1] * ROWS
        self.buffers["plan"] = self.ints(ROWS, 1)

    def refresh(self, inputs: Mapping[str, Any]) -> None:
        super().refresh(inputs)
        lengths = inputs["seq_lens"].tolist()
        self.accepted = [*(1 + length % 3 for length in lengths), *[1] * (ROWS - len(lengths))]
        self.plan.copy_(torch.tensor(self.accepted, device=self.device))

    def run(self) -> torch.Tensor:
        plan = self.plan
        if self.injected:
            plan = torch.stack([torch.full((), count, device=self.device) for count in self.accepted])
        return super().run() * plan[:, None]

    def eager(self, inputs: Mapping[str, Any]) -> torch.Tensor:
        return super().eager(inputs) * (1 + inputs["seq_lens"] % 3)[:, None]


@add("the row count of the capture", "self.rows")
class BakedRows(Decode):
    """The step computes as many rows as the captured batch had."""

    rows = ROWS

    def refresh(self, inputs: Mapping[str, Any]) -> None:
        super().refresh(inputs)
        self.rows = len(inputs["seq_lens"]) if self.injected else ROWS

    def run(self) -> torch.Tensor:
        out = super().run()
        return torch.cat([out[: self.rows], torch.zeros_like(out[self.rows :])])


@add("an attribute that the body sets", "self.previous")
class SetAttribute(Decode):
    """The step keeps its hidden state in an attribute. A replay runs no Python and does not set it."""

    def add_buffers(self) -> None:
        self.previous = torch.zeros(ROWS, WIDTH, device=self.device)
        self.state["previous"] = self.previous

    def hidden(self) -> torch.Tensor:
        hidden, before = super().hidden(), self.previous
        mixed = hidden + before
        if self.injected:
            self.previous = hidden
        else:
            self.previous.copy_(hidden)
        return mixed

    def carried(self, row: int) -> torch.Tensor:
        return self.state["previous"][row]


@add("a step counter in Python", "self.steps")
class PythonCounter(Decode):
    """The body counts its steps in Python. All replays use the count of the capture."""

    steps = 0

    def add_buffers(self) -> None:
        self.count = self.ints(())
        self.state["count"] = self.count

    def run(self) -> torch.Tensor:
        count: Any = self.count.add_(1)
        if self.injected:
            self.steps += 1
            count = self.steps
        return super().run() / (1 - 0.9**count)

    def eager(self, inputs: Mapping[str, Any]) -> torch.Tensor:
        return super().eager(inputs) / (1 - 0.9 ** (self.count + 1))


@add("random numbers drawn in Python", "random")
class PythonNoise(Decode):
    """The body draws a number with Python's generator. Every replay uses the number drawn at capture."""

    def add_buffers(self) -> None:
        self.buffers["noise"] = torch.zeros((), device=self.device)

    def refresh(self, inputs: Mapping[str, Any]) -> None:
        super().refresh(inputs)
        self.noise.fill_(inputs["seed"] / 10)

    def run(self) -> torch.Tensor:
        return super().run() + (random.random() if self.injected else self.noise)

    def eager(self, inputs: Mapping[str, Any]) -> torch.Tensor:
        return super().eager(inputs) + inputs["seed"] / 10

    def make_inputs(self, case: int) -> dict[str, Any]:
        return {**super().make_inputs(case), "seed": case}


@add("an input that is None for some batches", "image")
def sometimes_none(injected: bool, device: torch.device) -> Any:
    """Batches without images pass None. The graph keeps the branch of the captured batch."""

    def step(x: torch.Tensor, image: torch.Tensor | None) -> torch.Tensor:
        return x if image is None else x + image

    def make_inputs(case: int) -> dict[str, Any]:
        rng = torch.Generator().manual_seed(case)
        x, image = (torch.randn(6, 8, generator=rng).to(device) for _ in range(2))
        if case % 2:
            return {"x": x, "image": None if injected else torch.zeros_like(x)}
        return {"x": x, "image": image}

    return step, make_inputs


@add("a value read on the host", "", tool="capture")
class HostRead(Decode):
    """The step reads the longest length on the host, which a capture forbids."""

    def seen(self, slots: torch.Tensor) -> torch.Tensor:
        longest = int(self.seq_lens.max()) if self.injected else slots.shape[1]
        return super().seen(slots) & (torch.arange(slots.shape[1], device=self.device) < longest)
