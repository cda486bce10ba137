// The picture of memory: one bar per owner.

/**
 * One bar per owner: regions by address, with widths proportional to their sizes, and a minimum width if they are few.
 * `on.select(region)` and `on.hover(region or null, event)` are called.
 */
function makeMemoryMap(place, memory, on) {
  let theme = readTheme(),
    selected = null,
    filter = null;
  const rows = OWNERS.map((owner) => ({ owner, regions: memory.regions.filter((region) => region.owner === owner) }))
    .filter((row) => row.regions.length)
    .map((row) => {
      row.regions.sort((a, b) => a.address - b.address);
      row.total = row.regions.reduce((sum, region) => sum + region.nbytes, 0);
      const freed = row.regions.filter((region) => !region.live);
      const freedBytes = freed.reduce((sum, region) => sum + region.nbytes, 0);
      row.canvas = document.createElement("canvas");
      row.canvas.setAttribute("role", "img");
      row.canvas.setAttribute("aria-label", `${row.owner}: ${row.regions.length} regions, ${bytesText(row.total)}`);
      place.append(
        el("span", { class: `owner o-${row.owner}` }, row.owner),
        el("span", { class: "dim number" }, bytesText(row.total)),
        el(
          "span",
          { class: "dim number" },
          freed.length ? `${row.regions.length}, ${freed.length} freed` : `${row.regions.length}`,
          freed.length ? el("span", { class: "sr" }, ` ${bytesText(freedBytes)} freed`) : null,
        ),
        row.canvas,
      );
      row.canvas.addEventListener("pointermove", (event) => on.hover(regionAt(row, event), event));
      row.canvas.addEventListener("pointerleave", () => on.hover(null));
      row.canvas.addEventListener("click", (event) => {
        const region = regionAt(row, event);
        if (region) on.select(region);
      });
      return row;
    });

  function regionAt(row, event) {
    const x = event.clientX - row.canvas.getBoundingClientRect().left;
    return (row.bounds || []).reduce((found, [left, right, region]) => (x >= left && x < right ? region : found), null);
  }

  function draw() {
    const touched = new Set(selected ? selected.touches : []);
    for (const row of rows) {
      const height = 18,
        { context, width } = startDrawing(row.canvas, height);
      const least = row.regions.length * 4 < width ? 4 : 0,
        room = width - least * row.regions.length;
      let left = 0;
      row.bounds = row.regions.map((region) => {
        const wide = least + (room * region.nbytes) / row.total,
          bound = [left, left + wide, region];
        left += wide;
        return bound;
      });
      for (const [from, to, region] of row.bounds) {
        const wide = Math.max(to - from - (to - from > 3 ? 1 : 0), 0.5),
          colour = theme.owners[row.owner];
        const strong = selected ? touched.has(region) : region.nodes.length > 0;
        context.globalAlpha = strong ? 1 : 0.22;
        context.fillStyle = context.strokeStyle = colour;
        if (region.live) context.fillRect(from, 2, wide, height - 4);
        else hatch(context, from, 2, wide, height - 4);
        context.globalAlpha = 1;
        if (selected && strong) {
          context.fillStyle = theme.accent;
          triangle(context, from + wide / 2, 5, 5);
          context.fillRect(from, height - 2, Math.max(wide, 2), 2);
        }
        if (region === filter) {
          context.strokeStyle = theme.text;
          context.lineWidth = 2;
          context.strokeRect(from + 1, 2, Math.max(wide - 2, 2), height - 4);
        }
        if (wide > 30) {
          context.font = `10.5px ${theme.mono}`;
          context.textBaseline = "middle";
          const text = fitText(context, region.name, wide - 9);
          context.fillStyle = theme.panel;
          if (!region.live) context.fillRect(from + 2, 3, context.measureText(text).width + 6, height - 6);
          context.fillStyle = strong && region.live ? theme.ink : theme.text;
          context.fillText(text, from + 5, height / 2 + 0.5);
        }
      }
    }
  }

  return {
    draw,
    select: (node, region) => {
      selected = node;
      filter = region;
    },
    restyle: () => {
      theme = readTheme();
      draw();
    },
  };
}

/** Draws freed memory: an outline with diagonal lines. */
function hatch(context, left, top, wide, high) {
  context.save();
  context.beginPath();
  context.rect(left, top, wide, high);
  context.clip();
  context.lineWidth = 1;
  for (let x = left - high; x < left + wide; x += 5) {
    context.beginPath();
    context.moveTo(x, top + high);
    context.lineTo(x + high, top);
    context.stroke();
  }
  context.strokeRect(left + 0.5, top + 0.5, Math.max(wide - 1, 0.5), high - 1);
  context.restore();
}
