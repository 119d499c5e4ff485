// Long lists: only the rows in sight are in the document.

const ROW = 22;

function longList(count, draw, kind) {
  const rows = h("div", { class: "rows" });
  const box = h("div", { class: `list ${kind || ""}`, tabindex: 0 }, rows);
  let shown = [-1, -1];
  const list = { box, count, here: -1, draw };
  const refresh = (force) => {
    const first = Math.max(0, Math.floor(box.scrollTop / ROW) - 10);
    const last = Math.min(list.count, Math.ceil((box.scrollTop + box.clientHeight) / ROW) + 10);
    if (!force && first === shown[0] && last === shown[1]) return;
    shown = [first, last];
    rows.style.height = `${list.count * ROW}px`;
    const inside = [];
    for (let number = first; number < last; number += 1) {
      const row = draw(number);
      row.style.top = `${number * ROW}px`;
      row.classList.toggle("here", number === list.here);
      inside.push(row);
    }
    rows.replaceChildren(...inside);
  };
  box.addEventListener("scroll", () => refresh(false), { passive: true });
  new ResizeObserver(() => refresh(true)).observe(box);
  list.refresh = (count) => { if (count !== undefined) list.count = count; refresh(true); };
  list.show = (number) => {
    list.here = number;
    rows.style.height = `${list.count * ROW}px`;
    box.scrollTop = Math.max(0, number * ROW - box.clientHeight / 2);
    refresh(true);
  };
  return list;
}

// A table of many rows: `columns` are [heading, width, cell, value to sort by].
function longTable(items, columns, open) {
  const widths = columns.map((column) => column[1]).join(" ");
  let order = items;
  let by = -1;
  const draw = (number) => {
    const item = order[number];
    const row = h("div", { class: `row ${open ? "link" : ""}`, style: `grid-template-columns: ${widths}`,
      onclick: open ? (event) => { if (!event.target.closest("a")) open(item); } : null });
    for (const [, , cell, key] of columns)
      row.append(h("span", { class: key === "num" || typeof key === "function" ? "num" : "" }, cell(item)));
    return row;
  };
  const list = longList(items.length, draw);
  const sort = (number) => {
    const value = columns[number][3];
    by = number;
    order = [...items].sort((a, b) => value(b) - value(a));
    list.refresh();
  };
  const head = h("div", { class: "head", style: `grid-template-columns: ${widths}` },
    columns.map(([heading, , , key], number) => typeof key === "function"
      ? h("button", { class: "num", title: "largest first", onclick: () => sort(number) }, `${heading} ↓`)
      : h("span", {}, heading)));
  const show = (item) => {
    const number = order.indexOf(item);
    if (number >= 0) list.show(number);
  };
  return { parts: [head, list.box], list, sort, show, sorted: () => by };
}
