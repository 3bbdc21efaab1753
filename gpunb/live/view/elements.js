// Elements of the page, which are changed only where they differ.

import { printable } from "./texts.js";

export function make(tag, className = "", attributes = {}) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, printable(value));
  return element;
}

// Nothing is touched that stays as it is: neither focus nor selection is lost, nor layout redone.
export function setText(element, text) {
  const one = printable(text);
  if (element.textContent !== one) element.textContent = one;
}

export function setHidden(element, hidden) {
  if (element.hidden !== hidden) element.hidden = hidden;
}

export function setAttribute(element, name, value) {
  const text = printable(value);
  if (element.getAttribute(name) !== text) element.setAttribute(name, text);
}

export function setStyle(element, name, value) {
  if (element.style[name] !== value) element.style[name] = value;
}

// One child for each item, in order; a child stays that of its item. Those that are gone go first:
// an element that is moved loses the focus.
export function keyed(parent, items, keyOf, makeChild, draw) {
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

export function shape(tag, attributes = {}) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  return element;
}

// Shapes, drawn with lines in a square of 16; those of states differ without their colours.
export const ICONS = {
  running: "M5 3v10l8-5z",
  queued: "M8 2a6 6 0 1 0 0 12a6 6 0 1 0 0-12M8 4.500V8l2.500 1.500",
  done: "M3 8.500l3.500 3.500l6.500-8",
  failed: "M4 4l8 8M12 4l-8 8",
  cancelled: "M4 4h8v8H4z",
  alive: "M8 5a3 3 0 1 0 0 6a3 3 0 1 0 0-6",
  interrupt: "M4 4h8v8H4z",
  kill: "M8 2a6 6 0 1 0 0 12a6 6 0 1 0 0-12M6 6l4 4M10 6l-4 4",
  cancel: "M4 4l8 8M12 4l-8 8",
  logs: "M3 4h10M3 8h10M3 12h6",
  goTo: "M9 3h4v4M13 3L7.500 8.500M11 9v4H3V5h4",
  seen: "M3 8.500l3.500 3.500l6.500-8",
  fold: "M6 4l4 4l-4 4",
};

export function setIcon(element, name) {
  if (element.icon_ === name) return;
  element.icon_ = name;
  const svg = shape("svg", { viewBox: "0 0 16 16", "aria-hidden": "true" });
  svg.append(shape("path", { d: ICONS[name] }));
  element.replaceChildren(svg);
}

let names = 0;

// A name that no other element has.
export function freshId(kind) {
  names += 1;
  return `gm-${kind}-${names}`;
}

// Tab comes to one row or button only, with its buttons: to the last one that had the focus, else the
// first
export function roving(parent, current = parent.current_) {
  const items = [...parent.querySelectorAll(".gm-row, :scope > button")];
  parent.current_ = items.includes(current) ? current : items[0];
  for (const item of items) {
    const there = item === parent.current_ ? 0 : -1;
    for (const each of [item, ...item.querySelectorAll(":scope > .gm-line button")]) setAttribute(each, "tabindex", there);
  }
}
