"""Planted bugs of the capture: the graph holds a number, a branch or an address of the time when it was captured."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import torch

from tests.bugs.bug import add
from tests.bugs.step import PAGE, ROWS, WIDTH, Decode


@add("baked max_seq_len", "transformers #45274", "self.max_seq_len")
class BakedLength(Decode):
    """Keys beyond the longest row of the capture are never seen."""

    max_seq_len = 1

    def refresh(self, inputs: Mapping[str, Any]) -> None:
        super().refresh(inputs)
        self.max_seq_len = int(inputs["seq_lens"].max()) if self.planted else self.block_table.shape[1] * PAGE

    def seen(self, slots: torch.Tensor) -> torch.Tensor:
        return super().seen(slots) & (torch.arange(slots.shape[1], device=self.device) < self.max_seq_len)


@add("a number among the arguments", "vLLM #48494", "num_draft")
def baked_argument(planted: bool, device: torch.device) -> Any:
    """How many tokens are drafted changes from step to step; the graph always checks as many as at capture."""

    def step(logits: torch.Tensor, num_draft: Any) -> torch.Tensor:
        places = torch.arange(logits.shape[0], device=device)
        return torch.where(places < num_draft, logits.argmax(-1), -1)

    def make_inputs(case: int) -> dict[str, Any]:
        logits = torch.randn(6, 9, generator=torch.Generator().manual_seed(case)).to(device)
        count = (2, 5, 1, 6)[case]
        return {"logits": logits, "num_draft": count if planted else torch.tensor(count, device=device)}

    return step, make_inputs


@add("RoPE factors chosen for the whole batch", "vLLM #27431, #4298", "self.is_long")
class BakedFactors(Decode):
    """Long rows take other factors. The host looks at the longest row, and the graph keeps the branch it had."""

    is_long = False

    def refresh(self, inputs: Mapping[str, Any]) -> None:
        super().refresh(inputs)
        self.is_long = int(inputs["seq_lens"].max()) > 12

    def rates(self) -> torch.Tensor:
        if self.planted:
            return super().rates() / (3 if self.is_long else 1)
        return super().rates() / torch.where(self.seq_lens > 12, 3, 1)[:, None]

    def angle(self, inputs: Mapping[str, Any], row: int) -> torch.Tensor:
        return super().angle(inputs, row) / (3 if inputs["seq_lens"][row] > 12 else 1)


@add("metadata kernel that the warm-up made unnecessary", "vLLM #42444", "self.tiles")
class SkippedKernel(Decode):
    """A lazily computed schedule: the warm-up has filled it in, so the capture holds no kernel that computes it."""

    tiles: torch.Tensor | None = None

    def refresh(self, inputs: Mapping[str, Any]) -> None:
        super().refresh(inputs)
        self.tiles = None

    def seen(self, slots: torch.Tensor) -> torch.Tensor:
        if self.tiles is None or not self.planted:
            self.tiles = (self.seq_lens + PAGE - 1) // PAGE
        return super().seen(slots) & (torch.arange(slots.shape[1], device=self.device) < self.tiles[:, None] * PAGE)


@add("metadata in a new tensor each step", "vLLM #36492, #35175", "self.tiles")
class NewTensor(Decode):
    """The schedule of the step is a tensor that refresh makes anew, and the graph reads the one of its capture."""

    def add_buffers(self) -> None:
        self.tiles = self.ints(ROWS, 1)

    def refresh(self, inputs: Mapping[str, Any]) -> None:
        super().refresh(inputs)
        tiles = (self.seq_lens + PAGE - 1) // PAGE
        if self.planted:
            self.tiles = tiles
        else:
            self.tiles.copy_(tiles)

    def seen(self, slots: torch.Tensor) -> torch.Tensor:
        return super().seen(slots) & (torch.arange(slots.shape[1], device=self.device) < self.tiles[:, None] * PAGE)


@add("replay with a moved input", "vLLM #53915, #35605", "input_ids")
class MovedInput(Decode):
    """A static buffer is replaced by the caller's own tensor."""

    def refresh(self, inputs: Mapping[str, Any]) -> None:
        super().refresh(inputs)
        if self.planted:
            self.buffers["input_ids"] = self.input_ids.clone()


@add("weights loaded after the capture", "vLLM #48941, sglang #4961", "self.embed")
class NewWeights(Decode):
    """New weights come as new tensors, and the graph goes on with the old ones."""

    def refresh(self, inputs: Mapping[str, Any]) -> None:
        super().refresh(inputs)
        values = self.first * (1 + inputs["version"])
        if self.planted:
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


@add("a plan of the host as a constant", "sglang #39825", "self.accepted")
class HostPlan(Decode):
    """The host plans in Python and makes a tensor of its list inside the step: a constant of the graph."""

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
        if self.planted:
            plan = torch.stack([torch.full((), count, device=self.device) for count in self.accepted])
        return super().run() * plan[:, None]

    def eager(self, inputs: Mapping[str, Any]) -> torch.Tensor:
        return super().eager(inputs) * (1 + inputs["seq_lens"] % 3)[:, None]


@add("rows of the capture", "tokenspeed #369", "self.rows")
class BakedRows(Decode):
    """The step works on as many rows as the captured batch had."""

    rows = ROWS

    def refresh(self, inputs: Mapping[str, Any]) -> None:
        super().refresh(inputs)
        self.rows = len(inputs["seq_lens"]) if self.planted else ROWS

    def run(self) -> torch.Tensor:
        out = super().run()
        return torch.cat([out[: self.rows], torch.zeros_like(out[self.rows :])])


@add("an attribute that the body sets", "pytorch #114844", "self.previous")
class SetAttribute(Decode):
    """The step keeps its hidden state for the next one in an attribute. A replay runs no Python, and sets nothing."""

    def add_buffers(self) -> None:
        self.previous = torch.zeros(ROWS, WIDTH, device=self.device)
        self.state["previous"] = self.previous

    def hidden(self) -> torch.Tensor:
        hidden, before = super().hidden(), self.previous
        mixed = hidden + before
        if self.planted:
            self.previous = hidden
        else:
            self.previous.copy_(hidden)
        return mixed

    def carried(self, row: int) -> torch.Tensor:
        return self.state["previous"][row]


@add("a step counter in Python", "burn #5779", "self.steps")
class PythonCounter(Decode):
    """The body counts its steps in Python and computes with the count. All replays have that of the capture."""

    steps = 0

    def add_buffers(self) -> None:
        self.count = self.ints(())
        self.state["count"] = self.count

    def run(self) -> torch.Tensor:
        count: Any = self.count.add_(1)
        if self.planted:
            self.steps += 1
            count = self.steps
        return super().run() / (1 - 0.9**count)

    def eager(self, inputs: Mapping[str, Any]) -> torch.Tensor:
        return super().eager(inputs) / (1 - 0.9 ** (self.count + 1))


@add("random numbers drawn in Python", "pytorch #84967", "random")
class PythonNoise(Decode):
    """The body draws a number from Python's generator: every replay has the one that was drawn at capture."""

    def add_buffers(self) -> None:
        self.buffers["noise"] = torch.zeros((), device=self.device)

    def refresh(self, inputs: Mapping[str, Any]) -> None:
        super().refresh(inputs)
        self.noise.fill_(inputs["seed"] / 10)

    def run(self) -> torch.Tensor:
        return super().run() + (random.random() if self.planted else self.noise)

    def eager(self, inputs: Mapping[str, Any]) -> torch.Tensor:
        return super().eager(inputs) + inputs["seed"] / 10

    def make_inputs(self, case: int) -> dict[str, Any]:
        return {**super().make_inputs(case), "seed": case}


@add("an input that is None for some batches", "sglang #29018", "image")
def sometimes_none(planted: bool, device: torch.device) -> Any:
    """Batches without images bring None. The graph keeps the branch that the captured batch took."""

    def step(x: torch.Tensor, image: torch.Tensor | None) -> torch.Tensor:
        return x if image is None else x + image

    def make_inputs(case: int) -> dict[str, Any]:
        rng = torch.Generator().manual_seed(case)
        x, image = (torch.randn(6, 8, generator=rng).to(device) for _ in range(2))
        if case % 2:
            return {"x": x, "image": None if planted else torch.zeros_like(x)}
        return {"x": x, "image": image}

    return step, make_inputs


@add("a value read on the host", "gpt-fast get_pos", "", tool="capture")
class HostRead(Decode):
    """The longest length is read back in the middle of the step. A capture forbids it."""

    def seen(self, slots: torch.Tensor) -> torch.Tensor:
        longest = int(self.seq_lens.max()) if self.planted else slots.shape[1]
        return super().seen(slots) & (torch.arange(slots.shape[1], device=self.device) < longest)
