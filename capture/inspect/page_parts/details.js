// Details of the selected node, or help and findings if none is selected. main.js has the state.

const section = (title, count, ...children) =>
  el(
    "section",
    {},
    el("h3", {}, title, count === null ? null : el("span", { class: "dim" }, ` ${count}`)),
    ...children,
  );
const table = (head, rows) =>
  el("table", {}, el("thead", {}, el("tr", {}, ...head.map((text) => el("th", {}, text)))), el("tbody", {}, ...rows));
const cells = (...values) =>
  el(
    "tr",
    {},
    ...values.map((value) => (value instanceof Element && value.tagName === "TD" ? value : el("td", {}, value))),
  );

/** A framed word. The leading space separates it when the text is copied or read aloud. */
const badge = (text, kind) => el("span", {}, " ", el("span", { class: `badge ${kind || ""}` }, text));

function regionName(region) {
  return region.name || `${region.owner} ${region.text}`;
}

/** A link to all nodes that access a region, and the offset of an address in it. */
function regionLink(region, address) {
  return el(
    "span",
    { class: "region" },
    el(
      "button",
      {
        type: "button",
        class: "link",
        title: `${region.owner}, ${region.text}; show the nodes that access it`,
        click: () => toggle("region", String(region.id)),
      },
      el("span", { class: `dot o-${region.owner}` }),
      regionName(region),
    ),
    el("span", { class: "dim" }, ` ${offsetText(address, region)} of ${bytesText(region.nbytes)}`),
    region.live ? null : badge("freed", "bad"),
  );
}

function nodeLink(node, remark) {
  return el(
    "button",
    { type: "button", class: "node-link", title: node.kernel.name, click: () => select(node) },
    el("span", { class: "place" }, node.place),
    swatch(node.group),
    el("span", { class: "name" }, node.kernel.short),
    remark ? el("i", {}, remark) : null,
  );
}

/** Links to up to 40 nodes, and the number of other nodes. */
function nodeLinks(title, edges, graph, end) {
  const links = edges
    .slice(0, 40)
    .map((edge) => nodeLink(graph.nodes[edge[end]], edge.programmatic ? "programmatic" : ""));
  if (edges.length > links.length) links.push(el("p", { class: "dim" }, `and ${edges.length - links.length} more`));
  return section(title, edges.length, ...(links.length ? links : [el("p", { class: "dim" }, "none")]));
}

function argumentRows(argument) {
  const words = decodeArgument(argument, model.memory);
  return words.map((word, i) =>
    el(
      "tr",
      { class: i ? "" : "first" },
      el("td", { class: "dim number" }, String(argument.offset + word.at)),
      el(
        "td",
        {},
        i
          ? ""
          : el(
              "span",
              {},
              argument.name || el("span", { class: "dim" }, "unnamed"),
              el("span", { class: "dim fixed" }, ` ${bytesText(argument.size)}`),
            ),
      ),
      el(
        "td",
        { class: "value" },
        ...(word.region
          ? [regionLink(word.region, word.address)]
          : [
              el("b", {}, word.text),
              word.pointer ? badge("pointer") : null,
              word.more ? el("span", { class: "dim" }, ` ${word.more}`) : null,
            ].filter(Boolean)),
        el("code", { class: "dim" }, word.hex),
      ),
    ),
  );
}

function argumentsSection(node) {
  const args = argumentsOf(node),
    rows = args.flatMap(argumentRows),
    head = ["byte", "argument", "value"];
  const parts = [table(head, rows.slice(0, 64))];
  if (rows.length > 64)
    parts.push(
      el("details", {}, el("summary", {}, countText(rows.length - 64, "more word")), table(head, rows.slice(64))),
    );
  return section("Arguments", args.length, ...parts);
}

function operandRow(operand) {
  const region = findRegion(model.memory, operand.address),
    beyond = region ? operand.address + operand.nbytes - region.address - region.nbytes : 0;
  return el(
    "tr",
    { class: "first" },
    el(
      "td",
      {},
      operand.role,
      " ",
      operand.written ? badge("written", "accent") : null,
      operand.host ? badge("host") : null,
    ),
    el("td", { class: "number" }, bytesText(operand.nbytes)),
    el(
      "td",
      { class: "value" },
      region
        ? regionLink(region, operand.address)
        : el("span", { class: "dim" }, Number.isNaN(operand.address) ? "address unknown" : "unknown region"),
      beyond > 0 ? badge(`${bytesText(beyond)} past the end`, "bad") : null,
      el("code", { class: "dim" }, operand.text),
    ),
  );
}

function findingCard(finding, linked) {
  return el(
    "article",
    { class: "finding" },
    linked ? nodeLink(finding.node, "") : null,
    el("p", {}, finding.text),
    el(
      "p",
      { class: "dim" },
      [finding.where, finding.address === "0" ? "" : `0x${finding.address}`, finding.owner, finding.region]
        .filter(Boolean)
        .join(" · "),
    ),
  );
}

function facts(node) {
  const [grid, block, shared, attributes] = node.launch,
    product = (values) => values.reduce((a, b) => a * b, 1);
  const rows = [["kind", node.kernel.kind]];
  if (node.time !== null)
    rows.push([
      "time",
      `${timeText(node.time)}, ${((node.time / (model.totalTime || 1)) * 100).toPrecision(2)} % of all nodes`,
    ]);
  if (grid) rows.push(["grid", `${grid.join(" × ")}  =  ${countText(product(grid), "block")}`]);
  if (block) rows.push(["block", `${block.join(" × ")}  =  ${countText(product(block), "thread")}`]);
  if (grid) rows.push(["shared memory", bytesText(shared)]);
  rows.push(...Object.entries(attributes));
  return el("dl", {}, ...rows.flatMap(([name, value]) => [el("dt", {}, name), el("dd", {}, value)]));
}

function showDetails() {
  const place = byId("details");
  place.replaceChildren(...(selected ? nodeParts(selected) : overviewParts()));
  place.scrollTop = 0;
}

function nodeParts(node) {
  const { graph, index } = node,
    step = (way) => graph.nodes[index + way];
  const turn = (way, text, label) =>
    el(
      "button",
      { type: "button", title: label, "aria-label": label, disabled: !step(way), click: () => select(step(way)) },
      text,
    );
  const parts = [
    el(
      "div",
      { class: "bar sticky" },
      el("h2", {}, `Node ${node.place}`),
      swatch(node.group),
      el("span", { class: "space" }),
      el("span", { class: "group" }, turn(-1, "‹", "Previous node"), turn(1, "›", "Next node")),
      el("button", { type: "button", title: "Close (Esc)", "aria-label": "Close", click: () => select(null) }, "×"),
    ),
    el("h4", { id: "name" }, node.kernel.name),
    node.kernel.symbol && node.kernel.symbol !== node.kernel.name
      ? el("p", { class: "symbol" }, node.kernel.symbol)
      : null,
    node.remark ? el("p", { class: "remark" }, node.remark) : null,
    ...node.findings.map((finding) => findingCard(finding, false)),
    facts(node),
    graph.parent ? section("Contained in", null, nodeLink(graph.parent, `body ${graph.body}`)) : null,
    node.kernel.args.length ? argumentsSection(node) : null,
    node.kernel.operands.length
      ? section(
          "Operands",
          node.kernel.operands.length,
          table(["operand", "size", "memory"], operandsOf(node).map(operandRow)),
        )
      : null,
    node.scalars.length
      ? section(
          "Scalars",
          node.scalars.length,
          table(
            ["name", "value"],
            node.scalars.map((value, i) => cells(node.kernel.scalars[i], el("td", { class: "value" }, value))),
          ),
        )
      : null,
    ...node.bodies.map((body, which) =>
      section(
        `Body ${which}`,
        `${countText(body.nodes.length, "node")}, ${countText(body.edges.length, "edge")}`,
        ...body.nodes.slice(0, 12).map((inner) => nodeLink(inner, "")),
        body.nodes.length > 12
          ? el("p", { class: "dim" }, `and ${body.nodes.length - 12} more, in the list under ${node.place}.${which}`)
          : null,
      ),
    ),
    nodeLinks("Waits for", graph.before[index], graph, "source"),
    nodeLinks("Waited for by", graph.after[index], graph, "target"),
  ];
  return parts.filter(Boolean);
}

function overviewParts() {
  const keys = [
    ["/", "search"],
    ["↑ ↓", "next and previous node of the list"],
    ["Enter", "first match; first node of a body"],
    ["Esc", "clear node, search, filters"],
    ["+ − 0", "zoom the order"],
  ];
  const findings = model.findings.slice(0, 100).map((finding) => findingCard(finding, true));
  return [
    el("div", { class: "bar sticky" }, el("h2", {}, "No node selected")),
    el("p", { class: "dim" }, "Select one in the order or in the list."),
    model.findings.length
      ? section(
          "Findings",
          model.findings.length,
          ...findings,
          model.findings.length > 100
            ? el("p", { class: "dim" }, `and ${model.findings.length - 100} more: filter by findings`)
            : null,
        )
      : null,
    section(
      "Keys",
      null,
      el("dl", {}, ...keys.flatMap(([key, what]) => [el("dt", {}, el("kbd", {}, key)), el("dd", {}, what)])),
    ),
  ].filter(Boolean);
}
