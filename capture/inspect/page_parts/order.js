// The picture of the order: nodes by column and lane.

const MAX_LANES = 64; // further nodes share the last lane
const COLUMN = 11; // initial width of a column in pixels, if the graph does not fit

/** Colors and font of the current color scheme. */
function readTheme() {
  const style = getComputedStyle(document.documentElement);
  const names = ["mono", "text", "dim", "accent", "danger", "ink"];
  for (let i = 0; i <= COLORS; i++) names.push(`c${i}`);
  return Object.fromEntries(names.map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
}

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
 * The layout of a graph: {column, lane} by index, `byLane`, `columns` and `lanes`. A node is in the column after its
 * last dependency, and takes the lane of one of them if possible.
 */
function layoutGraph(graph) {
  if (graph.layout) return graph.layout;
  const count = graph.nodes.length,
    column = new Int32Array(count);
  graph.before.forEach((edges, index) => {
    for (const { source } of edges) column[index] = Math.max(column[index], column[source] + 1);
  });
  const lane = new Int32Array(count),
    free = [],
    last = [];
  const order = [...graph.nodes.keys()].sort((a, b) => column[a] - column[b] || a - b);
  for (const index of order) {
    const ahead = graph.before[index].find(({ source }) => last[lane[source]] === source);
    let chosen = ahead ? lane[ahead.source] : free.findIndex((until) => until <= column[index]);
    if (chosen < 0) chosen = Math.min(free.length, MAX_LANES - 1);
    lane[index] = chosen;
    free[chosen] = column[index] + 1;
    last[chosen] = index;
  }
  const byLane = free.map(() => []);
  for (const index of order) byLane[lane[index]].push(index);
  const columns = order.length ? column[order.at(-1)] + 1 : 0;
  return (graph.layout = { column, lane, byLane, lanes: free.length, columns });
}

/** The picture of a graph, which calls `on.select(node)` and `on.hover(node or null, event)`. */
function makeStrip(strip, on) {
  const state = { graph: null, from: 0, to: 1, shown: null, selected: null, hovered: null, layout: null };
  let theme = readTheme(),
    boxes = { height: 0, laneHeight: 1 };

  /** Shows the first columns of another graph at a usable width, or the whole graph if it is short. */
  function show(graph) {
    if (graph === state.graph) return;
    const layout = layoutGraph(graph),
      columns = layout.columns || 1;
    const part = Math.min(1, Math.max(strip.clientWidth, 1) / (columns * COLUMN));
    Object.assign(state, { graph, layout, from: 0, to: columns * part });
  }

  const fit = () => setWindow(0, Infinity);

  function setWindow(from, width) {
    const columns = state.layout.columns || 1;
    width = Math.min(Math.max(width, Math.min(columns, 4)), columns);
    state.from = Math.min(Math.max(from, 0), columns - width);
    state.to = state.from + width;
    draw();
  }

  function zoom(factor, part = 0.5) {
    const width = state.to - state.from;
    setWindow(state.from + width * part * (1 - 1 / factor), width / factor);
  }

  /** Moves the window if the selected node is outside of it. */
  function reveal(node) {
    const at = state.layout.column[node.index],
      width = state.to - state.from;
    if (at < state.from || at + 1 > state.to) setWindow(at + 0.5 - width / 2, width);
  }

  function draw() {
    if (!state.graph) return;
    const { column, lane, lanes } = state.layout,
      { nodes } = state.graph,
      laneHeight = Math.min(48, Math.max(110 / Math.max(lanes, 1), 2.6));
    boxes = { height: Math.ceil(lanes * laneHeight) + 14, laneHeight };
    const { context, width } = startDrawing(strip, boxes.height);
    const wide = width / (state.to - state.from || 1),
      x = (at) => (at - state.from) * wide;
    const middle = (index) => 7 + (lane[index] + 0.5) * laneHeight;
    const gap = wide > 60 ? 14 : wide > 6 ? Math.min(wide * 0.25, 8) : 0;
    const thick = laneHeight > 6 ? laneHeight - Math.min(laneHeight * 0.28, 8) : laneHeight;
    const visible = (edge) => x(column[edge.target]) >= 0 && x(column[edge.source] + 1) <= width;

    const drawEdge = (edge, arc) => {
      const x0 = x(column[edge.source] + 1) - gap / 2,
        x1 = x(column[edge.target]) + gap / 2;
      const y0 = middle(edge.source),
        y1 = middle(edge.target);
      context.setLineDash(edge.programmatic ? [4, 3] : []);
      context.beginPath();
      context.moveTo(x0, y0);
      if (arc && y0 === y1 && x1 - x0 > gap + 2) {
        // arc over the nodes between source and target
        const top = y0 - thick / 2 - 5;
        context.bezierCurveTo(x0 + 8, top, x1 - 8, top, x1, y1);
      } else {
        // follow the lower of both lanes, below its boxes, and then cross to the other lane
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

    context.textBaseline = "middle";
    const room = Math.max(wide - gap - (gap ? 0 : Math.min(1, wide * 0.15)), 1);
    nodes.forEach((node, i) => {
      const left = x(column[i]) + gap / 2,
        top = middle(i) - thick / 2;
      if (left + room < 0 || left > width) return;
      const faded = state.shown && !state.shown.has(node.id);
      context.fillStyle = theme[`c${node.group.color}`];
      context.globalAlpha = faded ? 0.16 : 1;
      box(context, left, top, room, thick);
      if (room > 44 && thick > 11) {
        context.font = `11px ${theme.mono}`;
        context.fillStyle = faded ? theme.text : theme.ink;
        const name = fitText(context, node.kernel.short.replace(/^\w+::/, ""), room - 10);
        context.fillText(name, left + 5, middle(i) + 0.5);
      }
      context.globalAlpha = 1;
      if (node.findings.length) {
        context.fillStyle = theme.danger;
        triangle(context, left + room / 2, top - 1, 5);
      }
    });

    // The hovered and the selected node, and the neighbors of the selected one.
    for (const node of [state.hovered, state.selected]) {
      if (!node || node.graph !== state.graph) continue;
      const i = node.index,
        left = x(column[i]) + gap / 2;
      context.strokeStyle = node === state.selected ? theme.accent : theme.text;
      if (node === state.selected) {
        context.lineWidth = 1.75;
        for (const edge of [...state.graph.before[i].slice(0, 300), ...state.graph.after[i].slice(0, 300)])
          drawEdge(edge, true);
        context.setLineDash([]);
        context.fillStyle = theme.accent;
        triangle(context, left + room / 2, middle(i) + thick / 2 + 6.5, -6);
      }
      context.lineWidth = 2;
      context.strokeRect(left - 1.5, middle(i) - thick / 2 - 1.5, room + 3, thick + 3);
    }
  }

  function nodeAt(event) {
    const bounds = strip.getBoundingClientRect(),
      { column, byLane, lanes } = state.layout;
    const at = Math.floor(state.from + ((event.clientX - bounds.left) / bounds.width) * (state.to - state.from));
    const which = Math.floor((event.clientY - bounds.top - 7) / boxes.laneHeight);
    if (which < 0 || which >= lanes) return null;
    const found = byLane[which].find((i) => column[i] === at);
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
  if (wide < 6 || high < 6) return context.fillRect(left, top, wide, high);
  context.beginPath();
  context.roundRect(left, top, wide, high, 2.5);
  context.fill();
}

/** The part of a text that fits the width. */
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
