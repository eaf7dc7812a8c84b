// Logs of workers, page by page. Only a few pages are in memory, however long the log is.

import { get } from "./api.js";
import { byId, el, keyed, setText } from "./dom.js";
import { bytes, visible, whole } from "./format.js";

const MAX_PAGES = 4;
const MAX_LINE = 4000;
const FOLLOW_MS = 2000;

const place = () => byId("log");
const chosen = { generation: null, rank: 0, stream: "out" };
let pages = []; // { start, stop, node }
let end = 0;
let current = null; // generation that runs
let known = null;
let ranksOfLayout = [];
let busy = Promise.resolve();

// Run one request after the other: their results move the same window.
function inTurn(work) {
  busy = busy.then(work).catch((error) => setText(byId("log-text"), `no answer (${error.message})`));
  return busy;
}

export function startLogs() {
  byId("log-generation").addEventListener("change", (event) => choose({ generation: Number(event.target.value) }));
  byId("log-rank").addEventListener("change", (event) => choose({ rank: Number(event.target.value) }));
  for (const radio of document.getElementsByName("stream")) {
    radio.addEventListener("change", () => choose({ stream: radio.value }));
  }
  byId("log-earlier").addEventListener("click", () => inTurn(earlier));
  byId("log-latest").addEventListener("click", () => inTurn(latest));
  place().addEventListener("scroll", () => {
    if (place().scrollTop < 40 && pages.length && pages[0].start > 0 && !byId("log-earlier").disabled) inTurn(earlier);
  });
  place().addEventListener("wheel", (event) => {
    if (event.deltaY < 0) byId("log-follow").checked = false;
  }, { passive: true });
  place().addEventListener("keydown", (event) => {
    if (["ArrowUp", "PageUp", "Home"].includes(event.key)) byId("log-follow").checked = false;
  });
  setInterval(() => {
    if (byId("log-follow").checked && !document.hidden && known !== null) inTurn(newer);
  }, FOLLOW_MS);
}

// Show the logs of the current layout as choices; follow the job into its next generation.
export function updateLogs(view) {
  const generation = view?.layout?.generation ?? null;
  ranksOfLayout = view?.layout ? view.layout.stage_map.flat() : [];
  if (known === null || generation !== current) {
    const follows = known === null || (chosen.generation === current && byId("log-follow").checked);
    current = generation;
    inTurn(() => loadIndex(follows));
  }
}

export function openLog(rank) {
  byId("log-follow").checked = true;
  choose({ rank, generation: current ?? chosen.generation });
  place().scrollIntoView({ block: "center" });
  place().focus({ preventScroll: true });
}

function choose(change) {
  const other = change.generation !== undefined && change.generation !== chosen.generation;
  Object.assign(chosen, change);
  inTurn(async () => {
    if (other) await loadIndex(false);
    else showChoices();
    await latest();
  });
}

async function loadIndex(follows) {
  const found = await get("/api/logs", { generation: follows ? current : chosen.generation });
  const generations = new Set(found.generations);
  if (current !== null) generations.add(current);
  if (follows || chosen.generation === null) chosen.generation = current ?? found.generations.at(-1) ?? null;
  const ranks = chosen.generation === current && ranksOfLayout.length ? [...ranksOfLayout] : found.ranks;
  known = { generations: [...generations].sort((a, b) => b - a), ranks: ranks.sort((a, b) => a - b) };
  if (!known.ranks.includes(chosen.rank) && known.ranks.length) chosen.rank = known.ranks[0];
  showChoices();
  if (follows) await latest();
}

function showChoices() {
  const options = (select, values, value, label) => {
    keyed(select, values, (one) => one, (one) => el("option", { value: one }, label(one)), () => {});
    select.value = value;
  };
  options(byId("log-generation"), known.generations, chosen.generation, (one) => (one ? String(one) : "–"));
  options(byId("log-rank"), known.ranks, chosen.rank, String);
  for (const radio of document.getElementsByName("stream")) radio.checked = radio.value === chosen.stream;
}

const request = (more) => get("/api/log", { ...chosen, ...more });

async function latest() {
  if (chosen.generation === null) return;
  const page = await request({});
  pages = [];
  place().replaceChildren();
  add(page, "end");
  place().scrollTop = place().scrollHeight;
}

async function earlier() {
  if (!pages.length || pages[0].start === 0) return;
  byId("log-follow").checked = false;
  const before = place().scrollHeight - place().scrollTop;
  add(await request({ stop: pages[0].start }), "start");
  place().scrollTop = place().scrollHeight - before;
}

async function newer() {
  if (!pages.length) return latest();
  const page = await request({ start: pages.at(-1).stop });
  if (page.problem || page.stop <= page.start) return;
  if (page.end - page.start > 8 * (page.stop - page.start)) return latest(); // it grows faster than we read
  add(page, "end");
  place().scrollTop = place().scrollHeight;
}

function add(page, side) {
  end = Math.max(page.end, side === "end" ? page.stop : end);
  if (page.problem) {
    setText(byId("log-text"), visible(page.problem));
    return;
  }
  const lines = visible(page.text).split("\n").map((line) =>
    line.length > MAX_LINE ? `${line.slice(0, MAX_LINE)} … ${line.length - MAX_LINE} more characters` : line);
  const node = el("pre", {}, lines.join("\n"));
  const entry = { start: page.start, stop: page.stop, node };
  if (side === "start") {
    pages.unshift(entry);
    place().prepend(node);
    while (pages.length > MAX_PAGES) pages.pop().node.remove();
  } else {
    const last = pages.at(-1);
    if (last && last.node.textContent.length + page.text.length < 20000) {
      last.node.append(lines.join("\n"));
      last.stop = page.stop;
    } else {
      pages.push(entry);
      place().append(node);
    }
    while (pages.length > MAX_PAGES) pages.shift().node.remove();
  }
  byId("log-earlier").disabled = pages[0].start === 0;
  const first = pages[0].start;
  setText(byId("log-text"), end ? `bytes ${whole(first)} to ${whole(pages.at(-1).stop)} of ${bytes(end)}` : "empty");
}
