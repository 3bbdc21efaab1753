// The cards of the devices.

import { keyed, make, roving, setAttribute, setHidden, setStyle, setText, shape } from "./elements.js";
import { detailsOf, outsidersOf, partsOf, pathOf, tintOf, whole } from "./facts.js";
import {
  dayText, deviceText, known, lineText, ownerText, placeText, shareText, sizeText,
} from "./texts.js";

export function deviceElement() {
  const element = make("li", "gm-device");
  const parts = {
    name: make("span", "gm-device-name"),
    type: make("span", "gm-device-type"),
    lane: make("div", "gm-lane", { role: "group" }),
    meter: make("div", "gm-meter", { role: "meter", "aria-valuemin": 0, "aria-valuemax": 100 }),
    fill: make("div", "gm-fill"),
    facts: make("div", "gm-facts"),
    outside: make("div", "gm-outside"),
    trend: new Trend(),
  };
  parts.meter.append(parts.fill);
  const head = make("div", "gm-head");
  head.append(parts.name, parts.type, parts.trend.element);
  element.append(head, parts.lane, parts.meter, parts.facts, parts.outside);
  element.parts = parts;
  return element;
}

export function drawDevice(view, element, device) {
  const { name, type, lane, meter, fill, facts, outside, trend } = element.parts;
  const { usage } = device;
  const total = usage.memory_total || device.memory;
  setText(name, deviceText(device));
  setText(type, device.type || (device.logical ? "logical" : device.name));
  type.tip_ = () => [device.name];
  setText(facts, lineText(factsOf(device, total)));
  trend.draw(device);
  setAttribute(lane, "aria-label", `Shares of ${deviceText(device)}`);
  const parts = partsOf(device, view.snapshot, view.kernels);
  keyed(lane, parts, (part, at) => `${part.kind} ${part.owner || ""} ${part.id ?? at}`, partElement, (each, part) =>
    drawPart(view, each, part, total));
  roving(lane);
  const used = known(usage.memory_used) && total ? Math.round((100 * usage.memory_used) / total) : null;
  setHidden(meter, used === null);
  if (used !== null) {
    setAttribute(meter, "aria-label", `Memory of ${deviceText(device)}`);
    setAttribute(meter, "aria-valuenow", used);
    setAttribute(meter, "aria-valuetext", `${sizeText(usage.memory_used)} of ${sizeText(total)}`);
    setStyle(fill, "width", `${used}%`);
  }
  const outsiders = outsidersOf(device).map((each) => ownerText(each) + (each.memory ? `, ${sizeText(each.memory)}` : ""));
  setText(outside, `also here: ${outsiders.join("; ")}`);
  setHidden(outside, !outsiders.length);
}

function factsOf(device, total) {
  const { usage } = device;
  const facts = [];
  if (known(usage.memory_used) && total) facts.push(`${sizeText(usage.memory_used)} of ${sizeText(total)}`);
  else if (total) facts.push(sizeText(total));
  if (known(usage.utilization)) facts.push(`${Math.round(usage.utilization)} % in use`);
  if (known(usage.temperature)) facts.push(`${Math.round(usage.temperature)} °C`);
  if (known(usage.power)) facts.push(`${Math.round(usage.power)} W`);
  if (device.health) facts.push(`⚠ ${device.health}`);
  if (device.kept) facts.push(device.kept);
  return facts;
}

// Parts that somebody has can be focused, for their details; the arrows go from one to the next.
function partElement(part) {
  const element = part.kind === "free" ? make("span") : make("button", "", { type: "button" });
  const [used, label] = [make("span", "gm-used"), make("span", "gm-label")];
  element.append(used, label);
  element.parts = { used, label };
  element.addEventListener("click", () => element.show_());
  return element;
}

function drawPart(view, element, part, total) {
  const { used, label } = element.parts;
  const { now, share } = { now: part.used, share: total && total * part.share, ...part.memory };
  const measured = known(now) && share;
  const kind = `gm-${part.kind}${part.kind === "own" ? ` gm-tint${tintOf(part.job)}` : ""}`;
  const state = part.kind === "free" ? "" : !measured ? " gm-unknown" : now > share ? " gm-over" : "";
  setAttribute(element, "class", `gm-part ${kind}${state}`);
  setStyle(element, "flexGrow", String(part.share));
  setStyle(used, "width", measured ? `${Math.min(100, (100 * now) / share).toFixed(1)}%` : "0%");
  const text = partText(part);
  setText(label, text);
  if (part.kind === "free") return;
  const held = part.kind === "outsider" ? "does not use gpunb, so has no share" : `share ${shareText(part.share)}`;
  setAttribute(element, "aria-label", `${text}, ${held}`);
  element.tip_ = () => [
    text,
    held,
    measured && now > share ? `uses more memory than its share of ${sizeText(share)}` : "",
    ...(part.job ? detailsOf(part.job, view.snapshot) : strangerFacts(part, measured ? now : null)),
  ].filter(Boolean);
  element.show_ = () => part.job && view.show(part.job);
}

// What is known of a part whose job is not in the snapshot
function strangerFacts({ since }, memory) {
  const began = known(since) ? `since ${dayText(since)}` : "";
  return [began, known(memory) ? `memory ${sizeText(memory)} now` : ""];
}

export function partText(part) {
  if (part.kind === "free") return part.free === 1 ? "free" : `${shareText(part.free)} free`;
  const number = part.job ? `#${part.job.id}` : part.id === null ? "" : `#${String(part.id).split(":").pop()}`;
  const place = part.job ? placeText(part.job) : "";
  return [number, part.name, place, part.owner || ""].filter(Boolean).join(" ");
}

// The shares of a device in a small place, without words; they are said beside it
export function drawShares(element, device, snapshot) {
  const parts = partsOf(device, whole(snapshot));
  keyed(element, parts, (part, at) => `${part.kind} ${part.id ?? at}`, () => make("span"), (each, part) => {
    setAttribute(each, "class", `gm-part gm-${part.kind}${part.kind === "own" ? ` gm-tint${tintOf(part.job)}` : ""}`);
    setStyle(each, "flexGrow", String(part.share));
  });
  setAttribute(element, "class", "gpunb-monitor gm-lane gm-mini");
  setAttribute(element, "aria-hidden", "true");
}

const MINUTE = 60; // seconds

// The last minute: use as an area, memory as a line; the share given out where neither is known
class Trend {
  constructor() {
    this.element = shape("svg", { class: "gm-trend", viewBox: "0 0 60 20", role: "img", preserveAspectRatio: "none" });
    this.area = shape("path", { class: "gm-area" });
    this.line = shape("path", { class: "gm-curve" });
    this.element.append(this.area, this.line);
  }

  draw(device) {
    const { memory, utilization, share, step } = device.history || {};
    const measured = memory && memory.some(known);
    const [area, line] = measured ? [utilization, memory] : [share || [], []];
    this.element.toggleAttribute("hidden", area.length < 2);
    if (area.length < 2) return;
    const count = MINUTE / step + 1;
    const path = (values) => pathOf(values.slice(-count), count, 60, 20);
    setAttribute(this.area, "d", areaOf(path(area)));
    setAttribute(this.line, "d", path(line));
    const last = (list) => (known(list[list.length - 1]) ? `${list[list.length - 1]} %` : "unknown");
    const said = measured ? `use ${last(utilization)}, memory ${last(memory)}` : `given out ${last(share)}`;
    setAttribute(this.element, "aria-label", `${deviceText(device)} in the last minute, now ${said}`);
    this.element.tip_ = () => [measured ? "The last minute: use filled, memory as a line" : "The share given out in the last minute", said];
  }
}

// The area below the pieces of a line
function areaOf(path) {
  return path.split("M").filter(Boolean).map((piece) => {
    const points = piece.split("L");
    const [first, last] = [points[0], points[points.length - 1]].map((each) => each.split(" ")[0]);
    return `M${first} 20L${points.join("L")}L${last} 20Z`;
  }).join("");
}
