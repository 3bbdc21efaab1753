// The escape codes of terminals in what a job has shown. Pure.

// A code of a colour or the like, which ends in m; any other code; a title or a link
const CODES =
  /\u001b(?:\[([0-?]*)[ -/]*([@-~])|\][^\u0007\u001b]*(?:\u0007|\u001b\\)?|[ -/]*[0-~])/g;

// What a later piece of the same line has replaced, as a progress bar does
const REPLACED = /[^\n]*\r(?=[^\r\n])/g;

// As view.css has them; the bright ones are the same
const COLOURS = ["black", "red", "green", "yellow", "blue", "magenta", "cyan", "white"].map(
  (name) => `var(--gm-${name})`,
);

// What the numbers of a code change
const CHANGES = {
  1: { fontWeight: "bold" },
  3: { fontStyle: "italic" },
  4: { textDecoration: "underline" },
  7: { color: "var(--gm-back)", backgroundColor: "var(--gm-text)" },
  22: { fontWeight: "" },
  23: { fontStyle: "" },
  24: { textDecoration: "" },
  27: { color: "", backgroundColor: "" },
  39: { color: "" },
  49: { backgroundColor: "" },
};
COLOURS.forEach((color, at) => {
  for (const first of [30, 90]) {
    CHANGES[first + at] = { color };
    CHANGES[first + 10 + at] = { backgroundColor: `color-mix(in srgb, ${color} 25%, transparent)` };
  }
});

// The text without codes
export function plainText(text) {
  return text.replace(CODES, "");
}

// The pieces of a text, each with its style: [["red", {color: ...}], [" plain", {}]]
export function stylesOf(text) {
  const shown = text.replaceAll("\r\n", "\n").replace(REPLACED, "");
  const pieces = [];
  let [at, style] = [0, {}];
  const add = (end) => end > at && pieces.push([shown.slice(at, end), style]);
  for (const found of shown.matchAll(CODES)) {
    const [code, numbers, kind] = found;
    add(found.index);
    at = found.index + code.length;
    if (kind === "m") style = styleAfter(style, numbers.split(/[;:]/).map(Number));
  }
  add(shown.length);
  return pieces;
}

function styleAfter(before, numbers) {
  let style = before;
  while (numbers.length) {
    const number = numbers.shift();
    if (number === 0) style = {};
    else if (number === 38) style = { ...style, color: manyColours(numbers) };
    else if (number === 48) style = { ...style, backgroundColor: manyColours(numbers) };
    else style = { ...style, ...CHANGES[number] };
  }
  return style;
}

// One of 256 colours (5;n), or of all of them (2;r;g;b); takes its numbers away
function manyColours(numbers) {
  if (numbers.shift() === 2) return `rgb(${numbers.splice(0, 3).join(" ")})`;
  const [number = 0] = numbers.splice(0, 1);
  if (number < 16) return COLOURS[number % 8];
  if (number > 231) return `rgb(${Array(3).fill(8 + 10 * (number - 232)).join(" ")})`;
  const level = (size) => (Math.floor((number - 16) / size) % 6) * 51;
  return `rgb(${level(36)} ${level(6)} ${level(1)})`;
}
