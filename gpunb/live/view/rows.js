// The lists of jobs, a line each.

import { DESCRIBE, buttons, groupRow } from "./actions.js";
import { ICONS, freshId, keyed, make, roving, setAttribute, setHidden, setIcon, setStyle, setText } from "./elements.js";
import { detailsOf, failures, homeOf, tintOf } from "./facts.js";
import { countsOf, isGroup, jobsOf, statesText } from "./groups.js";
import {
  jobText, keyOf, known, memoryText, notebookText, placeText, placedText, timeText, titleText,
} from "./texts.js";

const ROWS = 50; // of a list; the rest is counted, and shown on demand
const FEW = 8; // jobs that need no filter

// A line of words: a job is shown if its row has all of them, a state and a notebook included
export class Filter {
  constructor(view) {
    const choices = freshId("choices");
    this.view = view;
    this.element = make("div", "gm-filter");
    const hint = { type: "search", placeholder: "Filter jobs", "aria-label": "Filter jobs" };
    this.field = make("input", "gm-field", { ...hint, list: choices });
    this.field.value = view.memory.filter;
    this.choices = make("datalist", "", { id: choices });
    this.none = make("p", "gm-none");
    setText(this.none, "No job has these words.");
    this.element.append(this.field, this.choices, this.none);
    this.field.addEventListener("input", () => {
      view.memory.filter = this.field.value;
      view.redraw();
    });
  }

  get words() {
    return this.view.memory.filter.toLowerCase().split(/\s+/).filter(Boolean);
  }

  draw(snapshot, items) {
    const { counts } = snapshot;
    const few = counts.running + counts.waiting + counts.finished + counts.actors <= FEW;
    setHidden(this.element, few && !this.words.length);
    const jobs = Object.keys(this.view.lists).flatMap((name) => snapshot[name]);
    const words = this.words;
    setHidden(this.none, !words.length || items.some((item) => this.takes(item, words)));
    const choices = new Set(["running", "waiting", "done", "failed", "cancelled", ...jobs.map((job) => job.owner)]);
    choices.delete(undefined);
    keyed(this.choices, [...choices], (each) => each, (each) => make("option", "", { value: each }), () => {});
  }

  // Whether an item or one of its members has all the words
  takes(item, words) {
    return this.names(item, words) || (item.members || []).some((each) => this.names(each, words));
  }

  // The members to show: all of them, unless only some have the words
  membersOf({ members = [], ...item }) {
    const words = this.words;
    return !words.length || this.names(item, words) ? members : members.filter((each) => this.names(each, words));
  }

  names(job, words) {
    const state = job.state === "queued" ? "waiting" : job.state;
    const home = homeOf(job, this.view.snapshot);
    const notebook = home ? notebookText(home) : "";
    const facts = [jobText(job), job.class || "", placedText(job), state, notebook];
    const text = facts.join(" ").toLowerCase();
    return words.every((word) => text.includes(word));
  }
}

// The jobs of one state. A list that is folded shows the failures that nobody has seen, and rows that
// are open.
export class Rows {
  constructor(view, title, describe, folded = false) {
    this.view = view;
    this.title = title;
    this.describe = describe;
    this.folds = folded;
    this.most = ROWS;
    this.element = make("section", "gm-list", { "aria-label": title });
    this.heading = make("button", "gm-heading", { type: "button" });
    const [sign, name] = [make("span", "gm-sign"), make("span")];
    setIcon(sign, "fold");
    this.heading.append(sign, name);
    this.name = name;
    this.rows = make("ul", "gm-rows", { role: "tree", "aria-label": title });
    this.more = make("button", "gm-button", { type: "button" });
    this.seen = make("button", "gm-button", { type: "button" });
    setText(this.seen, "Mark all as seen");
    this.element.append(this.heading, this.rows, this.more, this.seen);
    this.heading.addEventListener("click", () => {
      view.memory.folded.set(title, !this.folded);
      view.redraw();
    });
    this.seen.addEventListener("click", () => {
      failures(view.snapshot, view.memory).forEach((job) => view.memory.see(job));
      view.redraw();
      this.heading.focus();
    });
    this.more.addEventListener("click", () => {
      this.most += ROWS;
      view.redraw();
    });
  }

  get folded() {
    return this.view.memory.folded.get(this.title) ?? this.folds;
  }

  // Open the item of which this job is a member
  reveal(key) {
    const item = this.items.find((each) => (each.members || []).some((member) => keyOf(member) === key));
    if (!item) return;
    this.view.opened.add(keyOf(item));
    this.view.redraw();
  }

  draw(items, count) {
    const { view, folded } = this;
    const words = view.filter.words;
    const found = words.length ? items.filter((item) => view.filter.takes(item, words)) : items;
    const fresh = (item) => (item.members || item.state === "failed" ? failures({ finished: jobsOf(item) }, view.memory).length : 0);
    const news = found.reduce((sum, item) => sum + fresh(item), 0);
    const listed = folded && !words.length ? found.filter((item) => fresh(item) || view.opened.has(keyOf(item))) : found;
    const shown = listed.slice(0, this.most);
    this.items = items;
    setHidden(this.element, !count || (words.length && !found.length));
    setAttribute(this.heading, "aria-expanded", !folded || words.length > 0);
    const facts = [words.length ? `${found.length} of ${count}` : count];
    if (news) facts.push(`${news} failed`);
    const all = items.some(({ members }) => members) || words.length ? found.length : count;
    if (shown.length < all && !folded) facts.push(`${shown.length} shown`);
    setText(this.name, `${this.title} (${facts.join(", ")})`);
    const at = [...this.rows.children].findIndex((each) => each.contains(document.activeElement));
    keyed(this.rows, shown, keyOf, rowElement, (element, job) => drawRow(view, element, job, (isGroup(job) ? groupRow : this.describe)(view, job)));
    setHidden(this.rows, !shown.length);
    setHidden(this.seen, news < 2);
    setHidden(this.more, shown.length === listed.length);
    setText(this.more, `Show ${Math.min(ROWS, listed.length - shown.length)} more`);
    roving(this.rows);
    if (at >= 0 && !this.rows.contains(document.activeElement)) this.focusNear(at);
  }

  // The row at this place is gone, and maybe the whole list
  focusNear(at) {
    const headings = this.view.root.querySelectorAll("button.gm-heading");
    const near = [this.rows.children[at], this.rows.lastElementChild, this.heading, ...headings];
    near.find((each) => each && !each.closest("[hidden]"))?.focus();
  }
}

function rowElement() {
  const element = make("li", "gm-row", { role: "treeitem", tabindex: -1 });
  const names = ["state", "text", "where", "from", "note", "on", "full", "brief", "time", "buttons", "more", "progress"];
  element.parts = Object.fromEntries(names.map((name) => [name, make("span", `gm-${name}`)]));
  const { state, text, where, from, note, on, full, brief, time, buttons, more, progress } = element.parts;
  setAttribute(state, "role", "img");
  setAttribute(progress, "role", "progressbar");
  const line = make("div", "gm-line");
  where.append(from);
  on.append(full, brief);
  line.append(state, text, where, note, on, time, buttons);
  element.append(line, progress, more);
  element.addEventListener("click", (event) => {
    const picked = !window.getSelection().isCollapsed;
    if (!picked && event.target.closest("button, .gm-row") === element) element.toggle_();
  });
  return element;
}

function drawRow(view, element, job, { state, on, brief = "", ticks, timed = true, actions }) {
  const { parts } = element;
  const key = keyOf(job);
  const members = job.members ? view.filter.membersOf(job) : [];
  const open = view.opened.has(key) || members.length < (job.members || []).length;
  const counts = job.states ? statesText(job.states) : "";
  element.job = job;
  element.toggle_ = () => toggle(view, element, !view.opened.has(key));
  const icon = job.state === "running" && job.waits_for ? "queued" : ICONS[job.state] ? job.state : "alive";
  setIcon(parts.state, icon);
  setAttribute(parts.state, "class", `gm-state gm-${icon}`);
  setAttribute(parts.state, "aria-label", state);
  setText(parts.text, titleText(job));
  setText(parts.from, placeText(job));
  setText(parts.note, open ? "" : job.waits_for || memoryText(job.memory) || job.hint || "");
  setText(parts.full, on);
  setText(parts.brief, brief);
  if (ticks) view.clock(parts.time, job.seconds);
  else setText(parts.time, timed && known(job.seconds) ? timeText(job.seconds) : "");
  const details = open ? detailsOf(job, view.snapshot) : [job.waits_for || ""].filter(Boolean);
  keyed(parts.more, details, (_, at) => at, () => make("span", "gm-detail"), setText);
  setHidden(parts.more, !details.length);
  setHidden(parts.progress, !known(job.progress));
  if (known(job.progress)) {
    const done = Math.round(100 * job.progress);
    setAttribute(parts.progress, "aria-label", `Progress of ${titleText(job)}`);
    setAttribute(parts.progress, "aria-valuenow", done);
    setStyle(parts.progress, "width", `${done}%`);
  }
  setAttribute(element, "class", `gm-row gm-tint${tintOf(job)}${open ? " gm-open" : ""}${job.members ? " gm-group" : ""}`);
  setAttribute(element, "aria-expanded", open);
  const said = on.startsWith(state) ? [on] : [state, on];
  setAttribute(element, "aria-label", [jobText(job), ...said, counts, job.waits_for].filter(Boolean).join(", "));
  buttons(view, element, job, actions);
  if (!job.members && !parts.members) return;
  drawMembers(view, element, open ? members : []);
  keyed(parts.states, countsOf(job.states || {}), ([each]) => each, countElement, (each, [, count]) => setText(each.lastChild, count));
  parts.states.tip_ = () => [counts];
  setHidden(parts.sign, !job.members);
}

// A number beside the icon of a state
function countElement([state]) {
  const [element, icon] = [make("span", `gm-count gm-${state}`), make("span")];
  setIcon(icon, ICONS[state] ? state : "alive");
  element.append(icon, make("span"));
  return element;
}

// The rows inside a row, at most as many as of a list
function drawMembers(view, element, members) {
  const { parts } = element;
  if (!parts.members) {
    [parts.sign, parts.states] = [make("span", "gm-sign"), make("span", "gm-states")];
    setIcon(parts.sign, "fold");
    parts.state.before(parts.sign);
    parts.on.before(parts.states);
    parts.members = make("ul", "gm-members", { role: "group" });
    parts.rest = make("button", "gm-button", { type: "button" });
    parts.most = ROWS;
    parts.rest.addEventListener("click", () => {
      parts.most += ROWS;
      view.redraw();
    });
    element.append(parts.members, parts.rest);
  }
  const shown = members.slice(0, parts.most);
  keyed(parts.members, shown, keyOf, rowElement, (each, member) =>
    drawRow(view, each, member, DESCRIBE[member.list](view, member)));
  setHidden(parts.members, !shown.length);
  setHidden(parts.rest, shown.length === members.length);
  setText(parts.rest, `Show ${Math.min(ROWS, members.length - shown.length)} more`);
}

export function toggle(view, row, open) {
  view.opened[open ? "add" : "delete"](keyOf(row.job));
  if (open) jobsOf(row.job).forEach((job) => view.memory.see(job));
  view.redraw();
}

