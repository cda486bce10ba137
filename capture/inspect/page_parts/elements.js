// Elements and lists. Texts of the graph only become text nodes, so that no name is parsed as markup.

/**
 * Creates an element: el("span.dim", { title: "…" }, child, ...). Function attributes become listeners. Attributes and
 * children that are null or false are skipped, and so are empty texts.
 */
function el(selector, ...content) {
  const [tag, ...classes] = selector.split(".");
  const element = document.createElement(tag);
  element.classList.add(...classes);
  const attributes = content[0]?.constructor === Object ? content.shift() : {};
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") element.addEventListener(name, value);
    else if (value !== null && value !== false) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...content.flat().filter(Boolean));
  return element;
}

const byId = (id) => document.getElementById(id);

/** A list whose document contains only the visible rows. `render(item, index)` creates a row. */
function makeList(place, rowHeight, render) {
  let items = [];
  const pad = place.appendChild(el("div.pad", { role: "presentation" }));
  function draw() {
    const first = Math.max(Math.floor(place.scrollTop / rowHeight) - 8, 0);
    const last = Math.ceil((place.scrollTop + place.clientHeight) / rowHeight) + 8;
    pad.replaceChildren(
      ...items.slice(first, last).map((item, at) => {
        const row = render(item, first + at);
        row.style.top = `${(first + at) * rowHeight}px`;
        return row;
      }),
    );
  }
  place.addEventListener("scroll", draw); // browsers report it once per frame
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
