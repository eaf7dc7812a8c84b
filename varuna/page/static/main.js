// Starts the page: takes the token, follows the job, and gives each part of the page its data.

import { follow, get, loader, takeToken } from "./api.js";
import { redrawCurve, showCurve, startCurve } from "./chart.js";
import { byId, setText } from "./dom.js";
import { showCheckpoints, showEvents, showFacts, showLedger, showProblems, showScalars } from "./facts.js";
import { clock, oneLine } from "./format.js";
import { openLog, startLogs, updateLogs } from "./logs.js";
import { showLayout, showMachines } from "./machines.js";
import { drawTimeline, showTimeline } from "./timeline.js";

const PHASES = { running: "good", morphing: "warn", saving: "warn", ending: "warn", finished: "plain", failed: "bad", stopped: "plain" };
const ENDS = ["finished", "failed", "stopped"];
const loadTimeline = loader(async () => showTimeline(await get("/api/timeline")));
let last = null; // the last update

function show(update) {
  last = update;
  setLink(update.link);
  setNotice(noticeOf(update));
  setText(byId("log-dir"), `Logs: ${update.log_dir}`);
  if (update.view) showView(update);
  else setText(byId("phase"), "no view yet");
  updateLogs(update.view);
  showCurve(`${update.last_step} ${update.num_events}`, update.link === "live" ? update.at : null);
  loadTimeline(update.timeline);
}

function showView({ view, link }) {
  const end = link === "over" ? view.events.findLast((event) => ENDS.includes(event.what)) : undefined;
  const phase = end?.what ?? view.phase;
  document.title = `${view.step} · ${oneLine(view.job)} · Varuna`;
  setText(byId("job"), oneLine(view.job));
  setText(byId("phase"), phase);
  byId("phase").className = `badge ${PHASES[phase] ?? "plain"}`;
  setText(byId("reason"), oneLine(end?.why ?? view.reason));
  showFacts(view);
  showProblems(view);
  showLayout(view, openLog);
  showMachines(view, link === "live");
  showEvents(view);
  showLedger(view.ledger);
  showCheckpoints(view);
  showScalars(view);
}

function noticeOf(update) {
  if (update.link === "live") return "";
  if (update.link === "over") return update.view ? "" : "The job is over. It left no view.";
  const at = update.view ? ` The page shows its last view, of ${clock(update.view.at, { date: true })}.` : "";
  if (update.link === "gone") return `${goneText(update)}${at} \`varuna run --resume\` resumes the job.`;
  const seen = update.seen_at ? ` since ${clock(update.seen_at, { date: true })}` : "";
  return `The manager does not answer${seen} (${oneLine(update.problem)}).${at} If it was killed, \`varuna run --resume\` resumes the job.`;
}

function goneText(update) {
  const seen = update.seen_at ? ` since ${clock(update.seen_at, { date: true })}` : "";
  return `The manager is gone${seen}: its process has ended, and the job has not.`;
}

function lost(error) {
  if (error?.status === 403) {
    setLink("lost");
    setNotice("This tab has no valid token. Open the address that Varuna printed.");
    return;
  }
  if (error?.status === 503) {
    setNotice("Too many tabs show this job. Close one.");
    return;
  }
  setLink("lost");
  const at = last ? ` This is the last view, of ${clock(last.at, { date: true })}.` : "";
  const command = last ? ` \`varuna page ${last.log_dir}\` shows the job again.` : "";
  setNotice(`${endText()}${at}${command}`);
}

function endText() {
  if (last?.link === "over") return "The job is over, and its page has ended.";
  if (last?.link === "gone") return `${goneText(last)} Its page has ended with it. \`varuna run --resume\` resumes the job.`;
  return "The server of this page does not answer.";
}

function setLink(state) {
  const words = { live: "live", over: "job is over", lost: "not connected", gone: "manager is gone" };
  byId("link").className = state === "gone" ? "lost" : state;
  setText(byId("link").lastChild, words[state]);
}

function setNotice(text) {
  byId("notice").hidden = !text;
  setText(byId("notice"), text);
}

function startTheme() {
  const names = { auto: "Auto", light: "Light", dark: "Dark" };
  const use = (name) => {
    document.documentElement.dataset.theme = name;
    setText(byId("theme"), names[name]);
    byId("theme").setAttribute("aria-label", `Colours: ${names[name]}`);
    redraw();
  };
  const order = Object.keys(names);
  byId("theme").addEventListener("click", () => {
    const next = order[(order.indexOf(document.documentElement.dataset.theme) + 1) % order.length];
    localStorage.setItem("varuna-theme", next);
    use(next);
  });
  use(order.includes(localStorage.getItem("varuna-theme")) ? localStorage.getItem("varuna-theme") : "auto");
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
}

function redraw() {
  redrawCurve();
  drawTimeline();
}

startCurve();
startLogs();
startTheme();
new ResizeObserver(redraw).observe(document.querySelector("main"));
if (takeToken()) follow(show, lost);
else lost({ status: 403 });
