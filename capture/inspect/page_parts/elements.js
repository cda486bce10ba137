// Elements and lists. Texts of the graph become text nodes only, so that no name is parsed as markup.

/** Creates an element. Function attributes become listeners; null and false are skipped. */
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

/** A list whose document contains only the visible rows. `render(item, index)` creates a row. */
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
    if (!asked)
      requestAnimationFrame(() => {
        asked = false;
        draw();
      });
    asked = true;
  });
  new ResizeObserver(draw).observe(place);
  return {
    draw,
    set(values) {
      items = values;
      pad.style.height = `${items.length * rowHeight}px`;
      draw();
    },
    reveal(index) {
      const top = index * rowHeight,
        room = place.clientHeight;
      if (top < place.scrollTop || top + rowHeight > place.scrollTop + room)
        place.scrollTop = top - room / 2 + rowHeight;
      draw();
    },
    page: () => Math.max(Math.floor(place.clientHeight / rowHeight) - 1, 1),
  };
}
