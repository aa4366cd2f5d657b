// The charts of the panels, as traces and layouts of plotly, which interprets some tags: names and
// values are escaped for it.
const DASHES = ["solid", "dash", "dot", "dashdot", "longdash", "longdashdot"];
const SIZE = 12; // colours before they repeat, mixed with grey

const dark = () => (document.documentElement.dataset.theme
  || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
const colourOf = (number) => state.data.palette[dark() ? "dark" : "light"][number];
const dashOf = (number) => DASHES[Math.floor(number / SIZE) % DASHES.length];
const scaled = (values, scale) => scale === 1 ? values : values.map((v) => v === null ? null : v * scale);
const fade = (colour, alpha) => `rgba(${[1, 3, 5].map((at) => parseInt(colour.slice(at, at + 2), 16)).join(",")},${alpha})`;

// An exponential moving average without bias at its start, as TensorBoard computes it. It is rounded,
// because the rounding errors of a constant would fill its chart.
function smooth(values, weight) {
  let sum = 0, count = 0;
  return values.map((v) => {
    if (v === null) return null;
    sum = weight * sum + (1 - weight) * v;
    return Number((sum / (1 - weight ** ++count)).toPrecision(6));
  });
}

const short = (key) => key.split("/").slice(1).join("/") || key;

function keysOf(panel, run) {
  return Object.keys(run.series).filter((name) => name in panel.colours);
}

function layout(panel, more = {}) {
  const axis = { gridcolor: css("--line"), zerolinecolor: css("--line") };
  return {
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", showlegend: false,
    font: { color: css("--ink"), size: 12 }, margin: { l: 56, r: 12, t: 8, b: 40 }, hovermode: "closest",
    hoverlabel: { namelength: 60 }, uirevision: panel.id + state.x, ...more,
    xaxis: { ...axis, ...(more.xaxis || {}) }, yaxis: { ...axis, ...(more.yaxis || {}) },
  };
}

function lines(panel) {
  // With one run, every metric of the panel is a line, and parts that sum to the step are stacked;
  // with several runs, each is a line, of one metric that can be chosen.
  const traces = [], events = [], stacked = panel.id === "time" && !several();
  for (const { run } of having(panel)) {
    const x = run.x[state.x];
    for (const key of several() ? [choice(panel)] : keysOf(panel, run)) {
      const { y: values, low, high } = run.series[key], number = several() ? run.colour : panel.colours[key];
      const name = esc(several() ? run.name : short(key));
      const raw = scaled(values, panel.scale), y = state.smoothing ? smooth(raw, state.smoothing) : raw;
      const colour = colourOf(number), few = raw.filter((v) => v !== null).length < 60;
      const under = { type: "scatter", x, mode: "lines", name, hoverinfo: "skip", connectgaps: true };
      if (state.band && low && !stacked) {
        traces.push({ ...under, line: { width: 0 }, y: scaled(low, panel.scale) });
        traces.push({ ...under, line: { width: 0 }, y: scaled(high, panel.scale), fill: "tonexty", fillcolor: fade(colour, 0.17) });
      }
      if (state.smoothing && !stacked) traces.push({ ...under, y: raw, opacity: 0.3, line: { color: colour, width: 1 } });
      traces.push({
        type: "scatter", x, y, name, connectgaps: true, mode: few ? "lines+markers" : "lines", marker: { size: 4 },
        line: { color: colour, width: 1.8, dash: dashOf(number) }, ...(stacked ? { stackgroup: "parts", fillcolor: fade(colour, 0.6) } : {}),
      });
    }
    events.push(...run.events);
  }
  return [[...traces, ...marks(events)], layout(panel, { xaxis: along(), yaxis: upward(panel, traces), yaxis2: MARKED })];
}

// The y axis of lines: logarithmic if the panel asks for it and has positive values, with ticks at
// powers of ten only where it has many of them. Around a constant it is as wide as that is large.
function upward(panel, traces) {
  let low = Infinity, high = -Infinity;
  for (const { y } of traces) for (const v of y) if (v !== null && (!panel.log || v > 0)) [low, high] = [Math.min(low, v), Math.max(high, v)];
  if (low > high) return {};
  if (panel.log) return { type: "log", dtick: high > 30 * low ? 1 : "D2" };
  return low === high && low ? { range: [low - Math.abs(low) / 2, low + Math.abs(low) / 2] } : {};
}

// The y axis of marks: from the bottom of a panel to its top, whatever else it shows.
const MARKED = { overlaying: "y", range: [0, 1], visible: false, fixedrange: true };
const along = () => ({ title: { text: AXES[state.x], standoff: 4 } });

// One trace for all events of a kind, because hundreds of shapes would take longer than the lines.
const EVENTS = { restart: ["--ink", "dash"], skip: ["--bad", "dot"], checkpoint: ["--soft", "dot"] };
const marks = (events) => [...new Set(events.map((one) => one.kind))].map((kind) => {
  const at = events.filter((one) => one.kind === kind), top = kind === "checkpoint" ? 0.05 : 1, [colour, dash] = EVENTS[kind];
  return {
    type: "scatter", mode: "lines", name: kind, yaxis: "y2", hoverinfo: "skip", connectgaps: false, mark: true,
    x: at.flatMap((one) => [one[state.x], one[state.x], null]), y: at.flatMap(() => [0, top, null]),
    line: { color: css(colour), width: 1, dash },
  };
});

// The causes of losses of some waterfalls in one order: by the largest share that any of them has.
function causesOf(falls) {
  const most = new Map();
  for (const [, losses] of falls) for (const [cause, label, share] of losses)
    if (cause !== "mfu" && Math.abs(share) >= 5e-5) most.set(label, Math.max(share, most.get(label) ?? share));
  return [...most.keys()].sort((one, other) => most.get(other) - most.get(one));
}

function waterfall(panel) {
  const falls = having(panel).map(({ run }) => [run.name, run.waterfall]);
  if (state.data.prediction.length) falls.push(state.data.prediction);
  return several() ? shares(panel, falls) : falling(panel, falls);
}

function falling(panel, falls) {
  const causes = causesOf(falls), known = falls.some(([, losses]) => losses.some(([cause]) => cause === "mfu"));
  const traces = falls.map(([name, losses], place) => {
    const lost = new Map(losses.map(([, label, share]) => [label, share])), grey = place ? css("--soft") : null;
    const parts = causes.map((label) => lost.get(label) ?? 0), rest = 1 - parts.reduce((sum, one) => sum + one, 0);
    const y = [1, ...parts.map((one) => -one), rest].map((v) => 100 * v);
    return {
      type: "waterfall", name: esc(name), x: ["all time at peak", ...causes, known ? "MFU" : "nothing left"].map(esc), y,
      measure: ["absolute", ...parts.map(() => "relative"), "total"],
      text: y.map((v) => v ? Math.abs(v).toFixed(Math.abs(v) < 9.95 ? 1 : 0) : ""), textposition: "outside",
      connector: { line: { color: css("--line") } }, cliponaxis: false, swatch: grey || colourOf(1),
      decreasing: { marker: { color: grey || colourOf(1) } }, increasing: { marker: { color: grey || colourOf(2) } },
      totals: { marker: { color: grey || colourOf(0) } },
    };
  });
  return [traces, layout(panel, {
    waterfallgroupgap: 0.05, margin: { l: 56, r: 12, t: 22, b: 36 },
    yaxis: { title: { text: panel.unit }, range: [0, 112] }, xaxis: { tickangle: 30, automargin: true },
  })];
}

// One bar for each of several runs, of its losses and its MFU.
function shares(panel, falls) {
  const known = new Map(falls.flatMap(([, losses]) => losses.map(([cause, label]) => [label, cause])));
  const labels = [...causesOf(falls), ...[...known].filter(([, cause]) => cause === "mfu").map(([label]) => label)];
  const traces = labels.map((label) => ({
    type: "bar", orientation: "h", name: esc(label), y: falls.map(([name]) => esc(name)),
    x: falls.map(([, losses]) => 100 * (losses.find((loss) => loss[1] === label)?.[2] ?? 0)),
    marker: { color: colourOf(panel.colours[known.get(label)] ?? 0) }, hovertemplate: "%{y}: %{x:.1f}%<extra>%{fullData.name}</extra>",
  }));
  return [traces, layout(panel, {
    barmode: "relative", xaxis: { title: { text: panel.unit, standoff: 4 }, range: [0, 100.5] }, height: 120 + 26 * falls.length,
    yaxis: { type: "category", autorange: "reversed", automargin: true, ticksuffix: " " },
  })];
}

function heat(panel) {
  const run = state.data.runs.find(({ name }) => name === choice(panel)), grid = run.heat[panel.id], apart = panel.id === "stragglers";
  const top = Math.max(1, ...grid.z.flat().filter((v) => v !== null));
  const across = grid.x ? along() : { title: { text: `${grid.across} (at step ${grid.at})` } };
  return [[{
    type: "heatmap", z: grid.z, x: grid.x ? grid.x[state.x] : grid.columns, y: grid.rows.map((row) => grid.what + " " + row),
    colorscale: apart ? [[0, "#2f81f7"], [0.5, "#f4f4f4"], [1, "#d1242f"]] : "Viridis",
    ...(apart ? { zmin: -top, zmax: top } : { zmin: 0 }), colorbar: { thickness: 10, len: 0.9 },
    hovertemplate: "%{y}, " + across.title.text + " %{x}: %{z}<extra></extra>",
  }, ...(grid.x ? marks(run.events) : [])], layout(panel, {
    xaxis: across, yaxis: { autorange: "reversed", nticks: 10, automargin: true }, yaxis2: MARKED,
  })];
}

function bars(panel) {
  const group = state.data.runs.find(({ name }) => name === choice(panel)).bars[panel.id];
  const traces = Object.entries(group.kinds).map(([kind, y]) => ({
    type: "bar", name: esc(kind), x: group.places.map(esc), y, marker: { color: colourOf(panel.colours[kind]) },
  }));
  return [traces, layout(panel, { barmode: "stack", xaxis: { type: "category", nticks: 12, automargin: true } })];
}

// Each run at its value of a key: what a sweep is for.
function outcome(panel) {
  const key = choice(panel), runs = having(panel), values = runs.map(({ run }) => valueOf(run, key));
  const numbers = values.every((text) => text !== "" && Number.isFinite(Number(text))) && values.map(Number);
  const wide = numbers && Math.min(...numbers) > 0 && Math.max(...numbers) >= 10 * Math.min(...numbers);
  const traces = runs.map(({ run }, place) => ({
    type: "scatter", mode: "markers", name: esc(run.name), x: [numbers ? numbers[place] : esc(values[place].slice(0, 40))], y: [run.outcome],
    marker: { size: 10, color: colourOf(run.colour) }, hovertemplate: "%{x}: %{y}<extra>%{fullData.name}</extra>",
  }));
  return [traces, layout(panel, {
    xaxis: { title: { text: esc(key), standoff: 4 }, type: numbers ? (wide ? "log" : "linear") : "category", automargin: true },
    yaxis: { title: { text: esc(state.data.metric) } },
  })];
}

const KINDS = { lines, waterfall, heat, bars, outcome };

// The shown runs that have numbers for a panel, and for the metric that is chosen in it.
function having(panel) {
  const all = shown().filter(({ run }) => {
    if (panel.kind === "lines") return keysOf(panel, run).length;
    if (panel.kind === "outcome") return run.outcome !== null && keysThatDiffer().length;
    return panel.kind === "waterfall" ? run.waterfall.length : run[panel.kind][panel.id];
  });
  return panel.kind === "lines" && several() && all.length ? all.filter(({ run }) => choice(panel, all) in run.series) : all;
}

// What can be chosen in a panel: a run where only one fits, a metric where each run is a line.
function choices(panel, runs) {
  if (["heat", "bars"].includes(panel.kind)) return runs.map(({ run }) => run.name);
  if (panel.kind === "outcome") return keysThatDiffer();
  if (panel.kind !== "lines" || !several()) return [];
  const keys = new Set(runs.flatMap(({ run }) => keysOf(panel, run))), rank = (key) => panel.keys.indexOf(key);
  return [...keys].sort((one, other) => rank(one) - rank(other) || panel.colours[one] - panel.colours[other]);
}

function choice(panel, runs = having(panel)) {
  const all = choices(panel, runs);
  return all.includes(state.chosen[panel.id]) ? state.chosen[panel.id] : all[0];
}

// The numbers of a figure as rows of a table, for those who cannot see it or want to copy them.
function numbersOf(traces) {
  const named = (t, name) => (t.name ? t.name + ": " : "") + name;
  return traces.filter((t) => t.hoverinfo !== "skip").flatMap((t) => {
    if (t.type === "heatmap") return t.y.slice(0, 50).map((name, i) => [name, Math.max(...t.z[i]).toPrecision(3)]);
    if (t.orientation === "h") return t.y.map((name, i) => [named(t, name), t.x[i].toPrecision(4)]);
    if (t.mode === "markers") return [[named(t, t.x[0]), t.y[0].toPrecision(6)]];
    if (t.type !== "scatter") return t.x.map((name, i) => [named(t, name), Number(t.y[i]).toPrecision(4)]);
    const there = t.y.map((v, i) => [i, v]).filter(([, v]) => v !== null), [i, v] = there[there.length - 1] || [];
    return v === undefined ? [] : [[`${t.name || ""} at ${AXES[state.x]} ${t.x[i]}`, v.toPrecision(5)]];
  }).map(([name, value]) => [unesc(name), value]);
}
