"use strict";
// The page: its controls, its panels and its state. Names of runs, keys and values are always inserted
// as text: into the document by textContent, and into plotly escaped.
const AXES = { step: "step", tokens: "tokens", hours: "hours of training" };
const state = { x: "step", smoothing: 0, band: true, hidden: new Set(), chosen: {}, search: "", sampled: null, logged: null, data: null };
const drawn = new Map();

const esc = (text) => String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
const unesc = (text) => String(text).replace(/&lt;/g, "<").replace(/&gt;/g, ">").replace(/&amp;/g, "&");
const make = (tag, text, attributes = {}) => {
  const node = document.createElement(tag);
  if (text !== undefined) node.textContent = text;
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  return node;
};
const theme = {}; // Read once per redraw, because each query makes the browser compute the layout.
const css = (name) => theme[name];
const readTheme = () => ["--line", "--ink", "--soft", "--bad"].forEach((name) => {
  theme[name] = getComputedStyle(document.documentElement).getPropertyValue(name).trim();
});
const shown = () => state.data.runs.map((run) => ({ run })).filter(({ run }) => !state.hidden.has(run.name));
const several = () => state.data.runs.length > 1;

function draw(id) {
  const entry = drawn.get(id), { panel, plot, details } = entry;
  entry.stale = false;
  if (entry.section.hidden) return;
  const [traces, how] = KINDS[panel.kind](panel), off = (name) => entry.off.has(name);
  if (how.height) plot.style.height = how.height + "px";
  traces.forEach((trace) => { if (off(trace.name)) trace.visible = false; });
  Plotly.react(plot, traces, how, { responsive: true, displaylogo: false, displayModeBar: false, scrollZoom: false });
  plot.setAttribute("aria-label", `${panel.title} (${traces.length} traces); arrows move, plus and minus zoom, 0 shows all`);
  entry.legend.replaceChildren(...legend(entry, traces));
  const fill = () => { if (details.open) entry.scroll.replaceChildren(grid([], numbersOf(traces))); };
  details.ontoggle = fill;
  fill();
  entry.section.dataset.state = "drawn";
}

// A legend below the figure, which takes nothing of its height; a click shows or hides a series.
function legend({ panel, off }, traces) {
  const named = traces.filter((trace) => trace.name && (trace.hoverinfo !== "skip" || trace.mark));
  if (named.length < 2 && !several()) return [];
  return named.map((trace) => {
    const node = make("button", undefined, { type: "button", "aria-pressed": String(!off.has(trace.name)) });
    const { color, dash } = trace.line || trace.marker || {};
    node.append(swatch(color || trace.swatch, trace.line && dash), make("span", unesc(trace.name)));
    node.onclick = () => { off[off.has(trace.name) ? "delete" : "add"](trace.name); draw(panel.id); };
    return node;
  });
}

// Prepares a panel for drawing: hides it if no run has numbers, and lists what can be chosen in it.
function outline(entry) {
  const { panel, select } = entry, runs = having(panel), all = choices(panel, runs);
  entry.stale = true;
  entry.section.hidden = !runs.length;
  if (!runs.length) entry.section.dataset.state = "empty";
  select.hidden = all.length < 2;
  select.replaceChildren(...all.map((name) => make("option", panel.kind === "lines" ? short(name) : name, { value: name })));
  if (all.length) select.value = choice(panel, runs);
}

// The keyboard: arrows move along x, plus and minus zoom, 0 shows all.
function keys(event, plot) {
  const axis = plot._fullLayout && plot._fullLayout.xaxis;
  if (!axis || event.ctrlKey || event.metaKey || event.altKey) return;
  const [low, high] = axis.range, width = high - low;
  const to = { ArrowLeft: [low - width / 4, high - width / 4], ArrowRight: [low + width / 4, high + width / 4],
    "+": [low + width / 4, high - width / 4], "=": [low + width / 4, high - width / 4],
    "-": [low - width / 2, high + width / 2] }[event.key];
  if (to) Plotly.relayout(plot, { "xaxis.range": to });
  else if (event.key === "0") Plotly.relayout(plot, { "xaxis.autorange": true, "yaxis.autorange": plot._fullLayout.yaxis.autorange === "reversed" ? "reversed" : true });
  else return;
  event.preventDefault();
}

function section(panel) {
  const wide = panel.id === "waterfall" || panel.id === "time";
  const node = make("section", undefined, { id: panel.id, "aria-labelledby": "h-" + panel.id, ...(wide ? { class: "wide" } : {}) });
  const top = node.appendChild(make("div", undefined, { class: "top" }));
  top.append(make("h2", panel.title, { id: "h-" + panel.id }), make("span", panel.unit, { class: "unit" }));
  const select = top.appendChild(make("select", undefined, { "aria-label": "shown in " + panel.title }));
  select.hidden = true;
  select.onchange = () => { state.chosen[panel.id] = select.value; drawn.get(panel.id).off.clear(); draw(panel.id); };
  const plot = node.appendChild(make("div", undefined, { class: "plot", tabindex: "0", role: "img" }));
  plot.onkeydown = (event) => keys(event, plot);
  const names = node.appendChild(make("div", undefined, { class: "legend" }));
  if (panel.help) node.appendChild(make("p", panel.help, { class: "help" }));
  const details = node.appendChild(make("details"));
  details.append(make("summary", "Numbers"));
  const scroll = details.appendChild(make("div", undefined, { class: "scroll", tabindex: "0" }));
  drawn.set(panel.id, { panel, section: node, plot, legend: names, details, scroll, select, off: new Set() });
  return node;
}

function frame() {
  const { runs, panels } = state.data, names = runs.map((run) => run.name);
  const title = names.length > 3 ? `${names.length} runs: ${names.slice(0, 3).join(", ")} ...` : names.join(", ");
  document.title = title + " - megaframe";
  document.querySelector("h1").textContent = title;
  drawn.clear();
  const tables = TABLES.map(([id, label, open]) => tableSection(id, label, open));
  document.querySelector("main").replaceChildren(...tables.slice(0, 2), ...panels.map(section), ...tables.slice(2));
  pick();
}

// The choice of runs: a box for each, and with many also a filter of their names.
function pick() {
  const { runs } = state.data, picker = document.querySelector("#runs"), filter = document.querySelector("#filter");
  picker.hidden = !several();
  filter.hidden = runs.length < 7;
  const list = picker.querySelector(".list");
  const change = () => { fillTables(); drawAll(); };
  list.replaceChildren(...runs.map((run) => {
    const box = make("input", undefined, { type: "checkbox" }), node = make("label", undefined, { title: run.folder });
    box.checked = !state.hidden.has(run.name);
    box.onchange = () => { state.hidden[box.checked ? "delete" : "add"](run.name); change(); };
    node.append(box, swatch(colourOf(run.colour), dashOf(run.colour)), make("span", run.name));
    return node;
  }));
  const listed = () => [...list.children].filter((node) => !node.hidden).map((node) => node.lastChild.textContent);
  const search = filter.querySelector("input"), narrow = () => [...list.children].forEach((node) => {
    node.hidden = !node.lastChild.textContent.toLowerCase().includes(search.value.toLowerCase());
  });
  search.oninput = narrow;
  narrow();
  const set = (how) => () => { listed().forEach((name) => state.hidden[how](name)); pick(); change(); };
  [filter.querySelector(".all").onclick, filter.querySelector(".none").onclick] = [set("delete"), set("add")];
}

function notes() {
  const { runs } = state.data, all = [...state.data.notes];
  runs.forEach((run) => all.push(...run.notes.map((note) => several() ? run.name + ": " + note : note)));
  const rest = all.splice(20).length;
  if (rest) all.push(`and ${rest} more notes`);
  document.querySelector(".notes").replaceChildren(...all.map((note) => make("li", note)));
}

const fillTables = () => TABLES.forEach(([id]) => fillTable(id));

// Panels in view are drawn at once, those up to a screen away soon, the rest when scrolled to.
const near = new IntersectionObserver((found) => found.forEach(({ target, isIntersecting }) => {
  if (isIntersecting) setTimeout(() => { if (drawn.get(target.id)?.stale) draw(target.id); });
}), { rootMargin: "100%" });

function drawAll() {
  if (!window.Plotly) return; // Tables and notes are shown before plotly is loaded.
  readTheme();
  near.disconnect();
  drawn.forEach(outline);
  const none = [...drawn.values()].filter(({ section, panel }) => section.hidden && panel.kind !== "outcome").map(({ panel }) => panel.title);
  document.querySelector("footer").textContent = !shown().length ? "No run is chosen."
    : none.length ? "These runs have no numbers of: " + none.join(", ") + "." : "";
  const seen = [...drawn.values()].filter(({ section }) => {
    const { top, bottom } = section.getBoundingClientRect();
    return bottom > 0 && top < innerHeight;
  });
  seen.forEach(({ panel }) => draw(panel.id)); // Not in the loop above, where each query would compute the layout again.
  document.documentElement.dataset.first = "drawn";
  drawn.forEach(({ section }) => near.observe(section));
}

function refresh(data) {
  const names = (of) => JSON.stringify(of && of.runs.map((run) => run.name)), same = names(state.data) === names(data);
  state.data = data;
  if (same) drawn.forEach((entry, id) => { entry.panel = data.panels.find((panel) => panel.id === id); });
  else frame();
  fillTables();
  notes();
  drawAll();
}

// A served page polls for new data; a saved page never does.
async function follow(token) {
  const status = document.querySelector("#live");
  let version = "";
  for (;;) {
    await new Promise((done) => setTimeout(done, document.hidden ? 10000 : 2000));
    try {
      const answer = await fetch("data?" + new URLSearchParams({ token, version }));
      if (!answer.ok) throw new Error(answer.status);
      const found = await answer.json();
      status.textContent = "live";
      if (found.version !== version && found.runs) refresh(found);
      version = found.version;
    } catch (error) { status.textContent = "the server does not answer"; }
  }
}

function start() {
  const redraw = () => { pick(); fillTables(); drawAll(); };
  document.querySelectorAll("input[name=x]").forEach((one) => one.onchange = () => { state.x = one.value; drawAll(); });
  const slider = document.querySelector("#smoothing"), output = document.querySelector("#smoothing ~ output");
  slider.oninput = () => { state.smoothing = Number(slider.value); output.textContent = state.smoothing.toFixed(2); drawAll(); };
  document.querySelector("#band").onchange = (event) => { state.band = event.target.checked; drawAll(); };
  document.querySelector("#theme").onclick = () => { document.documentElement.dataset.theme = dark() ? "light" : "dark"; redraw(); };
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  addEventListener("beforeprint", () => drawn.forEach(({ stale }, id) => stale && draw(id)));
  refresh(JSON.parse(document.getElementById("data").textContent));
  const token = document.documentElement.dataset.token;
  if (token) follow(token);
}
start();
