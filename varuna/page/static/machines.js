// The table of machines, and the layout as a picture: one column for each stage, one cell for each rank.

import { byId, el, keyed, setText } from "./dom.js";
import { works } from "./facts.js";
import { bytes, count, oneLine, seconds, whole } from "./format.js";

const MAX_ROWS = 100;
const MAX_LARGE = 64; // cells with text; more are small squares
const MAX_CELLS = 4096;
const COLUMNS = ["Machine", "State", "Ranks", "Step", "Compute | waiting", "Memory", "Heartbeat"];

let last = null; // the arguments of the last `showMachines`

export function stateOf(machine) {
  if (machine === undefined || /lost|ending|absent/.test(machine.state)) return "bad";
  if (machine.slow || /leav|not listed/.test(machine.state)) return "warn";
  return works(machine) ? "good" : "plain";
}

export function showMachines(view, isLive) {
  last = [view, isLive];
  const table = byId("machines");
  if (!table.tHead) {
    table.append(
      el("thead", {}, el("tr", {}, ...COLUMNS.map((name) => el("th", { scope: "col" }, name)))),
      el("tbody"),
    );
    byId("machine-filter").addEventListener("input", () => showMachines(...last));
  }
  const wanted = byId("machine-filter").value.trim().toLowerCase();
  const fits = (machine) => `${machine.name} ${machine.state} ${machine.slow ? "slow" : ""}`.toLowerCase().includes(wanted);
  const found = view.machines.filter(fits);
  const order = { bad: 0, warn: 1, plain: 2, good: 3 };
  if (found.length > MAX_ROWS) found.sort((a, b) => order[stateOf(a)] - order[stateOf(b)]);
  const hidden = Math.max(0, found.length - MAX_ROWS);
  const slow = view.machines.filter((machine) => machine.slow).length;
  setText(
    byId("machines-text"),
    [
      `${count(view.machines.filter(works).length, "machine")} at work`,
      slow ? `${slow} slow` : "",
      hidden ? `${whole(hidden)} more than shown: filter them` : "",
    ].filter(Boolean).join(", "),
  );
  keyed(table.tBodies[0], found.slice(0, MAX_ROWS), (machine) => machine.name, makeRow, (row, machine) => updateRow(row, machine, isLive));
}

function makeRow(machine) {
  return el(
    "tr",
    {},
    el("th", { scope: "row" }, oneLine(machine.name)),
    el("td", {}, el("span", { class: "badge" })),
    ...[2, 3].map(() => el("td")),
    el("td", {}, el("span", { class: "split", "aria-hidden": "true" }, el("i"), el("i")), el("span")),
    el("td", {}, el("span", { class: "split", "aria-hidden": "true" }, el("i")), el("span")),
    el("td"),
  );
}

function updateRow(row, machine, isLive) {
  const cells = row.cells;
  const badge = cells[1].firstChild;
  setText(badge, machine.slow ? `${oneLine(machine.state)}, slow` : oneLine(machine.state));
  badge.className = `badge ${stateOf(machine)}`;
  setText(cells[2], ranges(machine.ranks));
  setText(cells[3], machine.step === null ? "–" : whole(machine.step));
  const step = machine.step_seconds || 0;
  cells[4].firstChild.hidden = !step;
  cells[4].firstChild.firstChild.style.width = step ? `${Math.min(100, (100 * (machine.compute_seconds ?? 0)) / step)}%` : "0";
  setText(cells[4].lastChild, step ? `${seconds(machine.compute_seconds)} | ${seconds(machine.wait_seconds)}` : "–");
  const limit = machine.memory_limit;
  cells[5].firstChild.hidden = !limit;
  if (limit) cells[5].firstChild.firstChild.style.width = `${Math.min(100, (100 * machine.memory_bytes) / limit)}%`;
  setText(cells[5].lastChild, machine.memory_bytes ? bytes(machine.memory_bytes) + (limit ? ` of ${bytes(limit)}` : "") : "–");
  setText(cells[6], machine.seen_seconds_ago === null || !isLive ? "–" : `${machine.seen_seconds_ago.toFixed(0)} s ago`);
}

export function ranges(ranks) {
  const parts = [];
  for (const rank of [...ranks].sort((a, b) => a - b)) {
    const part = parts.at(-1);
    if (part && part[1] === rank - 1) part[1] = rank;
    else parts.push([rank, rank]);
  }
  return parts.map(([first, end]) => (first === end ? first : `${first}–${end}`)).join(", ") || "–";
}

// ---------------------------------------------------------------- layout

export function showLayout(view, openLog) {
  const place = byId("layout");
  const layout = view.layout;
  setText(byId("layout-text"), layout ? `generation ${layout.generation}: ${layout.text}` : "no layout yet");
  if (!layout) {
    place.replaceChildren();
    return;
  }
  const machineOf = new Map();
  for (const machine of view.machines) for (const rank of machine.ranks) machineOf.set(rank, machine);
  const cells = layout.widths.reduce((sum, width) => sum + width, 0);
  if (cells > MAX_CELLS) {
    place.replaceChildren(el("p", { class: "hint" }, `${count(cells, "rank")}: too many to draw`));
    return;
  }
  place.classList.toggle("small", cells > MAX_LARGE);
  keyed(
    place,
    layout.stage_map.map((ranks, stage) => ({ ranks, stage })),
    (column) => column.stage,
    (column) => el("div", { class: "stage" }, el("h3", {}, `Stage ${column.stage}`), el("div", { class: "ranks" })),
    (node, column) =>
      keyed(
        node.lastChild,
        column.ranks,
        (rank) => rank,
        (rank) =>
          el(
            "button",
            { type: "button", on: { click: () => openLog(rank) } },
            el("b", {}, String(rank)),
            el("span"),
          ),
        (cell, rank) => updateCell(cell, rank, { stage: column.stage, machine: machineOf.get(rank), phase: view.phase }),
      ),
  );
}

function updateCell(cell, rank, { stage, machine, phase }) {
  const name = machine ? oneLine(machine.name) : "no machine";
  const state = phase === "running" ? stateOf(machine) : machine ? "plain" : "bad";
  cell.className = state;
  setText(cell.lastChild, name);
  const label = `Rank ${rank}, stage ${stage}, ${name}${machine ? `, ${machine.state}` : ""}${machine?.slow ? ", slow" : ""}: show its log`;
  if (cell.getAttribute("aria-label") !== label) {
    cell.setAttribute("aria-label", label);
    cell.title = label;
  }
}
