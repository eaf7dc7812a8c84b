// The last step, measured and predicted: a lane for each stage on a canvas, and the same as a table.

import { byId, el, keyed, setText } from "./dom.js";
import { oneLine, percent, seconds, whole } from "./format.js";

const LABEL = 62;
const LANE = 26;
const COMPUTE = new Set(["F", "R", "B", "I", "W"]);
const NAMES = {
  F: "forward",
  R: "recompute",
  B: "backward",
  I: "backward, inputs",
  W: "backward, weights",
  reduce: "reduce",
  optimizer: "optimizer, script", // all from the end of a step to the next one
  wait: "wait",
};
const NOTHING = "\u00a0";
const PARTS = ["compute", "waiting", "reduce", "optimizer"];

let newest = null; // of the server
let shown = null; // stays the same while someone reads it
let panels = []; // { name, canvas, title, timeline, lanes, scale, chosen }
let parts = null; // elements that are kept

export function showTimeline(step) {
  newest = step;
  if (!isHeld()) useNewest();
  else showText();
}

// A step stays while the pointer or the focus is on it: the next one would move under the reader.
const isHeld = () => shown !== null && panels.some(({ canvas }) => canvas === document.activeElement || canvas.matches(":hover"));

function useNewest() {
  if (newest !== shown) {
    shown = newest;
    if (shown) fill();
    else byId("timeline").replaceChildren();
    drawTimeline();
  }
  showText();
}

function showText() {
  const where = shown?.kind === "last" ? `step ${whole(shown.step)}` : `a typical step near step ${whole(shown?.step)} of its layout`;
  const held = isHeld() && newest !== shown ? "paused while you read it" : "";
  const words = shown ? [where, "first replica", shown.note, held] : ["no step is recorded yet"];
  setText(byId("timeline-text"), words.filter(Boolean).map((text) => oneLine(text)).join(", "));
}

function fill() {
  const place = byId("timeline");
  if (!place.firstChild) {
    parts = {
      legend: el("p", { class: "legend" }),
      pictures: el("div"),
      tip: el("p", { class: "tip", "aria-live": "off" }, NOTHING),
      table: tableOf(),
    };
    panels = [];
    place.append(parts.legend, parts.pictures, parts.tip, el("div", { class: "scroll" }, parts.table));
  }
  const timelines = [["Measured", shown.measured], ["Predicted", shown.predicted]].filter(([, one]) => one?.intervals.length);
  panels = timelines.map(([name, timeline]) => ({
    ...(panels.find((one) => one.name === name) ?? newPanel(name)),
    timeline,
    lanes: lanesOf(timeline),
    chosen: null,
  }));
  const nodes = panels.flatMap(({ title, canvas }) => [title, canvas]);
  if (nodes.length !== parts.pictures.children.length || nodes.some((node, at) => node !== parts.pictures.children[at])) {
    parts.pictures.replaceChildren(...nodes);
  }
  for (const { title, timeline } of panels) setText(title.lastChild, ` ${seconds(endOf(timeline))}`);
  const kinds = new Set(timelines.flatMap(([, timeline]) => timeline.intervals.map((one) => one.what)));
  keyed(parts.legend, Object.keys(NAMES).filter((kind) => kinds.has(kind)), (kind) => kind,
    (kind) => el("span", {}, el("i", { class: `swatch op-${kind}` }), NAMES[kind]), () => {});
  fillTable(parts.table);
}

function newPanel(name) {
  const label = `${name} step. Left and right move over the operations of a stage, up and down over the stages. The table below has the numbers.`;
  const canvas = el("canvas", { tabindex: 0, role: "application", "aria-label": label });
  const panel = () => panels.find((one) => one.canvas === canvas);
  canvas.addEventListener("pointermove", (event) => point(panel(), event));
  canvas.addEventListener("pointerdown", (event) => point(panel(), event));
  canvas.addEventListener("pointerleave", (event) => {
    // A finger leaves at the end of a tap, which gives the canvas the focus.
    if (canvas !== document.activeElement && event.pointerType !== "touch") leave(panel());
  });
  canvas.addEventListener("keydown", (event) => pressKey(panel(), event));
  canvas.addEventListener("blur", () => leave(panel()));
  return { name, canvas, title: el("h3", {}, name, el("small")) };
}

const endOf = (timeline) => timeline.intervals.reduce((end, one) => Math.max(end, one.stop_seconds), 0);

function lanesOf(timeline) {
  const lanes = new Map();
  for (const one of timeline.intervals) {
    const key = `${one.stage} ${one.rank}`;
    if (!lanes.has(key)) lanes.set(key, { stage: one.stage, rank: one.rank, intervals: [] });
    lanes.get(key).intervals.push(one);
  }
  for (const lane of lanes.values()) lane.intervals.sort((a, b) => a.start_seconds - b.start_seconds);
  return [...lanes.values()].sort((a, b) => a.stage - b.stage || a.rank - b.rank);
}

function tableOf() {
  const columns = ["Stage", ...PARTS, "bubble"].map((name) => el("th", { scope: "col" }, name));
  return el("table", { class: "stages" }, el("caption"), el("thead", {}, el("tr", {}, ...columns)), el("tbody"));
}

function fillTable(table) {
  const total = (stage) => PARTS.reduce((sum, part) => sum + stage[`${part}_seconds`], 0);
  const texts = (stage) => [
    ...PARTS.map((part) => seconds(stage[`${part}_seconds`])),
    percent(1 - stage.compute_seconds / (total(stage) || 1), 0),
  ];
  const predictedOf = (number) => (shown.forecast?.stages[number] ? texts(shown.forecast.stages[number]) : null);
  setText(table.caption, shown.forecast ? "Measured / predicted" : "Measured. With a profile or a plan, the prediction stands beside it.");
  keyed(
    table.tBodies[0],
    shown.stages.map((stage, number) => ({ number, measured: texts(stage), predicted: predictedOf(number) })),
    (row) => row.number,
    (row) => el("tr", {}, el("th", { scope: "row" }, String(row.number)), ...row.measured.map(() => el("td", {}, el("span"), el("small")))),
    (node, row) => row.measured.forEach((text, at) => {
      setText(node.cells[at + 1].firstChild, text);
      setText(node.cells[at + 1].lastChild, row.predicted ? ` / ${row.predicted[at]}` : "");
    }),
  );
}

export function drawTimeline() {
  if (!shown) return;
  const end = Math.max(0, ...panels.map(({ timeline }) => endOf(timeline)));
  const colour = colours();
  const font = getComputedStyle(document.body).fontFamily;
  for (const panel of panels) {
    const { canvas, lanes } = panel;
    const width = canvas.clientWidth || 600;
    const height = lanes.length * LANE + 4;
    canvas.width = width * devicePixelRatio;
    canvas.height = height * devicePixelRatio;
    canvas.style.height = `${height}px`;
    const context = canvas.getContext("2d");
    context.scale(devicePixelRatio, devicePixelRatio);
    context.font = `11px ${font}`;
    context.textBaseline = "middle";
    panel.scale = (width - LABEL - 4) / (end || 1);
    lanes.forEach((lane, row) => drawLane(context, lane, { y: row * LANE + 2, width, scale: panel.scale, colour }));
    if (panel.chosen) drawChosen(context, panel, colour("chosen"));
  }
}

function drawChosen(context, { lanes, chosen, scale }, colour) {
  const one = lanes[chosen.row].intervals[chosen.at];
  const size = Math.max(3, (one.stop_seconds - one.start_seconds) * scale);
  context.strokeStyle = colour;
  context.lineWidth = 2;
  context.strokeRect(LABEL + one.start_seconds * scale, chosen.row * LANE + 2, size, LANE - 6);
}

// A canvas takes no variables of the style sheet: read the colours from elements that have them.
function colours() {
  const place = byId("timeline");
  const found = Object.fromEntries([...Object.keys(NAMES), "text", "chosen"].map((name) => {
    const probe = place.appendChild(el("i", { class: `op-${name}` }));
    const colour = getComputedStyle(probe).backgroundColor;
    probe.remove();
    return [name, colour];
  }));
  return (name) => found[name];
}

function drawLane(context, lane, { y, width, scale, colour }) {
  context.fillStyle = colour("text");
  context.textAlign = "left";
  context.fillText(`Stage ${lane.stage}`, 0, y + (LANE - 6) / 2);
  context.fillStyle = colour("wait");
  context.fillRect(LABEL, y, width - LABEL - 4, LANE - 6);
  context.textAlign = "center";
  for (const one of lane.intervals) {
    const left = LABEL + one.start_seconds * scale;
    const size = Math.max(0.4, (one.stop_seconds - one.start_seconds) * scale);
    if (one.what === "wait") continue;
    const computes = COMPUTE.has(one.what) || one.what === "optimizer";
    context.fillStyle = colour(NAMES[one.what] ? one.what : "optimizer");
    const gap = size > 3 ? 0.6 : 0;
    context.fillRect(left, computes ? y : y + LANE - 10, size - gap, computes ? LANE - 6 : 4);
    if (computes && size > 16 && one.microbatch >= 0) {
      context.fillStyle = "#fff";
      context.fillText(String(one.microbatch), left + size / 2, y + (LANE - 6) / 2);
    }
  }
}

// ---------------------------------------------------------------- reading by pointer and keyboard

function point(panel, event) {
  const lane = panel.lanes[Math.floor(event.offsetY / LANE)];
  const at = (event.offsetX - LABEL) / panel.scale;
  const found = lane?.intervals.filter((one) => one.start_seconds <= at && at < one.stop_seconds) ?? [];
  parts.tip.setAttribute("aria-live", "off");
  setText(parts.tip, found.length ? textOf(found.find((one) => one.what !== "wait") ?? found[0]) : NOTHING);
}

function pressKey(panel, event) {
  const { row, at } = panel.chosen ?? { row: 0, at: -1 };
  const last = panel.lanes[row].intervals.length - 1;
  const actions = {
    ArrowLeft: () => ({ row, at: Math.max(0, at - 1) }),
    ArrowRight: () => ({ row, at: Math.min(last, at + 1) }),
    ArrowUp: () => sameTime(panel, Math.max(0, row - 1)),
    ArrowDown: () => sameTime(panel, Math.min(panel.lanes.length - 1, row + 1)),
    Home: () => ({ row, at: 0 }),
    End: () => ({ row, at: last }),
    Escape: () => null,
  };
  if (!actions[event.key] || event.ctrlKey || event.metaKey || event.altKey) return;
  event.preventDefault();
  panel.chosen = actions[event.key]();
  parts.tip.setAttribute("aria-live", "polite");
  setText(parts.tip, panel.chosen ? textOf(panel.lanes[panel.chosen.row].intervals[panel.chosen.at]) : NOTHING);
  drawTimeline();
}

// The operation of a stage that is nearest in time to the chosen one.
function sameTime({ lanes, chosen }, row) {
  if (!chosen) return { row: 0, at: 0 };
  const middle = (one) => (one.start_seconds + one.stop_seconds) / 2;
  const wanted = middle(lanes[chosen.row].intervals[chosen.at]);
  const distances = lanes[row].intervals.map((one) => Math.abs(middle(one) - wanted));
  return { row, at: distances.indexOf(Math.min(...distances)) };
}

function leave(panel) {
  if (panel) panel.chosen = null;
  setText(parts.tip, NOTHING);
  if (!isHeld() && newest !== shown) useNewest();
  else drawTimeline();
}

function textOf(one) {
  const batch = one.microbatch >= 0 ? `, micro-batch ${one.microbatch}` : "";
  return `Stage ${one.stage}, rank ${one.rank}: ${NAMES[one.what] ?? one.what}${batch}, ${seconds(one.stop_seconds - one.start_seconds)} from ${seconds(one.start_seconds)}`;
}
