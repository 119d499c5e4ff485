// Elements, numbers and links.

function h(tag, props, ...children) {
  const node = document.createElement(tag);
  fill(node, props, children);
  return node;
}

function svg(tag, props, ...children) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  fill(node, props, children);
  return node;
}

function fill(node, props, children) {
  for (const [name, value] of Object.entries(props || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined));
}

function bytes(count) {
  for (const [unit, size] of [["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]])
    if (count >= size) return `${(count / size).toFixed(count >= 100 * size ? 0 : 1)} ${unit}`;
  return `${count} B`;
}

function time(seconds) {
  if (seconds >= 1) return `${seconds.toFixed(2)} s`;
  if (seconds >= 1e-3) return `${(seconds * 1e3).toFixed(2)} ms`;
  return `${(seconds * 1e6).toFixed(1)} µs`;
}

function short(line) {
  return line.slice(line.lastIndexOf("/") + 1);
}

function operatorName(name) {
  return name.replace(/^aten\./, "").split(".")[0];
}

// Where things are on the page: parts of the address behind `#`.
function to(...parts) {
  return "#" + parts.map((part) => encodeURIComponent(part)).join("/");
}

function bars(rows, most, kind) {
  return rows.map(([label, seconds]) => h("div", { class: `bar ${kind || ""}` },
    h("span", {}, label), h("span", {}, time(seconds)),
    h("i", { style: `width: ${Math.max(0.2, (100 * seconds) / (most || 1))}%` })));
}
