// The numbers at the top, the ledger, checkpoints, events and problems.

import { byId, el, keyed, setText } from "./dom.js";
import { clock, count, number, oneLine, percent, seconds, visible, whole } from "./format.js";

const FACTS = [
  ["Step", (view) => whole(view.step), (view) => (view.num_steps ? `of ${whole(view.num_steps)}` : "")],
  ["Loss", (view) => number(view.loss, 5), (view) => (view.step_seconds ? `${seconds(view.step_seconds)} per step` : "")],
  ["Samples / s", (view) => number(view.samples_per_second), tokens],
  ["Machines", (view) => whole(view.machines.filter(works).length), spare],
  ["Time left", (view) => seconds(view.eta_seconds), (view) => `running ${seconds(view.at - view.begun_at)}`],
  ["Goodput", (view) => percent(view.ledger?.goodput), changes],
];

export const works = (machine) => machine.state.startsWith("at work");

function tokens(view) {
  const mfu = view.mfu === null ? "" : `MFU ${percent(view.mfu)}`;
  const speed = view.tokens_per_second ? `${number(view.tokens_per_second)} tokens/s` : "";
  return [speed, mfu].filter(Boolean).join(", ");
}

function spare(view) {
  const others = view.machines.length - view.machines.filter(works).length;
  return others ? `at work; ${whole(others)} more known` : "at work";
}

function changes(view) {
  return `${count(view.morphs, "morph")}, ${view.losses === 1 ? "1 loss" : `${whole(view.losses)} losses`}`;
}

export function showFacts(view) {
  keyed(
    byId("facts"),
    FACTS,
    ([name]) => name,
    ([name]) => el("div", {}, el("dt", {}, name), el("dd", { class: "value" }), el("dd", { class: "note" })),
    (tile, [name, value, note]) => {
      setText(tile.children[1], value(view));
      setText(tile.children[2], note(view));
      if (name === "Step") showProgress(tile, view);
    },
  );
}

function showProgress(tile, view) {
  const bar = tile.querySelector("progress") ?? tile.appendChild(el("progress", { "aria-label": "Steps" }));
  bar.max = view.num_steps || 1;
  bar.value = view.num_steps ? view.step : 0;
  bar.hidden = !view.num_steps;
}

export function showProblems(view) {
  const list = byId("problems");
  const found = Object.entries(view.problems);
  list.hidden = !found.length;
  keyed(list, found, ([topic]) => topic, () => el("li"), (item, [topic, why]) => {
    setText(item, `${oneLine(topic)}: ${oneLine(why, 600)}`);
  });
}

const KINDS = {
  bad: ["machine lost", "recovering", "holding", "cold restart", "failed", "no checkpoint", "broken checkpoint", "join failed",
    "no plan", "agent not started"],
  change: ["generation", "morphed", "warm restart"],
  warn: ["slow machine", "notice", "generation ended", "change postponed", "store ended", "caller refused", "joiner refused",
    "machine list", "list ignored", "journal", "event log", "ledger", "metrics endpoint"],
};
const KIND_OF = new Map(Object.entries(KINDS).flatMap(([kind, names]) => names.map((name) => [name, kind])));

export const kindOf = (what) => KIND_OF.get(what) ?? "plain";

export function showEvents(view) {
  const events = view.events.slice(-100).reverse();
  setText(byId("events-text"), events.length ? "" : "none yet");
  keyed(
    byId("events"),
    events,
    (event) => `${event.at} ${event.what} ${event.why}`,
    (event) =>
      el(
        "li",
        { class: kindOf(event.what) },
        el("time", { datetime: new Date(event.at * 1000).toISOString() }, clock(event.at)),
        el("div", {}, el("b", {}, oneLine(event.what)), " ", oneLine(event.why)),
      ),
    () => {},
  );
}

const CAUSES = ["useful", "saving", "redoing", "morphing", "waiting", "idle"];

export function showLedger(ledger) {
  const place = byId("ledger");
  if (!ledger || !ledger.paid_seconds) {
    setText(byId("ledger-text"), "no machine was paid yet");
    place.replaceChildren();
    return;
  }
  const amounts = { useful: ledger.useful_seconds, ...ledger.lost_seconds };
  const share = (cause) => (amounts[cause] ?? 0) / ledger.paid_seconds;
  setText(byId("ledger-text"), `${percent(ledger.goodput)} of ${seconds(ledger.paid_seconds)} of machine time trained`);
  const bar = el("div", { class: "stack", "aria-hidden": "true" });
  const rows = el("dl", { class: "pairs causes" });
  for (const cause of CAUSES) {
    const part = el("i", { class: cause });
    part.style.width = `${share(cause) * 100}%`;
    bar.append(part);
    rows.append(
      el("dt", {}, el("i", { class: `swatch ${cause}` }), cause),
      el("dd", {}, `${seconds(amounts[cause] ?? 0)}, ${percent(share(cause))}`),
    );
  }
  if (ledger.money) {
    rows.append(el("dt", {}, "money"), el("dd", {}, `${number(ledger.money.paid)}, ${number(ledger.money.paid - ledger.money.useful, 3)} of it lost`));
  }
  const worst = ledger.worst.slice(0, 3).map((one) =>
    el("li", {}, oneLine(one.why, 160), el("span", {}, seconds(Object.values(one.lost).reduce((a, b) => a + b, 0)))),
  );
  const list = worst.length ? [el("h3", {}, "Most expensive interruptions"), el("ol", { class: "worst" }, ...worst)] : [];
  place.replaceChildren(bar, rows, ...list);
}

export function showCheckpoints(view) {
  const every = view.save_every_seconds ? `every ${seconds(view.save_every_seconds)}` : "";
  const rows = [
    ["store", visible(view.store) || "–"],
    ["saved step", view.saved_step === null ? "nothing saved yet" : whole(view.saved_step)],
    ["next save", view.phase === "over" ? "–" : view.next_save_seconds === null ? every || "–" : `in ${seconds(view.next_save_seconds)} (${every || "automatic"})`],
    ["training waited", view.save_seconds ? `${seconds(view.save_seconds)} for the last one` : "–"],
  ];
  showPairs(byId("checkpoints"), rows);
}

export function showScalars(view) {
  const rows = Object.entries(view.scalars ?? {}).map(([name, value]) => [name, number(value)]);
  byId("scalars-part").hidden = !rows.length;
  showPairs(byId("scalars"), rows);
}

function showPairs(list, rows) {
  keyed(
    list,
    rows,
    ([name]) => name,
    ([name]) => el("div", {}, el("dt", {}, oneLine(name)), el("dd")),
    (row, [, value]) => setText(row.lastChild, value),
  );
}

