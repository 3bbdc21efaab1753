// What a line says of its job, and what its buttons do.

import { keyed, make, setIcon } from "./elements.js";
import { failures } from "./facts.js";
import { jobsOf } from "./groups.js";
import { briefDevicesText, devicesText, keyOf, known, placedText, titleText } from "./texts.js";

export function runningRow(view, job) {
  const own = !job.actor && job.kind !== "create";
  const actions = [
    ["interrupt", "Interrupt", true, () => view.act("interrupt", keyOf(job))],
    own && ["kill", "Kill", true, () => view.act("cancel", keyOf(job), true), "cancel"],
    logs(view, job),
    goTo(view, job),
  ];
  return { state: "running", on: devicesText(job), brief: briefDevicesText(job), ticks: true, actions };
}

export function waitingRow(view, job) {
  const cancel = ["cancel", "Cancel", true, () => view.act("cancel", keyOf(job), false)];
  return { state: "waiting", on: "", ticks: true, actions: [cancel, goTo(view, job)] };
}

export function finishedRow(view, job) {
  const on = [job.state === "done" ? "" : job.state, placedText(job)].filter(Boolean).join(" · ");
  const brief = job.state === "done" ? briefDevicesText(job) : job.state;
  return { state: job.state, on, brief, ticks: false, actions: [logs(view, job), goTo(view, job), seen(view, job)] };
}

// Where a failure was not seen yet
function seen(view, item) {
  if (!item.members && item.state !== "failed") return false;
  const news = failures({ finished: jobsOf(item) }, view.memory);
  const see = () => {
    news.forEach((each) => view.memory.see(each));
    view.redraw();
  };
  return news.length > 0 && ["seen", "Mark as seen", false, see, null];
}

// A sweep, or a placement group that is not listed any more
export function groupRow(view, group) {
  const runs = group.kind === "sweep" && !known(group.ended);
  const stop = runs && ["interrupt", "Stop", true, () => view.act("stop", keyOf(group)), "stop"];
  return { state: group.state, on: "", ticks: !known(group.ended), actions: [stop, goTo(view, group), seen(view, group)] };
}

function rankRow(view, rank) {
  const over = !["running", "queued"].includes(rank.state);
  return { state: rank.state, on: devicesText(rank), brief: briefDevicesText(rank), ticks: false, timed: over, actions: [] };
}

export function actorRow(view, actor) {
  const state = actor.state === "alive" && !actor.running ? "idle" : actor.state;
  const kill = ["kill", "Kill", true, () => view.act("kill", keyOf(actor))];
  return { state, on: placedText(actor), brief: briefDevicesText(actor), ticks: true, actions: [kill, goTo(view, actor)] };
}

// What the row of a member says, by the list in which it stands alone
export const DESCRIBE = { actors: actorRow, running: runningRow, waiting: waitingRow, finished: finishedRow, ranks: rankRow };

function logs(view, job) {
  return job.has_log && ["logs", "Logs", false, () => view.log.open(job)];
}

// To the cell that it comes from, if there is one
function goTo(view, job) {
  return known(job.cell_id) && ["goTo", "Go to cell", false, () => view.act("goTo", job)];
}

// Buttons for the actions that there are: [icon, text, whether it asks once more, what it does, name
// of the action]. Each has a place of its own, where it stays while others come and go.
export function buttons(view, element, job, wanted) {
  const there = wanted.filter((each) => {
    const [icon, , , , action = icon] = each || [];
    return each && (action === null || view.actions[action] || (action === "logs" && view.actions.openLogs));
  });
  const named = (text) => `${text} ${titleText(job)}`.trim();
  keyed(element.parts.buttons, there, ([, text]) => text, ([icon, text, confirmed]) => {
    const place = make("span", confirmed ? "gm-place gm-stops" : "gm-place");
    const button = make("button", "gm-icon-button", { type: "button", "aria-label": named(text) });
    setIcon(button, icon);
    button.tip_ = () => [text];
    button.addEventListener("click", () => {
      if (confirmed) confirm(place, named(text));
      else place.act();
      jobsOf(element.job).forEach((each) => view.memory.see(each));
    });
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
    each.textContent = text === "Yes" ? `${question.split(" ")[0]}!` : text;
    return each;
  });
  const back = () => {
    const inside = box.contains(document.activeElement);
    box.replaceWith(button);
    if (inside) button.focus();
  };
  yes.addEventListener("click", () => {
    back();
    place.act();
  });
  no.addEventListener("click", back);
  box.addEventListener("keydown", (event) => {
    if (event.key !== "Escape") return;
    event.stopPropagation();
    back();
  });
  box.append(yes, no);
  button.replaceWith(box);
  yes.focus();
}
