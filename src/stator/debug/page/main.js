// The overview, the search, and what is shown where.

const TABS = {
  overview: ["Overview", overviewView], graphs: ["Passes", graphsView], kernels: ["Kernels", kernelsView],
  calls: ["Calls", callsView], unfused: ["Not fused", unfusedView], memory: ["Memory", memoryView],
  saved: ["Saved", savedView], source: ["Source", sourceView],
};

function overviewView(graph, data) {
  const steps = [...graph.kernels, ...graph.calls].filter((one) => one.runs);
  const total = (ones) => ones.reduce((sum, one) => sum + one.least, 0);
  const hot = [...steps].sort((a, b) => b.least - a.least).slice(0, 20);
  const card = (value, label) => h("div", { class: "card" }, h("b", {}, value), label);
  const links = hot.map((one) => [one.id
    ? [kernelLink(graph, one), ` ${one.half.name}: ${kernelTitle(one)}`]
    : [h("a", { href: to(graph.id, "calls", one.half.name, one.name) }, one.name), ` ${one.half.name}: ${one.operator}`], one.least]);
  return h("div", {},
    h("div", { class: "cards" }, card(time(graph.seconds), "to compile"), card(graph.kernels.length, "kernels"),
      card(graph.halves.reduce((sum, half) => sum + half.code.length, 0), "that differ"),
      card(`${graph.generated} / ${graph.called}`, "operators in kernels / called"),
      card(graph.halves.map((half) => bytes(half.memory.peak)).join(" / ") || "–", "peak beyond inputs, by graph"),
      steps.length ? card(time(total(steps)), "in all steps, measured") : null,
      steps.length ? card(`${((100 * total(graph.kernels)) / total(steps)).toFixed(0)}%`, "of that in kernels") : null),
    h("p", {}, "Cache: ", graph.cache || "unknown", graph.cache === "hit" ? ", but compiled anew to explain it" : ""),
    graph.fallback ? h("p", {}, h("b", {}, "Runs in eager mode: "), graph.fallback) : null,
    graph.notes.length ? h("details", {}, h("summary", {}, `Notes (${graph.notes.length})`),
      h("ul", {}, graph.notes.slice(0, 200).map((note) => h("li", {}, note)))) : null,
    framesView(data),
    h("h2", {}, "Hot steps"), steps.length ? bars(links, hot[0].least, "hot")
      : h("p", { class: "soft" }, "Nothing was measured: the program did not run as native code."),
    h("h2", {}, "Stages"), stagesView(graph));
}

function framesView(data) {
  const lists = [["Compiled again", data.recompilations], ["Left to eager", data.uncaptured]];
  return h("div", {}, lists.map(([title, frames]) => frames.length ? [h("h2", {}, title), h("table", {}, frames.map((one) =>
    h("tr", {}, h("td", { class: "mono" }, `${one.function} ${short(one.line)}`), h("td", {}, one.reason))))] : null));
}

function stagesView(graph) {
  const groups = new Map();
  for (const stage of graph.stages) {
    const [whole, part] = stage.name.split("/");
    const name = !part || part === "plan" || part === "executor" ? stage.name : `${whole}: passes`;
    if (!groups.has(name)) groups.set(name, []);
    groups.get(name).push(stage);
  }
  const sums = [...groups].map(([name, stages]) => [name, stages.reduce((sum, one) => sum + one.seconds, 0), stages]);
  const most = Math.max(...sums.map((row) => row[1]));
  return h("div", {}, sums.map(([name, seconds, stages]) => stages.length < 2 ? bars([[name, seconds]], most)
    : h("details", {}, h("summary", {}, bars([[`${name} (${stages.length})`, seconds]], most)),
      bars(stages.map((one) => [`  ${one.name.split("/")[1]} ${one.changed ? `(${one.changed})` : ""}`, one.seconds]), most))));
}

function searchBox(data) {
  const input = document.getElementById("search"), found = document.getElementById("found");
  let index = null, links = [], chosen = -1;
  const choose = (number) => {
    links.forEach((link, n) => link.classList.toggle("chosen", n === number));
    chosen = number;
    if (links[number]) links[number].scrollIntoView({ block: "nearest" });
  };
  const close = () => { found.hidden = true; };
  const look = () => {
    index = index || searchIndex(data);
    const words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
    if (!words.length) { close(); return; }
    const hits = index.filter((entry) => words.every((word) => entry.low.includes(word)));
    links = hits.slice(0, 100).map((entry) => h("a", { href: entry.address, onclick: close },
      h("span", { class: "soft" }, entry.kind), h("span", { title: entry.text }, entry.text)));
    found.replaceChildren(...links, h("p", { class: "soft" }, hits.length > 100 ? `${hits.length} found, 100 shown` : `${hits.length} found`));
    found.hidden = false;
    choose(links.length ? 0 : -1);
  };
  input.addEventListener("input", look);
  input.addEventListener("focus", look);
  input.addEventListener("keydown", (event) => {
    if (event.key === "ArrowDown") choose(Math.min(links.length - 1, chosen + 1));
    else if (event.key === "ArrowUp") choose(Math.max(0, chosen - 1));
    else if (event.key === "Enter" && links[chosen]) { links[chosen].click(); input.blur(); }
    else if (event.key === "Escape") { close(); input.blur(); }
    else return;
    event.preventDefault();
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "/" && !/^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName)) { event.preventDefault(); input.focus(); }
  });
  document.addEventListener("click", (event) => { if (!event.target.closest(".search")) close(); });
}

function show(data) {
  const parts = location.hash.slice(1).split("/").map(decodeURIComponent);
  const graph = data.graphs[Number(parts[0])] || data.graphs[0];
  const view = document.getElementById("view");
  if (!graph) { view.replaceChildren(h("p", {}, "Nothing was compiled."), framesView(data)); return; }
  const tab = TABS[parts[1]] ? parts[1] : "overview";
  document.getElementById("program").value = String(graph.id);
  document.getElementById("tabs").replaceChildren(...Object.entries(TABS).map(([name, [title]]) =>
    h("a", { href: to(graph.id, name), "aria-current": name === tab ? "page" : null }, title)));
  view.replaceChildren(TABS[tab][1](graph, data, parts.slice(2)));
  view.scrollTop = 0;
}

async function unpacked() {
  const letters = document.getElementById("data").textContent;
  const raw = Uint8Array.from(atob(letters), (letter) => letter.charCodeAt(0));
  const stream = new Blob([raw]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).json();
}

async function start() {
  const data = read(await unpacked());
  const choice = document.getElementById("program");
  choice.append(...data.graphs.map((graph) => h("option", { value: graph.id },
    `program ${graph.id + 1}: ${graph.halves.map((half) => half.name).join(", ") || "eager"}`)));
  choice.addEventListener("change", () => { location.hash = to(choice.value, "overview"); });
  searchBox(data);
  window.addEventListener("hashchange", () => show(data));
  show(data);
  document.body.dataset.ready = "yes";
}

start().catch((error) => {
  document.getElementById("view").replaceChildren(h("p", {}, `This page cannot be drawn: ${error}`));
  throw error;
});
