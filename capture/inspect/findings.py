"""What an audit says: findings, deliberate exceptions with their reasons, and the report of both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from fnmatch import fnmatchcase

from graphrt.capture.inspect.memory import Owner
from graphrt.capture.inspect.view import Place, place_name
from graphrt.kernels.checks import check_instance
from graphrt.kernels.errors import CaptureError, ConfigError

_MOST_SHOWN = 20  # groups of findings that are printed
_PLACES_SHOWN = 8  # further places of one group


class FindingKind(str, Enum):
    """What is wrong.

    FOREIGN        an allocation that nobody registered, and that is not of the graph's pool
    FREED          a block that was freed: whoever gets it next changes what the graph reads
    OVERRUN        bytes behind the end of registered memory. What lies in the graph's own pool may run on within it:
                   its blocks are cut anew while the graph is captured, so nobody knows where they ended then
    UNMAPPED       an address for certain, of no memory that anybody knows
    HOST_MEMORY    memory of the host, which every replay reads again
    HOST_FUNCTION  a function of the host, whose memory no audit sees
    EARLY_START    a kernel that may begin before an earlier one has ended, and is not known to wait
    HIDDEN_STATE   memory that an earlier capture of the same step made
    CHANGED        a value or a registered address that two captures of one step hold differently
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
    """One thing that is wrong with a graph.

    place    of the node; () where no node is to blame
    node     its name
    where    what of the node holds the address: "argument 3 'x', byte 16", "operand src"; "" for the node as a whole
    address  0 where there is none
    owner    of the memory at the address; None where nobody knows it
    region   its name; "" where nobody knows it
    text     what is wrong, why, and what to do
    kind     see FindingKind
    certain  False for a word that may be an address or a number: `audit_twice` decides
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
    """An exception that is deliberate: findings that match all of the patterns are not reported.

        Allowed("written only behind the event of the last copy", region="staging.*")
        Allowed("waits: its first instruction is griddepcontrol.wait", node="rms_norm*", kind=FindingKind.EARLY_START)

    reason   why it is right; stands in the report
    region   pattern of the region's name, as of `fnmatch`; upper and lower case differ
    node     pattern of the node's name
    kind     of the finding; None: any

    Raises: ConfigError without a reason, and where nothing is named.
    """

    reason: str
    region: str = "*"
    node: str = "*"
    kind: FindingKind | None = None

    def __post_init__(self) -> None:
        for name in ("reason", "region", "node"):
            check_instance(name, getattr(self, name), str, advice="pass a str")
        if not self.reason.strip():
            raise ConfigError("reason: expected why the exception is right, got none; write it down, it is reported")
        if self.region == self.node == "*" and self.kind is None:
            raise ConfigError("allowed: expected a region, a node or a kind, got none; it would allow every finding")

    def matches(self, finding: Finding) -> bool:
        """Whether the exception is about a finding."""
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
    """The result of an audit; `print` shows it.

    findings    those that nobody allowed, in the order of the nodes
    nodes       of the graph, those in bodies included
    words       candidate words that were looked at
    counts      addresses by the owner of their memory
    allowances  each exception, with how many findings it took away
    unread      nodes of which the graph did not tell all: place, name, remark
    """

    findings: tuple[Finding, ...]
    nodes: int
    words: int
    counts: Mapping[Owner, int]
    allowances: tuple[tuple[Allowed, int], ...] = ()
    unread: tuple[tuple[Place, str, str], ...] = ()

    @property
    def ok(self) -> bool:
        """Whether there is no finding, not even an uncertain one."""
        return not self.findings

    def raise_if_any(self) -> None:
        """Raises: CaptureError that shows the first finding, those that are certain before others, and how many."""
        if self.findings:
            first = min(self.findings, key=lambda finding: not finding.certain)
            raise CaptureError(f"audit: expected no findings, got {len(self.findings)}; the first: {first}")

    def __str__(self) -> str:
        owners = ", ".join(f"{count:,} {owner.value}" for owner, count in self.counts.items() if count) or "none"
        found = f"{len(self.findings):,} finding{'s' * (len(self.findings) != 1)}" if self.findings else "no finding"
        lines = [f"audit of {self.nodes:,} nodes: {found}; {self.words:,} words, addresses by owner: {owners}"]
        lines += _grouped(self.findings)
        for allowed, times in self.allowances:
            lines.append(f"  allowed {times:,} times: {allowed}" if times else f"  allowed, but never found: {allowed}")
        for place, name, remark in self.unread:
            lines.append(f"  not read: node {place_name(place)} {name}: {remark}")
        return "\n".join(lines)


def without_allowed(
    findings: Sequence[Finding], allowed: Sequence[Allowed]
) -> tuple[tuple[Finding, ...], tuple[tuple[Allowed, int], ...]]:
    """The findings that no exception takes away, and each exception with how many it took: the first that matches."""
    taken, left = [0] * len(allowed), []
    for finding in findings:
        which = next((at for at, exception in enumerate(allowed) if exception.matches(finding)), None)
        if which is None:
            left.append(finding)
        else:
            taken[which] += 1
    return tuple(left), tuple(zip(allowed, taken, strict=True))


def _grouped(findings: Sequence[Finding]) -> list[str]:
    """A line per kind and buffer, with the first finding of it: many nodes use one. Blocks of an allocator share their
    names, and so count by the address."""
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
