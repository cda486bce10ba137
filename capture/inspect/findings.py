"""Results of an audit: findings, deliberate exceptions with their reasons, and the report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from fnmatch import fnmatchcase

from graphrt.capture.inspect.memory import Owner
from graphrt.capture.inspect.view import Place, place_name
from graphrt.kernels.checks import check_instance
from graphrt.kernels.errors import CaptureError, ConfigError

_MOST_SHOWN = 20  # groups of findings in the report
_PLACES_SHOWN = 8  # further places per group


class FindingKind(str, Enum):
    """Kind of a finding.

    FOREIGN        an allocation that is neither registered nor in the graph's pool
    FREED          a freed block, whose next owner overwrites what the graph reads
    OVERRUN        bytes past the end of registered memory. Overruns within the graph's pool are not detected, because
                   blocks are split during the capture and their ends at a launch are unknown
    UNMAPPED       an address outside all known memory
    HOST_MEMORY    host memory, which every replay accesses again
    HOST_FUNCTION  a host function, whose memory an audit cannot see
    EARLY_START    a kernel that may start before an earlier kernel has finished and is not known to wait, or that loads
                   memory before it waits which is not a weight
    HIDDEN_STATE   memory allocated by an earlier capture of the same step
    CHANGED        a value or registered address that differs between two captures of the same step
    """

    FOREIGN = "foreign allocation"
    FREED = "freed block"
    OVERRUN = "past the end"
    UNMAPPED = "unmapped"
    HOST_MEMORY = "host memory"
    HOST_FUNCTION = "host function"
    EARLY_START = "early start"
    HIDDEN_STATE = "hidden state"
    CHANGED = "changed between captures"


@dataclass(frozen=True, slots=True)
class Finding:
    """A possible error in a graph.

    place    place of the node; () if the finding is not about a node
    node     name of the node
    where    position of the address in the node: "argument 3 'x', byte 16", "operand src"; "" for the whole node
    address  the address; 0 if there is none
    owner    owner of the memory at the address; None if unknown
    region   name of the memory; "" if unknown
    text     the error, its reason, and how to fix it
    kind     see FindingKind
    certain  False if the word may be a number instead of an address; `audit_twice` decides
    """

    place: Place
    node: str
    where: str
    address: int
    owner: Owner | None
    region: str
    text: str
    kind: FindingKind
    certain: bool = True

    def __str__(self) -> str:
        parts = (f"node {place_name(self.place)} {self.node}".rstrip() if self.place else "", self.where, self.text)
        return ": ".join(part for part in parts if part)


@dataclass(frozen=True, slots=True)
class Allowed:
    """A deliberate exception. Findings that match all its patterns are not reported.

        Allowed("written only after the event of the last copy", region="staging.*")
        Allowed("its first instruction is griddepcontrol.wait", node="rms_norm*", kind=FindingKind.EARLY_START)

    reason   why the exception is correct; included in the report
    region   `fnmatch` pattern of the region's name, case-sensitive
    node     `fnmatch` pattern of the node's name
    kind     kind of the finding; None: any

    Raises:
        ConfigError: if the reason is empty, or if neither region, node nor kind is given.
    """

    reason: str
    region: str = "*"
    node: str = "*"
    kind: FindingKind | None = None

    def __post_init__(self) -> None:
        for name in ("reason", "region", "node"):
            check_instance(name, getattr(self, name), str, advice="pass a str")
        if not self.reason.strip():
            raise ConfigError("reason: empty; state why the exception is correct")
        if self.region == self.node == "*" and self.kind is None:
            raise ConfigError("allowed: the exception would allow every finding; pass a region, a node or a kind")

    def matches(self, finding: Finding) -> bool:
        """Return whether the exception applies to a finding."""
        return (
            self.kind in (None, finding.kind)
            and fnmatchcase(finding.region, self.region)
            and fnmatchcase(finding.node, self.node)
        )

    def __str__(self) -> str:
        named = {"region": self.region, "node": self.node, "kind": self.kind.value if self.kind else "*"}
        return f"{', '.join(f'{k} {v!r}' for k, v in named.items() if v != '*')} ({self.reason})"


@dataclass(frozen=True, slots=True)
class Audit:
    """The result of an audit. `str` returns the report.

    findings    findings without an exception, in node order
    nodes       number of nodes in the graph, including bodies
    words       number of checked words
    counts      number of addresses by memory owner
    allowances  each exception, with the number of findings that matched it
    unread      nodes that could not be read completely: place, name, remark
    """

    findings: tuple[Finding, ...]
    nodes: int
    words: int
    counts: Mapping[Owner, int]
    allowances: tuple[tuple[Allowed, int], ...] = ()
    unread: tuple[tuple[Place, str, str], ...] = ()

    @property
    def ok(self) -> bool:
        """Whether there are no findings, including uncertain ones."""
        return not self.findings

    def raise_if_any(self) -> None:
        """Raise CaptureError if there are findings. The message has their number and the first certain finding."""
        if self.findings:
            first = min(self.findings, key=lambda finding: not finding.certain)
            raise CaptureError(f"audit: expected no findings, got {len(self.findings)}; first finding: {first}")

    def __str__(self) -> str:
        owners = ", ".join(f"{count:,} {owner.value}" for owner, count in self.counts.items() if count) or "none"
        found = f"{len(self.findings):,} finding{'s' * (len(self.findings) != 1)}" if self.findings else "no finding"
        lines = [f"audit of {self.nodes:,} nodes: {found}; {self.words:,} words, addresses by owner: {owners}"]
        lines += _grouped(self.findings)
        for allowed, times in self.allowances:
            lines.append(f"  allowed {times:,} times: {allowed}" if times else f"  allowed, but not found: {allowed}")
        for place, name, remark in self.unread:
            lines.append(f"  not read: node {place_name(place)} {name}: {remark}")
        return "\n".join(lines)


def without_allowed(
    findings: Sequence[Finding], allowed: Sequence[Allowed]
) -> tuple[tuple[Finding, ...], tuple[tuple[Allowed, int], ...]]:
    """Return the findings without an exception, and each exception with the number of findings it removed."""
    taken, left = [0] * len(allowed), []
    for finding in findings:
        which = next((at for at, exception in enumerate(allowed) if exception.matches(finding)), None)
        if which is None:
            left.append(finding)
        else:
            taken[which] += 1
    return tuple(left), tuple(zip(allowed, taken, strict=True))


def _grouped(findings: Sequence[Finding]) -> list[str]:
    """Return one line per kind and buffer, with the first finding of the line, because many nodes use one buffer.
    Blocks of an allocator have equal names, so they are grouped by address."""
    groups: dict[object, list[Finding]] = {}
    for finding in findings:
        unnamed = finding.owner in (None, Owner.ALLOCATOR, Owner.POOL)
        groups.setdefault((finding.kind, finding.region, finding.address if unnamed else 0), []).append(finding)
    lines = []
    for group in list(groups.values())[:_MOST_SHOWN]:
        first = group[0]
        lines.append(f"  {first.kind.value}{'' if first.certain else ' (may be a number)'}: {first}")
        places = list(dict.fromkeys(place_name(f.place) for f in group if f.place != first.place))
        if places:
            more = ", ..." if len(places) > _PLACES_SHOWN else ""
            lines.append(f"    and at {len(places)} more: node {', '.join(places[:_PLACES_SHOWN])}{more}")
    if len(groups) > _MOST_SHOWN:
        lines.append(f"  and {len(groups) - _MOST_SHOWN} more kinds or buffers: see .findings")
    return lines
