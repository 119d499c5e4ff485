// Kernels, calls, pairs that were not fused, saved values, the user's lines.

function kernelsView(graph, data, parts) {
  const [half, name] = parts;
  const detail = h("div", { class: "scroll" });
  const open = (kernel) => { location.hash = to(graph.id, "kernels", kernel.half.name, kernel.name); };
  const table = longTable(graph.kernels, [
    ["kernel", "5.5rem", (one) => one.name],
    ["graph", "4.2rem", (one) => one.half.name],
    ["time", "4.8rem", (one) => (one.runs ? time(one.least) : "–"), (one) => one.least],
    ["bytes", "4.8rem", (one) => bytes(one.read + one.written), (one) => one.read + one.written],
    ["operators", "minmax(0, 1fr)", (one) => h("span", { title: kernelTitle(one) }, kernelTitle(one))],
    ["line", "8rem", (one) => (one.lines.length ? lineLink(graph, data, one.lines[0]) : "")],
  ], open);
  if (graph.kernels.some((one) => one.runs)) table.sort(2);
  const chosen = graph.kernels.find((one) => one.half.name === half && one.name === name);
  if (chosen) {
    detail.append(kernelDetail(graph, data, chosen));
    requestAnimationFrame(() => table.show(chosen));
  } else detail.append(h("p", { class: "soft" }, "Choose a kernel."));
  return h("div", { class: "fill" },
    h("p", { class: "soft" }, `${graph.kernels.length} kernels; times are the shortest of the runs that were measured`),
    h("div", { class: "halves", style: "grid-template-columns: minmax(0, 4fr) minmax(0, 3fr)" },
      h("div", { class: "fill" }, table.parts), detail));
}

function kernelDetail(graph, data, kernel) {
  const half = kernel.half;
  const same = half.kernels.filter((one) => one.code === kernel.code && one !== kernel);
  const pairs = half.unfused.filter((pair) => pair.kernels.includes(kernel.name));
  return h("div", {}, h("h2", {}, `${kernel.name}, ${half.name}`),
    h("p", {}, `reads ${bytes(kernel.read)}, writes ${bytes(kernel.written)}`,
      kernel.runs ? `; ${time(kernel.least)} at best of ${kernel.runs} runs, ${time(kernel.seconds / kernel.runs)} on average` : "",
      kernel.runs && kernel.least ? `; ${((kernel.read + kernel.written) / kernel.least / 1e9).toFixed(1)} GB/s` : "",
      kernel.shared > 1 ? `; one of ${kernel.shared} launches that run as one and share the time` : ""),
    h("h3", {}, "Lines"),
    kernel.lines.length ? h("ul", {}, kernel.lines.map((line) => h("li", {}, lineLink(graph, data, line), " ",
      h("code", {}, data.sources[line] || "")))) : h("p", { class: "soft" }, "unknown"),
    h("h3", {}, "Operators"),
    h("ul", { class: "mono" }, kernel.operators.map(([node, operator]) =>
      h("li", {}, nodeLink(graph, half.name, node), ` ${operator}`))),
    h("h3", {}, "Step of the plan"), h("pre", {}, half.steps[kernel.step]),
    h("h3", {}, "Loop IR"), h("pre", { class: "loops" }, kernel.loops),
    h("details", {}, h("summary", {}, `${half.language} (code ${kernel.code} of ${half.code.length})`),
      h("pre", { class: "code" }, half.code[kernel.code])),
    same.length ? h("p", {}, "Same code: ", same.slice(0, 40).map((one) => [kernelLink(graph, one), " "])) : null,
    pairs.length ? [h("h3", {}, "Not fused with"), h("table", {}, pairs.slice(0, 100).map((pair) =>
      h("tr", {}, h("td", { class: "mono" }, pairCell(graph, half, pair)), h("td", {}, pair.reason))))] : null);
}

function pairCell(graph, half, pair) {
  return pair.nodes.map((node, number) => {
    const kernel = half.kernels.find((one) => one.name === pair.kernels[number]);
    const shown = node && (kernel || half.calls.some((call) => call.name === node)) ? nodeLink(graph, half.name, node) : node;
    return [number ? " – " : "", shown || "", kernel ? [" ", kernelLink(graph, kernel)] : ""];
  });
}

function callsView(graph, data, parts) {
  const [half, name] = parts;
  const table = longTable(graph.calls, [
    ["call", "11rem", (one) => nodeLink(graph, one.half.name, one.name)],
    ["graph", "5rem", (one) => one.half.name],
    ["operator", "20rem", (one) => one.operator],
    ["time", "5.5rem", (one) => (one.runs ? time(one.least) : "–"), (one) => one.least],
    ["why it is no kernel", "minmax(0, 1fr)", (one) => one.why + (one.function ? ` (${one.function})` : "")],
    ["line", "10rem", (one) => (one.lines.length ? lineLink(graph, data, one.lines[0]) : "")],
  ]);
  const chosen = graph.calls.find((one) => one.half.name === half && one.name === name);
  if (chosen) requestAnimationFrame(() => table.show(chosen));
  return h("div", { class: "fill" }, h("p", { class: "soft" }, `${graph.calls.length} operators that torch runs`), table.parts);
}

function unfusedView(graph) {
  const pairs = graph.halves.flatMap((half) => half.unfused.map((pair) => ({ ...pair, half })));
  const reasons = new Map();
  for (const pair of pairs) reasons.set(pair.reason, (reasons.get(pair.reason) || 0) + 1);
  const box = h("div", { class: "fill" });
  const draw = (reason) => {
    const shown = reason ? pairs.filter((pair) => pair.reason === reason) : pairs;
    const table = longTable(shown, [
      ["pair", "minmax(0, 1fr)", (pair) => pairCell(graph, pair.half, pair)],
      ["graph", "5rem", (pair) => pair.half.name],
      ["why they are not one kernel", "minmax(0, 1.2fr)", (pair) => pair.reason],
    ]);
    box.replaceChildren(...table.parts);
  };
  const choice = h("select", { "aria-label": "Reason", onchange: (event) => draw(event.target.value) },
    h("option", { value: "" }, `all reasons (${pairs.length})`),
    [...reasons].sort((a, b) => b[1] - a[1]).map(([reason, count]) =>
      h("option", { value: reason }, `${count} × ${reason.slice(0, 120)}`)));
  draw("");
  return h("div", { class: "fill" }, h("p", {}, choice), box);
}

function savedView(graph, data) {
  const kinds = { primal: "an input, held anyway", value: "an output, held anyway", extra: "kept for the backward" };
  const table = longTable(graph.saved, [
    ["value", "14rem", (one) => nodeLink(graph, "forward", one.name)],
    ["bytes", "6rem", (one) => bytes(one.bytes), (one) => one.bytes],
    ["shape", "14rem", (one) => one.shape],
    ["is", "14rem", (one) => kinds[one.kind]],
    ["line", "minmax(0, 1fr)", (one) => (one.line ? lineLink(graph, data, one.line) : "")],
  ]);
  table.sort(1);
  const kept = graph.saved.filter((one) => one.kind === "extra").reduce((sum, one) => sum + one.bytes, 0);
  return h("div", { class: "fill" }, h("p", { class: "soft" },
    graph.saved.length ? `${graph.saved.length} values; ${bytes(kept)} beyond what inputs and outputs hold anyway`
      : "Nothing is saved: there is no backward."), table.parts);
}

function sourceView(graph, data, parts) {
  const lines = [...graph.byLine.keys()].sort((a, b) => {
    const [x, y] = [a.lastIndexOf(":"), b.lastIndexOf(":")];
    return a.slice(0, x).localeCompare(b.slice(0, y)) || Number(a.slice(x + 1)) - Number(b.slice(y + 1));
  });
  const chips = (line) => {
    const { kernels, calls, nodes } = graph.byLine.get(line);
    const counts = [kernels.length && `${kernels.length} kernels`, calls.length && `${calls.length} calls`,
      nodes.length && `${nodes.length} nodes`].filter(Boolean).join(", ");
    return [h("span", { class: "soft" }, counts), kernels.slice(0, 4).map((kernel) => h("a", { class: "chip",
      href: to(graph.id, "kernels", kernel.half.name, kernel.name) }, `${kernel.half.name[0]}:${kernel.name}`)),
    calls.slice(0, 2).map((call) => h("a", { class: "chip", href: to(graph.id, "calls", call.half.name, call.name) },
      operatorName(call.operator)))];
  };
  const detail = h("div", { class: "scroll" });
  const table = longTable(lines, [
    ["line", "13rem", (line) => h("span", { title: line }, short(line))],
    ["source", "minmax(0, 1fr)", (line) => data.sources[line] || ""],
    ["where it went", "minmax(0, 1fr)", chips],
  ], (line) => { location.hash = to(graph.id, "source", line); });
  if (lines.includes(parts[0])) {
    requestAnimationFrame(() => table.show(parts[0]));
    detail.append(lineDetail(graph, data, parts[0]));
  } else detail.append(h("p", { class: "soft" }, "Choose a line."));
  return h("div", { class: "fill" }, h("div", { class: "halves", style: "grid-template-columns: 2fr 1fr" },
    h("div", { class: "fill" }, table.parts), detail));
}

function lineDetail(graph, data, line) {
  const { kernels, calls, nodes } = graph.byLine.get(line);
  return h("div", {}, h("h2", {}, short(line)), h("p", { class: "soft" }, line), h("pre", {}, data.sources[line] || ""),
    h("h3", {}, `Kernels (${kernels.length})`),
    h("ul", {}, kernels.slice(0, 200).map((kernel) => h("li", {}, kernelLink(graph, kernel),
      ` ${kernel.half.name}: ${kernelTitle(kernel)}`))),
    h("h3", {}, `Calls (${calls.length})`),
    h("ul", {}, calls.slice(0, 200).map((call) => h("li", {}, nodeLink(graph, call.half.name, call.name), ` ${call.operator}`))),
    h("h3", {}, `Nodes (${nodes.length})`),
    h("ul", { class: "mono" }, nodes.slice(0, 300).map(([history, node]) => h("li", {}, nodeLink(graph, history, node), ` ${history}`))));
}
