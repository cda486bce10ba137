// The page: its state, stored in the address after "#", and its rendering.

// ---- state

const EMPTY = { q: "", kind: "", kernel: "", region: "", findings: "", scale: "", node: "" };
const FILTERS = ["q", "kind", "kernel", "region", "findings"];

function readHash() {
  const given = new URLSearchParams(location.hash.slice(1).replace(/\+/g, "%2B"));
  return Object.fromEntries(Object.keys(EMPTY).map((key) => [key, given.get(key) || ""]));
}

function hashOf(state) {
  return (
    "#" +
    Object.keys(EMPTY)
      .filter((key) => state[key] !== "")
      .map((key) => `${key}=${encodeURIComponent(wellFormed(state[key]))}`)
      .join("&")
  );
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
  if (memoryMap) byId("toucher").textContent = selected ? `accessed by node ${selected.place}` : "accessed by a node";
  if (memoryMap) memoryMap.select(selected, state.region === "" ? null : model.memory.regions[Number(state.region)]);
}

// ---- header, names, nodes

function showHeader() {
  const kinds = new Map();
  for (const node of model.nodes) kinds.set(node.kernel.kind, (kinds.get(node.kernel.kind) || 0) + 1);
  const edges = model.graphs.reduce((sum, graph) => sum + graph.edges.length, 0),
    inner = model.graphs.length - 1;
  const fact = (value, label) => el("li", {}, el("b", {}, value), label ? ` ${label}` : "");
  const facts = [
    fact({ cuda: "CUDA graph", "op trace": "op trace (CPU)" }[model.origin] || model.origin, ""),
    fact(model.nodes.length.toLocaleString("en-US"), model.nodes.length === 1 ? "node" : "nodes"),
    fact(edges.toLocaleString("en-US"), edges === 1 ? "edge" : "edges"),
    inner ? fact(String(inner), inner === 1 ? "inner graph" : "inner graphs") : null,
    fact(String(model.groups.length), model.groups.length === 1 ? "name" : "names"),
    model.timed ? fact(timeText(model.totalTime), "in all nodes") : null,
    el(
      "li",
      { class: model.findings.length ? "bad" : "good" },
      el(
        "button",
        {
          type: "button",
          id: "findings",
          "aria-pressed": "false",
          disabled: !model.findings.length,
          title: "Show only nodes with findings",
          click: () => toggle("findings", "1"),
        },
        countText(model.findings.length, "finding"),
      ),
    ),
  ];
  byId("facts").append(...facts.filter(Boolean));
  for (const [kind, count] of [...kinds].sort((a, b) => b[1] - a[1])) {
    byId("kinds").append(
      el(
        "button",
        { type: "button", class: "chip", "data-kind": kind, click: () => toggle("kind", kind) },
        kind,
        el("span", { class: "dim" }, ` ${count.toLocaleString("en-US")}`),
      ),
    );
  }
  byId("kernels-facts").textContent = model.timed ? "by time; click to filter" : "by count; click to filter";
}

function showFilters() {
  for (const button of byId("kinds").children)
    button.setAttribute("aria-pressed", String(button.dataset.kind === state.kind));
  byId("findings").setAttribute("aria-pressed", String(state.findings !== ""));
  const chip = (key, label) =>
    el(
      "button",
      {
        type: "button",
        class: "chip on",
        title: "Remove this filter",
        click: () => go({ [key]: "" }, true),
      },
      el("span", { class: "cut" }, label),
      " ×",
    );
  const region = model.memory && state.region !== "" ? model.memory.regions[Number(state.region)] : null;
  byId("chips").replaceChildren(
    ...(state.kernel ? [chip("kernel", shortName(state.kernel))] : []),
    ...(state.region !== "" ? [chip("region", region ? `accesses ${regionName(region)}` : "unknown region")] : []),
    ...(state.findings ? [chip("findings", "with findings")] : []),
  );
  const time = shown.reduce((sum, node) => sum + (node.time || 0), 0),
    some = shown.length < model.nodes.length;
  byId("count").textContent =
    (some ? `${shown.length.toLocaleString("en-US")} of ` : "") +
    countText(model.nodes.length, "node") +
    (some && time ? `, ${timeText(time)}` : "");
}

const swatch = (group) => el("span", { class: `swatch s${group.colour}` });

/** A bar in the background of a row or number. `part`: its share of the largest value. */
function bar(part) {
  const element = el("span", { class: "meter" });
  element.style.width = `${Math.min(part, 1) * 100}%`;
  return element;
}

const widest = model.groups.reduce((most, group) => Math.max(most, model.timed ? group.time : group.count), 0) || 1;

const kernelList = makeList(byId("kernel-list"), 28, (group) =>
  el(
    "button",
    {
      type: "button",
      class: `row${group.key === state.kernel ? " chosen" : ""}`,
      title: group.name,
      "aria-pressed": String(group.key === state.kernel),
      click: () => toggle("kernel", group.key),
    },
    bar((model.timed ? group.time : group.count) / widest),
    swatch(group),
    el("span", { class: "name" }, group.short),
    el("span", { class: "number" }, group.count.toLocaleString("en-US")),
    model.timed ? el("span", { class: "number" }, timeText(group.time)) : null,
  ),
);

const slowest = model.nodes.reduce((most, node) => Math.max(most, node.time || 0), 0) || 1;
const extents = (values) => {
  const shape = [...values];
  while (shape.length > 1 && shape[shape.length - 1] === 1) shape.pop();
  return shape.join("×");
};

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
  const row = el(
    "div",
    {
      class: `row${node === selected ? " chosen" : ""}`,
      role: "option",
      id: `node-${node.id}`,
      title: node.kernel.name,
      "aria-selected": String(node === selected),
      "aria-setsize": shown.length,
      "aria-posinset": index + 1,
      "data-place": node.place,
      click: () => select(node),
    },
    el("span", { class: "place" }, node.place),
    swatch(node.group),
    el("span", { class: "name" }, node.kernel.short),
    node.findings.length
      ? el("span", { class: "flag", title: countText(node.findings.length, "finding") }, "▲")
      : el("span", {}),
    el(
      "span",
      { class: "shape" },
      node.kernel.kind === "kernel" || node.kernel.kind === "op" || node.kernel.kind === node.kernel.name
        ? ""
        : el("i", {}, node.kernel.kind),
      shapeOf(node),
    ),
    model.timed
      ? el("span", { class: "number" }, bar((node.time || 0) / slowest), node.time === null ? "" : timeText(node.time))
      : null,
  );
  row.style.paddingLeft = `${12 + node.depth * 18}px`;
  return row;
});

// ---- pictures

const strip = makeStrip(byId("strip"), byId("overview"), {
  select,
  hover: (node, event) =>
    tip(
      node && event,
      node && [
        el("b", {}, node.kernel.short),
        el(
          "span",
          { class: "dim" },
          [
            `node ${node.place}`,
            shapeOf(node),
            node.time === null ? "" : timeText(node.time),
            node.findings.length ? countText(node.findings.length, "finding") : "",
          ]
            .filter(Boolean)
            .join(" · "),
        ),
      ],
    ),
});

const memoryMap =
  model.memory &&
  makeMemoryMap(byId("owners"), model.memory, {
    select: (region) => toggle("region", String(region.id)),
    hover: (region, event) =>
      tip(
        region && event,
        region && [el("b", {}, regionName(region)), el("span", { class: "dim" }, regionText(region))],
      ),
  });

function regionText(region) {
  const owner = region.owner + (region.live ? "" : ", freed"),
    users = countText(region.nodes.length, "node");
  return `${owner} · ${bytesText(region.nbytes)} · ${region.text} · accessed by ${users}`;
}

/** Shows elements next to the pointer; hides them without an event. */
function tip(event, children) {
  const place = byId("tip");
  place.hidden = !event;
  if (!event) return;
  place.replaceChildren(...children);
  const left = Math.max(Math.min(event.clientX + 14, innerWidth - place.offsetWidth - 8), 8);
  const above = event.clientY + 22 + place.offsetHeight > innerHeight;
  place.style.left = `${left}px`;
  place.style.top = `${event.clientY + (above ? -place.offsetHeight - 10 : 20)}px`;
}

/** Draws both pictures in the next frame, once per frame. */
function drawLater() {
  if (!drawLater.asked) requestAnimationFrame(drawNow);
  drawLater.asked = true;
}

function drawNow() {
  drawLater.asked = false;
  strip.draw();
  if (memoryMap) memoryMap.draw();
}

function showPicture(moved) {
  const scale = model.timed && state.scale === "time" ? "time" : "order";
  Object.assign(strip.state, {
    selected,
    shown: shown.length === model.nodes.length ? null : new Set(shown.map((node) => node.id)),
  });
  strip.show(drawn, scale);
  if (moved && selected) strip.reveal(selected);
  drawLater();
  const { lanes } = strip.state.layout,
    columns = layoutGraph(drawn, "order").extent;
  byId("picture-facts").textContent =
    `${countText(drawn.nodes.length, "node")}, ${countText(columns, "step")} deep, ${countText(lanes, "lane")}` +
    (lanes === MAX_LANES ? " drawn" : "") +
    (model.timed && scale === "order" ? "; heights: square root of time" : "");
  for (const button of byId("scales").children)
    button.setAttribute("aria-pressed", String(button.dataset.scale === scale));
  const trail = [];
  for (let graph = drawn; graph.parent; graph = graph.parent.graph) {
    const { parent, body } = graph;
    trail.unshift(
      "›",
      el(
        "button",
        { type: "button", class: "link", click: () => select(parent) },
        `${parent.place} ${parent.kernel.short}`,
      ),
      ` body ${body}`,
    );
  }
  if (trail.length)
    trail.unshift(
      el(
        "button",
        {
          type: "button",
          class: "link",
          click: () => {
            drawn = model.graphs[0];
            select(null);
          },
        },
        "graph",
      ),
    );
  byId("trail").replaceChildren(...trail);
}

function showMemoryFacts() {
  const { regions } = model.memory,
    used = regions.filter((region) => region.nodes.length).length;
  byId("memory").hidden = false;
  byId("memory-facts").textContent =
    `${countText(regions.length, "region")}, ${used.toLocaleString("en-US")} accessed by nodes`;
  byId("memory-legend").append(
    el("span", { class: "key", id: "toucher" }),
    el("span", { class: "key pale" }, "not accessed"),
    el("span", { class: "key freed" }, "freed"),
  );
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
  else go({ ...EMPTY, scale: state.scale }, true);
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
byId("scales").hidden = !model.timed;
for (const button of byId("scales").children)
  button.addEventListener("click", () => go({ scale: button.dataset.scale === "time" ? "time" : "" }));
byId("memory-fold").addEventListener("click", () => {
  const open = byId("owners").hidden;
  byId("owners").hidden = !open;
  byId("memory-fold").setAttribute("aria-expanded", String(open));
  byId("memory-fold").textContent = open ? "hide" : "show";
  drawLater();
});

addEventListener("hashchange", () => render(readHash()));
addEventListener("resize", drawLater);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  strip.restyle();
  if (memoryMap) memoryMap.restyle();
});

document.body.classList.toggle("timed", model.timed);
showHeader();
if (memoryMap) showMemoryFacts();
kernelList.set(model.groups);
render(readHash(), true);
drawNow(); // before the first frame: the heights of the pictures determine the heights of the lists
document.documentElement.dataset.ready = "true"; // for tests: no error so far
