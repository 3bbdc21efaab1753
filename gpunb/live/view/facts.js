// What a snapshot says of devices and jobs. Pure.

import {
  actorText, dayText, keyOf, known, memoryText, notebookText, ownerText, placedText, timeText, tookText,
} from "./texts.js";

const UNKNOWN = { memory_used: null, memory_total: null, utilization: null, temperature: null };

// With all that may be missing, as where a session is only just known
export function whole(snapshot) {
  const lists = { devices: [], running: [], waiting: [], finished: [], actors: [], groups: [], warnings: [] };
  for (const name of Object.keys(lists)) lists[name] = snapshot[name] || [];
  const counts = {
    running: lists.running.length,
    waiting: snapshot.queued || lists.waiting.length,
    finished: lists.finished.length,
    actors: lists.actors.length,
    ...snapshot.counts,
  };
  const devices = lists.devices.map((each) => ({ usage: UNKNOWN, held: [], others: [], free: 1, ...each }));
  return { time: Date.now() / 1000, ...snapshot, ...lists, devices, counts };
}

// Whether a device is in the books of one session only: no other session can hold a part of it
export const isPrivate = (device) => device.logical && !device.leased;

// The parts of a device from left to right: [{kind, share, id, name, ...}], shares adding up to 1
export function partsOf(device, snapshot, kernels = []) {
  const parts = device.held.map(([id, share]) => ({ kind: "own", share, id, ...holder(snapshot, id) }));
  const seen = new Set();
  for (const other of isPrivate(device) ? [] : kernels) {
    const same = (other.devices || []).find((each) => each.key === device.key && !isPrivate(each));
    for (const [id, share] of same ? same.held : []) {
      seen.add(other.session.pid);
      const owner = `${notebookText(other.session)}, ${other.session.user}`;
      parts.push({ kind: "other", share, id, owner, ...holder(whole(other), id) });
    }
  }
  for (const other of device.others) {
    if (other.kind !== "kernel" || !other.share || seen.has(other.pid)) continue;
    const { share, job, since } = other;
    parts.push({ kind: "other", share, id: null, name: job || "", owner: ownerText(other), since });
  }
  const free = Math.max(0, 1 - parts.reduce((sum, part) => sum + part.share, 0));
  const total = device.usage.memory_total || device.memory;
  let left = free;
  for (const other of outsidersOf(device)) {
    const share = Math.min(left, total && other.memory ? other.memory / total : 0);
    left -= share;
    const { memory, since } = other;
    const owner = ownerText(other);
    parts.push({ kind: "outsider", share, id: null, name: "", owner, used: memory, since });
  }
  if (left > 0.00005) parts.push({ kind: "free", share: left, free, id: null, name: "free" });
  return parts;
}

// Processes that use a device without gpunb, so without a share
export function outsidersOf(device) {
  return device.others.filter((each) => each.kind !== "kernel" || !each.share);
}

function holder(snapshot, id) {
  const job = snapshot.running.find((each) => keyOf(each) === id);
  if (job) return { name: job.name, job, memory: job.memory };
  const actor = snapshot.actors.find((each) => keyOf(each) === id);
  if (actor) return { name: actorText(actor), job: actor, memory: actor.memory };
  const listed = snapshot.running.length >= snapshot.counts.running;
  return { name: listed ? "ending" : "", job: null, memory: null };
}

// The session of a job, or the attached kernel whose it is in a head process
export function homeOf(job, snapshot) {
  return job.client || job.session || snapshot.session;
}

// What there is to know of a job or an actor, a line each
export function detailsOf(job, snapshot) {
  const session = homeOf(job, snapshot);
  const cell = known(job.cell) ? `cell In[${job.cell}]` : "";
  const start = known(job.ended) ? job.ended - job.seconds : snapshot.time - job.seconds;
  const since = known(job.seconds) ? dayText(start) : "";
  const ended = known(job.ended) ? `, took ${timeText(job.seconds)}` : "";
  return [
    job.waits_for || "",
    [cell, session ? notebookText(session) : "", (session && session.user) || ""].filter(Boolean).join(", "),
    placedText(job),
    since && `${job.state} since ${since}`.replace(/^(done|failed|cancelled) since/, "$1, began at") + ended,
    memoryText(job.memory) && `memory ${memoryText(job.memory)}`,
    known(job.ended) ? tookText(job).join(", ") : "",
    job.waiting ? `${job.waiting} calls wait` : "",
    job.hint || "",
    job.unlisted ? `${job.unlisted} more are only counted` : "",
  ].filter(Boolean);
}

// What tells a failure from all others, for those that were seen
export function failureKey(job) {
  return `${keyOf(job)}@${job.ended}`;
}

// The failures that nobody has seen yet
export function failures(snapshot, memory) {
  return (snapshot.finished || []).filter((job) => job.state === "failed" && !memory.seen.has(failureKey(job)));
}

// What a view leaves for the next one: which lists are folded and which rows open, what the user filters by, and which
// failures were seen; `changed` is called when there is another one.
export class Memory {
  constructor(seen = []) {
    this.folded = new Map();
    this.opened = new Set(); // keys of the rows that show all
    this.filter = "";
    this.seen = new Set(seen);
    this.changed = () => {};
  }

  see(job) {
    if (job.state !== "failed" || this.seen.has(failureKey(job))) return;
    this.seen.add(failureKey(job));
    this.changed();
  }
}

// Points of a line for values from 0 to 100, the last one at the right edge; null interrupts it
export function pathOf(values, count, width, height) {
  const step = width / Math.max(1, count - 1);
  const first = width - step * (values.length - 1);
  let path = "";
  let drawing = false;
  values.forEach((value, at) => {
    if (value !== null) {
      const [x, y] = [first + step * at, height - (height * Math.min(100, value)) / 100];
      path += `${drawing ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`;
    }
    drawing = value !== null;
  });
  return path;
}

// The bars of a Gantt chart for a device: [{job, share, from, to, row}] in seconds before now, rows
// such that no two bars of one overlap. What runs in an actor or a session is part of its bar.
export function barsOf(device, snapshot) {
  const { time, finished, running, actors } = snapshot;
  const known = [
    ...finished.map((job) => ({ job, from: time - job.ended + job.seconds, to: time - job.ended })),
    ...[...running, ...actors].map((job) => ({ job, from: job.seconds || 0, to: 0 })),
  ];
  const ends = [];
  return known
    .filter(({ job }) => !job.actor && job.kind !== "create" && job.kind !== "method")
    .filter(({ job }) => !(isPrivate(device) && job.key) || sessionOf(device.key) === sessionOf(job.key))
    .map((each) => ({ ...each, share: shareOf(each.job, device) }))
    .filter((each) => each.share)
    .sort((one, other) => other.from - one.from)
    .map(({ job, share, from, to }) => {
      let row = ends.findIndex((end) => end >= from);
      if (row < 0) row = ends.length;
      ends[row] = to;
      return { job, share, from, to, row };
    });
}

// The GPU-seconds that a second adds
export function gpuRate(snapshot) {
  const gpus = (snapshot.devices || []).filter((each) => (each.resource || "GPU") === "GPU");
  return gpus.flatMap((each) => each.held).reduce((sum, [, share]) => sum + share, 0);
}

function shareOf(job, device) {
  const same = ([kind, id]) => kind === (device.resource || "GPU") && id === device.id;
  return ((job.devices || []).find(same) || [])[2];
}

// Of a key in a snapshot of several sessions, which begins with it
function sessionOf(key) {
  return key.split(":")[0];
}

// What to announce of the step from one snapshot to the next
export function newsOf(before, now) {
  if (!before) return "";
  const known = new Set(before.finished.map(keyOf));
  const ran = new Set(before.running.map(keyOf));
  const said = now.finished.filter((job) => !known.has(keyOf(job))).map((job) => `#${job.id} ${job.name} ${job.state}`);
  for (const job of now.running) if (!ran.has(keyOf(job))) said.push(`#${job.id} ${job.name} running`);
  return said.length > 3 ? `${said.length} jobs have changed` : said.join(", ");
}

// Which of six colours marks a job
export function tintOf(job) {
  return job && Number.isInteger(job.id) ? job.id % 6 : 0;
}
