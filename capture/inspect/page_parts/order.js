// The picture of the order: nodes by column and lane; and helpers of both pictures.

const MAX_LANES = 64; // further nodes share the last lane
const COLUMN = 11; // initial width of a column in pixels, if the graph does not fit

/** Colours and fonts of the current colour scheme. */
function readTheme() {
  const style = getComputedStyle(document.documentElement);
  const value = (name) => style.getPropertyValue(name).trim();
  const theme = { mono: value("--mono"), sans: value("--sans"), names: [], owners: {} };
  for (const name of ["panel", "text", "dim", "line", "accent", "danger", "ink", "well"])
    theme[name] = value(`--${name}`);
  for (let i = 0; i <= COLOURS; i++) theme.names.push(value(`--c${i}`));
  for (const owner of OWNERS) theme.owners[owner] = value(`--${owner}`);
  return theme;
}

const OWNERS = ["static", "weight", "cache", "pool", "allocator", "library", "host"];

/** Clears a canvas and returns its context in CSS pixels. */
function startDrawing(canvas, height) {
  const ratio = window.devicePixelRatio || 1,
    width = Math.max(canvas.clientWidth, 1);
  canvas.style.height = `${height}px`;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  return { context, width };
}

/**
 * The layout of a graph: {begin, end, lane} by index, `extent` and `lanes`. A node begins when its dependencies have
 * ended, and takes the lane of one of them if possible. Columns have width 1, or the times of the nodes.
 */
function layoutGraph(graph, scale) {
  if (graph.drawn[scale]) return graph.drawn[scale];
  const count = graph.nodes.length,
    begin = new Float64Array(count),
    end = new Float64Array(count);
  const total = graph.nodes.reduce((sum, node) => sum + (node.time || 0), 0);
  const waitsFor = (index) => {
    if (graph.serial) return index ? [index - 1] : [];
    return graph.before[index].map((edge) => edge.source);
  };
  let extent = 0;
  for (let index = 0; index < count; index++) {
    for (const source of waitsFor(index)) begin[index] = Math.max(begin[index], end[source]);
    const time = graph.nodes[index].time || 0;
    end[index] = begin[index] + (scale === "time" ? Math.max(time, total / count / 10) : 1);
    extent = Math.max(extent, end[index]);
  }
  const lane = new Int32Array(count),
    free = [],
    last = [];
  const order = [...graph.nodes.keys()].sort((a, b) => begin[a] - begin[b] || a - b);
  for (const index of order) {
    const ahead = waitsFor(index).find((source) => last[lane[source]] === source && end[source] <= begin[index]);
    let chosen = ahead === undefined ? free.findIndex((until) => until <= begin[index]) : lane[ahead];
    if (chosen < 0) chosen = Math.min(free.length, MAX_LANES - 1);
    lane[index] = chosen;
    free[chosen] = end[index];
    last[chosen] = index;
  }
  const byLane = free.map(() => []);
  for (const index of order) byLane[lane[index]].push(index);
  return (graph.drawn[scale] = { begin, end, lane, byLane, lanes: free.length, extent });
}

/** The strip and the overview above it. `on.select(node)` and `on.hover(node or null, event)` are called. */
function makeStrip(strip, overview, on) {
  const state = {
    graph: null,
    scale: "order",
    from: 0,
    to: 1,
    shown: null,
    selected: null,
    hovered: null,
    layout: null,
  };
  let theme = readTheme(),
    boxes = { height: 0, laneHeight: 1 };

  function show(graph, scale) {
    const changed = graph !== state.graph || scale !== state.scale;
    Object.assign(state, { graph, scale, layout: layoutGraph(graph, scale) });
    if (changed) reset();
  }

  /** Shows the first columns at a usable width, or the whole graph if it is short. */
  function reset() {
    const columns = layoutGraph(state.graph, "order").extent || 1;
    const part = Math.min(1, Math.max(strip.clientWidth, 1) / (columns * COLUMN));
    Object.assign(state, { from: 0, to: (state.layout.extent || 1) * part });
  }

  function fit() {
    Object.assign(state, { from: 0, to: state.layout.extent || 1 });
    draw();
  }

  function setWindow(from, width) {
    const extent = state.layout.extent || 1;
    width = Math.min(Math.max(width, Math.min(extent, (extent / Math.max(state.graph.nodes.length, 1)) * 4)), extent);
    state.from = Math.min(Math.max(from, 0), extent - width);
    state.to = state.from + width;
    draw();
  }

  function zoom(factor, part = 0.5) {
    const width = state.to - state.from;
    setWindow(state.from + width * part * (1 - 1 / factor), width / factor);
  }

  /** Moves the window if the selected node is outside of it. */
  function reveal(node) {
    const { begin, end } = state.layout,
      width = state.to - state.from,
      i = node.index;
    if (begin[i] < state.from || end[i] > state.to) {
      const extent = state.layout.extent;
      state.from = Math.min(Math.max((begin[i] + end[i] - width) / 2, 0), Math.max(extent - width, 0));
      state.to = state.from + width;
    }
  }

  function colourOf(node) {
    return theme.names[node.group.colour];
  }

  function draw() {
    if (!state.graph) return;
    const { lanes } = state.layout,
      laneHeight = Math.min(48, Math.max(110 / Math.max(lanes, 1), 2.6));
    boxes = { height: Math.ceil(lanes * laneHeight) + 14, laneHeight };
    drawOverview();
    const { context, width } = startDrawing(strip, boxes.height);
    const scale = width / (state.to - state.from || 1),
      x = (at) => (at - state.from) * scale;
    const { begin, end, lane } = state.layout,
      { nodes } = state.graph;
    const middle = (index) => 7 + (lane[index] + 0.5) * laneHeight;
    const column = scale * (state.scale === "time" ? state.layout.extent / nodes.length : 1);
    const gap = column > 60 ? 14 : column > 6 ? Math.min(column * 0.25, 8) : 0;
    const thick = laneHeight > 6 ? laneHeight - Math.min(laneHeight * 0.28, 8) : laneHeight;
    const visible = (edge) => x(begin[edge.target]) >= 0 && x(end[edge.source]) <= width;

    const drawEdge = (edge, arc) => {
      const x0 = x(end[edge.source]) - gap / 2,
        x1 = x(begin[edge.target]) + gap / 2;
      const y0 = middle(edge.source),
        y1 = middle(edge.target);
      context.setLineDash(edge.programmatic ? [4, 3] : []);
      context.beginPath();
      context.moveTo(x0, y0);
      if (arc && y0 === y1 && x1 - x0 > gap + 2) {
        // across the nodes in between
        const top = y0 - thick / 2 - 5;
        context.bezierCurveTo(x0 + 8, top, x1 - 8, top, x1, y1);
      } else {
        // along the lower of both lanes, below its boxes, and then across
        const far = Math.max(x1 - x0 - 24, 0),
          turn = y0 > y1 ? x0 + far : x0,
          until = y0 > y1 ? x1 : x1 - far;
        context.lineTo(turn, y0);
        const half = Math.max((until - turn) / 2, 4);
        context.bezierCurveTo(turn + half, y0, until - half, y1, until, y1);
        context.lineTo(x1, y1);
      }
      context.stroke();
    };
    // In a lane a box follows its dependency, so only other edges are drawn, if there is space.
    context.lineWidth = 1;
    context.strokeStyle = theme.dim;
    context.globalAlpha = 0.55;
    const crossing = state.graph.edges.filter(
      (edge) => visible(edge) && (lane[edge.source] !== lane[edge.target] || gap > 3),
    );
    if (crossing.length < 4000) for (const edge of crossing) drawEdge(edge, false);
    context.globalAlpha = 1;

    const longest = nodes.reduce((most, node) => Math.max(most, node.time || 0), 0);
    context.textBaseline = "middle";
    nodes.forEach((node, i) => {
      const left = x(begin[i]) + gap / 2,
        right = x(end[i]) - gap / 2;
      if (right < 0 || left > width) return;
      const wide = Math.max(right - left - (gap ? 0 : Math.min(1, (right - left) * 0.15)), 1),
        top = middle(i) - thick / 2;
      const faded = state.shown && !state.shown.has(node.id);
      context.fillStyle = colourOf(node);
      context.globalAlpha = faded ? 0.16 : 1;
      // With timings the boxes are also bars: pale to the full height, solid up to the time.
      const solid =
        longest && state.scale === "order" ? Math.max(thick * Math.sqrt((node.time || 0) / longest), 1.5) : thick;
      if (solid < thick) {
        context.globalAlpha = faded ? 0.05 : 0.2;
        box(context, left, top, wide, thick);
        context.globalAlpha = faded ? 0.16 : 1;
      }
      box(context, left, top + thick - solid, wide, solid);
      if (wide > 44 && thick > 11) label(context, node, left, middle(i), wide, solid === thick && !faded);
      context.globalAlpha = 1;
      if (node.findings.length) {
        context.fillStyle = theme.danger;
        triangle(context, left + wide / 2, top - 1, 5);
      }
    });
    drawMarks(context, x, middle, gap, thick, drawEdge);
  }

  function label(context, node, left, y, wide, filled) {
    context.font = `11px ${theme.mono}`;
    context.fillStyle = filled ? theme.ink : theme.text;
    context.fillText(fitText(context, node.kernel.short.replace(/^\w+::/, ""), wide - 10), left + 5, y + 0.5);
  }

  /** Marks the selected and the hovered node, and the neighbours of the selected one. */
  function drawMarks(context, x, middle, gap, thick, drawEdge) {
    const { begin, end } = state.layout;
    for (const node of [state.hovered, state.selected]) {
      if (!node || node.graph !== state.graph) continue;
      const i = node.index,
        left = x(begin[i]) + gap / 2,
        wide = Math.max(x(end[i]) - gap / 2 - left, 1);
      if (node === state.selected) {
        context.strokeStyle = theme.accent;
        context.lineWidth = 1.75;
        for (const edge of [...state.graph.before[i].slice(0, 300), ...state.graph.after[i].slice(0, 300)])
          drawEdge(edge, true);
        context.setLineDash([]);
        context.fillStyle = theme.accent;
        triangle(context, left + wide / 2, middle(i) + thick / 2 + 6.5, -6);
      }
      context.strokeStyle = node === state.selected ? theme.accent : theme.text;
      context.lineWidth = 2;
      context.strokeRect(left - 1.5, middle(i) - thick / 2 - 1.5, wide + 3, thick + 3);
    }
  }

  function drawOverview() {
    const height = 26,
      { context, width } = startDrawing(overview, height),
      { begin, end, lane, lanes, extent } = state.layout;
    const scale = width / (extent || 1),
      laneHeight = (height - 6) / Math.max(lanes, 1);
    for (const node of state.graph.nodes) {
      const i = node.index,
        wide = Math.max((end[i] - begin[i]) * scale, 0.8);
      context.globalAlpha = state.shown && !state.shown.has(node.id) ? 0.14 : 0.9;
      context.fillStyle = colourOf(node);
      context.fillRect(
        begin[i] * scale,
        3 + lane[i] * laneHeight,
        wide > 3 ? wide - 0.6 : wide,
        Math.max(laneHeight - (laneHeight > 4 ? 1 : 0), 0.8),
      );
    }
    context.globalAlpha = 1;
    context.fillStyle = theme.danger;
    for (const node of state.graph.nodes)
      if (node.findings.length) triangle(context, ((begin[node.index] + end[node.index]) / 2) * scale, 4, 4);
    if (state.selected && state.selected.graph === state.graph) {
      context.fillStyle = theme.accent;
      context.fillRect(((begin[state.selected.index] + end[state.selected.index]) / 2) * scale - 1, 0, 2, height);
    }
    if (state.to - state.from < extent * 0.999) {
      context.strokeStyle = theme.text;
      context.lineWidth = 1.5;
      context.strokeRect(
        Math.max(state.from * scale, 1),
        0.75,
        Math.min(Math.max((state.to - state.from) * scale, 4), width - 2),
        height - 1.5,
      );
    }
  }

  function nodeAt(event) {
    const bounds = strip.getBoundingClientRect(),
      { begin, end, byLane, lanes } = state.layout;
    const at = state.from + ((event.clientX - bounds.left) / bounds.width) * (state.to - state.from);
    const which = Math.floor((event.clientY - bounds.top - 7) / boxes.laneHeight);
    if (which < 0 || which >= lanes) return null;
    const inLane = byLane[which],
      slack = (3 / bounds.width) * (state.to - state.from);
    let low = 0,
      high = inLane.length;
    while (low < high) {
      const half = (low + high) >> 1;
      if (begin[inLane[half]] <= at) low = half + 1;
      else high = half;
    }
    const found = [inLane[low - 1], inLane[low]].find(
      (i) => i !== undefined && at >= begin[i] - slack && at <= end[i] + slack,
    );
    return found === undefined ? null : state.graph.nodes[found];
  }

  function hover(event) {
    const node = event ? nodeAt(event) : null;
    if (node !== state.hovered) {
      state.hovered = node;
      draw();
    }
    strip.style.cursor = node ? "pointer" : "grab";
    on.hover(node, event);
  }

  strip.addEventListener(
    "wheel",
    (event) => {
      event.preventDefault();
      const bounds = strip.getBoundingClientRect(),
        width = state.to - state.from;
      if (Math.abs(event.deltaX) > Math.abs(event.deltaY) || event.shiftKey) {
        setWindow(state.from + ((event.deltaX || event.deltaY) / bounds.width) * width, width);
      } else
        zoom(Math.exp(-Math.max(-60, Math.min(60, event.deltaY)) / 200), (event.clientX - bounds.left) / bounds.width);
    },
    { passive: false },
  );

  let drag = null;
  strip.addEventListener("pointerdown", (event) => {
    drag = { x: event.clientX, from: state.from, moved: false };
    strip.setPointerCapture(event.pointerId);
  });
  strip.addEventListener("pointermove", (event) => {
    if (!drag) return hover(event);
    const way = event.clientX - drag.x;
    drag.moved = drag.moved || Math.abs(way) > 4;
    if (drag.moved) setWindow(drag.from - (way / strip.clientWidth) * (state.to - state.from), state.to - state.from);
  });
  strip.addEventListener("pointerup", (event) => {
    const node = drag && !drag.moved ? nodeAt(event) : null;
    drag = null;
    if (node) on.select(node);
  });
  strip.addEventListener("pointerleave", () => hover(null));

  const jump = (event) => {
    const bounds = overview.getBoundingClientRect(),
      width = state.to - state.from;
    setWindow(((event.clientX - bounds.left) / bounds.width) * state.layout.extent - width / 2, width);
  };
  overview.addEventListener("pointerdown", (event) => {
    overview.setPointerCapture(event.pointerId);
    jump(event);
  });
  overview.addEventListener("pointermove", (event) => {
    if (event.buttons) jump(event);
  });

  return {
    state,
    show,
    draw,
    fit,
    zoom,
    reveal,
    restyle: () => {
      theme = readTheme();
      draw();
    },
  };
}

function box(context, left, top, wide, high) {
  if (wide < 6 || high < 6 || !context.roundRect) return context.fillRect(left, top, wide, high);
  context.beginPath();
  context.roundRect(left, top, wide, high, 2.5);
  context.fill();
}

/** The part of a text that fits. */
function fitText(context, text, room) {
  if (context.measureText(text).width <= room) return text;
  const letters = Math.floor(room / context.measureText("m").width) - 1; // the font is monospaced
  return letters > 1 ? `${text.slice(0, letters)}…` : "";
}

/** Draws a triangle that points down; up with a negative size. */
function triangle(context, x, y, size) {
  context.beginPath();
  context.moveTo(x, y);
  context.lineTo(x - Math.abs(size), y - size);
  context.lineTo(x + Math.abs(size), y - size);
  context.fill();
}
