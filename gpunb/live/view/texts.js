// Values as people read them. Pure.

// Nothing is known of what is null, or left out
export function known(value) {
  return value !== null && value !== undefined;
}

// Characters that move a cursor, end a line or turn the direction of what follows, as \u001b: what
// gpunb/scheduler/markup.py escapes. Names are of anybody; text is never HTML here.
const CONTROL = /[\u0000-\u001f\u007f-\u009f\u2028-\u202e\u2066-\u2069]/g;

export function printable(text) {
  return String(text).replace(CONTROL, (each) => `\\u${each.charCodeAt(0).toString(16).padStart(4, "0")}`);
}

// Facts in one line, which breaks after the dot between two of them only
export function lineText(facts) {
  return facts.map((each) => each.replaceAll(" ", "\u00a0")).join("\u00a0· ");
}

export function sizeText(bytes) {
  if (!known(bytes)) return "?";
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let at = 0;
  while (Math.abs(bytes) >= 1024 && at < units.length - 1) {
    bytes /= 1024;
    at += 1;
  }
  return `${bytes.toFixed(1).replace(/\.0$/, "")} ${units[at]}`;
}

export function timeText(seconds) {
  const whole = Math.max(0, Math.floor(seconds));
  if (whole < 60) return `${whole} s`;
  const [hours, minutes] = [Math.floor(whole / 3600), Math.floor(whole / 60) % 60];
  const two = (value) => String(value).padStart(2, "0");
  const rest = two(whole % 60);
  return hours ? `${hours}:${two(minutes)}:${rest}` : `${minutes}:${rest}`;
}

// The time of day of a moment: "14:03:59"
export function dayText(moment) {
  return new Date(1000 * moment).toTimeString().slice(0, 8);
}

export function shareText(share) {
  return String(Math.round(share * 10000) / 10000);
}

// "2 GiB now, 3 GiB at most, of 20 GiB"; empty if nothing of it is known
export function memoryText(memory) {
  if (!memory) return "";
  const parts = [];
  if (known(memory.now)) parts.push(`${sizeText(memory.now)} now`);
  if (known(memory.peak)) parts.push(`${sizeText(memory.peak)} at most`);
  if (known(memory.share)) parts.push(`share ${sizeText(memory.share)}`);
  return parts.join(", ");
}

// What a job took: ["1:10 of GPU time", "waited 20 s", "peak 2 GiB"]; the waiting of all together means nothing
export function tookText(what, memory) {
  const parts = [];
  if (what.gpu_seconds >= 1) parts.push(`${timeText(what.gpu_seconds)} of GPU time`);
  if (what.waited >= 1) parts.push(`waited ${timeText(what.waited)}`);
  if (memory && known(memory.peak)) parts.push(`peak ${sizeText(memory.peak)}`);
  return parts;
}

// What a job has: "GPU 0 (0.5), NPU 1 (1)"
export function devicesText(job) {
  const parts = (job.devices || []).map(([kind, id, share]) => `${kind} ${id} (${shareText(share)})`);
  return parts.join(", ") || "CPU";
}

// The same without shares, where there is little room: "GPU 0, NPU 1"
export function briefDevicesText(job) {
  return (job.devices || []).map(([kind, id]) => `${kind} ${id}`).join(", ");
}

// What a job has, of what may have no process yet, or never had one, and so is on nothing
export function placedText(job) {
  return (job.devices || []).length || known(job.pid) ? devicesText(job) : "";
}

// Where a job comes from: its cell, unless its name says so already
export function placeText(job) {
  const unsaid = known(job.cell) && !String(job.name).split(" ").includes(`In[${job.cell}]`);
  const owner = job.owner || (job.client ? notebookText(job.client) : "");
  return [unsaid ? `In[${job.cell}]` : "", owner].filter(Boolean).join(" ");
}

export function keyOf(job) {
  return job.key ?? job.id;
}

export function deviceText(device) {
  return `${device.resource || "GPU"} ${device.id}`;
}

// "in 4 ranks"; empty for a job in one process
export function ranksText(job) {
  const count = (job.ranks || []).length;
  return count ? `in ${count} ranks` : "";
}

// "#7 train"; a sweep and a rank have no number
export function titleText(job) {
  return [Number.isInteger(job.id) && !known(job.rank) ? `#${job.id}` : "", job.name].filter(Boolean).join(" ");
}

// "#7 train in 4 ranks In[3]"
export function jobText(job) {
  return [titleText(job), ranksText(job), placeText(job)].filter(Boolean).join(" ");
}

export function notebookText(session) {
  if (session.notebook) return session.notebook.split("/").pop();
  return session.head ? `head process ${session.head}` : `process ${session.pid}`;
}

export function ownerText(other) {
  const where = other.notebook ? other.notebook.split("/").pop() : `process ${other.pid}`;
  return other.user ? `${where}, ${other.user}` : where;
}

export function actorText(actor) {
  if (actor.kind === "session") return actor.class || `session ${actor.name}`;
  return actor.name ? `${actor.class} ${actor.name}` : actor.class || "actor";
}
