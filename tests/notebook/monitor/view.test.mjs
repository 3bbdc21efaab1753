// The pure functions of the view; run by tests/notebook/test_monitor.py with `node --test`.
import assert from "node:assert/strict";
import { test } from "node:test";

const names = ["texts", "facts", "clock", "devices", "index"];
const modules = await Promise.all(names.map((name) => import(`${process.env.GPUNB_VIEW}/${name}.js`)));
const view = Object.assign({}, ...modules);

test("sizes and times as people read them", () => {
  assert.equal(view.sizeText(0), "0 B");
  assert.equal(view.sizeText(1536), "1.5 KiB");
  assert.equal(view.sizeText(40 * 2 ** 30), "40 GiB");
  assert.equal(view.sizeText(null), "?");
  assert.equal(view.timeText(0.4), "0 s");
  assert.equal(view.timeText(59.9), "59 s");
  assert.equal(view.timeText(61), "1:01");
  assert.equal(view.timeText(3661), "1:01:01");
  assert.equal(view.shareText(1 / 3), "0.3333");
});

test("a job that is ending has the number that people know, also among several sessions", () => {
  assert.equal(view.partText({ kind: "own", id: "4711:9", name: "ending", share: 0.1 }), "#9 ending");
  assert.equal(view.partText({ kind: "own", id: 9, name: "ending", share: 0.1 }), "#9 ending");
});

test("memory says only what is known", () => {
  assert.equal(view.memoryText(null), "");
  assert.equal(view.memoryText({ now: null, peak: null, share: 2 ** 30 }), "share 1 GiB");
  assert.equal(view.memoryText({ now: 1024, peak: 2048, share: 4096 }), "1 KiB now, 2 KiB at most, share 4 KiB");
});

test("control characters are escaped, and all else stays as it is", () => {
  assert.equal(view.printable("größe 大小 <b>"), "größe 大小 <b>");
  assert.equal(view.printable("\u001b[2J\u0000\n\u202e"), "\\u001b[2J\\u0000\\u000a\\u202e");
  assert.equal(view.printable(7), "7");
});

test("what something took is told as far as it is worth a word", () => {
  const memory = { now: null, peak: 2 ** 30, share: null };
  const took = { gpu_seconds: 70.4, waited: 20, peak: 2 ** 30 };
  const words = ["1:10 of GPU time", "waited 20 s", "peak 1 GiB"];
  assert.deepEqual(view.tookText(took, memory), words);
  assert.deepEqual(view.tookText(took, took), words);
  assert.deepEqual(view.tookText({ gpu_seconds: 0.4, waited: 0.3 }, { peak: null }), []);
  assert.deepEqual(view.tookText({}, null), []);
});

const device = (more) => ({ id: 0, key: "GPU-1", logical: false, held: [], others: [], usage: {}, ...more });
const session = (pid) => ({ pid, user: "ada", notebook: `/home/ada/${pid}.ipynb` });
const job = (id, more) => ({ id, name: `t${id}`, cell: null, seconds: 1, memory: null, devices: [], ...more });
const snapshot = (more) => view.whole({ session: session(1), ...more });

test("the parts of a device add up to one", () => {
  const own = snapshot({ running: [job(7)] });
  const other = snapshot({ session: session(2), running: [job(3)], devices: [device({ held: [[3, 0.25]] })] });
  const parts = view.partsOf(device({ held: [[7, 0.5]] }), own, [other]);
  assert.deepEqual(parts.map(({ kind, share, name }) => [kind, share, name]), [
    ["own", 0.5, "t7"],
    ["other", 0.25, "t3"],
    ["free", 0.25, "free"],
  ]);
  assert.match(parts[1].owner, /2\.ipynb, ada/);
});

test("a kernel is drawn once, whether it is seen itself or by its lease", () => {
  const lease = { kind: "kernel", pid: 2, share: 0.25, user: "ada", notebook: "/a/b.ipynb", job: "x" };
  const other = snapshot({ session: session(2), devices: [device({ held: [[3, 0.25]] })] });
  const seen = view.partsOf(device({ others: [lease] }), snapshot({}), [other]);
  assert.deepEqual(seen.map((part) => part.kind), ["other", "free"]);
  const leased = view.partsOf(device({ others: [lease] }), snapshot({}));
  assert.deepEqual(leased.map((part) => [part.kind, part.owner]), [["other", "b.ipynb, ada"], ["free", undefined]]);
});

test("devices that exist in the books only are nobody else's", () => {
  const mine = device({ key: "sim:0", logical: true });
  const other = snapshot({ session: session(2), devices: [device({ key: "sim:0", logical: true, held: [[3, 1]] })] });
  assert.deepEqual(view.partsOf(mine, snapshot({}), [other]).map((part) => part.kind), ["free"]);
});

test("a holder that is not listed has no name, and is not said to end", () => {
  const shortened = snapshot({ counts: { running: 9 } });
  assert.equal(view.partsOf(device({ held: [[7, 1]] }), shortened)[0].name, "");
  assert.equal(view.partsOf(device({ held: [[7, 1]] }), snapshot({}))[0].name, "ending");
});

test("devices of other kinds are told by their own names", () => {
  assert.equal(view.devicesText(job(1)), "CPU");
  assert.equal(view.devicesText(job(1, { devices: [["GPU", 0, 0.5], ["NPU", 0, 1]] })), "GPU 0 (0.5), NPU 0 (1)");
  assert.equal(view.placedText(job(1, { pid: 7 })), "CPU");
  assert.equal(view.placedText(job(1, { pid: null })), "", "it never ran");
  assert.equal(view.placedText(job(1, { devices: [["GPU", 0, 0.5]] })), "GPU 0 (0.5)");
  const time = 100;
  const both = snapshot({ time, running: [job(1, { devices: [["NPU", 0, 1]] }), job(2, { devices: [["GPU", 0, 1]] })] });
  const bars = view.barsOf(device({ resource: "NPU" }), both);
  assert.deepEqual(bars.map((each) => [each.job.id, each.share]), [[1, 1]]);
});

test("bars of one row do not overlap", () => {
  const time = 1000;
  const over = (id, from, to, more) => job(id, { devices: [["GPU", 0, 0.5]], ended: time - to, seconds: from - to, ...more });
  const finished = [over(1, 100, 50), over(2, 90, 40), over(3, 40, 10), over(4, 30, 20, { devices: [["GPU", 1, 1]] })];
  finished.push(over(5, 30, 20, { actor: 9 }), over(7, 30, 20, { devices: [["NPU", 0, 1]] }));
  const running = [job(6, { devices: [["GPU", 0, 0.5]], seconds: 5 })];
  const bars = view.barsOf(device({}), snapshot({ time, finished, running }));
  assert.deepEqual(bars.map(({ job: { id }, row }) => [id, row]), [[1, 0], [2, 1], [3, 0], [6, 0]]);
});

test("a line is interrupted where nothing is known", () => {
  assert.equal(view.pathOf([0, 100], 2, 10, 10), "M0.0 10.0L10.0 0.0");
  assert.equal(view.pathOf([0, null, 50], 3, 10, 10), "M0.0 10.0M10.0 5.0");
  assert.equal(view.pathOf([50], 3, 10, 10), "M10.0 5.0");
});

test("only what has changed is announced, and not at first", () => {
  const before = snapshot({ running: [job(1)] });
  const after = snapshot({ running: [job(2)], finished: [job(1, { state: "done" })] });
  assert.equal(view.newsOf(undefined, before), "");
  assert.equal(view.newsOf(before, before), "");
  assert.equal(view.newsOf(before, after), "#1 t1 done, #2 t2 running");
  const many = snapshot({ running: [job(1), job(2), job(3), job(4), job(5)] });
  assert.equal(view.newsOf(snapshot({}), many), "5 jobs have changed");
});

test("names of jobs, cells and notebooks", () => {
  assert.equal(view.jobText(job(7, { cell: 3, name: "train" })), "#7 train In[3]");
  assert.equal(view.jobText(job(7, { cell: 3, name: "In[3]" })), "#7 In[3]");
  assert.equal(view.keyOf({ id: 7, key: "12:7" }), "12:7");
  assert.equal(view.notebookText({ pid: 7, notebook: null }), "process 7");
  assert.equal(view.deviceText({ id: 2, resource: "TPU" }), "TPU 2");
});

const event = (type, more) => Object.assign(new Event(type), more);

test("nothing is drawn while a button is pressed, and the last of it once it was clicked", async () => {
  globalThis.window = new EventTarget();
  const [button, drawn] = [new EventTarget(), []];
  const calm = new view.Calm();
  calm.watch(button);
  calm.draw(() => drawn.push("before"));
  for (const [down, up] of [
    [event("pointerdown"), event("pointerup")],
    [event("pointerdown"), event("pointercancel")],
    [event("keydown", { key: " " }), event("keyup")],
  ]) {
    drawn.length = 0;
    button.dispatchEvent(down);
    calm.draw(() => drawn.push("first"));
    calm.draw(() => drawn.push("last"));
    window.dispatchEvent(up);
    assert.deepEqual(drawn, [], "the click is yet to come");
    await new Promise((resolve) => setTimeout(resolve));
    assert.deepEqual(drawn, ["last"]);
    calm.draw(() => drawn.push("after"));
    assert.deepEqual(drawn, ["last", "after"]);
  }
  button.dispatchEvent(event("keydown", { key: "a" }));
  assert.equal(calm.pressed, false);
  button.dispatchEvent(event("pointerdown"));
  calm.draw(() => drawn.push("never"));
  calm.dispose();
  window.dispatchEvent(event("pointerup"));
  await new Promise((resolve) => setTimeout(resolve));
  assert.ok(!drawn.includes("never"));
});
