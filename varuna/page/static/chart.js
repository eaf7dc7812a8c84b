// Loss, samples per second and machines over time or steps, as one curve across all layouts, with events.
// The server sends as many points as the chart has pixels, with minimum and maximum of each.

import { get, loader } from "./api.js";
import { byId, el, setText, svg } from "./dom.js";
import { kindOf } from "./facts.js";
import { clock, number, oneLine, seconds, whole } from "./format.js";

const LEFT = 58;
const RIGHT = 14;
const LABEL = 52; // width of a time
const TOP = 34;
const GAP = 28;
const PANELS = [
  { key: "loss", title: "Loss", height: 180 },
  { key: "samples_per_second", title: "Samples / s", height: 96 },
  { key: "machines", title: "Machines", height: 60 },
];
const HEIGHT = PANELS.reduce((sum, panel) => sum + panel.height + GAP, TOP);

const NEAR = 6; // pixels
const LOAD_MS = 1500; // while the job runs; updates that come earlier do not load the curve

// `version` and `now` are those of the last update; `now` is null unless the job runs.
const chart = { axis: "time", log: false, range: null, data: null, cursor: null, drag: null, version: "", now: null, loadAt: 0 };
const loadCurve = loader(async () => {
  const [first, last] = chart.range ?? [null, null];
  const points = Math.max(100, Math.min(1500, Math.round(parts.root.clientWidth - LEFT - RIGHT)));
  chart.data = await get("/api/curve", { axis: chart.axis, first, last, points });
  redrawCurve();
});
let scaleX = null; // { first, last, left, width }
let parts = null; // elements that are kept

export function startCurve() {
  const root = byId("chart");
  const picture = svg("svg", { height: HEIGHT, "aria-hidden": "true" });
  const overlay = svg("g");
  const body = svg("g");
  picture.append(body, overlay);
  const tip = el("div", { class: "tooltip", hidden: true });
  root.append(picture, tip);
  parts = { root, picture, body, overlay, tip };
  for (const radio of document.getElementsByName("axis")) {
    radio.addEventListener("change", () => setAxis(radio.value));
  }
  byId("log-scale").addEventListener("change", (event) => {
    chart.log = event.target.checked;
    redrawCurve();
  });
  byId("zoom-out").addEventListener("click", () => zoom(null));
  picture.addEventListener("pointermove", movePointer);
  picture.addEventListener("pointerleave", (event) => {
    if (!chart.drag && event.pointerType !== "touch") setCursor(null); // a finger leaves at the end of a tap
  });
  picture.addEventListener("pointerdown", (event) => {
    if (event.button === 0 && chart.data) {
      movePointer(event);
      chart.drag = valueAt(event.offsetX);
      picture.setPointerCapture(event.pointerId);
    }
  });
  picture.addEventListener("pointerup", endDrag);
  picture.addEventListener("pointercancel", () => (chart.drag = null));
  picture.addEventListener("dblclick", () => zoom(null));
  root.addEventListener("keydown", pressKey);
  root.addEventListener("blur", () => setCursor(null));
}

export function showCurve(version, now) {
  if (now === null || performance.now() >= chart.loadAt) {
    chart.version = version;
    chart.loadAt = performance.now() + LOAD_MS;
  }
  chart.now = now;
  refreshCurve();
  redrawCurve();
}

function refreshCurve() {
  loadCurve(JSON.stringify([chart.version, chart.axis, chart.range]));
}

function setAxis(axis) {
  chart.axis = axis;
  chart.cursor = null;
  setRange(null);
}

function zoom(range) {
  if (range) {
    const [first, last] = fullRange();
    const least = chart.axis === "step" ? 2 : 0.05;
    range = [Math.max(first, range[0]), Math.min(last, range[1])];
    if (range[1] - range[0] < least) return;
    if (range[0] <= first && range[1] >= last) range = null;
  }
  setRange(range);
}

function setRange(range) {
  chart.range = range;
  byId("zoom-out").disabled = !range;
  redrawCurve();
  refreshCurve();
}

// All steps and, on the time axis, all events: what happens while no step ends is shown, too.
function fullRange() {
  if (!chart.data) return [0, 1];
  const { window, first_event: first, last_event: last } = chart.data;
  const hasSteps = window.steps.length > 0;
  if (chart.axis === "step") return hasSteps ? [window.first_step, window.last_step] : [0, 1];
  const times = [first, last, chart.now, ...(hasSteps ? [window.first_time, window.last_time] : [])].filter((one) => one !== null);
  return times.length ? [Math.min(...times), Math.max(...times)] : [0, 1];
}

const places = () => (chart.axis === "step" ? chart.data.window.steps : chart.data.window.times);
const valueAt = (x) => scaleX.first + ((x - scaleX.left) / scaleX.width) * (scaleX.last - scaleX.first);
const xOf = (value) => scaleX.left + ((value - scaleX.first) / (scaleX.last - scaleX.first || 1)) * scaleX.width;

// ---------------------------------------------------------------- drawing

export function redrawCurve() {
  if (!parts || !chart.data) return;
  const width = parts.root.clientWidth;
  if (width <= LEFT + RIGHT) return; // not laid out yet
  parts.picture.setAttribute("width", width);
  const [first, last] = chart.range ?? fullRange();
  scaleX = { first, last: last > first ? last : first + 1, left: LEFT, width: width - LEFT - RIGHT };
  const nodes = [];
  if (!chart.data.window.steps.length) {
    nodes.push(svg("text", { x: width / 2, y: HEIGHT / 2, class: "empty" }, "No step has finished yet"));
  }
  const titles = [];
  let top = TOP;
  for (const panel of PANELS) {
    nodes.push(...drawPanel(panel, top));
    titles.push(svg("text", { x: LEFT, y: top - 8, class: "name" }, panel.title));
    top += panel.height + GAP;
  }
  nodes.push(...drawAxis(top - GAP), ...drawMarks(top - GAP), ...titles); // the lines of marks pass below the titles
  parts.body.replaceChildren(...nodes);
  drawCursor();
}

function drawPanel(panel, top) {
  const bottom = top + panel.height;
  const series = panel.key === "machines" ? machineSeries() : bandSeries(panel.key);
  const nodes = [];
  const scale = scaleOf(panel, series, bottom);
  panel.y = scale?.y ?? null;
  if (!scale) return [...nodes, svg("path", { d: `M${LEFT} ${bottom}h${scaleX.width}`, class: "grid" })];
  for (const tick of scale.ticks) {
    const y = scale.y(tick);
    nodes.push(
      svg("path", { d: `M${LEFT} ${y.toFixed(1)}h${scaleX.width}`, class: "grid" }),
      svg("text", { x: LEFT - 8, y: y + 4, class: "tick end" }, tickText(tick)),
    );
  }
  const clip = `clip-${panel.key}`;
  nodes.push(svg("clipPath", { id: clip }, svg("rect", { x: LEFT, y: top - 2, width: scaleX.width, height: panel.height + 4 })));
  const group = svg("g", { "clip-path": `url(#${clip})`, class: `series ${panel.key}` });
  if (panel.key === "machines") {
    group.append(svg("path", { d: stepPath(series, scale.y), class: "line" }));
  } else {
    if (series.some((point) => point.high > point.low)) group.append(svg("path", { d: bandPath(series, scale.y), class: "band" }));
    group.append(svg("path", { d: linePath(series, scale.y), class: "line" }));
  }
  return [...nodes, group];
}

function bandSeries(key) {
  const { mean, low, high } = chart.data.window.bands[key];
  return places().map((x, at) => ({ x, mean: mean[at], low: low[at], high: high[at] })).filter((point) => point.mean !== null);
}

function machineSeries() {
  const { machines, window } = chart.data;
  if (!machines.length || (chart.axis === "step" && !window.steps.length)) return [];
  const found = machines.map(([at, mean]) => ({ x: chart.axis === "time" ? at : stepAt(at), mean, low: 0, high: mean }));
  return [...found, { ...found.at(-1), x: Math.max(found.at(-1).x, fullRange()[1]) }];
}

// The step at a time: times before and after the window are outside of the picture.
function stepAt(time) {
  const { times, steps, first_step: first, last_step: last } = chart.data.window;
  if (time < times[0]) return first;
  if (time > times.at(-1)) return last;
  return steps[Math.max(0, nearest(times, time))];
}

function nearest(sorted, value) {
  let low = 0;
  let high = sorted.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (sorted[middle] < value) low = middle + 1;
    else high = middle;
  }
  return low > 0 && value - sorted[low - 1] < sorted[low] - value ? low - 1 : low;
}

function scaleOf(panel, series, bottom) {
  const inside = series.filter((point) => point.x >= scaleX.first && point.x <= scaleX.last);
  const shown = inside.length ? inside : series;
  if (!shown.length) return null;
  let low = Math.min(...shown.map((point) => point.low));
  let high = Math.max(...shown.map((point) => point.high));
  if (panel.key === "samples_per_second") {
    const highs = shown.map((point) => point.high).sort((a, b) => a - b);
    high = Math.max(highs[Math.floor(highs.length * 0.95)], ...shown.map((point) => point.mean));
  }
  if (panel.key !== "loss") low = 0;
  if (panel.key === "loss" && chart.log && low > 0) {
    const from = Math.log10(low) - 0.05;
    const to = Math.log10(high) + 0.05;
    const y = (value) => bottom - ((Math.log10(value) - from) / (to - from)) * panel.height;
    return { y, ticks: logTicks(low, high) };
  }
  const size = Math.max(Math.abs(low), Math.abs(high));
  const spread = high - low > 1e-9 * size ? high - low : 0; // less is rounding, and too fine for ticks
  const pad = panel.key === "loss" ? (spread || size || 1) * 0.06 : 0;
  const [from, to] = [low - pad, (high === low ? high || 1 : high) + (pad || (high || 1) * 0.1)];
  const y = (value) => bottom - ((value - from) / (to - from)) * panel.height;
  if (panel.key === "machines") return { y, ticks: [...new Set([0, ...(high >= 4 ? [Math.round(high / 2)] : []), high])] };
  return { y, ticks: linearTicks(from, to, Math.floor(panel.height / 32), false) };
}

function linearTicks(from, to, most, isWhole) {
  const rough = (to - from) / most;
  const power = 10 ** Math.floor(Math.log10(rough));
  let step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= rough);
  if (isWhole) step = Math.max(1, Math.round(step));
  const ticks = [];
  for (let tick = Math.ceil(from / step) * step; tick <= to + step * 1e-6; tick += step) ticks.push(Math.abs(tick) < step * 1e-6 ? 0 : tick);
  return ticks;
}

function logTicks(low, high) {
  const ticks = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power += 1) {
    for (const factor of [1, 2, 5]) {
      const tick = factor * 10 ** power;
      if (tick >= low && tick <= high) ticks.push(tick);
    }
  }
  if (ticks.length < 2) return [low, high];
  return ticks.length > 7 ? ticks.filter((tick) => Number.isInteger(Math.log10(tick))) : ticks;
}

const tickText = (value) => (Math.abs(value) >= 1e4 ? `${number(value / 1e3, 3)} k` : number(value, 3));

const linePath = (series, y) => series.map((point, at) => `${at ? "L" : "M"}${xOf(point.x).toFixed(1)} ${y(point.mean).toFixed(1)}`).join("");

function bandPath(series, y) {
  const up = series.map((point) => `${xOf(point.x).toFixed(1)} ${y(point.high).toFixed(1)}`);
  const down = [...series].reverse().map((point) => `${xOf(point.x).toFixed(1)} ${y(point.low).toFixed(1)}`);
  return `M${[...up, ...down].join("L")}Z`;
}

function stepPath(series, y) {
  return series.map((point, at) => (at ? `H${xOf(point.x).toFixed(1)}V${y(point.mean).toFixed(1)}` : `M${xOf(point.x).toFixed(1)} ${y(point.mean).toFixed(1)}`)).join("");
}

function drawAxis(bottom) {
  const most = Math.max(2, Math.floor(scaleX.width / 110));
  const ticks = chart.axis === "step" ? linearTicks(scaleX.first, scaleX.last, most, true) : timeTicks(scaleX.first, scaleX.last, most);
  const text = (tick) => (chart.axis === "step" ? whole(tick) : clock(tick, { date: scaleX.last - scaleX.first > 86400, fine: scaleX.last - scaleX.first < 1200 }));
  const right = LEFT + scaleX.width + RIGHT - LABEL / 2; // the last label is not cut off
  return ticks.map((tick) => svg("text", { x: Math.min(xOf(tick), right), y: bottom + 18, class: "tick middle" }, text(tick)));
}

function timeTicks(from, to, most) {
  const sizes = [0.1, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 21600, 43200, 86400, 172800, 604800];
  const size = sizes.find((one) => (to - from) / one <= most) ?? 2592000;
  const shift = new Date(from * 1000).getTimezoneOffset() * 60;
  const ticks = [];
  for (let tick = Math.ceil((from - shift) / size) * size + shift; tick <= to; tick += size) ticks.push(tick);
  return ticks;
}

function drawMarks(bottom) {
  const nodes = [];
  const order = ["plain", "warn", "change", "bad"]; // what matters most is drawn on top
  const rank = (mark) => order.indexOf(kindOf(mark.what));
  for (const mark of [...chart.data.marks].sort((a, b) => rank(a) - rank(b))) {
    const kind = kindOf(mark.what);
    const x = xOf(chart.axis === "step" ? mark.step : mark.at);
    if (x < LEFT - 1 || x > LEFT + scaleX.width + 1) continue;
    const strong = kind === "bad" || kind === "change";
    if (strong) nodes.push(svg("path", { d: `M${x.toFixed(1)} ${TOP - 4}V${bottom}`, class: `event ${kind}` }));
    nodes.push(svg("circle", { cx: x, cy: 7, r: strong ? 4 : 2.5, class: `event ${kind}` }, svg("title", {}, `${oneLine(mark.what)}: ${oneLine(mark.why, 120)}`)));
  }
  return nodes;
}

// ---------------------------------------------------------------- cursor and zoom

function movePointer(event) {
  if (!chart.data || !scaleX) return;
  setCursor(Math.max(scaleX.first, Math.min(scaleX.last, valueAt(event.offsetX))));
}

function endDrag(event) {
  const from = chart.drag;
  chart.drag = null;
  if (from === null) return;
  const to = valueAt(event.offsetX);
  if (Math.abs(xOf(to) - xOf(from)) > NEAR) zoom([Math.min(from, to), Math.max(from, to)]);
  else drawCursor();
}

function pressKey(event) {
  if (!chart.data || !scaleX || event.ctrlKey || event.metaKey) return;
  const size = scaleX.last - scaleX.first;
  const middle = chart.cursor ?? scaleX.first + size / 2;
  const move = (share) => setCursor(Math.max(scaleX.first, Math.min(scaleX.last, middle + size * share)));
  const around = (factor) => zoom([middle - (middle - scaleX.first) * factor, middle + (scaleX.last - middle) * factor]);
  const shift = (share) => chart.range && zoom([scaleX.first + size * share, scaleX.last + size * share]);
  const actions = {
    ArrowLeft: () => move(event.shiftKey ? -0.1 : -0.01),
    ArrowRight: () => move(event.shiftKey ? 0.1 : 0.01),
    Home: () => setCursor(scaleX.first),
    End: () => setCursor(scaleX.last),
    PageUp: () => shift(-0.5),
    PageDown: () => shift(0.5),
    "+": () => around(0.5),
    "=": () => around(0.5),
    "-": () => around(2),
    0: () => zoom(null),
    Escape: () => zoom(null),
  };
  if (actions[event.key]) {
    event.preventDefault();
    actions[event.key]();
  }
}

function setCursor(value) {
  chart.cursor = value;
  drawCursor();
}

function drawCursor() {
  const { overlay, tip } = parts;
  const window = chart.data?.window;
  tip.hidden = chart.cursor === null || !window?.steps.length;
  if (tip.hidden) {
    overlay.replaceChildren();
    setText(byId("curve-text"), "");
    return;
  }
  const at = nearest(places(), chart.cursor);
  const point = xOf(places()[at]);
  const x = isAway(at) ? xOf(chart.cursor) : point;
  const nodes = [svg("path", { d: `M${x.toFixed(1)} ${TOP - 8}V${HEIGHT - GAP}`, class: "cursor" })];
  for (const panel of PANELS.slice(0, 2)) {
    const value = window.bands[panel.key].mean[at];
    if (value !== null && panel.y) nodes.push(svg("circle", { cx: point, cy: panel.y(value), r: 3.5, class: `point ${panel.key}` }));
  }
  if (chart.drag !== null) {
    const [a, b] = [xOf(chart.drag), xOf(chart.cursor)];
    nodes.push(svg("rect", { x: Math.min(a, b), y: TOP - 8, width: Math.abs(a - b), height: HEIGHT - TOP - GAP + 8, class: "selection" }));
  }
  overlay.replaceChildren(...nodes);
  showTip(at, x);
}

// The cursor is before the first step or after the last one: it stays where it is.
function isAway(at) {
  const { times } = chart.data.window;
  const isOutside = chart.cursor < times[0] || chart.cursor > times.at(-1);
  return chart.axis === "time" && isOutside && Math.abs(xOf(times[at]) - xOf(chart.cursor)) > NEAR;
}

function showTip(at, x) {
  const { tip, root } = parts;
  const { window, machines, marks } = chart.data;
  const time = isAway(at) ? chart.cursor : window.times[at];
  const distance = time - window.times[at];
  const apart = distance ? `, ${seconds(Math.abs(distance))} ${distance > 0 ? "after" : "before"} its end` : "";
  const value = (key) => number(window.bands[key].mean[at]);
  const size = machines.findLast(([since]) => since <= time)?.[1];
  const near = marks.filter((mark) => Math.abs(xOf(chart.axis === "step" ? mark.step : mark.at) - xOf(chart.cursor)) < NEAR);
  const important = [...near.filter((mark) => kindOf(mark.what) !== "plain"), ...near].slice(0, 3);
  const rows = [
    el("b", {}, `Step ${whole(window.steps[at])}`),
    el("span", {}, `${clock(time, { date: true })}${apart}`),
    el("span", {}, `loss ${value("loss")}`),
    el("span", {}, `${value("samples_per_second")} samples/s`),
    el("span", {}, size === undefined ? "" : `${size} machine${size === 1 ? "" : "s"}`),
    ...[...new Set(important)].map((mark) => el("em", { class: kindOf(mark.what) }, `${oneLine(mark.what)}: ${oneLine(mark.why, 110)}`)),
  ];
  tip.replaceChildren(...rows);
  const left = x + 14 + tip.offsetWidth > root.clientWidth ? x - 14 - tip.offsetWidth : x + 14;
  tip.style.left = `${Math.max(0, left)}px`;
  tip.style.top = `${TOP + 4}px`;
  if (document.activeElement === root) setText(byId("curve-text"), rows.slice(0, 5).map((row) => row.textContent).filter(Boolean).join(", "));
}
