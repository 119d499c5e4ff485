// The data, and what belongs to what: kernels, operators, nodes, lines.

function read(data) {
  data.graphs.forEach((graph, number) => {
    graph.id = number;
    graph.kernels = [];
    graph.calls = [];
    graph.byLine = new Map();  // line -> { kernels, calls, nodes }
    graph.byNode = new Map();  // node -> kernels and calls
    for (const half of graph.halves) {
      for (const kernel of half.kernels) addKernel(graph, half, kernel);
      for (const call of half.calls) addCall(graph, half, call);
    }
    for (const history of graph.graphs)
      for (const [node, line] of Object.entries(history.lines))
        atLine(graph, line).nodes.push([history.name, node]);
  });
  return data;
}

function atLine(graph, line) {
  if (!graph.byLine.has(line)) graph.byLine.set(line, { kernels: [], calls: [], nodes: [] });
  return graph.byLine.get(line);
}

function atNode(graph, half, node) {
  const key = `${half}/${node}`;
  if (!graph.byNode.has(key)) graph.byNode.set(key, []);
  return graph.byNode.get(key);
}

function addKernel(graph, half, kernel) {
  kernel.half = half;
  kernel.id = `${half.name}/${kernel.name}`;
  graph.kernels.push(kernel);
  for (const line of kernel.lines) atLine(graph, line).kernels.push(kernel);
  for (const [node] of kernel.operators) atNode(graph, half.name, node).push(kernel);
}

function addCall(graph, half, call) {
  call.half = half;
  graph.calls.push(call);
  for (const line of call.lines) atLine(graph, line).calls.push(call);
  atNode(graph, half.name, call.name).push(call);
}

// Lines of text of a history, before any pass and after each.
function versions(history) {
  if (history.versions) return history.versions;
  let now = history.text;
  history.versions = [now];
  for (const pass of history.passes) {
    if (pass.edits.length) {
      now = now.slice();
      for (const [at, removed, added] of [...pass.edits].reverse()) now.splice(at, removed, ...added);
    }
    history.versions.push(now);
  }
  return history.versions;
}

function nodeOf(text) {
  const found = /^([^\s:]+)/.exec(text);
  return found ? found[1] : "";
}

function kernelTitle(kernel) {
  return kernel.title.replaceAll("+", " + ");
}

function kernelLink(graph, kernel, text) {
  return h("a", { href: to(graph.id, "kernels", kernel.half.name, kernel.name) }, text || kernel.name);
}

function lineLink(graph, data, line, kind) {
  return h("a", { class: kind || "", href: to(graph.id, "source", line),
    title: `${line}\n${data.sources[line] || ""}` }, short(line));
}

// The history that a half's nodes stand in.
function historyOf(graph, half) {
  return graph.graphs.find((history) => history.name === half) ||
    graph.graphs.find((history) => half.startsWith(history.graph));
}

function nodeLink(graph, half, node, text) {
  const history = historyOf(graph, half);
  return history ? h("a", { href: to(graph.id, "graphs", history.name, history.passes.length, node) },
    text || node) : h("span", {}, text || node);
}

// What can be found: [kind, text, address].
function searchIndex(data) {
  const found = [];
  for (const graph of data.graphs) {
    for (const kernel of graph.kernels)
      found.push(["kernel", `${kernel.name} ${kernelTitle(kernel)} ${kernel.lines.map(short).join(" ")} (${kernel.half.name})`,
        to(graph.id, "kernels", kernel.half.name, kernel.name)]);
    for (const [line] of graph.byLine)
      found.push(["line", `${short(line)}  ${data.sources[line] || ""}`, to(graph.id, "source", line)]);
    for (const history of graph.graphs) {
      history.passes.forEach((pass, number) => {
        if (pass.edits.length)
          found.push(["pass", `${history.name}/${pass.name}`, to(graph.id, "graphs", history.name, number + 1)]);
      });
      const texts = versions(history);
      for (const text of texts[texts.length - 1])
        found.push(["node", `${text}  (${history.name})`,
          to(graph.id, "graphs", history.name, history.passes.length, nodeOf(text))]);
    }
    for (const call of graph.calls)
      found.push(["call", `${call.name} ${call.operator} ${call.lines.map(short).join(" ")} (${call.half.name})`,
        to(graph.id, "calls", call.half.name, call.name)]);
  }
  return found.map(([kind, text, address]) => ({ kind, text, address, low: text.toLowerCase() }));
}
