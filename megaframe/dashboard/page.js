"use strict";
// Draws the data of the page. Names of runs, keys and values are always inserted as text: into the
// document by textContent, and into plotly, which interprets some tags, escaped.
const AXES = { step: "step", tokens: "tokens", hours: "hours of training" };
const COLOURS = ["#2f81f7", "#e36209", "#2da44e", "#a475f9", "#d1242f", "#bf8700", "#1b7c83", "#bf3989"];
const DASHES = ["solid", "dot", "dash", "dashdot", "longdash", "longdashdot"];
const state = { x: "step", hidden: new Set(), band: true, data: null, chosen: {} };
const drawn = new Map();

const esc = (text) => String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
const make = (tag, text, attributes = {}) => {
  const node = document.createElement(tag);
  if (text !== undefined) node.textContent = text;
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  return node;
};
const theme = {}; // Read once per redraw, because each query makes the browser compute the layout.
const css = (name) => theme[name];
const readTheme = () => ["--line", "--ink"].forEach((name) => {
  theme[name] = getComputedStyle(document.documentElement).getPropertyValue(name).trim();
});
const shown = () => state.data.runs.map((run, number) => ({ run, number }))
  .filter(({ number }) => !state.hidden.has(number));
const several = () => state.data.runs.length > 1;
const scaled = (values, scale) => scale === 1 ? values : values.map((v) => v === null ? null : v * scale);

function keysOf(panel, run) {
  return Object.keys(run.series).filter((name) =>
    panel.keys.some((key) => key.endsWith("/") ? name.startsWith(key) : name === key));
}

function layout(panel, more = {}) {
  const axis = { gridcolor: css("--line"), zerolinecolor: css("--line") };
  return {
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    font: { color: css("--ink"), size: 12 }, margin: { l: 56, r: 12, t: 8, b: 64 },
    legend: { orientation: "h", y: -0.26, yanchor: "top", font: { size: 11 } }, hovermode: "closest",
    uirevision: panel.id + state.x, ...more,
    xaxis: { ...axis, ...(more.xaxis || {}) }, yaxis: { ...axis, ...(more.yaxis || {}) },
  };
}

function lines(panel) {
  // Parts that sum to the step are stacked if the page has only one run.
  const traces = [], events = [];
  for (const { run, number } of shown()) {
    const x = run.x[state.x], keys = keysOf(panel, run), single = keys.length === 1;
    keys.forEach((key, place) => {
      const series = run.series[key];
      const colour = COLOURS[(several() ? number : place) % COLOURS.length];
      const short = key.split("/").slice(1).join("/") || key;
      const name = esc(several() ? (single ? run.name : run.name + " " + short) : short);
      const y = scaled(series.y, panel.scale), points = y.filter((v) => v !== null).length;
      if (state.band && series.low && !panel.keys[0].endsWith("/")) {
        const edge = { x, mode: "lines", line: { width: 0 }, hoverinfo: "skip", showlegend: false, type: "scatter" };
        traces.push({ ...edge, y: scaled(series.low, panel.scale) });
        traces.push({ ...edge, y: scaled(series.high, panel.scale), fill: "tonexty", fillcolor: colour + "2b" });
      }
      traces.push({
        type: "scatter", x, y, name, connectgaps: true,
        mode: points < 60 ? "lines+markers" : "lines", marker: { size: 4 },
        ...(panel.id === "time" && !several() ? { stackgroup: "parts" } : {}),
        line: { color: colour, width: 1.6, dash: several() ? DASHES[place % DASHES.length] : "solid" },
      });
    });
    events.push(...run.events);
  }
  return [[...traces, ...marks(events)], layout(panel, {
    xaxis: along(), yaxis: { type: panel.log ? "log" : "linear" }, yaxis2: MARKED,
  })];
}

// The y axis of marks: from the bottom of a panel to its top, whatever else it shows.
const MARKED = { overlaying: "y", range: [0, 1], visible: false, fixedrange: true };
const along = () => ({ title: { text: AXES[state.x], standoff: 4 } });

// One trace for all events of a kind, because hundreds of shapes would take longer than the lines.
const EVENTS = { restart: "#a475f9", skip: "#d1242f", checkpoint: "#8a94a3" };
const marks = (events) => [...new Set(events.map((one) => one.kind))].map((kind) => {
  const at = events.filter((one) => one.kind === kind), top = kind === "checkpoint" ? 0.05 : 1;
  return {
    type: "scatter", mode: "lines", name: kind, yaxis: "y2", hoverinfo: "skip", connectgaps: false,
    x: at.flatMap((one) => [one[state.x], one[state.x], null]), y: at.flatMap(() => [0, top, null]),
    line: { color: EVENTS[kind], width: 1, dash: "dot" },
  };
});

function waterfall(panel) {
  const falls = having(panel).map(({ run, number }) => [run.name, run.waterfall, several() ? COLOURS[number % COLOURS.length] : null]);
  if (state.data.prediction.length) falls.push([...state.data.prediction, "#8a94a3"]);
  // All waterfalls have the same order of causes: by the largest share that any of them has.
  const most = new Map();
  for (const [, losses] of falls) for (const [cause, label, share] of losses)
    if (cause !== "mfu" && Math.abs(share) >= 5e-5) most.set(label, Math.max(share, most.get(label) ?? share));
  const causes = [...most.keys()].sort((one, other) => most.get(other) - most.get(one));
  const known = falls.some(([, losses]) => losses.some(([cause]) => cause === "mfu"));
  const traces = falls.map(([name, losses, colour]) => {
    const lost = new Map(losses.map(([, label, share]) => [label, share]));
    const parts = causes.map((label) => lost.get(label) ?? 0), rest = 1 - parts.reduce((sum, one) => sum + one, 0);
    const y = [1, ...parts.map((one) => -one), rest].map((v) => 100 * v);
    return {
      type: "waterfall", name: esc(name), x: ["all time at peak", ...causes, known ? "MFU" : "nothing left"].map(esc), y,
      measure: ["absolute", ...parts.map(() => "relative"), "total"],
      text: y.map((v) => v ? Math.abs(v).toFixed(Math.abs(v) < 9.95 ? 1 : 0) : ""), textposition: "outside",
      connector: { line: { color: css("--line") } }, cliponaxis: false,
      decreasing: { marker: { color: colour || "#e36209" } }, increasing: { marker: { color: "#2da44e" } },
      totals: { marker: { color: colour || "#2f81f7" } },
    };
  });
  return [traces, layout(panel, {
    showlegend: traces.length > 1, waterfallgroupgap: 0.05, margin: { l: 56, r: 12, t: 22, b: 36 },
    yaxis: { title: { text: panel.unit }, range: [0, 112] }, xaxis: { tickangle: 30, automargin: true },
  })];
}

// The runs that have numbers for a panel.
const having = (panel) => shown().filter(({ run }) => panel.kind === "lines" ? keysOf(panel, run).length
  : panel.kind === "waterfall" ? run.waterfall.length : run[panel.kind][panel.id]);

function chosen(panel) {
  const runs = having(panel);
  return runs.find(({ number }) => number === state.chosen[panel.id]) || runs[0];
}

function heat(panel) {
  const { run } = chosen(panel), grid = run.heat[panel.id], apart = panel.id === "stragglers";
  const top = Math.max(1, ...grid.z.flat().filter((v) => v !== null));
  const across = grid.x ? along() : { title: { text: `${grid.across} (at step ${grid.at})` } };
  return [[{
    type: "heatmap", z: grid.z, x: grid.x ? grid.x[state.x] : grid.columns, y: grid.rows.map((row) => grid.what + " " + row),
    colorscale: apart ? [[0, "#2f81f7"], [0.5, "#f4f4f4"], [1, "#d1242f"]] : "Viridis",
    ...(apart ? { zmin: -top, zmax: top } : { zmin: 0 }), colorbar: { thickness: 10, len: 0.9 },
    hovertemplate: "%{y}, " + across.title.text + " %{x}: %{z}<extra></extra>",
  }, ...(grid.x ? marks(run.events) : [])], layout(panel, {
    showlegend: true, xaxis: across, yaxis: { autorange: "reversed", nticks: 10, automargin: true }, yaxis2: MARKED,
  })];
}

function bars(panel) {
  const group = chosen(panel).run.bars[panel.id];
  const traces = Object.entries(group.kinds).map(([kind, y], place) => ({
    type: "bar", name: esc(kind), x: group.places.map(esc), y, marker: { color: COLOURS[place % COLOURS.length] },
  }));
  return [traces, layout(panel, { barmode: "stack", showlegend: traces.length > 1, xaxis: { type: "category", nticks: 12 } })];
}

const KINDS = { lines, waterfall, heat, bars };

// The numbers of a figure as a table, for those who cannot see it or want to copy them.
function tableOf(traces) {
  const rows = traces.filter((t) => t.hoverinfo !== "skip").flatMap((t) => {
    if (t.type === "heatmap") return t.y.slice(0, 50).map((name, i) => [name, Math.max(...t.z[i]).toPrecision(3)]);
    if (t.type !== "scatter") return t.x.map((name, i) => [(t.name ? t.name + ": " : "") + name, Number(t.y[i]).toPrecision(4)]);
    const there = t.y.map((v, i) => [i, v]).filter(([, v]) => v !== null), [i, v] = there[there.length - 1] || [];
    return v === undefined ? [] : [[`${t.name || ""} at ${AXES[state.x]} ${t.x[i]}`, v.toPrecision(5)]];
  });
  const plain = (text) => String(text).replace(/&lt;/g, "<").replace(/&gt;/g, ">").replace(/&amp;/g, "&");
  const table = make("table"), body = table.appendChild(make("tbody"));
  for (const [name, value] of rows) {
    const row = body.appendChild(make("tr"));
    row.append(make("th", plain(name), { scope: "row" }), make("td", value));
  }
  return table;
}

function draw(id) {
  const entry = drawn.get(id), { panel, plot, details } = entry;
  entry.stale = false;
  if (entry.section.hidden) return;
  const [traces, how] = KINDS[panel.kind](panel);
  Plotly.react(plot, traces, how, { responsive: true, displaylogo: false, displayModeBar: false, scrollZoom: false });
  plot.setAttribute("aria-label", `${panel.title} (${traces.length} traces); arrows move, plus and minus zoom, 0 shows all`);
  const fill = () => { if (details.open) entry.scroll.replaceChildren(tableOf(traces)); };
  details.ontoggle = fill;
  fill();
  entry.section.dataset.state = "drawn";
}

// Prepares a panel for drawing: hides it if no run has numbers, and lists the runs to choose from.
function outline(entry) {
  const { panel, select } = entry, runs = having(panel), empty = !runs.length;
  entry.stale = true;
  entry.section.hidden = empty;
  if (empty) entry.section.dataset.state = "empty";
  if (!["heat", "bars"].includes(panel.kind)) return;
  select.hidden = runs.length < 2;
  select.replaceChildren(...runs.map(({ run, number }) => make("option", run.name, { value: number })));
  if (!empty) select.value = chosen(panel).number;
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
  const select = top.appendChild(make("select", undefined, { "aria-label": "run shown in " + panel.title }));
  select.hidden = true;
  select.onchange = () => { state.chosen[panel.id] = Number(select.value); draw(panel.id); };
  const plot = node.appendChild(make("div", undefined, { class: "plot", tabindex: "0", role: "img" }));
  plot.onkeydown = (event) => keys(event, plot);
  if (panel.help) node.appendChild(make("p", panel.help, { class: "help" }));
  const details = node.appendChild(make("details"));
  details.append(make("summary", "Numbers"));
  const scroll = details.appendChild(make("div", undefined, { class: "scroll", tabindex: "0" }));
  drawn.set(panel.id, { panel, section: node, plot, details, scroll, select });
  return node;
}

function table([id, title]) {
  const wide = id !== "summary" || several();
  const node = make("section", undefined, { id, "data-state": "drawn", ...(wide ? { class: "wide" } : {}) });
  const details = node.appendChild(make("details"));
  details.appendChild(make("summary")).appendChild(make("h2", title));
  details.appendChild(make("div", undefined, { class: "scroll", tabindex: "0" }));
  details.open = id === "summary" || id === "differences";
  return node;
}

function fillTable([id, , heads, rows]) {
  const body = make("tbody"), grid = make("table");
  const first = grid.appendChild(make("thead")).appendChild(make("tr"));
  heads.forEach((text) => first.appendChild(make("th", text, { scope: "col" })));
  rows.forEach((row) => {
    const line = body.appendChild(make("tr"));
    row.forEach((cell, place) => line.appendChild(make(place ? "td" : "th", cell, place ? {} : { scope: "row" })));
  });
  grid.appendChild(body);
  document.querySelector(`#${id} .scroll`).replaceChildren(grid);
}

// Joins the rows of all runs by their first cell.
function joined(field) {
  const keys = [...new Set(state.data.runs.flatMap((run) => run[field].map((row) => row[0])))];
  const tables = state.data.runs.map((run) => new Map(run[field].map((row) => [row[0], row[1]])));
  return keys.map((key) => [key, ...tables.map((one) => one.get(key) ?? "")]);
}

// Id, title, column heads and rows of each table.
function tables() {
  const { runs, differences } = state.data, names = runs.map((run) => run.name);
  const events = runs.flatMap((run) => run.events.map((one) => [run.name, String(one.step), one.kind, one.text]));
  return [
    ["summary", "Summary", ["", ...names], joined("summary")],
    ...(several() ? [["differences", "Differences of the configs", ["key", ...names], differences]] : []),
    ["events", "Events", ["run", "step", "kind", "what"], events],
    ["config", "Config", ["key", ...names], joined("config")],
    ["environment", "Environment", ["", ...names], joined("environment")],
  ];
}

function frame() {
  const { runs, panels } = state.data, names = runs.map((run) => run.name);
  document.title = names.join(", ") + " - megaframe";
  document.querySelector("h1").textContent = names.join(", ");
  const [summary, ...rest] = tables();
  document.querySelector("main").replaceChildren(table(summary), ...panels.map(section), ...rest.map(table));
  const picker = document.querySelector("#runs");
  picker.hidden = !several();
  picker.replaceChildren(make("legend", "runs"), ...runs.map((run, number) => {
    const box = make("input", undefined, { type: "checkbox" });
    box.checked = !state.hidden.has(number);
    box.onchange = () => { state.hidden[box.checked ? "delete" : "add"](number); drawAll(); };
    const node = make("label");
    node.append(box, make("span", run.name));
    node.style.color = COLOURS[number % COLOURS.length];
    return node;
  }));
}

function notes() {
  const { runs } = state.data;
  document.querySelector(".notes").replaceChildren(...runs.flatMap((run) =>
    run.notes.map((note) => make("li", several() ? run.name + ": " + note : note))));
}

// Panels in view are drawn at once, those up to a screen away soon, the rest when scrolled to.
const near = new IntersectionObserver((found) => found.forEach(({ target, isIntersecting }) => {
  if (isIntersecting) setTimeout(() => { if (drawn.get(target.id).stale) draw(target.id); });
}), { rootMargin: "100%" });

function drawAll() {
  if (!window.Plotly) return; // Tables and notes are shown before plotly is loaded.
  readTheme();
  near.disconnect();
  drawn.forEach(outline);
  const none = [...drawn.values()].filter(({ section }) => section.hidden).map(({ panel }) => panel.title);
  document.querySelector("footer").textContent = none.length ? "These runs have no numbers of: " + none.join(", ") + "." : "";
  const seen = [...drawn.values()].filter(({ section }) => {
    const { top, bottom } = section.getBoundingClientRect();
    return bottom > 0 && top < innerHeight;
  });
  seen.forEach(({ panel }) => draw(panel.id)); // Not in the loop above, where each query would compute the layout again.
  document.documentElement.dataset.first = "drawn";
  drawn.forEach(({ section }) => near.observe(section));
}

function refresh(data) {
  const first = !state.data;
  state.data = data;
  if (first) frame();
  tables().forEach(fillTable);
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
  document.querySelectorAll("input[name=x]").forEach((one) => one.onchange = () => { state.x = one.value; drawAll(); });
  document.querySelector("#band").onchange = (event) => { state.band = event.target.checked; drawAll(); };
  document.querySelector("#theme").onclick = () => {
    const root = document.documentElement;
    const dark = (root.dataset.theme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
    root.dataset.theme = dark ? "light" : "dark";
    drawAll();
  };
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
  addEventListener("beforeprint", () => drawn.forEach(({ stale }, id) => stale && draw(id)));
  refresh(JSON.parse(document.getElementById("data").textContent));
  const token = document.documentElement.dataset.token;
  if (token) follow(token);
}
start();
