// The page: its state, which is the address after "#", and what shows it. Texts of the graph only ever become text
// nodes, so that no name is read as markup.

/** An element. Attributes whose value is a function are listeners; null and false children and attributes are left out. */
function el(tag, attributes, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (typeof value === "function") element.addEventListener(name, value);
    else if (value !== null && value !== false) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

const byId = (id) => document.getElementById(id);

/** A list of many rows, of which only those in sight are in the document. `render(item, index)` makes one. */
function makeList(place, rowHeight, render) {
  let items = [];
  const pad = place.appendChild(el("div", { class: "pad", role: "presentation" }));
  function draw() {
    const first = Math.max(Math.floor(place.scrollTop / rowHeight) - 8, 0);
    const last = Math.min(Math.ceil((place.scrollTop + place.clientHeight) / rowHeight) + 8, items.length);
    const rows = [];
    for (let i = first; i < last; i++) {
      const row = render(items[i], i);
      row.style.top = `${i * rowHeight}px`;
      rows.push(row);
    }
    pad.replaceChildren(...rows);
  }
  let asked = false;
  place.addEventListener("scroll", () => {
    if (!asked) requestAnimationFrame(() => { asked = false; draw(); });
    asked = true;
  });
  return {
    draw,
    set(values) { items = values; pad.style.height = `${items.length * rowHeight}px`; draw(); },
    reveal(index) {
      const top = index * rowHeight, room = place.clientHeight;
      if (top < place.scrollTop || top + rowHeight > place.scrollTop + room) place.scrollTop = top - room / 2 + rowHeight;
      draw();
    },
    page: () => Math.max(Math.floor(place.clientHeight / rowHeight) - 1, 1),
  };
}

// ---- state

const EMPTY = { q: "", kind: "", kernel: "", region: "", findings: "", scale: "", node: "" };
const FILTERS = ["q", "kind", "kernel", "region", "findings"];

function readHash() {
  const given = new URLSearchParams(location.hash.slice(1).replace(/\+/g, "%2B"));
  return Object.fromEntries(Object.keys(EMPTY).map((key) => [key, given.get(key) || ""]));
}

function hashOf(state) {
  return "#" + Object.keys(EMPTY).filter((key) => state[key] !== "")
    .map((key) => `${key}=${encodeURIComponent(state[key])}`).join("&");
}

const model = decodePage(JSON.parse(byId("data").textContent));
const serial = (graph) => model.origin === "op-tape" && graph.edges.length === 0; // an op tape without edges runs in order
let state = { ...EMPTY }, shown = model.nodes, selected = null, position = new Map(), drawn = model.graphs[0];

/** Changes the state. `step` makes an entry in the browser's history. */
function go(changes, step = false) {
  const next = { ...state, ...changes }, hash = hashOf(next);
  if (hash !== location.hash && !(hash === "#" && !location.hash)) {
    try { history[step ? "pushState" : "replaceState"](null, "", hash); } catch { location.replace(hash); }
  }
  render(next);
}

function select(node) { go({ node: node ? node.place : "" }, true); }

function toggle(key, value) { go({ [key]: state[key] === value ? "" : value }, true); }

function render(next, all = false) {
  const refilter = all || FILTERS.some((key) => next[key] !== state[key]), moved = all || next.node !== state.node;
  state = next;
  selected = model.byPlace.get(state.node) || null;
  if (refilter) {
    shown = filterNodes(model, state);
    position = new Map(shown.map((node, index) => [node, index]));
    if (byId("q").value !== state.q) byId("q").value = state.q;
    nodeList.set(shown);
    kernelList.draw();
    showFilters();
  }
  if (moved && selected) drawn = selected.graph;
  nodeList.draw();
  if (selected && position.has(selected) && (moved || refilter)) nodeList.reveal(position.get(selected));
  byId("node-list").setAttribute("aria-activedescendant", selected && position.has(selected) ? `node-${selected.id}` : "");
  if (moved) showDetails();
  showPicture(moved);
  if (memoryMap) byId("toucher").textContent = selected ? `touched by node ${selected.place}` : "touched by a node";
  if (memoryMap) memoryMap.update(selected, state.region === "" ? null : model.memory.regions[Number(state.region)]);
}

// ---- header, names, nodes

function showHeader() {
  const kinds = new Map();
  for (const node of model.nodes) kinds.set(node.kernel.kind, (kinds.get(node.kernel.kind) || 0) + 1);
  const edges = model.graphs.reduce((sum, graph) => sum + graph.edges.length, 0), inner = model.graphs.length - 1;
  const fact = (value, label) => el("li", {}, el("b", {}, value), label ? ` ${label}` : "");
  const facts = [
    fact({ cuda: "CUDA graph", "op-tape": "op tape, the CPU twin of a CUDA graph" }[model.origin] || model.origin, ""),
    fact(model.nodes.length.toLocaleString("en-US"), model.nodes.length === 1 ? "node" : "nodes"),
    fact(edges.toLocaleString("en-US"), edges === 1 ? "edge" : "edges"),
    inner ? fact(String(inner), inner === 1 ? "inner graph" : "inner graphs") : null,
    fact(String(model.groups.length), model.groups.length === 1 ? "name" : "names"),
    model.timed ? fact(timeText(model.totalTime), "in all nodes") : null,
    el("li", { class: model.findings.length ? "bad" : "good" }, el("button", {
      type: "button", id: "findings", "aria-pressed": "false", disabled: !model.findings.length,
      title: "Show only nodes with findings", click: () => toggle("findings", "1"),
    }, countText(model.findings.length, "finding"))),
  ];
  byId("facts").append(...facts.filter(Boolean));
  for (const [kind, count] of [...kinds].sort((a, b) => b[1] - a[1])) {
    byId("kinds").append(el("button", { type: "button", class: "chip", "data-kind": kind, click: () => toggle("kind", kind) },
      kind, el("span", { class: "dim" }, ` ${count.toLocaleString("en-US")}`)));
  }
  byId("kernels-facts").textContent = model.timed ? "by time; click to filter" : "by count; click to filter";
}

function showFilters() {
  for (const button of byId("kinds").children) button.setAttribute("aria-pressed", String(button.dataset.kind === state.kind));
  byId("findings").setAttribute("aria-pressed", String(state.findings !== ""));
  const chip = (key, label) => el("button", {
    type: "button", class: "chip on", title: "Remove this filter", click: () => go({ [key]: "" }, true),
  }, el("span", { class: "cut" }, label), " ×");
  const region = model.memory && state.region !== "" ? model.memory.regions[Number(state.region)] : null;
  byId("chips").replaceChildren(
    ...(state.kernel ? [chip("kernel", shortName(state.kernel))] : []),
    ...(state.region !== "" ? [chip("region", region ? `touches ${regionName(region)}` : "unknown region")] : []),
    ...(state.findings ? [chip("findings", "with findings")] : []),
  );
  const time = shown.reduce((sum, node) => sum + (node.time || 0), 0), some = shown.length < model.nodes.length;
  byId("count").textContent = (some ? `${shown.length.toLocaleString("en-US")} of ` : "") + countText(model.nodes.length, "node")
    + (some && time ? `, ${timeText(time)}` : "");
}

const swatch = (group) => el("span", { class: `swatch s${group.colour}` });

/** A bar behind a row or a number, as long as a part of the largest. */
function bar(part) {
  const element = el("span", { class: "meter" });
  element.style.width = `${Math.min(part, 1) * 100}%`;
  return element;
}

const widest = model.groups.reduce((most, group) => Math.max(most, model.timed ? group.time : group.count), 0) || 1;

const kernelList = makeList(byId("kernel-list"), 28, (group) => el("button", {
  type: "button", class: `row${group.name === state.kernel ? " chosen" : ""}`, title: group.name,
  "aria-pressed": String(group.name === state.kernel), click: () => toggle("kernel", group.name),
}, bar((model.timed ? group.time : group.count) / widest), swatch(group), el("span", { class: "name" }, group.short),
  el("span", { class: "number" }, group.count.toLocaleString("en-US")),
  model.timed ? el("span", { class: "number" }, timeText(group.time)) : null));

const slowest = model.nodes.reduce((most, node) => Math.max(most, node.time || 0), 0) || 1;
const extents = (values) => { const shape = [...values]; while (shape.length > 1 && shape[shape.length - 1] === 1) shape.pop(); return shape.join("×"); };

/** What stands beside the name in the list: the launch, or how much memory is worked on. */
function shapeOf(node) {
  const [grid, block] = node.launch;
  if (grid) return block ? `${extents(grid)} · ${extents(block)}` : extents(grid);
  if (node.bodies.length) return node.bodies.map((body) => countText(body.nodes.length, "node")).join(", ");
  if (node.kernel.kind === "memcpy" || node.kernel.kind === "memset") return bytesText(Math.max(0, ...operandsOf(node).map((operand) => operand.nbytes)));
  return "";
}

const nodeList = makeList(byId("node-list"), 28, (node, index) => {
  const row = el("div", {
    class: `row${node === selected ? " chosen" : ""}`, role: "option", id: `node-${node.id}`, title: node.kernel.name,
    "aria-selected": String(node === selected), "aria-setsize": shown.length, "aria-posinset": index + 1,
    "data-place": node.place, click: () => select(node),
  }, el("span", { class: "place" }, node.place), swatch(node.group), el("span", { class: "name" }, node.kernel.short),
    node.findings.length ? el("span", { class: "flag", title: countText(node.findings.length, "finding") }, "▲") : el("span", {}),
    el("span", { class: "shape" }, node.kernel.kind === "kernel" || node.kernel.kind === "op" || node.kernel.kind === node.kernel.name ? "" : el("i", {}, node.kernel.kind), shapeOf(node)),
    model.timed ? el("span", { class: "number" }, bar((node.time || 0) / slowest), node.time === null ? "" : timeText(node.time)) : null);
  row.style.paddingLeft = `${12 + node.depth * 18}px`;
  return row;
});

// ---- details

const section = (title, count, ...children) => el("section", {},
  el("h3", {}, title, count === null ? null : el("span", { class: "dim" }, ` ${count}`)), ...children);
const table = (head, rows) => el("table", {}, el("thead", {}, el("tr", {}, ...head.map((text) => el("th", {}, text)))), el("tbody", {}, ...rows));
const cells = (...values) => el("tr", {}, ...values.map((value) => (value instanceof Element && value.tagName === "TD" ? value : el("td", {}, value))));

function regionName(region) { return region.name || `${region.owner} ${region.text}`; }

/** A link to all nodes that touch a region, and where in it an address is. */
function regionLink(region, address) {
  return el("span", { class: "region" },
    el("button", { type: "button", class: "link", title: `${region.owner}, ${region.text}; show the nodes that touch it`,
      click: () => toggle("region", String(region.id)) }, el("span", { class: `dot o-${region.owner}` }), regionName(region)),
    el("span", { class: "dim" }, ` ${offsetText(address, region)} of ${bytesText(region.nbytes)}`),
    region.live ? null : el("span", { class: "badge bad" }, "freed"));
}

function nodeLink(node, remark) {
  return el("button", { type: "button", class: "node-link", title: node.kernel.name, click: () => select(node) },
    el("span", { class: "place" }, node.place), swatch(node.group), el("span", { class: "name" }, node.kernel.short), remark ? el("i", {}, remark) : null);
}

/** Links to at most so many nodes, and how many more there are. */
function nodeLinks(title, edges, graph, end) {
  const links = edges.slice(0, 40).map((edge) => nodeLink(graph.nodes[edge[end]], edge.programmatic ? "programmatic" : ""));
  if (edges.length > links.length) links.push(el("p", { class: "dim" }, `and ${edges.length - links.length} more`));
  return section(title, edges.length, ...(links.length ? links : [el("p", { class: "dim" }, "none")]));
}

function argumentRows(argument) {
  const words = decodeArgument(argument, model.memory);
  return words.map((word, i) => el("tr", { class: i ? "" : "first" },
    el("td", { class: "dim number" }, String(argument.offset + word.at)),
    el("td", {}, i ? "" : el("span", {}, argument.name || el("span", { class: "dim" }, "unnamed"),
      el("span", { class: "dim" }, ` ${bytesText(argument.size)}`))),
    el("td", { class: "value" }, ...(word.region ? [regionLink(word.region, word.address)]
      : [el("b", {}, word.text), word.pointer ? el("span", { class: "badge" }, "pointer") : null, word.more ? el("span", { class: "dim" }, ` ${word.more}`) : null].filter(Boolean)),
      el("code", { class: "dim" }, word.hex))));
}

function argumentsSection(node) {
  const args = argumentsOf(node), rows = args.flatMap(argumentRows), head = ["byte", "argument", "value"];
  const parts = [table(head, rows.slice(0, 64))];
  if (rows.length > 64) parts.push(el("details", {}, el("summary", {}, countText(rows.length - 64, "more word")), table(head, rows.slice(64))));
  return section("Arguments", args.length, ...parts);
}

function operandRow(operand) {
  const region = findRegion(model.memory, operand.address), beyond = region ? operand.address + operand.nbytes - region.address - region.nbytes : 0;
  return el("tr", { class: "first" },
    el("td", {}, operand.role, " ", operand.written ? el("span", { class: "badge accent" }, "written") : null, operand.host ? el("span", { class: "badge" }, "host") : null),
    el("td", { class: "number" }, bytesText(operand.nbytes)),
    el("td", { class: "value" }, region ? regionLink(region, operand.address) : el("span", { class: "dim" }, Number.isNaN(operand.address) ? "address unknown" : "no region known"),
      beyond > 0 ? el("span", { class: "badge bad" }, `${bytesText(beyond)} beyond its end`) : null,
      el("code", { class: "dim" }, operand.text)));
}

function findingCard(finding, linked) {
  return el("article", { class: "finding" },
    linked ? nodeLink(finding.node, "") : null,
    el("p", {}, finding.text),
    el("p", { class: "dim" }, [finding.where, finding.address === "0" ? "" : `0x${finding.address}`, finding.owner, finding.region].filter(Boolean).join(" · ")));
}

function facts(node) {
  const [grid, block, shared, attributes] = node.launch, product = (values) => values.reduce((a, b) => a * b, 1);
  const rows = [["kind", node.kernel.kind]];
  if (node.time !== null) rows.push(["time", `${timeText(node.time)}, ${(node.time / (model.totalTime || 1) * 100).toPrecision(2)} % of all nodes`]);
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
  const { graph, index } = node, step = (way) => graph.nodes[index + way];
  const turn = (way, text, label) => el("button", { type: "button", title: label, "aria-label": label, disabled: !step(way), click: () => select(step(way)) }, text);
  const parts = [
    el("div", { class: "bar sticky" }, el("h2", {}, `Node ${node.place}`), swatch(node.group), el("span", { class: "space" }),
      el("span", { class: "group" }, turn(-1, "‹", "Node before"), turn(1, "›", "Next node")),
      el("button", { type: "button", title: "Close (Esc)", "aria-label": "Close", click: () => select(null) }, "×")),
    el("h4", { id: "name" }, node.kernel.name),
    node.kernel.symbol && node.kernel.symbol !== node.kernel.name ? el("p", { class: "symbol" }, node.kernel.symbol) : null,
    node.remark ? el("p", { class: "remark" }, node.remark) : null,
    ...node.findings.map((finding) => findingCard(finding, false)),
    facts(node),
    graph.parent ? section("Inside of", null, nodeLink(graph.parent, `body ${graph.body}`)) : null,
    node.kernel.args.length ? argumentsSection(node) : null,
    node.kernel.operands.length ? section("Operands", node.kernel.operands.length, table(["operand", "size", "memory"], operandsOf(node).map(operandRow))) : null,
    node.scalars.length ? section("Scalars", node.scalars.length, table(["name", "value"], node.scalars.map((value, i) => cells(node.kernel.scalars[i], el("td", { class: "value" }, value))))) : null,
    ...node.bodies.map((body, which) => section(`Body ${which}`, `${countText(body.nodes.length, "node")}, ${countText(body.edges.length, "edge")}`,
      ...body.nodes.slice(0, 12).map((inner) => nodeLink(inner, "")),
      body.nodes.length > 12 ? el("p", { class: "dim" }, `and ${body.nodes.length - 12} more, in the list under ${node.place}.${which}`) : null)),
    nodeLinks("Waits for", graph.before[index], graph, "source"),
    nodeLinks("Waited for by", graph.after[index], graph, "target"),
  ];
  return parts.filter(Boolean);
}

function overviewParts() {
  const keys = [["/", "search"], ["↑ ↓", "next and previous node of the list"], ["Enter", "first hit; into a body"], ["Esc", "back: node, search, filters"], ["+ − 0", "zoom the order"]];
  const findings = model.findings.slice(0, 100).map((finding) => findingCard(finding, true));
  return [
    el("div", { class: "bar sticky" }, el("h2", {}, "No node selected")),
    el("p", { class: "dim" }, "Choose one in the order, or in the list."),
    model.findings.length ? section("Findings", model.findings.length, ...findings, model.findings.length > 100 ? el("p", { class: "dim" }, `and ${model.findings.length - 100} more: filter by findings`) : null) : null,
    section("Keys", null, el("dl", {}, ...keys.flatMap(([key, what]) => [el("dt", {}, el("kbd", {}, key)), el("dd", {}, what)]))),
  ].filter(Boolean);
}

// ---- pictures

const strip = makeStrip(byId("strip"), byId("overview"), {
  select,
  hover: (node, event) => tip(node && event, node && [el("b", {}, node.kernel.short), el("span", { class: "dim" },
    [`node ${node.place}`, shapeOf(node), node.time === null ? "" : timeText(node.time), node.findings.length ? countText(node.findings.length, "finding") : ""].filter(Boolean).join(" · "))]),
});

const memoryMap = model.memory && makeMemoryMap(byId("owners"), model.memory, {
  select: (region) => toggle("region", String(region.id)),
  hover: (region, event) => tip(region && event, region && [el("b", {}, regionName(region)), el("span", { class: "dim" },
    `${region.owner}${region.live ? "" : ", freed"} · ${bytesText(region.nbytes)} · ${region.text} · touched by ${countText(region.nodes.length, "node")}`)]),
});

function tip(event, children) {
  const place = byId("tip");
  place.hidden = !event;
  if (!event) return;
  place.replaceChildren(...children);
  place.style.left = `${Math.max(Math.min(event.clientX + 14, innerWidth - place.offsetWidth - 8), 8)}px`;
  place.style.top = `${event.clientY + 22 + place.offsetHeight > innerHeight ? event.clientY - place.offsetHeight - 10 : event.clientY + 20}px`;
}

function showPicture(moved) {
  const scale = model.timed && state.scale === "time" ? "time" : "order";
  Object.assign(strip.state, { selected, shown: shown.length === model.nodes.length ? null : new Set(shown.map((node) => node.id)) });
  strip.show(drawn, scale, serial(drawn));
  if (moved && selected) strip.reveal(selected);
  strip.draw();
  const { lanes } = strip.state.layout, columns = layoutGraph(drawn, "order", serial(drawn)).extent;
  byId("picture-facts").textContent = `${countText(drawn.nodes.length, "node")}, ${countText(columns, "step")} deep, ${countText(lanes, "lane")}`
    + (lanes === MAX_LANES ? " drawn" : "") + (model.timed && scale === "order" ? "; heights: square root of time" : "");
  for (const button of byId("scales").children) button.setAttribute("aria-pressed", String(button.dataset.scale === scale));
  const trail = [];
  for (let graph = drawn; graph.parent; graph = graph.parent.graph) {
    const { parent, body } = graph;
    trail.unshift("›", el("button", { type: "button", class: "link", click: () => select(parent) }, `${parent.place} ${parent.kernel.short}`), ` body ${body}`);
  }
  if (trail.length) trail.unshift(el("button", { type: "button", class: "link", click: () => { drawn = model.graphs[0]; select(null); } }, "graph"));
  byId("trail").replaceChildren(...trail);
}

function showMemoryFacts() {
  const { regions } = model.memory, used = regions.filter((region) => region.nodes.length).length;
  byId("memory").hidden = false;
  byId("memory-facts").textContent = `${countText(regions.length, "region")}, ${used.toLocaleString("en-US")} touched by nodes`;
  byId("memory-legend").append(el("span", { class: "key", id: "toucher" }), el("span", { class: "key pale" }, "not"), el("span", { class: "key freed" }, "freed"));
}

// ---- keys and other events

/** To the node that many rows further in the list. */
function move(way) {
  if (!shown.length) return;
  const at = selected && position.has(selected) ? position.get(selected) + way : way > 0 ? 0 : shown.length - 1;
  go({ node: shown[Math.min(Math.max(at, 0), shown.length - 1)].place });
}

function escape() {
  if (document.activeElement === byId("q") && !state.q) byId("q").blur();
  else if (document.activeElement === byId("q")) go({ q: "" });
  else if (state.node) select(null);
  else go({ ...EMPTY, scale: state.scale }, true);
}

function enter() {
  if (!selected || !position.has(selected)) move(1);
  else if (selected.bodies.length && selected.bodies[0].nodes.length) select(selected.bodies[0].nodes[0]);
  byId("node-list").focus();
}

const KEYS = {
  "/": () => { byId("q").focus(); byId("q").select(); }, Escape: escape, Enter: enter,
  ArrowDown: () => move(1), ArrowUp: () => move(-1), PageDown: () => move(nodeList.page()), PageUp: () => move(-nodeList.page()),
  "+": () => strip.zoom(1.6), "-": () => strip.zoom(1 / 1.6), 0: strip.fit,
};

addEventListener("keydown", (event) => {
  const typing = event.target === byId("q"), button = event.target instanceof HTMLButtonElement || event.target.tagName === "SUMMARY";
  const key = KEYS[event.key];
  if (!key || event.ctrlKey || event.metaKey || event.altKey) return;
  if (typing && (event.key.length === 1 || event.key.startsWith("Page"))) return;
  if (button && event.key === "Enter") return;
  event.preventDefault();
  key();
});

byId("q").addEventListener("input", () => go({ q: byId("q").value }));
byId("zoom-in").addEventListener("click", () => strip.zoom(1.6));
byId("zoom-out").addEventListener("click", () => strip.zoom(1 / 1.6));
byId("zoom-fit").addEventListener("click", strip.fit);
byId("scales").hidden = !model.timed;
for (const button of byId("scales").children) button.addEventListener("click", () => go({ scale: button.dataset.scale === "time" ? "time" : "" }));
byId("memory-fold").addEventListener("click", () => {
  const open = byId("owners").hidden;
  byId("owners").hidden = !open;
  byId("memory-fold").setAttribute("aria-expanded", String(open));
  byId("memory-fold").textContent = open ? "hide" : "show";
  redraw();
});

function redraw() { strip.draw(); if (memoryMap) memoryMap.draw(); nodeList.draw(); kernelList.draw(); }

addEventListener("hashchange", () => render(readHash()));
addEventListener("popstate", () => render(readHash()));
addEventListener("resize", redraw);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { strip.restyle(); if (memoryMap) memoryMap.restyle(); });

document.body.classList.toggle("timed", model.timed);
showHeader();
if (memoryMap) showMemoryFacts();
kernelList.set(model.groups);
render(readHash(), true);
document.documentElement.dataset.ready = "true"; // for tests: nothing above has thrown
