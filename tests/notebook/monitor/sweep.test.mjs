import assert from "node:assert/strict";
import { test } from "node:test";
import { pathToFileURL } from "node:url";

const { columns, merged, points, sorted, value } = await import(pathToFileURL(process.env.GPUNB_VIEW));

const row = (number, params, metrics, state = "done") => ({
  number, params, metrics, state, seconds: number, devices: "", error: "", curves: {},
});

test("a message replaces the rows that it has", () => {
  const table = { total: 2, rows: [row(0, {}, {}, "queued"), row(1, {}, {}, "queued")] };
  const after = merged(table, { total: 3, rows: [row(1, {}, {}), row(2, {}, {})] });
  assert.deepEqual(after.rows.map((each) => each.state), ["queued", "done", "done"]);
  assert.equal(after.total, 3);
  assert.equal(table.rows[1].state, "queued");
});

test("the columns are those of all rows", () => {
  const rows = [row(0, { rate: 1 }, {}), row(1, { width: 2 }, { loss: 3 })];
  assert.deepEqual(columns(rows), ["trial", "rate", "width", "loss", "state", "seconds", "devices", "error"]);
});

test("rows are sorted by numbers, then texts, and what has no value is last", () => {
  const rows = [row(0, {}, { loss: "nan" }), row(1, {}, {}), row(2, {}, { loss: 10 }), row(3, {}, { loss: 9 })];
  assert.deepEqual(sorted(rows, "loss", false).map((each) => each.number), [3, 2, 0, 1]);
  assert.deepEqual(sorted(rows, "loss", true).map((each) => each.number), [2, 3, 0, 1]);
  assert.equal(value(rows[2], "loss"), 10);
});

test("a curve fills the chart", () => {
  assert.equal(points([1, 3, 2], 1, 3, 3), "0,100 50,0 100,50");
  assert.equal(points([2, 2], 2, 2, 2), "0,50 100,50");
});
