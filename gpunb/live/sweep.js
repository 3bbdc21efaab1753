// The widget of a sweep: a bar, curves, and a table that sorts by any column.
const ROWS = 200; // rows in the page at once
const LINES = 100; // curves in the chart at once
const SVG = "http://www.w3.org/2000/svg";
const STATES = ["done", "stopped", "failed", "cancelled", "running", "queued"];
const ENDS = ["state", "seconds", "devices", "error"];

export function merged(table, message) {
  const rows = table.rows.slice();
  for (const row of message.rows) rows[row.number] = row;
  return { ...table, ...message, rows };
}

export function value(row, column) {
  if (column === "trial") return row.number;
  if (ENDS.includes(column)) return row[column];
  return column in row.metrics ? row.metrics[column] : row.params[column];
}

export function columns(rows) {
  const names = new Set();
  for (const row of rows) Object.keys(row.params).forEach((each) => names.add(each));
  for (const row of rows) Object.keys(row.metrics).forEach((each) => names.add(each));
  return ["trial", ...names, ...ENDS.filter((each) => !names.has(each))];
}

// Numbers before texts, and what has no value last, in either direction.
export function sorted(rows, column, down) {
  const rank = (each) => (each === undefined || each === null || each === "" ? 2 : typeof each === "string" ? 1 : 0);
  return rows.slice().sort((one, other) => {
    const [a, b] = [value(one, column), value(other, column)];
    if (rank(a) !== rank(b)) return rank(a) - rank(b);
    const order = a < b ? -1 : a > b ? 1 : 0;
    return (down ? -order : order) || one.number - other.number;
  });
}

export function points(curve, low, high, longest) {
  const y = (each) => (high > low ? 100 - (100 * (each - low)) / (high - low) : 50);
  return curve.map((each, at) => `${(100 * at) / Math.max(1, longest - 1)},${y(each)}`).join(" ");
}

function text(each) {
  if (each === undefined || each === null) return "";
  return typeof each === "number" ? String(Number(each.toPrecision(6))) : String(each);
}

function made(parent, tag, name, content) {
  const element = document.createElement(tag);
  if (name) element.className = name;
  if (content !== undefined) element.textContent = content;
  parent.append(element);
  return element;
}

function initialize({ model }) {
  model.on("msg:custom", (message) => {
    if (message.rows) model.set("table", merged(model.get("table"), message));
  });
}

function render({ model, el }) {
  el.classList.add("gpunb-monitor", "gpunb-sweep");
  const head = made(el, "p", "gm-summary");
  head.setAttribute("role", "status");
  const bar = made(el, "div", "gs-bar");
  const notes = made(el, "ul", "gm-notes");
  const chart = made(el, "div");
  const scroll = made(el, "div", "gs-scroll");
  const output = made(el, "div");
  let column = "trial";
  let down = false;
  let chosen = null;

  const drawHead = (table) => {
    const counts = STATES.filter((each) => table.counts[each]);
    const words = counts.map((each) => `${table.counts[each]} ${each}`).join(", ");
    head.textContent = `${table.name}: ${table.total} trials: ${words}`;
    bar.replaceChildren();
    for (const state of counts) {
      const part = made(bar, "span", `gs-${state}`);
      part.style.width = `${(100 * table.counts[state]) / table.total}%`;
      part.title = `${table.counts[state]} ${state}`;
    }
    notes.replaceChildren();
    for (const each of table.notes) made(notes, "li", "", each);
  };

  const drawChart = (rows) => {
    chart.replaceChildren();
    const names = new Set(rows.flatMap((row) => Object.keys(row.curves)));
    if (!names.size) return;
    const name = names.has(column) ? column : [...names][0];
    const drawn = rows.filter((row) => row.curves[name]).slice(-LINES);
    const all = drawn.flatMap((row) => row.curves[name]);
    const [low, high] = [Math.min(...all), Math.max(...all)];
    const longest = Math.max(...drawn.map((row) => row.curves[name].length));
    made(chart, "div", "gm-more", `${name} from ${text(low)} to ${text(high)}`);
    const svg = document.createElementNS(SVG, "svg");
    svg.setAttribute("class", "gs-chart");
    svg.setAttribute("viewBox", "0 0 100 100");
    svg.setAttribute("preserveAspectRatio", "none");
    svg.setAttribute("role", "img");
    svg.setAttribute("aria-label", `${name} of ${drawn.length} trials by report`);
    for (const row of drawn) {
      const line = document.createElementNS(SVG, "polyline");
      line.setAttribute("points", points(row.curves[name], low, high, longest));
      if (row.number === chosen) line.setAttribute("class", "gs-chosen");
      const title = document.createElementNS(SVG, "title");
      title.textContent = `trial ${row.number}`;
      line.append(title);
      svg.append(line);
    }
    chart.append(svg);
  };

  const drawTable = (all) => {
    const names = columns(all);
    const rows = sorted(all, column, down);
    const table = document.createElement("table");
    const titles = made(made(table, "thead"), "tr");
    for (const name of names) {
      const cell = made(titles, "th");
      cell.scope = "col";
      const current = name === column;
      if (current) cell.setAttribute("aria-sort", down ? "descending" : "ascending");
      const button = made(cell, "button", "", name + (current ? (down ? " ↓" : " ↑") : ""));
      button.addEventListener("click", () => {
        down = current && !down;
        column = name;
        draw();
      });
    }
    const body = made(table, "tbody");
    for (const row of rows.slice(0, ROWS)) {
      const line = made(body, "tr");
      for (const name of names) {
        const cell = made(line, "td");
        if (name !== "trial") {
          cell.textContent = text(value(row, name));
          continue;
        }
        const button = made(cell, "button", "", row.resumed ? `${row.number} (file)` : String(row.number));
        button.title = "show the output of this trial";
        button.addEventListener("click", () => {
          chosen = row.number;
          model.send({ trial: row.number });
          drawChart(model.get("table").rows);
        });
      }
    }
    if (rows.length > ROWS) made(table, "caption", "gm-more", `the first ${ROWS} of ${rows.length} trials`);
    const [left, top] = [scroll.scrollLeft, scroll.scrollTop];
    const focus = [...scroll.querySelectorAll("button")].indexOf(document.activeElement);
    scroll.replaceChildren(table);
    scroll.scrollTo(left, top);
    if (focus >= 0) scroll.querySelectorAll("button")[focus]?.focus();
  };

  const draw = () => {
    const table = model.get("table");
    drawHead(table);
    drawChart(table.rows);
    drawTable(table.rows);
  };

  const answered = (message) => {
    if (!message.output || message.trial !== chosen) return;
    output.replaceChildren();
    made(output, "div", "gm-heading", message.about);
    for (const { type, data } of message.output) {
      if (type === "text") {
        made(output, "pre", "gm-log-text", data);
        continue;
      }
      const image = made(output, "img");
      image.alt = `figure of trial ${message.trial}`;
      const svg = type === "image/svg+xml";
      image.src = svg ? `data:${type},${encodeURIComponent(data)}` : `data:${type};base64,${data}`;
    }
    if (!message.output.length) made(output, "p", "gm-more", "It has shown nothing.");
  };

  draw();
  model.on("change:table", draw);
  model.on("msg:custom", answered);
  return () => {
    model.off("change:table", draw);
    model.off("msg:custom", answered);
  };
}

export default { initialize, render };
