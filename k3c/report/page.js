"use strict";
const facts = JSON.parse(document.getElementById("facts").textContent);
const main = document.getElementById("main");
const nav = document.getElementById("nav");
const tip = document.getElementById("tip");
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const number = (n, digits = 0) => Number(n).toLocaleString("en-US", { maximumFractionDigits: digits });

function bytes(n) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (n >= 1024 && unit < units.length - 1) { n /= 1024; unit += 1; }
  return `${number(n, unit ? 2 : 0)} ${units[unit]}`;
}

function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [key, value] of Object.entries(attributes)) {
    if (key === "text") made.textContent = value; else made.setAttribute(key, value);
  }
  made.append(...children.flat());
  return made;
}

function section(id, title) {
  const made = element("section", { id });
  made.append(element("h2", { text: title }));
  main.append(made);
  nav.append(element("a", { href: `#${id}`, text: title }));
  return made;
}

// Columns: [title, value of a row, "n" for numbers].
function table(columns, rows) {
  const head = element("tr", {}, columns.map(([title, , kind]) => element("th", { class: kind || "", scope: "col", text: title })));
  const body = rows.map((row) => element("tr", {}, columns.map(([, value, kind]) => {
    const found = value(row);
    const cell = element("td", { class: kind || "" });
    if (found instanceof Node) cell.append(found); else cell.textContent = found;
    return cell;
  })));
  return element("div", { class: "wide" }, element("table", {}, element("thead", {}, head), element("tbody", {}, body)));
}

function picker(name, values, changed) {
  const chosen = element("select", { "aria-label": name }, values.map((v) => element("option", { value: v, text: v })));
  chosen.addEventListener("change", () => changed(chosen.value));
  return element("label", {}, `${name} `, chosen);
}

function show(event, text) {
  tip.textContent = text;
  tip.hidden = !text;
  tip.style.left = `${Math.min(event.clientX + 12, innerWidth - 360)}px`;
  tip.style.top = `${event.clientY + 14}px`;
}

function key(entries) {
  return element("p", { class: "key soft" }, entries.map(([color, text]) =>
    element("span", {}, element("i", { style: `background:${color}` }), text)));
}

function drawFacts() {
  const { manifest } = facts;
  const made = section("facts-of", "Artifact");
  const model = manifest.model;
  document.getElementById("title").textContent = `k3c report: ${model.name} for ${manifest.target.name}`;
  document.title = document.getElementById("title").textContent;
  const mesh = Object.entries(manifest.mesh).map(([axis, size]) => `${axis}=${size}`).join(", ") || "one rank";
  const rows = [
    ["model", `${model.name}, ${model.num_layers} layers, ${number(model.vocab_size)} tokens, ${model.compute}${model.has_weights ? "" : ", no weights in the artifact"}`],
    ["target", `${manifest.target.name} (${manifest.target.arch}${manifest.target.min_driver ? `, driver ${manifest.target.min_driver} or newer` : ""})`],
    ["mesh", mesh],
    ["state", `${manifest.cache.max_requests} requests of ${number(manifest.cache.max_context_tokens)} tokens; ${number(manifest.cache.pages)} pages of ${manifest.cache.page_tokens} tokens, ${manifest.cache.slots} slots`],
    ["format", `${manifest.format}, k3c ${manifest.k3c_version}`],
    ["made with", Object.entries(manifest.toolchain).map(([n, v]) => `${n} ${v}`).join(", ")],
    ["files", `${Object.keys(manifest.members).length} members, ${bytes(Object.values(manifest.members).reduce((a, b) => a + b, 0))}`],
  ];
  made.append(table([["", (r) => r[0]], ["", (r) => r[1]]], rows));
}

function drawMemory() {
  const made = section("memory", "Memory of a rank");
  const sizes = facts.manifest.space_bytes;
  const spaces = Object.keys(facts.memory.spaces).filter((s) => sizes[s]);
  const total = spaces.reduce((sum, s) => sum + sizes[s], 0);
  const buckets = facts.buckets.map((b) => b.name);
  made.append(table([
    ["space", (s) => s], ["bytes", (s) => bytes(sizes[s]), "n"],
    ["share", (s) => `${number(100 * sizes[s] / total, 1)} %`, "n"],
    ["", (s) => element("span", { class: "bar", style: `width:${240 * sizes[s] / total}px` })],
  ], spaces));
  let space = spaces[0], bucket = buckets[0];
  const canvas = element("canvas", { height: 70, tabindex: 0, role: "img" });
  const list = element("div");
  const rowsOf = () => facts.memory.spaces[space].all || facts.memory.spaces[space][bucket];
  function redraw() {
    const width = canvas.width = Math.max(600, Math.floor(canvas.clientWidth * devicePixelRatio));
    const paint = canvas.getContext("2d");
    const size = sizes[space] || 1;
    paint.clearRect(0, 0, width, 70);
    const colors = { used: css("--a"), padding: css("--c"), gap: css("--line") };
    rowsOf().forEach(([offset, nbytes, kind], i) => {
      paint.globalAlpha = kind === "used" ? (i % 2 ? 1 : .72) : 1;
      paint.fillStyle = colors[kind];
      paint.fillRect(width * offset / size, 0, Math.max(width * nbytes / size, .5), 70);
    });
    canvas.setAttribute("aria-label", `${rowsOf().length} segments of ${space}`);
    const largest = [...rowsOf()].sort((a, b) => b[1] - a[1]).slice(0, 40);
    list.replaceChildren(element("p", { class: "soft", text: `${number(rowsOf().length)} segments; the largest:` }), table([
      ["first byte", (r) => number(r[0]), "n"], ["bytes", (r) => number(r[1]), "n"], ["", (r) => bytes(r[1]), "n"],
      ["kind", (r) => r[2]], ["owner", (r) => r[3].join(", ") + (r[4] > r[3].length ? ` and ${r[4] - r[3].length} more` : "")],
    ], largest));
  }
  canvas.addEventListener("mousemove", (event) => {
    const place = (event.offsetX / canvas.clientWidth) * (sizes[space] || 1);
    const found = rowsOf().find(([offset, nbytes]) => offset <= place && place < offset + nbytes);
    show(event, found ? `${found[3].join(", ") || found[2]}: ${bytes(found[1])} at ${number(found[0])}` : "");
  });
  canvas.addEventListener("mouseleave", (event) => show(event, ""));
  made.append(element("p", {}, picker("space", spaces, (v) => { space = v; redraw(); }), picker("bucket", buckets, (v) => { bucket = v; redraw(); })),
    canvas, key([[css("--a"), "used"], [css("--c"), "padding"], [css("--line"), "nothing"]]), list);
  redraw();
  addEventListener("resize", redraw);
}

function drawBuckets() {
  const made = section("steps", "Steps by kind of node");
  made.append(table([
    ["bucket", (b) => b.name], ["launches", (b) => number(b.estimates.launches), "n"],
    ["read", (b) => bytes(b.estimates.read_bytes), "n"], ["written", (b) => bytes(b.estimates.write_bytes), "n"],
    ["GFLOP", (b) => number(b.estimates.flops / 1e9, 1), "n"], ["floor µs", (b) => number(b.estimates.floor_us), "n"],
    ["scratch", (b) => bytes(b.space_bytes.arena), "n"],
    ["over the lower bound", (b) => b.arena_lower_bound_bytes ? `${number(100 * (b.space_bytes.arena / b.arena_lower_bound_bytes - 1), 2)} %` : "-", "n"],
  ], facts.buckets));
  const body = element("div");
  function draw(name) {
    const bucket = facts.buckets.find((b) => b.name === name);
    const most = Math.max(...bucket.kinds.map((k) => k.floor_us), 1e-9);
    body.replaceChildren(table([
      ["node", (k) => k.label], ["in", (k) => k.graphs.join(", ")], ["commands", (k) => number(k.launches), "n"],
      ["floor µs", (k) => number(k.floor_us, 1), "n"], ["each", (k) => number(k.floor_us / k.launches, 2), "n"],
      ["message", (k) => k.message_bytes ? bytes(k.message_bytes) : "", "n"],
      ["", (k) => element("span", { class: `bar ${k.kind}`, style: `width:${220 * k.floor_us / most}px` })],
    ], bucket.kinds));
  }
  made.append(element("p", {}, picker("bucket", facts.buckets.map((b) => b.name), draw)), body,
    element("p", { class: "soft", text: "Floor: bytes and operations at the device's best. A message's bytes are what a rank sends; its time depends on the topology." }));
  draw(facts.buckets[0].name);
}

function drawPasses() {
  const made = section("passes", "Passes");
  const sum = (matches) => Object.values(matches).reduce((a, b) => a + b, 0);
  made.append(table([
    ["pass", (p) => p.name], ["nodes before", (p) => p.nodes_before, "n"], ["after", (p) => p.nodes_after, "n"],
    ["matches", (p) => sum(p.matches), "n"], ["expected", (p) => p.expected ?? "", "n"],
    ["rules", (p) => Object.entries(p.matches).map(([n, c]) => `${n} ${c}`).join(", ")],
    ["refused", (p) => p.refusals.map((r) => `@${r.graph} %${r.value}: ${r.reason}`).join("; ")],
  ], facts.passes));
}

function drawIr() {
  const made = section("ir", "The module after each pass");
  facts.ir.forEach((step) => {
    const details = element("details", {}, element("summary", { text: step.changes.length ? `${step.name}: ${step.changes.filter((l) => l[0] !== " " && l[0] !== "@").length} lines changed` : step.name }));
    details.addEventListener("toggle", () => {
      if (!details.open || details.childElementCount > 1) return;
      if (step.changes.length) {
        const lines = step.changes.map((line) => element("span", { class: { "+": "add", "-": "del", "@": "hunk" }[line[0]] || "", text: `${line}\n` }));
        details.append(element("pre", { tabindex: 0 }, lines));
      }
      step.text.split(/\n(?=graph @|schedule)/).forEach((part) => details.append(
        element("details", {}, element("summary", { class: "code", text: part.split("\n")[0].slice(0, 140) }), element("pre", { tabindex: 0, text: part }))));
    });
    made.append(details);
  });
}

function drawKernels() {
  const made = section("kernels", `Kernels (${facts.kernels.length})`);
  made.append(table([
    ["template", (k) => k.template], ["arch", (k) => k.arch], ["driver", (k) => k.min_driver],
    ["threads", (k) => k.threads, "n"], ["shared", (k) => bytes(k.shared_bytes), "n"],
    ["starts early", (k) => k.early_start ? "yes" : ""], ["constants", (k) => element("span", { class: "code", text: k.constants })],
    ["key", (k) => element("span", { class: "code", text: k.key.slice(0, 12) })],
  ], facts.kernels));
}

function drawTopology() {
  const t = facts.topology;
  if (!t) return;
  const made = section("topology", `Topology ${t.name}`);
  made.append(element("pre", { text: JSON.stringify(t, null, 1) }));
}

function drawPlacement() {
  const p = facts.placement;
  if (!p) return;
  const made = section("placement", "Where the experts are");
  made.append(element("p", { text: `${p.experts} experts on ${p.ranks} ranks, ${p.slots_per_rank} a rank: ${p.ranks * p.slots_per_rank - p.experts} replicas in each layer. The busiest rank of any layer gets ${number(p.worst, 3)} times the mean.` }));
  const side = Math.max(4, Math.min(14, Math.floor(1100 / p.ranks)));
  const canvas = element("canvas", { width: side * p.ranks, height: side * p.layers.length, style: `width:${side * p.ranks}px`, role: "img", "aria-label": "rows of each rank, by layer, over the mean" });
  const paint = canvas.getContext("2d");
  p.shares.forEach((row, y) => row.forEach((share, x) => {
    const heat = Math.max(0, Math.min(1, share / 2));
    paint.fillStyle = `hsl(${220 - 220 * heat} 75% ${62 - 18 * Math.abs(heat - .5)}%)`;
    paint.fillRect(x * side, y * side, side, side);
  }));
  canvas.addEventListener("mousemove", (event) => {
    const x = Math.floor(event.offsetX / side), y = Math.floor(event.offsetY / side);
    show(event, p.shares[y]?.[x] === undefined ? "" : `layer ${p.layers[y]}, rank ${x}: ${p.shares[y][x]} times the mean`);
  });
  canvas.addEventListener("mouseleave", (event) => show(event, ""));
  made.append(canvas, key([["hsl(220 75% 53%)", "no rows"], ["hsl(110 75% 62%)", "the mean"], ["hsl(0 75% 53%)", "twice the mean"]]));
}

drawFacts();
drawMemory();
drawBuckets();
drawTopology();
drawPlacement();
drawPasses();
drawIr();
drawKernels();
