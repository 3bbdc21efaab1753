// Jobs that belong together as one item: the ranks of a job, the tasks of a placement group, the
// trials of a sweep. Pure.

import { keyOf, known } from "./texts.js";

const LISTS = ["actors", "running", "waiting", "finished"];
const ORDER = ["alive", "running", "queued", "failed", "cancelled", "done"];
const OF_LIST = { actors: ["alive"], running: ["running"], waiting: ["queued"], finished: ["failed", "cancelled", "done"] };

// [["running", 3], ["queued", 12], ...]
export function countsOf(states) {
  return [...new Set([...ORDER, ...Object.keys(states)])].map((each) => [each, states[each]]).filter(([, count]) => count);
}

// "3 running, 12 waiting, 2 failed, 85 done"
export function statesText(states) {
  return countsOf(states).map(([state, count]) => `${count} ${state === "queued" ? "waiting" : state}`).join(", ");
}

// The jobs that an item stands for, as far as they are over or it is one itself
export function jobsOf(item) {
  const over = (item.members || []).filter((each) => each.list === "finished");
  return isGroup(item) ? over : [item, ...over];
}

// Whether an item is no job itself
export function isGroup(item) {
  return known(item.unlisted);
}

// A trial's name without that of its sweep, which stands above it: the parameters
function nameIn(group, job) {
  const prefix = `${group.name} `;
  return group.kind === "sweep" && String(job.name).startsWith(prefix) ? job.name.slice(prefix.length) : job.name;
}

// The items of each list, and how many jobs they stand for: {running: {items, count}, ...}. An item
// with `members` opens; each member has the name of its `list`.
export function grouped(snapshot) {
  const groups = new Map(snapshot.groups.map((each) => [keyOf(each), { ...each, members: [] }]));
  const lists = {};
  for (const name of LISTS) {
    lists[name] = { items: [], count: snapshot.counts[name] };
    for (const job of snapshot[name]) {
      const group = groups.get(job.part_of);
      if (group) group.members.push({ ...job, name: nameIn(group, job), list: name });
      else lists[name].items.push((job.ranks || []).length ? withRanks(job) : job);
    }
  }
  for (const group of groups.values()) if (group.members.length) place(group, lists, snapshot);
  return lists;
}

function withRanks(job) {
  const members = job.ranks.map((each) => ({ ...each, list: "ranks", name: `rank ${each.rank}`, key: `${keyOf(job)} rank ${each.rank}` }));
  const states = {};
  for (const { state } of members) states[state] = (states[state] || 0) + 1;
  return { ...job, members, states };
}

// A placement group stands where it is listed itself; all others where most remains to be done
function place(group, lists, snapshot) {
  const { states, members } = group;
  const own = known(group.actor) && ["actors", "finished"].find((name) => find(lists[name].items, group) >= 0);
  const there = (each) => OF_LIST[each].some((state) => states[state]);
  const name = own || ["running", "actors", "waiting", "finished"].find(there) || members[0].list;
  for (const each of LISTS) {
    if (each === name) continue;
    const elsewhere = OF_LIST[each].reduce((sum, state) => sum + (states[state] || 0), 0);
    lists[each].count = Math.max(lists[each].items.length, lists[each].count - elsewhere);
  }
  members.sort((one, other) => LISTS.indexOf(one.list) - LISTS.indexOf(other.list));
  const { items } = lists[name];
  if (own) {
    const at = find(items, group);
    items[at] = { ...items[at], members, states };
    return;
  }
  const at = name === "finished" ? items.findIndex((each) => each.ended < group.ended) : 0;
  items.splice(at < 0 ? items.length : at, 0, alone(group, name, snapshot));
}

function find(items, group) {
  return items.findIndex((each) => each.kind === "group" && keyOf(each) === group.actor);
}

function alone(group, name, snapshot) {
  const { states, members, total, began, ended } = group;
  const over = (states.done || 0) + (states.failed || 0) + (states.cancelled || 0);
  const state = name === "finished" ? OF_LIST.finished.find((each) => states[each]) : OF_LIST[name][0];
  return {
    ...group,
    key: keyOf(group),
    name: group.kind === "sweep" ? `sweep of ${group.name}` : "placement group",
    state: state === "alive" ? "running" : state,
    seconds: (ended ?? snapshot.time) - began,
    progress: over < total ? over / total : null,
    unlisted: Math.max(0, total - members.length),
    session: members[0].session,
    owner: members[0].owner,
    client: members[0].client,
    devices: [],
  };
}
