// Memory over the steps of a plan.

const WIDE = 1000, TALL = 220, LEFT = 70;
const KINDS = ["arena", "pool", "torch"];

function memoryView(graph) {
  return h("div", {}, graph.halves.map((half) => halfMemory(graph, half)));
}

function kindOf(buffer) {
  return buffer.offset !== null ? "arena" : buffer.torch ? "torch" : "pool";
}

function halfMemory(graph, half) {
  const { buffers, arena, peak } = half.memory;
  const steps = half.steps.length;
  const alive = Object.fromEntries(KINDS.map((kind) => [kind, new Float64Array(steps + 2)]));
  for (const buffer of buffers) {
    alive[kindOf(buffer)][buffer.first] += buffer.bytes;
    alive[kindOf(buffer)][Math.min(buffer.last, steps) + 1] -= buffer.bytes;
  }
  for (const kind of KINDS)
    for (let n = 1; n < steps + 2; n += 1) alive[kind][n] += alive[kind][n - 1];
  const told = h("div", {});
  const tell = (step) => told.replaceChildren(stepDetail(graph, half, step));
  let top = 0, highest = 0;
  for (let n = 0; n <= steps; n += 1) {
    const sum = KINDS.reduce((total, kind) => total + alive[kind][n], 0);
    if (sum > highest) { highest = sum; top = n; }
  }
  tell(Math.min(top, steps - 1));
  return h("section", {}, h("h2", {}, half.name),
    h("p", {}, `an arena of ${bytes(arena)}; ${bytes(peak)} at the peak beyond inputs`,
      h("span", { class: "key soft" }, h("i", { class: "arena" }), "alive in the arena", h("i", { class: "pool" }),
        "tensors of the pool", h("i", { class: "torch" }), "made by torch")),
    timeline(alive, steps, highest, tell), arenaMap(half, steps, arena, tell), told);
}

function timeline(alive, steps, highest, tell) {
  const x = (n) => LEFT + ((WIDE - LEFT) * n) / Math.max(1, steps);
  const y = (value) => TALL - 24 - ((TALL - 40) * value) / Math.max(1, highest);
  const below = new Float64Array(steps + 2);
  const areas = KINDS.map((kind) => {
    const up = [], down = [];
    for (let n = 0; n <= steps; n += 1) {
      const low = below[n];
      const high = low + alive[kind][n];
      up.push(`${x(n).toFixed(1)},${y(high).toFixed(1)} ${x(n + 1).toFixed(1)},${y(high).toFixed(1)}`);
      down.push(`${x(n + 1).toFixed(1)},${y(low).toFixed(1)} ${x(n).toFixed(1)},${y(low).toFixed(1)}`);
      below[n] = high;
    }
    return svg("polygon", { class: `area ${kind}`, points: [...up, ...down.reverse()].join(" ") });
  });
  const cursor = svg("line", { class: "cursor", y1: 8, y2: TALL - 24, x1: -9, x2: -9 });
  const drawing = svg("svg", { viewBox: `0 0 ${WIDE} ${TALL}`, role: "img", "aria-label": "bytes alive, by step" },
    [0, 0.5, 1].map((share) => [svg("line", { class: "grid", x1: LEFT, x2: WIDE, y1: y(share * highest), y2: y(share * highest) }),
      svg("text", { x: LEFT - 6, y: y(share * highest) + 4, "text-anchor": "end" }, bytes(Math.round(share * highest)))]),
    areas, cursor, svg("text", { x: WIDE, y: TALL - 6, "text-anchor": "end" }, `step ${steps - 1}`),
    svg("text", { x: LEFT, y: TALL - 6 }, "step 0"));
  drawing.addEventListener("pointermove", (event) => {
    const box = drawing.getBoundingClientRect();
    const at = ((event.clientX - box.left) / box.width) * WIDE;
    const step = Math.floor(((at - LEFT) / (WIDE - LEFT)) * steps);
    if (step < 0 || step >= steps) return;
    cursor.setAttribute("x1", x(step + 0.5));
    cursor.setAttribute("x2", x(step + 0.5));
    tell(step);
  });
  return drawing;
}

// Which buffer lies where in the arena, and when: the largest, if there are very many.
function arenaMap(half, steps, arena, tell) {
  const shown = half.memory.buffers.filter((one) => one.offset !== null && one.bytes > 0)
    .sort((a, b) => b.bytes - a.bytes).slice(0, 1500);
  if (!shown.length) return null;
  const x = (n) => LEFT + ((WIDE - LEFT) * n) / Math.max(1, steps);
  const y = (place) => ((TALL - 20) * place) / Math.max(1, arena);
  return svg("svg", { viewBox: `0 0 ${WIDE} ${TALL}`, role: "img", "aria-label": "places in the arena" },
    svg("text", { x: LEFT - 6, y: 12, "text-anchor": "end" }, "place 0"),
    svg("text", { x: LEFT - 6, y: TALL - 22, "text-anchor": "end" }, bytes(arena)),
    shown.map((one) => svg("rect", { class: "block", x: x(one.first), y: y(one.offset),
      width: Math.max(0.8, x(one.last + 1) - x(one.first)), height: Math.max(0.8, y(one.bytes)),
      onclick: () => tell(one.first) },
    svg("title", {}, `${one.name}: ${bytes(one.bytes)} at ${one.offset}, steps ${one.first} to ${one.last}`))));
}

function stepDetail(graph, half, step) {
  const alive = half.memory.buffers.filter((one) => one.first <= step && step <= one.last).sort((a, b) => b.bytes - a.bytes);
  const kernels = half.kernels.filter((one) => one.step === step);
  return h("div", {}, h("h3", {}, `step ${step}: `, kernels.slice(0, 3).map((one) => [kernelLink(graph, one), " "])),
    h("pre", {}, half.steps[step] || ""),
    h("table", {}, alive.slice(0, 12).map((one) => h("tr", {}, h("td", { class: "mono" }, nodeLink(graph, half.name, one.name)),
      h("td", { class: "num" }, bytes(one.bytes)), h("td", {}, kindOf(one)),
      h("td", { class: "soft" }, `steps ${one.first} to ${one.last}`)))),
    alive.length > 12 ? h("p", { class: "soft" }, `and ${alive.length - 12} smaller ones`) : null);
}
