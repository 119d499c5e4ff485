// Graphs before and after each pass, side by side.

const CONTEXT = 3;  // equal lines around a change

function graphsView(graph, data, parts) {
  const [name, number, node] = parts;
  const history = graph.graphs.find((one) => one.name === name) || graph.graphs[0];
  if (!history) return h("p", { class: "soft" }, "No graph was kept.");
  const at = number === undefined ? firstChange(history) : Math.min(Number(number), history.passes.length);
  const diff = diffView(graph, data, history, at, node);
  return h("div", { class: "fill" }, h("div", { class: "split" },
    h("div", { class: "scroll passes" }, graph.graphs.map((one) => passList(graph, one, history, at))),
    h("div", { class: "fill" }, diff)));
}

function firstChange(history) {
  const found = history.passes.findIndex((pass) => pass.edits.length);
  return found < 0 ? history.passes.length : found + 1;
}

function passList(graph, history, chosen, at) {
  return h("section", {}, h("h3", {}, history.name, h("span", { class: "soft" }, ` ${history.text.length} nodes`)),
    history.passes.map((pass, number) => h("a", {
      href: to(graph.id, "graphs", history.name, number + 1),
      class: pass.edits.length ? "" : "none",
      "aria-current": history === chosen && number + 1 === at,
      title: pass.rewrites.slice(0, 20).join("\n"),
    }, h("span", {}, pass.name),
      h("span", {}, pass.edits.length ? `${pass.rewrites.length || "±"} · ${time(pass.seconds)}` : "–"))));
}

function diffView(graph, data, history, at, node) {
  const texts = versions(history);
  const pass = at > 0 ? history.passes[at - 1] : null;
  const changes = Boolean(pass && pass.edits.length);
  const all = rowsOf(texts[Math.max(0, at - 1)], texts[at], changes ? pass.edits : []);
  // A node that is asked for is in sight only where nothing is folded.
  let rows = changes && !node ? folded(all) : all;
  const list = longList(rows.length, (n) => drawRow(rows[n], n), changes ? "diff" : "diff one");
  const unfold = (number) => {
    rows = [...rows.slice(0, number), ...rows[number].hidden, ...rows.slice(number + 1)];
    list.refresh(rows.length);
  };
  const drawRow = (row, number) => row.hidden
    ? h("div", { class: "row" }, h("span", { class: "gap", onclick: () => unfold(number) },
      `⋯ ${row.hidden.length} equal lines`))
    : h("div", { class: "row" },
      changes ? h("span", { class: row.left === null ? "" : row.changed ? "del" : "", title: row.left },
        row.left ?? "") : null,
      h("span", { class: `after ${row.changed && row.right !== null ? "add" : ""}` },
        h("span", { title: row.right }, row.right ?? ""),
        row.right === null ? null : chips(graph, data, history, row.right)));
  if (node) requestAnimationFrame(() => {
    const found = rows.findIndex((row) => row.right !== null && nodeOf(row.right) === node);
    if (found >= 0) list.show(found);
  });
  return [diffHead(history, pass, changes, () => { rows = all; list.refresh(rows.length); }), list.box];
}

function diffHead(history, pass, changes, unfoldAll) {
  const title = pass ? `${history.name}: ${pass.name}` : `${history.name}, before all passes`;
  const told = !pass ? "" : changes
    ? `${pass.rewrites.length} rewrites in ${time(pass.seconds)}; before on the left, after on the right`
    : `changed nothing, in ${time(pass.seconds)}; the graph behind it`;
  return h("div", {}, h("h3", {}, title, " ",
    changes ? h("button", { onclick: unfoldAll }, "show all lines") : null),
  h("p", { class: "soft" }, told),
  changes && pass.rewrites.length ? h("details", {}, h("summary", {}, "rewrites"),
    h("p", { class: "mono" }, pass.rewrites.slice(0, 400).join(", "))) : null);
}

function chips(graph, data, history, text) {
  const node = nodeOf(text);
  const line = history.lines[node];
  const users = graph.byNode.get(`${history.name}/${node}`) || [];
  return [
    users.filter((one) => one.id).slice(0, 3).map((kernel) => h("a", { class: "chip",
      href: to(graph.id, "kernels", kernel.half.name, kernel.name) }, kernel.name)),
    users.filter((one) => !one.id).slice(0, 1).map((call) => h("a", { class: "chip",
      href: to(graph.id, "calls", call.half.name, call.name) }, "call")),
    line ? lineLink(graph, data, line, "chip") : null,
  ];
}

// Rows of a comparison: left and right text, null where there is none.
function rowsOf(before, after, edits) {
  const rows = [];
  let at = 0;
  const equal = (end) => { for (; at < end; at += 1) rows.push({ left: before[at], right: before[at], changed: false }); };
  for (const [start, removed, added] of edits) {
    equal(start);
    for (let n = 0; n < Math.max(removed, added.length); n += 1)
      rows.push({ left: n < removed ? before[start + n] : null, right: n < added.length ? added[n] : null, changed: true });
    at = start + removed;
  }
  equal(before.length);
  return rows;
}

// Long runs of equal lines as one row that can be opened.
function folded(rows) {
  const keep = new Uint8Array(rows.length);
  rows.forEach((row, number) => {
    if (row.changed)
      for (let n = Math.max(0, number - CONTEXT); n <= Math.min(rows.length - 1, number + CONTEXT); n += 1) keep[n] = 1;
  });
  const found = [];
  for (let number = 0; number < rows.length; number += 1) {
    if (keep[number]) { found.push(rows[number]); continue; }
    let end = number;
    while (end < rows.length && !keep[end]) end += 1;
    if (end - number <= 2) found.push(...rows.slice(number, end));
    else found.push({ hidden: rows.slice(number, end) });
    number = end - 1;
  }
  return found;
}
