// The page: its state, stored in the URL after "#", and its rendering.

// ---- state

const EMPTY = { q: "", kind: "", kernel: "", region: "", findings: "", node: "" };
const FILTERS = ["q", "kind", "kernel", "region", "findings"];

function readHash() {
  const given = new URLSearchParams(location.hash.slice(1).replace(/\+/g, "%2B"));
  return Object.fromEntries(Object.keys(EMPTY).map((key) => [key, given.get(key) || ""]));
}

function hashOf(state) {
  const given = Object.keys(EMPTY).filter((key) => state[key] !== "");
  return "#" + given.map((key) => `${key}=${encodeURIComponent(wellFormed(state[key]))}`).join("&");
}

const model = decodePage(JSON.parse(byId("data").textContent));
let state = { ...EMPTY },
  shown = model.nodes,
  selected = null,
  position = new Map(),
  drawn = model.graphs[0];

/** Changes the state. `step` adds an entry to the browser's history. */
function go(changes, step = false) {
  const next = { ...state, ...changes },
    hash = hashOf(next);
  if (hash !== location.hash && !(hash === "#" && !location.hash)) {
    try {
      history[step ? "pushState" : "replaceState"](null, "", hash);
    } catch {
      location.replace(hash);
    }
  }
  render(next);
}

function select(node) {
  go({ node: node ? node.place : "" }, true);
}

function toggle(key, value) {
  go({ [key]: state[key] === value ? "" : value }, true);
}

function render(next, all = false) {
  const refilter = all || FILTERS.some((key) => next[key] !== state[key]),
    moved = all || next.node !== state.node;
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
  byId("node-list").setAttribute(
    "aria-activedescendant",
    selected && position.has(selected) ? `node-${selected.id}` : "",
  );
  if (moved) showDetails();
  showPicture(moved);
}

// ---- header, names, nodes

function showHeader() {
  const kinds = new Map();
  for (const node of model.nodes) kinds.set(node.kernel.kind, (kinds.get(node.kernel.kind) || 0) + 1);
  const inner = model.graphs.length - 1,
    edges = model.graphs.reduce((sum, graph) => sum + graph.edges.length, 0);
  const findings = el(
    "button",
    {
      id: "findings",
      disabled: !model.findings.length,
      title: "Show only nodes with findings",
      click: () => toggle("findings", "1"),
    },
    countText(model.findings.length, "finding"),
  );
  byId("facts").append(
    el("li", { cuda: "CUDA graph", "op trace": "op trace (CPU)" }[model.origin] || model.origin),
    el("li", countText(model.nodes.length, "node")),
    el("li", countText(edges, "edge")),
    inner ? el("li", countText(inner, "inner graph")) : "",
    el("li", countText(model.groups.length, "name")),
    el(model.findings.length ? "li.bad" : "li.good", findings),
  );
  for (const [kind, count] of [...kinds].sort((a, b) => b[1] - a[1])) {
    const number = el("span.dim", ` ${count.toLocaleString("en-US")}`);
    byId("kinds").append(el("button.chip", { "data-kind": kind, click: () => toggle("kind", kind) }, kind, number));
  }
}

function showFilters() {
  for (const button of byId("kinds").children) button.setAttribute("aria-pressed", button.dataset.kind === state.kind);
  byId("findings").setAttribute("aria-pressed", state.findings !== "");
  const chip = (key, label) => {
    const attributes = { title: "Remove this filter", click: () => go({ [key]: "" }, true) };
    return state[key] === "" ? "" : el("button.chip.on", attributes, el("span.cut", label), " ×");
  };
  const region = model.memory?.regions[Number(state.region)];
  byId("chips").replaceChildren(
    chip("kernel", shortName(state.kernel)),
    chip("region", region ? `accesses ${regionName(region)}` : "unknown region"),
    chip("findings", "with findings"),
  );
  const all = countText(model.nodes.length, "node");
  byId("count").textContent =
    shown.length < model.nodes.length ? `${shown.length.toLocaleString("en-US")} of ${all}` : all;
}

/** A small box in a color of the style sheet. */
function colored(selector, color) {
  const box = el(selector);
  box.style.background = `var(--${color})`;
  return box;
}

const swatch = (group) => colored("span.swatch", `c${group.color}`);

const kernelList = makeList(byId("kernel-list"), 28, (group) => {
  const chosen = group.key === state.kernel;
  const meter = el("span.meter");
  meter.style.width = `${(group.count / model.groups[0].count) * 100}%`;
  return el(
    chosen ? "button.row.chosen" : "button.row",
    { title: group.name, "aria-pressed": String(chosen), click: () => toggle("kernel", group.key) },
    meter,
    swatch(group),
    el("span.name", group.short),
    el("span.number", group.count.toLocaleString("en-US")),
  );
});

const extents = (values) => values.join("×").replace(/(×1)+$/, "");

/** The launch shape of a node, or the size of its memory, for the list. */
function shapeOf(node) {
  const [grid, block] = node.launch;
  if (grid) return block ? `${extents(grid)} · ${extents(block)}` : extents(grid);
  if (node.bodies.length) return node.bodies.map((body) => countText(body.nodes.length, "node")).join(", ");
  if (node.kernel.kind === "memcpy" || node.kernel.kind === "memset")
    return bytesText(Math.max(0, ...operandsOf(node).map((operand) => operand.nbytes)));
  return "";
}

const nodeList = makeList(byId("node-list"), 28, (node, index) => {
  const { kind, name, short } = node.kernel,
    plain = ["kernel", "op", name].includes(kind),
    flag = node.findings.length && el("span.flag", { title: countText(node.findings.length, "finding") }, "▲");
  const row = el(
    node === selected ? "div.row.chosen" : "div.row",
    {
      role: "option",
      id: `node-${node.id}`,
      title: name,
      "aria-selected": String(node === selected),
      "aria-setsize": shown.length,
      "aria-posinset": index + 1,
      "data-place": node.place,
      click: () => select(node),
    },
    el("span.place", node.place),
    swatch(node.group),
    el("span.name", short),
    flag || el("span"),
    el("span.shape", !plain && el("i", kind), shapeOf(node)),
  );
  row.style.paddingLeft = `${12 + node.depth * 18}px`;
  return row;
});

// ---- the picture

const strip = makeStrip(byId("strip"), { select, hover: showTip });

/** Shows a node's name next to the pointer; hides it without a node. */
function showTip(node, event) {
  const place = byId("tip");
  place.hidden = !node || !event;
  if (place.hidden) return;
  const findings = node.findings.length ? countText(node.findings.length, "finding") : "";
  const facts = [`node ${node.place}`, shapeOf(node), findings].filter(Boolean).join(" · ");
  place.replaceChildren(el("b", node.kernel.short), el("span.dim", facts));
  const left = Math.max(Math.min(event.clientX + 14, innerWidth - place.offsetWidth - 8), 8);
  const above = event.clientY + 22 + place.offsetHeight > innerHeight;
  place.style.left = `${left}px`;
  place.style.top = `${event.clientY + (above ? -place.offsetHeight - 10 : 20)}px`;
}

/** Draws the picture in the next frame, once per frame. */
function drawLater() {
  if (!drawLater.asked)
    requestAnimationFrame(() => {
      drawLater.asked = false;
      strip.draw();
    });
  drawLater.asked = true;
}

function showPicture(moved) {
  Object.assign(strip.state, {
    selected,
    shown: shown.length === model.nodes.length ? null : new Set(shown.map((node) => node.id)),
  });
  strip.show(drawn);
  if (moved && selected) strip.reveal(selected);
  drawLater();
  const { lanes, columns } = strip.state.layout;
  byId("picture-facts").textContent =
    `${countText(drawn.nodes.length, "node")}, ${countText(columns, "step")} deep, ${countText(lanes, "lane")}` +
    (lanes === MAX_LANES ? " drawn" : "");
  const trail = [];
  for (let graph = drawn; graph.parent; graph = graph.parent.graph) {
    const { parent, body } = graph;
    const link = el("button.link", { click: () => select(parent) }, `${parent.place} ${parent.kernel.short}`);
    trail.unshift("›", link, ` body ${body}`);
  }
  if (trail.length) trail.unshift(el("button.link", { click: showOuterGraph }, "graph"));
  byId("trail").replaceChildren(...trail);
}

function showOuterGraph() {
  drawn = model.graphs[0];
  select(null);
}

// ---- keys and other events

/** Selects the node `way` rows further down the list. */
function move(way) {
  if (!shown.length) return;
  const at = selected && position.has(selected) ? position.get(selected) + way : way > 0 ? 0 : shown.length - 1;
  go({ node: shown[Math.min(Math.max(at, 0), shown.length - 1)].place });
}

function escape() {
  if (document.activeElement === byId("q") && !state.q) byId("q").blur();
  else if (document.activeElement === byId("q")) go({ q: "" });
  else if (state.node) select(null);
  else go(EMPTY, true);
}

function enter() {
  if (!selected || !position.has(selected)) move(1);
  else if (selected.bodies.length && selected.bodies[0].nodes.length) select(selected.bodies[0].nodes[0]);
  byId("node-list").focus();
}

const KEYS = {
  "/": () => {
    byId("q").focus();
    byId("q").select();
  },
  Escape: escape,
  Enter: enter,
  ArrowDown: () => move(1),
  ArrowUp: () => move(-1),
  PageDown: () => move(nodeList.page()),
  PageUp: () => move(-nodeList.page()),
  "+": () => strip.zoom(1.6),
  "-": () => strip.zoom(1 / 1.6),
  0: strip.fit,
};

addEventListener("keydown", (event) => {
  const typing = event.target === byId("q"),
    button = event.target instanceof HTMLButtonElement || event.target.tagName === "SUMMARY";
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

addEventListener("hashchange", () => render(readHash()));
addEventListener("resize", drawLater);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", strip.restyle);

showHeader();
kernelList.set(model.groups);
render(readHash(), true);
strip.draw(); // before the first frame: the height of the picture determines the heights of the lists
document.documentElement.dataset.ready = "true"; // for tests: no error so far
