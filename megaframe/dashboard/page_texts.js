// The tables and texts of the page. All of them are inserted as text.
const swatch = (colour, dash) => {
  const node = make("span", undefined, { class: "swatch" });
  node.style.borderTop = `3px ${!dash || dash === "solid" ? "solid" : dash.includes("dash") ? "dashed" : "dotted"} ${colour}`;
  return node;
};

// A cell; the name of a run is marked with the run's colour.
function cell(tag, text, attributes = {}) {
  const node = make(tag, undefined, attributes);
  if (text && text.run) node.append(swatch(colourOf(text.run.colour), dashOf(text.run.colour)), text.run.name);
  else node.textContent = text;
  return node;
}

function grid(heads, rows) {
  const body = make("tbody"), node = make("table");
  if (heads.length) node.appendChild(make("thead")).appendChild(make("tr")).append(...heads.map((text) => cell("th", text, { scope: "col" })));
  rows.forEach((row) => {
    const line = body.appendChild(make("tr"));
    row.forEach((text, place) => line.appendChild(cell(place ? "td" : "th", text, place ? {} : { scope: "row" })));
  });
  node.appendChild(body);
  return node;
}

// A table of all shown runs has them across, or down if there are more runs than rows.
function gridOfRuns(field, keep = () => true) {
  const runs = shown().map(({ run }) => run), tables = runs.map((run) => new Map(run[field]));
  const keys = [...new Set(tables.flatMap((one) => [...one.keys()]))];
  const rows = keys.map((key) => [key, ...tables.map((one) => one.get(key) ?? "")]).filter(keep);
  const all = [["", ...runs.map((run) => several() ? { run } : run.name)], ...rows];
  if (!rows.length) return null;
  const turned = runs.length > rows.length ? all[0].map((_, place) => all.map((row) => row[place])) : all;
  return grid(turned[0], turned.slice(1));
}

const differs = ([key, ...values]) => key !== "run.dir" && new Set(values).size > 1;
const valueOf = (run, key) => (run.config.find(([name]) => name === key) || ["", ""])[1];
const keysThatDiffer = () => {
  const keys = [...new Set(shown().flatMap(({ run }) => run.config.map(([key]) => key)))];
  const tables = shown().map(({ run }) => new Map(run.config));
  return keys.filter((key) => differs([key, ...tables.map((one) => one.get(key) ?? "")]));
};

function gridOfEvents() {
  const rows = shown().flatMap(({ run }) => run.events.map((one) => [{ run }, String(one.step), one.kind, one.text]));
  return rows.length ? grid(["run", "step", "kind", "what"], rows) : null;
}

// Id, title, whether it is open at first, and what makes its content: null if there is none.
const TABLES = [
  ["summary", "Summary", true, () => gridOfRuns("summary")],
  ["differences", "Differences of the configs", true, () => several() ? gridOfRuns("config", differs) : null],
  ["samples", "Samples", true, samples],
  ["log", "Log", true, log],
  ["events", "Events", false, gridOfEvents],
  ["config", "Config", false, () => gridOfRuns("config")],
  ["environment", "Environment", false, () => gridOfRuns("environment")],
];

function tableSection(id, title, open) {
  const wide = id !== "summary" || several();
  const node = make("section", undefined, { id, "data-state": "drawn", ...(wide ? { class: "wide" } : {}) });
  const details = node.appendChild(make("details"));
  details.appendChild(make("summary")).appendChild(make("h2", title));
  details.appendChild(make("div", undefined, { class: "scroll", tabindex: "0" }));
  details.open = open;
  details.ontoggle = () => { if (details.open && node.dataset.stale) fillTable(id); };
  return node;
}

// Fills a table now, or when it is opened.
function fillTable(id) {
  const [, , , build] = TABLES.find(([name]) => name === id), node = document.getElementById(id);
  const details = node.querySelector("details"), content = build();
  node.hidden = content === null;
  delete node.dataset.stale;
  if (content === null) return;
  if (details.open) node.querySelector(".scroll").replaceChildren(content);
  else node.dataset.stale = "stale";
}

function chooser(label, options, value, change) {
  const node = make("label"), select = make("select", undefined, { "aria-label": label });
  select.append(...options.map(([of, text]) => make("option", text, { value: of })));
  select.value = value;
  select.onchange = () => change(select.value);
  node.append(make("span", label, { class: "unit" }), select);
  return node;
}

// What the models wrote after each prompt, at one step: runs side by side.
function samples() {
  const runs = shown().map(({ run }) => run).filter((run) => run.samples.length);
  if (!runs.length) return null;
  const all = runs.flatMap((run) => run.samples), steps = [...new Set(all.map(({ step }) => step))].sort((a, b) => a - b);
  const step = steps.includes(state.sampled) ? state.sampled : steps[steps.length - 1];
  const rows = [...new Set(all.map(({ prompt }) => prompt))].map((prompt) => [prompt, ...runs.map((run) => {
    const before = run.samples.filter((one) => one.prompt === prompt && one.step <= step), last = before[before.length - 1];
    return last ? (last.step === step ? "" : `(step ${last.step}) `) + last.text : "";
  })]);
  const node = make("div", undefined, { class: "texts" });
  const label = (one) => [String(one), one.toLocaleString("en")];
  node.append(chooser("at step", steps.map(label), String(step), (value) => { state.sampled = Number(value); fillTable("samples"); }),
    grid(["prompt", ...runs.map((run) => several() ? { run } : "text")], rows));
  return node;
}

// The end of a run's log, and in it the lines that have some words.
function log() {
  const runs = shown().map(({ run }) => run).filter((run) => run.log.lines);
  if (!runs.length) return null;
  const run = runs.find(({ name }) => name === state.logged) || runs[0], { lines, skipped } = run.log;
  const node = make("div", undefined, { class: "texts" }), pre = make("pre", undefined, { tabindex: "0" });
  const search = make("input", undefined, { type: "search", placeholder: "search", "aria-label": "search the log" });
  const count = make("span", undefined, { class: "unit", role: "status" });
  search.value = state.search;
  const fill = () => {
    const words = (state.search = search.value).toLowerCase(), found = lines.filter((line) => line.toLowerCase().includes(words));
    pre.replaceChildren(...found.flatMap((line) => [...marked(line, words), "\n"]));
    const before = skipped ? `, after ${skipped.toLocaleString("en")} bytes that are not shown` : "";
    count.textContent = words ? `${found.length} of ${lines.length} lines${before}` : `${lines.length} lines${before}`;
    pre.scrollTop = pre.scrollHeight;
  };
  search.oninput = fill;
  if (runs.length > 1) node.append(chooser("of", runs.map(({ name }) => [name, name]), run.name, (name) => { state.logged = name; fillTable("log"); }));
  node.append(search, count, pre);
  fill();
  requestAnimationFrame(() => { pre.scrollTop = pre.scrollHeight; });
  return node;
}

// The parts of a line, with what was searched for marked.
function marked(line, words) {
  const parts = [], lower = line.toLowerCase();
  let from = 0;
  for (let at; words && lower.length === line.length && (at = lower.indexOf(words, from)) >= 0; from = at + words.length)
    parts.push(line.slice(from, at), make("mark", line.slice(at, at + words.length)));
  return [...parts, line.slice(from)];
}
