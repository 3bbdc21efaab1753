// Draws a snapshot of gpunb (docs/snapshot.md). Depends on nothing, and decides nothing: what
// waits for what, what is free and who holds it are in the snapshot.
//
//   const view = render(element, snapshot, { actions, kernels });
//   view.update(next, kernels);  view.dispose();
//
// actions, each may be missing and may return a promise: cancel(job, force), interrupt(job),
// kill(actor), stop(sweep), goTo(job), logs(job, position) -> {text, truncated, position, state},
// the text from a position on. A rejected promise is shown with its message. Where there is
// openLogs(job), it shows the log elsewhere.
// kernels: snapshots of further kernels; what they hold of shared devices is drawn grey.
// busy: what to say while an answer takes its time.
// clock: the kernel's, if others hear its messages too; else each snapshot is taken to be fresh.
// memory: what the user has folded, filtered and seen, for the next view: see `Memory`.
//
// A snapshot may be of several sessions together. Then each job and actor has a `key` of its own,
// which stands in `held` and goes to the actions instead of its number, and an `owner`, its notebook.

import { actorRow, finishedRow, runningRow, waitingRow } from "./actions.js";
import { Chart } from "./chart.js";
import { Calm, Clock } from "./clock.js";
import { deviceElement, drawDevice } from "./devices.js";
import { keyed, make, roving, setHidden, setText } from "./elements.js";
import { Memory, gpuRate, newsOf, whole } from "./facts.js";
import { grouped } from "./groups.js";
import { onKey } from "./keys.js";
import { Log } from "./log.js";
import { Filter, Rows, toggle } from "./rows.js";
import { actorText, keyOf, known, lineText, notebookText, shareText, timeText, tookText } from "./texts.js";
import { Tip } from "./tip.js";

export { plainText } from "./ansi.js";
export { Calm, Clock } from "./clock.js";
export { drawShares } from "./devices.js";
export { statesText } from "./groups.js";
export { Memory, failures, gpuRate, isPrivate } from "./facts.js";
export { deviceText, devicesText, printable, shareText } from "./texts.js";

const TICK = 1000; // milliseconds between two looks at the clock, and at an open log
const BUSY = 3000; // milliseconds without an answer, after which the user is told why

export function render(element, snapshot, options = {}) {
  const view = new View(element, options);
  view.update(snapshot, options.kernels);
  return {
    update: (next, kernels) => view.update(next, kernels),
    dispose: () => view.dispose(),
  };
}

class View {
  constructor(element, options) {
    this.actions = options.actions || {};
    this.memory = options.memory || new Memory();
    this.busy = options.busy || "Waiting for the kernel, which is busy; Stop interrupts its cell.";
    this.root = make("div", "gpunb-monitor", { role: "region", "aria-label": "GPU monitor" });
    this.summary = make("p", "gm-summary");
    this.notes = make("ul", "gm-notes", { "aria-label": "Warnings" });
    this.devices = make("ul", "gm-devices", { "aria-label": "Devices" });
    this.filter = new Filter(this);
    this.lists = {
      actors: new Rows(this, "Actors and sessions", actorRow),
      running: new Rows(this, "Running", runningRow),
      waiting: new Rows(this, "Waiting", waitingRow),
      finished: new Rows(this, "Finished", finishedRow, true),
    };
    this.opened = this.memory.opened;
    this.chart = new Chart();
    this.log = new Log(this);
    this.live = make("div", "gm-live", { "aria-live": "polite", role: "status" });
    this.problem = make("p", "gm-problem", { role: "alert" });
    setHidden(this.problem, true);
    this.root.append(this.summary, this.problem, this.notes, this.devices, this.filter.element);
    for (const rows of Object.values(this.lists)) this.root.append(rows.element);
    this.root.append(this.chart.element, this.log.element, this.live);
    this.tip = new Tip(this.root);
    this.root.addEventListener("keydown", (event) => onKey(this, event));
    this.root.addEventListener("focusin", ({ target }) => {
      const item = target.closest(".gm-row, .gm-lane > button");
      if (item) roving(item.closest(".gm-rows, .gm-lane"), item);
    });
    element.append(this.root);
    this.calm = new Calm();
    this.calm.watch(this.root);
    this.fresh = !options.clock;
    this.clock_ = options.clock || new Clock();
    this.clocks = new Map(); // element -> seconds at the time of the snapshot
    this.timer = setInterval(() => {
      this.tick();
      void this.log.follow();
    }, TICK);
  }

  update(snapshot, kernels) {
    if (snapshot) this.calm.draw(() => this.draw(whole(snapshot), kernels));
  }

  draw(snapshot, kernels) {
    const news = newsOf(this.snapshot, snapshot);
    this.snapshot = snapshot;
    this.kernels = kernels || this.kernels || [];
    if (this.fresh) {
      this.clock_.reset();
      this.clock_.hear(snapshot.time);
    }
    this.redraw();
    if (news) setText(this.live, news);
  }

  // The same snapshot, as after the user has folded a list
  redraw() {
    const { snapshot } = this;
    this.clocks.clear();
    keyed(this.notes, snapshot.warnings, (text) => text, () => make("li"), setText);
    setHidden(this.notes, !snapshot.warnings.length);
    keyed(this.devices, snapshot.devices, (each) => each.key, deviceElement, (element, each) =>
      drawDevice(this, element, each));
    const actors = snapshot.actors.map((each) => ({ ...each, name: actorText(each) }));
    const lists = grouped({ ...snapshot, actors });
    this.filter.draw(snapshot, Object.values(lists).flatMap(({ items }) => items));
    for (const [name, rows] of Object.entries(this.lists)) rows.draw(lists[name].items, lists[name].count);
    this.chart.draw(snapshot);
    this.root.classList.toggle("gm-ended", Boolean(snapshot.ended));
    this.tip.again();
    this.tick();
  }

  clock(element, seconds) {
    if (known(seconds)) this.clocks.set(element, seconds);
    if (!known(seconds)) setText(element, "");
    else if (!element.textContent) setText(element, timeText(seconds + this.passed())); // also of a row that a click has made
  }

  // Seconds since the snapshot
  passed() {
    return this.snapshot.ended ? 0 : Math.max(0, this.clock_.now() - this.snapshot.time);
  }

  tick() {
    if (this.calm.pressed) return; // a longer text moves what is beside it
    const passed = this.passed();
    setText(this.summary, summaryText(this.snapshot, passed));
    for (const [element, seconds] of this.clocks) setText(element, timeText(seconds + passed));
  }

  // The row of a job, opened and with the focus
  show(job) {
    for (const rows of Object.values(this.lists)) {
      rows.reveal(keyOf(job));
      const row = [...rows.rows.querySelectorAll(".gm-row")].find((each) => keyOf(each.job) === keyOf(job));
      if (row) {
        toggle(this, row, true);
        row.focus();
      }
    }
  }

  // Do what a button says; an error is shown where everybody sees it.
  async act(name, ...what) {
    const busy = setTimeout(() => name === "goTo" || this.say(this.busy), BUSY);
    try {
      const value = await this.actions[name](...what);
      this.say("");
      return value;
    } catch (error) {
      this.fail(error);
      return undefined;
    } finally {
      clearTimeout(busy);
    }
  }

  fail(error) {
    this.say(String((error && error.message) || error));
    setTimeout(() => this.say(""), 4 * BUSY);
  }

  say(text) {
    setText(this.problem, text);
    setHidden(this.problem, !text);
  }

  dispose() {
    clearInterval(this.timer);
    this.calm.dispose();
    this.tip.dispose();
    this.log.dispose();
    this.root.remove();
  }
}

function summaryText(snapshot, passed) {
  const { devices, session, totals } = snapshot;
  const used = (totals ? totals.gpu_seconds : 0) + passed * gpuRate(snapshot);
  const free = devices.reduce((sum, each) => sum + each.free, 0);
  const parts = [
    ...(snapshot.ended ? ["This session has ended; as it was last"] : []),
    `${devices.length} GPU${devices.length === 1 ? "" : "s"}, ${shareText(free)} free`,
  ];
  if (totals) parts.push(...tookText({ gpu_seconds: used }, totals));
  if (session) parts.push(notebookText(session));
  return lineText(parts);
}
