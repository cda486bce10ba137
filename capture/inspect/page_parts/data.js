// Decodes the graph and its memory. This file does not use the document. `_page_json` of page.py describes the data.

const COLORS = 12; // names with a separate color; the others are grey

/** The data model: nodes of the graph and its bodies in one array, in the order of GraphView.walk(). */
function decodePage(page) {
  const model = {
    origin: page.origin,
    nodes: [],
    graphs: [],
    byPlace: new Map(),
    launches: page.launches,
    findings: [],
    memory: page.memory ? decodeMemory(page.memory) : null,
  };
  model.kernels = page.kernels.map(([kind, name, symbol, args, operands, scalars]) => ({
    kind,
    name,
    symbol,
    args,
    operands,
    scalars,
    short: shortName(name),
    key: wellFormed(name),
  }));
  addGraph(model, page.graph, null, 0);
  for (const [place, where, address, owner, region, text] of page.findings) {
    const finding = { node: model.byPlace.get(place), where, address, owner, region, text };
    finding.node?.findings.push(finding); // some findings have no node
    model.findings.push(finding);
  }
  groupByName(model);
  if (model.memory) indexMemory(model);
  return model;
}

function addGraph(model, values, parent, body) {
  const graph = { parent, body, nodes: [], edges: [], layout: null };
  model.graphs.push(graph);
  const prefix = parent ? `${parent.place}.${body}.` : "";
  values.nodes.forEach(([kernel, launch, data, operands, scalars, bodies, remark], index) => {
    const node = {
      id: model.nodes.length,
      place: prefix + index,
      graph,
      index,
      depth: parent ? parent.depth + 1 : 0,
      kernel: model.kernels[kernel],
      launch: model.launches[launch],
      data: data || "",
      operands: operands || [],
      scalars: scalars || [],
      bodies: [],
      remark: remark || "",
      findings: [],
      touches: [],
    };
    model.nodes.push(node);
    model.byPlace.set(node.place, node);
    graph.nodes.push(node);
    node.bodies = (bodies || []).map((inner, which) => addGraph(model, inner, node, which));
  });
  graph.before = graph.nodes.map(() => []);
  graph.after = graph.nodes.map(() => []);
  let source = 0;
  for (let at = 0; at < values.edges.length; at += 3) {
    source += values.edges[at];
    const edge = { source, target: source + values.edges[at + 1], programmatic: values.edges[at + 2] === 1 };
    graph.edges.push(edge);
    graph.before[edge.target].push(edge);
    graph.after[source].push(edge);
  }
  return graph;
}

/** Groups nodes by name, most frequent first. Each group gets a color. */
function groupByName(model) {
  const groups = new Map();
  for (const node of model.nodes) {
    const { name, short, kind, key } = node.kernel;
    let group = groups.get(name);
    if (!group) groups.set(name, (group = { name, short, kind, key, count: 0, color: COLORS }));
    group.count += 1;
    node.group = group;
  }
  model.groups = [...groups.values()].sort((a, b) => b.count - a.count || (a.name < b.name ? -1 : 1));
  model.groups.slice(0, COLORS).forEach((group, rank) => {
    group.color = rank;
  });
}

/** Replaces lone surrogates, which an address cannot contain. */
function wellFormed(text) {
  return text.replace(/\p{Surrogate}/gu, "\ufffd");
}

/** A short name, without result type, parameters and namespaces. */
function shortName(name) {
  let text = name.replace(/\(anonymous namespace\)::/g, "").replace(/^(void|static void) /, "");
  if (text.endsWith(")")) {
    let depth = 0,
      at = text.length - 1;
    for (; at > 0; at--) {
      if (text[at] === ")") depth += 1;
      if (text[at] === "(" && --depth === 0) break;
    }
    text = text.slice(0, at) || text;
  }
  return (
    text.replace(/([A-Za-z_]\w*::)+/g, (path) => (/^(aten|prims|graphrt)::/.test(path) ? path : "")).trim() || name
  );
}

// ---- memory

function decodeMemory(values) {
  const regions = values.regions.map(([name, owner, address, nbytes, live], id) => ({
    id,
    name,
    owner,
    text: "0x" + address,
    address: parseInt(address, 16),
    nbytes,
    live: live === 1,
    nodes: [],
  }));
  const cuts = Float64Array.from(values.cuts, ([address]) => parseInt(address, 16));
  return { regions, cuts, holders: values.cuts.map(([, region]) => regions[region] || null) };
}

/** Index of the last cut at or before an address; -1 if there is none. */
function cutAt(memory, address) {
  let low = 0,
    high = memory.cuts.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (memory.cuts[middle] <= address) low = middle + 1;
    else high = middle;
  }
  return low - 1;
}

/** The region that contains an address, or null. */
function findRegion(memory, address) {
  const at = memory && address >= 0 ? cutAt(memory, address) : -1; // an unknown address is NaN
  return at < 0 ? null : memory.holders[at];
}

/** Links each node to the regions that it accesses, and each region to its nodes. */
function indexMemory(model) {
  for (const node of model.nodes) {
    const touched = new Set();
    for (const address of addressWords(node)) {
      const region = findRegion(model.memory, address);
      if (region) touched.add(region);
    }
    for (const { address, nbytes } of operandsOf(node)) {
      const { cuts, holders } = model.memory;
      for (let at = Math.max(cutAt(model.memory, address), 0); cuts[at] < address + nbytes; at++) {
        if (holders[at]) touched.add(holders[at]);
      }
    }
    node.touches = [...touched];
    for (const region of node.touches) region.nodes.push(node);
  }
}

/** The memory that a memcpy, a memset or an op accesses. */
function operandsOf(node) {
  return node.kernel.operands.map(([role, host, written], i) => {
    const text = node.operands[2 * i],
      nbytes = node.operands[2 * i + 1];
    const address = text === "0" ? NaN : parseInt(text, 16); // 0: unknown
    return { role, host: host === 1, written: written === 1, text: "0x" + text, address, nbytes };
  });
}

// ---- arguments

/** The arguments of a node, each with a DataView of its bytes. */
function argumentsOf(node) {
  const text = atob(node.data);
  const bytes = Uint8Array.from(text, (letter) => letter.charCodeAt(0));
  let begin = 0;
  return node.kernel.args.map(([offset, size, name, pointers]) => {
    const view = new DataView(bytes.buffer, begin, size);
    begin += size;
    return { offset, size, name, pointers, view };
  });
}

/** Eight bytes as a number, exact for all hardware addresses. */
function word64(view, at) {
  return view.getUint32(at + 4, true) * 4294967296 + view.getUint32(at, true);
}

/** All non-zero words of a node's arguments that are or may be addresses. */
function addressWords(node) {
  const words = argumentsOf(node).flatMap((argument) =>
    pointerOffsets(argument).map((at) => word64(argument.view, at)),
  );
  return words.filter(Boolean);
}

function pointerOffsets({ pointers, size }) {
  if (pointers) return pointers.filter((at) => at + 8 <= size);
  const every = [];
  for (let at = 0; at + 8 <= size; at += 8) every.push(at);
  return every;
}

/**
 * The rows of an argument: {at, hex, text, more, region, address, pointer}. `text` is the most likely meaning; `more`
 * lists others. A word is an address if the graph marks it as one, or if a region contains it.
 */
function decodeArgument(argument, memory) {
  const rows = [],
    { view, size } = argument;
  const pointers = new Set(pointerOffsets(argument));
  for (let at = 0; at < size;) {
    // Words do not overlap with addresses.
    let width = [8, 4, 2, 1].find((w) => at + w <= size && at % w === 0);
    if (width === 8 && !pointers.has(at) && [1, 2, 3, 4, 5, 6, 7].some((part) => pointers.has(at + part))) width = 4;
    if (pointers.has(at)) width = 8;
    rows.push({
      at,
      ...decodeWord(view, at, width, width === 8 && pointers.has(at), argument.pointers !== null, memory),
    });
    at += width;
  }
  return rows;
}

function decodeWord(view, at, width, mayPoint, known, memory) {
  const hex = (value, digits) => "0x" + value.toString(16).padStart(digits, "0");
  if (width < 4) {
    const value = width === 1 ? view.getUint8(at) : view.getUint16(at, true);
    return { hex: hex(value, 2 * width), text: String(value) };
  }
  if (width === 4) {
    const signed = view.getInt32(at, true),
      real = view.getFloat32(at, true),
      number = plausible(real) ? { text: floatText(real, 7), more: `int ${signed}` } : { text: String(signed) };
    return { hex: hex(view.getUint32(at, true), 8), ...number };
  }
  const bits = hex(view.getBigUint64(at, true), 16),
    address = word64(view, at);
  const region = mayPoint ? findRegion(memory, address) : null;
  if (region) return { hex: hex(view.getBigUint64(at, true), 1), region, address };
  if (mayPoint && known) return { hex: bits, pointer: true, text: address ? "unknown region" : "null" };
  const real = view.getFloat64(at, true),
    signed = view.getBigInt64(at, true);
  const [low, high] = [decodeWord(view, at, 4), decodeWord(view, at + 4, 4)];
  const halves = `${low.text}, ${high.text}`;
  if (signed >= -2147483648n && signed < 4294967296n) {
    const isFloat = low.more && signed > 0n;
    return { hex: bits, text: isFloat ? low.text : String(signed), more: isFloat && `int ${signed}` };
  }
  if (plausible(real)) return { hex: bits, text: floatText(real, 12), more: `as two words ${halves}` };
  return { hex: bits, text: halves, more: `int ${signed}` };
}

/** Whether bits look like a real number: small integers, read as floats, are close to 0. */
function plausible(real) {
  const size = Math.abs(real);
  return size > 1e-12 && size < 1e12;
}

function floatText(real, digits) {
  const text = String(Number(real.toPrecision(digits)));
  return /[.e]/.test(text) ? text : text + ".0";
}

// ---- filters

/** Nodes that match all filters of the state, in order. */
function filterNodes(model, state) {
  const tests = state.q
    .toLowerCase()
    .split(/\s+/)
    .filter(Boolean)
    .map((term) => termTest(model, term));
  if (state.kind) tests.push((node) => node.kernel.kind === state.kind);
  if (state.kernel) tests.push((node) => node.kernel.key === state.kernel);
  if (state.findings) tests.push((node) => node.findings.length > 0);
  if (state.region !== "" && model.memory) {
    const region = model.memory.regions[Number(state.region)];
    tests.push((node) => node.touches.includes(region));
  }
  return tests.length ? model.nodes.filter((node) => tests.every((test) => test(node))) : model.nodes;
}

/** Tests whether a search word is in a node's name, symbol, kind or accessed regions, or is its place. */
function termTest(model, term) {
  const kernels = new Set(
    model.kernels.filter((kernel) =>
      [kernel.name, kernel.symbol, kernel.kind].some((text) => text.toLowerCase().includes(term)),
    ),
  );
  const address = /^0x[0-9a-f]+$/.test(term) ? parseInt(term, 16) : NaN,
    holder = findRegion(model.memory, address);
  const regions = new Set(
    model.memory
      ? model.memory.regions.filter((region) => region === holder || region.name.toLowerCase().includes(term))
      : [],
  );
  const exact = new Set(
    Number.isNaN(address) || holder
      ? []
      : model.nodes.filter(
          (node) =>
            addressWords(node).includes(address) || operandsOf(node).some((operand) => operand.address === address),
        ),
  );
  const isPlace = /^\d+(\.\d+)*$/.test(term);
  return (node) =>
    kernels.has(node.kernel) ||
    exact.has(node) ||
    (isPlace && (node.place === term || node.place.startsWith(term + "."))) ||
    (regions.size > 0 && node.touches.some((region) => regions.has(region)));
}

// ---- numbers as text

function bytesText(count) {
  if (count < 1024) return `${count} B`;
  const units = ["KiB", "MiB", "GiB", "TiB"];
  let value = count / 1024,
    unit = 0;
  while (value >= 1024 && unit < units.length - 1) {
    value /= 1024;
    unit += 1;
  }
  return `${value >= 100 ? value.toFixed(0) : value.toFixed(1).replace(/\.0$/, "")} ${units[unit]}`;
}

function countText(count, noun, nouns) {
  return `${count.toLocaleString("en-US")} ${count === 1 ? noun : nouns || noun + "s"}`;
}

function offsetText(address, region) {
  const offset = address - region.address;
  return offset ? `+0x${offset.toString(16)}` : "+0";
}
