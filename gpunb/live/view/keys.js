// The keys of the picture.

import { toggle } from "./rows.js";
import { keyOf, known } from "./texts.js";

// The keys of a list: arrows, Enter for the cell, Space for the details, Delete to stop it.
export function onKey(view, event) {
  const { target, key } = event;
  if (event.ctrlKey || event.altKey || event.metaKey || target.matches("input, pre")) return;
  const lane = target.closest(".gm-lane");
  const row = target.closest(".gm-row");
  const stops = lane
    ? [...lane.querySelectorAll("button")]
    : [...view.root.querySelectorAll("button.gm-heading, .gm-row")].filter((each) => !each.closest("[hidden]"));
  const at = stops.indexOf(lane ? target : row || target);
  const back = lane ? "ArrowLeft" : "ArrowUp";
  const next = { [back]: at - 1, [lane ? "ArrowRight" : "ArrowDown"]: at + 1, Home: 0, End: stops.length - 1 }[key];
  if (at < 0) return;
  if (next !== undefined) (stops[next] || target).focus();
  else if (!row || !rowKey(view, row, target, key)) return;
  event.preventDefault();
  event.stopPropagation();
}

// Whether a row knows the key
function rowKey(view, row, target, key) {
  const inside = [row, ...row.parts.buttons.querySelectorAll("button")];
  const at = inside.indexOf(target);
  const open = view.opened.has(keyOf(row.job));
  const turns = at === 0 && row.job.members && open === (key === "ArrowLeft");
  if (turns && key.startsWith("Arrow")) toggle(view, row, !open);
  else if (key === "ArrowRight") (inside[at + 1] || target).focus();
  else if (key === "ArrowLeft") (inside[at - 1] || row.parentElement.closest(".gm-row") || target).focus();
  else if (at > 0) return false; // a button has its own keys
  else if (key === "Delete") row.parts.buttons.querySelector(".gm-stops > .gm-icon-button")?.click();
  else if (key === " " || (key === "Enter" && !known(row.job.cell_id))) toggle(view, row, !open);
  else if (key === "Enter") view.act("goTo", row.job);
  else return false;
  return true;
}
