// Details of the selected node, or help, memory and findings if none is selected. main.js has the state.

const section = (title, count, ...children) =>
  el("section", el("h3", title, count !== null && el("span.dim", ` ${count}`)), ...children);
function table(head, rows) {
  const headings = head.map((text) => el("th", text));
  return el("table", el("thead", el("tr", headings)), el("tbody", rows));
}

/** A word in a frame. The leading space separates it when the text is copied or read aloud. */
const badge = (text, kind = "badge") => el("span", " ", el(`span.${kind}`, text));

function regionName(region) {
  return region.name || `${region.owner} ${region.text}`;
}

/** A link to all nodes that access a region, and the offset of an address in it. */
function regionLink(region, address) {
  const title = `${region.owner}, ${region.text}; show the nodes that access it`;
  return el(
    "span.region",
    el(
      "button.link",
      { title, click: () => toggle("region", String(region.id)) },
      colored("span.dot", region.owner),
      regionName(region),
    ),
    el("span.dim", ` ${offsetText(address, region)} of ${bytesText(region.nbytes)}`),
    !region.live && badge("freed", "badge.bad"),
  );
}

function nodeLink(node, remark = "") {
  return el(
    "button.node-link",
    { title: node.kernel.name, click: () => select(node) },
    el("span.place", node.place),
    swatch(node.group),
    el("span.name", node.kernel.short),
    remark && el("i", remark),
  );
}

/** Links to up to 40 nodes, and the number of other nodes. */
function nodeLinks(title, edges, graph, end) {
  const links = edges
    .slice(0, 40)
    .map((edge) => nodeLink(graph.nodes[edge[end]], edge.programmatic ? "programmatic" : ""));
  if (edges.length > links.length) links.push(el("p.dim", `and ${edges.length - links.length} more`));
  return section(title, edges.length, links.length ? links : el("p.dim", "none"));
}

function argumentRows(argument) {
  return decodeArgument(argument, model.memory).map((word, i) =>
    el(
      i ? "tr" : "tr.first",
      el("td.dim.number", String(argument.offset + word.at)),
      el(
        "td",
        !i && [argument.name || el("span.dim", "unnamed"), el("span.dim.fixed", ` ${bytesText(argument.size)}`)],
      ),
      el(
        "td.value",
        word.region
          ? regionLink(word.region, word.address)
          : [el("b", word.text), word.pointer && badge("pointer"), word.more && el("span.dim", ` ${word.more}`)],
        el("code.dim", word.hex),
      ),
    ),
  );
}

function argumentsSection(node) {
  const args = argumentsOf(node),
    rows = args.flatMap(argumentRows),
    head = ["byte", "argument", "value"],
    more = rows.length > 64 && el("summary", countText(rows.length - 64, "more word"));
  const rest = more && el("details", more, table(head, rows.slice(64)));
  return section("Arguments", args.length, table(head, rows.slice(0, 64)), rest);
}

function operandRow(operand) {
  const region = findRegion(model.memory, operand.address),
    beyond = region ? operand.address + operand.nbytes - region.address - region.nbytes : 0,
    unknown = Number.isNaN(operand.address) ? "address unknown" : "unknown region";
  return el(
    "tr.first",
    el("td", operand.role, " ", operand.written && badge("written", "badge.accent"), operand.host && badge("host")),
    el("td.number", bytesText(operand.nbytes)),
    el(
      "td.value",
      region ? regionLink(region, operand.address) : el("span.dim", unknown),
      beyond > 0 && badge(`${bytesText(beyond)} past the end`, "badge.bad"),
      el("code.dim", operand.text),
    ),
  );
}

function findingCard(finding, linked) {
  const address = finding.address === "0" ? "" : `0x${finding.address}`;
  const place = [finding.where, address, finding.owner, finding.region].filter(Boolean).join(" · ");
  return el(
    "article.finding",
    linked && finding.node && nodeLink(finding.node),
    el("p", finding.text),
    el("p.dim", place),
  );
}

function facts(node) {
  const [grid, block, shared, attributes] = node.launch,
    product = (values) => values.reduce((a, b) => a * b, 1);
  const rows = [["kind", node.kernel.kind]];
  if (grid) rows.push(["grid", `${grid.join(" × ")}  =  ${countText(product(grid), "block")}`]);
  if (block) rows.push(["block", `${block.join(" × ")}  =  ${countText(product(block), "thread")}`]);
  if (grid) rows.push(["shared memory", bytesText(shared)]);
  rows.push(...Object.entries(attributes));
  return definitions(rows);
}

function definitions(rows) {
  const cells = rows.flatMap(([name, value]) => [el("dt", name), el("dd", value)]);
  return el("dl", cells);
}

function showDetails() {
  const place = byId("details");
  place.replaceChildren(...(selected ? nodeParts(selected) : overviewParts()).filter(Boolean));
  place.scrollTop = 0;
}

function nodeParts(node) {
  const { graph, index, kernel } = node,
    step = (way) => graph.nodes[index + way],
    turn = (way, text, title) =>
      el("button", { title, "aria-label": title, disabled: !step(way), click: () => select(step(way)) }, text),
    scalars = node.scalars.map((value, i) => el("tr", el("td", kernel.scalars[i]), el("td.value", value))),
    operands = operandsOf(node).map(operandRow);
  return [
    el(
      "div.bar.sticky",
      el("h2", `Node ${node.place}`),
      swatch(node.group),
      el("span.space"),
      el("span.group", turn(-1, "‹", "Previous node"), turn(1, "›", "Next node")),
      el("button", { title: "Close (Esc)", "aria-label": "Close", click: () => select(null) }, "×"),
    ),
    el("h4", { id: "name" }, kernel.name),
    kernel.symbol !== kernel.name && el("p.symbol", kernel.symbol),
    node.remark && el("p.remark", node.remark),
    ...node.findings.map((finding) => findingCard(finding, false)),
    facts(node),
    graph.parent && section("Contained in", null, nodeLink(graph.parent, `body ${graph.body}`)),
    kernel.args.length && argumentsSection(node),
    operands.length && section("Operands", operands.length, table(["operand", "size", "memory"], operands)),
    scalars.length && section("Scalars", scalars.length, table(["name", "value"], scalars)),
    ...node.bodies.map((body, which) => bodySection(body, which)),
    nodeLinks("Waits for", graph.before[index], graph, "source"),
    nodeLinks("Waited for by", graph.after[index], graph, "target"),
  ];
}

function bodySection(body, which) {
  const { nodes, edges, parent } = body,
    more = nodes.length - 12;
  return section(
    `Body ${which}`,
    `${countText(nodes.length, "node")}, ${countText(edges.length, "edge")}`,
    nodes.slice(0, 12).map((inner) => nodeLink(inner)),
    more > 0 && el("p.dim", `and ${more} more, in the list under ${parent.place}.${which}`),
  );
}

const KEY_HELP = [
  ["/", "search"],
  ["↑ ↓", "next and previous node of the list"],
  ["Enter", "first match; first node of a body"],
  ["Esc", "clear node, search, filters"],
  ["+ − 0", "zoom in, zoom out, show the whole graph"],
].map(([key, what]) => [el("kbd", key), what]);

function overviewParts() {
  const { findings, memory } = model,
    cards = findings.slice(0, 100).map((finding) => findingCard(finding, true)),
    more = findings.length - cards.length;
  return [
    el("div.bar.sticky", el("h2", "No node selected")),
    el("p.dim", "Select a node in the picture or in the list."),
    cards.length &&
      section("Findings", findings.length, cards, more > 0 && el("p.dim", `and ${more} more: filter by findings`)),
    memory && section("Memory", countText(memory.regions.length, "region"), definitions(ownerRows(memory.regions))),
    section("Keys", null, definitions(KEY_HELP)),
  ];
}

/** For each owner, the number and size of its regions. */
function ownerRows(regions) {
  return [...new Set(regions.map((region) => region.owner))].map((owner) => {
    const own = regions.filter((region) => region.owner === owner),
      freed = own.filter((region) => !region.live).length,
      size = bytesText(own.reduce((sum, region) => sum + region.nbytes, 0));
    const name = el("span", colored("span.dot", owner), owner);
    return [name, `${size} in ${countText(own.length, "region")}${freed ? `, ${freed} freed` : ""}`];
  });
}
