// Draws a snapshot of gpunb (docs/snapshot.md). Depends on nothing, and decides nothing: what
// waits for what, what is free and who holds it are in the snapshot.
//
//   const view = render(element, snapshot, { actions, kernels });
//   view.update(next, kernels);  view.dispose();
//
// actions, each may be missing and may return a promise: cancel(job, force), interrupt(job),
// kill(actor), logs(job) -> text, goTo(job). A rejected promise is shown with its message.
// kernels: snapshots of further kernels; what they hold of shared devices is drawn grey.
// busy: what to say while an answer takes its time.
//
// A snapshot may be of several sessions together. Then each job and actor has a `key` of its own,
// which stands in `held` and goes to the actions instead of its number, and an `owner`, its notebook.

const ROWS = 50; // of a list; the rest is counted
const TICK = 1000; // milliseconds between two looks at the clock
const BUSY = 3000; // milliseconds without an answer, after which the user is told why

export function render(element, snapshot, options = {}) {
  const view = new View(element, options);
  view.update(snapshot, options.kernels);
  return {
    update: (next, kernels) => view.update(next, kernels),
    dispose: () => view.dispose(),
  };
}

// ------------------------------------------------------------------------------ pure functions

// Nothing is known of what is null, or left out
function known(value) {
  return value !== null && value !== undefined;
}

export function sizeText(bytes) {
  if (!known(bytes)) return "?";
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let at = 0;
  while (Math.abs(bytes) >= 1024 && at < units.length - 1) {
    bytes /= 1024;
    at += 1;
  }
  return `${bytes.toFixed(1).replace(/\.0$/, "")} ${units[at]}`;
}

export function timeText(seconds) {
  const whole = Math.max(0, Math.floor(seconds));
  if (whole < 60) return `${whole} s`;
  const [hours, minutes] = [Math.floor(whole / 3600), Math.floor(whole / 60) % 60];
  const two = (value) => String(value).padStart(2, "0");
  const rest = two(whole % 60);
  return hours ? `${hours}:${two(minutes)}:${rest}` : `${minutes}:${rest}`;
}

export function shareText(share) {
  return String(Math.round(share * 10000) / 10000);
}

// "2 GiB now, 3 GiB at most, of 20 GiB"; empty if nothing of it is known
export function memoryText(memory) {
  if (!memory) return "";
  const parts = [];
  if (known(memory.now)) parts.push(`${sizeText(memory.now)} now`);
  if (known(memory.peak)) parts.push(`${sizeText(memory.peak)} at most`);
  if (known(memory.share)) parts.push(`share ${sizeText(memory.share)}`);
  return parts.join(", ");
}

// What a job took, or all together: ["1:10 of GPU time", "waited 20 s", "peak 2 GiB"]
export function tookText(what, memory) {
  const parts = [];
  if (what.gpu_seconds >= 1) parts.push(`${timeText(what.gpu_seconds)} of GPU time`);
  if (what.waited >= 1) parts.push(`waited ${timeText(what.waited)}`);
  if (memory && known(memory.peak)) parts.push(`peak ${sizeText(memory.peak)}`);
  return parts;
}

// What a job has: "GPU 0 (0.5), NPU 1 (1)"
export function devicesText(job) {
  const parts = (job.devices || []).map(([kind, id, share]) => `${kind} ${id} (${shareText(share)})`);
  return parts.join(", ") || "CPU";
}

// The same of what may have no process yet, or never had one, and so is on nothing
export function placedText(job) {
  return (job.devices || []).length || known(job.pid) ? devicesText(job) : "";
}

// Where a job comes from: its cell, unless its name says so already
export function placeText(job) {
  const unsaid = known(job.cell) && job.name !== `In[${job.cell}]`;
  const owner = job.owner || (job.client ? notebookText(job.client) : "");
  return [unsaid ? `In[${job.cell}]` : "", owner].filter(Boolean).join(" ");
}

export function keyOf(job) {
  return job.key ?? job.id;
}

export function deviceText(device) {
  return `${device.resource || "GPU"} ${device.id}`;
}

// "#7 train In[3]"
export function jobText(job) {
  return [`#${job.id}`, job.name, placeText(job)].filter(Boolean).join(" ");
}

const UNKNOWN = { memory_used: null, memory_total: null, utilization: null, temperature: null };

// With all that may be missing, as where a session is only just known
export function whole(snapshot) {
  const lists = { devices: [], running: [], waiting: [], finished: [], actors: [], warnings: [] };
  for (const name of Object.keys(lists)) lists[name] = snapshot[name] || [];
  const counts = {
    running: lists.running.length,
    waiting: snapshot.queued || lists.waiting.length,
    finished: lists.finished.length,
    actors: lists.actors.length,
    ...snapshot.counts,
  };
  const devices = lists.devices.map((each) => ({ usage: UNKNOWN, held: [], others: [], free: 1, ...each }));
  return { time: Date.now() / 1000, ...snapshot, ...lists, devices, counts };
}

export function notebookText(session) {
  if (session.notebook) return session.notebook.split("/").pop();
  return session.head ? `head process ${session.head}` : `process ${session.pid}`;
}

// The parts of a device from left to right: [{kind, share, id, name, ...}], shares adding up to 1
export function partsOf(device, snapshot, kernels = []) {
  const parts = device.held.map(([id, share]) => ({ kind: "own", share, id, ...holder(snapshot, id) }));
  const seen = new Set();
  for (const other of device.logical ? [] : kernels) {
    const same = (other.devices || []).find((each) => each.key === device.key && !each.logical);
    for (const [id, share] of same ? same.held : []) {
      seen.add(other.session.pid);
      const owner = `${notebookText(other.session)}, ${other.session.user}`;
      parts.push({ kind: "other", share, id, owner, ...holder(whole(other), id) });
    }
  }
  for (const other of device.others) {
    if (other.kind !== "kernel" || !other.share || seen.has(other.pid)) continue;
    parts.push({ kind: "other", share: other.share, id: null, name: other.job || "", owner: ownerText(other) });
  }
  const free = 1 - parts.reduce((sum, part) => sum + part.share, 0);
  if (free > 0.00005) parts.push({ kind: "free", share: free, id: null, name: "free" });
  return parts;
}

export function ownerText(other) {
  const where = other.notebook ? other.notebook.split("/").pop() : `process ${other.pid}`;
  return other.user ? `${where}, ${other.user}` : where;
}

function holder(snapshot, id) {
  const job = snapshot.running.find((each) => keyOf(each) === id);
  if (job) return { name: job.name, job, memory: job.memory };
  const actor = snapshot.actors.find((each) => keyOf(each) === id);
  if (actor) return { name: actorText(actor), job: actor, memory: actor.memory };
  const listed = snapshot.running.length >= snapshot.counts.running;
  return { name: listed ? "ending" : "", job: null, memory: null };
}

export function actorText(actor) {
  if (actor.kind === "session") return actor.class || `session ${actor.name}`;
  return actor.name ? `${actor.class} ${actor.name}` : actor.class || "actor";
}

// Points of a line for values from 0 to 100, the last one at the right edge; null interrupts it
export function pathOf(values, count, width, height) {
  const step = width / Math.max(1, count - 1);
  const first = width - step * (values.length - 1);
  let path = "";
  let drawing = false;
  values.forEach((value, at) => {
    if (value !== null) {
      const [x, y] = [first + step * at, height - (height * Math.min(100, value)) / 100];
      path += `${drawing ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`;
    }
    drawing = value !== null;
  });
  return path;
}

// The bars of a Gantt chart for a device: [{job, share, from, to, row}] in seconds before now, rows
// such that no two bars of one overlap. What runs in an actor or a session is part of its bar.
export function barsOf(device, snapshot) {
  const { time, finished, running, actors } = snapshot;
  const known = [
    ...finished.map((job) => ({ job, from: time - job.ended + job.seconds, to: time - job.ended })),
    ...[...running, ...actors].map((job) => ({ job, from: job.seconds || 0, to: 0 })),
  ];
  const ends = [];
  return known
    .filter(({ job }) => !job.actor && job.kind !== "create" && job.kind !== "method")
    .filter(({ job }) => !(device.logical && job.key) || sessionOf(device.key) === sessionOf(job.key))
    .map((each) => ({ ...each, share: shareOf(each.job, device) }))
    .filter((each) => each.share)
    .sort((one, other) => other.from - one.from)
    .map(({ job, share, from, to }) => {
      let row = ends.findIndex((end) => end >= from);
      if (row < 0) row = ends.length;
      ends[row] = to;
      return { job, share, from, to, row };
    });
}

function shareOf(job, device) {
  const same = ([kind, id]) => kind === (device.resource || "GPU") && id === device.id;
  return ((job.devices || []).find(same) || [])[2];
}

// Of a key in a snapshot of several sessions, which begins with it
function sessionOf(key) {
  return key.split(":")[0];
}

// What to announce of the step from one snapshot to the next
export function newsOf(before, now) {
  if (!before) return "";
  const known = new Set(before.finished.map(keyOf));
  const ran = new Set(before.running.map(keyOf));
  const said = now.finished.filter((job) => !known.has(keyOf(job))).map((job) => `#${job.id} ${job.name} ${job.state}`);
  for (const job of now.running) if (!ran.has(keyOf(job))) said.push(`#${job.id} ${job.name} running`);
  return said.length > 3 ? `${said.length} jobs have changed` : said.join(", ");
}

// ------------------------------------------------------------------------------------ the view

const PRESS = 10000; // milliseconds that a button may be pressed before things move under it

// Draws, but nothing that is pressed is moved or replaced, or there would be no click: what is to be
// drawn then is drawn when it is let go, the last of it.
export class Calm {
  constructor() {
    this.pressed = false;
    this.due = null;
    this.timer = 0;
    this.down = (event) => {
      if (event.type === "keydown" && event.key !== " ") return;
      clearTimeout(this.timer);
      this.pressed = true;
      this.timer = setTimeout(() => this.release(), PRESS);
    };
    this.up = (event) => {
      if (!this.pressed || (event.type === "blur" && event.target !== window)) return;
      clearTimeout(this.timer);
      this.timer = setTimeout(() => this.release()); // the click comes first
    };
    for (const kind of ["pointerup", "pointercancel", "keyup", "blur"]) window.addEventListener(kind, this.up, true);
  }

  watch(element) {
    for (const kind of ["pointerdown", "keydown"]) element.addEventListener(kind, this.down, true);
  }

  draw(what) {
    if (this.pressed) this.due = what;
    else what();
  }

  release() {
    const due = this.due;
    this.pressed = false;
    this.due = null;
    if (due) due();
  }

  dispose() {
    clearTimeout(this.timer);
    this.due = null;
    for (const kind of ["pointerup", "pointercancel", "keyup", "blur"]) window.removeEventListener(kind, this.up, true);
  }
}

class View {
  constructor(element, options) {
    this.actions = options.actions || {};
    this.busy = options.busy || "Waiting for the kernel, which is busy; Stop interrupts its cell.";
    this.root = make("div", "gpunb-monitor", { role: "region", "aria-label": "GPU monitor" });
    this.summary = make("p", "gm-summary");
    this.notes = make("ul", "gm-notes", { "aria-label": "Warnings" });
    this.devices = make("ul", "gm-devices", { "aria-label": "Devices" });
    this.lists = {
      actors: new Rows(this, "Actors and sessions", actorRow),
      running: new Rows(this, "Running", runningRow),
      waiting: new Rows(this, "Waiting", waitingRow),
      finished: new Rows(this, "Finished", finishedRow, 10),
    };
    this.chart = new Chart();
    this.log = new Log(this);
    this.live = make("div", "gm-live", { "aria-live": "polite", role: "status" });
    this.problem = make("p", "gm-problem", { role: "alert" });
    setHidden(this.problem, true);
    this.root.append(this.summary, this.problem, this.notes, this.devices);
    for (const rows of Object.values(this.lists)) this.root.append(rows.element);
    this.root.append(this.chart.element, this.log.element, this.live);
    element.append(this.root);
    this.calm = new Calm();
    this.calm.watch(this.root);
    this.clocks = new Map(); // element -> seconds at the time of the snapshot
    this.timer = setInterval(() => this.tick(), TICK);
  }

  update(snapshot, kernels) {
    if (snapshot) this.calm.draw(() => this.draw(whole(snapshot), kernels));
  }

  draw(snapshot, kernels) {
    const news = newsOf(this.snapshot, snapshot);
    this.snapshot = snapshot;
    this.kernels = kernels || this.kernels || [];
    this.taken = performance.now();
    this.clocks.clear();
    setText(this.summary, summaryText(snapshot));
    keyed(this.notes, snapshot.warnings, (text) => text, () => make("li"), setText);
    setHidden(this.notes, !snapshot.warnings.length);
    keyed(this.devices, snapshot.devices, (each) => each.key, deviceElement, (element, each) =>
      drawDevice(this, element, each));
    const { counts } = snapshot;
    this.lists.actors.draw(snapshot.actors, counts.actors);
    this.lists.running.draw(snapshot.running, counts.running);
    this.lists.waiting.draw(snapshot.waiting, counts.waiting);
    this.lists.finished.draw(snapshot.finished, counts.finished);
    this.chart.draw(snapshot);
    this.root.classList.toggle("gm-ended", Boolean(snapshot.ended));
    if (news) setText(this.live, news);
    this.tick();
  }

  clock(element, seconds) {
    if (known(seconds)) this.clocks.set(element, seconds);
    else setText(element, "");
  }

  tick() {
    if (this.calm.pressed) return; // a longer text moves what is beside it
    const passed = this.snapshot.ended ? 0 : (performance.now() - this.taken) / 1000;
    for (const [element, seconds] of this.clocks) setText(element, timeText(seconds + passed));
  }

  // Do what a button says; an error is shown where everybody sees it.
  async act(name, ...what) {
    const busy = setTimeout(() => name === "goTo" || this.say(this.busy), BUSY);
    try {
      const value = await this.actions[name](...what);
      this.say("");
      return value;
    } catch (error) {
      this.say(String((error && error.message) || error));
      setTimeout(() => this.say(""), 4 * BUSY);
      return undefined;
    } finally {
      clearTimeout(busy);
    }
  }

  say(text) {
    setText(this.problem, text);
    setHidden(this.problem, !text);
  }

  dispose() {
    clearInterval(this.timer);
    this.calm.dispose();
    this.root.remove();
  }
}

function summaryText(snapshot) {
  const { devices, counts, session, totals } = snapshot;
  const free = devices.reduce((sum, each) => sum + each.free, 0);
  const parts = [
    ...(snapshot.ended ? ["This session has ended; as it was last"] : []),
    `${devices.length} GPU${devices.length === 1 ? "" : "s"}, ${shareText(free)} free`,
    `${counts.running} running`,
    `${counts.waiting} waiting`,
    `${counts.finished} finished`,
  ];
  if (totals) parts.push(...tookText(totals, totals));
  if (session) parts.push(notebookText(session));
  return parts.join(" · ");
}

function deviceElement() {
  const element = make("li", "gm-device");
  const parts = {
    name: make("div", "gm-device-name"),
    lane: make("ol", "gm-lane"),
    meter: make("div", "gm-meter", { role: "meter", "aria-valuemin": 0, "aria-valuemax": 100 }),
    fill: make("div", "gm-fill"),
    outside: make("div", "gm-outside"),
    trend: new Trend(),
  };
  parts.meter.append(parts.fill);
  const head = make("div", "gm-head");
  head.append(parts.name, parts.trend.element);
  element.append(head, parts.lane, parts.meter, parts.outside);
  element.parts = parts;
  return element;
}

function drawDevice(view, element, device) {
  const { name, lane, meter, fill, outside, trend } = element.parts;
  const { usage } = device;
  const facts = [device.type || (device.logical ? "logical" : device.name)];
  const total = usage.memory_total || device.memory;
  if (known(usage.memory_used) && total) facts.push(`${sizeText(usage.memory_used)} of ${sizeText(total)}`);
  else if (total) facts.push(sizeText(total));
  if (known(usage.utilization)) facts.push(`${Math.round(usage.utilization)} % in use`);
  if (known(usage.temperature)) facts.push(`${Math.round(usage.temperature)} °C`);
  if (device.health) facts.push(`⚠ ${device.health}`);
  setText(name, `${deviceText(device)}  ${facts.join(" · ")}`);
  trend.draw(device);
  setAttribute(lane, "aria-label", `Shares of ${deviceText(device)}`);
  const parts = partsOf(device, view.snapshot, view.kernels);
  keyed(lane, parts, (part, at) => `${part.kind} ${part.owner || ""} ${part.id ?? at}`, partElement, (each, part) =>
    drawPart(view, each, part));
  const part = known(usage.memory_used) && total ? Math.round((100 * usage.memory_used) / total) : null;
  setHidden(meter, part === null);
  if (part !== null) {
    setAttribute(meter, "aria-label", `Memory of ${deviceText(device)}`);
    setAttribute(meter, "aria-valuenow", part);
    setAttribute(meter, "aria-valuetext", `${sizeText(usage.memory_used)} of ${sizeText(total)}`);
    setStyle(fill, "width", `${part}%`);
  }
  const outsiders = device.others.filter((each) => each.kind !== "kernel" || !each.share);
  setText(outside, outsiders.map((each) => `also here: ${ownerText(each)}${each.memory ? `, ${sizeText(each.memory)}` : ""}`).join("; "));
  setHidden(outside, !outsiders.length);
}

function partElement() {
  const element = make("li", "gm-part");
  const [label, time, memory] = [make("span", "gm-label"), make("span", "gm-time"), make("span", "gm-memory")];
  element.append(label, time, memory);
  element.parts = { label, time, memory };
  return element;
}

function drawPart(view, element, part) {
  const { label, time, memory } = element.parts;
  setAttribute(element, "class", `gm-part gm-${part.kind}${part.kind === "own" ? ` gm-tint${(part.job ? part.job.id : 0) % 6}` : ""}`);
  setStyle(element, "flexGrow", String(part.share));
  const place = part.job ? placeText(part.job) : "";
  const text = part.kind === "free"
    ? `${shareText(part.share)} free`
    : [part.job ? `#${part.job.id}` : part.id === null ? "" : `#${part.id}`, part.name, place, part.owner || ""].filter(Boolean).join(" ");
  setText(label, text);
  view.clock(time, part.job ? part.job.seconds : null);
  const { now, peak, share } = part.memory || {};
  setText(memory, !known(now) && !known(peak) ? "" : `${sizeText(now)} / ${sizeText(peak)} / ${sizeText(share)}`);
  const where = part.kind === "own" && view.snapshot.session ? notebookText(view.snapshot.session) : "";
  const words = [text, where, `share ${shareText(part.share)}`, memoryText(part.memory)];
  setAttribute(element, "title", words.filter(Boolean).join(", "));
}

// -------------------------------------------------------------------------------------- charts

const MINUTES = 5;

// Lines of the last minutes: memory solid, use dashed; the share given out where neither is known
class Trend {
  constructor() {
    this.element = draw("svg", { class: "gm-trend", viewBox: "0 0 120 20", role: "img", preserveAspectRatio: "none" });
    this.lines = ["gm-solid", "gm-dashed"].map((name) => draw("path", { class: name }));
    this.element.append(...this.lines);
  }

  draw(device) {
    const history = device.history;
    const measured = history && history.memory && history.memory.some(known);
    const values = !history ? [[], []] : measured ? [history.memory, history.utilization] : [history.share || [], []];
    this.element.toggleAttribute("hidden", values[0].length < 2);
    if (values[0].length < 2) return;
    const count = (60 * MINUTES) / history.step;
    values.forEach((each, at) => setAttribute(this.lines[at], "d", pathOf(each.slice(-count), count, 120, 20)));
    const last = (list) => (known(list[list.length - 1]) ? `${list[list.length - 1]} %` : "unknown");
    const said = measured ? `memory ${last(values[0])}, use ${last(values[1])}` : `given out ${last(values[0])}`;
    setAttribute(this.element, "aria-label", `${deviceText(device)} in the last ${MINUTES} minutes, now ${said}`);
  }
}

const [CHART, LEFT, BAR, BARS] = [720, 60, 18, 300];

// What ran on the devices, as far as the snapshot has it; drawn while it is open
class Chart {
  constructor() {
    this.element = make("details", "gm-chart");
    this.title = make("summary", "gm-heading");
    setText(this.title, "Timeline");
    this.box = make("div", "gm-chart-box", { tabindex: 0, role: "group", "aria-label": "Timeline" });
    this.element.append(this.title, this.box);
    this.element.addEventListener("toggle", () => this.draw(this.snapshot));
  }

  draw(snapshot) {
    this.snapshot = snapshot;
    if (!this.element.open) return;
    const lanes = snapshot.devices.map((device) => ({ device, bars: barsOf(device, snapshot).slice(-BARS) }));
    const longest = Math.max(1, ...lanes.flatMap(({ bars }) => bars.map((bar) => bar.from)));
    const scale = (CHART - LEFT) / longest;
    const pieces = [];
    let top = 2;
    for (const { device, bars } of lanes) {
      const rows = 1 + Math.max(0, ...bars.map((bar) => bar.row));
      pieces.push(words(0, top + 13, deviceText(device)));
      pieces.push(draw("rect", { class: "gm-frame", x: LEFT, y: top, width: CHART - LEFT, height: rows * BAR }));
      for (const bar of bars) pieces.push(barElement(bar, top, scale));
      top += rows * BAR + 6;
    }
    pieces.push(words(LEFT, top + 12, `${timeText(longest)} ago`), words(CHART - 30, top + 12, "now"));
    const jobs = lanes.reduce((sum, { bars }) => sum + bars.length, 0);
    const label = `${jobs} bars on ${lanes.length} devices in the last ${timeText(longest)}`;
    const svg = draw("svg", { viewBox: `0 0 ${CHART} ${top + 16}`, role: "img", "aria-label": label });
    svg.append(...pieces);
    this.box.replaceChildren(svg);
  }
}

function barElement({ job, share, from, to, row }, top, scale) {
  const [x, width] = [CHART - from * scale, Math.max(2, (from - to) * scale)];
  const group = draw("g", { class: `gm-tint${job.id % 6}` });
  const text = `#${job.id} ${job.name || ""}`.trim();
  const title = draw("title");
  title.textContent = `${text}: ${job.state}, ${timeText(from - to)}, share ${shareText(share)}`;
  const over = job.state === "failed" || job.state === "cancelled";
  group.append(title, draw("rect", { class: over ? "gm-bar gm-broken" : "gm-bar", x, y: top + row * BAR + 1, width, height: BAR - 2 }));
  if (text.length * 7 < width) group.append(words(x + 3, top + row * BAR + 13, text));
  return group;
}

function words(x, y, text) {
  const element = draw("text", { x, y });
  element.textContent = text;
  return element;
}

function draw(tag, attributes = {}) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  return element;
}

// --------------------------------------------------------------------------------------- lists

class Rows {
  constructor(view, title, draw, most = ROWS) {
    this.most = most;
    this.view = view;
    this.draw_ = draw;
    this.title = title;
    this.element = make("section", "gm-list", { "aria-label": title });
    this.heading = make("div", "gm-heading");
    this.rows = make("ul", "gm-rows");
    this.element.append(this.heading, this.rows);
  }

  draw(jobs, count) {
    setHidden(this.element, !count);
    const shown = Math.min(jobs.length, this.most);
    setText(this.heading, `${this.title} (${count}${count > shown ? `, ${shown} shown` : ""})`);
    keyed(this.rows, jobs.slice(0, this.most), keyOf, rowElement, (element, job) => {
      element.job = job;
      this.draw_(this.view, element, job);
    });
  }
}

function rowElement() {
  const element = make("li", "gm-row");
  const [text, time, more, buttons] = [make("span", "gm-text"), make("span", "gm-time"), make("span", "gm-more"), make("span", "gm-buttons")];
  element.append(text, time, more, buttons);
  element.parts = { text, time, more, buttons };
  return element;
}

function runningRow(view, element, job) {
  const { text, time, more } = element.parts;
  setText(text, `${jobText(job)} ${devicesText(job)}`);
  view.clock(time, job.seconds);
  setText(more, [memoryText(job.memory), job.waits_for || ""].filter(Boolean).join("; "));
  const own = !job.actor && job.kind !== "create";
  buttons(view, element, job, [
    ["interrupt", "Interrupt", true, () => view.act("interrupt", keyOf(job))],
    own && ["cancel", "Kill", true, () => view.act("cancel", keyOf(job), true)],
    job.has_log && ["logs", "Logs", false, () => view.log.open(job)],
    goTo(view, element, job),
  ]);
}

function waitingRow(view, element, job) {
  const { text, time, more } = element.parts;
  setText(text, jobText(job));
  view.clock(time, job.seconds);
  setText(more, job.waits_for || "");
  buttons(view, element, job, [
    ["cancel", "Cancel", true, () => view.act("cancel", keyOf(job), false)],
    goTo(view, element, job),
  ]);
}

function finishedRow(view, element, job) {
  const { text, time, more } = element.parts;
  const sign = { done: "✓", failed: "✗", cancelled: "■" }[job.state] || "";
  setText(text, [sign, jobText(job), job.state].filter(Boolean).join(" "));
  setText(time, timeText(job.seconds));
  const took = tookText(job, job.hint ? null : job.memory);
  setText(more, [placedText(job), ...took, job.hint].filter(Boolean).join(", "));
  buttons(view, element, job, [
    job.has_log && ["logs", "Logs", false, () => view.log.open(job)],
    goTo(view, element, job),
  ]);
}

function actorRow(view, element, actor) {
  const { text, time, more } = element.parts;
  const state = actor.state === "alive" && !actor.running ? "idle" : actor.state;
  const named = { ...actor, name: actorText(actor) };
  setText(text, [jobText(named), placedText(actor), state].filter(Boolean).join(" "));
  view.clock(time, actor.seconds);
  setText(more, [memoryText(actor.memory), actor.waiting ? `${actor.waiting} calls wait` : ""].filter(Boolean).join("; "));
  buttons(view, element, named, [
    ["kill", "Kill", true, () => view.act("kill", keyOf(actor))],
    goTo(view, element, actor),
  ]);
}

// To the cell that it comes from, if there is one
function goTo(view, element, job) {
  return known(job.cell_id) && ["goTo", "Go to cell", false, () => view.act("goTo", element.job)];
}

// Buttons for the actions that there are; those that stop something ask once more. Each has a place
// of its own, where it stays while others come and go.
function buttons(view, element, job, wanted) {
  const there = wanted.filter((each) => each && view.actions[each[0]]);
  const named = (text) => `${text} #${job.id} ${job.name || ""}`.trim();
  keyed(element.parts.buttons, there, ([, text]) => text, ([, text, confirmed]) => {
    const place = make("span", "gm-place");
    const button = make("button", "gm-button", { type: "button", "aria-label": named(text) });
    button.textContent = text;
    button.addEventListener("click", () => (confirmed ? confirm(place, named(text)) : place.act()));
    place.append(button);
    return place;
  }, (place, [, , , act]) => { place.act = act; });
}

// Ask in the place of a button.
function confirm(place, question) {
  const button = place.firstChild;
  const box = make("span", "gm-confirm", { role: "group", "aria-label": `${question}?` });
  const [yes, no] = ["Yes", "No"].map((text) => {
    const each = make("button", `gm-button${text === "Yes" ? " gm-yes" : ""}`, { type: "button", "aria-label": `${text}: ${question}` });
    each.textContent = text === "Yes" ? `${button.textContent}!` : text;
    return each;
  });
  const back = () => {
    const inside = box.contains(document.activeElement);
    box.replaceWith(button);
    if (inside) button.focus();
  };
  yes.addEventListener("click", () => { back(); place.act(); });
  no.addEventListener("click", back);
  box.addEventListener("keydown", (event) => {
    if (event.key === "Escape") { event.stopPropagation(); back(); }
  });
  box.append(yes, no);
  button.replaceWith(box);
  yes.focus();
}

class Log {
  constructor(view) {
    this.view = view;
    this.element = make("section", "gm-log", { "aria-label": "Log" });
    this.heading = make("div", "gm-heading");
    this.close = make("button", "gm-button", { type: "button", "aria-label": "Close the log" });
    this.close.textContent = "Close";
    this.text = make("pre", "gm-log-text", { tabindex: 0, "aria-label": "Text of the log" });
    this.close.addEventListener("click", () => { this.element.hidden = true; });
    this.element.append(this.heading, this.close, this.text);
    setHidden(this.element, true);
  }

  async open(job) {
    const text = await this.view.act("logs", keyOf(job));
    if (text === undefined) return;
    setText(this.heading, `What #${job.id} ${job.name} has shown`);
    setText(this.text, text || "nothing yet");
    setHidden(this.element, false);
    this.text.scrollTop = this.text.scrollHeight;
    this.close.focus();
  }
}

// ------------------------------------------------------------------------------------ elements

function make(tag, className = "", attributes = {}) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  return element;
}

// Nothing is touched that stays as it is: neither focus nor selection is lost, nor layout redone.
function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

function setHidden(element, hidden) {
  if (element.hidden !== hidden) element.hidden = hidden;
}

function setAttribute(element, name, value) {
  if (element.getAttribute(name) !== String(value)) element.setAttribute(name, value);
}

function setStyle(element, name, value) {
  if (element.style[name] !== value) element.style[name] = value;
}

// One child for each item, in order; a child stays that of its item. Those that are gone go first:
// an element that is moved loses the focus.
function keyed(parent, items, keyOf, makeChild, draw) {
  const children = parent.children_ || new Map();
  const keys = items.map(keyOf);
  const wanted = new Set(keys);
  for (const [key, child] of children) if (!wanted.has(key)) child.remove();
  let at = parent.firstChild;
  parent.children_ = new Map();
  items.forEach((item, index) => {
    const child = children.get(keys[index]) || makeChild(item);
    parent.children_.set(keys[index], child);
    draw(child, item);
    if (child === at) at = at.nextSibling;
    else parent.insertBefore(child, at);
  });
}
