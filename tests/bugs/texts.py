"""What docs/graph_bugs.md says of each planted bug: its symptom, and how to mend it. The cause is its docstring."""

from __future__ import annotations

TEXTS: dict[str, tuple[str, str]] = {
    "stale positions tail": (
        "Tokens are wrong when a small batch follows a large one; elsewhere an illegal address every few hours.",
        "Write the whole buffer: real values, then the pad value up to its end.",
    ),
    "stale slot mapping": (
        "A sequence that is not in the batch answers nonsense later on: its cache was overwritten.",
        "Fill the slots of pad rows with a slot that nobody owns, from the real row count to the end.",
    ),
    "stale table columns": (
        "A short row attends to pages of a longer one that stood there before.",
        "Clear the columns behind a row's last page, or mask by the row's length and never by the table.",
    ),
    "table one column short": (
        "Rows lose their newest tokens as soon as they grow past a page border.",
        "Size the table for the longest sequence, the token of this step included.",
    ),
    "lengths refreshed when the batch size changes only": (
        "Rows attend to too few splits, but only while the batch size stays the same.",
        "Refresh each derived buffer at every step, or compare all that it depends on.",
    ),
    "split plan of the first step": (
        "Batch size 1 looks right; later slots attend to the first chunk of their keys only.",
        "Plan at every step, into memory that stays.",
    ),
    "plan cached by batch size": (
        "A batch is served with the plan of another one of the same size.",
        "Let the key hold everything that the plan is made of.",
    ),
    "sampling values of a row that moved": (
        "After some row ended, others sample with its temperature.",
        "Write the values of every real row, or follow rows by an id and not by their place.",
    ),
    "one row's value broadcast to all": (
        "All rows rotate by the position of the first one.",
        "Compare shapes before a copy: assignment and copy_() broadcast without a word.",
    ),
    "offsets of pad rows": (
        "Kernels of packed rows see tokens of a batch that is gone.",
        "Repeat the last offset up to the end of the buffer.",
    ),
    "a counter that nobody resets": (
        "The first launch is right and every later one is wrong.",
        "Reset the counter inside of the captured step.",
    ),
    "cache of results in a function": (
        "Results depend on which batch came first in the process.",
        "Make the key complete, and own what the graph reads: a cache may drop it.",
    ),
    "baked max_seq_len": (
        "Long rows lose everything beyond the longest row of the capture; benchmarks fall by half.",
        "Capture with the upper bound, or keep the number in a tensor, or make it part of the graph's key.",
    ),
    "a number among the arguments": (
        "A Python number that changes from step to step has no effect.",
        "Pass a tensor, or capture one graph for each value.",
    ),
    "RoPE factors chosen for the whole batch": (
        "Short rows change their answer when a long row is in the batch, or was in the captured one.",
        "Choose for each row, on the device: torch.where over the rows' lengths.",
    ),
    "metadata kernel that the warm-up made unnecessary": (
        "The graph has one kernel less than the eager step, and its schedule is that of the warm-up.",
        "Forget lazily computed values between the warm-up and the capture; compare the kernels of both.",
    ),
    "metadata in a new tensor each step": (
        "The schedule never changes, or an illegal address, depending on who got the old memory.",
        "Allocate once and fill in place.",
    ),
    "replay with a moved input": (
        "The graph goes on with the input that it was captured with.",
        "Copy into the static buffer; compare addresses at the first replay.",
    ),
    "weights loaded after the capture": (
        "New weights take effect in eager steps and not in graphs.",
        "Load in place with copy_(), or capture again.",
    ),
    "a plan of the host as a constant": (
        "Outputs look right and drafts are hardly ever accepted: the plan is that of the capture.",
        "Make the tensor outside of the step, in a static buffer, and fill that.",
    ),
    "rows of the capture": (
        "Rows beyond those of the captured batch come out empty.",
        "Work on all padded rows, and let the caller cut.",
    ),
    "a value read on the host": (
        "The capture fails: operation not permitted while a stream is capturing.",
        "Compute with tensors: masks, torch.where, an upper bound.",
    ),
    "slot -1 used as an index": (
        "The last page of the cache is overwritten whenever there are pad rows.",
        "Mask negative slots in the kernel, or give pad rows a slot of their own.",
    ),
    "pad rows in a scale of all rows": (
        "Real rows turn NaN, or lose precision, depending on what an earlier batch left in pad rows.",
        "Leave pad rows out of what is taken over all rows.",
    ),
    "pad rows on a live row's state": (
        "A running sequence changes although nobody advanced it.",
        "Reserve a slot for pad rows.",
    ),
    "plan entries that nobody wrote": (
        "Works for days, then an illegal address: blocks of the grid read what was in that memory.",
        "Write every entry that the grid reads, or initialise the plan in the step.",
    ),
    "metadata buffer too small": (
        "Something unrelated is wrong: the buffer that happens to lie behind.",
        "Ask the kernel's own formula for the size, at the largest batch.",
    ),
    "values that are only masked by a weight of 0": (
        "A row turns NaN because an earlier owner of its page wrote NaN there, and else nothing is to be seen.",
        "Mask the values too: 0 times NaN is NaN.",
    ),
    "an attribute that the body sets": (
        "Every step mixes in the state of the first one.",
        "Write it in place, with copy_(), into a tensor that stays; name that in the state.",
    ),
    "a step counter in Python": (
        "Corrections that should fade with the steps stay as they were.",
        "Count in a tensor of the device, or let refresh() fill the count in.",
    ),
    "random numbers drawn in Python": (
        "Samples repeat: each step adds the same noise.",
        "Draw with torch inside of the step, or let refresh() fill a buffer with noise.",
    ),
    "an input that is None for some batches": (
        "Images have no effect, or text is answered as if the images of another batch were there.",
        "Give a tensor in every batch with a mask beside it, or capture a graph for each of both.",
    ),
    "attention output that nobody writes": (
        "NaN in all rows, once in a while, and only where the batch is padded.",
        "Zero what the kernel skips, or keep pad rows out of whatever looks at all rows.",
    ),
    "pad rows that are counted": (
        "A sequence is penalised for tokens that it never had.",
        "Keep a row of counts that nobody owns, and send pad rows there.",
    ),
    "stale rows of scratch": (
        "A small batch after a large one is scaled by rows of the large one.",
        "Zero the rows that the kernel skips, in each step, or mask them wherever all rows are looked at.",
    ),
    "launches that only one rank captures": (
        "A hang in the first step that all ranks replay, or a capture that fails on another rank.",
        "Decide from what all ranks share; compare diff() or fingerprint() of the ranks' graphs after capture.",
    ),
    "a constant made in the step": (
        "Capture fails far from the cause; on a CPU all looks well.",
        "Make constants before the capture; the marker names the line, also where there is no GPU.",
    ),
    "pinned staging overwritten in flight": (
        "Rare wrong tokens under load, gone as soon as anybody synchronises to look.",
        "A slot per launch in flight, each with an event that is waited for before the host writes.",
    ),
    "a copy on another stream that nobody waits for": (
        "The graph starts with a part of the new values, now and then.",
        "main.wait_stream(side) before the launch.",
    ),
    "a buffer overwritten while a graph reads it": (
        "A step takes values of the next one, now and then.",
        "side.wait_stream(main) before the copy, or two buffers in turn.",
    ),
    "a tensor that was captured and then freed": (
        "Right until the allocator gives the memory to somebody else.",
        "Own every tensor that a graph reads for as long as the graph lives.",
    ),
    "an allocation that was given away after the capture": (
        "The same, once something else is allocated.",
        "Keep it, or capture again after dropping it; audit() names such addresses.",
    ),
    "a loop whose condition never resets": (
        "The first launch loops, later ones do not enter the body.",
        "Create the handle with a default value and CU_GRAPH_COND_ASSIGN_DEFAULT.",
    ),
    "host memory copied inside the graph": (
        "Replays read what the host wrote last, whether or not it was meant for them.",
        "Copy before the launch, or own that memory and guard it with an event.",
    ),
}
