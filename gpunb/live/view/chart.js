// The timeline of the last jobs.

import { make, setIcon, setText, shape } from "./elements.js";
import { barsOf, tintOf } from "./facts.js";
import { deviceText, printable, shareText, timeText } from "./texts.js";

const [CHART, LEFT, BAR, BARS] = [720, 60, 18, 300];

// What ran on the devices, as far as the snapshot has it; drawn while it is open
export class Chart {
  constructor() {
    this.element = make("details", "gm-chart");
    this.title = make("summary", "gm-heading");
    const [sign, name] = [make("span", "gm-sign"), make("span")];
    setIcon(sign, "fold");
    setText(name, "Timeline");
    this.title.append(sign, name);
    this.box = make("div", "gm-chart-box", { tabindex: 0, role: "group", "aria-label": "Timeline" });
    this.element.append(this.title, this.box);
    this.element.addEventListener("toggle", () => this.draw(this.snapshot, true));
  }

  draw(snapshot, opened = false) {
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
      pieces.push(shape("rect", { class: "gm-frame", x: LEFT, y: top, width: CHART - LEFT, height: rows * BAR }));
      for (const bar of bars) pieces.push(barElement(bar, top, scale));
      top += rows * BAR + 6;
    }
    pieces.push(words(LEFT, top + 12, `${timeText(longest)} ago`), words(CHART - 30, top + 12, "now"));
    const jobs = lanes.reduce((sum, { bars }) => sum + bars.length, 0);
    const label = `${jobs} bars on ${lanes.length} devices in the last ${timeText(longest)}`;
    const svg = shape("svg", { viewBox: `0 0 ${CHART} ${top + 16}`, role: "img", "aria-label": label });
    svg.append(...pieces);
    this.box.replaceChildren(svg);
    if (opened) this.box.scrollLeft = this.box.scrollWidth; // to now
  }
}

function barElement({ job, share, from, to, row }, top, scale) {
  const [x, width] = [CHART - from * scale, Math.max(2, (from - to) * scale)];
  const group = shape("g", { class: `gm-tint${tintOf(job)}` });
  const text = `#${job.id} ${job.name || ""}`.trim();
  const title = shape("title");
  title.textContent = printable(`${text}: ${job.state}, ${timeText(from - to)}, share ${shareText(share)}`);
  const over = job.state === "failed" || job.state === "cancelled";
  group.append(title, shape("rect", { class: over ? "gm-bar gm-broken" : "gm-bar", x, y: top + row * BAR + 1, width, height: BAR - 2 }));
  if (text.length * 7 < width) group.append(words(x + 3, top + row * BAR + 13, text));
  return group;
}

function words(x, y, text) {
  const element = shape("text", { x, y });
  element.textContent = printable(text);
  return element;
}
